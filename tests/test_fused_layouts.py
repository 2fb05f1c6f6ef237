"""The fused layout kernels: the interpreted suite in a process of its own, and code for six
targets."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.codegen.compiler import compile_many
from kernels.catalog import LAYOUTS
from kernels.fused.rearrange import Job, describe, job, job_of_parts
from kernels.fused.tiles import tile_for

ROOT = Path(__file__).resolve().parents[1]
TARGETS = ("sm90", "sm100", "sm120", "gfx942", "gfx950", "gfx1250")

# Layout, rows, columns, widest load and store, in bytes a lane, that the source's alignment allows.
SHAPES: dict[str, tuple[str, int, int, int, int]] = {
    "reorder": ("w13_to_w31", 5760, 1440, 16, 16),
    "reorder scale": ("w13_to_w31", 5760, 90, 16, 16),  # halves are contiguous: 16 divides 259200
    "deinterleave": ("w13_interleaved_to_w31", 5760, 1440, 16, 16),
    "deinterleave scale": ("w13_interleaved_to_w31", 5760, 90, 2, 2),  # rows of 90 bytes
    "interleave": ("gate_up_interleave_64", 5760, 1440, 16, 16),
    "cutedsl_w13": ("cutedsl_w13", 512, 3584, 16, 16),
    "trtllm_w13": ("trtllm_w13", 4096, 3584, 16, 16),
    "trtllm_w2": ("trtllm_shuffle_32", 7168, 128, 16, 16),
    "blackwell_value": ("blackwell_value", 5760, 1440, 16, 16),
    "128x4": ("block_scale_128x4", 4096, 448, 16, 16),
    "128x4 rows of 180": ("block_scale_128x4", 5760, 180, 4, 16),
    "trtllm_w13_scale": ("trtllm_w13_scale", 4096, 448, 16, 16),
    "trtllm_w2_scale": ("trtllm_w2_scale", 7168, 16, 16, 16),
    "cutedsl_w13_scale": ("cutedsl_w13_scale", 512, 448, 16, 16),
    "blackwell_scale": ("blackwell_scale", 5760, 96, 16, 16),
    "blackwell_scale rows of 90": ("blackwell_scale", 5760, 90, 2, 16),
    "hopper_scale rows of 90": ("hopper_scale_w8", 5760, 90, 2, 16),
    "hopper_scale": ("hopper_scale_w4", 5760, 96, 16, 16),
    "hopper_value_v2": ("hopper_value_v2", 5760, 1440, 16, 16),
    "hopper_value_v3": ("hopper_value_v3", 5760, 1440, 16, 16),
    "cdna4_scale": ("cdna4_scale", 5760, 96, 16, 16),
    "gfx1250_scale": ("gfx1250_scale", 5760, 96, 16, 16),
}


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("which", "least"), [("every_layout", 4), ("not every_layout", 80)])
def test_suite_against_the_reference(suite: Callable[..., None], which: str, least: int) -> None:
    suite("layout_suite.py", least, which)


def meta(layout: str, n: int, k: int) -> Job:
    """A matrix without memory into a layout: enough to plan the launch."""
    return job(LAYOUTS[layout], torch.empty((n, k), dtype=torch.uint8, device="meta"))


def launches(target: str) -> dict[str, tuple[dict[str, Any], int, int]]:
    """Name -> launch and its widest load and store: every shape there, and some back."""
    table = "wave64" if target in ("gfx942", "gfx950") else "sm90"
    found = {}
    for name, (layout, n, k, load, store) in SHAPES.items():
        found[name] = describe(meta(layout, n, k), table), load, store
        if name in ("hopper_value_v3", "128x4", "hopper_scale", "trtllm_w13"):
            back = describe(replace(meta(layout, n, k), back=True), table)
            found[f"{name} back"] = back, store, load
    merged = ("cutedsl_w13_scale", "trtllm_w13_scale") if target.startswith("sm") else ()
    for name in merged:  # two global scales made one on the way; no AMD path takes NVFP4
        share = torch.empty((8, 2, 512, 448), dtype=torch.float8_e4m3fn, device="meta")
        made = job_of_parts(LAYOUTS[name], share, torch.empty(8, 2, device="meta"))
        found[f"{name} merged"] = describe(made, table), 16, 16
    found["swap"] = (
        {
            "module": "kernels.fused.rearrange_kernels", "kernel": "swap_kernel",
            "pointers": {"x": "*i32"}, "integers": {"half": 16, "blocks": 7},
            "constants": {"UNITS": 128, "VECTOR": 4, "WIDE": False}, "num_stages": 3,
            "num_warps": tile_for(table, "swap").rows_warps,
        },
        16, 16,
    )  # fmt: skip
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize("target", TARGETS)
def test_code_has_no_spill_and_16_byte_accesses(target: str) -> None:
    named = launches(target)
    records = compile_many([(launch, target) for launch, _, _ in named.values()])
    for (name, (_, load, store)), record in zip(named.items(), records, strict=True):
        assert record["spills"] == 0 and record["stack_bytes"] == 0, (name, record)
        loads = set(record["global_loads"]) - ({"4"} if name.endswith("merged") else set())
        assert loads == {str(load)}, (name, record["global_loads"])  # merged: and both scales
        assert set(record["global_stores"]) == {str(store)}, (name, record["global_stores"])


def test_a_size_or_stride_of_one_is_a_constant_and_compiles() -> None:
    """triton makes a plain number of it, which the interpreter does not."""
    one = lambda v: type(v)(1 for _ in v) if isinstance(v, (list, tuple)) else 1
    named = [launch for launch, _, _ in launches("sm90").values()]
    changed = [
        launch | {"integers": {name: one(v) for name, v in launch["integers"].items()}}
        for launch in named
    ]
    compile_many([(launch, "sm90") for launch in changed])


def test_shapes_share_compilations() -> None:
    """What the compiler is told differs by layout and alignment, not by every size of a model."""
    seen = set()
    for n in (2880, 4096, 5760, 7168):
        for k in (1440, 1536, 2048, 3584):
            launch = describe(meta("trtllm_shuffle_32", n, k))
            seen.add(tuple(launch["constants"].items()))  # type: ignore[attr-defined]
    assert len(seen) == 1
    seen = set()
    for n in (2880, 4096, 5760, 7168):
        for k in (180, 192, 256, 448, 896, 1024):
            launch = describe(meta("block_scale_128x4", n, k))
            seen.add(tuple(launch["constants"].items()))  # type: ignore[attr-defined]
    assert len(seen) <= 6


def test_import_takes_no_gpu_context_and_no_harness() -> None:
    """`import kernels` and the planner alone: nothing of the harness, no CUDA initialisation."""
    code = (
        "import sys, kernels, kernels.fused.plan, torch; "
        "bad = {'hydra', 'pandas', 'matplotlib', 'harness'} & set(sys.modules); "
        "assert not bad, bad; assert not torch.cuda.is_initialized()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
