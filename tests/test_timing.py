"""Times that are true, and null with a reason where they cannot be."""

import time

import pytest
import torch

from harness import UsageError, rows
from harness.measure import sampling, telemetry, timing

WARM = timing.Plan(cache="warm", min_samples=8, max_samples=8, warmup_ms=1.0, noisy_rel_iqr=1e9)
CPU = torch.device("cpu")


def measure(fn, plan=WARM, useful_bytes=1000, **kwargs):
    return timing.measure(
        fn, device="cpu", timing=plan, useful_bytes=useful_bytes, **{"copy_gb_per_s": 10.0} | kwargs
    )


@pytest.mark.parametrize("name", ["quick", "careful"])
def test_every_plan_keeps_the_promises(name):
    p = timing.plan(name)
    assert p.name == name and p.cache == "cold" and p.scope == "call"
    assert p.warmup_calls >= 10 and p.warmup_ms >= 25 and p.min_samples >= 32
    assert p.flush_bytes >= 512 * 2**20 and p.rel_iqr <= 0.02
    assert p.graph_below_us == 10 and p.min_clock_fraction == 0.75 and p.copy_excess == 0.08


def test_a_plan_from_a_mapping_and_bad_plans():
    assert timing.plan({"name": "x", "cache": "warm"}).cache == "warm"
    for bad, message in [
        ("quik", "did you mean quick"),
        ({"cach": "warm"}, "did you mean cache"),
        ({"cache": "hot"}, "not one of cold, warm"),
        ({"min_samples": 1}, "2 <="),
    ]:
        with pytest.raises(UsageError, match=message):
            timing.plan(bad)


def test_a_known_duration_and_everything_a_row_needs():
    calls = []

    def fn():
        calls.append(1)
        time.sleep(0.004)

    found, absent = measure(fn)
    assert absent is None and 4000 <= found["min_us"] <= found["q1_us"] <= found["median_us"]
    assert found["median_us"] == pytest.approx(sorted(found["samples_us"])[4], rel=0.5)
    assert len(found["samples_us"]) == 8 and len(calls) >= 8 + 10 + 1  # samples, warm-up, first
    assert found["gb_per_s"] == pytest.approx(1000 / found["median_us"] / 1e3)
    assert found["copy_fraction"] == pytest.approx(found["gb_per_s"] / 10)
    assert (found["cache"], found["scope"], found["backend"]) == ("warm", "call", "clock")
    assert found["first_call_ms"] >= 4 and found["telemetry"] is None
    assert found["host_us"] is None
    row = rows.new_row(dict.fromkeys(rows.CELL, 0))
    row["time"] = found
    row.pop("time_absent")
    rows.validate(row)


def test_the_first_call_is_apart():
    state = {"first": True}

    def fn():
        time.sleep(0.2 if state.pop("first", False) else 0.0005)

    found, _ = measure(fn)
    assert found["first_call_ms"] > 190 and max(found["samples_us"]) < 100_000


def test_sampling_stops_when_the_spread_is_small_and_not_before():
    plan = timing.Plan(cache="warm", min_samples=12, max_samples=400, max_seconds=30, rel_iqr=1e9)
    samples, _, _ = sampling.sample(lambda: time.sleep(0.001), plan, CPU)
    assert len(samples) == 12
    plan = timing.Plan(cache="warm", min_samples=12, max_samples=40, max_seconds=30, rel_iqr=0.0)
    assert len(sampling.sample(lambda: time.sleep(0.001), plan, CPU)[0]) == 40


def test_short_warm_calls_are_repeated_within_a_sample():
    plan = timing.Plan(cache="warm", min_samples=8, max_samples=8)
    samples, calls, _ = sampling.sample(lambda: None, plan, CPU)
    assert calls > 100 and max(samples) < 10


def test_cold_flushes_before_each_sample_and_outside_it(monkeypatch):
    events = []
    real = torch.empty

    class Buffer:
        def zero_(self):
            events.append("flush")
            time.sleep(0.02)

    def empty(size, **kwargs):
        assert size * 8 >= 4 * sampling.llc_bytes(CPU)
        monkeypatch.setattr(torch, "empty", real)
        return Buffer()

    monkeypatch.setattr(torch, "empty", empty)
    plan = timing.Plan(min_samples=4, max_samples=4, flush_bytes=1)
    samples, _, _ = sampling.sample(lambda: events.append("call"), plan, CPU)
    assert events == ["flush", "call"] * 7  # three to probe, four samples
    assert max(samples) < 20_000


