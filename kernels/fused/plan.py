"""From a Layout's digits to the compile-time description of one kernel launch.

A layout is a list of digits (`Layout.digits`); each steps through the source matrix and through the
storage. The planner merges the digits that stay contiguous on both sides into a run, picks the widest
word that keeps together and stays aligned, and splits the rest into a grid (any sizes, at run time)
and a tile (powers of two, at compile time). Two shapes of kernel come out:

rows   whole runs move (reorders, interleaves, row shuffles, padding): each 16-byte unit of the
       storage finds its source by dividing its number into digits.
tile   words change order inside a tile (block scales, Hopper and CDNA4 layouts): a tile is read in
       source order, permuted in registers and shared memory, and written in storage order.

Coordinates of the source are (p, h, c): part (gate or up half), row inside the part, column. Columns
count bytes where a row is contiguous, else elements. Padding is what lies past the valid h or c.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import gcd, prod

from kernels.fused.tiles import Tile, ceil_pow2, tile_for
from kernels.layout import Layout

P, H, C = 0, 1, 2  # coordinates of the source
RANK = 8  # axes of the permuted tile; sizes of 1 fill up
AT_RUN_TIME = -1  # a stride that the kernel takes as an argument
GRID = 4  # digits of the grid beside the matrix


@dataclass(frozen=True)
class Part:
    """One digit, or a share of one. mult: step of its coordinate; out: step in the storage."""

    size: int
    dim: int
    mult: int
    out: int
    inferred: bool = False


@dataclass(frozen=True)
class Plan:
    """kind: `rows` or `tile`. word: bytes of an element. grid: programs per matrix. args: run-time
    values in the order of the kernel's own; consts: compile-time ones. warps: per program."""

    kind: str
    word: int
    grid: int
    args: dict[str, object]
    consts: dict[str, object]
    warps: int


@dataclass(frozen=True)
class _Problem:
    """A layout at one size and stride, in units of bytes (rows contiguous) or elements (else)."""

    layout: Layout
    digits: tuple[Part, ...]  # innermost in storage first
    base: tuple[int, int, int]  # coordinate at which flipped digits begin
    valid: tuple[int, int]  # rows of a part, columns: in the source
    padded: tuple[int, int]  # the same in storage
    strides: tuple[int, int, int, int]  # matrix, part, row, column
    storage: int  # units of one matrix in storage
    align: tuple[int, int]  # of the two addresses, in bytes
    near: bool  # a row is contiguous
    word: int = field(default=1)

    @property
    def wide(self) -> bool:
        """Whether offsets inside one matrix need 64 bits."""
        _, part, row, col = self.strides
        reach = part * self.layout.parts + row * self.padded[0] + col * self.padded[1]
        return max(reach, self.storage) >= 1 << 31


@lru_cache(maxsize=4096)
def plan(
    layout: Layout,
    sizes: tuple[tuple[str, int], ...],
    n: int,
    k: int,
    item: int,
    strides: tuple[int, int, int],
    align: tuple[int, int],
    target: str,
    tile: Tile | None = None,
) -> Plan:
    """The launch for matrices [n, k] of `item`-byte elements with element strides (matrix, n, k).

    sizes: layout.sizes as items, which the layout's own hash leaves out. align: powers of two, in bytes,
    that divide the addresses of source and storage. tile: overrides the table, for sweeps.
    """
    del sizes
    problem = _problem(layout, n, k, item, strides, align)
    whole = problem.near and problem.valid == problem.padded and problem.strides[2] == problem.padded[1]
    run, rest = _run(problem, inferred=True, rows=whole)
    if layout.bits is None and not any(d.dim == C for d in rest):
        return _rows_plan(_with_word(problem, run, 16, item), run, rest, tile or tile_for(target, "words"))
    run, rest = _run(problem, inferred=False, rows=False)
    problem = _with_word(problem, run, 4, item)
    if layout.bits is not None and problem.word == 2:
        problem = replace(problem, word=1)
    kind = "bits" if layout.bits else "words" if run >= 4 else "bytes"
    return _tile_plan(problem, run, rest, tile or tile_for(target, kind))


