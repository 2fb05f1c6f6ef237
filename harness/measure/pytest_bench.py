"""pytest-benchmark's JSON (`make bench`) as rows, so that one gate and one report serve both.

A benchmark says its cell through `benchmark.extra_info`: `cell`, `useful_bytes`, `cache`, `device`,
and optionally `checks`. Raw samples are in the file that `--benchmark-json` writes; without them
there is no row. Times in the file are seconds.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from harness import UsageError, rows
from harness.measure import stats

NEEDED = ("cell", "useful_bytes", "cache", "device", "torch", "triton")


def read(path: Path) -> list[rows.Row]:
    """One row a benchmark; UsageError for a file that is not this project's `make bench`."""
    try:
        loaded = json.loads(path.read_text())
        found = loaded["benchmarks"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is no pytest-benchmark JSON: {error}") from None
    commit = loaded.get("commit_info", {})
    return [_row(entry, commit, path) for entry in found]


def _row(entry: dict[str, Any], commit: dict[str, Any], path: Path) -> rows.Row:
    info, data = entry.get("extra_info", {}), entry.get("stats", {}).get("data")
    missing = [name for name in NEEDED if name not in info] + (["stats.data"] if not data else [])
    if missing:
        raise UsageError(f"{path}: benchmark {entry.get('name')} lacks {', '.join(missing)}")
    row = rows.new_row(info["cell"])
    samples = [1e6 * seconds for seconds in data]
    s = stats.summarize(samples)
    rate = info["useful_bytes"] / s["median"] / 1e3
    row["checks"] = info.get("checks", {})
    row["time"] = {
        "scope": "call",
        "device": info["device"],
        "median_us": s["median"],
        "q1_us": s["q1"],
        "q3_us": s["q3"],
        "min_us": s["min"],
        "rel_iqr": s["rel_iqr"],
        "samples_us": [round(x, 3) for x in samples],
        "outliers": s["outliers"],
        "useful_bytes": info["useful_bytes"],
        "gb_per_s": rate,
        "copy_fraction": rate / info["copy_gb_per_s"] if info.get("copy_gb_per_s") else None,
        "copy_gb_per_s": info.get("copy_gb_per_s"),
        "cache": info["cache"],
        "backend": "pytest-benchmark",
        "plan": "pytest-benchmark",
    }
    del row["time_absent"]
    row["provenance"] = {
        "device": info["device"],
        "torch": info["torch"],
        "triton": info["triton"],
        "commit": commit.get("id"),
        "dirty": commit.get("dirty"),
    }
    row["repro"] = f"make bench  # {entry.get('fullname', entry.get('name'))}"
    rows.validate(row)
    return row
