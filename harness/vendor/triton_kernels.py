"""OpenAI's triton_kernels, either generation, told apart by what it has rather than by a version.

The 3.5.1 generation (vendored by vLLM) has layout classes that take a shape; the 3.8 generation
(PyPI: tokenspeed-triton-kernels) has layout instances with `make_transformation`. Names moved too:
`GFX950MXScaleLayout` became `CDNA4MXScaleLayout`, `matmul_ogs` became `matmul`. PyPI's package
named `triton-kernels` is unrelated to either. Values come packed along K, [E, n, k]; the library
takes them as [E, k, n] with K in front, as vLLM's `_swizzle_mxfp4` passes them. Its layouts run on
any device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, metadata
from types import ModuleType
from typing import Any

import torch

from harness.vendor import NotInstalled, NotOffered, Probe, memory_bytes
from kernels.layout import round_up
from kernels.reference.mxfp4 import InFlexData, Swizzled, SwizzledMxfp4
from kernels.select import choose_mxfp4


@dataclass(frozen=True)
class Spelling:
    """A catalog layout in the library: class names, newest first, and its options."""

    names: tuple[str, ...]
    fp4: bool
    axis: bool = False  # takes mx_axis
    options: tuple[tuple[str, int], ...] = ()


SPELLINGS: dict[str, Spelling] = {
    "strided": Spelling(("StridedLayout",), True),
    "hopper_value_v2": Spelling(("HopperMXValueLayout",), True, True, (("mma_version", 2),)),
    "hopper_value_v3": Spelling(("HopperMXValueLayout",), True, True, (("mma_version", 3),)),
    "hopper_scale_w4": Spelling(("HopperMXScaleLayout",), False, True, (("num_warps", 4),)),
    "hopper_scale_w8": Spelling(("HopperMXScaleLayout",), False, True, (("num_warps", 8),)),
    "blackwell_value": Spelling(("BlackwellMXValueLayout",), True),
    "blackwell_scale": Spelling(("BlackwellMXScaleLayout",), False),
    "cdna4_scale": Spelling(("CDNA4MXScaleLayout", "GFX950MXScaleLayout"), False),
    "gfx1250_scale": Spelling(("GFX1250MXScaleLayout",), False),
}


def library() -> ModuleType:
    """triton_kernels; NotInstalled for an absent one and for PyPI's package of that name."""
    try:
        import_module("triton_kernels")
        return import_module("triton_kernels.tensor_details.layout")
    except ImportError as error:
        try:
            about = metadata("triton-kernels")
        except PackageNotFoundError:
            words = str(error).partition(" (/")[0]  # without the path of what lacks a name
            raise NotInstalled(f"{words}; env sync env=tk35 or env=tk38 fetches it") from None
        raise NotInstalled(
            f"PyPI's `triton-kernels` {about['Version']} ({about['Summary']}) is here, an "
            f"unrelated package; "
            "OpenAI's is tokenspeed-triton-kernels (env=tk38) or vLLM's copy (env=tk35)"
        ) from None


def layout_class(module: ModuleType, names: tuple[str, ...]) -> Any:
    """The first of the names that the module has; NotOffered names all that were tried."""
    for name in names:
        if hasattr(module, name):
            return getattr(module, name)
    has = ", ".join(sorted(n for n in vars(module) if n.endswith("Layout")))
    raise NotOffered(
        f"this triton_kernels has none of {', '.join(names)}; it has {has or 'no layouts'}",
        "NOT_INSTALLED",
    )


def generation(module: ModuleType) -> str:
    """'3.8' where a layout is an instance with `make_transformation`, '3.5' where it takes a
    shape."""
    return "3.8" if hasattr(module.Layout, "make_transformation") else "3.5"


def as_choice(selected: Any) -> tuple[Any, dict[str, Any]]:
    """What a selector of either generation returned, as (class or instance, options)."""
    if isinstance(selected, tuple):
        layout, options = selected
        return layout, dict(options)
    return selected, {}


def matmul_name() -> str:
    """`matmul_ogs` up to 3.7, `matmul` from 3.8 on; NotOffered when neither is there."""
    for name in ("matmul_ogs", "matmul"):
        try:
            if hasattr(import_module(f"triton_kernels.{name}"), name):
                return name
        except ImportError:
            continue
    raise NotOffered("this triton_kernels has neither matmul_ogs nor matmul")


def probe() -> Probe:
    try:
        module = library()
    except NotInstalled as error:
        return Probe(None, str(error))
    try:
        version = metadata("tokenspeed-triton-kernels")["Version"]
    except PackageNotFoundError:
        version = "vendored by vLLM"
    return Probe(f"{generation(module)} ({version})", generation=generation(module))


