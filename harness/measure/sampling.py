"""Samples of a call on a device: warm-up, the cache's flush, the host's queueing out of the way.

`timing` decides what a set of samples is worth; the rules are said there.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from harness.measure import stats

if TYPE_CHECKING:
    from harness.measure.timing import Plan

MIB = 2**20
BATCH = 16  # samples queued on a GPU before the host waits: the queue hides the launch of the next
COVER = 1.5  # times its queueing that a call's flush lasts: the host of a sample may be slower
MOST_FLUSHES = 64


def llc_bytes(device: torch.device) -> int:
    """Last-level cache of the device this runs on, as the driver or the kernel states it."""
    if device.type == "cuda":
        l2 = int(torch.cuda.get_device_properties(device).L2_cache_size)
        # The driver states 4 MiB of L2 on CDNA3 and CDNA4; behind it is 256 MiB of Infinity Cache
        # (AMD CDNA 3 white paper).
        return max(l2, 256 * MIB) if torch.version.hip else l2
    sizes = [
        int(p.read_text().strip().rstrip("K")) * 1024
        for p in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
        if p.read_text().strip().endswith("K")
    ]
    return max(sizes, default=32 * MIB)


def sync(device: torch.device) -> None:
    """Wait for what is queued on a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def warm_up(fn: Callable[[], Any], p: Plan, device: torch.device) -> None:
    """Call until the plan has enough calls and milliseconds."""
    start, calls = time.perf_counter(), 0
    while calls < p.warmup_calls or (time.perf_counter() - start) * 1e3 < p.warmup_ms:
        fn()
        calls += 1
        sync(device)


def _graph(fn: Callable[[], Any], calls: int, device: torch.device) -> torch.cuda.CUDAGraph | None:
    """`calls` calls of fn as one graph, or None where fn cannot be captured (it waits, say)."""
    try:
        stream: Callable[..., torch.cuda.Stream] = torch.cuda.Stream
        side = stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(side):
            fn()
            sync(device)
            # not `torch.cuda.graph`, which collects garbage and empties the allocator's cache:
            # 0.1 s for each capture
            graph.capture_begin()
            try:
                for _ in range(calls):
                    fn()
            finally:
                graph.capture_end()
        torch.cuda.current_stream(device).wait_stream(side)
    except RuntimeError:
        sync(device)
        return None
    return graph


def _cuda_batch(fn: Callable[[], Any], flush: Callable[[], Any], n: int) -> list[float]:
    """n samples in us between device events. The host waits once, so launches overlap the flush."""
    event: Callable[..., torch.cuda.Event] = torch.cuda.Event
    pairs = [(event(enable_timing=True), event(enable_timing=True)) for _ in range(n)]
    for start, end in pairs:
        flush()
        start.record()
        fn()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) * 1e3 for start, end in pairs]


def _cpu_batch(fn: Callable[[], Any], flush: Callable[[], Any], n: int) -> list[float]:
    out = []
    for _ in range(n):
        flush()
        start = time.perf_counter_ns()
        fn()
        out.append((time.perf_counter_ns() - start) / 1e3)
    return out


def queueing_us(fn: Callable[[], Any], device: torch.device) -> float | None:
    """What the host needs for a call until it may go on, in us; None where the host is the device.

    The median of five calls on an idle device; a call that waits for its results takes it all.
    """
    if device.type != "cuda":
        return None
    taken = []
    for _ in range(5):
        sync(device)
        start = time.perf_counter_ns()
        fn()
        taken.append((time.perf_counter_ns() - start) / 1e3)
    sync(device)
    return sorted(taken)[2]


def flushes(host_us: float, flush_us: float) -> int:
    """How often to flush before a sample, so that the device is busy while the host queues it."""
    return max(1, min(MOST_FLUSHES, math.ceil(COVER * host_us / flush_us)))


def sample(
    fn: Callable[[], Any], p: Plan, device: torch.device, host_us: float | None = None
) -> tuple[list[float], int, str]:
    """Samples in us per call, calls per sample, and the backend: `event`, `graph` or `clock`.

    host_us: what the host needs to queue a call on the device, where it is to be hidden.
    A warm call below `graph_below_us` is repeated within a sample to 20 times that; a cold one
    cannot be, since its second run would find the cache filled.
    """
    batch = _cuda_batch if device.type == "cuda" else _cpu_batch
    flush: Callable[[], Any] = lambda: None
    if p.cache == "cold":
        size = max(p.flush_bytes, 4 * llc_bytes(device))
        buffer = torch.empty(size // 8, dtype=torch.int64, device=device)
        flush = once = buffer.zero_
        if host_us is not None:
            once()
            times = flushes(host_us, min(_cuda_batch(once, lambda: None, 3)))

            def flush() -> None:
                for _ in range(times):
                    once()

    probe = min(batch(fn, flush, 3))
    calls, backend, run = 1, "event" if device.type == "cuda" else "clock", fn
    if p.cache == "warm" and probe < p.graph_below_us:
        calls = max(1, int(20 * p.graph_below_us / max(probe, 0.1)))
    if device.type == "cuda" and (p.scope == "kernel" or probe < p.graph_below_us):
        graph = _graph(fn, calls, device)
        if graph is not None:
            run, backend = graph.replay, "graph"
    if backend != "graph" and calls > 1:

        def run() -> None:
            for _ in range(calls):
                fn()

    collecting = gc.isenabled()
    gc.disable()
    try:
        samples: list[float] = []
        deadline = time.perf_counter() + p.max_seconds
        step = BATCH if device.type == "cuda" else 4
        while len(samples) < p.max_samples:
            more = batch(run, flush, min(step, p.max_samples - len(samples)))
            samples += [t / calls for t in more]
            if len(samples) >= p.min_samples and (
                time.perf_counter() > deadline or stats.summarize(samples)["rel_iqr"] < p.rel_iqr
            ):
                break
    finally:
        if collecting:
            gc.enable()
    return samples, calls, backend
