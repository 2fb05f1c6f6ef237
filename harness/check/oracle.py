"""A second opinion on every layout: where the vendors' own code puts an element, as plain
arithmetic.

`kernels.catalog` states layouts as patterns and derives all else from them, so a wrong pattern
would be wrong everywhere alike. The formulas here are written from the vendors' sources and
address arithmetic instead, share nothing with the catalog, and are held to the recorded bytes of
the real libraries in tests/test_oracle.py. A sweep can therefore tell a wrong catalog from a right
one at any shape.

A formula takes m, k (int64 tensors, broadcastable), the logical rows n, and the padded (N, K), and
gives the offset in the flat storage of one matrix. Sources: cases of public reports, cuBLAS "1D
Block Scaling Factors Layout", triton_kernels layout_details, flashinfer fp4_quantization.py and
fused_moe/core.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels.layout import Layout

T = torch.Tensor
Formula = Callable[[T, T, int, int, int], T]


@dataclass(frozen=True)
class Truth:
    """align: multiples of (n, k) that the storage is padded to. twiddled: words packed for bf16."""

    align: tuple[int, int]
    offset: Formula
    twiddled: bool = False


def tile_128x4(m: T, k: T, K: int) -> T:
    """cuBLAS: tiles of 128 x 4 in 512 bytes; 16 bytes from row to row, 4 between rows 32 apart."""
    tile = (m // 128) * (K // 4) + k // 4
    return tile * 512 + (m % 32) * 16 + (m % 128) // 32 * 4 + k % 4


def hopper_scale(warps: int) -> Formula:
    """triton_kernels hopper_scale.py: 32 * warps rows fold into `warps`, 64 columns a k pair."""

    def offset(m: T, k: T, n: int, N: int, K: int) -> T:
        span = 32 * warps
        row = m // span * warps + m % (16 * warps) // 16
        col = k // 2 * 64 + m % span // (16 * warps) * 32 + m % 8 * 4 + k % 2 * 2 + m // 8 % 2
        return row * (32 * K) + col

    return offset


def hopper_value(width: int) -> Formula:
    """triton_kernels hopper_value.py: 16 x 32 bytes of four mma tiles, a thread's bytes together.

    width: neighbouring bytes of k that one thread holds, 4 for mma v2 and 1 for v3.
    """

    def offset(m: T, k: T, n: int, N: int, K: int) -> T:
        sub = k % 32 // (8 * width)  # which of the thread's sub-tiles; none beside width 4
        warp_k, thread_k, byte = k // (4 * width) % 2, k // width % 4, k % width
        row = m // 16 * 4 + m % 8 // 2
        word = k // 32 * 32 + m % 2 * 16 + thread_k * 4
        inside = ((sub * 2 + warp_k) * 2 + m % 16 // 8) * width + byte
        return row * (4 * K) + word * 4 + inside

    return offset


def _shuffled(row: T, block: int) -> T:
    """flashinfer get_shuffle_block_size: row a*b+i of a block of 8b goes to i*8+a."""
    b = block // 8
    return row // block * block + row % b * 8 + row % block // b


def _halves(m: T, n: int) -> tuple[T, T]:
    """(0 for gate and 1 for up, row inside its half)."""
    return m // (n // 2), m % (n // 2)


def _grouped(half: T, row: T, group: int) -> T:
    """Groups of rows of the two halves alternate."""
    return row // group * 2 * group + half * group + row % group


def _rows(to_row: Callable[[T, int, int], T]) -> Formula:
    """A formula that only moves rows."""
    return lambda m, k, n, N, K: to_row(m, n, N) * K + k


def _rows_128x4(to_row: Callable[[T, int, int], T]) -> Formula:
    """Rows moved, then the 128x4 tile."""
    return lambda m, k, n, N, K: tile_128x4(to_row(m, n, N), k, K)


def _same(m: T, n: int, N: int) -> T:
    return m


def _up_first(m: T, n: int, N: int) -> T:
    half, row = _halves(m, n)
    return (1 - half) * (N // 2) + row


def _pairs_to_up_first(m: T, n: int, N: int) -> T:
    return (1 - m % 2) * (N // 2) + m // 2


def _interleaved(group: int) -> Callable[[T, int, int], T]:
    return lambda m, n, N: _grouped(*_halves(m, n), group)


def _shuffle(block: int) -> Callable[[T, int, int], T]:
    return lambda m, n, N: _shuffled(m, block)


def _trtllm_w13(m: T, n: int, N: int) -> T:
    return _shuffled(_grouped(*_halves(m, n), 1), 32)


def _cutedsl_w13(m: T, n: int, N: int) -> T:
    half, row = _halves(m, n)
    return _grouped(1 - half, row, 64)


def _cutedsl_w13_interleaved(m: T, n: int, N: int) -> T:
    return _grouped(1 - m % 2, m // 2, 64)


_GFX1250: Formula = lambda m, k, n, N, K: (
    m // 128 * (128 * K) + k // 4 * 512 + m % 32 * 16 + m % 128 // 32 * 4 + k % 4
)
_CDNA4: Formula = lambda m, k, n, N, K: (
    m // 32 * (32 * K) + k // 8 * 256 + k % 4 * 64 + m % 16 * 4 + k // 4 % 2 * 2 + m // 16 % 2
)

TRUTHS: dict[str, Truth] = {
    "strided": Truth((1, 1), _rows(_same)),
    "w13_to_w31": Truth((2, 1), _rows(_up_first)),
    "w13_interleaved_to_w31": Truth((2, 1), _rows(_pairs_to_up_first)),
    "gate_up_interleave_1": Truth((2, 1), _rows(_interleaved(1))),
    "gate_up_interleave_8": Truth((16, 1), _rows(_interleaved(8))),
    "gate_up_interleave_16": Truth((32, 1), _rows(_interleaved(16))),
    "gate_up_interleave_64": Truth((128, 1), _rows(_interleaved(64))),
    "trtllm_shuffle_16": Truth((16, 1), _rows(_shuffle(16))),
    "trtllm_shuffle_32": Truth((32, 1), _rows(_shuffle(32))),
    "block_scale_128x4": Truth((128, 4), _rows_128x4(_same)),
    "cutedsl_mma_view": Truth((128, 4), _rows_128x4(_same)),
    "blackwell_scale": Truth((128, 8), _rows_128x4(_same)),
    "hopper_scale_w4": Truth((128, 4), hopper_scale(4)),
    "hopper_scale_w8": Truth((256, 4), hopper_scale(8)),
    "hopper_scale_w4_tk38": Truth((128, 2), hopper_scale(4)),
    "hopper_scale_w8_tk38": Truth((256, 2), hopper_scale(8)),
    "cdna4_scale": Truth((32, 8), _CDNA4),
    "gfx1250_scale": Truth((128, 4), _GFX1250),
    "hopper_value_v2": Truth((16, 32), hopper_value(4), twiddled=True),
    "hopper_value_v3": Truth((16, 32), hopper_value(1), twiddled=True),
    "hopper_value_v2_tk38": Truth((64, 64), hopper_value(4), twiddled=True),
    "hopper_value_v3_tk38": Truth((64, 64), hopper_value(1), twiddled=True),
    "blackwell_value": Truth((1, 128), _rows(_same)),
    "trtllm_w13": Truth((128, 1), _rows(_trtllm_w13)),
    "trtllm_w13_scale": Truth((128, 4), _rows_128x4(_trtllm_w13)),
    "trtllm_w2_scale": Truth((128, 4), _rows_128x4(_shuffle(32))),
    "cutedsl_w13": Truth((128, 1), _rows(_cutedsl_w13)),
    "cutedsl_w13_scale": Truth((128, 4), _rows_128x4(_cutedsl_w13)),
    "cutedsl_w13_interleaved": Truth((128, 1), _rows(_cutedsl_w13_interleaved)),
    "cutedsl_w13_interleaved_scale": Truth((128, 4), _rows_128x4(_cutedsl_w13_interleaved)),
}


def padded(truth: Truth, n: int, k: int) -> tuple[int, int]:
    """(N, K) that the vendor stores for an n x k matrix."""
    N, K = (-(-size // step) * step for size, step in zip((n, k), truth.align, strict=True))
    return N, K


def untwiddled(words: T, byte: T) -> T:
    """The plain byte (0 to 3) of 32-bit words packed for bf16, as int64; triton_kernels
    `_pack_bits`.

    In each 16-bit half, nibble i < 3 has its sign at bit 15 - 3i and the rest at 8 - 3i downwards;
    the fourth has sign 14, exponent 11 and 10, mantissa 13. The low half holds the low nibble.
    """
    words = words.to(torch.int64) & 0xFFFFFFFF
    out = torch.zeros_like(words)
    for shift in (0, 16):
        half = words >> shift & 0xFFFF
        three = torch.clamp(byte, max=2) * 3
        code = (half >> (15 - three) & 1) << 3 | half >> (6 - three) & 7
        fourth = (half >> 14 & 1) << 3 | (half >> 10 & 3) << 1 | half >> 13 & 1
        out |= torch.where(byte < 3, code, fourth) << (shift // 4)
    return out


def bytes_at(truth: Truth, storage: T, m: T, k: T, n: int, width: int) -> T:
    """What storage [E, elements] holds for (m, k) of each n x width matrix: [E, len(m)]."""
    N, K = padded(truth, n, width)
    offset = truth.offset(m, k, n, N, K)
    if not truth.twiddled:
        return storage[:, offset]
    words = storage.contiguous().view(torch.int32)[:, offset // 4]
    return untwiddled(words, (offset % 4).expand_as(words)).to(torch.uint8)


def find(layout: Layout) -> Truth | None:
    """The vendor's formula for a layout, or None for one that no vendor has."""
    return TRUTHS.get(layout.name)
