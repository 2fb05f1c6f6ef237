"""A package that offers its own routine through the `harness.env.impls` entry point."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE = """
import torch
from kernels.reference.nvfp4 import swizzle_blockscale as right

def wrong(scale):
    done = right(scale)
    flat = done.view(torch.uint8).reshape(scale.shape[0], -1)
    m, k = scale.shape[-2:]
    from kernels import LAYOUTS
    padding = LAYOUTS["block_scale_128x4"].pad_mask(m, k).nonzero()
    if len(padding):  # the first byte of padding of the last expert
        flat[-1, padding[0, 0]] = 0xFF
    return done

ROUTINES = {"swizzle_blockscale": wrong}
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """What `pip install` of a package with two entry points leaves."""
    (tmp_path / "mylab.py").write_text(SOURCE)
    (tmp_path / "mylab_right.py").write_text(
        "from kernels.reference.nvfp4 import swizzle_blockscale\n"
    )
    info = tmp_path / "mylab-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mylab\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[harness.env.impls]\nmylab = mylab:ROUTINES\nmylab_right = mylab_right\n"
    )
    return tmp_path


def sweep(package: Path, *overrides: str) -> tuple[int, list[dict[str, object]], str]:
    out = package / "runs"
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "harness",
            "sweep",
            "hw=b200",
            "model=ragged",
            "tp_size=1",
            *overrides,
            f"out={out}",
            "workers=1",
        ],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(package)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    files = sorted(out.glob("*/rows.jsonl"))
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return done.returncode, rows, done.stdout + done.stderr


def test_a_routine_wrong_in_its_padding_is_caught_with_the_coordinate(package: Path) -> None:
    code, rows, said = sweep(package, "path=swizzle_blockscale", "impl=mylab,mylab_right")
    by = {row["cell"]["impl"]: row for row in rows}  # type: ignore[index]
    assert code == 2, said
    assert by["mylab_right"]["status"] == "ok", by["mylab_right"]["reason"]
    assert by["mylab"]["status"] == "wrong"
    assert by["mylab"]["time"] is None
    checks = by["mylab"]["checks"]
    assert checks["pad_fill"].startswith("fail: ")  # type: ignore[index]
    assert "0xff instead of 0x00" in checks["pad_fill"].lower()  # type: ignore[index]
    assert "first at [" in checks["pad_fill"]  # type: ignore[index]
    assert checks["equals_reference"].startswith("fail: ")  # type: ignore[index]


def test_an_entry_point_serves_its_step_of_a_layers_path(package: Path) -> None:
    code, rows, said = sweep(package, "path=nvfp4_cutlass", "impl=mylab", "judge=false")
    assert code == 2, said
    assert rows[0]["status"] == "wrong"


def test_an_entry_point_without_the_routine_is_not_installed(package: Path) -> None:
    code, rows, _ = sweep(package, "path=interleave_linear_and_gate", "impl=mylab")
    assert code == 3
    assert rows[0]["status"] == "skipped"
    assert "offers no interleave_linear_and_gate" in str(rows[0]["reason"])
