"""MXFP4 weight preparation for OpenAI's triton_kernels: values and scales swizzled for a target.

MXFP4: e2m1 codes packed two a byte along K, one e8m0 scale per 32 elements. Results come in the
shapes and strides in which triton_kernels returns them (K before N), over storage whose bytes are
equal to its own; each carries the layout it is in, so that a second swizzle or another consumer is
an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from kernels import select
from kernels.errors import LayoutError
from kernels.layout import Layout, round_up
from kernels.reference.reorder import check_out

BLOCK = 32  # elements per scale


@dataclass(frozen=True)
class Swizzled:
    """A tensor in a layout. data: as the consumer's library shapes it; storage: the same memory as
    [E, rows, cols]; shape: the logical (n, k) of each expert's matrix, k in bytes or groups."""

    data: torch.Tensor
    storage: torch.Tensor
    layout: Layout
    shape: tuple[int, int]
    num_warps: int | None = None

    def check(self, layout: Layout) -> None:
        """Raise LayoutError unless this is the layout that a consumer expects, warps included."""
        if self.layout != layout or self.layout.sizes != layout.sizes:
            raise LayoutError(
                f"the consumer reads layout {layout.name!r}, but this tensor "
                f"{tuple(self.data.shape)} was "
                f"prepared as {self.layout.name!r}; prepare it again from the checkpoint"
            )


@dataclass(frozen=True)
class InFlexData:
    """What triton_kernels calls the per-tensor scale of a flexpoint value; none for MXFP4."""

    dtype: object = None
    scale: torch.Tensor | None = None


@dataclass(frozen=True)
class SwizzledMxfp4:
    """(value, flex, scale), in that order when unpacked, and the constraints the kernel runs
    under."""

    value: Swizzled
    flex: InFlexData
    scale: Swizzled
    constraints: Mapping[str, object] = field(default_factory=dict)
    reason: str = ""

    def __iter__(self) -> Iterator[object]:
        return iter((self.value, self.flex, self.scale))


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
    """What vLLM's `_swizzle_mxfp4` gives on `target`, which need not be this machine.

    quant_tensor [E, N, K/2] uint8 (packed along K), scale [E, N, K/32] uint8. `out` takes the two
    storages, contiguous uint8 of `Layout.storage_shape`, so a loader can reuse buffers or fill one
    expert's slice. Raises LayoutError for another dtype or rank, scales that do not fit the values,
    a tensor swizzled already, or a shape that this generation of triton_kernels refuses. Source:
    vllm mxfp4_utils.py `_swizzle_mxfp4`; triton_kernels layout_details.
    """
    values, choice = check_mxfp4(
        quant_tensor, scale, num_warps, target, tp_size, torch_version, generation
    )
    outs = out or (None, None)
    if out is not None:
        for name, part, x, layout, pad_k in (
            ("value", out[0], values, choice.value, 1),
            ("scale", out[1], scale, choice.scale, choice.scale_pad_k),
        ):
            rows, cols = layout.storage_shape(x.shape[1], round_up(x.shape[2], pad_k))
            check_out(f"swizzle_mxfp4: {name}", part, x, x.shape[0] * rows * cols)
    swizzled_scale = swizzle(scale, choice.scale, out=outs[1], pad_k=choice.scale_pad_k)
    warps = num_warps if "w" in choice.scale.sizes else None
    return SwizzledMxfp4(
        swizzle(values, choice.value, out=outs[0]),
        InFlexData(),
        Swizzled(
            swizzled_scale.data, swizzled_scale.storage, choice.scale, swizzled_scale.shape, warps
        ),
        choice.constraints,
        choice.reason,
    )


