"""Fused layout routines against the reference: on a GPU as compiled, elsewhere under the
interpreter.

`tests/test_fused_layouts.py` runs this file in a process of its own, because triton decides at
import whether it interprets. By hand: TRITON_INTERPRET=1 python -m pytest -n 0 and this file's
path. Position codes, not random bytes alone: byte i of a tensor is i in one pass and i >> 8 in the
other, so that no two places can be exchanged unseen.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import kernels
from kernels import catalog
from kernels.catalog import LAYOUTS
from kernels.errors import LayoutError
from kernels.fused.rearrange import rearrange, restore
from kernels.layout import Layout

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
E4M3 = torch.float8_e4m3fn
DTYPES = (torch.uint8, torch.int16, torch.bfloat16, torch.float32, E4M3)
EXAMPLES = 1000 if os.environ.get("CI") else 200
PARTS = 4  # of the catalog's layouts, so that no single test takes minutes of interpreter
# A failing example is printed as drawn: shrinking it would take minutes of interpreter.
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)
QUICK = settings(deadline=None, suppress_health_check=list(HealthCheck), phases=PHASES)
T = torch.Tensor

pytestmark = pytest.mark.timeout(1200)  # a busy machine's interpreter takes its time


def coded(*shape: int, dtype: torch.dtype = torch.uint8, shift: int = 0) -> T:
    """A tensor whose bytes tell their place."""
    size = torch.Size(shape).numel() * dtype.itemsize
    codes = torch.arange(size, dtype=torch.int32).bitwise_right_shift(shift)
    return codes.to(torch.uint8).view(dtype).view(shape)


def laid(x: T, how: str) -> T:
    """The same values in other memory."""
    if how == "dense" or x.numel() == 0:
        return x
    if how == "turned":
        return x.mT.contiguous().mT
    if how == "shared":
        return x[:1].expand(x.shape)
    wide = torch.full((*x.shape[:-2], x.shape[-2] + 3, x.shape[-1] + 5), 0, dtype=torch.uint8)
    wide = wide.repeat_interleave(x.element_size(), -1).view(x.dtype)
    wide[..., 2:-1, 3:-2] = x
    return wide[..., 2:-1, 3:-2]


def same(got: Any, want: Any) -> None:
    """Equal bytes, shapes and dtypes, through tuples; a failure says how many differ and where."""
    if not isinstance(want, T):
        assert len(got) == len(want)
        for a, b in zip(got, want, strict=True):
            same(a, b)
        return
    assert got.shape == want.shape and got.dtype == want.dtype
    plain = torch.contiguous_format  # one element may keep any stride through contiguous()
    a, b = (x.cpu().clone(memory_format=plain).view(-1).view(torch.uint8) for x in (got, want))
    wrong = (a != b).nonzero().flatten()
    assert not len(wrong), (
        f"{len(wrong)} of {len(a)} bytes, first {int(wrong[0])}: {int(a[wrong[0]])} for "
        f"{int(b[wrong[0]])}"
    )


@st.composite
def patterns(draw: st.DrawFn) -> Layout:
    """A layout that nobody wrote: up to two sized axes of n and of k, in any order in storage."""
    sized = {
        name: draw(st.sampled_from([2, 4, 3]))
        for name in draw(st.sets(st.sampled_from("abcd"), max_size=3))
    }
    n = [name for name in "ab" if name in sized]
    k = [name for name in "cd" if name in sized]
    n.insert(draw(st.integers(0, len(n))), "r")
    storage = draw(st.permutations([*n, "s", *k]))
    cut = draw(st.integers(1, len(storage) - 1))
    flip = tuple(name for name in "ab" if sized.get(name) == 2 and draw(st.booleans()))
    tile_n = torch.Size([sized[name] for name in "ab" if name in sized]).numel()
    tile_k = torch.Size([sized[name] for name in "cd" if name in sized]).numel()
    more = draw(st.sampled_from([1, 1, 2]))
    rows, columns = " ".join(storage[:cut]), " ".join(storage[cut:])
    return Layout(
        "drawn", f"({' '.join(n)}) ({' '.join(['s', *k])}) -> ({rows}) ({columns})", sized,
        align=(tile_n * more, tile_k * more), fill=draw(st.sampled_from([0, 0, 0x7F])), flip=flip,
    )  # fmt: skip


@st.composite
def problems(draw: st.DrawFn, layouts: st.SearchStrategy[Layout], most: int) -> tuple[Layout, T]:
    """A layout and a tensor for it: 2 or 3 axes, ragged, of any dtype and strides."""
    layout = draw(layouts)
    dtypes = (torch.uint8,) if layout.bits or layout.fill else DTYPES
    n = draw(st.integers(1, most)) * layout.parts
    k = draw(st.one_of(st.integers(1, most), st.sampled_from([16, 32])))
    if layout.tile == (128, 1):  # else a program a row, half a second: one such shape is in RAGGED
        k = 8 * k
    batch = draw(st.sampled_from([(), (), (1,), (1,), (2,), (0,), (2, 1)]))
    dtype = draw(st.sampled_from(dtypes))
    x = coded(*batch, n, k, dtype=dtype, shift=draw(st.sampled_from([0, 8])))
    how = draw(st.sampled_from(["dense", "sliced", "turned", "shared"]))
    return layout, laid(x, how if batch or how != "shared" else "dense")


@pytest.mark.parametrize("part", range(PARTS))
@settings(QUICK, max_examples=EXAMPLES * 7 // 10 // PARTS)
@given(st.data(), st.booleans())
def test_any_tensor_in_every_layout(part: int, data: st.DataObject, back: bool) -> None:
    layouts = st.sampled_from(list(LAYOUTS.values())[part::PARTS])
    both_ways(*data.draw(problems(layouts, 12)), back)


@settings(QUICK, max_examples=EXAMPLES * 3 // 10)
@given(problems(patterns(), 6), st.booleans())
def test_any_tensor_in_any_layout(problem: tuple[Layout, T], back: bool) -> None:
    both_ways(*problem, back)


def both_ways(layout: Layout, x: T, back: bool) -> None:
    """There equals forward; back, from the reference's storage, is the input again."""
    want = layout.forward(x)
    if back:
        same(restore(layout, want.to(DEVICE), *x.shape[-2:]), x)
    else:
        same(rearrange(layout, x.to(DEVICE)), want)


