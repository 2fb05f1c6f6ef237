"""The sweep that filled kernels/fused/tiles.py: every tile variant of every kind, timed on this
GPU.

    python -m harness.measure.tune [only=SUBSTRING] [part=I/N]

part=I/N compiles every N-th variant into Triton's cache and times nothing, so that N processes
share the compiling. Each variant is checked against the reference before it is timed; times are
medians of cold-cache calls and shares of a device copy of the same bytes, measured in between.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

import torch

from kernels.catalog import LAYOUTS
from kernels.fused.rearrange import rearrange, swap_halves_
from kernels.fused.tiles import Tile

# Layout, experts, rows, columns: the shapes of the fused kernels' issue.
SHAPES: dict[str, tuple[str, int, int, int]] = {
    "128x4": ("block_scale_128x4", 128, 5760, 180),
    "128x4 K448": ("block_scale_128x4", 64, 7168, 448),
    "trtllm_w13_scale": ("trtllm_w13_scale", 64, 4096, 448),
    "trtllm_w2_scale tp8": ("trtllm_w2_scale", 256, 7168, 16),
    "cutedsl_w13_scale": ("cutedsl_w13_scale", 128, 5760, 180),
    "blackwell_scale": ("blackwell_scale", 128, 5760, 90),
    "gfx1250_scale": ("gfx1250_scale", 128, 5760, 90),
    "hopper_scale": ("hopper_scale_w8", 128, 5760, 90),
    "cdna4_scale": ("cdna4_scale", 128, 5760, 90),
    "hopper_value": ("hopper_value_v3", 128, 5760, 1440),
    "narrow w31": ("w13_interleaved_to_w31", 128, 5760, 90),
    "rows w31": ("w13_to_w31", 128, 5760, 1440),
    "rows cutedsl": ("cutedsl_w13", 128, 5760, 1440),
    "rows trtllm": ("trtllm_w13", 64, 4096, 3584),
    "rows trtllm tp8": ("trtllm_shuffle_32", 256, 7168, 128),
    "rows blackwell": ("blackwell_value", 128, 5760, 1440),
    "swap": ("w13_to_w31", 128, 5760, 1440),
}


@dataclass(frozen=True)
class Variant:
    """One shape under one tile."""

    name: str
    tile: Tile


def variants(only: str) -> Iterator[Variant]:
    """Every tile worth a try: 16 to 256 bytes a thread."""
    for name in SHAPES:
        if only not in name:
            continue
        if name.startswith(("rows", "swap")):
            for units, warps in product((128, 256, 512, 1024, 2048), (2, 4, 8)):
                if 1 <= units // (32 * warps) <= 8:
                    yield Variant(name, Tile(0, 0, 0, units, warps))
            continue
        wide = (128, 256, 512) if name == "hopper_value" else (16, 32, 64, 128, 256)
        for k_bytes, tile, warps in product(wide, (2048, 4096, 8192, 16384), (2, 4, 8)):
            if 32 <= tile // (32 * warps) <= 128:
                yield Variant(name, Tile(k_bytes, tile, warps))


def call(v: Variant, x: torch.Tensor, out: torch.Tensor | None) -> Callable[[], object]:
    """The variant on x: in place for `swap`, else into out."""
    layout = LAYOUTS[SHAPES[v.name][0]]
    if v.name == "swap":
        return lambda: swap_halves_(x, 1, tile=v.tile)
    return lambda: rearrange(layout, x, out, tile=v.tile)


def compile_only(todo: list[Variant], part: int, parts: int) -> None:
    """Fill the compile cache with every parts-th variant."""
    for v in todo[part::parts]:
        _, _, n, k = SHAPES[v.name]
        x = torch.zeros((2, n, k), dtype=torch.uint8, device="cuda")
        call(v, x, None)()
    torch.cuda.synchronize()


def median_us(fn: Callable[[], object], flush: torch.Tensor, repeats: int) -> float:
    """Median of cold-cache calls; a long flush lets the host run ahead of the device."""
    pairs = []
    for _ in range(repeats):
        flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        fn()
        end.record()
        pairs.append((begin, end))
    torch.cuda.synchronize()
    return statistics.median(b.elapsed_time(e) * 1e3 for b, e in pairs)


def main(argv: list[str]) -> int:
    """Print a line a variant, best first for each shape. 2 when bytes differ, 3 without a GPU."""
    options = dict(arg.partition("=")[::2] for arg in argv)
    if unknown := set(options) - {"only", "part"}:
        print(
            f"tune: no option {', '.join(sorted(unknown))}; there are only, part", file=sys.stderr
        )
        return 4
    if not torch.cuda.is_available():
        print("tune: no GPU here, so nothing is timed (NO_DEVICE)", file=sys.stderr)
        return 3
    todo = list(variants(options.get("only", "")))
    if "part" in options:
        part, parts = map(int, options["part"].split("/"))
        compile_only(todo, part, parts)
        return 0
    flush = torch.empty(768 << 20, dtype=torch.uint8, device="cuda")
    wrong = 0
    for name in dict.fromkeys(v.name for v in todo):
        layout_name, e, n, k = SHAPES[name]
        layout = LAYOUTS[layout_name]
        x = torch.randint(0, 256, (e, n, k), dtype=torch.uint8, device="cuda")
        out = x.new_empty((e, *layout.storage_shape(n, k)))
        want = torch.cat([layout.forward(part) for part in x.split(8)])
        moved = x.numel() + (x.numel() if name == "swap" else out.numel())
        a, b = (torch.empty(moved // 2, dtype=torch.uint8, device="cuda") for _ in range(2))
        results = []
        begun = time.perf_counter()
        copy = median_us(lambda: b.copy_(a), flush, 15)  # noqa: B023
        for v in (v for v in todo if v.name == name):
            fn = call(v, x, out)
            out.fill_(255) if name != "swap" else None
            fn()
            good = torch.equal(x if name == "swap" else out, want)
            if name == "swap":
                fn()
            wrong += not good
            results.append((median_us(fn, flush, 10), v.tile, good))
        copy = min(copy, median_us(lambda: b.copy_(a), flush, 15))  # noqa: B023
        spent = time.perf_counter() - begun
        print(f"{name}: copy {copy:.1f} us of {moved / 2**20:.0f} MiB, {spent:.1f} s")
        results.sort(key=lambda r: r[0])
        for us, tile, good in results[:6] + results[-1:]:
            rows = (tile.rows_units, tile.rows_warps)
            size = (tile.k_bytes, tile.tile_bytes, tile.warps) if tile.warps else rows
            print(f"  {copy / us:.3f} {us:8.1f} us {size}{'' if good else ' WRONG'}")
    return 2 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
