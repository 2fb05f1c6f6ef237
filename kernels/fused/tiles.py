"""Tile sizes of the layout kernels: one literal table per target, found by measurement.

The numbers of sm90 come from `python -m harness.measure.tune` on an H200 (docs/findings.md); every
GPU with warps of 32 lanes takes them, gfx1250 too. Those of AMD's wavefronts of 64 lanes are
sm90's with half the warps, and were not measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton


@dataclass(frozen=True)
class Tile:
    """How much one program moves.

    k_bytes: contiguous bytes of one source row in a tile. tile_bytes: the whole tile, a power of
    two. warps: of a tile program. rows_units, rows_warps: 16-byte units and warps of a program
    that moves whole rows. measured: whether a sweep on that target chose the numbers.
    """

    k_bytes: int
    tile_bytes: int
    warps: int
    rows_units: int = 0
    rows_warps: int = 0
    measured: bool = False


# words: 4 bytes keep together (128x4 and its kin). halves: the same where rows are 2-byte aligned.
# bytes: bytes of several rows meet (Hopper and CDNA4 scales). bits: then bits move (Hopper values).
# rows: whole rows move. narrow: rows whose alignment is below 8 bytes, or strided ones.
# swap: both halves' tiles change places in registers.
TILES: dict[str, dict[str, Tile]] = {
    "sm90": {
        "words": Tile(128, 16384, 8, measured=True),
        "halves": Tile(128, 4096, 4, measured=True),
        "bytes": Tile(32, 4096, 4, measured=True),
        "bits": Tile(512, 4096, 2, measured=True),
        "rows": Tile(0, 0, 0, rows_units=128, rows_warps=4, measured=True),
        "narrow": Tile(128, 8192, 2, measured=True),
        "swap": Tile(0, 0, 0, rows_units=128, rows_warps=4, measured=True),
    },
    "wave64": {
        "words": Tile(128, 16384, 4),
        "halves": Tile(128, 4096, 2),
        "bytes": Tile(32, 4096, 2),
        "bits": Tile(512, 4096, 1),
        "rows": Tile(0, 0, 0, rows_units=128, rows_warps=2),
        "narrow": Tile(128, 4096, 2),
        "swap": Tile(0, 0, 0, rows_units=128, rows_warps=2),
    },
}


def target_of(device: torch.device) -> str:
    """The table's key for a device: `wave64` for AMD's wavefronts of 64 lanes, else `sm90`."""
    return _table(device.index) if device.type == "cuda" and torch.version.hip else "sm90"


@cache
def _table(index: int) -> str:
    return "wave64" if torch.cuda.get_device_properties(index).warp_size == 64 else "sm90"


def tile_for(target: str, kind: str) -> Tile:
    """The tile of a kind (`words`, `halves`, `bytes`, `bits`, `rows`, `swap`) on a target."""
    return TILES[target][kind]


def ceil_pow2(x: int) -> int:
    """The least power of two that is at least x."""
    return int(triton.next_power_of_2(x))
