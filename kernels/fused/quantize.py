"""Triton twins of kernels/reference/quantize.py: same names, signatures, errors and bytes.

One pass: each source byte is read once and each output byte written once, for any axis and any
strides, without a copy and without scratch (NVFP4 without a given global scale reads twice). Runs
on a GPU, or on the CPU under TRITON_INTERPRET=1. Only integer and fp32 operations that round once
are used, and no fp8 or FP4 instruction, so the bytes are the same on every target.
"""

from __future__ import annotations

import torch
import triton

from kernels.errors import LayoutError
from kernels.formats import MXFP4, NVFP4, per_matrix
from kernels.fused.dequantize import dequantize_mxfp4, dequantize_nvfp4, pack_e2m1, unpack_e2m1
from kernels.fused.launch import launchable
from kernels.fused.quantize_kernels import (
    largest_finite_kernel,
    merge_kernel,
    quantize_kernel,
)
from kernels.fused.rows import Rows, rows_of
from kernels.quantize_task import (
    SCALE_ROUNDING,
    QuantizeTask,
    check_merge,
    nvfp4_global_scale,
    plan_mxfp4,
    plan_nvfp4,
)

__all__ = [
    "dequantize_mxfp4",
    "dequantize_nvfp4",
    "downcast_to_mxfp",
    "merge_global_scales",
    "mxfp4_quantize",
    "pack_e2m1",
    "quantize_nvfp4",
    "unpack_e2m1",
]


def downcast_to_mxfp(
    src_tensor: torch.Tensor,
    axis: int,
    out_quant_tensor: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None,
    BLOCK_OUT_DIM: int = 128,
    BLOCK_QUANT_DIM: int = 32,
    *,
    scale_rounding: str = "even",
    nonfinite: str = "nan",
) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]:
    """[.., L, ..] -> (packed e2m1, e8m0 bytes, scale's shape), as the reference says."""
    task = plan_mxfp4(
        src_tensor, axis, out_quant_tensor, out_scale, BLOCK_QUANT_DIM, scale_rounding, nonfinite
    )
    keep = nonfinite == "vllm"
    saturate = keep or scale_rounding == "floor"  # elsewhere a scaled magnitude stays below 7
    _launch(task, None, MXFP4.block, scale_rounding, saturate=saturate, keep=keep)
    return *task.outputs, tuple(task.outputs[1].shape)


def mxfp4_quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., L] -> ([..., L/2] packed e2m1, [..., ceil(L/32)] e8m0 bytes) along the last axis."""
    packed, scale, _ = downcast_to_mxfp(x, -1)
    return packed, scale


def quantize_nvfp4(
    x: torch.Tensor,
    global_scale: torch.Tensor | float | None = None,
    out_quant_tensor: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[..., N, L] -> (packed e2m1, e4m3, fp32 global scale); the reference says the contract."""
    task = plan_nvfp4(x, out_quant_tensor, out_scale)
    given = nvfp4_global_scale(x, global_scale, largest_finite)
    inverse = per_matrix(given.reciprocal(), x).expand(*x.shape[:-1], 1)
    _launch(task, inverse, NVFP4.block, "floor", saturate=True, keep=False)
    return *task.outputs, given


