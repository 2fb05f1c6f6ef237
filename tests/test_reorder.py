"""Gate and up rows: exact results on coded rows, inverses, in-place promises, refusals."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import kernels
from kernels import LayoutError
from kernels.reference import reorder


def rows(n: int, k: int = 3, batch: tuple[int, ...] = (2,)) -> torch.Tensor:
    """int32 [*batch, n, k] whose element is its own flat position."""
    shape = (*batch, n, k)
    return torch.arange(torch.Size(shape).numel(), dtype=torch.int32).view(shape)


@pytest.mark.parametrize("dim", [-3, -2, -1, 0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.float32])
def test_reorder_w1w3_to_w3w1(dim: int, dtype: torch.dtype) -> None:
    weight = torch.arange(6 * 4 * 2).view(6, 4, 2).to(dtype)
    scale = torch.arange(6 * 4 * 2).view(6, 4, 2).flip(0).contiguous().to(dtype)
    kept = weight.clone(), scale.clone()
    got = kernels.reorder_w1w3_to_w3w1(weight, scale, dim)
    assert got[0] is weight and got[1] is scale and weight.is_contiguous()
    for x, before in zip(got, kept, strict=True):
        half = x.shape[dim] // 2
        assert torch.equal(x, before.roll(half, dim))
    kernels.reorder_w1w3_to_w3w1(weight, scale, dim)
    assert torch.equal(weight, kept[0]) and torch.equal(scale, kept[1])


def test_reorder_w1w3_to_w3w1_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reorder, "_SCRATCH_BYTES", 64)  # rows of 24 bytes: two at a time
    weight, scale = rows(10), rows(10) + 1000
    want = weight.roll(5, -2), scale.roll(5, -2)
    got = reorder.reorder_w1w3_to_w3w1(weight, scale)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_reorder_w1w3_to_w3w1_refuses_and_changes_nothing() -> None:
    weight, odd = rows(4), rows(5)
    kept = weight.clone(), odd.clone()
    for call, rule in (
        (lambda: kernels.reorder_w1w3_to_w3w1(weight, odd), r"scale \(2, 5, 3\) has an odd size 5"),
        (lambda: kernels.reorder_w1w3_to_w3w1(weight, rows(2, 4).mT), "scale .* not contiguous"),
        (lambda: kernels.reorder_w1w3_to_w3w1(weight, rows(4), 3), "has no dim 3"),
    ):
        with pytest.raises(LayoutError, match=rule):
            call()
    assert torch.equal(weight, kept[0]) and torch.equal(odd, kept[1])


@pytest.mark.parametrize("activation", ["silu", "swigluoai", SimpleNamespace(value="swigluoai")])
def test_reorder_w13_to_w31_for_flashinfer_cutedsl(activation: object) -> None:
    w13, scale = rows(6, 4), rows(6, 1)
    kept = w13.clone()
    w31, s31 = kernels.reorder_w13_to_w31_for_flashinfer_cutedsl(activation, w13, scale)
    alternate = activation != "silu"
    gate, up = (w13[:, 0::2], w13[:, 1::2]) if alternate else (w13[:, :3], w13[:, 3:])
    assert torch.equal(w31, torch.cat([up, gate], 1)) and torch.equal(w13, kept)
    assert torch.equal(s31[..., 0] * 4, w31[..., 0]), "scale rows follow the weight's"
    back = kernels.reorder_w31_to_w13_from_flashinfer_cutedsl(activation, w31, s31)
    assert torch.equal(back[0], w13) and torch.equal(back[1], scale)
    outs = torch.empty_like(w13), torch.empty_like(scale)
    kernels.reorder_w13_to_w31_for_flashinfer_cutedsl(activation, w13, scale, out=outs)
    assert torch.equal(outs[0], w31) and torch.equal(outs[1], s31)


def test_reorder_w13_to_w31_refuses() -> None:
    with pytest.raises(LayoutError, match="'relu2_no_mul' has no gate"):
        kernels.reorder_w13_to_w31_for_flashinfer_cutedsl("relu2_no_mul", rows(4), rows(4))
    with pytest.raises(LayoutError, match="unknown MoE activation 'tanh'; known: silu"):
        kernels.reorder_w13_to_w31_for_flashinfer_cutedsl("tanh", rows(4), rows(4))
    with pytest.raises(LayoutError, match=r"w13_scale \(2, 3, 3\) has an odd size 3"):
        kernels.reorder_w13_to_w31_for_flashinfer_cutedsl("silu", rows(4), rows(3))


@pytest.mark.parametrize("group", [1, 2, 8, 16, 64])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_interleave_linear_and_gate(group: int, dim: int) -> None:
    size = 6 * group
    x = torch.arange(size * 2 * 3, dtype=torch.int32).view(size, 2, 3).movedim(0, dim)
    halves = x.chunk(2, dim)
    pieces = [half.split(group, dim) for half in halves]
    want = torch.cat([piece for pair in zip(*pieces, strict=True) for piece in pair], dim)
    got = kernels.interleave_linear_and_gate(x, group, dim)
    assert torch.equal(got, want) and got.is_contiguous()
    assert torch.equal(kernels.deinterleave_linear_and_gate(got, group, dim), x)
    out = torch.empty_like(want)
    assert kernels.interleave_linear_and_gate(x, group, dim, out=out) is out
    assert torch.equal(out, want)


def test_interleave_linear_and_gate_refuses() -> None:
    with pytest.raises(LayoutError, match=r"x \(2, 3, 130\).*2 \* group_size = 128"):
        kernels.interleave_linear_and_gate(torch.zeros(2, 3, 130))
    with pytest.raises(LayoutError, match="group_size=0"):
        kernels.interleave_linear_and_gate(torch.zeros(2, 4), 0)
    with pytest.raises(LayoutError, match="out .* cannot take"):
        kernels.interleave_linear_and_gate(torch.zeros(4), 1, 0, out=torch.zeros(5))


@pytest.mark.parametrize(("tile", "block"), [(128, 32), (256, 32), (64, 16)])
def test_shuffle_rows_for_trtllm(tile: int, block: int) -> None:
    x = rows(2 * block)
    got = kernels.shuffle_rows_for_trtllm(x, tile)
    b = block // 8
    for row in range(2 * block):
        inside = row % block
        target = row - inside + inside % b * 8 + inside // b
        assert torch.equal(got[:, target], x[:, row])
    assert torch.equal(kernels.unshuffle_rows_for_trtllm(got, tile), x)
    with pytest.raises(LayoutError, match=f"no multiple of the {block}-row block"):
        kernels.shuffle_rows_for_trtllm(x[:, :-1], tile)


@pytest.mark.parametrize("shape", [(0, 64, 4), (2, 64, 0)])
def test_empty_inputs(shape: tuple[int, ...]) -> None:
    x = torch.empty(shape, dtype=torch.uint8)
    assert kernels.shuffle_rows_for_trtllm(x).shape == shape
    assert kernels.interleave_linear_and_gate(x, 8, -2).shape == shape
    assert kernels.reorder_w1w3_to_w3w1(x, x.clone())[0].shape == shape
    assert kernels.reorder_w13_to_w31_for_flashinfer_cutedsl("silu", x, x)[0].shape == shape
