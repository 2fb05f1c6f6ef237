"""From a checkpoint layer to what one backend consumes on one rank: per path, the steps in their
order.

The order is the contract: shard by whole blocks, pad gate and up each by itself, bring the rows to
the backend's order, shuffle them, swizzle the scales, make the views. Biases and scales follow the
rows of their weight. Reading `PATHS` says which steps a path takes; each step is one short function
below, and the routines they call are resolved by `impl`, so a fused twin or a vendor serves in
their place.

Preparation never writes to its inputs, and preparing a prepared layer is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import torch

import kernels
from kernels import activations, consumers, one_pass, pads, shard
from kernels.catalog import LAYOUTS
from kernels.errors import LayoutError
from kernels.layout import round_up
from kernels.prepared import PreparedLayer
from kernels.weights import MoEWeights, take

__all__ = ["PATHS", "STEPS", "MoEWeights", "Path", "PreparedLayer", "prepare"]

Resolve = Callable[[str, str], Callable[..., Any]]


@dataclass(frozen=True)
class Path:
    """What a path starts from and the steps it takes, by name, in order."""

    format: str
    steps: tuple[str, ...]
    consumer: str


PATHS: dict[str, Path] = {
    "nvfp4_cutedsl": Path(
        pads.FORMAT["nvfp4_cutedsl"],
        ("shard_and_pad", "merge_global_scales", "share_activation_scales", "cutedsl"),
        "FlashInfer CuteDSL grouped GEMM",
    ),
    "nvfp4_trtllm": Path(
        pads.FORMAT["nvfp4_trtllm"],
        ("shard_and_pad", "merge_global_scales", "share_activation_scales", "up_first", "trtllm"),
        "TRT-LLM gen block-scale MoE",
    ),
    "nvfp4_cutlass": Path(
        pads.FORMAT["nvfp4_cutlass"],
        ("shard_and_pad", "merge_global_scales", "share_activation_scales", "up_first", "cutlass"),
        "FlashInfer CUTLASS fused MoE",
    ),
    "mxfp4_triton": Path(
        pads.FORMAT["mxfp4_triton"], ("shard_and_pad", "swizzle"), "triton_kernels matmul_ogs"
    ),
    "mxfp4_quantize": Path(
        pads.FORMAT["mxfp4_quantize"],
        ("shard_and_pad", "quantize", "swizzle"),
        "triton_kernels matmul_ogs",
    ),
}


def prepare(
    path: str,
    weights: MoEWeights,
    *,
    target: str,
    tp_size: int = 1,
    tp_rank: int = 0,
    ep_size: int = 1,
    ep_rank: int = 0,
    impl: str = "reference",
    generation: str = "3.5",
    num_warps: int = 8,
    torch_version: str | None = None,
    per_token: bool = False,
    enable_eplb: bool = False,
    group: Any = None,
    resolve: Resolve | None = None,
) -> PreparedLayer:
    """The whole recipe of a path for rank (tp_rank, ep_rank), from the unsharded layer.

    target, generation, num_warps, torch_version: as `select.choose_mxfp4`. per_token: as
    `shard.plan`. enable_eplb, group: the activation scale is then the maximum over that
    torch.distributed group. impl: reference or fused; `resolve(routine, impl)` may serve others.
    Raises LayoutError, naming tensor, shape and rule, for a layer that is prepared already, of
    another format, or that this path and target cannot serve.
    """
    if isinstance(weights, PreparedLayer):
        raise LayoutError(
            f"prepare({path!r}): this layer was prepared for path {weights.path!r} on "
            f"{weights.target}; prepare from the checkpoint weights, or reload in place with "
            "PreparedLayer.update_"
        )
    plan = shard.plan(
        path, target,
        experts=weights.experts, hidden=weights.hidden, intermediate=weights.intermediate,
        activation=weights.activation, interleaved=weights.interleaved,
        tp_size=tp_size, tp_rank=tp_rank, ep_size=ep_size, ep_rank=ep_rank, per_token=per_token,
    ).require()  # fmt: skip
    options = {
        "tp_size": tp_size, "tp_rank": tp_rank, "ep_size": ep_size, "ep_rank": ep_rank,
        "generation": generation, "num_warps": num_warps, "torch_version": torch_version,
        "per_token": per_token, "enable_eplb": enable_eplb, "group": group, "resolve": resolve,
    }  # fmt: skip
    reads = consumers.reads(
        path, target, weights.activation, tp_size=tp_size, num_warps=num_warps,
        torch_version=torch_version, generation=generation,
    )  # fmt: skip
    state = State(weights, plan, reads, options, impl, resolve or kernels.resolve)
    taken = STEPS | (one_pass.steps(state) if impl == "fused" else {})
    for step in PATHS[path].steps:
        taken[step](state)
    for name, tensor in state.tensors.items():
        if _borrowed(state, tensor):
            state.tensors[name] = tensor.clone()
    held = state.tensors.keys()
    return PreparedLayer(
        path=path, target=target, impl=impl, tensors=state.tensors,
        layouts={name: layout for name, layout in reads.layouts.items() if name in held},
        logical={name: size for name, size in plan.logical().items() if name in held},
        padded=state.padded, views=state.views, row_order=state.row_order,
        constraints=dict(reads.constraints), num_warps=reads.num_warps, plan=plan, options=options,
    )  # fmt: skip


@dataclass
class State:
    """The layer between two steps. tensors hold the rank's share, padded, in the order so far."""

    weights: MoEWeights
    plan: shard.ShardPlan
    reads: consumers.Reads
    options: dict[str, Any]
    impl: str
    resolve: Resolve
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    padded: dict[str, tuple[int, int]] = field(default_factory=dict)
    views: dict[str, torch.Tensor] = field(default_factory=dict)
    row_order: str = "plain"
    shares: dict[str, torch.Tensor] = field(default_factory=dict)
    small: dict[str, torch.Tensor] = field(default_factory=dict)
    jobs: list[Any] = field(default_factory=list)
    unmerged: torch.Tensor | None = None  # global scales of gate and up that are still to be one

    @cached_property
    def checkpoint(self) -> frozenset[int]:
        """Where the checkpoint's memory starts."""
        return frozenset(t.untyped_storage().data_ptr() for t in self.weights.tensors().values())

    def routine(self, name: str) -> Callable[..., Any]:
        return self.resolve(name, self.impl)


