"""Public faults of FP4 quantizers, one test each, by its number in the list of known faults."""

from __future__ import annotations

import math

import pytest
import torch

from kernels import formats
from kernels.reference.quantize import downcast_to_mxfp, quantize_nvfp4

ONES = torch.ones(32)


def encode(*values: float) -> list[float]:
    return formats.decode_e2m1(formats.encode_e2m1(torch.tensor(values))).tolist()


def fp32(bits: int) -> float:
    return torch.tensor([bits], dtype=torch.int32).view(torch.float32).item()


def scale_bytes(x: torch.Tensor, mode: str = "even") -> list[int]:
    return downcast_to_mxfp(x, -1, scale_rounding=mode)[1].flatten().tolist()


def test_case_39_ties_go_to_even() -> None:
    """ROCm/aiter#974: half-way values rounded up; the same in a second copy and in the tests."""
    assert encode(0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0) == [0, 1, 1, 2, 2, 4, 4]
    assert encode(-0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5.0) == [0, -1, -1, -2, -2, -4, -4]
    values = torch.tensor(
        [
            0.3463, -0.0499, 0.3794, -2.3764, 0.3960, 0.5989, -0.6250, -0.4239,
            -0.6192, 0.2761, -0.3746, 0.1462, 0.5216, -0.5194, -0.8497, -0.8237,
            0.5145, 0.3508, 0.0298, -0.3462, 0.3917, 0.1096, 1.4494, 1.7009,
            -0.5473, -2.0851, 1.8099, 0.3587, 1.4622, -2.3143, 0.3412, -0.8931,
        ]
    )  # fmt: skip
    packed, scale, _ = downcast_to_mxfp(values, -1)
    assert scale.tolist() == [126]
    assert packed.tolist() == [
        129, 226, 34, 170, 26, 25, 162, 187, 18, 144, 2, 85, 234, 22, 229, 193
    ]  # fmt: skip


def test_case_40_sticky_bits_of_subnormals() -> None:
    """Bits shifted out below .25 decide: 0x3F000003 at scale 128 is a little over .25."""
    x = torch.zeros(32)
    x[0], x[1], x[2] = 8.0, fp32(0x3F000000), fp32(0x3F000003)
    packed, scale, _ = downcast_to_mxfp(x, -1)
    assert scale.tolist() == [128]
    assert formats.decode_e2m1(formats.unpack_e2m1(packed))[:3].tolist() == [4.0, 0.0, 0.5]
    assert encode(0.25000006) == [0.5]
    codes = torch.arange(16, dtype=torch.uint8)
    assert torch.equal(formats.encode_e2m1(formats.decode_e2m1(codes)), codes)


def test_case_42_values_round_once() -> None:
    """compressed-tensors#822: fp32 2.500004 through bf16 is the tie 2.5 and becomes 2."""
    assert encode(2.500004, 0.25000006) == [3.0, 0.5]
    through_bf16 = torch.tensor([2.500004, 0.25000006]).to(torch.bfloat16)
    assert formats.decode_e2m1(formats.encode_e2m1(through_bf16)).tolist() == [2.0, 0.0]
    x = ONES * 6
    x[0] = 2.500004
    packed, scale, _ = downcast_to_mxfp(x, -1)
    assert scale.item() == 127 and int(packed[0]) & 15 == 5
    nv_packed, nv_scale, _ = quantize_nvfp4(x[None, :16], 1.0)
    assert formats.decode_e4m3(nv_scale).item() == 1.0 and int(nv_packed[0, 0]) & 15 == 5


@pytest.mark.parametrize(
    ("amax", "floor", "even", "up"),
    [
        (1.0, 125, 125, 125),
        (1.5, 125, 125, 125),
        (1.74999, 125, 125, 126),
        (1.75, 125, 126, 126),
        (3.5, 126, 127, 127),
        (6.0, 127, 127, 127),
        (6.0000005, 127, 127, 128),
        (7.0, 127, 128, 128),
    ],
)
def test_case_44_the_scale_mode_is_explicit(amax: float, floor: int, even: int, up: int) -> None:
    x = torch.zeros(32)
    x[7] = -amax
    assert scale_bytes(x, "floor") == [floor]
    assert scale_bytes(x, "even") == [even] == scale_bytes(x)
    assert scale_bytes(x, "up") == [up]
    if amax == 7.0:  # floor may clip: 7 / 1 saturates at 6
        packed, _, _ = downcast_to_mxfp(x, -1, scale_rounding="floor")
        assert int(packed[3]) >> 4 == 15


