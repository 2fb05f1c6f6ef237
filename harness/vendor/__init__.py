"""Other people's implementations on the same bench: one small adapter each, imported on demand.

An adapter module has `probe()`, which says whether its library is importable, which version, and
from where; `ROUTINES`, public routines of `kernels` by name with their signatures, served by the
library's own functions; and `LAYOUTS`, catalog names to functions [E, n, k] uint8 -> [E, bytes] in
memory order. Sweeps run a vendor in a process of its own (`harness.env.worker`): `kernels` is also
the import name of a Hugging Face package that these libraries may pull in. An absent library is
NOT_INSTALLED, never passed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

VENDORS: dict[str, str] = {
    "flashinfer": "harness.vendor.flashinfer",
    "triton_kernels": "harness.vendor.triton_kernels",
    "vllm": "harness.vendor.vllm",
}


class NotInstalled(ImportError):
    """The vendor's library is absent, or is another package of the same name; the message says
    which."""


class NotOffered(LookupError):
    """The library is there but does not do this. code: REFUSED for a shape or option that it turns
    down, NO_DEVICE where its code needs a GPU, NOT_INSTALLED where a part of it is missing."""

    def __init__(self, why: str, code: str = "REFUSED") -> None:
        super().__init__(why)
        self.code = code


@dataclass(frozen=True)
class Probe:
    """version: None when the library cannot serve, and then `reason` says why."""

    version: str | None
    reason: str = ""
    generation: str | None = None  # of triton_kernels


def adapter(vendor: str) -> ModuleType:
    return import_module(VENDORS[vendor])


def probe(vendor: str) -> Probe:
    """Whether a vendor can serve in this process. Imports the library."""
    found: Probe = adapter(vendor).probe()
    return found


def routine(vendor: str, name: str) -> Callable[..., Any]:
    """The vendor's form of a routine; NotInstalled or NotOffered with the reason."""
    found = probe(vendor)
    if found.version is None:
        raise NotInstalled(f"{vendor} is not installed: {found.reason}")
    offered: dict[str, Callable[..., Any]] = adapter(vendor).ROUTINES
    if name not in offered:
        raise NotOffered(
            f"{vendor} {found.version} has no {name}; it offers {', '.join(offered)}",
            "NOT_INSTALLED",
        )
    return offered[name]


def show_unwritten() -> None:
    """From here on, memory that a library allocates and never writes reads as 0xFF, not by
    chance."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]


def memory_bytes(x: torch.Tensor, experts: int) -> torch.Tensor:
    """A library's result as [E, bytes] in the order its bytes lie in memory, whatever its strides.

    NotOffered when the tensor has gaps or overlaps, where bytes have no such order.
    """
    strides = x.stride()
    order = sorted(range(x.ndim), key=lambda dim: (-strides[dim], x.shape[dim] != 1))
    dense = x.permute(order)
    if not dense.is_contiguous():
        raise NotOffered(
            f"the result {tuple(x.shape)}, strides {x.stride()}, is not dense in memory"
        )
    return dense.reshape(-1).view(torch.uint8).reshape(experts, -1)
