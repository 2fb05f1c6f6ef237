"""`python -m harness bench`: every fused routine checked against its reference, then timed.

    python -m harness bench [case=TEXT,...] [out=FILE] [plan=quick|careful] [experts=N] [commit=ID]

One call, on this machine's GPU: bytes of the fused routine are compared with the reference's on
the real shape, expert group by expert group; then the median time of a cold-cache call is set
against a device copy of the same number of bytes in the same run, and memory beyond the outputs is
counted. `today` is what a vendor takes for the same call where its package is here, else absent.
Rows (DESIGN section 9) go to `out`. Exit codes: 0; 2 a byte differs; 3 a routine below its bar; 4
usage. Needs no Hydra.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import triton

import kernels
from harness import UsageError, rows
from harness.measure import memory, timing
from harness.measure.bench_cases import CASES, Case, inputs, tensors
from kernels.prepare import prepare
from kernels.prepared import PreparedLayer

T = torch.Tensor
OUT = Path("results") / "runs" / "bench" / "rows.jsonl"


def split(made: dict[str, T], at: slice) -> dict[str, T]:
    """Some experts of every input."""
    return {name: x[at] for name, x in made.items()}


def layer(case: Case, impl: str, made: dict[str, T]) -> PreparedLayer:
    """The layer of a case whose routine is a path, prepared."""
    return prepare(
        case.routine, *case.args(made), target=case.target, tp_size=case.tp_size, impl=impl
    )


def call(case: Case, impl: str, made: dict[str, T]) -> Any:
    """One call of the case's routine, or of its path, on these inputs."""
    if case.target:
        done = layer(case, impl, made)
        return [done.tensors[name] for name in sorted(done.tensors)]
    return kernels.resolve(case.routine, impl)(*case.args(made), **case.kwargs)


def differing(case: Case, made: dict[str, T], step: int) -> str:
    """`pass`, or the first tensor whose bytes differ from the reference's, and where.

    Results hold experts first, so the reference runs on a few experts at a time: its scratch is
    many times its output.
    """
    kept = {name: x.clone() for name, x in made.items()} if case.in_place else made
    got = tensors(call(case, "fused", made))
    for begin in range(0, case.experts, step):
        at = slice(begin, min(begin + step, case.experts))
        part = split(kept, at)
        want = tensors(call(case, "reference", part))
        for index, (whole, right) in enumerate(zip(got, want, strict=True)):
            a, b = whole[at].contiguous().view(torch.uint8), right.contiguous().view(torch.uint8)
            if a.shape != b.shape:
                return f"fail: result {index} is {tuple(a.shape)}, not {tuple(b.shape)}"
            if not torch.equal(a, b):
                wrong = (a != b).nonzero()
                where = (
                    wrong[0] + torch.tensor([begin] + [0] * (a.ndim - 1), device=a.device)
                ).tolist()
                values = f"{int(a[tuple(wrong[0])])} instead of {int(b[tuple(wrong[0])])}"
                return (
                    f"fail: result {index}: {len(wrong)} bytes differ, first at {where}: {values}"
                )
    if case.in_place:
        call(case, "fused", made)  # an exchange done twice: the inputs again
    return "pass"


def useful(case: Case, made: dict[str, T], result: Any) -> int:
    """Bytes of each input read (once, but for `reads`) and each output written once; untouched
    inputs do not count, nor do other ranks' shares."""
    count = lambda xs: sum(x.numel() * x.element_size() for x in xs)
    if case.target:
        plan = layer(case, "fused", made).plan
        large = (x for x in made.values() if x.ndim == 3)
        return count(large) * plan.real // plan.intermediate + count(tensors(result))
    outputs = tensors(result)
    if case.in_place:
        return 2 * count(outputs)
    returned = {x.data_ptr() for x in outputs}
    read = [x for x in made.values() if x.data_ptr() not in returned]
    own = {x.data_ptr() for x in made.values()}
    return case.reads * count(read) + count(x for x in outputs if x.data_ptr() not in own)


def today(
    case: Case, made: dict[str, T], device: torch.device, plan: dict[str, Any]
) -> dict[str, Any] | None:
    """The time of the first vendor that offers this routine here; none has a path."""
    if case.target:
        return None
    from harness import vendor
    from harness.env import impls

    for name in vendor.VENDORS:
        try:
            given = case.args(made)
            if case.routine == "swizzle":  # one layout: the vendor's own function of that layout
                made_by = vendor.adapter(name).LAYOUTS.get(given[1].name)
                if made_by is None:
                    continue
                function = lambda x, _: made_by(x)  # noqa: B023
            else:
                function = impls.load(name, case.routine)
            work = lambda: function(*given, **case.kwargs)  # noqa: B023
            size = useful(case, made, work())
            measured, why = timing.measure(work, device=device, timing=plan, useful_bytes=size)
            if measured:
                extra = memory.measure(work, device)["peak_extra_bytes"]
                return {"impl": name, "peak_extra_bytes": extra, **measured}
            print(f"bench: {case.name}: {name} not timed: {why}", file=sys.stderr)
        except impls.NotAvailable:
            pass
        except Exception as error:  # whatever a vendor does, its column is absent, with the reason
            print(f"bench: {case.name}: no {name}: {str(error)[:160]}", file=sys.stderr)
        torch.cuda.empty_cache()
    return None


