"""What each consumer reads: the layouts, row order and kernel constraints of a path on a target.

One table for both sides. `prepare` tags a layer with it, and a consumer (or the judge) asks it anew
for the flags that the kernel runs under and compares tags, so loader and kernel cannot disagree in
silence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from kernels import activations, pads
from kernels.catalog import LAYOUTS
from kernels.errors import LayoutError
from kernels.layout import Layout
from kernels.select import choose_mxfp4


@dataclass(frozen=True)
class Reads:
    """Layouts by tensor; rows: the order of gate and up before the layout (see `PreparedLayer`)."""

    layouts: Mapping[str, Layout]
    rows: str
    constraints: Mapping[str, object] = field(default_factory=dict)
    num_warps: int | None = None
    scale_pad_k: int = 1


# Layout of (w13_weight, w13_scale, w2_weight, w2_scale) and row order, gated and plain. Biases take
# the row layout of their weight. cutedsl_w13 itself puts up first, so its rows enter as gate, up.
_NVFP4: dict[tuple[str, bool], tuple[str, str, str, str, str]] = {
    ("nvfp4_cutedsl", True): (
        "cutedsl_w13", "cutedsl_w13_scale", "strided", "cutedsl_mma_view", "gate|up"),
    ("nvfp4_cutedsl", False): (
        "strided", "cutedsl_mma_view", "strided", "cutedsl_mma_view", "plain"),
    ("nvfp4_trtllm", True): (
        "trtllm_w13", "trtllm_w13_scale", "trtllm_shuffle_32", "trtllm_w2_scale", "up|gate"),
    ("nvfp4_trtllm", False): (
        "trtllm_shuffle_32", "trtllm_w2_scale", "trtllm_shuffle_32", "trtllm_w2_scale", "plain"),
    ("nvfp4_cutlass", True): (
        "strided", "block_scale_128x4", "strided", "block_scale_128x4", "up|gate"),
    ("nvfp4_cutlass", False): (
        "strided", "block_scale_128x4", "strided", "block_scale_128x4", "plain"),
}  # fmt: skip


def reads(
    path: str,
    target: str,
    activation: str,
    *,
    tp_size: int = 1,
    num_warps: int = 8,
    torch_version: str | None = None,
    generation: str = "3.5",
) -> Reads:
    """What the consumer of `path` on `target` reads, run with these flags."""
    act = activations.find(activation)
    if path not in pads.FORMAT:
        raise LayoutError(f"no path {path!r}; known: {', '.join(pads.FORMAT)}")
    names = ("w13_weight", "w13_scale", "w2_weight", "w2_scale")
    if pads.CONSUMER_FORMAT[path] == "nvfp4":
        *layouts, rows = _NVFP4[path, act.gated]
        by_name = {name: LAYOUTS[layout] for name, layout in zip(names, layouts, strict=True)}
        biases = {"w13_bias": by_name["w13_weight"], "w2_bias": by_name["w2_weight"]}
        return Reads(by_name | biases, rows)
    version = torch.__version__ if torch_version is None else torch_version
    choice = choose_mxfp4(target, tp_size, num_warps, version, generation)
    by_name = dict(zip(names, (choice.value, choice.scale) * 2, strict=True))
    biases = dict.fromkeys(("w13_bias", "w2_bias"), LAYOUTS["strided"])
    # triton's fused swigluoai epilogue takes gate and up from neighbouring columns
    rows = "pairs" if act.interleaved else "gate|up" if act.gated else "plain"
    warps = num_warps if "w" in choice.scale.sizes else None
    return Reads(by_name | biases, rows, choice.constraints, warps, choice.scale_pad_k)
