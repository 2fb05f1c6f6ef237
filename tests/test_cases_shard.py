"""Faults that others had in sharding, padding, row order and preparation, one test a case; the
numbers are those of the list of cases that this project was started from."""

from dataclasses import replace

import pytest
import torch

import kernels
from harness.check import judge
from harness.run.source import synthetic
from kernels import activations, consumers, moe, readback
from kernels.errors import LayoutError
from kernels.prepare import PATHS, prepare
from kernels.shard import plan
from kernels.weights import MoEWeights, take

E4M3 = torch.float8_e4m3fn


def rows_as_values(rows: list[int], hidden: int = 32) -> torch.Tensor:
    """uint8 [1, len(rows), hidden/2]: every byte of a row is the row's value."""
    return torch.tensor(rows, dtype=torch.uint8)[None, :, None].repeat(1, 1, hidden // 2)


def nvfp4(gate: list[int], up: list[int], hidden: int = 32) -> MoEWeights:
    """A layer of one expert whose w13 rows, scales and bias hold the given values."""
    w13 = rows_as_values(gate + up, hidden)
    inner = len(gate)
    return MoEWeights(
        w13, rows_as_values(gate + up, hidden // 8)[..., : hidden // 16].contiguous().view(E4M3),
        torch.full((1, hidden, inner // 2), 0x11, dtype=torch.uint8),
        torch.full((1, hidden, -(-inner // 16)), 0x38, dtype=torch.uint8).view(E4M3),
        w13_bias=torch.tensor([gate + up], dtype=torch.float32), format="nvfp4",
    )  # fmt: skip


def test_case_01_each_half_is_padded_by_itself():
    """vllm#55649, sglang#30887: end padding hands the first rows of up to gate."""
    weights = nvfp4([100, 101, 102, 103, 104, 105], [200, 201, 202, 203, 204, 205])
    made = plan("nvfp4_cutlass", "sm100", experts=1, hidden=32, intermediate=6, activation="silu")
    to_eight = replace(made, padded_intermediate=8)
    taken = take(weights, to_eight)
    want = [100, 101, 102, 103, 104, 105, 0, 0, 200, 201, 202, 203, 204, 205, 0, 0]
    assert taken["w13_weight"][0, :, 0].tolist() == want
    assert taken["w13_scale"].view(torch.uint8)[0, :, 0].tolist() == want
    assert taken["w13_bias"][0].int().tolist() == want


def test_case_01_gemma_at_tp_2_with_real_sizes():
    """I = 704 at TP 2 is 352 rows of each, allocated 384: rows 352..383 and 736..767 are zero."""
    weights = synthetic(1, 64, 704, "silu", "nvfp4")
    made = plan(
        "nvfp4_trtllm",
        "sm100",
        experts=1,
        hidden=64,
        intermediate=704,
        activation="silu",
        tp_size=2,
    )
    assert (made.real, made.padded_intermediate) == (352, 384)
    taken = take(weights, made)
    w13 = taken["w13_weight"][0]
    assert w13.shape[0] == 768
    assert not w13[352:384].any() and not w13[736:768].any()
    assert torch.equal(w13[384, :32], weights.w13_weight[0, 704])
    assert torch.equal(w13[0, :32], weights.w13_weight[0, 0])
    scale = taken["w2_scale"].view(torch.uint8)
    assert scale.shape[-1] == 24 and weights.w2_scale.shape[-1] // 2 == 22
    assert not scale[..., 22:].any()


@pytest.mark.parametrize(
    ("size", "tp_size", "activation", "padded"),
    [
        (704, 2, "silu", 384), (704, 4, "silu", 192), (640, 4, "silu", 192), (1280, 8, "silu", 192),
        (704, 1, "silu", 704), (192, 1, "silu", 192), (384, 1, "silu", 384),
        (1856, 4, "relu2_no_mul", 512),
    ],
)  # fmt: skip
def test_case_02_trtllm_rows_come_in_tiles_of_128(size, tp_size, activation, padded):
    """vllm#46879, flashinfer#3206: the tile is over gate and up together, so 64 for each."""
    made = plan(
        "nvfp4_trtllm", "sm100", experts=2, hidden=512, intermediate=size, activation=activation,
        tp_size=tp_size,
    )  # fmt: skip
    assert made.padded_intermediate == padded
    assert made.parts * padded % 128 == 0
    weights = synthetic(2, 512, size, activation, "nvfp4")
    prepare("nvfp4_trtllm", weights, target="sm100", tp_size=tp_size)  # the routine's own check


@pytest.mark.parametrize("size", [2880, 704, 640, 1280, 1408, 1536, 1856, 3072])
@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
def test_case_02_every_tp_size_is_ok_padded_or_refused_with_a_reason(size, tp_size):
    """The tensor-parallel axis of the list: sizes that real models have."""
    for path, target in (("nvfp4_trtllm", "sm100"), ("nvfp4_cutedsl", "sm100"),
                         ("nvfp4_cutlass", "sm120"), ("mxfp4_triton", "gfx950"),
                         ("mxfp4_triton", "sm90"), ("nvfp4_trtllm", "sm90")):  # fmt: skip
        for activation in ("silu", "relu2_no_mul"):
            made = plan(
                path, target, experts=2, hidden=2880, intermediate=size, activation=activation,
                tp_size=tp_size,
            )  # fmt: skip
            assert made.outcome == "ok" or made.reason
            if path.startswith("nvfp4") and made.outcome != "refused":
                assert made.parts * made.padded_intermediate % 128 == 0


def test_case_13_over_padding_is_reported():
    """sglang#27858, vllm#55104: 384 rows of a rank rounded to 512 on gfx950."""
    made = plan(
        "mxfp4_triton", "gfx950", experts=32, hidden=2880, intermediate=2880,
        activation="swigluoai", tp_size=8,
    )  # fmt: skip
    assert (made.per_rank, made.padded_intermediate) == (384, 512)
    assert round(made.ratio, 2) == 1.33
    assert made.padded_intermediate - made.per_rank == 128
    assert any("over-padded: 1.33x" in note for note in made.notes)
    assert "1.33x" in made.verdict()


@pytest.mark.parametrize(
    ("tp_size", "owned"),
    [(1, [2880]), (2, [1440] * 2), (4, [736] * 3 + [672]), (8, [384] * 7 + [192])],
)
def test_case_15_gpt_oss_is_sharded_by_whole_blocks(tp_size, owned):
    """sglang#9433, #9473: 2880 / 4 is 22.5 blocks of 32, 2880 / 8 is 11.25."""
    sizes = {"experts": 2, "hidden": 64, "intermediate": 2880, "activation": "swigluoai"}
    plans = [
        plan("mxfp4_triton", "sm90", tp_size=tp_size, tp_rank=r, **sizes) for r in range(tp_size)
    ]
    assert [p.real for p in plans] == owned
    assert all(p.start % 32 == 0 for p in plans)
    weights = synthetic(2, 64, 2880, "swigluoai", "mxfp4")
    assert judge.shards_equal_whole(
        weights, "mxfp4_triton", target="sm90", tp_size=tp_size
    ).startswith("pass")


@pytest.mark.parametrize("tp_size", [4, 8])
def test_case_15_the_naive_starts_are_rejected(tp_size, monkeypatch):
    naive = [2880 // tp_size * rank % 32 for rank in range(4)]
    assert naive == {4: [0, 16, 0, 16], 8: [0, 8, 16, 24]}[tp_size]
    from kernels import shard

    true, size = shard.plan, 2880 // tp_size
    monkeypatch.setattr(
        shard, "plan",
        lambda *a, **k: replace(
            true(*a, **k), start=k["tp_rank"] * size, real=size, per_rank=size),
    )  # fmt: skip
    weights = synthetic(2, 64, 2880, "swigluoai", "mxfp4")
    assert judge.shards_equal_whole(
        weights, "mxfp4_triton", target="sm90", tp_size=tp_size
    ).startswith("fail: down")


@pytest.mark.parametrize(("tp_size", "padded"), [(8, 512), (4, 768)])
def test_case_16_offsets_come_from_unpadded_sizes(tp_size, padded):
    """vllm#42595: the padded size as the stride leaves the last ranks empty at TP 8, and at TP 4
    is silent, for all starts are in range."""
    sizes = {"experts": 2, "hidden": 2880, "intermediate": 2880, "activation": "swigluoai"}
    plans = [
        plan("mxfp4_triton", "gfx950", tp_size=tp_size, tp_rank=r, **sizes) for r in range(tp_size)
    ]
    each = {8: 384, 4: 736}[tp_size]
    assert [p.start for p in plans] == [each * rank for rank in range(tp_size)]
    assert {p.padded_intermediate for p in plans} == {padded}
    assert all(p.start < 2880 and p.real > 0 for p in plans)
    for p in plans:
        for piece in p.pieces():
            limit = {"w2_weight": 1440, "w2_scale": 90, "w2_bias": 2880}.get(piece.tensor, 5760)
            assert 0 <= piece.start < piece.stop <= limit


@pytest.mark.parametrize("target", ["gfx950", "gfx942", "sm90", "sm100"])
@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
def test_case_17_loader_and_kernel_share_one_predicate(target, tp_size):
    """vllm#44804, #54773: CDNA4 scales for tp_size <= 2 on gfx950 only; the layer says which."""
    weights = synthetic(2, 256, 512, "swigluoai", "mxfp4")
    ready = prepare("mxfp4_triton", weights, target=target, tp_size=tp_size)
    swizzled = ready.layouts["w13_scale"].name == "cdna4_scale"
    assert swizzled == (target == "gfx950" and tp_size <= 2)
    assert swizzled == kernels.should_use_cdna4_mx_scale_swizzle(target, tp_size)
    other = consumers.reads("mxfp4_triton", target, "swigluoai", tp_size=4 if swizzled else 1)
    if target == "gfx950":
        with pytest.raises(LayoutError, match="cdna4_scale"):
            ready.require("w13_scale", other.layouts["w13_scale"])


def test_case_22_up_first_is_per_backend_and_takes_weight_scale_and_bias():
    """vllm#40082, Megatron-LM#6045: CUTLASS reads up, gate; triton reads gate, up."""
    gate, up = list(range(1, 65)), list(range(101, 165))
    weights = nvfp4(gate, up)
    cutlass = prepare("nvfp4_cutlass", weights, target="sm100")
    assert cutlass.row_order == "up|gate"
    assert cutlass.tensors["w13_weight"][0, :, 0].tolist() == up + gate
    assert cutlass.tensors["w13_bias"][0].int().tolist() == up + gate
    scale = kernels.unswizzle_blockscale(cutlass.tensors["w13_scale"], 128, 2)
    assert scale.view(torch.uint8)[0, :, 0].tolist() == up + gate
    mxfp4 = synthetic(1, 64, 64, "silu", "mxfp4")
    triton = prepare("mxfp4_triton", mxfp4, target="sm80")
    assert triton.row_order == "gate|up"
    assert torch.equal(triton.tensors["w13_weight"].reshape(-1), mxfp4.w13_weight.reshape(-1))


def test_case_24_interleaved_rows_stay_pairs_for_triton_and_are_separated_for_others():
    """vllm#29273, ATOM#845, vllm#52240: rows on disk are g0, u0, g1, u1."""
    rows = [value for pair in zip(range(1, 65), range(101, 165), strict=True) for value in pair]
    base = nvfp4(rows[:64], rows[64:])
    weights = replace(base, activation="swigluoai", interleaved=True)
    cutlass = prepare("nvfp4_cutlass", weights, target="sm100")
    want = list(range(101, 165)) + list(range(1, 65))
    assert cutlass.tensors["w13_weight"][0, :, 0].tolist() == want
    assert cutlass.tensors["w13_bias"][0].int().tolist() == want
    mxfp4 = synthetic(2, 64, 96, "swigluoai", "mxfp4")
    triton = prepare("mxfp4_triton", mxfp4, target="sm80")
    assert triton.row_order == "pairs"
    assert triton.tensors["w13_weight"][:, 0::2].tolist() == _padded(mxfp4.w13_weight[:, 0::2])
    x = torch.randn(3, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ids, probs = moe.route(x[:, :2], 2)
    want_out, bound = moe.forward(moe.dense(mxfp4), x, ids, probs)
    got, _ = moe.forward(readback.dense_from_prepared(triton), x, ids, probs)
    assert ((got - want_out).abs() <= 2 * bound).all()
    wrong, _ = moe.forward(moe.dense(replace(mxfp4, interleaved=False)), x, ids, probs)
    assert ((wrong - want_out).abs() > 2 * bound).any()  # read as halves it is another model


def _padded(rows: torch.Tensor) -> list[object]:
    """96 rows of gate in the 128 allocated for it."""
    return torch.nn.functional.pad(rows, (0, 0, 0, 32)).tolist()


@pytest.mark.parametrize("path", PATHS)
def test_case_26_biases_follow_the_rows_of_their_weight(path):
    """flashinfer#3423, #3416: with weights of zero the output is the biases' alone."""
    experts, hidden, inner = 3, 320, 192
    made = synthetic(experts, hidden, inner, "swigluoai", PATHS[path].format)
    zero = {"w13_weight": torch.zeros_like(made.w13_weight)}
    weights = replace(made, **zero)
    assert weights.w13_bias.shape == (experts, 2 * inner)
    assert weights.w2_bias.shape == (experts, hidden)
    ready = prepare(path, weights, target="sm100")
    served = readback.dense_from_prepared(ready)
    assert torch.equal(served.gate_bias, weights.w13_bias[:, 0::2].double())
    assert torch.equal(served.up_bias, weights.w13_bias[:, 1::2].double())
    x = torch.zeros(2, hidden, dtype=torch.float64)
    ids, probs = moe.route(torch.eye(2, experts, dtype=torch.float64), 1)
    out, bound = moe.forward(served, x, ids, probs)
    f = moe.act("swigluoai")
    inner_values = f.f(served.gate_bias) * f.k(served.up_bias)
    for token in range(2):
        want = served.down[token] @ inner_values[token] + weights.w2_bias[token].double()
        assert ((out[token] - want).abs() <= bound[token]).all()


@pytest.mark.parametrize("path", PATHS)
def test_case_31_a_swizzle_done_twice_or_not_at_all_raises(path):
    """vllm#42118, #42089, #49335: the tag says whether a scale is linear or swizzled."""
    weights = synthetic(2, 256, 192, "silu", PATHS[path].format)
    ready = prepare(path, weights, target="sm100")
    with pytest.raises(LayoutError, match="already"):
        MoEWeights(
            ready.tensors["w13_weight"], ready.tensors["w13_scale"], ready.tensors["w2_weight"],
            ready.tensors["w2_scale"], format=ready.plan.format,
        )  # fmt: skip
    linear = replace(ready, layouts=dict.fromkeys(ready.layouts, kernels.LAYOUTS["strided"]))
    verdict = judge.consumer_reads_it(linear, weights)
    assert verdict.startswith("fail") and "strided" in verdict and "reads layout" in verdict


def test_case_36_the_mma_view_aliases_expert_major_storage():
    """vllm#37217, #48355, #43316: a 6-D view over storage [E, ...]; nothing with a stride of 0."""
    weights = synthetic(4, 256, 192, "silu", "nvfp4")
    ready = prepare("nvfp4_cutedsl", weights, target="sm100")
    for name in ("w13_scale", "w2_scale"):
        storage, view = ready.tensors[name], ready.views[name]
        e, m, k = storage.shape
        assert view.shape == (32, 4, m // 128, 4, k // 4, e)
        tiles_k = k // 4
        assert view.stride() == (16, 4, tiles_k * 512, 1, 512, m * k)
        assert storage[2].is_contiguous()
        before = view.clone()
        storage[2].view(torch.uint8).bitwise_xor_(1)
        changed = (view.view(torch.uint8) != before.view(torch.uint8)).nonzero()[:, -1]
        assert set(changed.tolist()) == {2}
        storage[2].view(torch.uint8).bitwise_xor_(1)
    for name in ("a13_scale", "a2_scale"):
        assert ready.tensors[name].stride() == (1,) and ready.tensors[name].shape == (4,)
    order = [2, 3, 1, 0]
    moved = replace(weights, **{name: t[order] for name, t in weights.tensors().items()})
    want = prepare("nvfp4_cutedsl", moved, target="sm100")
    ready.rearrange_(order)
    for name, tensor in ready.tensors.items():
        assert torch.equal(tensor.view(torch.uint8), want.tensors[name].view(torch.uint8)), name


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("activation", ["silu", "swigluoai", "relu2_no_mul"])
def test_case_37_preparation_is_pure_and_a_reload_keeps_pointers(path, activation):
    """vllm#42821, sglang#18085: a second load wrote checkpoint rows into prepared storage."""
    first, second = (synthetic(2, 320, 192, activation, PATHS[path].format, s) for s in (0, 1))
    kept = {name: t.clone() for name, t in first.tensors().items()}
    one, two = (prepare(path, first, target="sm100") for _ in range(2))
    for name, tensor in first.tensors().items():
        assert torch.equal(tensor.view(torch.uint8), kept[name].view(torch.uint8)), name
    pointers = [t.data_ptr() for t in one.tensors.values()]
    one.update_(second).update_(first)
    assert [t.data_ptr() for t in one.tensors.values()] == pointers
    for name, tensor in one.tensors.items():
        assert torch.equal(tensor.view(torch.uint8), two.tensors[name].view(torch.uint8)), name
    with pytest.raises(LayoutError):
        prepare(path, one, target="sm100")


def test_every_activation_is_gated_as_its_name_says():
    """Case 24's other half: names ending in _no_mul hold one projection, all others two."""
    for name, act in activations.ACTIVATIONS.items():
        assert act.gated != name.endswith("_no_mul")
        assert moe.act(name) is moe.ACTS[name.removesuffix("_no_mul")]
