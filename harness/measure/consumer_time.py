"""How long a consumer takes with prepared weights and with strided ones, on the device that is
here.

    python -m harness compare measure=consumer [model=A,B] [m=1,16,128,1024] [out=FILE]

Each variant of a point (its layouts, its kernel) is tried with a few launch shapes and keeps its
fastest. Weights of all experts together are far larger than the last-level cache, so every launch
reads memory. Launches are captured in a graph and its replays timed with events: at M = 1 a launch
takes longer to start than to run. Before any timing both variants must equal the dequantized
product exactly; a wrong one has no time.

Break-even: the one-time preparation (fused kernels, same tensors) over the saving of one step that
runs the matmul once; none where nothing is saved.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from harness import UsageError
from harness.check.consumers import launch as consumer_launch
from harness.check.consumers import shapes
from kernels.catalog import LAYOUTS
from kernels.fused import consume
from kernels.layout import Layout
from kernels.select import choose_mxfp4

WEIGHT_BYTES = 256 << 20  # of all experts together; an H200 has 50 MiB of L2
REPLAYS = 9
Config = tuple[tuple[int, int, int], int, int]  # blocks, num_warps, num_stages


@dataclass(frozen=True)
class Point:
    """One measured matmul: y [experts, m, n] = x [experts, m, k] @ w."""

    model: str
    matrix: str
    experts: int
    m: int
    n: int
    k: int
    variant: str  # prepared or strided
    value: str
    scale: str


def configs(variant: str, m: int) -> list[Config]:
    """Launch shapes tried for a variant at m rows an expert."""
    bm = 16 if m <= 16 else 64 if m <= 64 else 128
    if variant == "prepared":  # 256 columns: the layout's 8 warps
        found = [((bm, 256, 128), 8, s) for s in (3, 4)]
        return [*found, ((64, 256, 128), 8, 3)] if m > 64 else found
    found = [((bm, 128, 128), 4, 3), ((bm, 128, 128), 8, 4), ((bm, 256, 128), 8, 3)]
    return [*found, ((64, 128, 128), 4, 4)] if m > 64 else found


def points(models: Sequence[dict[str, Any]], ms: Sequence[int], arch: str) -> list[Point]:
    """Every measurement, with as many experts as fill WEIGHT_BYTES, at least 4."""
    choice = choose_mxfp4(arch)
    strided = LAYOUTS["strided"]
    found = []
    for model in models:
        for matrix, (n, k) in shapes(model, 1).items():
            experts = min(model["E"], max(4, -(-WEIGHT_BYTES // (n * k // 2))))
            for m in ms:
                for variant, value, scale in (
                    ("prepared", choice.value, choice.scale), ("strided", strided, strided),
                ):  # fmt: skip
                    found.append(
                        Point(
                            model["name"], matrix, experts, m, n, k, variant, value.name, scale.name
                        )
                    )
    return found


def planned(
    point: Point, config: Config, out_type: str = "bf16", experts: int | None = None
) -> consume.Launch:
    blocks, warps, stages = config
    return consumer_launch(
        "sm90", LAYOUTS[point.value], LAYOUTS[point.scale], point.n, point.k, m=point.m,
        experts=experts or point.experts, blocks=blocks, num_warps=warps, num_stages=stages,
        out_type=out_type,
    )  # fmt: skip


def tensors(point: Point, experts: int, narrow: bool) -> tuple[torch.Tensor, ...]:
    """(x, checkpoint codes, checkpoint scales) of random bytes; narrow: sums exact in fp32."""
    draw = torch.Generator(device="cuda").manual_seed(1)
    pick = lambda low, high, *shape: torch.randint(
        low, high, shape, device="cuda", generator=draw, dtype=torch.int32
    )
    codes = pick(0, 256, experts, point.n, point.k // 2).byte()
    scales = pick(124, 131 if narrow else 130, experts, point.n, point.k // 32).byte()
    x = pick(-4, 5, experts, point.m, point.k).bfloat16()
    return x, codes, scales


def poisoned(layout: Layout, x: torch.Tensor) -> torch.Tensor:
    """Storage of x [E, n, k] with 0xFF wherever it holds padding."""
    n, k = layout.padded(*x.shape[-2:])
    full = torch.full((x.shape[0], n, k), 0xFF, dtype=torch.uint8, device=x.device)
    full[:, : x.shape[1], : x.shape[2]] = x
    return layout.forward(full).contiguous()


def is_right(point: Point, config: Config) -> bool:
    """Whether the variant equals the dequantized product on 2 experts, pad bytes 0xFF, exactly."""
    x, codes, scales = tensors(point, 2, narrow=True)
    value, scale = LAYOUTS[point.value], LAYOUTS[point.scale]
    w, s = poisoned(value, codes), poisoned(scale, scales)
    dense = consume.dequantize(
        w, s, consume.dequantize_launch(value, scale, n=point.n, k=point.k, experts=2)
    )
    factor = (scales.int() << 23).view(torch.float32).repeat_interleave(32, -1)  # exact 2^(b-127)
    low_high = torch.stack([codes & 15, codes >> 4], -1).flatten(-2).long()
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device="cuda")
    plain = torch.cat([table, -table])[low_high] * factor
    want = x.float() @ plain.mT  # fp32: torch's default for fp32 matmul has no tf32
    got = consume.matmul(x, w, s, planned(point, config, "fp32", 2))
    return torch.equal(dense, plain) and torch.equal(got, want)


def timed(run: Any) -> list[float]:
    """Microseconds of one call, REPLAYS samples of a captured graph."""
    run()
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    calls = max(1, min(20, int(2.0 / max(start.elapsed_time(end), 1e-3))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run()
    samples = []
    for i in range(REPLAYS + 2):
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        if i >= 2:
            samples.append(start.elapsed_time(end) * 1e3 / calls)
    return samples


def measure(point: Point) -> dict[str, Any]:
    """The row of one point: its fastest launch shape, or why there is no time."""
    row: dict[str, Any] = asdict(point) | {"median_us": None, "absent": None}
    tried = configs(point.variant, point.m)
    if not is_right(point, tried[0]):
        return row | {"absent": "INCORRECT"}
    x, codes, scales = tensors(point, point.experts, narrow=False)
    w = LAYOUTS[point.value].forward(codes).contiguous()
    s = LAYOUTS[point.scale].forward(scales).contiguous()
    del codes, scales
    out = torch.empty(point.experts, point.m, point.n, dtype=torch.bfloat16, device="cuda")
    best: tuple[float, list[float], Config] | None = None
    for config in tried:
        launch = planned(point, config)
        samples = timed(lambda launch=launch: consume.matmul(x, w, s, launch, out=out))
        median = statistics.median(samples)
        if best is None or median < best[0]:
            best = (median, samples, config)
    assert best is not None
    median, samples, config = best
    quarters = statistics.quantiles(samples, n=4)
    read = w.numel() + s.numel() + 2 * x.numel() + 2 * out.numel()
    work = 2 * point.experts * point.m * point.n * point.k
    return row | {
        "median_us": round(median, 2), "rel_iqr": round((quarters[2] - quarters[0]) / median, 4),
        "samples_us": [round(v, 2) for v in samples],
        "config": {"blocks": config[0], "num_warps": config[1], "num_stages": config[2]},
        "gb_per_s": round(read / median / 1e3, 1), "tflop_per_s": round(work / median / 1e6, 1),
        "backend": "graph",
    }  # fmt: skip


def preparation(point: Point) -> dict[str, Any]:
    """Time of preparing the point's weights with the fused kernels: value and scale."""
    from kernels.fused.rearrange import rearrange

    _, codes, scales = tensors(replace(point, m=1), point.experts, narrow=False)
    times = {}
    for name, layout, x in (("value", point.value, codes), ("scale", point.scale, scales)):
        times[f"{name}_us"] = round(
            statistics.median(timed(lambda layout=layout, x=x: rearrange(LAYOUTS[layout], x))), 2
        )
    return {"model": point.model, "matrix": point.matrix, "experts": point.experts} | times


