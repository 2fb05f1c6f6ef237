"""Quantizers to MXFP4 and NVFP4 in plain torch: the twin that the Triton kernels must equal.

MXFP4: 32 elements along `axis` share an e8m0 scale 2**(b - 127), found from the bits of their
largest magnitude by adding a rounding constant and keeping the exponent less 2 (6 = 1.5 * 2**2
fills a block). Elements are then rounded once, nearest with ties to even, from the fp32 value. The
bytes equal those of vLLM 0.33's downcast_to_mxfp
(vllm/model_executor/layers/quantization/utils/mxfp4_utils.py) for every finite bf16 and fp16 input;
a short last block uses only its own elements. Two edges are upstream's too: under scale byte 0
(`even`: largest magnitude below 1.75 * 2**-125) every magnitude is zero, and in mode `even` a block
that reaches 1.75 * 2**127 gets scale 254, not 253.

NVFP4: 16 elements share an e4m3 scale relative to an fp32 scale per matrix, as in ModelOpt
checkpoints.

Inf and NaN. A block with either gets the NaN scale (255; e4m3 0x7F) and zero codes, so that it
decodes to NaN everywhere and its neighbours are untouched. `nonfinite="vllm"` gives MXFP4's
upstream behaviour instead: scale 254 for a block with Inf or with nothing but NaN, code 7 for Inf
and NaN elements.

Work goes in pieces, so scratch stays below twice the output (or 2 MiB, for small tensors).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn.functional import pad

from kernels.formats import (
    E2M1_MAX,
    E4M3_NAN,
    E8M0_NAN,
    MXFP4,
    NVFP4,
    decode_e4m3,
    decode_e8m0,
    dequantize_mxfp4,
    dequantize_nvfp4,
    encode_e2m1,
    encode_e4m3,
    pack_e2m1,
    per_matrix,
    unpack_e2m1,
)
from kernels.quantize_task import (
    SCALE_ROUNDING,
    check_merge,
    nvfp4_global_scale,
    plan_mxfp4,
    plan_nvfp4,
)

__all__ = [
    "dequantize_mxfp4",
    "dequantize_nvfp4",
    "downcast_to_mxfp",
    "merge_global_scales",
    "mxfp4_quantize",
    "pack_e2m1",
    "quantize_nvfp4",
    "unpack_e2m1",
]

INFINITY_BITS = 0x7F800000


def downcast_to_mxfp(
    src_tensor: torch.Tensor,
    axis: int,
    out_quant_tensor: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None,
    BLOCK_OUT_DIM: int = 128,
    BLOCK_QUANT_DIM: int = 32,
    *,
    scale_rounding: str = "even",
    nonfinite: str = "nan",
) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]:
    """[.., L, ..] -> ([.., L/2, ..] packed e2m1, [.., ceil(L/32), ..] e8m0 bytes, scale's shape).

    bf16, fp16 or fp32, any strides; L along `axis` even. A new packed tensor has stride 1 along
    `axis`, as vLLM's has. Outputs that are given, of any strides, are written through and returned.
    BLOCK_OUT_DIM and BLOCK_QUANT_DIM are tile sizes of vLLM's kernel and never change the bytes.
    """
    task = plan_mxfp4(
        src_tensor, axis, out_quant_tensor, out_scale, BLOCK_QUANT_DIM, scale_rounding, nonfinite
    )
    for values, packed, scale in _pieces((task.source, task.packed, task.scale), MXFP4.block):
        codes, byte = _mxfp4_blocks(values, scale_rounding, nonfinite)
        packed.copy_(pack_e2m1(codes))
        scale.copy_(byte)
    return *task.outputs, tuple(task.outputs[1].shape)


def mxfp4_quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., L] -> ([..., L/2] packed e2m1, [..., ceil(L/32)] e8m0 bytes) along the last axis.

    `kernels.mxfp4_quantize` chooses a native backend where there is one; see kernels/providers.py.
    """
    packed, scale, _ = downcast_to_mxfp(x, -1)
    return packed, scale


def quantize_nvfp4(
    x: torch.Tensor,
    global_scale: torch.Tensor | float | None = None,
    out_quant_tensor: torch.Tensor | None = None,
    out_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[..., N, L] -> ([..., N, L/2] packed e2m1, [..., N, ceil(L/16)] e4m3, global scale [...]).

    global_scale is the decoding factor (a checkpoint's weight_scale_2), one number or one per
    matrix; absent, it is each matrix's largest finite magnitude / (6 * 448), and 1 where that is
    zero. In fp32, each step rounded once: u = x * (1 / global_scale); scale = e4m3(min(amax(u) / 6,
    448)); element = e2m1(u / scale), which is the exact rounding of the quotient (a test enumerates
    why). A scale that is zero, for a block of zeros or below 2**-10, gives zeros: finite, never
    NaN.
    """
    task = plan_nvfp4(x, out_quant_tensor, out_scale)
    given = nvfp4_global_scale(x, global_scale, largest_finite)
    inverse = per_matrix(given.reciprocal(), x).expand(*x.shape[:-1], 1)
    tensors = (task.source, task.packed, task.scale, inverse)
    for values, packed, scale, factor in _pieces(tensors, NVFP4.block):
        codes, byte = _nvfp4_blocks(values, factor)
        packed.copy_(pack_e2m1(codes))
        scale.copy_(byte)
    return *task.outputs, given


def merge_global_scales(
    scale: torch.Tensor, global_scales: torch.Tensor, *, interleaved: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Give w1 and w3 one global scale: [..., 2I, G] e4m3 and [..., 2] fp32 -> (e4m3, [...] fp32).

    Kernels take one global scale for w13 where checkpoints hold two. The larger is kept; the block
    scales of the other half are rescaled by the ratio and rounded to e4m3; FP4 bytes stay valid as
    they are. Rows are w1 then w3, or alternate if `interleaved`. Bound on a weight: |w' - w| <=
    max(|w| * (2**-4 + 2**-22), 6 * 2**-10 * merged). The ratio is at most 1, so nothing saturates;
    its division and product round to 2**-24 each; e4m3 keeps 3 bits after the point (half a step is
    2**-4 of the value), and below 2**-6 half a step is 2**-10. Halves whose scales are equal are
    unchanged; a NaN keeps its sign.
    """
    check_merge(scale, global_scales)
    merged = global_scales.amax(-1)
    ratio = torch.where(merged[..., None] > 0, global_scales / merged[..., None], 1.0)
    rows, half = scale.shape[-2], scale.shape[-2] // 2
    row_ratio = ratio.repeat(*[1] * (ratio.ndim - 1), half) if interleaved else None
    if row_ratio is None:
        row_ratio = ratio.repeat_interleave(half, -1, output_size=rows)
    values = decode_e4m3(scale).mul_(row_ratio[..., None])
    byte = encode_e4m3(values).view(torch.uint8)
    byte = torch.where(values.isnan(), scale.view(torch.uint8) | E4M3_NAN, byte)
    return byte.view(scale.dtype), merged


def largest_finite(x: torch.Tensor) -> torch.Tensor:
    """[..., N, L] -> [...] fp32: each matrix's largest finite magnitude; 0 where there is none."""
    matrices = x.reshape(-1, *x.shape[-2:]) if x.ndim > 2 else x[None]
    largest = torch.zeros(matrices.shape[0], device=x.device)
    for index, matrix in enumerate(matrices):
        for values in _pieces((matrix,), 1):
            finite = values[0].float().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
            torch.maximum(largest[index], finite.abs_().amax(), out=largest[index])
    return largest.view(x.shape[:-2])


def _mxfp4_blocks(
    values: torch.Tensor, scale_rounding: str, nonfinite: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """One piece [..., L] -> uint8 codes [..., L] and e8m0 bytes [..., ceil(L/32)]."""
    blocks = _blocks(values, MXFP4.block, torch.nan if nonfinite == "vllm" else 0.0)
    magnitude = blocks.abs()
    if nonfinite == "vllm":
        nothing_but_nan = magnitude.isnan().all(-1)
        magnitude.nan_to_num_(nan=0.0, posinf=torch.inf)
    largest = magnitude.amax(-1)
    del magnitude
    bits = largest.view(torch.int32).add(SCALE_ROUNDING[scale_rounding])
    byte = bits.bitwise_right_shift_(23).sub_(2).clamp_(0, 254)
    if scale_rounding == "even":  # 1.75 * 2**127 and more round to infinity, which upstream clamps
        byte.masked_fill_(byte == 253, 254)
    if nonfinite == "vllm":
        byte.masked_fill_(largest.isinf() | nothing_but_nan, 254)
    else:
        byte.masked_fill_(~largest.isfinite(), E8M0_NAN)
    byte = byte.to(torch.uint8)
    inverse = decode_e8m0(254 - byte).masked_fill_(byte == 0, 0.0)
    codes = encode_e2m1(blocks * inverse[..., None])
    codes.masked_fill_((byte == E8M0_NAN)[..., None], 0)
    return codes.flatten(-2)[..., : values.shape[-1]], byte


def _nvfp4_blocks(
    values: torch.Tensor, inverse_global: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One piece [..., L] -> uint8 codes [..., L] and e4m3 bytes [..., ceil(L/16)]."""
    blocks = _blocks(values, NVFP4.block)
    lost = ~blocks.isfinite().all(-1)
    blocks = blocks * inverse_global[..., None]
    largest = blocks.abs().amax(-1)
    scale = encode_e4m3(largest / torch.full_like(largest, E2M1_MAX))
    byte = scale.view(torch.uint8).masked_fill_(lost, E4M3_NAN)
    divisor = scale.float()[..., None]
    codes = encode_e2m1(torch.where(divisor > 0, blocks / divisor, blocks * 0.0))
    codes.masked_fill_(lost[..., None], 0)
    return codes.flatten(-2)[..., : values.shape[-1]], byte


def _blocks(values: torch.Tensor, block: int, fill: float = 0.0) -> torch.Tensor:
    """[..., L] of any float -> fp32 [..., blocks, block]; a short last block ends in `fill`."""
    length = values.shape[-1]
    blocks = -(-length // block)
    whole = pad(values.float(), (0, blocks * block - length), value=fill)
    return whole.reshape(*values.shape[:-1], blocks, block)


def _pieces(tensors: tuple[torch.Tensor, ...], block: int) -> Iterator[tuple[torch.Tensor, ...]]:
    """Views of matching parts, few enough elements of the first that their scratch stays small.

    A piece takes about 24 bytes an element, so 1/32 of the tensor costs .75 bytes an element where
    the output is .53. The last axis is cut at block ends; the others' is as many times shorter.
    """
    yield from _cut(tensors, block, max(1 << 16, min(1 << 20, tensors[0].numel() // 32)))


def _cut(
    tensors: tuple[torch.Tensor, ...], block: int, limit: int
) -> Iterator[tuple[torch.Tensor, ...]]:
    source = tensors[0]
    if source.numel() == 0:
        return
    axis = next((a for a, size in enumerate(source.shape[:-1]) if size > 1), source.ndim - 1)
    half = source.shape[axis] // 2
    if axis == source.ndim - 1:
        half = half // block * block
    if source.numel() <= limit or half == 0:
        yield tensors
        return
    halves: list[tuple[torch.Tensor, torch.Tensor]] = []
    for tensor in tensors:
        if tensor.shape[axis] == 1:  # one value for the whole axis
            halves.append((tensor, tensor))
            continue
        per_entry = -(-source.shape[axis] // tensor.shape[axis])  # 1, 2 or the block
        at = half // per_entry
        halves.append(
            (tensor.narrow(axis, 0, at), tensor.narrow(axis, at, tensor.shape[axis] - at))
        )
    for part in zip(*halves, strict=True):
        yield from _cut(part, block, limit)
