"""Is a prepared layer right for its consumer? Three checks, each `pass` or what is wrong and where.

- shards_equal_whole: what the ranks hold, decoded and put together, is the layer; no block is cut.
- consumer_reads_it: read by the consumer's own layouts, rows and views, the layer decodes to the
  same matrices, bit for bit, and to the same MoE output within the bound of its rounding.
- order: position-coded weights arrive where the consumer looks for them (see `judge_order`).

None takes a tolerance. Cost is bounded by looking at part of a large layer: few experts and a
hidden size cut to its remainder over a whole tile; the intermediate size and the tensor-parallel
split are always real. A verdict says what it looked at:
`pass (2 of 128 experts, hidden 320 of 2880, intermediate in full)`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch

import kernels
from harness.check import judge_order
from harness.check.judge_compare import difference, merge_fault, on, passed, reduced
from kernels import consumers, moe, pads, readback, shard
from kernels import prepare as preparation
from kernels import weights as checkpoint
from kernels.errors import LayoutError
from kernels.prepared import PreparedLayer
from kernels.weights import MoEWeights

TILE = 256  # hidden sizes are cut to a remainder over this, the widest hidden tile but one
WIDE = 1 << 22  # w13 elements an expert, hidden cut, from which one expert is decoded, not two
TOKENS = 4
Tensor = torch.Tensor


def run(prepared: PreparedLayer, weights: MoEWeights) -> dict[str, str]:
    """The three checks of a layer and the checkpoint weights that it was prepared from."""
    plan = prepared.plan
    return {
        "shards_equal_whole": shards_equal_whole(
            weights, plan.path, target=plan.target, tp_size=plan.tp_size, ep_size=plan.ep_size
        ),
        "consumer_reads_it": consumer_reads_it(prepared, weights),
        "order": order(prepared, weights),
    }


def shards_equal_whole(
    weights: MoEWeights, path: str, *, target: str, tp_size: int = 1, ep_size: int = 1
) -> str:
    """Every rank's padded share, split as a kernel splits it and decoded, joins to the whole
    layer."""
    small = reduced(
        weights, experts=ep_size + weights.experts % ep_size if ep_size > 1 else 2, tile=64
    )
    try:
        ranks = [
            [_share(small, path, target, tp_size, tp, ep_size, ep) for tp in range(tp_size)]
            for ep in range(ep_size)
        ]
        whole = _halves(
            _quantized(_tensors(small), path), small, "pairs" if small.interleaved else ""
        )
    except LayoutError as error:
        return f"fail: {error}"
    for name, want in whole.items():
        axis = {"gate": 1, "up": 1, "gate_bias": 1, "up_bias": 1, "down": 2}.get(name)
        rows = [
            torch.cat([share[name] for share in row], axis)
            if axis
            else torch.stack([share[name] for share in row]).sum(0)  # w2_bias: on one rank only
            for row in ranks
        ]
        if fault := difference(f"{name}, {tp_size} ranks together", torch.cat(rows, 0), want):
            return f"fail: {fault}"
    return passed(small, weights)


def consumer_reads_it(
    prepared: PreparedLayer, weights: MoEWeights, *, num_warps: int | None = None
) -> str:
    """The consumer, run with `num_warps`, finds its layouts, views, matrices, scales and output."""
    try:
        reads = readback.consumer_of(prepared, num_warps)
        if fault := _tags_shapes_views(prepared, reads) or _activation_scales(prepared, weights):
            return f"fail: {fault}"
        small, layer = weights, prepared
        if weights.w13_weight.numel() + weights.w2_weight.numel() > 1 << 20:
            wide = weights.w13_weight.shape[1] * TILE >= WIDE
            small = on(reduced(weights, experts=1 if wide else 2, tile=TILE), _device(prepared))
            options = prepared.options | {"enable_eplb": False, "ep_size": 1, "ep_rank": 0}
            layer = preparation.prepare(
                prepared.path, small, target=prepared.target, impl=prepared.impl, **options
            )
            if fault := _tags_shapes_views(layer, reads):
                return f"fail: {fault}"
        return _values(layer, reads, small) or passed(small, weights)
    except LayoutError as error:
        return f"fail: {error}"


def order(prepared: PreparedLayer, weights: MoEWeights) -> str:
    """Every byte stands where the consumer's index map looks for it: see `judge_order`."""
    small = on(reduced(weights, experts=1, tile=TILE), _device(prepared))
    try:
        fault = judge_order.misplaced(prepared, small)
    except LayoutError as error:
        fault = str(error)
    return f"fail: {fault}" if fault else passed(small, weights, "position codes")


