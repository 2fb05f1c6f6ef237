"""A static bound of a cell: what its bytes cost at least, from datasheets and index maps. Never a
time.

floor_us: bytes that must move over the datasheet's memory bandwidth; no launch can be faster, every
real one is slower. segments: how many 32-, 64- or 128-byte pieces of memory one warp's access
touches when consecutive lanes read consecutive k of one row, and when they read one k of
consecutive rows, next to the fewest that so many bytes need; from `Layout.offsets`. conflicts: of a
storage copied to shared memory as it is, how many of a warp's lanes ask the same 4-byte bank for
different words when each reads its own row.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch

from harness.codegen.chips import CHIPS, Chip
from kernels.layout import Layout

BANKS, BANK_BYTES = 32, 4


def for_cell(
    cell: Mapping[str, Any],
    layouts: Mapping[str, Layout],
    shapes: Mapping[str, tuple[int, int, int]],
) -> dict[str, Any]:
    """{"bytes", "floor_us", "source", "tensors"} of what a cell writes.

    layouts: by tensor name; shapes: (experts, n, k) of each, in elements of one byte. A target
    without a datasheet (cpu) has floor_us None.
    """
    hw = cell["hw"]
    chip = CHIPS.get(hw["arch"])
    tensors = {
        name: of_layout(layout, *shapes[name][1:], chip) | {"experts": shapes[name][0]}
        for name, layout in layouts.items()
    }
    useful = sum(shapes[name][0] * t["useful_bytes"] for name, t in tensors.items())
    stored = sum(shapes[name][0] * t["stored_bytes"] for name, t in tensors.items())
    moved = useful + stored  # read the checkpoint once, write the storage once
    rate = hw.get("hbm_bytes_per_s")
    return {
        "bytes": moved, "useful_bytes": useful, "stored_bytes": stored,
        "floor_us": round(moved / rate * 1e6, 3) if rate else None,
        "source": "datasheet" if rate else None, "kind": "bound", "tensors": tensors,
    }  # fmt: skip


def of_layout(layout: Layout, n: int, k: int, chip: Chip | None) -> dict[str, Any]:
    """The static facts of one n x k matrix of bytes in a layout on a chip."""
    rows, cols = layout.storage_shape(n, k)
    fact: dict[str, Any] = {
        "layout": layout.name, "useful_bytes": n * k, "stored_bytes": rows * cols,
        "overhead": round(rows * cols / (n * k), 4) if n * k else None,
    }  # fmt: skip
    if chip is not None and n >= chip.warp and k > 0:
        fact |= _accesses(layout, min(n, 4 * layout.align[0] + chip.warp), min(k, 512), chip)
    return fact


@lru_cache(maxsize=512)
def _accesses(layout: Layout, n: int, k: int, chip: Chip) -> dict[str, Any]:
    """Segments and bank conflicts of a corner of the matrix; layouts repeat beyond it."""
    offsets = layout.offsets(n, k)
    along_k = offsets[: min(n, 64), : k - k % min(k, chip.warp)].reshape(-1, min(k, chip.warp))
    down_n = offsets[: n - n % chip.warp].T.reshape(k, -1, chip.warp).reshape(-1, chip.warp)
    return {
        "segments": {
            str(size): {"along_k": _mean(along_k, size), "down_n": _mean(down_n, size)}
            for size in chip.sectors
        },
        "segments_fewest": {str(size): -(-chip.warp // size) for size in chip.sectors},
        "bank_conflicts": _conflicts(down_n[:, : min(chip.warp, 32)]),
    }


def _mean(accesses: torch.Tensor, size: int) -> float:
    """Segments of `size` bytes an access touches, on average over the accesses [count, lanes]."""
    segment = (accesses // size).sort(dim=1).values
    touched = (segment.diff(dim=1) != 0).sum(dim=1) + 1
    return round(touched.float().mean().item(), 3)


def _conflicts(accesses: torch.Tensor) -> int:
    """The most distinct words that one bank must serve in one access [count, lanes]."""
    worst = 0
    for lanes in accesses[:64]:
        words = (lanes // BANK_BYTES).unique()
        worst = max(worst, int(torch.bincount(words % BANKS, minlength=BANKS).max()))
    return worst
