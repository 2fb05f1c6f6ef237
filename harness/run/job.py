"""One piece of work of a cell: a whole layer's preparation, or one routine on a rank's share.

A `Job` knows its inputs, runs one implementation on them, and can say, without asking that code,
where each checkpoint byte must end. `Result.made` pairs each storage with its layout and with the
matrix that the layout was given; `Result.values` are results that are numbers rather than an order
of bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch

from harness.check import expected
from harness.env import impls
from kernels.layout import Layout, round_up
from kernels.pads import BLOCK, FORMAT
from kernels.prepare import prepare
from kernels.prepared import PreparedLayer
from kernels.weights import MoEWeights, take

T = torch.Tensor
At = Callable[[T, T], T]  # element (m, k) of each expert's matrix as it must be: [E, len(m)]
CPU = torch.device("cpu")
_INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(x: T) -> T:
    """The tensor's own memory as integers of its element size: equal bits, equal integers."""
    return x.view(_INTS[x.element_size()])


@dataclass(frozen=True)
class Made:
    """storage [E, elements] in `layout` of an n x k matrix; source() is that matrix [E, n, k], or
    None where it would have to be quantized again; at gives single elements of it from the inputs
    alone, for samples of `lines` rows and columns (of the latter, `depth` elements). real: the (n,
    k) that is no padding."""

    storage: T
    layout: Layout
    n: int
    k: int
    real: tuple[int, int]
    source: Callable[[], T | None]
    at: At
    lines: int = 24
    depth: int = 1 << 30


@dataclass
class Result:
    """What a run gave. tensors: every result by name; views share memory with them. inputs: the
    memory that an in-place routine was handed."""

    tensors: dict[str, T]
    inputs: dict[str, T] = field(default_factory=dict)
    made: dict[str, Made] = field(default_factory=dict)
    values: dict[str, Callable[[T], T]] = field(default_factory=dict)
    views: dict[str, T] = field(default_factory=dict)
    decisions: dict[str, Any] = field(default_factory=dict)
    layer: PreparedLayer | None = None


@dataclass(frozen=True)
class Job:
    """inputs: what may not change, by name. run: one implementation, on those inputs, anew each
    time. promise: see `Routine`. again(inputs): the same job on other memory, for the poison
    checks. timed: the implementation alone, on arguments made before; in place, on one memory.
    reads(result): bytes of the inputs that one call has to read."""

    inputs: dict[str, T]
    run: Callable[[], Result]
    promise: str
    again: Callable[[dict[str, T]], Job]
    timed: Callable[[], object]
    reads: Callable[[Result], int]


def layer_job(
    cell: dict[str, Any], weights: MoEWeights, impl: str, device: torch.device = CPU
) -> Job:
    """The preparation of a whole layer by one path, on `device`; what must come out is worked out
    from `weights` where they are."""
    resolve = impls.resolver(cell["impl"], impl, cell["path"]["name"])
    held = weights if device == CPU else replace(weights, **to_device(weights.tensors(), device))

    def work() -> PreparedLayer:
        return prepare(
            cell["path"]["name"], held, target=cell["hw"]["arch"], tp_size=cell["tp_size"],
            tp_rank=cell["tp_rank"], ep_size=cell["ep_size"], ep_rank=cell["ep_rank"], impl=impl,
            generation=cell["generation"], num_warps=cell["num_warps"], resolve=resolve,
        )  # fmt: skip

    def run() -> Result:
        layer = work()
        made = _made(layer, weights)
        values = {
            name: _per_expert(layer, weights, name)
            for name in layer.tensors
            if name not in layer.layouts
        }
        plan = layer.plan
        decisions = {
            "outcome": plan.outcome, "reason": plan.reason, "notes": list(plan.notes),
            "start": plan.start, "real": plan.real, "padded_intermediate": plan.padded_intermediate,
            "padded_hidden": plan.padded_hidden, "bytes_ratio": round(plan.bytes_ratio, 4),
            "row_order": layer.row_order, "num_warps": layer.num_warps,
            "constraints": dict(layer.constraints), "source": plan.source,
        }  # fmt: skip
        return Result(
            layer.tensors,
            made=made,
            values=values,
            views=layer.views,
            decisions=decisions,
            layer=layer,
        )

    def again(inputs: dict[str, T]) -> Job:
        other = {name: inputs[name] for name in weights.tensors()}
        fixed = {n: getattr(weights, n) for n in ("format", "activation", "interleaved")}
        return layer_job(
            cell, MoEWeights(**({"w13_scale": None, "w2_scale": None} | other | fixed)), impl
        )

    def reads(result: Result) -> int:
        """A rank reads its share of the layer."""
        assert result.layer is not None
        plan = result.layer.plan
        share = plan.real / plan.intermediate * plan.expert_count / plan.experts
        return int(size(*held.tensors().values()) * share)

    return Job(held.tensors(), run, "new", again, work, reads)


