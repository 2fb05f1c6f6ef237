"""The row: what one cell established, as a JSON object; and the run folder that keeps rows.

A row has the fields of `ROW`. `cell` names the point of the grid: the keys of `CELL` always, and
further ones (`generation`, `num_warps`, `ep_rank`, ...) only where they are not the default.
`checks` maps a check to `pass`, `pass (the part of the tensor it looked at)`, `fail: tensor,
differing bytes, first coordinate, both values`, or `skip: why`. `layouts` maps a tensor to
`{"name", "params", "logical", "padded", "shape", "stride", "pad_bytes"}`. `decisions` holds what
the target chose (constraints, reason, shard plan). Evidence that was not taken is null, and
`<field>_absent` says why with a code of `ABSENT`.

A run folder holds `manifest.json` (the whole frozen grid, written first) and `rows.jsonl`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from harness import UsageError

SCHEMA = 1
STATUSES = ("ok", "wrong", "refused", "skipped", "oom", "timeout", "crashed")
ABSENT = {
    "NO_DEVICE": "the target is not the device this ran on",
    "UNSUPPORTED_SHAPE": "the implementation does not take this shape",
    "REFUSED": "the cell was refused with a reason",
    "INCORRECT": "a check failed, so no number counts",
    "COMPILE_ERROR": "the kernel did not compile",
    "OOM": "not enough memory, estimated or met",
    "TIMEOUT": "the time limit ended it",
    "CRASHED": "the process or the harness failed",
    "THROTTLED": "the device ran below 75 % of its clock",
    "NOISY": "the samples did not settle",
    "IMPOSSIBLE": "the bandwidth is more than 3 % above the device's own copy speed",
    "CONTENDED": "another process used the device",
    "FILTERED": "not asked for in this sweep",
    "NOT_INSTALLED": "the package is not installed",
}
CELL = (
    "hw", "model", "path", "tp_size", "tp_rank", "ep_size", "experts", "impl", "env", "size",
    "source", "seed",
)  # fmt: skip
EVIDENCE = ("time", "memory", "codegen", "bound")
ROW = (
    "schema", "cell", "status", "reason", "checks", "digests", "layouts", "decisions", *EVIDENCE,
    "spent_ms", "provenance", "repro",
)  # fmt: skip
_ABSENT_OF_STATUS = {
    "wrong": "INCORRECT", "refused": "REFUSED", "oom": "OOM", "timeout": "TIMEOUT",
    "crashed": "CRASHED", "skipped": "FILTERED", "ok": "FILTERED",
}  # fmt: skip

Row = dict[str, Any]


def new_row(cell: Mapping[str, Any], status: str = "ok", reason: str | None = None) -> Row:
    """A valid row that has established nothing yet."""
    row: Row = {"schema": SCHEMA, "cell": dict(cell), "status": status, "reason": reason}
    row |= {"checks": {}, "digests": {}, "layouts": {}, "decisions": {}}
    for field in EVIDENCE:
        row |= {field: None, f"{field}_absent": _ABSENT_OF_STATUS[status]}
    return row | {"spent_ms": {}, "provenance": {}, "repro": ""}


def finish(row: Row, status: str, reason: str | None = None, absent: str | None = None) -> Row:
    """Sets the verdict. A row that is not ok keeps its checks and bytes but no time."""
    row["status"], row["reason"] = status, reason
    if status != "ok":
        row["time"] = None
        code = absent or _ABSENT_OF_STATUS[status]
        for field in EVIDENCE:
            if row[field] is None:
                row[f"{field}_absent"] = code
    return row


def validate(row: Mapping[str, Any]) -> None:
    """Raises ValueError with the first thing that is not as the schema says."""
    missing = [field for field in ROW if field not in row]
    missing += [f"cell.{key}" for key in CELL if key not in row.get("cell", {})]
    if missing:
        raise ValueError(f"row without {', '.join(missing)}")
    if row["schema"] != SCHEMA or row["status"] not in STATUSES:
        raise ValueError(f"row with schema {row['schema']!r}, status {row['status']!r}")
    if row["status"] != "ok" and not row["reason"]:
        raise ValueError(f"row that is {row['status']} without a reason")
    if row["status"] != "ok" and row["time"] is not None:
        raise ValueError(f"row that is {row['status']} with a time")
    for field in EVIDENCE:
        if row[field] is None and row.get(f"{field}_absent") not in ABSENT:
            raise ValueError(f"{field} is null, and {field}_absent is not a reason code")
    if row["status"] == "ok" and any(str(c).startswith("fail") for c in row["checks"].values()):
        raise ValueError("row that is ok with a failed check")


def key(cell: Mapping[str, Any]) -> str:
    """The cell's identity as text, stable across runs: joins rows of two runs."""
    return " ".join(f"{name}={cell[name]}" for name in sorted(cell))


