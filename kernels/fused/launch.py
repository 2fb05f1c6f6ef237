"""Where a Triton kernel may run: on the tensor's GPU and on which of its streams, or on the CPU
under TRITON_INTERPRET=1."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache
from typing import Any, Protocol

import torch
import triton

from kernels.errors import LayoutError


def launchable(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """The tensor's device as a context for a launch; LayoutError where no kernel can run."""
    if tensor.device.type == "cpu":
        if not triton.knobs.runtime.interpret:
            raise LayoutError(
                f"a fused routine got a CPU tensor {tuple(tensor.shape)}: use impl='reference', "
                "move it to a GPU, or set TRITON_INTERPRET=1 before Python starts"
            )
        return nullcontext()
    return getattr(torch, tensor.device.type).device(tensor.device)


def on_device_of(x: torch.Tensor) -> AbstractContextManager[object]:
    """`launchable`, at no cost where x's GPU is the current one."""
    if x.is_cuda and x.get_device() == torch.cuda.current_device():
        return nullcontext()
    return launchable(x)


def start(
    kernel: Any, grid: int, pointers: Sequence[Any], args: Iterable[Any], consts: dict[str, Any],
    *, held: dict[tuple[object, ...], Any], key: tuple[object, ...], on: torch.Tensor,
    **options: int,
) -> None:  # fmt: skip
    """`kernel[(grid,)](*pointers, *args, **consts, **options)` on the device of `on`.

    Looking a kernel up among triton's takes the host longer than all else of a launch, so what came
    of it is kept in `held` under `key` and launched directly from then on. key: whatever triton
    distinguishes launches by: args, and which pointers are None or not divisible by 16.
    """
    with on_device_of(on):
        if (compiled := held.get(key)) is None:
            compiled = kernel[(grid,)](*pointers, *args, **consts, **options)
            if compiled is not None:  # the interpreter compiles nothing
                held[key] = compiled
        else:
            addresses = (t if t is None else t.data_ptr() for t in pointers)
            compiled[grid, 1, 1](*addresses, *args, *consts.values())


class Launch(Protocol):
    """A launch to come that writes `out`, allocated already."""

    @property
    def out(self) -> torch.Tensor: ...

    def launch(self) -> None: ...


def run(jobs: Iterable[Launch]) -> None:
    """Launches that do not depend on each other, small ones first, two at a time where a GPU can:
    one ends while another begins.

    From the largest down they are dealt to two streams as A, B, B, A: the last two end together,
    and neither waits for a small one of the other. The second stream begins after the work so far
    and is waited for at the end: what is queued next sees all of them done.
    """
    if (kept := _kept.get()) is not None:
        kept.extend(jobs)
        return
    full = sorted((job for job in jobs if job.out.numel()), key=lambda job: job.out.numel())
    if len(full) < 2 or not full[0].out.is_cuda:
        for job in full:
            job.launch()
        return
    on = full[0].out
    main, side = torch.cuda.current_stream(on.device), _second_stream(on.get_device())
    side.wait_stream(main)
    try:
        for rank, job in zip(range(len(full), 0, -1), full, strict=True):
            with torch.cuda.stream(side) if rank % 4 in (2, 3) else nullcontext():
                job.launch()
    finally:
        main.wait_stream(side)


@contextmanager
def planned() -> Iterator[list[Launch]]:
    """What the calls inside give to `run`, kept in its place: tensors may be on the device `meta`,
    and outputs stay unwritten."""
    jobs: list[Launch] = []
    before = _kept.set(jobs)
    try:
        yield jobs
    finally:
        _kept.reset(before)


_kept: ContextVar[list[Launch] | None] = ContextVar("launches kept in place of run", default=None)


@cache
def _second_stream(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
