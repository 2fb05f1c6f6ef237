"""The drawing half of `draw`: coloured cells to SVG text; geometry and colour only."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from math import hypot, pi, sin
from textwrap import wrap

CELL_H, GAP, CUT = 19, 5, 17  # px: a cell's height, the gap between blocks, the gap of a cut axis
BIT_W = 25
GUTTER = 24  # px between the row heads of the source and its cells, where arrows run

WIDE = 1240  # px: beyond it, storage goes below the source so that its text stays readable

_SANS = "system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif"
_MONO = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace"
STYLE = """
svg.layout{--ink:#1b1f24;--dim:#5d6670;--paper:#fff;--line:#aab2bb;--mark:#b3125c}
svg.layout{background:var(--paper)}
svg.layout text{font:10px MONO;fill:var(--ink)}
svg.layout .c text{text-anchor:middle;fill:#14171a}
svg.layout .h{fill:var(--dim)}
svg.layout .mid{text-anchor:middle}
svg.layout .end{text-anchor:end}
svg.layout .s,svg.layout .t,svg.layout .n{font-family:SANS}
svg.layout .t{font-size:18px;font-weight:650}
svg.layout .s{font-size:13px}
svg.layout .n{font-size:12px;fill:var(--dim)}
svg.layout .p{font-size:12px}
svg.layout .pad rect{fill:url(#hatch);stroke:var(--line);stroke-width:.5}
svg.layout .edge{fill:none;stroke:var(--ink);stroke-width:1.3}
svg.layout .own{fill:none;stroke:var(--mark);stroke-width:2}
svg.layout .walk{fill:none;stroke:#1b1f24;stroke-width:1.3}
svg.layout .halo{fill:none;stroke:#fff;stroke-width:3.6;stroke-opacity:.65}
svg.layout .b circle{fill:#1b1f24;stroke:#fff;stroke-width:1}
svg.layout .b text{fill:#fff;font-size:8.5px;font-weight:700;text-anchor:middle}
svg.layout .c.on rect{stroke:var(--mark);stroke-width:3}
""".replace("MONO", _MONO).replace("SANS", _SANS)
DARK = "{--ink:#e7eaee;--dim:#9aa4af;--paper:#161a20;--line:#56606b;--mark:#ff6fa8}"
DEFS = (
    '<defs><pattern id="hatch" width="5" height="5" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><path d="M0 0V5" stroke="#8b949e" stroke-width="1.6"/></pattern>'
    '<marker id="tip" viewBox="0 0 8 8" refX="12" refY="4" markerWidth="7" markerHeight="7" '
    'orient="auto"><path d="M0 0 8 4 0 8z" fill="#1b1f24" stroke="#fff" stroke-width=".6"/>'
    "</marker></defs>"
)
_BIT_NAMES = ("mantissa", "exponent low bit", "exponent high bit", "sign")


@dataclass(frozen=True)
class Cell:
    """One element of a layout: where it is, where it goes, and what a reader should be told of it.

    source: (row, column), padded. storage: (line, place in the line). logical: (n, k), None for
    padding. hue, shade: 0..1. half: 'gate', 'up' or ''. owner: ((kind, number), ...). block: what a
    border surrounds.
    """

    source: tuple[int, int]
    storage: tuple[int, int]
    offset: int
    logical: tuple[int, int] | None
    hue: float
    shade: float
    half: str
    owner: tuple[tuple[str, int], ...]
    block: tuple[int | str, ...]


@dataclass(frozen=True)
class Picture:
    """A layout on one matrix, ready to draw. Heads are row labels; runs are stretches of memory."""

    name: str
    pattern: str
    sizes: str
    caption: str
    shape: str
    cells: tuple[Cell, ...]
    source_heads: dict[int, str]
    storage_heads: dict[int, str]
    runs: list[list[Cell]]
    line: int
    fill: int
    bits: tuple[int, ...] | None
    cut: bool


@dataclass(frozen=True)
class Axis:
    """Pixel positions of a panel's shown rows or columns, the cuts between them, and its blocks."""

    at: dict[int, float]
    cuts: tuple[float, ...]
    blocks: tuple[tuple[int, ...], ...]
    end: float


def colour(hue: float, shade: float) -> str:
    """#rrggbb. hue 0..1: blue, violet, rose, yellow along OKLab b, for all eyes; shade darkens."""
    lightness, a, b = 0.91 - 0.16 * shade, 0.075 * sin(pi * hue), -0.085 + 0.215 * hue
    lms = [
        (lightness + x * a + y * b) ** 3
        for x, y in ((0.3963, 0.2158), (-0.1056, -0.0639), (-0.0895, -1.2915))
    ]
    to_rgb = ((4.0767, -3.3077, 0.231), (-1.2684, 2.6098, -0.3413), (-0.0042, -0.7034, 1.7076))
    rgb = []
    for weights in to_rgb:
        linear = min(1.0, max(0.0, sum(w * v for w, v in zip(weights, lms, strict=True))))
        rgb.append(12.92 * linear if linear < 0.0031308 else 1.055 * linear ** (1 / 2.4) - 0.055)
    return "#" + "".join(f"{round(255 * v):02x}" for v in rgb)


def text(css: str, x: float, y: float, words: str) -> str:
    return f'<text class="{css}" x="{x:g}" y="{y:g}">{escape(words)}</text>'


def render(picture: Picture, standalone: bool = True) -> str:
    """The picture as SVG text; if standalone, with name, caption, pattern, style and DEFS."""
    cells = picture.cells
    width = max(24.0, 6.1 * max(len(_label(c)) for c in cells) + 3)
    heads = (picture.source_heads, picture.storage_heads)
    left, lead = (18 + 6.1 * max(map(len, head.values())) for head in heads)
    left += GUTTER
    source = Panel(cells, lambda c: c.source, left, width, GUTTER)
    beside = max(source.right + 32 + lead, left + 270)  # the source's title is 260 px long
    storage = Panel(cells, lambda c: c.storage, beside, width)
    stacked = storage.right + 14 > WIDE
    if stacked:
        storage = Panel(cells, lambda c: c.storage, lead, width)
    bits_width = 33 * BIT_W if picture.bits else 0
    total = max(source.right + 14, storage.right + 14, bits_width, 720)

    y = 26.0 if standalone else 0.0
    out = []
    if standalone:
        out.append(text("t", 14, y, picture.name))
        pattern = picture.pattern + (f"   ({picture.sizes})" if picture.sizes else "")
        lines = [("s", row, 19) for row in wrap(picture.caption, int((total - 28) / 6.6))]
        lines += [("p", row, 20) for row in wrap(pattern, int((total - 28) / 7.3))]
        for css, row, step in lines:
            y += step
            out.append(text(css, 14, y, row))
    y += 18
    out.append(text("n", 14, y, picture.shape))
    y += 30
    title = f"Storage: memory order, {picture.line} elements a line"
    tops = (y + 26, y + 26 + (source.bottom + 62 if stacked else 0))
    out.append(text("s", left, y, "Source: row n down, column k across"))
    out.append(text("s", min(storage.cols.at.values()), tops[1] - 26, title))
    for panel, top, head in zip((source, storage), tops, heads, strict=True):
        out += panel.svg(top, head, picture)
    out.append(_walk(source, tops[0], picture.runs))
    for panel, top in zip((source, storage), tops, strict=True):
        out += panel.badges(top, picture.runs)
    y = max(tops[0] + source.bottom, tops[1] + storage.bottom) + 26
    for row in _legend(picture, int((total - 28) / 6.3)):
        out.append(text("n", 14, y, row))
        y += 17
    if picture.bits:
        y = _bits(out, y + 14, picture.bits)
    dark = f"@media(prefers-color-scheme:dark){{svg.layout{DARK}}}"
    style = f"<style>{STYLE}{dark}</style>{DEFS}" if standalone else ""
    label = escape(f"{picture.name}: {picture.caption}")
    return (
        f'<svg class="layout" xmlns="http://www.w3.org/2000/svg" width="{total:.0f}" '
        f'height="{y:.0f}" viewBox="0 0 {total:.0f} {y:.0f}" role="img" aria-label="{label}">'
        f"{style}" + "\n".join(out) + "</svg>\n"
    )


class Panel:
    """One side of the picture: cells placed by `where`, blocks apart by GAP, cut axes by CUT."""

    def __init__(
        self,
        cells: Iterable[Cell],
        where: Callable[[Cell], tuple[int, int]],
        left: float,
        width: float,
        gutter: float = 0,
    ) -> None:
        self.cells, self.where, self.width, self.gutter = tuple(cells), where, width, gutter
        self.rows = self._axis(0, 0.0, CELL_H)
        self.cols = self._axis(1, left, width)
        self.right, self.bottom = self.cols.end, self.rows.end

    def _axis(self, dim: int, start: float, step: float) -> Axis:
        blocks: dict[int, set[tuple[int | str, ...]]] = {}
        for cell in self.cells:
            blocks.setdefault(self.where(cell)[dim], set()).add(cell.block)
        shown = sorted(blocks)
        at, cuts, groups, x = {shown[0]: start}, [], [[shown[0]]], start
        for before, here in pairwise(shown):
            x += step
            if blocks[before] != blocks[here]:
                groups.append([])
                x += GAP
            if here > before + 1:
                cuts.append(x + CUT / 2 - (GAP / 2 if blocks[before] != blocks[here] else 0))
                x += CUT
            at[here] = x
            groups[-1].append(here)
        return Axis(at, tuple(cuts), tuple(map(tuple, groups)), x + step)

    def place(self, cell: Cell) -> tuple[float, float]:
        row, col = self.where(cell)
        return self.cols.at[col], self.rows.at[row]

    def svg(self, top: float, heads: dict[int, str], picture: Picture) -> list[str]:
        """Cells with row and column heads, cuts, block borders and the first owner's outline."""
        left = min(self.cols.at.values())
        middle = (left + self.right) / 2
        out = [
            text("h mid", x + self.width / 2, top - 7, f"{col}") for col, x in self.cols.at.items()
        ]
        out += [
            text("h end", left - 8 - self.gutter, top + y + 13, heads[row])
            for row, y in self.rows.at.items()
        ]
        out += [text("h mid", middle, top + y + 4, "⋮") for y in self.rows.cuts]
        out += [text("h mid", x, top + self.bottom / 2, "⋯") for x in self.cols.cuts]
        for cell in self.cells:
            x, y = self.place(cell)
            out.append(self._cell(cell, x, top + y, picture))
        for rows in self.rows.blocks:
            for cols in self.cols.blocks:
                x, y = self.cols.at[cols[0]], self.rows.at[rows[0]]
                w = self.cols.at[cols[-1]] + self.width - x
                out.append(_box("edge", x, top + y, w, self.rows.at[rows[-1]] + CELL_H - y))
        first = picture.cells[0].owner
        for cell in self.cells if first else ():
            if cell.owner == first:
                x, y = self.place(cell)
                out.append(_box("own", x + 1, top + y + 1, self.width - 2, CELL_H - 2))
        return out

    def _cell(self, cell: Cell, x: float, y: float, picture: Picture) -> str:
        line, place = cell.storage
        to = f"offset {cell.offset} (line {line}, place {place})"
        to += "".join(f", {kind} {number}" for kind, number in cell.owner)
        at = f'x="{x:g}" y="{y:g}" width="{self.width:g}" height="{CELL_H}"'
        start = f'data-o="{cell.offset}"><title>'
        if cell.logical is None:
            tip = f"padding, 0x{picture.fill:02x}: {to}"
            return f'<g class="c pad" {start}{tip}</title><rect {at}/></g>'
        n, k = cell.logical
        tip = f"row {n}{f' ({cell.half})' if cell.half else ''}, column {k}: {to}"
        fill = colour(cell.hue, cell.shade)
        return (
            f'<g class="c" {start}{tip}</title><rect {at} fill="{fill}"/>'
            f'<text x="{x + self.width / 2:g}" y="{y + 13:g}">{_label(cell)}</text></g>'
        )

    def badges(self, top: float, runs: list[list[Cell]]) -> list[str]:
        """A number at the first cell of each run."""
        out = []
        for number, run in enumerate(runs, 1):
            x, y = self.place(run[0])
            circle = f'<circle cx="{x + 1:g}" cy="{top + y + 3:g}" r="6"/>'
            label = f'<text x="{x + 1:g}" y="{top + y + 6:g}">{number}</text>'
            out.append(f'<g class="b">{circle}{label}</g>')
        return out


def _label(cell: Cell) -> str:
    return "" if cell.logical is None else f"{cell.logical[0]},{cell.logical[1]}"


def _box(css: str, x: float, y: float, w: float, h: float) -> str:
    return f'<rect class="{css}" x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}"/>'


def _walk(panel: Panel, top: float, runs: list[list[Cell]]) -> str:
    """Arrows through the numbered runs on the source side: the order in which memory visits it."""
    out = []
    for before, here in pairwise(panel.place(run[0]) for run in runs):
        (x0, y0), (x1, y1) = ((x + 1, top + y + 3) for x, y in (before, here))
        if (far := hypot(x1 - x0, y1 - y0)) < 2 * CELL_H:
            continue
        bulge = min(0.5, 2 * GUTTER / far)
        x, y = (x0 + x1) / 2 - bulge * abs(y1 - y0), (y0 + y1) / 2 + bulge * (x1 - x0)
        curve = f"M{x0:g} {y0:g}Q{x:g} {y:g} {x1:g} {y1:g}"
        out.append(f'<path class="halo" d="{curve}"/>')
        out.append(f'<path class="walk" d="{curve}" marker-end="url(#tip)"/>')
    return "".join(out)


def _legend(picture: Picture, width: int) -> list[str]:
    words = [
        "Each cell prints its source row,column and keeps its colour on both sides: "
        "hue by row (blue first, yellow last), darker by column."
    ]
    if len(picture.runs) > 1:
        words.append(
            f"1 to {len(picture.runs)}: the first runs of memory, in order; "
            "the arrows follow them through the source."
        )
    if any(cell.logical is None for cell in picture.cells):
        words.append(f"Hatched: padding, stored as 0x{picture.fill:02x}.")
    if picture.cells[0].owner:
        first = ", ".join(f"{kind} {number}" for kind, number in picture.cells[0].owner)
        quad = " (quad t is lanes 4t to 4t+3)" if "quad" in first else ""
        words.append(f"Outlined: what {first} reads{quad}.")
    if picture.cut:
        words.append("⋮ ⋯: cut; the same values of each axis are left out on both sides.")
    return [row for word in words for row in wrap(word, width)]


def _bits(out: list[str], y: float, bits: tuple[int, ...]) -> float:
    """Two rows of 32 boxes, a word before and after `bits`, coloured by FP4 code; the next y."""
    out.append(text("s", 14, y, "Then the bits of each 32-bit word move. Code 0 to 7, and its "
                    "sign, exponent (e) or mantissa bit; bit 31 is leftmost."))  # fmt: skip
    y += 12
    for name, order in (("before", range(32)), ("after", bits)):
        for place, origin in enumerate(order):
            x = 14 + (31 - place) * BIT_W
            code, bit = divmod(origin, 4)
            fill = colour(code / 7, 0.25 * (3 - bit))
            out.append(
                f'<g class="c"><title>{name}, bit {place}: code {code}, {_BIT_NAMES[bit]}</title>'
                f'<rect x="{x}" y="{y:g}" width="{BIT_W - 1}" height="{CELL_H}" fill="{fill}"/>'
                f'<text x="{x + BIT_W / 2:g}" y="{y + 13:g}">{code}{"mees"[bit]}</text></g>'
            )
        y += CELL_H + 8
    return y + 4
