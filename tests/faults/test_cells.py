"""A cell that dies, hangs, floods or lies costs itself only; totals and exit codes stay right."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from harness import rows
from harness.__main__ import main
from harness.env import worker as env_worker
from harness.env.worker import Worker
from harness.plan import grid

FAULTS = {  # of the stub -> (status, what the reason says)
    "segv": ("crashed", "signal SIGSEGV: Fatal Python error: Segmentation fault"),
    "exit": ("crashed", "code 7"),
    "kill": ("crashed", "signal SIGKILL"),
    "signal 40": ("crashed", "signal 40"),
    "raise": ("crashed", "RuntimeError: planted"),
    "unsendable": ("crashed", "its result cannot be sent: TypeError"),
    "nan": ("crashed", "its result cannot be sent: ValueError"),
    "no row": ("crashed", "Error"),
    "bad row": ("crashed", "row with schema 1, status 'fine'"),
    "flood": ("crashed", "code 9: last words"),
    "context": ("crashed", "an illegal memory access"),
    "grow": ("oom", "GiB, and was ended"),
}


def test_each_fault_ends_its_own_cell(site: Any) -> None:
    planted = {name.replace(" ", "_"): 3 * n + 1 for n, name in enumerate(FAULTS)}
    after_context = planted["context"] + 1
    argv = site.argv(
        site.stub(lost=after_context, **planted), 3 * len(FAULTS), "run_id=one", "limit_s=120",
        "workers=1",
    )  # fmt: skip
    assert site.run(argv) == 3, site.said()
    found = {row["cell"]["seed"]: row for row in site.rows()}
    assert len(found) == 3 * len(FAULTS)
    for name, (status, says) in FAULTS.items():
        row = found.pop(planted[name.replace(" ", "_")])
        assert (row["status"], says in row["reason"]) == (status, True), (name, row["reason"])
        assert row["time"] is None
        assert len(row["reason"]) < 700
    assert {row["status"] for row in found.values()} == {"ok"}
    assert all(row["digests"]["x"] for row in found.values())
    assert f"{3 * len(FAULTS)} cells: {2 * len(FAULTS)} ok" in site.said()
    assert "1 oom" in site.said()
    segfault = next(r for r in site.rows() if r["cell"]["seed"] == planted["segv"])
    assert any("in cell" in line for line in segfault["trace"])  # where it was, from faulthandler


def test_a_hang_ends_its_own_cell(site: Any) -> None:
    assert site.run(site.argv(site.stub(hang=1), 3, "run_id=one", "limit_s=5", "workers=1")) == 3
    found = {row["cell"]["seed"]: (row["status"], row["reason"]) for row in site.rows()}
    status, reason = found.pop(1)
    assert status == "timeout" and "no answer in 5 s; the worker was ended" in reason
    assert [status for status, _ in found.values()] == ["ok", "ok"]
    assert "1 timeout" in site.said()


def test_a_flood_of_stderr_is_not_kept_on_disk(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each cell writes 200 MiB; the file of the worker is looked at every tenth of a second."""
    seen: list[int] = []
    real = Worker._quiet

    def watch(self: Worker) -> int:
        at = real(self)
        if self._stderr is not None:
            seen.append(os.fstat(self._stderr.fileno()).st_blocks * 512)
        return at

    monkeypatch.setattr(Worker, "_quiet", watch)
    (cell,) = grid.plan(site.argv(site.stub(flood=0), 1)).cells
    row = env_worker.execute(cell, {}, 60)
    env_worker.close_all()
    assert "last words" in row["reason"]
    assert row["trace"][-1] == "last words"
    assert seen
    assert max(seen) <= env_worker.FLOOD_BYTES


PATCH = """
import ctypes, os, time
import torch
from harness.check import checks
from kernels.reference.nvfp4 import swizzle_blockscale as right

def fine(scale, **options):
    return right(scale, **options)

def segv(scale, **options):
    ctypes.memmove(0, scale.data_ptr(), 8)

def leave(scale, **options):
    os._exit(5)

def hang(scale, **options):
    time.sleep(600)

def huge(scale, **options):
    return torch.empty(100 << 30, dtype=torch.uint8).fill_(1)

def in_a_check(scale, **options):
    real, checks.strides = checks.strides, None
    def strides(*args):
        checks.strides = real
        raise RuntimeError("planted in a check")
    checks.strides = strides
    return right(scale, **options)
"""
REAL = {
    "fine": ("ok", ""),
    "segv": ("crashed", "signal SIGSEGV: Fatal Python error: Segmentation fault"),
    "leave": ("crashed", "code 5"),
    "hang": ("timeout", "no answer in 40 s"),
    "huge": ("oom", ""),
    "in_a_check": ("crashed", "RuntimeError: planted in a check"),
}


def test_faults_inside_a_kernel_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same through torch, a real routine and the whole ladder of checks."""
    (tmp_path / "faulty.py").write_text(PATCH)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    names = ",".join(f"faulty:{name}" for name in REAL)
    code = main(
        ["sweep", "hw=b200", "model=ragged", "path=swizzle_blockscale", "tp_size=1",
         f"impl.import={names}", f"out={tmp_path}", "run_id=one", "report=false", "codegen=false",
         "limit_s=40", "workers=2"]
    )  # fmt: skip
    assert code == 3
    found = {row["cell"]["import"].split(":")[1]: row for row in rows.read(tmp_path / "one")}
    assert set(found) == set(REAL)
    for name, (status, says) in REAL.items():
        row = found[name]
        rows.validate(row)
        assert row["status"] == status, (name, row["reason"])
        assert says in (row["reason"] or ""), (name, row["reason"])
    assert Counter(row["status"] for row in found.values())["crashed"] == 3
