"""A run as a table for a person: path x model against TP, then why cells are not ok."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

STYLE = {
    "ok": "green", "padded": "cyan", "refused": "yellow", "wrong": "bold white on red",
    "skipped": "dim", "oom": "magenta", "timeout": "magenta", "crashed": "bold magenta",
}  # fmt: skip
TABLES = 12  # of a large grid the first few are printed, the report has them all
SHOWN_DIMENSIONS = ("hw", "impl", "env", "experts", "ep_size", "tp_rank", "size", "source", "seed",
                    "generation", "num_warps", "layer")  # fmt: skip


def state(row: Mapping[str, Any]) -> str:
    """ok, padded, or the status of a row that is not ok."""
    if row["status"] == "ok" and row["decisions"].get("outcome") == "padded":
        return "padded"
    return str(row["status"])


def word(row: Mapping[str, Any]) -> str:
    """What the table's cell says: the state, and how much padding costs."""
    found = state(row)
    return f"padded {row['decisions']['bytes_ratio']:.2f}x" if found == "padded" else found


def show(rows: Iterable[Mapping[str, Any]], console: Console) -> None:
    """Prints one table for each target, implementation and so on, then the reasons."""
    rows = list(rows)
    split = [d for d in SHOWN_DIMENSIONS if len({str(r["cell"].get(d)) for r in rows}) > 1]
    kinds: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        kinds.setdefault(tuple(str(row["cell"].get(d, "-")) for d in split), []).append(row)
    shown = dict(list(kinds.items())[:TABLES])
    for values, part in shown.items():
        title = ", ".join(f"{d}={v}" for d, v in zip(split, values, strict=True))
        console.print(_table(part, title or f"hw={part[0]['cell']['hw']}" if part else ""))
    if len(kinds) > TABLES:
        console.print(f"and {len(kinds) - TABLES} more tables: see the report")
    _reasons(rows, console)
    counts: dict[str, int] = {}
    for row in rows:
        counts[state(row)] = counts.get(state(row), 0) + 1
    parts = [f"{n} {name}" for name, n in sorted(counts.items(), key=lambda item: -item[1])]
    timed, coded = (sum(bool(row[field]) for row in rows) for field in ("time", "codegen"))
    code = f"; code read of {coded}" if coded else ""
    console.print(
        f"{len(rows)} cells: {', '.join(parts) or 'none'}{code}; "
        f"time measured for {timed} of {len(rows)}"
    )


def _table(rows: list[Mapping[str, Any]], title: str) -> Table:
    table = Table(
        title=title, title_justify="left", title_style="bold", header_style="", pad_edge=False
    )
    tps = sorted({row["cell"]["tp_size"] for row in rows})
    table.add_column("path", no_wrap=True)
    table.add_column("model", no_wrap=True)
    for tp in tps:
        table.add_column(f"TP {tp}", no_wrap=True)
    lines: dict[tuple[str, str], dict[int, Mapping[str, Any]]] = {}
    for row in rows:
        cell = row["cell"]
        lines.setdefault((cell["path"], cell["model"]), {})[cell["tp_size"]] = row
    order = {path: n for n, path in enumerate(dict.fromkeys(row["cell"]["path"] for row in rows))}
    last = ""
    for (path, model), by_tp in sorted(
        lines.items(), key=lambda item: (order[item[0][0]], item[0][1])
    ):
        if last and path != last:
            table.add_section()
        cells = [
            Text(word(by_tp[tp]), style=STYLE[state(by_tp[tp])]) if tp in by_tp else Text("-")
            for tp in tps
        ]
        table.add_row("" if path == last else path, Text(model), *cells)
        last = path
    return table


def _reasons(rows: list[Mapping[str, Any]], console: Console) -> None:
    """Each kind of reason once, as its first cell has it, with the cells that it holds for."""
    grouped: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    also: dict[str, int] = {}
    for row in rows:
        if row["status"] == "ok":
            continue
        kind = re.sub(r"0x[0-9a-f]+|[0-9]+", "#", str(row["reason"]))
        grouped.setdefault((row["status"], kind), []).append(row)
        failed = [name for name, found in row["checks"].items() if found.startswith("fail")]
        for name in failed[1:]:
            also[name] = also.get(name, 0) + 1
    for (status, _), part in sorted(grouped.items(), key=lambda item: item[0][0] != "wrong"):
        first = part[0]
        where = [_where(row["cell"]) for row in part[:3]]
        more = f"; and {len(part) - 3} more" if len(part) > 3 else ""
        console.print(Text.assemble((f"{status}: ", STYLE[status]), str(first["reason"])))
        console.print(Text(f"    {'; '.join(where)}{more}"))
        if status not in ("refused", "skipped"):
            console.print(Text(f"    {first['repro']}"), soft_wrap=True)
    if also:
        failed = [f"{name} in {count}" for name, count in also.items()]
        console.print(Text(f"these cells also fail: {', '.join(failed)}"))


def _where(cell: Mapping[str, Any]) -> str:
    impl = "" if cell["impl"] == "reference" else f" {cell['impl']}"
    return f"{cell['hw']} {cell['model']} {cell['path']} tp_size={cell['tp_size']}{impl}"
