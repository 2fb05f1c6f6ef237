"""`python -m harness list [GROUP ...]`: the axes of a sweep and their values."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness import UsageError, suggest
from harness.plan import config

# What each group's options are shown by, beside their names.
COLUMNS = {
    "hw": ("platform", "arch", "hbm_bytes_per_s", "llc_bytes", "aliases", "source"),
    "model": ("E", "H", "I", "activation", "format", "top_k", "aliases"),
    "path": ("kind", "format", "source"),
    "impl": ("kind",),
    "size": ("experts",),
    "source": ("kind",),
}
NUMBERS = (
    ("tp_size", "tensor-parallel ranks; default grid 1,2,4,8"),
    ("tp_rank", "the rank that is prepared; default 0"),
    ("ep_size", "expert-parallel ranks; default 1"),
    ("experts", "experts of the layer; default: what size= says"),
    ("seed", "of source=synthetic; default 0"),
    ("generation", "triton_kernels generation that MXFP4 layouts follow: '3.5' (default) or '3.8'"),
    ("num_warps", "of the Hopper scale layout: 8 (default) or 4"),
)


def main(argv: list[str]) -> int:
    """Prints every group, or those named."""
    if argv and argv[0] in ("-h", "--help"):
        print(__doc__)
        return 0
    known = [*config.groups(), "layout", "routine", "number"]
    for name in argv:
        if name not in known:
            raise UsageError(f"no group {name!r}{suggest(name, known)}")
    console = Console(highlight=False)
    console.width = max(console.width, 110)
    for group in config.groups():
        if not argv or group in argv:
            console.print(_group(group))
    if not argv or "layout" in argv:
        console.print(_layouts())
    if not argv or "number" in argv:
        table = Table("value", "meaning", title="numbers", title_justify="left")
        for row in NUMBERS:
            table.add_row(*row)
        console.print(table)
    console.print(
        "any of them takes a list: tp_size=1,8; layouts: python -m harness show layout=NAME"
    )
    return 0


def _group(group: str) -> Table:
    columns = COLUMNS.get(group, ("note",))
    table = Table("name", *columns, title=f"{group}=", title_justify="left")
    for option in config.groups()[group]:
        node = config.group_config(group, option)
        table.add_row(option, *(Text(_short(node.get(column))) for column in columns))
    return table


def _short(value: object) -> str:
    if isinstance(value, float):
        return f"{value / 1e12:g} TB/s"
    if isinstance(value, int) and value >= 1 << 20:
        return f"{value >> 20} MiB"
    if isinstance(value, list):
        return ", ".join(str(item) for item in value)
    return "" if value is None else str(value)


def _layouts() -> Table:
    from kernels.catalog import LAYOUTS

    table = Table(
        "name", "pattern", "align n, k", "consumer", title="layout=", title_justify="left"
    )
    for name, layout in LAYOUTS.items():
        align = f"{layout.align[0]}, {layout.align[1]}"
        table.add_row(name, Text(layout.pattern), align, Text(layout.consumer))
    return table
