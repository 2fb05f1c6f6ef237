"""Fresh processes for two folders of `kernels`, measured one at a time on one device.

A side is a warm interpreter (`ab_worker`) over its own folder. A process answers on a Unix socket:
its number, then `ready` once its work is built, then its times.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import ROOT, UsageError

PATIENCE_S = 300.0  # a process that is silent for longer has failed


@dataclass(frozen=True)
class Setup:
    """What is measured, and how. spawn: `fork` from a warm interpreter, or `exec` a new one each
    time (on a CPU the address layout that forks share would be part of the noise)."""

    cases: Sequence[str]
    device: str
    impl: str
    experts: int
    timing: Mapping[str, Any]
    spawn: str = "fork"


class Side:
    """A warm interpreter over one folder of kernels, from which fresh processes are forked."""

    def __init__(self, folder: Path, address: str, log: Any) -> None:
        command = [sys.executable, "-m", "harness.gate.ab_worker", str(folder), address]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=log, stderr=log, text=True
        )

    def fork(self, number: int) -> None:
        if self.process.stdin is None or self.process.poll() is not None:
            raise RuntimeError("a side of the comparison ended")
        self.process.stdin.write(f"{number}\n")
        self.process.stdin.flush()

    def close(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()


class Pair:
    """Two folders to compare, and the processes that measure them."""

    def __init__(self, a: Path, b: Path, setup: Setup) -> None:
        self.folders, self.setup = (a, b), setup
        # None: the first process measures it. On a CPU, where the cache is left warm, no time is
        # held to the copy speed, and measuring it would cost 5 s.
        self.copy_gb_per_s: float | None = None if setup.device != "cpu" else float("inf")
        self.sides: list[Side] = []
        self.started = {os.getpid()}  # processes that hold a context but wait
        self.stack = ExitStack()

    def __enter__(self) -> Pair:
        folder = self.stack.enter_context(tempfile.TemporaryDirectory(prefix="ab"))
        self.address = str(Path(folder) / "socket")
        self.log = self.stack.enter_context((Path(folder) / "log").open("w+"))
        self.server = self.stack.enter_context(socket.socket(socket.AF_UNIX))
        self.server.bind(self.address)
        self.server.listen(8)
        self.server.settimeout(0.5)
        self.sides = [self._side(f) for f in self.folders] if self.setup.spawn == "fork" else []
        return self

    def __exit__(self, *_: object) -> None:
        for side in self.sides:
            side.close()
        self.stack.close()

    def _side(self, folder: Path) -> Side:
        return Side(folder, self.address, self.log)

    def measure(
        self, order: Sequence[int], cases: Sequence[str], probe: bool = False
    ) -> list[dict[str, Any]]:
        """Fresh processes of the sides in `order` (0 is A), built together, measured in turn."""
        files = self._start(order)
        request = {
            "cases": list(cases),
            "device": self.setup.device,
            "impl": self.setup.impl,
            "experts": self.setup.experts,
            "timing": dict(self.setup.timing),
            "probe": probe,
        }
        # The very first processes compile; one at a time, so that they find each other's cache.
        if probe:
            for file, _ in files:
                _say(file, request)
                self._hear(file)
        else:
            for file, _ in files:
                _say(file, request)
            for file, _ in files:
                self._hear(file)
        # Of processes that have just ended the driver may still know.
        self.started.update(pid for _, pid in files)
        out = []
        for file, _ in files:
            turn = {"siblings": sorted(self.started), "copy_gb_per_s": self.copy_gb_per_s}
            _say(file, turn)
            out.append(self._hear(file))
        for file, _ in files:
            file.close()
        if self.setup.spawn == "exec":
            while self.sides:
                self.sides.pop().close()
        return out

    def _start(self, order: Sequence[int]) -> list[tuple[Any, int]]:
        """One connected process for each entry, in order."""
        fresh = self.setup.spawn == "exec"
        for number, which in enumerate(order):
            if fresh:
                self.sides.append(self._side(self.folders[which]))
            self.sides[-1 if fresh else which].fork(number)
        found: dict[int, tuple[Any, int]] = {}
        deadline = time.monotonic() + PATIENCE_S
        while len(found) < len(order):
            try:
                link, _ = self.server.accept()
            except TimeoutError:
                dead = any(side.process.poll() is not None for side in self.sides)
                if dead or time.monotonic() > deadline:
                    raise RuntimeError(f"gate ab: no process started:\n{self._tail()}") from None
                continue
            file = link.makefile("rw")
            link.settimeout(PATIENCE_S)
            link.close()  # the file keeps the connection
            hello = json.loads(file.readline())
            found[hello["number"]] = (file, hello["pid"])
        return [found[n] for n in range(len(order))]

    def _hear(self, file: Any) -> dict[str, Any]:
        try:
            line = file.readline()
        except TimeoutError:
            line = ""
        answer: dict[str, Any] = json.loads(line) if line else {"error": "it ended without a word"}
        if "error" in answer:
            raise RuntimeError(f"gate ab: a process failed: {answer['error']}\n{self._tail()}")
        return answer

    def _tail(self) -> str:
        self.log.flush()
        self.log.seek(0)
        return str(self.log.read())[-2000:]


def _say(file: Any, message: Mapping[str, Any]) -> None:
    file.write(json.dumps(message) + "\n")
    file.flush()


@contextmanager
def worktree(revision: str) -> Iterator[Path]:
    """A checkout of a revision in a temporary folder, removed afterwards."""

    def git(*command: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(ROOT), *command], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise UsageError(f"gate ab: git {' '.join(command)}: {done.stderr.strip()}")
        return done.stdout.strip()

    commit = git("rev-parse", "--verify", f"{revision}^{{commit}}")
    with tempfile.TemporaryDirectory(prefix="worktree") as folder:
        git("worktree", "add", "--detach", folder, commit)
        try:
            yield Path(folder)
        finally:
            git("worktree", "remove", "--force", folder)
