"""A kernel that must spill on every target (`codegen.canary_launch` gives it too few registers).

If a parser reports no spill of it, no spill count can be trusted, and the gate is exit 4.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def canary_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    """Each loaded value is needed again after a reduction over all of them."""
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at)
    tl.store(y_ptr + at, x * tl.sum(x, axis=0))