def _shard_and_pad(state: State) -> None:
    """Shard by whole blocks and pad each half, in one copy; none where the share is one slice.

    Rows come as [gate; up]; triton's swigluoai epilogue reads gate and up from neighbouring
    columns, so those stay pairs.
    """
    plan = state.plan
    pairs = state.reads.rows == "pairs"
    in_place = ("w13_weight", "w13_scale") if "up_first" in PATHS[plan.path].steps else ()
    borrow = state.weights.tensors().keys() - set(in_place)
    own = state.impl == "fused"  # a vendor's code may want its inputs contiguous
    state.tensors = take(state.weights, plan, pairs=pairs, borrow=borrow, strided=own)
    state.row_order = ("pairs" if pairs else "gate|up") if plan.gated else "plain"
    for name, tensor in state.tensors.items():
        if name.endswith(("weight", "scale", "bias")) and not name.startswith("a"):
            state.padded[name] = (tensor.shape[1], tensor.shape[2] if tensor.ndim == 3 else 1)


def _merge_global_scales(state: State) -> None:
    """One global scale for gate and up: block scales of the smaller half are rescaled, codes
    kept."""
    scale_2 = state.tensors.get("w13_scale_2")
    if scale_2 is None or scale_2.ndim == 1:
        return
    merge = state.routine("merge_global_scales")
    scale, merged = merge(state.tensors["w13_scale"], scale_2)
    state.tensors |= {"w13_scale": scale, "w13_scale_2": merged}


def _share_activation_scales(state: State) -> None:
    """One activation scale for all experts, stored once per expert (no stride of 0)."""
    for name in ("a13_scale", "a2_scale"):
        if name in state.tensors:
            amax = state.routine("amax_for_moe_activation_quant")(
                state.tensors[name], state.options["enable_eplb"], state.options["group"]
            )
            state.tensors[name] = amax.repeat(state.plan.expert_count)


def _up_first(state: State) -> None:
    """Exchange gate and up rows of weight, scale and bias."""
    if not state.plan.gated:
        return
    t = state.tensors
    state.routine("reorder_w1w3_to_w3w1")(t["w13_weight"], t["w13_scale"])
    if "w13_bias" in t:
        t["w13_bias"] = LAYOUTS["w13_to_w31"].forward(t["w13_bias"][..., None]).squeeze(-1)
    state.row_order = "up|gate"