RAGGED = ((1, 66, 18, 0), (1, 66, 18, 8), (2, 34, 5, 0))


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_ragged_shapes_written_whole_and_nothing_else(name: str) -> None:
    layout = LAYOUTS[name]
    for e, n, k, shift in RAGGED:
        x = coded(e, n, k, shift=shift)
        want = layout.forward(x)
        guarded = torch.full((want.numel() + 128,), 0xFF, dtype=torch.uint8, device=DEVICE)
        out = guarded[64:-64]
        rearrange(layout, x.to(DEVICE), out)
        same(out.view(want.shape), want)
        assert (guarded[:64] == 0xFF).all() and (guarded[-64:] == 0xFF).all()


def twins(routine: str, *args: Any, **kwargs: Any) -> None:
    """Both implementations on the same inputs: equal results, or equal errors; inputs unchanged."""
    on = lambda x: x.to(DEVICE) if isinstance(x, T) else x
    before = [x.clone() if isinstance(x, T) else x for x in args]
    try:
        want = kernels.resolve(routine, "reference")(*args, **kwargs)
    except LayoutError as error:
        with pytest.raises(LayoutError) as caught:
            kernels.resolve(routine, "fused")(*map(on, args), **kwargs)
        assert str(caught.value) == str(error)
        return
    got = kernels.resolve(routine, "fused")(*map(on, args), **kwargs)
    plain = lambda r: [x for x in (r if isinstance(r, tuple) else (r,)) if isinstance(x, T)]
    same(plain(got), plain(want))
    for x, kept in zip(args, before, strict=True):
        if isinstance(x, T):
            same(x, kept)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2])
