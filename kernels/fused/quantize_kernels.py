"""Triton kernels of the quantizers: one read of the source, one write of codes and scales.

A program takes a tile of BLOCK_R rows and BLOCK_K elements along the quantized axis. Eight elements
that follow each other sit in one thread and leave as one 32-bit word of codes. Rows come as up to
three axes with strides of their own, so that no axis and no stride needs a copy.

Rounding to e2m1 without a branch, in fp32. For y >= 0 the code number is g(y) = min(2y, y + 2,
y / 2 + 4) rounded to the nearest even integer: the three lines are the three spacings .5, 1, 2, and
codes and mantissa bits share their parity. Adding 2**23 rounds to integers, each line is one fused
step that rounds once (2y and y / 2 are exact), and rounding is monotone, so the minimum of the
rounded lines is the rounded minimum. The code is then in the low bits. With the sign that is four
multiply-adds an element on the wide fp32 pipe; integer emulation takes about 25 operations on the
integer pipe, which has half as many lanes on sm_90 (64 against 128 a cycle).
"""

import triton
import triton.language as tl

from kernels.fused.quantize_pairs import (
    e4m3_of,
    four_words,
    fp32_bits,
    inverse_in_two,
    largest_of_pairs,
    nvfp4_word_of_pairs,
    sixth,
    word_of_pairs,
)