def compile_ahead(work: Sequence[tuple[Point, Config]]) -> None:
    """Fill triton's disk cache from several processes, each with one expert's worth of memory."""
    jobs = max(1, min(12, (os.cpu_count() or 2) - 2))
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        pool.map(_compile, work, chunksize=1)


def _compile(item: tuple[Point, Config]) -> None:
    point, config = item
    x, codes, scales = tensors(point, 1, narrow=True)
    w, s = (LAYOUTS[lay].forward(t) for lay, t in ((point.value, codes), (point.scale, scales)))
    consume.matmul(x, w, s, planned(point, config, "bf16", 1))
    if config == configs(point.variant, point.m)[0]:
        consume.matmul(x, w, s, planned(point, config, "fp32", 1))
        value, scale = LAYOUTS[point.value], LAYOUTS[point.scale]
        consume.dequantize(w, s, consume.dequantize_launch(value, scale, n=point.n, k=point.k))
    torch.cuda.synchronize()


def break_even(
    rows: Sequence[dict[str, Any]], prep: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Strided against prepared at each point, with the steps after which preparation has paid."""
    by = {(r["model"], r["matrix"], r["m"], r["variant"]): r for r in rows}
    found = []
    for cost in prep:
        for m in sorted({r["m"] for r in rows}):
            pair = [by.get((cost["model"], cost["matrix"], m, v)) for v in ("strided", "prepared")]
            if any(p is None or p["median_us"] is None for p in pair):
                continue
            plain, ready = pair[0]["median_us"], pair[1]["median_us"]  # type: ignore[index]
            noise = plain * (pair[0]["rel_iqr"] + pair[1]["rel_iqr"])  # type: ignore[index]
            saved = plain - ready
            total = cost["value_us"] + cost["scale_us"]
            found.append({
                "model": cost["model"], "matrix": cost["matrix"], "m": m, "strided_us": plain,
                "prepared_us": ready, "ratio": round(plain / ready, 3),
                "prepare_us": round(total, 2),
                "steps": round(total / saved, 1) if saved > noise else None,
                "decided": abs(saved) > noise,
            })  # fmt: skip
    return found


def main(options: dict[str, str]) -> int:
    """Measures, prints a table, writes JSON to options["out"]; exit 2 if a variant was wrong, 3
    without a device."""
    from harness.plan.config import group_config, option

    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        print(
            "NO_DEVICE: measure=consumer times Hopper's consumers; no sm90 device is here",
            file=sys.stderr,
        )
        return 3
    names = options.get("model", "gpt_oss_120b,deepseek_r1_nvfp4").split(",")
    models = [group_config("model", option("model", name)) for name in names]
    try:
        ms = [int(m) for m in options.get("m", "1,16,128,1024").split(",")]
    except ValueError:
        raise UsageError(f"m={options['m']!r}: want whole numbers of rows an expert") from None
    return run(models, ms, options.get("out"))


def run(models: Sequence[dict[str, Any]], ms: Sequence[int], out: str | None = None) -> int:
    """The measurement itself, for models as dicts of name, E, H, I, activation."""
    import triton

    work = points(models, ms, "sm90")
    compile_ahead([(p, c) for p in work for c in configs(p.variant, p.m)])
    rows = [measure(p) for p in work]
    done = {(p.model, p.matrix): p for p in work if p.variant == "prepared"}
    prep = [preparation(p) for p in done.values()]
    device = torch.cuda.get_device_name()
    result = {
        "device": device, "hw": "h200" if "H200" in device else "h100",
        "torch": torch.__version__, "triton": triton.__version__, "rows": rows, "preparation": prep,
        "break_even": break_even(rows, prep),
    }  # fmt: skip
    for line in result["break_even"]:
        print(
            "{model} {matrix} M={m}: strided {strided_us} us, prepared {prepared_us} us, {ratio}x, "
            "prepare {prepare_us} us, steps {steps}, decided {decided}".format(**line)
        )
    if out:
        Path(out).write_text(json.dumps(result, indent=1) + "\n")
    return 2 if any(r["absent"] == "INCORRECT" for r in rows) else 0
