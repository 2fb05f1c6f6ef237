"""Whole NVFP4 layers: padding for FlashInfer, CuteDSL and TRT-LLM preparation."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import kernels
from kernels import LAYOUTS, LayoutError

E4M3 = torch.float8_e4m3fn


def layer(e: int, h: int, i: int, gated: bool) -> dict[str, torch.Tensor]:
    """Coded bytes of one layer; the two rows of any pair differ."""
    rows = 2 * i if gated else i
    shapes = {
        "w13": (e, rows, h // 2),
        "w13_scale": (e, rows, h // 16),
        "w2": (e, h, i // 2),
        "w2_scale": (e, h, i // 16),
    }
    generator = torch.Generator().manual_seed(e * h + i)
    return {
        name: torch.randint(1, 120, shape, dtype=torch.uint8, generator=generator)
        for name, shape in shapes.items()
    }


def padded(x: torch.Tensor, rows: int, cols: int, halves: int = 1) -> torch.Tensor:
    """Each half of the rows padded by itself, spelled out with cat."""
    parts = [
        torch.nn.functional.pad(part, (0, cols - x.shape[2], 0, rows // halves - part.shape[1]))
        for part in x.chunk(halves, 1)
    ]
    return torch.cat(parts, 1)


@pytest.mark.parametrize("gated", [True, False])
def test_align_fp4_moe_weights_for_fi(gated: bool) -> None:
    given = layer(2, 64, 48, gated)
    kept = {name: x.clone() for name, x in given.items()}
    *got, size = kernels.align_fp4_moe_weights_for_fi(*given.values(), gated, 64)
    halves = 2 if gated else 1
    assert size == 64
    for name, x, (rows, cols) in zip(
        given, got, [(64 * halves, 32), (64 * halves, 4), (64, 32), (64, 4)], strict=True
    ):
        want = padded(given[name], rows, cols, halves if name.startswith("w13") else 1)
        assert torch.equal(x, want), name
        assert torch.equal(given[name], kept[name])
    *same, size = kernels.align_fp4_moe_weights_for_fi(*given.values(), gated, 16)
    assert size == 48 and all(a is b for a, b in zip(same, given.values(), strict=True))


def test_align_fp4_moe_hidden_dim_for_fi() -> None:
    given = layer(2, 48, 32, True)
    *got, size = kernels.align_fp4_moe_hidden_dim_for_fi(*given.values())
    assert size == 256
    for name, x, (rows, cols) in zip(
        given, got, [(64, 128), (64, 16), (256, 16), (256, 2)], strict=True
    ):
        assert torch.equal(x, padded(given[name], rows, cols)), name


def test_align_refuses() -> None:
    given = layer(2, 64, 48, True)
    with pytest.raises(LayoutError, match="w2_scale \\(2, 64, 2\\) does not belong"):
        kernels.align_fp4_moe_weights_for_fi(
            *(given | {"w2_scale": given["w2_scale"][..., :2]}).values(), True
        )
    with pytest.raises(LayoutError, match="min_alignment=24 is no multiple of 16"):
        kernels.align_fp4_moe_weights_for_fi(*given.values(), True, 24)
    with pytest.raises(LayoutError, match="has 96 rows; w2 .* says 1 x 48"):
        kernels.align_fp4_moe_weights_for_fi(*given.values(), False)
    with pytest.raises(LayoutError, match="are not of one layer"):
        kernels.align_fp4_moe_hidden_dim_for_fi(
            *(given | {"w2": given["w2"][:, :32], "w2_scale": given["w2_scale"][:, :32]}).values()
        )


@pytest.mark.parametrize("activation", ["silu", "swigluoai", "relu2_no_mul"])
@pytest.mark.parametrize(("h", "i"), [(256, 128), (192, 80), (512, 48)])
def test_prepare_nvfp4_moe_layer_for_flashinfer_cutedsl(activation: str, h: int, i: int) -> None:
    gated = activation != "relu2_no_mul"
    given = layer(3, h, i, gated)
    kept = {name: x.clone() for name, x in given.items()}
    a13, a2 = torch.tensor([1.0, 3.0, 2.0]), torch.tensor([0.5, 0.25, 0.125])
    g13, g2 = torch.ones(3, 2), torch.ones(3)
    got = kernels.prepare_nvfp4_moe_layer_for_flashinfer_cutedsl(
        SimpleNamespace(activation=activation),
        given["w13"], given["w13_scale"].view(E4M3), g13, a13,
        given["w2"], given["w2_scale"].view(E4M3), g2, a2,
    )  # fmt: skip
    w13, s13, got_g13, got_a13, w2, s2, got_g2, got_a2 = got
    unit = 64 if gated else 128
    ip, hp = -(-i // unit) * unit, -(-h // 256) * 256
    for name, x, cols in (("w13", w13, hp // 2), ("w13_scale", s13, hp // 16)):
        rows = given[name]
        if gated:
            halves = (
                (rows[:, 0::2], rows[:, 1::2]) if activation == "swigluoai" else rows.chunk(2, 1)
            )
            gate, up = (padded(half, ip, cols) for half in halves)
            rows = torch.stack([up.unflatten(1, (-1, 64)), gate.unflatten(1, (-1, 64))], 2).flatten(
                1, 3
            )
        else:
            rows = padded(rows, ip, cols)
        if name == "w13_scale":
            rows = LAYOUTS["block_scale_128x4"].forward(rows).reshape(rows.shape)
        assert torch.equal(x.view(torch.uint8), rows), name
    assert torch.equal(w2, padded(given["w2"], hp, ip // 2))
    want = LAYOUTS["block_scale_128x4"].forward(padded(given["w2_scale"], hp, ip // 16))
    assert torch.equal(s2.view(torch.uint8).flatten(1), want.flatten(1))
    assert got_g13 is g13 and got_g2 is g2
    assert got_a13.tolist() == [3.0] * 3 and got_a2.tolist() == [0.5] * 3
    assert got_a13.is_contiguous() and got_a13.stride() == (1,), "no stride-0 parameter"
    assert all(torch.equal(given[name], kept[name]) for name in given)


@pytest.mark.parametrize(
    ("h", "i", "gated", "rule"),
    [
        (256, 176, True, "gemm1 rows .*, 352, must be divisible by 128"),
        (256, 192, False, "gemm1 rows .*, 192, must be divisible by 128"),
        (192, 128, True, "the hidden size, 192, must be divisible by 128"),
    ],
)
def test_prepare_static_weights_for_trtllm_fp4_moe_refuses(
    h: int, i: int, gated: bool, rule: str
) -> None:
    x = layer(1, h, i, gated)
    with pytest.raises(LayoutError, match=rule):
        kernels.prepare_static_weights_for_trtllm_fp4_moe(
            x["w13"], x["w2"], x["w13_scale"], x["w2_scale"], h, i, 1, gated
        )


def test_prepare_static_weights_for_trtllm_fp4_moe_names_the_tensor() -> None:
    x = layer(2, 128, 128, True)
    with pytest.raises(
        LayoutError, match=r"w2_scale \(1, 128, 8\) .*want one-byte .* \(2, 128, 8\)"
    ):
        kernels.prepare_static_weights_for_trtllm_fp4_moe(
            x["w13"], x["w2"], x["w13_scale"], x["w2_scale"][:1], 128, 128, 2, True
        )


def test_expert_by_expert_into_its_final_place() -> None:
    x = layer(3, 128, 128, True)
    args = (x["w13"], x["w2"], x["w13_scale"], x["w2_scale"])
    whole = kernels.prepare_static_weights_for_trtllm_fp4_moe(*args, 128, 128, 3, True)
    out = tuple(torch.empty_like(tensor) for tensor in whole)
    for e in range(3):
        kernels.prepare_static_weights_for_trtllm_fp4_moe(
            *(tensor[e : e + 1] for tensor in args), 128, 128, 1, True,
            out=out, experts=slice(e, e + 1),
        )  # fmt: skip
    for got, want in zip(out, whole, strict=True):
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
    with pytest.raises(LayoutError, match="needs out="):
        kernels.prepare_static_weights_for_trtllm_fp4_moe(
            *args, 128, 128, 3, True, experts=slice(0, 1)
        )
