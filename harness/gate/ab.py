"""`gate ab --base REV`: two revisions of `kernels` on one device, in rounds of fresh processes.

Each round starts four processes, lets them build and compile side by side, and then measures one
at a time in the order A B B A while the others wait. A is the base, B the change; both run under
this harness. A case that looks slower (or faster) is measured in a second, independent comparison
before it is called so. The verdicts are `stats.compare`'s; a difference between kernels of
identical machine code, launches and environment is ENVIRONMENT.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from harness import ROOT, UsageError, suggest
from harness.gate import report as gate_report
from harness.gate.ab_pair import Pair, Setup, worktree
from harness.gate.join import exit_code
from harness.gate.rules import Finding, Limits, memory
from harness.measure import stats


@dataclass
class Measured:
    """Medians of one comparison: case -> [rounds, 2] for each side; and what the probes saw."""

    a: dict[str, Any]
    b: dict[str, Any]
    absent: dict[str, str] = field(default_factory=dict)
    probes: tuple[dict[str, Any], dict[str, Any]] = field(default_factory=lambda: ({}, {}))


def probe(pair: Pair) -> tuple[dict[str, Any], dict[str, Any]]:
    """One process a side that compiles everything and reads memory, launches and code."""
    a, b = pair.measure((0, 1), pair.setup.cases, probe=True)
    times = [c["time"] for side in (a, b) for c in side["cases"].values() if c["time"]]
    if times:
        pair.copy_gb_per_s = times[0]["copy_gb_per_s"]
    return a, b


def comparison(pair: Pair, cases: Sequence[str], rounds: int) -> Measured:
    """`rounds` rounds of A B B A. A case that any process could not time is absent."""
    a: dict[str, list[list[float]]] = {c: [] for c in cases}
    b: dict[str, list[list[float]]] = {c: [] for c in cases}
    absent: dict[str, str] = {}
    for _ in range(rounds):
        first, second, third, fourth = pair.measure((0, 1, 1, 0), cases)
        for case in cases:
            got = []
            for side in (first, fourth, second, third):
                found = side["cases"].get(case)
                if found is None or found["time"] is None:
                    absent[case] = side["failed"].get(case) or (found or {}).get("absent") or "?"
                    break
                got.append(found["time"]["median_us"])
            else:
                a[case].append(got[:2])
                b[case].append(got[2:])
    return Measured(
        {c: np.array(a[c]) for c in cases if c not in absent},
        {c: np.array(b[c]) for c in cases if c not in absent},
        absent,
    )


def judge(
    pair: Pair, limits: Limits, probes: tuple[dict[str, Any], dict[str, Any]] | None = None
) -> tuple[list[Finding], dict[str, Any]]:
    """Findings for every case, and the record of all numbers (for a file).

    probes: of an earlier comparison by the same pair, which need not be taken again.
    """
    probes = probes or probe(pair)
    first = comparison(pair, pair.setup.cases, limits.rule.rounds)
    verdicts = {c: stats.compare(first.a[c], first.b[c], limits.rule) for c in first.a}
    again = [c for c, v in verdicts.items() if v.retry]
    second = comparison(pair, again, limits.rule.rounds) if again else Measured({}, {})
    for case in again:
        if case in second.a:
            verdicts[case] = stats.compare(
                first.a[case], first.b[case], limits.rule, (second.a[case], second.b[case])
            )
    statistical = {c: v.verdict for c, v in verdicts.items()}
    verdicts = {c: _environment(v, *(p["cases"][c] for p in probes)) for c, v in verdicts.items()}
    findings = [_timed(c, v, pair.setup) for c, v in verdicts.items()]
    findings += [f for c in pair.setup.cases for f in _absent(c, first, probes, pair.setup)]
    findings += [f for c in first.a for f in _memory(c, probes, limits, pair.setup)]
    record = {
        "environment": probes[0]["environment"],
        "impl": pair.setup.impl,
        "experts": pair.setup.experts,
        "rounds": limits.rule.rounds,
        "cases": {
            c: {
                "verdict": v.verdict,
                "statistical": statistical[c],
                "reason": v.reason,
                "ratio": v.ratio,
                "low": v.low,
                "high": v.high,
                "p": v.p,
                "floor": v.floor,
                "a_us": first.a[c].tolist(),
                "b_us": first.b[c].tolist(),
                "again_a_us": second.a[c].tolist() if c in second.a else None,
                "again_b_us": second.b[c].tolist() if c in second.b else None,
                "time": {
                    k: x
                    for k, x in (probes[0]["cases"][c]["time"] or {}).items()
                    if k not in ("samples_us", "telemetry")
                },
                "memory": probes[0]["cases"][c].get("memory"),
            }
            for c, v in verdicts.items()
        },
        "absent": first.absent,
    }
    return findings, record


def _environment(
    v: stats.Comparison,
    a: Mapping[str, Any],
    b: Mapping[str, Any],
) -> stats.Comparison:
    """A change of kernel time without any change of the code that ran is not the code's."""
    same = (
        a.get("isa")
        and a["isa"] == b.get("isa")
        and a["launches"] == b.get("launches")
        and a.get("time")
        and a["time"]["scope"] == "kernel"
    )
    if v.verdict in ("SLOWER", "FASTER") and same:
        return replace(
            v, verdict="ENVIRONMENT", reason=f"{v.reason}; machine code and launches are identical"
        )
    return v


