"""The ladder of checks, on real tensors: each returns `pass`, `pass (how far)`, `fail: ...` or
`skip: ...`.

No check has a tolerance. A failure names the tensor, how many elements differ, the first
coordinate [expert, n, k] of the checkpoint-order matrix (or of the storage), and both values. The
whole ladder runs on a small layer of the same kind (`harness.run.small`); on the real one run the
checks that need one or two passes over the bytes, and the rest on a sample that the verdict
describes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from harness.check import oracle
from harness.run.job import Job, Made, Result, bits
from kernels.layout import Layout

T = torch.Tensor
WHOLE = 1 << 19  # matrices up to this many elements are compared whole, larger ones by a sample


class Fails(Exception):
    """A check found a difference; the text is the verdict after `fail: `."""


def verdict(check: Callable[[], str | None]) -> str:
    """Runs one check; what it returns describes how far it looked."""
    try:
        extent = check()
    except Fails as found:
        return f"fail: {found}"
    return f"pass ({extent})" if extent else "pass"


def same(name: str, got: T, want: T) -> None:
    """Raises Fails unless both hold the same bits in the same shape."""
    if got.shape != want.shape:
        raise Fails(f"{name} has shape {list(got.shape)}, not {list(want.shape)}")
    a, b = (bits(x.contiguous() if x.stride()[-1:] not in ((), (1,)) else x) for x in (got, want))
    if torch.equal(a, b):
        return
    wrong = a != b
    at = int(wrong.flatten().nonzero()[0, 0])
    where = [int(i) for i in torch.unravel_index(torch.tensor(at), a.shape)]
    x, y = int(a.flatten()[at]), int(b.flatten()[at])
    raise Fails(
        f"{name}: {int(wrong.sum())} of {a.numel()} elements differ, first at {where}: "
        f"{_hex(x, a)} instead of {_hex(y, b)}"
    )


def _hex(value: int, like: T) -> str:
    size = like.element_size()
    return f"0x{value % (1 << 8 * size):0{2 * size}x}"


def digest(x: T) -> str:
    """sha256 of the elements in logical order."""
    data = bits(x.detach().cpu().contiguous()).flatten()
    array: Any = data.view(torch.uint8).numpy()
    return "sha256:" + hashlib.sha256(array).hexdigest()


def digests(tensors: Mapping[str, T]) -> dict[str, str]:
    return {name: digest(x) for name, x in tensors.items()}


# Checks of one result against its inputs.


def inverse(result: Result) -> str | None:
    """The layout's inverse of the storage is the matrix that went in."""
    for name, made in result.made.items():
        # by rows, so that one expert's [1, n] is not read as one matrix of a single row
        by_rows = made.storage.unflatten(1, made.layout.storage_shape(made.n, made.k))
        back = made.layout.inverse(by_rows, made.n, made.k)
        source = made.source()
        if source is None:
            again = made.layout.forward(back).flatten(1)
            same(
                f"{name}, read back through {made.layout.name} and laid out again",
                again,
                made.storage,
            )
        else:
            same(f"{name}, read back through {made.layout.name}", bits(back), source)
    return None


def by_formula(result: Result) -> str | None:
    """Each element is where the vendor's formula says, counted from the checkpoint tensor."""
    sampled, unknown = False, set()
    for name, made in result.made.items():
        truth = oracle.find(made.layout)
        if truth is None:
            unknown.add(made.layout.name)
            continue
        N, K = oracle.padded(truth, made.n, made.k)
        if made.storage.shape[1] != N * K:
            raise Fails(
                f"{name} in {made.layout.name} holds {made.storage.shape[1]} elements an expert; "
                f"the vendor's form of {made.n} x {made.k} holds {N} x {K}"
            )
        whole = made.n * made.k <= WHOLE
        sampled |= not whole
        for m, c in _coordinates(made.n, made.k, made.lines, made.depth):
            got = oracle.bytes_at(truth, made.storage, m, c, made.n, made.k)
            _same_at(f"{name} in {made.layout.name}", got, made.at(m, c), m, c)
    if unknown and len(unknown) == len({made.layout.name for made in result.made.values()}):
        return f"no vendor formula for {', '.join(sorted(unknown))}"
    if not sampled:
        return None
    made = min(result.made.values(), key=lambda made: made.lines)
    deep = f", {made.depth} deep," if made.depth < made.n else ""
    return f"{made.lines} rows and {made.lines} columns{deep} of each large matrix"


def _same_at(name: str, got: T, want: T, m: T, c: T) -> None:
    got, want = (
        bits(got),
        bits(want.to(got.dtype) if want.element_size() != got.element_size() else want),
    )
    if torch.equal(got, want):
        return
    e, i = (int(x) for x in (got != want).nonzero()[0])
    count = int((got != want).sum())
    raise Fails(
        f"{name}: {count} of {got.numel()} elements looked at differ, first at "
        f"[{e}, {int(m[i])}, {int(c[i])}]: {_hex(int(got[e, i]), got)} instead of "
        f"{_hex(int(want[e, i]), want)}"
    )


