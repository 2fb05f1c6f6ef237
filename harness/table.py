"""A run as a table for a person: path x model against TP, then why cells are not ok."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

STYLE = {
    "ok": "green", "padded": "cyan", "refused": "yellow", "wrong": "bold white on red",
    "skipped": "dim", "oom": "magenta", "timeout": "magenta", "crashed": "bold magenta",
}  # fmt: skip
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
    for values, part in kinds.items():
        title = ", ".join(f"{d}={v}" for d, v in zip(split, values, strict=True))
        console.print(_table(part, title or f"hw={part[0]['cell']['hw']}" if part else ""))
    _reasons(rows, console)
    counts: dict[str, int] = {}
    for row in rows:
        counts[state(row)] = counts.get(state(row), 0) + 1
    parts = [f"{n} {name}" for name, n in sorted(counts.items(), key=lambda item: -item[1])]
    timed = sum(row["time"] is not None for row in rows)
    console.print(
        f"{len(rows)} cells: {', '.join(parts) or 'none'}; time measured for {timed} of {len(rows)}"
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
    """Each distinct reason once, with the cells that it holds for; wrong cells one by one."""
    grouped: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row["status"] != "ok":
            where = _where(row["cell"])
            grouped.setdefault((row["status"], str(row["reason"])), []).append(where)
    for (status, reason), cells in grouped.items():
        shown = "; ".join(cells[:3]) + (f"; and {len(cells) - 3} more" if len(cells) > 3 else "")
        console.print(Text.assemble((f"{status}: ", STYLE[status]), f"{reason}\n    {shown}"))
    checks: dict[str, list[str]] = {}
    for row in rows:
        for name, found in row["checks"].items():
            if str(found).startswith("fail") and row["reason"] not in (
                found[6:],
                f"{name}: {found[6:]}",
            ):
                checks.setdefault(f"{name}: {found[6:]}", []).append(_where(row["cell"]))
    for found, cells in list(checks.items())[:12]:
        console.print(Text(f"  also {found}  ({len(cells)} cells)"))


def _where(cell: Mapping[str, Any]) -> str:
    impl = "" if cell["impl"] == "reference" else f" {cell['impl']}"
    return f"{cell['hw']} {cell['model']} {cell['path']} tp_size={cell['tp_size']}{impl}"
