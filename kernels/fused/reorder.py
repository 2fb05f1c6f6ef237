"""Gate and up rows, fused: the routines of `kernels.reference.reorder`, one kernel launch a tensor.

Contracts, errors and bytes are the reference's. Inputs of any strides are read as they lie; the
in-place exchange holds both halves' tiles in registers and takes no device memory.
"""

from __future__ import annotations

import torch

from kernels import catalog
from kernels.errors import LayoutError
from kernels.fused.rearrange import rearrange, restore, swap_halves_
from kernels.layout import Layout
from kernels.reference import reorder as reference
from kernels.reference.reorder import check_dim, check_groups, check_halves, check_out


def reorder_w1w3_to_w3w1(
    weight: torch.Tensor, scale: torch.Tensor, dim: int = -2
) -> tuple[torch.Tensor, torch.Tensor]:
    """Exchange the gate and up halves along `dim`, in place on both tensors; no scratch."""
    for name, x in (("weight", weight), ("scale", scale)):
        check_halves(name, x, dim)
        if not x.is_contiguous():
            raise LayoutError(
                f"reorder_w1w3_to_w3w1: {name} {tuple(x.shape)} with strides {x.stride()} is not "
                "contiguous, and the exchange is in place; pass a contiguous tensor"
            )
    for x in (weight, scale):
        swap_halves_(x, dim % x.ndim)
    return weight, scale


def reorder_w13_to_w31_for_flashinfer_cutedsl(
    activation: object,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    *,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """New tensors (or `out`) with the up rows first, then the gate rows."""
    layout = reference.w31_layout(activation)
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
    layout = reference.w31_layout(activation)
    return invert_rows(layout, w31, -2, "w31"), invert_rows(layout, w31_scale, -2, "w31_scale")


def interleave_linear_and_gate(
    x: torch.Tensor, group_size: int = 64, dim: int = -1, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Alternate groups of `group_size` from the first and the second half along `dim`."""
    layout = reference.interleave_layout(group_size)
    check_groups("interleave_linear_and_gate", x, group_size, dim)
    return apply_rows(layout, x, dim, out, "x")


def deinterleave_linear_and_gate(
    x: torch.Tensor, group_size: int = 64, dim: int = -1
) -> torch.Tensor:
    """The inverse of `interleave_linear_and_gate`."""
    check_groups("deinterleave_linear_and_gate", x, group_size, dim)
    return invert_rows(reference.interleave_layout(group_size), x, dim, "x")


def shuffle_rows_for_trtllm(
    x: torch.Tensor, epilogue_tile_m: int = 128, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Permute rows inside 32-row blocks (tile 128) or 16-row blocks (other tiles)."""
    return apply_rows(_checked_shuffle(x, epilogue_tile_m), x, -2, out, "x")


def unshuffle_rows_for_trtllm(x: torch.Tensor, epilogue_tile_m: int = 128) -> torch.Tensor:
    """The inverse of `shuffle_rows_for_trtllm`."""
    return invert_rows(_checked_shuffle(x, epilogue_tile_m), x, -2, "x")


def apply_rows(
    layout: Layout, x: torch.Tensor, dim: int, out: torch.Tensor | None, name: str
) -> torch.Tensor:
    """A row layout along `dim` of x: same shape, new contiguous memory (or `out`)."""
    if out is not None:
        check_out(name, out, x, x.numel())
    rows = _as_rows(x, dim)
    result = rearrange(layout, rows, None if out is None else out.view(rows.shape))
    return result.view(x.shape) if out is None else out


def invert_rows(layout: Layout, x: torch.Tensor, dim: int, name: str) -> torch.Tensor:
    """The inverse of `apply_rows`."""
    check_halves(name, x, dim) if layout.parts > 1 else check_dim(name, x, dim)
    if x.shape[dim] % layout.tile[0]:
        raise LayoutError(
            f"{name} {tuple(x.shape)}: {x.shape[dim]} rows along dim {dim} are no multiple of the "
            f"{layout.tile[0]}-row tile of layout {layout.name!r}"
        )
    rows = _as_rows(x, dim)
    return restore(layout, rows, *rows.shape[-2:]).view(x.shape)


def _as_rows(x: torch.Tensor, dim: int) -> torch.Tensor:
    """x [.., dim, ..] -> [before, size along dim, after]: a view wherever the axes fold."""
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
            f"the {layout.tile[0]}-row block of epilogue tile {epilogue_tile_m}; pad the rows first"
        )
    return layout
