"""Pictures of layouts: every drawn cell is where the index map says, and a picture is safe text."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from math import prod
from xml.etree import ElementTree

import pytest

from kernels import catalog
from kernels.draw import MAX_ROWS, draw, example_shape, picture
from kernels.errors import LayoutError
from kernels.layout import Layout

SVG = "{http://www.w3.org/2000/svg}"
SHAPES = ((None, None), (300, 37), (1, 1), (258, 129))


def _shape(layout: Layout, n: int | None, k: int | None) -> tuple[int, int]:
    auto = example_shape(layout)
    n = auto[0] if n is None else n + n % layout.parts
    return n, auto[1] if k is None else k


@pytest.mark.parametrize("name", catalog.LAYOUTS)
def test_every_cell_is_where_the_index_map_says(name: str) -> None:
    layout = catalog.LAYOUTS[name]
    for shape in SHAPES:
        n, k = _shape(layout, *shape)
        offsets, padding = layout.offsets(n, k), layout.pad_mask(n, k)
        shown = picture(layout, n, k)
        for cell in shown.cells:
            line, place = cell.storage
            assert line * shown.line + place == cell.offset
            if cell.logical is None:
                assert padding[cell.offset], (name, n, k, cell)
            else:
                assert offsets[cell.logical] == cell.offset, (name, n, k, cell)
        assert len({cell.offset for cell in shown.cells}) == len(shown.cells)
        if not shown.cut:
            assert len(shown.cells) == prod(layout.storage_shape(n, k))


@pytest.mark.parametrize("name", catalog.LAYOUTS)
def test_the_text_is_well_formed_small_and_shows_each_cell_twice(name: str) -> None:
    layout = catalog.LAYOUTS[name]
    text = draw(layout)
    assert len(text) < 250_000
    root = ElementTree.fromstring(text)
    shown = picture(layout, *example_shape(layout))
    assert len(shown.source_heads) <= MAX_ROWS
    assert len(shown.storage_heads) <= MAX_ROWS
    tips = [title.text or "" for title in root.iter(f"{SVG}title")]
    for cell in shown.cells:
        where = f"offset {cell.offset} ("
        assert sum(where in tip for tip in tips) == 2, (name, where)
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")


def test_a_person_can_read_the_128x4_swizzle_off_its_picture() -> None:
    shown = picture(catalog.find("block_scale_128x4"), 128, 7)
    assert shown.line == 16
    first = [cell.logical for cell in shown.cells if cell.storage[0] == 0]
    want = [(row, k) for row in (0, 32, 64, 96) for k in range(4)]
    assert first == want  # one line: rows 0, 32, 64 and 96, four columns each
    assert [run[0].logical for run in shown.runs[:5]] == [(0, 0), (32, 0), (64, 0), (96, 0), (1, 0)]
    assert {c.offset for c in shown.cells if c.logical is None} <= {
        i for i in range(512, 1024) if i % 4 == 3
    }  # k = 7 is padding: the last of each four in the second tile


def test_the_owner_of_a_hopper_value_reads_one_stretch_of_16_bytes() -> None:
    """32 lanes of 16 bytes: a lane holds rows lane/4 and lane/4 + 8 of its mma fragment."""
    shown = picture(catalog.find("hopper_value_v3"), 16, 32)
    by_lane: dict[int, list[tuple[int, tuple[int, int]]]] = {}
    for cell in shown.cells:
        ((kind, lane),) = cell.owner
        assert kind == "lane"
        assert cell.logical
        by_lane.setdefault(lane, []).append((cell.offset, cell.logical))
    assert sorted(by_lane) == list(range(32))
    for lane, held in by_lane.items():
        offsets = sorted(offset for offset, _ in held)
        assert offsets == list(range(16 * lane, 16 * lane + 16))
        assert {row for _, (row, _) in held} == {lane // 4, lane // 4 + 8}
        assert {k % 4 for _, (_, k) in held} == {lane % 4}


def test_another_pattern_is_another_picture() -> None:
    right = catalog.find("block_scale_128x4")
    wrong = replace(right, pattern="(rn no ni) (rk kk) -> (rn rk) (no ni kk)")
    assert draw(right) != draw(wrong)


def test_gate_and_up_are_named_and_each_half_is_padded_by_itself() -> None:
    shown = picture(catalog.find("gate_up_interleave_8"), 20, 2)
    heads = list(shown.source_heads.values())
    assert heads[:10] == [f"gate {i}" for i in range(10)]
    assert heads[10:16] == ["pad"] * 6
    assert heads[16] == "up 10"


def test_names_and_notes_are_escaped() -> None:
    layout = Layout("<script>alert(1)</script>", "n k -> n k", note="a \" b' & <b>")
    text = draw(layout, 2, 2)
    assert "<script" not in text
    assert ElementTree.fromstring(text).attrib["aria-label"].startswith("<script>alert(1)")


def test_shapes_that_cannot_be_drawn_are_refused() -> None:
    with pytest.raises(LayoutError, match="0 x 4"):
        draw(catalog.find("strided"), 0, 4)
    with pytest.raises(LayoutError, match="even"):
        draw(catalog.find("w13_to_w31"), 3, 4)


def test_drawing_needs_no_plotting_library() -> None:
    code = (
        "import sys; from kernels import catalog, draw; draw.draw(catalog.find('128x4'));"
        "assert not {'matplotlib', 'pandas', 'hydra'} & set(sys.modules), 'imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
