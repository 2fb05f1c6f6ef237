"""FlashInfer's own preparation functions, under the signatures of `kernels`.

Its row permutations (`get_shuffle_matrix_a_row_indices` and friends) and its MMA view of scales run
on any device; `block_scale_interleave` is a CUDA kernel that FlashInfer compiles at first use, and
needs a GPU. Sources: flashinfer fused_moe/core.py, quantization/fp4_quantization.py,
cute_dsl/utils.py.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

from harness.vendor import NotOffered, Probe, memory_bytes

T = torch.Tensor
TILE = 128  # epilogue tile rows of the TRT-LLM gen kernels that vLLM prepares for


def _module(name: str = "flashinfer") -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its dependencies, at import
        return import_module(name)


def probe() -> Probe:
    try:
        return Probe(str(_module().__version__))
    except ImportError as error:
        return Probe(None, f"{error}; env sync env=flashinfer013 fetches it")


def _rows(index: T, x: T) -> T:
    """Each expert's rows gathered by the library's index."""
    return x[:, index.to(x.device)].contiguous()


def _w13_index(x: T, scale: bool, gated: bool = True) -> T:
    core = _module("flashinfer.fused_moe.core")
    options = {"num_elts_per_sf": 16} if scale else {}
    try:
        index: T = core._maybe_get_cached_w3_w1_permute_indices(
            {}, x[0], TILE, is_gated_act_gemm=gated, **options
        )
    except AssertionError as error:
        raise NotOffered(f"flashinfer refuses {tuple(x.shape)}: {error}") from None
    return index


def _w2_index(x: T, scale: bool, tile: int = TILE) -> T:
    core = _module("flashinfer.fused_moe.core")
    options = {"num_elts_per_sf": 16} if scale else {}
    try:
        index: T = core.get_w2_permute_indices_with_cache({}, x[0], tile, **options)
    except AssertionError as error:
        raise NotOffered(f"flashinfer refuses {tuple(x.shape)}: {error}") from None
    return index


def nvfp4_block_scale_interleave(scale: T) -> T:
    """uint8 [M, K] or [E, M, K] -> flat, by FlashInfer's CUDA kernel."""
    if not scale.is_cuda:
        raise NotOffered(
            "flashinfer's block_scale_interleave is a CUDA kernel; it needs a GPU", "NO_DEVICE"
        )
    done: T = _module().nvfp4_block_scale_interleave(scale)
    return done


