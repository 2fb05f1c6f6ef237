"""Every layout of the catalog: bijection, exact inverse, index map, padding, mutation, refusals."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import prod

import pytest
import torch

from kernels import catalog
from kernels.errors import LayoutError
from kernels.layout import Layout, permute_bits_

NAMES = list(catalog.LAYOUTS)
SHAPES = [(2, 1), (130, 5), (64, 90), (258, 64), (512, 33)]


def coded(layout: Layout, n: int, k: int) -> torch.Tensor:
    """A matrix whose elements tell their position: int32, or bytes where bits are permuted."""
    if layout.bits:
        return (torch.arange(n * k) * 40503 // 7 % 251).to(torch.uint8).view(n, k)
    return torch.arange(1, n * k + 1, dtype=torch.int32).view(n, k)


@pytest.mark.parametrize(("name", "shape"), list(product(NAMES, SHAPES)))
def test_forward_inverse_and_index_map_agree(name: str, shape: tuple[int, int]) -> None:
    layout, (n, k) = catalog.find(name), shape
    x = coded(layout, n, k)
    storage = layout.forward(x)
    assert storage.shape == layout.storage_shape(n, k)
    assert torch.equal(layout.inverse(storage, n, k), x)
    offsets = layout.offsets(n, k)
    assert offsets.flatten().unique().numel() == n * k, "two elements share a place"
    plain = replace(layout, bits=None).forward(x).flatten()
    assert torch.equal(plain[offsets], x)
    pad = layout.pad_mask(n, k)
    assert int(pad.sum()) == prod(layout.padded(n, k)) - n * k
    assert bool((plain[pad] == layout.fill).all())


@pytest.mark.parametrize(("name", "shape"), list(product(NAMES, [(130, 5), (64, 90)])))
def test_digits_give_the_same_address(name: str, shape: tuple[int, int]) -> None:
    layout, (n, k) = catalog.find(name), shape
    rows, cols = layout.padded(n, k)
    place = torch.arange(rows).view(-1, 1), torch.arange(cols).view(1, -1)
    address = torch.zeros(rows, cols, dtype=torch.int64)
    for digit in layout.digits(n, k):
        value = place[digit.dim] // digit.in_stride % digit.size
        address += (digit.size - 1 - value if digit.flip else value) * digit.out_stride
    by_part = address.view(layout.parts, rows // layout.parts, cols)
    logical = by_part[:, : n // layout.parts, :k].reshape(n, k)
    assert torch.equal(logical, layout.offsets(n, k))


@pytest.mark.parametrize("name", NAMES)
def test_fill_is_the_declared_byte(name: str) -> None:
    layout = replace(catalog.find(name), fill=0x5A, bits=None)
    n, k = 2 * layout.parts + 2 if layout.parts > 1 else 3, 3
    storage = layout.forward(torch.full((n, k), 0xFF, dtype=torch.uint8)).flatten()
    assert bool((storage[layout.pad_mask(n, k)] == 0x5A).all())
    assert int((storage == 0xFF).sum()) == n * k


@pytest.mark.parametrize("name", [n for n in NAMES if not catalog.LAYOUTS[n].is_plain])
def test_mutation_is_caught(name: str) -> None:
    """Exchanging any two storage axes of different place changes the bytes of a coded matrix."""
    layout = replace(catalog.find(name), bits=None)
    n, k = (2 * a for a in (max(layout.align[0], 2), max(layout.align[1], 2)))
    x = torch.arange(n * k, dtype=torch.int32).view(n, k)
    want = layout.forward(x)
    names = [axis for group in layout.storage_axes for axis in group]
    caught = 0
    for i, one in enumerate(names):
        for other in names[i + 1 :]:
            source, storage = layout.pattern.split("->")
            swap = {one: other, other: one}
            words = storage.replace("(", "( ").replace(")", " )").split()
            mutant = " ".join(swap.get(word, word) for word in words)
            mutated = replace(layout, pattern=f"{source}-> {mutant}")
            extents = layout.extents(n, k)
            order = [axis for axis in names if extents[axis] > 1]
            swapped = [swap.get(axis, axis) for axis in names]
            if [axis for axis in swapped if extents[axis] > 1] != order:
                assert not torch.equal(mutated.forward(x).flatten(), want.flatten()), (one, other)
                caught += 1
    assert caught or len(names) == 2


@pytest.mark.parametrize("name", NAMES)
def test_batch_strides_and_empty(name: str) -> None:
    layout = catalog.find(name)
    n, k = 2 * layout.tile[0] + 2 * (layout.tile[0] == 1), 6
    x = torch.randint(0, 256, (3, n, k), dtype=torch.uint8)
    want = torch.stack([layout.forward(matrix) for matrix in x])
    strided = torch.zeros(3, 2 * n, 2 * k, dtype=torch.uint8)
    strided[:, ::2, ::2] = x
    assert torch.equal(layout.forward(strided[:, ::2, ::2]), want)
    assert torch.equal(layout.forward(x.mT.contiguous().mT), want)
    assert torch.equal(layout.inverse(want.flatten(1), n, k), x)
    assert layout.forward(x[:0]).shape == (0, *layout.storage_shape(n, k))
    assert layout.forward(x).data_ptr() != x.data_ptr()


@pytest.mark.parametrize(
    ("pattern", "sizes", "rule"),
    [
        ("(r a) k -> (r b) k", {"a": 2}, "on one side only"),
        ("(r a) k -> (r r) k", {"a": 2}, "occurs twice"),
        ("(r a) k", {"a": 2}, "exactly one '->'"),
        ("n k -> k", {}, "has 1 axes"),
        ("(r a) k -> (a r) k", {}, "exactly one size to infer"),
        ("(r a) k -> (a r) k", {"a": 2, "z": 3}, "does not have"),
        ("(r a) k -> (a r) k", {"a": 0}, "at least 1"),
        ("n (kk rk) -> n (rk kk)", {"kk": 2}, "must come first"),
    ],
)
def test_no_bijection_is_refused_at_construction(
    pattern: str, sizes: dict[str, int], rule: str
) -> None:
    with pytest.raises(LayoutError, match=rule):
        Layout("planted", pattern, sizes, align=(2, 1))


def test_other_refusals_at_construction() -> None:
    base = ("planted", "(r a) k -> (a r) k", {"a": 4})
    with pytest.raises(LayoutError, match="no multiple of 4"):
        Layout(*base, align=(6, 1))
    with pytest.raises(LayoutError, match="only an axis of size 2"):
        Layout(*base, align=(4, 1), flip=("a",))
    with pytest.raises(LayoutError, match="no permutation of the 32 bits"):
        Layout(*base, align=(4, 1), bits=(0,) * 32)
    with pytest.raises(LayoutError, match="view 'sideways'"):
        Layout(*base, align=(4, 1), view="sideways")


def test_errors_name_tensor_shape_and_rule() -> None:
    value = catalog.find("hopper_value")
    with pytest.raises(LayoutError, match=r"want uint8, got torch.int32 \(4, 4\)"):
        value.forward(torch.zeros(4, 4, dtype=torch.int32))
    with pytest.raises(LayoutError, match=r"\(4,\) has fewer than 2 axes"):
        value.forward(torch.zeros(4, dtype=torch.uint8))
    with pytest.raises(LayoutError, match="is not that of a 130 x 5 matrix"):
        catalog.find("128x4").inverse(torch.zeros(3, 512, dtype=torch.uint8), 130, 5)
    with pytest.raises(LayoutError, match="3 rows do not divide into 2 equal halves"):
        catalog.find("w31").forward(torch.zeros(3, 4))
    with pytest.raises(LayoutError, match="did you mean hopper_scale"):
        catalog.find("hoper_scale")


def test_bit_permutation_moves_each_bit_where_it_says() -> None:
    bits = catalog.HOPPER_TWIDDLE
    words = torch.tensor([1 << bit for bit in range(31)] + [-(1 << 31)], dtype=torch.int32)
    out = permute_bits_(words.clone().view(torch.uint8), bits).view(torch.int32)
    for source, word in enumerate(out.tolist()):
        assert word & 0xFFFFFFFF == 1 << bits.index(source)


def test_consumer_views_share_memory() -> None:
    for layout in catalog.LAYOUTS.values():
        n, k = layout.padded(256, 128)
        storage = layout.forward(torch.zeros(2, n, k, dtype=torch.uint8))
        view = layout.consumer_view(storage, n, k)
        assert view.numel() == storage.numel()
        assert view.data_ptr() == storage.data_ptr()


def test_composites_equal_their_chains() -> None:
    def chain(x: torch.Tensor, *names: str) -> torch.Tensor:
        for name in names:
            x = catalog.LAYOUTS[name].forward(x)
        return x

    x = torch.arange(2 * 256 * 8, dtype=torch.int32).view(2, 256, 8)
    for name, parts in {
        "trtllm_w13": ("gate_up_interleave_1", "trtllm_shuffle_32"),
        "trtllm_w13_scale": ("gate_up_interleave_1", "trtllm_shuffle_32", "block_scale_128x4"),
        "trtllm_w2_scale": ("trtllm_shuffle_32", "block_scale_128x4"),
        "cutedsl_w13": ("w13_to_w31", "gate_up_interleave_64"),
        "cutedsl_w13_scale": ("w13_to_w31", "gate_up_interleave_64", "block_scale_128x4"),
        "cutedsl_w13_interleaved": ("w13_interleaved_to_w31", "gate_up_interleave_64"),
        "cutedsl_w13_interleaved_scale": (
            "w13_interleaved_to_w31",
            "gate_up_interleave_64",
            "block_scale_128x4",
        ),
    }.items():
        assert torch.equal(catalog.LAYOUTS[name].forward(x), chain(x, *parts)), name


def test_published_offsets() -> None:
    """The three index formulas that cases.md lists, each element of each checked."""
    m, k = torch.arange(256).view(-1, 1), torch.arange(8).view(1, -1)
    tile = (m // 128 * 2 + k // 4) * 512 + m % 32 * 16 + m % 128 // 32 * 4 + k % 4
    assert torch.equal(catalog.find("128x4").offsets(256, 8), tile)
    assert [tile[p].item() for p in ((0, 0), (1, 0), (32, 0), (0, 4), (128, 0))] == [
        0,
        16,
        4,
        512,
        1024,
    ]
    n, k = torch.arange(64).view(-1, 1), torch.arange(16).view(1, -1)
    column = k // 8 * 256 + k % 4 * 64 + n % 16 * 4 + k // 4 % 2 * 2 + n // 16 % 2
    assert torch.equal(catalog.find("cdna4_scale").offsets(64, 16), n // 32 * 512 + column)
    for w in (1, 2, 4, 8, 16):
        m, k = torch.arange(64 * w).view(-1, 1), torch.arange(8).view(1, -1)
        row = m // (32 * w) * w + m % (16 * w) // 16
        column = k // 2 * 64 + m % (32 * w) // (16 * w) * 32 + m % 8 * 4 + k % 2 * 2 + m // 8 % 2
        assert torch.equal(catalog.hopper_scale(w).offsets(64 * w, 8), row * 256 + column)


def test_every_entry_says_consumer_and_source() -> None:
    for layout in catalog.LAYOUTS.values():
        assert layout.consumer and layout.source and layout.note, layout.name
    aliases = [a for layout in catalog.LAYOUTS.values() for a in layout.aliases]
    assert len(aliases) == len(set(aliases)) and not set(aliases) & set(catalog.LAYOUTS)
