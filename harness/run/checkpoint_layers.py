"""What the experts of one layer are called, and how they become `MoEWeights`; see `reader`."""

from __future__ import annotations

import re
from typing import Any

import torch

from harness import UsageError, rows
from harness.run.reader import Checkpoint
from kernels.weights import MoEWeights

_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}


def describe(checkpoint: Checkpoint, layer: int) -> dict[str, Any]:
    """The model of a layer, every name, dtype and shape of its experts checked."""
    prefix = checkpoint.prefix(layer)
    look = _gpt_oss if checkpoint.is_gpt_oss(prefix) else _modelopt
    model = look(checkpoint, prefix)
    name = str(checkpoint.config.get("model_type") or "checkpoint")
    top_k = checkpoint.config.get("num_experts_per_tok", 1)
    return {
        "name": rows.safe_name(name), **model,
        "top_k": top_k if type(top_k) is int else 1, "aliases": [], "source": "checkpoint",
    }  # fmt: skip


def read(checkpoint: Checkpoint, layer: int, experts: int | None) -> MoEWeights:
    """The first `experts` experts of a layer."""
    model = describe(checkpoint, layer)
    prefix = checkpoint.prefix(layer)
    count = model["E"] if experts is None else min(experts, model["E"])
    if model["format"] == "mxfp4":
        return _read_gpt_oss(checkpoint, prefix, count)
    return _read_modelopt(checkpoint, prefix, count, model["activation"])


def _shape(name: str, have: tuple[int, ...], want: tuple[int, ...]) -> None:
    if have != want:
        raise UsageError(f"tensor {name!r} has shape {list(have)}; want {list(want)}")