def _cutedsl(state: State) -> None:
    """Up first, interleaved by 64, scales swizzled 128x4; the kernel's MMA view of the scales."""
    t, plan = state.tensors, state.plan
    one = torch.ones(plan.expert_count, device=t["w13_weight"].device)
    layer = SimpleNamespace(activation=_separated(plan.activation), moe_config=None)
    done = state.routine("prepare_nvfp4_moe_layer_for_flashinfer_cutedsl")(
        layer,
        t["w13_weight"], t["w13_scale"], t.get("w13_scale_2", one), t.get("a13_scale", one),
        t["w2_weight"], t["w2_scale"], t.get("w2_scale_2", one), t.get("a2_scale", one),
    )  # fmt: skip
    names = ("w13_weight", "w13_scale", "w13_scale_2", "a13_scale", "w2_weight", "w2_scale",
             "w2_scale_2", "a2_scale")  # fmt: skip
    t |= {name: x for name, x in zip(names, done, strict=True) if name in t}
    order_biases(state)
    for name in ("w13_scale", "w2_scale"):
        state.views[name] = state.routine("nvfp4_swizzled_scale_to_cutedsl_mma_view")(t[name])


def _trtllm(state: State) -> None:
    """Rows interleaved by one and shuffled inside 32, then scales swizzled 128x4."""
    t, plan = state.tensors, state.plan
    names = ("w13_weight", "w13_scale", "w2_weight", "w2_scale")
    done = state.routine("prepare_static_weights_for_trtllm_fp4_moe")(
        t["w13_weight"], t["w2_weight"], t["w13_scale"], t["w2_scale"],
        plan.padded_hidden, plan.padded_intermediate, plan.expert_count, plan.gated,
    )  # fmt: skip
    t |= dict(zip(names, done, strict=True))
    order_biases(state)


def _cutlass(state: State) -> None:
    """Scales swizzled 128x4; weights stay rows of k."""
    for name in ("w13_scale", "w2_scale"):
        state.tensors[name] = state.routine("swizzle_blockscale")(state.tensors[name])
    order_biases(state)


def _quantize(state: State) -> None:
    """bf16 to MXFP4 along k; a rank holds whole blocks, so this equals sharding the quantized
    layer."""
    for name in ("w13", "w2"):
        weight = state.tensors[f"{name}_weight"]
        codes, scale, *_ = state.routine("downcast_to_mxfp")(weight, weight.ndim - 1)
        state.tensors |= {f"{name}_weight": codes, f"{name}_scale": scale}
        for part, tensor in (("weight", codes), ("scale", scale)):
            state.padded[f"{name}_{part}"] = (tensor.shape[1], tensor.shape[2])


def _swizzle(state: State) -> None:
    """Values and scales in the layouts that `select.choose_mxfp4` names for the target."""
    o, pad_k = state.options, state.reads.scale_pad_k
    for name in ("w13", "w2"):
        done = state.routine("swizzle_mxfp4")(
            state.tensors[f"{name}_weight"], state.tensors[f"{name}_scale"], o["num_warps"],
            target=state.plan.target, tp_size=o["tp_size"], torch_version=o["torch_version"],
            generation=o["generation"],
        )  # fmt: skip
        for part, swizzled in (("weight", done.value), ("scale", done.scale)):
            storage, view = swizzled.storage, swizzled.data
            if _borrowed(state, storage):
                storage = storage.clone()
                view = swizzled.layout.consumer_view(storage, *swizzled.shape)
            state.tensors[f"{name}_{part}"], state.views[f"{name}_{part}"] = storage, view
        n, groups = state.padded[f"{name}_scale"]
        state.padded[f"{name}_scale"] = (n, round_up(groups, pad_k))
    order_biases(state)


STEPS: dict[str, Callable[[State], None]] = {
    "shard_and_pad": _shard_and_pad,
    "merge_global_scales": _merge_global_scales,
    "share_activation_scales": _share_activation_scales,
    "up_first": _up_first,
    "cutedsl": _cutedsl,
    "trtllm": _trtllm,
    "cutlass": _cutlass,
    "quantize": _quantize,
    "swizzle": _swizzle,
}


def order_biases(state: State) -> None:
    """Bring the biases to the row order of their weights, a bias being a matrix of one column."""
    for name in ("w13_bias", "w2_bias"):
        if name in state.tensors:
            bias, layout = state.tensors[name], state.reads.layouts[name]
            if not layout.is_plain:
                rows = layout.forward(bias[..., None])
                state.tensors[name] = rows.reshape(bias.shape).contiguous()


def _borrowed(state: State, tensor: torch.Tensor) -> bool:
    """Whether a tensor still is the checkpoint's memory: a reload in place must not write to it."""
    return tensor.untyped_storage().data_ptr() in state.checkpoint


def _separated(activation: str) -> str:
    """The activation's name once its rows are [gate; up]: swigluoai is then `_uninterleave`."""
    found = activations.find(activation)
    return "swigluoai_uninterleave" if found.interleaved else found.name
