"""The plan of a tile kernel: which digits it holds, in which order it reads and writes them.

Bytes that meet in a stored word often come from different rows (Hopper and CDNA4 layouts). Then the
tile is read as words of `meet` bytes, the words whose bytes meet are brought together, and the
bytes change places between them in registers: a transposition of meet x meet bytes. Where
alignment or the digits do not allow it, single bytes move. A permutation of bits is done on the
words before that transposition, four stored words at a time, so that one shift and mask serves
four bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import gcd, prod

from kernels.fused.digits import C, H, P, Part, Plan, Problem
from kernels.fused.tiles import Tile, ceil_pow2

RANK = 8  # axes of the permuted tile; sizes of 1 fill up
GRID = 8  # digits of the grid beside the matrix
AT_RUN_TIME = -1  # a stride that the kernel takes as an argument


def tile_plan(p: Problem, run: int, rest: Sequence[Part], tile: Tile) -> Plan:
    """The launch for a problem whose digits outside of the run are `rest`."""
    w = p.word if p.near else 1
    p = p.in_units(w)
    rest = [_in_words(d, w) for d in rest]
    tiled, grid = _split([Part("run", run // w, C, 1, 1)] if run > w else [], rest, tile, p.word)
    meet, tiled, within, met = _meeting(p, tiled)
    p = replace(p.in_units(meet), word=p.word * meet)
    words = [_in_words(d, meet) for d in tiled]
    grid = [_in_words(d, meet) for d in grid if d.size > 1]
    read = [d for d in words if d.name not in within]
    store = [d for d in words if d.name not in met]
    if len(grid) > GRID or max(len(read), len(store)) > RANK:
        raise NotImplementedError(
            f"layout {p.layout.name!r}: {len(grid)} grid and {len(words)} tile axes; the kernel "
            f"has {GRID} and {RANK}"
        )
    along = sorted((d for d in read if d.dim == C), key=lambda d: d.mult)
    in_vector = _vector([(d.mult, d.size) for d in along], p.source_fit // p.word)
    outs = (p.storage, *(d.out for d in (*store, *grid) if d.inferred))
    out_fit = gcd(p.align[1], 16, *(s * p.word for s in outs)) // p.word
    out_vector = _vector([(d.out, 1 if d.inferred else d.size) for d in store], out_fit)
    read = _read_order(p, read, store, met, in_vector)
    load = _merge(_skip(read, in_vector), lambda a, b: a.dim == b.dim and b.mult == a.mult * a.size)
    write = _merge(
        _skip(store, out_vector), lambda a, b: b.out == a.out * a.size and not b.inferred
    )
    total = prod(d.size for d in read)
    size = {d.name: d.size for d in words}
    source, stored = [d.name for d in read], [d.name for d in store]
    apart = [name for name in source if name not in met]
    live = grid + [Part("", 1, C, 0, 0)] * (GRID - len(grid))
    consts = {
        "GRID_DIMS": tuple(d.dim for d in live), "GRID_MULTS": tuple(d.mult for d in live),
        "BASE": p.base,
        "IN_UNITS": total // in_vector, "IN_VECTOR": in_vector,
        "IN_SIZES": tuple(d.size for d in load), "IN_DIMS": tuple(d.dim for d in load),
        "IN_MULTS": tuple(d.mult for d in load),
        "OUT_UNITS": total // out_vector, "OUT_VECTOR": out_vector,
        "OUT_SIZES": tuple(d.size for d in write),
        "OUT_STRIDES": tuple(
            AT_RUN_TIME if d.inferred and d.dim == H else d.out // out_vector for d in write
        ),
        "EDGES": _edges(store, out_vector),
        **_permutation("", source, met + apart if met else stored, size),
        **_permutation("WORD_", within + apart, stored if met else within + apart, size),
        "MEET": meet, "MOVES": _moves(p.layout.bits) if meet == 4 else (),
        "BITS": () if meet == 4 else _distances(p.layout.bits),
        "PADDED": p.valid != p.padded, "OVERHANG": _overhangs(p, store, grid),
        "FILL": _repeated(p.layout.fill, meet), "WIDE": p.wide, "WORD": p.word,
        "SPLIT": 0 if p.split is None else -1 if p.split[1] else 1,
    }  # fmt: skip
    args = {
        "counts": tuple(d.size for d in live),
        "outs": tuple(d.out // out_vector for d in live),
        "row_out": next((d.out // out_vector for d in write if d.inferred and d.dim == H), 0),
        "valid": p.valid, "padded": p.padded,
        "strides": (*(s // in_vector for s in p.strides[:3]), p.strides[3]),
        "storage_stride": p.storage // out_vector, "half": p.split[0] if p.split else 0,
    }  # fmt: skip
    return Plan("tile", p.word, prod(d.size for d in live), args, consts, tile.warps)


def _repeated(byte: int, times: int) -> int:
    """A word of so many equal bytes, as a signed number; one byte stays as it is."""
    word = bytes([byte]) * times
    return byte if times == 1 else int.from_bytes(word, "little", signed=True)


def _in_words(d: Part, columns: int) -> Part:
    """The digit with steps counted in words of so many columns."""
    return replace(d, out=d.out // columns, mult=d.mult // columns if d.dim == C else d.mult)


def _split(
    tiled: list[Part], rest: Sequence[Part], tile: Tile, word: int
) -> tuple[list[Part], list[Part]]:
    """The digits of the tile, innermost first, and those of the grid.

    In the tile: sized axes that are inside both inferred ones in storage, so that their strides are
    constants; then enough columns of the inferred k axis for whole sectors, then rows up to the
    size.
    """
    grid: list[Part] = []
    for d in rest:
        small = not d.inferred and d.size == ceil_pow2(d.size) and not any(g.inferred for g in grid)
        (tiled if small else grid).append(d)
    elements = prod(d.size for d in tiled)
    for dim in (C, H):
        for at, d in enumerate(grid):
            if d.inferred and d.dim == dim:
                room = tile.tile_bytes // (elements * word)
                if dim == C:
                    room = min(room, tile.k_bytes // (d.mult * word))
                share = min(ceil_pow2(d.size), 1 << max(0, room.bit_length() - 1))
                grid[at] = replace(
                    d, size=-(-d.size // share), mult=d.mult * share, out=d.out * share
                )
                if share > 1:
                    tiled.append(replace(d, size=share))
                    elements *= share
    return sorted((d for d in tiled if d.size > 1), key=lambda d: d.out), grid


def _meeting(p: Problem, tiled: list[Part]) -> tuple[int, list[Part], list[str], list[str]]:
    """(meet, digits, within, met): how many bytes change places between words, the digits with
    those split off, the names of the digits inside a source word and of those inside a stored one,
    innermost first. meet 1: none do."""
    if p.word == 1 and p.near:
        for meet in (4, 2):
            if min(p.source_fit, p.align[1]) % meet or (p.layout.bits and meet != 4):
                continue
            parts, met = _cut(tiled, meet, lambda d: d.out)
            inside = set(met)
            step = lambda d: d.mult if d.dim == C and d.name not in inside else 0  # noqa: B023
            parts, within = _cut(parts, meet, step)
            if met and within:
                return meet, sorted(parts, key=lambda d: d.out), within, met
    return 1, tiled, [], []


def _cut(
    digits: list[Part], total: int, step: Callable[[Part], int]
) -> tuple[list[Part], list[str]]:
    """Digits with the first `total` steps split off, and the names of those, innermost first."""
    left, names, parts = total, [], []
    run = 1
    for d in sorted(digits, key=step):
        if left == 1 or step(d) != run or d.inferred:
            parts.append(d)
            continue
        taken = min(d.size, left)
        parts.append(replace(d, size=taken, name=f"{d.name}'"))
        names.append(f"{d.name}'")
        if taken < d.size:
            rest = replace(d, size=d.size // taken, mult=d.mult * taken, out=d.out * taken)
            parts.append(rest)
        left, run = left // taken, run * taken
    return (parts, names) if left == 1 else (digits, [])


def _read_order(
    p: Problem, read: Sequence[Part], store: Sequence[Part], met: Sequence[str], vector: int
) -> list[Part]:
    """The tile's digits from the nearest in the source outwards.

    Rows that meet inside one 16-byte store go last, so that a thread holds all of them and they
    come together in registers; digits that meet in one word go last of all.
    """
    inside, late = p.word, set()
    for d in store:
        if inside < 16 and d.dim != C:
            late.add(d.name)
        inside *= d.size
    far = {P: p.strides[1], H: p.strides[2], C: p.strides[3]}

    def key(d: Part) -> tuple[int, int]:
        if d.dim == C and d.mult < vector:
            return 0, d.mult
        rank = 3 if d.name in met else 2 if d.name in late else 1
        return rank, abs(d.mult) * far[d.dim]

    return sorted(read, key=key)


def _vector(digits: Sequence[tuple[int, int]], most: int) -> int:
    """How many elements from the first on are neighbours, at most `most`: (step, size) innermost
    first."""
    run = 1
    for step, size in digits:
        if step != run or run >= most:
            break
        run *= size
    return max(1, min(run, most))


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


def _permutation(
    prefix: str, before: Sequence[str], after: Sequence[str], size: dict[str, int]
) -> dict[str, tuple[int, ...]]:
    """Compile-time shape and order of axes, there and back; names come innermost first."""
    pad = RANK - len(before)
    shape = lambda names: (*(1,) * pad, *(size[name] for name in reversed(names)))
    perm = (*range(pad), *(RANK - 1 - list(before).index(name) for name in reversed(after)))
    return {
        f"{prefix}SHAPE": shape(before), f"{prefix}PERM": perm,
        f"{prefix}BACK_SHAPE": shape(after),
        f"{prefix}BACK_PERM": tuple(perm.index(at) for at in range(RANK)),
    }  # fmt: skip


def _edges(store: Sequence[Part], vector: int) -> tuple[int, ...]:
    """For each share of an inferred axis: vectors before it, size, coordinate and step, in a
    row."""
    edges, inside = [], 1
    for d in store:
        if d.inferred:
            edges += [inside // vector, d.size, d.dim, d.mult]
        inside *= d.size
    return tuple(edges)


def _overhangs(p: Problem, tiled: Sequence[Part], grid: Sequence[Part]) -> bool:
    """Whether the last tile along an inferred axis reaches past the storage."""
    steps = {d.dim: d.size * d.mult for d in grid if d.inferred}
    whole = {d.dim: d.size * d.mult for d in tiled if d.inferred}
    return any(steps.get(dim, whole[dim]) > p.padded[dim - 1] for dim in whole)


def _distances(bits: Sequence[int] | None) -> tuple[int, ...]:
    """(distance, mask of the bits that arrive) of each group of a word's bits that move
    together."""
    moves: dict[int, int] = {}
    for target, origin in enumerate(bits or ()):
        moves[target - origin] = moves.get(target - origin, 0) | 1 << target
    return tuple(value for move in moves.items() for value in move)


def _moves(bits: Sequence[int] | None) -> tuple[int, ...]:
    """(byte to, byte from, distance, mask) of each group of bits that move together, byte by byte.

    The mask is that of the bits that arrive, repeated in all four bytes of a word: byte i of four
    stored words sits in word i while bits move.
    """
    moves: dict[tuple[int, int, int], int] = {}
    for target, origin in enumerate(bits or ()):
        key = (target // 8, origin // 8, target % 8 - origin % 8)
        moves[key] = moves.get(key, 0) | 0x01010101 << target % 8
    return tuple(value for key, mask in moves.items() for value in (*key, mask))
