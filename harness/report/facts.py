"""What a set of runs established: how much was measured, what was not and why, and the verdict.

Everything is counted over the same list of cells: rows, plus cells that a manifest lists and no row
answers. A count is never rounded and never leaves out what failed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from harness.report.evidence import clip
from harness.report.load import STATES, Record, Run
from harness.report.trace import Number, Text, count, say
from harness.rows import ABSENT

EVIDENCE = (
    ("time", "timed"), ("memory", "memory measured"), ("codegen", "code read"),
    ("bound", "bound computed"),
)  # fmt: skip


@dataclass(frozen=True)
class Coverage:
    """One kind of evidence: how many cells have it, of how many, and the reasons of the rest."""

    field: str
    label: str
    have: Number
    total: Number
    share: float
    reasons: tuple[tuple[str, Number, str], ...]  # code, count, what it means


@dataclass(frozen=True)
class Facts:
    runs: tuple[Run, ...]
    records: tuple[Record, ...]
    states: dict[str, int]
    total: int
    coverage: tuple[Coverage, ...]
    level: str  # good, warn, bad: how the verdict is marked
    verdict: Text
    about: tuple[tuple[str, str], ...]


def facts(runs: Sequence[Run]) -> Facts:
    """See the module's page."""
    records = tuple(record for run in runs for record in run.records)
    missing = sum(len(run.missing) for run in runs)
    states = dict.fromkeys(STATES, 0) | Counter(r.state for r in records) | {"missing": missing}
    total = len(records) + missing
    level, verdict = _verdict(states, total, records)
    coverage = (_checked(records, total), *(_coverage(f, n, records, total) for f, n in EVIDENCE))
    return Facts(
        tuple(runs), records, {k: states[k] for k in STATES}, total, coverage, level, verdict,
        tuple(_about(runs, records)),
    )  # fmt: skip


def _checked(records: Sequence[Record], total: int) -> Coverage:
    """Cells whose checks ran to an answer, right or wrong."""
    have = [r for r in records if r.row["status"] in ("ok", "wrong")]
    rest = Counter(str(r.row["status"]) for r in records if r.row["status"] not in ("ok", "wrong"))
    meaning = {
        "refused": "refused with a reason", "skipped": "not run, with a reason",
        "crashed": "the process or the harness failed", "timeout": "the time limit ended it",
        "oom": "not enough memory",
    }  # fmt: skip
    reasons = [(s, count(n, status=s), meaning[s]) for s, n in rest.most_common()]
    reasons += _never(total - len(records))
    share = len(have) / total if total else 0.0
    number = Number(str(len(have)), "count:status=ok|wrong")
    return Coverage("checks", "bytes checked", number, count(total, all="1"), share, tuple(reasons))


def _coverage(field: str, label: str, records: Sequence[Record], total: int) -> Coverage:
    have = sum(r.row.get(field) is not None for r in records)
    codes = Counter(str(r.row.get(f"{field}_absent")) for r in records if r.row.get(field) is None)
    reasons = [
        (code, count(n, **{f"{field}_absent": code}), ABSENT.get(code, "no reason was recorded"))
        for code, n in codes.most_common()
    ]
    reasons += _never(total - len(records))
    number = count(have, has=field)
    share = have / total if total else 0.0
    return Coverage(field, label, number, count(total, all="1"), share, tuple(reasons))


def _never(missing: int) -> list[tuple[str, Number, str]]:
    meaning = "the run ended before these cells"
    return [("NOT_REACHED", count(missing, state="missing"), meaning)] if missing else []


def _verdict(states: dict[str, int], total: int, records: Sequence[Record]) -> tuple[str, Text]:
    """One sentence: the worst that is true first, then what holds."""
    of = count(total, all="1")
    right = states["ok"] + states["padded"]
    right_n = Number(str(right), "count:state=ok|padded")
    timed = sum(r.row.get("time") is not None for r in records)
    if not total:
        return "bad", ["Nothing was run: there are no rows."]
    tail: list[str | Number] = []
    if states["refused"]:
        tail += ["; ", count(states["refused"], state="refused"), " refused with a reason"]
    if states["skipped"]:
        tail += ["; ", count(states["skipped"], state="skipped"), " not run, with a reason"]
    if timed:
        tail += ["; ", count(timed, has="time"), " timed on ", _listed(_devices(records))]
    elif right:
        tail += ["; none timed, so no statement about speed"]
    tail += ["."]
    lost = states["failed"] + states["missing"]
    lost_n = Number(str(lost), "count:state=failed|missing")
    if wrong := states["wrong"]:
        where = _listed(sorted({_who(r) for r in records if r.state == "wrong"}))
        are = "is" if wrong == 1 else "are"
        lead = say("{} of {} cells {} wrong ({}); {} are right", count(wrong, state="wrong"), of,
                   are, where, right_n)  # fmt: skip
        return "bad", [*lead, *_lost(lost_n, lost), *tail]
    if not right:
        lead = say("Nothing was verified: none of {} cells passed its checks", of)
        return "bad", [*lead, *_lost(lost_n, lost), *tail]
    if states["missing"]:
        ran = Number(str(len(records)), "count:rows=1")
        lead = say("The run was interrupted: {} of {} cells ran; {} are right and none is wrong",
                   ran, of, right_n)  # fmt: skip
        return "warn", [*lead, *tail]
    if failed := states["failed"]:
        lead = say("{} of {} cells gave no answer (crashed, time or memory); {} are right and none "
                   "is wrong", count(failed, state="failed"), of, right_n)  # fmt: skip
        return "warn", [*lead, *tail]
    return "good", [*say("{} of {} cells have exactly the right bytes", right_n, of), *tail]


def _who(record: Record) -> str:
    """The path, and who computed it where that is neither the reference nor ours."""
    path, impl = clip(record.cell["path"]), str(record.cell["impl"])
    return path if impl in ("reference", "fused") else f"{path} by {clip(impl)}"


def _lost(number: Number, lost: int) -> list[str | Number]:
    return ["; ", number, " gave no answer"] if lost else []


def _listed(names: Iterable[str], limit: int = 4) -> str:
    names = list(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def _devices(records: Iterable[Record]) -> list[str]:
    return sorted({str(r.get("time.device")) for r in records if r.get("time")})


def _about(runs: Sequence[Run], records: Sequence[Record]) -> Iterable[tuple[str, str]]:
    """(label, values) of what ran where, from the rows' cells and provenance."""

    def values(path: str) -> list[str]:
        found = {clip(v, 80) for r in records if (v := r.get(path)) is not None}
        return sorted(found)

    yield "runs", _listed((run.name for run in runs), 6)
    for label, path in (
        ("targets", "cell.hw"), ("models", "cell.model"), ("paths", "cell.path"),
        ("TP", "cell.tp_size"), ("implementations", "cell.impl"), ("environments", "cell.env"),
        ("ran on", "provenance.device"), ("torch", "provenance.torch"),
        ("triton", "provenance.triton"), ("commit", "provenance.commit"),
    ):  # fmt: skip
        if found := values(path):
            numeric = sorted(found, key=lambda v: int(v)) if path == "cell.tp_size" else found
            if path == "provenance.commit":
                numeric = [commit[:12] for commit in found]
            yield label, _listed(numeric, 8)
    if any(r.get("provenance.dirty") for r in records):
        yield "work tree", "had uncommitted changes in at least one run"
    if others := sum(run.others for run in runs):
        yield "other lines", f"{others} in these files are no rows and are not shown here"
    if replaced := sum(run.replaced for run in runs):
        yield "replaced rows", f"{replaced}, each by a later row of its cell"
