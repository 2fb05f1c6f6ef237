"""`python -m harness sweep`: plans the grid, freezes it, runs its cells, prints what came of them.

The run folder gets manifest.json before the first cell and a line of rows.jsonl for each cell as
it ends. Cells run in worker processes with one torch thread each; together they stay within a
memory budget, and a cell that could never fit becomes a skipped row that says what it would take.
Ctrl-C once: cells under way are finished, and `resume=RUN` does the rest later; twice: at once.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from harness import rows
from harness.env import worker as env_worker
from harness.measure import sampling
from harness.plan import grid
from harness.run import launch, pool, runs, table
from harness.run.journal import Journal

BASE_BYTES = 640 << 20  # a worker with torch and triton loaded, and what it keeps between cells
CONTEXT_BYTES = 2 << 30  # host memory of a CUDA context and its loaded modules
PLAIN_BYTES = 600 << 20  # quantizing samples and a small layer the plain way, in float64
USAGE = "usage: python -m harness sweep [AXIS=VALUE,VALUE ...]   (axes: python -m harness list)"


def main(argv: list[str]) -> int:
    """Runs a sweep; the exit code of its rows. The last line printed is `run: <folder>`."""
    if argv and argv[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    start = time.perf_counter()
    launcher, of_hydra = launch.chosen(argv)
    planned = grid.plan(argv)
    if planned.run["resume"] is not None:
        folder, planned = runs.take_up(argv, planned)
    else:
        folder = runs.make_folder(planned, argv)
    journal = Journal(folder)
    done = runs.finished(folder, planned)
    for row in runs.one_a_cell(launch.left_behind(folder), planned, done):
        journal.append(row)
        done.append(row)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 120  # a log or a pipe has no width of its own
    say = Console(stderr=True, highlight=False)
    kept = f", {len(done)} of them done before" if done else ""
    say.print(f"{len(planned.cells)} cells planned in {time.perf_counter() - start:.1f} s{kept}")
    coming = lambda todo, stop: (
        run(todo, planned.run, stop)
        if launcher == "basic"
        else launch.run(todo, planned.run, folder, launcher, of_hydra, stop)
    )
    stopped = _run_all(journal, planned, done, say, coming)
    order = {cell["key"]: n for n, cell in enumerate(planned.cells)}
    done.sort(key=lambda row: order[runs.key_of(row["cell"])])
    table.show(done, console)
    if planned.run["report"]:
        _report(folder, console, say)
    if stopped:
        left = len(planned.cells) - len(done)
        console.print(
            f"interrupted: {len(done)} cells are kept, {left} are left; go on with: "
            f"python -m harness sweep resume={folder.name}", soft_wrap=True,
        )  # fmt: skip
    console.print(f"{time.perf_counter() - start:.0f} s in all")
    console.print(f"run: {folder}", soft_wrap=True)
    return rows.exit_code(done, len(planned.cells))


def _run_all(
    journal: Journal, planned: grid.Grid, done: list[rows.Row], say: Console,
    run: Callable[[list[dict[str, Any]], pool.Stop], Generator[rows.Row, None, None]],
) -> bool:  # fmt: skip
    """Runs what is not in `done`, keeping each row as it comes; True when it was interrupted."""
    finished = {runs.key_of(row["cell"]) for row in done}
    todo = [cell for cell in planned.cells if cell["key"] not in finished]
    tally: dict[str, int] = {}
    stop = pool.Stop()
    journal.state("running")
    try:
        with (
            _progress(say) as bar, _interruptible(stop, say),
            closing(run(todo, stop)) as coming,
        ):  # fmt: skip
            task = bar.add_task("cells", total=len(planned.cells), completed=len(done), state="")
            for row in coming:
                journal.append(row)
                done.append(row)
                tally[table.state(row)] = tally.get(table.state(row), 0) + 1
                shown = " ".join(f"{n} {name}" for name, n in tally.items())
                bar.update(task, advance=1, state=shown)
        complete = len(done) == len(planned.cells)
        journal.state("done" if complete else "interrupted")
        return not complete
    except BaseException:  # RowsLost, or a fault of the harness
        journal.state("interrupted")
        raise
    finally:
        journal.close()


@contextmanager
def _interruptible(stop: pool.Stop, say: Console) -> Iterator[None]:
    """The first SIGINT or SIGTERM (which Slurm sends ahead of time) asks for an end after the cells
    under way, the second ends at once."""

    def on_signal(number: int, frame: FrameType | None) -> None:
        if stop:
            env_worker.kill_all()
            os._exit(3)
        stop.event.set()
        say.print("finishing the cells under way; once more to leave at once")

    if threading.current_thread() is not threading.main_thread():  # whoever runs us handles them
        yield
        return
    before = {n: signal.signal(n, on_signal) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _report(folder: Path, console: Console, say: Console) -> None:
    """The page of the run. If that fails the rows, which are what counts, are kept."""
    try:
        from harness import report

        console.print(f"report: {report.of_run(folder)}", soft_wrap=True)
    except Exception as error:
        say.print(f"no report: {type(error).__name__}: {error}", highlight=False, markup=False)


def estimate_bytes(cell: dict[str, Any]) -> int:
    """An upper estimate of what a cell holds at once: the layer, the rank's copies, its results.

    Beside the checkpoint's layer: the share, its prepared form, the inverse of the largest tensor
    (about two thirds of a layer) and what compares them; for bf16 the share too, then quantized
    forms.
    """
    from harness.run.source import layer_bytes
    from kernels import activations
    from kernels.pads import BLOCK, FORMAT

    model, path = cell["model"], cell["path"]["name"]
    form = FORMAT.get(path, "bf16")
    gated = activations.find(model["activation"]).gated
    whole = lambda f: layer_bytes(cell["experts"], model["H"], model["I"], gated, f)
    prepared = whole("nvfp4" if BLOCK[form] == 16 else "mxfp4") / cell["tp_size"]
    share = whole(form) / cell["tp_size"] + (PLAIN_BYTES if form == "bf16" else 0)
    timed = _timing_bytes() if cell["hw"]["platform"] == "cpu" and cell.get("timing") else 0
    context = CONTEXT_BYTES if torch.cuda.is_available() else 0
    return int(BASE_BYTES + whole(form) + share + 4 * prepared) + timed + context


@cache
def _timing_bytes() -> int:
    """What a time on the CPU takes: the buffer that empties the cache, and the copy's two."""
    cached = sampling.llc_bytes(torch.device("cpu"))
    return max(512 << 20, 4 * cached) + max(256 << 20, 8 * cached)


