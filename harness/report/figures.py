"""Figures of a report, as SVG for a light and a dark page and as PNG, from the same rows.

An implementation is a colour and a shape (Okabe-Ito hues, told apart with any colour vision), times
are on a logarithmic axis, quartiles are a bar behind the mark. Files do not depend on the date.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from importlib.resources import as_file
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter, NullLocator

from harness.report import evidence
from harness.report.facts import Facts
from harness.report.load import STATES, Record
from harness.report.page import ASSETS
from harness.report.trace import digits

WIDTH = 8.6
MOST = 26
MARKS = {
    "fused": ("o", "#0a5bab"), "reference": ("o", "#5f6872"), "vllm": ("s", "#0b7f72"),
    "flashinfer": ("^", "#b85c00"), "triton_kernels": ("D", "#8a3f9e"),
}  # fmt: skip
OTHER = ("P", "#7a6a00")
SHADES = {
    "wrong": "#bd2c14", "failed": "#a3560a", "missing": "#c3c8cd", "skipped": "#98a0a8",
    "refused": "#6f5a9a", "padded": "#1f66b0", "ok": "#14795a",
}  # fmt: skip
HATCHES = {"wrong": "xxx", "failed": "///", "refused": "...", "padded": "\\\\\\"}
TARGET_HATCHES = ("", "///", "...", "xxx")
INK, PAPER, GRID = "#1b1f24", "#ffffff", "#e3e6e9"
# The dark page's colour for each of the light page's: the same drawing, repainted as text.
DARK = {
    INK: "#e6e9ed", PAPER: "#0d1117", GRID: "#2c333b", "#0a5bab": "#6db3ff", "#5f6872": "#a3adb8",
    "#0b7f72": "#4fcfc0", "#b85c00": "#f5a55a", "#8a3f9e": "#d59be8", "#7a6a00": "#d6c64a",
    "#bd2c14": "#ff7d64", "#a3560a": "#f0a14f", "#c3c8cd": "#4a525b", "#98a0a8": "#7d8791",
    "#6f5a9a": "#b7a2e6", "#1f66b0": "#6fb0f5", "#14795a": "#4cc39a",
}  # fmt: skip
INKED = ("text.color", "axes.labelcolor", "xtick.color", "ytick.color")
PAPERED = ("figure.facecolor", "axes.facecolor", "savefig.facecolor")
GRIDDED = ("grid.color", "axes.edgecolor")


def mark(impl: str) -> tuple[str, str]:
    """(marker, colour) of an implementation."""
    return MARKS.get(impl, OTHER)


def write(
    facts: Facts,
    pairs: Sequence[evidence.Pair],
    slopes: Sequence[evidence.Slope],
    sides: Sequence[evidence.Side],
    out: Path,
) -> list[tuple[str, str]]:
    """Writes what the rows allow under `out`; returns (name, description) of each figure."""
    timed = [r for r in facts.records if r.row.get("time")]
    timed += [today for r in timed if (today := r.today())]
    told = _representative(pairs)
    drawn: list[tuple[str, str, Callable[[], Figure]]] = []
    if facts.total:
        drawn.append(("states", "Cells by path and state", lambda: states(facts)))
    if told:
        text = "Before and after: time and memory of the same cell on the same device"
        drawn.append(("before_after", text, lambda: before_after(told)))
    if timed:
        text = "Fraction of the device's own copy speed, by routine"
        drawn.append(("copy_fraction", text, lambda: copy_fraction(timed)))
    if slopes:
        drawn.append(("experts", "Time against expert count", lambda: experts(slopes)))
    if sides:
        text = "What padding adds to the stored bytes, by target and TP size"
        drawn.append(("targets", text, lambda: targets(sides)))
    out.mkdir(parents=True, exist_ok=True)
    paint = dict.fromkeys(INKED, INK) | dict.fromkeys(PAPERED, PAPER) | dict.fromkeys(GRIDDED, GRID)
    for name, _, draw in drawn:
        with as_file(ASSETS / "figures.mplstyle") as style, plt.style.context([style, paint]):
            figure = draw()
            svg = io.StringIO()
            figure.savefig(svg, format="svg", metadata={"Date": None})
            figure.savefig(out / f"{name}.png", metadata={"Software": None})
            plt.close(figure)
        (out / f"{name}.svg").write_text(svg.getvalue(), encoding="utf-8")
        dark = re.sub("#[0-9a-f]{6}", lambda m: DARK.get(m[0], m[0]), svg.getvalue())
        (out / f"{name}-dark.svg").write_text(dark, encoding="utf-8")
    return [(name, text) for name, text, _ in drawn]


def _representative(pairs: Sequence[evidence.Pair]) -> list[evidence.Pair]:
    """One pair per path, model and TP, the one that takes longest; at most MOST."""
    best: dict[tuple[str, str, int], evidence.Pair] = {}
    for pair in pairs:
        cell = pair.after.cell
        key = (pair.after.case or str(cell["path"]), str(cell["model"]), int(cell["tp_size"]))
        moved = lambda p: float(p.before.get("time.median_us"))
        if key not in best or moved(pair) > moved(best[key]):
            best[key] = pair
    kept = sorted(best.values(), key=lambda p: -float(p.before.get("time.median_us")))[:MOST]
    return sorted(kept, key=lambda p: evidence.label(p.after), reverse=True)


def _time_axis(axis: Any) -> None:
    axis.set_xscale("log")
    units = lambda us, _: (
        f"{us / 1e6:g} s" if us >= 1e6 else f"{us / 1e3:g} ms" if us >= 1e3 else f"{us:g} µs"
    )
    axis.xaxis.set_major_formatter(FuncFormatter(units))
    axis.xaxis.set_minor_formatter(NullFormatter())


def _clip(text: str, most: int = 64) -> str:
    # A label is data: no mathtext, and only characters that the font has.
    text = re.sub(r"[^ -~\n\u00a1-\u017f\u2026·]", "?", text).replace("$", r"\$")
    return text if len(text) <= most else text[: most - 1] + "…"


def _dot(axis: Any, record: Record, y: float, label: str | None = None) -> None:
    impl, median, q1, q3 = (
        record.impl,
        *(record.get(f"time.{k}_us") for k in ("median", "q1", "q3")),
    )
    shade = mark(impl)[1]
    if q1 and q3:
        axis.plot([q1, q3], [y, y], lw=3.2, alpha=0.45, color=shade)
    hollow = impl == "reference"
    axis.plot(median, y, mark(impl)[0], color=shade, label=label, ls="none",
              markerfacecolor=PAPER if hollow else shade)  # fmt: skip


def before_after(pairs: Sequence[evidence.Pair]) -> Figure:
    """A line per cell from the time before to the time after; scratch memory beside it."""
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(WIDTH, 1.2 + 0.26 * len(pairs)), sharey=True, width_ratios=(3, 1)
    )
    seen: set[str] = set()
    for y, pair in enumerate(pairs):
        ends = [r.get("time.median_us") for r in (pair.before, pair.after)]
        left.plot(ends, [y, y], lw=1, color=INK, alpha=0.45, zorder=1)
        for record in (pair.before, pair.after):
            impl = record.impl
            _dot(left, record, y, None if impl in seen else impl)
            seen.add(impl)
            if (extra := record.get("memory.peak_extra_bytes")) is not None:
                right.plot(extra / 2**20, y, mark(impl)[0], color=mark(impl)[1],
                           markerfacecolor="none" if impl == "reference" else None)  # fmt: skip
        left.annotate(f"{digits(pair.ratio)}x", (max(ends), y), xytext=(7, 0), va="center",
                      textcoords="offset points", fontsize=8)  # fmt: skip
    left.set_yticks(range(len(pairs)), [_clip(evidence.label(p.after)) for p in pairs])
    _time_axis(left)
    left.margins(x=0.12)
    left.set_xlabel("median time")
    right.set_xlabel("extra memory")
    right.set_xscale("symlog", linthresh=1, linscale=0.6)
    right.set_xlim(left=-0.3)
    right.set_xticks((0, 2**5, 2**15), ["0", "32 MiB", "32 GiB"], fontsize=7)
    right.xaxis.set_minor_locator(NullLocator())
    devices = sorted({str(p.after.get("time.device")) for p in pairs})
    figure.suptitle(
        f"Before and after, {', '.join(devices)}", x=0.01, ha="left", weight="bold", size=10
    )
    figure.legend(loc="outside lower center", ncols=5)
    return figure


def copy_fraction(timed: Sequence[Record]) -> Figure:
    """Every timed cell's fraction of copy speed, a line per path."""
    paths = sorted({str(r.cell["path"]) for r in timed}, reverse=True)
    figure, axis = plt.subplots(figsize=(WIDTH, 1.3 + 0.27 * len(paths)))
    seen: set[str] = set()
    for record in timed:
        fraction, impl = record.get("time.copy_fraction"), record.impl
        if fraction is None or fraction <= 0:
            continue
        axis.plot(fraction, paths.index(str(record.cell["path"])), mark(impl)[0],
                  color=mark(impl)[1], alpha=0.8, label=None if impl in seen else impl,
                  ls="none", markerfacecolor="none" if impl == "reference" else None)  # fmt: skip
        seen.add(impl)
    axis.axvline(1, color=INK, lw=0.8, ls=":")
    axis.set_yticks(range(len(paths)), [_clip(p) for p in paths])
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
    axis.set_xlabel(
        "useful bytes per second, as a fraction of the device's copy (dotted: the copy)"
    )
    devices = sorted({str(r.get("time.device")) for r in timed})
    axis.set_title(f"How close to the speed of memory, {', '.join(devices)}")
    figure.legend(loc="outside lower center", ncols=5)
    return figure


