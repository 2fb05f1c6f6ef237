"""128x4 block scales, their CuteDSL view, and the activation scale."""

from __future__ import annotations

import pytest
import torch

import kernels
from kernels import LayoutError

E4M3 = torch.float8_e4m3fn


def coded(*shape: int) -> torch.Tensor:
    """Bytes that differ between neighbours and between tiles."""
    n = torch.Size(shape).numel()
    return (torch.arange(n) * 40503 // 11 % 256).to(torch.uint8).view(shape)


@pytest.mark.parametrize(
    "shape", [(1, 1), (128, 4), (130, 5), (3, 31, 33), (2, 256, 12), (0, 128, 4)]
)
def test_swizzle_blockscale(shape: tuple[int, ...]) -> None:
    scale = coded(*shape).view(E4M3)
    got = kernels.swizzle_blockscale(scale)
    m, k = shape[-2:]
    rows, cols = -(-m // 128) * 128, -(-k // 4) * 4
    assert got.shape == (*shape[:-2], rows, cols) and got.dtype == E4M3
    want = torch.zeros(*shape[:-2], rows * cols, dtype=torch.uint8)
    r, c = torch.arange(m).view(-1, 1), torch.arange(k).view(1, -1)
    at = (r // 128 * (cols // 4) + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4
    want[..., at.flatten()] = scale.view(torch.uint8).flatten(-2)
    assert torch.equal(got.view(torch.uint8).flatten(-2), want)
    back = kernels.unswizzle_blockscale(got, m, k)
    assert torch.equal(back.view(torch.uint8), scale.view(torch.uint8))
    out = torch.full_like(got.view(torch.uint8), 0xFF).view(E4M3)
    assert kernels.swizzle_blockscale(scale, out=out) is out
    assert torch.equal(out.view(torch.uint8), got.view(torch.uint8))


def test_swizzle_blockscale_refuses() -> None:
    with pytest.raises(LayoutError, match=r"scale \(4, 4\) torch.uint8; want float8_e4m3fn"):
        kernels.swizzle_blockscale(coded(4, 4))
    with pytest.raises(LayoutError, match="of rank 2 or 3"):
        kernels.swizzle_blockscale(coded(2, 2, 2, 2).view(E4M3))
    with pytest.raises(LayoutError, match=r"\(128, 4\) is not the swizzled form of 129 x 4"):
        kernels.unswizzle_blockscale(coded(128, 4).view(E4M3), 129, 4)
    with pytest.raises(LayoutError, match="not contiguous"):
        kernels.swizzle_blockscale(coded(128, 4).view(E4M3), out=coded(4, 128).view(E4M3).mT)
    with pytest.raises(LayoutError, match="rank 2 or 3"):
        kernels.nvfp4_block_scale_interleave(coded(128))
    with pytest.raises(LayoutError, match="512 bytes cannot be scales of shape \\(129, 4\\)"):
        kernels.nvfp4_block_scale_deinterleave(coded(512), 129, 4)


def test_nvfp4_swizzled_scale_to_cutedsl_mma_view() -> None:
    scale = coded(3, 300, 10)
    swizzled = kernels.swizzle_blockscale(scale.view(E4M3)).view(torch.uint8)
    view = kernels.nvfp4_swizzled_scale_to_cutedsl_mma_view(swizzled)
    assert view.shape == (32, 4, 3, 4, 3, 3)
    assert view.stride() == (16, 4, 3 * 512, 1, 512, 9 * 512)
    for e, m, k in ((0, 0, 0), (2, 299, 9), (1, 130, 5), (0, 33, 4)):
        assert view[m % 32, m % 128 // 32, m // 128, k % 4, k // 4, e] == scale[e, m, k]
    swizzled[1, 0, 0] = 7
    assert view[0, 0, 0, 0, 0, 1] == 7, "a write to the storage is seen through the view"
    back = kernels.cutedsl_mma_view_to_nvfp4_swizzled_scale(view)
    assert back.data_ptr() == swizzled.data_ptr() and torch.equal(back, swizzled)


def test_mma_view_refuses_what_it_cannot_alias() -> None:
    with pytest.raises(LayoutError, match="128 | M and 4 | K"):
        kernels.nvfp4_swizzled_scale_to_cutedsl_mma_view(coded(1, 130, 4))
    with pytest.raises(LayoutError, match="not contiguous"):
        kernels.nvfp4_swizzled_scale_to_cutedsl_mma_view(coded(2, 256, 8)[:, :128])
    view = kernels.nvfp4_swizzled_scale_to_cutedsl_mma_view(coded(2, 256, 8))
    with pytest.raises(LayoutError, match="a copy, not a view"):
        kernels.cutedsl_mma_view_to_nvfp4_swizzled_scale(view.contiguous())
    with pytest.raises(LayoutError, match="want \\(32, 4, M/128, 4, K/4, E\\)"):
        kernels.cutedsl_mma_view_to_nvfp4_swizzled_scale(coded(2, 2))


def test_amax_for_moe_activation_quant() -> None:
    scale = torch.tensor([[0.5, 2.0], [3.0, 1.0]], dtype=torch.bfloat16)
    amax = kernels.amax_for_moe_activation_quant(scale, enable_eplb=False)
    assert amax.dtype == torch.float32 and amax.shape == () and amax == 3
    with pytest.raises(LayoutError, match="has no experts"):
        kernels.amax_for_moe_activation_quant(scale[:0], enable_eplb=False)
