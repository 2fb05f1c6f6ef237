"""Number formats over their whole domains: all codes, all bytes, all ties and their neighbours."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise

import pytest
import torch

from kernels import formats
from kernels.errors import LayoutError
from kernels.formats import MXFP4, NVFP4

CODES = torch.arange(16, dtype=torch.uint8)
BYTES = torch.arange(256, dtype=torch.uint8)


def bits(x: torch.Tensor) -> list[int]:
    return x.view(torch.int32).tolist()


def neighbours(value: float, dtype: torch.dtype) -> tuple[float, float]:
    """The next numbers of a dtype below and above a positive value that it holds."""
    whole = torch.tensor([value], dtype=dtype)
    raw = whole.view(torch.int32 if dtype == torch.float32 else torch.int16)
    return (raw - 1).view(dtype).item(), (raw + 1).view(dtype).item()


def test_e2m1_is_the_table_of_the_specification() -> None:
    values = formats.decode_e2m1(CODES)
    expected = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    assert values[:8].tolist() == expected
    assert values[8:].tolist() == [-value for value in expected]
    assert math.copysign(1.0, values[8].item()) == -1.0


def test_e2m1_decode_then_encode_is_the_identity() -> None:
    assert formats.encode_e2m1(formats.decode_e2m1(CODES)).tolist() == list(range(16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tie", "even"), formats.E2M1_TIES)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_e2m1_ties_go_to_even_and_neighbours_to_the_nearest(
    tie: float, even: float, sign: float, dtype: torch.dtype
) -> None:
    below, above = neighbours(tie, dtype)
    values = torch.tensor([below, tie, above], dtype=dtype) * sign
    got = (formats.decode_e2m1(formats.encode_e2m1(values)) * sign).tolist()
    lower = max(m for m in formats.E2M1_MAGNITUDES if m < tie)
    upper = min(m for m in formats.E2M1_MAGNITUDES if m > tie)
    assert got == [lower, even, upper]
    index = formats.E2M1_MAGNITUDES.index(even)
    assert index % 2 == 0 and even in (lower, upper)


def test_e2m1_ties_are_the_halfway_points() -> None:
    m = formats.E2M1_MAGNITUDES
    assert [tie for tie, _ in formats.E2M1_TIES] == [(a + b) / 2 for a, b in pairwise(m)]


def test_e2m1_saturates_and_keeps_signs() -> None:
    values = torch.tensor([6.0, 7.0, 1e38, math.inf, -math.inf, -0.0, 0.0, math.nan])
    assert formats.encode_e2m1(values).tolist() == [7, 7, 7, 7, 15, 8, 0, 7]
    assert formats.encode_e2m1(-torch.tensor([math.nan])).tolist() == [15]


def test_e2m1_is_nearest_for_every_bf16() -> None:
    values = torch.arange(1 << 15, dtype=torch.int16).view(torch.bfloat16)
    values = values[values.float() < 7.0]
    got = formats.decode_e2m1(formats.encode_e2m1(values)).tolist()
    for value, chosen in zip(values.tolist(), got, strict=True):
        distances = [abs(Fraction(value) - Fraction(m)) for m in formats.E2M1_MAGNITUDES]
        assert abs(Fraction(value) - Fraction(chosen)) == min(distances)


def test_pack_puts_the_even_element_low_and_unpack_undoes_it() -> None:
    assert formats.pack_e2m1(torch.tensor([1, 2, 15, 0], dtype=torch.uint8)).tolist() == [0x21, 0xF]
    codes = formats.unpack_e2m1(BYTES.view(16, 16))
    assert codes.shape == (16, 32) and int(codes.max()) == 15
    assert torch.equal(formats.pack_e2m1(codes), BYTES.view(16, 16))
    assert torch.equal(formats.pack_e2m1(codes.t().contiguous().t()), BYTES.view(16, 16))


def test_e8m0_every_byte() -> None:
    values = formats.decode_e8m0(BYTES)
    assert all(values[b].item() == 2.0 ** (b - 127) for b in range(255))
    assert math.isnan(values[255].item())
    assert bits(values[:1]) == [0x00400000], "byte 0 is the subnormal 2**-127, not zero"
    assert torch.equal(
        formats.decode_e8m0(BYTES.view(torch.float8_e8m0fnu)).view(torch.int32),
        values.view(torch.int32),
    )


def test_e4m3_every_byte() -> None:
    values = formats.decode_e4m3(BYTES).tolist()
    for byte, value in enumerate(values):
        sign = -1 if byte >> 7 else 1
        exponent, mantissa = (byte >> 3) & 15, byte & 7
        if exponent == 15 and mantissa == 7:
            assert math.isnan(value)
        elif exponent:
            assert value == sign * math.ldexp(8 + mantissa, exponent - 10)
        else:
            assert value == sign * math.ldexp(mantissa, -9)


def test_e4m3_encodes_every_byte_tie_and_neighbour() -> None:
    grid = formats.decode_e4m3(BYTES[:127])
    assert torch.equal(formats.encode_e4m3(grid).view(torch.uint8), BYTES[:127])
    assert torch.equal(formats.encode_e4m3(-grid).view(torch.uint8), BYTES[128:255])
    for low in range(126):
        tie = (grid[low] + grid[low + 1]).item() / 2
        below, above = neighbours(tie, torch.float32)
        got = formats.encode_e4m3(torch.tensor([below, tie, above])).view(torch.uint8).tolist()
        assert got == [low, low if low % 2 == 0 else low + 1, low + 1]


def test_e4m3_saturates_before_the_cast() -> None:
    values = torch.tensor([448.0, 463.9, 464.0, 480.0, 1e9, math.inf, -math.inf, math.nan])
    got = formats.encode_e4m3(values).view(torch.uint8).tolist()
    assert got[:7] == [0x7E] * 6 + [0xFE] and got[7] & 0x7F == 0x7F


@pytest.mark.parametrize("length", [2, 30, 32, 34, 64, 90])
def test_dequantize_mxfp4_is_code_times_power_of_two(length: int) -> None:
    groups = MXFP4.scales(length)
    packed = torch.randint(0, 256, (255, length // 2), dtype=torch.uint8)
    scale = torch.stack([torch.arange(255, dtype=torch.uint8).roll(g) for g in range(groups)], 1)
    values = formats.dequantize_mxfp4(packed, scale)
    codes = formats.decode_e2m1(formats.unpack_e2m1(packed)).double()
    power = torch.exp2(scale.repeat_interleave(32, 1)[:, :length].double() - 127)
    assert torch.equal(values, (codes * power).float())
    turned = formats.dequantize_mxfp4(packed.t(), scale.t(), axis=0)
    assert torch.equal(turned.t(), values)


def test_dequantize_mxfp4_of_scale_255_is_nan_and_only_there() -> None:
    packed = torch.zeros(1, 32, dtype=torch.uint8)
    values = formats.dequantize_mxfp4(packed, torch.tensor([[255, 127]], dtype=torch.uint8))
    assert values[0, :32].isnan().all() and (values[0, 32:] == 0).all()


def test_dequantize_nvfp4_multiplies_block_and_global_scale() -> None:
    packed = torch.randint(0, 256, (2, 127, 20), dtype=torch.uint8)
    scale = torch.stack([BYTES[:127].roll(g) for g in range(3)], 1).expand(2, 127, 3)
    overall = torch.tensor([0.37, 3.0])
    values = formats.dequantize_nvfp4(packed, scale.view(torch.float8_e4m3fn), overall)
    codes = formats.decode_e2m1(formats.unpack_e2m1(packed)).double()
    block = formats.decode_e4m3(scale).repeat_interleave(16, 2)[..., :40].double()
    assert torch.equal(values, (codes * block * overall[:, None, None].double()).float())
    assert torch.equal(formats.dequantize_nvfp4(packed, scale, 1.0), (codes * block).float())


def test_descriptors() -> None:
    assert (MXFP4.block, MXFP4.scales(90), NVFP4.block, NVFP4.scales(90)) == (32, 3, 16, 6)
    with pytest.raises(AttributeError):
        MXFP4.block = 16  # type: ignore[misc]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: formats.pack_e2m1(torch.zeros(3, dtype=torch.uint8)), "two codes fill a byte"),
        (lambda: formats.pack_e2m1(torch.zeros(4)), "float32"),
        (lambda: formats.unpack_e2m1(torch.tensor(3, dtype=torch.uint8)), "at least one axis"),
        (lambda: formats.dequantize_mxfp4(BYTES[None], BYTES[None, :15]), "give (1, 16)"),
        (lambda: formats.dequantize_mxfp4(BYTES[None], BYTES[None, :16].float()), "e8m0"),
        (lambda: formats.dequantize_mxfp4(BYTES[None], BYTES[None, :16], axis=2), "axis 2"),
        (lambda: formats.dequantize_nvfp4(BYTES[None], BYTES[None, :16]), "give (1, 32)"),
        (
            lambda: formats.dequantize_nvfp4(BYTES[None], BYTES[None, :32], torch.ones(2)),
            "one per matrix",
        ),
    ],
)
def test_bad_input_names_tensor_and_rule(call: object, words: str) -> None:
    with pytest.raises(LayoutError) as error:
        call()  # type: ignore[operator]
    assert words in str(error.value)
