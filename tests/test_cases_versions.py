"""Cases 18 and 19 of the known faults: another triton_kernels, another torch.

18: names that moved between versions (`GFX950MXScaleLayout` to `CDNA4MXScaleLayout`, `matmul_ogs`
to `matmul`), a selector that returned (class, options) and later an instance; features are
detected, never versions compared. 19: the torch check belongs to Hopper alone, and versions are
parsed as versions.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from harness import vendor
from harness.vendor import NotInstalled, NotOffered
from harness.vendor import triton_kernels as tk
from kernels.errors import LayoutError
from kernels.select import choose_mxfp4, hopper_swizzle_supported


class OldLayout:
    """The 3.5.1 generation: a layout takes the shape."""

    def __init__(self, shape: list[int]) -> None:
        self.shape = shape


class NewLayout:
    """The 3.8 generation: an instance makes a transformation of a shape."""

    def make_transformation(self, shape: list[int], is_fp4: bool) -> Any:
        return SimpleNamespace(shape=shape, is_fp4=is_fp4)


def fake(monkeypatch: pytest.MonkeyPatch, base: type, **names: Any) -> ModuleType:
    """A triton_kernels package with just these layout names."""
    package = ModuleType("triton_kernels")
    package.__path__ = []
    details = ModuleType("triton_kernels.tensor_details")
    details.__path__ = []
    layout = ModuleType("triton_kernels.tensor_details.layout")
    for name, value in {"Layout": base, **names}.items():
        setattr(layout, name, value)
    for module in (package, details, layout):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return layout


CDNA4 = tk.SPELLINGS["cdna4_scale"].names


@pytest.mark.parametrize(
    ("base", "name", "generation"),
    [
        (OldLayout, "GFX950MXScaleLayout", "3.5"),
        (OldLayout, "CDNA4MXScaleLayout", "3.5"),
        (NewLayout, "CDNA4MXScaleLayout", "3.8"),
    ],
)
def test_case_18_either_name_gives_the_class_and_the_generation_is_by_feature(
    monkeypatch: pytest.MonkeyPatch, base: type, name: str, generation: str
) -> None:
    wanted = type(name, (base,), {})
    module = fake(monkeypatch, base, **{name: wanted})
    assert tk.layout_class(tk.library(), CDNA4) is wanted
    assert tk.generation(module) == generation
    assert vendor.probe("triton_kernels").generation == generation


def test_the_newer_name_wins_where_both_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    new, old = type("New", (), {}), type("Old", (), {})
    module = fake(monkeypatch, OldLayout, CDNA4MXScaleLayout=new, GFX950MXScaleLayout=old)
    assert tk.layout_class(module, CDNA4) is new


def test_neither_name_is_an_error_that_says_what_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    module = fake(monkeypatch, OldLayout, HopperMXScaleLayout=OldLayout)
    with pytest.raises(
        NotOffered, match="none of CDNA4MXScaleLayout, GFX950MXScaleLayout"
    ) as error:
        tk.layout_class(module, CDNA4)
    assert "HopperMXScaleLayout" in str(error.value)


def test_selector_may_return_a_pair_or_an_instance() -> None:
    instance = NewLayout()
    assert tk.as_choice((OldLayout, {"mx_axis": 1})) == (OldLayout, {"mx_axis": 1})
    assert tk.as_choice((OldLayout, {})) == (OldLayout, {})
    assert tk.as_choice(instance) == (instance, {})


@pytest.mark.parametrize("name", ["matmul_ogs", "matmul"])
def test_either_matmul_is_found(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    fake(monkeypatch, OldLayout)
    module = ModuleType(f"triton_kernels.{name}")
    setattr(module, name, lambda: None)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert tk.matmul_name() == name


def test_neither_matmul_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch, OldLayout)
    with pytest.raises(NotOffered, match="neither matmul_ogs nor matmul"):
        tk.matmul_name()


def test_pypis_package_of_that_name_is_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    """`pip install triton-kernels` gives an unrelated package: said, not taken for OpenAI's."""
    unrelated = ModuleType("triton_kernels")
    unrelated.__path__ = []
    monkeypatch.setitem(sys.modules, "triton_kernels", unrelated)
    monkeypatch.setattr(tk, "metadata", lambda name: {"Version": "0.1.0", "Summary": "kernels"})
    with pytest.raises(NotInstalled, match="an unrelated package"):
        tk.library()
    found = vendor.probe("triton_kernels")
    assert found.version is None
    assert "tokenspeed-triton-kernels" in found.reason
    with pytest.raises(NotInstalled):
        vendor.routine("triton_kernels", "swizzle_mxfp4")


@pytest.mark.parametrize(
    ("target", "version", "swizzled"),
    [
        ("sm90", "2.8.0", False),
        ("sm90", "2.8.1rc1", False),
        ("sm90", "2.8.1", True),
        ("sm90", "2.8.1+cu128", True),
        ("sm90", "2.9.0.dev20250801+cu128", True),
        ("sm90", "2.10.0", True),
        ("sm100", "2.7.0", True),
        ("sm103", "2.8.0", True),
        ("sm80", "2.13.0", False),
    ],
)
def test_case_19_torch_gates_hopper_alone(target: str, version: str, swizzled: bool) -> None:
    choice = choose_mxfp4(target, torch_version=version)
    assert (choice.scale.name != "strided") is swizzled
    warned = target == "sm90" and not swizzled
    assert (choice.warning is not None) is warned


def test_a_version_that_is_none_is_refused() -> None:
    with pytest.raises(LayoutError, match="cannot be read as a version"):
        hopper_swizzle_supported("two point eight")


def test_memory_order_of_any_strides() -> None:
    """Vendors return transposed views: bytes are compared as they lie in memory."""
    x = torch.arange(2 * 3 * 4, dtype=torch.uint8).view(2, 3, 4)
    for view in (x, x.mT, x[:, None].permute(1, 0, 3, 2)):
        assert torch.equal(vendor.memory_bytes(view, 2), x.view(2, -1))
    with pytest.raises(NotOffered, match="not dense"):
        vendor.memory_bytes(x[..., :2], 2)
