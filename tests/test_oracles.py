"""Every key of the layout oracles, byte for byte: bytes, shapes and strides of the real
libraries."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

import kernels
from kernels import catalog
from kernels.reference import mxfp4

GOLDEN = Path(__file__).parent / "golden"
INPUTS = [
    (generation, key.removesuffix("_in"))
    for generation in catalog.GENERATIONS
    for key in np.load(GOLDEN / f"triton_kernels_{generation}.npz").files
    if key.endswith("_in")
]


def tensors(file: str) -> dict[str, torch.Tensor]:
    with np.load(GOLDEN / file) as arrays:
        return {key: torch.from_numpy(arrays[key]) for key in arrays.files}


def layout_of(key: str, generation: str) -> kernels.Layout:
    name = re.sub(r"_E\d.*", "", key)
    if name == "hopper_value":
        return catalog.hopper_value(3, generation)
    if name.startswith("hopper_scale"):
        return catalog.hopper_scale(int(name[-1]), generation)
    return catalog.find(name)


@pytest.mark.parametrize(("generation", "key"), INPUTS, ids=lambda x: x)
def test_triton_kernels(generation: str, key: str) -> None:
    oracle = tensors(f"triton_kernels_{generation}.npz")
    x, want = oracle[f"{key}_in"], oracle[f"{key}_out"]
    made = mxfp4.swizzle(x, layout_of(key, generation))
    assert list(made.data.shape) == oracle[f"{key}_shape"].tolist()
    strides = oracle[f"{key}_stride"].tolist()
    free = [size > 1 for size in made.data.shape]
    assert [s for s, f in zip(made.data.stride(), free, strict=True) if f] == [
        s for s, f in zip(strides, free, strict=True) if f
    ]
    got = made.storage.reshape(want.shape)
    if generation == "3.8" and key.startswith("blackwell_value"):
        valid = x.shape[
            -1
        ]  # that library leaves the padding uninitialised; see the oracle's README
        got, want = got[..., :valid], want[..., :valid]
    assert torch.equal(got, want)
    assert torch.equal(mxfp4.unswizzle(made), x)


SCALES = ["128x4", "128x8", "256x12", "130x6", "2880x90", "64x180", "512x448", "1x1"]
LAYERS = [
    f"E{e}_H{h}_I{i}_{kind}"
    for e, h, i in ((2, 256, 128), (3, 512, 384))
    for kind in ("gated", "plain")
]


@pytest.mark.parametrize("shape", SCALES)
def test_flashinfer_block_scale_interleave(shape: str) -> None:
    oracle = tensors("flashinfer_h200.npz")
    x, want = oracle[f"sf_{shape}_in"], oracle[f"sf_{shape}_out"]
    got = kernels.nvfp4_block_scale_interleave(x)
    assert torch.equal(got, want)
    assert torch.equal(kernels.nvfp4_block_scale_deinterleave(got, *x.shape), x)
    swizzled = kernels.swizzle_blockscale(x.view(torch.float8_e4m3fn))
    assert torch.equal(swizzled.view(torch.uint8).flatten(), want)


@pytest.mark.parametrize("layer", LAYERS)
def test_flashinfer_trtllm_preparation(layer: str) -> None:
    oracle = tensors("flashinfer_h200.npz")
    e, h, i = (int(part[1:]) for part in layer.split("_")[:3])
    given = {t: oracle[f"trtllm_{layer}_in_{t}"] for t in ("w13", "w2", "s13", "s2")}
    kept = {t: x.clone() for t, x in given.items()}
    results = kernels.prepare_static_weights_for_trtllm_fp4_moe(
        *given.values(), h, i, e, "gated" in layer
    )
    for name, got in zip(("w13", "s13", "w2", "s2"), results, strict=True):
        assert torch.equal(got.view(torch.uint8), oracle[f"trtllm_{layer}_out_{name}"]), name
        assert got.dtype == (torch.float8_e4m3fn if name[0] == "s" else torch.uint8)
    assert all(torch.equal(given[t], kept[t]) for t in given)


def test_no_key_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    counts = {}
    for generation in catalog.GENERATIONS:
        file = f"triton_kernels_{generation}.npz"
        tested = {
            f"{key}_{end}"
            for g, key in INPUTS
            if g == generation
            for end in ("in", "out", "shape", "stride")
        }
        counts[file] = len(tested)
        assert tested == set(tensors(file))
    tested = {f"sf_{shape}_{end}" for shape in SCALES for end in ("in", "out")}
    tested |= {
        f"trtllm_{layer}_{end}_{t}"
        for layer in LAYERS
        for end in ("in", "out")
        for t in ("w13", "w2", "s13", "s2")
    }
    counts["flashinfer_h200.npz"] = len(tested)
    assert tested == set(tensors("flashinfer_h200.npz"))
    with capsys.disabled():
        print(
            "\noracle keys reproduced:", ", ".join(f"{n} of {file}" for file, n in counts.items())
        )
