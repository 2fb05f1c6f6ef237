"""What two library versions, or two implementations, do differently with the same cells.

    python -m harness compare env=triton36,triton39 hw=gfx950,h200
    python -m harness compare env=tk38 impl=reference,triton_kernels hw=b200 tp_size=1

The two values of the varied axis run the same grid, each cell in a worker of its env. Reported:
verdicts, tensors whose digests differ and where (layout, first coordinate, values or padding),
decisions, numbers of the compiled code, times where both have one, each with the commands that show
it again. Two generations of triton_kernels pad differently: the same values in another frame are
said to be that.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from harness import UsageError, rows, vendor
from harness.check.where import differ
from harness.env import envs
from harness.env import worker as env_worker
from harness.plan import config, grid
from kernels.catalog import LAYOUTS, find
from kernels.layout import Layout

USAGE = "usage: python -m harness compare env=A,B|impl=A,B [hw=... model=... path=... tp_size=...]"
AXES = ("env", "impl")


@dataclass(frozen=True)
class Difference:
    """kind: verdict, bytes, decision, codegen or time. what: the tensor or quantity."""

    cell: str
    kind: str
    what: str
    detail: str
    repro: tuple[str, str]


def main(argv: list[str]) -> int:
    """Prints the differences; exit 0 with none, 1 with some, 3 when nothing could be compared."""
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if argv else 4
    axis, (left, right) = varied(argv)
    pairs = run(argv, axis, left, right)
    both = [p for p in pairs if all(r["status"] in ("ok", "wrong") for r in p[2:])]
    found = [d for pair in pairs for d in differences(*pair)]
    for line in render(found, axis, left, right, len(both), len(pairs)):
        print(line)
    if not both:
        return 3
    return 1 if found else 0


def varied(argv: Sequence[str]) -> tuple[str, tuple[str, str]]:
    """The axis with two values, and those; UsageError unless it is exactly one of env and impl."""
    found = []
    for override in config.parse(argv):
        if override.key_or_group in AXES and override.is_sweep_override():
            values = [str(v) for v in override.sweep_string_iterator()]
            found.append((override.key_or_group, values))
    if len(found) != 1 or len(found[0][1]) != 2:
        raise UsageError(f"compare wants two values of one of {', '.join(AXES)}; {USAGE}")
    (axis, values) = found[0]
    return axis, (values[0], values[1])


Pair = tuple[dict[str, Any], dict[str, Any], rows.Row, rows.Row]


def run(argv: Sequence[str], axis: str, left: str, right: str) -> list[Pair]:
    """(cell, cell, row, row) of every point of the grid, the two sides at the same time."""
    cells = grid.plan(argv).cells
    sides: dict[str, dict[str, dict[str, Any]]] = {left: {}, right: {}}
    for cell in cells:
        sides[cell[axis]["name"]][_point(cell, axis)] = cell
    points = [point for point in sides[left] if point in sides[right]]
    with ThreadPoolExecutor(2) as pool:
        turns = [
            pool.submit(list, map(_apart, (sides[side][p] for p in points)))
            for side in (left, right)
        ]
        a, b = (turn.result() for turn in turns)
    return [(sides[left][p], sides[right][p], x, y) for p, x, y in zip(points, a, b, strict=True)]


def _point(cell: Mapping[str, Any], axis: str) -> str:
    """The cell's place in the grid without the axis, and without what follows from an env."""
    identity = {k: v for k, v in cell["cell"].items() if k not in (axis, "generation")}
    return rows.key(identity)


def _apart(cell: dict[str, Any]) -> rows.Row:
    return env_worker.execute(cell, {})


def differences(
    left: dict[str, Any], right: dict[str, Any], a: rows.Row, b: rows.Row
) -> Iterator[Difference]:
    """Everything that two rows of one point say differently."""
    name, repro = rows.short(a["cell"]), (a["repro"], b["repro"])
    make = lambda kind, what, detail: Difference(name, kind, what, detail, repro)
    if (a["status"], a["reason"]) != (b["status"], b["reason"]):
        say = lambda r: r["status"] + (f" ({r['reason']})" if r["reason"] else "")
        yield make("verdict", "status", f"{say(a)} | {say(b)}")
    names = list(dict.fromkeys([*a["digests"], *b["digests"]]))
    unequal = [n for n in names if a["digests"].get(n) != b["digests"].get(n)]
    if unequal and a["digests"] and b["digests"]:
        yield from (make("bytes", n, detail) for n, detail in _bytes(left, right, unequal))
    for key in sorted({*a["decisions"], *b["decisions"]}):
        x, y = a["decisions"].get(key), b["decisions"].get(key)
        if x != y and a["decisions"] and b["decisions"]:
            yield make("decision", key, f"{x} | {y}")
    for key, (x, y) in _code(a, b).items():
        yield make("codegen", key, f"{x} | {y}")
    if a["time"] and b["time"]:
        x, y = a["time"]["median_us"], b["time"]["median_us"]
        yield make("time", "median_us", f"{x:.1f} | {y:.1f}, ratio {y / x:.3f}")


