"""One cell of a sweep: weights, preparation or routine, checks, digests, memory, time, code and
bound.

`run_cell` is a pure function of a frozen config (plain JSON) and gives one row; it runs in this
process or in a worker. It never raises for what the cell does: a refusal, a missing
implementation, too little memory or a fault of the code each become a row with its reason.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any
from weakref import ref

import torch

from harness import rows
from harness.check import checks, judge
from harness.codegen import bound, compiler, preparers
from harness.env import impls
from harness.measure import memory, timing, turn
from harness.plan.routines import ROUTINES
from harness.run import small, source
from harness.run.job import CPU, Job, Result, layer_job, on_cpu, size
from harness.run.share import routine_job
from kernels.errors import LayoutError
from kernels.pads import FORMAT
from kernels.weights import MoEWeights


def run_cell(cell: dict[str, Any], ctx: dict[str, Any] | None = None) -> rows.Row:
    """The row of a cell. ctx: what the parent knows of the run (`provenance`, `copy_gb_per_s`)."""
    ctx = ctx or {}
    row = rows.new_row(cell["cell"])
    row["repro"] = cell.get("repro", "")
    row["provenance"] = _provenance() | ctx.get("provenance", {})
    start = time.perf_counter()
    try:
        _run(cell, ctx, row)
        failed = [f"{n}: {v[6:]}" for n, v in row["checks"].items() if v.startswith("fail: ")]
        rows.finish(row, "wrong" if failed else "ok", failed[0] if failed else None)
    except LayoutError as error:
        rows.finish(row, "refused", str(error))
    except impls.NotAvailable as error:
        _code_all_the_same(cell, error, row)
        rows.finish(row, "skipped", str(error), error.code)
    except MemoryError as error:
        rows.finish(row, "oom", _sentence(error) or "out of memory")
    except Exception as error:
        out_of_memory = isinstance(error, torch.OutOfMemoryError) or "can't allocate" in str(error)
        source.forget()
        rows.finish(row, "oom" if out_of_memory else "crashed", _sentence(error))
        if not out_of_memory:
            row["trace"] = traceback.format_exc().splitlines()[-12:]
    row["spent_ms"]["total"] = round((time.perf_counter() - start) * 1e3, 1)
    return row


def _sentence(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".strip().rstrip(":")[:600]


def _run(cell: dict[str, Any], ctx: dict[str, Any], row: rows.Row) -> None:
    spent = row["spent_ms"]
    impl = cell["impl"]["name"]
    device = impls.device(impl, cell["hw"])
    make: Callable[..., Job] = layer_job if cell["path"]["kind"] == "layer" else routine_job
    form = wanted_format(cell)
    with _clock(spent, "source"):
        weights = source.load(cell, form)
        if weights.format != form:
            raise LayoutError(
                f"path {cell['path']['name']!r} starts from {form}, the source is {weights.format}"
            )
    with _clock(spent, "routine"):
        job = make(cell, weights, impl, device)
        given = (
            (_input_digests(weights), weights.tensors())
            if device == CPU
            else (checks.digests(job.inputs), job.inputs)
        )
        held: list[Result] = []
        row["memory"] = memory.measure(lambda: held.append(job.run()), device, warm=False)
        result = held[0]
    row.pop("memory_absent", None)
    row["decisions"], row["layouts"] = result.decisions, _layouts(result, cell)
    with _clock(spent, "digests"):
        row["digests"] = checks.digests(result.tensors)
    with _clock(spent, "checks"):
        row["checks"] = _checks(cell, form, make, impl, job, weights, result, given)
    if any(v.startswith("fail") for v in row["checks"].values()):
        return
    with _clock(spent, "time"):
        _time(cell, ctx, row, job, result, device)
    with _clock(spent, "code_and_bound"):
        _evidence(cell, row, result)


def _checks(
    cell: dict[str, Any], form: str, make: Callable[..., Job], impl: str, job: Job,
    weights: MoEWeights, result: Result,
    given: tuple[dict[str, str], dict[str, torch.Tensor]],
) -> dict[str, str]:  # fmt: skip
    """The ladder: the small layer's verdicts under their names, the real layer's with `real_`."""
    done = small.ladder(cell, form, make, impl)
    here = on_cpu(result)
    done |= {
        "real_inverse": checks.verdict(lambda: checks.inverse(here)),
        "real_formula": checks.verdict(lambda: checks.by_formula(here)),
        "real_values": checks.verdict(lambda: checks.values(here)),
        "real_padding": checks.verdict(lambda: checks.pad_count(here)),
        "real_strides": checks.verdict(lambda: checks.strides(job, result)),
        "inputs_unchanged": checks.verdict(lambda: checks.unchanged(*given)),
    }
    if cell["judge"] and result.layer is not None:
        done |= judge.run(result.layer, weights)
    if done["inputs_unchanged"] != "pass":
        source.forget()
    return done


_seen: list[tuple[ref[MoEWeights], dict[str, str]]] = []


def _input_digests(weights: MoEWeights) -> dict[str, str]:
    """Digests of a source taken when it was first seen, so that one pass a cell is enough."""
    if not _seen or _seen[0][0]() is not weights:
        _seen[:] = [(ref(weights), checks.digests(weights.tensors()))]
    return _seen[0][1]


def wanted_format(cell: dict[str, Any]) -> str:
    """mxfp4, nvfp4 or bf16: the checkpoint form that the cell's path starts from."""
    name = cell["path"]["name"]
    return FORMAT[name] if cell["path"]["kind"] == "layer" else ROUTINES[name].format


