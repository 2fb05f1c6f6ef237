"""What counts as worse in a kernel's code: pure rules over two records of `codegen`.

A regression (exit 1): a new spill; global reads or writes whose widest or mean width a lane shrank;
asynchronous copies gone; a matrix instruction or a scale-path copy gone, or fewer of them; shared
memory or registers that cost a resident block; instructions above +10 %; a kernel that no longer
compiles. The opposite asks for the baseline to be pinned again (exit 0). Records of different
triton versions are not the same subject: what moved between them is reported as `NOT_COMPARABLE`,
exit 0, unless the caller asks across versions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from harness import UsageError

# Loads that go to registers and copies that go to shared memory are one traffic: a compiler that
# moves a load from one kind to the other has made nothing narrower.
ACCESSES = {"global reads": ("global_loads", "async_copies"), "global writes": ("global_stores",)}
INSTRUCTIONS = 1.10  # more than this is a regression, less than its inverse an improvement
Record = Mapping[str, Any]


class CanaryMissed(UsageError):
    """A kernel that must spill was read as if it did not: exit 4, since no count can be trusted."""


@dataclass(frozen=True)
class Finding:
    """verdict: a word of stats.VERDICTS; code: the exit code it calls for; what: the metric."""

    verdict: str
    code: int
    what: str
    sentence: str


def compare_codegen(
    old: Mapping[str, Any], new: Mapping[str, Any], *, across_versions: bool = False
) -> list[Finding]:
    """Findings of two `codegen.for_cell` results, or of two single records, worst first.

    across_versions: judge different triton versions by the same rules (`compare env=`). Raises
    CanaryMissed when the new side's parser saw no spill in the kernel that must have some.
    """
    if new.get("canary_spills", 1) < 1:
        raise CanaryMissed(
            f"codegen: the canary kernel for {new['target']} must spill, and triton "
            f"{new['triton']}'s code "
            "was read as not spilling: the parser in harness/isa_*.py no longer fits this compiler"
        )
    if "kernels" not in old:
        old = {"target": old["target"], "triton": old["triton"], "kernels": {old["kernel"]: old}}
        new = {"target": new["target"], "triton": new["triton"], "kernels": {new["kernel"]: new}}
    found: list[Finding] = []
    other_version = old["triton"] != new["triton"] and not across_versions
    for name, was in old["kernels"].items():
        where = f"{old['target']} {name}"
        now = new["kernels"].get(name)
        if now is None:
            found.append(Finding("LOST", 3, name, f"{where}: no code for this kernel any more"))
        elif "error" in was or "error" in now:
            found += _errors(where, was, now)
        elif other_version:
            found += _moved(where, was, now)
        else:
            found += _rules(where, was, now)
    return sorted(found, key=lambda f: (-f.code, f.verdict, f.what))


def _moved(where: str, was: Record, now: Record) -> Iterator[Finding]:
    """Between compilers: what the rules see, then every metric that is another number."""
    versions = f"triton {was['triton']} to {now['triton']}"
    for f in _rules(where, was, now):
        sentence = f.sentence.removesuffix("; pin the baseline again")
        yield Finding("NOT_COMPARABLE", 0, f.what, f"{sentence} ({versions})")
    changed = [
        f"{name} {_text(was[name])} -> {_text(now[name])}"
        for name in sorted({*was, *now} - {"triton"})
        if was.get(name) != now.get(name) and name in was and name in now
    ]
    if changed:
        text = f"{where}: moved from {versions}: {'; '.join(changed)}"
        yield Finding("NOT_COMPARABLE", 0, "metrics", text)


def _text(value: object) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k}: {v}" for k, v in value.items()) + "}"
    return str(value)


def _errors(where: str, was: Record, now: Record) -> Iterator[Finding]:
    if "error" in now and "error" not in was:
        yield Finding("SLOWER", 1, "compile", f"{where}: no longer compiles: {now['error']}")
    elif "error" in was and "error" not in now:
        yield Finding("FASTER", 0, "compile", f"{where}: compiles now; pin the baseline again")


def _rules(where: str, was: Record, now: Record) -> Iterator[Finding]:
    """One finding for each metric that moved past its rule."""

    def worse(what: str, sentence: str) -> Finding:
        return Finding("SLOWER", 1, what, f"{where}: {sentence}")

    def better(what: str, sentence: str) -> Finding:
        return Finding("FASTER", 0, what, f"{where}: {sentence}; pin the baseline again")

    a, b = was["spills"], now["spills"]
    if b > a:
        yield worse("spills", f"{b} spill instructions (was {a})")
    elif b < a:
        yield better("spills", f"{b} spill instructions (was {a})")
    for what, fields in ACCESSES.items():
        before, after = _merged(was, fields), _merged(now, fields)
        text = f"{what} by bytes a lane: {_show(after)} (was {_show(before)})"
        if not before or not after:
            continue
        if max(after) < max(before) or _mean(after) < _mean(before) * 0.999:
            yield worse(what, f"{text}, narrower")
        elif _mean(after) > _mean(before) * 1.001:
            yield better(what, f"{text}, wider")
    a, b = sum(was["async_copies"].values()), sum(now["async_copies"].values())
    if bool(a) != bool(b):
        yield (worse if a else better)("async copies", f"{b} asynchronous copies (was {a})")
    for what in ("matrix", "scale_path"):
        for name in sorted({*was[what], *now[what]}):
            a, b = was[what].get(name, 0), now[what].get(name, 0)
            if name == "tcgen05.st":  # the register round trip: more of it is the loss
                a, b = -a, -b
            text = f"{abs(b)} x {name} (was {abs(a)})"
            if b < a:
                yield worse(what, text)
            elif b > a:
                yield better(what, text)
    a, b = was["occupancy"]["blocks"], now["occupancy"]["blocks"]
    if a != b:
        cause = f"limited by {now['occupancy']['limit']}"
        text = (
            f"{b} resident blocks (was {a}), {cause}; shared memory {now['shared_bytes']} bytes "
            f"(was {was['shared_bytes']}), registers {now['registers']} (was {was['registers']})"
        )
        yield (worse if b < a else better)("occupancy", text)
    a, b = was["instructions"], now["instructions"]
    if b > a * INSTRUCTIONS:
        yield worse("instructions", f"{b} instructions (was {a}), {b / a - 1:+.0%}")
    elif b * INSTRUCTIONS < a:
        yield better("instructions", f"{b} instructions (was {a}), {b / a - 1:+.0%}")


def _merged(record: Record, fields: tuple[str, ...]) -> dict[int, int]:
    """Counts by width of several kinds of access together."""
    out: dict[int, int] = {}
    for name in fields:
        for width, count in record[name].items():
            out[int(width)] = out.get(int(width), 0) + count
    return dict(sorted(out.items()))


def _mean(widths: Mapping[int, int]) -> float:
    """Bytes an access moves a lane, on average."""
    return sum(width * n for width, n in widths.items()) / sum(widths.values())


def _show(widths: Mapping[int, int]) -> str:
    return ", ".join(f"{n} x {width}" for width, n in widths.items()) or "none"
