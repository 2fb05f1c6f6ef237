"""Findings: sentences that rows alone support, worst first, each with its evidence.

Nothing is said that the rows do not show: no cause, no advice, no number without its source.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from harness.report import evidence
from harness.report.facts import Facts
from harness.report.load import Record
from harness.report.trace import Number, Text, count, digits, say, size

LEVELS = {"bad": "✕", "warn": "!", "good": "✓", "note": "·"}
STEEP = 1.1  # exponent of time over experts above which a series is named


@dataclass(frozen=True)
class Finding:
    """level: a key of LEVELS. find: filters of the page that show the cells meant."""

    level: str
    text: Text
    find: dict[str, str] = field(default_factory=dict)


def findings(
    facts: Facts,
    pairs: Sequence[evidence.Pair],
    slopes: Sequence[evidence.Slope],
    sides: Sequence[evidence.Side],
) -> list[Finding]:
    """See the module's page."""
    every = [
        *_wrong(facts), *_disagree(facts), *_failed(facts), *_speed(facts), *_gains(pairs),
        *_memory(facts), *_padding(facts), *_slopes(slopes),
        *_targets(sides),
    ]  # fmt: skip
    return sorted(every, key=lambda f: list(LEVELS).index(f.level))


def _wrong(facts: Facts) -> Iterator[Finding]:
    groups: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for record in facts.records:
        if record.state == "wrong":
            groups[(str(record.cell["path"]), str(record.cell["impl"]))].append(record)
    for (path, impl), group in sorted(groups.items(), key=lambda item: -len(item[1])):
        failed: Counter[str] = Counter()
        for record in group:
            checks = record.row.get("checks") or {}
            failed.update(name for name, told in checks.items() if str(told).startswith("fail"))
        names = ", ".join(name for name, _ in failed.most_common(3)) or "no check named"
        n = count(len(group), state="wrong", path=path, impl=impl)
        text = say("{} by {} is wrong in {} of its cells; failed: {}.", path, impl, n, names)
        yield Finding("bad", text, {"state": "wrong", "path": path, "impl": impl})


def _disagree(facts: Facts) -> Iterator[Finding]:
    """Two rows of one cell that both call themselves right and have other digests."""
    groups: dict[str, list[Record]] = defaultdict(list)
    for record in facts.records:
        if record.state in ("ok", "padded"):
            groups[evidence.key(record, "impl", "env")].append(record)
    for group in groups.values():
        for other in group[1:]:
            if evidence.same_bytes(group[0], other) is False:
                one, two = (f"{r.cell['impl']} ({r.cell['env']})" for r in (group[0], other))
                what = evidence.label(other)
                text = say("{} and {} have other digests for {}, both are ok.", one, two, what)
                yield Finding("warn", text, {"path": str(other.cell["path"])})


def _failed(facts: Facts) -> Iterator[Finding]:
    for status in ("crashed", "timeout", "oom"):
        group = [r for r in facts.records if r.row["status"] == status]
        if group:
            first = str(group[0].row.get("reason"))
            short = first if len(first) <= 160 else first[:159] + "…"
            n = count(len(group), status=status)
            text = say("Status {}: {} of {} cells; the first says: {}", status, n,
                       count(facts.total, all="1"), short)  # fmt: skip
            yield Finding("warn", text, {"state": "failed"})
    if missing := facts.states["missing"]:
        n = count(missing, state="missing")
        text = say("Planned and without a row: {} of {} cells.", n, count(facts.total, all="1"))
        yield Finding("warn", text, {"state": "missing"})


def _number(record: Record, path: str, text: str) -> Number:
    return Number(text, record.ref(path))


def _speed(facts: Facts) -> Iterator[Finding]:
    """The fused routines' range of copy speed."""
    path = "time.copy_fraction"
    timed = [
        r for r in facts.records if r.cell["impl"] == evidence.OURS and r.get(path) is not None
    ]
    if not timed:
        return
    low, *_, high = sorted([*timed, timed[0]], key=lambda r: float(r.get(path)))
    parts = [
        part
        for r in (low, high)
        for part in (_number(r, path, digits(r.get(path), 2)), evidence.label(r))
    ]
    n = count(len(timed), impl=evidence.OURS, has="time")
    text = say("The fused routines reach {} ({}) to {} ({}) of the device's copy speed over {} "
               "timed cells.", *parts, n)  # fmt: skip
    yield Finding("note", text, {"impl": evidence.OURS})


