"""Where a Triton kernel may run: on the tensor's GPU and on which of its streams, or on the CPU
under TRITON_INTERPRET=1."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

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


@contextmanager
def side_by_side(x: torch.Tensor, count: int) -> Iterator[list[AbstractContextManager[object]]]:
    """A context for each of `count` launches that do not depend on each other.

    On a GPU the second, third, sixth, seventh and so on go to a second stream, so that in order of
    size both streams have as much. It begins after the work so far and is waited for at the end:
    what is queued next sees all of them done. Outputs have to be allocated before, on the current
    stream.
    """
    if count < 2 or not x.is_cuda:
        yield [nullcontext()] * count
        return
    main, side = torch.cuda.current_stream(x.device), _second_stream(x.get_device())
    side.wait_stream(main)
    try:
        yield [
            torch.cuda.stream(side) if at % 4 in (1, 2) else nullcontext() for at in range(count)
        ]
    finally:
        main.wait_stream(side)


@cache
def _second_stream(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
