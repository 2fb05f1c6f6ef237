"""The page: one HTML file that holds its style, its script and the rows, and opens from disk.

Rows are packed: every value that recurs (names, checks, layouts, provenance, ...) is stored once
in `pool` and referred to by number, samples are left out (their count and quartiles stay), and the
script draws from that as one scrolls or filters. Text reaches the page through the template's
autoescape, or through the script's textContent; the packed rows stand in a JSON block whose `<`,
`>` and `&` are escaped, so nothing in a row can end it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from harness.report import code, evidence
from harness.report.facts import Facts
from harness.report.findings import LEVELS, Finding
from harness.report.load import STATES
from harness.report.trace import plain
from harness.rows import ABSENT

ASSETS = files("harness.report") / "assets"
SCRIPTS = ("base.js", "filter.js", "matrix.js", "cells.js", "detail.js", "charts.js", "targets.js")
# Per row, in this order; `pooled` ones are numbers of the pool, the others stand as they are.
POOLED = (
    "status", "reason", "checks", "digests", "layouts", "decisions", "memory", "codegen", "bound",
    "provenance", "time_absent", "memory_absent", "codegen_absent", "bound_absent",
)  # fmt: skip


class Pool:
    """Values stored once: `put` gives the number of an equal value."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._number: dict[str, int] = {}

    def put(self, value: Any) -> int:
        text = json.dumps(value, sort_keys=True, default=str)
        if text not in self._number:
            self._number[text] = len(self.values)
            self.values.append(value)
        return self._number[text]


def asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def environment() -> Environment:
    """Templates of this package; everything that is not Markup is escaped."""
    env = Environment(
        loader=FunctionLoader(asset), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    env.filters["plain"] = plain
    return env


def as_json(value: Any) -> Markup:
    """JSON that cannot end its script block nor start markup."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def _time(time: Mapping[str, Any] | None) -> dict[str, Any] | int:
    """A row's time without its samples and telemetry; 0 for none."""
    if not time:
        return 0
    dropped = ("samples_us", "telemetry", "outliers")
    kept = {key: value for key, value in time.items() if key not in dropped}
    return kept | {"samples": len(time.get("samples_us") or ())}


def packed(
    facts: Facts,
    pairs: Sequence[evidence.Pair],
    slopes: Sequence[evidence.Slope],
    sides: Sequence[evidence.Side],
    metrics: code.CodeTable,
) -> dict[str, Any]:
    """What the script needs, as JSON values. Records are numbered as in `facts.records`."""
    pool = Pool()
    index = {(r.run, r.line): i for i, r in enumerate(facts.records)}
    at = lambda record: index[(record.run, record.line)]
    axes = list(dict.fromkeys(name for r in facts.records for name in r.cell))
    names = list(STATES)
    rows = [
        [
            r.run, r.line, names.index(r.state), _time(r.row.get("time")), r.row.get("repro", ""),
            [pool.put(r.cell.get(axis)) for axis in axes],
            [pool.put(r.row.get(field)) for field in POOLED],
        ]
        for r in facts.records
    ]  # fmt: skip
    missing = [
        [pool.put(cell.get(axis)) for axis in axes] for run in facts.runs for cell in run.missing
    ]
    return {
        "runs": [run.name for run in facts.runs],
        "states": [[name, *STATES[name]] for name in names],
        "absent": ABSENT,
        "axes": axes,
        "fields": list(POOLED),
        "pool": pool.values,
        "rows": rows,
        "missing": missing if axes else [],
        "pairs": [
            [at(p.before), at(p.after), p.ratio, p.same_bytes, p.before.vendor] for p in pairs
        ],
        "slopes": [[s.label, s.impl, s.exponent, [at(r) for r in s.records]] for s in slopes],
        "targets": [
            [s.path, s.model, s.tp_size, s.experts, {hw: at(r) for hw, r in s.by.items()}]
            for s in sides
        ],
        "code": {
            "columns": metrics.columns,
            "metrics": [
                [m.kernel, m.name, [c and [at(c[0]), c[1], c[2]] for c in m.cells], m.changed]
                for m in metrics.metrics
            ],
        },
    }


def render(
    facts: Facts, title: str, found: Sequence[Finding], data: Mapping[str, Any], commands: str
) -> str:
    """The page's HTML. commands: how the run is made again, as text."""
    return environment().get_template("page.html").render(
        title=title, facts=facts, states=STATES, findings=found, levels=LEVELS, commands=commands,
        level_glyph={"good": "✓", "warn": "!", "bad": "✕"}[facts.level],
        data=as_json(data), style=Markup(asset("page.css")),
        script=Markup("\n".join(asset(name) for name in SCRIPTS)),
    )  # fmt: skip
