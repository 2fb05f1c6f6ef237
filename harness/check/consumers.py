"""Which consumer stands for a backend on each target, and with what blocks: literal tables.

Blocks are those of the library's own heuristics where it has them (triton_kernels
opt_flags_details: Hopper block_n = 32 * num_warps, block_k 128; gfx950 block_k 256), and 128 x 128
x 256 elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernels.catalog import LAYOUTS
from kernels.errors import LayoutError
from kernels.fused.consume import MX_GROUP, NV_GROUP, Launch, matmul_launch
from kernels.layout import Layout
from kernels.select import choose_mxfp4

# Per target: how its tile matmul is launched. x_format is the activation that the matrix unit takes
# next to e2m1 weights; bf16 where weights are cast up.
CONFIG: dict[str, dict[str, Any]] = {
    "sm80": {"x_format": "bf16", "blocks": (64, 128, 128), "num_warps": 4, "num_stages": 3},
    "sm90": {"x_format": "bf16", "blocks": (64, 256, 128), "num_warps": 8, "num_stages": 3},
    "sm100": {"x_format": "e2m1", "blocks": (128, 128, 256), "num_warps": 4, "num_stages": 3},
    "sm103": {"x_format": "e2m1", "blocks": (128, 128, 256), "num_warps": 4, "num_stages": 3},
    "sm120": {"x_format": "e2m1", "blocks": (128, 128, 128), "num_warps": 8, "num_stages": 3},
    "gfx942": {"x_format": "bf16", "blocks": (64, 128, 128), "num_warps": 4, "num_stages": 2},
    "gfx950": {"x_format": "e2m1", "blocks": (128, 128, 256), "num_warps": 4, "num_stages": 2},
    "gfx1250": {"x_format": "e2m1", "blocks": (128, 128, 256), "num_warps": 4, "num_stages": 2},
}
# NVFP4 paths: (w13 value, w13 scale, w2 value, w2 scale), gated; without a gate w13 is as w2.
NVFP4: dict[str, tuple[str, str, str, str]] = {
    "nvfp4_trtllm": ("trtllm_w13", "trtllm_w13_scale", "trtllm_shuffle_32", "trtllm_w2_scale"),
    "nvfp4_cutedsl": ("cutedsl_w13", "cutedsl_w13_scale", "strided", "cutedsl_mma_view"),
    "nvfp4_cutlass": ("strided", "block_scale_128x4", "strided", "block_scale_128x4"),
}


def launch(
    arch: str, value: Layout, scale: Layout, n: int, k: int, *, m: int = 128, experts: int = 8,
    group: int = MX_GROUP, **change: Any,
) -> Launch:  # fmt: skip
    """The target's tile matmul for weights [experts, n, k] in these layouts."""
    if group == MX_GROUP and scale.name == "strided" and arch == "sm90" and not value.bits:
        # The library's strided kernel on Hopper keeps x on the left and is not tied to num_warps.
        change = {"blocks": (64, 128, 128), "num_warps": 4} | change
    return matmul_launch(
        value, scale, m=m, n=n, k=k, experts=experts, group=group, **(CONFIG[arch] | change)
    )


def shapes(model: Mapping[str, Any], tp_size: int) -> dict[str, tuple[int, int]]:
    """Logical (n, k) of w13 and w2 on one rank; I is split by whole 32-element blocks, as a shard
    is."""
    blocks = -(-model["I"] // MX_GROUP)
    per_rank = -(-blocks // tp_size) * MX_GROUP
    rows = per_rank if str(model["activation"]).endswith("_no_mul") else 2 * per_rank
    return {"w13": (rows, model["H"]), "w2": (model["H"], per_rank)}


def layouts_of_cell(
    cell: Mapping[str, Any],
) -> tuple[dict[str, tuple[Layout, Layout, int, int]], int]:
    """({matrix: (value, scale, n, k)}, scale group) of a layer cell; empty if none is read here."""
    path, arch = cell["path"]["name"], cell["hw"]["arch"]
    tp_size = int(cell["cell"]["tp_size"])
    sizes = shapes(cell["model"], tp_size)
    if path == "mxfp4_triton":
        choice = choose_mxfp4(arch, tp_size, generation=cell.get("generation", "3.5"))
        pairs, group = dict.fromkeys(sizes, (choice.value, choice.scale)), MX_GROUP
    elif path in NVFP4 and arch in ("sm100", "sm103", "sm120"):
        gated = not str(cell["model"]["activation"]).endswith("_no_mul")
        w13_value, w13_scale, w2_value, w2_scale = (LAYOUTS[n] for n in NVFP4[path])
        w2 = (w2_value, w2_scale)
        pairs, group = {"w13": (w13_value, w13_scale) if gated else w2, "w2": w2}, NV_GROUP
    else:
        return {}, MX_GROUP
    return {name: (*pairs[name], *size) for name, size in sizes.items()}, group


def of_cell(cell: Mapping[str, Any]) -> dict[str, Launch]:
    """Launches of the consumers that read what a layer cell prepares."""
    found, (matrices, group) = {}, layouts_of_cell(cell)
    for name, (value, scale, n, k) in matrices.items():
        try:
            found[name] = launch(cell["hw"]["arch"], value, scale, n, k - k % group, group=group)
        except LayoutError:
            continue  # the preparation refuses such a shape itself, with the same reason
    return found
