"""Code metrics as one table: a line per kernel and metric, a column per target and triton version.

Lines are kept apart by the row's path, the kernel's role and the layouts it reads, since other
layouts are other code; a cell of the table is one number of one row, the first of its column that
has the metric. Metrics that nest (loads by width) are named by their whole path.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.report.load import Record


@dataclass(frozen=True)
class Metric:
    """A line: cells[i] is (record, path in the row, value) of column i, or None."""

    kernel: str
    name: str
    cells: tuple[tuple[Record, str, float] | None, ...]

    @property
    def changed(self) -> bool:
        return len({cell[2] for cell in self.cells if cell}) > 1


@dataclass(frozen=True)
class CodeTable:
    """columns: (target, triton version), versions of a target side by side, oldest first."""

    columns: tuple[tuple[str, str], ...]
    metrics: tuple[Metric, ...]


def numbers(value: Any, prefix: str = "") -> Iterator[tuple[str, float]]:
    """Every number in a nested mapping, with its dotted path."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from numbers(inner, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield prefix, value


def _parts(path: str) -> tuple[str, str]:
    """'kernels.w13.global_loads.16' -> ('w13', 'global_loads 16')."""
    keys = path.split(".")
    if keys[0] == "kernels" and len(keys) > 2:
        keys = keys[1:]
    return (keys[0], " ".join(keys[1:])) if len(keys) > 1 else ("", keys[0])


def _reads(record: Record, role: str) -> str:
    """' (value + scale layout)' of the tensors that a kernel of this role reads."""
    names = [record.get(f"layouts.{role}_{kind}.name") for kind in ("weight", "scale")]
    return f" ({' + '.join(map(str, filter(None, names)))})" if any(names) else ""


def version_key(text: str) -> tuple[tuple[int, ...], str]:
    head = text.split("+")[0]
    return tuple(int(p) for p in head.split(".") if p.isdigit()), text


def table(records: Sequence[Record]) -> CodeTable:
    """See the module's page."""
    found: dict[tuple[str, str], dict[tuple[str, str], tuple[Record, str, float]]] = {}
    columns: set[tuple[str, str]] = set()
    for record in records:
        codegen = record.row.get("codegen")
        if not codegen:
            continue
        # A worker of another env states the compiler it read the code of; else the process's own.
        triton = str(codegen.get("triton") or record.get("provenance.triton") or "unknown")
        column = (str(record.cell["hw"]), triton)
        columns.add(column)
        for path, value in numbers(codegen):
            scope, name = _parts(path)
            line = (f"{record.cell['path']} {scope}{_reads(record, scope)}", name)
            found.setdefault(line, {}).setdefault(column, (record, f"codegen.{path}", value))
    ordered = sorted(columns, key=lambda c: (c[0], version_key(c[1])))
    metrics = [
        Metric(kernel, name, tuple(cells.get(column) for column in ordered))
        for (kernel, name), cells in sorted(found.items())
    ]
    return CodeTable(tuple(ordered), tuple(metrics))