def test_case_45_zero_block_has_a_finite_scale() -> None:
    """Model-Optimizer#1397: 448 / (amax / 6) beyond 448 became NaN for an all-zero block."""
    x = torch.zeros(4, 64)
    x[0] = torch.linspace(-1e-5, 1e-5, 64)
    packed, scale, overall = quantize_nvfp4(x)
    assert formats.decode_e4m3(scale).isfinite().all()
    assert (packed[1:] == 0).all()
    assert torch.equal(formats.dequantize_nvfp4(packed, scale, overall)[1:], torch.zeros(3, 64))
    assert formats.encode_e4m3(torch.tensor([480.0])).view(torch.uint8).item() == 0x7E


def test_case_47_e8m0_has_no_zero() -> None:
    got = formats.decode_e8m0(torch.tensor([0, 127, 254, 255], dtype=torch.uint8)).tolist()
    assert got[:3] == [2.0**-127, 1.0, 2.0**127] and math.isnan(got[3])


@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("mode", ["floor", "even", "up"])
def test_case_48_a_nonfinite_block_is_nan_and_its_neighbours_are_not(bad: float, mode: str) -> None:
    x = torch.randn(3, 96, generator=torch.Generator().manual_seed(0))
    clean = downcast_to_mxfp(x, -1, scale_rounding=mode)
    x[1, 40] = bad
    packed, scale, _ = downcast_to_mxfp(x, -1, scale_rounding=mode)
    assert scale[1, 1] == 255 and (packed[1, 16:32] == 0).all()
    values = formats.dequantize_mxfp4(packed, scale)
    assert values[1, 32:64].isnan().all() and values.isnan().sum() == 32
    scale[1, 1], packed[1, 16:32] = clean[1][1, 1], clean[0][1, 16:32]
    assert torch.equal(scale, clean[1]) and torch.equal(packed, clean[0])

    nv_clean = quantize_nvfp4(x[2:], 1.0)
    nv_packed, nv_scale, _ = quantize_nvfp4(x[1:], 1.0)
    assert nv_scale.view(torch.uint8)[0].tolist().count(0x7F) == 1
    assert nv_scale.view(torch.uint8)[0, 2] == 0x7F and (nv_packed[0, 16:24] == 0).all()
    assert torch.equal(nv_packed[1:], nv_clean[0])


@pytest.mark.parametrize("keep", ["nan", "vllm"])
def test_case_48_byte_0_never_carries_code_7(keep: str) -> None:
    """NaN bits plus a rounding constant wrapped to a negative number, that is to byte 0."""
    for bits in (0x7FFFFFFF, 0x7FC00000, -1, 0x7F800000):
        for size in (32, 2):
            x = torch.full((size,), bits, dtype=torch.int32).view(torch.float32)
            for mode in ("floor", "even", "up"):
                packed, scale, _ = downcast_to_mxfp(x, -1, scale_rounding=mode, nonfinite=keep)
                assert scale.tolist() == [255 if keep == "nan" else 254]
                assert (packed & 7 == (0 if keep == "nan" else 7)).all()


@pytest.mark.parametrize("length", [48, 68, 34, 2])
def test_case_49_a_short_last_block_sees_only_its_own_elements(length: int) -> None:
    """Masked lanes polluted the scale of the tail; there are ceil(L / 32) scales and L is even."""
    storage = torch.full((2, 96), 1e30)
    x = storage[:, :length]
    x[:] = torch.randn(2, length, generator=torch.Generator().manual_seed(length))
    tail = length - length % 32
    x[:, tail:] *= 2.0**-20
    _, scale, _ = downcast_to_mxfp(x, -1)
    assert scale.shape == (2, -(-length // 32))
    alone = downcast_to_mxfp(x[:, tail:].contiguous(), -1)[1]
    assert torch.equal(scale[:, -1:], alone)
    _, nv_scale, _ = quantize_nvfp4(x, 2.0**-24)
    assert nv_scale.shape == (2, -(-length // 16))


def test_case_51_e4m3_is_nearest_even_with_carry() -> None:
    """triton#8322: its interpreter rounds half up and loses the mantissa carry."""
    values = torch.tensor([126.2386, 31.6051, 1.97, 1.0625, 1.1875])
    assert formats.decode_e4m3(formats.encode_e4m3(values)).tolist() == [128, 32, 2, 1, 1.25]
