"""README's tables and figures, written from rows between its markers.

    <!-- table:h200 --> ... <!-- /table -->
    <!-- figures:h200 --> ... <!-- /figures -->

`h200` names a folder of rows under results/ and the published report under reports/. What stands
between the markers is derived from the rows alone, so a test compares it with what they say now.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from harness import UsageError
from harness.report import evidence, facts, load
from harness.report.load import Record
from harness.report.markdown import escape, memory
from harness.report.trace import digits, duration

OPTIONS = {"readme": "README.md", "results": "results", "reports": "reports", "check": "false"}
FIGURES = (("before_after", "Time and memory before and after"),
           ("copy_fraction", "Fraction of copy speed by routine"))  # fmt: skip
_MARK = re.compile(r"(<!-- (table|figures):([\w.-]+) -->\n).*?(<!-- /\2 -->)", re.S)


def main(options: Mapping[str, str]) -> int:
    """Rewrites README; with check=true only says (exit 1) whether it would change."""
    path = Path(options["readme"])
    if not path.is_file():
        raise UsageError(f"report readme: no file {path}")
    old = path.read_text(encoding="utf-8")
    new = rewritten(old, Path(options["results"]), Path(options["reports"]))
    if old == new:
        print(f"{path}: up to date")
        return 0
    if options["check"] == "true":
        print(f"{path}: differs from the rows; run: python -m harness report readme")
        return 1
    path.write_text(new, encoding="utf-8")
    print(f"{path}: rewritten")
    return 0


def rewritten(text: str, results: Path, reports: Path) -> str:
    """README's text, all between markers made anew. UsageError without markers or rows."""
    if not _MARK.search(text):
        raise UsageError("report readme: README has no <!-- table:NAME --> ... <!-- /table -->")

    def block(match: re.Match[str]) -> str:
        kind, name = match[2], match[3]
        made = table(results / name) if kind == "table" else figures(reports / name)
        return f"{match[1]}{made}{match[4]}"

    return _MARK.sub(block, text)


def figures(report: Path) -> str:
    """Two of the report's figures, light and dark, where its rows allowed them."""
    out = []
    for name, text in FIGURES:
        light = f"{report.as_posix()}/figures/{name}.svg"
        if Path(light).is_file():
            dark = light.replace(".svg", "-dark.svg")
            out.append(f'<picture><source media="(prefers-color-scheme: dark)" srcset="{dark}">'
                       f'<img alt="{text}" src="{light}"></picture>\n')  # fmt: skip
    return "\n".join(out)


def table(folder: Path) -> str:
    """A line per path and TP size, or bench case: its largest timed cell, before and ours."""
    told = facts.facts(load.load([folder]))
    best: dict[tuple[str, str], Record] = {}
    for record in told.records:
        if record.row.get("time") and record.impl == evidence.OURS:
            key = (str(record.cell["path"]), str(record.cell["tp_size"]) + record.case)
            if key not in best or _moved(record) > _moved(best[key]):
                best[key] = record
    before = {(p.after.run, p.after.line): p for p in evidence.pairs(told.records)}
    lines = [
        "| routine or path | cell | before | ours | gain | of copy speed | extra memory before "
        "| extra memory ours |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (path, _), record in sorted(best.items()):
        pair = before.get((record.run, record.line))
        was = "not measured" if pair is None else (
            f"{duration(pair.before.get('time.median_us'))} ({pair.before.impl})"
        )  # fmt: skip
        gain = "" if pair is None else f"{digits(pair.ratio)}x"
        fraction = record.get("time.copy_fraction")
        cell = record.cell
        what = f"{cell['model']}, TP{cell['tp_size']}, {cell['experts']} experts"
        ours = duration(record.get("time.median_us"))
        named = f" ({escape(record.case)})" if record.case not in path else ""
        lines.append(
            f"| `{path}`{named} | {escape(what)} | {was} | {ours} "
            f"| {gain} | {'' if fraction is None else digits(fraction, 2)} "
            f"| {'' if pair is None else memory(pair.before)} | {memory(record)} |"
        )
    timed = sum(r.row.get("time") is not None for r in told.records)
    devices = sorted({str(r.get("time.device")) for r in told.records if r.row.get("time")})
    lines += ["", f"{timed} of {told.total} rows timed, on {', '.join(devices) or 'no device'}; "
              "the largest cell of each. Made by `python -m harness report "
              "readme`.", ""]  # fmt: skip
    return "\n".join(lines)


def _moved(record: Record) -> float:
    return float(record.get("time.useful_bytes") or 0)
