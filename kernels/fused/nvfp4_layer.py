"""A whole NVFP4 layer, fused: the routines of `kernels.reference.nvfp4_layer`, one launch a tensor.

Each chain of the reference (reorder, pad, interleave, shuffle, swizzle) is one layout here, so
every checkpoint byte is read once and every prepared byte written once, padding included.
Contracts, errors and bytes are the reference's. `out` takes the four prepared tensors, so that a
loader can reuse buffers; with `experts`, a slice, they are a whole layer's and the inputs hold
that slice's experts only, so that a checkpoint is prepared expert by expert into its final place.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch

from kernels import activations, catalog
from kernels.errors import LayoutError
from kernels.fused.launch import Launch, run
from kernels.fused.per_expert import small_tensors, taken
from kernels.fused.rearrange import job, rearrange
from kernels.layout import Layout, round_up
from kernels.reference import nvfp4_layer as reference
from kernels.reference.nvfp4 import BLOCK, E4M3, amax_for_moe_activation_quant
from kernels.reference.nvfp4_layer import PREPARED_CUTEDSL, check_bytes, check_trtllm_sizes, slices
from kernels.reference.reorder import check_halves, check_out

Four = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]

# Rows padded, each half by itself or as one: `align` is set for the case at hand.
_HALVES = Layout("padded_halves", "(g h) k -> (g h) k", {"g": 2}, align=(2, 1))
_PLAIN = catalog.LAYOUTS["strided"]


def align_fp4_moe_weights_for_fi(
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    is_act_and_mul: bool,
    min_alignment: int = 16,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Pad the intermediate size to `min_alignment` with zeros, gate and up each by itself."""
    size, _ = reference.check_align(
        "align_fp4_moe_weights_for_fi", w13, w13_scale, w2, w2_scale, is_act_and_mul, min_alignment
    )
    padded = round_up(size, min_alignment)
    if padded == size:
        return w13, w13_scale, w2, w2_scale, size
    halves = _HALVES if is_act_and_mul else _PLAIN
    rows = replace(halves, align=(min_alignment * halves.parts, 1))
    return (
        rearrange(rows, w13),
        rearrange(rows, w13_scale),
        rearrange(replace(_PLAIN, align=(1, min_alignment // 2)), w2),
        rearrange(replace(_PLAIN, align=(1, min_alignment // BLOCK)), w2_scale),
        padded,
    )


def align_fp4_moe_hidden_dim_for_fi(
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    min_alignment: int = 256,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Pad the hidden size to `min_alignment` with zeros: columns of w13, rows of w2."""
    routine = "align_fp4_moe_hidden_dim_for_fi"
    reference.check_align(routine, w13, w13_scale, w2, w2_scale, None, min_alignment)
    size = w13.shape[2] * 2
    padded = round_up(size, min_alignment)
    if padded == size:
        return w13, w13_scale, w2, w2_scale, size
    return (
        rearrange(replace(_PLAIN, align=(1, min_alignment // 2)), w13),
        rearrange(replace(_PLAIN, align=(1, min_alignment // BLOCK)), w13_scale),
        rearrange(replace(_PLAIN, align=(min_alignment, 1)), w2),
        rearrange(replace(_PLAIN, align=(min_alignment, 1)), w2_scale),
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
    """A layer for FlashInfer's CuteDSL grouped GEMM; at most four launches over the weights.

    out: (w13, w13_scale, w2, w2_scale) as returned; written through, also where the reference would
    hand an unpadded w2 back as it came. experts: the slice of `out` that these inputs are.
    """
    activation = activations.find(layer.activation)
    eplb = reference.enable_eplb(layer)
    count = w13.shape[0]
    jobs: list[Launch] = []
    if eplb or not (taken(a13_scale) and taken(a2_scale)):
        a13 = amax_for_moe_activation_quant(a13_scale, eplb).repeat(count)
        a2 = amax_for_moe_activation_quant(a2_scale, eplb).repeat(count)
    else:
        small = small_tensors([a13_scale, a2_scale], [count, count])
        jobs.append(small)
        a13, a2 = small.outs
    if activation.gated:
        for name, x in (("w13", w13), ("w13_scale", w13_scale)):
            check_halves(name, x, -2)
    reference.check_align(
        "align_fp4_moe_weights_for_fi", w13, w13_scale, w2, w2_scale, activation.gated, 64
    )
    layouts = cutedsl_layouts(activation.gated, activation.interleaved)
    for name, x in (("w13_scale", w13_scale), ("w2_scale", w2_scale)):
        if x.dtype != E4M3:  # the reference meets it after padding, and says so
            shape = (count, *layouts[name].padded(*x.shape[-2:]))
            raise LayoutError(
                f"swizzle_blockscale: scale {shape} {x.dtype}; want float8_e4m3fn of rank 2 or 3, "
                "[M, K] or [E, M, K]"
            )
    outs = slices("prepare_nvfp4_moe_layer_for_flashinfer_cutedsl", out, experts)
    prepared = []
    for (name, layout), x, given in zip(
        layouts.items(), (w13, w13_scale, w2, w2_scale), outs, strict=True
    ):
        rows, columns = layout.padded(*x.shape[-2:])
        shape = torch.Size((count, rows, columns))
        plain = layout.source_axes == layout.storage_axes and not layout.flip
        if given is None and plain and shape == x.shape:
            prepared.append(x)  # nothing to pad: the tensor itself, as the reference returns it
            continue
        if given is not None:
            check_out(
                f"prepare_nvfp4_moe_layer_for_flashinfer_cutedsl: {name}", given, x, shape.numel()
            )
        placed = job(layout, x, given)
        jobs.append(placed)
        prepared.append(placed.storage.view(shape))
    run(jobs)
    w13, w13_scale, w2, w2_scale = prepared
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
    """A layer for TRT-LLM gen: (w13, w13_scale, w2, w2_scale) in four launches.

    out: those four tensors, written through. experts: the slice of `out` that these inputs, of
    num_experts experts, are.
    """
    rows = intermediate_size * (2 if is_gated_activation else 1)
    check_trtllm_sizes(rows, hidden_size, intermediate_size)
    routine = "prepare_static_weights_for_trtllm_fp4_moe"
    layouts = reference.trtllm_layouts(is_gated_activation)
    hidden, packed, blocks = hidden_size // 2, intermediate_size // 2, intermediate_size // BLOCK
    inputs = []
    for name, x, shape in (
        ("w13", gemm1_weights, (num_experts, rows, hidden)),
        ("w13_scale", gemm1_scales_linear_fp4_bytes, (num_experts, rows, hidden_size // BLOCK)),
        ("w2", gemm2_weights, (num_experts, hidden_size, packed)),
        ("w2_scale", gemm2_scales_linear_fp4_bytes, (num_experts, hidden_size, blocks)),
    ):  # fmt: skip
        inputs.append((name, check_bytes(f"{routine}: {name}", x, shape)))
    jobs, results = [], []
    for (name, x), given in zip(inputs, slices(routine, out, experts), strict=True):
        dtype = E4M3 if name.endswith("scale") else torch.uint8
        if given is not None:
            check_out(f"{routine}: {name}", given.view(torch.uint8), x, x.numel())
            given = given.view(torch.uint8)
        jobs.append(job(layouts[name], x, given))
        results.append(jobs[-1].storage.view(x.shape).view(dtype))
    run(jobs)
    w13, w13_scale, w2, w2_scale = results
    return w13, w13_scale, w2, w2_scale


@cache
def cutedsl_layouts(gated: bool, interleaved: bool) -> dict[str, Layout]:
    """Which one-pass layout each tensor of a CuteDSL layer takes, the path's padding in `align`.

    Hidden is padded to 256 elements, gate and up each to 64, an ungated projection to 128: 128
    bytes or 16 scale columns of hidden; 32 or 64 bytes, 4 or 8 scale columns, of intermediate.
    """
    step = 64 if gated else 128
    scale = catalog.LAYOUTS["block_scale_128x4"]
    if not gated:
        first, first_scale = _PLAIN, scale
    else:
        kind = "cutedsl_w13_interleaved" if interleaved else "cutedsl_w13"
        first, first_scale = catalog.LAYOUTS[kind], catalog.LAYOUTS[f"{kind}_scale"]
    return {
        "w13": replace(first, align=(128, 128)),
        "w13_scale": replace(first_scale, align=(128, 16)),
        "w2": replace(_PLAIN, align=(256, step // 2)),
        "w2_scale": replace(scale, align=(256, step // BLOCK)),
    }
