"""The vendors' formulas against their recorded bytes, and the catalog against the formulas."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from harness.check import oracle
from kernels import catalog

GOLDEN = Path(__file__).parent / "golden"
SHAPES = [(1, 1), (2, 1), (130, 5), (96, 47), (352, 90), (2880, 12), (704, 33), (256, 256)]


def coordinates(n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    index = torch.arange(n * k)
    return index // k, index % k


def test_every_layout_of_the_catalog_has_a_formula() -> None:
    assert set(oracle.TRUTHS) == set(catalog.LAYOUTS)


@pytest.mark.parametrize("name", list(catalog.LAYOUTS))
def test_catalog_puts_every_element_where_the_vendor_does(name: str) -> None:
    layout, truth = catalog.LAYOUTS[name], oracle.TRUTHS[name]
    for n, k in SHAPES:
        if n % layout.parts:
            continue
        assert oracle.padded(truth, n, k) == layout.padded(n, k)
        m, c = coordinates(n, k)
        x = torch.randint(0, 256, (2, n, k), dtype=torch.uint8)
        found = oracle.bytes_at(truth, layout.forward(x).flatten(1), m, c, n, k)
        assert torch.equal(found, x.flatten(1)), (name, n, k)


@pytest.mark.parametrize("generation", ["3.5", "3.8"])
def test_formulas_find_every_byte_that_triton_kernels_wrote(generation: str) -> None:
    suffix = "" if generation == "3.5" else "_tk38"
    names = {
        "hopper_value": f"hopper_value_v3{suffix}", "hopper_scale_w4": f"hopper_scale_w4{suffix}",
        "hopper_scale_w8": f"hopper_scale_w8{suffix}", "blackwell_value": "blackwell_value",
        "blackwell_scale": "blackwell_scale", "cdna4_scale": "cdna4_scale",
        "gfx1250_scale": "gfx1250_scale",
    }  # fmt: skip
    seen = set()
    with np.load(GOLDEN / f"triton_kernels_{generation}.npz") as recorded:
        for key in recorded.files:
            if not key.endswith("_in"):
                continue
            kind = key.split("_E")[0]
            truth = oracle.TRUTHS[names[kind]]
            x = torch.from_numpy(recorded[key])
            out = torch.from_numpy(recorded[key.removesuffix("_in") + "_out"])
            storage = out.view(torch.uint8).reshape(x.shape[0], -1)
            e, n, k = x.shape
            m, c = coordinates(n, k)
            found = oracle.bytes_at(truth, storage, m, c, n, k)
            assert torch.equal(found, x.reshape(e, -1)), key
            seen.add(kind)
    absent = {"gfx1250_scale"} if generation == "3.5" else set()  # that generation has no gfx1250
    assert seen == set(names) - absent


def test_formulas_find_every_byte_that_flashinfer_wrote() -> None:
    count = 0
    with np.load(GOLDEN / "flashinfer_h200.npz") as recorded:
        for key in recorded.files:
            if key.startswith("sf_") and key.endswith("_in"):
                names = {"": "block_scale_128x4"}
            elif "_in_" in key:
                gated = "_gated_" in key
                names = {
                    "w13": "trtllm_w13" if gated else "trtllm_shuffle_32",
                    "s13": "trtllm_w13_scale" if gated else "trtllm_w2_scale",
                    "w2": "trtllm_shuffle_32", "s2": "trtllm_w2_scale",
                }  # fmt: skip
            else:
                continue
            kind = key.split("_in_")[1] if "_in_" in key else ""
            x = torch.from_numpy(recorded[key].view(np.uint8))
            out = torch.from_numpy(recorded[key.replace("_in", "_out")].view(np.uint8))
            x = x.reshape(-1, *x.shape[-2:])
            e, n, k = x.shape
            m, c = coordinates(n, k)
            truth = oracle.TRUTHS[names[kind]]
            assert torch.equal(oracle.bytes_at(truth, out.reshape(e, -1), m, c, n, k), x.flatten(1))
            count += 1
    assert count >= 8