def test_the_flush_outlasts_the_hosts_queueing():
    assert sampling.flushes(0.0, 130.0) == 1
    assert sampling.flushes(800.0, 130.0) == 10  # 1.5 times 800 us, in flushes of 130
    assert sampling.flushes(1e6, 130.0) == sampling.MOST_FLUSHES
    assert sampling.queueing_us(lambda: None, CPU) is None  # there the host is the device


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_time_of_a_call_is_not_its_hosts():
    x = torch.zeros(2**20, device="cuda")

    def fn():
        x.add_(1.0)
        time.sleep(0.002)
        x.add_(1.0)

    found, absent = timing.measure(fn, device="cuda", useful_bytes=2**24, timing=timing.Plan())
    assert absent is None and found["host_us"] > 2000 and found["median_us"] < 200


def test_what_cannot_be_true_is_null_with_a_reason(monkeypatch):
    slow = lambda: time.sleep(0.001)
    assert measure(slow, useful_bytes=10**12) == (None, "IMPOSSIBLE")
    jumpy = iter([0.0, 0.03] * 100)
    plan = timing.Plan(cache="warm", min_samples=8, max_samples=8, warmup_ms=1.0)
    assert measure(lambda: time.sleep(next(jumpy)), plan) == (None, "NOISY")
    busy = {"pids": [1, 2, 3], "sm_mhz": 1900, "default_sm_mhz": 1980}
    monkeypatch.setattr(telemetry, "snapshot", lambda device: busy)
    assert measure(slow) == (None, "CONTENDED")
    slowed = {"pids": [], "sm_mhz": 1400, "default_sm_mhz": 1980}
    monkeypatch.setattr(telemetry, "snapshot", lambda device: slowed)
    assert measure(slow) == (None, "THROTTLED")
    fine = {"pids": [], "sm_mhz": 1500, "default_sm_mhz": 1980, "driver": "580.1"}
    monkeypatch.setattr(telemetry, "snapshot", lambda device: fine)
    found, absent = measure(slow)
    assert absent is None and found["driver_major"] == "580"
    assert "pids" not in found["telemetry"]["after"]


def test_a_warm_cache_may_beat_memory_but_only_if_the_data_fits():
    slow = lambda: time.sleep(0.001)
    fits = sampling.llc_bytes(CPU)
    assert measure(slow, useful_bytes=fits)[1] is None
    assert measure(slow, useful_bytes=5 * fits)[1] == "IMPOSSIBLE"


def test_every_reason_is_a_code_of_the_row():
    assert {"THROTTLED", "CONTENDED", "IMPOSSIBLE", "NOISY"} <= set(rows.ABSENT)


def test_other_processes_in_and_out_of_our_pid_namespace():
    import os

    me = os.getpid()
    assert telemetry.others(None) == 0
    assert telemetry.others({"pids": [me]}) == 0
    assert telemetry.others({"pids": [me, 2**22 + 1]}) == 1
    assert telemetry.others({"pids": [me, 2**22 + 1]}, siblings=[2**22 + 1]) == 0
    assert telemetry.others({"pids": [1]}) == 0  # ours, under a number of another namespace
    assert telemetry.others({"pids": [1, 2]}) == 1


def test_workers_of_one_harness_process_are_no_strangers_and_a_shells_are(tmp_path):
    """Two sleepers under `python -m harness.x` and two under a plain script, for real."""
    import subprocess
    import sys

    code = (
        "import subprocess, sys\n"
        "a = subprocess.Popen(['sleep', '60'])\n"
        "ask = 'import sys, os; from harness.measure import telemetry; '\n"
        "ask += 'print(telemetry.others(dict(pids=[os.getpid(), int(sys.argv[1])])))'\n"
        "out = subprocess.run([sys.executable, '-c', ask, str(a.pid)], stdout=subprocess.PIPE)\n"
        "a.kill()\n"
        "print(out.stdout.decode())\n"
    )
    seen = []
    for word in ("harness.worker", "plain"):  # an argument that the parent's command line holds
        done = subprocess.run([sys.executable, "-c", code, word], capture_output=True, text=True)
        seen.append(done.stdout.strip())
    assert seen == ["0", "1"]


def test_copy_speed_counts_read_and_write():
    speed = timing.copy_speed("cpu", 8 * 2**20)
    assert 0.05 < speed < 2000
    assert timing.copy_speed("cpu", 8 * 2**20) == speed  # once per process


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("scope", ["call", "kernel"])
def test_gpu_time_of_a_copy_is_its_copy_speed(scope):
    a = torch.empty(2**27, dtype=torch.int64, device="cuda").random_()
    b = torch.empty_like(a)
    work = lambda: torch.bitwise_not(a, out=b)  # a copy in a graph is another engine's, at .65
    found, absent = timing.measure(
        work, device="cuda", useful_bytes=2 * 2**30, timing=timing.Plan(scope=scope)
    )
    assert absent is None and found["scope"] == scope
    assert found["copy_fraction"] == pytest.approx(1.0, abs=0.05)
