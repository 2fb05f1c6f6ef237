"""What counts as worse: pure comparisons of two rows, class by class.

exact     status, digests, layouts, decisions and checks: no threshold, any change is exit 2
coverage  a cell or a piece of evidence that was there and is gone: exit 3
memory    bytes and launches, by threshold: exit 1
time      one run against a stored one can only raise a suspicion (AMBIGUOUS): a verdict needs the
          rounds of `gate ab`, see `stats`
codegen   `codegen_gate.compare_codegen`, where that module and both rows' evidence exist

A finding has the exit code it calls for; 0 is worth a line but not a failure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from harness import rows
from harness.codegen.rules import compare_codegen
from harness.measure import stats

Row = Mapping[str, Any]
CLASSES = ("exact", "coverage", "memory", "time", "codegen")
# Inside `decisions`, but none: sentences for people, and what a vendor took beside us.
PROSE = ("reason", "notes", "source", "today")
LOST_STATUS = ("skipped", "oom", "timeout", "crashed")


@dataclass(frozen=True)
class Limits:
    """conf/gate/default.yaml."""

    memory_rel: float = 0.01
    memory_bytes: int = 2**20
    rule: stats.Rule = field(default_factory=stats.Rule)


@dataclass(frozen=True)
class Finding:
    """One difference. kind: a name of CLASSES; size: how bad, for the order within a verdict."""

    kind: str
    verdict: str
    code: int
    cell: dict[str, Any]
    what: str
    sentence: str
    size: float = 0.0
    repro: str = ""  # where the cell alone does not say it


def differences(old: Any, new: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(dotted path, old, new) of each leaf where two JSON values differ; one may be `absent`."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for name in [*old, *(n for n in new if n not in old)]:
            yield from differences(
                old.get(name, "absent"),
                new.get(name, "absent"),
                f"{path}.{name}" if path else str(name),
            )
    elif old != new:
        yield path, old, new


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:40]}... ({len(text)} characters)"


def _digest(value: Any) -> str:
    return str(value)[:19]  # `sha256:` and twelve digits tell two digests apart for a reader


def status(old: Row, new: Row) -> Finding | None:
    """What a change of status means; wrong bytes always fail."""
    was, now = old["status"], new["status"]
    cell = dict(new["cell"])
    if now == "wrong":
        return Finding("exact", "WRONG", 2, cell, "status", f"wrong: {new['reason']}", 1e9)
    if was == now:
        return None
    text = f"was {was}, is {now}" + (f": {new['reason']}" if new.get("reason") else "")
    if was == "ok" or now in LOST_STATUS:
        return Finding("coverage", "LOST", 3, cell, "status", text, 1e6)
    if was == "refused":
        return Finding("exact", "CHANGED", 2, cell, "status", f"{text} (it was: {old['reason']})")
    return Finding("coverage", "GAINED", 0, cell, "status", text)


def exact(old: Row, new: Row) -> list[Finding]:
    """Digests, layouts (strides and padding too) and decisions of two rows that are both ok."""
    cell, out = dict(new["cell"]), []
    for name, was, now in differences(old.get("digests", {}), new.get("digests", {})):
        how = "" if "absent" in (was, now) else "the bytes differ, "
        out.append(
            Finding(
                "exact",
                "CHANGED",
                2,
                cell,
                f"digests.{name}",
                f"{name}: {how}{_digest(was)} is now {_digest(now)}",
                2,
            )
        )
    for part in ("layouts", "decisions"):
        for path, was, now in differences(old.get(part, {}), new.get(part, {})):
            if part == "decisions" and path.split(".")[0] in PROSE:
                continue
            out.append(
                Finding(
                    "exact",
                    "CHANGED",
                    2,
                    cell,
                    f"{part}.{path}",
                    f"{part}.{path}: {_shown(was)} is now {_shown(now)}",
                    1,
                )
            )
    for name, was in old.get("checks", {}).items():
        now = str(new.get("checks", {}).get(name, "absent"))
        if str(was).startswith("pass") and now.startswith("fail"):
            out.append(Finding("exact", "WRONG", 2, cell, f"checks.{name}", f"{name}: {now}", 3))
    return out


def coverage(old: Row, new: Row) -> list[Finding]:
    """Checks that no longer run, and evidence that is gone."""
    cell, out = dict(new["cell"]), []
    for name, was in old.get("checks", {}).items():
        now = str(new.get("checks", {}).get(name, "absent"))
        if str(was).startswith("pass") and not now.startswith(("pass", "fail")):
            out.append(
                Finding(
                    "coverage",
                    "LOST",
                    3,
                    cell,
                    f"checks.{name}",
                    f"check {name} passed in the baseline and is now {_shown(now)}",
                )
            )
    for part in rows.EVIDENCE:
        if old.get(part) is not None and new.get(part) is None:
            why = new.get(f"{part}_absent")
            out.append(
                Finding(
                    "coverage", "LOST", 3, cell, part, f"{part} was measured and is gone: {why}"
                )
            )
    return out


def memory(old: Row, new: Row, limits: Limits) -> list[Finding]:
    """Bytes above the threshold, and any further kernel launch."""
    cell = dict(new["cell"])
    was_all, now_all = old.get("memory"), new.get("memory")
    if not was_all or not now_all:
        return []
    if was_all.get("method") != now_all.get("method"):
        return [
            Finding(
                "memory",
                "NOT_COMPARABLE",
                0,
                cell,
                "memory",
                f"measured by {was_all.get('method')}, now by {now_all.get('method')}",
            )
        ]
    out = []
    for name in ("peak_extra_bytes", "scratch_bytes", "output_bytes", "launches"):
        was, now = was_all.get(name), now_all.get(name)
        if was is None or now is None or now <= was:
            continue
        grown = now / was if was else float("inf")
        if name == "launches" or (
            now - was > limits.memory_bytes and grown > 1 + limits.memory_rel
        ):
            unit = "" if name == "launches" else " bytes"
            out.append(
                Finding(
                    "memory",
                    "MORE",
                    1,
                    cell,
                    f"memory.{name}",
                    f"{name}: {was:,}{unit} is now {now:,}{unit}"
                    + (f", {grown:.2f}x" if was else ""),
                    grown,
                )
            )
    return out


def comparison_key(row: Row) -> dict[str, Any]:
    """What `stats.not_comparable` needs to know of a row's time."""
    time, made = row["time"], row.get("provenance", {})
    return {**time, "torch": made.get("torch"), "triton": made.get("triton")}


