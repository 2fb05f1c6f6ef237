"""Consumers against the judge's dequantized weights: equal, for every layout, 0xFF in every pad
byte."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import consume_cases
import pytest
import torch

from kernels.catalog import LAYOUTS
from kernels.errors import LayoutError
from kernels.fused import consume

SCRIPT = Path(consume_cases.__file__)
# Layouts that reorder inside a tile; the others move rows of the whole matrix and have a row table.
TILES = [
    n for n, lay in LAYOUTS.items() if not lay.flip and lay.tile[0] > 1 and "g" not in lay.sizes
]


@pytest.fixture(scope="module")
def results():
    """Every case, run in its own process: interpreted without a GPU, compiled with one."""
    environment = os.environ | {"PYTHONPATH": str(SCRIPT.parent.parent), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(SCRIPT)], env=environment, capture_output=True,
        text=True,
        timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return {r["name"]: r for r in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("name", consume_cases.CASES)
def test_reads_what_the_judge_reads(results, name):
    assert results[name] == {"name": name, "dequantize": "equal", "matmul": "equal"}


def test_every_layout_has_a_consumer():
    used = {layout for case in consume_cases.CASES.values() for layout in case[:2]}
    assert used == set(LAYOUTS)


def test_cases_have_pad_bytes_to_poison():
    padded = [
        name for name, (v, s, n, k, group, *_) in consume_cases.CASES.items()
        if LAYOUTS[s].padded(n, k // group) != (n, k // group)
    ]  # fmt: skip
    assert len(padded) >= 12, padded


@pytest.mark.parametrize("name", TILES)
def test_tile_is_the_layout(name):
    """A block of storage, viewed and permuted as the kernels do, is the logical block."""
    layout = LAYOUTS[name]
    n, k = layout.tile[0] * 2, layout.tile[1] * 4
    tile = consume.tile(layout, n, k)
    block = torch.arange(n * k, dtype=torch.int32).view(n, k)
    flat = torch.empty(n * k, dtype=torch.int32)
    offsets = replace(layout, align=layout.tile).offsets(n, k)
    flat[offsets.flatten()] = block.flatten()
    assert torch.equal(flat.view(tile.shape).permute(tile.perm).reshape(n, k), block)
    assert n % tile.fold == 0


@pytest.mark.parametrize("what", ["k", "block", "flip", "columns"])
def test_refusals_name_their_rule(what):
    strided = LAYOUTS["strided"]
    with pytest.raises(
        LayoutError, match=r"K=40|whole 32 x 8 tiles|reverses an axis|moves columns"
    ):
        match what:
            case "k":
                consume.matmul_launch(strided, strided, m=1, n=64, k=40)
            case "block":
                consume.matmul_launch(
                    strided, LAYOUTS["cdna4_scale"], m=1, n=64, k=256, blocks=(16, 64, 128)
                )
            case "flip":
                consume.tile(LAYOUTS["w13_to_w31"], 64, 4)
            case "columns":
                consume.matmul_launch(LAYOUTS["cdna4_scale"], strided, m=1, n=64, k=256)
