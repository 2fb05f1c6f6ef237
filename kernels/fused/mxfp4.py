"""MXFP4 weights for triton_kernels, fused: the routines of `kernels.reference.mxfp4`.

Contracts, errors, results and bytes are the reference's; padding is part of the one pass.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import lcm

import torch

from kernels.errors import LayoutError
from kernels.fused.launch import run
from kernels.fused.rearrange import Job, job, restore
from kernels.layout import Layout, round_up
from kernels.reference import mxfp4 as reference
from kernels.reference.mxfp4 import InFlexData, Swizzled, SwizzledMxfp4
from kernels.reference.reorder import check_out


def swizzle_mxfp4(
    quant_tensor: torch.Tensor,
    scale: torch.Tensor,
    num_warps: int = 8,
    *,
    target: str,
    tp_size: int = 1,
    torch_version: str | None = None,
    generation: str = "3.5",
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> SwizzledMxfp4:
    """What vLLM's `_swizzle_mxfp4` gives on `target`; two launches, nothing but the outputs."""
    values, choice = reference.check_mxfp4(
        quant_tensor, scale, num_warps, target, tp_size, torch_version, generation
    )
    outs = out or (None, None)
    swizzled_scale, scale_job = _planned(scale, choice.scale, outs[1], choice.scale_pad_k)
    swizzled_value, value_job = _planned(values, choice.value, outs[0])
    run([*scale_job, *value_job])
    warps = num_warps if "w" in choice.scale.sizes else None
    return SwizzledMxfp4(
        swizzled_value,
        InFlexData(),
        replace(swizzled_scale, num_warps=warps),
        choice.constraints,
        choice.reason,
    )


def unswizzle_mxfp4(swizzled: SwizzledMxfp4) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse of `swizzle_mxfp4`: ([E, N, K/2], [E, N, K/32]) uint8, checkpoint order."""
    return unswizzle(swizzled.value), unswizzle(swizzled.scale)


def swizzle(
    x: torch.Tensor, layout: Layout, *, out: torch.Tensor | None = None, pad_k: int = 1
) -> Swizzled:
    """x [E, n, k] bytes -> the layout's storage, viewed as its consumer's library does."""
    swizzled, jobs = _planned(x, layout, out, pad_k)
    run(jobs)
    return swizzled


def _planned(
    x: torch.Tensor, layout: Layout, out: torch.Tensor | None, pad_k: int = 1
) -> tuple[Swizzled, list[Job]]:
    """The result of `swizzle`, and the launch that fills it, if one has to."""
    if isinstance(x, Swizzled):
        raise LayoutError(
            f"tensor {tuple(x.data.shape)} is in layout {x.layout.name!r} already; swizzling "
            "twice gives wrong weights; start from the checkpoint tensor"
        )
    if x.ndim != 3 or x.dtype != torch.uint8:
        raise LayoutError(
            f"layout {layout.name!r}: tensor {tuple(x.shape)} {x.dtype}; want uint8 [E, n, k]"
        )
    e, n, k = x.shape
    wide = round_up(k, pad_k)
    if out is not None:
        numel = e * layout.storage_shape(n, wide)[0] * layout.storage_shape(n, wide)[1]
        check_out(f"layout {layout.name!r}", out, x, numel)
    jobs = []
    if not (layout.is_plain and x.is_contiguous() and out is None and wide == k):
        jobs = [job(_padded(layout, pad_k), x, out)]
    storage = jobs[0].storage if jobs else x
    return Swizzled(layout.consumer_view(storage, n, wide), storage, layout, (n, k)), jobs


@lru_cache(maxsize=256)
def _padded(layout: Layout, pad_k: int) -> Layout:
    """The layout with its columns padded to a multiple of pad_k too."""
    return replace(layout, align=(layout.align[0], lcm(layout.align[1], pad_k)))


def unswizzle(swizzled: Swizzled) -> torch.Tensor:
    """The inverse of `swizzle`: [E, n, k] bytes."""
    n, k = swizzled.shape
    layout, stored = swizzled.layout, swizzled.storage.shape[-2:]
    if layout.storage_shape(n, k) != stored and layout.storage_shape(n, round_up(k, 4)) == stored:
        layout = _padded(layout, 4)
    return restore(layout, swizzled.storage, n, k)
