"""Runs as records: each row of each rows.jsonl with its place in the file and its state.

The state is what a reader wants to see of a cell: `ok`; `padded` (ok, and something was padded);
`refused`; `wrong`; `failed` (crashed, timeout or oom); `skipped`; and `missing`, a cell that the
manifest lists and no row answers, as after an interruption. A row that a later row of the same cell
replaces (a resumed run) is not counted; how many is kept in `Run.replaced`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
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
    """One row: `ref(path)` names one of its values as RUN:LINE:path, to find it again.

    A bench row may hold in `decisions.today` what a vendor took for the same call in the same run:
    `today()` is that as a record, whose time and memory are the vendor's.
    """

    run: int
    line: int
    row: Mapping[str, Any]
    state: str
    vendor: bool = False

    @property
    def cell(self) -> Mapping[str, Any]:
        cell: Mapping[str, Any] = self.row["cell"]
        return cell

    @property
    def impl(self) -> str:
        return str(self.row["decisions"]["today"]["impl"] if self.vendor else self.cell["impl"])

    @property
    def case(self) -> str:
        """What sets bench rows of one cell apart: another layout or shape of the same routine.
        A vendor's bench names its cases in the cell's size."""
        size = str(self.cell.get("size"))
        named = (self.row.get("decisions") or {}).get("case")
        return str(named or ("" if size in ("ci", "full", "None") else size))

    def today(self) -> Record | None:
        known = isinstance((self.row.get("decisions") or {}).get("today"), Mapping)
        return replace(self, vendor=True) if known else None

    def _path(self, path: str) -> str:
        group, _, rest = path.partition(".")
        return f"decisions.today.{rest}" if self.vendor and group in ("time", "memory") else path

    def get(self, path: str) -> Any:
        """The value at a dotted path of the row, or None."""
        value: Any = self.row
        for key in self._path(path).split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    def ref(self, path: str) -> str:
        return f"{self.run}:{self.line}:{self._path(path)}"


@dataclass(frozen=True)
class Run:
    """A run's name (no path), its records, the cells it never reached, replaced rows, and how many
    lines of its files are no rows (other measurements kept beside them)."""

    name: str
    records: tuple[Record, ...]
    missing: tuple[Mapping[str, Any], ...] = ()
    replaced: int = 0
    others: int = 0
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


def load(sources: Iterable[str | Path]) -> list[Run]:
    """Runs by `latest`, id, folder or .jsonl file; a folder without rows.jsonl is one run a file.

    UsageError where there is no such run.
    """
    found: list[Path] = []
    for source in sources:
        path = Path(source)
        if path.suffix != ".jsonl":
            path = path if path.is_dir() and list(path.glob("*.jsonl")) else rows.run_dir(source)
        loose = path.is_dir() and not (path / "rows.jsonl").is_file()
        found += sorted(path.glob("*.jsonl")) if loose and list(path.glob("*.jsonl")) else [path]
    return [_load(path, number) for number, path in enumerate(found)]


def _load(path: Path, number: int) -> Run:
    manifest = path / "manifest.json"
    listed = rows.manifest(path) if manifest.is_file() else {}
    name = f"{path.parent.name}/{path.stem}" if path.suffix == ".jsonl" else path.name
    return build(name, rows.read(path), number, listed)


def build(
    name: str,
    every: Iterable[Mapping[str, Any]],
    number: int = 0,
    manifest: Mapping[str, Any] | None = None,
) -> Run:
    """A run from rows in file order. The last row of a cell counts."""
    last: dict[str, Record] = {}
    total = 0
    others = 0
    for line, row in enumerate(every):
        if "cell" not in row or "status" not in row:
            others += 1
            continue
        total += 1
        record = Record(number, line, row, state(row))
        last[f"{rows.key(row['cell'])} {record.case}"] = record
    listed = [entry.get("cell", entry) for entry in (manifest or {}).get("cells", ())]
    answered = {rows.key(record.cell) for record in last.values()}
    missing = tuple(cell for cell in listed if rows.key(cell) not in answered)
    records = tuple(sorted(last.values(), key=lambda r: r.line))
    return Run(name, records, missing, total - len(records), others, manifest or {})
