"""Two 16-bit elements an instruction on NVIDIA targets from sm_90: the fast form of the kernels.

MXFP4. The arithmetic is quantize_kernels' with 2**7 (bf16) or 2**10 (fp16) for 2**23: bf16 numbers
from 128 to 255 are integers, fp16 numbers from 1024 on too, so one fused step rounds a line to a
code, exactly and once, and the code is the low byte of its half word. Scaling by a power of two is
exact (what underflows is far below .25). The inverse scale is part of each line's slope in bf16;
in fp16, whose exponents do not reach 2**26, a first factor of up to 2**13 is multiplied in before.

NVFP4. The maximum, the signs and the packing are as above; quotients need fp32. u / s rounded once
is fma(u, h, u * l) for an h near 1 / s and l = (1 - s * h) * h: h + l has 44 good bits, and u / s
is no nearer than 2**-29 of itself to the middle of two fp32 numbers, because s is an odd number
below 16 times a power of two (u of 24 bits would need 25 for the middle). The same holds for 6.

Bytes are gathered by prmt, whose sign mode spreads the sign bit of a byte over it. Triton does
neither by itself, hence the PTX. Tests hold the arithmetic to the table for every bf16 and fp16
value on the CPU; on a GPU the kernels are held to the reference.
"""

import triton
import triton.language as tl

_MAGIC: tl.constexpr = tl.constexpr(8414208.0)  # 2**23, and the bits of fp16 1024 below
_SIXTH: tl.constexpr = tl.constexpr(0.1666666716337204)  # fp32(1 / 6)
_SIXTH_REST: tl.constexpr = tl.constexpr(-4.967053879312289e-09)  # fp32(1 / 6 - _SIXTH)


