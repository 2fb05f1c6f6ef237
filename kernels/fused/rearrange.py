"""The fused twin of `Layout.forward` and `Layout.inverse`: one read, one write, no index tensors.

`rearrange(layout, x)` and `restore(layout, storage, n, k)` run one kernel for all matrices of a
batch. The kernels are in `rearrange_kernels`, and `plan` derives their arguments from the layout's
digits.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from math import prod

import torch
import triton
import triton.language as tl

from kernels.errors import LayoutError
from kernels.fused.launch import launchable
from kernels.fused.plan import plan
from kernels.fused.rearrange_kernels import rows_kernel, swap_kernel, tile_kernel
from kernels.fused.tiles import Tile, target_of, tile_for
from kernels.layout import Layout

WORDS = {1: tl.uint8, 2: tl.int16, 4: tl.int32, 8: tl.int64}  # elements are moved as plain words


def rearrange(
    layout: Layout, x: torch.Tensor, out: torch.Tensor | None = None, *, tile: Tile | None = None
) -> torch.Tensor:
    """x [..., n, k] of any strides -> storage [..., rows, cols], as `layout.forward` gives it.

    out: contiguous, of x's dtype and the storage's element count, written whole. LayoutError as
    forward.
    """
    check(layout, x)
    shape = (*x.shape[:-2], *_storage_shape(layout, tuple(layout.sizes.items()), *x.shape[-2:]))
    storage = x.new_empty(shape) if out is None else out.view(shape)
    if storage.numel() and not x.numel():
        storage.view(torch.uint8).fill_(layout.fill)
    elif storage.numel():
        _launch(layout, as_batch(x), storage, back=False, tile=tile)
    return storage


def rearrange_parts(layout: Layout, x: torch.Tensor) -> torch.Tensor:
    """x [E, layout.parts, rows, k] of any strides -> storage [E, rows, cols]: as `rearrange` of
    [E, parts * rows, k], whose parts need not follow each other evenly."""
    check(layout, x)
    if x.ndim != 4 or x.shape[1] != layout.parts:
        raise LayoutError(
            f"layout {layout.name!r}: tensor {tuple(x.shape)}; want [E, {layout.parts}, rows, k]"
        )
    n, k = x.shape[1] * x.shape[2], x.shape[3]
    sizes = tuple(layout.sizes.items())
    storage = x.new_empty((x.shape[0], *_storage_shape(layout, sizes, n, k)))
    if x.numel():
        _launch(layout, x, storage, back=False, tile=None)
    return storage


def restore(
    layout: Layout, storage: torch.Tensor, n: int, k: int, *, tile: Tile | None = None
) -> torch.Tensor:
    """Storage [..., rows, cols] (or flat [..., rows * cols]) -> [..., n, k], as
    `layout.inverse`."""
    rows, cols = layout.storage_shape(n, k)
    batch = storage.shape[:-2] if storage.shape[-2:] == (rows, cols) else storage.shape[:-1]
    if storage.shape not in ((*batch, rows, cols), (*batch, rows * cols)):
        raise LayoutError(
            f"layout {layout.name!r}: storage {tuple(storage.shape)} is not that of a {n} x {k} "
            f"matrix, which takes {rows} x {cols}; give the logical shape it was made from"
        )
    if layout.bits:
        check(layout, storage)
    x = storage.new_empty((*batch, n, k))
    if x.numel():
        _launch(layout, x.view(-1, n, k), storage.contiguous(), back=True, tile=tile)
    return x


def swap_halves_(x: torch.Tensor, dim: int, *, tile: Tile | None = None) -> None:
    """Exchange the two halves of contiguous x along `dim`, in place, without scratch."""
    if not x.numel():
        return
    before = prod(x.shape[:dim]) if dim else 1
    half_bytes = x.numel() // before // 2 * x.element_size()
    width = _alignment(x.data_ptr() | half_bytes)
    word = min(width, 4)
    vector = width // word
    tile = tile or tile_for(target_of(x.device), "swap")
    half = half_bytes // width
    blocks = -(-half // tile.rows_units)
    with _on(x):
        swap_kernel[(before * blocks,)](
            _typed(x, word), half, blocks,
            UNITS=tile.rows_units, VECTOR=vector, WIDE=blocks * tile.rows_units >= 1 << 30,
            num_warps=tile.rows_warps,
        )  # fmt: skip


def _typed(x: torch.Tensor, word: int) -> object:
    """x's memory as words of that many bytes, for a kernel's argument."""
    return triton.reinterpret(x, WORDS[word])


def _alignment(address: int) -> int:
    """The largest power of two up to 16 that divides it."""
    return min(16, address & -address) if address else 16


def _on(x: torch.Tensor) -> AbstractContextManager[object]:
    """Kernels launch on x's GPU, whichever is current; LayoutError where none can run."""
    if x.is_cuda and x.get_device() == torch.cuda.current_device():
        return nullcontext()
    return launchable(x)


