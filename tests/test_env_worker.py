"""A worker process: whose `kernels` it imports, and what a dead or slow one leaves behind."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import kernels
from harness.env import envs
from harness.env import worker as env_worker
from harness.env.worker import Worker, WorkerDied, WorkerTimeout, is_apart
from harness.plan import grid

CURRENT = envs.load("current")
PATCH = """
import os, signal, time
from kernels.reference.nvfp4 import swizzle_blockscale as right

def swizzle_blockscale(scale, **options):
    print("chatter on stdout")
    if scale.shape[-1] == 94:  # the ragged model's hidden size of 1504
        os.kill(os.getpid(), signal.SIGKILL)
    return right(scale, **options)

def slow(scale, **options):
    time.sleep(60)
"""


def cells(*overrides: str) -> list[dict[str, Any]]:
    return grid.plan(["hw=b200", "path=swizzle_blockscale", "tp_size=1", *overrides]).cells


@pytest.fixture
def patch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my_patch.py").write_text(PATCH)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def test_kernels_is_this_projects_even_beside_another_package_of_that_name(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("raise ImportError('the Hub package')")
    with Worker(CURRENT, extra_path=(str(tmp_path),)) as worker:
        said = worker.call("hello")
    assert Path(said["kernels"]) == Path(str(kernels.__file__))
    assert said["env"] == "current"
    assert set(said["versions"]) == {"python", "torch", "triton"}


def test_killed_worker_leaves_a_crashed_row_and_the_next_cell_runs(patch: Path) -> None:
    both = cells("model=ragged,qwen3_30b", "impl.import=my_patch:swizzle_blockscale")
    assert all(is_apart(cell) for cell in both)
    by = {cell["model"]["name"]: env_worker.execute(cell, {}) for cell in both}
    env_worker.close_all()
    assert by["ragged"]["status"] == "crashed"
    assert "SIGKILL" in by["ragged"]["reason"]
    assert by["ragged"]["time"] is None
    assert by["ragged"]["repro"].startswith("python -m harness sweep hw=b200 model=ragged")
    assert by["qwen3_30b"]["status"] == "ok", by["qwen3_30b"]["reason"]


def test_kill_from_outside_in_the_middle_of_a_call(patch: Path) -> None:
    (cell,) = cells("model=qwen3_30b", "impl.import=my_patch:slow")
    with Worker(CURRENT) as worker:
        worker.call("hello")
        assert worker.process is not None
        pid = worker.process.pid
        killer = threading.Timer(2.0, os.kill, (pid, signal.SIGKILL))
        killer.start()
        with pytest.raises(WorkerDied, match="SIGKILL"):
            worker.call("cell", 50, cell=cell, ctx={})
        assert worker.call("hello")["env"] == "current"
        assert worker.started == 2


def test_slow_worker_is_ended_in_time(patch: Path) -> None:
    (cell,) = cells("model=qwen3_30b", "impl.import=my_patch:slow")
    with Worker(CURRENT) as worker:
        worker.call("hello")
        start = time.monotonic()
        with pytest.raises(WorkerTimeout, match="no answer in 3 s"):
            worker.call("cell", 3, cell=cell, ctx={})
        assert time.monotonic() - start < 15
        assert worker.process is None


def test_env_that_is_not_built_is_a_row_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FP4_MOE_ENVS", str(tmp_path))
    (cell,) = cells("model=ragged", "env=triton36")
    assert is_apart(cell)
    row = env_worker.execute(cell, {})
    assert row["status"] == "skipped"
    assert "triton==3.6.0" in row["reason"]
    assert row["time_absent"] == row["codegen_absent"] == "NOT_INSTALLED"


def test_vendor_that_is_absent_is_not_installed_never_passed() -> None:
    (cell,) = cells("model=ragged", "impl=flashinfer")
    assert is_apart(cell)
    row = env_worker.execute(cell, {})
    env_worker.close_all()
    assert row["status"] == "skipped"
    assert row["checks"] == {}
    assert row["time_absent"] == "NOT_INSTALLED"
    assert "flashinfer is not installed" in row["reason"]


def test_own_cell_of_the_current_env_needs_no_worker() -> None:
    (cell,) = cells("model=ragged")
    assert not is_apart(cell)
