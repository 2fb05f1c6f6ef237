"""Whole layers, fused against the reference: on a GPU as compiled, elsewhere under the interpreter.

`tests/test_prepare.py` runs this file in a process of its own, because triton decides at import
whether it interprets.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from harness.run.source import synthetic
from kernels.errors import LayoutError
from kernels.fused import quantize, rearrange
from kernels.fused.launch import planned, run
from kernels.fused.per_expert import small_tensors
from kernels.prepare import PATHS, prepare
from kernels.prepared import PreparedLayer
from kernels.weights import MoEWeights

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TARGETS = {
    "nvfp4_cutedsl": ("sm100",),
    "nvfp4_trtllm": ("sm100",),
    "nvfp4_cutlass": ("sm100", "sm120"),
    "mxfp4_triton": ("sm90", "sm100", "gfx942", "gfx950", "gfx1250"),
    "mxfp4_quantize": ("sm90", "gfx950"),  # starts as bf16
}
ONE_PASS = [path for path in TARGETS if path != "mxfp4_quantize"]
EXPERTS = 2
# tp_size, tp_rank, and sizes: some that tiles divide, some that need padding on both axes.
RANKS = ((1, 0, 64, 256), (2, 1, 96, 352), (4, 3, 64, 512))

pytestmark = pytest.mark.timeout(900)


def moved(weights: MoEWeights) -> MoEWeights:
    """The same layer on the device under test, with its strides."""
    return replace(weights, **{name: moved_one(x) for name, x in weights.tensors().items()})


def moved_one(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=DEVICE).copy_(x)


def layer(path: str, activation: str, hidden: int, intermediate: int, **more: Any) -> MoEWeights:
    form = PATHS[path].format
    made = synthetic(EXPERTS, hidden, intermediate, activation, form)
    extra: dict[str, Any] = {
        "w13_bias": torch.randn(made.w13_weight.shape[:2]).bfloat16(),
        "w2_bias": torch.randn(EXPERTS, hidden).bfloat16(),
    }
    return replace(made, **extra | more)


def same(got: PreparedLayer, want: PreparedLayer) -> None:
    """Every byte, shape, stride and decision of a prepared layer."""
    assert got.tensors.keys() == want.tensors.keys()
    for kind in ("tensors", "views"):
        for name, right in getattr(want, kind).items():
            mine = getattr(got, kind)[name]
            assert (mine.shape, mine.dtype) == (right.shape, right.dtype), (kind, name)
            assert right.numel() < 2 or mine.stride() == right.stride(), (kind, name)
            plain = torch.contiguous_format
            a, b = (
                x.cpu().clone(memory_format=plain).view(-1).view(torch.uint8) for x in (mine, right)
            )
            assert torch.equal(a, b), f"{kind} {name}: {int((a != b).sum())} of {len(a)} bytes"
    for field in ("padded", "logical", "row_order", "constraints", "num_warps", "plan"):
        assert getattr(got, field) == getattr(want, field), field
    owned = {x.untyped_storage().data_ptr() for x in got.tensors.values()}
    assert len(owned) == len(got.tensors)


def both(weights: MoEWeights, path: str, **options: Any) -> None:
    try:
        want = prepare(path, weights, **options)
    except LayoutError as error:
        with pytest.raises(LayoutError) as caught:
            prepare(path, moved(weights), impl="fused", **options)
        assert str(caught.value) == str(error)
        return
    given = moved(weights)
    got = prepare(path, given, impl="fused", **options)
    same(got, want)
    theirs = {x.untyped_storage().data_ptr() for x in given.tensors().values()}
    assert not theirs & {x.untyped_storage().data_ptr() for x in got.tensors.values()}
    for name, x in weights.tensors().items():
        assert torch.equal(*(t.cpu().view(torch.uint8) for t in (getattr(given, name), x))), name


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("activation", ["silu", "swigluoai", "relu2_no_mul"])
@pytest.mark.parametrize("path", TARGETS)
def test_every_path_and_rank(path: str, activation: str, rank: tuple[int, ...]) -> None:
    tp_size, tp_rank, hidden, intermediate = rank
    weights = layer(path, activation, hidden, intermediate)
    for target in TARGETS[path]:
        both(weights, path, target=target, tp_size=tp_size, tp_rank=tp_rank)


@pytest.mark.parametrize("intermediate", [512, 384])  # of 384, a tile has rows of gate and of up
@pytest.mark.parametrize("path", ONE_PASS)
def test_one_launch_a_tensor(path: str, intermediate: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five tensors, five launches, and nothing but the outputs: no copy of the share. The sixth,
    w2's bias, is zeros beyond the first rank."""
    seen: list[torch.Tensor] = []
    real = rearrange._launch

    def launch(job: rearrange.Job) -> None:
        seen.append(job.x)
        real(job)

    monkeypatch.setattr(rearrange, "_launch", launch)
    two = {} if path == "mxfp4_triton" else {"w13_scale_2": torch.tensor([[1.0, 0.5], [0.25, 3.0]])}
    given = moved(layer(path, "silu", 64, intermediate, **two))
    prepare(path, given, target=TARGETS[path][0], tp_size=2, tp_rank=1, impl="fused")
    theirs = {x.untyped_storage().data_ptr() for x in given.tensors().values()}
    assert len(seen) == 5
    assert {x.untyped_storage().data_ptr() for x in seen} <= theirs


