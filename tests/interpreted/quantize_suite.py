"""Fused quantizers against the reference: on a GPU as compiled, elsewhere under the interpreter.

`tests/test_fused_quantize.py` runs this file in a process of its own, because triton decides at
import whether it interprets. By hand: TRITON_INTERPRET=1 python -m pytest and this file's path.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels import formats
from kernels.errors import LayoutError
from kernels.fused import quantize as fused
from kernels.quantize_task import SCALE_ROUNDING
from kernels.reference import quantize as reference

GOLDEN = Path(__file__).parents[1] / "golden" / "mxfp4_quantize_h200.npz"
CASES = [key.removesuffix("_bits") for key in np.load(GOLDEN).files if key.endswith("_bits")]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
QUICK = settings(deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)

# The interpreter computes with numpy, which warns of overflow to infinity where a GPU is silent.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def same(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal bytes, shape and strides; a failure says how many differ, where first, and both."""
    got = got.cpu()
    assert got.shape == expected.shape and got.dtype == expected.dtype
    if got.dtype == torch.float32:
        got = torch.where(got.isnan(), torch.nan, got)
        expected = torch.where(expected.isnan(), torch.nan, expected)
    kind = torch.int32 if got.dtype == torch.float32 else torch.uint8
    a, b = got.contiguous().view(kind), expected.contiguous().view(kind)
    wrong = (a != b).nonzero()
    if len(wrong):
        at = tuple(wrong[0].tolist())
        pytest.fail(f"{len(wrong)} of {a.numel()} differ, first at {at}: {a[at]} for {b[at]}")


@st.composite
def tensors(draw: st.DrawFn, least_axes: int = 1) -> tuple[torch.Tensor, int]:
    """A tensor of random shape, dtype, strides, magnitude and content, and the axis to quantize."""
    axes = draw(st.integers(least_axes, 4))
    axis = draw(st.integers(0, axes - 1))
    shape = [draw(st.integers(1, 5)) for _ in range(axes)]
    shape[axis] = 2 * draw(st.one_of(st.integers(1, 70), st.sampled_from([16, 32, 64])))
    room = [size + draw(st.sampled_from([0, 0, 2])) for size in shape]
    order = draw(st.permutations(range(axes)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    values = torch.randn([room[a] for a in order], generator=generator)
    dtype = draw(st.sampled_from(DTYPES))
    magnitude = draw(st.sampled_from([1.0, 1e-3, 1e-38, 1e-44, 1e30, 1e38]))
    values = (values * (magnitude if dtype != torch.float16 else min(magnitude, 9e3))).to(dtype)
    x = values.permute([order.index(a) for a in range(axes)])
    x = x[tuple(slice(0, size) for size in shape)]
    if draw(st.booleans()):
        bad = draw(st.sampled_from([math.nan, math.inf, -math.inf, -0.0]))
        x.select(axis, draw(st.integers(0, shape[axis] - 1))).fill_(bad)
    return x, axis


def on_device(x: torch.Tensor) -> torch.Tensor:
    """The tensor on the device under test, with its strides."""
    moved = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=DEVICE)
    return moved.copy_(x)


@pytest.mark.parametrize("case", CASES)
def test_every_key_of_the_oracle(case: str) -> None:
    with np.load(GOLDEN) as arrays:
        x, q, s = (torch.from_numpy(arrays[f"{case}_{name}"]) for name in ("bits", "q", "s"))
    x = x.view(torch.bfloat16 if case.startswith("bf16") else torch.float16)
    keep = "vllm" if case.endswith("nonfinite") else "nan"
    axis = 1 if "axis1" in case else -1
    packed, scale, shape = fused.downcast_to_mxfp(x.to(DEVICE), axis, nonfinite=keep)
    same(packed, q)
    same(scale, s)
    assert shape == tuple(s.shape)


@settings(QUICK, max_examples=250)
@given(tensors(), st.sampled_from(list(SCALE_ROUNDING)), st.sampled_from(["nan", "vllm"]))
def test_mxfp4_of_random_tensors(given: tuple[torch.Tensor, int], mode: str, keep: str) -> None:
    x, axis = given
    options = {"scale_rounding": mode, "nonfinite": keep}
    expected = reference.downcast_to_mxfp(x, axis, **options)
    got = fused.downcast_to_mxfp(on_device(x), axis, **options)
    same(got[0], expected[0])
    same(got[1], expected[1])
    assert got[2] == expected[2]
    assert [t.stride() for t in got[:2]] == [t.stride() for t in expected[:2]]


@settings(QUICK, max_examples=100)
@given(tensors(least_axes=2), st.sampled_from([None, 1.0, 0.37, "each"]))
def test_nvfp4_of_random_tensors(given: tuple[torch.Tensor, int], overall: object) -> None:
    x = given[0].movedim(given[1], -1)
    scales = overall
    if overall == "each":
        scales = torch.linspace(0.1, 3.0, x.shape[:-2].numel()).view(x.shape[:-2])
    expected = reference.quantize_nvfp4(x, scales)
    moved = scales.to(DEVICE) if isinstance(scales, torch.Tensor) else scales
    got = fused.quantize_nvfp4(on_device(x), moved)
    for mine, theirs in zip(got, expected, strict=True):
        same(mine, theirs)
    same(fused.dequantize_nvfp4(*got), reference.dequantize_nvfp4(*expected))


def test_nvfp4_of_every_bf16_and_ties_of_every_scale() -> None:
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    every = every[every.isfinite()]
    every = every[torch.randperm(len(every), generator=torch.Generator().manual_seed(0))]
    ties = torch.tensor([tie for tie, _ in formats.E2M1_TIES])
    blocks = torch.zeros(8, 16)
    for row in range(8):  # 6 * scale fixes the block's scale to 1, 1.125, ... 1.875
        scale = 1 + row / 8
        at = (ties * scale).view(torch.int32)
        blocks[row] = torch.cat([at, at + 1, at[:1] - 1, at[:1]]).view(torch.float32)
        blocks[row, 15] = 6 * scale
    below = blocks.clone().view(torch.int32)
    below[:, :7] -= 1
    for x in (every.view(-1, 64), blocks, below.view(torch.float32), -blocks):
        for mine, theirs in zip(
            fused.quantize_nvfp4(x.to(DEVICE), 1.0), reference.quantize_nvfp4(x, 1.0), strict=True
        ):
            same(mine, theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 32, 2), (3, 96, 70), (2, 160, 260)])
