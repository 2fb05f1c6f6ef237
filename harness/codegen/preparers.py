"""The fused preparation kernels as launches: their code is read without a device.

A cell is prepared on tensors that have shapes and strides and no memory (device `meta`), with its
launches kept in place of run. So the code is that of the cell's own launches: rank 0's share with
the checkpoint's strides, padded, ordered and laid out in one pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from harness.check.consumers import layouts_of_cell
from harness.codegen.chips import chip
from kernels import activations
from kernels.errors import LayoutError
from kernels.layout import Layout
from kernels.pads import FORMAT
from kernels.prepare import prepare
from kernels.weights import WEIGHTS, MoEWeights, checkpoint_shapes

EXPERTS = 8


def launch(layout: Layout, n: int, k: int, arch: str) -> dict[str, Any]:
    """One layout of contiguous bytes [experts, n, k], for `codegen`."""
    from kernels.fused.rearrange import describe, job

    matrices = torch.empty((EXPERTS, n, k), dtype=torch.uint8, device="meta")
    return describe(job(layout, matrices), _table(arch))


def of_cell(cell: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The launch of each weight and scale of a fused layer cell; none where the preparation
    refuses, or takes it in several steps."""
    if cell["impl"]["name"] != "fused" or not layouts_of_cell(cell)[0]:
        return {}
    from kernels.fused.launch import planned
    from kernels.fused.rearrange import Job, describe

    path, arch = cell["path"]["name"], cell["hw"]["arch"]
    try:
        with planned() as launches:
            prepare(
                path, _weights(cell["model"], path), target=arch, impl="fused",
                tp_size=int(cell["cell"]["tp_size"]), generation=cell.get("generation", "3.5"),
            )  # fmt: skip
    except LayoutError:
        return {}
    jobs = [one for one in launches if isinstance(one, Job)]
    if len(jobs) != len(WEIGHTS):
        return {}
    return {
        f"prepare_{name}": describe(job, _table(arch))
        for name, job in zip(WEIGHTS, jobs, strict=True)
    }


def _weights(model: Mapping[str, Any], path: str) -> MoEWeights:
    """A checkpoint's layer without memory, and without what is small: biases and global scales."""
    form, found = FORMAT[path], activations.find(model["activation"])
    parts = 2 if found.gated else 1
    shapes = checkpoint_shapes(EXPERTS, model["H"], model["I"], parts, form)
    scale = torch.float8_e4m3fn if form == "nvfp4" else torch.uint8
    made = {
        name: torch.empty(
            shapes[name], dtype=scale if "scale" in name else torch.uint8, device="meta"
        )
        for name in WEIGHTS
    }
    return MoEWeights(**made, format=form, activation=found.name, interleaved=found.interleaved)


def _table(arch: str) -> str:
    """The key of the tile table that a target takes."""
    return "wave64" if chip(arch).warp == 64 else "sm90"
