"""Each way to prepare a wrong layer, planted, and the check that names it.

A fault is planted in the code that prepares, never in the judge. Layers prepared right pass first,
so no check can fail for another reason.
"""

from dataclasses import replace

import pytest
import torch

import kernels
from harness.check import judge
from harness.run.source import synthetic
from kernels import consumers
from kernels import prepare as preparation
from kernels import weights as checkpoint
from kernels.prepare import PATHS, prepare
from kernels.shard import ShardPlan


def layer(path, *, hidden=320, intermediate=704, activation="silu", experts=3):
    """A layer in checkpoint form with biases, sizes that no tile divides."""
    made = synthetic(experts, hidden, intermediate, activation, PATHS[path].format)
    if made.w13_bias is None:
        draw = torch.Generator().manual_seed(7)
        biases = {
            "w13_bias": torch.randn(experts, made.w13_weight.shape[1], generator=draw),
            "w2_bias": torch.randn(experts, hidden, generator=draw),
        }
        made = replace(made, **biases)
    return made


def judged(path, weights, *, target="sm100", tp_size=2, tp_rank=1, **options):
    return judge.run(
        prepare(path, weights, target=target, tp_size=tp_size, tp_rank=tp_rank, **options), weights
    )


def failures(verdicts):
    return {name: text for name, text in verdicts.items() if text.startswith("fail")}


def routines(**faulty):
    """A resolver that serves `faulty[name]`, given the true routine, in place of it."""

    def resolve(name, impl):
        true = kernels.resolve(name, impl)
        return faulty[name](true) if name in faulty else true

    return resolve


CELLS = [
    (path, target, activation)
    for path, targets in {
        "nvfp4_cutedsl": ["sm100"],
        "nvfp4_trtllm": ["sm100"],
        "nvfp4_cutlass": ["sm100", "sm120"],
        "mxfp4_triton": ["sm80", "sm90", "sm100", "gfx942", "gfx950", "gfx1250", "cpu"],
        "mxfp4_quantize": ["sm90", "sm100", "gfx950"],
    }.items()
    for target in targets
    for activation in ("silu", "swigluoai", "relu2_no_mul")
]


@pytest.mark.parametrize(("path", "target", "activation"), CELLS)
def test_a_layer_prepared_right_passes(path, target, activation):
    weights = layer(path, activation=activation)
    for tp_size, tp_rank in ((4, 3), (1, 0)) if activation == "silu" else ((4, 3),):
        verdicts = judged(path, weights, target=target, tp_size=tp_size, tp_rank=tp_rank)
        assert not failures(verdicts)
        assert list(verdicts) == ["shards_equal_whole", "consumer_reads_it", "order"]


@pytest.mark.parametrize("path", ["nvfp4_cutedsl", "mxfp4_triton"])
def test_expert_ranks_pass_together_with_tensor_ranks(path):
    weights = layer(path, experts=5)
    for ep_rank in range(2):
        assert not failures(judged(path, weights, ep_size=2, ep_rank=ep_rank))


def test_gate_and_up_exchanged_is_caught(monkeypatch):
    weights = layer("nvfp4_trtllm")
    monkeypatch.setitem(preparation.STEPS, "up_first", lambda state: None)
    found = failures(judged("nvfp4_trtllm", weights))
    assert found.keys() == {"consumer_reads_it", "order"}
    assert "gate" in found["consumer_reads_it"] and "instead of" in found["consumer_reads_it"]
    assert "w13_weight" in found["order"] and "checkpoint row" in found["order"]


def test_swigluoai_rows_taken_as_halves_is_caught(monkeypatch):
    weights = layer("mxfp4_triton", activation="swigluoai")
    as_halves = ShardPlan.pieces
    monkeypatch.setattr(
        ShardPlan, "pieces", lambda plan: as_halves(replace(plan, interleaved=False))
    )
    found = failures(judged("mxfp4_triton", weights))
    assert "gate" in found["shards_equal_whole"] and "values differ" in found["shards_equal_whole"]
    assert found.keys() == {"shards_equal_whole", "consumer_reads_it", "order"}


def padded_at_the_end(weights, plan, *, pairs=False, **_):
    """Both halves copied in one piece, the padding left at the end of w13 (vllm#55649)."""
    taken = checkpoint.take(weights, plan, pairs=pairs)
    for name in ("w13_weight", "w13_scale", "w13_bias"):
        halves = taken[name].chunk(2, dim=1)
        own = torch.cat([half[:, : plan.real] for half in halves], dim=1)
        ended = torch.zeros_like(taken[name])
        ended[:, : own.shape[1]] = own
        taken[name] = ended
    return taken


def test_end_padding_instead_of_per_half_padding_is_caught(monkeypatch):
    weights = layer("nvfp4_trtllm")
    true = checkpoint.take
    faulty = lambda *args, **kwargs: padded_at_the_end(*args, **kwargs)
    monkeypatch.setattr(preparation, "take", faulty)
    found = failures(judged("nvfp4_trtllm", weights))
    assert found.keys() == {"consumer_reads_it", "order"}
    monkeypatch.setattr(checkpoint, "take", lambda w, p, *, pairs=False: _with(true, w, p, pairs))
    found = failures(judged("nvfp4_trtllm", weights))
    assert "padding are not zero" in found["shards_equal_whole"]


