"""NVFP4 along long contiguous rows, bf16 or fp16: a thread holds whole blocks of 16 elements.

On NVIDIA targets from sm_90. A block's scale is then worked out once, and no thread waits for
another; quantize_kernel, which takes any shape, spends it twice.
"""

import triton
import triton.language as tl

from kernels.fused.quantize_kernels import INFINITY, e4m3_fast
from kernels.fused.quantize_pairs import fp32_bits, larger_magnitude, nvfp4_word_of_pairs


@triton.jit
def _four(x, B: tl.constexpr):
    """[B, 4] words -> four [B]."""
    even, odd = tl.split(tl.reshape(x, [B, 2, 2]))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def _largest(w0, w1, w2, w3, HALF: tl.constexpr):
    one, other = larger_magnitude(w0, w1, HALF), larger_magnitude(w2, w3, HALF)
    return larger_magnitude(one, other, HALF)


# A global scale for all, or one a matrix: one compilation.
@triton.jit(do_not_specialize=["g_row", "g_mid", "g_out"])
def quantize_blocks_kernel(
    x_ptr, q_ptr, s_ptr, g_ptr,
    blocks, rows, middle, tiles,
    x_row, x_mid, x_out,
    q_row, q_mid, q_out,
    s_row, s_mid, s_out,
    g_row, g_mid, g_out,
    B: tl.constexpr, TIMES: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """TIMES * B blocks of one row. x and q and their strides count 4-byte words, s bytes."""
    pid = tl.program_id(0)
    tile = (pid % tiles).to(tl.int64)
    pid = pid // tiles
    row, outer = (pid % rows).to(tl.int64), pid // rows
    mid, out = (outer % middle).to(tl.int64), (outer // middle).to(tl.int64)
    factor = tl.load(g_ptr + out * g_out + mid * g_mid + row * g_row)
    x_ptr += out * x_out + mid * x_mid + row * x_row + tile * (TIMES * B * 8)
    q_ptr += out * q_out + mid * q_mid + row * q_row + tile * (TIMES * B * 2)
    s_ptr += out * s_out + mid * s_mid + row * s_row + tile * (TIMES * B)
    left = tl.minimum(blocks - tile * (TIMES * B), TIMES * B).to(tl.int32)
    for i in tl.static_range(TIMES):
        block = i * B + tl.arange(0, B)
        inside = block < left
        at = x_ptr + block[:, None] * 8 + tl.arange(0, 4)[None, :]
        w0, w1, w2, w3 = _four(tl.load(at, mask=inside[:, None], other=0), B)
        w4, w5, w6, w7 = _four(tl.load(at + 4, mask=inside[:, None], other=0), B)
        front, back = _largest(w0, w1, w2, w3, HALF), _largest(w4, w5, w6, w7, HALF)
        pair = larger_magnitude(front, back, HALF)
        largest = fp32_bits(tl.maximum(pair & 0x7FFF, (pair >> 16) & 0x7FFF), HALF)
        byte, high, low = e4m3_fast(largest, factor)
        front = nvfp4_word_of_pairs(w0, w1, w2, w3, factor, high, low, HALF)
        back = nvfp4_word_of_pairs(w4, w5, w6, w7, factor, high, low, HALF)
        keep = tl.where(largest >= INFINITY, 0, -1).to(tl.uint32, bitcast=True)
        words = tl.join(front & keep, back & keep).to(tl.int32, bitcast=True)
        to = q_ptr + block[:, None] * 2 + tl.arange(0, 2)[None, :]
        tl.store(to, words, mask=inside[:, None])
        tl.store(s_ptr + block, byte.to(tl.uint8), mask=inside)
