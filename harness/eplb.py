"""Expert load balancing over real processes: one activation scale, experts that change places.

`python -m harness.eplb --backend gloo --world 4` starts that many processes, each an
expert-parallel rank with its share of one layer. Every rank checks, byte for byte, that

- `amax_for_moe_activation_quant(enable_eplb=True)` gives the maximum over all ranks' experts, and
  without EPLB only that of its own;
- after experts move between ranks as prepared storage, each rank holds what preparing the
  rearranged checkpoint gives it, at the same addresses, and views see it.

With `--backend nccl` rank r uses GPU r. Prints one JSON object; exit 0, or 2 when a rank disagrees.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

import kernels
from harness.run.source import synthetic
from kernels.prepare import PATHS, prepare
from kernels.prepared import PER_EXPERT, PreparedLayer
from kernels.weights import MoEWeights

TARGET = "sm100"
SIZES = {"hidden": 320, "intermediate": 192}  # neither is a multiple of a hidden tile
PATHS_CHECKED = ("nvfp4_cutedsl", "nvfp4_trtllm", "mxfp4_triton")


def layer(path: str, experts: int, device: str) -> MoEWeights:
    """A synthetic layer; activation scales grow with the expert, so only the last rank has the
    maximum."""
    made = synthetic(experts, **SIZES, activation="silu", form=PATHS[path].format, device=device)
    if made.a13_scale is None:
        return made
    scales = torch.linspace(0.01, 0.02, experts, device=device)
    return replace(made, a13_scale=scales, a2_scale=scales * 3)


def moved(weights: MoEWeights, sources: list[int]) -> MoEWeights:
    """The same layer with expert sources[e] of the checkpoint in place e."""
    tensors: dict[str, Any] = {name: t[sources] for name, t in weights.tensors().items()}
    return replace(weights, **tensors)


def rearrange_across(prepared: PreparedLayer, sources: list[int]) -> None:
    """Global place e takes what global expert sources[e] held; ranks exchange prepared storage.

    Every rank gathers a tensor's experts and copies those it is to hold into its own storage.
    """
    plan = prepared.plan
    own = sources[plan.expert_start : plan.expert_start + plan.expert_count]
    for name in PER_EXPERT:
        if name not in prepared.tensors:
            continue
        local = prepared.tensors[name]
        raw = local.view(torch.uint8) if local.element_size() == 1 else local
        everyone = [torch.empty_like(raw) for _ in range(plan.ep_size)]
        dist.all_gather(everyone, raw)
        raw.copy_(torch.cat(everyone)[own])


def check_rank(rank: int, world: int, device: str, impl: str) -> list[str]:
    """What is wrong on this rank, one sentence each."""
    faults, experts = [], 2 * world
    order = torch.randperm(experts, generator=torch.Generator().manual_seed(5)).tolist()
    for path in PATHS_CHECKED:
        weights = layer(path, experts, device)
        options: dict[str, Any] = {
            "target": TARGET,
            "ep_size": world,
            "ep_rank": rank,
            "impl": impl,
        }
        before = prepare(path, weights, **options, enable_eplb=True)
        pointers = {name: t.data_ptr() for name, t in before.tensors.items()}
        if weights.a13_scale is not None:
            own = weights.a13_scale[2 * rank : 2 * rank + 2]
            amax = kernels.resolve("amax_for_moe_activation_quant", impl)
            for eplb, want in ((True, weights.a13_scale.max()), (False, own.max())):
                if not torch.equal(got := amax(own, eplb), want):
                    faults.append(f"{path}: amax, EPLB {eplb}: {got.item()} not {want.item()}")
        rearrange_across(before, order)
        after = prepare(path, moved(weights, order), **options, enable_eplb=True)
        for name, tensor in before.tensors.items():
            same = tensor.contiguous().view(torch.uint8) == after.tensors[name].view(torch.uint8)
            if not bool(same.all()):
                faults.append(f"{path}: {name}: {int((~same).sum())} bytes differ after the move")
            if tensor.data_ptr() != pointers[name]:
                faults.append(f"{path}: {name} moved in memory")
        for name, view in before.views.items():
            if not torch.equal(view.view(torch.uint8), after.views[name].view(torch.uint8)):
                faults.append(f"{path}: the view of {name} does not see the move")
    return faults


def _worker(rank: int, world: int, backend: str, impl: str, folder: str) -> None:
    torch.set_num_threads(1)
    device = f"cuda:{rank}" if backend == "nccl" else "cpu"
    if backend == "nccl":
        torch.cuda.set_device(rank)
    store = f"file://{folder}/store"
    dist.init_process_group(
        backend, init_method=store, rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    try:
        faults = check_rank(rank, world, device, impl)
        (Path(folder) / f"rank{rank}.json").write_text(json.dumps(faults))
    finally:
        dist.destroy_process_group()


def run(backend: str, world: int, impl: str = "reference") -> dict[str, Any]:
    """Start the processes and collect what each found; raises if one dies."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_worker, (world, backend, impl, folder), nprocs=world, join=True)
        found = {
            rank: json.loads((Path(folder) / f"rank{rank}.json").read_text())
            for rank in range(world)
        }
    device = torch.cuda.get_device_name(0) if backend == "nccl" else "cpu"
    return {
        "backend": backend, "world": world, "impl": impl, "device": device,
        "paths": list(PATHS_CHECKED), "torch": torch.__version__, "faults": found,
    }  # fmt: skip


def main(argv: list[str]) -> int:
    """The command line; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m harness.eplb", description=__doc__)
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo")
    parser.add_argument("--world", type=int, default=2, help="processes, one GPU each with nccl")
    parser.add_argument("--impl", choices=kernels.IMPLS, default="reference")
    asked = parser.parse_args(argv)
    result = run(asked.backend, asked.world, asked.impl)
    print(json.dumps(result))
    return 2 if any(result["faults"].values()) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
