"""What the gate found, for a terminal, a job summary (Markdown) and a CI server (JUnit XML).

Worst first everywhere. A cell's command to repeat it is built from its identity, so that a baseline
need not hold it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from harness import rows
from harness.gate.rules import Finding

MEANING = {
    0: "passed",
    1: "regression",
    2: "wrong or changed bytes",
    3: "coverage lost",
    4: "harness or usage error",
}
STYLE = {2: "bold red", 3: "magenta", 1: "yellow", 0: ""}
QUIET = ("SAME",)  # counted, not listed


def repro(cell: Mapping[str, Any]) -> str:
    """The command that runs this cell alone."""
    return "python -m harness sweep " + " ".join(
        f"{k}={v}" for k, v in cell.items() if v is not None
    )


def summary(findings: Sequence[Finding], compared: Mapping[str, int], code: int) -> str:
    """One sentence: the verdict, how much was compared, and the first thing that is wrong."""
    counts = ", ".join(f"{kind} {n}" for kind, n in compared.items())
    text = f"gate: {MEANING[code]} (exit {code}); cells compared: {counts}"
    bad = [f for f in findings if f.code]
    if bad:
        more = f", and {len(bad) - 1} more" if len(bad) > 1 else ""
        text += f"; {rows.short(bad[0].cell)}: {bad[0].sentence}{more}"
    return text


def table(findings: Sequence[Finding], limit: int = 40) -> Table:
    """The findings, worst first; what is the same is left out."""
    out = Table(title=None, show_lines=False)
    for name in ("verdict", "class", "cell", "what"):
        out.add_column(name, overflow="fold")
    listed = [f for f in findings if f.verdict not in QUIET]
    for f in listed[:limit]:
        out.add_row(
            f.verdict, f.kind, escape(rows.short(f.cell)), escape(f.sentence), style=STYLE[f.code]
        )
    if len(listed) > limit:
        out.add_row("...", "", "", f"{len(listed) - limit} more; see the Markdown")
    return out


def show(findings: Sequence[Finding], line: str, console: Console | None = None) -> None:
    """Print the table, if there is anything to list, then the sentence."""
    console = console or Console()
    if not console.is_terminal:  # a log has no width; 80 columns would fold every sentence
        console.width = max(console.width, 150)
    if any(f.verdict not in QUIET for f in findings):
        console.print(table(findings))
    console.print(escape(line), soft_wrap=True, highlight=False)


def _cell_text(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")


def markdown(findings: Sequence[Finding], line: str, header: Mapping[str, Any]) -> str:
    """For a job summary: the sentence, the baseline's origin, a table of what differs."""
    lines = ["## Gate", "", _cell_text(line), ""]
    if header:
        origin = "Baseline: {cells} cells, accepted by {who} on {when}: {why}".format_map(header)
        lines += [_cell_text(origin), ""]
    listed = [f for f in findings if f.verdict not in QUIET]
    if listed:
        lines += ["| verdict | class | cell | what |", "|---|---|---|---|"]
        lines += [
            "| "
            + " | ".join(_cell_text(x) for x in (f.verdict, f.kind, rows.short(f.cell), f.sentence))
            + " |"
            for f in listed
        ]
        bad = [f for f in listed if f.code]
        if bad:
            again = bad[0].repro or repro(bad[0].cell)
            lines += ["", "To repeat the first:", "", "```", again, "```"]
    counts = Counter(f.verdict for f in findings)
    if counts:
        lines += ["", ", ".join(f"{n} {verdict}" for verdict, n in sorted(counts.items()))]
    return "\n".join(lines) + "\n"


def junit(findings: Sequence[Finding], cells: Iterable[Mapping[str, Any]], line: str) -> ET.Element:
    """One test case a cell; failures carry the sentences, undecided ones are skipped.

    A gate that had nothing to compare is one failed case, so that a server cannot show it as green.
    """
    suite = ET.Element("testsuite", name="gate")
    by_cell: dict[str, list[Finding]] = {}
    for f in findings:
        by_cell.setdefault(rows.key(f.cell), []).append(f)
    names = {rows.key(c): c for c in cells} | {rows.key(f.cell): f.cell for f in findings}
    failures = skipped = 0
    for key, cell in names.items():
        case = ET.SubElement(
            suite, "testcase", classname=f"gate.{cell['path']}", name=_xml(rows.short(cell))
        )
        found = by_cell.get(key, [])
        bad = [f for f in found if f.code]
        open_ = [f for f in found if f.verdict in ("AMBIGUOUS", "NOT_COMPARABLE", "ENVIRONMENT")]
        if bad:
            failures += 1
            node = ET.SubElement(
                case, "failure", type=bad[0].verdict, message=_xml(bad[0].sentence)
            )
            node.text = _xml(
                "\n".join(f"{f.kind} {f.verdict}: {f.sentence}" for f in bad)
                + f"\n{bad[0].repro or repro(cell)}"
            )
        elif open_:
            skipped += 1
            ET.SubElement(case, "skipped", message=_xml(open_[0].sentence))
    nothing = "nothing to compare" in line or "nothing was verified" in line
    if nothing:
        failures += 1
        case = ET.SubElement(suite, "testcase", classname="gate", name="anything to compare")
        ET.SubElement(case, "failure", type="NOTHING", message=_xml(line))
    suite.set("tests", str(len(names) + nothing))
    suite.set("failures", str(failures))
    suite.set("skipped", str(skipped))
    suite.set("errors", "0")
    return suite


def _xml(text: str) -> str:
    """Text without the control characters that XML 1.0 cannot hold."""
    return "".join(c for c in text if c in "\t\n\r" or ord(c) >= 0x20)


def write_junit(path: Path, suite: ET.Element) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    ET.indent(suite)
    ET.ElementTree(suite).write(path, encoding="utf-8", xml_declaration=True)
