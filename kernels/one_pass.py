"""The fused form of a layer's preparation: each weight, scale and bias from the checkpoint to its
storage in one pass, whatever the rank's share.

The steps of `kernels.prepare` that copy the share, merge global scales, exchange halves,
interleave, shuffle and swizzle end in one layout of one view (`kernels.weights.share`,
`kernels.fused.share`), so they are one launch a tensor here, and one more for the small tensors;
all of them run side by side. What starts as bf16 is quantized from the same view, and its codes are
laid out. Bytes, shapes, views and refusals are the steps' own. A tensor that no view stands for
goes the steps' way.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from kernels import pads
from kernels.catalog import LAYOUTS
from kernels.layout import round_up
from kernels.quantize_task import SOURCE_DTYPES
from kernels.shard import ShardPlan
from kernels.weights import BIASES, WEIGHTS, padded_shapes, share, take

if TYPE_CHECKING:
    from kernels.prepare import State

DTYPES = {  # what the launches take: weights, scales
    "mxfp4": ((torch.uint8,), (torch.uint8,)),
    "nvfp4": ((torch.uint8,), (torch.float8_e4m3fn,)),
    "bf16": (SOURCE_DTYPES, ()),
}
SMALL = ("w13_scale_2", "w2_scale_2", "a13_scale", "a2_scale")


def steps(state: State) -> dict[str, Callable[[State], None]]:
    """The steps that this layer takes in another way than `prepare.STEPS`; none where some tensor
    needs them one by one."""
    if not _shared(state):
        return {}
    own: dict[str, Callable[[State], None]]
    own = dict.fromkeys(("cutedsl", "trtllm", "cutlass", "swizzle"), _lay_out)
    own |= {"shard_and_pad": _take_the_rest, "quantize": _quantize, "up_first": _up_first}
    scale_2, scale = state.weights.w13_scale_2, state.shares.get("w13_scale")
    if scale_2 is not None and scale_2.ndim == 2:
        if scale is not None and scale.shape[1] == 2:
            own["merge_global_scales"] = _merge_global_scales
        else:
            state.shares.pop("w13_scale", None)  # made anew by that step
            return own
    if _in_one_launch(state):
        own["share_activation_scales"] = _shared_already
    return own


def _shared(state: State) -> bool:
    """Collect each weight and scale as a view of the rank's share; False where that is no help."""
    from kernels.fused.share import share_layout
    from kernels.prepare import PATHS

    plan, path, reads = state.plan, PATHS[state.plan.path], state.reads
    pairs, up_first = reads.rows == "pairs", "up_first" in path.steps and plan.gated
    for name in (*WEIGHTS, *BIASES):
        tensor = getattr(state.weights, name)
        if tensor is None:
            continue  # no bias; or the scales of bf16, which come with its codes
        if name not in BIASES and tensor.dtype not in DTYPES[path.format]["scale" in name]:
            return False  # the steps say what they want
        n, k = _padded(state, name)
        view = share(state.weights, plan, name, pairs=pairs)
        layout, first = reads.layouts[name], up_first and name.startswith("w13")
        sizes = tuple(layout.sizes.items())
        if view is None or share_layout(layout, sizes, view.shape[1], n, k, first) is None:
            if path.format == "bf16" or (first and name not in BIASES):
                return False
            continue
        state.padded[name] = (n, k)
        state.shares[name] = view
    return True


def _padded(state: State, name: str) -> tuple[int, int]:
    """A tensor's rows and columns on the rank before its layout; bf16 is meant as codes."""
    n, k = (*padded_shapes(state.plan)[name], 1)[:2]
    if state.plan.format == "bf16" and name.endswith("weight"):
        k //= 2
    return n, round_up(k, state.reads.scale_pad_k) if name.endswith("scale") else k


def _quantize(state: State) -> None:
    """bf16 shares to codes and scales, read where the checkpoint has them; no padding is quantized:
    it is zeros in either form."""
    for name in ("w13", "w2"):
        view = state.shares[f"{name}_weight"]
        codes, scale, *_ = state.routine("downcast_to_mxfp")(view, view.ndim - 1)
        for part, tensor in (("weight", codes), ("scale", scale)):
            state.shares[f"{name}_{part}"] = tensor
            state.padded[f"{name}_{part}"] = _padded(state, f"{name}_{part}")


