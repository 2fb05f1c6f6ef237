"""Gate and up rows: exchanged, interleaved, separated, shuffled.

w13 holds two projections along its rows: gate (w1) first, then up (w3). Backends want up first
(FlashInfer CUTLASS, CuteDSL, TRT-LLM), or the two interleaved by rows or groups of rows. Weight,
scale and bias of one layer take the same row order, or the result is silently another model. Rows
may be any axis (`dim`), elements any dtype; the layouts are in `catalog.py`.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from kernels import activations, catalog
from kernels.errors import LayoutError
from kernels.layout import Layout

_SCRATCH_BYTES = 64 << 20  # most an in-place exchange may hold at a time


def reorder_w1w3_to_w3w1(
    weight: torch.Tensor, scale: torch.Tensor, dim: int = -2
) -> tuple[torch.Tensor, torch.Tensor]:
    """Exchange the gate and up halves along `dim`, in place on both tensors; its own inverse.

    weight, scale: contiguous, any dtype, an even size along `dim`. Returns the same two tensors.
    Scratch is at most 64 MiB. Raises LayoutError, with both tensors unchanged, on an odd size, a
    non-contiguous tensor or a `dim` out of range.
    Source: vllm flashinfer_fp4_moe.py, same name.
    """
    for name, x in (("weight", weight), ("scale", scale)):
        check_halves(name, x, dim)
        if not x.is_contiguous():
            raise LayoutError(
                f"reorder_w1w3_to_w3w1: {name} {tuple(x.shape)} with strides {x.stride()} is not "
                "contiguous, and the exchange is in place; pass a contiguous tensor"
            )
    for x in (weight, scale):
        halves = _as_rows(x, dim).unflatten(1, (2, x.shape[dim] // 2))
        row_bytes = max(1, x.numel() // max(1, x.shape[dim]) * x.element_size())
        step = max(1, _SCRATCH_BYTES // row_bytes)
        for at in range(0, halves.shape[2], step):
            gate, up = (halves[:, half, at : at + step] for half in (0, 1))
            kept = gate.clone()
            gate.copy_(up)
            up.copy_(kept)
    return weight, scale


def reorder_w13_to_w31_for_flashinfer_cutedsl(
    activation: object,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    *,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """New tensors with the up rows first, then the gate rows.

    w13 [E, 2I, H/2], w13_scale [E, 2I, H/16], any dtype. For `swigluoai` the rows come as gate0,
    up0, gate1, up1, ... and are separated; else gate rows come first. `out` is written through.
    Source: vllm flashinfer_fp4_moe.py, same name.
    """
    layout = w31_layout(activation)
    outs = out or (None, None)
    for name, x in (("w13", w13), ("w13_scale", w13_scale)):
        check_halves(name, x, -2)
    return (
        apply_rows(layout, w13, -2, outs[0], "w13"),
        apply_rows(layout, w13_scale, -2, outs[1], "w13_scale"),
    )


def reorder_w31_to_w13_from_flashinfer_cutedsl(
    activation: object, w31: torch.Tensor, w31_scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse of `reorder_w13_to_w31_for_flashinfer_cutedsl`: checkpoint row order again."""
    layout = w31_layout(activation)
    return invert_rows(layout, w31, -2, "w31"), invert_rows(layout, w31_scale, -2, "w31_scale")


