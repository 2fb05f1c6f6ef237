"""The weights of one MoE layer as a checkpoint stores them, and a rank's padded share of them.

Shapes: w13_weight [E, rows, H/2] uint8 (bf16: [E, rows, H]), w13_scale [E, rows, ceil(H/block)],
w2_weight [E, H, I/2] uint8 (bf16: [E, H, I]), w2_scale [E, H, ceil(I/block)], w13_bias [E, rows],
w2_bias [E, H]; rows is 2I with a gate (halves gate then up, or pairs where `interleaved`), else I.
MXFP4 scales are e8m0 bytes (uint8), NVFP4 scales e4m3. NVFP4 global scales w13_scale_2 [E] or [E,
2] (gate, up) and w2_scale_2 [E], activation scales a13_scale and a2_scale [E] or [E, 2], all fp32.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields
from functools import lru_cache

import torch

from kernels import activations
from kernels.errors import LayoutError
from kernels.pads import BLOCK
from kernels.shard import Piece, ShardPlan

WEIGHTS = ("w13_weight", "w13_scale", "w2_weight", "w2_scale")
BIASES = ("w13_bias", "w2_bias")  # matrices of one column
PREPARED_MARK = "prepared_layout"  # attribute set on every tensor that is in a backend's form


@dataclass(frozen=True)
class MoEWeights:
    """One layer in checkpoint form; see the module's docstring. Absent tensors are None.

    format: mxfp4, nvfp4 or bf16. interleaved: w13 rows alternate gate, up (gpt-oss). Construction
    raises LayoutError, naming tensor, shape and rule, when the tensors are not of one layer.
    """

    w13_weight: torch.Tensor
    w13_scale: torch.Tensor | None
    w2_weight: torch.Tensor
    w2_scale: torch.Tensor | None
    w13_bias: torch.Tensor | None = None
    w2_bias: torch.Tensor | None = None
    w13_scale_2: torch.Tensor | None = None
    w2_scale_2: torch.Tensor | None = None
    a13_scale: torch.Tensor | None = None
    a2_scale: torch.Tensor | None = None
    format: str = "mxfp4"
    activation: str = "silu"
    interleaved: bool = False

    def __post_init__(self) -> None:
        for name, tensor in self.tensors().items():
            if hasattr(tensor, PREPARED_MARK):
                raise LayoutError(
                    f"MoEWeights: {name} {tuple(tensor.shape)} is in layout "
                    f"{getattr(tensor, PREPARED_MARK)!r} already; start from the checkpoint tensor"
                )
        if self.format not in BLOCK:
            raise LayoutError(f"MoEWeights: format {self.format!r}; known: {', '.join(BLOCK)}")
        if self.interleaved and not self.gated:
            raise LayoutError(
                f"MoEWeights: {self.activation!r} has no gate, so rows cannot interleave"
            )
        e, h, i = self.experts, self.hidden, self.intermediate
        expected = checkpoint_shapes(e, h, i, self.parts, self.format)
        for name, tensor in self.tensors().items():
            if name in expected and tuple(tensor.shape) != expected[name]:
                raise LayoutError(
                    f"MoEWeights: {name} {tuple(tensor.shape)}; want {expected[name]} for "
                    f"{e} experts, hidden {h}, intermediate {i}, {self.format}, {self.activation}"
                )
        missing = [
            n for n in ("w13_scale", "w2_scale") if n in expected and getattr(self, n) is None
        ]
        if missing:
            raise LayoutError(f"MoEWeights: {self.format} weights without {' and '.join(missing)}")

    @property
    def gated(self) -> bool:
        return activations.find(self.activation).gated

    @property
    def parts(self) -> int:
        return 2 if self.gated else 1

    @property
    def experts(self) -> int:
        return self.w13_weight.shape[0]

    @property
    def hidden(self) -> int:
        return self.w2_weight.shape[1]

    @property
    def intermediate(self) -> int:
        return self.w2_weight.shape[2] * (1 if self.format == "bf16" else 2)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor that is present, by name."""
        found = ((name, getattr(self, name)) for name in TENSORS)
        return {name: tensor for name, tensor in found if tensor is not None}


