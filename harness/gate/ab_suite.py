"""What `gate ab` times: calls of public routines, built from their published signatures alone.

Two revisions of `kernels` run under the same suite, so nothing here reaches inside the package.
Shapes are gpt-oss-120b's (w13 5760 x 1440 bytes, 90 MXFP4 or 180 NVFP4 scales a row), and
Qwen3-235B's at TP 4 for TRT-LLM, whose shuffle wants rows in whole tiles. `experts` sets the size:
128 fills an H200.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

T = torch.Tensor
Resolve = Callable[[str], Callable[..., Any]]


@dataclass(frozen=True)
class Work:
    """A call that may be repeated, and the bytes of its inputs and outputs, each once."""

    fn: Callable[[], Any]
    useful_bytes: int


class Inputs:
    """Random tensors by name, made once and shared by the cases of a process."""

    def __init__(self, device: torch.device, experts: int) -> None:
        self.device, self.experts = device, experts
        self._made: dict[str, T] = {}

    def bytes(self, name: str, *shape: int) -> T:
        if name not in self._made:
            seed = torch.Generator(self.device).manual_seed(sum(name.encode()))
            self._made[name] = torch.randint(
                0,
                256,
                (self.experts, *shape),
                dtype=torch.uint8,
                device=self.device,
                generator=seed,
            )
        return self._made[name]

    def e4m3(self, name: str, *shape: int) -> T:
        # 0x00 to 0x7e: every positive finite e4m3 value, no NaN
        return (self.bytes(name, *shape) % 0x7F).view(torch.float8_e4m3fn)

    def bf16(self, name: str, *shape: int) -> T:
        if name not in self._made:
            seed = torch.Generator(self.device).manual_seed(sum(name.encode()))
            self._made[name] = torch.randn(
                (self.experts, *shape), dtype=torch.bfloat16, device=self.device, generator=seed
            )
        return self._made[name]


Build = Callable[[Resolve, Inputs], tuple[Callable[[], Any], list[T]]]


def _plain(
    routine: str, tensors: Callable[[Inputs], list[T]], *before: Any, **kwargs: Any
) -> Build:
    """routine(*before, *tensors, **kwargs)."""

    def build(resolve: Resolve, make: Inputs) -> tuple[Callable[[], Any], list[T]]:
        fn, args = resolve(routine), tensors(make)
        return (lambda: fn(*before, *args, **kwargs)), args

    return build


def _cutedsl(resolve: Resolve, make: Inputs) -> tuple[Callable[[], Any], list[T]]:
    fn = resolve("prepare_nvfp4_moe_layer_for_flashinfer_cutedsl")
    one = torch.ones(make.experts, device=make.device)
    w13, s13 = make.bytes("w13", 5760, 1440), make.e4m3("nv13", 5760, 180)
    w2, s2 = make.bytes("w2", 2880, 1440), make.e4m3("nv2", 2880, 180)
    layer = SimpleNamespace(activation="silu")
    return (lambda: fn(layer, w13, s13, one, one, w2, s2, one, one)), [w13, s13, w2, s2]


def _trtllm(resolve: Resolve, make: Inputs) -> tuple[Callable[[], Any], list[T]]:
    fn = resolve("prepare_static_weights_for_trtllm_fp4_moe")
    hidden, inter = 4096, 384
    args = [
        make.bytes("t13", 2 * inter, hidden // 2),
        make.bytes("t2", hidden, inter // 2),
        make.bytes("ts13", 2 * inter, hidden // 16),
        make.bytes("ts2", hidden, inter // 16),
    ]
    return (lambda: fn(*args, hidden, inter, make.experts, True)), args


_W13: Callable[[Inputs], list[T]] = lambda m: [m.bytes("w13", 5760, 1440)]
_MX: Callable[[Inputs], list[T]] = lambda m: [m.bytes("w13", 5760, 1440), m.bytes("mx13", 5760, 90)]

SUITE: dict[str, Build] = {
    "reorder_w1w3_to_w3w1": _plain("reorder_w1w3_to_w3w1", _MX),
    "reorder_w13_to_w31_for_flashinfer_cutedsl": _plain(
        "reorder_w13_to_w31_for_flashinfer_cutedsl", _MX, "silu"
    ),
    "interleave_linear_and_gate": _plain("interleave_linear_and_gate", _W13, dim=1),
    "shuffle_rows_for_trtllm": _plain("shuffle_rows_for_trtllm", _W13),
    "swizzle_blockscale": _plain("swizzle_blockscale", lambda m: [m.e4m3("nv13", 5760, 180)]),
    "prepare_nvfp4_moe_layer_for_flashinfer_cutedsl": _cutedsl,
    "prepare_static_weights_for_trtllm_fp4_moe": _trtllm,
    "swizzle_mxfp4@sm90": _plain("swizzle_mxfp4", _MX, target="sm90"),
    "swizzle_mxfp4@sm100": _plain("swizzle_mxfp4", _MX, target="sm100"),
    "downcast_to_mxfp": _plain("downcast_to_mxfp", lambda m: [m.bf16("bf", 2880, 1440)], axis=-1),
}


def tensors(value: Any) -> list[T]:
    """The tensors of a result: in tuples, lists, dicts and dataclasses."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [t for v in value.values() for t in tensors(v)]
    if isinstance(value, (tuple, list)):
        return [t for v in value for t in tensors(v)]
    names = getattr(value, "__dataclass_fields__", ())
    return [t for name in names for t in tensors(getattr(value, name))]


def _storage_bytes(found: list[T]) -> int:
    unique = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in found}
    return sum(unique.values())


def build(name: str, resolve: Resolve, make: Inputs) -> Work:
    """The case's work, called once (which compiles it) to count its output bytes."""
    fn, inputs = SUITE[name](resolve, make)
    return Work(fn, _storage_bytes(inputs) + _storage_bytes(tensors(fn())))
