"""Faults that others had in layouts and padding, one test a case; the numbers are those of the list
of cases that this project was started from, the reports are named in each docstring."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import kernels
from kernels import LAYOUTS, LayoutError, catalog
from kernels.layout import round_up
from kernels.reference import mxfp4

E4M3 = torch.float8_e4m3fn
SWIZZLED_SCALES = [
    name
    for name in LAYOUTS
    if "scale" in name and LAYOUTS[name].parts == 1 and not LAYOUTS[name].is_plain
]


def coded_passes(n: int, k: int) -> list[torch.Tensor]:
    """Two byte matrices that together give every position its own code."""
    position = torch.arange(n * k).view(n, k)
    return [(position & 0xFF).to(torch.uint8), (position >> 8 & 0xFF).to(torch.uint8)]


@pytest.mark.parametrize(
    ("shape", "padded"),
    [
        ((130, 5), (256, 8)),
        ((1, 1), (128, 4)),
        ((2880, 180), (2944, 180)),
        ((3, 130, 5), (3, 256, 8)),
    ],
)
def test_case_03_swizzle_blockscale_pads(shape: tuple[int, ...], padded: tuple[int, ...]) -> None:
    """vllm#23140: the result was reshaped to the unpadded size."""
    scale = torch.full(shape, 0x41, dtype=torch.uint8)
    got = kernels.swizzle_blockscale(scale.view(E4M3))
    assert got.shape == padded
    zeros = int((got.view(torch.uint8) == 0).sum())
    assert zeros == torch.Size(padded).numel() - scale.numel()
    if shape == (130, 5):
        assert zeros == 1398
    back = kernels.unswizzle_blockscale(got, *shape[-2:])
    assert torch.equal(back.view(torch.uint8), scale)


