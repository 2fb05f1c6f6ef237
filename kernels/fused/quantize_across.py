"""MXFP4 along an axis that is not contiguous: two neighbouring rows in a word.

bf16 or fp16 on NVIDIA targets from sm_90, where rows follow each other in memory. A thread holds
the 32 elements of a block for two rows, so that the maximum needs no exchange between threads. Only
what leaves, a quarter of what came, is turned on chip: a program takes several blocks of its rows,
so that the 16 bytes of each make whole sectors of 32.
"""

import triton
import triton.language as tl

from kernels.fused.quantize_kernels import INFINITY, e8m0
from kernels.fused.quantize_pairs import (
    code_pair,
    fp32_bits,
    gather,
    larger_pair,
    lower,
    nibbles,
    signed,
    slopes,
    twice_and_half,
    upper,
)


@triton.jit
def _load(x_ptr, x_k, inside, FIRST: tl.constexpr):
    """Eight k of a block, [W] words of two rows each."""
    return (
        tl.load(x_ptr + (FIRST + 0) * x_k, mask=inside, other=0),
        tl.load(x_ptr + (FIRST + 1) * x_k, mask=inside, other=0),
        tl.load(x_ptr + (FIRST + 2) * x_k, mask=inside, other=0),
        tl.load(x_ptr + (FIRST + 3) * x_k, mask=inside, other=0),
        tl.load(x_ptr + (FIRST + 4) * x_k, mask=inside, other=0),
        tl.load(x_ptr + (FIRST + 5) * x_k, mask=inside, other=0),
        tl.load(x_ptr + (FIRST + 6) * x_k, mask=inside, other=0),
        tl.load(x_ptr + (FIRST + 7) * x_k, mask=inside, other=0),
    )


@triton.jit
def _largest(w, HALF: tl.constexpr):
    a = larger_pair(w[0] & 0x7FFF7FFF, w[1] & 0x7FFF7FFF, HALF)
    b = larger_pair(w[2] & 0x7FFF7FFF, w[3] & 0x7FFF7FFF, HALF)
    c = larger_pair(w[4] & 0x7FFF7FFF, w[5] & 0x7FFF7FFF, HALF)
    d = larger_pair(w[6] & 0x7FFF7FFF, w[7] & 0x7FFF7FFF, HALF)
    return larger_pair(larger_pair(a, b, HALF), larger_pair(c, d, HALF), HALF)


@triton.jit
def _four(w0, w1, w2, w3, first, double, one, half, HALF: tl.constexpr, SATURATE: tl.constexpr):
    """Four k of two rows -> 16 bits of codes for each row."""
    c0 = code_pair(w0 & 0x7FFF7FFF, first, double, one, half, HALF, SATURATE)
    c1 = code_pair(w1 & 0x7FFF7FFF, first, double, one, half, HALF, SATURATE)
    c2 = code_pair(w2 & 0x7FFF7FFF, first, double, one, half, HALF, SATURATE)
    c3 = code_pair(w3 & 0x7FFF7FFF, first, double, one, half, HALF, SATURATE)
    return nibbles(signed(gather(c0, c2), w0, w2), signed(gather(c1, c3), w1, w3))


@triton.jit
def _words(w, first, double, one, half, HALF: tl.constexpr, SATURATE: tl.constexpr):
    """Eight k of two rows -> a word of codes for each row."""
    a = _four(w[0], w[1], w[2], w[3], first, double, one, half, HALF, SATURATE)
    b = _four(w[4], w[5], w[6], w[7], first, double, one, half, HALF, SATURATE)
    return lower(a, b), upper(a, b)


@triton.jit
def quantize_across_kernel(
    x_ptr, q_ptr, s_ptr,
    words, middle, blocks, block_tiles, word_tiles,
    x_k, x_mid, x_out,
    q_row, q_mid, q_out,
    s_k, s_row, s_mid, s_out,
    W: tl.constexpr, K: tl.constexpr, BIAS: tl.constexpr, SATURATE: tl.constexpr,
    HALF: tl.constexpr,
):  # fmt: skip
    """K blocks of 32 k of 2 * W rows. x and q and their strides count 4-byte words, s bytes."""
    pid = tl.program_id(0)
    first_block = (pid % block_tiles).to(tl.int64) * K  # k first: neighbours then meet in L2
    pid = pid // block_tiles
    first_word = (pid % word_tiles).to(tl.int64) * W
    outer = pid // word_tiles
    mid, out = (outer % middle).to(tl.int64), (outer // middle).to(tl.int64)
    block, word = tl.arange(0, K), tl.arange(0, W)
    block_in, word_in = block < blocks - first_block, word < words - first_word
    inside = block_in[:, None] & word_in[None, :]
    x_k = tl.full((), 0, tl.int64) + x_k  # a stride of 1 is a constant, without .to
    x_ptr += out * x_out + mid * x_mid + first_block * 32 * x_k + first_word
    at = x_ptr + (block * 32)[:, None] * x_k + word[None, :]
    a = _load(at, x_k, inside, 0)
    b = _load(at, x_k, inside, 8)
    c = _load(at, x_k, inside, 16)
    d = _load(at, x_k, inside, 24)
    pair = larger_pair(
        larger_pair(_largest(a, HALF), _largest(b, HALF), HALF),
        larger_pair(_largest(c, HALF), _largest(d, HALF), HALF),
        HALF,
    )
    even, odd = fp32_bits(pair & 0xFFFF, HALF), fp32_bits((pair >> 16) & 0xFFFF, HALF)
    even_byte, even_inverse = e8m0(even, BIAS, False)
    odd_byte, odd_inverse = e8m0(odd, BIAS, False)
    even_first, even_one = slopes(even_byte, even_inverse, HALF)
    odd_first, odd_one = slopes(odd_byte, odd_inverse, HALF)
    first, one = lower(even_first, odd_first), lower(even_one, odd_one)
    double, half = twice_and_half(one, HALF)
    a0, a1 = _words(a, first, double, one, half, HALF, SATURATE)
    b0, b1 = _words(b, first, double, one, half, HALF, SATURATE)
    c0, c1 = _words(c, first, double, one, half, HALF, SATURATE)
    d0, d1 = _words(d, first, double, one, half, HALF, SATURATE)
    keep, too = tl.where(even >= INFINITY, 0, -1), tl.where(odd >= INFINITY, 0, -1)
    q0 = tl.join(tl.join(a0 & keep, c0 & keep), tl.join(b0 & keep, d0 & keep))
    q1 = tl.join(tl.join(a1 & too, c1 & too), tl.join(b1 & too, d1 & too))
    q = tl.permute(tl.reshape(tl.join(q0, q1), [K, W, 4, 2]), (1, 3, 0, 2))  # row, then k
    s = tl.permute(tl.join(even_byte.to(tl.uint8), odd_byte.to(tl.uint8)), (1, 2, 0))
    row, unit = tl.arange(0, 2 * W), tl.arange(0, 4 * K)
    row_in, unit_in = row < 2 * (words - first_word), unit < 4 * (blocks - first_block)
    row = 2 * first_word + row
    q_at = (
        q_ptr + out * q_out + mid * q_mid + first_block * 4 + row[:, None] * q_row + unit[None, :]
    )
    tl.store(q_at, tl.reshape(q, [2 * W, 4 * K]), mask=row_in[:, None] & unit_in[None, :])
    s_ptr += out * s_out + mid * s_mid + first_block * s_k
    s_at = s_ptr + row[:, None] * s_row + block[None, :].to(tl.int64) * s_k
    tl.store(s_at, tl.reshape(s, [2 * W, K]), mask=row_in[:, None] & block_in[None, :])