def _gains(pairs: Sequence[evidence.Pair]) -> Iterator[Finding]:
    for vendor in dict.fromkeys(p.before.impl for p in pairs):
        mine = [p for p in pairs if p.before.impl == vendor]
        slower = sum(p.ratio < 1 for p in mine)
        both = [
            say("{} ({})", Number(f"{digits(p.ratio)}x", p.src), evidence.label(p.after))
            for p in ([mine[-1], mine[0]] if len(mine) > 1 else mine)
        ]
        end = f"{slower} of {len(mine)} slower" if slower else f"none of {len(mine)} slower"
        text = [*say("The fused routines against {}, same cell and device: ", vendor), *both[0]]
        text += [" to ", *both[1]] if len(both) > 1 else []
        text.append(f"; {end}.")
        yield Finding("warn" if slower else "good", text)


def _memory(facts: Facts) -> Iterator[Finding]:
    """The largest scratch of any implementation, in bytes beyond its outputs."""
    path = "memory.scratch_bytes"
    worst = max(facts.records, key=lambda r: r.get(path) or 0, default=None)
    if worst is None or not worst.get(path):
        return
    output = worst.get("memory.output_bytes") or 0
    text = say(
        "Most scratch memory: {} takes {} beyond {} of outputs for {}.",
        str(worst.cell["impl"]), _number(worst, path, size(worst.get(path))),
        _number(worst, "memory.output_bytes", size(output)), evidence.label(worst),
    )  # fmt: skip
    yield Finding("note", text, {"impl": str(worst.cell["impl"])})


def _padding(facts: Facts) -> Iterator[Finding]:
    """The preparation that padding makes the largest, against its share of the checkpoint."""
    path = "decisions.bytes_ratio"
    worst = max(facts.records, key=lambda r: r.get(path) or 0, default=None)
    if worst is None or (ratio := worst.get(path) or 0) <= 1:
        return
    number = _number(worst, path, f"{digits(ratio)}x")
    text = say("Most padding: {} on {} stores {} the bytes of its share of the checkpoint.",
               evidence.label(worst), str(worst.cell["hw"]), number)  # fmt: skip
    yield Finding("note", text, {"path": str(worst.cell["path"]), "hw": str(worst.cell["hw"])})


def _targets(sides: Sequence[evidence.Side]) -> Iterator[Finding]:
    """Which layout each target takes at which TP size, where targets differ."""
    taken: dict[tuple[str, str], dict[str, dict[str, set[int]]]] = {}
    for side in sides:
        for hw, record in side.by.items():
            for tensor, made in (record.row.get("layouts") or {}).items():
                by_hw = taken.setdefault((side.path, tensor), {}).setdefault(hw, {})
                by_hw.setdefault(str(made.get("name")), set()).add(side.tp_size)
    for (path, tensor), by_target in sorted(taken.items()):
        if len({str(sorted(layouts)) for layouts in by_target.values()}) < 2:
            continue
        told = []
        for hw, layouts in sorted(by_target.items()):
            by_first = sorted(layouts.items(), key=lambda item: min(item[1]))
            each = [f"{name} at TP {', '.join(map(str, sorted(tps)))}" for name, tps in by_first]
            told.append(f"{hw} {' and '.join(each)}")
        text = say("{} of {}: {}.", tensor, path, "; ".join(told))
        yield Finding("note", text, {"path": path})


def _slopes(slopes: Sequence[evidence.Slope]) -> Iterator[Finding]:
    for slope in slopes:
        if slope.exponent > STEEP:
            exponent = Number(digits(slope.exponent), slope.src)
            text = say("{} by {} grows faster than its experts: time ~ experts^{}.", slope.label,
                       slope.impl, exponent)  # fmt: skip
            yield Finding("warn", text)