def interleave_linear_and_gate(
    x: torch.Tensor, group_size: int = 64, dim: int = -1, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Alternate groups of `group_size` from the first and the second half along `dim`.

    x any dtype; the size along `dim` must be divisible by 2 * group_size. [g0 g1 | u0 u1] becomes
    [g0 u0 g1 u1]. Returns a new contiguous tensor, or `out`.
    Source: vllm flashinfer_fp4_moe.py, same name.
    """
    layout = interleave_layout(group_size)
    check_groups("interleave_linear_and_gate", x, group_size, dim)
    return apply_rows(layout, x, dim, out, "x")


def deinterleave_linear_and_gate(
    x: torch.Tensor, group_size: int = 64, dim: int = -1
) -> torch.Tensor:
    """The inverse of `interleave_linear_and_gate`."""
    check_groups("deinterleave_linear_and_gate", x, group_size, dim)
    return invert_rows(interleave_layout(group_size), x, dim, "x")


def shuffle_rows_for_trtllm(
    x: torch.Tensor, epilogue_tile_m: int = 128, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Permute rows inside 32-row blocks (tile 128) or 16-row blocks (other tiles) for TRT-LLM gen.

    x [..., M, K] any dtype; M must be divisible by the block. Source: flashinfer utils.py
    `get_shuffle_block_size`, fp4_quantization.py `shuffle_matrix_a`.
    """
    return apply_rows(_checked_shuffle(x, epilogue_tile_m), x, -2, out, "x")


def unshuffle_rows_for_trtllm(x: torch.Tensor, epilogue_tile_m: int = 128) -> torch.Tensor:
    """The inverse of `shuffle_rows_for_trtllm`."""
    return invert_rows(_checked_shuffle(x, epilogue_tile_m), x, -2, "x")


def w31_layout(activation: object) -> Layout:
    """The layout that brings this activation's w13 rows to up first."""
    found = activations.find(activation)
    if not found.gated:
        raise LayoutError(
            f"activation {found.name!r} has no gate: w13 holds one projection, nothing to reorder"
        )
    return catalog.LAYOUTS["w13_interleaved_to_w31" if found.interleaved else "w13_to_w31"]


def interleave_layout(group_size: int) -> Layout:
    """The gate/up interleave by groups of `group_size` rows, for any positive size."""
    if group_size < 1:
        raise LayoutError(f"gate/up interleave: group_size={group_size}; want at least 1")
    if (name := f"gate_up_interleave_{group_size}") in catalog.LAYOUTS:
        return catalog.LAYOUTS[name]
    base = catalog.LAYOUTS["gate_up_interleave_64"]
    sizes, align = {**base.sizes, "s": group_size}, (2 * group_size, 1)
    return replace(base, name=name, sizes=sizes, align=align, aliases=())


def check_groups(routine: str, x: torch.Tensor, group_size: int, dim: int) -> None:
    """Raise LayoutError unless 2 * group_size divides x along dim."""
    check_dim("x", x, dim)
    if x.shape[dim] % (2 * group_size):
        raise LayoutError(
            f"{routine}: x {tuple(x.shape)} has size {x.shape[dim]} along dim {dim}, not "
            "divisible by "
            f"2 * group_size = {2 * group_size}; pad gate and up each to a multiple of "
            f"{group_size} first"
        )


def check_halves(name: str, x: torch.Tensor, dim: int) -> None:
    """Raise LayoutError unless x splits into two halves along dim."""
    check_dim(name, x, dim)
    if x.shape[dim] % 2:
        raise LayoutError(
            f"{name} {tuple(x.shape)} has an odd size {x.shape[dim]} along dim {dim}: it cannot "
            "hold a "
            "gate and an up half"
        )


def check_dim(name: str, x: torch.Tensor, dim: int) -> None:
    """Raise LayoutError for a dim that x does not have."""
    if not -x.ndim <= dim < x.ndim:
        raise LayoutError(f"{name} {tuple(x.shape)} has no dim {dim}")


def check_out(name: str, out: torch.Tensor, like: torch.Tensor, numel: int) -> None:
    """Raise LayoutError unless `out` can hold `numel` elements of like's dtype on its device."""
    if out.dtype != like.dtype or out.device != like.device or out.numel() != numel:
        raise LayoutError(
            f"{name}: out {tuple(out.shape)} {out.dtype} on {out.device} cannot take {numel} "
            "elements of "
            f"{like.dtype} on {like.device}"
        )
    if not out.is_contiguous():
        raise LayoutError(
            f"{name}: out {tuple(out.shape)} with strides {out.stride()} is not contiguous"
        )


def apply_rows(
    layout: Layout, x: torch.Tensor, dim: int, out: torch.Tensor | None, name: str
) -> torch.Tensor:
    """A row layout along `dim` of x: same shape, new contiguous memory (or `out`)."""
    result = layout.forward(_as_rows(x, dim)).reshape(x.shape)
    if out is None:
        return result
    check_out(name, out, x, x.numel())
    out.view(x.shape).copy_(result)
    return out


def invert_rows(layout: Layout, x: torch.Tensor, dim: int, name: str) -> torch.Tensor:
    """The inverse of `apply_rows`."""
    check_halves(name, x, dim) if layout.parts > 1 else check_dim(name, x, dim)
    rows = _as_rows(x, dim)
    if x.shape[dim] % layout.tile[0]:
        raise LayoutError(
            f"{name} {tuple(x.shape)}: {x.shape[dim]} rows along dim {dim} are no multiple of the "
            f"{layout.tile[0]}-row tile of layout {layout.name!r}"
        )
    return layout.inverse(rows, *rows.shape[-2:]).reshape(x.shape)


def _as_rows(x: torch.Tensor, dim: int) -> torch.Tensor:
    """x [.., dim, ..] -> [before, size along dim, after], so that a row layout applies."""
    dim %= x.ndim
    before, after = x.shape[:dim].numel(), x.shape[dim + 1 :].numel()
    return x.reshape(before, x.shape[dim], after)


def _checked_shuffle(x: torch.Tensor, epilogue_tile_m: int) -> Layout:
    """The shuffle of that epilogue tile, after checking that its block divides the rows of x."""
    check_dim("x", x, -2)
    layout = catalog.LAYOUTS[f"trtllm_shuffle_{32 if epilogue_tile_m % 128 == 0 else 16}"]
    if x.shape[-2] % layout.tile[0]:
        raise LayoutError(
            f"shuffle_rows_for_trtllm: x {tuple(x.shape)} has {x.shape[-2]} rows, no multiple of "
            "the "
            f"{layout.tile[0]}-row block of epilogue tile {epilogue_tile_m}; pad the rows first"
        )
    return layout
