"""A prepared layer read back as its consumer addresses it: by index map, row order and views.

Nothing here knows how the layer was prepared. The consumer's own table (`consumers.reads`) says
which layouts and row order it expects for the flags that it runs under; a tag that differs is an
error. Each element is then fetched from flat storage at `Layout.offsets`, after undoing the
layout's bit permutation.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from kernels import consumers, moe, pads
from kernels.errors import LayoutError
from kernels.layout import Layout, permute_bits_, round_up
from kernels.prepared import PreparedLayer
from kernels.shard import ShardPlan


def consumer_of(prepared: PreparedLayer, num_warps: int | None = None) -> consumers.Reads:
    """What the consumer of this layer reads, run with `num_warps` (default: as it was prepared)."""
    o = prepared.options
    return consumers.reads(
        prepared.path, prepared.plan.target, prepared.plan.activation,
        tp_size=prepared.plan.tp_size, num_warps=num_warps or o["num_warps"],
        torch_version=o["torch_version"], generation=o["generation"],
    )  # fmt: skip


def fetch(storage: torch.Tensor, layout: Layout, n: int, k: int) -> torch.Tensor:
    """Flat storage of each expert -> [E, n, k], element by element at `layout.offsets(n, k)`."""
    rows, cols = layout.storage_shape(n, k)
    flat = storage.reshape(storage.shape[0], -1)
    if flat.shape[1] != rows * cols:
        raise LayoutError(
            f"storage {tuple(storage.shape)} holds {flat.shape[1]} elements an expert; layout "
            f"{layout.name!r} of {n} x {k} takes {rows * cols}"
        )
    if layout.bits:
        undo = tuple(sorted(range(32), key=layout.bits.__getitem__))
        flat = permute_bits_(flat.contiguous().clone(), undo)
    index = layout.offsets(n, k).flatten().to(flat.device)
    # gather bytes: index_select has no kernel for float8 on every device
    byte = flat.view(torch.uint8) if flat.element_size() == 1 else flat
    return byte.index_select(1, index).view(flat.dtype).view(-1, n, k)


def fetch_all(
    prepared: PreparedLayer, reads: consumers.Reads | None = None
) -> dict[str, torch.Tensor]:
    """Every weight, scale and bias in padded checkpoint order [E, n, k], tags checked first."""
    reads = reads or consumer_of(prepared)
    fetched = {}
    for name in prepared.layouts:
        layout = reads.layouts[name]
        storage = prepared.require(name, layout, reads.num_warps)
        n, k = expected_shape(prepared, name, reads)
        fetched[name] = fetch(storage, layout, n, k).cpu()
    return fetched


def expected_shape(prepared: PreparedLayer, name: str, reads: consumers.Reads) -> tuple[int, int]:
    """(n, k) of a tensor by the plan's padded sizes: what the kernel's own strides assume."""
    plan = prepared.plan
    block, pad = pads.BLOCK[pads.CONSUMER_FORMAT[plan.path]], reads.scale_pad_k
    inner, hidden = plan.padded_intermediate, plan.padded_hidden
    rows = plan.parts * inner
    return {
        "w13_weight": (rows, hidden // 2),
        "w13_scale": (rows, round_up(hidden // block, pad)),
        "w13_bias": (rows, 1),
        "w2_weight": (hidden, inner // 2),
        "w2_scale": (hidden, round_up(inner // block, pad)),
        "w2_bias": (hidden, 1),
    }[name]


def dense_from_prepared(
    prepared: PreparedLayer,
    dtype: torch.dtype = torch.float64,
    *,
    reads: consumers.Reads | None = None,
    padded: bool = False,
) -> moe.Dense:
    """The matrices that the consumer multiplies by; `padded` keeps the padding, as the kernel does.

    Raises LayoutError where a tag or a storage size is not what the consumer reads.
    """
    reads, plan = reads or consumer_of(prepared), prepared.plan
    x, form = fetch_all(prepared, reads), pads.CONSUMER_FORMAT[plan.path]
    decoded = {}
    for name in ("w13", "w2"):
        codes = x[f"{name}_weight"]
        groups = codes.shape[-1] * 2 // pads.BLOCK[form]  # without those added for the layout
        decoded[name] = moe.decode(codes, x[f"{name}_scale"][..., :groups], form, dtype)
    gate, up = moe.split_rows(decoded["w13"], reads.rows, plan.gated)
    biases = {name: x[name].squeeze(-1).to(dtype) for name in ("w13_bias", "w2_bias") if name in x}
    gate_bias, up_bias = moe.split_bias(biases.get("w13_bias"), reads.rows, plan.gated, dtype)
    scales = {name: t.cpu() for name, t in prepared.tensors.items() if name not in prepared.layouts}
    gate_2, up_2 = moe.global_scales(scales.get("w13_scale_2"), dtype)
    _, down_2 = moe.global_scales(scales.get("w2_scale_2"), dtype)
    whole = moe.Dense(
        gate=None if gate is None else gate * gate_2,
        up=up * up_2,
        down=decoded["w2"] * down_2,
        gate_bias=gate_bias,
        up_bias=up_bias,
        down_bias=biases.get("w2_bias"),
        a13_scale=scales["a13_scale"].max().to(dtype) if "a13_scale" in scales else None,
        a2_scale=scales["a2_scale"].max().to(dtype) if "a2_scale" in scales else None,
        activation=plan.activation,
    )
    return whole if padded else unpadded(whole, plan)


def unpadded(layer: moe.Dense, plan: ShardPlan) -> moe.Dense:
    """The same matrices without their padding: what the rank owns of the checkpoint."""
    real, hidden = slice(plan.real), slice(plan.hidden)
    cuts: dict[str, tuple[slice, ...]] = {
        "gate": (slice(None), real, hidden),
        "up": (slice(None), real, hidden),
        "down": (slice(None), hidden, real),
        "gate_bias": (slice(None), real),
        "up_bias": (slice(None), real),
        "down_bias": (slice(None), hidden),
    }
    kept: dict[str, Any] = {
        name: t[cuts[name]] for name, t in layer.matrices().items() if name in cuts
    }
    return replace(layer, **kept)
