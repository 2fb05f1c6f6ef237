"""The reference quantizers against recorded bytes, exact rational arithmetic and their contract."""

from __future__ import annotations

import math
import sys
import types
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

import kernels
from kernels import formats, providers
from kernels.errors import LayoutError
from kernels.quantize_task import SCALE_ROUNDING
from kernels.reference import quantize
from kernels.reference.quantize import downcast_to_mxfp, merge_global_scales, quantize_nvfp4

GOLDEN = Path(__file__).parent / "golden" / "mxfp4_quantize_h200.npz"
CASES = [key.removesuffix("_bits") for key in np.load(GOLDEN).files if key.endswith("_bits")]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def recorded(case: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    with np.load(GOLDEN) as arrays:
        x, q, s = (torch.from_numpy(arrays[f"{case}_{name}"]) for name in ("bits", "q", "s"))
    return x.view(DTYPES[case[:4]]), q, s


@pytest.mark.parametrize("case", CASES)
def test_every_key_of_the_oracle(case: str) -> None:
    """vLLM 0.33's bytes from an H200; its handling of Inf and NaN under nonfinite='vllm'."""
    x, q, s = recorded(case)
    keep = "vllm" if case.endswith("nonfinite") else "nan"
    packed, scale, shape = downcast_to_mxfp(x, 1 if "axis1" in case else -1, nonfinite=keep)
    assert torch.equal(packed, q) and torch.equal(scale, s) and shape == tuple(s.shape)


def test_the_oracle_is_whole() -> None:
    finite = [case for case in CASES if not case.endswith("nonfinite")]
    print(
        f"{GOLDEN.name}: {2 * len(finite)} finite keys and {2 * (len(CASES) - len(finite))} others"
    )
    assert len(finite) == 18 and len(CASES) == 20


def exact_byte(largest: Fraction, mode: str) -> int:
    """The scale byte of a largest magnitude, by exact arithmetic from the mode's definition."""
    if not largest:
        return 0
    if mode == "up":
        k = math.floor(math.log2(largest / 6)) - 2
        while Fraction(2) ** k < largest / 6:
            k += 1
        return max(k + 127, 0)
    e = math.frexp(float(largest))[1] - 1
    if mode == "even" and largest / Fraction(2) ** e >= Fraction(7, 4):
        e += 1
    if mode == "even" and e == 128:
        return 254  # upstream's clamp, see the module's docstring
    return max(e - 2 + 127, 0)


@pytest.mark.parametrize("mode", SCALE_ROUNDING)
def test_scale_of_every_bf16_magnitude(mode: str) -> None:
    values = torch.arange(0x7F80, dtype=torch.int16).view(torch.bfloat16)
    x = torch.zeros(len(values), 32, dtype=torch.bfloat16)
    x[:, 5] = values
    _, scale, _ = downcast_to_mxfp(x, -1, scale_rounding=mode)
    expected = [exact_byte(Fraction(value), mode) for value in values.tolist()]
    assert scale[:, 0].tolist() == expected


@pytest.mark.parametrize("mode", SCALE_ROUNDING)
def test_elements_are_the_nearest_with_ties_to_even(mode: str) -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(40, 96, generator=generator) * torch.logspace(-30, 30, 40)[:, None]
    packed, scale, _ = downcast_to_mxfp(x, -1, scale_rounding=mode)
    codes = formats.unpack_e2m1(packed)
    for row in range(40):
        for k in range(0, 96, 7):
            y = abs(Fraction(x[row, k].item())) / Fraction(2) ** (scale[row, k // 32].item() - 127)
            distance = [abs(y - Fraction(m)) for m in formats.E2M1_MAGNITUDES]
            best = [m for m in range(8) if distance[m] == min(distance)]
            chosen = next((m for m in best if m % 2 == 0), best[0]) if len(best) > 1 else best[0]
            assert codes[row, k].item() == chosen + 8 * (x[row, k].item() < 0)


def test_up_never_clips() -> None:
    x = torch.rand(4096, 32, generator=torch.Generator().manual_seed(0)) * 8
    _, scale, _ = downcast_to_mxfp(x, -1, scale_rounding="up")
    assert (x.amax(-1) / formats.decode_e8m0(scale)[:, 0] <= 6).all()


@pytest.mark.parametrize("axis", [0, 1, 2, -3])
def test_any_axis_is_the_last_axis_of_a_turned_tensor(axis: int) -> None:
    x = torch.randn(34, 66, 130).to(torch.bfloat16)
    packed, scale, shape = downcast_to_mxfp(x, axis)
    turned, turned_scale, _ = downcast_to_mxfp(x.movedim(axis, -1).contiguous(), -1)
    assert torch.equal(packed.movedim(axis, -1), turned)
    assert torch.equal(scale.movedim(axis, -1), turned_scale) and shape == tuple(scale.shape)
    assert packed.stride(axis) == 1 and scale.is_contiguous()


def test_outputs_given_are_written_whole_and_nothing_beside_them() -> None:
    x = torch.randn(3, 5, 96).to(torch.float16)
    before = x.clone()
    room = torch.full((3, 7, 60), 0xA5, dtype=torch.uint8)
    packed, scale = room[:, 1:6, 4:52], torch.full((3, 5, 3), 0xFF, dtype=torch.uint8)
    got = downcast_to_mxfp(x, -1, packed, scale)
    fresh = downcast_to_mxfp(x, -1)
    assert got[0] is packed and got[1] is scale
    assert torch.equal(packed, fresh[0]) and torch.equal(scale, fresh[1])
    room[:, 1:6, 4:52] = 0xA5
    assert (room == 0xA5).all() and torch.equal(x, before)


@pytest.mark.parametrize("shape", [(0, 64), (4, 0), (0, 0), (2, 0, 64), (1, 64), (64,), (2,)])
def test_empty_and_single_rows(shape: tuple[int, ...]) -> None:
    packed, scale, _ = downcast_to_mxfp(torch.ones(shape, dtype=torch.bfloat16), -1)
    assert packed.shape == (*shape[:-1], shape[-1] // 2)
    assert scale.shape == (*shape[:-1], -(-shape[-1] // 32))
    assert (scale == 125).all() and (packed == 0x66).all()


@pytest.mark.parametrize("rows", [1, 300])
def test_pieces_do_not_change_bytes(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(rows, 4096 // rows * 30).to(torch.bfloat16)[:, 2:]
    whole = downcast_to_mxfp(x, -1)
    cut = quantize._cut
    monkeypatch.setattr(quantize, "_pieces", lambda tensors, block: cut(tensors, block, 96))
    pieces = downcast_to_mxfp(x, -1)
    assert torch.equal(whole[0], pieces[0]) and torch.equal(whole[1], pieces[1])


def test_scratch_is_below_twice_the_output() -> None:
    """The largest sum of live storages while it runs, from torch's own allocation events."""
    x = torch.randn(2048, 2048).to(torch.bfloat16)
    with torch.profiler.profile(profile_memory=True) as profile:
        packed, scale, _ = downcast_to_mxfp(x, -1)
    live = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    output = packed.numel() + scale.numel()
    assert output < peak <= 3 * output


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"axis": 2}, "axis 2"),
        ({"axis": 0}, "odd (3)"),
        ({"axis": 1, "scale_rounding": "nearest"}, "floor"),
        ({"axis": 1, "nonfinite": "drop"}, "vllm"),
        ({"axis": 1, "BLOCK_QUANT_DIM": 48}, "multiple of 32"),
        ({"axis": 1, "out_quant_tensor": torch.zeros(3, 31, dtype=torch.uint8)}, "(3, 32)"),
        ({"axis": 1, "out_quant_tensor": torch.zeros(3, 32)}, "torch.uint8"),
        ({"axis": 1, "out_scale": torch.zeros(3, 1, dtype=torch.uint8)}, "(3, 2)"),
        ({"axis": 1, "out_scale": torch.zeros(1, 2, dtype=torch.uint8).expand(3, 2)}, "stride 0"),
        (
            {"axis": 1, "out_scale": torch.zeros(3, 2, dtype=torch.uint8, device="meta")},
            "one device",
        ),
    ],
)
def test_bad_calls_say_what_to_do_and_change_nothing(kwargs: dict[str, object], words: str) -> None:
    x = torch.randn(3, 64).to(torch.bfloat16)
    before = x.clone()
    with pytest.raises(LayoutError) as error:
        downcast_to_mxfp(x, **kwargs)  # type: ignore[arg-type]
    assert words in str(error.value) and torch.equal(x, before)
    with pytest.raises(LayoutError, match="float64"):
        downcast_to_mxfp(x.double(), -1)


@pytest.mark.parametrize(("dtype", "magic"), [(torch.bfloat16, 128), (torch.float16, 1024)])
@pytest.mark.parametrize("power", [-14, 0, 13])
def test_paired_arithmetic_equals_the_table_for_every_value(
    dtype: torch.dtype, magic: int, power: int
) -> None:
    """What kernels/fused/quantize_pairs.py computes, torch rounding each fused step."""
    seven = torch.tensor(7.0).to(dtype).view(torch.int16).item()
    y = torch.arange(int(seven), dtype=torch.int16).view(dtype)  # every value in [0, 7)
    x = (y.double() * 2.0**-power).to(dtype)
    x = x[x.isfinite()]
    slope = torch.tensor(2.0**power).to(dtype)
    wide = x.double() * slope.double()
    lines = (wide * 2 + magic, wide + (magic + 2), wide * 0.5 + (magic + 4))
    code = torch.stack([line.to(dtype) for line in lines]).amin(0)
    low_bytes = (code.view(torch.int16) & 0xFF).to(torch.uint8)
    assert len(x) > 5000 and torch.equal(low_bytes, formats.encode_e2m1(wide.float()))


def test_inverse_in_two_gives_the_rounded_quotient() -> None:
    """fma(u, h, u * l) is fp32 u / s for every e4m3 significand, h up to six ulps low."""
    generator = torch.Generator().manual_seed(0)
    u = torch.rand(20000, generator=generator) * 8
    for mantissa in [*range(8, 16), 6 * 8]:
        scale = torch.tensor(mantissa / 8)
        at = torch.tensor([tie for tie, _ in formats.E2M1_TIES]) * scale
        near = (at.view(torch.int32)[:, None] + torch.arange(-4, 5, dtype=torch.int32)).flatten()
        values = torch.cat([u, near.view(torch.float32)])
        for low in range(2, 7):
            h = (scale.reciprocal().view(torch.int32) - low).view(torch.float32)
            rest = (1 - scale.double() * h.double()).float() * h
            assert rest > 0
            fused = values.double() * h.double() + (values * rest).double()
            assert torch.equal(fused.float(), values / scale)


def test_nvfp4_division_rounds_the_exact_quotient() -> None:
    """e2m1(fp32 u / scale) is e2m1 of the exact quotient: all scales, ties and neighbours."""
    for mantissa in range(8, 16):
        scale = torch.tensor(mantissa / 8)
        for tie, even in formats.E2M1_TIES:
            at = (torch.tensor(tie) * scale).view(torch.int32).item()
            u = torch.arange(at - 8, at + 9, dtype=torch.int32).view(torch.float32)
            got = formats.decode_e2m1(formats.encode_e2m1(u / scale)).tolist()
            for value, chosen in zip(u.tolist(), got, strict=True):
                exact = Fraction(value) / Fraction(scale.item())
                down = exact < Fraction(tie) or (exact == Fraction(tie) and even < tie)
                assert (chosen < tie) == down


def test_nvfp4_global_scale_is_one_per_matrix_from_its_largest_finite_value() -> None:
    x = torch.randn(3, 8, 64)
    x[1, 2, 3], x[1, 0, 0], x[2] = math.inf, math.nan, 0.0
    packed, scale, overall = quantize_nvfp4(x)
    finite = x[1][x[1].isfinite()].abs().max()
    expected = [x[0].abs().max() / 2688, finite / 2688, torch.tensor(1.0)]
    assert torch.equal(overall, torch.stack(expected))
    assert scale.dtype == torch.float8_e4m3fn and packed.shape == (3, 8, 32)
    lost = scale.view(torch.uint8) == 0x7F
    assert lost.sum() == 2 and lost[1, 2, 0] and lost[1, 0, 0]
    assert (packed[1, 2, :8] == 0).all() and (packed[2] == 0).all()
    assert (
        formats.dequantize_nvfp4(packed, scale, overall)[~lost.repeat_interleave(16, 2)]
        .isfinite()
        .all()
    )


@pytest.mark.parametrize("length", [16, 48, 68])
def test_nvfp4_error_is_half_a_step(length: int) -> None:
    x = torch.randn(64, length).to(torch.bfloat16)
    packed, scale, overall = quantize_nvfp4(x)
    values = formats.dequantize_nvfp4(packed, scale, overall).double()
    step = (
        formats.decode_e4m3(scale).double().repeat_interleave(16, 1)[:, :length] * overall.double()
    )
    room = 1 + step * 0.5  # half the widest spacing is one scale; 6.4 / 6 clips by less than that
    assert ((values - x.double()).abs() <= step * room).all()


def test_nvfp4_given_scale_too_small_saturates() -> None:
    x = torch.full((1, 16), 1e30)
    packed, scale, _ = quantize_nvfp4(x, 1.0)
    assert scale.view(torch.uint8).item() == 0x7E and (packed == 0x77).all()


@pytest.mark.parametrize("interleaved", [False, True])
def test_merging_global_scales_keeps_the_bound(interleaved: bool) -> None:
    """Every finite e4m3 byte under many ratios, against |w' - w| <= max(|w| 2**-4, 6 2**-10 g)."""
    generator = torch.Generator().manual_seed(1)
    scale = torch.arange(127, dtype=torch.uint8).repeat(200, 4, 1).view(torch.float8_e4m3fn)
    pair = torch.rand(200, 2, generator=generator) * torch.logspace(-6, 2, 200)[:, None] + 1e-9
    merged, overall = merge_global_scales(scale, pair, interleaved=interleaved)
    assert torch.equal(overall, pair.amax(-1)) and merged.dtype == scale.dtype
    rows = [0, 1, 0, 1] if interleaved else [0, 0, 1, 1]
    old = formats.decode_e4m3(scale).double() * pair[:, rows].double()[..., None]
    new = formats.decode_e4m3(merged).double() * overall.double()[:, None, None]
    for magnitude in formats.E2M1_MAGNITUDES:
        bound = torch.maximum(
            magnitude * old * (2.0**-4 + 2.0**-22), 6 * 2.0**-10 * overall.double()[:, None, None]
        )
        assert (magnitude * (new - old).abs() <= bound).all()
    larger = pair[:, rows] == overall[:, None]
    assert torch.equal(merged.view(torch.uint8)[larger], scale.view(torch.uint8)[larger])


def test_merging_refuses_other_shapes() -> None:
    scale = torch.zeros(2, 4, 3, dtype=torch.uint8)
    with pytest.raises(LayoutError, match="one for w1 and one for w3"):
        merge_global_scales(scale, torch.ones(2))
    with pytest.raises(LayoutError, match="equal in number"):
        merge_global_scales(scale[:, :3], torch.ones(2, 2))


def test_public_names_and_providers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Absent backends are stood in for; the choice is vLLM's order and can be asked."""
    x = torch.randn(4, 6, 64).to(torch.bfloat16)
    expected = quantize.mxfp4_quantize(x)
    assert providers.mxfp4_quantize_provider(x) == "reference"
    assert all(map(torch.equal, kernels.mxfp4_quantize(x), expected))

    monkeypatch.setattr(providers, "platform_of", lambda _: "rocm")
    assert providers.mxfp4_quantize_provider(x) == "fused"
    seen: list[tuple[int, ...]] = []

    def dynamic_mxfp4_quant(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(tuple(matrix.shape))
        packed, scale = quantize.mxfp4_quantize(matrix)
        return packed, torch.nn.functional.pad(scale, (0, 6, 0, 8))  # aiter pads its scales

    quant = types.ModuleType("aiter.ops.triton.quant")
    quant.dynamic_mxfp4_quant = dynamic_mxfp4_quant  # type: ignore[attr-defined]
    for name in ("aiter", "aiter.ops", "aiter.ops.triton"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, quant.__name__, quant)
    assert providers.mxfp4_quantize_provider(x) == "aiter"
    assert all(map(torch.equal, kernels.mxfp4_quantize(x), expected)) and seen == [(24, 64)]
    assert providers.mxfp4_quantize_provider(x.half()) == "fused"
    with pytest.raises(LayoutError, match="whole blocks of 32"):
        kernels.mxfp4_quantize(x[..., :34])

    monkeypatch.setattr(providers, "platform_of", lambda _: "xpu")
    assert providers.mxfp4_quantize_provider(x) == "fused"
    monkeypatch.setattr(providers, "_xpu_op", lambda: quantize.mxfp4_quantize)
    assert providers.mxfp4_quantize_provider(x) == "xpu"
    assert all(map(torch.equal, kernels.mxfp4_quantize(x), expected))
