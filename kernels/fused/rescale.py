"""e4m3 block scales under another global scale, in Triton: what `merge_global_scales` does to a
byte, for the layout kernels to do on their way.

Gate and up of a checkpoint have a global scale each, a kernel takes one for both: the larger stays,
and the block scales of the other half are multiplied by the ratio. Where the two are equal, as
most checkpoints have them, no byte changes and nothing is computed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.fused.quantize_pairs import e4m3_of


@triton.jit
def one_global_scale(x, part, pair, WORD: tl.constexpr):
    """Words of e4m3 bytes under one global scale. part: 0 or 1 for each row of x [UNITS, VECTOR];
    pair: where the two scales of the matrix are, fp32."""
    first, second = tl.load(pair), tl.load(pair + 1)
    merged = tl.maximum(first, second, propagate_nan=tl.PropagateNan.ALL)
    positive = merged > 0
    divisor = tl.where(positive, merged, 1.0)
    first = tl.where(positive, tl.div_rn(first, divisor), 1.0)
    second = tl.where(positive, tl.div_rn(second, divisor), 1.0)
    if (first != 1.0) | (second != 1.0):
        x = _times(x, tl.where(part == 0, first, second), WORD)
    return x


@triton.jit
def _times(x, ratio, WORD: tl.constexpr):
    """Each e4m3 byte of words of WORD bytes times the ratio of its row: rounded to fp32, then to
    e4m3, nearest even and saturating. NaN keeps the sign that its byte had.

    Signs and NaN are worked out for all bytes of a word together, by the top bit of each.
    """
    word = x.to(tl.int32).to(tl.uint32, bitcast=True)
    size, bits = tl.abs(ratio), ratio.to(tl.uint32, bitcast=True)
    product = tl.zeros_like(word)
    for i in tl.static_range(WORD):
        scaled = _scaled_times((word >> (8 * i)) & 0x7F, size)
        product |= scaled >> (20 - 8 * i) if i < 3 else scaled << (8 * i - 20)
    magnitude = word & 0x7F7F7F7F
    lost = magnitude + 0x01010101  # NaN is 0x7F
    zero = ~(magnitude + 0x7F7F7F7F)
    lost |= tl.where(bits << 1 == 0xFF000000, zero, 0)  # times infinity
    lost = tl.where(bits << 1 > 0xFF000000, 0x80808080, lost & 0x80808080)
    flip = tl.where(bits >> 31 == 1, 0x80808080, 0) & ~lost
    product |= ((word ^ flip) & 0x80808080) | (lost - (lost >> 7))
    return product.to(tl.int32, bitcast=True).to(x.dtype)


@triton.jit
def _scaled_times(magnitude, size):
    """e4m3 magnitude times fp32 -> the bits of the rounded product times 2**-120: an e4m3 number's
    exponent and mantissa, subnormals included, from bit 20 on."""
    value = (magnitude << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2**120
    _, rounded = e4m3_of(tl.minimum(value * size, 448.0))
    return (rounded * 7.52316384526264e-37).to(tl.uint32, bitcast=True)
