"""A process that serves cells under another set of library versions, one JSON line each way.

The parent holds a `Worker(env)`; `call(op, ...)` starts the process at need, writes one request
and waits for its answer. The child is `python -P -m harness.env_worker`: its sys.path is this
checkout, then the env's overlays, then the interpreter's own packages, so that `kernels` is always
this project's (a Hugging Face package has that import name too) and everything else is the env's.
A child that dies or overruns its time is a `WorkerDied` or `WorkerTimeout`, and the next call
starts a fresh one. What a library prints goes to stderr, of which the tail is kept for reasons.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from harness import envs, rows
from harness.envs import ROOT, Env, EnvError

OPS: dict[str, str] = {  # op -> module:function in the child, called with the request's fields
    "hello": "harness.env_worker:hello",
    "cell": "harness.env_worker:cell",
    "layouts": "harness.vendor.table:measure",
    "tensors": "harness.compare_env:tensors",
}


class WorkerDied(RuntimeError):
    """The process ended before it answered; the message has its signal or code, and its last
    words."""


class WorkerTimeout(RuntimeError):
    """No answer in time; the process was killed."""


class Worker:
    """One process of an env, started at the first call and again after it died."""

    def __init__(self, env: Env, extra_path: tuple[str, ...] = ()) -> None:
        self.env, self.extra_path = env, extra_path
        self.process: subprocess.Popen[bytes] | None = None
        self._stderr: IO[bytes] | None = None
        self.started = 0

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _start(self) -> subprocess.Popen[bytes]:
        if missing := self.env.missing():
            pins = ", ".join(package.pin for package in missing)
            raise EnvError(
                f"env {self.env.name} is not built ({pins}); run: env sync env={self.env.name}"
            )
        given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        path = [str(ROOT), *self.extra_path, *self.env.path(), *filter(None, given)]
        environ = dict(os.environ, PYTHONPATH=os.pathsep.join(path), HARNESS_ENV=self.env.name)
        self._stderr = tempfile.TemporaryFile()
        self.started += 1
        return subprocess.Popen(
            [self.env.python, "-P", "-m", "harness.env_worker"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stderr,
            env=environ, cwd=ROOT, start_new_session=True,
        )  # fmt: skip

    def call(self, op: str, timeout: float | None = None, **fields: Any) -> Any:
        """The child's answer; WorkerDied, WorkerTimeout, or EnvError when the op itself raised."""
        if self.process is None or self.process.poll() is not None:
            self.close()
            self.process = self._start()
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps({"op": op, **fields}).encode() + b"\n")
            self.process.stdin.flush()
            line = self._read(timeout)
        except BrokenPipeError:
            line = b""
        if not line.endswith(b"\n"):
            raise WorkerDied(self._last_words())
        answer = json.loads(line)
        if "error" in answer:
            raise EnvError(f"env {self.env.name}: {answer['error']}")
        return answer["value"]

    def _read(self, timeout: float | None) -> bytes:
        assert self.process is not None and self.process.stdout is not None
        deadline = None if timeout is None else time.monotonic() + timeout
        chunks: list[bytes] = []
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while not chunks or not chunks[-1].endswith(b"\n"):
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and (left <= 0 or not selector.select(left)):
                    self.close()
                    raise WorkerTimeout(f"no answer in {timeout:.0f} s; the worker was ended")
                chunk = os.read(self.process.stdout.fileno(), 1 << 20)
                if not chunk:
                    break
                chunks.append(chunk)
        return b"".join(chunks)

    def _last_words(self) -> str:
        assert self.process is not None
        try:
            code: int | None = self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            code = None
        text = b""
        if self._stderr is not None:
            self._stderr.seek(0, os.SEEK_END)
            self._stderr.seek(max(0, self._stderr.tell() - 4000))
            text = self._stderr.read()
        how = (
            f"signal {signal.Signals(-code).name}"
            if code is not None and code < 0
            else f"code {code}"
        )
        lines = [line for line in text.decode(errors="replace").splitlines() if line.strip()]
        self.close()
        words = f": {lines[-1].strip()[:300]}" if lines else ""
        return f"the worker of env {self.env.name} ended with {how}{words}"

    def close(self) -> None:
        if self.process is not None:
            for stream in (self.process.stdin, self.process.stdout):
                try:
                    if stream is not None:
                        stream.close()
                except BrokenPipeError:
                    pass
            try:
                self.process.wait(timeout=2)  # a closed stdin asks it to end
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)  # its own session: children go with it
                self.process.wait()
        if self._stderr is not None:
            self._stderr.close()
        self.process = self._stderr = None


