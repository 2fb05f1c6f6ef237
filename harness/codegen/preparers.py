"""The fused preparation kernels of a layout as launches: their code is read without a device.

The launch is what `kernels.fused.plan` decides for the matrix and the target; here it is only put
in the form that `codegen` compiles.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.check.consumers import layouts_of_cell
from harness.codegen.chips import chip
from kernels.layout import Layout

WORDS = {1: "*u8", 2: "*i16", 4: "*i32", 8: "*i64"}  # kernels.fused.rearrange.WORDS, by name


def launch(layout: Layout, n: int, k: int, arch: str, experts: int = 8) -> dict[str, Any]:
    """`kernels.fused.rearrange.rearrange` of contiguous bytes [experts, n, k], for `codegen`."""
    from kernels.fused.plan import plan

    backend = "hip" if chip(arch).backend == "hip" else "sm90"
    sizes = tuple(layout.sizes.items())
    strides = (n * k if experts > 1 else 0, n // layout.parts * k, k, 1)
    steps = plan(layout, sizes, n, k, 1, strides, (16, 16), backend)
    target = 4 if layout.bits and steps.word == 1 else steps.word
    return {
        "module": "kernels.fused.rearrange",
        "kernel": "rows_kernel" if steps.kind == "rows" else "tile_kernel",
        "pointers": {"source": WORDS[steps.word], "storage": WORDS[target]},
        "integers": dict(steps.args), "constants": {**steps.consts, "BACK": False},
        "num_warps": steps.warps, "num_stages": 3,
    }  # fmt: skip


def of_cell(cell: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The kernel of each layout that a fused layer cell ends in, on a contiguous padded matrix;
    without those that move nothing. The cell's own launch reads the rank's share in place: the same
    kernel with the share's strides, and a digit more where gate and up are apart."""
    if cell["impl"]["name"] != "fused":
        return {}
    found, (matrices, group) = {}, layouts_of_cell(cell)
    for name, (value, scale, n, k) in matrices.items():
        for what, layout, cols in (("value", value, k // 2), ("scale", scale, k // group)):
            if layout.source_axes != layout.storage_axes or layout.flip:
                found[f"prepare_{name}_{what}"] = launch(layout, n, cols, cell["hw"]["arch"])
    return found
