"""The whole ladder on a small layer of the same kind, where every byte can be looked at.

The small layer has the path, target, format, activation and TP split of the cell, and sizes with
the same remainders: the intermediate size modulo 256 a rank, the hidden size modulo 512. So it
pads, splits and refuses as the real one does, at a few MiB. Its source lies between guard bytes of
0xFF (the NaN of both scale formats), and what a run allocates holds 0xFF before it is written.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from harness.check import checks, index_checks
from harness.env import impls
from harness.run import source
from harness.run.job import Job, Result, on_cpu
from kernels.errors import LayoutError

GUARD = 4096  # bytes of 0xFF before and after each input
T = torch.Tensor
Make = Callable[..., Job]


def sizes(hidden: int, intermediate: int, tp_size: int) -> tuple[int, int]:
    """(H, I) with the same remainders and at most two tiles of them a rank."""
    return _cut(hidden, 512), _cut(intermediate, 256 * tp_size)


def _cut(size: int, tile: int) -> int:
    return size if size <= 2 * tile else size % tile + tile


def ladder(cell: dict[str, Any], form: str, make: Make, impl: str) -> dict[str, str]:
    """Every check on the small layer; `make(cell, weights, impl)` is the cell's kind of job.

    The bytes depend on few fields of a cell, so equal small layers are checked once a process.
    """
    model = cell["model"]
    hidden, inner = sizes(model["H"], model["I"], cell["tp_size"])
    key = (
        *(cell[name] for name in ("tp_size", "tp_rank", "generation", "num_warps")),
        *(cell[name]["name"] for name in ("path", "env")),
        cell["hw"]["arch"], cell["impl"]["import"], model["activation"], form, hidden, inner, impl,
    )  # fmt: skip
    if key not in _done:
        _done[key] = _ladder(cell, form, make, impl, hidden, inner)
    return dict(_done[key])


_done: dict[tuple[Any, ...], dict[str, str]] = {}


def _ladder(
    cell: dict[str, Any], form: str, make: Make, impl: str, hidden: int, inner: int
) -> dict[str, str]:
    ranked = {"ep_size": 1, "ep_rank": 0, "experts": 2}
    small = cell | ranked | {"model": cell["model"] | {"H": hidden, "I": inner, "E": 2}}
    weights = source.synthetic(2, hidden, inner, cell["model"]["activation"], form, cell["seed"])
    try:
        job = make(small, weights, impl, impls.device(impl, cell["hw"]))
        ran = job.run()
    except LayoutError as error:
        return {"small_layer": f"skip: H={hidden} I={inner} is refused: {error}"}
    result = on_cpu(ran)
    done = {
        "bijection": checks.verdict(lambda: index_checks.bijection(result)),
        "inverse": checks.verdict(lambda: checks.inverse(result)),
        "formula": checks.verdict(lambda: checks.by_formula(result)),
        "values": checks.verdict(lambda: checks.values(result)),
        "pad_fill": checks.verdict(lambda: checks.pad_fill(result)),
        "strides": checks.verdict(lambda: checks.strides(job, ran)),
        "poisoned_source": checks.verdict(lambda: poisoned_source(job, result)),
        "written_whole": checks.verdict(lambda: written_whole(job, result)),
        "mutation": checks.verdict(lambda: index_checks.mutated(result)),
    }
    if impl != "reference":
        twin = make(small | {"impl": {"name": "reference", "kind": "own", "import": None}},
                    weights, "reference").run()  # fmt: skip
        done["equals_reference"] = checks.verdict(lambda: checks.equal(result, twin, "reference"))
    return done


def poisoned_source(job: Job, result: Result) -> str | None:
    """With 0xFF around every input the bytes are the same, and the 0xFF is still there."""
    inputs, guards = {}, {}
    for name, x in job.inputs.items():
        size = x.numel() * x.element_size()
        buffer = torch.full((size + 2 * GUARD,), 0xFF, dtype=torch.uint8, device=x.device)
        place = buffer[GUARD : GUARD + size].view(x.dtype).view(x.shape)
        place.copy_(x)
        inputs[name], guards[name] = place, buffer
    other = job.again(inputs).run()
    checks.equal(result, other, "a run with 0xFF around its inputs")
    for name, buffer in guards.items():
        edge = torch.cat([buffer[:GUARD], buffer[-GUARD:]])
        checks.same(f"the bytes around {name}", edge, torch.full_like(edge, 0xFF))
    return None


def written_whole(job: Job, result: Result) -> str | None:
    """When fresh memory holds 0xFF instead of what happens to be there, the bytes are the same."""
    with _poisoned_allocations():
        probe = torch.empty(64, dtype=torch.uint8, device=next(iter(job.inputs.values())).device)
        if not bool((probe == 0xFF).all()):
            raise RuntimeError("torch did not fill fresh memory; this check would see nothing")
        other = job.run()
    checks.equal(result, other, "a run into memory of 0xFF")
    return None


@contextmanager
def _poisoned_allocations() -> Iterator[None]:
    """torch.empty and its kin are filled: the largest value of an integer type, NaN of a float."""
    mode = torch.get_deterministic_debug_mode()
    switch: Any = torch.utils.deterministic  # whose one attribute the stubs do not know
    fill = switch.fill_uninitialized_memory
    torch.set_deterministic_debug_mode("warn")  # use_deterministic_algorithms imports inductor: 2 s
    switch.fill_uninitialized_memory = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        switch.fill_uninitialized_memory = fill