def _layouts(result: Result, cell: dict[str, Any]) -> dict[str, Any]:
    out = {}
    for name, made in result.made.items():
        tensor = result.views.get(name, result.tensors[name])
        rows_, cols = made.layout.storage_shape(made.n, made.k)
        params: dict[str, Any] = {}
        if "w" in made.layout.sizes:
            params["num_warps"] = made.layout.sizes["w"]
        if made.layout.name.startswith("hopper"):
            params["generation"] = cell["generation"]
        size = result.tensors[name].element_size()
        real = made.real[0] * made.real[1]
        out[name] = {
            "name": made.layout.name, "params": params, "logical": list(made.real),
            "padded": list(made.layout.padded(made.n, made.k)), "shape": list(tensor.shape),
            "stride": list(tensor.stride()),
            "pad_bytes": (rows_ * cols - real) * size * made.storage.shape[0],
        }  # fmt: skip
    return out


def _time(
    cell: dict[str, Any], ctx: dict[str, Any], row: rows.Row, job: Job, result: Result,
    device: torch.device,
) -> None:  # fmt: skip
    """A time, if this device is the target and a timing plan is asked for."""
    plan = cell.get("timing") or {}
    if not plan or plan.get("name") == "off":
        row["time_absent"] = "FILTERED"
    elif not impls.is_target(cell["hw"]):
        row["time_absent"] = "NO_DEVICE"
    else:
        useful = job.reads(result) + size(*result.tensors.values())
        with turn.alone(device):  # its copy speed, once a process, is measured in there too
            row["time"], row["time_absent"] = timing.measure(
                job.timed, device=device, timing=plan, useful_bytes=useful,
                copy_gb_per_s=ctx.get("copy_gb_per_s"),
            )  # fmt: skip
        if row["time"] is not None:
            del row["time_absent"]


def _evidence(cell: dict[str, Any], row: rows.Row, result: Result) -> None:
    """Code and bound, where their modules are part of this checkout."""
    shapes = {name: (made.storage.shape[0], made.n, made.k) for name, made in result.made.items()}
    layouts = {name: made.layout for name, made in result.made.items()}
    for field, found, arguments in (
        ("codegen", compiler.for_cell, (cell,)), ("bound", bound.for_cell, (cell, layouts, shapes)),
    ):  # fmt: skip
        if cell.get(field, True) is not False:
            row[field] = found(*arguments)
        if row[field] is not None:
            row.pop(f"{field}_absent", None)


def _code_all_the_same(cell: dict[str, Any], why: impls.NotAvailable, row: rows.Row) -> None:
    """A fused layer that cannot run here still compiles for its target: its kernels' code."""
    if why.code != "NO_DEVICE" or cell["impl"]["name"] != "fused" or cell.get("codegen") is False:
        return
    with _clock(row["spent_ms"], "code_and_bound"):
        row["codegen"] = compiler.for_cell(cell) if preparers.of_cell(cell) else None
    if row["codegen"] is not None:
        row.pop("codegen_absent", None)


@contextmanager
def _clock(spent: dict[str, float], name: str) -> Iterator[None]:
    start = time.perf_counter()
    try:
        yield
    finally:
        spent[name] = round((time.perf_counter() - start) * 1e3, 1)


@lru_cache(maxsize=1)
def _provenance() -> dict[str, Any]:
    import platform

    found = {"python": platform.python_version(), "torch": torch.__version__}
    try:
        import triton

        found["triton"] = triton.__version__
    except ImportError:
        found["triton"] = "not installed"
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return found | {"device": timing.device_name(device)}
