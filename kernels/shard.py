"""Which rows and blocks a rank owns, and how far they are padded: pure data, no tensor is touched.

A tensor-parallel rank owns whole scale blocks of the intermediate axis: ceil(blocks / tp_size) of
them, the last rank what is left. So gpt-oss (2880, blocks of 32) at tp_size 4 gives 736, 736, 736,
672, and no block's scale is shared by two ranks. Offsets into the checkpoint come from these
unpadded sizes alone; the padded size only says how much a rank allocates. Gate and up are padded
each by itself, because a kernel splits w13 at the padded half. Expert-parallel ranks own runs of
whole experts, the first ranks one more where they do not divide, as vLLM's determine_expert_map
places them.

`plan` answers ok, padded or refused with the reason, as a value that prints; `ShardPlan.require`
turns a refusal into LayoutError. `pieces` lists every slice that a rank copies.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from kernels import activations, pads
from kernels.errors import LayoutError
from kernels.layout import round_up
from kernels.pads import BLOCK, FORMAT, PadRule


@dataclass(frozen=True)
class Piece:
    """One slice of a checkpoint tensor and its place in the rank's padded tensor.

    source[start:stop:step] along `axis` goes to [into : into + length]. Units are the tensor's own:
    rows for w13, packed bytes or scale groups for the contraction of w2. `part` is gate, up or all.
    """

    tensor: str
    part: str
    axis: int
    start: int
    stop: int
    step: int
    into: int

    @property
    def length(self) -> int:
        return max(0, -(-(self.stop - self.start) // self.step))


@dataclass(frozen=True)
class ShardPlan:
    """What one rank owns of a layer and how it is padded. Sizes are elements, ranges are half open.

    start, real: the rank's range of the intermediate axis. per_rank: rows of a full rank (whole
    blocks). padded_intermediate, padded_hidden: what is allocated. outcome: ok, padded or refused,
    for all ranks of this tp_size together. reason: why it is padded or refused. notes: what else a
    user should know.
    """

    path: str
    target: str
    format: str
    block: int
    activation: str
    interleaved: bool
    experts: int
    hidden: int
    intermediate: int
    tp_size: int
    tp_rank: int
    ep_size: int
    ep_rank: int
    expert_start: int
    expert_count: int
    start: int
    real: int
    per_rank: int
    padded_intermediate: int
    padded_hidden: int
    outcome: str
    reason: str
    notes: tuple[str, ...]
    source: str

    @property
    def gated(self) -> bool:
        return activations.find(self.activation).gated

    @property
    def parts(self) -> int:
        """2 where w13 holds gate and up, 1 where it holds one projection."""
        return 2 if self.gated else 1

    @property
    def ratio(self) -> float:
        """Padded over owned rows of a full rank: 384 -> 512 is 1.33."""
        return self.padded_intermediate / self.per_rank

    @property
    def bytes_ratio(self) -> float:
        """Weight bytes that all ranks hold over those of the checkpoint: every overhead
        together."""
        held = self.tp_size * self.padded_intermediate * self.padded_hidden
        return held / (self.intermediate * self.hidden)

    def require(self) -> ShardPlan:
        """The plan itself; LayoutError with the reason where it is a refusal."""
        if self.outcome == "refused":
            raise LayoutError(f"path {self.path!r} on {self.target}: {self.reason}")
        return self

    def pieces(self) -> Iterator[Piece]:
        """Every slice that this rank copies, by checkpoint offsets and places in the padded
        tensors."""
        start, stop = self.start, self.start + self.real
        per_byte = 1 if self.format == "bf16" else 2
        for tensor in ("w13_weight", "w13_scale", "w13_bias"):
            if self.gated and self.interleaved:
                for part, first, into in (("gate", 0, 0), ("up", 1, self.padded_intermediate)):
                    yield Piece(tensor, part, 1, 2 * start + first, 2 * stop, 2, into)
            elif self.gated:
                for part, first, into in (
                    ("gate", 0, 0),
                    ("up", self.intermediate, self.padded_intermediate),
                ):
                    yield Piece(tensor, part, 1, first + start, first + stop, 1, into)
            else:
                yield Piece(tensor, "all", 1, start, stop, 1, 0)
        yield Piece("w2_weight", "all", 2, start // per_byte, -(-stop // per_byte), 1, 0)
        first = start // self.block  # a rank that owns nothing may stand inside a partial block
        yield Piece("w2_scale", "all", 2, first, first - (start - stop) // self.block, 1, 0)
        if self.tp_rank == 0:  # summed over ranks, so one rank alone may add it
            yield Piece("w2_bias", "all", 1, 0, self.hidden, 1, 0)

    def logical(self) -> dict[str, tuple[int, int]]:
        """(n, k) of each tensor that this rank owns, without padding, in the tensor's own units."""
        rows = self.parts * self.real
        return {
            "w13_weight": (rows, self.hidden // 2),
            "w13_scale": (rows, -(-self.hidden // self.block)),
            "w13_bias": (rows, 1),
            "w2_weight": (self.hidden, self.real // 2),
            "w2_scale": (self.hidden, -(-self.real // self.block)),
            "w2_bias": (self.hidden, 1),
        }

    def verdict(self) -> str:
        """ok, padded(p, ratio) or refused(reason): the cell of the truth table."""
        if self.outcome == "refused":
            return f"refused({self.reason})"
        if self.outcome == "ok":
            return "ok"
        hidden = (
            f"; H {self.padded_hidden}, {self.padded_hidden / self.hidden:.2f}x"
            if self.padded_hidden != self.hidden
            else ""
        )
        return (
            f"padded({self.padded_intermediate}, {self.ratio:.2f}x{hidden}; "
            f"bytes {self.bytes_ratio:.2f}x)"
        )

    def __str__(self) -> str:
        lines = [
            f"{self.path} on {self.target}, {self.format}, {self.activation}: {self.verdict()}",
            f"  tp {self.tp_rank}/{self.tp_size}: intermediate [{self.start}, "
            f"{self.start + self.real}) of {self.intermediate}, {self.real} real in "
            f"{self.padded_intermediate} allocated"
            f"{' for each of gate and up' if self.gated else ''}",
            f"  ep {self.ep_rank}/{self.ep_size}: experts [{self.expert_start}, "
            f"{self.expert_start + self.expert_count}) of {self.experts}",
            f"  hidden {self.hidden} in {self.padded_hidden}",
        ]
        if self.outcome == "padded":
            lines.append(f"  why: {self.reason} ({self.source})")
        return "\n".join(lines + [f"  note: {note}" for note in self.notes])


@lru_cache(maxsize=1024)
def plan(
    path: str,
    target: str,
    *,
    experts: int,
    hidden: int,
    intermediate: int,
    activation: str,
    interleaved: bool | None = None,
    tp_size: int = 1,
    tp_rank: int = 0,
    ep_size: int = 1,
    ep_rank: int = 0,
    per_token: bool = False,
) -> ShardPlan:
    """What rank (tp_rank, ep_rank) owns of a layer with these unsharded sizes, and how it is
    padded.

    interleaved: rows of w13 alternate gate, up (default: as checkpoints of this activation store
    them). per_token: activations are quantized with per-token scales (a wider hidden tile for
    TRT-LLM without a gate). A shape or target that the path cannot serve gives a plan with outcome
    refused; a question that makes no sense (unknown path, rank outside its group) raises
    LayoutError.
    """
    rule = pads.rule(path, target, activation)
    for name, size in (("experts", experts), ("hidden", hidden), ("intermediate", intermediate)):
        if size < 1:
            raise LayoutError(f"plan: {name}={size}; a layer has at least one")
    for kind, rank, size in (("tp", tp_rank, tp_size), ("ep", ep_rank, ep_size)):
        if not 0 <= rank < size:
            raise LayoutError(
                f"plan: {kind}_rank={rank} is outside the group of {kind}_size={size}"
            )
    block = BLOCK[FORMAT[path]]
    blocks = -(-intermediate // block)
    per_rank = -(-blocks // tp_size) * block
    start = min(tp_rank * per_rank, intermediate)
    real = min(per_rank, intermediate - start)
    spread, extra = divmod(experts, ep_size)
    act = activations.find(activation)
    align, align_hidden = rule.intermediate(act.gated), rule.hidden(activation, per_token)
    padded, padded_hidden = round_up(per_rank, align), round_up(hidden, align_hidden)
    refusal = pads.refusal(path, target) or _shape_refusal(experts, hidden, intermediate, ep_size)
    exact = padded * tp_size == intermediate and padded_hidden == hidden
    return ShardPlan(
        path=path,
        target=target,
        format=FORMAT[path],
        block=block,
        activation=activation,
        interleaved=act.interleaved if interleaved is None else interleaved,
        experts=experts,
        hidden=hidden,
        intermediate=intermediate,
        tp_size=tp_size,
        tp_rank=tp_rank,
        ep_size=ep_size,
        ep_rank=ep_rank,
        expert_start=ep_rank * spread + min(ep_rank, extra),
        expert_count=spread + (ep_rank < extra),
        start=start,
        real=real,
        per_rank=per_rank,
        padded_intermediate=padded,
        padded_hidden=padded_hidden,
        outcome="refused" if refusal else "ok" if exact else "padded",
        reason=refusal
        or ("" if exact else _why(rule, align, align_hidden, per_rank, hidden, block)),
        notes=_notes(rule, blocks, block, tp_size, padded / per_rank),
        source=rule.source,
    )


def _shape_refusal(experts: int, hidden: int, intermediate: int, ep_size: int) -> str:
    """Why no rank of this layer can be prepared, or ''."""
    for name, tensor, size in (
        ("hidden", "w13_weight [E, rows, hidden/2]", hidden),
        ("intermediate", "w2_weight [E, hidden, intermediate/2]", intermediate),
    ):
        if size % 2:
            return (
                f"{tensor}: {name} size {size} is odd, and two e2m1 codes share a byte; "
                "pad the checkpoint to an even size"
            )
    if ep_size > experts:
        return (
            f"w13_weight: {experts} experts over ep_size {ep_size} leave a rank without an expert"
        )
    return ""


def _why(
    rule: PadRule, align: int, align_hidden: int, per_rank: int, hidden: int, block: int
) -> str:
    whys = []
    if per_rank % align:
        whys.append(f"intermediate {per_rank} -> {round_up(per_rank, align)}: {rule.why}")
    if hidden % align_hidden:
        whys.append(f"hidden {hidden} -> {round_up(hidden, align_hidden)}: {rule.why_hidden}")
    return "; ".join(whys) or f"the last rank is short: ranks own whole blocks of {block}"


def _notes(rule: PadRule, blocks: int, block: int, tp_size: int, ratio: float) -> tuple[str, ...]:
    notes = []
    each = -(-blocks // tp_size)
    if (first := -(-blocks // each)) < tp_size:
        empty = f"ranks {first} to {tp_size - 1}" if first < tp_size - 1 else f"rank {first}"
        notes.append(
            f"{empty} of {tp_size} own no block and hold padding only "
            f"({blocks} blocks of {block}, {each} a rank)"
        )
    if ratio > 1.25:
        notes.append(f"over-padded: {ratio:.2f}x the rows that a rank owns")
    return (*notes, *((rule.note,) if rule.note else ()))
