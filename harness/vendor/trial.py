"""One vendor function on one input, against this project: (verdict, detail).

A verdict is `equal`, `differs: where`, `refused: why` or `absent: why`. Source bytes are random and
never zero, so that padding shows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from harness import vendor
from harness.check.where import differ
from kernels import resolve
from kernels.errors import LayoutError
from kernels.layout import Layout

EXPERTS = 2
SCALES = ((256, 8), (512, 92), (130, 5), (1, 1), (32, 1), (2880, 90), (5760, 90), (704, 45))
VALUES = ((256, 128), (64, 64), (130, 48), (16, 16), (32, 16), (2880, 1440), (704, 352))


def shapes(layout: Layout) -> tuple[tuple[int, int], ...]:
    return VALUES if "value" in layout.name or not _is_scale(layout) else SCALES


def _is_scale(layout: Layout) -> bool:
    return "scale" in layout.name or layout.view in ("mma_6d", "blackwell_5d")


def source(n: int, k: int, seed: int = 0) -> torch.Tensor:
    """[E, n, k] uint8, no byte 0 or 0xFF."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 255, (EXPERTS, n, k), generator=generator, dtype=torch.uint8)


def judge(
    layout: Layout, run: Callable[[torch.Tensor], torch.Tensor], n: int, k: int, device: str
) -> tuple[str, str]:
    """(verdict, detail) of a function [E, n, k] -> [E, bytes] against the catalog's forward."""
    x = source(n, k)
    try:
        got = run(x.to(device)).cpu()
    except vendor.NotOffered as error:
        return ("refused" if error.code == "REFUSED" else "absent"), str(error)
    except LayoutError as error:
        return "refused", str(error)
    except vendor.NotInstalled as error:
        return "absent", str(error)
    except (AssertionError, RuntimeError, ValueError) as error:
        words = (str(error).splitlines() or [""])[0]
        return "refused", f"{type(error).__name__}: {words}"
    try:
        want = layout.forward(x).reshape(EXPERTS, -1)
    except LayoutError as error:
        return "differs", f"this project refuses the shape ({error}); the library does not"
    found = differ(got, want, layout, n, k)
    return ("equal", "") if found is None else ("differs", found)


def view_bytes(layout: Layout, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """For a view: the library's axes over a swizzled storage, read back in this project's order."""

    def run(x: torch.Tensor) -> torch.Tensor:
        n, k = x.shape[-2:]
        storage = layout.forward(x)
        wide = storage.view(x.shape[0], *layout.padded(n, k))
        view, ours = function(wide), layout.consumer_view(storage, n, k)
        if view.shape != ours.shape or view.stride() != ours.stride():
            raise vendor.NotOffered(
                f"its view is {tuple(view.shape)}, strides {view.stride()}; ours "
                f"{tuple(ours.shape)}, "
                f"{ours.stride()}"
            )
        return storage.reshape(x.shape[0], -1)

    return run


def round_trip(
    function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor
) -> tuple[str, str]:
    """(verdict, detail) of a library's way there and back against what went in."""
    try:
        back = function(x)
    except vendor.NotOffered as error:
        return ("refused" if error.code == "REFUSED" else "absent"), str(error)
    if back.shape != x.shape:
        return "differs", f"it comes back as {tuple(back.shape)}: padding is not cut off"
    wrong = back != x
    if not bool(wrong.any()):
        return "equal", ""
    at = [int(i) for i in wrong.nonzero()[0]]
    return "differs", f"{int(wrong.sum())} of {x.numel()} bytes, first at {at}"


def quantizer(run: Callable[..., Any], rounding: str, device: str) -> tuple[str, str]:
    """(verdict, detail) of an MXFP4 quantizer on ties, near-ties and normal values, against
    `kernels`."""
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]).repeat_interleave(4)
    line = torch.cat([ties * torch.tensor([1.0, -1.0] * 14), torch.tensor([6.0, 5.0, 7.0, 1.0])])
    generator = torch.Generator().manual_seed(0)
    gauss = torch.randn(15, 1024, generator=generator)
    x = torch.cat([line.repeat(1, 32), gauss]).bfloat16()
    want = resolve("downcast_to_mxfp", "reference")(x, 1, scale_rounding=rounding)
    try:
        got = run(x.to(device), 1, scale_rounding=rounding)
    except vendor.NotOffered as error:
        return ("refused" if error.code == "REFUSED" else "absent"), str(error)
    for what, a, b in (("scale", got[1].cpu(), want[1]), ("code byte", got[0].cpu(), want[0])):
        wrong = a != b
        if bool(wrong.any()):
            row, col = (int(i) for i in wrong.nonzero()[0])
            per = 2 if what != "scale" else 32
            source = [float(v) for v in x[row, col * per : col * per + 2]]
            largest = float(x[row, col * per // 32 * 32 :][:32].abs().max())
            values = f"0x{int(a[row, col]):02x} and 0x{int(b[row, col]):02x}"
            of = f"source {source}, largest of its block {largest}"
            return "differs", (
                f"{what}: {int(wrong.sum())} of {a.numel()}, first at [{row}, {col}]: {values} "
                f"({of})"
            )
    return "equal", ""