TENSORS = tuple(f.name for f in fields(MoEWeights) if str(f.type).startswith("torch."))


def checkpoint_shapes(
    experts: int, hidden: int, intermediate: int, parts: int, form: str
) -> dict[str, tuple[int, ...]]:
    """Each weight, scale and bias of an unsharded layer, in its own units. parts: 2 with a gate."""
    rows, block, per_byte = intermediate * parts, BLOCK[form], 1 if form == "bf16" else 2
    shapes: dict[str, tuple[int, ...]] = {
        "w13_weight": (experts, rows, hidden // per_byte),
        "w13_scale": (experts, rows, -(-hidden // block)),
        "w2_weight": (experts, hidden, intermediate // per_byte),
        "w2_scale": (experts, hidden, -(-intermediate // block)),
        "w13_bias": (experts, rows),
        "w2_bias": (experts, hidden),
    }
    scaled = form != "bf16"
    return {name: shape for name, shape in shapes.items() if scaled or name[-5:] != "scale"}


def take(
    weights: MoEWeights, plan: ShardPlan, *, pairs: bool = False, borrow: Collection[str] = (),
    strided: bool = False, skip: Collection[str] = (),
) -> dict[str, torch.Tensor]:  # fmt: skip
    """The rank's share, padded with zeros: new tensors, one copy each, the weights unchanged.

    A tensor named in `borrow` whose share is one slice, unpadded and in the order asked for, is a
    view of the checkpoint's memory instead; a contiguous one, unless `strided`. Tensors named in
    `skip` are left out.

    Rows of w13 come as [gate; up], each half padded by itself; with `pairs` they alternate gate, up
    and are padded at the end. w2_bias is the checkpoint's on tp_rank 0 and zero elsewhere, since
    the ranks' outputs are summed. Per-expert scales are sliced to the rank's experts, activation
    scales are not: one value of all experts is what a kernel takes.
    """
    plan.require()
    _check_plan(weights, plan)
    experts = slice(plan.expert_start, plan.expert_start + plan.expert_count)
    sources = weights.tensors()
    taken = {}
    same_rows = not plan.gated or pairs == plan.interleaved
    for name, shape in padded_shapes(plan).items():
        if name not in sources or name in skip:
            continue
        own = sources[name][experts]
        pieces = _pieces(plan).get(name, [])
        if name in borrow and (same_rows or name.startswith("w2")):
            view = _one_slice(own, pieces)
            fits = view is not None and view.shape[1:] == shape
            if view is not None and fits and (strided or view.is_contiguous()):
                taken[name] = view
                continue
        moved = sum(p.length for p in pieces)
        held = pieces and all(
            size == (moved if axis == pieces[0].axis else own.shape[axis])
            for axis, size in enumerate(shape, start=1)
        )
        make = own.new_empty if held else own.new_zeros
        taken[name] = make((plan.expert_count, *shape))
        for piece in pieces:
            _copy(own, taken[name], piece, pairs and plan.gated)
    for name in ("w13_scale_2", "w2_scale_2"):
        if name in sources and name not in skip:
            taken[name] = sources[name][experts].to(torch.float32, copy=True)
    for name in ("a13_scale", "a2_scale"):
        if name in sources and name not in skip:
            taken[name] = sources[name].to(torch.float32, copy=True)
    return taken


@lru_cache(maxsize=256)
def padded_shapes(plan: ShardPlan) -> dict[str, tuple[int, ...]]:
    """Each tensor's shape on a rank, one expert, in the tensor's own units."""
    block, per_byte = plan.block, 1 if plan.format == "bf16" else 2
    rows = plan.parts * plan.padded_intermediate
    return {
        "w13_weight": (rows, plan.padded_hidden // per_byte),
        "w13_scale": (rows, plan.padded_hidden // block),
        "w13_bias": (rows,),
        "w2_weight": (plan.padded_hidden, plan.padded_intermediate // per_byte),
        "w2_scale": (plan.padded_hidden, -(-plan.padded_intermediate // block)),
        "w2_bias": (plan.padded_hidden,),
    }


def share(
    weights: MoEWeights, plan: ShardPlan, name: str, *, pairs: bool = False
) -> torch.Tensor | None:
    """A rank's part of a weight, scale or bias without padding, as a view [experts, parts, rows,
    columns] of the checkpoint's memory: w13 has parts gate and up, or one part of pairs. A bias has
    one column; w2_bias has no rows beyond tp_rank 0. None where rows would have to be woven, which
    no view can.
    """
    own = getattr(weights, name)[plan.expert_start : plan.expert_start + plan.expert_count]
    if name == "w2_bias":
        return own[:, None, : None if plan.tp_rank == 0 else 0, None]
    if name == "w13_bias":
        own = own[..., None]
    elif name.startswith("w2"):
        pieces = _pieces(plan).get(name)
        start, stop = (pieces[0].start, pieces[0].stop) if pieces else (0, 0)
        return own[:, None, :, start:stop]
    start, stop = plan.start, plan.start + plan.real
    if not plan.gated:
        return own[:, None, start:stop]
    if pairs:
        return own[:, None, 2 * start : 2 * stop] if plan.interleaved else None
    if plan.interleaved:
        return own.unflatten(1, (plan.intermediate, 2)).transpose(1, 2)[:, :, start:stop]
    return own.unflatten(1, (2, plan.intermediate))[:, :, start:stop]


@lru_cache(maxsize=256)
def _pieces(plan: ShardPlan) -> dict[str, list[Piece]]:
    """The slices of each tensor that hold anything."""
    found: dict[str, list[Piece]] = {}
    for piece in plan.pieces():
        if piece.length:
            found.setdefault(piece.tensor, []).append(piece)
    return found


def _one_slice(source: torch.Tensor, pieces: list[Piece]) -> torch.Tensor | None:
    """The pieces of one tensor as one view of it, or None where they do not follow each other.

    Gate and up rows that alternate are two pieces of step 2, and one run of rows.
    """
    if not pieces:
        return None
    axis, start, stop = pieces[0].axis, pieces[0].start, max(piece.stop for piece in pieces)
    if sum(piece.length for piece in pieces) != stop - start:
        return None
    return source.narrow(axis, start, stop - start)


def _copy(source: torch.Tensor, into: torch.Tensor, piece: Piece, pairs: bool) -> None:
    """One piece of one tensor; the axes it does not name are copied from their start."""
    part = source.narrow(piece.axis, piece.start, piece.stop - piece.start)
    part = part[(slice(None),) * piece.axis + (slice(None, None, piece.step),)]
    place = into
    if pairs and piece.axis == 1 and piece.part in ("gate", "up"):
        place = into[:, piece.part == "up" :: 2].narrow(1, 0, part.shape[1])
    else:
        place = into.narrow(piece.axis, piece.into, part.shape[piece.axis])
    for axis in range(1, source.ndim):
        if axis != piece.axis:
            place = place.narrow(axis, 0, part.shape[axis])
    place.copy_(part)


def _check_plan(weights: MoEWeights, plan: ShardPlan) -> None:
    """Raise LayoutError when the plan was made for another layer."""
    for what, have, want in (
        ("format", weights.format, plan.format),
        ("activation", weights.activation, plan.activation),
        ("interleaved", weights.interleaved, plan.interleaved),
        ("experts", weights.experts, plan.experts),
        ("hidden", weights.hidden, plan.hidden),
        ("intermediate", weights.intermediate, plan.intermediate),
    ):
        if have != want:
            raise LayoutError(
                f"path {plan.path!r} was planned for {what} {want!r}, but w13_weight "
                f"{tuple(weights.w13_weight.shape)} and w2_weight {tuple(weights.w2_weight.shape)} "
                f"are a layer with {what} {have!r}"
            )