def _code(a: rows.Row, b: rows.Row) -> dict[str, tuple[Any, Any]]:
    """Numbers of the compiled kernels that differ; an error of one side by its first line."""
    flat: list[dict[str, Any]] = []
    for row in (a, b):
        out: dict[str, Any] = {}
        for kernel, record in ((row["codegen"] or {}).get("kernels") or {}).items():
            for key, value in record.items():
                if isinstance(value, int | float) and not isinstance(value, bool):
                    out[f"{kernel}.{key}"] = value
                elif key == "error":
                    out[f"{kernel}.error"] = str(value).splitlines()[0][:200]
        flat.append(out)
    if not flat[0] or not flat[1]:
        return {}
    keys = dict.fromkeys([*flat[0], *flat[1]])
    return {
        key: (flat[0].get(key), flat[1].get(key))
        for key in keys
        if flat[0].get(key) != flat[1].get(key)
    }


def tensors(cell: dict[str, Any], path: str) -> dict[str, list[Any]]:
    """In a worker: runs the cell's work again and saves its storages as bytes; name -> [layout, n,
    k]."""
    from harness.run import cell as cells
    from harness.run import source
    from harness.run.job import layer_job
    from harness.run.share import routine_job

    vendor.show_unwritten()
    make = layer_job if cell["path"]["kind"] == "layer" else routine_job
    weights = source.load(cell, cells.wanted_format(cell))
    result = make(cell, weights, cell["impl"]["name"]).run()
    flat = {n: x.contiguous().view(-1).view(torch.uint8) for n, x in result.tensors.items()}
    experts = {n: made.storage.shape[0] for n, made in result.made.items()}
    save_file({n: x.reshape(experts.get(n, 1), -1).clone() for n, x in flat.items()}, path)
    return {n: [made.layout.name, made.n, made.k] for n, made in result.made.items()}


def _bytes(
    left: dict[str, Any], right: dict[str, Any], names: Sequence[str]
) -> Iterator[tuple[str, str]]:
    """Where tensors of two cells differ, from both workers' bytes."""
    with tempfile.TemporaryDirectory() as folder:
        described, held = [], []
        for side, cell in (("a", left), ("b", right)):
            path = str(Path(folder) / f"{side}.safetensors")
            env = envs.load(cell["env"]["name"], cell["env"].get("python"))
            try:
                with env_worker.Worker(env, (str(Path.cwd()),)) as worker:
                    described.append(worker.call("tensors", cell=cell, path=path))
            except (env_worker.WorkerDied, env_worker.WorkerFailed) as error:
                yield ", ".join(names), f"the digests differ; made again, {error}"
                return
            held.append(load_file(path))
        for name in names:
            if name not in held[0] or name not in held[1]:
                yield name, f"only {'the first' if name in held[0] else 'the second'} has it"
                continue
            yield (
                name,
                _one(held[0][name], held[1][name], described[0].get(name), described[1].get(name)),
            )


def _one(a: torch.Tensor, b: torch.Tensor, x: list[Any] | None, y: list[Any] | None) -> str:
    if x is None or y is None:
        same = a.shape == b.shape
        count = int((a != b).sum()) if same else "all"
        return f"{count} of {a.numel()} bytes, no layout"
    if x == y:
        layout = LAYOUTS.get(x[0]) or find(x[0])
        said = differ(a, b, layout, x[1], x[2])
        return (
            f"{x[0]} of {x[1]}x{x[2]}: {said or 'equal now: the bytes are not the same each time'}"
        )
    frame = f"{x[0]} of {x[1]}x{x[2]} | {y[0]} of {y[1]}x{y[2]}"
    plain = [_plain(t, d) for t, d in ((a, x), (b, y))]
    if plain[0] is None or plain[1] is None:
        return f"{frame}: a storage of another size than its layout"
    n, k = min(x[1], y[1]), min(x[2], y[2])
    same = torch.equal(plain[0][:, :n, :k], plain[1][:, :n, :k])
    return f"{frame}: {'the same values in another frame' if same else 'other values'}"


def _plain(storage: torch.Tensor, described: list[Any]) -> torch.Tensor | None:
    """[E, n, k] bytes in checkpoint order, or None for a storage that is not the layout's."""
    name, n, k = described
    layout: Layout = find(name)
    rows_, cols = layout.storage_shape(n, k)
    if storage.shape[-1] != rows_ * cols:
        return None
    return layout.inverse(storage.view(-1, rows_, cols), n, k)


def render(
    found: Sequence[Difference], axis: str, left: str, right: str, compared: int, total: int
) -> Iterator[str]:
    """The differences as text, those that read the same in many cells once."""
    yield f"{axis}: {left} | {right}; compared {compared} of {total} cells"
    if not found:
        yield "no difference" if compared else "nothing was compared"
    same: dict[tuple[str, str, str], list[Difference]] = {}
    for d in found:
        same.setdefault((d.kind, d.what, d.detail), []).append(d)
    for (kind, what, detail), group in same.items():
        yield f"{kind} {what}: {detail}"
        yield f"    {len(group)} cells, first: {group[0].cell}"
        for command in dict.fromkeys(group[0].repro):
            yield f"    {command}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