def experts(slopes: Sequence[evidence.Slope]) -> Figure:
    """Small panels of time against experts, both logarithmic, with the slope of each series."""
    labels = list(dict.fromkeys(s.label for s in slopes))[:9]
    columns = min(3, len(labels))
    lines = -(-len(labels) // columns)
    figure, axes = plt.subplots(lines, columns, figsize=(WIDTH, 0.5 + 2.1 * lines), squeeze=False)
    for axis in axes.flat[len(labels) :]:
        axis.set_visible(False)
    for axis, label in zip(axes.flat, labels, strict=False):
        for slope in (s for s in slopes if s.label == label):
            xs = [r.cell["experts"] for r in slope.records]
            ys = [r.get("time.median_us") for r in slope.records]
            marker, shade = mark(slope.impl)[0], mark(slope.impl)[1]
            named = f"{slope.impl} {digits(slope.exponent)}"
            axis.plot(xs, ys, marker=marker, ms=4, lw=1.2, color=shade, label=named)
        axis.set_xscale("log", base=2)
        axis.set_xticks(xs, [str(x) for x in xs])
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
        axis.yaxis.set_minor_formatter(NullFormatter())
        axis.xaxis.set_minor_locator(NullLocator())
        axis.grid(True, axis="both")
        axis.set_title(_clip(label.replace(" · ", "\n", 1), 70), fontsize=8, weight="normal")
        low, high = axis.get_ylim()
        axis.set_ylim(low, high * (high / low) ** 0.6)  # room for the legend above the lines
        axis.legend(title="slope", title_fontsize=7, fontsize=7, loc="upper left", ncols=2,
                    handlelength=1, columnspacing=1)  # fmt: skip
    figure.supxlabel("experts", size=9)
    figure.supylabel("median, µs", size=9)
    return figure


def states(facts: Facts) -> Figure:
    """Stacked bars of cells by state, a bar per path."""
    paths = sorted({str(r.cell["path"]) for r in facts.records}, reverse=True)
    lost = [str(cell["path"]) for run in facts.runs for cell in run.missing]
    paths = sorted({*paths, *lost}, reverse=True)
    figure, axis = plt.subplots(figsize=(WIDTH, 1.2 + 0.27 * len(paths)))
    left = [0] * len(paths)
    for name in reversed(list(STATES)):
        counts = [
            lost.count(path) if name == "missing"
            else sum(r.state == name and r.cell["path"] == path for r in facts.records)
            for path in paths
        ]  # fmt: skip
        if sum(counts):
            axis.barh(range(len(paths)), counts, left=left, label=f"{name} {sum(counts)}",
                      color=SHADES[name], hatch=HATCHES.get(name), height=0.7,
                      edgecolor=PAPER, linewidth=0)  # fmt: skip
            left = [a + b for a, b in zip(left, counts, strict=True)]
    axis.set_yticks(range(len(paths)), [_clip(p) for p in paths])
    axis.set_xlabel("cells")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.set_title("What was established")
    figure.legend(loc="outside lower center", ncols=7)
    return figure


def targets(sides: Sequence[evidence.Side]) -> Figure:
    """Panels of what padding adds to the stored bytes, a group of bars per TP size."""
    panels: dict[str, list[evidence.Side]] = {}
    for side in sides:
        panels.setdefault(f"{side.path} · {side.model}", []).append(side)
    shown = dict(list(panels.items())[:9])
    hws = sorted({hw for side in sides for hw in side.by})
    shades = dict(zip(hws, [m[1] for m in (*MARKS.values(), OTHER)] * len(hws), strict=False))
    most = 1.15 * max(5.0, *(_grown(r) for side in sides for r in side.by.values()))
    columns = min(3, len(shown))
    lines = -(-len(shown) // columns)
    figure, axes = plt.subplots(
        lines, columns, figsize=(WIDTH, 0.9 + 1.7 * lines), squeeze=False, sharey=True
    )
    for axis in axes.flat[len(shown) :]:
        axis.set_visible(False)
    for axis, (label, found) in zip(axes.flat, shown.items(), strict=False):
        tps = sorted({side.tp_size for side in found})
        width = 0.8 / len(hws)
        for i, hw in enumerate(hws):
            grown = {s.tp_size: _grown(s.by[hw]) for s in found if hw in s.by}
            xs = [tps.index(tp) + (i - (len(hws) - 1) / 2) * width for tp in grown]
            axis.bar(xs, list(grown.values()), width=width * 0.92, color=shades[hw], label=hw,
                     hatch=TARGET_HATCHES[i % 4], edgecolor=PAPER, linewidth=0)  # fmt: skip
        axis.set_xticks(range(len(tps)), [f"TP{tp}" for tp in tps])
        axis.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g} %"))
        axis.set_ylim(0, most)
        axis.grid(True, axis="y")
        axis.grid(False, axis="x")
        axis.set_title(_clip(label.replace(" · ", "\n", 1), 70), fontsize=8, weight="normal")
    handles, names = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=6)
    title = "What padding adds to the stored bytes"
    figure.suptitle(title, x=0.01, ha="left", weight="bold", size=10)
    return figure


def _grown(record: Record) -> float:
    """Percent that a prepared layer is larger than its share of the checkpoint."""
    return 100 * (float(record.get("decisions.bytes_ratio") or 1) - 1)
