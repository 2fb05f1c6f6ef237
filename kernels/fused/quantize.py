"""Triton twins of kernels/reference/quantize.py: same names, signatures, errors and bytes.

One pass: each source byte is read once and each output byte written once, for any axis and any
strides, without a copy and without scratch (NVFP4 without a given global scale reads twice). Runs
on a GPU, or on the CPU under TRITON_INTERPRET=1. Only integer and fp32 operations that round once
are used, and no fp8 or FP4 instruction, so the bytes are the same on every target.
"""

from __future__ import annotations

import torch
import triton

from kernels.catalog import LAYOUTS
from kernels.errors import LayoutError
from kernels.formats import MXFP4, NVFP4, per_matrix
from kernels.fused.dequantize import dequantize_mxfp4, dequantize_nvfp4, pack_e2m1, unpack_e2m1
from kernels.fused.launch import launchable, run
from kernels.fused.quantize_across import quantize_across_kernel
from kernels.fused.quantize_blocks import quantize_blocks_kernel
from kernels.fused.quantize_kernels import largest_finite_kernel, quantize_kernel
from kernels.fused.rearrange import as_batch
from kernels.fused.rows import Rows, rows_of
from kernels.fused.share import share_job
from kernels.quantize_task import (
    SCALE_ROUNDING,
    QuantizeTask,
    check_merge,
    nvfp4_global_scale,
    plan_mxfp4,
    plan_nvfp4,
)
from kernels.reference.reorder import interleave_layout

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
    rows, groups = scale.shape[-2:]
    halves = as_batch(scale).unflatten(1, (rows // 2, 2) if interleaved else (2, rows // 2))
    if interleaved:
        layout, halves = interleave_layout(1), halves.transpose(1, 2)
    else:
        layout = LAYOUTS["strided"]
    pairs = global_scales.reshape(-1, 2).contiguous()
    job = share_job(halves, layout, rows, groups, False, pairs)
    run([job])
    return job.storage.view(scale.shape), global_scales.amax(-1)


def largest_finite(x: torch.Tensor) -> torch.Tensor:
    """[..., N, L] -> [...] fp32: each matrix's largest finite magnitude; 0 where there is none."""
    matrices = x.reshape(-1, *x.shape[-2:]) if x.ndim > 2 else x.reshape(1, -1, x.shape[-1])
    bits = torch.zeros(matrices.shape[0], dtype=torch.int32, device=x.device)
    numel = matrices.shape[1] * matrices.shape[2]
    if x.numel():
        block, times, warps = LARGEST[_measured(x)]
        with launchable(x):
            largest_finite_kernel[(triton.cdiv(numel, block * times), matrices.shape[0])](
                matrices,
                bits,
                numel,
                *matrices.stride(),
                matrices.shape[2],
                BLOCK=block,
                TIMES=times,
                DENSE=matrices[0].is_contiguous(),
                num_warps=warps,
            )
    return bits.view(torch.float32).view(x.shape[:-2])


def tile_for(rows: Rows, block: int) -> tuple[int, int, int]:
    """(BLOCK_R, BLOCK_K, num_warps) of quantize_kernel."""
    *_, row, k = rows.strides[0]
    if row == 1 and k != 1 and rows.sizes[2] > 1:  # contiguous across rows: turned on chip
        return 64, 128, 4
    source = rows.tensors[0]
    tile, warps = TILES[_measured(source)][block, source.dtype]
    block_k = min(tile, max(32, 1 << (rows.length - 1).bit_length()))
    block_r = min(tile // block_k, 1 << (rows.sizes[2] - 1).bit_length())
    return block_r, block_k, warps


def _measured(x: torch.Tensor) -> str:
    """Which column of the tables below a tensor's device takes."""
    return "nvidia" if x.device.type == "cuda" and torch.version.hip is None else "other"


# (block, source) -> elements a program, warps. Measured on an H200, see docs/findings.md; "other"
# is not measured, and half for fp32, which spilled registers on sm_120.
TILES = {
    "nvidia": {
        (32, torch.bfloat16): (2048, 2),
        (32, torch.float16): (2048, 1),
        (32, torch.float32): (1024, 1),
        (16, torch.bfloat16): (4096, 2),
        (16, torch.float16): (4096, 2),
        (16, torch.float32): (2048, 4),
    },
    "other": {
        (32, torch.bfloat16): (4096, 4),
        (32, torch.float16): (4096, 4),
        (32, torch.float32): (2048, 4),
        (16, torch.bfloat16): (4096, 4),
        (16, torch.float16): (4096, 4),
        (16, torch.float32): (2048, 4),
    },
}
ROW = 2  # place of the row axis in a Rows' strides (out, mid, row, k)
ACROSS = 64, 2, 2  # quantize_across_kernel: words of two rows, blocks of 32, warps a program
BLOCKS = 64, 4, 1  # quantize_blocks_kernel: blocks of 16 a step, steps a program, and its warps
# largest_finite_kernel: elements a step, steps a program, and its warps; 16 bytes a thread
LARGEST = {"nvidia": (1024, 16, 4), "other": (2048, 8, 4)}


def _launch(
    task: QuantizeTask, inverse_global: torch.Tensor | None, block: int, scale_rounding: str,
    *, saturate: bool, keep: bool,
) -> None:  # fmt: skip
    """Quantize a task's views, however many row axes they have."""
    if task.source.numel() == 0:
        return
    if inverse_global is None:  # MXFP4 has none: a valid pointer that is never read
        inverse_global = task.scale.as_strided((*task.source.shape[:-1], 1), (0,) * task.scale.ndim)
    tensors = (task.source, task.packed, task.scale, inverse_global)
    for rows in rows_of(tensors, (1, 2, block, 0), block):
        bias = SCALE_ROUNDING[scale_rounding]
        if block == NVFP4.block:
            done = _launch_blocks(rows)
        else:
            done = not keep and _launch_across(rows, bias, saturate)
        if not done:
            _launch_rows(rows, block, bias, saturate, keep)


def _launch_rows(rows: Rows, block: int, bias: int, saturate: bool, keep: bool) -> None:
    x, packed, scale, inverse_global = rows.tensors
    x_strides, q_strides, s_strides, g_strides = rows.strides
    outer, middle, inner = rows.sizes
    block_r, block_k, warps = tile_for(rows, block)
    words = rows.length % 8 == 0 and _widens(packed, q_strides, 4)
    if words:
        packed, q_strides = _widen(packed, q_strides, 4)
    pairs = _pairs(x) if words and not keep and _widens(x, x_strides, 2) else 0
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


def _pairs(x: torch.Tensor) -> int:
    """1 for bf16, 2 for fp16 on a target with pairs of both (PTX for sm_90 and later), else 0."""
    kind = {torch.bfloat16: 1, torch.float16: 2}.get(x.dtype, 0)
    if not kind or x.device.type != "cuda" or torch.version.hip is not None:
        return 0
    paired = torch.cuda.get_device_capability(x.device)[0] >= 9
    return kind if paired and not triton.knobs.runtime.interpret else 0


def _launch_across(rows: Rows, bias: int, saturate: bool) -> bool:
    """MXFP4 where rows, not the quantized axis, are contiguous; False if it does not apply."""
    x, packed, scale, _ = rows.tensors
    x_strides, q_strides, s_strides, _ = rows.strides
    outer, middle, inner = rows.sizes
    kind = _pairs(x)
    fits = rows.length % MXFP4.block == 0 and inner % 2 == 0 and x_strides[3] != 1
    if not (kind and fits and _widens(x, x_strides, 2, ROW) and _widens(packed, q_strides, 4)):
        return False
    words, blocks = inner // 2, rows.length // MXFP4.block
    width, deep, warps = ACROSS
    word_tiles, block_tiles = -(-words // width), -(-blocks // deep)
    grid = outer * middle * word_tiles * block_tiles
    if grid >= 1 << 31:
        return False
    x, x_strides = _widen(x, x_strides, 2, ROW)
    packed, q_strides = _widen(packed, q_strides, 4)
    with launchable(x):
        quantize_across_kernel[(grid,)](
            x, packed, scale, words, middle, blocks, block_tiles, word_tiles,
            x_strides[3], x_strides[1], x_strides[0],
            q_strides[2], q_strides[1], q_strides[0], *reversed(s_strides),
            W=width, K=deep, BIAS=bias, SATURATE=saturate, HALF=kind == 2, num_warps=warps,
        )  # fmt: skip
    return True


def _launch_blocks(rows: Rows) -> bool:
    """NVFP4 of 16-bit elements in long contiguous rows; False if it does not apply."""
    x, packed, scale, inverse_global = rows.tensors
    x_strides, q_strides, s_strides, g_strides = rows.strides
    outer, middle, inner = rows.sizes
    kind, each = _pairs(x), BLOCKS[0] * BLOCKS[1]
    fits = rows.length % NVFP4.block == 0 and rows.length >= each * NVFP4.block
    if not (kind and fits and _widens(x, x_strides, 2) and _widens(packed, q_strides, 4)):
        return False
    blocks = rows.length // NVFP4.block
    tiles = -(-blocks // each)
    grid = outer * middle * inner * tiles
    if s_strides[3] != 1 or grid >= 1 << 31:
        return False
    x, x_strides = _widen(x, x_strides, 2)
    packed, q_strides = _widen(packed, q_strides, 4)
    with launchable(x):
        quantize_blocks_kernel[(grid,)](
            x, packed, scale, inverse_global, blocks, inner, middle, tiles,
            *reversed(x_strides[:3]), *reversed(q_strides[:3]), *reversed(s_strides[:3]),
            *reversed(g_strides[:3]),
            B=BLOCKS[0], TIMES=BLOCKS[1], HALF=kind == 2, num_warps=BLOCKS[2],
        )  # fmt: skip
    return True


def _widens(
    first: torch.Tensor, strides: tuple[int, int, int, int], times: int, along: int = 3
) -> bool:
    """Whether every run of `times` elements along one axis is one aligned 4-byte word."""
    aligned = first.data_ptr() % 4 == 0 and first.storage_offset() % times == 0
    others = (stride for axis, stride in enumerate(strides) if axis != along)
    return aligned and strides[along] == 1 and all(stride % times == 0 for stride in others)


def _widen(
    first: torch.Tensor, strides: tuple[int, int, int, int], times: int, along: int = 3
) -> tuple[torch.Tensor, tuple[int, int, int, int]]:
    """The same start and strides in 4-byte words."""
    words = first.as_strided((times,), (1,)).view(torch.int32)
    out, mid, row, k = (1 if axis == along else s // times for axis, s in enumerate(strides))
    return words, (out, mid, row, k)
