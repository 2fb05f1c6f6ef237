"""Two sets of rows, joined by the identity of their cells: every finding, worst first."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from harness import UsageError, rows
from harness.gate.rules import (
    CLASSES,
    Finding,
    Limits,
    Row,
    codegen,
    coverage,
    exact,
    memory,
    status,
    time,
)
from harness.measure import stats


def compare(
    old: Iterable[Row], new: Iterable[Row], limits: Limits, classes: Iterable[str] = CLASSES
) -> tuple[list[Finding], dict[str, int]]:
    """(findings worst first, how many cells each class compared); joined by the cell's identity.

    Wrong bytes are a finding whichever classes are asked for.
    """
    olds, news = by_cell(old), by_cell(new)
    out: list[Finding] = []
    compared = dict.fromkeys(classes, 0)
    for key, was in olds.items():
        now = news.get(key)
        if now is None:
            out.append(
                Finding(
                    "coverage",
                    "LOST",
                    3,
                    dict(was["cell"]),
                    "cell",
                    "the baseline has this cell, the run does not",
                    1e7,
                )
            )
            continue
        found, seen = _cell(was, now, limits)
        out += [replace(f, repro=now.get("repro", "")) for f in found]
        for kind in seen & set(compared):
            compared[kind] += 1
    out += [_new(now) for key, now in news.items() if key not in olds]
    kept = [f for f in out if f.kind in compared or f.verdict == "WRONG"]
    return sorted(kept, key=_worst_first), compared


def by_cell(found: Iterable[Row]) -> dict[str, Row]:
    """Rows by the identity of their cell. A later row of a cell replaces one that was not ok.

    UsageError for two that are: one of them would never be compared.
    """
    out: dict[str, Row] = {}
    for row in found:
        key = rows.key(row["cell"])
        if key in out and out[key]["status"] == row["status"] == "ok":
            raise UsageError(
                f"two rows are of one cell, {rows.short(row['cell'])}: whatever sets them apart "
                "has to be part of the cell"
            )
        out[key] = row
    return out


def _cell(was: Row, now: Row, limits: Limits) -> tuple[list[Finding], set[str]]:
    """Findings of a cell that both sides have, and the classes that were compared."""
    changed = status(was, now)
    if changed is not None:  # what such a row holds besides says nothing more
        return [changed], {"exact", "coverage"}
    found, seen = exact(was, now) + coverage(was, now), {"exact", "coverage"}
    for kind in ("memory", "time", "codegen"):
        if was.get(kind) and now.get(kind):
            seen.add(kind)
    timed = time(was, now, limits)
    if timed is not None:
        found.append(timed)
        if timed.verdict == "NOT_COMPARABLE":
            seen.discard("time")
    return found + memory(was, now, limits) + codegen(was, now), seen


def _new(now: Row) -> Finding:
    """A cell that the baseline lacks: it can only be wrong, or lost from the start."""
    code = {"wrong": 2, "oom": 3, "timeout": 3, "crashed": 3}.get(now["status"], 0)
    text = f"not in the baseline; {now['status']}"
    text += f": {now['reason']}" if now.get("reason") else ""
    return Finding(
        "exact" if code == 2 else "coverage",
        "WRONG" if code == 2 else "NEW",
        code,
        dict(now["cell"]),
        "cell",
        text,
    )


_CODE_ORDER = (2, 3, 1, 0)  # wrong bytes before lost coverage before regressions


def _worst_first(f: Finding) -> tuple[int, int, float]:
    order = stats.VERDICTS.index(f.verdict) if f.verdict in stats.VERDICTS else -1
    return _CODE_ORDER.index(f.code), order, -f.size


def exit_code(findings: Iterable[Finding]) -> int:
    """The worst of all findings: 2, then 3, then 1, then 0."""
    return min((f.code for f in findings), key=_CODE_ORDER.index, default=0)
