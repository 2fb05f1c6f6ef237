"""The smallest real readers of each layout: what a backend does with prepared weights, and no more.

Three kernels. `scaled_matmul_kernel` is a tile matmul on `tl.dot_scaled`, reading block scales as
the backends of Blackwell, CDNA4, gfx1250 and every older target do: one contiguous piece of storage
a tile, un-swizzled in registers by a reshape and a transpose derived from the layout's own digits.
`hopper_matmul_kernel` is Hopper's: untwiddle to bf16, scale, wgmma. `dequantize_kernel` only reads:
storage order in, logical order out. Each takes the strided layout too: the variant without the
swizzle.

Shapes: x `[E, M, K]`, storage of w `[E, rows, cols]` bytes (two e2m1 codes a byte, low nibble even
k), storage of its scales `[E, rows, cols]` bytes, y `[E, M, N]`. K need not be a multiple of the
block: the last block is peeled off and masked, so pad bytes may hold anything, 0xFF (a NaN scale)
included, while the main loop keeps the unmasked path that lets a compiler copy scales without
registers.

How the library reads the same bytes: triton_kernels matmul_details/_matmul.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from math import prod
from typing import Any

import torch

from kernels.catalog import LAYOUTS
from kernels.errors import LayoutError
from kernels.layout import Layout

MX_GROUP, NV_GROUP = 32, 16  # elements of the contraction a scale covers

# Scale layouts that are a row permutation and then a tile: the tile alone, which is what a matmul
# that walks the weight in storage order has to undo.
SCALE_TILE = {
    "trtllm_w13_scale": "block_scale_128x4",
    "trtllm_w2_scale": "block_scale_128x4",
    "cutedsl_w13_scale": "block_scale_128x4",
    "cutedsl_w13_interleaved_scale": "block_scale_128x4",
}
_KERNELS = {
    "scaled_matmul_kernel": "kernels.fused.consume_kernels",
    "dequantize_kernel": "kernels.fused.consume_kernels",
    "hopper_matmul_kernel": "kernels.fused.consume_hopper",
}
Table = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Tile:
    """How one block of storage becomes a logical block: view as `shape`, permute by `perm`.

    fold: matrix rows that one storage row holds; a block of n x k elements is n/fold storage rows
    of k*fold contiguous elements.
    """

    shape: tuple[int, ...]
    perm: tuple[int, ...]
    fold: int


@dataclass(frozen=True)
class Launch:
    """One kernel launch, described without tensors: enough to compile it, or with pointers to run
    it.

    pointers: argument name -> Triton element type. integers: argument name -> value. constants:
    constexpr arguments. grid: programs along n, m and experts.
    """

    kernel: str
    pointers: dict[str, str]
    integers: dict[str, int]
    constants: dict[str, Any]
    num_warps: int
    num_stages: int
    grid: tuple[int, int, int]

    @cached_property
    def module(self) -> str:
        return _KERNELS[self.kernel]

    def run(self, *tensors: torch.Tensor) -> None:
        """Launch with one tensor a pointer, in order."""
        kernel = getattr(import_module(self.module), self.kernel)
        kernel[self.grid](
            *tensors, *self.integers.values(), **self.constants,
            num_warps=self.num_warps, num_stages=self.num_stages,
        )  # fmt: skip


def tile(layout: Layout, block_n: int, block_k: int, *, nibbles: bool = False) -> Tile:
    """The `Tile` of a block_n x block_k block (k in storage elements; `nibbles` splits each in
    two).

    Raises LayoutError when the block is no whole number of the layout's tiles, or the layout
    reverses an axis, which no tile can undo.
    """
    if block_n % layout.tile[0] or block_k % layout.tile[1]:
        raise LayoutError(
            f"layout {layout.name!r}: a block of {block_n} x {block_k} does not hold whole "
            f"{layout.tile[0]} x {layout.tile[1]} tiles; choose a multiple"
        )
    # The padding is the whole matrix's affair: a block may be as small as the pattern's own tile.
    # Axes of size 1 stay: triton's pass that copies scales to tensor memory matches Blackwell's
    # five axes.
    unaligned = replace(layout, align=layout.tile)
    digits = unaligned.digits(block_n, block_k)
    if any(d.flip for d in digits):
        raise LayoutError(f"layout {layout.name!r} reverses an axis: it moves rows, it is no tile")
    first_k = next(i for i, d in enumerate(digits) if d.dim == 1)
    fold = prod(d.size for d in digits[first_k:] if d.dim == 0)
    perm = tuple(sorted(range(len(digits)), key=lambda i: (digits[i].dim, -digits[i].in_stride)))
    shape = tuple(d.size for d in digits)
    return Tile((*shape, 2), (*perm, len(shape)), fold) if nibbles else Tile(shape, perm, fold)


def digit_table(layout: Layout, n: int, k: int) -> Table:
    """(size, dim, in_stride, out_stride, flip) of each digit of an n x k matrix, for a kernel."""
    digits = [d for d in layout.digits(n, k) if d.size > 1]
    return tuple((d.size, d.dim, d.in_stride, d.out_stride, int(d.flip)) for d in digits)


def row_table(layout: Layout, n: int) -> Table:
    """Where each storage row of a layout that moves whole rows comes from; empty for the
    identity."""
    if layout.storage_axes == layout.source_axes and not layout.flip:
        return ()
    k = layout.align[1]
    return tuple(
        (size, 0, in_stride, out_stride // k, flip)
        for size, dim, in_stride, out_stride, flip in digit_table(layout, n, k)
        if dim == 0
    )


def walked(scale: Layout) -> Layout:
    """A scale layout as a matmul that walks the weight in storage order sees it: rows where they
    are."""
    if scale.name in SCALE_TILE:
        return LAYOUTS[SCALE_TILE[scale.name]]
    if scale.name != "strided" and scale.storage_axes[1] == scale.source_axes[1]:
        return replace(LAYOUTS["strided"], align=scale.align)
    return scale


def matmul_launch(
    value: Layout,
    scale: Layout,
    *,
    m: int,
    n: int,
    k: int,
    experts: int = 1,
    x_format: str = "bf16",
    group: int = MX_GROUP,
    blocks: tuple[int, int, int] = (128, 128, 256),
    num_warps: int = 4,
    num_stages: int = 3,
    out_type: str = "bf16",
    plain: bool = False,
) -> Launch:
    """The launch that multiplies x [E, m, k] by weights [E, n, k] stored in `value` and `scale`.

    x_format: bf16, or e4m3 or e2m1 with linear scales of `group`. blocks: (m, n, k) of a program.
    plain: fp32 arithmetic of plain operations in place of the matrix unit's own (the interpreter;
    PTX-free). Raises LayoutError for a layout that a tile matmul cannot walk, or k that is no
    multiple of `group`.
    """
    if k % group:
        raise LayoutError(f"matmul of K={k}: no whole number of {group}-element scale groups")
    bm, bn, bk = blocks
    scale = walked(scale)
    s_rows, s_row = _rows(scale, n, k // group, bn, bk // group)
    s_tile = tile(scale, bn, bk // group)
    grid_m = -(-m // bm)
    if value.bits:
        w_tile = tile(value, bn, bk // 2, nibbles=True)
        w_rows, w_row = _rows(value, n, k // 2, bn, bk // 2)
        return Launch(
            "hopper_matmul_kernel",
            {"x_ptr": "*bf16", "w_ptr": "*u8", "s_ptr": "*u8", "y_ptr": f"*{out_type}"},
            {"M": m, "N": n, "K": k, "w_rows": w_rows, "s_rows": s_rows, "x_row": k, "w_row": w_row,
             "s_row": s_row},
            {"W_SHAPE": w_tile.shape, "W_PERM": w_tile.perm, "W_FOLD": w_tile.fold,
             "S_SHAPE": s_tile.shape, "S_PERM": s_tile.perm, "S_RANK": len(s_tile.perm),
             "S_FOLD": s_tile.fold,
             "TAIL": k % bk != 0, "ASM": not plain, "BM": bm, "BN": bn, "BK": bk},
            num_warps, num_stages, (-(-n // bn), grid_m, experts),
        )  # fmt: skip
    if value.storage_axes[1] != value.source_axes[1]:
        raise LayoutError(f"layout {value.name!r} moves columns: no kernel here walks it in tiles")
    w_rows, w_row = value.storage_shape(n, k // 2)
    rows = row_table(value, n)
    pack = 2 if x_format == "e2m1" else 1
    return Launch(
        "scaled_matmul_kernel",
        {"x_ptr": {"bf16": "*bf16", "e4m3": "*fp8e4nv", "e2m1": "*u8"}[x_format], "xs_ptr": "*u8",
         "w_ptr": "*u8", "s_ptr": "*u8", "y_ptr": f"*{out_type}"},
        {"M": m, "N": n, "K": k, "w_rows": w_rows, "s_rows": s_rows, "x_row": k // pack,
         "xs_row": k // group, "w_row": w_row, "s_row": s_row},
        {"SHAPE": s_tile.shape, "PERM": s_tile.perm, "RANK": len(s_tile.perm), "FOLD": s_tile.fold,
         "ROWS": rows, "N_ROWS": len(rows),
         "X_FORMAT": x_format, "GROUP": group, "TAIL": k % bk != 0, "PLAIN": plain,
         "BM": bm, "BN": bn, "BK": bk},
        num_warps, num_stages, (-(-w_rows // bn), grid_m, experts),
    )  # fmt: skip


def dequantize_launch(
    value: Layout, scale: Layout, *, n: int, k: int, experts: int = 1, group: int = MX_GROUP,
    block: int = 256, num_warps: int = 4,
) -> Launch:  # fmt: skip
    """The launch that reads weights of logical shape [E, n, k] back to fp32; any catalog layout.

    Raises LayoutError when the value storage of one expert is no whole number of 32-bit words.
    """
    w_rows, w_row = value.storage_shape(n, k // 2)
    s_rows, s_row = scale.storage_shape(n, k // group)
    if w_rows * w_row % 4:
        raise LayoutError(
            f"layout {value.name!r}: {w_rows} x {w_row} bytes an expert are no whole words"
        )
    bits = tuple(sorted(range(32), key=value.bits.__getitem__)) if value.bits else ()
    at, scale_at = digit_table(value, n, k // 2), digit_table(scale, n, k // group)
    return Launch(
        "dequantize_kernel",
        {"w_ptr": "*u8", "s_ptr": "*u8", "y_ptr": "*fp32"},
        {"N": n, "K": k, "w_bytes": w_rows * w_row, "s_bytes": s_rows * s_row},
        {"DIGITS": at, "N_DIGITS": len(at), "SCALE_DIGITS": scale_at,
         "N_SCALE_DIGITS": len(scale_at),
         "BITS": bits, "TWIDDLED": bool(bits), "E8M0": group == MX_GROUP, "GROUP": group,
         "BLOCK": block},
        num_warps, 1, (-(-w_rows * w_row // (4 * block)), experts, 1),
    )  # fmt: skip


def matmul(
    x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor, launch: Launch,
    x_scale: torch.Tensor | None = None, out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Run a `matmul_launch`: x [E, M, K or K/2], storages [E, rows, cols] -> y [E, M, N], written
    through `out`."""
    if out is None:
        dtype = {"*bf16": torch.bfloat16, "*fp32": torch.float32}[launch.pointers["y_ptr"]]
        shape = (launch.grid[2], launch.integers["M"], launch.integers["N"])
        out = torch.empty(shape, dtype=dtype, device=x.device)
    if launch.kernel == "hopper_matmul_kernel":
        launch.run(x, w, scale, out)
    else:
        launch.run(x, x if x_scale is None else x_scale, w, scale, out)
    return out


def dequantize(w: torch.Tensor, scale: torch.Tensor, launch: Launch) -> torch.Tensor:
    """Run a `dequantize_launch`: storages [E, rows, cols] uint8 -> [E, n, k] fp32, exact."""
    shape = (launch.grid[1], launch.integers["N"], launch.integers["K"])
    out = torch.empty(shape, dtype=torch.float32, device=w.device)
    launch.run(w, scale, out)
    return out


def _rows(layout: Layout, n: int, k: int, block_n: int, block_k: int) -> tuple[int, int]:
    """Storage of n x k as a tile walker sees it: (rows, bytes a row) with `fold` matrix rows in
    each."""
    padded_n, padded_k = layout.padded(n, k)
    fold = tile(layout, block_n, block_k).fold
    return padded_n // fold, padded_k * fold
