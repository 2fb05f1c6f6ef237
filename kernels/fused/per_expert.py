"""The small tensors of a layer, one number or two an expert: all of them in one launch.

A layer has up to four, and torch takes three launches for most: a copy, a maximum, a repetition. On
a rank that holds an eighth of the experts' rows they were a quarter of the layer's time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.fused.launch import start

BLOCK = 256
_compiled: dict[tuple[object, ...], Any] = {}


def taken(x: torch.Tensor) -> bool:
    """Whether `small_tensors` takes x: [E] or [E, 2] fp32 of any strides, not empty."""
    return x.dtype == torch.float32 and x.ndim in (1, 2) and x.numel() > 0


@dataclass(frozen=True)
class SmallTensors:
    """One launch that makes up to four small tensors; `small_tensors` says which."""

    tensors: Sequence[torch.Tensor]
    over_all: tuple[bool, ...]
    outs: Sequence[torch.Tensor]

    @property
    def out(self) -> torch.Tensor:
        return self.outs[0]

    def launch(self) -> None:
        many = len(self.outs)
        pointers = [t for pair in zip(self.tensors, self.outs, strict=True) for t in pair]
        sizes = tuple(_sizes(x, out) for x, out in zip(self.tensors, self.outs, strict=True))
        aligned = tuple(t.data_ptr() % 16 == 0 for t in pointers)
        start(
            per_expert_kernel, many, pointers + [None] * (8 - 2 * many),
            sizes + ((0,) * 5,) * (4 - many),
            {"OVER_ALL": self.over_all, "MANY": many, "BLOCK": BLOCK},
            held=_compiled, key=(self.out.get_device(), sizes, self.over_all, aligned),
            on=self.out, num_warps=2,
        )  # fmt: skip


def small_tensors(tensors: Sequence[torch.Tensor], counts: Sequence[int | None]) -> SmallTensors:
    """For each of up to four [E] or [E, 2] fp32 tensors a new [E]: its rows' maxima; or with a
    count the maximum of it all, so many times. NaN is the largest, as torch has it."""
    outs = [
        x.new_empty(x.shape[0] if count is None else count)
        for x, count in zip(tensors, counts, strict=True)
    ]
    return SmallTensors(tensors, tuple(count is not None for count in counts), outs)


def _sizes(x: torch.Tensor, out: torch.Tensor) -> tuple[int, ...]:
    columns, step = (1, 0) if x.ndim == 1 else (x.shape[1], x.stride(1))
    return x.shape[0], columns, x.stride(0), step, out.shape[0]


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def per_expert_kernel(
    x0, out0, x1, out1, x2, out2, x3, out3, sizes0, sizes1, sizes2, sizes3,
    OVER_ALL: tl.constexpr, MANY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program i makes tensor i; sizes: rows, columns, their strides, length of the output."""
    pid = tl.program_id(0)
    if pid == 0:
        _one(x0, out0, sizes0, OVER_ALL[0], BLOCK)
    if MANY > 1:
        if pid == 1:
            _one(x1, out1, sizes1, OVER_ALL[1], BLOCK)
    if MANY > 2:
        if pid == 2:
            _one(x2, out2, sizes2, OVER_ALL[2], BLOCK)
    if MANY > 3:
        if pid == 3:
            _one(x3, out3, sizes3, OVER_ALL[3], BLOCK)


@triton.jit
def _one(x, out, sizes, OVER_ALL: tl.constexpr, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK).to(tl.int64)
    if OVER_ALL:
        largest = tl.full([BLOCK], float("-inf"), tl.float32)
        for begin in range(0, sizes[0], BLOCK):
            largest = _larger(largest, _rows(x, begin + lane, sizes))
        all_of_them = tl.reduce(largest, 0, _larger)
        for begin in range(0, sizes[4], BLOCK):
            at = begin + lane
            tl.store(out + at, tl.zeros_like(largest) + all_of_them, mask=at < sizes[4])
    else:
        for begin in range(0, sizes[0], BLOCK):
            at = begin + lane
            tl.store(out + at, _rows(x, at, sizes), mask=at < sizes[0])


@triton.jit
def _rows(x, row, sizes):
    """The maximum of each row, -inf past the last."""
    largest = tl.load(x + row * sizes[2], mask=row < sizes[0], other=float("-inf"))
    for column in range(1, sizes[1]):
        at = x + row * sizes[2] + column * sizes[3]
        largest = _larger(largest, tl.load(at, mask=row < sizes[0], other=float("-inf")))
    return largest
