"""A whole NVFP4 layer: padding for FlashInfer, and the CuteDSL and TRT-LLM preparations.

Tensors of a layer: w13 [E, 2I, H/2] (or [E, I, H/2] without a gate) and w2 [E, H, I/2], packed
bytes; their scales [E, rows, K/16]. Signatures are vLLM's, so each routine can be swapped in. `out`
takes the four prepared tensors (w13, w13_scale, w2, w2_scale) of a layer, so that a loader can
reuse buffers; with `experts`, a slice, the inputs hold that slice's experts only, so that a
checkpoint is prepared expert by expert into its final place.
"""

from __future__ import annotations

from typing import Any

import torch

from kernels import activations, catalog
from kernels.errors import LayoutError
from kernels.layout import Layout, round_up
from kernels.reference.nvfp4 import (
    BLOCK,
    E4M3,
    amax_for_moe_activation_quant,
    swizzle_blockscale,
)
from kernels.reference.reorder import (
    check_out,
    interleave_linear_and_gate,
    reorder_w13_to_w31_for_flashinfer_cutedsl,
)

Four = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
PREPARED_CUTEDSL = tuple[
    torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor,
    torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor,
]  # fmt: skip


def align_fp4_moe_weights_for_fi(
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    is_act_and_mul: bool,
    min_alignment: int = 16,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Pad the intermediate size to `min_alignment` with zeros, gate and up each by itself.

    w13 [E, 2I or I, H/2], w13_scale [E, 2I or I, H/16], w2 [E, H, I/2], w2_scale [E, H, I/16].
    Returns the four (the inputs themselves when nothing is to pad) and the padded size.
    `min_alignment` must be a multiple of 16, the scale block. Source: vllm flashinfer_utils.py,
    same name.
    """
    size, halves = check_align(
        "align_fp4_moe_weights_for_fi", w13, w13_scale, w2, w2_scale, is_act_and_mul, min_alignment
    )
    padded = round_up(size, min_alignment)
    if padded == size:
        return w13, w13_scale, w2, w2_scale, size
    return (
        _pad_rows(w13, halves, padded),
        _pad_rows(w13_scale, halves, padded),
        _pad_columns(w2, padded // 2),
        _pad_columns(w2_scale, padded // BLOCK),
        padded,
    )


def align_fp4_moe_hidden_dim_for_fi(
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    min_alignment: int = 256,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Pad the hidden size to `min_alignment` with zeros: columns of w13, rows of w2.

    Shapes as for `align_fp4_moe_weights_for_fi`. Source: vllm flashinfer_utils.py, same name.
    """
    routine = "align_fp4_moe_hidden_dim_for_fi"
    check_align(routine, w13, w13_scale, w2, w2_scale, None, min_alignment)
    size = w13.shape[2] * 2
    padded = round_up(size, min_alignment)
    if padded == size:
        return w13, w13_scale, w2, w2_scale, size
    return (
        _pad_columns(w13, padded // 2),
        _pad_columns(w13_scale, padded // BLOCK),
        _pad_rows(w2, 1, padded),
        _pad_rows(w2_scale, 1, padded),
        padded,
    )


def prepare_nvfp4_moe_layer_for_flashinfer_cutedsl(
    layer: Any,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w13_scale_2: torch.Tensor,
    a13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    w2_scale_2: torch.Tensor,
    a2_scale: torch.Tensor,
    *,
    out: Four | None = None,
    experts: slice | None = None,
) -> PREPARED_CUTEDSL:
    """A layer for FlashInfer's CuteDSL grouped GEMM, in the order of the arguments.

    layer: anything with `.activation` (a name or vLLM's enum) and, for EPLB,
    `.moe_config.moe_parallel_config.enable_eplb`. w13 [E, 2I, H/2] uint8, w13_scale [E, 2I, H/16]
    e4m3, w2 [E, H, I/2] uint8, w2_scale [E, H, I/16] e4m3. Gated: rows to up first, padded by
    halves to 64, interleaved by 64; plain: padded to 128. Hidden is padded to 256; both scales
    swizzled 128x4; the activation scales become one fp32 value an expert, all equal. Inputs are
    unchanged. Source: vllm flashinfer_fp4_moe.py, same name.
    """
    activation = activations.find(layer.activation)
    eplb = enable_eplb(layer)
    a13 = amax_for_moe_activation_quant(a13_scale, eplb).repeat(w13.shape[0])
    a2 = amax_for_moe_activation_quant(a2_scale, eplb).repeat(w13.shape[0])
    if activation.gated:
        w13, w13_scale = reorder_w13_to_w31_for_flashinfer_cutedsl(activation, w13, w13_scale)
    w13, w13_scale, w2, w2_scale, _ = align_fp4_moe_weights_for_fi(
        w13, w13_scale, w2, w2_scale, activation.gated, 64 if activation.gated else 128
    )
    w13, w13_scale, w2, w2_scale, _ = align_fp4_moe_hidden_dim_for_fi(w13, w13_scale, w2, w2_scale)
    if activation.gated:
        w13 = interleave_linear_and_gate(w13, 64, dim=1)
        w13_scale = interleave_linear_and_gate(w13_scale, 64, dim=1)
    w13, w13_scale, w2, w2_scale = deliver(
        "prepare_nvfp4_moe_layer_for_flashinfer_cutedsl",
        (w13, swizzle_blockscale(w13_scale), w2, swizzle_blockscale(w2_scale)), out, experts,
    )  # fmt: skip
    return w13, w13_scale, w13_scale_2, a13, w2, w2_scale, w2_scale_2, a2


def prepare_static_weights_for_trtllm_fp4_moe(
    gemm1_weights: torch.Tensor,
    gemm2_weights: torch.Tensor,
    gemm1_scales_linear_fp4_bytes: torch.Tensor,
    gemm2_scales_linear_fp4_bytes: torch.Tensor,
    hidden_size: int,
    intermediate_size: int,
    num_experts: int,
    is_gated_activation: bool,
    *,
    out: Four | None = None,
    experts: slice | None = None,
) -> Four:
    """A layer for TRT-LLM gen: (w13, w13_scale, w2, w2_scale), weights uint8, scales e4m3.

    gemm1_weights [E, 2I or I, H/2], gemm2_weights [E, H, I/2] bytes; their scales [E, rows, K/16]
    bytes in linear order. Gated rows are interleaved by one, all rows shuffled inside 32 (epilogue
    tile 128), scales then swizzled 128x4. 128 must divide the gemm1 rows and the hidden size, 64
    the intermediate size (four scale columns). Source: vllm flashinfer_fp4_moe.py, same name;
    flashinfer fused_moe/core.py.
    """
    rows = intermediate_size * (2 if is_gated_activation else 1)
    check_trtllm_sizes(rows, hidden_size, intermediate_size)
    layouts = trtllm_layouts(is_gated_activation)
    results = []
    for name, x, shape, dtype in (
        ("w13", gemm1_weights, (num_experts, rows, hidden_size // 2), torch.uint8),
        (
            "w13_scale",
            gemm1_scales_linear_fp4_bytes,
            (num_experts, rows, hidden_size // BLOCK),
            E4M3,
        ),
        ("w2", gemm2_weights, (num_experts, hidden_size, intermediate_size // 2), torch.uint8),
        (
            "w2_scale",
            gemm2_scales_linear_fp4_bytes,
            (num_experts, hidden_size, intermediate_size // BLOCK),
            E4M3,
        ),
    ):
        data = check_bytes(f"prepare_static_weights_for_trtllm_fp4_moe: {name}", x, shape)
        results.append(layouts[name].forward(data).reshape(shape).view(dtype))
    w13, w13_scale, w2, w2_scale = results
    return deliver(
        "prepare_static_weights_for_trtllm_fp4_moe",
        (w13, w13_scale, w2, w2_scale), out, experts,
    )  # fmt: skip


def slices(
    routine: str, out: Four | None, experts: slice | None
) -> tuple[torch.Tensor | None, ...]:
    """Where each result goes: `out`, or its slice of experts; None for a new tensor."""
    if out is None:
        if experts is not None:
            raise LayoutError(f"{routine}: experts={experts} needs out=, the whole layer's tensors")
        return (None, None, None, None)
    return tuple(x if experts is None else x[experts] for x in out)


def deliver(routine: str, made: Four, out: Four | None, experts: slice | None) -> Four:
    """The results themselves, or their places in `out`, once they are copied there."""
    places = slices(routine, out, experts)
    if out is None:
        return made
    for place, x in zip(places, made, strict=True):
        assert place is not None
        check_out(routine, place, x, x.numel())
    for place, x in zip(places, made, strict=True):
        assert place is not None
        place.view(x.shape).copy_(x)
    w13, w13_scale, w2, w2_scale = (place for place in places if place is not None)
    return w13, w13_scale, w2, w2_scale


def trtllm_layouts(is_gated_activation: bool) -> dict[str, Layout]:
    """Which one-pass layout each tensor of a TRT-LLM layer takes."""
    return {
        "w13": catalog.LAYOUTS["trtllm_w13" if is_gated_activation else "trtllm_shuffle_32"],
        "w13_scale": catalog.LAYOUTS[
            "trtllm_w13_scale" if is_gated_activation else "trtllm_w2_scale"
        ],
        "w2": catalog.LAYOUTS["trtllm_shuffle_32"],
        "w2_scale": catalog.LAYOUTS["trtllm_w2_scale"],
    }


def check_trtllm_sizes(rows: int, hidden_size: int, intermediate_size: int) -> None:
    """Raise LayoutError where the TRT-LLM shuffle and swizzle cannot hold these sizes."""
    for what, size, multiple in (
        ("the gemm1 rows (gate and up together)", rows, 128),
        ("the hidden size", hidden_size, 128),
        ("the intermediate size", intermediate_size, 64),
    ):
        if size % multiple:
            raise LayoutError(
                f"prepare_static_weights_for_trtllm_fp4_moe: {what}, {size}, must be divisible by "
                f"{multiple}; "
                "pad with align_fp4_moe_weights_for_fi and align_fp4_moe_hidden_dim_for_fi first"
            )


def check_bytes(name: str, x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """x as uint8 of `shape`, or LayoutError."""
    if x.element_size() != 1 or x.numel() != torch.Size(shape).numel():
        raise LayoutError(
            f"{name} {tuple(x.shape)} {x.dtype}; want one-byte elements of shape {shape}"
        )
    return x.view(torch.uint8).reshape(shape)


def enable_eplb(layer: Any) -> bool:
    """vLLM's flag on a layer; False where the layer has no such configuration."""
    parallel = getattr(getattr(layer, "moe_config", None), "moe_parallel_config", None)
    return bool(getattr(parallel, "enable_eplb", False))


def check_align(
    routine: str,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    is_act_and_mul: bool | None,
    min_alignment: int,
) -> tuple[int, int]:
    """(intermediate size, halves of w13's rows), or LayoutError; None asks nothing of the rows."""
    _check_layer(routine, w13, w13_scale, w2, w2_scale)
    if min_alignment < 1 or min_alignment % BLOCK:
        raise LayoutError(f"{routine}: min_alignment={min_alignment} is no multiple of 16")
    size = w2.shape[2] * 2
    halves = 2 if is_act_and_mul else 1
    if is_act_and_mul is not None and w13.shape[1] != halves * size:
        raise LayoutError(
            f"{routine}: w13 {tuple(w13.shape)} has {w13.shape[1]} rows; w2 "
            f"{tuple(w2.shape)} says {halves} x {size}"
        )
    return size, halves


def _check_layer(
    routine: str,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
) -> None:
    """Raise LayoutError unless the four tensors are of one layer."""
    for name, x in (("w13", w13), ("w13_scale", w13_scale), ("w2", w2), ("w2_scale", w2_scale)):
        if x.ndim != 3 or x.element_size() != 1:
            raise LayoutError(f"{routine}: {name} {tuple(x.shape)} {x.dtype}; want bytes of rank 3")
    for name, scale, weight in (("w13_scale", w13_scale, w13), ("w2_scale", w2_scale, w2)):
        want = (*weight.shape[:2], weight.shape[2] * 2 // BLOCK)
        if weight.shape[2] * 2 % BLOCK or tuple(scale.shape) != want:
            raise LayoutError(
                f"{routine}: {name} {tuple(scale.shape)} does not belong to weight "
                f"{tuple(weight.shape)}; "
                f"want {want}, one scale per {BLOCK} elements"
            )
    if w13.shape[0] != w2.shape[0] or w13.shape[2] * 2 != w2.shape[1]:
        raise LayoutError(
            f"{routine}: w13 {tuple(w13.shape)} and w2 {tuple(w2.shape)} are not of one layer: "
            "want "
            "[E, rows, H/2] and [E, H, I/2]"
        )


def _pad_rows(x: torch.Tensor, halves: int, size: int) -> torch.Tensor:
    """[E, halves * n, K] -> [E, halves * size, K], each half padded with zeros by itself."""
    e, rows, k = x.shape
    out = x.new_zeros((e, halves, size, k))
    out[:, :, : rows // halves] = x.reshape(e, halves, rows // halves, k)
    return out.view(e, halves * size, k)


def _pad_columns(x: torch.Tensor, size: int) -> torch.Tensor:
    """[E, M, K] -> [E, M, size], padded with zeros."""
    out = x.new_zeros((*x.shape[:2], size))
    out[:, :, : x.shape[2]] = x
    return out
