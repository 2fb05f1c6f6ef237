"""Checks of an index map itself: it hits every element once, and a wrong one would be noticed."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, partial
from itertools import pairwise

import torch

from harness.check import oracle
from harness.check.checks import Fails, by_formula
from harness.run.job import Result
from kernels.errors import LayoutError
from kernels.layout import Layout

T = torch.Tensor


def bijection(result: Result) -> str | None:
    """The index map of each layout hits every storage element once, data or padding."""
    whole = True
    for made in result.made.values():
        n, k = (_shrunk(s, a) for s, a in zip((made.n, made.k), made.layout.align, strict=True))
        whole &= (n, k) == (made.n, made.k)
        if found := _bijection(made.layout, n, k):
            raise Fails(found)
    return None if whole else "index maps of a few tiles and the same remainders"


def _shrunk(size: int, align: int) -> int:
    """The same remainder of two tiles, with at most four tiles."""
    return size if size <= 4 * align + 64 else size % (2 * align) + 2 * align


@lru_cache(maxsize=256)
def _bijection(layout: Layout, n: int, k: int) -> str:
    rows, cols = layout.storage_shape(n, k)
    offsets = layout.offsets(n, k).flatten()
    hits = torch.bincount(offsets, minlength=rows * cols)
    if hits.numel() != rows * cols or int(hits.max()) > 1 or int(hits.sum()) != n * k:
        at = int(hits.argmax())
        return (
            f"layout {layout.name} of {n} x {k}: storage element {at} is hit {int(hits.max())} "
            f"times, {int((hits == 0).sum())} of {rows * cols} not at all"
        )
    return ""


def mutated(result: Result) -> str | None:
    """A layout with two axes exchanged is noticed: the formula check is no formality."""
    seen = 0
    for name, made in result.made.items():
        other = _swapped(made.layout, made.n, made.k)
        if other is None or oracle.find(made.layout) is None:
            continue
        seen += 1
        # random bytes everywhere: a layer's own padding would hide a move of nothing but zeros
        dice = torch.Generator().manual_seed(seen)
        x = torch.randint(0, 256, (1, made.n, made.k), dtype=torch.uint8, generator=dice)
        wrong = replace(made, storage=other.forward(x).flatten(1), at=partial(_element, x))
        try:
            by_formula(Result({}, made={name: wrong}))
        except Fails:
            continue
        raise Fails(f"{name}: {made.layout.name} as {other.pattern!r} passes as right")
    return None if seen else "no layout here has two axes to exchange"


def _element(x: T, m: T, c: T) -> T:
    return x[:, m, c]


@lru_cache(maxsize=256)
def _swapped(layout: Layout, n: int, k: int) -> Layout | None:
    """The layout with two axes of its storage exchanged so that the index map changes."""
    source, storage = layout.pattern.split("->")
    names = [d.name for d in layout.digits(n, k) if d.size > 1]
    if layout.flip:
        return replace(layout, flip=())
    for first, second in pairwise(names):
        trade = {first: second, second: first}
        tokens = storage.replace("(", "( ").replace(")", " )").split()
        pattern = source + "-> " + " ".join(trade.get(t, t) for t in tokens)
        pattern = pattern.replace("( ", "(").replace(" )", ")")
        try:
            other = replace(layout, pattern=pattern)
            if not torch.equal(other.offsets(n, k), layout.offsets(n, k)):
                return other
        except LayoutError:
            continue
    return None
