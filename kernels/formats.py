"""The number formats of FP4 weights: e2m1 elements, e8m0 and e4m3 scales, MXFP4 and NVFP4 blocks.

A packed byte holds two e2m1 codes, the even k in its low nibble; a code is sign << 3 | magnitude.
The magnitudes are 0, .5, 1, 1.5, 2, 3, 4, 6. An e8m0 byte b is 2**(b - 127): it has no zero, byte 0
being 2**-127 (a subnormal fp32), and 255 is NaN. e4m3 has no infinity; 0x7F and 0xFF are NaN.
Everything here is exact: a decoded value is the fp32 number that the bytes say.
Sources: OCP Microscaling Formats (MX) v1.0, sections 5.3 and 5.4; NVIDIA ModelOpt for NVFP4.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from kernels.errors import LayoutError

E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Halfway points between neighbouring magnitudes, with the one that a tie goes to (the even code).
E2M1_TIES = ((0.25, 0.0), (0.75, 1.0), (1.25, 1.0), (1.75, 2.0), (2.5, 2.0), (3.5, 4.0), (5.0, 4.0))
E2M1_MAX = 6.0
E4M3_MAX = 448.0
E8M0_NAN = 255
E4M3_NAN = 0x7F


@dataclass(frozen=True)
class BlockFormat:
    """A block-scaled FP4 format: `block` elements along the contraction share one scale byte."""

    name: str
    block: int
    scale: str
    scale_dtype: torch.dtype
    global_scale: bool
    source: str

    def scales(self, length: int) -> int:
        """Scale bytes of a row of `length` elements; the last block may be short."""
        return -(-length // self.block)


MXFP4 = BlockFormat("mxfp4", 32, "e8m0", torch.uint8, False, "OCP MX v1.0, section 5.3")
NVFP4 = BlockFormat("nvfp4", 16, "e4m3", torch.float8_e4m3fn, True, "NVIDIA ModelOpt NVFP4")
FORMATS = {"mxfp4": MXFP4, "nvfp4": NVFP4}


def decode_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """uint8 codes 0..15 -> fp32 of the same shape; code 8 is -0.0."""
    return _value_table(codes.device)[codes.int()]


def encode_e2m1(values: torch.Tensor) -> torch.Tensor:
    """Any float -> uint8 codes: nearest, ties to even, saturating at 6; signs of zero and NaN stay.

    The rounding happens once, from the values as given (fp32 2.500004 is 3; through bf16 it is 2).
    NaN gives magnitude 7, as FP4 has none: callers mark such blocks in the scale.
    """
    bounds = _code_bounds(values.device)
    codes = torch.bucketize(values.float().abs().contiguous(), bounds, right=True, out_int32=True)
    return codes.add_(torch.signbit(values), alpha=8).to(torch.uint8)


def pack_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """uint8 codes 0..15 [..., 2n] -> bytes [..., n]; the low nibble is the even k."""
    want(codes, "codes", torch.uint8)
    if codes.shape[-1] % 2:
        raise LayoutError(f"codes {tuple(codes.shape)}: two codes fill a byte; pad the last axis")
    return codes[..., 1::2].bitwise_left_shift(4).bitwise_or_(codes[..., 0::2])


def unpack_e2m1(packed: torch.Tensor) -> torch.Tensor:
    """Bytes [..., n] -> uint8 codes [..., 2n], the inverse of `pack_e2m1`."""
    want(packed, "packed", torch.uint8)
    codes = packed.new_empty((*packed.shape[:-1], 2 * packed.shape[-1]))
    torch.bitwise_and(packed, 15, out=codes[..., 0::2])
    torch.bitwise_right_shift(packed, 4, out=codes[..., 1::2])
    return codes


def decode_e8m0(scale: torch.Tensor) -> torch.Tensor:
    """e8m0 bytes -> fp32. The exponent field alone would make byte 0 zero and byte 255 infinite."""
    byte = scale.view(torch.uint8).int()
    bits = byte.bitwise_left_shift(23)
    bits.masked_fill_(byte == 0, 0x00400000).masked_fill_(byte == E8M0_NAN, 0x7FC00000)
    return bits.view(torch.float32)


def decode_e4m3(scale: torch.Tensor) -> torch.Tensor:
    """e4m3 bytes (uint8 or float8_e4m3fn) -> fp32."""
    return scale.view(torch.uint8).view(torch.float8_e4m3fn).float()


def encode_e4m3(values: torch.Tensor) -> torch.Tensor:
    """fp32 -> float8_e4m3fn: nearest even, saturating at 448 before the cast; NaN stays NaN."""
    return values.float().clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def dequantize_mxfp4(packed: torch.Tensor, scale: torch.Tensor, axis: int = -1) -> torch.Tensor:
    """[.., L/2, ..] bytes and [.., ceil(L/32), ..] e8m0 bytes along `axis` -> fp32 [.., L, ..].

    Exact: code times 2**(b - 127). What fp32 cannot hold (2 and more at scale 254) is infinite.
    """
    check_blocks(packed, scale, axis, MXFP4)
    values = _decode_packed(packed.movedim(axis, -1))
    _scale_blocks(values, decode_e8m0(scale.movedim(axis, -1)), MXFP4.block)
    return values.movedim(-1, axis)


def dequantize_nvfp4(
    packed: torch.Tensor, scale: torch.Tensor, global_scale: torch.Tensor | float = 1.0
) -> torch.Tensor:
    """[..., N, L/2] bytes, [..., N, ceil(L/16)] e4m3 and fp32 global scale(s) -> fp32 [..., N, L].

    `global_scale` is the checkpoint's weight_scale_2: one number, or one per leading index ([...]).
    code * block scale is exact in fp32 (6 significant bits); the global scale then rounds once.
    """
    check_blocks(packed, scale, -1, NVFP4)
    values = _decode_packed(packed)
    _scale_blocks(values, decode_e4m3(scale), NVFP4.block)
    return values.mul_(per_matrix(global_scale, values))


def _decode_packed(packed: torch.Tensor) -> torch.Tensor:
    """Bytes [..., n] -> fp32 [..., 2n] through a table of 256 pairs, each one 8-byte word."""
    index = packed.reshape(-1).int()
    pairs = torch.index_select(_pair_table(packed.device), 0, index).view(torch.float32)
    return pairs.view(*packed.shape[:-1], 2 * packed.shape[-1])


def _scale_blocks(values: torch.Tensor, scale: torch.Tensor, block: int) -> None:
    """Multiply each block of the last axis by its scale, in place; a short last block by itself."""
    whole = values.shape[-1] // block
    blocks = values[..., : whole * block].view(*values.shape[:-1], whole, block)
    blocks.mul_(scale[..., :whole, None])
    values[..., whole * block :].mul_(scale[..., whole:])


def per_matrix(global_scale: torch.Tensor | float, values: torch.Tensor) -> torch.Tensor:
    """A global scale as fp32 that broadcasts over the last two axes of `values`."""
    scales = torch.as_tensor(global_scale, dtype=torch.float32, device=values.device)
    if scales.ndim == 0 or scales.numel() == 1:
        return scales.reshape(())
    if scales.shape != values.shape[:-2]:
        raise LayoutError(
            f"global_scale {tuple(scales.shape)} for values {tuple(values.shape)}: "
            f"give one number, or one per matrix {tuple(values.shape[:-2])}"
        )
    return scales[..., None, None]


def check_blocks(packed: torch.Tensor, scale: torch.Tensor, axis: int, fmt: BlockFormat) -> None:
    """LayoutError unless `scale` has a byte for every block of `packed` and nothing more."""
    want(packed, "packed", torch.uint8)
    known = (torch.uint8, torch.float8_e4m3fn if fmt is NVFP4 else torch.float8_e8m0fnu)
    if scale.dtype not in known:
        raise LayoutError(f"scale is {scale.dtype}: {fmt.name} takes {fmt.scale} as one of {known}")
    if not -packed.ndim <= axis < packed.ndim:
        raise LayoutError(f"axis {axis} is not one of packed {tuple(packed.shape)}")
    expected = list(packed.shape)
    expected[axis] = fmt.scales(2 * packed.shape[axis])
    if list(scale.shape) != expected:
        raise LayoutError(
            f"scale {tuple(scale.shape)} for packed {tuple(packed.shape)}: {fmt.name} has one per "
            f"{fmt.block} elements along axis {axis}, so give {tuple(expected)}"
        )


def want(tensor: torch.Tensor, name: str, dtype: torch.dtype) -> None:
    if tensor.dtype != dtype or tensor.ndim == 0:
        raise LayoutError(
            f"{name} {tuple(tensor.shape)} is {tensor.dtype}: give {dtype} with at least one axis"
        )


@cache
def _value_table(device: torch.device) -> torch.Tensor:
    values = (*E2M1_MAGNITUDES, *(-value for value in E2M1_MAGNITUDES))
    return torch.tensor(values, dtype=torch.float32, device=device)


@cache
def _pair_table(device: torch.device) -> torch.Tensor:
    """[256] int64, each the two fp32 values of a packed byte in memory order."""
    codes = unpack_e2m1(torch.arange(256, dtype=torch.uint8, device=device)[:, None])
    return decode_e2m1(codes).view(torch.int64).flatten()


@cache
def _code_bounds(device: torch.device) -> torch.Tensor:
    """[7] fp32: the smallest magnitude that rounds to each next code, ties as E2M1_TIES says."""
    ties = torch.tensor([tie for tie, _ in E2M1_TIES], dtype=torch.float32, device=device)
    above = torch.nextafter(ties, torch.full_like(ties, torch.inf))
    goes_up = torch.tensor([even > tie for tie, even in E2M1_TIES], device=device)
    return torch.where(goes_up, ties, above)
