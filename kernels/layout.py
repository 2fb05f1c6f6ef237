"""A layout is a value: one pattern says where every element goes, and all else follows from it.

A `Layout` maps a matrix `[..., n, k]` (n output features, k along the contraction; leading axes are
batch) to storage `[..., rows, cols]`. `pattern` is in einops notation over the last two axes, with
the inner `sizes` given and one axis of n and one of k inferred. The matrix is first padded with
`fill` up to `align` (the consumer's contract, which may be coarser than the pattern's own tile),
then permuted, axes named in `flip` (size 2) exchanged, and last the bits of each 32-bit word
permuted by `bits`.

Padding belongs to the inferred axis. Where sized axes stand before it, as g in `(g h s)` (gate
rows, then up rows), each of those `parts` is padded by itself: padding only the end would hand gate
rows to up.

forward, inverse, index map, padding mask, byte count, the fused kernel's tile and the picture are
all derived from these fields; nothing else in the project states a permutation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

import torch
from einops import rearrange

from kernels.errors import LayoutError

# How a consumer's library returns the storage [e, rows, cols]: always the same memory, other
# strides.
VIEWS = {
    "rows_cols": "e r c -> e r c",
    "cols_rows": "e r c -> e c r",
    "blackwell_5d": "e (rn rk) (o b) -> 1 (e rn) rk o b",
    "mma_6d": "e (rn rk) (ni no kk) -> ni no rn kk rk e",
}

_GROUP = re.compile(r"\(([^()]*)\)|(\S+)")
_WORD_CHUNK = 1 << 18  # 32-bit words a bit permutation holds at a time: 1 MiB, stays in L2


@dataclass(frozen=True)
class Digit:
    """One named axis of a layout at a concrete size, as a mixed-radix digit of the address.

    dim: 0 for n, 1 for k. in_stride: step along that padded axis, in elements; where `Layout.parts`
    is above 1, the leading digits of n step from part to part, n / parts rows apart in an unpadded
    source. out_stride: step in the flat storage of one matrix, in elements. flip: reversed on its
    way.
    """

    name: str
    size: int
    dim: int
    in_stride: int
    out_stride: int
    flip: bool


def round_up(x: int, multiple: int) -> int:
    """The least multiple of `multiple` that is at least x."""
    return -(-x // multiple) * multiple


def _axes(side: str) -> tuple[tuple[str, ...], ...]:
    """'(r a) k' -> (('r', 'a'), ('k',))."""
    return tuple(
        tuple(m.group(1).split()) if m.group(1) is not None else (m.group(2),)
        for m in _GROUP.finditer(side.strip())
    )


@dataclass(frozen=True)
class Layout:
    """A byte order as a value; see the module's docstring.

    name: catalog key. align: (n, k) multiples that the consumer reads. fill: pad byte. bits: output
    bit i of each little-endian 32-bit word is source bit bits[i]. view: how the consumer's library
    returns the storage (`rows_cols`, `cols_rows` (transposed), `blackwell_5d`, `mma_6d`).
    consumer, aliases (vendor names), source (where the rule is published), note: for people.
    """

    name: str
    pattern: str
    sizes: Mapping[str, int] = field(default_factory=dict, hash=False)
    align: tuple[int, int] = (1, 1)
    fill: int = 0
    flip: tuple[str, ...] = ()
    bits: tuple[int, ...] | None = None
    view: str = "rows_cols"
    consumer: str = ""
    aliases: tuple[str, ...] = ()
    source: str = ""
    note: str = ""

    def __post_init__(self) -> None:
        refuse = lambda why: LayoutError(f"layout {self.name!r}, pattern {self.pattern!r}: {why}")
        if self.pattern.count("->") != 1:
            raise refuse("want exactly one '->' between source and storage axes")
        source, storage = (_axes(side) for side in self.pattern.split("->"))
        for side, axes in (("source", source), ("storage", storage)):
            if len(axes) != 2:
                raise refuse(f"the {side} side has {len(axes)} axes; a matrix has 2, n and k")
            names = [name for group in axes for name in group]
            for name in names:
                if names.count(name) > 1:
                    raise refuse(f"axis {name!r} occurs twice on the {side} side: no bijection")
        one, other = ({a for group in axes for a in group} for axes in (source, storage))
        for name in sorted(one ^ other):
            raise refuse(f"axis {name!r} is on one side only: no bijection")
        for name, size in self.sizes.items():
            if name not in one:
                raise refuse(f"sizes give axis {name!r}, which the pattern does not have")
            if size < 1:
                raise refuse(f"axis {name!r} has size {size}; a size is at least 1")
        for dim, group in enumerate(source):
            free = [name for name in group if name not in self.sizes]
            if len(free) != 1:
                raise refuse(f"source axis {'nk'[dim]} needs exactly one size to infer, has {free}")
            if dim == 1 and group[0] != free[0]:
                raise refuse(
                    f"the inferred axis {free[0]!r} of k must come first: k is padded at its end"
                )
            if self.align[dim] % (tile := self.tile[dim]):
                raise refuse(f"align {self.align[dim]} along {'nk'[dim]} is no multiple of {tile}")
        for name in self.flip:
            if self.sizes.get(name) != 2:
                raise refuse(f"flip of axis {name!r}: only an axis of size 2 can be exchanged")
        if self.view not in VIEWS:
            raise refuse(f"view {self.view!r} is none of {', '.join(VIEWS)}")
        if self.bits is not None and sorted(self.bits) != list(range(32)):
            raise refuse("bits is no permutation of the 32 bits of a word")

    def __hash__(self) -> int:
        return self._hash  # a layout is a key in many caches

    @cached_property
    def _hash(self) -> int:
        return hash((self.name, self.pattern, self.align, self.flip))

    @cached_property
    def source_axes(self) -> tuple[tuple[str, ...], ...]:
        return _axes(self.pattern.split("->")[0])

    @cached_property
    def storage_axes(self) -> tuple[tuple[str, ...], ...]:
        return _axes(self.pattern.split("->")[1])

    @cached_property
    def tile(self) -> tuple[int, int]:
        """(n, k) elements inside the inferred outer axes: the pattern's own period."""
        n, k = (prod(self.sizes.get(name, 1) for name in group) for group in self.source_axes)
        return n, k

    @cached_property
    def parts(self) -> int:
        """How many equal parts of the rows are padded each by itself: 2 for gate and up halves,
        else 1."""
        parts = 1
        for name in self.source_axes[0]:
            if name not in self.sizes:
                break
            parts *= self.sizes[name]
        return parts

    def padded(self, n: int, k: int) -> tuple[int, int]:
        """(n, k) after padding to `align`. LayoutError when the rows do not divide into `parts`."""
        if n % self.parts:
            raise LayoutError(
                f"layout {self.name!r}, pattern {self.pattern!r}: {n} rows do not divide into "
                f"{self.parts} equal halves (gate and up); an even row count is needed"
            )
        return round_up(n, self.align[0]), round_up(k, self.align[1])

    def extents(self, n: int, k: int) -> dict[str, int]:
        """Every axis's size for an n x k matrix."""
        sizes = dict(self.sizes)
        for group, total, tile in zip(self.source_axes, self.padded(n, k), self.tile, strict=True):
            sizes[next(name for name in group if name not in self.sizes)] = total // tile
        return sizes

    @cached_property
    def is_plain(self) -> bool:
        """Checkpoint order without any alignment: nothing to move, so storage may be the input
        itself."""
        return self.source_axes == self.storage_axes and not self.flip and self.align == (1, 1)

    def storage_shape(self, n: int, k: int) -> tuple[int, int]:
        """(rows, cols) of one matrix in storage; rows * cols is its byte count for byte
        elements."""
        extents = self.extents(n, k)
        rows, cols = (prod(extents[name] for name in group) for group in self.storage_axes)
        return rows, cols

    def digits(self, n: int, k: int) -> tuple[Digit, ...]:
        """The address of an n x k matrix as mixed-radix digits, in storage order, outermost
        first."""
        extents = self.extents(n, k)
        place: dict[str, tuple[int, int]] = {}
        for dim, group in enumerate(self.source_axes):
            stride = 1
            for name in reversed(group):
                place[name] = (dim, stride)
                stride *= extents[name]
        digits, stride = [], 1
        for name in reversed([name for group in self.storage_axes for name in group]):
            digits.append(Digit(name, extents[name], *place[name], stride, name in self.flip))
            stride *= extents[name]
        return tuple(reversed(digits))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., n, k] of any dtype (uint8 if `bits`) -> storage [..., rows, cols], a new tensor.

        Raises LayoutError for fewer than two axes, or for `bits` on another dtype than uint8.
        """
        self._check(x)
        if _is_float8(x):
            return self.forward(x.view(torch.uint8)).view(x.dtype)
        n, k = x.shape[-2:]
        rows, cols = self.storage_shape(n, k)
        if x.numel() == 0:
            return torch.full(
                (*x.shape[:-2], rows, cols), self.fill, dtype=x.dtype, device=x.device
            )
        out = self._permute(self._pad(x), n, k, back=False)
        fresh = torch.contiguous_format
        out = out.clone(memory_format=fresh) if out.data_ptr() == x.data_ptr() else out.contiguous()
        return permute_bits_(out, self.bits) if self.bits else out

    def inverse(self, storage: torch.Tensor, n: int, k: int) -> torch.Tensor:
        """Storage [..., rows, cols] (or flat [..., rows * cols]) -> [..., n, k], padding sliced
        off.

        Raises LayoutError when the storage is not that of an n x k matrix.
        """
        if _is_float8(storage):
            return self.inverse(storage.view(torch.uint8), n, k).view(storage.dtype)
        rows, cols = self.storage_shape(n, k)
        if storage.shape[-2:] != (rows, cols):
            if storage.ndim < 1 or storage.shape[-1] != rows * cols:
                raise LayoutError(
                    f"layout {self.name!r}: storage {tuple(storage.shape)} is not that of a {n} x "
                    f"{k} "
                    f"matrix, which takes {rows} x {cols}; give the logical shape it was made from"
                )
            storage = storage.unflatten(-1, (rows, cols))
        if self.bits:
            self._check(storage)
            inverse_bits = tuple(sorted(range(32), key=self.bits.__getitem__))
            storage = permute_bits_(storage.contiguous().clone(), inverse_bits)
        return self._unpad(self._permute(storage, n, k, back=True), n, k).contiguous()

    def consumer_view(self, storage: torch.Tensor, n: int, k: int) -> torch.Tensor:
        """Storage [E, rows, cols] as the consumer's library shapes it (`view`); shares memory,
        always."""
        rn, rk = (p // a for p, a in zip(self.padded(n, k), (128, 4), strict=True))
        sizes = {
            "blackwell_5d": {"rn": rn, "rk": rk, "o": 2},
            "mma_6d": {"rn": rn, "rk": rk, "no": 4, "kk": 4},
        }
        if self.view == "rows_cols":
            return storage
        if self.view == "cols_rows":
            return storage.mT
        view = rearrange(storage, VIEWS[self.view], **sizes.get(self.view, {}))
        if storage.numel() and view.data_ptr() != storage.data_ptr():
            raise LayoutError(
                f"layout {self.name!r}: storage {tuple(storage.shape)} is not contiguous"
            )
        return view

    def offsets(self, n: int, k: int) -> torch.Tensor:
        """int64 [n, k]: each element's offset in the flat storage of one matrix, before `bits`."""
        rows, cols = self.storage_shape(n, k)
        index = torch.arange(rows * cols).view(rows, cols)
        return self._unpad(self._permute(index, n, k, back=True), n, k).contiguous()

    def pad_mask(self, n: int, k: int) -> torch.Tensor:
        """bool [rows * cols]: True where the storage of one matrix holds padding, before `bits`."""
        mask = torch.ones(prod(self.storage_shape(n, k)), dtype=torch.bool)
        mask[self.offsets(n, k).flatten()] = False
        return mask

    def _pad(self, x: torch.Tensor) -> torch.Tensor:
        """[..., n, k] -> padded [..., N, K]; x itself where nothing is to pad."""
        n, k = x.shape[-2:]
        pad_n, pad_k = (p - s for p, s in zip(self.padded(n, k), (n, k), strict=True))
        if not pad_n and not pad_k:
            return x
        by_part = x.unflatten(-2, (self.parts, n // self.parts))
        pads = (0, pad_k, 0, pad_n // self.parts)
        return torch.nn.functional.pad(by_part, pads, value=self.fill).flatten(-3, -2)

    def _unpad(self, x: torch.Tensor, n: int, k: int) -> torch.Tensor:
        """Padded [..., N, K] -> [..., n, k]."""
        by_part = x.unflatten(-2, (self.parts, x.shape[-2] // self.parts))
        return by_part[..., : n // self.parts, :k].flatten(-3, -2)

    def _permute(self, x: torch.Tensor, n: int, k: int, *, back: bool) -> torch.Tensor:
        """The bijection alone, on padded shapes: source to storage, or back."""
        source, storage = self.pattern.split("->")
        extents = self.extents(n, k)
        names = [name for group in self.source_axes for name in group]
        apart = " ".join(names)
        begin, end = (storage, source) if back else (source, storage)
        axes = rearrange(x, f"... {begin} -> ... {apart}", **extents)
        if self.flip:
            axes = axes.flip([names.index(name) - len(names) for name in self.flip])
        return rearrange(axes, f"... {apart} -> ... {end}", **extents)

    def _check(self, x: torch.Tensor) -> None:
        if x.ndim < 2:
            raise LayoutError(
                f"layout {self.name!r}: tensor {tuple(x.shape)} has fewer than 2 axes"
            )
        if self.bits and x.dtype != torch.uint8:
            raise LayoutError(
                f"layout {self.name!r} permutes bits of bytes: want uint8, got {x.dtype} "
                f"{tuple(x.shape)}"
            )


def _is_float8(x: torch.Tensor) -> bool:
    """One-byte floats, which torch pads and flips only as bytes."""
    return x.element_size() == 1 and x.is_floating_point()


def permute_bits_(x: torch.Tensor, bits: tuple[int, ...]) -> torch.Tensor:
    """In place on contiguous uint8 x (a multiple of 4 bytes): bit i of each word becomes bit
    bits[i].

    Bits that travel the same distance move together, so whole words take one shift and mask a
    distance.
    """
    moves: dict[int, int] = {}
    for target, origin in enumerate(bits):
        moves[target - origin] = moves.get(target - origin, 0) | 1 << target
    words = x.view(torch.int32).view(-1)
    signed = lambda mask: mask - (1 << 32) if mask >> 31 else mask
    for start in range(0, words.numel(), _WORD_CHUNK):
        word = words[start : start + _WORD_CHUNK]
        out = torch.zeros_like(word)
        for distance, mask in moves.items():
            moved = word << distance if distance >= 0 else word >> -distance
            out |= moved.bitwise_and_(signed(mask))
        word.copy_(out)
    return x
