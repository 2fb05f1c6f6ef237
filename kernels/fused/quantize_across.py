"""MXFP4 along an axis that is not contiguous: two neighbouring rows in a word, no turn on chip.

bf16 or fp16 on NVIDIA targets from sm_90, where rows follow each other in memory. A thread holds
the 32 elements of a block for two rows, so that the maximum needs no exchange between threads, and
what leaves, 16 bytes a row and block, is four times smaller than what would be turned.
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
def _store_row(ptr, q0, q1, q2, q3, inside, W: tl.constexpr):
    q = tl.reshape(tl.join(tl.join(q0, q2), tl.join(q1, q3)), [W, 4])
    tl.store(ptr[:, None] + tl.arange(0, 4)[None, :], q, mask=inside[:, None])


@triton.jit
def quantize_across_kernel(
    x_ptr, q_ptr, s_ptr,
    words, middle, blocks, word_tiles,
    x_k, x_mid, x_out,
    q_row, q_mid, q_out,
    s_k, s_row, s_mid, s_out,
    W: tl.constexpr, BIAS: tl.constexpr, SATURATE: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """One block of 32 k of 2 * W rows. x and q and their strides count 4-byte words, s bytes."""
    pid = tl.program_id(0)
    block = (pid % blocks).to(tl.int64)  # first, so that the 16 bytes of two blocks meet in L2
    pid = pid // blocks
    word = (pid % word_tiles).to(tl.int64) * W + tl.arange(0, W)
    outer = pid // word_tiles
    mid, out = (outer % middle).to(tl.int64), (outer // middle).to(tl.int64)
    inside = word < words
    x_ptr += out * x_out + mid * x_mid + block * 32 * x_k + word
    x_k = x_k.to(tl.int64)
    a = _load(x_ptr, x_k, inside, 0)
    b = _load(x_ptr, x_k, inside, 8)
    c = _load(x_ptr, x_k, inside, 16)
    d = _load(x_ptr, x_k, inside, 24)
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
    q_ptr += out * q_out + mid * q_mid + block * 4 + 2 * word * q_row
    _store_row(q_ptr, a0 & keep, b0 & keep, c0 & keep, d0 & keep, inside, W)
    _store_row(q_ptr + q_row, a1 & too, b1 & too, c1 & too, d1 & too, inside, W)
    s_ptr += out * s_out + mid * s_mid + block * s_k + 2 * word * s_row
    tl.store(s_ptr, even_byte.to(tl.uint8), mask=inside)
    tl.store(s_ptr + s_row, odd_byte.to(tl.uint8), mask=inside)
