"""The reference MoE forward against sums written out by hand; ranks summed against the whole."""

import math
from dataclasses import replace

import pytest
import torch

from harness.run.source import synthetic
from kernels import moe, readback
from kernels.activations import ACTIVATIONS
from kernels.errors import LayoutError
from kernels.prepare import PATHS, prepare

E, H, I, T, K = 4, 12, 6, 5, 2


def plain(activation: str, seed: int = 0) -> moe.Dense:
    """A small layer of normal numbers, large enough to reach the clamps of swigluoai."""
    draw = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=draw)
    gated = ACTIVATIONS[activation].gated
    return moe.Dense(
        gate=3 * normal(E, I, H) if gated else None, up=3 * normal(E, I, H), down=normal(E, H, I),
        gate_bias=normal(E, I) if gated else None, up_bias=normal(E, I), down_bias=normal(E, H),
        a13_scale=None, a2_scale=None, activation=activation,
    )  # fmt: skip


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def gelu_tanh(x: float) -> float:
    return x / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


# Written from the formulas of the sources named in moe.py, on Python floats.
BY_HAND = {
    "silu": lambda g, u: g * sigmoid(g) * u,
    "gelu": lambda g, u: g / 2 * (1 + math.erf(g / math.sqrt(2))) * u,
    "gelu_tanh": lambda g, u: gelu_tanh(g) * u,
    "relu2": lambda g, u: max(g, 0.0) ** 2 * u,
    "swigluoai": lambda g, u: (
        min(g, 7.0) * sigmoid(1.702 * min(g, 7.0)) * (min(max(u, -7.0), 7.0) + 1)
    ),
    "swiglustep": lambda g, u: min(g * sigmoid(g), 7.0) * min(max(u, -7.0), 7.0),
}
BY_HAND["swigluoai_uninterleave"] = BY_HAND["swigluoai"]


def by_hand(layer: moe.Dense, x, ids, probs):
    """The forward as loops over Python floats."""
    name = layer.activation.removesuffix("_no_mul")
    dot = lambda row, vector: math.fsum(a * b for a, b in zip(row, vector, strict=True))
    out = [[0.0] * H for _ in range(T)]
    for t in range(T):
        for slot in range(K):
            e, p = int(ids[t, slot]), float(probs[t, slot])
            hidden = []
            for i in range(I):
                u = dot(layer.up[e, i].tolist(), x[t].tolist()) + float(layer.up_bias[e, i])
                if layer.gate is None:
                    hidden.append(BY_HAND[name](u, 1.0))
                    continue
                g = dot(layer.gate[e, i].tolist(), x[t].tolist()) + float(layer.gate_bias[e, i])
                hidden.append(BY_HAND[name](g, u))
            for h in range(H):
                out[t][h] += p * (
                    dot(layer.down[e, h].tolist(), hidden) + float(layer.down_bias[e, h])
                )
    return torch.tensor(out, dtype=torch.float64)


def routed(seed: int = 1, hidden: int = H, experts: int = E):
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(T, hidden, dtype=torch.float64, generator=draw)
    logits = torch.randn(T, experts, dtype=torch.float64, generator=draw)
    return x, *moe.route(logits, K)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_forward_is_the_sum_by_hand_within_its_own_bound(activation):
    layer = plain(activation)
    x, ids, probs = routed()
    out, bound = moe.forward(layer, x, ids, probs)
    want = by_hand(layer, x, ids, probs)
    assert ((out - want).abs() <= bound).all()
    assert (bound <= 1e-10 * want.abs().max().clamp(min=1)).all()  # and the bound says something


@pytest.mark.parametrize("activation", ["silu", "swigluoai", "relu2_no_mul"])
def test_fp32_stays_within_its_bound_of_fp64(activation):
    layer = plain(activation)
    x, ids, probs = routed()
    exact, _ = moe.forward(layer, x, ids, probs)
    single = replace(layer, **{name: t.float() for name, t in layer.matrices().items()})
    out, bound = moe.forward(single, x.float(), ids, probs.float())
    # rounding the inputs to fp32 is one more relative 2^-24 on each factor: twice covers it
    assert ((out.double() - exact).abs() <= 2 * bound.double()).all()


def test_routing_is_the_softmax_over_the_chosen():
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0]], dtype=torch.float64)
    ids, probs = moe.route(logits, 2)
    assert ids.tolist() == [[1, 2]]
    assert probs[0, 0].item() == pytest.approx(sigmoid(1.0), abs=1e-15)
    with pytest.raises(LayoutError, match="top_k=5 of 4"):
        moe.route(logits, 5)


