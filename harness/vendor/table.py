"""Every layout that a vendor writes, at aligned, ragged, small and model shapes, and the catalog's.

    python -m harness.vendor.table                        every env; writes docs/vendors.md
    python -m harness.vendor.table record=FILE env=NAMES  what this process holds, as a record

A verdict is `equal`, `differs: where`, `refused: why` or `absent: why` (with its reason code).
Source bytes are random and never zero, so that padding shows; memory that a library leaves
unwritten reads as 0xFF (torch fills it), so that it shows too. Records of another machine, such as
what needs a GPU, are read from results/h200/vendor_layouts.jsonl and marked with its device.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from harness import UsageError, vendor
from harness.envs import ROOT, EnvError, load
from harness.where import differ
from kernels import resolve
from kernels.catalog import LAYOUTS
from kernels.errors import LayoutError
from kernels.layout import Layout

OUT = ROOT / "docs" / "vendors.md"
RECORDS = ROOT / "results" / "h200" / "vendor_layouts.jsonl"
EXPERTS = 2
QUANTIZER = "downcast_to_mxfp, scales"
SCALES = ((256, 8), (512, 92), (130, 5), (1, 1), (32, 1), (2880, 90), (5760, 90), (704, 45))
VALUES = ((256, 128), (64, 64), (130, 48), (16, 16), (32, 16), (2880, 1440), (704, 352))
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


def shapes(layout: Layout) -> tuple[tuple[int, int], ...]:
    return VALUES if "value" in layout.name or not _is_scale(layout) else SCALES


def _is_scale(layout: Layout) -> bool:
    return "scale" in layout.name or layout.view in ("mma_6d", "blackwell_5d")


def source(n: int, k: int, seed: int = 0) -> torch.Tensor:
    """[E, n, k] uint8, no byte 0 or 0xFF."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 255, (EXPERTS, n, k), generator=generator, dtype=torch.uint8)


def judge(
    layout: Layout, run: Callable[[torch.Tensor], torch.Tensor], n: int, k: int, device: str
) -> tuple[str, str]:
    """(verdict, detail) of a function [E, n, k] -> [E, bytes] against the catalog's forward."""
    x = source(n, k)
    try:
        got = run(x.to(device)).cpu()
    except vendor.NotOffered as error:
        return ("refused" if error.code == "REFUSED" else "absent"), str(error)
    except LayoutError as error:
        return "refused", str(error)
    except vendor.NotInstalled as error:
        return "absent", str(error)
    except (AssertionError, RuntimeError, ValueError) as error:
        words = (str(error).splitlines() or [""])[0]
        return "refused", f"{type(error).__name__}: {words}"
    try:
        want = layout.forward(x).reshape(EXPERTS, -1)
    except LayoutError as error:
        return "differs", f"this project refuses the shape ({error}); the library does not"
    found = differ(got, want, layout, n, k)
    return ("equal", "") if found is None else ("differs", found)


def _view_bytes(layout: Layout, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """For a view: the library's axes over a swizzled storage, read back in this project's order."""

    def run(x: torch.Tensor) -> torch.Tensor:
        n, k = x.shape[-2:]
        storage = layout.forward(x)
        wide = storage.view(x.shape[0], *layout.padded(n, k))
        view, ours = function(wide), layout.consumer_view(storage, n, k)
        if view.shape != ours.shape or view.stride() != ours.stride():
            raise vendor.NotOffered(
                f"its view is {tuple(view.shape)}, strides {view.stride()}; ours "
                f"{tuple(ours.shape)}, "
                f"{ours.stride()}"
            )
        return storage.reshape(x.shape[0], -1)

    return run


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
        key: _view_bytes(LAYOUTS[key], value) for key, value in getattr(module, "VIEWS", {}).items()
    }
    where = torch.cuda.get_device_name(0) if device == "cuda" else "CPU"
    out = []
    for key, function in functions.items():
        suffix = "_tk38" if found.generation == "3.8" and f"{key}_tk38" in LAYOUTS else ""
        layout = LAYOUTS[key + suffix]
        for n, k in shapes(layout):
            verdict, detail = judge(layout, function, n, k, device)
            out.append(asdict(Record("", name, found.version, key, (n, k), verdict, detail, where)))
    if "downcast_to_mxfp" in module.ROUTINES:
        for rounding in ("even", "up", "floor"):
            verdict, detail = quantizer(module.ROUTINES["downcast_to_mxfp"], rounding, device)
            key, shape = f"{QUANTIZER} {rounding}", (16, 1024)
            out.append(asdict(Record("", name, found.version, key, shape, verdict, detail, where)))
    return out


def quantizer(run: Callable[..., Any], rounding: str, device: str) -> tuple[str, str]:
    """(verdict, detail) of an MXFP4 quantizer on ties, near-ties and normal values, against
    `kernels`."""
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]).repeat_interleave(4)
    line = torch.cat([ties * torch.tensor([1.0, -1.0] * 14), torch.tensor([6.0, 5.0, 7.0, 1.0])])
    generator = torch.Generator().manual_seed(0)
    gauss = torch.randn(15, 1024, generator=generator)
    x = torch.cat([line.repeat(1, 32), gauss]).bfloat16()
    want = resolve("downcast_to_mxfp", "reference")(x, 1, scale_rounding=rounding)
    try:
        got = run(x.to(device), 1, scale_rounding=rounding)
    except vendor.NotOffered as error:
        return ("refused" if error.code == "REFUSED" else "absent"), str(error)
    for what, a, b in (("scale", got[1].cpu(), want[1]), ("code byte", got[0].cpu(), want[0])):
        wrong = a != b
        if bool(wrong.any()):
            row, col = (int(i) for i in wrong.nonzero()[0])
            per = 2 if what != "scale" else 32
            source = [float(v) for v in x[row, col * per : col * per + 2]]
            largest = float(x[row, col * per // 32 * 32 :][:32].abs().max())
            values = f"0x{int(a[row, col]):02x} and 0x{int(b[row, col]):02x}"
            of = f"source {source}, largest of its block {largest}"
            return "differs", (
                f"{what}: {int(wrong.sum())} of {a.numel()}, first at [{row}, {col}]: {values} "
                f"({of})"
            )
    return "equal", ""


def collect(columns: tuple[tuple[str, str, str], ...] = COLUMNS) -> list[Record]:
    """Records of every env that is built; one that is not gives one record, NOT_INSTALLED."""
    from harness.env_worker import Worker, WorkerDied

    out: list[Record] = []
    for env, name, _ in columns:
        try:
            with Worker(load(env)) as worker:
                found = worker.call("layouts", 600, name=name)
        except (EnvError, WorkerDied) as error:
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
    keys = [*LAYOUTS, *(f"{QUANTIZER} {rounding}" for rounding in ("even", "up", "floor"))]
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
