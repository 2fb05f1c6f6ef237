"""Code metrics as one table: a line per kernel and metric, a column per target and triton version.

Lines are kept apart by the row's path, the kernel's role, the layouts it reads and the cell (model,
TP, ...): only the same kernel of the same cell is compared across versions. Cells whose kernels
have the same numbers in every column are shown once. A cell of the table is one number of one row.
Metrics that nest (loads by width) are named by their whole path.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.report.evidence import key, label
from harness.report.load import Record

Cell = tuple[Record, str, float]  # a row, the path of a number in it, the number
Column = tuple[str, str]  # target, triton version


@dataclass(frozen=True)
class Metric:
    """A line: cells[i] is that of column i, or None. changed: between versions of one target."""

    kernel: str
    name: str
    cells: tuple[Cell | None, ...]
    changed: bool


@dataclass(frozen=True)
class CodeTable:
    """columns: (target, triton version), versions of a target side by side, oldest first."""

    columns: tuple[Column, ...]
    metrics: tuple[Metric, ...]


def numbers(value: Any, prefix: str = "") -> Iterator[tuple[str, float]]:
    """Every number in a nested mapping, with its dotted path."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from numbers(inner, f"{prefix}.{name}" if prefix else str(name))
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
    # kernel -> cell -> metric -> column -> number
    found: dict[str, dict[str, dict[str, dict[Column, Cell]]]] = {}
    columns: set[Column] = set()
    for record in records:
        codegen = record.row.get("codegen")
        if not codegen:
            continue
        # A worker of another env states the compiler it read the code of; else the process's own.
        triton = str(codegen.get("triton") or record.get("provenance.triton") or "unknown")
        column = (str(record.cell["hw"]), triton)
        columns.add(column)
        same = key(record, "hw", "impl", "env")
        for path, value in numbers(codegen):
            scope, name = _parts(path)
            kernel = f"{record.cell['path']} {scope}{_reads(record, scope)}"
            line = found.setdefault(kernel, {}).setdefault(same, {}).setdefault(name, {})
            line.setdefault(column, (record, f"codegen.{path}", value))
    ordered = tuple(sorted(columns, key=lambda c: (c[0], version_key(c[1]))))
    metrics = [m for kernel, by in sorted(found.items()) for m in _lines(kernel, by, ordered)]
    return CodeTable(ordered, tuple(metrics))


def _lines(
    kernel: str, by: Mapping[str, Mapping[str, Mapping[Column, Cell]]], columns: Sequence[Column]
) -> Iterator[Metric]:
    """A kernel's lines, those of cells with equal numbers once; several are named by their cell."""
    kinds: dict[str, tuple[Mapping[str, Mapping[Column, Cell]], int]] = {}
    for lines in by.values():
        values = {n: sorted((c, at[2]) for c, at in line.items()) for n, line in lines.items()}
        first, count = kinds.get(signature := repr(sorted(values.items())), (lines, 0))
        kinds[signature] = (first, count + 1)
    for lines, count in kinds.values():
        record = next(iter(next(iter(lines.values())).values()))[0]
        alike = f" and {count - 1} more cells alike" if count > 1 else ""
        which = f", {label(record).split(' · ', 1)[1]}{alike}" if len(kinds) > 1 else ""
        compiled = {column for line in lines.values() for column in line}
        for name, line in sorted(lines.items()):
            cells = tuple(line.get(column) for column in columns)
            seen: dict[str, set[float | None]] = {}
            for column, cell in zip(columns, cells, strict=True):
                if column in compiled:  # a kind of instruction that is gone is a change, too
                    seen.setdefault(column[0], set()).add(cell[2] if cell else None)
            yield Metric(kernel + which, name, cells, any(len(v) > 1 for v in seen.values()))