def test_bf16_is_quantized_where_the_checkpoint_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Halves, pairs and columns of a rank are read in place, and only their codes are laid out."""
    seen: list[torch.Tensor] = []
    real = quantize.downcast_to_mxfp

    def downcast(x: torch.Tensor, *args: Any) -> Any:
        seen.append(x)
        return real(x, *args)

    monkeypatch.setattr(quantize, "downcast_to_mxfp", downcast)
    for activation in ("silu", "swigluoai", "relu2_no_mul"):
        given = moved(layer("mxfp4_quantize", activation, 96, 352))
        prepare("mxfp4_quantize", given, target="sm90", tp_size=2, tp_rank=1, impl="fused")
        theirs = {x.untyped_storage().data_ptr() for x in given.tensors().values()}
        assert len(seen) == 2 and {x.untyped_storage().data_ptr() for x in seen} <= theirs
        seen.clear()


class Computed(TorchDispatchMode):
    """The operators of torch that are run and are neither views nor allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not (func.is_view or "empty" in func.name() or "view" in func.name()):
            self.seen.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("path", ONE_PASS)
def test_torch_computes_nothing(path: str) -> None:
    """A launch for each weight, scale and bias, one for the small tensors, and none of torch's."""
    weights = layer(path, "silu", 64, 512)
    if weights.w13_scale_2 is not None:
        weights = replace(weights, w13_scale_2=torch.rand(EXPERTS, 2))
    options = {"target": TARGETS[path][0], "tp_size": 2, "impl": "fused"}
    with planned() as first:
        prepare(path, weights, **options)  # what is worked out once is not of the call
    with planned() as jobs, Computed() as computed:
        prepare(path, weights, **options)
    assert len(first) == len(jobs) == (6 if path == "mxfp4_triton" else 7)
    assert not computed.seen


@pytest.mark.parametrize("path", TARGETS)
def test_rows_stored_otherwise_and_expert_parallel(path: str) -> None:
    """Gate and up in halves where the activation is known for pairs, and in pairs where not."""
    for activation, interleaved in (("swigluoai", False), ("silu", True)):
        weights = layer(path, activation, 64, 256, interleaved=interleaved)
        for target in TARGETS[path][:1]:
            both(weights, path, target=target, tp_size=2, tp_rank=0, ep_size=2, ep_rank=1)


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("activation", ["silu", "swigluoai", "relu2_no_mul"])
@pytest.mark.parametrize("path", ["nvfp4_cutedsl", "nvfp4_trtllm", "nvfp4_cutlass"])
def test_two_global_scales_and_activation_scales(
    path: str, activation: str, rank: tuple[int, ...]
) -> None:
    """One expert whose halves have equal scales, one whose have not."""
    tp_size, tp_rank, hidden, intermediate = rank
    scales = torch.tensor([[1.0, 1.0], [0.25, 3.0]])
    weights = layer(
        path, activation, hidden, intermediate, w13_scale_2=scales,
        w2_scale_2=scales[:, 0].clone(), a13_scale=scales[:, 1].clone(),
        a2_scale=scales[:, 0].clone(),
    )  # fmt: skip
    both(weights, path, target="sm100", tp_size=tp_size, tp_rank=tp_rank)


@pytest.mark.parametrize("generation", ["3.5", "3.8"])
@pytest.mark.parametrize("num_warps", [4, 8])
def test_hopper_of_both_generations(generation: str, num_warps: int) -> None:
    for intermediate in (384, 512):
        weights = layer("mxfp4_triton", "silu", 64, intermediate)
        for target in ("sm90", "gfx950"):
            both(
                weights, "mxfp4_triton", target=target, tp_size=2, tp_rank=1,
                generation=generation, num_warps=num_warps,
            )  # fmt: skip


