"""Vendors against this project on one device in one run: `python -m harness.vendor.bench out=FILE`.

Every case gives the same inputs to every implementation that this process can import; bytes are
compared with the reference's before anything is timed, and a wrong one gets no time. One row a case
and implementation, in the schema of `harness.rows`; `decisions` holds the shapes. The table that is
printed has the time, its share of the device's copy speed, memory beyond the inputs over the size
of the outputs, and how many times the fused twin's time each took. For two generations of
triton_kernels, run it once with each.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from harness import UsageError, rows, vendor
from harness.env import impls, plugins
from harness.measure import memory, timing
from harness.run.runs import commit
from kernels.errors import LayoutError

T = torch.Tensor
Inputs = dict[str, T]
Call = Callable[[Inputs], tuple[tuple[Any, ...], dict[str, Any]]]


@dataclass(frozen=True)
class Case:
    """routine(*call(inputs)): shapes name the inputs, uint8 unless `bf16`. in_place: works on its
    inputs."""

    routine: str
    model: str
    shapes: Mapping[str, tuple[int, ...]]
    call: Call
    hw: str = "h200"
    bf16: bool = False
    in_place: bool = False


def _e4m3(x: T) -> T:
    return x.view(torch.float8_e4m3fn)


def _swizzle(target: str, generation: str) -> Call:
    return lambda t: ((t["value"], t["scale"], 8), {"target": target, "generation": generation})


def cases(generation: str) -> dict[str, Case]:
    """Sized past the last-level cache; models' real H and I, and as many experts as that takes."""
    deepseek = {
        "w13": (32, 4096, 3584), "w2": (32, 7168, 1024),
        "s13": (32, 4096, 448), "s2": (32, 7168, 128),
    }  # fmt: skip
    trtllm: Call = lambda t: ((t["w13"], t["w2"], t["s13"], t["s2"], 7168, 2048, 32, True), {})
    gpt_oss, padded = {"value": (32, 5760, 1440), "scale": (32, 5760, 90)}, {
        "value": (32, 6144, 1536), "scale": (32, 6144, 96),
    }  # fmt: skip
    source = {"x": (16, 5760, 2880)}
    return {
        "block_scale": Case(
            "nvfp4_block_scale_interleave", "deepseek_r1_nvfp4", {"s": (256, 4096, 448)},
            lambda t: ((t["s"],), {}),
        ),
        "swizzle_blockscale": Case(
            "swizzle_blockscale", "deepseek_r1_nvfp4", {"s": (256, 4096, 448)},
            lambda t: ((_e4m3(t["s"]),), {}),
        ),
        "trtllm": Case(
            "prepare_static_weights_for_trtllm_fp4_moe", "deepseek_r1_nvfp4", deepseek, trtllm
        ),
        "hopper": Case("swizzle_mxfp4", "gpt_oss_20b", gpt_oss, _swizzle("sm90", generation)),
        "blackwell": Case(
            "swizzle_mxfp4", "gpt_oss_20b", padded, _swizzle("sm100", generation), hw="b200"
        ),
        "quantize_even": Case(
            "downcast_to_mxfp", "gpt_oss_20b", source, lambda t: ((t["x"], 2), {}), bf16=True
        ),
        "quantize_up": Case(
            "downcast_to_mxfp", "gpt_oss_20b", source,
            lambda t: ((t["x"], 2), {"scale_rounding": "up"}), bf16=True,
        ),
        "reorder": Case(
            "reorder_w1w3_to_w3w1", "deepseek_r1_nvfp4",
            {"w": (32, 4096, 3584), "s": (32, 4096, 448)}, lambda t: ((t["w"], t["s"]), {}),
            in_place=True,
        ),
        "interleave": Case(
            "interleave_linear_and_gate", "deepseek_r1_nvfp4", {"w": (32, 4096, 3584)},
            lambda t: ((t["w"], 64, 1), {}),
        ),
    }  # fmt: skip


def inputs(case: Case, device: torch.device) -> Inputs:
    generator = torch.Generator(device).manual_seed(0)
    if case.bf16:
        make = lambda shape: torch.randn(shape, generator=generator, device=device).bfloat16()
    else:
        make = lambda shape: torch.randint(
            1, 127, shape, generator=generator, device=device, dtype=torch.uint8
        )
    return {name: make(shape) for name, shape in case.shapes.items()}


def results(done: Any) -> list[T]:
    """The tensors that a routine returned, storages for swizzled ones, as bytes."""
    items = done if isinstance(done, tuple) else (done,)
    if hasattr(done, "value"):
        items = (done.value.storage, done.scale.storage)
    return [x.contiguous().view(torch.uint8) for x in items if isinstance(x, T)]


