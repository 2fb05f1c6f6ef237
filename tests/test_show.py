"""`list` and `show`: what they print is true and needs no config file of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness import show
from harness.__main__ import main
from kernels.catalog import LAYOUTS


def test_show_places_an_element(capsys: pytest.CaptureFixture[str]) -> None:
    """vllm#47303: 5760 x 90 scales are stored as 184 x 2944 at 8 warps, once padded to 92."""
    assert main(["show", "layout=hopper_scale", "shape=5760x90", "at=17,3"]) == 0
    out = capsys.readouterr().out
    assert "padded 5888 x 92, stored 184 x 2944" in out
    assert "offset 3014 = row 1, column 70" in out
    assert "HopperMXScaleLayout" in out


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_show_agrees_with_the_index_map(name: str) -> None:
    layout = LAYOUTS[name]
    n, k = (354, 47) if layout.parts == 2 else (353, 47)
    offsets = layout.offsets(n, k)
    for m, c in ((0, 0), (1, 0), (n - 1, k - 1), (n // 2, 3), (n // 2 - 1, k - 1), (17, 3)):
        assert show._offset(layout, n, k, m, c) == int(offsets[m, c])


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["layout=hopper"], "known:"),
        (["layout=strided", "shape=3"], "write two whole numbers"),
        (["layout=strided", "at=1,1"], "needs shape"),
        (["layout=strided", "shape=2x2", "at=2,0"], "outside 2 x 2"),
        (["layout=strided", "shape=0x2"], "is empty"),
        (["layout=strided", "num_warps=4"], "only Hopper's"),
        (["layot=strided"], "did you mean layout"),
        (["shape=2x2"], "give layout=NAME"),
        (["layout=w13_to_w31", "shape=3x2"], "even row count"),
        (["layout=strided", "out=x.png"], ".svg"),
    ],
)
def test_mistakes_are_answered(
    argv: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", *argv]) == 4
    assert says in capsys.readouterr().err


def test_show_draws(tmp_path: Path) -> None:
    out = tmp_path / "x.svg"
    assert main(["show", "layout=block_scale_128x4", "shape=40x5", f"out={out}"]) == 0
    assert out.read_text().lstrip().startswith("<svg")


def test_list_names_every_axis(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    out = capsys.readouterr().out
    for name in ("b200", "gpt_oss_120b", "nvfp4_trtllm", "swizzle_blockscale", "fused", "ci",
                 "safetensors", "tp_size", "hopper_scale_w8", "8 TB/s"):  # fmt: skip
        assert name in out
    assert main(["list", "modle"]) == 4
    assert "did you mean model" in capsys.readouterr().err
