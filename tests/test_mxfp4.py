"""MXFP4: the whole `_swizzle_mxfp4` on every target, its tags, inverses and refusals."""

from __future__ import annotations

import pytest
import torch

import kernels
from kernels import LayoutError, catalog, select
from kernels.reference.mxfp4 import Swizzled, swizzle


def weights(e: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(n * k)
    draw = lambda *shape: torch.randint(0, 255, shape, dtype=torch.uint8, generator=generator)
    return draw(e, n, k // 2), draw(e, n, k // 32)


@pytest.mark.parametrize("generation", catalog.GENERATIONS)
@pytest.mark.parametrize("target", select.TARGETS)
@pytest.mark.parametrize("shape", [(2, 96, 2880), (1, 1, 32), (2, 258, 96), (0, 64, 64)])
def test_swizzle_mxfp4(target: str, generation: str, shape: tuple[int, int, int]) -> None:
    value, scale = weights(*shape)
    kept = value.clone(), scale.clone()
    if target == "gfx950" and generation == "3.5" and scale.shape[-1] % 8:
        with pytest.raises(LayoutError, match="does not pad CDNA4 scales"):
            kernels.swizzle_mxfp4(value, scale, target=target, generation=generation)
        return
    made = kernels.swizzle_mxfp4(value, scale, target=target, generation=generation)
    choice = select.choose_mxfp4(target, 1, 8, torch.__version__, generation)
    assert made.value.layout is choice.value and made.scale.layout is choice.scale
    assert made.constraints == choice.constraints
    for part, x in ((made.value, value), (made.scale, scale)):
        assert part.data.numel() == part.storage.numel()
        assert not x.numel() or part.data.data_ptr() == part.storage.data_ptr()
        assert part.shape == tuple(x.shape[1:])
    back = kernels.unswizzle_mxfp4(made)
    assert torch.equal(back[0], value) and torch.equal(back[1], scale)
    assert torch.equal(value, kept[0]) and torch.equal(scale, kept[1])
    outs = torch.full_like(made.value.storage, 0xFF), torch.full_like(made.scale.storage, 0xFF)
    again = kernels.swizzle_mxfp4(value, scale, target=target, generation=generation, out=outs)
    assert again.value.storage.data_ptr() == outs[0].data_ptr()
    assert torch.equal(outs[0], made.value.storage) and torch.equal(outs[1], made.scale.storage)


def test_swizzle_mxfp4_unpacks_like_vllm() -> None:
    value, flex, scale = kernels.swizzle_mxfp4(*weights(1, 64, 64), target="sm90")
    assert isinstance(value, Swizzled) and isinstance(scale, Swizzled)
    assert flex.scale is None and scale.num_warps == 8 and value.num_warps is None


def test_expert_by_expert_into_its_final_place() -> None:
    value, scale = weights(3, 128, 128)
    whole = kernels.swizzle_mxfp4(value, scale, target="sm90")
    outs = torch.empty_like(whole.value.storage), torch.empty_like(whole.scale.storage)
    for e in range(3):
        kernels.swizzle_mxfp4(
            value[e : e + 1], scale[e : e + 1], target="sm90", out=(outs[0][e], outs[1][e])
        )
    assert torch.equal(outs[0], whole.value.storage) and torch.equal(outs[1], whole.scale.storage)


def test_a_swizzled_tensor_is_refused() -> None:
    value, scale = weights(1, 64, 64)
    made = kernels.swizzle_mxfp4(value, scale, target="sm90")
    with pytest.raises(LayoutError, match="quant_tensor is in layout 'hopper_value_v3' already"):
        kernels.swizzle_mxfp4(made.value, scale, target="sm90")
    with pytest.raises(LayoutError, match="in layout 'hopper_scale_w8' already; swizzling twice"):
        swizzle(made.scale, catalog.hopper_scale(8))
    made.scale.check(catalog.hopper_scale(8))
    with pytest.raises(
        LayoutError, match="reads layout 'hopper_scale_w4'.*prepared as 'hopper_scale_w8'"
    ):
        made.scale.check(catalog.hopper_scale(4))


def test_swizzle_mxfp4_refuses() -> None:
    value, scale = weights(2, 64, 64)
    for bad, rule in (
        (
            (value, scale[..., :1]),
            r"scale \(2, 64, 1\) does not belong to quant_tensor \(2, 64, 32\)",
        ),
        ((value.float(), scale), "quant_tensor .* torch.float32; want uint8"),
        ((value[0], scale), "want uint8 \\[E, N, K\\]"),
        ((value[..., :20], scale), "K divisible by 32"),
    ):
        with pytest.raises(LayoutError, match=rule):
            kernels.swizzle_mxfp4(*bad, target="sm90")
    with pytest.raises(LayoutError, match="unknown target 'sm9'; did you mean sm90"):
        kernels.swizzle_mxfp4(value, scale, target="sm9")


def test_out_is_checked_before_anything_is_written() -> None:
    value, scale = weights(1, 64, 64)
    short = torch.zeros(8, dtype=torch.uint8)
    with pytest.raises(LayoutError, match="out .* cannot take"):
        kernels.swizzle_mxfp4(value, scale, target="sm100", out=(short, short))
    good = torch.zeros(512, dtype=torch.uint8)
    with pytest.raises(LayoutError, match="out .* cannot take"):
        kernels.swizzle_mxfp4(
            value, scale, target="sm100", out=(short, good[None].expand(2, 512)[:1])
        )
    assert not short.any() and not good.any()