@triton.jit
def four_words(x, R: tl.constexpr, K: tl.constexpr):
    """[R, K // 2] int32 pairs -> four [R, K // 8], the pairs (0, 1), (2, 3), (4, 5), (6, 7)."""
    even, odd = tl.split(tl.reshape(x, [R, K // 8, 2, 2]))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def larger_pair(a, b, HALF: tl.constexpr):
    """The larger of two magnitudes in each half, NaN above Inf; HALF: fp16, else bf16."""
    if HALF:
        return tl.inline_asm_elementwise(
            "max.NaN.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
        )
    return tl.inline_asm_elementwise(
        "max.NaN.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def larger_magnitude(a, b, HALF: tl.constexpr):
    """The larger magnitude in each half, NaN above Inf, under a sign bit of no meaning.

    The instruction takes magnitudes itself: one mask at the end in place of one a word.
    """
    if HALF:
        return tl.inline_asm_elementwise(
            "max.NaN.xorsign.abs.f16x2 $0, $1, $2;",
            "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    return tl.inline_asm_elementwise(
        "max.NaN.xorsign.abs.bf16x2 $0, $1, $2;",
        "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def largest_of_pairs(w0, w1, w2, w3, HALF: tl.constexpr):
    """The larger of both halves over four words of magnitudes, as 16 bits."""
    pair = larger_pair(larger_pair(w0, w1, HALF), larger_pair(w2, w3, HALF), HALF)
    return tl.maximum(pair & 0xFFFF, (pair >> 16) & 0xFFFF)


@triton.jit
def fp32_bits(low, HALF: tl.constexpr):
    """Bits of a magnitude in the low half of a word -> bits of the same fp32 number."""
    if HALF:
        half = low.to(tl.int16).to(tl.float16, bitcast=True)
        return half.to(tl.float32).to(tl.int32, bitcast=True)
    return low << 16


@triton.jit
def slopes(byte, inverse, HALF: tl.constexpr):
    """e8m0 byte and its fp32 inverse -> 16-bit patterns (first factor, inverse scale / it)."""
    if HALF:
        power = tl.minimum(127 - byte, 26)  # 26 takes 2**-24 to 4; beyond, a block is all zeros
        first = tl.minimum(tl.maximum(power, 0), 13)
        return (first + 15) << 10, (power - first + 15) << 10
    return tl.full(byte.shape, 0x3F80, tl.int32), (inverse.to(tl.int32, bitcast=True) >> 16)


@triton.jit
def twice_and_half(both, HALF: tl.constexpr):
    """A pair of slopes -> the pairs of twice and of half of them, exact."""
    if HALF:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 c; mov.b32 c, 0x38003800; add.rn.f16x2 $0, $2, $2;"
            " mul.rn.f16x2 $1, $2, c; }",
            "=r,=r,r", [both], dtype=(tl.int32, tl.int32), is_pure=True, pack=1,
        )  # fmt: skip
    return tl.inline_asm_elementwise(
        "{ .reg .b32 c; mov.b32 c, 0x3F003F00; add.rn.bf16x2 $0, $2, $2;"
        " mul.rn.bf16x2 $1, $2, c; }",
        "=r,=r,r", [both], dtype=(tl.int32, tl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def code_pair(word, first, double, one, half, HALF: tl.constexpr, SATURATE: tl.constexpr):
    """Two magnitudes and their lines' slopes -> codes 0 to 7 in bytes 0 and 2, others of no use."""
    if HALF:
        code = tl.inline_asm_elementwise(
            """{
            .reg .b32 y, m0, m1, m2, t0, t1, t2;
            mov.b32 m0, 0x64006400;
            mov.b32 m1, 0x64026402;
            mov.b32 m2, 0x64046404;
            mul.rn.f16x2 y, $1, $2;
            fma.rn.f16x2 t0, y, $3, m0;
            fma.rn.f16x2 t1, y, $4, m1;
            fma.rn.f16x2 t2, y, $5, m2;
            min.f16x2 t0, t0, t1;
            min.f16x2 $0, t0, t2;
            }""",
            "=r,r,r,r,r,r", [word, first, double, one, half], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
        if SATURATE:
            code = tl.inline_asm_elementwise(
                "{ .reg .b32 c; mov.b32 c, 0x64076407; min.f16x2 $0, $1, c; }",
                "=r,r", [code], dtype=tl.int32, is_pure=True, pack=1,
            )  # fmt: skip
    else:
        code = tl.inline_asm_elementwise(
            """{
            .reg .b32 m0, m1, m2, t0, t1, t2;
            mov.b32 m0, 0x43004300;
            mov.b32 m1, 0x43024302;
            mov.b32 m2, 0x43044304;
            fma.rn.bf16x2 t0, $1, $2, m0;
            fma.rn.bf16x2 t1, $1, $3, m1;
            fma.rn.bf16x2 t2, $1, $4, m2;
            min.bf16x2 t0, t0, t1;
            min.bf16x2 $0, t0, t2;
            }""",
            "=r,r,r,r,r", [word, double, one, half], dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
        if SATURATE:
            code = tl.inline_asm_elementwise(
                "{ .reg .b32 c; mov.b32 c, 0x43074307; min.bf16x2 $0, $1, c; }",
                "=r,r", [code], dtype=tl.int32, is_pure=True, pack=1,
            )  # fmt: skip
    return code


@triton.jit
def gather(a, b):
    """Bytes 0 and 2 of a (a0, a2) and b -> (a0, b0, a2, b2)."""
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, 0x6240;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def signed(codes, a, b):
    """Codes 0 to 7 of two words, gathered, with their signs from bit 3 of each byte upwards."""
    spread = tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, 0xFBD9;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )
    return _choose(codes, spread, 0x07070707)


@triton.jit
def nibbles(low, high):
    """Low nibbles of two words of bytes -> one word, `low` in the lower ones."""
    return _choose(low, high << 4, 0x0F0F0F0F)


@triton.jit
def _choose(a, b, MASK: tl.constexpr):
    """Bits of a where MASK has ones, else of b."""
    return tl.inline_asm_elementwise(
        "lop3.b32 $0, $1, $2, $3, 0xE4;",
        "=r,r,r,r",
        [a, b, tl.full(a.shape, MASK, tl.int32)],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def lower(a, b):
    """The lower halves of two words."""
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, 0x5410;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def upper(a, b):
    """The upper halves of two words."""
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, 0x7632;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def word_of_pairs(
    w0, w1, w2, w3, byte, inverse, HALF: tl.constexpr, SATURATE: tl.constexpr
):  # fmt: skip
    """Four pairs, their block's e8m0 byte and inverse -> a word of codes, element 0 lowest."""
    first, one = slopes(byte, inverse, HALF)
    first, one = first | (first << 16), one | (one << 16)
    double, half = twice_and_half(one, HALF)
    c0 = code_pair(w0 & 0x7FFF7FFF, first, double, one, half, HALF, SATURATE)
    c1 = code_pair(w1 & 0x7FFF7FFF, first, double, one, half, HALF, SATURATE)
    c2 = code_pair(w2 & 0x7FFF7FFF, first, double, one, half, HALF, SATURATE)
    c3 = code_pair(w3 & 0x7FFF7FFF, first, double, one, half, HALF, SATURATE)
    front, back = signed(gather(c0, c1), w0, w1), signed(gather(c2, c3), w2, w3)
    return nibbles(lower(front, back), upper(front, back)).to(tl.uint32, bitcast=True)


@triton.jit
def sixth(value):
    """value / 6 rounded once, where the result is a normal number; NaN for Inf."""
    return tl.fma(value, _SIXTH, value * _SIXTH_REST)


@triton.jit
def inverse_in_two(scale):
    """fp32 value of an e4m3 byte -> (h, l), h + l = 1 / (8 scale) to 44 bits; (0, 0) for 0.

    h is taken low, so that l is above 0 and an infinite u gives infinity, not NaN.
    """
    near = tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=r,r", [scale], dtype=tl.float32, is_pure=True, pack=1
    )
    h = (near.to(tl.int32, bitcast=True) - 4).to(tl.float32, bitcast=True)
    h = tl.where(scale == 0.0, 0.0, h)
    eighth = h * 0.125
    return eighth, tl.fma(-scale, h, 1.0) * eighth


@triton.jit
def _line(x, factor, high, low):
    """fp32 x -> a number from 2**23 on, whose low half is the lowest line in fp16, 1024 + code.

    The three lines differ in their low halves alone, so that integers compare them.
    """
    u = tl.inline_asm_elementwise(
        "{ .reg .f32 a; abs.f32 a, $1; mul.rn.f32 $0, a, $2; }",
        "=r,r,r", [x, factor], dtype=tl.float32, is_pure=True, pack=1,
    )  # fmt: skip
    eighth = tl.inline_asm_elementwise(
        "fma.rn.sat.f32 $0, $1, $2, $3;",
        "=r,r,r,r", [u, high, u * low], dtype=tl.float32, is_pure=True, pack=1,
    )  # fmt: skip
    t0 = tl.fma(eighth, 16.0, _MAGIC)
    t1 = tl.fma(eighth, 8.0, _MAGIC + 2.0)
    t2 = tl.fma(eighth, 4.0, _MAGIC + 4.0)
    t0, t1 = t0.to(tl.int32, bitcast=True), t1.to(tl.int32, bitcast=True)
    return tl.minimum(tl.minimum(t0, t1), t2.to(tl.int32, bitcast=True))


@triton.jit
def _nvfp4_pair(word, factor, high, low, HALF: tl.constexpr):
    """Two elements -> codes 0 to 7 in bytes 0 and 2, others of no use."""
    if HALF:  # halves named in PTX: the GPU's conversion takes either half, without mask or shift
        first, second = tl.inline_asm_elementwise(
            "{ .reg .b16 lo, hi; mov.b32 {lo, hi}, $2; cvt.f32.f16 $0, lo; cvt.f32.f16 $1, hi; }",
            "=r,=r,r", [word], dtype=(tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        first = (word << 16).to(tl.float32, bitcast=True)
        second = (word & -65536).to(tl.float32, bitcast=True)
    code = lower(_line(first, factor, high, low), _line(second, factor, high, low))
    return tl.inline_asm_elementwise(
        "{ .reg .b32 seven; mov.b32 seven, 0x64076407; min.f16x2 $0, $1, seven; }",
        "=r,r", [code], dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def nvfp4_word_of_pairs(w0, w1, w2, w3, factor, high, low, HALF: tl.constexpr):
    """Four pairs, 1 / global scale and the block scale's inverse in two -> a word of codes."""
    c0 = _nvfp4_pair(w0, factor, high, low, HALF)
    c1 = _nvfp4_pair(w1, factor, high, low, HALF)
    c2 = _nvfp4_pair(w2, factor, high, low, HALF)
    c3 = _nvfp4_pair(w3, factor, high, low, HALF)
    front, back = signed(gather(c0, c1), w0, w1), signed(gather(c2, c3), w2, w3)
    return nibbles(lower(front, back), upper(front, back)).to(tl.uint32, bitcast=True)


@triton.jit
def e4m3_of(value):
    """fp32 in [0, 448] -> (e4m3 byte as int32, nearest even; its value).

    Adding and taking 2**20 times its power of two leaves four significant bits; from 2**-6 down,
    steps of 2**-9. Times 2**-120 an e4m3 number has its own exponent bits, subnormals included.
    """
    power = tl.maximum(value.to(tl.int32, bitcast=True) & 0x7F800000, 0x3C800000) + (20 << 23)
    magic = power.to(tl.float32, bitcast=True)
    rounded = (value + magic) - magic
    small = rounded * 7.52316384526264e-37  # 2**-120
    return small.to(tl.int32, bitcast=True) >> 20, rounded
