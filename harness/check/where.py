"""Where two storages of one layout differ: how many bytes, in values or in padding, and the first
one.

Coordinates are those of the checkpoint-order matrix, [expert, n, k]; padding has none, and is given
by its offset in the storage. A layout that packs words (`bits`) is compared by words, whose first
byte stands for them.
"""

from __future__ import annotations

import torch

from kernels.layout import Layout

T = torch.Tensor


def differ(a: T, b: T, layout: Layout, n: int, k: int) -> str | None:
    """None when equal, else one sentence; a, b: [E, bytes] uint8 of an n x k matrix in `layout`."""
    rows, cols = layout.storage_shape(n, k)
    if a.shape != b.shape:
        sizes = f"{a.shape[-1]} bytes an expert and {b.shape[-1]}"
        return f"size: {sizes}; {layout.name} of {n} x {k} takes {rows * cols}"
    if torch.equal(a, b):
        return None
    if a.shape[-1] != rows * cols:
        return f"values: {int((a != b).sum())} of {a.numel()} bytes, in a storage of another size"
    wrong = a != b
    padding = layout.pad_mask(n, k)
    if layout.bits is not None:  # a word holds padding only where all four of its bytes do
        padding = padding.view(-1, 4).all(1).repeat_interleave(4)
    in_values, in_padding = wrong & ~padding, wrong & padding
    if bool(in_values.any()):
        expert, at = (int(i) for i in in_values.nonzero()[0])
        word = at - at % 4 if layout.bits is not None else at
        offsets = layout.offsets(n, k)
        inside = (offsets >= word) & (offsets < word + (4 if layout.bits is not None else 1))
        row, col = (int(i) for i in inside.nonzero()[0])
        count, kind = int(in_values.sum()), "values"
        where = f"[{expert}, {row}, {col}] (storage offset {at})"
    else:
        expert, at = (int(i) for i in in_padding.nonzero()[0])
        count, kind, where = int(in_padding.sum()), "padding only", f"expert {expert}, offset {at}"
    first = f"0x{int(a[expert, at]):02x} and 0x{int(b[expert, at]):02x}"
    return f"{kind}: {count} of {a.numel()} bytes, first at {where}: {first}"