# Fp32 numbers from 2**23 on are integers. 4 more, so that taking or adding 4 for the sign leaves
# 2**23 + sign * 8 + code. The bits of 2**23 in a word of eight codes add up to 0xFB000000: those of
# the first two nibbles only, as the others' are shifted out.
_MAGIC: tl.constexpr = tl.constexpr(8388612.0)
_MAGIC_IN_WORD: tl.constexpr = tl.constexpr(0xFB000000)
INFINITY: tl.constexpr = tl.constexpr(0x7F800000)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _eight(x, R: tl.constexpr, K: tl.constexpr):
    """[R, K] -> eight fp32 [R, K // 8], elements 0 to 7 of every group."""
    even, odd = tl.split(tl.reshape(x, [R, K // 8, 2, 2, 2]))
    even0, even1 = tl.split(even)
    odd0, odd1 = tl.split(odd)
    x0, x4 = tl.split(even0)
    x2, x6 = tl.split(even1)
    x1, x5 = tl.split(odd0)
    x3, x7 = tl.split(odd1)
    return (
        _fp32(x0), _fp32(x1), _fp32(x2), _fp32(x3), _fp32(x4), _fp32(x5), _fp32(x6), _fp32(x7)
    )  # fmt: skip


@triton.jit
def _fp32(x):
    """Widen; bf16 by its bits, as the interpreter of triton 3.9 loses subnormals in the cast."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def _largest(x0, x1, x2, x3, x4, x5, x6, x7, DROP_NAN: tl.constexpr):
    """The largest magnitude of eight as fp32 bits, NaN above Inf. DROP_NAN: -1 if all are NaN."""
    if DROP_NAN:
        m = _bits_or_none(x0)
        m = tl.maximum(m, _bits_or_none(x1))
        m = tl.maximum(m, _bits_or_none(x2))
        m = tl.maximum(m, _bits_or_none(x3))
        m = tl.maximum(m, _bits_or_none(x4))
        m = tl.maximum(m, _bits_or_none(x5))
        m = tl.maximum(m, _bits_or_none(x6))
        return tl.maximum(m, _bits_or_none(x7))
    a = _larger(_larger(tl.abs(x0), tl.abs(x1)), _larger(tl.abs(x2), tl.abs(x3)))
    b = _larger(_larger(tl.abs(x4), tl.abs(x5)), _larger(tl.abs(x6), tl.abs(x7)))
    return tl.abs(_larger(a, b)).to(tl.int32, bitcast=True)


@triton.jit
def _bits_or_none(x):
    bits = tl.abs(x).to(tl.int32, bitcast=True)
    return tl.where(bits > 0x7F800000, -1, bits)


@triton.jit
def _quotient(u, divisor, inverse):
    """u / divisor rounded once, from the rounded inverse (Markstein's correction)."""
    first = u * inverse
    return tl.fma(tl.fma(-divisor, first, u), inverse, first)


@triton.jit
def _append(
    word, x, factor, divisor, inverse, double, half, EXACT: tl.constexpr, SAT: tl.constexpr
):
    """Shift one more code into the low nibble of a word; x is fp32, the scale 1 / inverse."""
    one = (x.to(tl.uint32, bitcast=True) & 0x80000000) | 0x3F800000
    sign = one.to(tl.float32, bitcast=True)
    y = x * sign  # the magnitude, on the pipe that has room
    if EXACT:
        y = _quotient(y * factor, divisor, inverse)
        code = tl.minimum(y * 2.0 + _MAGIC, y + (_MAGIC + 2.0))
        code = tl.minimum(code, y * 0.5 + (_MAGIC + 4.0))
    else:
        code = tl.minimum(y * double + _MAGIC, y * inverse + (_MAGIC + 2.0))
        code = tl.minimum(code, y * half + (_MAGIC + 4.0))
    if SAT:
        code = tl.minimum(code, _MAGIC + 7.0)
    code = code - sign * 4.0
    return (word << 4) + code.to(tl.uint32, bitcast=True)


@triton.jit
def _word(
    x0, x1, x2, x3, x4, x5, x6, x7, factor, divisor, inverse, EXACT: tl.constexpr, SAT: tl.constexpr
):
    """Eight elements and their block's scale -> a word of codes, element 0 in the low nibble."""
    double, half = inverse * 2.0, inverse * 0.5
    word = tl.zeros_like(x0).to(tl.uint32)
    word = _append(word, x7, factor, divisor, inverse, double, half, EXACT, SAT)
    word = _append(word, x6, factor, divisor, inverse, double, half, EXACT, SAT)
    word = _append(word, x5, factor, divisor, inverse, double, half, EXACT, SAT)
    word = _append(word, x4, factor, divisor, inverse, double, half, EXACT, SAT)
    word = _append(word, x3, factor, divisor, inverse, double, half, EXACT, SAT)
    word = _append(word, x2, factor, divisor, inverse, double, half, EXACT, SAT)
    word = _append(word, x1, factor, divisor, inverse, double, half, EXACT, SAT)
    word = _append(word, x0, factor, divisor, inverse, double, half, EXACT, SAT)
    return word - _MAGIC_IN_WORD


@triton.jit
def e8m0(largest, BIAS: tl.constexpr, DROP_NAN: tl.constexpr):
    """Bits of a block's largest magnitude -> (e8m0 byte, fp32 inverse scale); see the reference.

    The inverse of byte 0 is 0 (upstream's), of 254 the subnormal 2**-127, of 255 of no account.
    """
    byte = tl.maximum(((largest + BIAS) >> 23) - 2, 0)
    if BIAS == 0x200000:  # mode `even`, where upstream clamps an overflow to 254
        byte = tl.where(byte == 253, 254, byte)
    if DROP_NAN:
        byte = tl.where((largest < 0) | (largest == INFINITY), 254, byte)
    else:
        byte = tl.where(largest >= INFINITY, 255, byte)
    inverse = tl.maximum((254 - byte) << 23, 0x00400000)
    return byte, tl.where(byte == 0, 0, inverse).to(tl.float32, bitcast=True)


@triton.jit
def e4m3_encode(value):
    """fp32 in [0, 448] -> e4m3 byte as int32, nearest even."""
    bits = value.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960  # exponent bias 127 to 7, times 8
    small = (value + 16384.0).to(tl.int32, bitcast=True) - 0x46800000  # 2**14: steps are 2**-9
    return tl.where(value < 0.015625, small, normal)


@triton.jit
def e4m3_decode(byte):
    """Positive e4m3 byte (int32, not NaN) -> fp32."""
    normal = ((byte + 960) << 20).to(tl.float32, bitcast=True)
    return tl.where(byte < 8, byte.to(tl.float32) * 0.001953125, normal)


@triton.jit
def _e4m3(largest, factor):
    """Bits of a block's largest magnitude -> (e4m3 byte, fp32 scale, rounded inverse; 0 for 0)."""
    wanted = tl.div_rn(largest.to(tl.float32, bitcast=True) * factor, 6.0)
    byte = e4m3_encode(tl.minimum(wanted, 448.0))
    scale = e4m3_decode(byte)
    inverse = tl.where(byte == 0, 0.0, tl.div_rn(1.0, tl.where(byte == 0, 1.0, scale)))
    return tl.where(largest >= INFINITY, 0x7F, byte), scale, inverse


@triton.jit
def e4m3_fast(largest, factor):
    """_e4m3 with inverses in two parts, for the pairs: (byte, and 1 / scale in two)."""
    wanted = sixth(largest.to(tl.float32, bitcast=True) * factor)
    byte, scale = e4m3_of(tl.minimum(wanted, 448.0))
    high, low = inverse_in_two(scale)
    return tl.where(largest >= INFINITY, 0x7F, byte), high, low


@triton.jit
def _spread(x, R: tl.constexpr, BLOCKS: tl.constexpr, TIMES: tl.constexpr):
    """[R, BLOCKS] -> [R, BLOCKS * TIMES], each value for the TIMES groups of its block."""
    return tl.reshape(
        tl.broadcast_to(tl.expand_dims(x, 2), [R, BLOCKS, TIMES]), [R, BLOCKS * TIMES]
    )


@triton.jit
def quantize_kernel(
    x_ptr, q_ptr, s_ptr, g_ptr,
    length, rows, middle, k_tiles, row_tiles,
    x_k, x_row, x_mid, x_out,
    q_k, q_row, q_mid, q_out,
    s_k, s_row, s_mid, s_out,
    g_row, g_mid, g_out,
    BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK: tl.constexpr,
    BIAS: tl.constexpr, SATURATE: tl.constexpr, DROP_NAN: tl.constexpr, WORDS: tl.constexpr,
    PAIRS: tl.constexpr,
):  # fmt: skip
    """One tile. Axes are (out, mid, row, k); strides in elements. BLOCK 32 is MXFP4, 16 NVFP4.

    g is NVFP4's inverse global scale. WORDS: codes go out as words (q_ptr and its strides count
    4-byte words; length a multiple of 8), else as bytes. PAIRS: x_ptr and its strides count pairs
    of bf16 (1) or fp16 (2), which follow each other along k.
    """
    BLOCKS: tl.constexpr = BLOCK_K // BLOCK
    TIMES: tl.constexpr = BLOCK // 8
    pid = tl.program_id(0)
    k_tile = (pid % k_tiles).to(tl.int64)
    pid = pid // k_tiles
    r = (pid % row_tiles).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
    outer = pid // row_tiles
    mid, out = (outer % middle).to(tl.int64), (outer // middle).to(tl.int64)
    inside = r < rows
    left = tl.minimum(length - k_tile * BLOCK_K, BLOCK_K).to(tl.int32)
    PER_LOAD: tl.constexpr = 2 if PAIRS else 1
    HALF: tl.constexpr = PAIRS == 2
    x_ptr += out * x_out + mid * x_mid + k_tile * (BLOCK_K // PER_LOAD) * x_k
    s_ptr += out * s_out + mid * s_mid + k_tile * BLOCKS * s_k
    q_ptr += out * q_out + mid * q_mid

    k = tl.arange(0, BLOCK_K // PER_LOAD)[None, :]
    fill: tl.constexpr = float("nan") if DROP_NAN else 0
    x = tl.load(
        x_ptr + r * x_row + k.to(tl.int64) * x_k, mask=inside & (k < left // PER_LOAD), other=fill
    )
    if PAIRS:
        w0, w1, w2, w3 = four_words(x, BLOCK_R, BLOCK_K)
        largest = largest_of_pairs(
            w0 & 0x7FFF7FFF, w1 & 0x7FFF7FFF, w2 & 0x7FFF7FFF, w3 & 0x7FFF7FFF, HALF
        )
        largest = tl.max(tl.reshape(largest, [BLOCK_R, BLOCKS, TIMES]), axis=2)
        largest = fp32_bits(largest, HALF)
    else:
        x0, x1, x2, x3, x4, x5, x6, x7 = _eight(x, BLOCK_R, BLOCK_K)
        largest = _largest(x0, x1, x2, x3, x4, x5, x6, x7, DROP_NAN)
        largest = tl.max(tl.reshape(largest, [BLOCK_R, BLOCKS, TIMES]), axis=2)
    if BLOCK == 32:
        byte, scale = e8m0(largest, BIAS, DROP_NAN)
        inverse = _spread(scale, BLOCK_R, BLOCKS, TIMES)
        if PAIRS:
            spread = _spread(byte, BLOCK_R, BLOCKS, TIMES)
            word = word_of_pairs(w0, w1, w2, w3, spread, inverse, HALF, SATURATE)
        else:
            word = _word(
                x0, x1, x2, x3, x4, x5, x6, x7, inverse, inverse, inverse, False, SATURATE
            )  # fmt: skip
    else:
        factor = tl.load(g_ptr + out * g_out + mid * g_mid + r * g_row, mask=inside, other=0.0)
        if PAIRS:
            byte, high, low = e4m3_fast(largest, factor)
            high = _spread(high, BLOCK_R, BLOCKS, TIMES)
            low = _spread(low, BLOCK_R, BLOCKS, TIMES)
            word = nvfp4_word_of_pairs(w0, w1, w2, w3, factor, high, low, HALF)
        else:
            byte, scale, inverse = _e4m3(largest, factor)
            scale = _spread(scale, BLOCK_R, BLOCKS, TIMES)
            inverse = _spread(inverse, BLOCK_R, BLOCKS, TIMES)
            word = _word(x0, x1, x2, x3, x4, x5, x6, x7, factor, scale, inverse, True, SATURATE)
    if not DROP_NAN:
        word = tl.where(_spread(largest, BLOCK_R, BLOCKS, TIMES) >= INFINITY, 0, word)

    b = tl.arange(0, BLOCKS)[None, :]
    tl.store(
        s_ptr + r * s_row + b.to(tl.int64) * s_k,
        byte.to(tl.uint8),
        mask=inside & (b * BLOCK < left),
    )
    if WORDS:
        q_ptr += k_tile * (BLOCK_K // 8)
        w = tl.arange(0, BLOCK_K // 8)[None, :]
        tl.store(
            q_ptr + r * q_row + w, word.to(tl.int32, bitcast=True), mask=inside & (w < left // 8)
        )
    else:
        q_ptr += k_tile * (BLOCK_K // 2) * q_k
        low, high = word.to(tl.uint16), (word >> 16).to(tl.uint16)
        b0, b1 = low.to(tl.uint8), (low >> 8).to(tl.uint8)
        b2, b3 = high.to(tl.uint8), (high >> 8).to(tl.uint8)
        packed = tl.reshape(tl.join(tl.join(b0, b2), tl.join(b1, b3)), [BLOCK_R, BLOCK_K // 2])
        c = tl.arange(0, BLOCK_K // 2)[None, :]
        tl.store(q_ptr + r * q_row + c.to(tl.int64) * q_k, packed, mask=inside & (c < left // 2))


@triton.jit
def largest_finite_kernel(
    x_ptr, out_ptr, numel, x_matrix, x_row, x_k, columns,
    BLOCK: tl.constexpr, TIMES: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """The largest finite |x| of the matrix of program axis 1, as fp32 bits, by atomic maximum.

    DENSE: a matrix's elements follow each other, so that no element's row need be divided out.
    """
    matrix = tl.program_id(1).to(tl.int64)
    start = tl.program_id(0).to(tl.int64) * (BLOCK * TIMES)
    x_ptr += matrix * x_matrix
    i = tl.arange(0, BLOCK)
    largest = tl.zeros([BLOCK], tl.int32)
    for step in tl.static_range(TIMES):
        first = start + step * BLOCK
        if DENSE:
            at = x_ptr + first + i
        else:
            at = x_ptr + ((first + i) // columns) * x_row + ((first + i) % columns) * x_k
        bits = tl.abs(_fp32(tl.load(at, mask=i < numel - first, other=0.0)))
        bits = bits.to(tl.int32, bitcast=True)
        largest = tl.maximum(largest, tl.where(bits >= INFINITY, 0, bits))
    tl.atomic_max(out_ptr + matrix, tl.max(largest, axis=0))
