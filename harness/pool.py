"""Cells over worker processes: what one cell does costs that cell only.

Each slot is a thread that hands cells, one at a time, to a worker process of the cell's env
(`env_worker`), which it replaces when the process dies, hangs or outgrows its memory. So a
segfault, a fault of the GPU's context, a hang or a flood of output ends as one row. Cells start
only while all of them together stay within the memory budget. `Stop` asks for an end after the
cells under way.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from harness import env_worker, rows

HEADROOM = 2.0  # a cell is ended above this multiple of its estimate
FLOOR_BYTES = 1 << 30  # and never below this: torch and what it loads


@dataclass(frozen=True)
class Plan:
    """How cells run. slots: at once. budget: bytes for all. limit_s: time of one cell, None for no
    limit. gpus: device ids that slots take in turn."""

    slots: int
    budget: float
    limit_s: float | None = None
    gpus: tuple[str, ...] = ()


@dataclass
class Stop:
    """Set to end a run: cells under way are finished, no other starts."""

    event: threading.Event = field(default_factory=threading.Event)

    def __bool__(self) -> bool:
        return self.event.is_set()


def run(
    cells: Sequence[dict[str, Any]], ctx: dict[str, Any], plan: Plan, stop: Stop | None = None
) -> Iterator[rows.Row]:
    """A row for every cell that was started, as it ends. Each cell carries its `estimate`."""
    stop = stop or Stop()
    running: dict[Future[rows.Row], dict[str, Any]] = {}
    queue = list(reversed(cells))
    # 2 MiB pages: a cell's large short-lived tensors cost half the page faults (torch reads this)
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    place = count()
    pool = ThreadPoolExecutor(
        plan.slots, "cell", initializer=lambda: _start_slot(next(place), plan)
    )
    try:
        while (queue and not stop) or running:
            used = sum(cell["estimate"] for cell in running.values())
            while queue and not stop and len(running) < plan.slots:
                if running and used + queue[-1]["estimate"] > plan.budget:
                    break
                cell = queue.pop()
                used += cell["estimate"]
                running[pool.submit(_one, cell, ctx, plan)] = cell
            ended, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in ended:
                running.pop(future)
                yield future.result()
    finally:
        env_worker.close_all()
        pool.shutdown(wait=True, cancel_futures=True)


def _start_slot(place: int, plan: Plan) -> None:
    """Settings of the workers of one slot: one torch thread each, and its GPU, if any."""
    environ = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    if plan.gpus:
        environ["CUDA_VISIBLE_DEVICES"] = plan.gpus[place % len(plan.gpus)]
    env_worker.set_environ(environ)


def _one(cell: dict[str, Any], ctx: dict[str, Any], plan: Plan) -> rows.Row:
    allowed = min(max(FLOOR_BYTES, HEADROOM * cell["estimate"]), max(plan.budget, FLOOR_BYTES))
    return env_worker.execute(cell, ctx, plan.limit_s, allowed)