def _cell(case: str, setup: Setup) -> dict[str, Any]:
    return {
        "hw": setup.device,
        "model": f"experts={setup.experts}",
        "path": case,
        "tp_size": 1,
        "impl": setup.impl,
    }


def _timed(case: str, v: stats.Comparison, setup: Setup) -> Finding:
    code = 1 if v.verdict == "SLOWER" else 0
    interval = f"{v.ratio:.3f}x ({v.low:.3f} to {v.high:.3f}), p {v.p:.4f}: {v.reason}"
    return Finding(
        "time",
        v.verdict,
        code,
        _cell(case, setup),
        "time",
        interval,
        v.ratio or 0.0,
        f"python -m harness gate ab --base REV only={case} impl={setup.impl}",
    )


def _absent(
    case: str, first: Measured, probes: Sequence[Mapping[str, Any]], setup: Setup
) -> Iterator[Finding]:
    """A case that both, one or no side could time."""
    if case not in first.absent:
        return
    base, change = (p["failed"].get(case) for p in probes)
    if base and not change:
        yield Finding("coverage", "NEW", 0, _cell(case, setup), "cell", f"not in the base: {base}")
    elif change and not base:
        yield Finding("coverage", "LOST", 3, _cell(case, setup), "cell", change)
    else:
        yield Finding("time", "AMBIGUOUS", 0, _cell(case, setup), "time", first.absent[case])


def _memory(
    case: str, probes: Sequence[Mapping[str, Any]], limits: Limits, setup: Setup
) -> list[Finding]:
    old, new = (
        {"cell": _cell(case, setup), "memory": p["cases"][case].get("memory")} for p in probes
    )
    return memory(old, new, limits)


def setup_here(only: str | None, impl: str | None, experts: str | None) -> Setup:
    """The whole suite on the GPU there is, fused; a small one on the CPU, reference."""
    import torch

    from harness.gate.ab_suite import SUITE

    cases = only.split(",") if only else list(SUITE)
    for case in cases:
        if case not in SUITE:
            raise UsageError(f"gate ab: no case {case!r}{suggest(case, list(SUITE))}")
    gpu = torch.version.cuda or torch.version.hip
    device = "cuda" if gpu and torch.cuda.device_count() else "cpu"
    timing: dict[str, Any] = {"name": "ab", "scope": "kernel", "max_samples": 48}
    if device == "cpu":  # a cold cache costs 0.1 s a sample there
        timing |= {"scope": "call", "cache": "warm", "noisy_rel_iqr": 1.0}
    return Setup(
        cases,
        device,
        impl or ("fused" if device == "cuda" else "reference"),
        int(experts or (128 if device == "cuda" else 1)),
        timing,
        "fork" if device == "cuda" else "exec",
    )


def main(argv: list[str]) -> int:
    """Parse, build the worktrees, compare, report."""
    from harness.gate import command as gate

    flags = {"--base": "", "--head": ""}
    rest, items = [], iter(argv)
    for item in items:
        if item in flags:
            flags[item] = next(items, "")
        else:
            rest.append(item)
    given = gate.options(rest, ("only", "experts", "markdown", "junit", "json"))
    if not flags["--base"]:
        raise UsageError("gate ab: --base REV is missing: the revision to compare with")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(4))  # leave no worktree behind
    setup = setup_here(given.get("only"), given.get("impl"), given.get("experts"))
    with ExitStack() as stack:
        base = stack.enter_context(worktree(flags["--base"]))
        head = stack.enter_context(worktree(flags["--head"])) if flags["--head"] else ROOT
        pair = stack.enter_context(Pair(base, head, setup))
        findings, record = judge(pair, gate.limits(given))
    findings.sort(key=lambda f: (-f.code, -f.size))
    timed = len(record["cases"])
    code = exit_code(findings) if timed else 3
    line = (
        gate_report.summary(findings, {"time": timed}, code)
        if timed
        else ("gate: nothing to compare (exit 3): no case was timed on both sides")
    )
    if "json" in given:
        Path(given["json"]).write_text(json.dumps(record, indent=1) + "\n")
    gate.finish(findings, line, {}, [f.cell for f in findings], given)
    return code
