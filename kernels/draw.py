"""A layout as a picture: where each element of a matrix goes, as the text of an SVG file.

`draw(layout, n, k)` shows the source matrix [n, k] and the storage of one matrix side by side. A
cell has the colour of its source row (hue, blue to yellow) and column (lightness) in both, and
prints that coordinate; storage is cut into lines that hold whole inner axes, so that what a memory
or matrix unit reads together stands on one line. Padding is hatched, blocks have borders, the first
runs of memory are numbered on both sides, and where the hardware fixes which warp or lane reads an
element, lines say so and the first owner is outlined. Everything is computed from `Layout.digits`,
so picture and bytes cannot disagree.

Large axes are shown in part: the same axis values are kept on both sides, so every cell has its
twin, and each cut is marked. Text only, no dependency.
"""

from __future__ import annotations

from itertools import product
from math import prod

from kernels.draw_svg import Cell, Picture, render
from kernels.errors import LayoutError
from kernels.layout import Digit, Layout

MAX_ROWS, MAX_COLS = 34, 32  # cells a panel shows along each side before axes are cut
MAX_FREE = 12  # columns shown where k is not permuted
MAX_LINE = 32  # storage elements a line holds, unless one axis alone is longer
RUNS = 8  # numbered runs of memory

# Who reads an element: (part, ((axis, weight), ...)). Lane numbers follow the mma fragment layouts
# of the PTX ISA (row = lane / 4, column = lane % 4, so the four lanes of quad t share row t) and,
# for CDNA4, v_mfma_scale_f32_16x16x128 (row = lane % 16).
_OWNERS: dict[str, tuple[tuple[str, tuple[tuple[str, int], ...]], ...]] = {
    "hopper_value": (("lane", (("t0", 8), ("s", 4), ("t1", 1))),),
    "hopper_scale": (("warp", (("w", 1),)), ("quad", (("t", 1),))),
    "cdna4_scale": (("lane", (("c", 16), ("n", 1))),),
    "gfx1250_scale": (("lane", (("n", 1),)),),
}