def size(*tensors: T) -> int:
    """Bytes of the tensors' elements."""
    return sum(x.numel() * x.element_size() for x in tensors)


def to_device(tensors: Mapping[str, T], device: torch.device) -> dict[str, Any]:
    return {name: x.to(device) for name, x in tensors.items()}


def on_cpu(result: Result) -> Result:
    """The result with its storages on the CPU, where what must be in them is worked out."""
    if all(x.device == CPU for x in result.tensors.values()):
        return result
    made = {name: replace(m, storage=m.storage.cpu()) for name, m in result.made.items()}
    return replace(result, tensors=to_device(result.tensors, CPU), made=made)


def _made(layer: PreparedLayer, weights: MoEWeights) -> dict[str, Made]:
    """Each tensor of a prepared layer with the matrix and the checkpoint elements it must hold."""
    share = cache(lambda: _share(layer, weights))
    merged = weights.w13_scale_2 is not None and weights.w13_scale_2.ndim == 2
    out = {}
    for name, layout in layer.layouts.items():
        storage, (n, k) = layer.tensors[name], layer.padded[name]
        at: At = partial(_origin, layer, weights, name)
        if merged and name == "w13_scale":  # gate and up scales are made one: not checkpoint bytes
            at = lambda m, c: share()["w13_scale"][:, m, c]
        made = Made(
            bits(storage).reshape(storage.shape[0], -1), layout, n, k, layer.logical[name],
            partial(_matrix, share, name), at,
        )  # fmt: skip
        if weights.format == "bf16" and not name.endswith("bias"):
            made = replace(made, source=lambda: None, lines=6, depth=256)
        out[name] = made
    return out


def _matrix(share: Callable[[], dict[str, T]], name: str) -> T:
    return share()[name]


def _share(layer: PreparedLayer, weights: MoEWeights) -> dict[str, T]:
    """The rank's share that went into the layouts, each [E, n, k], by the reference."""
    taken = take(weights, layer.plan, pairs=layer.row_order == "pairs")
    if "w13_scale_2" in taken and taken["w13_scale_2"].ndim == 2:
        merge = impls.load("reference", "merge_global_scales")
        taken["w13_scale"], _ = merge(taken["w13_scale"], taken["w13_scale_2"])
    out = {}
    for name in layer.layouts:
        if name not in taken:
            continue  # the scales of a layer that starts as bf16
        matrix = bits(taken[name])
        matrix = matrix[..., None] if matrix.ndim == 2 else matrix
        if name.startswith("w13") and layer.row_order == "up|gate":
            gate, up = matrix.chunk(2, dim=1)
            matrix = torch.cat([up, gate], dim=1)
        pads = [
            want - have for want, have in zip(layer.padded[name], matrix.shape[1:], strict=True)
        ]
        matrix = torch.nn.functional.pad(matrix, (0, pads[1], 0, pads[0])) if any(pads) else matrix
        out[name] = matrix
    return out