def swizzle_blockscale(scale: T) -> T:
    """e4m3 [.., M, K] by the same kernel, in the padded shape of `kernels.swizzle_blockscale`."""
    m, k = scale.shape[-2:]
    flat = nvfp4_block_scale_interleave(scale.view(torch.uint8))
    return flat.view(*scale.shape[:-2], -(-m // 128) * 128, -(-k // 4) * 4).view(scale.dtype)


def shuffle_rows_for_trtllm(x: T, epilogue_tile_m: int = TILE) -> T:
    """FlashInfer's shuffle_matrix_a over each expert's bytes."""
    rows = x.view(torch.uint8)
    rows = rows if rows.ndim == 3 else rows[None]
    return _rows(_w2_index(rows, False, epilogue_tile_m), rows).reshape(x.shape).view(x.dtype)


def prepare_static_weights_for_trtllm_fp4_moe(
    gemm1_weights: T,
    gemm2_weights: T,
    gemm1_scales_linear_fp4_bytes: T,
    gemm2_scales_linear_fp4_bytes: T,
    hidden_size: int,
    intermediate_size: int,
    num_experts: int,
    is_gated_activation: bool,
) -> tuple[T, T, T, T]:
    """FlashInfer's index functions and its scale kernel, expert by expert as its users call
    them."""
    outs = []
    pairs = (
        (
            gemm1_weights,
            gemm1_scales_linear_fp4_bytes,
            partial(_w13_index, gated=is_gated_activation),
        ),
        (gemm2_weights, gemm2_scales_linear_fp4_bytes, _w2_index),
    )
    for weight, scale, index in pairs:
        bytes_, scale_bytes = weight.view(torch.uint8), scale.view(torch.uint8)
        rows, scale_rows = index(bytes_, False), index(scale_bytes, True)
        done = torch.empty_like(bytes_)
        done_scale = torch.empty_like(scale_bytes)
        for e in range(num_experts):
            torch.index_select(bytes_[e], 0, rows.to(bytes_.device), out=done[e])
            picked = scale_bytes[e][scale_rows.to(bytes_.device)]
            done_scale[e].view(-1).copy_(nvfp4_block_scale_interleave(picked))
        outs += [done, done_scale.view(torch.float8_e4m3fn)]
    return outs[0], outs[1], outs[2], outs[3]


def nvfp4_swizzled_scale_to_cutedsl_mma_view(scale: T) -> T:
    """FlashInfer's convert_sf_to_mma_layout, called as vLLM does; imports the CuTe DSL."""
    try:
        convert = _module("flashinfer.cute_dsl.utils").convert_sf_to_mma_layout
    except ImportError as error:
        raise NotOffered(
            f"flashinfer.cute_dsl cannot be imported: {error}", "NOT_INSTALLED"
        ) from None
    e, m, k = scale.shape
    view: T = convert(scale.reshape(e * m, k), m=m, k=k * 16, num_groups=e, sf_vec_size=16)
    return view


def _interleaved(x: T) -> T:
    core = _module("flashinfer.fused_moe.core")
    try:
        return torch.stack([core.reorder_rows_for_gated_act_gemm(e) for e in x])
    except AssertionError as error:
        raise NotOffered(f"flashinfer refuses {tuple(x.shape)}: {error}") from None


def _scale(index: Callable[..., T], x: T) -> T:
    """Rows by the library's index for scales, then its 128x4 kernel."""
    return nvfp4_block_scale_interleave(_rows(index(x, True), x))


def _mma(x: T) -> T:
    """The view's memory must be its input's, so the bytes are the 128x4 kernel's."""
    m, k = x.shape[-2:]
    if m % 128 or k % 4:
        raise NotOffered(f"convert_sf_to_mma_layout wants 128 | M and 4 | K; got {tuple(x.shape)}")
    view = nvfp4_swizzled_scale_to_cutedsl_mma_view(x)
    if view.data_ptr() != x.data_ptr():
        raise NotOffered("convert_sf_to_mma_layout copied; the view must share its input's storage")
    return view


ROUTINES: dict[str, Callable[..., Any]] = {
    "nvfp4_block_scale_interleave": nvfp4_block_scale_interleave,
    "swizzle_blockscale": swizzle_blockscale,
    "shuffle_rows_for_trtllm": shuffle_rows_for_trtllm,
    "prepare_static_weights_for_trtllm_fp4_moe": prepare_static_weights_for_trtllm_fp4_moe,
    "nvfp4_swizzled_scale_to_cutedsl_mma_view": nvfp4_swizzled_scale_to_cutedsl_mma_view,
}
_FUNCTIONS: dict[str, Callable[[T], T]] = {
    "gate_up_interleave_1": _interleaved,
    "trtllm_shuffle_16": lambda x: _rows(_w2_index(x, False, 64), x),
    "trtllm_shuffle_32": lambda x: _rows(_w2_index(x, False), x),
    "trtllm_w13": lambda x: _rows(_w13_index(x, False), x),
    "block_scale_128x4": nvfp4_block_scale_interleave,
    "trtllm_w13_scale": partial(_scale, _w13_index),
    "trtllm_w2_scale": partial(_scale, _w2_index),
}
LAYOUTS: dict[str, Callable[[T], T]] = {
    name: lambda x, function=function: memory_bytes(function(x), x.shape[0])  # type: ignore[misc]
    for name, function in _FUNCTIONS.items()
}
# A view moves nothing: what it shows is compared, in the order of its own axes.
VIEWS: dict[str, Callable[[T], T]] = {"cutedsl_mma_view": _mma}
