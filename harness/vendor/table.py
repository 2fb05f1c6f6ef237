"""Every layout that a vendor writes, at aligned, ragged, small and model shapes, and the catalog's.

    python -m harness.vendor.table                        every env; writes docs/vendors.md
    python -m harness.vendor.table record=FILE env=NAMES  what this process holds, as a record

Verdicts are those of `trial`. Memory that a library leaves unwritten reads as 0xFF, so that it
shows. Records of another machine, such as what needs a GPU, are read from
results/h200/vendor_layouts.jsonl and marked with its device.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from harness import ROOT, UsageError, vendor
from harness.env.envs import EnvError, load
from harness.vendor.trial import EXPERTS, judge, quantizer, round_trip, shapes, source, view_bytes
from kernels.catalog import LAYOUTS

OUT = ROOT / "docs" / "vendors.md"
RECORDS = ROOT / "results" / "h200" / "vendor_layouts.jsonl"
INVERSE = ", its own inverse"
QUANTIZER = "downcast_to_mxfp, scales"
# Columns of the table: the env that holds the library, the vendor, and its heading.
COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("tk35", "triton_kernels", "triton_kernels 3.5.1"),
    ("tk38", "triton_kernels", "triton_kernels 3.8"),
    ("flashinfer013", "flashinfer", "FlashInfer 0.6.13"),
    ("flashinfer074", "flashinfer", "FlashInfer 0.7.4"),
    ("vllm033", "vllm", "vLLM 0.33"),
)


@dataclass(frozen=True)
class Record:
    """What one vendor did with one layout at one (n, k). env: where it was measured."""

    env: str
    vendor: str
    version: str
    layout: str
    shape: tuple[int, int]
    verdict: str
    detail: str
    device: str


def measure(name: str, device: str = "cpu") -> list[dict[str, Any]]:
    """Every layout of a vendor in this process."""
    found = vendor.probe(name)
    if found.version is None:
        raise vendor.NotInstalled(found.reason)
    module = vendor.adapter(name)
    vendor.show_unwritten()
    torch.manual_seed(0)
    functions = dict(module.LAYOUTS)
    functions |= {
        key: view_bytes(LAYOUTS[key], value) for key, value in getattr(module, "VIEWS", {}).items()
    }
    where = torch.cuda.get_device_name(0) if device == "cuda" else "CPU"
    out = []
    for key, function in functions.items():
        suffix = "_tk38" if found.generation == "3.8" and f"{key}_tk38" in LAYOUTS else ""
        layout = LAYOUTS[key + suffix]
        for n, k in shapes(layout):
            verdict, detail = judge(layout, function, n, k, device)
            out.append(asdict(Record("", name, found.version, key, (n, k), verdict, detail, where)))
    for key, function in getattr(module, "INVERSES", {}).items():
        for n, k in shapes(LAYOUTS[key]):
            verdict, detail = round_trip(function, source(n, k).to(device))
            name_ = f"{key}{INVERSE}"
            out.append(
                asdict(Record("", name, found.version, name_, (n, k), verdict, detail, where))
            )
    if "downcast_to_mxfp" in module.ROUTINES:
        for rounding in ("even", "up", "floor"):
            verdict, detail = quantizer(module.ROUTINES["downcast_to_mxfp"], rounding, device)
            key, shape = f"{QUANTIZER} {rounding}", (16, 1024)
            out.append(asdict(Record("", name, found.version, key, shape, verdict, detail, where)))
    return out


def collect(columns: tuple[tuple[str, str, str], ...] = COLUMNS) -> list[Record]:
    """Records of every env that is built; one that is not gives one record, NOT_INSTALLED."""
    from harness.env.worker import Worker, WorkerDied, WorkerFailed, WorkerTimeout

    out: list[Record] = []
    for env, name, _ in columns:
        try:
            with Worker(load(env)) as worker:
                found = worker.call("layouts", 600, name=name)
        except (EnvError, WorkerDied, WorkerFailed, WorkerTimeout) as error:
            why = f"NOT_INSTALLED: {error}"
            out.append(Record(env, name, "", "*", (0, 0), "absent", why, "CPU"))
            continue
        out += [Record(**(item | {"env": env, "shape": tuple(item["shape"])})) for item in found]
    return out


def recorded(path: Path = RECORDS) -> list[Record]:
    """Records of another machine, committed."""
    if not path.is_file():
        return []
    items = [json.loads(line) for line in path.read_text().splitlines()]
    return [Record(**(item | {"shape": tuple(item["shape"])})) for item in items]


def merge(here: list[Record], there: list[Record]) -> list[Record]:
    """A record taken on a GPU replaces one that is absent here; what only that machine ran is
    added."""
    key = lambda r: (r.env, r.vendor, r.layout, r.shape)
    other = {key(r): r for r in there}
    out = [other.pop(key(r), r) if r.verdict == "absent" else r for r in here]
    have = {key(r) for r in out}
    return out + [r for r in other.values() if key(r) not in have]


def _cell(records: list[Record]) -> str:
    """One cell of the table: counts by verdict, and the machine when it was not a CPU."""
    if not records:
        return ""
    if all(r.verdict == "absent" for r in records):
        detail = records[0].detail
        if "has none of" in detail:
            return "not in this version"
        return "needs a GPU" if "GPU" in detail else "not installed"
    names = ("equal", "differs", "refused", "absent")
    counts = {name: sum(r.verdict == name for r in records) for name in names}
    text = ", ".join(f"{name} {count}" for name, count in counts.items() if count)
    devices = {r.device for r in records if r.verdict != "absent"} - {"CPU"}
    return text + (f" ({', '.join(sorted(devices))})" if devices else "")


HEAD = """\
# Layouts of other libraries against the catalog

