"""Baselines: what a gate compares with, one JSON row a line under results/baselines/.

The first line says who accepted it, when, why, of which commit, and how many cells it holds. Rows
keep what a gate reads and nothing that another machine would write differently. `.jsonl.gz` is read
and written too.
"""

from __future__ import annotations

import gzip
import json
import subprocess
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from harness import UsageError, rows
from harness.gate.join import by_cell
from harness.gate.rules import CLASSES, PROSE
from harness.measure import pytest_bench

# The fields of a row that each class reads.
FIELDS = {
    "exact": ("digests", "layouts", "decisions", "checks"),
    "coverage": ("checks",),
    "memory": ("memory",),
    "time": ("time",),
    "codegen": ("codegen", "bound"),
}
PROVENANCE = ("device", "torch", "triton", "commit")


def load(path: str | Path) -> tuple[dict[str, Any], list[rows.Row]]:
    """(header, rows). UsageError where the file is missing, broken or cut."""
    path = Path(path)
    if not path.is_file():
        near = ", ".join(sorted(p.name for p in path.parent.glob("*.jsonl*"))) or "none"
        raise UsageError(f"no baseline {path}; beside it: {near}; `gate accept` writes one")
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        lines = [json.loads(line) for line in data.splitlines() if line.strip()]
    except (ValueError, OSError, EOFError) as error:
        raise UsageError(f"baseline {path} cannot be read: {error}") from None
    if not lines or "baseline" not in lines[0]:
        raise UsageError(
            f"baseline {path} does not begin with its header; write it with gate accept"
        )
    header, found = lines[0]["baseline"], lines[1:]
    if header.get("cells") != len(found):
        raise UsageError(
            f"baseline {path}: the header says {header.get('cells')} cells, "
            f"the file holds {len(found)}; it was cut or edited"
        )
    return header, found


def load_run(run: str) -> list[rows.Row]:
    """The rows of a run, of another baseline, or of a pytest-benchmark JSON file."""
    if run.endswith(".json"):
        return pytest_bench.read(Path(run))
    if run.endswith((".jsonl", ".jsonl.gz")):
        path = Path(run)
        if not path.is_file():
            raise UsageError(f"no run {run}")
        if path.suffix == ".gz" or path.read_text()[:13] == '{"baseline": ':
            return load(path)[1]
    return rows.read(run)


def trim(row: Mapping[str, Any], classes: Iterable[str]) -> rows.Row:
    """A row with only what the classes read."""
    keep = {name for kind in classes for name in FIELDS[kind]}
    out: rows.Row = {"cell": row["cell"], "status": row["status"]}
    if row.get("reason"):
        out["reason"] = row["reason"]
    for name in ("checks", "digests", "layouts", "decisions", *rows.EVIDENCE):
        if name in keep and row.get(name):
            out[name] = row[name]
    if "checks" in out:  # the verdicts; how far a check looked is for the run's own reader
        out["checks"] = {
            name: str(v).split(" ", 1)[0].rstrip(":") for name, v in out["checks"].items()
        }
    if "decisions" in out:
        out["decisions"] = {k: v for k, v in out["decisions"].items() if k not in PROSE}
    made = row.get("provenance", {})
    return out | {"provenance": {k: made[k] for k in PROVENANCE if made.get(k)}}


def save(
    path: Path,
    run: Iterable[rows.Row],
    classes: Iterable[str],
    *,
    who: str,
    why: str,
    when: str | None = None,
    commit: str | None = None,
) -> dict[str, Any]:
    """Write a baseline; its header. UsageError for rows that must not become the yardstick."""
    found = list(by_cell(run).values())
    classes = [c for c in CLASSES if c in set(classes)]
    wrong = [r for r in found if r["status"] == "wrong"]
    if wrong:
        raise UsageError(
            f"{len(wrong)} rows are wrong, the first is "
            f"{rows.short(wrong[0]['cell'])}: wrong bytes cannot be accepted"
        )
    lost = [r for r in found if r["status"] in ("crashed", "oom", "timeout")]
    if lost:
        raise UsageError(
            f"{len(lost)} rows did not finish, the first is "
            f"{rows.short(lost[0]['cell'])} ({lost[0]['status']}): run them again"
        )
    if not any(r["status"] == "ok" for r in found):
        raise UsageError("no row is ok: there is nothing to accept")
    if not why.strip() or not who.strip():
        raise UsageError("a baseline needs who=NAME and why='the reason it may change'")
    header = {
        "who": who,
        "when": when or datetime.now(UTC).isoformat(timespec="seconds"),
        "why": why,
        "commit": commit or git("rev-parse", "HEAD"),
        "cells": len(found),
        "classes": classes,
    }
    ordered = sorted(found, key=lambda r: rows.key(r["cell"]))
    lines = [{"baseline": header}, *(trim(r, classes) for r in ordered)]
    text = "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines)
    path.parent.mkdir(parents=True, exist_ok=True)
    # mtime=0: equal rows give an equal file
    path.write_bytes(
        gzip.compress(text.encode(), mtime=0) if path.suffix == ".gz" else text.encode()
    )
    return header


def git(*command: str) -> str | None:
    """One line of git's answer, or None outside a repository."""
    done = subprocess.run(["git", *command], capture_output=True, text=True, check=False)
    return done.stdout.strip() or None if done.returncode == 0 else None