def example_shape(layout: Layout) -> tuple[int, int]:
    """(n, k) that shows a layout best: one tile of rows, and columns with padding at the end."""
    align_n, align_k = layout.align
    n = align_n if align_n >= 8 else 12 if "g" in layout.sizes else 6
    if align_k == 1:
        return n, 4
    return n, 2 * align_k - 1 if align_k <= 4 else align_k - max(1, align_k // 16)


def draw(
    layout: Layout, n: int | None = None, k: int | None = None, *, standalone: bool = True
) -> str:
    """SVG text of `layout` on an n x k matrix (default: `example_shape`).

    standalone=False leaves out title, style sheet and shared definitions, for a page that inlines
    many pictures and holds `draw_svg.STYLE` and `draw_svg.DEFS` once. Raises LayoutError where the
    layout refuses the shape.
    """
    auto_n, auto_k = example_shape(layout)
    n, k = auto_n if n is None else n, auto_k if k is None else k
    if n < 1 or k < 1:
        raise LayoutError(f"layout {layout.name!r}: nothing to draw of a {n} x {k} matrix")
    return render(picture(layout, n, k), standalone)


def picture(layout: Layout, n: int, k: int) -> Picture:
    """What `draw` shows, as data: every drawn cell with its coordinate and its storage offset."""
    digits = layout.digits(n, k)
    line = _line_size(layout, digits)
    kept = _kept(layout, digits, n, k, line)
    cells = sorted(
        (
            _cell(layout, digits, dict(zip(kept, values, strict=True)), n, k, line)
            for values in product(*kept.values())
        ),
        key=lambda cell: cell.offset,
    )
    rows, cols = layout.storage_shape(n, k)
    padded = layout.padded(n, k)
    grown = f", padded to {padded[0]} x {padded[1]}" if padded != (n, k) else ""
    return Picture(
        name=layout.name,
        pattern=layout.pattern,
        sizes=", ".join(f"{name}={size}" for name, size in layout.sizes.items()),
        caption=layout.note,
        shape=f"matrix {n} x {k}{grown}; storage {rows} x {cols}",
        cells=tuple(cells),
        source_heads=_source_heads(cells),
        storage_heads=_storage_heads(cells, line),
        runs=_number_runs(cells),
        line=line,
        fill=layout.fill,
        bits=layout.bits,
        cut=any(len(kept[d.name]) < d.size for d in digits),
    )


def _line_size(layout: Layout, digits: tuple[Digit, ...]) -> int:
    """Elements of a storage line: the inner axes that fit MAX_LINE; a row where only rows move."""
    size = digits[-1].size
    if layout.tile[1] == 1:
        return size
    for d in reversed(digits[:-1]):
        if size * d.size > MAX_LINE:
            break
        size *= d.size
    return size


def _kept(
    layout: Layout, digits: tuple[Digit, ...], n: int, k: int, line: int
) -> dict[str, list[int]]:
    """Which values of each axis are drawn; axes outside a storage line are cut first."""
    kept = {d.name: list(range(d.size)) for d in digits}

    def count(axes: list[Digit]) -> int:
        return prod(len(kept[d.name]) for d in axes)

    outside = [d for d in digits if d.out_stride >= line]
    groups = (
        ([d for d in digits if d.dim == 0], MAX_ROWS),
        ([d for d in digits if d.dim == 1], MAX_COLS if layout.tile[1] > 1 else MAX_FREE),
        (outside, MAX_ROWS),
    )
    for axes, limit in groups:
        for candidates in ([d for d in axes if d in outside], axes):
            for cap in range(max((d.size for d in candidates), default=1) - 1, 1, -1):
                for d in sorted(candidates, key=lambda d: (d.name in layout.sizes, -d.size)):
                    if count(axes) > limit and len(kept[d.name]) > cap:
                        kept[d.name] = _some(layout, d, cap, n, k)
    return kept


def _some(layout: Layout, digit: Digit, cap: int, n: int, k: int) -> list[int]:
    """At most `cap` values of an axis: the first, the last, both sides of where padding begins."""
    real = k if digit.dim else n // layout.parts
    edge = -(-real // digit.in_stride)
    if digit.name not in layout.sizes and 0 < edge < digit.size and cap > 4:
        return sorted({*range(cap - 3), edge - 1, edge, digit.size - 1})
    return [*range(cap - 1), digit.size - 1]


def _cell(
    layout: Layout, digits: tuple[Digit, ...], at: dict[str, int], n: int, k: int, line: int
) -> Cell:
    """One element: where it is, where it goes, whether it is padding, who reads it."""
    row, col = (sum(at[d.name] * d.in_stride for d in digits if d.dim == dim) for dim in (0, 1))
    offset = sum((d.size - 1 - at[d.name] if d.flip else at[d.name]) * d.out_stride for d in digits)
    rows, cols = layout.padded(n, k)
    part, inside = divmod(row, rows // layout.parts)
    real = inside < n // layout.parts and col < k
    place, half = row, ""
    if layout.sizes.get("g") == 2:  # gate or up decides the hue before the row does
        stride = next(d.in_stride for d in digits if d.name == "g")
        half = ("gate", "up")[at["g"]]
        place = at["g"] * rows // 2 + row // (2 * stride) * stride + row % stride
    owners = next((o for name, o in _OWNERS.items() if layout.name.startswith(name)), ())
    inner = [layout.tile[0] // (2 if half else 1), layout.tile[1]]
    free = [at[d.name] for d in digits if d.name not in layout.sizes and inner[d.dim] > 1]
    return Cell(
        source=(row, col),
        storage=divmod(offset, line),
        offset=offset,
        logical=(part * (n // layout.parts) + inside, col) if real else None,
        hue=place / max(1, rows - 1),
        shade=col / max(1, cols - 1),
        half=half,
        owner=tuple((label, sum(at[axis] * w for axis, w in axes)) for label, axes in owners),
        block=(half, *free),
    )


def _number_runs(cells: list[Cell]) -> list[list[Cell]]:
    """The first RUNS stretches of memory that are also consecutive columns of one block's row."""
    runs: list[list[Cell]] = []
    for number, cell in enumerate(cells):
        if cell.offset != number:  # the axes are cut here
            break
        before = cells[number - 1] if runs else None
        follows = before and cell.source == (before.source[0], before.source[1] + 1)
        if before and follows and cell.block == before.block:
            runs[-1].append(cell)
        elif len(runs) == RUNS:
            break
        else:
            runs.append([cell])
    return runs


def _source_heads(cells: list[Cell]) -> dict[int, str]:
    """Row labels of the source: the row's number, gate or up, or 'pad'."""
    heads: dict[int, str] = {}
    for cell in cells:
        if cell.logical is not None:
            heads[cell.source[0]] = f"{cell.half} {cell.logical[0]}".strip()
    return {row: heads.get(row, "pad") for row in sorted({c.source[0] for c in cells})}


def _storage_heads(cells: list[Cell], line: int) -> dict[int, str]:
    """Line labels of the storage: who reads the line, and the offset of its first element."""
    heads: dict[int, str] = {}
    for number in sorted({c.storage[0] for c in cells}):
        here = [c for c in cells if c.storage[0] == number]
        halves = {c.half for c in here}
        who = [_span(here, i) for i in range(len(here[0].owner))]
        who += [halves.pop()] if len(halves) == 1 else []
        heads[number] = " ".join([*filter(None, who), f"+{number * line}"])
    return heads


def _span(cells: list[Cell], part: int) -> str:
    """'lane 3', or 'quad 0-7' where a line holds several."""
    numbers = sorted({c.owner[part][1] for c in cells})
    last = f"-{numbers[-1]}" if len(numbers) > 1 else ""
    return f"{cells[0].owner[part][0]} {numbers[0]}{last}"