def test_mxfp4_across_contiguous_rows(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Whole blocks along axis 1: two rows, an odd number of blocks, rows past a tile's end."""
    generator = torch.Generator().manual_seed(len(shape) + shape[1])
    power = 2.0 ** torch.randint(-20, 12, shape, generator=generator)
    x = (torch.randn(shape, generator=generator) * power).to(dtype)
    x[0, 5, 1], x[-1, 31, 0] = math.nan, -math.inf
    for mine, theirs in zip(
        fused.downcast_to_mxfp(on_device(x), 1)[:2],
        reference.downcast_to_mxfp(x, 1)[:2],
        strict=True,
    ):
        same(mine, theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_nvfp4_of_every_value_in_long_rows(dtype: torch.dtype) -> None:
    """Rows of 4,112 elements with a gap between them, so that none joins the next."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    order = torch.randperm(1 << 16, generator=torch.Generator().manual_seed(1))
    x = torch.zeros(17, 4128, dtype=dtype)[:, :4112]
    x[:16, :4096] = every[order].view(16, 4096)
    for overall in (None, 1.0, 2.5e-3):
        for mine, theirs in zip(
            fused.quantize_nvfp4(on_device(x), overall),
            reference.quantize_nvfp4(x, overall),
            strict=True,
        ):
            same(mine, theirs)


@pytest.mark.parametrize("length", [2, 34, 64, 90])
def test_dequantize_pack_and_unpack(length: int) -> None:
    packed = torch.arange(256, dtype=torch.uint8).repeat(length // 2, 1).t()
    byte = torch.arange(256, dtype=torch.uint8)
    scale = torch.stack([byte.roll(3 * g) for g in range(-(-length // 32))], 1)
    got = fused.dequantize_mxfp4(packed.to(DEVICE), scale.to(DEVICE))
    same(got, reference.dequantize_mxfp4(packed, scale))
    turned = fused.dequantize_mxfp4(packed.t().to(DEVICE), scale.t().to(DEVICE), axis=0)
    same(turned, reference.dequantize_mxfp4(packed.t(), scale.t(), axis=0))
    block = torch.stack([byte.roll(g) for g in range(-(-length // 16))], 1)
    got = fused.dequantize_nvfp4(packed.to(DEVICE), block.to(DEVICE), 0.3)
    same(got, reference.dequantize_nvfp4(packed, block, 0.3))
    codes = fused.unpack_e2m1(packed.to(DEVICE))
    same(codes, reference.unpack_e2m1(packed))
    same(fused.pack_e2m1(codes), packed.contiguous())


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("columns", [256, 257, 2])
def test_merge_global_scales(columns: int, interleaved: bool) -> None:
    """Every byte under ratios of every kind: rows of words, of single bytes, sliced and empty."""
    scale = torch.arange(14 * 6 * columns).view(14, 6, columns).to(torch.uint8)
    pairs = torch.tensor(
        [[1, 1], [0.3, 1], [1, 1e-3], [0, 0], [7.7, 5.5], [1, -0.7], [-2, -1], [0, 1], [-0.0, 2],
         [torch.nan, 1], [torch.inf, 1], [1, -torch.inf], [1e-38, 3e38], [1, 0.999999]]
    )  # fmt: skip
    wide = torch.stack([scale, scale], -1)[..., 1]
    for x in (scale, wide, scale[:, 2:4], scale[:0], scale[:, :0]):
        pair = pairs[: len(x)]
        expected = reference.merge_global_scales(x, pair, interleaved=interleaved)
        on_device = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=DEVICE).copy_(x)
        got = fused.merge_global_scales(on_device, pair.to(DEVICE), interleaved=interleaved)
        same(got[0], expected[0])
        same(got[1], expected[1])


@pytest.mark.parametrize("shape", [(0, 64), (4, 0), (2, 0, 64), (1, 64), (64,), (1, 2), (3, 4096)])
def test_empty_single_rows_and_long_rows(shape: tuple[int, ...]) -> None:
    x = torch.linspace(-7, 7, math.prod(shape)).view(shape).to(torch.bfloat16)
    expected, got = reference.mxfp4_quantize(x), fused.mxfp4_quantize(x.to(DEVICE))
    same(got[0], expected[0])
    same(got[1], expected[1])


@pytest.mark.parametrize("offset", [0, 1, 2, 4])
def test_outputs_given_are_written_whole_and_nothing_beside_them(offset: int) -> None:
    x = torch.randn(3, 5, 96, generator=torch.Generator().manual_seed(offset)).to(torch.float16)
    expected = reference.downcast_to_mxfp(x, -1)
    room = torch.full((3, 7, 61), 0xA5, dtype=torch.uint8, device=DEVICE)
    packed = room[:, 1:6, offset : offset + 48]
    scale = torch.full((5, 3, 3), 0xFF, dtype=torch.uint8, device=DEVICE).transpose(0, 1)
    got = fused.downcast_to_mxfp(x.to(DEVICE), -1, packed, scale)
    assert got[0] is packed and got[1] is scale
    same(packed, expected[0])
    same(scale, expected[1])
    packed.fill_(0xA5)
    assert (room == 0xA5).all()


def test_five_row_axes_that_do_not_merge() -> None:
    x = torch.randn(2, 4, 2, 4, 2, 66)[:, ::2, :, ::2].permute(4, 2, 0, 3, 1, 5)
    expected, got = reference.downcast_to_mxfp(x, -1), fused.downcast_to_mxfp(on_device(x), -1)
    same(got[0], expected[0])
    same(got[1], expected[1])


def test_offsets_past_two_to_the_31() -> None:
    """Rows 2**31 + 64 elements apart; only the pages that are touched exist."""
    step = (1 << 31) + 64
    storage = torch.empty(step + 64, dtype=torch.bfloat16, device=DEVICE)
    x = storage.as_strided((2, 64), (step, 1))
    values = torch.randn(2, 64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    x.copy_(values)
    expected, got = reference.mxfp4_quantize(values), fused.mxfp4_quantize(x)
    same(got[0], expected[0])
    same(got[1], expected[1])


def test_bad_calls_are_the_references() -> None:
    x = torch.zeros(2, 33, dtype=torch.bfloat16, device=DEVICE)
    for call in (fused.downcast_to_mxfp, reference.downcast_to_mxfp):
        with pytest.raises(LayoutError, match="odd"):
            call(x, -1)
        with pytest.raises(LayoutError, match="axis 3"):
            call(x, 3)