def unswizzle_mxfp4(swizzled: SwizzledMxfp4) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse of `swizzle_mxfp4`: ([E, N, K/2], [E, N, K/32]) uint8, checkpoint order."""
    return unswizzle(swizzled.value), unswizzle(swizzled.scale)


def swizzle(
    x: torch.Tensor, layout: Layout, *, out: torch.Tensor | None = None, pad_k: int = 1
) -> Swizzled:
    """x [E, n, k] bytes -> the layout's storage, viewed as its consumer's library does.

    pad_k: k is first padded with the layout's fill to this multiple (sm90 scale groups, to 4). The
    strided layout moves nothing: without `out`, a contiguous x is its own storage, as in
    triton_kernels.
    """
    if isinstance(x, Swizzled):
        raise LayoutError(
            f"tensor {tuple(x.data.shape)} is in layout {x.layout.name!r} already; swizzling "
            "twice gives "
            "wrong weights; start from the checkpoint tensor"
        )
    if x.ndim != 3 or x.dtype != torch.uint8:
        raise LayoutError(
            f"layout {layout.name!r}: tensor {tuple(x.shape)} {x.dtype}; want uint8 [E, n, k]"
        )
    _, n, k = x.shape
    padded = round_up(k, pad_k)
    source = x if padded == k else torch.nn.functional.pad(x, (0, padded - k), value=layout.fill)
    storage = source if layout.is_plain and source.is_contiguous() else layout.forward(source)
    if out is not None:
        check_out(f"layout {layout.name!r}", out, storage, storage.numel())
        storage = out.view(storage.shape).copy_(storage)
    return Swizzled(layout.consumer_view(storage, n, padded), storage, layout, (n, k))


def unswizzle(swizzled: Swizzled) -> torch.Tensor:
    """The inverse of `swizzle`: [E, n, k] bytes."""
    n, k = swizzled.shape
    rows, cols = swizzled.storage.shape[-2:]
    wide = next(
        (
            wide
            for wide in (k, round_up(k, 4))
            if swizzled.layout.storage_shape(n, wide) == (rows, cols)
        ),
        k,
    )
    return swizzled.layout.inverse(swizzled.storage, n, wide)[..., :k].contiguous()


def check_mxfp4(
    values: torch.Tensor, scale: torch.Tensor, num_warps: int, target: str, tp_size: int,
    torch_version: str | None, generation: str,
) -> tuple[torch.Tensor, select.Choice]:  # fmt: skip
    """The values, and the choice for the target, once the arguments make sense together."""
    for name, x in (("quant_tensor", values), ("scale", scale)):
        if isinstance(x, Swizzled):
            raise LayoutError(
                f"swizzle_mxfp4: {name} is in layout {x.layout.name!r} already; start from the "
                "checkpoint"
            )
        if x.ndim != 3 or x.dtype != torch.uint8:
            raise LayoutError(
                f"swizzle_mxfp4: {name} {tuple(x.shape)} {x.dtype}; want uint8 [E, N, K]"
            )
    e, n, packed = values.shape
    if packed * 2 % BLOCK or tuple(scale.shape) != (e, n, packed * 2 // BLOCK):
        raise LayoutError(
            f"swizzle_mxfp4: scale {tuple(scale.shape)} does not belong to quant_tensor "
            f"{tuple(values.shape)}; "
            f"want one scale per {BLOCK} elements, {(e, n, packed * 2 // BLOCK)}, and K divisible "
            f"by {BLOCK}"
        )
    version = torch.__version__ if torch_version is None else torch_version
    choice = select.choose_mxfp4(target, tp_size, num_warps, version, generation)
    if choice.scale.name == "cdna4_scale" and generation == "3.5":
        n, groups = scale.shape[-2:]
        if (n, groups) != choice.scale.padded(n, groups):
            raise LayoutError(
                f"swizzle_mxfp4: scale {tuple(scale.shape)} on {target}: triton_kernels 3.5 does "
                "not pad CDNA4 "
                "scales and needs 32 | N and 8 | K/32; pad the weights first, or use "
                "generation='3.8'"
            )
    return values, choice
