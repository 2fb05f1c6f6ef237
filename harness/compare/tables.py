"""A comparison for people: rich tables in a terminal, the same as Markdown, and one line of
advice."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import ceil
from typing import Any

from rich.console import Console
from rich.table import Table

Found = Mapping[str, Any]
MIB = 2**20


def _widths(name: str) -> Callable[[Found], str]:
    return lambda r: ", ".join(f"{n} x {w} B" for w, n in r[name].items()) or "-"


def _named(name: str) -> Callable[[Found], str]:
    return lambda r: ", ".join(f"{n} x {what}" for what, n in r[name].items()) or "-"


# What a consumer's code is described by: (label, cell text).
METRICS: tuple[tuple[str, Callable[[Found], str]], ...] = (
    ("matrix instructions", _named("matrix")),
    ("scale path", _named("scale_path")),
    ("global loads, a lane", _widths("global_loads")),
    ("async copies, a lane", _widths("async_copies")),
    ("shared loads, a lane", _widths("shared_loads")),
    ("instructions", lambda r: str(r["instructions"])),
    ("registers a thread", lambda r: str(r["registers"])),
    ("spill instructions", lambda r: str(r["spills"])),
    ("shared memory", lambda r: f"{r['shared_bytes']} B"),
    ("barriers", lambda r: str(r["barriers"])),
    ("resident blocks", lambda r: f"{r['occupancy']['blocks']} (by {r['occupancy']['limit']})"),
    ("code size", lambda r: f"{r['code_bytes']} B"),
)
# And that of a preparing kernel.
PREPARING: tuple[tuple[str, Callable[[Found], str]], ...] = (
    ("global loads, a lane", _widths("global_loads")),
    ("global stores, a lane", _widths("global_stores")),
    ("shared loads, a lane", _widths("shared_loads")),
    *(metric for metric in METRICS if metric[0] in (
        "instructions", "registers a thread", "spill instructions", "shared memory",
        "resident blocks",
    )),
)  # fmt: skip
LAYOUT_HEAD = (
    "TP",
    "value layout",
    "scale layout",
    "padding",
    "stored",
    "preparation moves",
    "bound",
)


def _layout_rows(target: Found) -> list[tuple[str, ...]]:
    return [
        (
            str(r["tp_size"]), r["value"], r["scale"],
            f"+{r['padded_bytes'] / MIB:.1f} MiB ({r['overhead']:.3f}x)",
            f"{r['stored_bytes'] / MIB:.0f} MiB", f"{r['preparation_bytes'] / MIB:.0f} MiB",
            "-" if r["bound_us"] is None else f">= {r['bound_us']:.0f} us",
        )
        for r in target["rows"]
    ]  # fmt: skip


def _code_rows(
    records: Mapping[str, Found], metrics: Sequence[tuple[str, Callable[[Found], str]]]
) -> list[tuple[str, ...]]:
    """A line for each metric, a column for each record."""
    return [
        (label, *(r["error"][:60] if "error" in r else text(r) for r in records.values()))
        for label, text in metrics
    ]


def _why(target: Found) -> list[str]:
    """The rule behind each distinct choice, once, with the TP sizes it covers."""
    groups: dict[tuple[str, str, str], list[Found]] = {}
    for r in target["rows"]:
        groups.setdefault((r["value"], r["scale"], r["source"]), []).append(r)
    lines = [
        f"TP {', '.join(str(r['tp_size']) for r in rows)}: {rows[0]['reason']} [{source}]"
        for (_, _, source), rows in groups.items()
    ]
    return lines + sorted({r["warning"] for r in target["rows"] if r["warning"]})


def _times(target: Found) -> list[str]:
    """Measured consumer times, or why there are none."""
    if not target["measured"]:
        return [
            f"consumer time: none (no measurement taken on {target['hw']}); code and bound only"
        ]
    out = []
    for r in target["measured"]:
        if not r["decided"]:
            pays = "undecided: inside the noise"
        elif r["steps"] is None:
            pays = "preparing does not pay"
        else:
            steps = max(1, ceil(r["steps"]))
            within = f"within {steps} step{'s' if steps > 1 else ''}"
            pays = f"preparing ({r['prepare_us']:.0f} us) pays {within}"
        out.append(
            f"measured on {r['device']}, {r['matrix']} M={r['m']}: "
            f"{r['strided_us']:.0f} us strided, "
            f"{r['prepared_us']:.0f} us prepared ({r['ratio']:.2f}x); {pays}"
        )
    return out


def _title(target: Found) -> str:
    shape = target["code_shape"]
    return (
        f"{target['hw']} ({target['arch']}): the consumer's code, {shape['matrix']} N={shape['n']} "
        f"K={shape['k']}, {target['x_format']} activations"
    )


def _preparing_title(target: Found) -> str:
    return f"{target['hw']} ({target['arch']}): preparing kernels"


def advice(target: Found) -> str:
    """One line: what to use on this target, and the evidence that says so."""
    by_layout: dict[str, list[str]] = {}
    for r in target["rows"]:
        by_layout.setdefault(f"{r['value']} + {r['scale']}", []).append(str(r["tp_size"]))
    use = "; ".join(f"{name} at TP {', '.join(tps)}" for name, tps in by_layout.items())
    names = list(target["code"])
    good = [m for m in target["moved"] if m["better"]]
    bad = [m for m in target["moved"] if not m["better"]]
    if len(names) < 2:
        evidence = "nothing to swizzle here, so there is no second kernel to compare"
    elif not target["moved"]:
        evidence = f"the code of {names[0]} and {names[-1]} differs in no rule of the gate"
    else:
        say = lambda ms: "; ".join(m["sentence"] for m in ms[:2])
        parts = [f"for it: {say(good)}"] if good else []
        parts += [f"against it: {say(bad)}"] if bad else []
        evidence = f"code of {names[0]} against {names[-1]}, " + ", ".join(parts)
    decided = [r for r in target["measured"] if r["decided"]]
    if decided:
        ratios = [r["ratio"] for r in decided]
        span = f"{min(ratios):.2f}x to {max(ratios):.2f}x"
        evidence += f"; measured {span}, {len(decided)} of {len(target['measured'])} points decided"
    else:
        evidence += "; no time was taken on it"
    return f"{target['hw']}: {use}. Evidence: {evidence}."


def terminal(found: Found, console: Console | None = None) -> None:
    """Print the comparison."""
    console = console or Console(highlight=False)
    if not console.is_terminal:  # a log has no width; 80 columns would cut the layouts' names
        console.width = max(console.width, 120)
    for line in _head(found):
        console.print(line, soft_wrap=True)
    for target in found["targets"]:
        table = Table(
            *LAYOUT_HEAD, title=f"{target['hw']} ({target['arch']}): layouts and bytes of one rank"
        )
        for row in _layout_rows(target):
            table.add_row(*row)
        console.print(table)
        for line in _why(target):
            console.print(f"  {line}", soft_wrap=True, markup=False)
        table = Table("consumer", *target["code"], title=_title(target))
        for row in _code_rows(target["code"], METRICS):
            table.add_row(*row)
        console.print(table)
        for move in target["moved"]:
            console.print(
                f"  {'+' if move['better'] else '-'} {move['sentence']}",
                soft_wrap=True,
                markup=False,
            )
        for line in _times(target):
            console.print(f"  {line}", soft_wrap=True, markup=False)
        if target["preparing"]:
            table = Table("to prepare", *target["preparing"], title=_preparing_title(target))
            for row in _code_rows(target["preparing"], PREPARING):
                table.add_row(*row)
            console.print(table)
    console.print("Advice", style="bold")
    for line in found["advice"]:
        console.print(f"  {line}", soft_wrap=True, markup=False)


def _head(found: Found) -> list[str]:
    model = found["model"]
    return [
        f"{model['name']}: {found['experts']} experts, H {model['H']}, I {model['I']}, "
        f"{model['activation']}; MXFP4 weights, blocks of 32 along K.",
        f"Code is cross-compiled by triton {found['triton']}; a bound is bytes over "
        "datasheet bandwidth, "
        "never a time. + is better with the first column's layout, - is worse.",
    ]


def markdown(found: Found) -> str:
    """The same as Markdown."""
    out = [f"# {' against '.join(t['hw'] for t in found['targets'])}", "", *_head(found), ""]
    table = lambda head, rows: [
        "| " + " | ".join(head) + " |", "|" + " --- |" * len(head),
        *("| " + " | ".join(row) + " |" for row in rows), "",
    ]  # fmt: skip
    for target in found["targets"]:
        out += [f"## {target['hw']} ({target['arch']})", ""]
        out += table(LAYOUT_HEAD, _layout_rows(target))
        out += [*(f"- {line}" for line in _why(target)), "", _title(target), ""]
        out += table(("consumer", *target["code"]), _code_rows(target["code"], METRICS))
        out += [
            f"- {'better' if m['better'] else 'worse'}: {m['sentence']}" for m in target["moved"]
        ]
        out += [*(f"- {line}" for line in _times(target)), ""]
        if target["preparing"]:
            out += [_preparing_title(target), ""]
            out += table(
                ("to prepare", *target["preparing"]), _code_rows(target["preparing"], PREPARING)
            )
    return "\n".join([*out, "## Advice", "", *(f"- {line}" for line in found["advice"]), ""])
