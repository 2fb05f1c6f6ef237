"""Cells over worker processes: what one cell does costs that cell only.

Each slot is a thread that hands cells, one at a time, to a worker process of the cell's env
(`env_worker`), which it replaces when the process dies, hangs or outgrows its memory. So a
segfault, a fault of the GPU's context, a hang or a flood of output ends as one row. The first slots
own a GPU each and take the cells that need one, a cell of that GPU's model first; the others see
no GPU. Cells start only while all of them together stay within the memory budget. `Stop` asks for
an end after the cells under way.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

from harness import rows
from harness.env import worker as env_worker

HEADROOM = 2.0  # a cell is ended above this multiple of its estimate
# And never below this: torch, what it loads, and what the allocator keeps of the cells before. A
# limit is for a runaway: at 1.3 GiB it ended one of 396 sound cells, which held 1.4.
FLOOR_BYTES = 3 << 30


@dataclass(frozen=True)
class Gpu:
    """id: as CUDA_VISIBLE_DEVICES takes it. model: as `conf/hw` names it, or the driver does."""

    id: str
    model: str


@dataclass(frozen=True)
class Plan:
    """How cells run. slots: at once. budget: bytes for all. limit_s: time of one cell, None for no
    limit. gpus: one for each of the first slots."""

    slots: int
    budget: float
    limit_s: float | None = None
    gpus: tuple[Gpu, ...] = ()


@dataclass
class Stop:
    """Set to end a run: cells under way are finished, no other starts."""

    event: threading.Event = field(default_factory=threading.Event)

    def __bool__(self) -> bool:
        return self.event.is_set()


@dataclass
class _Slot:
    """kinds: the queues it takes cells from, best first. thread: which keeps its workers."""

    kinds: tuple[str, ...]
    thread: ThreadPoolExecutor


def run(
    cells: Sequence[dict[str, Any]], ctx: dict[str, Any], plan: Plan, stop: Stop | None = None
) -> Iterator[rows.Row]:
    """A row for every cell that was started, as it ends. Each cell carries its `estimate`, and
    `on`: cpu, gpu or a GPU's model."""
    stop = Stop() if stop is None else stop  # not `or`: a Stop is false until it is set
    queues: dict[str, deque[dict[str, Any]]] = {}
    for cell in cells:
        queues.setdefault(cell.get("on", "cpu"), deque()).append(cell)
    # 2 MiB pages: a cell's large short-lived tensors cost half the page faults (torch reads this)
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    slots = _slots(plan, queues)
    free = list(reversed(slots))
    running: dict[Future[rows.Row], tuple[_Slot, float]] = {}
    try:
        while True:
            if not stop:
                _start(free, queues, running, ctx, plan)
            if not running:
                return
            ended, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in ended:
                free.append(running.pop(future)[0])
                yield future.result()
    finally:
        if running:  # the caller gave up: nobody waits for these
            env_worker.kill_all()
        for slot in slots:
            slot.thread.shutdown(wait=True, cancel_futures=True)
        env_worker.close_all()


def _slots(plan: Plan, queues: dict[str, Any]) -> list[_Slot]:
    """The slots; every kind of cell has at least one that takes it."""
    models = {gpu.model for gpu in plan.gpus}
    strangers = tuple(kind for kind in queues if kind not in {"cpu", "gpu", *models})
    out = []
    for place in range(plan.slots):
        environ = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        kinds: tuple[str, ...] = ("cpu",) if plan.gpus else tuple(queues)
        if place < len(plan.gpus):
            gpu = plan.gpus[place]
            environ["CUDA_VISIBLE_DEVICES"] = gpu.id
            kinds = (gpu.model, "gpu", *strangers)
            if plan.slots <= len(plan.gpus):
                kinds = (*kinds, "cpu", *sorted(models - {gpu.model}))
        elif plan.gpus:
            environ["CUDA_VISIBLE_DEVICES"] = ""
        start = lambda environ=environ: env_worker.set_environ(environ)
        out.append(_Slot(kinds, ThreadPoolExecutor(1, f"slot{place}", initializer=start)))
    return out


def _start(
    free: list[_Slot], queues: dict[str, deque[dict[str, Any]]],
    running: dict[Future[rows.Row], tuple[_Slot, float]], ctx: dict[str, Any], plan: Plan,
) -> None:  # fmt: skip
    """Gives free slots their next cells; none overtakes one that waits for memory."""
    used = sum(need for _, need in running.values())
    for slot in reversed(free.copy()):
        queue = next((queues[kind] for kind in slot.kinds if queues.get(kind)), None)
        if queue is None:
            continue
        need = queue[0]["estimate"]
        if running and used + need > plan.budget:
            return
        used += need
        free.remove(slot)
        running[slot.thread.submit(_one, queue.popleft(), ctx, plan)] = (slot, need)


def _one(cell: dict[str, Any], ctx: dict[str, Any], plan: Plan) -> rows.Row:
    allowed = min(max(FLOOR_BYTES, HEADROOM * cell["estimate"]), max(plan.budget, FLOOR_BYTES))
    return env_worker.execute(cell, ctx, plan.limit_s, allowed)