def _share(
    weights: MoEWeights, path: str, target: str, tp_size: int, tp: int, ep_size: int, ep: int
) -> dict[str, Tensor]:
    """One rank's share as halves without padding; LayoutError if the padding is not zero."""
    plan = shard.plan(
        path, target,
        experts=weights.experts, hidden=weights.hidden, intermediate=weights.intermediate,
        activation=weights.activation, interleaved=weights.interleaved,
        tp_size=tp_size, tp_rank=tp, ep_size=ep_size, ep_rank=ep,
    ).require()  # fmt: skip
    rows = consumers.reads(path, target, weights.activation, tp_size=tp_size).rows
    taken = checkpoint.take(weights, plan, pairs=rows == "pairs")
    padded = _halves(_quantized(taken, path), weights, rows if rows == "pairs" else "")
    real, hidden = plan.real, plan.hidden
    keep: dict[str, tuple[slice, ...]] = {
        "gate": (slice(None), slice(real), slice(hidden)),
        "down": (slice(None), slice(hidden), slice(real)),
        "gate_bias": (slice(None), slice(real)),
        "down_bias": (slice(None), slice(hidden)),
    }
    keep |= {"up": keep["gate"], "up_bias": keep["gate_bias"]}
    share = {}
    for name, tensor in padded.items():
        share[name] = tensor[keep[name]]
        # A second pass over `tensor` with the kept part cleared would copy it: count instead.
        extra = int(tensor.count_nonzero()) - int(share[name].count_nonzero())
        if extra:
            raise LayoutError(
                f"{name} of rank {tp} of {tp_size}: {extra} values in its padding are not zero"
            )
    return share


def _tensors(weights: MoEWeights) -> dict[str, Tensor]:
    return dict(weights.tensors())


def _quantized(tensors: dict[str, Tensor], path: str) -> dict[str, Tensor]:
    """For a path that quantizes, the codes and scales in place of the bf16 weights."""
    if pads.FORMAT[path] == "bf16":
        downcast = kernels.resolve("downcast_to_mxfp", "reference")
        for name in ("w13", "w2"):
            codes, scale, *_ = downcast(tensors[f"{name}_weight"], 2)
            tensors |= {f"{name}_weight": codes, f"{name}_scale": scale}
    return tensors


def _halves(tensors: dict[str, Tensor], weights: MoEWeights, rows: str) -> dict[str, Tensor]:
    """Decoded gate, up and down and their biases, fp32, without global scales."""
    form = "mxfp4" if weights.format == "bf16" else weights.format
    decode: Callable[[str], Tensor] = lambda name: moe.decode(
        tensors[f"{name}_weight"], tensors[f"{name}_scale"], form, torch.float32
    )
    gate, up = moe.split_rows(decode("w13"), rows, weights.gated)
    halves = {"gate": gate, "up": up, "down": decode("w2")}
    if "w13_bias" in tensors:
        gate, up = moe.split_rows(tensors["w13_bias"], rows, weights.gated)
        halves |= {"gate_bias": gate, "up_bias": up}
    if "w2_bias" in tensors:
        halves["down_bias"] = tensors["w2_bias"]
    return {name: half for name, half in halves.items() if half is not None}


def _tags_shapes_views(prepared: PreparedLayer, reads: consumers.Reads) -> str:
    """What differs from the consumer's tags, storage sizes and views, or ''."""
    for name, layout in reads.layouts.items():
        if name not in prepared.tensors:
            continue
        storage = prepared.require(name, layout, reads.num_warps)
        n, k = readback.expected_shape(prepared, name, reads)
        rows, cols = layout.storage_shape(n, k)
        want = prepared.plan.expert_count * rows * cols
        if storage.numel() != want:
            return (
                f"{name}: storage {tuple(storage.shape)} holds {storage.numel()} elements; the "
                f"consumer strides over {want}, {prepared.plan.expert_count} x {n} x {k} in layout "
                f"{layout.name!r}"
            )
        if not storage.is_contiguous() or any(not s for s in storage.stride()):
            return f"{name}: storage {tuple(storage.shape)} has strides {storage.stride()}"
        view = prepared.views.get(name)
        if layout.view == "mma_6d" and view is None:
            return (
                f"{name}: the consumer takes a {layout.view} view of the storage, and there is none"
            )
        if (
            view is not None
            and view.untyped_storage().data_ptr() != storage.untyped_storage().data_ptr()
        ):
            return (
                f"{name}: the view {tuple(view.shape)} is a copy; a reload in place would miss it"
            )
    return ""


