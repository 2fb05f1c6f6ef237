"""Who computes: the callable of a routine in one implementation, or the reason why there is none.

`reference` and `fused` are this project's. Vendors live in `harness.vendor`, others come in
through the `harness.env.impls` entry-point group or `impl.import=module:function`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import torch

import kernels
from harness import UsageError, vendor
from harness.env import plugins
from kernels.errors import LayoutError

OWN = ("reference", "fused")
# The step that makes a path what it is. Where an implementation has no other of its steps, such as
# the maximum of the activation scales, the reference serves it; without this one it has nothing to
# show.
MAIN = {
    "nvfp4_cutedsl": "prepare_nvfp4_moe_layer_for_flashinfer_cutedsl",
    "nvfp4_trtllm": "prepare_static_weights_for_trtllm_fp4_moe",
    "nvfp4_cutlass": "swizzle_blockscale",
    "mxfp4_triton": "swizzle_mxfp4",
    "mxfp4_quantize": "downcast_to_mxfp",
}


class NotAvailable(RuntimeError):
    """This implementation cannot serve here: `code` is a reason code of rows.ABSENT."""

    def __init__(self, code: str, why: str) -> None:
        super().__init__(why)
        self.code = code


def load(impl: str, routine: str, config: Mapping[str, Any] | None = None) -> Callable[..., Any]:
    """The callable; NotAvailable with a reason code where there is none."""
    if config and config.get("import"):
        return imported(str(config["import"]))
    if impl in OWN:
        try:
            return kernels.resolve(routine, impl)
        except ModuleNotFoundError as error:
            raise NotAvailable("NOT_INSTALLED", f"impl={impl} lacks {routine}: {error}") from None
    return _others(impl, routine)


def _others(impl: str, routine: str) -> Callable[..., Any]:
    """A vendor's or a plugin's routine; what it refuses at the call becomes a refusal of the
    cell."""
    if impl in plugins.found():
        function = plugins.routine(impl, routine)
        if function is None:
            raise NotAvailable("NOT_INSTALLED", f"impl={impl} (an entry point) offers no {routine}")
        return function
    if impl not in vendor.VENDORS:
        raise NotAvailable("NOT_INSTALLED", f"impl={impl} offers no {routine} here")
    try:
        function = vendor.routine(impl, routine)
    except (vendor.NotInstalled, vendor.NotOffered) as error:
        raise NotAvailable("NOT_INSTALLED", str(error)) from None

    @wraps(getattr(function, "func", function))
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except vendor.NotInstalled as error:
            raise NotAvailable("NOT_INSTALLED", str(error)) from None
        except vendor.NotOffered as error:
            if error.code == "REFUSED":
                raise LayoutError(str(error)) from None
            raise NotAvailable(error.code, str(error)) from None

    return call


def imported(target: str) -> Callable[..., Any]:
    """`module:function`, a routine of the user's own."""
    module, _, name = target.partition(":")
    if not module or not name:
        raise UsageError(f"impl.import={target!r}; write impl.import=module:function")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise NotAvailable("NOT_INSTALLED", f"impl.import={target}: {error}") from None
    if not callable(function):
        raise UsageError(f"impl.import={target!r} is no function")
    return function


def resolver(
    config: Mapping[str, Any], impl: str, path: str
) -> Callable[[str, str], Callable[..., Any]] | None:
    """What `kernels.prepare` resolves a path's routines by; None for this project's own.

    `impl.import=module:function` serves the routine that the function is named after.
    """
    if target := config.get("import"):
        mine = str(target).partition(":")[2]
        if mine not in kernels.ROUTINES:
            raise UsageError(
                f"impl.import={target}: in a layer's path, name it after a routine of kernels"
            )
        own = imported(str(target))
        return lambda routine, _: own if routine == mine else _served(impl, routine)
    if impl in OWN:
        return None
    load(impl, MAIN[path])
    return lambda routine, _: _served(impl, routine)


def _served(impl: str, routine: str) -> Callable[..., Any]:
    """The implementation's own routine, else the reference's."""
    try:
        return load(impl, routine)
    except NotAvailable:
        return kernels.resolve(routine, "reference")


def device(impl: str, hw: Mapping[str, Any]) -> torch.device:
    """Where a cell runs: fused kernels on a GPU; the rest too if that is the target itself."""
    if not torch.cuda.is_available():
        if impl == "fused":
            raise NotAvailable("NO_DEVICE", "impl=fused runs Triton kernels; there is no GPU here")
        return torch.device("cpu")
    here = is_target(hw)
    return torch.device("cuda") if impl == "fused" or here else torch.device("cpu")


def is_target(hw: Mapping[str, Any]) -> bool:
    """Whether the target is the device of this machine, so that a time on it is the target's."""
    if not torch.cuda.is_available():
        return bool(hw["platform"] == "cpu")
    if hw["platform"] == "cpu":
        return False
    found = torch.cuda.get_device_properties(0)
    if hw["platform"] == "rocm":
        return bool(getattr(found, "gcnArchName", "").split(":")[0] == hw["arch"])
    name = torch.cuda.get_device_name(0).lower().replace(" ", "_")
    return str(hw["name"]) in name and f"sm{found.major}{found.minor}" == hw["arch"]