Generated by `python -m harness.vendor.table`; do not edit. Each cell counts shapes: `equal` bytes
in memory order, padding included; `differs`; `refused` by the library. Below, every shape that
is not equal, with the first place. Empty: the library has no such layout.
"""


def _lines(records: list[Record], columns: tuple[tuple[str, str, str], ...]) -> Iterator[str]:
    yield HEAD
    yield "| layout | " + " | ".join(heading for _, _, heading in columns) + " |"
    yield "|---" * (len(columns) + 1) + "|"
    by: dict[tuple[str, str], list[Record]] = {}
    for r in records:
        by.setdefault((r.env, r.vendor), []).append(r)
    keys = [
        *LAYOUTS,
        *(f"{key}{INVERSE}" for key in LAYOUTS),
        *(f"{QUANTIZER} {rounding}" for rounding in ("even", "up", "floor")),
    ]
    for key in (key for key in keys if any(r.layout == key for r in records)):
        of = lambda column, key=key: [r for r in by.get(column[:2], []) if r.layout in (key, "*")]
        yield f"| `{key}` | " + " | ".join(_cell(of(column)) for column in columns) + " |"
    yield ""
    for env, name, heading in columns:
        mine = [r for r in by.get((env, name), []) if r.verdict != "equal"]
        if not mine:
            continue
        version = next((r.version for r in mine if r.version), "not built")
        yield f"## {heading} (env `{env}`, {version})\n"
        same: dict[tuple[str, str, str], list[str]] = {}
        for r in mine:
            said = r.detail.replace(str((EXPERTS, *r.shape)), "it")
            same.setdefault((r.layout, r.verdict, said), []).append("x".join(map(str, r.shape)))
        for (key, verdict, said), at in same.items():
            place = "" if key == "*" else f"`{key}` {', '.join(at)}: "
            yield f"- {place}{verdict}: {said}"
        yield ""


def main(argv: list[str]) -> int:
    """Writes docs/vendors.md, or with record=FILE env=NAME,... what this process measures."""
    given = dict(word.partition("=")[::2] for word in argv)
    if set(given) - {"record", "env"} or ("record" in given) != ("env" in given):
        raise UsageError("usage: python -m harness.vendor.table [record=FILE env=NAME,NAME]")
    if given:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        vendors = {env: name for env, name, _ in COLUMNS}
        with Path(given["record"]).open("w") as out:
            for env in given["env"].split(","):
                for item in measure(vendors[env], device):
                    out.write(json.dumps(item | {"env": env}) + "\n")
        return 0
    records = merge(collect(), recorded())
    OUT.write_text("\n".join(_lines(records, COLUMNS)))
    lost = [r for r in records if r.layout == "*"]
    for r in lost:
        print(f"{r.env}: {r.detail}", file=sys.stderr)
    return 3 if lost else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