def run(
    cells: Sequence[dict[str, Any]], settings: dict[str, Any], stop: pool.Stop | None = None
) -> Generator[rows.Row, None, None]:
    """A row for every cell, in the order in which they end."""
    budget = _budget(settings)
    ctx = {"provenance": runs.commit()}
    waiting: list[dict[str, Any]] = []
    for cell in cells:
        need = estimate_bytes(cell)
        if need > budget:
            yield _too_large(cell, need, budget, ctx)
        else:
            waiting.append(cell | {"estimate": need})
    if settings["workers"] == 0:
        for cell in waiting:
            if stop:
                return
            yield _here(cell, ctx, settings)
    elif waiting:
        gpus = _gpus()
        for cell in waiting:
            cell["on"] = _on(cell, gpus)
        on_gpu = sum(cell["on"] != "cpu" for cell in waiting)
        gpus = gpus[: min(on_gpu, settings["workers"] or on_gpu)]
        slots = settings["workers"] or max(len(os.sched_getaffinity(0)), len(gpus))
        slots = min(slots, len(gpus) + len(waiting) - on_gpu if gpus else len(waiting))
        plan = pool.Plan(slots, budget, settings["limit_s"], gpus)
        yield from pool.run(waiting, ctx, plan, stop)


def _here(cell: dict[str, Any], ctx: dict[str, Any], settings: dict[str, Any]) -> rows.Row:
    """One cell in this process (workers=0, for a debugger), or in a worker of its env."""
    if env_worker.is_apart(cell):
        return env_worker.execute(cell, ctx, settings["limit_s"])
    from harness.run.cell import run_cell

    return run_cell(cell, ctx)


def _gpus() -> tuple[pool.Gpu, ...]:
    """The GPUs that this process may see, each with its model."""
    if not torch.cuda.is_available():
        return ()
    return tuple(
        pool.Gpu(id, torch.cuda.get_device_name(n).lower().replace(" ", "_"))
        for n, id in enumerate(gpu_ids())
    )


def gpu_ids() -> list[str]:
    """As CUDA_VISIBLE_DEVICES names them; asks the driver without opening a device."""
    count = torch.cuda.device_count()
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [str(n) for n in range(count)] if given is None else given.split(",")[:count]


def _on(cell: dict[str, Any], gpus: Sequence[pool.Gpu]) -> str:
    """Where a cell runs: cpu, gpu for any, or the model of GPU that is its target."""
    own = env_worker.is_own(cell)
    models = [gpu.model for gpu in gpus if cell["hw"]["name"] in gpu.model]
    if not gpus or (own and not models and cell["impl"]["name"] == "reference"):
        return "cpu"
    return models[0] if models else "gpu"


def _budget(settings: dict[str, Any]) -> float:
    given = settings["memory_gib"]
    whole = given * 2**30 if given else 0.8 * psutil.virtual_memory().available
    return float(whole * settings.get("share", 1.0))


def _too_large(cell: dict[str, Any], need: int, budget: float, ctx: dict[str, Any]) -> rows.Row:
    gib = lambda n: f"{n / 2**30:.1f} GiB"
    reason = (
        f"not started: {cell['experts']} experts would take about {gib(need)}, the sweep may use "
        f"{gib(budget)}; lower experts=, or raise memory_gib="
    )
    row = rows.new_row(cell["cell"])
    row["repro"], row["provenance"] = cell["repro"], dict(ctx["provenance"])
    return rows.finish(row, "skipped", reason, "OOM")


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("{task.fields[state]}"), console=console, transient=False,
        disable=not console.is_terminal,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
