"""NVFP4 scales: the 128x4 block-scale swizzle, its CuteDSL view, and the activation scale.

NVFP4: e2m1 codes packed two a byte along K, one e4m3 scale per 16 elements, one fp32 scale a
tensor. The tensor cores read block scales in 512-byte tiles of 128 rows x 4 columns ("128x4").
Signatures are vLLM's and FlashInfer's, so each routine can be swapped in.
"""

from __future__ import annotations

from typing import Any

import torch

from kernels import catalog
from kernels.errors import LayoutError
from kernels.reference.reorder import check_out

E4M3 = torch.float8_e4m3fn
BLOCK = 16  # elements per scale


def swizzle_blockscale(scale: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Block scales to the 128x4 order: padded to (128, 4) with zero bytes, swizzled, same rank.

    scale: e4m3 [M, K] or [E, M, K]. Returns e4m3 [round_up(M, 128), round_up(K, 4)], with E kept,
    or `out`. Raises LayoutError for another dtype or rank. Source: vllm nvfp4_utils.py, same name;
    cuBLAS "1D Block Scaling Factors Layout".
    """
    if scale.dtype != E4M3 or scale.ndim not in (2, 3):
        raise LayoutError(
            f"swizzle_blockscale: scale {tuple(scale.shape)} {scale.dtype}; want float8_e4m3fn of "
            "rank 2 "
            "or 3, [M, K] or [E, M, K]"
        )
    layout = catalog.LAYOUTS["block_scale_128x4"]
    shape = (*scale.shape[:-2], *layout.padded(*scale.shape[-2:]))
    return _into(out, layout.forward(scale).reshape(shape), "swizzle_blockscale")


def unswizzle_blockscale(scale: torch.Tensor, m: int, k: int) -> torch.Tensor:
    """The inverse of `swizzle_blockscale`: [.., round_up(m, 128), round_up(k, 4)] -> [.., m, k]."""
    layout = catalog.LAYOUTS["block_scale_128x4"]
    if scale.shape[-2:] != layout.padded(m, k):
        raise LayoutError(
            f"unswizzle_blockscale: scale {tuple(scale.shape)} is not the swizzled form of {m} x "
            f"{k}, "
            f"which is {layout.padded(m, k)}"
        )
    return layout.inverse(scale.reshape(*scale.shape[:-2], *layout.storage_shape(m, k)), m, k)


def nvfp4_block_scale_interleave(
    scale: torch.Tensor, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """FlashInfer's form of the 128x4 swizzle: uint8 [M, K] or [E, M, K] -> uint8, flat.

    Each matrix is padded to (128, 4) with zero bytes.
    Source: flashinfer fp4_quantization.py, same name (alias block_scale_interleave).
    """
    if scale.dtype != torch.uint8 or scale.ndim not in (2, 3):
        raise LayoutError(
            f"nvfp4_block_scale_interleave: scale {tuple(scale.shape)} {scale.dtype}; want uint8 "
            "of rank 2 or 3"
        )
    result = catalog.LAYOUTS["block_scale_128x4"].forward(scale).flatten()
    return _into(out, result, "nvfp4_block_scale_interleave")


def nvfp4_block_scale_deinterleave(scale: torch.Tensor, *shape: int) -> torch.Tensor:
    """The inverse of `nvfp4_block_scale_interleave`: flat bytes -> `shape`, (M, K) or (E, M, K)."""
    layout = catalog.LAYOUTS["block_scale_128x4"]
    *batch, m, k = shape
    rows, cols = layout.storage_shape(m, k)
    want = rows * cols * (batch[0] if batch else 1)
    if scale.numel() != want:
        raise LayoutError(
            f"nvfp4_block_scale_deinterleave: {scale.numel()} bytes cannot be scales of shape "
            f"{shape}, "
            f"which take {want}"
        )
    return layout.inverse(scale.reshape(*batch, rows, cols), m, k)


def nvfp4_swizzled_scale_to_cutedsl_mma_view(scale: torch.Tensor) -> torch.Tensor:
    """Swizzled [E, M, K] scales as the CuteDSL kernel addresses them: (32, 4, M/128, 4, K/4, E).

    A view: it shares storage with `scale`, always, so that a reload or an expert rearrangement in
    the storage is seen by the kernel. M must be divisible by 128, K by 4, and `scale` contiguous.
    Source: flashinfer cute_dsl/utils.py convert_sf_to_mma_layout; vllm, same name.
    """
    layout = catalog.LAYOUTS["cutedsl_mma_view"]
    if scale.ndim != 3 or scale.shape[-2:] != layout.padded(*scale.shape[-2:]):
        raise LayoutError(
            f"nvfp4_swizzled_scale_to_cutedsl_mma_view: scale {tuple(scale.shape)}; want [E, M, "
            "K] with "
            "128 | M and 4 | K, as swizzle_blockscale returns it"
        )
    if not scale.is_contiguous():
        raise LayoutError(
            f"nvfp4_swizzled_scale_to_cutedsl_mma_view: scale {tuple(scale.shape)} with strides "
            f"{scale.stride()} is not contiguous, so no view of it can be the kernel's"
        )
    m, k = scale.shape[-2:]
    return layout.consumer_view(scale.view(scale.shape[0], *layout.storage_shape(m, k)), m, k)


def cutedsl_mma_view_to_nvfp4_swizzled_scale(view: torch.Tensor) -> torch.Tensor:
    """The inverse: (32, 4, M/128, 4, K/4, E) -> the swizzled [E, M, K], again the same storage."""
    if view.ndim != 6 or (view.shape[0], view.shape[1], view.shape[3]) != (32, 4, 4):
        raise LayoutError(
            f"cutedsl_mma_view_to_nvfp4_swizzled_scale: view {tuple(view.shape)}; want (32, 4, "
            "M/128, 4, K/4, E)"
        )
    _, _, rn, _, rk, e = view.shape
    tile = 512
    strides = (16, 4, rk * tile, 1, tile, rn * rk * tile)
    if view.numel() and any(
        have != want
        for have, want, size in zip(view.stride(), strides, view.shape, strict=True)
        if size > 1
    ):
        raise LayoutError(
            f"cutedsl_mma_view_to_nvfp4_swizzled_scale: strides {view.stride()} are not those of "
            "the MMA "
            f"view, {strides}; this tensor is a copy, not a view of swizzled scales"
        )
    return view.as_strided((e, rn * 128, rk * 4), (rn * rk * tile, rk * 4, 1))


def amax_for_moe_activation_quant(
    a_scale: torch.Tensor, enable_eplb: bool, group: Any = None
) -> torch.Tensor:
    """One activation scale for all experts: the fp32 maximum, 0-dimensional.

    With EPLB any rank may hold any expert, so the maximum goes over the expert-parallel `group` too
    (an all-reduce MAX; None is the default group). Source: vllm quant_utils.py, same name.
    """
    if a_scale.numel() == 0:
        raise LayoutError(
            f"amax_for_moe_activation_quant: a_scale {tuple(a_scale.shape)} has no experts"
        )
    amax = a_scale.max().to(torch.float32)
    if enable_eplb:
        torch.distributed.all_reduce(amax, op=torch.distributed.ReduceOp.MAX, group=group)
    return amax


def _into(out: torch.Tensor | None, result: torch.Tensor, routine: str) -> torch.Tensor:
    """The result itself, or `out` holding it."""
    if out is None:
        return result
    check_out(routine, out, result, result.numel())
    out.view(result.shape).copy_(result)
    return out