def same(got: list[T], want: list[T]) -> str:
    """`pass`, or which tensor differs and where first."""
    for index, (a, b) in enumerate(zip(got, want, strict=True)):
        if a.numel() != b.numel():
            return f"fail: result {index} has {a.numel()} bytes, not {b.numel()}"
        wrong = a.view(-1) != b.view(-1)
        if bool(wrong.any()):
            at = int(wrong.nonzero()[0])
            values = f"0x{int(a.view(-1)[at]):02x} instead of 0x{int(b.view(-1)[at]):02x}"
            return f"fail: result {index}: {int(wrong.sum())} bytes differ, first at {at}: {values}"
    return "pass"


def measure(
    name: str, case: Case, impl: str, device: torch.device, plan: Any, ctx: Any
) -> rows.Row:
    """One row. The reference's bytes are computed anew, so that only one implementation's are
    held."""
    identity = {
        "hw": case.hw, "model": case.model, "path": case.routine, "tp_size": 1, "tp_rank": 0,
        "ep_size": 1, "experts": next(iter(case.shapes.values()))[0], "impl": impl,
        "env": ctx["env"], "size": name, "source": "synthetic", "seed": 0,
    }  # fmt: skip
    row = rows.new_row(identity)
    row["repro"] = f"python -m harness.vendor.bench case={name} impl={impl}"
    row["provenance"] = dict(ctx["provenance"])
    row["decisions"] = {"shapes": {n: list(s) for n, s in case.shapes.items()}}
    if impl in vendor.VENDORS:
        row["provenance"][impl] = vendor.probe(impl).version or "not installed"
    try:
        function = impls.load(impl, case.routine)
        given = inputs(case, device)
        args, options = case.call(given)
        got = results(function(*args, **options))
        args, options = case.call(inputs(case, device))
        want = results(impls.load("reference", case.routine)(*args, **options))
        row["checks"]["equals_reference"] = verdict = same(got, want)
        del want, args
        if verdict != "pass":
            return rows.finish(row, "wrong", verdict.removeprefix("fail: "))
        args, options = case.call(given)
        work = lambda: function(*args, **options)
        row["memory"] = memory.measure(work, device)
        size = sum(x.numel() for x in got)
        useful = (2 if case.in_place else 1) * size
        if not case.in_place:
            useful += sum(x.numel() * x.element_size() for x in given.values())
        del got
        row["time"], row["time_absent"] = timing.measure(
            work, device=device, timing=plan, useful_bytes=useful
        )
    except LayoutError as error:
        return rows.finish(row, "refused", str(error))
    except impls.NotAvailable as error:
        return rows.finish(row, "skipped", str(error), error.code)
    except torch.OutOfMemoryError as error:
        return rows.finish(row, "oom", str(error)[:300])
    except Exception as error:
        return rows.finish(row, "crashed", f"{type(error).__name__}: {str(error)[:300]}")
    for field in ("time", "memory"):
        if row[field] is not None:
            row.pop(f"{field}_absent", None)
    return rows.finish(row, "ok")


def table(done: list[rows.Row]) -> Iterator[str]:
    """Markdown, one line a row."""
    yield "| case | impl | us | of copy | extra / output | x fused |"
    yield "|---|---|---|---|---|---|"
    fused = {
        r["cell"]["size"]: r["time"]["median_us"]
        for r in done
        if r["cell"]["impl"] == "fused" and r["time"]
    }
    for r in done:
        case, impl = r["cell"]["size"], r["cell"]["impl"]
        if not r["time"]:
            yield f"| {case} | {impl} | {r['status']}: {r['reason'] or r['time_absent']} | | | |"
            continue
        t, m = r["time"], r["memory"]
        extra = m["peak_extra_bytes"] / m["output_bytes"] if m["output_bytes"] else 0.0
        ratio = f"{t['median_us'] / fused[case]:.2f}" if case in fused else ""
        yield (
            f"| {case} | {impl} | {t['median_us']:.0f} | {t['copy_fraction']:.2f} | "
            f"{extra:.2f} | {ratio} |"
        )


def main(argv: list[str]) -> int:
    """out=FILE (appended), case=NAME,..., impl=NAME,..., plan=quick|careful, env=LABEL."""
    given = dict(word.partition("=")[::2] for word in argv)
    if unknown := set(given) - {"out", "case", "impl", "plan", "env"}:
        raise UsageError(f"vendor bench: no option {', '.join(sorted(unknown))}; {main.__doc__}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = vendor.probe("triton_kernels").generation or "3.5"
    known = cases(found)
    names = given.get("case", ",".join(known)).split(",")
    every = ("reference", "fused", *vendor.VENDORS, *plugins.found())
    chosen = given.get("impl", ",".join(every)).split(",")
    ctx = {
        "env": given.get("env", "current"),
        "provenance": {
            "torch": torch.__version__,
            "device": timing.device_name(device),
            **commit(),
        },
    }
    done = []
    for name in names:
        for impl in chosen:
            row = measure(name, known[name], impl, device, given.get("plan", "quick"), ctx)
            done.append(row)
            if out := given.get("out"):
                rows.append(Path(out), row)
    print("\n".join(table(done)))
    return rows.exit_code([r for r in done if r["status"] != "skipped"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
