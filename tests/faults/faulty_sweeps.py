"""Sweeps whose cells cost nothing, so that a run takes tenths of a second and can be killed often.

`env.python=STUB` names the interpreter of a cell's worker. The stub runs the real child of
`harness.env.child`, with the op `cell` replaced: no torch, a row from the cell's key, and a fault
where the cell's seed is in its table. The sweep itself runs in a fork of the test's process.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from harness import rows
from harness.__main__ import main
from harness.run import runs

STUB = """#!{python} -S
import ctypes, hashlib, os, signal, sys, time
from harness import rows
from harness.env import child as env_child

FAULTS = {faults!r}

def cell(cell, ctx):
    row = rows.new_row(cell["cell"])
    row["repro"] = cell["repro"]
    row["digests"] = {{"x": hashlib.sha256(cell["key"].encode()).hexdigest()}}
    row["provenance"] = {{"pid": os.getpid()}}
    fault = FAULTS.get(cell["seed"])
    if fault == "segv":
        ctypes.string_at(0)
    elif fault == "exit":
        os._exit(7)
    elif fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "signal 40":
        os.kill(os.getpid(), 40)
    elif fault == "hang":
        time.sleep(600)
    elif fault == "raise":
        raise RuntimeError("planted")
    elif fault == "unsendable":
        row["checks"] = {{"x": {{1, 2}}}}
    elif fault == "nan":
        row["memory"] = {{"output_bytes": float("nan")}}
    elif fault == "no row":
        return [1, 2]
    elif fault == "bad row":
        row["status"] = "fine"
    elif fault == "flood":
        for _ in range(200):
            os.write(2, b"x" * 1023 + b"\\n" + b"y" * (1 << 20))
            time.sleep(0.005)
        os.write(2, b"\\nlast words\\n")
        os._exit(9)
    elif fault == "context":
        class Lost:
            is_initialized = staticmethod(lambda: True)
            def synchronize(): raise RuntimeError("an illegal memory access was encountered")
        sys.modules["torch"] = type(sys)("torch")
        sys.modules["torch"].cuda = Lost
        return rows.finish(row, "crashed", "an illegal memory access was encountered")
    elif fault == "lost" and "torch" in sys.modules:
        return rows.finish(row, "crashed", "served by a lost context")
    elif fault == "grow":
        held = []
        while True:
            held.append(bytearray(64 << 20))
            time.sleep(0.01)
    time.sleep({seconds})
    return row

env_child.OPS["cell"] = "__main__:cell"
sys.exit(env_child.main())
"""


@dataclass(frozen=True)
class Site:
    """A results folder and a stub of an interpreter, in one temporary folder."""

    folder: Path

    @property
    def out(self) -> Path:
        return self.folder / "runs"

    def stub(self, seconds: float = 0.0, **faults: int | list[int]) -> str:
        """The override that makes cells run in the stub; faults: name -> seeds that have it."""
        table = {
            seed: name.replace("_", " ")
            for name, seeds in faults.items()
            for seed in ([seeds] if isinstance(seeds, int) else seeds)
        }
        path = self.folder / "stub"
        path.write_text(STUB.format(python=sys.executable, faults=table, seconds=seconds))
        path.chmod(0o755)
        return f"env.python={path}"

    def argv(self, stub: str, count: int, *more: str) -> list[str]:
        return [
            "hw=b200", "model=ragged", "path=swizzle_blockscale", "tp_size=1",
            f"seed=range(0,{count})", stub, f"out={self.out}", "report=false", "workers=2", *more,
        ]  # fmt: skip

    def start(self, argv: list[str], log: str = "log") -> int:
        """Forks a process that sweeps; its id. What it prints goes to a file."""
        sys.stdout.flush()
        if pid := os.fork():
            return pid
        code = 70
        try:
            handle = os.open(self.folder / log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(handle, 1)
            os.dup2(handle, 2)
            sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)
            sys.stderr = sys.__stderr__ = open(2, "w", closefd=False)
            code = main(["sweep", *argv])
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)

    def run(self, argv: list[str], log: str = "log") -> int:
        """Sweeps in a fork; its exit code, minus the signal if one ended it."""
        return ended(self.start(argv, log))

    def said(self, log: str = "log") -> str:
        return " ".join((self.folder / log).read_text().split())

    def rows(self, run: str = "one") -> list[rows.Row]:
        found = rows.read(self.out / run)
        for row in found:
            rows.validate(row)
        return found

    def processes(self) -> list[int]:
        """Processes that run the stub."""
        out = []
        for process in psutil.process_iter(["cmdline"]):
            if str(self.folder / "stub") in " ".join(process.info["cmdline"] or ()):
                out.append(process.pid)
        return out

    def nothing_left(self, seconds: float = 5.0) -> bool:
        until = time.monotonic() + seconds
        while left := self.processes():
            if time.monotonic() > until:
                return not left
            time.sleep(0.02)
        return True


def ended(pid: int, seconds: float = 120.0) -> int:
    """Waits for a forked sweep."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    raise AssertionError(f"the sweep did not end within {seconds:g} s")


def without_times(found: list[rows.Row], site: Site) -> dict[str, dict[str, Any]]:
    """Rows by their cells, without what differs between two runs; no cell may have two."""
    skip = {"spent_ms", "provenance"}
    out = {}
    for row in found:
        key = runs.key_of(row["cell"])
        assert key not in out
        out[key] = {k: v for k, v in row.items() if k not in skip}
        out[key]["repro"] = row["repro"].replace(str(site.folder), "SITE")
    return out
