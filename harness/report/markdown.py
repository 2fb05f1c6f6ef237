"""report.md: the page's content as GitHub Markdown tables, for a pull request or a terminal."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from harness.report import code, evidence
from harness.report.facts import Facts
from harness.report.findings import LEVELS, Finding
from harness.report.load import STATES, Record
from harness.report.page import environment
from harness.report.trace import digits, duration, size

MOST = 60  # lines of a table; the page has them all


def escape(text: object) -> str:
    """Text that Markdown and HTML show as it is, on one line."""
    flat = re.sub(r"\s+", " ", str(text))
    for character, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;")):
        flat = flat.replace(character, entity)
    return re.sub(r"([\\`*\[\]|~])", r"\\\1", flat)


def render(
    facts: Facts,
    title: str,
    found: Sequence[Finding],
    pairs: Sequence[evidence.Pair],
    slopes: Sequence[evidence.Slope],
    sides: Sequence[evidence.Side],
    metrics: code.CodeTable,
    figures: Sequence[tuple[str, str]],
    commands: str,
) -> str:
    """The Markdown of a report."""
    env = environment()
    env.autoescape = False  # Markdown: `md` does it
    env.filters["md"] = escape
    columns, matrix = _matrix(facts)
    timed = sorted((r for r in facts.records if r.row.get("time")), key=evidence.label)
    changed = [m for m in metrics.metrics if m.changed][:MOST]
    text = env.get_template("report.md").render(
        title=title,
        facts=facts,
        states=STATES,
        level=LEVELS[facts.level],
        levels=LEVELS,
        findings=found,
        figures=figures,
        columns=columns,
        matrix=matrix,
        glyphs=", ".join(f"{glyph} {name}" for name, (glyph, _) in STATES.items()),
        timed=[_timed(r) for r in timed[:MOST]],
        untold=max(0, len(timed) - MOST),
        pairs=[_pair(p) for p in pairs[:MOST]],
        slopes=[
            {
                "label": s.label, "impl": s.impl, "slope": digits(s.exponent),
                "experts": ", ".join(str(r.cell["experts"]) for r in s.records),
            }
            for s in slopes[:MOST]
        ],
        sides=[_side(s, hw, r) for s in sides[:MOST] for hw, r in sorted(s.by.items())],
        code_columns=metrics.columns,
        changed=[
            {
                "kernel": m.kernel, "name": m.name,
                "cells": ["" if c is None else f"{c[2]:g}" for c in m.cells],
            }
            for m in changed
        ],
        commands=commands,
    )  # fmt: skip
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def _matrix(facts: Facts) -> tuple[list[tuple[str, int]], list[dict[str, Any]]]:
    squares: dict[tuple[str, str], dict[tuple[str, int], list[str]]] = defaultdict(dict)
    cells = [(r.cell, r.state) for r in facts.records]
    cells += [(cell, "missing") for run in facts.runs for cell in run.missing]
    for cell, state in cells:
        line = (str(cell["path"]), str(cell["model"]))
        squares[line].setdefault((str(cell["hw"]), int(cell["tp_size"])), []).append(state)
    columns = sorted({column for line in squares.values() for column in line})
    worst = list(STATES)
    lines = []
    for (path, model), found in sorted(squares.items()):
        shown = []
        for column in columns:
            states = found.get(column, [])
            first = min(states, key=worst.index, default="")
            n = states.count(first)
            count = (
                "" if len(states) < 2 else f" {n}" if n == len(states) else f" {n}/{len(states)}"
            )
            shown.append(f"{STATES[first][0]}{count}" if first else "")
        lines.append({"path": path, "model": model, "squares": shown})
    return columns, lines


def memory(record: Record) -> str:
    peak = record.get("memory.peak_extra_bytes")
    return str(record.row.get("memory_absent")) if peak is None else size(peak)


def _timed(record: Record) -> dict[str, str]:
    time: Mapping[str, Any] = record.row["time"]
    fraction, q1, q3 = (time.get(key) for key in ("copy_fraction", "q1_us", "q3_us"))
    median, host = time["median_us"], time.get("host_us")
    waits = f" (host {duration(host)})" if host and host > median else ""
    return {
        "label": evidence.label(record), "impl": str(record.cell["impl"]),
        "device": str(time.get("device")), "median": duration(median) + waits,
        "quartiles": f"{duration(q1)} to {duration(q3)}" if q1 and q3 else "",
        "fraction": "" if fraction is None else digits(fraction, 2), "memory": memory(record),
    }  # fmt: skip


def _pair(pair: evidence.Pair) -> dict[str, str]:
    told = {None: "not compared", True: "the same", False: "different"}
    return {
        "label": evidence.label(pair.after), "impl": pair.before.impl,
        "before": duration(pair.before.get("time.median_us")),
        "after": duration(pair.after.get("time.median_us")), "ratio": f"{digits(pair.ratio)}x",
        "memory_before": memory(pair.before), "memory_after": memory(pair.after),
        "bytes": told[pair.same_bytes],
    }  # fmt: skip


def _side(side: evidence.Side, hw: str, record: Record) -> dict[str, Any]:
    layouts: Mapping[str, Any] = record.row.get("layouts") or {}
    floor, output = record.get("bound.floor_us"), record.get("memory.output_bytes")
    time = record.get("time.median_us")
    pads = [f"{name} {size(made['pad_bytes'])}" for name, made in layouts.items()
            if made.get("pad_bytes")]  # fmt: skip
    named = ", ".join(f"{name} {made.get('name')}" for name, made in layouts.items())
    bound = f"at least {duration(floor)}" if floor else str(record.row.get("time_absent"))
    return {
        "path": side.path, "model": side.model, "tp_size": side.tp_size, "experts": side.experts,
        "hw": hw, "padding": ", ".join(pads) or "none",
        "layouts": named or f"{record.state}: {record.row.get('reason')}",
        "result": size(output) if output is not None else str(record.row.get("memory_absent")),
        "time": duration(time) if time else bound,
    }  # fmt: skip
