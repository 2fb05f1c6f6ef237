"""Preparation of FP4 mixture-of-experts weights: exact layouts, references and fused twins.

Every routine exists twice, in `kernels.reference` (torch) and `kernels.fused` (Triton), with one
name, one signature and equal bytes. The names here pick the fused twin when the first tensor is on
a GPU and the reference elsewhere; `impl="reference"` or `impl="fused"` overrides. Layouts are in
`kernels.catalog`.

This package does no I/O, imports neither hydra nor pandas, and touches no GPU when imported.
(A package of the same import name by Hugging Face exists; `kernels.PROJECT` tells them apart.)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

from kernels.catalog import LAYOUTS
from kernels.errors import LayoutError
from kernels.layout import Layout
from kernels.select import choose_mxfp4, should_use_cdna4_mx_scale_swizzle

PROJECT = "fp4-moe-layouts"
IMPLS = ("reference", "fused")

# Which file, in reference/ and in fused/, holds a routine.
ROUTINES: dict[str, str] = {
    **dict.fromkeys(
        (
            "reorder_w1w3_to_w3w1",
            "reorder_w13_to_w31_for_flashinfer_cutedsl",
            "reorder_w31_to_w13_from_flashinfer_cutedsl",
            "interleave_linear_and_gate",
            "deinterleave_linear_and_gate",
            "shuffle_rows_for_trtllm",
            "unshuffle_rows_for_trtllm",
        ),
        "reorder",
    ),
    **dict.fromkeys(
        (
            "swizzle_blockscale",
            "unswizzle_blockscale",
            "nvfp4_block_scale_interleave",
            "nvfp4_block_scale_deinterleave",
            "nvfp4_swizzled_scale_to_cutedsl_mma_view",
            "cutedsl_mma_view_to_nvfp4_swizzled_scale",
            "amax_for_moe_activation_quant",
        ),
        "nvfp4",
    ),
    **dict.fromkeys(
        (
            "align_fp4_moe_weights_for_fi",
            "align_fp4_moe_hidden_dim_for_fi",
            "prepare_nvfp4_moe_layer_for_flashinfer_cutedsl",
            "prepare_static_weights_for_trtllm_fp4_moe",
        ),
        "nvfp4_layer",
    ),
    **dict.fromkeys(("swizzle_mxfp4", "unswizzle_mxfp4", "swizzle", "unswizzle"), "mxfp4"),
    **dict.fromkeys(
        (
            "downcast_to_mxfp",
            "mxfp4_quantize",
            "quantize_nvfp4",
            "dequantize_mxfp4",
            "merge_global_scales",
            "dequantize_nvfp4",
            "pack_e2m1",
            "unpack_e2m1",
        ),
        "quantize",
    ),
}


def resolve(routine: str, impl: str) -> Callable[..., Any]:
    """The callable of a routine in one implementation. LayoutError for an unknown name."""
    if routine not in ROUTINES:
        raise LayoutError(f"no routine {routine!r}; known: {', '.join(ROUTINES)}")
    if impl not in IMPLS:
        raise LayoutError(f"no impl {impl!r} in this package; known: {', '.join(IMPLS)}")
    module: ModuleType = import_module(f"kernels.{impl}.{ROUTINES[routine]}")
    return getattr(module, routine)


def _on_gpu(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the first tensor among the arguments, bare or in a prepared value, is on a GPU."""
    for value in (*args, *kwargs.values()):
        for part in (value, getattr(value, "value", None), getattr(value, "storage", None)):
            tensor = getattr(part, "storage", part) if not isinstance(part, torch.Tensor) else part
            if isinstance(tensor, torch.Tensor):
                return tensor.is_cuda
    return False


def _dispatch(routine: str) -> Callable[..., Any]:
    """The public form of a routine: fused on a GPU, reference elsewhere, `impl=` overrides."""

    @wraps(resolve(routine, "reference"))
    def call(*args: Any, impl: str | None = None, **kwargs: Any) -> Any:
        if routine == "mxfp4_quantize" and impl is None:  # a vendor's native op may serve it
            return import_module("kernels.providers").mxfp4_quantize(*args, **kwargs)
        chosen = impl or ("fused" if _on_gpu(args, kwargs) else "reference")
        return resolve(routine, chosen)(*args, **kwargs)

    return call


def __getattr__(name: str) -> Any:
    """Public routines by name, made on first use so that importing the package costs nothing."""
    if name in ROUTINES:
        globals()[name] = function = _dispatch(name)
        return function
    raise AttributeError(f"module 'kernels' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *ROUTINES])


__all__ = [
    "IMPLS",
    "LAYOUTS",
    "PROJECT",
    "ROUTINES",
    "Layout",
    "LayoutError",
    "choose_mxfp4",
    "resolve",
    "should_use_cdna4_mx_scale_swizzle",
]
