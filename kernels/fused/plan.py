"""From a Layout's digits to the compile-time description of one kernel launch.

A layout is a list of digits (`Layout.digits`); each steps through the source matrix and through the
storage. The planner merges the digits that stay contiguous on both sides into a run, picks the
widest word that keeps together and stays aligned, and splits the rest into a grid (any sizes, at
run time) and a tile (powers of two, at compile time). Two shapes of kernel come out:

rows   whole runs move (reorders, interleaves, row shuffles, padding): each 16-byte unit of the
       storage finds its source by dividing its number into digits.
tile   words change order inside a tile (block scales, Hopper and CDNA4 layouts): a tile is read in
       source order, permuted in registers and shared memory, and written in storage order.

Coordinates of the source are (p, h, c): part (gate or up half), row inside the part, column.
Columns count bytes where a row is contiguous, else elements. Padding is what lies past the valid h
or c.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from math import gcd

from kernels.fused.digits import C, H, P, Part, Plan, Problem
from kernels.fused.tile_plan import tile_plan
from kernels.fused.tiles import Tile, ceil_pow2, tile_for
from kernels.layout import Layout


@lru_cache(maxsize=4096)
def plan(
    layout: Layout,
    sizes: tuple[tuple[str, int], ...],
    n: int,
    k: int,
    item: int,
    strides: tuple[int, int, int, int],
    align: tuple[int, int],
    target: str,
    tile: Tile | None = None,
    parts_apart: bool = False,
    split: tuple[int, bool] | None = None,
) -> Plan:
    """The launch for matrices [n, k] of `item`-byte elements with element strides (matrix, part, n,
    k); a part is what `layout.parts` divides the rows into.

    sizes: layout.sizes as items, which the layout's own hash leaves out. align: powers of two, in
    bytes, that divide the addresses of source and storage. tile: overrides the table, for sweeps.
    parts_apart: the kernel has to know the part of what it moves. split: as `Job` has it.
    """
    del sizes
    problem = replace(_problem(layout, n, k, item, strides, align), split=split)
    unpadded, row = problem.valid == problem.padded, problem.strides[2]
    whole = problem.near and unpadded and row == problem.padded[1] and not parts_apart
    run, rest = _run(problem, inferred=True, rows=whole)
    if layout.bits is None and not any(d.dim == C for d in rest):
        joined, rest = _join_rows(problem, run, rest) if whole else (problem, rest)
        joined = _with_word(joined, run, 16, item)
        if joined.near and joined.word >= 8 and not split:
            return _rows_plan(joined, run, rest, tile or tile_for(target, "rows"))
        narrow = _with_columns(problem, item)
        run, rest = _run(narrow, inferred=False, rows=False)
        return tile_plan(narrow, run, rest, tile or tile_for(target, "narrow"))
    run, rest = _run(problem, inferred=False, rows=False)
    problem = _with_word(problem, run, 4, item)
    if layout.bits is not None and problem.word == 2:
        problem = replace(problem, word=1)
    if layout.bits:
        kind = "bits"
    else:
        kind = {1: "bytes", 2: "halves"}.get(problem.word, "words")
    return tile_plan(problem, run, rest, tile or tile_for(target, kind))


def _problem(
    layout: Layout, n: int, k: int, item: int, strides: tuple[int, int, int, int],
    align: tuple[int, int],
) -> Problem:  # fmt: skip
    near = strides[3] == 1 or k == 1
    unit = item if near else 1
    parts, (big_n, big_k) = layout.parts, layout.padded(n, k)
    inferred = {name for group in layout.source_axes for name in group if name not in layout.sizes}
    base, digits = [0, 0, 0], [Part("byte", unit, C, 1, 1)] if unit > 1 else []
    for d in reversed(layout.digits(n, k)):
        of_part = d.dim == 0 and d.in_stride >= big_n // parts and d.name not in inferred
        dim = C if d.dim == 1 else P if of_part else H
        mult = d.in_stride // (big_n // parts) if of_part else d.in_stride * (unit if d.dim else 1)
        if d.flip:
            base[dim] += mult * (d.size - 1)
            mult = -mult
        digits.append(Part(d.name, d.size, dim, mult, d.out_stride * unit, d.name in inferred))
    return Problem(
        layout=layout, digits=tuple(digits), base=(base[0], base[1], base[2]),
        valid=(n // parts, k * unit), padded=(big_n // parts, big_k * unit),
        strides=(*(s * unit for s in strides[:3]), 1 if near else strides[3]),
        storage=big_n * big_k * unit, align=align, near=near,
    )  # fmt: skip


def _run(p: Problem, *, inferred: bool, rows: bool) -> tuple[int, tuple[Part, ...]]:
    """Units that stay together from source to storage, and the digits outside of them.

    inferred: the inferred axis of k may belong to the run; rows: so may rows, which then have no
    padding.
    """
    run = 1
    for at, d in enumerate(p.digits):
        if d.dim == C:
            fits_a_tile = not d.inferred and d.size == ceil_pow2(d.size)
            joins = d.mult == run and (inferred or fits_a_tile)
        else:
            step = d.mult * p.strides[1 if d.dim == P else 2]
            joins = rows and step == run and run >= p.padded[1]
        if d.size > 1 and not joins:
            return run, p.digits[at:]
        run *= d.size
    return run, ()


def _join_rows(p: Problem, run: int, rest: Sequence[Part]) -> tuple[Problem, tuple[Part, ...]]:
    """The problem with the rows of a run as one long row, so only the steps of runs count."""
    step = gcd(*(d.mult for d in rest if d.dim == H)) or 1
    matrix, part, row, col = p.strides
    strides = (
        matrix,
        part if any(d.dim == P for d in rest) else 0,
        row * step if any(d.dim == H for d in rest) else 0,
        col,
    )
    joined = replace(
        p, base=(p.base[0], p.base[1] // step, p.base[2]), strides=strides,
        valid=(p.valid[0], run), padded=(p.padded[0], run),
    )  # fmt: skip
    return joined, tuple(replace(d, mult=d.mult // step) if d.dim == H else d for d in rest)


def _with_columns(p: Problem, item: int) -> Problem:
    """Rows too badly aligned for 16-byte units: the widest word becomes the inner axis of k."""
    p = _with_word(p, p.padded[1], 4, item)
    word = p.word if p.near else 1
    inner = [Part("word", word, C, 1, 1)] if word > 1 else []
    columns = [d for d in p.digits if d.inferred and d.dim == C]
    others = [d for d in p.digits if d.dim != C]
    size = p.padded[1] // word
    outer = [replace(d, size=size, mult=word, out=word) for d in columns]
    return replace(p, digits=(*inner, *outer, *others))


def _with_word(p: Problem, run: int, most: int, item: int) -> Problem:
    """The widest word, in bytes, that divides the run, every stride and the valid columns."""
    if not p.near or p.layout.fill:
        return replace(p, word=item)  # a fill other than zero is a value, not bytes
    fits = gcd(*p.align, run, p.valid[1], *p.strides[:3], p.storage, 16)
    return replace(p, word=min(most, fits))


def _rows_plan(p: Problem, run: int, rest: Sequence[Part], tile: Tile) -> Plan:
    vector = max(1, p.word // 4) if p.near else 1
    unit = p.word if p.near else 1
    word, p = p.word // vector, p.in_units(unit)
    digits = [d for d in rest if d.size > 1]
    blocks = -(-p.storage // tile.rows_units)
    consts = {
        "SIZES": tuple(0 if d.inferred else d.size for d in digits),
        "DIMS": tuple(d.dim for d in digits),
        "MULTS": tuple(d.mult for d in digits),
        "BASE": p.base, "UNITS": tile.rows_units, "VECTOR": vector,
        "PADDED": p.valid != p.padded, "FILL": p.layout.fill, "WIDE": p.wide, "WORD": word,
    }  # fmt: skip
    args = {
        "per_run": run // unit, "count": p.storage, "blocks": blocks,
        "inferred": next((d.size for d in digits if d.inferred), 1),
        "valid": p.valid, "strides": p.strides, "storage_stride": p.storage,
    }  # fmt: skip
    return Plan("rows", word, blocks, args, consts, tile.rows_warps)
