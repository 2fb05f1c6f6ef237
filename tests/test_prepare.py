"""Preparation: pure, tagged, refused with a reason, updated in place without moving a pointer."""

from dataclasses import replace

import pytest
import torch

import kernels
from harness.run.source import synthetic
from kernels import prepared as prepared_module
from kernels.catalog import LAYOUTS
from kernels.errors import LayoutError
from kernels.prepare import PATHS, STEPS, prepare
from kernels.prepared import PreparedLayer, constrained
from kernels.weights import MoEWeights

TARGET = "sm100"


def layer(path: str, activation: str = "swigluoai", experts: int = 5, seed: int = 0) -> MoEWeights:
    return synthetic(experts, 320, 192, activation, PATHS[path].format, seed)


def same_bytes(one: torch.Tensor, two: torch.Tensor) -> bool:
    return one.dtype == two.dtype and torch.equal(
        one.contiguous().view(torch.uint8), two.contiguous().view(torch.uint8)
    )


def equal(one: PreparedLayer, two: PreparedLayer) -> bool:
    return one.tensors.keys() == two.tensors.keys() and all(
        same_bytes(t, two.tensors[name]) for name, t in one.tensors.items()
    )


@pytest.mark.parametrize("path", PATHS)
def test_every_step_is_known_and_begins_with_sharding(path):
    assert set(PATHS[path].steps) <= STEPS.keys()
    assert PATHS[path].steps[0] == "shard_and_pad"


@pytest.mark.parametrize("path", PATHS)
def test_twice_from_the_same_weights_is_equal_and_the_weights_unchanged(path):
    weights = layer(path)
    before = {name: t.clone() for name, t in weights.tensors().items()}
    one, two = (prepare(path, weights, target=TARGET) for _ in range(2))
    assert equal(one, two)
    assert all(same_bytes(t, before[name]) for name, t in weights.tensors().items())
    own = {t.untyped_storage().data_ptr() for t in weights.tensors().values()}
    assert not own & {t.untyped_storage().data_ptr() for t in one.tensors.values()}


@pytest.mark.parametrize("path", PATHS)
def test_preparing_a_prepared_layer_is_an_error(path):
    ready = prepare(path, layer(path), target=TARGET)
    with pytest.raises(LayoutError, match=f"prepared for path '{path}'"):
        prepare(path, ready, target=TARGET)
    weights = layer(path)
    with pytest.raises(LayoutError, match="w13_weight .* already"):
        replace(weights, w13_weight=ready.tensors["w13_weight"])


@pytest.mark.parametrize("path", PATHS)
def test_storage_is_expert_major_and_views_share_it(path):
    ready = prepare(path, layer(path), target=TARGET, tp_size=2, tp_rank=1)
    for name, tensor in ready.tensors.items():
        assert tensor.is_contiguous() and tensor.shape[0] == 5, name
        assert all(tensor.stride())
    for name, view in ready.views.items():
        storage = ready.tensors[name]
        assert view.untyped_storage().data_ptr() == storage.untyped_storage().data_ptr()
    for name, layout in ready.layouts.items():
        rows, cols = layout.storage_shape(*ready.padded[name])
        assert ready.tensors[name].numel() == 5 * rows * cols, name
        logical, padded = ready.logical[name], ready.padded[name]
        assert logical[0] <= padded[0] and logical[1] <= padded[1], name


@pytest.mark.parametrize("path", PATHS)
def test_a_reload_keeps_pointers_and_views_see_it(path):
    ready = prepare(path, layer(path), target=TARGET, tp_size=2, tp_rank=1)
    pointers = {name: t.data_ptr() for name, t in ready.tensors.items()}
    views = {name: view.clone() for name, view in ready.views.items()}
    other = layer(path, seed=1)
    assert ready.update_(other) is ready
    assert {name: t.data_ptr() for name, t in ready.tensors.items()} == pointers
    fresh = prepare(path, other, target=TARGET, tp_size=2, tp_rank=1)
    assert equal(ready, fresh)
    for name, view in ready.views.items():
        assert not same_bytes(view, views[name]), name
        assert same_bytes(view, fresh.views[name]), name


def test_a_reload_of_another_layer_changes_nothing():
    ready = prepare("nvfp4_trtllm", layer("nvfp4_trtllm"), target=TARGET)
    before = {name: t.clone() for name, t in ready.tensors.items()}
    without = replace(layer("nvfp4_trtllm", seed=1), w13_bias=None, w2_bias=None)
    with pytest.raises(LayoutError, match="update_: w13_bias"):
        ready.update_(without)
    with pytest.raises(LayoutError, match="update_: w13_weight"):
        ready.update_(layer("nvfp4_trtllm", experts=4))
    assert all(same_bytes(t, before[name]) for name, t in ready.tensors.items())


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "sources", [[0, 1, 2, 3, 4], [1, 2, 3, 4, 0], [4, 3, 2, 1, 0], [0, 0, 0, 1, 1], [2, 0, 1, 1, 3]]
)
def test_experts_rearranged_in_storage_equal_rearranged_experts_prepared(path, sources):
    weights = layer(path)
    ready = prepare(path, weights, target=TARGET, tp_size=2, tp_rank=1)
    pointers = {name: t.data_ptr() for name, t in ready.tensors.items()}
    views = dict(ready.views)
    ready.rearrange_(sources)
    moved = replace(weights, **{name: t[sources] for name, t in weights.tensors().items()})
    want = prepare(path, moved, target=TARGET, tp_size=2, tp_rank=1)
    for name, tensor in ready.tensors.items():
        if not name.startswith("a"):  # a maximum over fewer experts may be another one
            assert same_bytes(tensor, want.tensors[name]), name
    assert {name: t.data_ptr() for name, t in ready.tensors.items()} == pointers
    assert all(same_bytes(view, want.views[name]) for name, view in views.items())


