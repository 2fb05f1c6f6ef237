"""NVFP4 block scales, fused: the routines of `kernels.reference.nvfp4`, one kernel launch a tensor.

Contracts, errors and bytes are the reference's. The CuteDSL views move nothing and the activation
scale is a reduction of E numbers, so both are the reference's own.
"""

from __future__ import annotations

import torch

from kernels import catalog
from kernels.errors import LayoutError
from kernels.fused.rearrange import rearrange, restore
from kernels.reference.nvfp4 import (
    E4M3,
    amax_for_moe_activation_quant,
    cutedsl_mma_view_to_nvfp4_swizzled_scale,
    nvfp4_swizzled_scale_to_cutedsl_mma_view,
)
from kernels.reference.reorder import check_out

__all__ = [
    "amax_for_moe_activation_quant",
    "cutedsl_mma_view_to_nvfp4_swizzled_scale",
    "nvfp4_block_scale_deinterleave",
    "nvfp4_block_scale_interleave",
    "nvfp4_swizzled_scale_to_cutedsl_mma_view",
    "swizzle_blockscale",
    "unswizzle_blockscale",
]


def swizzle_blockscale(scale: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """e4m3 [M, K] or [E, M, K] -> the 128x4 order, padded to (128, 4) with zero bytes, same
    rank."""
    if scale.dtype != E4M3 or scale.ndim not in (2, 3):
        raise LayoutError(
            f"swizzle_blockscale: scale {tuple(scale.shape)} {scale.dtype}; want float8_e4m3fn of "
            "rank 2 or 3, [M, K] or [E, M, K]"
        )
    layout = catalog.LAYOUTS["block_scale_128x4"]
    shape = torch.Size((*scale.shape[:-2], *layout.padded(*scale.shape[-2:])))
    if out is not None:
        check_out("swizzle_blockscale", out, scale, shape.numel())
    result = rearrange(layout, scale, out)
    return result.view(shape) if out is None else out


def unswizzle_blockscale(scale: torch.Tensor, m: int, k: int) -> torch.Tensor:
    """The inverse of `swizzle_blockscale`: [.., round_up(m, 128), round_up(k, 4)] -> [.., m, k]."""
    layout = catalog.LAYOUTS["block_scale_128x4"]
    if scale.shape[-2:] != layout.padded(m, k):
        raise LayoutError(
            f"unswizzle_blockscale: scale {tuple(scale.shape)} is not the swizzled form of {m} x "
            f"{k}, which is {layout.padded(m, k)}"
        )
    storage = scale.reshape(*scale.shape[:-2], *layout.storage_shape(m, k))
    return restore(layout, storage, m, k)


def nvfp4_block_scale_interleave(
    scale: torch.Tensor, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """FlashInfer's form of the 128x4 swizzle: uint8 [M, K] or [E, M, K] -> uint8, flat."""
    if scale.dtype != torch.uint8 or scale.ndim not in (2, 3):
        raise LayoutError(
            f"nvfp4_block_scale_interleave: scale {tuple(scale.shape)} {scale.dtype}; want uint8 "
            "of rank 2 or 3"
        )
    layout = catalog.LAYOUTS["block_scale_128x4"]
    if out is not None:
        numel = torch.Size((*scale.shape[:-2], *layout.padded(*scale.shape[-2:]))).numel()
        check_out("nvfp4_block_scale_interleave", out, scale, numel)
    result = rearrange(layout, scale, out)
    return result.flatten() if out is None else out


def nvfp4_block_scale_deinterleave(scale: torch.Tensor, *shape: int) -> torch.Tensor:
    """The inverse of `nvfp4_block_scale_interleave`: flat bytes -> `shape`, (M, K) or (E, M, K)."""
    layout = catalog.LAYOUTS["block_scale_128x4"]
    *batch, m, k = shape
    rows, cols = layout.storage_shape(m, k)
    want = rows * cols * (batch[0] if batch else 1)
    if scale.numel() != want:
        raise LayoutError(
            f"nvfp4_block_scale_deinterleave: {scale.numel()} bytes cannot be scales of shape "
            f"{shape}, which take {want}"
        )
    return restore(layout, scale.reshape(*batch, rows, cols), m, k)