def _origin(layer: PreparedLayer, weights: MoEWeights, name: str, m: T, c: T) -> T:
    """Element (m, c) of the rank's padded matrix, from the checkpoint by shard arithmetic alone.

    Ranks own ceil(blocks / tp_size) whole blocks of the intermediate axis, from rank * that on;
    w13 rows are halves of `padded_intermediate`, or pairs; what lies outside is zero.
    """
    plan, block = layer.plan, BLOCK[weights.format]
    step = round_up(-(-weights.intermediate // block), plan.tp_size) // plan.tp_size * block
    start = min(plan.tp_rank * step, weights.intermediate)
    real = min(step, weights.intermediate - start)
    experts = slice(plan.expert_start, plan.expert_start + plan.expert_count)
    which, part = name.split("_")
    scale = 16 if FORMAT[plan.path] == "nvfp4" else 32
    unit = {"weight": 2, "scale": scale, "bias": 1}[part]  # elements per column
    if which == "w13":
        parts, size = plan.parts, plan.padded_intermediate
        half, row = (m % 2, m // 2) if layer.row_order == "pairs" else (m // size, m % size)
        half = 1 - half if layer.row_order == "up|gate" else half
        row_there = row < real
        at_pair = (
            (start + row) * parts + half
            if weights.interleaved
            else (half * weights.intermediate + start + row)
        )
        columns = 1 if part == "bias" else -(-weights.hidden // unit)
        there, row, col = row_there & (c < columns), at_pair, c
    else:
        columns = 1 if part == "bias" else -(-real // unit)
        there = (m < weights.hidden) & (c < columns)
        there &= part != "bias" or plan.tp_rank == 0
        row, col = m, c + (0 if part == "bias" else start // unit)
    return _checkpoint_at(weights, name, experts, row, col, there)


def _checkpoint_at(weights: MoEWeights, name: str, experts: slice, row: T, col: T, there: T) -> T:
    """Elements (row, col) of a checkpoint tensor as integers, 0 where not `there`."""
    which, part = name.split("_")
    row, col = row.where(there, torch.zeros_like(row)), col.where(there, torch.zeros_like(col))
    if weights.format == "bf16" and part != "bias":
        source = getattr(weights, f"{which}_weight")[experts]
        found = _quantized_at(source, row, col, packed=part == "weight")
    elif part == "bias":
        found = bits(getattr(weights, name)[experts])[:, row]
    else:
        found = bits(getattr(weights, name)[experts])[:, row, col]
    return found * there


def _quantized_at(source: T, row: T, col: T, *, packed: bool) -> T:
    """Packed bytes or scales (row, col) of [E, n, K] quantized to MXFP4 the plain way.

    A small tensor is quantized whole, once; of a large one only the blocks that are looked at.
    """
    groups = -(-source.shape[2] // 32)
    if source.numel() <= 1 << 22:
        codes, scale = _quantized_whole(source)
        at_row, first = row, 2 * col
    else:
        block = row * groups + (col // 16 if packed else col)
        blocks, place = block.unique(return_inverse=True)
        columns = (blocks % groups)[:, None] * 32 + torch.arange(32)
        inside = columns < source.shape[2]
        values = source[:, (blocks // groups)[:, None], columns.where(inside, 0 * columns)]
        codes, scale = expected.mxfp4(values * inside)
        at_row, first, col = place, 2 * (col % 16), torch.zeros_like(col)
    if not packed:
        return scale[:, at_row, col]
    return codes[:, at_row, first] + codes[:, at_row, first + 1] * 16


_whole: dict[int, tuple[T, tuple[T, T]]] = {}


def _quantized_whole(source: T) -> tuple[T, T]:
    """`expected.mxfp4` of a tensor, kept for the two that were asked for last."""
    key = source.data_ptr()
    if key not in _whole or _whole[key][0].shape != source.shape:
        while len(_whole) > 1:
            del _whole[next(iter(_whole))]
        _whole[key] = (source, expected.mxfp4(source))  # holding it keeps its address its own
    return _whole[key][1]


def _per_expert(layer: PreparedLayer, weights: MoEWeights, name: str) -> Callable[[T], T]:
    """A tensor without a layout: a scale per expert, or one for all that each expert holds."""
    plan, tensor = layer.plan, getattr(weights, name)
    if name.startswith("a"):
        return lambda rows: expected.rows_of("amax", tensor)(rows).repeat(plan.expert_count)
    local = tensor[plan.expert_start : plan.expert_start + plan.expert_count].float()
    return lambda rows: local if local.ndim == 1 else local.amax(dim=1)
