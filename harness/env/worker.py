"""A process that serves cells under another set of library versions, one JSON line each way.

The parent holds a `Worker(env)`; `call(op, ...)` starts the process at need, writes one request
and waits for its answer. The child is `python -P -m harness.env.child`: its sys.path is this
checkout, then the env's overlays, then the interpreter's own packages, so that `kernels` is always
this project's (a Hugging Face package has that import name too) and everything else is the env's.
A child that dies or overruns its time is a `WorkerDied` or `WorkerTimeout`, and the next call
starts a fresh one. What a library prints goes to stderr, of which the tail is kept for reasons.
"""

from __future__ import annotations

import atexit
import json
import os
import selectors
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import psutil

from harness import ROOT, rows
from harness.env import envs
from harness.env.envs import Env, EnvError


class WorkerDied(RuntimeError):
    """The process ended before it answered; the message has its signal or code, and its last
    words. `tail`: the last lines of its stderr."""

    tail: tuple[str, ...] = ()


class WorkerFailed(RuntimeError):
    """The op raised in the process, which lives on."""


class WorkerTimeout(RuntimeError):
    """No answer in time; the process was killed."""


class WorkerTooLarge(RuntimeError):
    """The process held more memory than it may; it was killed."""


class Worker:
    """One process of an env, started at the first call and again after it died."""

    def __init__(
        self, env: Env, extra_path: tuple[str, ...] = (), environ: Mapping[str, str] | None = None
    ) -> None:
        self.env, self.extra_path, self.environ = env, extra_path, dict(environ or {})
        self.process: subprocess.Popen[bytes] | None = None
        self._stderr: IO[bytes] | None = None
        self._said = 0  # where in stderr the current call began
        self._ending = threading.Lock()
        self._aborted = False
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
        environ |= self.environ
        with self._ending:
            if self._aborted:
                raise WorkerDied("the sweep was ended")
            self._stderr = tempfile.TemporaryFile()
            self.started += 1
            self.process = subprocess.Popen(
                [self.env.python, "-P", "-m", "harness.env.child"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stderr,
                env=environ, cwd=ROOT, start_new_session=True,
            )  # fmt: skip
        return self.process

    def abort(self) -> None:
        """From any thread: ends the process now and lets no other start. The call under way gets
        WorkerDied; `close` stays with the thread that calls."""
        with self._ending:
            self._aborted = True
            if self.process is not None and self.process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(self.process.pid, signal.SIGKILL)

    def call(
        self, op: str, timeout: float | None = None, memory: float | None = None, **fields: Any
    ) -> Any:
        """The child's answer; WorkerDied, WorkerTimeout (seconds), WorkerTooLarge (resident bytes),
        EnvError when an import failed there, WorkerFailed when the op raised anything else."""
        if self.process is None or self.process.poll() is not None:
            self.close()
            self._start()
        assert self.process is not None and self.process.stdin is not None
        self._said = self._quiet()
        try:
            self.process.stdin.write(json.dumps({"op": op, **fields}).encode() + b"\n")
            self.process.stdin.flush()
            line = self._read(timeout, memory)
        except BrokenPipeError:
            line = b""
        if not line.endswith(b"\n"):
            raise self._death()
        answer = json.loads(line)
        if answer.get("last"):
            self._kill()
        if "error" in answer:
            kind = EnvError if answer["absent"] else WorkerFailed
            raise kind(f"env {self.env.name}: {answer['error']}")
        return answer["value"]

    def _read(self, timeout: float | None, memory: float | None) -> bytes:
        assert self.process is not None and self.process.stdout is not None
        deadline = time.monotonic() + (float("inf") if timeout is None else timeout)
        chunks: list[bytes] = []
        above = 0  # looks in a row: what an earlier cell left is dropped within one
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while not chunks or not chunks[-1].endswith(b"\n"):
                left = deadline - time.monotonic()
                if left <= 0:
                    words = self._kill()
                    raise WorkerTimeout(f"no answer in {timeout:g} s; the worker was ended{words}")
                if not selector.select(min(left, LOOK_S)):
                    self._quiet()
                    held = _resident(self.process.pid) if memory else 0
                    above = above + 1 if memory and held > memory else 0
                    if memory and above == 2:
                        words = self._kill()
                        raise WorkerTooLarge(
                            f"the worker held {held / 2**30:.1f} GiB where the cell may take "
                            f"{memory / 2**30:.1f} GiB, and was ended{words}"
                        )
                    continue
                chunk = os.read(self.process.stdout.fileno(), 1 << 20)
                if not chunk:
                    break
                chunks.append(chunk)
        return b"".join(chunks)

    def _quiet(self) -> int:
        """Where stderr stands now. A flood of it is dropped from the disk, all but its end."""
        if self._stderr is None:
            return 0
        found = os.fstat(self._stderr.fileno())
        if found.st_blocks * 512 > FLOOD_BYTES:
            os.ftruncate(self._stderr.fileno(), 0)  # the child writes on at its own offset
        return found.st_size

    def _kill(self) -> str:
        """Ends the process and what it started, at once; its last words."""
        assert self.process is not None
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        words = _words(self._tail())
        self.close()
        return words

    def _tail(self) -> list[str]:
        """The last lines that the process wrote to stderr during this call, from a fault on."""
        if self._stderr is None:
            return []
        end = self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, end - 16_000, min(self._said, end)))
        text = self._stderr.read().decode(errors="replace").replace("\0", "")
        lines = [line.rstrip()[:300] for line in text.splitlines() if line.strip()]
        lines = [line for line in lines if not line.startswith("Extension modules:")]
        fatal = [n for n, line in enumerate(lines) if line.startswith("Fatal Python error")]
        return lines[fatal[-1] :][:12] if fatal else lines[-12:]

    def _death(self) -> WorkerDied:
        assert self.process is not None
        try:
            code: int | None = self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            code = None
        tail = self._tail()
        self.close()
        how = f"{_how(code)}{_words(tail)}"
        died = WorkerDied(f"the worker of env {self.env.name} ended with {how}")
        died.tail = tuple(tail)
        return died

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
                with suppress(ProcessLookupError):
                    os.killpg(self.process.pid, signal.SIGKILL)  # its own session: children too
                self.process.wait()
        if self._stderr is not None:
            self._stderr.close()
        self.process = self._stderr = None