def test_swigluoai_clamps_gate_above_and_up_on_both_sides():
    f = moe.act("swigluoai")
    values = lambda g, u: (f.f(torch.tensor([g])) * f.k(torch.tensor([u]))).item()
    assert values(100.0, 0.0) == values(7.0, 0.0)
    assert values(1.0, 100.0) == values(1.0, 7.0)
    assert values(1.0, -100.0) == values(1.0, -7.0)
    assert values(-100.0, 0.0) != values(-7.0, 0.0)  # the gate is not clamped below


@pytest.mark.parametrize(
    ("path", "activation"),
    [(path, act) for path in PATHS for act in ("silu", "swigluoai", "relu2_no_mul", "gelu_tanh")],
)
def test_ranks_summed_over_tp_and_ep_are_the_whole_layer(path, activation):
    tp_size, ep_size, experts, hidden = 4, 2, 5, 96
    form = PATHS[path].format
    weights = synthetic(experts, hidden, 224, activation, form)
    whole = moe.dense(_as_mxfp4(weights) if form == "bf16" else weights)
    x, ids, probs = routed(hidden=hidden, experts=experts)
    want, bound = moe.forward(whole, x, ids, probs)
    total, rows = torch.zeros_like(want), []
    for ep_rank in range(ep_size):
        shares = []
        for tp_rank in range(tp_size):
            prepared = prepare(
                path, weights, target="sm100",
                tp_size=tp_size, tp_rank=tp_rank, ep_size=ep_size, ep_rank=ep_rank,
            )  # fmt: skip
            share = readback.dense_from_prepared(prepared)
            start = prepared.plan.expert_start
            out, own = moe.forward(share, x, ids, probs, expert_start=start)
            total, bound = total + out, bound + own
            shares.append(share)
        rows.append(shares)
    for name, axis in (("up", 1), ("gate", 1), ("down", 2), ("up_bias", 1)):
        matrix = whole.matrices().get(name)
        if matrix is not None:
            parts = [torch.cat([s.matrices()[name] for s in shares], axis) for shares in rows]
            assert torch.equal(torch.cat(parts), matrix), name
    assert ((total - want).abs() <= bound).all()
    assert total.isfinite().all() and total.abs().max() > 0


def _as_mxfp4(weights):
    from kernels.reference.quantize import downcast_to_mxfp

    made = {}
    for name in ("w13", "w2"):
        made[f"{name}_weight"], made[f"{name}_scale"], _ = downcast_to_mxfp(
            weights.tensors()[f"{name}_weight"], 2
        )
    return replace(weights, **made, format="mxfp4")


def test_activation_scales_round_activations_to_nvfp4():
    x = torch.tensor([[0.0, 0.26, 0.74, 1.0, 1.25, 2.5, 5.0, 6.0] * 2], dtype=torch.float64)
    scale = torch.tensor(1.0, dtype=torch.float64)  # amax 6 gives block scale 1
    want = [0.0, 0.5, 0.5, 1.0, 1.0, 2.0, 4.0, 6.0] * 2
    assert moe.fake_quant_nvfp4(x, scale).tolist() == [want]
    assert moe.fake_quant_nvfp4(torch.zeros(1, 20, dtype=torch.float64), scale).tolist() == [
        [0.0] * 20
    ]
    layer = replace(plain("silu"), a13_scale=torch.tensor(0.01), a2_scale=torch.tensor(0.05))
    x, ids, probs = routed()
    without, _ = moe.forward(layer, x, ids, probs)
    rounded, _ = moe.forward(layer, x, ids, probs, quantize_activations=True)
    assert not torch.equal(without, rounded)
    assert (without - rounded).abs().max() < 0.5 * without.abs().max()


@pytest.mark.parametrize("path", ["nvfp4_cutedsl", "nvfp4_trtllm", "nvfp4_cutlass"])
def test_the_prepared_layer_rounds_activations_as_the_checkpoint_layer_does(path):
    weights = synthetic(3, 256, 128, "silu", "nvfp4")
    whole = moe.dense(weights)
    served = readback.dense_from_prepared(prepare(path, weights, target="sm100"))
    for name in ("a13_scale", "a2_scale"):
        assert torch.equal(whole.matrices()[name], served.matrices()[name])
    x, ids, probs = routed(hidden=256, experts=3)
    # equal matrices of equal shape, so equal sums and equal roundings
    one, two = (
        moe.forward(d, x, ids, probs, quantize_activations=True)[0] for d in (whole, served)
    )
    assert torch.equal(one, two)
