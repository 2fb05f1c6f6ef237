"""Tile sizes of the layout kernels: one literal table per target, found by measurement.

k_bytes: contiguous bytes of one source row in a tile. tile_bytes: the whole tile. warps: per program.
rows_units: 16-byte units that one program of the row kernels moves. Numbers for sm90 come from the
sweep in docs/findings.md (H200, 2026-11-30); the other targets take sm90's shape with their warp size
in mind, and are marked as not measured.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton


@dataclass(frozen=True)
class Tile:
    """How much one program moves. measured: whether a sweep on that target chose the numbers."""

    k_bytes: int
    tile_bytes: int
    warps: int
    rows_units: int = 1024
    rows_warps: int = 4
    measured: bool = False


TILES: dict[str, dict[str, Tile]] = {
    "sm90": {
        "words": Tile(64, 8192, 4, measured=True),  # 128x4 and its kin: 4-byte words keep together
        "bytes": Tile(128, 8192, 4, measured=True),  # Hopper and CDNA4 scales: bytes of two rows meet
        "bits": Tile(256, 4096, 4, measured=True),  # Hopper values: bytes, then bits of a word
        "swap": Tile(0, 0, 0, rows_units=512, rows_warps=4),  # both halves' tiles in registers
    },
    "hip": {
        "words": Tile(64, 8192, 4),
        "bytes": Tile(64, 8192, 4),
        "bits": Tile(256, 4096, 4),
        "swap": Tile(0, 0, 0, rows_units=512, rows_warps=4),
    },
}


def target_of(device: torch.device) -> str:
    """The table's key for a device: `hip` for AMD, else sm90, whose numbers serve every NVIDIA GPU."""
    return "hip" if device.type == "cuda" and torch.version.hip else "sm90"


def tile_for(target: str, kind: str) -> Tile:
    """The tile of a kind (`words`, `bytes`, `bits`) on a target."""
    return TILES[target][kind]


def ceil_pow2(x: int) -> int:
    """The least power of two that is at least x."""
    return triton.next_power_of_2(x)
