"""Triton twins of the decoders in kernels/formats.py: same names, signatures, errors and bytes.

One pass over contiguous memory; an input that is not contiguous is made so first. Values are built
from bits, so no target needs fp8 or FP4 instructions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.errors import LayoutError
from kernels.formats import MXFP4, NVFP4, BlockFormat, check_blocks, per_matrix, want
from kernels.fused.launch import launchable
from kernels.fused.quantize_kernels import e4m3_decode

BLOCK = 1024


def dequantize_mxfp4(packed: torch.Tensor, scale: torch.Tensor, axis: int = -1) -> torch.Tensor:
    """[.., L/2, ..] bytes and [.., ceil(L/32), ..] e8m0 bytes along `axis` -> fp32 [.., L, ..]."""
    check_blocks(packed, scale, axis, MXFP4)
    values = _dequantize(packed.movedim(axis, -1), scale.movedim(axis, -1), None, MXFP4)
    return values.movedim(-1, axis)


def dequantize_nvfp4(
    packed: torch.Tensor, scale: torch.Tensor, global_scale: torch.Tensor | float = 1.0
) -> torch.Tensor:
    """[..., N, L/2] bytes, [..., N, ceil(L/16)] e4m3, fp32 global scale(s) -> fp32 [..., N, L]."""
    check_blocks(packed, scale, -1, NVFP4)
    return _dequantize(packed, scale, per_matrix(global_scale, packed), NVFP4)


def pack_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """uint8 codes 0..15 [..., 2n] -> bytes [..., n]; the low nibble is the even k."""
    want(codes, "codes", torch.uint8)
    if codes.shape[-1] % 2:
        raise LayoutError(f"codes {tuple(codes.shape)}: two codes fill a byte; pad the last axis")
    packed = codes.new_empty((*codes.shape[:-1], codes.shape[-1] // 2))
    _each(_pack_kernel, packed.numel(), codes.contiguous(), packed)
    return packed


def unpack_e2m1(packed: torch.Tensor) -> torch.Tensor:
    """Bytes [..., n] -> uint8 codes [..., 2n], the inverse of `pack_e2m1`."""
    want(packed, "packed", torch.uint8)
    codes = packed.new_empty((*packed.shape[:-1], packed.shape[-1] * 2))
    _each(_unpack_kernel, packed.numel(), packed.contiguous(), codes)
    return codes


def _dequantize(
    packed: torch.Tensor, scale: torch.Tensor, factor: torch.Tensor | None, fmt: BlockFormat
) -> torch.Tensor:
    shape = (*packed.shape[:-1], packed.shape[-1] * 2)
    values = torch.empty(shape, dtype=torch.float32, device=packed.device)
    matrix = 1
    if factor is None or factor.ndim == 0:
        matrix = max(packed.numel(), 1)
        factor = values.new_ones(1) if factor is None else factor.reshape(1)
    else:
        matrix = packed.shape[-1] * packed.shape[-2]
        factor = factor.contiguous()
    scales = scale.contiguous().view(torch.uint8)
    if packed.numel():
        with launchable(packed):
            _dequantize_kernel[(triton.cdiv(packed.numel(), BLOCK),)](
                packed.contiguous(), scales, factor, values, packed.numel(),
                packed.shape[-1], scale.shape[-1], matrix,
                GROUP=fmt.block // 2, E8M0=fmt is MXFP4, BLOCK=BLOCK, num_warps=4,
            )  # fmt: skip
    return values


def _each(
    kernel: triton.JITFunction[[]], numel: int, source: torch.Tensor, out: torch.Tensor
) -> None:
    """Run a kernel over `numel` packed bytes of contiguous tensors."""
    if numel:
        with launchable(out):
            kernel[(triton.cdiv(numel, BLOCK),)](source, out, numel, BLOCK=BLOCK, num_warps=4)


@triton.jit
def _e8m0_decode(byte):
    bits = tl.where(byte == 0, 0x00400000, byte << 23)
    return tl.where(byte == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def _e2m1_decode(code):
    """int32 codes 0..15 -> fp32. From 1 on, magnitudes are exponent and mantissa as they stand."""
    magnitude = code & 7
    bits = tl.where(magnitude < 2, magnitude * 0x3F000000, 0x3F000000 + (magnitude << 22))
    return (bits | ((code & 8) << 28)).to(tl.float32, bitcast=True)


@triton.jit
def _dequantize_kernel(
    q_ptr, s_ptr, g_ptr, out_ptr, numel, width, groups, matrix,
    GROUP: tl.constexpr, E8M0: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Packed bytes [.., width] with `groups` scales a row and a global scale per `matrix` bytes."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    inside = i < numel
    byte = tl.load(q_ptr + i, mask=inside, other=0).to(tl.int32)
    group = (i // width) * groups + (i % width) // GROUP
    scale = tl.load(s_ptr + group, mask=inside, other=0).to(tl.int32)
    low, high = _e2m1_decode(byte & 15), _e2m1_decode(byte >> 4)
    if E8M0:
        factor = _e8m0_decode(scale)
        low, high = low * factor, high * factor
    else:
        magnitude = scale & 0x7F
        factor = tl.where(magnitude == 0x7F, float("nan"), e4m3_decode(magnitude))
        # the sign as a bit: triton negates by 0 - x, which makes -0 of no zero
        sign = (scale & 0x80) << 24
        factor = (factor.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
        overall = tl.load(g_ptr + i // matrix, mask=inside, other=0.0)
        low, high = low * factor * overall, high * factor * overall
    k = tl.program_id(0).to(tl.int64) * (2 * BLOCK) + tl.arange(0, 2 * BLOCK).to(tl.int64)
    tl.store(out_ptr + k, tl.interleave(low, high), mask=k < 2 * numel)


@triton.jit
def _pack_kernel(codes_ptr, packed_ptr, numel, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64)
    k = start * (2 * BLOCK) + tl.arange(0, 2 * BLOCK).to(tl.int64)
    codes = tl.load(codes_ptr + k, mask=k < 2 * numel, other=0)
    low, high = tl.split(tl.reshape(codes, [BLOCK, 2]))
    i = start * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    tl.store(packed_ptr + i, low | (high << 4), mask=i < numel)


@triton.jit
def _unpack_kernel(packed_ptr, codes_ptr, numel, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64)
    i = start * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    byte = tl.load(packed_ptr + i, mask=i < numel, other=0)
    k = start * (2 * BLOCK) + tl.arange(0, 2 * BLOCK).to(tl.int64)
    tl.store(codes_ptr + k, tl.interleave(byte & 15, byte >> 4), mask=k < 2 * numel)
