"""Position-coded weights through a whole path: where did each byte of the checkpoint go?

Each byte of a coded tensor says where it stood. Positions need three bytes, so three experts carry
the low, middle and high byte of the same position; position 0 is kept for padding. The layer is
prepared as the real one was, read back through the consumer's index maps, and every position
compared with the one that the plan's arithmetic gives. Values play no part, so repeated or random
bytes cannot hide a fault.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from kernels import pads, readback
from kernels.prepare import prepare
from kernels.prepared import PreparedLayer
from kernels.shard import ShardPlan
from kernels.weights import MoEWeights

PLANES = 3  # bytes of a position: 16 Mi places a matrix
Tensor = torch.Tensor


def misplaced(prepared: PreparedLayer, weights: MoEWeights) -> str:
    """The first byte that is not where the consumer of `prepared` looks for it, or ''.

    weights: gives sizes, row order and device; its values are not used.
    """
    # After quantizing it is the MXFP4 path; shards_equal_whole shows that quantizing and sharding
    # commute.
    path = "mxfp4_triton" if prepared.path == "mxfp4_quantize" else prepared.path
    options = prepared.options | {"ep_size": 1, "ep_rank": 0, "enable_eplb": False}
    layer = prepare(path, coded(weights), target=prepared.target, impl=prepared.impl, **options)
    reads = readback.consumer_of(layer)
    for name, found in readback.fetch_all(layer, reads).items():
        have = found[0].long() if name.endswith("bias") else decode(found)
        want = expected(layer.plan, name, have.shape, reads.rows)
        unequal = have != want
        if unequal.any():
            at = tuple(int(i) for i in torch.unravel_index(unequal.int().argmax(), have.shape))
            width = source_shape(layer.plan, name)[1]
            return (
                f"{name}: {int(unequal.sum())} of {have.numel()} places hold another byte, first "
                f"at row {at[0]}, column {at[1]} of the padded matrix: "
                f"{_place(int(have[at]), width)} instead of {_place(int(want[at]), width)}"
            )
    return ""


def coded(weights: MoEWeights) -> MoEWeights:
    """Weights of the same sizes whose bytes are positions, one byte of it an expert."""
    device, form = weights.w13_weight.device, weights.format
    if form == "bf16":
        _, rows, h = weights.w13_weight.shape
        form, i = "mxfp4", weights.intermediate
        shapes = {
            "w13_weight": (rows, h // 2), "w13_scale": (rows, -(-h // 32)),
            "w2_weight": (h, i // 2), "w2_scale": (h, -(-i // 32)),
        }  # fmt: skip
    else:
        have = weights.tensors()
        names = ("w13_weight", "w13_scale", "w2_weight", "w2_scale")
        shapes = {name: (have[name].shape[1], have[name].shape[2]) for name in names}
    scale_dtype = torch.float8_e4m3fn if form == "nvfp4" else torch.uint8
    tensors: dict[str, Any] = {name: _planes(*shape, device) for name, shape in shapes.items()}
    for name in ("w13_scale", "w2_scale"):
        tensors[name] = tensors[name].view(scale_dtype)
    for name, size in (("w13_bias", weights.w13_weight.shape[1]), ("w2_bias", weights.hidden)):
        positions = torch.arange(1, size + 1, dtype=torch.float32, device=device)
        tensors[name] = positions.repeat(PLANES, 1)
    tensors |= dict.fromkeys(("w13_scale_2", "w2_scale_2", "a13_scale", "a2_scale"))
    return replace(weights, **tensors, format=form)


def decode(planes: Tensor) -> Tensor:
    """[3, n, k] bytes -> int64 [n, k] positions."""
    low, middle, high = (plane.view(torch.uint8).long() for plane in planes)
    return low | middle << 8 | high << 16


def expected(plan: ShardPlan, name: str, shape: torch.Size, rows: str) -> Tensor:
    """int64 [n, k]: the position that each place of the padded matrix should hold, 0 for
    padding."""
    n, k = shape
    count, width = source_shape(plan, name)
    row, column = torch.arange(n), torch.arange(k)
    if name.startswith("w13"):
        row = _w13_source_row(plan, row, rows)
    else:
        row = row.where(row < count, -1)
        if name == "w2_bias" and plan.tp_rank:
            row = torch.full_like(row, -1)
        if name != "w2_bias":
            unit = 2 if name == "w2_weight" else pads.BLOCK[plan.format]
            inside = column < -(-plan.real // unit)
            column = (column + plan.start // unit).where(inside, -1)
    column = column.where(column < width, -1)
    position = row[:, None] * width + column + 1
    return position.where((row >= 0)[:, None] & (column >= 0), 0)


def source_shape(plan: ShardPlan, name: str) -> tuple[int, int]:
    """(rows, columns) of a checkpoint tensor, unsharded."""
    rows, block = plan.parts * plan.intermediate, pads.BLOCK[plan.format]
    return {
        "w13_weight": (rows, plan.hidden // 2),
        "w13_scale": (rows, -(-plan.hidden // block)),
        "w13_bias": (rows, 1),
        "w2_weight": (plan.hidden, plan.intermediate // 2),
        "w2_scale": (plan.hidden, -(-plan.intermediate // block)),
        "w2_bias": (plan.hidden, 1),
    }[name]


def _w13_source_row(plan: ShardPlan, row: Tensor, rows: str) -> Tensor:
    """The checkpoint row of each row that the consumer sees, -1 for padding."""
    half, j = torch.zeros_like(row), row
    if plan.gated:
        p = plan.padded_intermediate
        half, j = (row % 2, row // 2) if rows == "pairs" else (row // p, row % p)
        half = 1 - half if rows == "up|gate" else half
    own = plan.start + j
    source = 2 * own + half if plan.gated and plan.interleaved else own + half * plan.intermediate
    return source.where(j < plan.real, -1)


def _planes(n: int, k: int, device: torch.device) -> Tensor:
    """uint8 [3, n, k]: the low, middle and high byte of 1 + row * k + column."""
    position = torch.arange(1, n * k + 1, dtype=torch.int32, device=device).view(n, k)
    return torch.stack([position >> 8 * plane & 0xFF for plane in range(PLANES)]).to(torch.uint8)


def _place(position: int, width: int) -> str:
    if not position:
        return "padding"
    row, column = divmod(position - 1, width)
    return f"checkpoint row {row}, column {column}"