def _problem(
    layout: Layout, n: int, k: int, item: int, strides: tuple[int, int, int], align: tuple[int, int]
) -> _Problem:
    near = strides[2] == 1 or k == 1
    unit = item if near else 1
    parts, (big_n, big_k) = layout.parts, layout.padded(n, k)
    inferred = {name for group in layout.source_axes for name in group if name not in layout.sizes}
    base, digits = [0, 0, 0], [Part(unit, C, 1, 1)] if unit > 1 else []
    for d in reversed(layout.digits(n, k)):
        of_part = d.dim == 0 and d.in_stride >= big_n // parts and d.name not in inferred
        dim = C if d.dim == 1 else P if of_part else H
        mult = d.in_stride // (big_n // parts) if of_part else d.in_stride * (unit if d.dim else 1)
        if d.flip:
            base[dim] += mult * (d.size - 1)
            mult = -mult
        digits.append(Part(d.size, dim, mult, d.out_stride * unit, d.name in inferred))
    return _Problem(
        layout=layout, digits=tuple(digits), base=(base[0], base[1], base[2]),
        valid=(n // parts, k * unit), padded=(big_n // parts, big_k * unit),
        strides=(strides[0] * unit, n // parts * strides[1] * unit, strides[1] * unit, 1 if near else strides[2]),
        storage=big_n * big_k * unit, align=align, near=near,
    )  # fmt: skip


def _run(p: _Problem, *, inferred: bool, rows: bool) -> tuple[int, tuple[Part, ...]]:
    """Units that stay together from source to storage, and the digits outside of them.

    inferred: the inferred axis of k may belong to the run; rows: so may rows, which then have no padding.
    """
    run = 1
    for at, d in enumerate(p.digits):
        if d.dim == C:
            joins = d.mult == run and (inferred or not d.inferred)
        else:
            step = d.mult * p.strides[1 if d.dim == P else 2]
            joins = rows and step == run and run >= p.padded[1]
        if d.size > 1 and not joins:
            return run, p.digits[at:]
        run *= d.size
    return run, ()


def _with_word(p: _Problem, run: int, most: int, item: int) -> _Problem:
    """The widest word, in bytes, that divides the run, every stride and the valid columns."""
    if not p.near or p.layout.fill:
        return replace(p, word=item)  # a fill other than zero is a value, not bytes
    fits = gcd(*p.align, run, p.valid[1], *p.strides[:3], p.storage, 16)
    return replace(p, word=min(most, fits))


def _in_words(p: _Problem) -> tuple[int, _Problem]:
    """Units of a word, and the problem's sizes and strides in words."""
    w = p.word if p.near else 1
    e, part, row, col = p.strides
    return w, replace(
        p, valid=(p.valid[0], p.valid[1] // w), padded=(p.padded[0], p.padded[1] // w),
        strides=(e // w, part // w, row // w, col), storage=p.storage // w,
    )  # fmt: skip


def _rows_plan(p: _Problem, run: int, rest: Sequence[Part], tile: Tile) -> Plan:
    vector = max(1, p.word // 4) if p.near else 1
    p = replace(p, word=p.word // vector)
    w, p = _in_words(p)
    digits = [d for d in rest if d.size > 1]
    per_run = run // w // vector
    blocks = -(-p.storage // vector // tile.rows_units)
    consts = {
        "SIZES": tuple(0 if d.inferred else d.size for d in digits),
        "DIMS": tuple(d.dim for d in digits),
        "MULTS": tuple(d.mult for d in digits),
        "BASE": p.base, "UNITS": tile.rows_units, "VECTOR": vector,
        "PADDED": p.valid != p.padded, "FILL": p.layout.fill, "WIDE": p.wide,
    }  # fmt: skip
    args = {
        "per_run": per_run, "count": p.storage // vector, "blocks": blocks,
        "inferred": next((d.size for d in digits if d.inferred), 1),
        "valid": p.valid, "strides": p.strides, "storage_stride": p.storage,
    }  # fmt: skip
    return Plan("rows", p.word, blocks, args, consts, tile.rows_warps)


def _tile_plan(p: _Problem, run: int, rest: Sequence[Part], tile: Tile) -> Plan:
    w, p = _in_words(p)
    rest = [replace(d, out=d.out // w, mult=d.mult // w if d.dim == C else d.mult) for d in rest]
    tiled, grid = _split([Part(run // w, C, 1, 1)] if run > w else [], rest, tile, w)
    read = _read_order(p, tiled)
    fit = gcd(p.align[0], 16, *(s * p.word for s in (p.valid[1], *p.strides[:3]))) if p.near else 1
    in_vector = _vector([(d.size, d.mult if d.dim == C else 0) for d in read], max(1, fit // p.word))
    outs = (p.storage, *(d.out for d in (*tiled, *grid) if d.inferred))
    out_fit = gcd(p.align[1], 16, *(s * p.word for s in outs))
    out_vector = _vector([(1 if d.inferred else d.size, d.out) for d in tiled], max(1, out_fit // p.word))
    load = _merge(_skip(read, in_vector), lambda a, b: a.dim == b.dim and b.mult == a.mult * a.size)
    store = _merge(_skip(tiled, out_vector), lambda a, b: b.out == a.out * a.size and not b.inferred)
    live = [d for d in grid if d.size > 1]
    rank = len(read)
    if len(live) > GRID or rank > RANK:
        raise NotImplementedError(
            f"layout {p.layout.name!r}: {len(live)} grid and {rank} tile axes; the kernel has {GRID} and {RANK}"
        )
    order = [RANK - 1 - read.index(d) for d in reversed(tiled)]
    perm = (*range(RANK - rank), *order)
    live += [Part(1, C, 0, 0)] * (GRID - len(live))
    total = prod(d.size for d in tiled)
    moves: dict[int, int] = {}
    for target, origin in enumerate(p.layout.bits or ()):
        moves[target - origin] = moves.get(target - origin, 0) | 1 << target
    consts = {
        "GRID_DIMS": tuple(d.dim for d in live), "GRID_MULTS": tuple(d.mult for d in live),
        "BASE": p.base,
        "IN_UNITS": total // in_vector, "IN_VECTOR": in_vector,
        "IN_SIZES": tuple(d.size for d in load), "IN_DIMS": tuple(d.dim for d in load),
        "IN_MULTS": tuple(d.mult for d in load),
        "OUT_UNITS": total // out_vector, "OUT_VECTOR": out_vector,
        "OUT_SIZES": tuple(d.size for d in store),
        "OUT_STRIDES": tuple(AT_RUN_TIME if d.inferred and d.dim == H else d.out for d in store),
        "EDGES": _edges(tiled, out_vector),
        "SHAPE": (*(1,) * (RANK - rank), *(d.size for d in reversed(read))),
        "PERM": perm,
        "BACK_SHAPE": (*(1,) * (RANK - rank), *(d.size for d in reversed(tiled))),
        "BACK_PERM": tuple(perm.index(at) for at in range(RANK)),
        "BITS": tuple(v for move in moves.items() for v in move),
        "PADDED": p.valid != p.padded, "OVERHANG": _overhangs(p, tiled, grid),
        "FILL": p.layout.fill, "WIDE": p.wide, "WORD": p.word,
    }  # fmt: skip
    args = {
        "counts": tuple(d.size for d in live), "outs": tuple(d.out for d in live),
        "row_out": next((d.out for d in tiled if d.inferred and d.dim == H), 0),
        "valid": p.valid, "padded": p.padded, "strides": p.strides, "storage_stride": p.storage,
    }  # fmt: skip
    return Plan("tile", p.word, prod(d.size for d in live), args, consts, tile.warps)


def _split(
    tiled: list[Part], rest: Sequence[Part], tile: Tile, word: int
) -> tuple[list[Part], list[Part]]:
    """The digits of the tile, innermost first, and those of the grid.

    In the tile: sized axes that are inside both inferred ones in storage, so that their strides are
    constants; then enough columns of the inferred k axis for whole sectors, then rows up to the size.
    """
    grid: list[Part] = []
    for d in rest:
        small = not d.inferred and d.size == ceil_pow2(d.size) and not any(g.inferred for g in grid)
        (tiled if small else grid).append(d)
    elements = prod(d.size for d in tiled)
    for dim, most in ((C, tile.k_bytes), (H, tile.tile_bytes)):
        for at, d in enumerate(grid):
            if d.inferred and d.dim == dim:
                room = most // (d.mult * word) if dim == C else tile.tile_bytes // (elements * word)
                share = min(ceil_pow2(d.size), 1 << max(0, room.bit_length() - 1))
                grid[at] = replace(d, size=-(-d.size // share), mult=d.mult * share, out=d.out * share)
                if share > 1:
                    tiled.append(replace(d, size=share))
                    elements *= share
    return sorted((d for d in tiled if d.size > 1), key=lambda d: d.out), grid


def _read_order(p: _Problem, tiled: Sequence[Part]) -> list[Part]:
    """The tile's digits from the nearest in the source outwards.

    Rows that meet inside one 16-byte store go last, so that a thread holds all of them and the bytes of
    a store word meet in registers.
    """
    inside, meet = 1, set()
    for d in tiled:
        if inside * p.word < 16 and d.dim != C:
            meet.add(d)
        inside *= d.size
    far = {P: p.strides[1], H: p.strides[2], C: p.strides[3]}
    return sorted(tiled, key=lambda d: (d in meet, abs(d.mult) * far[d.dim]))


def _vector(digits: Sequence[tuple[int, int]], most: int) -> int:
    """How many elements from the first on are neighbours, at most `most`: a power of two."""
    run = 1
    for size, stride in digits:
        if stride != run or run >= most:
            break
        run *= size
    return min(run, most)


def _skip(digits: Sequence[Part], vector: int) -> list[Part]:
    """The digits in steps of whole vectors."""
    left = []
    for d in digits:
        taken = min(vector, d.size)
        vector //= taken
        if d.size > taken:
            left.append(replace(d, size=d.size // taken, mult=d.mult * taken, out=d.out * taken))
    return left


def _merge(digits: Sequence[Part], follows: Callable[[Part, Part], bool]) -> list[Part]:
    """Neighbouring digits as one where the second goes on where the first ends."""
    merged: list[Part] = []
    for d in digits:
        if merged and follows(merged[-1], d):
            merged[-1] = replace(merged[-1], size=merged[-1].size * d.size)
        else:
            merged.append(d)
    return merged


def _edges(tiled: Sequence[Part], vector: int) -> tuple[int, ...]:
    """For each share of an inferred axis: vectors before it, size, coordinate and step, in a row."""
    edges, inside = [], 1
    for d in tiled:
        if d.inferred:
            edges += [inside // vector, d.size, d.dim, d.mult]
        inside *= d.size
    return tuple(edges)


def _overhangs(p: _Problem, tiled: Sequence[Part], grid: Sequence[Part]) -> bool:
    """Whether the last tile along an inferred axis reaches past the storage."""
    reach = {d.dim: d.size * d.mult for d in grid if d.inferred}
    return any(d.inferred and reach[d.dim] > p.padded[d.dim - 1] for d in tiled)
