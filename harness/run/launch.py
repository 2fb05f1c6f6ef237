"""Cells beyond this process: batches of them as jobs of joblib, submitit (local, Slurm) or Ray.

`python -m harness sweep ... hydra/launcher=NAME` plans and freezes the grid here, splits the cells
that are left into batches, and starts one Hydra multirun over `batch=0..n-1` (Ray: one task each);
presets are in conf/hydra/launcher. A job runs its cells in workers as any sweep does, on the CPUs
and GPUs that the engine gave it, and appends to a rows file of its own in the run folder. This side
reads those files as they grow and yields the rows; its caller merges them into the run's. Jobs end
after the cells under way when a file `stop` appears beside the batches, or when this side is gone.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import hydra
from omegaconf import DictConfig

from harness import ROOT, UsageError, rows, suggest
from harness.run import pool

CONF = ROOT / "conf"
LOOK_S = 0.2  # how often the rows of jobs are looked for
BEAT_S = 2.0  # how often this side shows jobs that it lives
GONE_S = 120.0  # without that sign, a job ends; far above what a network file system delays
ONE_MACHINE = ("joblib", "submitit_local")  # engines that give a job no CPUs or GPUs of its own
BATCHES = {"submitit_slurm": 64}  # others: two a core


def names() -> list[str]:
    return ["basic", *sorted(path.stem for path in (CONF / "hydra" / "launcher").glob("*.yaml"))]


def chosen(overrides: Sequence[str]) -> tuple[str, list[str]]:
    """(launcher, its `hydra...` overrides) of a command line; UsageError for one that is unknown.

    basic is this process; the rest of `hydra.` is the launcher's to judge.
    """
    own = [text for text in overrides if text.lstrip("+~").startswith("hydra")]
    name = "basic"
    for text in own:
        if text.startswith("hydra/launcher="):
            name = text.split("=", 1)[1]
    if name not in names():
        raise UsageError(f"no launcher {name!r}{suggest(name, names())}")
    return name, own


def run(
    cells: Sequence[dict[str, Any]], settings: dict[str, Any], folder: Path, launcher: str,
    overrides: Sequence[str], stop: pool.Stop,
) -> Generator[rows.Row, None, None]:  # fmt: skip
    """A row for every cell that a job has finished, as it is seen.

    UsageError with the engine's last words when it ends in error with cells left over.
    """
    place = folder / "launches" / uuid4().hex[:8]
    place.mkdir(parents=True)
    count = _write(cells, settings, place, launcher)
    (place / "alive").touch()
    if launcher == "ray":
        what = ["harness.run.launch_ray", str(place.resolve()), str(count)]
    else:
        what = ["harness.run.launch", "--multirun", f"folder='{place.resolve()}'"]
        what += [f"batch=range(0,{count})"]
    with (place / "log.txt").open("wb") as log:
        engine = subprocess.Popen(
            [sys.executable, "-P", "-m", *what, *overrides],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            env=dict(os.environ, PYTHONPATH=_python_path()),
        )  # fmt: skip
    left = len(cells)
    files = _Files(place, count)
    ended = threading.Event()
    threading.Thread(target=_beat, args=(place, ended), daemon=True).start()
    try:
        while True:
            alive = engine.poll() is None
            if stop and not (place / "stop").exists():
                (place / "stop").touch()
            for row in files.new():
                left -= 1
                yield row
            if not alive:
                break
            time.sleep(LOOK_S)
        if left and not stop:
            raise UsageError(
                f"{launcher} ended with code {engine.returncode} and left {left} of {len(cells)} "
                f"cells: {_last(place / 'log.txt')} (all of it: {place / 'log.txt'}); "
                f"go on with: python -m harness sweep resume={folder.name}"
            )
    finally:
        ended.set()
        (place / "stop").touch()
        if engine.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(engine.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                engine.wait(10)
        if engine.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(engine.pid, signal.SIGKILL)
            engine.wait()


def _python_path() -> str:
    """This checkout and the caller's folder first, for jobs on other machines too."""
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join([str(CONF.parent), str(Path.cwd()), *filter(None, given)])


def _write(
    cells: Sequence[dict[str, Any]], settings: dict[str, Any], place: Path, launcher: str
) -> int:
    """The batches, dealt like cards, so that each is a fair sample; how many there are."""
    cores = len(os.sched_getaffinity(0))
    count = min(len(cells), settings["batches"] or BATCHES.get(launcher, 2 * cores))
    if launcher == "submitit_local":
        count = min(count, settings["batches"] or cores)  # it starts all of them at once
    here = launcher in ONE_MACHINE
    own = {
        "workers": settings["workers"] or (1 if here or launcher == "ray" else None),
        "memory_gib": settings["memory_gib"], "limit_s": settings["limit_s"],
        "share": 1 / min(count, cores) if here else 1.0, "here": here,
    }  # fmt: skip
    for number in range(count):
        batch = {"settings": own, "cells": list(cells[number::count])}
        (place / f"batch{number}.json").write_text(json.dumps(batch))
    return count


def _beat(place: Path, ended: threading.Event) -> None:
    while not ended.wait(BEAT_S):
        with suppress(OSError):
            os.utime(place / "alive")


def _last(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip()[:300] if lines else "it said nothing"


class _Files:
    """The rows files of the jobs, read on from where the last look ended."""

    def __init__(self, place: Path, count: int) -> None:
        self.at = {place / f"rows{number}.jsonl": 0 for number in range(count)}

    def new(self) -> Iterator[rows.Row]:
        """Whole lines that were not there before."""
        for path, start in self.at.items():
            if not path.is_file() or path.stat().st_size <= start:
                continue
            with path.open("rb") as file:
                file.seek(start)
                data = file.read()
            whole = data.rfind(b"\n") + 1
            self.at[path] = start + whole
            for line in data[:whole].splitlines():
                yield json.loads(line)


def left_behind(folder: Path) -> list[rows.Row]:
    """Rows that jobs wrote for a run whose sweep was not there to merge them."""
    return [
        row for path in sorted(folder.glob("launches/*/rows*.jsonl")) for row in rows.read(path)
    ]


def run_batch(place: Path, number: int) -> None:
    """One job: its cells in workers of this machine, each row into its own file."""
    from harness.run import sweep

    batch = json.loads((place / f"batch{number}.json").read_text())
    settings = batch["settings"]
    if settings["here"] and (gpus := sweep.gpu_ids()):
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[number % len(gpus)]
    stop, ended = pool.Stop(), threading.Event()
    threading.Thread(target=_watch, args=(place, stop, ended), daemon=True).start()
    try:
        for row in sweep.run(batch["cells"], settings, stop):
            rows.append(place / f"rows{number}.jsonl", row)
    finally:
        ended.set()


def _watch(
    place: Path, stop: pool.Stop, ended: threading.Event, now: Callable[[], float] = time.monotonic
) -> None:
    """Sets `stop` once the sweep asks for it or shows no sign of life; by this machine's clock."""
    seen, since = 0.0, now()
    while not ended.wait(LOOK_S):
        try:
            beat = (place / "alive").stat().st_mtime
        except OSError:
            beat = seen
        if beat != seen:
            seen, since = beat, now()
        if (place / "stop").exists() or now() - since > GONE_S:
            stop.event.set()
            return


@hydra.main(config_path=str(CONF), config_name="launch", version_base="1.3")  # type: ignore[untyped-decorator]
def job(config: DictConfig) -> None:
    run_batch(Path(config.folder), int(config.batch))


if __name__ == "__main__":
    from harness.run.launch import job as by_name  # so that engines pickle a name, not its code

    by_name()
