"""reports/layouts/index.html: a picture of every layout of the catalog, with what it is for.

One self-contained file: the pictures stand in it as SVG and share one style sheet, a search keeps
those whose name, alias, consumer or pattern has the words, and pointing at a cell marks its twin on
the other side. Layouts with equal patterns and sizes are drawn once and refer to each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from harness.report.page import asset, environment
from kernels import catalog, draw, draw_svg
from kernels.layout import Layout

# Sections of the page: title, one sentence, and how a layout's name begins.
GROUPS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("Rows of gate and up", "Whole rows move; a row keeps its bytes.",
     ("w13_", "gate_up_", "trtllm_shuffle", "cutedsl_w13", "trtllm_w13", "trtllm_w2")),
    ("Block scales", "One byte a block, put where a matrix unit fetches it.",
     ("block_scale", "cutedsl_mma", "blackwell_scale", "hopper_scale", "cdna4", "gfx1250")),
    ("FP4 values", "Two codes a byte; k counts packed bytes.",
     ("strided", "blackwell_value", "hopper_value")),
)  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """A layout with its picture, or with the name of the one that has the same picture."""

    layout: Layout
    svg: Markup | None
    same_as: str
    shape: str


def entries(layouts: Mapping[str, Layout]) -> list[Entry]:
    drawn: dict[tuple[object, ...], str] = {}
    out = []
    for name, layout in layouts.items():
        n, k = draw.example_shape(layout)
        what = (layout.pattern, tuple(layout.sizes.items()), layout.flip, layout.bits,
                layout.padded(n, k), n, k)  # fmt: skip
        first = drawn.setdefault(what, name)
        svg = Markup(draw.draw(layout, standalone=False)) if first == name else None
        out.append(Entry(layout, svg, "" if svg else first, f"{n} x {k}"))
    return out


def group_of(name: str) -> str:
    """The title of the group a layout belongs to; its scales follow their own kind."""
    if name.endswith("_scale") and name.startswith(("trtllm_", "cutedsl_")):
        return GROUPS[1][0]
    return next((title for title, _, starts in GROUPS if name.startswith(starts)), "Others")


def render(layouts: Mapping[str, Layout]) -> str:
    """The gallery's HTML."""
    every = entries(layouts)
    titles = [*((title, told) for title, told, _ in GROUPS), ("Others", "")]
    groups = [
        (title, told, [e for e in every if group_of(e.layout.name) == title])
        for title, told in titles
    ]
    svg_style = Markup(f"{draw_svg.STYLE}\n:root[data-theme=dark] svg.layout{draw_svg.DARK}\n"
                       "@media(prefers-color-scheme:dark){:root:not([data-theme=light]) "
                       f"svg.layout{draw_svg.DARK}}}")  # fmt: skip
    return environment().get_template("gallery.html").render(
        groups=[group for group in groups if group[2]], total=len(every), svg_style=svg_style,
        style=Markup(asset("page.css")), script=Markup(asset("gallery.js")),
        defs=Markup(draw_svg.DEFS),
    )  # fmt: skip


def write(out: Path) -> Path:
    """Writes index.html of the whole catalog into `out`; returns it."""
    out.mkdir(parents=True, exist_ok=True)
    index = out / "index.html"
    index.write_text(render(catalog.LAYOUTS), encoding="utf-8")
    return index