def _with(true, weights, plan, pairs):
    saved, checkpoint.take = checkpoint.take, true
    try:
        return padded_at_the_end(weights, plan, pairs=pairs)
    finally:
        checkpoint.take = saved


def planned(monkeypatch, change):
    """Every plan that the preparation and the judge ask for goes through `change`."""
    from kernels import shard

    true = shard.plan
    monkeypatch.setattr(shard, "plan", lambda *a, **k: change(true(*a, **k)))


def test_a_naive_split_through_a_block_is_caught(monkeypatch):
    weights = layer("mxfp4_triton", hidden=64, intermediate=2880, activation="swigluoai")

    def naive(plan):  # 2880 / 4 = 720 = 22.5 blocks of 32
        size = plan.intermediate // plan.tp_size
        return replace(plan, start=plan.tp_rank * size, real=size, per_rank=size)

    planned(monkeypatch, naive)
    found = judge.shards_equal_whole(weights, "mxfp4_triton", target="sm90", tp_size=4)
    assert found.startswith("fail: down"), found
    assert "4 ranks together" in found and "values differ" in found


def test_a_padded_stride_into_the_unpadded_checkpoint_is_caught(monkeypatch):
    weights = layer("mxfp4_triton", hidden=64, intermediate=2880, activation="swigluoai")

    def padded_stride(plan):
        start = min(plan.tp_rank * plan.padded_intermediate, plan.intermediate)
        return replace(plan, start=start, real=min(plan.real, plan.intermediate - start))

    planned(monkeypatch, padded_stride)
    for tp_size in (4, 8):  # at 8 the last ranks start past the end; at 4 all are in range
        found = judge.shards_equal_whole(weights, "mxfp4_triton", target="gfx950", tp_size=tp_size)
        assert found.startswith("fail: gate") and "instead of" in found


def test_a_scale_that_is_not_swizzled_is_caught():
    weights = layer("nvfp4_cutlass")
    flat = lambda true: (
        lambda scale: true(scale).copy_(
            torch.nn.functional.pad(
                scale.view(torch.uint8),
                (
                    0,
                    true(scale).shape[-1] - scale.shape[-1],
                    0,
                    true(scale).shape[-2] - scale.shape[-2],
                ),
            ).view(scale.dtype)
        )
    )
    found = failures(judged("nvfp4_cutlass", weights, resolve=routines(swizzle_blockscale=flat)))
    assert found.keys() == {"consumer_reads_it", "order"}
    assert "w13_scale" in found["order"]


def test_a_scale_swizzled_twice_is_caught():
    weights = layer("nvfp4_cutlass")
    twice = lambda true: lambda scale: true(true(scale))
    found = failures(judged("nvfp4_cutlass", weights, resolve=routines(swizzle_blockscale=twice)))
    assert found.keys() == {"consumer_reads_it", "order"}
    assert "w13_scale" in found["order"]


def test_a_scale_not_permuted_with_its_weight_is_caught():
    weights = layer("nvfp4_cutlass")
    weight_only = lambda true: lambda weight, scale: (true(weight, scale.clone())[0], scale)
    resolve = routines(reorder_w1w3_to_w3w1=weight_only)
    found = failures(judged("nvfp4_cutlass", weights, resolve=resolve))
    assert found.keys() == {"consumer_reads_it", "order"}
    assert found["order"].startswith("fail: w13_scale")


@pytest.mark.parametrize("path", ["nvfp4_cutedsl", "nvfp4_trtllm"])
def test_a_bias_not_permuted_is_caught(path, monkeypatch):
    weights = layer(path)
    monkeypatch.setattr(preparation, "order_biases", lambda state: None)
    found = failures(judged(path, weights))
    assert found["order"].startswith("fail: w13_bias")
    assert "bias" in found["consumer_reads_it"]
    assert "shards_equal_whole" not in found


def test_w2_rows_left_unpadded_under_padded_scales_is_caught():
    weights = layer("nvfp4_cutedsl", hidden=320)
    prepared = prepare("nvfp4_cutedsl", weights, target="sm100", tp_size=2, tp_rank=1)
    assert not failures(judge.run(prepared, weights))
    short = prepared.tensors["w2_weight"][:, :320].contiguous()
    faulty = replace(prepared, tensors=prepared.tensors | {"w2_weight": short})
    found = judge.consumer_reads_it(faulty, weights)
    assert found.startswith("fail: w2_weight") and "512" in found


