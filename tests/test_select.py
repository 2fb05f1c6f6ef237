"""The decision tables: targets, TP sizes, torch versions, paths."""

from __future__ import annotations

import pytest

from kernels import LayoutError, select

EXPECTED = {  # target: (value, scale, constraints) at TP 1, 8 warps, a current torch
    "sm80": ("strided", "strided", {}),
    "sm90": ("hopper_value_v3", "hopper_scale_w8", {"split_k": 1}),
    "sm100": ("blackwell_value", "blackwell_scale", {"is_persistent": True, "epilogue_subtile": 1}),
    "sm103": ("blackwell_value", "blackwell_scale", {"is_persistent": True, "epilogue_subtile": 1}),
    "sm120": ("blackwell_value", "blackwell_scale", {"is_persistent": True, "epilogue_subtile": 1}),
    "gfx942": ("strided", "strided", {}),
    "gfx950": ("strided", "cdna4_scale", {}),
    "gfx1250": ("strided", "gfx1250_scale", {}),
    "cpu": ("strided", "strided", {}),
}


@pytest.mark.parametrize("target", select.TARGETS)
def test_choose_mxfp4(target: str) -> None:
    choice = select.choose_mxfp4(target)
    assert (choice.value.name, choice.scale.name, choice.constraints) == EXPECTED[target]
    assert choice.reason and choice.source and choice.warning is None
    assert choice.scale_pad_k == (4 if target == "sm90" else 1)


@pytest.mark.parametrize("target", select.TARGETS)
@pytest.mark.parametrize("tp_size", [1, 2, 3, 4, 8, 16])
def test_should_use_cdna4_mx_scale_swizzle(target: str, tp_size: int) -> None:
    want = target == "gfx950" and tp_size <= 2
    assert select.should_use_cdna4_mx_scale_swizzle(target, tp_size) is want
    scale = select.choose_mxfp4(target, tp_size).scale.name
    assert (scale == "cdna4_scale") is want, "loader and kernel ask one predicate"


@pytest.mark.parametrize(
    ("version", "supported"),
    [
        ("2.7.0", False), ("2.8.0", False), ("2.8.1rc1", False), ("2.8.1", True),
        ("2.8.1+cu128", True), ("2.9.0.dev20250801", True), ("2.9.0a0+git1234", True),
        ("2.10", True),
    ],
)  # fmt: skip
def test_torch_versions_matter_on_sm90_only(version: str, supported: bool) -> None:
    hopper = select.choose_mxfp4("sm90", torch_version=version)
    assert (hopper.value.name == "hopper_value_v3") is supported
    assert (hopper.warning is None) is supported
    assert select.choose_mxfp4("sm100", torch_version=version).value.name == "blackwell_value"


@pytest.mark.parametrize("generation", ["3.5", "3.8"])
@pytest.mark.parametrize("num_warps", [1, 2, 4, 8, 16])
def test_warps_and_generation(num_warps: int, generation: str) -> None:
    scale = select.choose_mxfp4("sm90", num_warps=num_warps, generation=generation).scale
    assert scale.sizes["w"] == num_warps
    assert scale.align == (32 * num_warps, 4 if generation == "3.5" else 2)


def test_refusals() -> None:
    for call, rule in (
        (lambda: select.choose_mxfp4("b200"), "unknown target 'b200'"),
        (lambda: select.choose_mxfp4("sm90", tp_size=0), "tp_size=0"),
        (lambda: select.choose_mxfp4("sm90", num_warps=6), "no power of 2"),
        (lambda: select.choose_mxfp4("sm90", generation="3.7"), "generation '3.7'"),
        (lambda: select.choose_mxfp4("sm90", torch_version="new"), "cannot be read as a version"),
    ):
        with pytest.raises(LayoutError, match=rule):
            call()


def test_paths_for() -> None:
    assert set(select.PATHS_FOR) == set(select.TARGETS)
    assert select.paths_for("sm100")[:3] == ("nvfp4_cutedsl", "nvfp4_trtllm", "nvfp4_cutlass")
    assert select.paths_for("gfx950") == ("mxfp4_triton", "mxfp4_quantize")
