"""A kernel that must spill on every target: if a parser reports no spill of it, no count can be trusted."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from harness.chips import chip

LIVE = 128  # fp32 values one lane must hold at once
# Fewer registers a lane than that: 32 by decree on NVIDIA; on AMD what is left of 512 (gfx1250: 1024)
# when that many waves must fit a SIMD.
LIMIT: dict[str, dict[str, int]] = {
    "cuda": {"maxnreg": 32}, "gfx942": {"waves_per_eu": 8}, "gfx950": {"waves_per_eu": 8},
    "gfx1250": {"waves_per_eu": 16},
}  # fmt: skip


@triton.jit
def canary_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    """Each loaded value is needed again after a reduction over all of them."""
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at)
    tl.store(y_ptr + at, x * tl.sum(x, axis=0))


def launch(arch: str) -> dict[str, Any]:
    """The canary's launch on an architecture, as `codegen.compile_one` takes it."""
    target = chip(arch)
    return {
        "module": "harness.canary", "kernel": "canary_kernel",
        "pointers": {"x_ptr": "*fp32", "y_ptr": "*fp32"}, "integers": {},
        "constants": {"BLOCK": LIVE * target.warp}, "num_warps": 1, "num_stages": 1,
        "options": LIMIT.get(str(target.arch), LIMIT["cuda"]),
    }  # fmt: skip
