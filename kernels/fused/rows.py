"""Rows of a tensor for a kernel that treats one axis: any shape and strides as three row axes.

The axis that is quantized is last. Row axes that are evenly spaced in every tensor merge into one,
and where whole blocks follow each other in memory rows join the last axis, so that a contiguous
tensor is one long row whatever its shape: no waste at row ends, and one specialisation for all of
them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch


@dataclass(frozen=True)
class Rows:
    """Sizes of (out, mid, row) and, for each tensor, its first element and strides with k's."""

    length: int
    sizes: tuple[int, int, int]
    tensors: tuple[torch.Tensor, ...]
    strides: tuple[tuple[int, int, int, int], ...]


def rows_of(
    tensors: tuple[torch.Tensor, ...], per_entry: tuple[int, ...], block: int
) -> Iterator[Rows]:
    """One Rows, or several where more than three row axes remain after merging.

    Tensors share all axes but the last, where tensor i has one entry for per_entry[i] elements of
    tensor 0 (0: one entry for all). Rows join the last axis only if it is a whole number of blocks.
    """
    length = tensors[0].shape[-1]
    last = [t.stride(-1) if per else 0 for t, per in zip(tensors, per_entry, strict=True)]
    axes = [
        (size, [t.stride(a) for t in tensors])
        for a, size in enumerate(tensors[0].shape[:-1])
        if size > 1
    ]
    axes.sort(key=lambda axis: axis[1][0], reverse=True)
    merged: list[tuple[int, list[int]]] = []
    for size, strides in axes:
        if merged and merged[-1][1] == [size * stride for stride in strides]:
            merged[-1] = (merged[-1][0] * size, strides)
        else:
            merged.append((size, strides))
    if merged and length % block == 0:
        size, strides = merged[-1]
        follow = [length // per * k if per else 0 for per, k in zip(per_entry, last, strict=True)]
        if strides == follow:
            length *= size
            merged.pop()
    inner = [(1, [0] * len(tensors))] * (3 - len(merged)) + merged[-3:]
    sizes = inner[0][0], inner[1][0], inner[2][0]
    strides = tuple(
        (inner[0][1][i], inner[1][1][i], inner[2][1][i], last[i]) for i in range(len(tensors))
    )
    outer = merged[:-3]
    if not outer:  # every tensor already starts where its rows do
        yield Rows(length, sizes, tensors, strides)
        return
    for index in product(*(range(size) for size, _ in outer)):
        starts = tuple(
            tensor.as_strided(
                (1,),
                (1,),
                tensor.storage_offset()
                + sum(i * axis[1][n] for i, axis in zip(index, outer, strict=True)),
            )
            for n, tensor in enumerate(tensors)
        )
        yield Rows(length, sizes, starts, strides)
