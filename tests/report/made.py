"""Rows made up for tests of reports: valid, with every status and every reason code."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path
from typing import Any

from harness import rows

Row = dict[str, Any]
COPY = 4140.0  # GB/s
HOSTILE = '<script>alert("x")</script>\'"><img src=x onerror=alert(1)>'
LONG = "model_" + "very_long_" * 30 + "名前-ملف-🧪"
SPEED = {"fused": 0.94, "vllm": 0.09, "flashinfer": 0.2, "triton_kernels": 0.011, "reference": 0.05}
PATHS = ("mxfp4_triton", "nvfp4_trtllm", "nvfp4_cutedsl", "swizzle_blockscale",
         "reorder_w1w3_to_w3w1", "interleave_linear_and_gate")  # fmt: skip
SHAPES = {"gpt_oss_120b": (128, 2880, 2880), "deepseek_r1_nvfp4": (256, 7168, 2048),
          "qwen3_235b": (128, 4096, 1536)}  # fmt: skip


def cell(**axes: Any) -> dict[str, Any]:
    base = {
        "hw": "h200", "model": "gpt_oss_120b", "path": "mxfp4_triton", "tp_size": 1, "tp_rank": 0,
        "ep_size": 1, "experts": 8, "impl": "fused", "env": "current", "size": "ci",
        "source": "synthetic", "seed": 0,
    }  # fmt: skip
    return base | axes


def layouts(model: str, tp_size: int, hw: str) -> dict[str, Any]:
    _, hidden, inter = SHAPES.get(model, (8, 512, 256))
    n, groups = 2 * inter // tp_size, hidden // 32
    kind, align = {"h200": ("hopper_scale_w8", 4), "gfx950": ("cdna4_scale", 8)}.get(
        hw, ("blackwell_scale", 8)
    )
    if hw == "gfx950" and tp_size > 2:
        kind, align = "strided", 1
    rows_, cols = -(-n // 256) * 256 if align > 1 else n, -(-groups // align) * align
    return {
        "w13_weight": {
            "name": "hopper_value_v3" if hw == "h200" else "strided", "params": {},
            "logical": [n, hidden // 2], "padded": [n, hidden // 2], "pad_bytes": 0,
        },
        "w13_scale": {
            "name": kind, "params": {"num_warps": 8} if hw == "h200" else {},
            "logical": [n, groups], "padded": [rows_, cols], "pad_bytes": rows_ * cols - n * groups,
        },
    }  # fmt: skip


def ok(rng: random.Random, timed: bool = True, **axes: Any) -> Row:
    """A row whose checks passed; its time and memory follow from the bytes it moves."""
    row = rows.new_row(cell(**axes))
    at = row["cell"]
    _, hidden, inter = SHAPES.get(at["model"], (8, 512, 256))
    useful = 2 * at["experts"] * (2 * inter // at["tp_size"]) * (hidden // 2)
    row["checks"] = {"bijection": "pass", "round_trip": "pass", "oracle": "pass (w13)",
                     "poison": "pass", "shards": "skip: tp_size is 1"}  # fmt: skip
    digest = hashlib.sha256(
        json.dumps([at[k] for k in ("hw", "model", "path", "tp_size", "experts")]).encode()
    ).hexdigest()
    row["digests"] = {"w13_weight": f"sha256:{digest}"}
    row["layouts"] = layouts(at["model"], at["tp_size"], at["hw"])
    row["decisions"] = {"reason": f"{at['hw']} takes it", "bytes_ratio": 1 + at["tp_size"] / 16}
    row["bound"] = {"bytes": useful, "floor_us": useful / 4.8e6, "source": "datasheet"}
    row["bound_absent"] = None
    row["memory"] = {
        "output_bytes": useful // 2, "scratch_bytes": 0 if at["impl"] == "fused" else useful * 3,
        "peak_extra_bytes": useful // 2 + (0 if at["impl"] == "fused" else useful * 3),
        "required_over_peak": 1.0, "launches": 1, "method": "caching allocator",
    }  # fmt: skip
    row["memory_absent"] = None
    if timed:
        fraction = SPEED.get(at["impl"], 0.3) * rng.uniform(0.9, 1.04)
        median = useful / (fraction * COPY * 1e3) + 2.0
        samples = sorted(round(median * rng.gauss(1, 0.01), 3) for _ in range(33))
        row["time"] = {
            "scope": "call", "device": "NVIDIA H200", "median_us": samples[16],
            "q1_us": samples[8], "q3_us": samples[24], "min_us": samples[0], "rel_iqr": 0.013,
            "converged": True, "samples_us": samples, "outliers": [], "useful_bytes": useful,
            "gb_per_s": useful / samples[16] / 1e3, "copy_gb_per_s": COPY,
            "copy_fraction": useful / samples[16] / 1e3 / COPY, "cache": "cold",
            "backend": "event", "plan": "quick", "first_call_ms": 812.5, "driver_major": 570,
            "telemetry": {"before": {"sm_mhz": 1980}, "after": {"sm_mhz": 1965}},
        }  # fmt: skip
        row["time_absent"] = None
    else:
        row["time_absent"] = "NO_DEVICE"
    row["spent_ms"] = {"checks": round(rng.uniform(20, 300), 1)}
    row["provenance"] = {"device": "NVIDIA H200", "torch": "2.11.0", "triton": "3.6.0",
                         "commit": "0123abc", "dirty": False}  # fmt: skip
    words = " ".join(f"{k}={at[k]}" for k in ("hw", "model", "path", "tp_size", "experts", "impl"))
    row["repro"] = f"python -m harness sweep {words}"
    rows.validate(row)
    return row


def bad(
    rng: random.Random, status: str, reason: str, absent: str | None = None, **axes: Any
) -> Row:
    """A row that did not end well: no time; memory only where the bytes were wrong."""
    row = ok(rng, timed=False, **axes)
    if status == "wrong":
        row["checks"]["oracle"] = "fail: w13_scale, 12 bytes differ, first at (3, 17): 0x7f, 0x80"
    else:
        row["memory"] = None
    row["time_absent"] = None
    row = rows.finish(row, status, reason, absent)
    rows.validate(row)
    return row


def with_code(row: Row, triton: str, wider: bool) -> Row:
    row["provenance"] = {**row["provenance"], "triton": triton}
    kernel = {
        "kernel": "scaled_matmul_kernel", "instructions": 1059 if wider else 5454, "spills": 0,
        "registers": 96, "global_loads": {"16": 8} if wider else {"4": 32}, "matrix": {"wgmma": 8},
    }  # fmt: skip
    row["codegen"] = {"target": "sm90", "triton": triton, "kernels": {"w13": kernel}}
    row["codegen_absent"] = None
    return row


def mixed(seed: int = 1) -> list[Row]:
    """Every status, every reason code, three models, four implementations, two code versions."""
    rng = random.Random(seed)
    out = [
        ok(rng, model=model, path=path, tp_size=tp, experts=experts, impl=impl,
           env="vllm033" if impl == "vllm" else "current")
        for model in SHAPES
        for path in PATHS
        for tp in (1, 8)
        for experts in (8, 32, 128)
        for impl in ("fused", "reference", "vllm")
        if impl != "vllm" or path != "interleave_linear_and_gate"
    ]  # fmt: skip
    out += [
        ok(rng, timed=False, hw=hw, tp_size=tp, impl="reference")
        for hw in ("gfx950", "b200") for tp in (1, 2, 4, 8)
    ]  # fmt: skip
    for i, code in enumerate(rows.ABSENT):
        row = ok(rng, timed=False, path="mxfp4_quantize", tp_size=2, seed=i)
        row["time_absent"] = row["memory_absent"] = code
        row["memory"] = None
        out.append(row)
    refusal = "w13_scale (352, 90): 128 must divide the gemm1 rows"
    out += [
        bad(rng, "wrong", "oracle: bytes differ", path="nvfp4_trtllm", tp_size=4),
        bad(rng, "refused", refusal, path="nvfp4_trtllm", tp_size=2),
        bad(rng, "oom", "needs 9113 MiB, 4096 MiB are free", path="mxfp4_triton", tp_size=4),
        bad(rng, "timeout", "no answer after 60 s", path="nvfp4_cutedsl", tp_size=4),
        bad(rng, "crashed", "exit code -11", path="nvfp4_cutedsl", tp_size=2),
        bad(rng, "skipped", "flashinfer is not installed", "NOT_INSTALLED", impl="flashinfer"),
    ]
    for hw, versions in (("h200", ("3.4.0", "3.6.0", "3.9.1")), ("gfx950", ("3.6.0", "3.10.0"))):
        for i, version in enumerate(versions):
            row = ok(rng, timed=False, hw=hw, impl="fused", env=f"triton{version}", experts=16)
            out.append(with_code(row, version, i > 0))
    for i, version in enumerate(("3.9.1", "3.4.0")):  # another model, newest first, other numbers
        axes = {"model": "qwen3_235b", "impl": "fused", "env": f"triton{version}", "experts": 16}
        out.append(with_code(ok(rng, timed=False, **axes), version, i > 0))
    return out + bench()


def hostile(seed: int = 2) -> list[Row]:
    rng = random.Random(seed)
    names = (HOSTILE, LONG, "a|b`c`*d*[e](f)&amp;$x$", "</script><!--", "line\nbreak\ttab")
    out = [
        ok(rng, model=name, source=f"/weights/{name}.safetensors", impl=impl)
        for name in names for impl in ("fused", "reference")
    ]  # fmt: skip
    for row in out:
        row["repro"] = f"python -m harness sweep model='{row['cell']['model']}'"
    out.append(bad(rng, "refused", HOSTILE, path="nvfp4_trtllm"))
    return out


def many(count: int = 5000, seed: int = 3) -> list[Row]:
    rng = random.Random(seed)
    out = []
    for i in range(count):
        axes = {
            "hw": ("h200", "gfx950", "b200", "gfx1250")[i % 4],
            "path": PATHS[i // 4 % 6], "tp_size": (1, 2, 4, 8)[i // 24 % 4],
            "impl": ("fused", "reference")[i // 96 % 2], "model": tuple(SHAPES)[i // 192 % 3],
            "experts": 8 * (1 + i // 576),
        }  # fmt: skip
        out.append(ok(rng, timed=axes["hw"] == "h200", **axes))
    return out


def write(folder: Path, found: list[Row], planned: int = 0) -> Path:
    """A run folder: rows.jsonl, and a manifest of those cells and `planned` more."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "rows.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in found)
    cells = [row["cell"] for row in found]
    cells += [cell(path="nvfp4_cutlass", seed=seed) for seed in range(planned)]
    manifest = {"cells": [{"cell": c} for c in cells], "overrides": ["hw=h200"]}
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    return folder