@pytest.mark.parametrize(("groups", "padded"), [(90, 92), (94, 96), (47, 48), (92, 92)])
def test_case_05_hopper_groups_are_padded_to_four(groups: int, padded: int) -> None:
    """vllm#47303, triton#10772: the kernel reads 4 groups, the layout padded to 2."""
    scale = torch.full((1, 5760, groups), 0xFF, dtype=torch.uint8)
    value = torch.zeros(1, 5760, groups * 16, dtype=torch.uint8)
    made = kernels.swizzle_mxfp4(value, scale, target="sm90").scale
    rows, width = made.storage.shape[-2:]
    assert (rows, width) == (round_up(5760, 256) // 32, padded * 32) and width % 128 == 0
    assert int((made.storage == 0xFF).sum()) == scale.numel(), "pad bytes are 0"
    assert torch.equal(mxfp4.unswizzle(made), scale)
    if groups == 90:
        assert (rows, width) == (184, 2944)
        assert catalog.hopper_scale(8, "3.8").storage_shape(5760, 90) == (184, 2880)


@pytest.mark.parametrize("name", SWIZZLED_SCALES)
def test_case_06_pad_bytes_do_not_leak(name: str) -> None:
    """triton#10190: a result that depends on what stands in the padding."""
    layout, (n, k) = LAYOUTS[name], (256, 47)
    scale = torch.randint(0, 255, (n, k), dtype=torch.uint8)
    storage = layout.forward(scale)
    storage.view(-1)[layout.pad_mask(n, k)] = 0xFF
    assert torch.equal(layout.inverse(storage, n, k), scale)
    codes = torch.randint(0, 256, (n, k * 16), dtype=torch.uint8)
    clean = kernels.dequantize_mxfp4(codes, scale)
    assert torch.equal(kernels.dequantize_mxfp4(codes, layout.inverse(storage, n, k)), clean)


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_case_08_one_scale_group(name: str) -> None:
    """triton#10343: K = 32, one group, 16 bytes."""
    for n, k in ((2, 1), (2, 16)):
        for x in coded_passes(n, k):
            assert torch.equal(LAYOUTS[name].inverse(LAYOUTS[name].forward(x), n, k), x)


@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
def test_case_09_unpadded_scales_pad_or_raise(tp_size: int) -> None:
    """triton#8803, #7958, #8677: layouts without padding viewed the wrong bytes."""
    groups = {1: 90, 2: 45, 4: 23, 8: 12}[tp_size]
    assert groups % 8, "none of gpt-oss' group counts is a multiple of 8"
    padded_n = {1: 96, 2: 48, 4: 24, 8: 16}[tp_size]
    layout = LAYOUTS["cdna4_scale"]
    assert layout.padded(256, groups)[1] == padded_n
    for x in coded_passes(100, groups):
        assert torch.equal(layout.inverse(layout.forward(x), 100, groups), x)
    value, scale = (torch.zeros(1, 64, g, dtype=torch.uint8) for g in (groups * 16, groups))
    if tp_size <= 2:
        with pytest.raises(LayoutError, match="does not pad CDNA4 scales"):
            kernels.swizzle_mxfp4(value, scale, target="gfx950", tp_size=tp_size)
    kernels.swizzle_mxfp4(value, scale, target="gfx950", tp_size=tp_size, generation="3.8")


@pytest.mark.parametrize(("m", "k"), list(product((31, 32, 33, 63), (5, 8, 9))))
def test_case_10_outer_stride_and_buffer_agree(m: int, k: int) -> None:
    """rocm-libraries#12232: the outer stride used the padded M, the buffer did not."""
    layout = LAYOUTS["cdna4_scale"]
    for x in coded_passes(m, k):
        storage = layout.forward(x)
        assert storage.numel() == round_up(m, 32) * round_up(k, 8)
        assert torch.equal(layout.inverse(storage, m, k), x)


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_case_11_the_fill_is_a_contract(name: str) -> None:
    """Primus-Turbo#383, aiter#5232: padding left as it was, or as 1.0."""
    layout = LAYOUTS[name]
    assert layout.fill == 0, "2**-127 as e8m0, +0 as e4m3 and e2m1; never 0xFF, a NaN scale"
    n, k = (6, 3) if layout.parts > 1 else (5, 3)
    for _ in range(3):  # freed memory full of 0xFF is what a pad left alone would show
        torch.full((1 << 16,), 0xFF, dtype=torch.uint8)
        storage = layout.forward(torch.full((n, k), 1, dtype=torch.uint8))
        assert int(storage.ne(0).sum()) == n * k or layout.bits


def test_case_20_bytes_depend_on_the_warps() -> None:
    """triton#9029: prepared for 8 warps, read with 4."""
    scale = torch.randint(0, 255, (1, 2880, 90), dtype=torch.uint8)
    four, eight = (mxfp4.swizzle(scale, catalog.hopper_scale(w), pad_k=4) for w in (4, 8))
    assert four.layout.padded(2880, 90)[0] == 2944 and eight.layout.padded(2880, 90)[0] == 3072
    same = scale[:, :512]
    one = catalog.hopper_scale(4).forward(same)
    other = catalog.hopper_scale(8).forward(same)
    assert one.shape == other.shape and not torch.equal(one, other)
    assert not torch.equal(catalog.hopper_scale(8).inverse(one, 512, 90), same)
    with pytest.raises(LayoutError, match="hopper_scale_w4"):
        eight.check(catalog.hopper_scale(4))


def test_case_25_the_group_is_a_parameter() -> None:
    """flashinfer#4874: 16 rows on SM103, 8 on SM120, 64 elsewhere."""
    x = torch.arange(128, dtype=torch.int32).view(128, 1)
    results = {g: kernels.interleave_linear_and_gate(x, g, -2).flatten() for g in (8, 16, 64)}
    for g, got in results.items():
        assert got[: 2 * g].tolist() == [*range(g), *range(64, 64 + g)]
    assert not torch.equal(results[8], results[16])
    with pytest.raises(LayoutError, match="not divisible by 2 \\* group_size = 32"):
        kernels.interleave_linear_and_gate(x[:48], 16, -2)


def test_case_28_no_index_tensor_per_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm#24154: a permutation recomputed for each expert. Here one call serves them all."""
    calls = []
    forward = kernels.Layout.forward
    monkeypatch.setattr(
        kernels.Layout, "forward", lambda self, x: (calls.append(self.name), forward(self, x))[1]
    )
    e, h, i = 8, 128, 64
    args = (
        torch.randint(0, 256, (e, 2 * i, h // 2), dtype=torch.uint8),
        torch.randint(0, 256, (e, h, i // 2), dtype=torch.uint8),
        torch.randint(0, 256, (e, 2 * i, h // 16), dtype=torch.uint8),
        torch.randint(0, 256, (e, h, i // 16), dtype=torch.uint8),
    )
    whole = kernels.prepare_static_weights_for_trtllm_fp4_moe(*args, h, i, e, True)
    assert len(calls) == 4, "one a tensor, whatever the number of experts"
    for expert in range(e):
        one = kernels.prepare_static_weights_for_trtllm_fp4_moe(
            *(x[expert : expert + 1] for x in args), h, i, 1, True
        )
        for got, want in zip(one, whole, strict=True):
            assert torch.equal(got[0].view(torch.uint8), want[expert].view(torch.uint8))


def test_case_30_scales_take_both_steps() -> None:
    """flashinfer#4087: the 128x4 step was missing, and random scales under a tolerance hid it."""
    h, i, e = 512, 384, 1
    rows, groups = 2 * i, h // 16
    w13 = torch.zeros(e, rows, h // 2, dtype=torch.uint8)
    w2 = torch.zeros(e, h, i // 2, dtype=torch.uint8)
    s2 = torch.zeros(e, h, i // 16, dtype=torch.uint8)
    for coded in coded_passes(rows, groups):
        got = kernels.prepare_static_weights_for_trtllm_fp4_moe(
            w13, w2, coded[None], s2, h, i, e, True
        )[1]
        permuted = kernels.shuffle_rows_for_trtllm(kernels.interleave_linear_and_gate(coded, 1, -2))
        want = kernels.nvfp4_block_scale_interleave(permuted)
        assert torch.equal(got.view(torch.uint8).flatten(), want)
        assert not torch.equal(got.view(torch.uint8).flatten(), permuted.flatten())


@pytest.mark.parametrize(("target", "value", "scale"), [
    ("sm90", True, True), ("gfx950", False, True), ("gfx942", False, False), ("sm100", True, True),
])  # fmt: skip
def test_case_32_value_and_scale_are_swizzled_independently(
    target: str, value: bool, scale: bool
) -> None:
    """TransformerEngine#665: one flag for both."""
    n, groups = 128, 8
    for code in coded_passes(n, groups * 16):
        made = kernels.swizzle_mxfp4(code[None], code[None, :, :groups].contiguous(), target=target)
        for part, x, moved in ((made.value, code, value), (made.scale, code[:, :groups], scale)):
            assert part.layout.is_plain is not moved
            want = part.layout.forward(x.contiguous()[None])
            assert torch.equal(part.storage, want)
            plain = torch.equal(part.storage.flatten()[: x.numel()], x.flatten())
            assert plain is not moved or part.layout.name == "blackwell_value"


@pytest.mark.parametrize("chunk", [1, 3, 6])
def test_case_33_expert_chunks_give_the_same_bytes(chunk: int) -> None:
    """TRT-LLM#16125: nine times the tensor in scratch, so people cut it by experts."""
    x = torch.randint(0, 256, (6, 100, 64), dtype=torch.uint8)
    layout = catalog.hopper_value(3)
    whole = layout.forward(x)
    parts = torch.cat([layout.forward(part) for part in x.split(chunk)])
    assert torch.equal(whole, parts)


def test_case_34_peak_is_outputs_and_one_expert() -> None:
    """ATOM#530, sglang#31898: a list of experts and their stack, twice the memory."""
    experts, n, k = 8, 512, 512
    layout = catalog.hopper_value(3)
    out = torch.empty(experts, *layout.storage_shape(n, k), dtype=torch.uint8)
    x = torch.randint(0, 256, (experts, n, k), dtype=torch.uint8)
    held, given = [0], {x.untyped_storage().data_ptr(), out.untyped_storage().data_ptr()}

    class Peak(TorchDispatchMode):
        """Largest tensor that any operation makes: what a list and a stack cannot hide from."""

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                memory = result.untyped_storage()
                if memory.data_ptr() not in given:
                    held.append(memory.nbytes())
            return result

    with Peak():
        for e in range(experts):
            mxfp4.swizzle(x[e : e + 1], layout, out=out[e])
    assert torch.equal(out, torch.stack([layout.forward(matrix) for matrix in x]))
    assert max(held) <= out[0].nbytes, "nothing larger than one expert is ever made"
