"""What a routine by itself is tried on, a rank's unpadded share, and the job that tries it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from harness.check import expected
from harness.env import impls
from harness.plan.routines import ROUTINES, Want
from harness.run.job import CPU, Job, Made, Result, bits, size, to_device
from kernels import activations, catalog, select
from kernels.errors import LayoutError
from kernels.layout import round_up
from kernels.pads import BLOCK
from kernels.weights import MoEWeights

T = torch.Tensor


@dataclass(frozen=True)
class Share:
    """tensors: by name, as in a checkpoint, but one rank's. hidden, intermediate: theirs."""

    tensors: dict[str, T]
    activation: str
    interleaved: bool
    experts: int
    hidden: int
    intermediate: int
    target: str
    tp_size: int
    generation: str
    num_warps: int

    def __getitem__(self, name: str) -> T:
        return self.tensors[name]

    @property
    def gated(self) -> bool:
        return activations.find(self.activation).gated

    @property
    def separated(self) -> str:
        """The activation's name for rows that are [gate; up]."""
        return f"{self.activation}_uninterleave" if self.interleaved else self.activation

    @property
    def choice(self) -> select.Choice:
        return select.choose_mxfp4(
            self.target, self.tp_size, self.num_warps, torch.__version__, self.generation
        )

    def bytes(self, name: str) -> T:
        return bits(self[name])

    def plain(self, name: str) -> T:
        """The tensor with rows [gate; up], which NVFP4 layers of these backends have."""
        x = self[name]
        if not (name.startswith("w13") and self.interleaved and x.ndim == 3):
            return x
        rows = bits(x)
        return torch.cat([rows[:, 0::2], rows[:, 1::2]], dim=1).view(x.dtype)

    def padded(self, inner: int, hidden: int) -> dict[str, T]:
        """The four matrices with zeros up to multiples of both sizes, each half by itself."""
        out = {}
        to = -(-self.intermediate // inner) * inner
        wide = -(-self.hidden // hidden) * hidden
        for name in ("w13_weight", "w13_scale", "w2_weight", "w2_scale"):
            x, per = bits(self.plain(name)), 2 if name.endswith("weight") else 16
            if name.startswith("w2"):
                made = x.new_zeros(x.shape[0], wide, to // per)
                made[:, : x.shape[1], : x.shape[2]] = x
            else:
                parts = 2 if self.gated else 1
                made = x.new_zeros(x.shape[0], parts * to, wide // per)
                for part in range(parts):
                    half = x[:, part * self.intermediate : (part + 1) * self.intermediate]
                    made[:, part * to : part * to + half.shape[1], : x.shape[2]] = half
            out[name] = made
        return out

    def codes(self, name: str) -> T:
        return expected.codes(self[name])

    def swizzled(self, name: str) -> T:
        return impls.load("reference", "swizzle_blockscale")(self[name])

    def expected(self, kind: str, *tensors: T) -> expected.Rows:
        return expected.rows_of(kind, *tensors)


def share(cell: dict[str, Any], weights: MoEWeights) -> Share:
    """The rank's whole blocks of the intermediate axis, contiguous and without padding."""
    tp, rank, block = cell["tp_size"], cell["tp_rank"], BLOCK[weights.format]
    if not 0 <= rank < tp:
        raise LayoutError(f"tp_rank={rank} is not one of tp_size={tp} ranks")
    step = round_up(-(-weights.intermediate // block), tp) // tp * block
    start = rank * step
    stop = min(start + step, weights.intermediate)
    if start >= stop:
        raise LayoutError(
            f"tp_rank={rank} of {tp} owns no block: {weights.intermediate} is "
            f"{-(-weights.intermediate // block)} blocks of {block}, {step // block} a rank"
        )
    parts = weights.parts
    rows = torch.arange(start, stop)
    if weights.interleaved:
        rows = torch.stack([2 * rows, 2 * rows + 1], dim=1).flatten()
    elif parts == 2:
        rows = torch.cat([rows, rows + weights.intermediate])
    tensors = {}
    for name, x in weights.tensors().items():
        whole = tp == 1 or x.ndim == 1 or name in ("w2_bias", "w13_scale_2")
        if whole:
            tensors[name] = x.clone() if ROUTINES[cell["path"]["name"]].promise == "in_place" else x
        elif name.startswith("w13"):
            tensors[name] = bits(x)[:, rows].view(x.dtype)
        else:
            per = {"weight": 1 if weights.format == "bf16" else 2, "scale": block}[
                name.split("_")[1]
            ]
            tensors[name] = bits(x)[:, :, start // per : -(-stop // per)].contiguous().view(x.dtype)
    return Share(
        tensors, weights.activation, weights.interleaved, weights.experts, weights.hidden,
        stop - start, cell["hw"]["arch"], tp, cell["generation"], cell["num_warps"],
    )  # fmt: skip


def routine_job(
    cell: dict[str, Any], weights: MoEWeights, impl: str, device: torch.device = CPU
) -> Job:
    """One routine on the rank's unpadded share, on `device`."""
    name = cell["path"]["name"]
    found = activations.find(weights.activation)
    if ROUTINES[name].gated and not found.gated:
        raise LayoutError(
            f"{name}: activation {found.name!r} has no gate, so there is nothing to do"
        )
    rank = share(cell, weights)
    held = rank if device == CPU else replace(rank, tensors=to_device(rank.tensors, device))
    return _job(cell, rank, held, impl)


def _job(cell: dict[str, Any], rank: Share, held: Share, impl: str) -> Job:
    """The routine runs on `held`; what must come out is worked out from `rank`, which holds the
    same bytes."""
    name = cell["path"]["name"]
    routine = ROUTINES[name]
    function = impls.load(impl, name, cell["impl"])

    in_place = routine.promise == "in_place"

    def anew() -> Share:
        """What one run works on: in place, the same bytes in memory of its own."""
        if not in_place:
            return held
        return replace(held, tensors={n: t.clone() for n, t in held.tensors.items()})

    def run() -> Result:
        result = Result({}, decisions={"promise": routine.promise})
        fresh = anew()
        wanted = routine.calls(rank if held is not rank else fresh)
        calls = wanted if held is rank else routine.calls(fresh)
        for call, says in zip(calls, wanted, strict=True):
            outs = call.unpack(function(*call.args, **call.kwargs))
            for want, out in zip(says.wants, outs, strict=True):
                if routine.promise == "view":
                    result.views[want.name] = out
                    out = call.args[0]
                if in_place:
                    result.inputs[want.name] = fresh[want.name]
                result.tensors[want.name] = out
                if want.layout is None and want.rows is not None:
                    result.values[want.name] = want.rows
                else:
                    result.made[want.name] = _wanted(want, out)
        return result

    ready: list[Any] = []  # the calls that are timed, made at the first

    def timed() -> None:
        if not ready:
            ready.extend(routine.calls(anew()))
        for call in ready:
            function(*call.args, **call.kwargs)

    def reads(result: Result) -> int:
        """The tensors among the arguments."""
        given = [x for call in routine.calls(held) for x in (*call.args, *call.kwargs.values())]
        return size(*(x for x in given if isinstance(x, torch.Tensor)))

    again = lambda other: _again(cell, replace(held, tensors=held.tensors | other), impl)
    return Job(held.tensors, run, routine.promise, again, timed, reads)


def _again(cell: dict[str, Any], other: Share, impl: str) -> Job:
    return _job(cell, other, other, impl)


def _wanted(want: Want, out: T) -> Made:
    source = bits(want.source)
    e, n, k = source.shape
    wide = -(-k // want.pad_k) * want.pad_k
    matrix = torch.nn.functional.pad(source, (0, wide - k))
    return Made(
        bits(out).reshape(e, -1), catalog.find(str(want.layout)), n, wide, (n, k),
        lambda: matrix, lambda m, c: matrix[:, m, c],
    )  # fmt: skip