def test_sliced_checkpoints_and_other_dtypes() -> None:
    """A layer cut from a stack of layers, and scales of a dtype that a path refuses or reads."""
    wide = layer("mxfp4_triton", "silu", 64, 256)
    cut = replace(wide, **{n: torch.stack([x, x, x], 1)[:, 1] for n, x in wide.tensors().items()})
    both(cut, "mxfp4_triton", target="sm90", tp_size=2, tp_rank=1)
    raw = layer("nvfp4_trtllm", "silu", 64, 256)
    assert raw.w13_scale is not None and raw.w2_scale is not None
    as_bytes = replace(
        raw, w13_scale=raw.w13_scale.view(torch.uint8), w2_scale=raw.w2_scale.view(torch.uint8)
    )
    for path in ("nvfp4_trtllm", "nvfp4_cutedsl"):
        both(as_bytes, path, target="sm100", tp_size=2, tp_rank=0)


@pytest.mark.parametrize("count", [1, 2, 300, 513])
def test_small_tensors(count: int) -> None:
    """Rows' maxima and maxima of all, of any strides, NaN and infinities among them; one launch."""
    made = torch.randn(count, 2, generator=torch.Generator().manual_seed(count))
    made[0, 1], made[-1, 0] = torch.inf, -torch.inf
    lost = made.clone()
    lost[count // 2, 0] = torch.nan
    wide = torch.stack([made, lost], 2)[..., 1]
    for tensors in ([made], [made[:, 0], lost], [wide, made[:1], lost[:, 1], made.t().t()]):
        for counts in ([None] * len(tensors), [count + 3] * len(tensors)):
            job = small_tensors([moved_one(x) for x in tensors], counts)
            run([job])
            for mine, x, repeat in zip(job.outs, tensors, counts, strict=True):
                rows = x.amax(1) if x.ndim == 2 else x
                want = rows if repeat is None else x.max().repeat(repeat)
                assert torch.equal(mine.cpu().nan_to_num(7e37), want.nan_to_num(7e37))


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_side_by_side_waits_for_its_inputs_and_is_waited_for() -> None:
    """On a stream of the caller's, behind inputs that arrive late; and in a CUDA graph."""
    first, second = (layer("nvfp4_trtllm", "silu", 256, 512, w13_scale_2=None) for _ in range(2))
    turned = {
        name: x.view(torch.uint8).flip(2).view(x.dtype)
        for name, x in first.tensors().items()
        if x.ndim == 3
    }
    second = replace(second, **turned)
    options: dict[str, Any] = {"target": "sm100", "tp_size": 2, "tp_rank": 1}
    wants = [prepare("nvfp4_trtllm", weights, **options) for weights in (first, second)]
    late = moved(first)
    prepare("nvfp4_trtllm", late, impl="fused", **options)
    own = torch.cuda.Stream()
    for turn in range(20):
        source = moved((first, second)[turn % 2]).tensors()
        torch.cuda.synchronize()
        with torch.cuda.stream(own):
            torch.cuda._sleep(2_000_000)  # about 1 ms
            for name, x in late.tensors().items():
                x.copy_(source[name])
            got = prepare("nvfp4_trtllm", late, impl="fused", **options)
            copies = {name: x.clone() for name, x in got.tensors.items()}
        own.synchronize()
        for name, want in wants[turn % 2].tensors.items():
            assert torch.equal(*(x.cpu().view(torch.uint8) for x in (copies[name], want))), name
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = prepare("nvfp4_trtllm", late, impl="fused", **options)
    for turn in range(4):
        for name, x in late.tensors().items():
            x.copy_((first, second)[turn % 2].tensors()[name])
        graph.replay()
        torch.cuda.synchronize()
        for name, want in wants[turn % 2].tensors.items():
            assert torch.equal(*(x.cpu().view(torch.uint8) for x in (got.tensors[name], want))), (
                name
            )


@pytest.mark.parametrize("path", TARGETS)
def test_a_rank_that_owns_nothing_or_part_of_a_block(path: str) -> None:
    """96 rows in four: the last rank has none; of 88, the third has half a block of 32."""
    for intermediate, rank in ((96, 3), (88, 2)):
        if PATHS[path].format == "nvfp4" and intermediate % 16:
            continue
        for activation in ("silu", "swigluoai"):
            weights = layer(path, activation, 64, intermediate)
            for target in TARGETS[path]:
                both(weights, path, target=target, tp_size=4, tp_rank=rank)
