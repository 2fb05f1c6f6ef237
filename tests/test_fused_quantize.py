"""The fused quantizers: the interpreted suite in a process of its own, and code for six targets."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.codegen import compile_many

ROOT = Path(__file__).resolve().parents[1]
TARGETS = ("sm90", "sm100", "sm120", "gfx942", "gfx950", "gfx1250")
STRIDES = ("x", "q", "s")


def launch(
    *,
    dtype: str = "bf16",
    block: int = 32,
    flat: bool = True,
    pairs: bool = False,
    turned: bool = False,
) -> dict[str, Any]:
    """One specialisation of quantize_kernel as the host launches it; 16: any multiple of 16."""
    integers = dict.fromkeys(("length", "rows", "middle", "k_tiles", "row_tiles"), 16)
    integers |= {f"{t}_{a}": 16 for t in STRIDES for a in ("k", "row", "mid", "out")}
    integers |= {f"g_{axis}": 16 for axis in ("row", "mid", "out")}
    integers |= {"q_k": 1, ("x_row" if turned else "x_k"): 1, "s_k": 1}
    if flat:
        integers |= {"rows": 1, "middle": 1, "row_tiles": 1}
    tile = 2048 if dtype == "fp32" else 4096
    source = {"bf16": "*bf16", "fp16": "*fp16", "fp32": "*fp32"}[dtype]
    return {
        "module": "kernels.fused.quantize_kernels",
        "kernel": "quantize_kernel",
        "pointers": {
            "x_ptr": "*i32" if pairs else source,
            "q_ptr": "*i32",
            "s_ptr": "*u8",
            "g_ptr": "*u8" if block == 32 else "*fp32",
        },
        "integers": integers,
        "constants": {
            "BLOCK_R": 1 if flat else 64, "BLOCK_K": tile if flat else 128, "BLOCK": block,
            "BIAS": 0x200000, "SATURATE": block == 16, "DROP_NAN": False, "WORDS": True,
            "PAIRS": pairs,
        },
        "num_warps": 4,
        "num_stages": 3,
    }  # fmt: skip


LAUNCHES = {
    "mxfp4_bf16": launch(),
    "mxfp4_fp16": launch(dtype="fp16"),
    "mxfp4_fp32": launch(dtype="fp32"),
    "mxfp4_across_rows": launch(flat=False, turned=True),
    "nvfp4_bf16": launch(block=16),
}
PAIRED = {"mxfp4_pairs": launch(pairs=True)}


@pytest.mark.timeout(600)
def test_suite_against_the_reference() -> None:
    """On a GPU the compiled kernels, elsewhere the interpreter."""
    environment = dict(os.environ)
    if not torch.cuda.is_available():
        environment["TRITON_INTERPRET"] = "1"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "0", "tests/interpreted/quantize_suite.py"],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) >= 43, done.stdout[-500:]


@pytest.mark.parametrize("target", TARGETS)
def test_code_has_no_spill_and_wide_loads(target: str) -> None:
    launches = LAUNCHES | (PAIRED if target.startswith("sm") else {})
    records = compile_many([(launch, target) for launch in launches.values()])
    for name, record in zip(launches, records, strict=True):
        assert record["spills"] == 0 and record["stack_bytes"] == 0, (name, record)
        assert max(map(int, record["global_loads"])) == 16, (name, record)
