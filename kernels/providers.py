"""Who quantizes activations and weights to MXFP4: a native backend where there is one, else ours.

The order is vLLM 0.33's (mxfp4_utils.mxfp4_quantize): Intel XPU's native op where it is registered,
aiter on ROCm when it is installed and x is bf16, the Triton twin on a GPU, and the torch reference.
Nothing is imported or probed before a call needs it.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from kernels.errors import LayoutError

Quantizer = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def platform_of(x: torch.Tensor) -> str:
    """cpu, xpu, rocm or cuda: where the tensor lives. Tests replace it to stand in for a device."""
    if x.device.type == "cuda" and torch.version.hip is not None:
        return "rocm"
    return x.device.type


def mxfp4_quantize_provider(x: torch.Tensor) -> str:
    """The name of the provider that `mxfp4_quantize(x)` takes: xpu, aiter, fused or reference."""
    return next(name for name, serves, _ in PROVIDERS if serves(x))


def mxfp4_quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., L] -> ([..., L/2] packed e2m1, [..., ceil(L/32)] e8m0 bytes) along the last axis."""
    quantize = next(run for _, serves, run in PROVIDERS if serves(x))
    return quantize(x)


def _has_xpu_op(x: torch.Tensor) -> bool:
    return platform_of(x) == "xpu" and _xpu_op() is not None


def _xpu_op() -> Quantizer | None:
    """vLLM's custom op for XPU, registered when vLLM is imported there."""
    namespace: Any = getattr(torch.ops, "vllm", None)
    return getattr(namespace, "xpu_mxfp4_quantize", None)


def _xpu(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    op = _xpu_op()
    assert op is not None
    packed, scale = op(x)
    return packed.view(torch.uint8), scale.view(torch.uint8)


def _has_aiter(x: torch.Tensor) -> bool:
    return platform_of(x) == "rocm" and x.dtype == torch.bfloat16 and _installed("aiter")


def _installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ValueError:  # a module that was put into sys.modules without a spec
        return True


def _aiter(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """aiter quantizes matrices, and may pad the scale; what is beyond x is dropped."""
    if x.shape[-1] % 32:
        raise LayoutError(
            f"x {tuple(x.shape)}: aiter quantizes whole blocks of 32 along the last axis; "
            "pad it, or use impl='fused'"
        )
    quant = import_module("aiter.ops.triton.quant")
    packed, scale = quant.dynamic_mxfp4_quant(x.reshape(-1, x.shape[-1]))
    rows, groups = x.numel() // x.shape[-1], x.shape[-1] // 32
    return (
        packed.view(torch.uint8).reshape(*x.shape[:-1], x.shape[-1] // 2),
        scale.view(torch.uint8)[:rows, :groups].reshape(*x.shape[:-1], groups),
    )


def _fused(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return import_module("kernels.fused.quantize").mxfp4_quantize(x)


def _reference(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return import_module("kernels.reference.quantize").mxfp4_quantize(x)


# (name, whether it serves this tensor, how it runs), first match first.
PROVIDERS: tuple[tuple[str, Callable[[torch.Tensor], bool], Quantizer], ...] = (
    ("xpu", _has_xpu_op, _xpu),
    ("aiter", _has_aiter, _aiter),
    ("fused", lambda x: platform_of(x) in ("cuda", "rocm", "xpu"), _fused),
    ("reference", lambda x: True, _reference),
)