def test_a_rearrangement_that_names_no_expert_is_refused():
    ready = prepare("mxfp4_triton", layer("mxfp4_triton"), target=TARGET)
    for sources in ([0, 1, 2, 3], [0, 1, 2, 3, 5], [0, 1, 2, 3, -1]):
        with pytest.raises(LayoutError, match="rearrange_"):
            ready.rearrange_(sources)


def test_moving_experts_holds_one_expert_beside_the_storage(monkeypatch):
    storage = torch.arange(60).view(6, 10).clone()
    clones = []
    monkeypatch.setattr(
        torch.Tensor,
        "clone",
        lambda t, **k: clones.append(t.numel()) or t.new_empty(t.shape).copy_(t),
    )
    prepared_module._move_experts(storage, [1, 2, 0, 4, 3, 5])
    assert clones == [10, 10]  # one for each of the two cycles, of one expert each
    assert (storage[:, 0] // 10).tolist() == [1, 2, 0, 4, 3, 5]


def test_a_consumer_asks_for_its_layout_and_warps():
    ready = prepare("mxfp4_triton", layer("mxfp4_triton"), target="sm90", num_warps=4)
    scale = LAYOUTS["hopper_scale_w4"]
    assert ready.require("w13_scale", scale, 4) is ready.tensors["w13_scale"]
    with pytest.raises(LayoutError, match="hopper_scale_w8.*hopper_scale_w4"):
        ready.require("w13_scale", LAYOUTS["hopper_scale_w8"], 8)
    with pytest.raises(LayoutError, match="runs 8 warps.* for 4"):
        ready.require("w13_scale", scale, 8)
    with pytest.raises(LayoutError, match="no 'w4_scale'"):
        ready.require("w4_scale", scale)


def test_constraints_are_released_even_when_the_kernel_fails():
    ready = prepare("mxfp4_triton", layer("mxfp4_triton"), target="sm90")
    flags = {}
    with pytest.raises(RuntimeError), constrained(ready, flags.update, flags.clear):
        assert flags == {"split_k": 1}
        raise RuntimeError
    assert flags == {}
    blackwell = prepare("mxfp4_triton", layer("mxfp4_triton"), target="sm100")
    assert blackwell.constraints == {"is_persistent": True, "epilogue_subtile": 1}
    assert prepare("mxfp4_triton", layer("mxfp4_triton"), target="gfx950").constraints == {}


def test_routines_are_resolved_by_name_and_impl():
    asked = []

    def resolve(name, impl):
        asked.append((name, impl))
        return kernels.resolve(name, "reference")

    prepare("nvfp4_trtllm", layer("nvfp4_trtllm"), target=TARGET, impl="elsewhere", resolve=resolve)
    assert ("prepare_static_weights_for_trtllm_fp4_moe", "elsewhere") in asked
    assert ("reorder_w1w3_to_w3w1", "elsewhere") in asked


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"w13_scale": torch.zeros(5, 384, 9, dtype=torch.uint8)}, r"w13_scale \(5, 384, 9\)"),
        ({"w2_weight": torch.zeros(5, 320, 97, dtype=torch.uint8)}, "intermediate 194"),
        ({"w13_bias": torch.zeros(5, 383)}, r"w13_bias \(5, 383\); want \(5, 384\)"),
        ({"w2_scale": None}, "without w2_scale"),
        ({"format": "fp4"}, "format 'fp4'"),
        ({"activation": "relu2_no_mul", "interleaved": True}, "no gate"),
    ],
)
def test_weights_that_are_not_of_one_layer_are_refused(change, words):
    with pytest.raises(LayoutError, match=words):
        replace(layer("mxfp4_triton"), **change)


def test_a_path_refuses_another_format():
    with pytest.raises(LayoutError, match="format 'nvfp4'.*format 'mxfp4'"):
        prepare("nvfp4_trtllm", layer("mxfp4_triton"), target=TARGET)


def test_global_scales_merge_within_the_stated_bound_and_codes_stay():
    weights = layer("nvfp4_cutlass", activation="silu")
    scales = torch.rand(5, 2, generator=torch.Generator().manual_seed(3)) + 0.1
    merged = prepare("nvfp4_cutlass", replace(weights, w13_scale_2=scales), target=TARGET)
    plain = prepare("nvfp4_cutlass", weights, target=TARGET)
    assert same_bytes(merged.tensors["w13_weight"], plain.tensors["w13_weight"])
    assert torch.equal(merged.tensors["w13_scale_2"], scales.amax(1))
    same = prepare(
        "nvfp4_cutlass", replace(weights, w13_scale_2=scales[:, :1].expand(-1, 2)), target=TARGET
    )
    assert same_bytes(same.tensors["w13_scale"], plain.tensors["w13_scale"])


@pytest.mark.timeout(1800)
def test_fused_suite_against_the_reference(suite):
    suite("prepare_suite.py", least=100)