def test_rows_along_any_axis(dtype: torch.dtype, dim: int) -> None:
    x = coded(4, 12, 8, dtype=dtype, shift=1)
    a, b = (x.clone().to(d) for d in ("cpu", DEVICE))
    small = x[..., :2].contiguous()
    s, t = (small.clone().to(d) for d in ("cpu", DEVICE))
    kernels.resolve("reorder_w1w3_to_w3w1", "reference")(a, s, dim)
    kept = b.data_ptr()
    kernels.resolve("reorder_w1w3_to_w3w1", "fused")(b, t, dim)
    same((b, t), (a, s))
    assert b.data_ptr() == kept
    for size in (1, 2, 3):
        twins("interleave_linear_and_gate", x, size, dim)
        twins("deinterleave_linear_and_gate", x, size, dim)


@pytest.mark.parametrize("activation", ["silu", "swigluoai", "relu2_no_mul", "nonsense"])
def test_cutedsl_layers(activation: str) -> None:
    gated = not activation.endswith("_no_mul")
    for e, h, i in ((2, 96, 80), (1, 256, 128), (2, 512, 64)):
        rows = i * (2 if gated else 1)
        w13, w2 = coded(e, rows, h // 2), coded(e, h, i // 2, shift=3)
        s13, s2 = (coded(e, n, k // 16, shift=1).view(E4M3) for n, k in ((rows, h), (h, i)))
        one = torch.linspace(1, 2, e)
        layer = SimpleNamespace(activation=activation)
        args = (layer, w13, s13, one, one, w2, s2, one, one)
        twins("prepare_nvfp4_moe_layer_for_flashinfer_cutedsl", *args)
        if activation != "nonsense":
            twins("reorder_w13_to_w31_for_flashinfer_cutedsl", activation, w13, s13)
            twins("reorder_w31_to_w13_from_flashinfer_cutedsl", activation, w13, s13)
        twins("align_fp4_moe_weights_for_fi", w13, s13, w2, s2, gated, 48)
        twins("align_fp4_moe_weights_for_fi", w13, s13, w2, s2, not gated, 48)
        twins("align_fp4_moe_hidden_dim_for_fi", w13, s13, w2, s2, 160)
        twins("align_fp4_moe_hidden_dim_for_fi", w13, s13, w2, s2, 7)


def test_errors_of_a_layer_are_the_references() -> None:
    w13, s13, one = coded(1, 64, 48), coded(1, 64, 6).view(E4M3), torch.ones(1)
    w2, s2 = coded(1, 96, 16), coded(1, 96, 2).view(E4M3)
    layer = SimpleNamespace(activation="silu")
    routine = "prepare_nvfp4_moe_layer_for_flashinfer_cutedsl"
    for change in (
        {1: coded(1, 63, 48)}, {2: s13.view(torch.uint8)}, {2: coded(1, 64, 5).view(E4M3)},
        {5: coded(2, 96, 16)}, {6: s2.view(torch.uint8)}, {4: one[:0]},
    ):  # fmt: skip
        args = [layer, w13, s13, one, one, w2, s2, one, one]
        for at, value in change.items():
            args[at] = value
        twins(routine, *args)


@pytest.mark.parametrize("gated", [True, False])
def test_trtllm_layers(gated: bool) -> None:
    for e, h, i in ((2, 256, 128), (1, 128, 64), (1, 96, 64)):
        rows = i * (2 if gated else 1)
        args = (
            coded(e, rows, h // 2), coded(e, h, i // 2, shift=3),
            coded(e, rows, h // 16, shift=1), coded(e, h, i // 16), h, i, e, gated,
        )  # fmt: skip
        twins("prepare_static_weights_for_trtllm_fp4_moe", *args)
    for tile in (128, 64):
        twins("shuffle_rows_for_trtllm", coded(2, 96, 48), tile)
        twins("unshuffle_rows_for_trtllm", coded(2, 96, 48), tile)
        twins("shuffle_rows_for_trtllm", coded(2, 40, 48), tile)


@pytest.mark.parametrize("shape", [(130, 5), (2, 256, 8), (1, 1, 1), (0, 64, 4)])
def test_block_scales(shape: tuple[int, ...]) -> None:
    scale = coded(*shape)
    twins("swizzle_blockscale", scale.view(E4M3))
    twins("swizzle_blockscale", scale)
    twins("nvfp4_block_scale_interleave", scale)
    twins("nvfp4_block_scale_interleave", scale.view(E4M3))
    flat = kernels.nvfp4_block_scale_interleave(scale, impl="reference")
    twins("nvfp4_block_scale_deinterleave", flat, *shape)
    twins("nvfp4_block_scale_deinterleave", flat, *shape[:-1], shape[-1] + 8)
    wide = kernels.swizzle_blockscale(scale.view(E4M3), impl="reference")
    twins("unswizzle_blockscale", wide, *shape[-2:])


@pytest.mark.parametrize("target", ["sm80", "sm90", "sm100", "gfx942", "gfx950", "gfx1250"])
@pytest.mark.parametrize("generation", catalog.GENERATIONS)
def test_mxfp4_of_every_target(target: str, generation: str) -> None:
    for e, n, groups in ((2, 64, 6), (1, 96, 8)):
        value, scale = coded(e, n, groups * 16), coded(e, n, groups, shift=2)
        options = {"target": target, "generation": generation}
        routine = lambda impl: kernels.resolve("swizzle_mxfp4", impl)
        try:
            want = routine("reference")(value, scale, **options)
        except LayoutError as error:
            with pytest.raises(LayoutError) as caught:
                routine("fused")(value.to(DEVICE), scale.to(DEVICE), **options)
            assert str(caught.value) == str(error)
            continue
        got = routine("fused")(value.to(DEVICE), scale.to(DEVICE), **options)
        for a, b in ((got.value, want.value), (got.scale, want.scale)):
            same((a.data, a.storage), (b.data, b.storage))
            assert a.data.stride() == b.data.stride()
            assert (a.layout, a.shape, a.num_warps) == (b.layout, b.shape, b.num_warps)
        assert (got.constraints, got.reason) == (want.constraints, want.reason)
        same(kernels.resolve("unswizzle_mxfp4", "fused")(got), (value, scale))


def test_results_go_into_slices_of_a_whole_layer() -> None:
    """One expert at a time into its final place: equal to all experts at once."""
    e, h, i = 3, 128, 64
    inputs = (
        coded(e, 2 * i, h // 2), coded(e, h, i // 2), coded(e, 2 * i, h // 16),
        coded(e, h, i // 16),
    )  # fmt: skip
    routine = kernels.resolve("prepare_static_weights_for_trtllm_fp4_moe", "fused")
    whole = routine(*(x.to(DEVICE) for x in inputs), h, i, e, True)
    out = tuple(torch.full_like(x.view(torch.uint8), 0xFF).view(x.dtype) for x in whole)
    for at in range(e):
        one = slice(at, at + 1)
        parts = (x[one].to(DEVICE) for x in inputs)
        results = routine(*parts, h, i, 1, True, out=out, experts=one)
        assert all(r.data_ptr() == o[one].data_ptr() for r, o in zip(results, out, strict=True))
    same(out, whole)
    with pytest.raises(LayoutError, match="experts"):
        routine(*(x.to(DEVICE) for x in inputs), h, i, e, True, experts=slice(0, 1))
    with pytest.raises(LayoutError, match="out"):
        routine(*(x.to(DEVICE) for x in inputs), h, i, e, True, out=tuple(o[:1] for o in out))


def test_out_is_written_through_and_checked() -> None:
    x = coded(2, 32, 12)
    out = torch.full((2 * 32 * 12,), 7, dtype=torch.uint8, device=DEVICE)
    shuffle = kernels.resolve("shuffle_rows_for_trtllm", "fused")
    assert shuffle(x.to(DEVICE), out=out) is out
    same(out, kernels.shuffle_rows_for_trtllm(x, impl="reference").flatten())
    for wrong in (out[1:], out.view(torch.int8), out.view(2, -1)[:, ::2]):
        with pytest.raises(LayoutError, match="out"):
            shuffle(x.to(DEVICE), out=wrong)