def short(cell: Mapping[str, Any]) -> str:
    """The cell as a person reads it."""
    tail = "" if cell.get("impl") == "reference" else f" {cell.get('impl')}"
    return f"{cell['hw']} {cell['model']} {cell['path']} tp{cell['tp_size']}{tail}"


def append(path: Path, row: Mapping[str, Any]) -> None:
    """Writes one whole line with one call, so that lines of two writers never mix; flushes."""
    validate(row)
    line = json.dumps(row, sort_keys=False, allow_nan=False) + "\n"
    with path.open("ab") as file:
        file.write(line.encode())
        file.flush()


def results_root() -> Path:
    return Path("results") / "runs"


def run_dir(run: str | Path, root: Path | None = None) -> Path:
    """The folder of `latest`, of a run id, or a path; UsageError with the runs there are."""
    root = results_root() if root is None else root
    found = sorted(root.glob("*/manifest.json"), key=lambda p: p.stat().st_mtime)
    if str(run) == "latest":
        if not found:
            raise UsageError(f"no run in {root}; make one with: python -m harness sweep hw=b200")
        return found[-1].parent
    for candidate in (root / run, Path(run)):
        if candidate.is_dir():
            return candidate
    names = ", ".join(p.parent.name for p in found[-5:]) or "none"
    raise UsageError(f"no run {str(run)!r} in {root}; the newest are: {names}")


def read(run: str | Path, root: Path | None = None) -> list[Row]:
    """The rows of a run (`latest`, id, folder) or .jsonl file, without a torn last line."""
    path = Path(run) if str(run).endswith(".jsonl") else run_dir(run, root) / "rows.jsonl"
    if not path.is_file():
        return []
    lines = path.read_bytes().split(b"\n")
    out = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            out.append(json.loads(line))
        except ValueError:
            if number == len(lines):
                continue  # the writer was killed inside its last line
            raise UsageError(f"{path}:{number} is no JSON; was the file edited?") from None
    return out


def manifest(run: str | Path, root: Path | None = None) -> dict[str, Any]:
    path = run_dir(run, root) / "manifest.json"
    if not path.is_file():
        raise UsageError(f"{path.parent} has no manifest.json: not a run folder")
    loaded: dict[str, Any] = json.loads(path.read_text())
    return loaded


def safe_name(name: str) -> str:
    """A name from a user or a file as one path component of plain ASCII."""
    cleaned = re.sub(r"[^A-Za-z0-9._-]+", "_", name).strip("._")[:80]
    return cleaned or "unnamed"


def exit_code(rows: Iterable[Mapping[str, Any]], expected: int | None = None) -> int:
    """2 for wrong bytes; 3 for cells lost (crashed, timeout, oom, never ran), or none ok; else 0.

    A cell that was refused with a reason, or skipped with one, is not lost.
    """
    statuses = [row["status"] for row in rows]
    if "wrong" in statuses:
        return 2
    lost = any(status in ("crashed", "timeout", "oom") for status in statuses)
    if lost or "ok" not in statuses or (expected is not None and len(statuses) < expected):
        return 3
    return 0