def merge_global_scales(
    scale: torch.Tensor, global_scales: torch.Tensor, *, interleaved: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Give w1 and w3 one global scale; the reference says the contract and proves the bound."""
    check_merge(scale, global_scales)
    merged = global_scales.amax(-1)
    ratio = torch.where(merged[..., None] > 0, global_scales / merged[..., None], 1.0)
    out = torch.empty(scale.shape, dtype=scale.dtype, device=scale.device)
    source = scale.contiguous().view(torch.uint8)
    rows, groups = scale.shape[-2:]
    if scale.numel():
        BLOCK = 1024
        with launchable(scale):
            merge_kernel[(triton.cdiv(scale.numel(), BLOCK),)](
                source, ratio, out.view(torch.uint8), scale.numel(), rows, groups,
                INTERLEAVED=interleaved, BLOCK=BLOCK, num_warps=4,
            )  # fmt: skip
    return out, merged


def largest_finite(x: torch.Tensor) -> torch.Tensor:
    """[..., N, L] -> [...] fp32: each matrix's largest finite magnitude; 0 where there is none."""
    matrices = x.reshape(-1, *x.shape[-2:]) if x.ndim > 2 else x.reshape(1, -1, x.shape[-1])
    bits = torch.zeros(matrices.shape[0], dtype=torch.int32, device=x.device)
    numel = matrices.shape[1] * matrices.shape[2]
    if x.numel():
        BLOCK = 4096
        with launchable(x):
            largest_finite_kernel[(triton.cdiv(numel, BLOCK), matrices.shape[0])](
                matrices,
                bits,
                numel,
                *matrices.stride(),
                matrices.shape[2],
                BLOCK=BLOCK,
                num_warps=4,
            )
    return bits.view(torch.float32).view(x.shape[:-2])


def tile_for(rows: Rows) -> tuple[int, int, int]:
    """(BLOCK_R, BLOCK_K, num_warps), measured on an H200; see docs/findings.md."""
    *_, row, k = rows.strides[0]
    if row == 1 and k != 1 and rows.sizes[2] > 1:  # contiguous across rows: turned on chip
        return 64, 128, 4
    tile = TILE // 2 if rows.tensors[0].dtype == torch.float32 else TILE
    block_k = min(tile, max(32, 1 << (rows.length - 1).bit_length()))
    block_r = min(tile // block_k, 1 << (rows.sizes[2] - 1).bit_length())
    return block_r, block_k, 4


TILE = 4096  # elements a program; half for fp32, which spilled registers on sm_120


def _launch(
    task: QuantizeTask, inverse_global: torch.Tensor | None, block: int, scale_rounding: str,
    *, saturate: bool, keep: bool,
) -> None:  # fmt: skip
    """Quantize a task's views, however many row axes they have."""
    if task.source.numel() == 0:
        return
    if inverse_global is None:  # MXFP4 has none: a valid pointer that is never read
        first = task.scale[(0,) * task.scale.ndim]
        inverse_global = first.expand(*task.source.shape[:-1], 1)
    tensors = (task.source, task.packed, task.scale, inverse_global)
    for rows in rows_of(tensors, (1, 2, block, 0), block):
        _launch_rows(rows, block, SCALE_ROUNDING[scale_rounding], saturate, keep)


def _launch_rows(rows: Rows, block: int, bias: int, saturate: bool, keep: bool) -> None:
    x, packed, scale, inverse_global = rows.tensors
    x_strides, q_strides, s_strides, g_strides = rows.strides
    outer, middle, inner = rows.sizes
    block_r, block_k, warps = tile_for(rows)
    words = rows.length % 8 == 0 and _widens(packed, q_strides, 4)
    if words:
        packed, q_strides = _widen(packed, q_strides, 4)
    pairs = words and block == 32 and not keep and _has_paired_bf16(x) and _widens(x, x_strides, 2)
    if pairs:
        x, x_strides = _widen(x, x_strides, 2)
    k_tiles, row_tiles = -(-rows.length // block_k), -(-inner // block_r)
    grid = outer * middle * row_tiles * k_tiles
    if grid >= 1 << 31:
        raise LayoutError(f"src_tensor of {grid} tiles: split it, a launch takes fewer than 2**31")
    with launchable(x):
        quantize_kernel[(grid,)](
            x, packed, scale, inverse_global,
            rows.length, inner, middle, k_tiles, row_tiles,
            *reversed(x_strides), *reversed(q_strides), *reversed(s_strides),
            *reversed(g_strides[:3]),
            BLOCK_R=block_r, BLOCK_K=block_k, BLOCK=block, BIAS=bias, SATURATE=saturate,
            DROP_NAN=keep, WORDS=words, PAIRS=pairs, num_warps=warps,
        )  # fmt: skip


def _has_paired_bf16(x: torch.Tensor) -> bool:
    """Whether the target has fused bf16 pairs (PTX for sm_90 and later) and x is bf16."""
    if x.dtype != torch.bfloat16 or x.device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(x.device)[0] >= 9 and not triton.knobs.runtime.interpret


def _widens(first: torch.Tensor, strides: tuple[int, int, int, int], times: int) -> bool:
    """Whether every run of `times` elements along k is one aligned 4-byte word."""
    out, mid, row, k = strides
    aligned = first.data_ptr() % 4 == 0 and first.storage_offset() % times == 0
    return aligned and k == 1 and out % times == 0 and mid % times == 0 and row % times == 0


def _widen(
    first: torch.Tensor, strides: tuple[int, int, int, int], times: int
) -> tuple[torch.Tensor, tuple[int, int, int, int]]:
    """The same start and strides in 4-byte words."""
    out, mid, row, _ = strides
    words = first.as_strided((times,), (1,)).view(torch.int32)
    return words, (out // times, mid // times, row // times, 1)
