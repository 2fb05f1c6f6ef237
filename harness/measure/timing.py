"""How long a call takes on the device it runs on, or the reason why there is no number.

The caller has checked the result first. The first call (compilation) is apart; warm-up is at least
10 calls and 25 ms; then at least 32 samples, until the relative IQR is small or a cap is met. Cache
`cold` writes a buffer of at least max(512 MiB, 4 x the last-level cache) before each sample and
outside its interval; `warm` does not. Scope `call` is the public function with its allocations;
`kernel` replays a captured graph, so pass a function that writes to outputs it was given. On a GPU
a cold time is the device's: the flush is repeated until it outlasts the host's queueing of the
call, whose own time is `host_us`, so that a layer of many short kernels is no clock of Python. All
samples are kept in microseconds, outliers are named and never dropped. Bytes are the useful ones:
each input read once, each output written once; a device copy counts read plus write.

A number that cannot be true is not reported: a clock under load below 75 % of the default
(THROTTLED), another process on the device (CONTENDED), a bandwidth more than 8 % above the device's
own copy (IMPOSSIBLE), samples that do not settle (NOISY).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import torch

from harness import ROOT, UsageError, suggest
from harness.measure import stats, telemetry
from harness.measure.sampling import llc_bytes, queueing_us, sample, sync, warm_up

CONF = ROOT / "conf" / "timing"
MIB = 2**20


@dataclass(frozen=True)
class Plan:
    """What conf/timing/*.yaml says; the comments there give each field's meaning."""

    name: str = "quick"
    scope: str = "call"
    cache: str = "cold"
    warmup_calls: int = 10
    warmup_ms: float = 25.0
    min_samples: int = 32
    max_samples: int = 64
    max_seconds: float = 1.0
    rel_iqr: float = 0.02
    noisy_rel_iqr: float = 0.25
    flush_bytes: int = 512 * MIB
    graph_below_us: float = 10.0
    min_clock_fraction: float = 0.75
    copy_excess: float = 0.08

    def __post_init__(self) -> None:
        for key, allowed in (("scope", ("call", "kernel")), ("cache", ("cold", "warm"))):
            if getattr(self, key) not in allowed:
                raise UsageError(
                    f"timing.{key}={getattr(self, key)!r} is not one of {', '.join(allowed)}"
                )
        if not 2 <= self.min_samples <= self.max_samples:
            raise UsageError(
                f"timing: 2 <= min_samples <= max_samples does not hold "
                f"({self.min_samples}, {self.max_samples})"
            )


def plan(timing: Plan | str | Mapping[str, Any]) -> Plan:
    """A Plan from itself, from the name of a file in conf/timing, or from such a file's content."""
    if isinstance(timing, Plan):
        return timing
    if isinstance(timing, str):
        from omegaconf import OmegaConf

        file = CONF / f"{timing}.yaml"
        if not file.is_file():
            names = [p.stem for p in CONF.glob("*.yaml")]
            raise UsageError(f"timing={timing}: no such plan{suggest(timing, names)}")
        timing = dict(OmegaConf.load(file))
    values = {str(k): v for k, v in timing.items()}
    known = {f.name for f in fields(Plan)}
    unknown = sorted(set(values) - known)
    if unknown:
        raise UsageError(f"timing.{unknown[0]}: no such field{suggest(unknown[0], list(known))}")
    return Plan(**values)


@cache
def _copy_us(device: torch.device, half: int) -> float:
    source = torch.randint(0, 256, (half,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    p = Plan(name="copy", max_seconds=0.5)
    fn = lambda: target.copy_(source)
    warm_up(fn, p, device)
    return float(stats.summarize(sample(fn, p, device)[0])["median"])


def copy_speed(device: torch.device | str, nbytes: int | None = None) -> float:
    """Device copy speed in GB/s (10^9), bytes read plus bytes written, measured once per process.

    nbytes: what is moved in all; None takes 2 GiB on a GPU, 256 MiB on a CPU (or 8 caches).
    A small copy is slower than a large one, so compare a routine with a copy of its own size.
    """
    device = _device(device)
    if nbytes is None:
        nbytes = 2048 * MIB if device.type == "cuda" else max(256 * MIB, 8 * llc_bytes(device))
    half = max(1, nbytes // 2)
    return 2 * half / _copy_us(device, half) / 1e3


def _device(device: torch.device | str) -> torch.device:
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device


def device_name(device: torch.device | str) -> str:
    """As rows name it: `NVIDIA H200`, or the processor's model name."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return "cpu"


def measure(
    fn: Callable[[], Any],
    *,
    device: torch.device | str,
    timing: Plan | str | Mapping[str, Any],
    useful_bytes: int,
    copy_gb_per_s: float | None = None,
    siblings: Iterable[int] = (),
) -> tuple[dict[str, Any] | None, str | None]:
    """(time, None) or (None, reason code): see the module's page and DESIGN's row schema.

    fn takes nothing, may be called any number of times, and its result has been checked.
    copy_gb_per_s: of this device in this run; None measures it (once per process).
    siblings: ids of processes that hold a context on this device but are known to be idle.
    """
    p, device = plan(timing), _device(device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    limit = copy_gb_per_s or copy_speed(device)
    start = time.perf_counter()
    fn()
    sync(device)
    first_call_ms = (time.perf_counter() - start) * 1e3
    warm_up(fn, p, device)
    before = telemetry.snapshot(device)
    host_us = queueing_us(fn, device)
    samples, calls, backend = sample(fn, p, device, host_us)
    after = telemetry.snapshot(device)
    if telemetry.others(before, siblings) or telemetry.others(after, siblings):
        return None, "CONTENDED"
    if telemetry.throttled(after, p.min_clock_fraction):
        return None, "THROTTLED"
    s = stats.summarize(samples)
    if s["rel_iqr"] > p.noisy_rel_iqr:
        return None, "NOISY"
    rate = useful_bytes / s["median"] / 1e3
    # A warm cache may well be faster than memory; only what cannot fit in it is held to the copy.
    if (p.cache == "cold" or useful_bytes > 4 * llc_bytes(device)) and (
        rate > (1 + p.copy_excess) * limit
    ):
        return None, "IMPOSSIBLE"
    return {
        "scope": "kernel" if backend == "graph" else "call",
        "device": device_name(device),
        "median_us": s["median"],
        "q1_us": s["q1"],
        "q3_us": s["q3"],
        "min_us": s["min"],
        "rel_iqr": s["rel_iqr"],
        "converged": s["rel_iqr"] < p.rel_iqr,
        "samples_us": [round(x, 3) for x in samples],
        "outliers": s["outliers"],
        "calls_per_sample": calls,
        "host_us": host_us,
        "useful_bytes": useful_bytes,
        "gb_per_s": rate,
        "copy_gb_per_s": limit,
        "copy_fraction": rate / limit,
        "cache": p.cache,
        "backend": backend,
        "plan": p.name,
        "first_call_ms": first_call_ms,
        "driver_major": telemetry.driver_major(before),
        "telemetry": None
        if before is None
        else {"before": _public(before), "after": _public(after)},
    }, None


def _public(state: telemetry.Snapshot | None) -> telemetry.Snapshot:
    """A snapshot without process ids, which mean nothing to a reader of rows."""
    return {k: v for k, v in (state or {}).items() if k != "pids"}
