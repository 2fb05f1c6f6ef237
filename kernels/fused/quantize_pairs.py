"""Two bf16 elements an instruction on NVIDIA targets from sm_90: the fast form of the MXFP4 kernel.

The arithmetic is quantize_kernels' with 2**7 for 2**23: bf16 numbers from 128 to 255 are integers,
so one fused bf16 step rounds a line to a code, exactly and once. A scaled magnitude has the 8
significant bits of its bf16 source, and scaling by a power of two is exact (what underflows is far
below .25). It takes half the instructions of the fp32 form: a card of 4 TB/s needs that.
Triton does not pair bf16 operations by itself, hence the PTX. Tests hold the arithmetic to the
table for every bf16 value on the CPU; on a GPU the kernel is held to the reference.
"""

import triton
import triton.language as tl


@triton.jit
def four_words(x, R: tl.constexpr, K: tl.constexpr):
    """[R, K // 2] int32 pairs -> four [R, K // 8], the pairs (0, 1), (2, 3), (4, 5), (6, 7)."""
    even, odd = tl.split(tl.reshape(x, [R, K // 8, 2, 2]))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def _larger_pair(a, b):
    return tl.inline_asm_elementwise(
        "max.NaN.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def largest_of_pairs(w0, w1, w2, w3):
    """The largest magnitude of eight as fp32 bits, NaN above Inf."""
    a = _larger_pair(w0 & 0x7FFF7FFF, w1 & 0x7FFF7FFF)
    b = _larger_pair(w2 & 0x7FFF7FFF, w3 & 0x7FFF7FFF)
    pair = _larger_pair(a, b)
    return tl.maximum(pair & 0x7FFF0000, pair << 16)


@triton.jit
def _code_pair(word, inverse, SATURATE: tl.constexpr):
    """Two elements and their inverse scale twice -> codes with signs, in bits 0-3 and 16-19."""
    code = tl.inline_asm_elementwise(
        """{
        .reg .b32 y, two, half, m0, m1, m2, t0, t1, t2;
        mov.b32 two, 0x40004000;
        mov.b32 half, 0x3F003F00;
        mov.b32 m0, 0x43004300;
        mov.b32 m1, 0x43024302;
        mov.b32 m2, 0x43044304;
        mul.rn.bf16x2 y, $1, $2;
        fma.rn.bf16x2 t0, y, two, m0;
        add.rn.bf16x2 t1, y, m1;
        fma.rn.bf16x2 t2, y, half, m2;
        min.bf16x2 t0, t0, t1;
        min.bf16x2 $0, t0, t2;
        }""",
        "=r,r,r",
        [word & 0x7FFF7FFF, inverse],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )
    if SATURATE:
        code = tl.inline_asm_elementwise(
            "min.bf16x2 $0, $1, $2;",
            "=r,r,r",
            [code, tl.full(code.shape, 0x43074307, tl.int32)],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    return (code & 0x00070007) | ((word >> 12) & 0x00080008)


@triton.jit
def word_of_pairs(w0, w1, w2, w3, inverse, SATURATE: tl.constexpr):
    """Four pairs and their block's inverse scale (fp32) -> a word of codes, element 0 lowest."""
    bits = inverse.to(tl.int32, bitcast=True)
    both = bits | (bits >> 16)
    front = _code_pair(w0, both, SATURATE) | (_code_pair(w1, both, SATURATE) << 8)
    back = _code_pair(w2, both, SATURATE) | (_code_pair(w3, both, SATURATE) << 8)
    even = (front & 0xFFFF) | (back << 16)
    odd = ((front >> 16) & 0xFFFF) | (back & -65536)
    return (even | (odd << 4)).to(tl.uint32, bitcast=True)
