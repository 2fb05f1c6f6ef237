"""Runs as records: each row of each rows.jsonl with its place in the file and its state.

The state is what a reader wants to see of a cell: `ok`; `padded` (ok, and something was padded);
`refused`; `wrong`; `failed` (crashed, timeout or oom); `skipped`; and `missing`, a cell that the
manifest lists and no row answers, as after an interruption. A row that a later row of the same cell
replaces (a resumed run) is not counted; how many is kept in `Run.replaced`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import rows

# State, glyph, what it means. Worst first: a summary of several cells shows the first that occurs.
STATES: dict[str, tuple[str, str]] = {
    "wrong": ("✕", "a check failed: bytes or numbers are wrong"),
    "failed": ("!", "crashed, ran out of time or out of memory"),
    "missing": ("…", "listed in the manifest, and no row: the run did not get there"),
    "skipped": ("○", "not run, with a reason"),
    "refused": ("⊘", "refused with a reason that names the rule"),
    "padded": ("◪", "every check passed; some tensor was padded"),
    "ok": ("✓", "every check passed"),
}
_STATE_OF = {
    "wrong": "wrong", "refused": "refused", "skipped": "skipped",
    "oom": "failed", "timeout": "failed", "crashed": "failed",
}  # fmt: skip


@dataclass(frozen=True)
class Record:
    """One row: `ref(path)` names one of its values as RUN:LINE:path, to find it again."""

    run: int
    line: int
    row: Mapping[str, Any]
    state: str

    @property
    def cell(self) -> Mapping[str, Any]:
        cell: Mapping[str, Any] = self.row["cell"]
        return cell

    def get(self, path: str) -> Any:
        """The value at a dotted path of the row, or None."""
        value: Any = self.row
        for key in path.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    def ref(self, path: str) -> str:
        return f"{self.run}:{self.line}:{path}"


@dataclass(frozen=True)
class Run:
    """A run's name (no path), its records, the cells it never reached, and replaced rows."""

    name: str
    records: tuple[Record, ...]
    missing: tuple[Mapping[str, Any], ...] = ()
    replaced: int = 0
    manifest: Mapping[str, Any] = field(default_factory=dict)


def state(row: Mapping[str, Any]) -> str:
    """See the module's page."""
    status = str(row["status"])
    if status != "ok":
        return _STATE_OF[status]
    if outcome := (row.get("decisions") or {}).get("outcome"):
        return "padded" if outcome == "padded" else "ok"
    layouts = [made for made in (row.get("layouts") or {}).values() if isinstance(made, Mapping)]
    return "padded" if any(_grew(made) for made in layouts) else "ok"


def _grew(layout: Mapping[str, Any]) -> bool:
    return bool(layout.get("pad_bytes")) or layout.get("padded") != layout.get("logical")


def load(source: str | Path, number: int = 0) -> Run:
    """A run by `latest`, id or folder; a .jsonl file; or a folder of .jsonl files without manifest.

    UsageError where there is no such run.
    """
    path = Path(source)
    if path.suffix != ".jsonl":
        path = path if path.is_dir() and list(path.glob("*.jsonl")) else rows.run_dir(source)
    files = [path] if path.suffix == ".jsonl" else sorted(path.glob("*.jsonl"))
    listed: Mapping[str, Any] = {}
    if path.is_dir() and (path / "manifest.json").is_file():
        listed = rows.manifest(path)
    every = [row for file in files for row in rows.read(file)]
    return build(path.stem if path.suffix else path.name, every, number, listed)


def build(
    name: str,
    every: Iterable[Mapping[str, Any]],
    number: int = 0,
    manifest: Mapping[str, Any] | None = None,
) -> Run:
    """A run from rows in file order. The last row of a cell counts."""
    last: dict[str, Record] = {}
    total = 0
    for line, row in enumerate(every):
        total += 1
        last[rows.key(row["cell"])] = Record(number, line, row, state(row))
    listed = [entry.get("cell", entry) for entry in (manifest or {}).get("cells", ())]
    missing = tuple(cell for cell in listed if rows.key(cell) not in last)
    records = tuple(sorted(last.values(), key=lambda r: r.line))
    return Run(name, records, missing, total - len(records), manifest or {})