_workers: dict[tuple[str, str, str], Worker] = {}  # env, interpreter, whose code
KEPT = 6  # workers a process holds at once: about 350 MB each; the longest unused one ends


def is_apart(cell: dict[str, Any]) -> bool:
    """Whether a cell needs a process of its own: other versions, or code that is not this
    project's."""
    return cell["env"]["name"] != "current" or bool(cell["env"].get("python")) or not _own(cell)


def _own(cell: dict[str, Any]) -> bool:
    return bool(cell["impl"]["kind"] == "own" and not cell["impl"].get("import"))


def execute(cell: dict[str, Any], ctx: dict[str, Any], timeout: float | None = None) -> rows.Row:
    """The row of a cell from a worker of its env; a worker that dies or hangs leaves a row that
    says so."""
    start = time.perf_counter()
    row = rows.new_row(cell["cell"])
    row["repro"], row["provenance"] = cell.get("repro", ""), dict(ctx.get("provenance", {}))
    impl = "own" if _own(cell) else cell["impl"]["name"]
    try:
        env = envs.load(cell["env"]["name"], cell["env"].get("python"))
        key = (env.name, env.python, impl)
        worker = _workers.pop(key, None) or Worker(env, () if impl == "own" else (str(Path.cwd()),))
        _workers[key] = worker
        while len(_workers) > KEPT:
            _workers.pop(next(iter(_workers))).close()
        return worker.call("cell", timeout, cell=cell, ctx=ctx)
    except WorkerTimeout as error:
        rows.finish(row, "timeout", str(error))
    except WorkerDied as error:
        rows.finish(row, "crashed", str(error))
    except EnvError as error:
        rows.finish(row, "skipped", str(error), "NOT_INSTALLED")
    row["spent_ms"]["total"] = round((time.perf_counter() - start) * 1e3, 1)
    return row


def close_all() -> None:
    """Ends the workers of this process."""
    while _workers:
        _workers.popitem()[1].close()


atexit.register(close_all)


def hello(vendors: bool = False) -> dict[str, Any]:
    """What this process imports: versions, whose `kernels`, and with `vendors` each vendor's
    probe."""
    import kernels
    from harness.vendor import VENDORS, probe

    versions = {"python": sys.version.split()[0]}
    for name in ("torch", "triton"):
        try:
            versions[name] = str(importlib.import_module(name).__version__)
        except ImportError as error:
            versions[name] = f"not importable ({error})"
    if vendors:
        for name in VENDORS:
            found = probe(name)
            versions[name] = found.version or f"not installed ({found.reason})"
    return {
        "versions": versions,
        "kernels": str(kernels.__file__),
        "env": os.environ.get("HARNESS_ENV"),
    }


def cell(cell: dict[str, Any], ctx: dict[str, Any]) -> dict[str, Any]:
    """One row, computed here."""
    from harness import impls
    from harness.cell import run_cell
    from harness.vendor import VENDORS, probe, show_unwritten

    if not _own(cell) and not impls.device(cell["impl"]["name"], cell["hw"]).type == "cuda":
        show_unwritten()  # not on a GPU, where filling would count in a time
    row: dict[str, Any] = run_cell(cell, ctx)
    if (impl := cell["impl"]["name"]) in VENDORS:
        row["provenance"][impl] = probe(impl).version or "not installed"
    return row


def serve(stdin: IO[bytes], answer: IO[bytes]) -> None:
    """Answers requests until stdin ends; an op that raises is answered with its error."""
    resolved: dict[str, Callable[..., Any]] = {}
    for line in stdin:
        request = json.loads(line)
        op = request.pop("op")
        try:
            if op not in resolved:
                module, _, function = OPS[op].partition(":")
                resolved[op] = getattr(importlib.import_module(module), function)
            reply: dict[str, Any] = {"value": resolved[op](**request)}
        except Exception as error:  # the parent makes a row of it
            traceback.print_exc()
            reply = {"error": f"{op}: {type(error).__name__}: {error}"}
        answer.write(json.dumps(reply).encode() + b"\n")
        answer.flush()


def main() -> int:
    """The child: answers go to the real stdout, and whatever libraries print to stderr."""
    with os.fdopen(os.dup(1), "wb") as answer:
        os.dup2(2, 1)
        serve(sys.stdin.buffer, answer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
