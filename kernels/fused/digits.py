"""What the planner of the layout kernels works on: digits, a problem in one unit, a plan."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import gcd
from typing import Any

from kernels.layout import Layout

P, H, C = 0, 1, 2  # coordinates of the source


@dataclass(frozen=True)
class Part:
    """One digit, or a share of one. mult: step of its coordinate; out: step in the storage."""

    name: str
    size: int
    dim: int
    mult: int
    out: int
    inferred: bool = False


@dataclass(frozen=True)
class Plan:
    """kind: `rows` or `tile`. word: bytes of an element. grid: programs per matrix. args: run-time
    values in the order of the kernel's own; consts: compile-time ones. warps: per program.
    compiled: what triton made of it, by device and arguments that are not in the plan."""

    kind: str
    word: int
    grid: int
    args: dict[str, object]
    consts: dict[str, object]
    warps: int
    compiled: dict[tuple[object, ...], Any] = field(default_factory=dict, compare=False)

    def stored_word(self, layout: Layout) -> int:
        """Bytes of an element of the storage: a layout that permutes bits stores 32-bit words."""
        return 4 if layout.bits and self.word == 1 else self.word


@dataclass(frozen=True)
class Problem:
    """A layout at one size and stride, in units of bytes (rows contiguous) or elements (else)."""

    layout: Layout
    digits: tuple[Part, ...]  # innermost in storage first
    base: tuple[int, int, int]  # coordinate at which flipped digits begin
    valid: tuple[int, int]  # rows of a part, columns: in the source
    padded: tuple[int, int]  # the same in storage
    strides: tuple[int, int, int, int]  # matrix, part, row, column
    storage: int  # units of one matrix in storage
    align: tuple[int, int]  # of the two addresses, in bytes
    near: bool  # a row is contiguous
    word: int = 1  # bytes of an element that moves as one
    column: int = 1  # bytes of a column, where near
    split: tuple[int, bool] | None = None  # rows of the storage's first half; the second part's?

    @property
    def wide(self) -> bool:
        """Whether offsets inside one matrix need 64 bits."""
        _, part, row, col = self.strides
        reach = (
            part * (2 if self.split else self.layout.parts)
            + row * self.padded[0]
            + col * self.padded[1]
        )
        return max(reach, self.storage) >= 1 << 31

    @property
    def source_fit(self) -> int:
        """The largest power of two up to 16, in bytes, at which every source row and its end
        lie."""
        if not self.near:
            return self.word
        steps = (self.valid[1], self.padded[1], *self.strides[:3])
        return gcd(self.align[0], 16, *(s * self.column for s in steps))

    def in_units(self, columns: int) -> Problem:
        """The same sizes and strides counted in units of so many columns."""
        e, part, row, col = self.strides
        return replace(
            self, valid=(self.valid[0], self.valid[1] // columns),
            padded=(self.padded[0], self.padded[1] // columns),
            strides=(e // columns, part // columns, row // columns, col),
            storage=self.storage // columns, column=self.column * columns,
        )  # fmt: skip
