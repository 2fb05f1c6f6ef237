"""A rank's share of a weight in one pass: sliced, padded, put in order and laid out at once.

The share is a view of the checkpoint, [E, parts, rows, columns] (`kernels.weights.share`). What a
path does to it step by step (copy the slice, pad gate and up, exchange them, lay out) is one layout
of that view: `share_layout` derives it from the catalog's.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch

from kernels.fused.rearrange import Job, job_of_parts
from kernels.layout import Layout


def share_job(
    view: torch.Tensor, layout: Layout, n: int, k: int, up_first: bool,
    global_scales: torch.Tensor | None = None,
) -> Job:  # fmt: skip
    """view [E, parts, rows, columns] into storage [E, ...] of `layout` for matrices [n, k].

    Each part is padded with zeros to n / parts rows, and columns to k, before the layout pads
    further. up_first: the second part's rows come first. global_scales: as `Job` says.
    `share_layout` must have an answer.
    """
    parts = view.shape[1]
    laid = share_layout(layout, tuple(layout.sizes.items()), parts, n, k, up_first)
    assert laid is not None, f"layout {layout.name!r} does not take {parts} parts of {n} rows"
    if view.numel():
        return job_of_parts(laid[0], view, global_scales, laid[1])
    return Job(layout, view, view.new_empty((view.shape[0], *layout.storage_shape(n, k))))


@lru_cache(maxsize=512)
def share_layout(
    layout: Layout, sizes: tuple[tuple[str, int], ...], parts: int, n: int, k: int, up_first: bool
) -> tuple[Layout, tuple[int, bool] | None] | None:
    """`layout` of matrices [n, k] as the layout of a share, and `Job.split`; None where it has no
    such form.

    Alignment to the padded size itself makes padding of each part; an axis in front of the rows
    makes parts of a layout that has none, where a part is a whole number of tiles; where it is not,
    rows are told apart one by one. sizes: what the layout's hash leaves out.
    """
    del sizes
    whole = layout.padded(n, k)
    if parts == 1:
        return None if layout.parts > 1 or up_first else (replace(layout, align=whole), None)
    first = layout.source_axes[0][0]
    if layout.parts == parts:
        flip = (*layout.flip, first) if up_first else layout.flip
        again = up_first and first in layout.flip
        return None if again else (replace(layout, align=whole, flip=flip), None)
    if layout.parts > 1 or first in layout.sizes or parts != 2:
        return None
    half = n // parts
    if whole[0] != n or half % layout.tile[0]:
        return replace(layout, align=whole), (half, up_first)
    source, storage = (
        " ".join(
            f"({' '.join(f'part {axis}' if axis == first else axis for axis in group)})"
            for group in axes
        )
        for axes in (layout.source_axes, layout.storage_axes)
    )
    flip = (*layout.flip, "part") if up_first else layout.flip
    by_part = replace(
        layout, pattern=f"{source} -> {storage}", sizes={**layout.sizes, "part": parts},
        align=whole, flip=flip,
    )  # fmt: skip
    return by_part, None
