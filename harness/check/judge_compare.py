"""How two tensors are compared, how much of a layer is looked at, and how a verdict says so."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from kernels import pads
from kernels.weights import MoEWeights

Tensor = torch.Tensor


def reduced(weights: MoEWeights, *, experts: int, tile: int) -> MoEWeights:
    """The first experts, and hidden columns cut to one tile and the remainder of the real size."""
    experts = min(experts, weights.experts)
    hidden = min(weights.hidden, tile + weights.hidden % tile)
    per_byte, block = (1, 32) if weights.format == "bf16" else (2, pads.BLOCK[weights.format])
    cut: dict[str, Any] = weights.tensors()
    columns = {"w13_weight": hidden // per_byte, "w13_scale": -(-hidden // block)}
    for name, tensor in cut.items():
        kept = tensor[:experts]
        if name in columns:
            kept = kept[..., : columns[name]]
        elif name in ("w2_weight", "w2_scale", "w2_bias"):
            kept = kept[:, :hidden]
        cut[name] = kept
    return replace(weights, **cut)


def on(weights: MoEWeights, device: torch.device) -> MoEWeights:
    """The same weights on a device."""
    tensors: dict[str, Any] = {name: t.to(device) for name, t in weights.tensors().items()}
    return replace(weights, **tensors)


def difference(name: str, got: Tensor, want: Tensor) -> str:
    """'' when equal in shape and every bit, else how many differ, the first place and both
    values."""
    if got.shape != want.shape:
        return f"{name}: shape {tuple(got.shape)} instead of {tuple(want.shape)}"
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[want.element_size()]
    unequal = got.contiguous().view(bits) != want.contiguous().view(bits)
    count = int(unequal.sum())
    if not count:
        return ""
    at = tuple(int(i) for i in torch.unravel_index(unequal.flatten().int().argmax(), want.shape))
    return (
        f"{name}: {count} of {want.numel()} values differ, first at {at}: "
        f"{got[at].item()!r} instead of {want[at].item()!r}"
    )


def merge_fault(name: str, have: Tensor, want: Tensor, merged: Tensor) -> str:
    """'' where two global scales made one within the bound that `merge_global_scales` states."""
    step = 6 * 2.0**-10 * merged.double().cpu()[:, None, None]
    outside = (have - want).abs() > torch.maximum(want.abs() * (2.0**-4 + 2.0**-22), step)
    if not outside.any():
        return ""
    at = tuple(int(i) for i in torch.unravel_index(outside.flatten().int().argmax(), want.shape))
    return (
        f"{name}: {int(outside.sum())} of {want.numel()} values outside the bound of the "
        f"global-scale merge, first at {at}: {have[at].item()!r} instead of {want[at].item()!r}"
    )


def passed(small: MoEWeights, weights: MoEWeights, codes: str = "") -> str:
    """pass, with what was looked at where that was not everything; codes: in place of values."""
    seen = codes or f"{small.experts} of {weights.experts} experts"
    if small.hidden == weights.hidden and (codes or small.experts == weights.experts):
        return "pass"
    return f"pass ({seen}, hidden {small.hidden} of {weights.hidden}, intermediate in full)"
