"""`python -m harness sweep`: plans the grid, freezes it, runs its cells, prints what came of them.

The run folder gets manifest.json before the first cell and a line of rows.jsonl for each cell as
it ends. Cells run over a pool of processes with one torch thread each; together they stay within a
memory budget, and a cell that could never fit becomes a skipped row that says what it would take.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from harness import UsageError, grid, rows, table

ROOT = Path(__file__).resolve().parent.parent
BASE_BYTES = 400 << 20  # a worker with torch loaded, before its first cell


def main(argv: list[str]) -> int:
    """Runs a sweep; the exit code of its rows. The last line printed is `run: <folder>`."""
    if argv and argv[0] in ("-h", "--help"):
        print(
            "usage: python -m harness sweep [AXIS=VALUE,VALUE ...]   (axes: python -m harness list)"
        )
        return 0
    start = time.perf_counter()
    planned = grid.plan(argv)
    folder = make_folder(planned, argv)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 120  # a log or a pipe has no width of its own
    say = Console(stderr=True)
    say.print(
        f"{len(planned.cells)} cells planned in {time.perf_counter() - start:.1f} s",
        highlight=False,
    )
    file, done = folder / "rows.jsonl", []
    with _progress(say) as bar:
        task = bar.add_task("cells", total=len(planned.cells), state="")
        tally: dict[str, int] = {}
        for row in run(planned, say):
            rows.append(file, row)
            done.append(row)
            tally[table.state(row)] = tally.get(table.state(row), 0) + 1
            shown = " ".join(f"{n} {name}" for name, n in tally.items())
            bar.update(task, advance=1, state=shown)
    order = {cell["key"]: n for n, cell in enumerate(planned.cells)}
    done.sort(key=lambda row: order[key_of(row["cell"])])
    table.show(done, console)
    if planned.run["report"]:
        _report(folder, console, say)
    console.print(f"{time.perf_counter() - start:.0f} s in all")
    console.print(f"run: {folder}", soft_wrap=True)
    return rows.exit_code(done, len(planned.cells))


def _report(folder: Path, console: Console, say: Console) -> None:
    """The page of the run. If that fails the rows, which are what counts, are kept."""
    try:
        from harness import report

        console.print(f"report: {report.of_run(folder)}", soft_wrap=True)
    except Exception as error:
        say.print(f"no report: {type(error).__name__}: {error}", highlight=False, markup=False)


def key_of(cell: dict[str, Any]) -> str:
    return " ".join(f"{name}={cell[name]}" for name in cell)


def make_folder(planned: grid.Grid, argv: list[str]) -> Path:
    """The run folder with its manifest. UsageError when the name is taken or cannot be written."""
    given = planned.run["run_id"]
    if given is not None and rows.safe_name(str(given)) != str(given):
        raise UsageError(f"run_id={given!r}: use letters, digits, dot, dash and underscore")
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    folder = Path(planned.run["out"]) / str(given or f"{stamp}-{uuid4().hex[:4]}")
    try:
        folder.mkdir(parents=True, exist_ok=False)
    except FileExistsError:
        raise UsageError(f"{folder} exists; choose another run_id") from None
    except OSError as error:
        raise UsageError(f"{folder} cannot be made: {error.strerror}; set out=FOLDER") from None
    manifest = {
        "schema": rows.SCHEMA, "run_id": folder.name,
        "created": datetime.now(UTC).isoformat(timespec="seconds"), "overrides": argv,
        "machine": machine(), **commit(), "count": len(planned.cells), **grid.freeze(planned.cells),
    }  # fmt: skip
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=None))
    return folder


def machine() -> dict[str, Any]:
    """Processor, cores, memory, GPUs and versions; nothing that names the host."""
    from importlib.metadata import PackageNotFoundError, version

    import torch

    from harness.timing import device_name

    versions = {}
    for name in ("torch", "triton", "hydra-core", "safetensors", "einops", "numpy"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not installed"
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "processor": device_name("cpu"), "cores": os.cpu_count(), "gpus": gpus,
        "memory_bytes": psutil.virtual_memory().total, "system": platform.system(),
        "python": platform.python_version(), "versions": versions,
    }  # fmt: skip


def commit() -> dict[str, Any]:
    """The commit of this checkout and whether it was changed since; null outside of one."""
    git = lambda *args: subprocess.run(
        ["git", "-C", str(ROOT), *args], capture_output=True, text=True, check=True
    ).stdout.strip()
    try:
        return {
            "commit": git("rev-parse", "HEAD"),
            "dirty": bool(git("status", "--porcelain", "-uno")),
        }
    except (OSError, subprocess.CalledProcessError):
        return {"commit": None, "dirty": None}


def estimate_bytes(cell: dict[str, Any]) -> int:
    """An upper estimate of what a cell holds at once: the layer, the rank's copies, its results.

    Beside the checkpoint's layer: the share, its prepared form, the inverse of the largest tensor
    (about two thirds of a layer) and what compares them; for bf16 the share too, then quantized
    forms.
    """
    from harness.source import layer_bytes
    from kernels import activations
    from kernels.pads import BLOCK, FORMAT

    model, path = cell["model"], cell["path"]["name"]
    form = FORMAT.get(path, "bf16")
    gated = activations.find(model["activation"]).gated
    whole = lambda f: layer_bytes(cell["experts"], model["H"], model["I"], gated, f)
    prepared = whole("nvfp4" if BLOCK[form] == 16 else "mxfp4") / cell["tp_size"]
    share = whole(form) / cell["tp_size"]
    return int(BASE_BYTES + whole(form) + share + 4 * prepared)


def run(planned: grid.Grid, say: Console) -> Iterator[rows.Row]:
    """A row for every cell, in the order in which they end."""
    budget = _budget(planned)
    ctx = {"provenance": commit()}
    waiting: list[dict[str, Any]] = []
    for cell in planned.cells:
        need = estimate_bytes(cell)
        if need > budget:
            yield _too_large(cell, need, budget, ctx)
        else:
            waiting.append(cell | {"estimate": need})
    workers = planned.run["workers"]
    if workers == 0:
        for cell in waiting:
            yield execute(cell, ctx)
    else:
        count = max(1, min(workers or os.cpu_count() or 1, len(waiting)))
        yield from _pooled(waiting, count, budget, ctx)


def _budget(planned: grid.Grid) -> float:
    given = planned.run["memory_gib"]
    return given * 2**30 if given else 0.8 * psutil.virtual_memory().available


def _too_large(cell: dict[str, Any], need: int, budget: float, ctx: dict[str, Any]) -> rows.Row:
    gib = lambda n: f"{n / 2**30:.1f} GiB"
    reason = (
        f"not started: {cell['experts']} experts would take about {gib(need)}, the sweep may use "
        f"{gib(budget)}; lower experts=, or raise memory_gib="
    )
    row = rows.new_row(cell["cell"])
    row["repro"], row["provenance"] = cell["repro"], dict(ctx["provenance"])
    return rows.finish(row, "skipped", reason, "OOM")


def _pooled(
    waiting: list[dict[str, Any]], count: int, budget: float, ctx: dict[str, Any]
) -> Iterator[rows.Row]:
    """Runs cells over `count` processes, never more at once than the memory budget holds."""
    running: dict[Future[rows.Row], dict[str, Any]] = {}
    queue = list(reversed(waiting))
    # 2 MiB pages: a cell's large short-lived tensors cost half the page faults (torch reads this)
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    with ProcessPoolExecutor(count, get_context("spawn"), initializer=_start_worker) as pool:
        while queue or running:
            used = sum(cell["estimate"] for cell in running.values())
            while queue and len(running) < count + 1:
                if running and used + queue[-1]["estimate"] > budget:
                    break
                cell = queue.pop()
                used += cell["estimate"]
                running[pool.submit(execute, cell, ctx)] = cell
            ended, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in ended:
                cell = running.pop(future)
                yield _outcome(future, cell, ctx)


def _outcome(future: Future[rows.Row], cell: dict[str, Any], ctx: dict[str, Any]) -> rows.Row:
    """The worker's row, or a crashed one where the worker died."""
    try:
        return future.result()
    except Exception as error:
        row = rows.new_row(cell["cell"])
        row["repro"], row["provenance"] = cell["repro"], dict(ctx["provenance"])
        return rows.finish(row, "crashed", f"worker: {type(error).__name__}: {error}")


def _start_worker() -> None:
    import torch

    torch.set_num_threads(1)


def execute(cell: dict[str, Any], ctx: dict[str, Any]) -> rows.Row:
    """One cell in this process, or in a worker of its env."""
    from harness import env_worker

    if env_worker.is_apart(cell):
        return env_worker.execute(cell, ctx)
    from harness.cell import run_cell

    return run_cell(cell, ctx)


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("{task.fields[state]}"), console=console, transient=False,
        disable=not console.is_terminal,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