def _converted(x: torch.Tensor, name: str) -> Any:
    """x [E, n, k] uint8 -> the library's own tensor in that layout."""
    module, spelling = library(), SPELLINGS[name]
    tensor = import_module("triton_kernels.tensor")
    old = generation(module) == "3.5"
    options = dict(spelling.options)
    if spelling.axis:
        options["mx_axis"] = x.ndim - 2 if old else -2
    found = layout_class(module, spelling.names)
    if name == "strided" and not old:
        options["major_dim"] = -2
    wrapped = tensor.wrap_torch_tensor(x.mT, dtype=tensor.FP4 if spelling.fp4 else None)
    if old:
        return tensor.convert_layout(wrapped, found, **options)
    return tensor.convert_layout(wrapped, found(**options))


def convert(x: torch.Tensor, name: str) -> torch.Tensor:
    """x [E, n, k] uint8 -> what `convert_layout` returns, in its own shape and strides."""
    data: torch.Tensor = _converted(x, name).storage.data
    return data


REFUSALS = (AssertionError, RuntimeError, ValueError, NotImplementedError, ZeroDivisionError)


def stored(x: torch.Tensor, name: str) -> torch.Tensor:
    """[E, bytes] of x in the library's layout; NotOffered with its words for a refusal."""
    try:
        return memory_bytes(convert(x, name), x.shape[0])
    except REFUSALS as error:
        words = f"{type(error).__name__}: {error}"
        raise NotOffered(f"triton_kernels refuses {tuple(x.shape)}: {words}") from None


def returned(x: torch.Tensor, name: str) -> torch.Tensor:
    """x after the library's layout and its own way back to strides, [E, n', k']."""
    tensor, module = import_module("triton_kernels.tensor"), library()
    old = generation(module) == "3.5"
    strided = module.StridedLayout if old else module.StridedLayout(-2)
    try:
        back: torch.Tensor = tensor.convert_layout(_converted(x, name), strided).storage.data
    except REFUSALS as error:
        words = f"{type(error).__name__}: {error}".rstrip(": ")
        raise NotOffered(f"triton_kernels refuses {tuple(x.shape)}: {words}") from None
    return back.mT


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
    """`kernels.swizzle_mxfp4` by the library's own layouts, for the layouts that the target
    takes."""
    have = globals()["generation"](library())
    if have != generation:
        raise NotOffered(f"this triton_kernels is of generation {have}; the cell asks {generation}")
    version = torch.__version__ if torch_version is None else torch_version
    choice = choose_mxfp4(target, tp_size, num_warps, version, generation)
    n, groups = scale.shape[-2:]
    pad_k = round_up(groups, choice.scale_pad_k) - groups
    padded = torch.nn.functional.pad(scale, (0, pad_k)) if pad_k else scale
    done = []
    for x, layout, like in (
        (quant_tensor, choice.value, quant_tensor),
        (padded, choice.scale, scale),
    ):
        name = layout.name.removesuffix("_tk38")
        data = convert(x, name)
        bytes_ = memory_bytes(data, x.shape[0])
        rows, cols = layout.storage_shape(n, x.shape[-1])
        fits = bytes_.shape[1] == rows * cols
        storage = bytes_.view(x.shape[0], rows, cols) if fits else bytes_[:, None]
        warps = num_warps if "w" in layout.sizes else None
        done.append(Swizzled(data, storage, layout, (n, like.shape[-1]), warps))
    if out is not None:
        for buffer, swizzled in zip(out, done, strict=True):
            buffer.copy_(swizzled.storage)
    return SwizzledMxfp4(done[0], InFlexData(), done[1], choice.constraints, choice.reason)


ROUNDINGS = {"up": "ROUND_UP", "floor": "ROUND_DOWN"}


def downcast_to_mxfp(
    src_tensor: torch.Tensor, axis: int, *args: Any, scale_rounding: str = "even", **_: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Size]:
    """The library's MXFP4 quantizer: its Triton kernel on a GPU, its torch twin elsewhere.

    It rounds scales up or down only; `even`, vLLM's rule, is vLLM's own kernel.
    """
    if scale_rounding not in ROUNDINGS:
        raise NotOffered(
            f"triton_kernels rounds scales {' or '.join(ROUNDINGS)}, not {scale_rounding}"
        )
    numerics = import_module("triton_kernels.numerics_details.mxfp")
    name = "downcast_to_mxfp" if src_tensor.is_cuda else "downcast_to_mxfp_torch"
    mode = getattr(numerics.DequantScaleRoundingMode, ROUNDINGS[scale_rounding])
    codes, scale = getattr(numerics, name)(
        src_tensor, torch.uint8, axis, DEQUANT_SCALE_ROUNDING_MODE=mode
    )[:2]
    codes, scale = (getattr(getattr(x, "storage", x), "data", x) for x in (codes, scale))
    return codes, scale, scale.shape


ROUTINES: dict[str, Callable[..., Any]] = {
    "swizzle_mxfp4": swizzle_mxfp4,
    "downcast_to_mxfp": downcast_to_mxfp,
}
INVERSES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    name: partial(returned, name=name) for name in SPELLINGS if name != "strided"
}
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    name: partial(stored, name=name) for name in SPELLINGS
}