def _in_one_launch(state: State) -> bool:
    """Collect the small tensors, if one launch makes all of them: with expert load balancing the
    activation scales are those of a whole group."""
    from kernels.fused.per_expert import taken

    plan, weights = state.plan, state.weights
    if state.options["enable_eplb"] or pads.CONSUMER_FORMAT[plan.path] != "nvfp4":
        return False
    held = {name: x for name in SMALL if (x := getattr(weights, name)) is not None}
    own = slice(plan.expert_start, plan.expert_start + plan.expert_count)
    small = {name: x[own] if name.startswith("w") else x for name, x in held.items()}
    if not small or not all(taken(x) for x in small.values()):
        return False
    state.small = small
    return True


def _take_the_rest(state: State) -> None:
    """What no view stands for is taken as ever, rows [gate; up] or pairs."""
    from kernels.fused.per_expert import small_tensors

    plan = state.plan
    pairs = state.reads.rows == "pairs"
    skip = {*state.shares, *state.small}
    state.tensors = take(state.weights, plan, pairs=pairs, skip=skip)
    if state.small:
        counts = [None if name.startswith("w") else plan.expert_count for name in state.small]
        job = small_tensors(list(state.small.values()), counts)
        state.tensors |= zip(state.small, job.outs, strict=True)
        state.jobs.append(job)
    state.row_order = ("pairs" if pairs else "gate|up") if plan.gated else "plain"
    for name in BIASES:
        if name in state.tensors:
            state.padded[name] = (state.tensors[name].shape[1], 1)


def _merge_global_scales(state: State) -> None:
    """Gate's and up's global scales become the larger of both; the block scales follow in their
    one pass."""
    scales = state.small.get("w13_scale_2", state.tensors["w13_scale_2"])
    state.unmerged = scales.contiguous()
    if not state.small:
        state.tensors["w13_scale_2"] = scales.amax(-1)


def _shared_already(state: State) -> None:
    """The activation scales are one value for all experts as they were taken."""


def _up_first(state: State) -> None:
    """Part of the one pass of a tensor; now only for a bias that was taken."""
    if not state.plan.gated:
        return
    if "w13_bias" in state.tensors:
        bias = state.tensors["w13_bias"]
        state.tensors["w13_bias"] = LAYOUTS["w13_to_w31"].forward(bias[..., None]).squeeze(-1)
    state.row_order = "up|gate"


def _lay_out(state: State) -> None:
    """Every weight, scale and bias from its share to its storage, each byte read and written
    once."""
    from kernels.fused.launch import run
    from kernels.fused.share import share_job
    from kernels.prepare import order_biases

    t, plan, reads = state.tensors, state.plan, state.reads
    nvfp4 = pads.CONSUMER_FORMAT[plan.path] == "nvfp4"
    if not nvfp4:
        o = state.options
        _check_mxfp4(plan, o["num_warps"], o["tp_size"], o["torch_version"], o["generation"])
    jobs = {}
    for name in (*WEIGHTS, *(name for name in BIASES if name in state.shares)):
        layout, up_first = reads.layouts[name], state.row_order == "up|gate" and name[:3] == "w13"
        view = state.shares.get(name)
        if view is None:  # taken, and padded already
            parts = plan.parts if layout.parts > 1 or up_first else 1
            n, k = t[name].shape[1:]
            view = t[name].unflatten(1, (parts, n // parts))
            state.padded[name] = (n, round_up(k, reads.scale_pad_k if "scale" in name else 1))
        n, k = state.padded[name]
        merge = state.unmerged if name == "w13_scale" else None
        jobs[name] = share_job(view, layout, n, k, up_first, merge)
    run([*state.jobs, *jobs.values()])
    order_biases(state)  # those that were taken
    for name, job in jobs.items():
        layout, (n, k) = reads.layouts[name], state.padded[name]
        if name in BIASES:
            t[name] = job.storage.view(-1, n)
        elif nvfp4:
            t[name] = job.storage.view(-1, *layout.padded(n, k))
        else:
            t[name], state.views[name] = job.storage, layout.consumer_view(job.storage, n, k)
    if plan.path == "nvfp4_cutedsl":
        for name in ("w13_scale", "w2_scale"):
            state.views[name] = state.routine("nvfp4_swizzled_scale_to_cutedsl_mma_view")(t[name])


@lru_cache(maxsize=256)
def _check_mxfp4(
    plan: ShardPlan, num_warps: int, tp_size: int, torch_version: str | None, generation: str
) -> None:
    """The refusals of `swizzle_mxfp4`, which looks at shapes alone."""
    from kernels.reference.mxfp4 import check_mxfp4

    shapes = padded_shapes(plan)
    for name in ("w13", "w2"):
        scale = torch.empty(
            (plan.expert_count, *shapes[f"{name}_scale"]), dtype=torch.uint8, device="meta"
        )
        values = scale.repeat_interleave(plan.block // 2, -1)
        check_mxfp4(values, scale, num_warps, plan.target, tp_size, torch_version, generation)