@lru_cache(maxsize=64)
def _coordinates(n: int, k: int, lines: int, depth: int) -> tuple[tuple[T, T], ...]:
    """(m, k) of every element, or of `lines` rows, and columns of `depth`, where it is too many."""
    if n * k <= WHOLE:
        index = torch.arange(n * k)
        return ((index // k, index % k),)
    rows, cols = _spread(n, lines), _spread(k, lines)
    every_row, every_col = _spread(n, min(n, depth)), torch.arange(k)
    across = (rows.repeat_interleave(k), every_col.repeat(len(rows)))
    down = (every_row.repeat_interleave(len(cols)), cols.repeat(len(every_row)))
    return across, down


def _spread(size: int, lines: int = 24) -> T:
    """That many indices: the ends, the middle (where gate meets up), and a golden-ratio spread."""
    if size <= lines:
        return torch.arange(size)
    fixed = {0, 1, size // 2 - 1, size // 2, size - 2, size - 1}
    index = 0
    while len(fixed) < lines:
        index += 1
        fixed.add(int(index * 0.6180339887 % 1 * size))
    return torch.tensor(sorted(fixed))


def values(result: Result) -> str | None:
    """Results that are numbers are those worked out the plain way."""
    sampled = False
    for name, want_rows in result.values.items():
        got = result.tensors[name]
        rows = _spread(got.shape[1]) if got.ndim > 2 else torch.arange(0)
        sampled |= got.ndim > 2 and len(rows) < got.shape[1]
        want = want_rows(rows)
        part = bits(got)[:, rows].view(got.dtype) if got.ndim > 2 else got
        same(name, part.contiguous(), want.contiguous())
    if not result.values:
        return "no values beside the layouts"
    return "24 rows of each" if sampled else None


def pad_fill(result: Result) -> str | None:
    """Every padding element of the storage is the declared fill; exact, by mask."""
    padding = 0
    for name, made in result.made.items():
        storage = made.storage
        if made.layout.bits is not None:  # bits of padding and data share words: undo, then look
            plain = replace(made.layout, bits=None)
            back = made.layout.inverse(storage, *made.layout.padded(made.n, made.k))
            storage = plain.forward(back).flatten(1)
        mask = _pad_mask(made.layout, made.n, made.k)
        padding += int(mask.sum())
        part = storage[:, mask]
        same(
            f"{name}, padding of {made.layout.name}", part, torch.full_like(part, made.layout.fill)
        )
    return None if padding else "no layout pads here"


@lru_cache(maxsize=32)
def _pad_mask(layout: Layout, n: int, k: int) -> T:
    return layout.pad_mask(n, k)


def pad_count(result: Result) -> str | None:
    """As many non-zero elements as went in: with an exact inverse, all padding is zero."""
    twiddled = 0
    for name, made in result.made.items():
        if made.layout.bits is not None:
            twiddled += 1
            continue
        source = made.source()
        if made.layout.fill != 0 or source is None:
            continue
        got, want = int(torch.count_nonzero(made.storage)), int(torch.count_nonzero(source))
        if got != want:
            raise Fails(f"{name}: {got} non-zero elements in {made.layout.name}, {want} went in")
    return (
        f"all but {twiddled} twiddled tensors, whose padding the small layer checks"
        if twiddled
        else None
    )


def strides(job: Job, result: Result) -> str | None:
    """Results are contiguous and share memory only with what they promise to."""
    inputs = {x.untyped_storage().data_ptr(): name for name, x in job.inputs.items() if x.numel()}
    for name, x in result.tensors.items():
        if not x.is_contiguous():
            raise Fails(f"{name} {list(x.shape)} has strides {list(x.stride())}: not contiguous")
        if job.promise == "in_place":
            given = result.inputs[name]
            if x.data_ptr() != given.data_ptr() or x.stride() != given.stride():
                raise Fails(f"{name} was to be written in place, and is other memory")
        elif job.promise == "new" and x.untyped_storage().data_ptr() in inputs and x.numel():
            raise Fails(f"{name} shares memory with input {inputs[x.untyped_storage().data_ptr()]}")
    for name, view in result.views.items():
        made = result.made.get(name)
        owner = made.storage if made else result.tensors[name]
        if view.untyped_storage().data_ptr() != owner.untyped_storage().data_ptr():
            raise Fails(f"the consumer's view of {name} is a copy, not a view of its storage")
        if made and (found := _view_strides(made, view)):
            raise Fails(f"the consumer's view of {name} {found}")
    return None


def _view_strides(made: Made, view: T) -> str:
    """What is wrong with a view's shape and strides, or ''; sizes of 1 may have any stride."""
    e, (rows, cols) = made.storage.shape[0], made.layout.storage_shape(made.n, made.k)
    N, K = made.layout.padded(made.n, made.k)
    forms = {
        "rows_cols": ((e, rows, cols), (rows * cols, cols, 1)),
        "cols_rows": ((e, cols, rows), (rows * cols, 1, cols)),
        "blackwell_5d": ((1, e * (N // 128), K // 4, 2, 256), (N * K * e, 128 * K, 512, 256, 1)),
        "mma_6d": ((32, 4, N // 128, 4, K // 4, e), (16, 4, 128 * K, 1, 512, N * K)),
    }
    shape, steps = forms[made.layout.view]
    have = tuple(view.shape), tuple(view.stride())
    pairs = zip(view.shape, view.stride(), steps, strict=False)
    if have[0] != shape or any(size > 1 and step != want for size, step, want in pairs):
        read = f"the consumer reads {list(shape)} by {list(steps)}"
        return f"is {list(have[0])} by {list(have[1])}; {read}"
    return ""


def unchanged(before: Mapping[str, str], inputs: Mapping[str, T]) -> str | None:
    """Inputs hold the bytes that they held."""
    for name, x in inputs.items():
        if digest(x) != before[name]:
            raise Fails(f"input {name} {list(x.shape)} was written to")
    return None


def equal(result: Result, other: Result, who: str) -> str | None:
    """Two implementations, or two runs, gave the same bits."""
    if set(result.tensors) != set(other.tensors):
        raise Fails(f"{who} gives {sorted(other.tensors)}, this one {sorted(result.tensors)}")
    for name, x in result.tensors.items():
        same(f"{name} against {who}", x.cpu(), other.tensors[name].cpu())
    return None