def run(case: Case, device: torch.device, plan: dict[str, Any], commit: str | None) -> rows.Row:
    """The case's row."""
    row = rows.new_row({
        "hw": case.hw, "model": case.model, "path": case.routine, "tp_size": case.tp_size,
        "tp_rank": 0, "ep_size": 1, "experts": case.experts, "impl": "fused", "env": "current",
        "size": "full", "source": "synthetic", "seed": 0, "case": case.name,
    })  # fmt: skip
    row["repro"] = f"python -m harness bench 'case={case.name}'"
    row["decisions"] = {"case": case.name, "bar": case.bar,
                        "shapes": {name: list(s) for name, s in case.shapes.items()}}  # fmt: skip
    row["provenance"] = {"device": timing.device_name(device), "torch": torch.__version__,
                         "triton": triton.__version__, "commit": commit, "dirty": None}  # fmt: skip
    made = inputs(case, device)
    row["checks"]["equals_reference"] = verdict = differing(case, made, max(1, case.experts // 8))
    if verdict != "pass":
        return rows.finish(row, "wrong", verdict.removeprefix("fail: "))
    work = lambda: call(case, "fused", made)
    size = useful(case, made, work())
    row["memory"] = memory.measure(work, device)
    torch.cuda.empty_cache()
    before = timing.copy_speed(device, size)
    row["time"], row["time_absent"] = timing.measure(
        work, device=device, timing=plan, useful_bytes=size, copy_gb_per_s=before
    )
    row["decisions"]["today"] = today(case, made, device, plan)
    row.pop("memory_absent", None)
    if row["time"]:
        row.pop("time_absent", None)
    return rows.finish(row, "ok")


def table(done: list[rows.Row]) -> Iterator[str]:
    """Markdown: a line a case."""
    yield "| routine | shape | ms | of copy | bar | scratch | launches | today ms | speed-up |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for row in done:
        named, t, m = row["decisions"], row["time"], row["memory"]
        shape = " + ".join("x".join(map(str, s)) for s in named["shapes"].values() if s[1:])
        if not t:
            why = row["reason"] or row["time_absent"]
            yield f"| {named['case']} | {shape} | {row['status']}: {why} | | | | | | |"
            continue
        short = " **below**" if t["copy_fraction"] < named["bar"] else ""
        old = named["today"]
        cells = [
            named["case"],
            shape,
            f"{t['median_us'] / 1e3:.3f}",
            f"{t['copy_fraction']:.3f}{short}",
            f"{named['bar']:.2f}",
            f"{m['scratch_bytes'] / 2**20:.1f} MiB",
            str(m["launches"]),
            f"{old['median_us'] / 1e3:.2f} ({old['impl']})" if old else "",
            f"{old['median_us'] / t['median_us']:.1f}" if old else "",
        ]
        yield f"| {' | '.join(cells)} |"


def main(argv: list[str]) -> int:
    """Options are NAME=VALUE; see the module's page."""
    given = dict(word.partition("=")[::2] for word in argv)
    if unknown := set(given) - {"out", "case", "plan", "commit"}:
        raise UsageError(
            f"bench: no option {', '.join(sorted(unknown))}; there are out, case, plan, commit"
        )
    wanted = given.get("case", "").split(",")
    chosen = [case for case in CASES if any(text in case.name for text in wanted)]
    if not chosen:
        raise UsageError(
            f"bench: no case holds {given['case']!r}; cases: {'; '.join(c.name for c in CASES)}"
        )
    if not torch.cuda.is_available():
        print("bench: no GPU here, so nothing is timed (NO_DEVICE)", file=sys.stderr)
        return 3
    device = torch.device("cuda")
    # The host queues up to four launches while the device still writes the flush: 4 GiB is 1 ms.
    plan = {"name": given.get("plan", "quick"), "flush_bytes": 2**32}
    out = Path(given.get("out", OUT))
    out.parent.mkdir(parents=True, exist_ok=True)
    done = []
    for case in chosen:
        begun = time.perf_counter()
        row = run(case, device, plan, given.get("commit"))
        row["spent_ms"] = {"all": round((time.perf_counter() - begun) * 1e3)}
        rows.append(out, row)
        done.append(row)
        torch.cuda.empty_cache()
    versions = f"torch {torch.__version__}, triton {triton.__version__}"
    print(f"{timing.device_name(device)}, {versions}, cold cache")
    print("\n".join(table(done)))
    if any(row["status"] == "wrong" for row in done):
        return 2
    met = (r["time"] and r["time"]["copy_fraction"] >= r["decisions"]["bar"] for r in done)
    return 0 if all(met) else 3


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
