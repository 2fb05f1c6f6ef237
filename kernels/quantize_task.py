"""What both quantizer twins agree on before any byte is written: modes, checks and output tensors.

A task holds views with the quantized axis last, so that the twins differ only in how they compute.
Every refusal is a LayoutError that names tensor, shape and rule, raised before an output changes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels.errors import LayoutError
from kernels.formats import E2M1_MAX, E4M3_MAX, MXFP4, NVFP4, BlockFormat, per_matrix

# Added to the fp32 bits of a block's largest magnitude a before its exponent is taken. floor: 2**(
# floor(log2 a) - 2). even: a's significand is first rounded to two bits, so 1.75 and more carry.
# up: the smallest power of two at least a / 6, so only significands above 1.5 carry.
SCALE_ROUNDING = {"floor": 0, "even": 0x200000, "up": 0x3FFFFF}
NONFINITE = ("nan", "vllm")
SOURCE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TINY = 2.0**-126  # the smallest global scale whose reciprocal is finite in fp32


@dataclass(frozen=True)
class QuantizeTask:
    """Views with the quantized axis last (source, packed, scale), and the outputs to return."""

    source: torch.Tensor
    packed: torch.Tensor
    scale: torch.Tensor
    outputs: tuple[torch.Tensor, torch.Tensor]


def plan_mxfp4(
    src_tensor: torch.Tensor,
    axis: int,
    out_quant_tensor: torch.Tensor | None,
    out_scale: torch.Tensor | None,
    block_quant_dim: int,
    scale_rounding: str,
    nonfinite: str,
) -> QuantizeTask:
    """Check a call of downcast_to_mxfp and make the outputs that it was not given."""
    if scale_rounding not in SCALE_ROUNDING:
        raise LayoutError(f"scale_rounding {scale_rounding!r}: use one of {list(SCALE_ROUNDING)}")
    if nonfinite not in NONFINITE:
        raise LayoutError(f"nonfinite {nonfinite!r}: use one of {list(NONFINITE)}")
    if block_quant_dim % MXFP4.block or block_quant_dim <= 0:
        raise LayoutError(f"BLOCK_QUANT_DIM {block_quant_dim}: use a positive multiple of 32")
    return _plan(src_tensor, axis, out_quant_tensor, out_scale, MXFP4)


def plan_nvfp4(
    x: torch.Tensor, out_quant_tensor: torch.Tensor | None, out_scale: torch.Tensor | None
) -> QuantizeTask:
    """Check a call of quantize_nvfp4 and make the outputs that it was not given."""
    return _plan(x, -1, out_quant_tensor, out_scale, NVFP4)


def nvfp4_global_scale(
    x: torch.Tensor,
    global_scale: torch.Tensor | float | None,
    largest_finite: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """The given global scale as fp32, or one per matrix from `largest_finite` (0 gives scale 1)."""
    if global_scale is not None:
        scales = torch.as_tensor(global_scale, dtype=torch.float32, device=x.device)
        per_matrix(scales, x)
        return scales
    largest = largest_finite(x)
    # by a tensor: torch on CUDA divides by a Python number through its reciprocal, one ulp off
    scales = (largest / torch.full_like(largest, E2M1_MAX * E4M3_MAX)).clamp_(min=TINY)
    return scales.masked_fill_(largest == 0, 1.0)


def check_merge(scale: torch.Tensor, global_scales: torch.Tensor) -> None:
    """LayoutError unless scale is [..., 2I, G] e4m3 and global_scales [..., 2] fp32."""
    if scale.dtype not in (torch.float8_e4m3fn, torch.uint8) or scale.ndim < 2:
        raise LayoutError(f"scale {tuple(scale.shape)} is {scale.dtype}: give e4m3 [..., 2I, G]")
    if scale.shape[-2] % 2:
        raise LayoutError(f"scale {tuple(scale.shape)}: w1 and w3 rows must be equal in number")
    expected = (*scale.shape[:-2], 2)
    if global_scales.dtype != torch.float32 or global_scales.shape != expected:
        raise LayoutError(
            f"global_scales {tuple(global_scales.shape)} {global_scales.dtype} for scale "
            f"{tuple(scale.shape)}: give fp32 {expected}, one for w1 and one for w3"
        )


def _plan(
    source: torch.Tensor,
    axis: int,
    packed: torch.Tensor | None,
    scale: torch.Tensor | None,
    fmt: BlockFormat,
) -> QuantizeTask:
    shape = tuple(source.shape)
    if source.dtype not in SOURCE_DTYPES:
        raise LayoutError(f"src_tensor {shape} is {source.dtype}: quantize bf16, fp16 or fp32")
    if not -source.ndim <= axis < source.ndim:
        raise LayoutError(f"axis {axis} is not one of the {source.ndim} axes of src_tensor {shape}")
    axis %= source.ndim
    length = shape[axis]
    if length % 2:
        raise LayoutError(
            f"src_tensor {shape}: axis {axis} is odd ({length}), but two codes fill a byte; "
            "pad it to an even length"
        )
    packed_shape = (*shape[:axis], length // 2, *shape[axis + 1 :])
    scale_shape = (*shape[:axis], fmt.scales(length), *shape[axis + 1 :])
    if packed is None:
        memory = list(packed_shape)
        memory[axis], memory[-1] = memory[-1], memory[axis]
        packed = source.new_empty(memory, dtype=torch.uint8).transpose(axis, -1)
    else:
        _check_output("out_quant_tensor", packed, packed_shape, (torch.uint8,), source)
    if scale is None:
        scale = source.new_empty(scale_shape, dtype=fmt.scale_dtype)
    else:
        _check_output("out_scale", scale, scale_shape, (torch.uint8, fmt.scale_dtype), source)
    return QuantizeTask(
        source.transpose(axis, -1),
        packed.transpose(axis, -1),
        scale.view(torch.uint8).transpose(axis, -1),
        (packed, scale),
    )


def _check_output(
    name: str,
    tensor: torch.Tensor,
    shape: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...],
    source: torch.Tensor,
) -> None:
    """LayoutError unless an output has its shape, dtype and device, and no byte twice."""
    given = f"{name} {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"
    if tuple(tensor.shape) != shape:
        raise LayoutError(f"{given}: src_tensor {tuple(source.shape)} needs {shape}")
    if tensor.dtype not in dtypes:
        raise LayoutError(f"{given}: give {' or '.join(map(str, dict.fromkeys(dtypes)))}")
    if tensor.device != source.device:
        raise LayoutError(f"{given}: src_tensor is on {source.device}; give one device")
    axes = zip(tensor.shape, tensor.stride(), strict=True)
    if any(size > 1 and stride == 0 for size, stride in axes):
        raise LayoutError(f"{given}: an expanded axis (stride 0) cannot be written; pass a clone")
