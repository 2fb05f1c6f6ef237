"""What follows from several rows: before and after, time against experts, target by target.

Rows are compared only where everything but the compared axis is the same cell: same model, path,
TP, experts, size, source and seed. Times are compared only if taken on the same device. Each result
keeps its records, so that every number on the page leads back to rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from typing import Any

from harness import rows
from harness.report.load import Record

OURS = "fused"
# Who a reader calls "before", best first: what serving engines run today, then plain torch.
BEFORE = ("vllm", "flashinfer", "triton_kernels", "reference")


@dataclass(frozen=True)
class Pair:
    """A vendor's (or the reference's) time against ours on one device; same_bytes: by digests."""

    before: Record
    after: Record
    ratio: float
    same_bytes: bool | None

    @property
    def src(self) -> str:
        return f"ratio:{self.before.ref('time.median_us')}/{self.after.ref('time.median_us')}"


@dataclass(frozen=True)
class Slope:
    """Median time against experts: time ~ experts^exponent, fitted in logs over `records`."""

    label: str
    impl: str
    exponent: float
    records: tuple[Record, ...]

    @property
    def src(self) -> str:
        return "slope:" + ",".join(r.ref("time.median_us") for r in self.records)


@dataclass(frozen=True)
class Side:
    """One preparation on several targets: {hw: record}."""

    path: str
    model: str
    tp_size: int
    experts: Any
    by: dict[str, Record]


def clip(name: object, most: int = 48) -> str:
    """A name that does not fill the page: its start, and that it went on."""
    text = str(name)
    return text if len(text) <= most else text[: most - 1] + "…"


def titled(record: Record) -> str:
    """The path, or the bench's name of the case, with the path where that does not say it."""
    path, case = str(record.cell["path"]), record.case
    if case in path:
        return path
    return case if path.split("_")[0] in case else f"{path} {case}"


def label(record: Record, *without: str) -> str:
    """The cell in a line's length: path, model, TP, experts, and what is not the default."""
    cell = record.cell
    parts = [
        clip(titled(record)),
        clip(cell["model"]),
        f"TP{cell['tp_size']}",
        f"E={cell['experts']}",
    ]
    extra = [
        f"{k}={clip(v)}" for k, v in cell.items()
        if k not in (*rows.CELL, "case") and k not in without and v is not None
    ]  # fmt: skip
    return " · ".join(parts + extra)


def key(record: Record, *without: str) -> str:
    """The cell's identity without some axes."""
    kept = {k: v for k, v in record.cell.items() if k not in without}
    return f"{rows.key(kept)} {record.case}"


def same_bytes(a: Record, b: Record) -> bool | None:
    """Whether the digests that two rows share are equal, or both rows were held to the reference;
    None where neither is known."""
    if a.vendor or b.vendor:
        return None  # a bench row has our digests only
    one, two = a.row.get("digests") or {}, b.row.get("digests") or {}
    shared = one.keys() & two.keys()
    if shared:
        return all(one[name] == two[name] for name in shared)
    held = [r.get("checks.equals_reference") == "pass" for r in (a, b)]
    return True if all(held) else None


def pairs(records: Sequence[Record]) -> list[Pair]:
    """Each timed fused row against the first of BEFORE in its cell; the largest gain first."""
    groups: dict[tuple[str, str], dict[str, Record]] = defaultdict(dict)
    for record in records:
        if record.row.get("time"):
            group = (key(record, "impl", "env"), str(record.get("time.device")))
            groups[group].setdefault(record.impl, record)
            if today := record.today():
                groups[group].setdefault(today.impl, today)
    out = []
    for found in groups.values():
        before = next((found[name] for name in BEFORE if name in found), None)
        after = found.get(OURS)
        if before and after:
            slow, fast = before.get("time.median_us"), after.get("time.median_us")
            if slow and fast:
                out.append(Pair(before, after, slow / fast, same_bytes(before, after)))
    return sorted(out, key=lambda p: -p.ratio)


def slopes(records: Sequence[Record]) -> list[Slope]:
    """Groups of timed rows that differ in experts alone, three counts or more."""
    groups: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        experts = record.cell.get("experts")
        if record.row.get("time") and isinstance(experts, int) and experts > 0:
            groups[key(record, "experts", "size")].append(record)
    out = []
    for group in groups.values():
        by_count = {int(r.cell["experts"]): r for r in group}
        ordered = tuple(by_count[e] for e in sorted(by_count))
        if len(ordered) >= 3 and all(r.get("time.median_us") for r in ordered):
            xs = [log(r.cell["experts"]) for r in ordered]
            ys = [log(r.get("time.median_us")) for r in ordered]
            first = ordered[0].cell
            name = f"{titled(ordered[0])} · {first['model']} · TP{first['tp_size']}"
            out.append(Slope(name, str(first["impl"]), _fit(xs, ys), ordered))
    return sorted(out, key=lambda s: (s.label, s.impl))


def _fit(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Least-squares slope."""
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    top = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    return top / sum((x - mean_x) ** 2 for x in xs)


def targets(records: Sequence[Record]) -> list[Side]:
    """Preparations that were done for two targets or more. Per target, a timed row is preferred,
    then one that is right, then fused before others."""
    groups: dict[str, dict[str, Record]] = defaultdict(dict)
    rank = lambda r: (
        r.row.get("time") is not None, r.state in ("ok", "padded"), r.cell["impl"] == OURS, r.run
    )  # fmt: skip
    for record in records:
        by = groups[key(record, "hw", "impl", "env", "size", "seed", "source")]
        hw = str(record.cell["hw"])
        if hw not in by or rank(record) > rank(by[hw]):
            by[hw] = record
    out = []
    for by in groups.values():
        if len(by) > 1:
            cell = next(iter(by.values())).cell
            tp, experts = int(cell["tp_size"]), cell["experts"]
            out.append(Side(str(cell["path"]), str(cell["model"]), tp, experts, by))
    return sorted(out, key=lambda s: (s.path, s.model, s.tp_size, str(s.experts)))