class _Kept(threading.local):
    """The workers of one thread, by (env, interpreter, whose code)."""

    def __init__(self) -> None:
        self.workers: dict[tuple[str, str, str], Worker] = {}
        self.environ: dict[str, str] = {}
        with _lock:
            _all.append(self.workers)


_lock = threading.Lock()
_all: list[dict[tuple[str, str, str], Worker]] = []
_kept = _Kept()
KEPT = 6  # workers a thread holds at once: about 350 MB each; the longest unused one ends
LOOK_S = 0.1  # how often a worker's memory and the size of its stderr are looked at
FLOOD_BYTES = 64 << 20  # of stderr on disk


def _resident(pid: int) -> int:
    """Bytes that a process holds; 0 once it has ended."""
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


def _how(code: int | None) -> str:
    """A return code as a person reads it."""
    if code is None or code >= 0:
        return f"code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal has no name
        return f"signal {-code}"


def _words(tail: Sequence[str]) -> str:
    """What of a tail goes into a reason, behind a colon: the fault, else the last line."""
    if not tail:
        return ""
    return f": {tail[0 if tail[0].startswith('Fatal') else -1].strip()}"


def set_environ(environ: Mapping[str, str]) -> None:
    """Environment of the workers that this thread starts from now on (its GPU, say)."""
    _kept.environ = dict(environ)


def is_apart(cell: dict[str, Any]) -> bool:
    """Whether a cell needs a process of its own: other versions, or code that is not this
    project's."""
    return cell["env"]["name"] != "current" or bool(cell["env"].get("python")) or not is_own(cell)


def is_own(cell: dict[str, Any]) -> bool:
    """Whether only code of this project computes the cell."""
    return bool(cell["impl"]["kind"] == "own" and not cell["impl"].get("import"))


def execute(
    cell: dict[str, Any],
    ctx: dict[str, Any],
    timeout: float | None = None,
    memory: float | None = None,
) -> rows.Row:
    """The row of a cell from this thread's worker of its env; a worker that dies, hangs or grows
    too large leaves a row that says so, and the next cell gets a fresh one."""
    start = time.perf_counter()
    row = rows.new_row(cell["cell"])
    row["repro"], row["provenance"] = cell.get("repro", ""), dict(ctx.get("provenance", {}))
    own = is_own(cell)
    workers = _kept.workers
    try:
        env = envs.load(cell["env"]["name"], cell["env"].get("python"))
        key = (env.name, env.python, "own" if own else cell["impl"]["name"])
        extra = () if own else (str(Path.cwd()),)
        worker = workers.pop(key, None) or Worker(env, extra, _kept.environ)
        workers[key] = worker
        while len(workers) > KEPT:
            workers.pop(next(iter(workers))).close()
        answer: rows.Row = worker.call("cell", timeout, memory, cell=cell, ctx=ctx)
        rows.validate(answer)
        return answer
    except WorkerTimeout as error:
        rows.finish(row, "timeout", str(error))
    except WorkerTooLarge as error:
        rows.finish(row, "oom", str(error))
    except (WorkerDied, WorkerFailed) as error:
        rows.finish(row, "crashed", str(error))
        if tail := getattr(error, "tail", ()):
            row["trace"] = list(tail)
    except EnvError as error:
        rows.finish(row, "skipped", str(error), "NOT_INSTALLED")
    except Exception as error:  # no worker could be started, or what it sent is no row
        rows.finish(row, "crashed", f"{type(error).__name__}: {error}")
    row["spent_ms"]["total"] = round((time.perf_counter() - start) * 1e3, 1)
    return row


def close_all() -> None:
    """Ends the workers of every thread of this process, none of which may be in a call."""
    with _lock:
        for workers in _all:
            while workers:
                workers.popitem()[1].close()


def kill_all() -> None:
    """Ends them at once, whatever they do; calls under way raise WorkerDied."""
    for workers in list(_all):
        for worker in list(workers.values()):
            worker.abort()


atexit.register(close_all)
