"""`python -m harness gate selftest`: the gate put to the test on the GPU of this machine.

In one call, in this order, so that a budget that runs out costs gates and nothing else:
timer   five routines by this timer and by `triton.testing.do_bench`
hopper  peak memory of the Hopper value swizzle at 128 x 5760 x 1440, reference and fused
plant   a comparison in which one routine of the second folder was made 5 % slower
gates   A/A comparisons of the whole fused suite, as many as fit in budget_s

An alarm is a statistical SLOWER: the rule that calls equal code ENVIRONMENT is not asked here.
Bytes are not checked here: `python -m harness bench` does that, and gives the rows of a baseline.
Writes selftest.json to out=FOLDER; exit 1 if any claim fails, 3 without a GPU.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

import kernels
from harness import ROOT, UsageError
from harness.gate import ab, ab_suite
from harness.gate.ab_pair import Pair, Setup
from harness.gate.rules import Limits
from harness.measure import memory, timing

EXPERTS = 128
PLANTED = "shuffle_rows_for_trtllm"
SLOWDOWN = 0.05
AB_TIMING = {"name": "ab", "scope": "kernel", "min_samples": 32, "max_samples": 32}
# conf/timing/careful.yaml, which needs OmegaConf to be read: a bare GPU machine may lack it
CAREFUL = {"name": "careful", "min_samples": 100, "max_samples": 1000, "rel_iqr": 0.005}
# Long enough that a launch hides behind the flush, in this timer and in do_bench alike.
TIMED_TWICE = (
    "reorder_w1w3_to_w3w1",
    "reorder_w13_to_w31_for_flashinfer_cutedsl",
    "interleave_linear_and_gate",
    "shuffle_rows_for_trtllm",
    "swizzle_mxfp4@sm90",
)
TODAY_MIB = 9113  # triton_kernels 3.5.1's Hopper value swizzle of 128 x 5760 x 1440 on an H200


def main(argv: list[str]) -> int:
    given = dict(text.partition("=")[::2] for text in argv)
    if set(given) - {"out", "budget_s", "gates", "only"}:
        raise UsageError("gate selftest takes out=FOLDER budget_s=SECONDS gates=N only=PART,PART")
    if not torch.cuda.is_available():
        print("gate selftest: nothing was verified (exit 3): there is no GPU here")
        return 3
    start = time.perf_counter()
    out = Path(given.get("out", "results/runs/selftest"))
    out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {"ok": {}, "spent_s": {}, "failed": {}}
    kept: dict[str, Any] = {}  # what one part learns and the next need not learn again
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "timer": against_do_bench,
        "hopper": hopper_memory,
        "plant": lambda: plant(kept),
        "gates": lambda: gates(
            int(given.get("gates", 5)), start + float(given.get("budget_s", 300)), kept
        ),
    }
    for name in given["only"].split(",") if "only" in given else parts:
        with _part(name, found, out):
            found[name] = parts[name]()
            found["ok"][name] = found[name].pop("ok")
        torch.cuda.empty_cache()
    print(json.dumps({k: found[k] for k in ("ok", "spent_s", "failed")}))
    return 0 if all(found["ok"].values()) and not found["failed"] else 1


@contextmanager
def _part(name: str, found: dict[str, Any], out: Path) -> Iterator[None]:
    """Times a part; a part that fails is recorded, and the next one runs."""
    start = time.perf_counter()
    try:
        yield
    except Exception as error:
        found["failed"][name] = f"{type(error).__name__}: {error}"[:1500]
        print(f"{name} failed: {found['failed'][name]}", flush=True)
    finally:
        found["spent_s"][name] = round(time.perf_counter() - start, 1)
        (out / "selftest.json").write_text(json.dumps(found, indent=1) + "\n")


def _work(case: str, impl: str) -> ab_suite.Work:
    """A case with inputs of its own."""
    make = ab_suite.Inputs(torch.device("cuda", 0), EXPERTS)
    return ab_suite.build(case, lambda routine: kernels.resolve(routine, impl), make)


def against_do_bench() -> dict[str, Any]:
    """Median of this timer over do_bench's, for five routines: within 3 %."""
    from triton.testing import do_bench

    out = {}
    for case in TIMED_TWICE:
        work = _work(case, "fused")
        ours, absent = timing.measure(
            work.fn, device="cuda", timing=CAREFUL, useful_bytes=work.useful_bytes
        )
        theirs = 1e3 * do_bench(work.fn, warmup=25, rep=100, return_mode="median")
        out[case] = {"ours_us": ours["median_us"] if ours else absent, "do_bench_us": theirs,
                     "ratio": ours["median_us"] / theirs if ours else None}  # fmt: skip
        print(case, out[case], flush=True)
        del work
    close = [abs(v["ratio"] - 1) <= 0.03 for v in out.values() if v["ratio"]]
    return {"ok": len(close) == len(TIMED_TWICE) and all(close), "routines": out}


