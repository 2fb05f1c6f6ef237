"""The weights of a cell: seeded bytes of a model's shapes, or one layer of a real checkpoint.

Synthetic bytes cover what the formats can hold and what a reference forward can sum in fp32: every
byte of a value, e8m0 scales 2^-31 to 2^32 (64 bytes), every positive finite e4m3, bf16 with 32
exponents. `positions` instead codes each byte's own address, so that four passes name every byte.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from harness.run import reader
from kernels import activations
from kernels.pads import BLOCK
from kernels.weights import BIASES, WEIGHTS, MoEWeights, checkpoint_shapes

E4M3 = torch.float8_e4m3fn
_CHUNK = 1 << 19  # random words drawn once, then repeated under another xor each time: 4 MiB


def layer_bytes(experts: int, hidden: int, intermediate: int, gated: bool, form: str) -> int:
    """Bytes of one layer in checkpoint form, without biases."""
    elements = experts * hidden * intermediate * (3 if gated else 2)
    return elements * 2 if form == "bf16" else elements // 2 + elements // BLOCK[form]


def synthetic(
    experts: int,
    hidden: int,
    intermediate: int,
    activation: str,
    form: str,
    seed: int = 0,
    *,
    positions: int | None = None,
    device: str = "cpu",
) -> MoEWeights:
    """One layer in checkpoint form; `form` is mxfp4, nvfp4 or bf16.

    positions: None for random bytes; 0 to 3 for that byte of each element's address in its tensor.
    """
    found = activations.find(activation)
    shapes = checkpoint_shapes(experts, hidden, intermediate, 2 if found.gated else 1, form)
    made: dict[str, Any] = {}
    for number, name in enumerate(WEIGHTS):
        shape = shapes.get(name, ())
        if form == "bf16":
            made[name] = _bf16(shape, seed * 8 + number) if shape else None
            continue
        count = torch.Size(shape).numel()
        if positions is None:
            data = _random(count, seed * 8 + number)
        else:
            data = (torch.arange(count) >> 8 * positions).to(torch.uint8)
        if name.endswith("scale") and form == "mxfp4" and positions is None:
            data.bitwise_and_(63).add_(96)
        elif name.endswith("scale") and form == "nvfp4" and positions is None:
            data.bitwise_and_(127).clamp_(max=126)
        data = data.view(shape)
        made[name] = data.view(E4M3) if name.endswith("scale") and form == "nvfp4" else data
    small = torch.Generator().manual_seed(seed)
    if form == "nvfp4":
        for name in ("w13_scale_2", "w2_scale_2", "a13_scale", "a2_scale"):
            made[name] = torch.rand(experts, generator=small) * 0.01 + 0.001
    if found.name.startswith("swigluoai"):  # gpt-oss layers carry biases
        for name in BIASES:
            made[name] = torch.randn(shapes[name], generator=small).to(torch.bfloat16)
    if device != "cpu":
        made = {name: x if x is None else x.to(device) for name, x in made.items()}
    return MoEWeights(**made, format=form, activation=found.name, interleaved=found.interleaved)


def _random(count: int, seed: int) -> torch.Tensor:
    """`count` uniform bytes."""
    words = -(-count // 8)
    unit = torch.empty(min(words, _CHUNK), dtype=torch.int64)
    unit.random_(-(1 << 63), None, generator=torch.Generator().manual_seed(seed + 1))
    out = torch.empty(words, dtype=torch.int64)
    for number, start in enumerate(range(0, words, _CHUNK)):
        part = out[start : start + _CHUNK]
        # another odd constant for each repeat, so that no two repeats hold the same bytes
        salt = (number * 0x9E3779B97F4A7C15) % (1 << 63)
        torch.bitwise_xor(unit[: part.numel()], salt, out=part)
    return out.view(torch.uint8)[:count]


def _bf16(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Finite bf16 of both signs, every mantissa, exponents 2^-15 to 2^16."""
    bits = _random(torch.Size(shape).numel() * 2, seed).view(torch.int16)
    # exponent field: the five random bits at 7..11, plus 112; 0x8FFF keeps sign, those and mantissa
    bits.bitwise_and_(-0x7001).add_(112 << 7)
    return bits.view(torch.bfloat16).view(shape)


@lru_cache(maxsize=1)
def _cached(key: tuple[Any, ...]) -> MoEWeights:
    kind, *rest = key
    if kind == "safetensors":
        path, layer, experts = rest
        return reader.Checkpoint.open(path).layer(layer, experts)
    experts, hidden, intermediate, activation, form, seed = rest
    return synthetic(experts, hidden, intermediate, activation, form, seed)


_key: list[tuple[Any, ...]] = []  # of what `_cached` holds


def load(config: dict[str, Any], form: str) -> MoEWeights:
    """The weights of a cell, on the CPU. Kept for the next cell, which often wants the same."""
    model, source, experts = config["model"], config["source"], config["experts"]
    key: tuple[Any, ...]
    if source["kind"] == "safetensors":
        key = ("safetensors", source["path"], source["layer"], experts)
    else:
        sizes = (experts, model["H"], model["I"])
        key = ("synthetic", *sizes, model["activation"], form, config["seed"])
    if _key != [key]:
        forget()  # before the next is made: a cell's memory is limited to its own estimate
        _key[:] = [key]
    return _cached(key)


def forget() -> None:
    """Drops the kept weights: their cell changed or crashed on them."""
    _cached.cache_clear()