def test_wrong_num_warps_is_caught():
    weights = layer("mxfp4_triton")
    prepared = prepare("mxfp4_triton", weights, target="sm90", num_warps=4)
    assert judge.consumer_reads_it(prepared, weights) == "pass"
    found = judge.consumer_reads_it(prepared, weights, num_warps=8)
    assert found.startswith("fail: w13_scale")
    assert "hopper_scale_w8" in found and "hopper_scale_w4" in found
    four = lambda true: lambda q, s, warps, **k: true(q, s, 4, **k)  # and the tag says 8
    verdicts = judged("mxfp4_triton", weights, target="sm90", resolve=routines(swizzle_mxfp4=four))
    assert failures(verdicts).keys() == {"consumer_reads_it", "order"}


def test_cdna4_scale_at_tp_4_is_caught(monkeypatch):
    weights = layer("mxfp4_triton")
    true = consumers.reads
    with monkeypatch.context() as loading:  # the loader believes that it is at tp_size 2
        loading.setattr(
            consumers, "reads", lambda *a, **k: true(*a, **k | {"tp_size": min(k["tp_size"], 2)})
        )
        at_two = lambda swizzle: lambda *a, **k: swizzle(*a, **k | {"tp_size": 2})
        prepared = prepare(
            "mxfp4_triton", weights, target="gfx950", tp_size=4,
            resolve=routines(swizzle_mxfp4=at_two),
        )  # fmt: skip
    assert prepared.layouts["w13_scale"].name == "cdna4_scale"
    found = judge.consumer_reads_it(prepared, weights)
    assert found.startswith("fail: w13_scale")
    assert "strided" in found and "cdna4_scale" in found and "tp_size 4" in found


def test_one_experts_amax_used_for_all_is_caught():
    weights = layer("nvfp4_cutedsl")
    weights = replace(weights, a13_scale=torch.tensor([0.01, 0.03, 0.02]))
    first = lambda true: lambda scale, eplb, group=None: true(scale[:1], eplb, group)
    resolve = routines(amax_for_moe_activation_quant=first)
    found = failures(judged("nvfp4_cutedsl", weights, resolve=resolve))
    assert found.keys() == {"consumer_reads_it"}
    assert (
        "a13_scale" in found["consumer_reads_it"]
        and "maximum over all" in found["consumer_reads_it"]
    )


def test_a_view_that_copied_is_caught():
    weights = layer("nvfp4_cutedsl")
    copied = lambda true: lambda scale: true(scale.clone())
    resolve = routines(nvfp4_swizzled_scale_to_cutedsl_mma_view=copied)
    found = failures(judged("nvfp4_cutedsl", weights, resolve=resolve))
    assert found.keys() == {"consumer_reads_it"}
    assert "w13_scale" in found["consumer_reads_it"] and "is a copy" in found["consumer_reads_it"]


def test_rows_shuffled_before_they_are_interleaved_is_caught():
    """Steps that do not commute: TRT-LLM wants the interleave first, then the shuffle."""
    weights = layer("nvfp4_trtllm", intermediate=512)
    shuffle = kernels.resolve("shuffle_rows_for_trtllm", "reference")
    interleave = kernels.resolve("interleave_linear_and_gate", "reference")

    def swapped(true):
        def call(w13, w2, s13, s2, *sizes):
            _, scale, down, down_scale = true(w13, w2, s13, s2, *sizes)
            return interleave(shuffle(w13), 1, dim=1), scale, down, down_scale

        return call

    resolve = routines(prepare_static_weights_for_trtllm_fp4_moe=swapped)
    found = failures(judged("nvfp4_trtllm", weights, resolve=resolve))
    assert found["order"].startswith("fail: w13_weight")


def test_a_fault_in_one_expert_or_one_column_past_the_cut_size_is_seen_where_layers_are_small():
    weights = layer("mxfp4_triton")
    prepared = prepare("mxfp4_triton", weights, target="sm100")
    prepared.tensors["w2_weight"][2, -1, 100] ^= 1
    found = judge.consumer_reads_it(prepared, weights)
    assert found.startswith("fail: down: 1 of") and "(2, 319, " in found


def test_a_large_layer_is_cut_and_the_verdict_says_so():
    weights = layer("mxfp4_triton", hidden=2880, intermediate=704, experts=4)
    verdicts = judged("mxfp4_triton", weights)
    assert verdicts["consumer_reads_it"] == (
        "pass (2 of 4 experts, hidden 320 of 2880, intermediate in full)"
    )


def test_two_global_scales_are_judged_by_the_bound_of_their_merge():
    weights = layer("nvfp4_trtllm")
    scales = torch.tensor([[0.5, 0.3], [0.2, 0.9], [0.4, 0.4]])
    weights = replace(weights, w13_scale_2=scales)
    assert not failures(judged("nvfp4_trtllm", weights))
    prepared = prepare("nvfp4_trtllm", weights, target="sm100", tp_size=2, tp_rank=1)
    assert torch.equal(prepared.tensors["w13_scale_2"], scales.amax(1))
    prepared.tensors["w13_scale_2"][1] *= 1.2  # past e4m3's half step of 1/16
    assert "bound of the global-scale merge" in judge.consumer_reads_it(prepared, weights)