def hopper_memory() -> dict[str, Any]:
    """Peak extra memory of the Hopper value swizzle alone, beside triton_kernels' own."""
    x = torch.randint(0, 256, (EXPERTS, 5760, 1440), dtype=torch.uint8, device="cuda")
    layout = kernels.choose_mxfp4("sm90", 1, 8, torch.__version__, "3.5").value
    out: dict[str, Any] = {"layout": layout.name, "triton_kernels_mib": TODAY_MIB}
    for impl in ("reference", "fused"):
        out[impl] = memory.measure(partial(kernels.resolve("swizzle", impl), x, layout), "cuda")
        torch.cuda.empty_cache()
    print(out, flush=True)
    return {"ok": out["fused"]["peak_extra_bytes"] <= TODAY_MIB * timing.MIB // 8, **out}


def _pair(b: Path) -> Pair:
    return Pair(ROOT, b, Setup(tuple(ab_suite.SUITE), "cuda", "fused", EXPERTS, AB_TIMING))


def plant(kept: dict[str, Any]) -> dict[str, Any]:
    """Compare with a copy in which PLANTED does 5 % more: found by name, and nothing else."""
    work = _work(PLANTED, "fused")
    measured, absent = timing.measure(work.fn, device="cuda", timing=AB_TIMING,
                                      useful_bytes=work.useful_bytes)  # fmt: skip
    if measured is None:
        raise RuntimeError(f"{PLANTED} cannot be timed: {absent}")
    del work
    torch.cuda.empty_cache()
    mhz = measured["telemetry"]["after"]["sm_mhz"] if measured["telemetry"] else 1980
    cycles = int(SLOWDOWN * measured["median_us"] * mhz)
    with tempfile.TemporaryDirectory(prefix="planted") as folder:
        shutil.copytree(ROOT / "kernels", Path(folder) / "kernels")
        file = Path(folder) / "kernels" / "fused" / f"{kernels.ROUTINES[PLANTED]}.py"
        file.write_text(
            f"{file.read_text()}\n\n_plain = {PLANTED}\n\n\ndef {PLANTED}(*args, **kwargs):\n"
            f"    result = _plain(*args, **kwargs)\n    torch.cuda._sleep({cycles})\n"
            "    return result\n"
        )
        with _pair(Path(folder)) as pair:
            probes = ab.probe(pair)
            kept |= {"probe": probes[0], "copy_gb_per_s": pair.copy_gb_per_s}
            findings, record = ab.judge(pair, Limits(), probes)
    slower = [f.cell["path"] for f in findings if f.verdict == "SLOWER"]
    print("planted:", {c: (v["verdict"], round(v["ratio"], 4)) for c, v in record["cases"].items()},
          flush=True)  # fmt: skip
    return {"ok": slower == [PLANTED], "cycles": cycles, "found": slower, "record": record}


def gates(count: int, deadline: float, kept: dict[str, Any]) -> dict[str, Any]:
    """Up to `count` independent A/A gates of the whole suite; none may raise an alarm."""
    records: list[dict[str, Any]] = []
    longest = 0.0
    with _pair(ROOT) as pair:
        if "probe" in kept:  # of these very kernels, by the part before
            probes, pair.copy_gb_per_s = (kept["probe"],) * 2, kept["copy_gb_per_s"]
        else:
            probes = ab.probe(pair)
        while len(records) < count and time.perf_counter() + longest < deadline:
            start = time.perf_counter()
            records.append(ab.judge(pair, Limits(), probes)[1])
            longest = max(longest, time.perf_counter() - start)
            found = {c: (v["statistical"], round(v["ratio"], 4), round(v["floor"], 4))
                     for c, v in records[-1]["cases"].items()}  # fmt: skip
            print(f"gate {len(records)} ({time.perf_counter() - start:.0f} s):", found, flush=True)
    alarms = [[c for c, v in r["cases"].items() if v["statistical"] == "SLOWER"] for r in records]
    return {"ok": len(records) == count and not any(alarms), "gates": len(records),
            "asked": count, "alarms": alarms, "records": records}  # fmt: skip