@lru_cache(maxsize=4096)
def _storage_shape(
    layout: Layout, sizes: tuple[tuple[str, int], ...], n: int, k: int
) -> tuple[int, int]:
    """`layout.storage_shape`, kept; sizes are what the layout's hash leaves out."""
    del sizes
    return layout.storage_shape(n, k)


def describe(
    layout: Layout, n: int, k: int, *, item: int = 1, align: tuple[int, int] = (16, 16),
    turned: bool = False, back: bool = False, target: str = "sm90",
) -> dict[str, object]:  # fmt: skip
    """The launch for contiguous matrices [n, k] (or their transposes, `turned`) as data, to
    compile for a target that is not here (`harness.codegen`). target: the tile table's key."""
    sizes = tuple(layout.sizes.items())
    row, column = (1, n) if turned else (k, 1)
    strides = (n * k, n // layout.parts * row, row, column)
    steps = plan(layout, sizes, n, k, item, strides, align, target)
    words = {1: "*u8", 2: "*i16", 4: "*i32", 8: "*i64"}
    stored = 4 if layout.bits and steps.word == 1 else steps.word
    return {
        "module": rows_kernel.__module__,
        "kernel": f"{steps.kind}_kernel",
        "pointers": {"source": words[steps.word], "storage": words[stored]},
        "integers": steps.args,
        "constants": {**steps.consts, "BACK": back},
        "num_warps": steps.warps,
        "num_stages": 3,
    }


def check(layout: Layout, x: torch.Tensor) -> None:
    """Raise LayoutError for a tensor that the layout does not take."""
    if layout.fill and x.is_floating_point() and x.element_size() > 1:
        raise LayoutError(
            f"layout {layout.name!r} fills with byte {layout.fill}; fused kernels move {x.dtype} "
            f"{tuple(x.shape)} as bits, so give its integer view"
        )
    if x.ndim < 2:
        raise LayoutError(f"layout {layout.name!r}: tensor {tuple(x.shape)} has fewer than 2 axes")
    if layout.bits and x.dtype != torch.uint8:
        raise LayoutError(
            f"layout {layout.name!r} permutes bits of bytes: want uint8, got {x.dtype} "
            f"{tuple(x.shape)}"
        )


def as_batch(x: torch.Tensor) -> torch.Tensor:
    """[..., n, k] -> [batch, n, k]; copied only where leading axes do not fold into one."""
    return x.unsqueeze(0) if x.ndim == 2 else x.flatten(0, -3)


def _launch(
    layout: Layout, x: torch.Tensor, storage: torch.Tensor, *, back: bool, tile: Tile | None
) -> None:
    """One kernel for all matrices x [batch, n, k], or [batch, parts, n / parts, k], and their
    contiguous storage."""
    batch, k = x.shape[0], x.shape[-1]
    rows = x.shape[-2] if x.ndim == 4 else x.shape[1] // layout.parts
    n = layout.parts * rows
    row = x.stride(-2) if x.shape[-2] > 1 else k
    strides = (
        x.stride(0) if batch > 1 else 0,
        x.stride(1) if x.ndim == 4 else rows * row,
        row,
        x.stride(-1) if k > 1 else 1,
    )
    align = (_alignment(x.data_ptr()), _alignment(storage.data_ptr()))
    if layout.bits and align[1] < 4:
        raise LayoutError(
            f"layout {layout.name!r}: storage is not aligned to the 4-byte words of its bits"
        )
    sizes = tuple(layout.sizes.items())
    steps = plan(layout, sizes, n, k, x.element_size(), strides, align, target_of(x.device), tile)
    source, target = _typed(x, steps.word), _typed(storage, steps.word)
    if layout.bits and steps.word == 1:
        target = _typed(storage, 4)
    kernel = rows_kernel if steps.kind == "rows" else tile_kernel
    with _on(x):
        kernel[(batch * steps.grid,)](
            source, target, *steps.args.values(), **steps.consts, BACK=back, num_warps=steps.warps
        )
