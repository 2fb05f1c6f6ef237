"""What a call takes beyond what was there: peak, outputs, scratch and kernel launches, measured.

`peak_extra_bytes` is the allocator's highest level during the call above the level before it, so
outputs are part of it; an in-place routine without scratch has 0. `output_bytes` is what is still
held once the call has returned and its result is kept; a view or the input itself adds nothing.
`scratch_bytes` is the first less the second, `required_over_peak` the second over the first (1.0:
nothing wasted; null where nothing was allocated).

On a GPU torch's caching allocator answers, in the bytes asked for. On a CPU every allocation and
release of torch's allocator is recorded in order, temporaries inside an operator included; memory
that others take by themselves (numpy, a vendor's C code) is not seen. One call has gone before, so
that compilation and cached constants do not count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


def running_peak(changes: Iterable[int]) -> tuple[int, int]:
    """(highest level, last level) of a run of allocations (+bytes) and releases (-bytes)."""
    level = peak = 0
    for change in changes:
        level += change
        peak = max(peak, level)
    return peak, level


def _cpu(fn: Callable[[], Any]) -> tuple[int, int, Any]:
    # The recorder behind torch.autograd.profiler before Kineto: it costs 0.1 ms to start where
    # torch.profiler costs 1.4 s the first time, and it writes nothing to stderr.
    from torch._C._autograd import _disable_profiler_legacy, _enable_profiler_legacy
    from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig

    _enable_profiler_legacy(
        ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig())
    )
    try:
        result = fn()
    finally:
        threads = _disable_profiler_legacy()
    # One list for each thread. Their peaks need not coincide, so the sum is an upper bound; torch's
    # operators allocate on the calling thread, where the sum is exact.
    levels = [
        running_peak(e.cpu_memory_usage() for e in events if str(e.kind()) == "memory_alloc")
        for events in threads
    ]
    return sum(p for p, _ in levels), sum(n for _, n in levels), result


def _cuda(fn: Callable[[], Any], device: torch.device) -> tuple[int, int, Any]:
    def now(what: str) -> int:
        stats = torch.cuda.memory_stats(device)
        return int(stats.get(f"requested_bytes.all.{what}", stats[f"allocated_bytes.all.{what}"]))

    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = now("current")
    result = fn()
    torch.cuda.synchronize(device)
    return now("peak") - before, now("current") - before, result


def launches(fn: Callable[[], Any]) -> list[str]:
    """Names of the device operations (kernels, copies, fills) of one call on a GPU, in order."""
    from torch._C._autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        fn()
        torch.cuda.synchronize()
    events = [e for e in recorded.events() or () if e.device_type == DeviceType.CUDA]
    return [e.name for e in sorted(events, key=lambda e: e.time_range.start)]


def measure(
    fn: Callable[[], Any], device: torch.device | str, *, warm: bool = True
) -> dict[str, Any]:
    """The row's `memory` for one call of fn (takes nothing, returns its outputs).

    warm: call fn once before; not needed on a CPU, where nothing is compiled.
    """
    device = torch.device(device)
    if warm or device.type == "cuda":
        fn()
    peak, held, result = _cuda(fn, device) if device.type == "cuda" else _cpu(fn)
    del result
    peak, held = max(peak, held, 0), max(held, 0)
    return {
        "output_bytes": held,
        "peak_extra_bytes": peak,
        "scratch_bytes": peak - held,
        "required_over_peak": round(held / peak, 6) if peak else None,
        "launches": len(launches(fn)) if device.type == "cuda" else None,
        "method": "caching allocator" if device.type == "cuda" else "allocator record",
    }