def time(old: Row, new: Row, limits: Limits) -> Finding | None:
    """A stored time against a new one: SAME, NOT_COMPARABLE, or AMBIGUOUS."""
    if not old.get("time") or not new.get("time"):
        return None
    cell = dict(new["cell"])
    why = stats.not_comparable(comparison_key(old), comparison_key(new))
    if why:
        return Finding("time", "NOT_COMPARABLE", 0, cell, "time", why)
    was, now = old["time"], new["time"]
    ratio = now["median_us"] / was["median_us"]
    spread = was.get("rel_iqr", 0.0) + now.get("rel_iqr", 0.0)
    threshold = 1 + max(limits.rule.effect, spread)
    text = f"{was['median_us']:.1f} us is now {now['median_us']:.1f} us, {ratio:.3f}x"
    if max(ratio, 1 / ratio) < threshold:
        return Finding("time", "SAME", 0, cell, "time", text)
    return Finding(
        "time",
        "AMBIGUOUS",
        0,
        cell,
        "time",
        f"{text} from one process each; `gate ab` decides with paired rounds",
        ratio,
    )


def codegen(old: Row, new: Row) -> list[Finding]:
    """What the rule table of `codegen_gate` says of two rows' code metrics."""
    if not old.get("codegen") or not new.get("codegen"):
        return []
    found = compare_codegen(old["codegen"], new["codegen"])
    return [
        Finding("codegen", f.verdict, f.code, dict(new["cell"]), f.what, f.sentence) for f in found
    ]