def _gpt_oss(checkpoint: Checkpoint, prefix: str) -> dict[str, Any]:
    up = checkpoint.get(f"{prefix}.gate_up_proj_blocks", "U8", 4).shape
    down = checkpoint.get(f"{prefix}.down_proj_blocks", "U8", 4).shape
    experts, rows13, groups, _ = up
    hidden, inner = groups * 32, down[2] * 32
    if rows13 % 2:
        raise UsageError(
            f"tensor '{prefix}.gate_up_proj_blocks' has {rows13} rows; want gate and up"
        )
    wants = {
        "gate_up_proj_blocks": ("U8", (experts, 2 * inner, groups, 16)),
        "gate_up_proj_scales": ("U8", (experts, 2 * inner, groups)),
        "gate_up_proj_bias": ("BF16", (experts, 2 * inner)),
        "down_proj_blocks": ("U8", (experts, hidden, inner // 32, 16)),
        "down_proj_scales": ("U8", (experts, hidden, inner // 32)),
        "down_proj_bias": ("BF16", (experts, hidden)),
    }
    for name, (dtype, shape) in wants.items():
        entry = checkpoint.get(f"{prefix}.{name}", dtype, len(shape))
        _shape(f"{prefix}.{name}", entry.shape, shape)
    if not experts or not inner or not hidden:
        raise UsageError(f"tensor '{prefix}.gate_up_proj_blocks' is empty: {list(up)}")
    return {"E": experts, "H": hidden, "I": inner, "activation": "swigluoai", "format": "mxfp4"}


def _read_gpt_oss(checkpoint: Checkpoint, prefix: str, count: int) -> MoEWeights:
    get = lambda name: checkpoint.tensor(f"{prefix}.{name}", count)
    return MoEWeights(
        w13_weight=get("gate_up_proj_blocks").flatten(-2),
        w13_scale=get("gate_up_proj_scales"),
        w2_weight=get("down_proj_blocks").flatten(-2),
        w2_scale=get("down_proj_scales"),
        w13_bias=get("gate_up_proj_bias"),
        w2_bias=get("down_proj_bias"),
        format="mxfp4", activation="swigluoai", interleaved=True,
    )  # fmt: skip


def _modelopt(checkpoint: Checkpoint, prefix: str) -> dict[str, Any]:
    one = re.compile(re.escape(prefix) + r"\.(\d+)\.(\w+)\.")
    seen = {(int(m.group(1)), m.group(2)) for m in map(one.match, checkpoint.entries) if m}
    experts = len({number for number, _ in seen})
    gaps = sorted(set(range(experts)) - {number for number, _ in seen})
    if gaps or not experts:
        at = gaps[0] if gaps else 0
        raise UsageError(f"tensor '{prefix}.{at}.up_proj.weight' is missing: experts count from 0")
    gated = not _relu2(checkpoint) or any(name == "gate_proj" for _, name in seen)
    first = checkpoint.get(f"{prefix}.0.up_proj.weight", "U8", 2).shape
    inner, hidden = first[0], first[1] * 2
    for expert in range(experts):
        for name in ("gate_proj", "up_proj", "down_proj") if gated else ("up_proj", "down_proj"):
            out, k = (hidden, inner) if name == "down_proj" else (inner, hidden)
            base = f"{prefix}.{expert}.{name}"
            for suffix, dtype, shape in (
                ("weight", "U8", (out, k // 2)),
                ("weight_scale", "F8_E4M3", (out, -(-k // 16))),
            ):
                entry = checkpoint.get(f"{base}.{suffix}", dtype, 2)
                _shape(f"{base}.{suffix}", entry.shape, shape)
            for suffix in ("weight_scale_2", "input_scale"):
                have = checkpoint.entries.get(f"{base}.{suffix}")
                entry = checkpoint.get(f"{base}.{suffix}", "F32", len(have.shape) if have else 0)
                if torch.Size(entry.shape).numel() != 1:
                    raise UsageError(
                        f"tensor '{base}.{suffix}' has {list(entry.shape)}; want one number"
                    )
    if not inner or not hidden:
        raise UsageError(f"tensor '{prefix}.0.up_proj.weight' is empty: {list(first)}")
    return {
        "E": experts, "H": hidden, "I": inner, "format": "nvfp4",
        "activation": _activation(checkpoint) if gated else "relu2_no_mul",
    }  # fmt: skip


def _relu2(checkpoint: Checkpoint) -> bool:
    config = checkpoint.config
    return config.get("mlp_hidden_act", config.get("hidden_act")) == "relu2"


def _activation(checkpoint: Checkpoint) -> str:
    named = str(checkpoint.config.get("hidden_act", "silu"))
    if named not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise UsageError(f"config.json: hidden_act {named!r} is not known here; known: {known}")
    return _ACTIVATIONS[named]


def _read_modelopt(checkpoint: Checkpoint, prefix: str, count: int, act: str) -> MoEWeights:
    gated = not act.endswith("_no_mul")
    up = ("gate_proj", "up_proj") if gated else ("up_proj",)

    def stack(names: tuple[str, ...], suffix: str) -> torch.Tensor:
        """[E, rows, K] of the projections under each other, each tensor read into its place."""
        shapes = [checkpoint.entries[f"{prefix}.0.{name}.{suffix}"].shape for name in names]
        height = sum(shape[0] for shape in shapes)
        dtype = torch.uint8 if suffix == "weight" else torch.float8_e4m3fn
        out = torch.empty((count, height, shapes[0][1]), dtype=dtype)
        for expert in range(count):
            at = 0
            for name, shape in zip(names, shapes, strict=True):
                out[expert, at : at + shape[0]] = checkpoint.tensor(
                    f"{prefix}.{expert}.{name}.{suffix}"
                )
                at += shape[0]
        return out

    def numbers(names: tuple[str, ...], suffix: str) -> torch.Tensor:
        """[E] where the projections agree, else [E, 2]."""
        read = [
            [checkpoint.tensor(f"{prefix}.{e}.{n}.{suffix}").reshape(()) for n in names]
            for e in range(count)
        ]
        table = torch.tensor(read, dtype=torch.float32)
        return table[:, 0].clone() if bool((table == table[:, :1]).all()) else table

    return MoEWeights(
        w13_weight=stack(up, "weight"), w13_scale=stack(up, "weight_scale"),
        w2_weight=stack(("down_proj",), "weight"), w2_scale=stack(("down_proj",), "weight_scale"),
        w13_scale_2=numbers(up, "weight_scale_2"),
        w2_scale_2=numbers(("down_proj",), "weight_scale_2"),
        a13_scale=numbers(up, "input_scale"), a2_scale=numbers(("down_proj",), "input_scale"),
        format="nvfp4", activation=act,
    )  # fmt: skip
