"""The fused twin of `Layout.forward` and `Layout.inverse`: one read, one write, no index tensors.

`rearrange(layout, x)` and `restore(layout, storage, n, k)` run one kernel for all matrices of a
batch; a `Job` is such a launch to come, and `launch.run` takes several. The kernels are in
`rearrange_kernels`, and `plan` derives their arguments from the layout's digits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

import torch
import triton
import triton.language as tl

from kernels.errors import LayoutError
from kernels.fused.digits import Plan
from kernels.fused.launch import on_device_of, run, start
from kernels.fused.plan import plan
from kernels.fused.rearrange_kernels import rows_kernel, swap_kernel, tile_kernel
from kernels.fused.tiles import Tile, target_of, tile_for
from kernels.layout import Layout

WORDS = {1: tl.uint8, 2: tl.int16, 4: tl.int32, 8: tl.int64}  # elements are moved as plain words


@dataclass(frozen=True)
class Job:
    """One launch: x [batch, n, k] or [batch, parts, n / parts, k] of any strides, and its storage,
    contiguous, of x's dtype.

    back: from the storage to x. tile: overrides the table. global_scales: [batch, 2] fp32,
    contiguous, for e4m3 x of two parts; the storage then has the scales under the larger one, as
    `merge_global_scales` makes them. split: x has two parts that `layout` knows nothing of, each
    padded to so many rows, the second one first if the flag is set.
    """

    layout: Layout
    x: torch.Tensor
    storage: torch.Tensor
    back: bool = False
    tile: Tile | None = None
    global_scales: torch.Tensor | None = None
    split: tuple[int, bool] | None = None

    @property
    def out(self) -> torch.Tensor:
        return self.x if self.back else self.storage

    def launch(self) -> None:
        if self.x.numel():
            _launch(self)
        else:
            self.storage.view(torch.uint8).fill_(self.layout.fill)


def job(layout: Layout, x: torch.Tensor, out: torch.Tensor | None = None) -> Job:
    """x [..., n, k] of any strides into storage [..., rows, cols]: new, or `out`, which is
    contiguous, of x's dtype and the storage's element count. LayoutError as `Layout.forward`."""
    check(layout, x)
    shape = (*x.shape[:-2], *_storage_shape(layout, tuple(layout.sizes.items()), *x.shape[-2:]))
    storage = x.new_empty(shape) if out is None else out.view(shape)
    return Job(layout, as_batch(x) if x.numel() else x, storage)


def job_of_parts(
    layout: Layout, x: torch.Tensor, global_scales: torch.Tensor | None = None,
    split: tuple[int, bool] | None = None,
) -> Job:  # fmt: skip
    """x [E, parts, rows, k] of any strides into storage [E, rows, cols]: as `job` of
    [E, parts * rows, k], whose parts need not follow each other evenly. `layout.parts` parts, or
    two where `split` says so."""
    check(layout, x)
    if x.ndim != 4 or x.shape[1] != (2 if split else layout.parts):
        raise LayoutError(
            f"layout {layout.name!r}: tensor {tuple(x.shape)}; want [E, {layout.parts}, rows, k]"
        )
    sizes = tuple(layout.sizes.items())
    shape = _storage_shape(layout, sizes, x.shape[1] * x.shape[2], x.shape[3])
    storage = x.new_empty((x.shape[0], *shape))
    return Job(layout, x, storage, global_scales=global_scales, split=split)


def rearrange(
    layout: Layout, x: torch.Tensor, out: torch.Tensor | None = None, *, tile: Tile | None = None
) -> torch.Tensor:
    """x [..., n, k] of any strides -> storage [..., rows, cols], as `layout.forward` gives it.

    out: contiguous, of x's dtype and the storage's element count, written whole. LayoutError as
    forward.
    """
    made = job(layout, x, out)
    run([replace(made, tile=tile)] if tile else [made])
    return made.storage


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
        run([Job(layout, x.view(-1, n, k), storage.contiguous(), back=True, tile=tile)])
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
    with on_device_of(x):
        swap_kernel[(before * blocks,)](
            _typed(x, word), half, blocks,
            UNITS=tile.rows_units, VECTOR=vector, WIDE=blocks * tile.rows_units >= 1 << 30,
            num_warps=tile.rows_warps,
        )  # fmt: skip


def _typed(x: torch.Tensor, word: int) -> object:
    """x's memory as words of that many bytes, for a kernel's argument."""
    return triton.reinterpret(x, WORDS[word])


def _address(x: torch.Tensor) -> int:
    """Where x begins; on `meta`, as if its memory began at 0."""
    return x.storage_offset() * x.element_size() if x.is_meta else x.data_ptr()


def _alignment(address: int) -> int:
    """The largest power of two up to 16 that divides it."""
    return min(16, address & -address) if address else 16


@lru_cache(maxsize=4096)
def _storage_shape(
    layout: Layout, sizes: tuple[tuple[str, int], ...], n: int, k: int
) -> tuple[int, int]:
    """`layout.storage_shape`, kept; sizes are what the layout's hash leaves out."""
    del sizes
    return layout.storage_shape(n, k)


def describe(job: Job, target: str = "sm90") -> dict[str, object]:
    """A job's launch as data, to compile for a target that is not here (`harness.codegen`). Its
    tensors may be on the device `meta`. target: the tile table's key."""
    steps = _plan(job, target)
    words = {1: "*u8", 2: "*i16", 4: "*i32", 8: "*i64"}
    pointers = {"source": words[steps.word], "storage": words[steps.stored_word(job.layout)]}
    absent = {"global_scales": None} if job.global_scales is None else {}
    if not absent:
        pointers["global_scales"] = "*fp32"
    return {
        "module": rows_kernel.__module__,
        "kernel": f"{steps.kind}_kernel",
        "pointers": pointers,
        "integers": steps.args,
        "constants": {**absent, **steps.consts, "BACK": job.back},
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


def _launch(job: Job) -> None:
    """One kernel for all matrices of a job that has elements."""
    x, storage, scales = job.x, job.storage, job.global_scales
    steps = _plan(job)
    aligned = scales is None or scales.data_ptr() % 16 == 0
    pointers = _typed(x, steps.word), _typed(storage, steps.stored_word(job.layout)), scales
    start(
        rows_kernel if steps.kind == "rows" else tile_kernel, x.shape[0] * steps.grid, pointers,
        steps.args.values(), {**steps.consts, "BACK": job.back},
        held=steps.compiled, key=(x.get_device(), job.back, scales is None, aligned), on=x,
        num_warps=steps.warps,
    )  # fmt: skip


def _plan(job: Job, target: str | None = None) -> Plan:
    """The plan of a job's launch, on its device or for a key of the tile table."""
    layout, x = job.layout, job.x
    k = x.shape[-1]
    rows = x.shape[-2] if x.ndim == 4 else x.shape[1] // layout.parts
    row = x.stride(-2) if x.shape[-2] > 1 else k
    strides = (
        x.stride(0) if x.shape[0] > 1 else 0,
        x.stride(1) if x.ndim == 4 else rows * row,
        row,
        x.stride(-1) if k > 1 else 1,
    )
    align = (_alignment(_address(x)), _alignment(_address(job.storage)))
    if layout.bits and align[1] < 4:
        raise LayoutError(
            f"layout {layout.name!r}: storage is not aligned to the 4-byte words of its bits"
        )
    return plan(
        layout, tuple(layout.sizes.items()), layout.parts * rows, k, x.element_size(), strides,
        align, target or target_of(x.device), job.tile, job.global_scales is not None, job.split,
    )  # fmt: skip