def _activation_scales(prepared: PreparedLayer, weights: MoEWeights) -> str:
    """Whether a13_scale and a2_scale are the maximum over all experts, once for each local one."""
    for name in ("a13_scale", "a2_scale"):
        source, have = getattr(weights, name), prepared.tensors.get(name)
        if source is None or have is None or prepared.options["enable_eplb"]:
            continue
        want = source.float().max().repeat(prepared.plan.expert_count).cpu()
        if fault := difference(f"{name}, the maximum over all experts", have.cpu(), want):
            return fault
    return ""


def _values(layer: PreparedLayer, reads: consumers.Reads, weights: MoEWeights) -> str:
    """fail: ... where the matrices or the output that the consumer gets are not the
    checkpoint's."""
    source = moe.dense(on(_as_quantized(weights, layer.path), torch.device("cpu")), torch.float64)
    plan, merged = layer.plan, weights.w13_scale_2 is not None and weights.w13_scale_2.ndim == 2
    experts = slice(plan.expert_start, plan.expert_start + plan.expert_count)
    own = slice(plan.start, plan.start + plan.real)
    padded = readback.dense_from_prepared(layer, reads=reads, padded=True)
    got = readback.unpadded(padded, plan).matrices()
    want = {name: t[experts] if t.ndim else t for name, t in source.matrices().items()}
    for name in ("gate", "up", "gate_bias", "up_bias"):
        if name in want:
            want[name] = want[name][:, own]
    want["down"] = want["down"][..., own]
    if plan.tp_rank and "down_bias" in want:
        want["down_bias"] = torch.zeros_like(want["down_bias"])
    for name, matrix in want.items():
        have = got[name]
        merging = merged and name in ("gate", "up")
        check = merge_fault if merging else difference
        if fault := check(name, have, matrix, *([layer.tensors["w13_scale_2"]] if merging else [])):
            return f"fail: {fault}"
        want[name] = have  # equal, or within the bound of the merge: compare the output past it
    rank = replace(source, **cast(Any, want))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(TOKENS, plan.hidden, dtype=torch.float64, generator=generator)
    logits = torch.randn(TOKENS, weights.experts, dtype=torch.float64, generator=generator)
    ids, probs = moe.route(logits, min(2, weights.experts))
    x_padded = torch.nn.functional.pad(x, (0, plan.padded_hidden - plan.hidden))
    out, bound = moe.forward(rank, x, ids, probs, expert_start=plan.expert_start)
    served, served_bound = moe.forward(padded, x_padded, ids, probs, expert_start=plan.expert_start)
    served, served_bound = served[:, : plan.hidden], served_bound[:, : plan.hidden]
    outside = (served - out).abs() > bound + served_bound
    if not bool(outside.any() | served.isnan().any()):
        return ""
    at = tuple(int(i) for i in torch.unravel_index(outside.flatten().int().argmax(), outside.shape))
    return (
        f"fail: MoE output: {int(outside.sum())} of {outside.numel()} values outside the fp64 "
        f"bound, first at token {at[0]}, column {at[1]}: {served[at].item()!r} instead "
        f"of {out[at].item()!r}"
    )


def _as_quantized(weights: MoEWeights, path: str) -> MoEWeights:
    """bf16 weights as the MXFP4 weights that the path makes of them."""
    if pads.FORMAT[path] != "bf16":
        return weights
    tensors: dict[str, Any] = _quantized(_tensors(weights), path)
    return replace(weights, **tensors, format="mxfp4")


def _device(prepared: PreparedLayer) -> torch.device:
    """Where the layer is, which need not be where its checkpoint weights are."""
    return prepared.tensors["w13_weight"].device
