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
    """Each byte of words of WORD bytes, an e4m3 number, times the ratio of its row."""
    word = x.to(tl.int32)
    product = tl.zeros_like(word)
    for i in tl.static_range(WORD):
        product |= _byte_times((word >> (8 * i)) & 0xFF, ratio) << (8 * i)
    return product.to(x.dtype)


@triton.jit
def _byte_times(byte, ratio):
    """e4m3 byte times fp32, rounded to fp32 and then to e4m3, nearest even and saturating; NaN has
    the byte's sign. e4m3's exponent and mantissa are fp32's when scaled by 2**-120."""
    magnitude = ((byte & 0x7F) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2**120
    product = magnitude * tl.abs(ratio)
    scaled, _ = e4m3_of(tl.minimum(product, 448.0))
    sign = (byte ^ (ratio.to(tl.int32, bitcast=True) >> 24)) & 0x80
    lost = ((byte & 0x7F) == 0x7F) | (product != product)
    return tl.where(lost, byte | 0x7F, scaled | sign)