def unmeasured(seed: int = 4) -> list[Row]:
    """Rows without any evidence of speed: other targets than the machine, refusals, skips."""
    rng = random.Random(seed)
    out = [ok(rng, timed=False, hw="b200", tp_size=tp, impl="reference") for tp in (1, 2, 4, 8)]
    for row in out:
        row["memory"], row["memory_absent"] = None, "FILTERED"
    return [*out, bad(rng, "skipped", "not installed", "NOT_INSTALLED", impl="vllm")]


def bench(seed: int = 5) -> list[Row]:
    """Rows as the bench writes them: cases of one cell, a vendor's time beside ours."""
    rng = random.Random(seed)
    out = []
    for case, slower in (("Hopper value", 50.0), ("CDNA4 scale", 20.0), ("strided", 0.0)):
        row = ok(rng, path="swizzle", size="full")
        row["decisions"] = {"case": case, "bar": 0.9, "shapes": {"x": [128, 5760, 1440]}}
        time = {**row["time"], "median_us": row["time"]["median_us"] * slower,
                "copy_fraction": row["time"]["copy_fraction"] / (slower or 1)}  # fmt: skip
        for key in ("q1_us", "q3_us"):
            time[key] = row["time"][key] * slower
        vendor = {"impl": "triton_kernels", "peak_extra_bytes": 9 << 30, **time}
        row["decisions"]["today"] = vendor if slower else None
        out.append(row)
    return out
