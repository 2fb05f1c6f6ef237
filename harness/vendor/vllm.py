"""vLLM's own preparation functions, under the signatures of `kernels`.

vLLM's package initialisers import its engine and about a hundred dependencies. The functions
measured here need few of them, so the packages on the way to them are entered without running their
`__init__.py`; every module that holds a function is vLLM's own and runs as it is. A complete vLLM
that is already imported in this process is used as it is. Quantizer and TRT-LLM preparation need a
GPU. Source: vllm model_executor/layers/quantization/utils.
"""

from __future__ import annotations

import sys
import types
import warnings
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from harness.vendor import NotInstalled, NotOffered, Probe, memory_bytes
from kernels import activations
from kernels.layout import Layout, round_up
from kernels.reference.mxfp4 import InFlexData, Swizzled, SwizzledMxfp4
from kernels.select import choose_mxfp4

T = torch.Tensor
UTILS = "vllm.model_executor.layers.quantization.utils"
BARE = (
    "vllm",
    "vllm.model_executor",
    "vllm.model_executor.layers",
    "vllm.model_executor.layers.fused_moe",
    "vllm.model_executor.layers.quantization",
    UTILS,
)
# Imported for its custom ops where the platform is CUDA; no function here uses them.
COMPILED = ("_C_stable_libtorch",)
HOME: dict[str, str] = {  # routine -> module of vLLM that holds it
    "reorder_w1w3_to_w3w1": "flashinfer_fp4_moe",
    "reorder_w13_to_w31_for_flashinfer_cutedsl": "flashinfer_fp4_moe",
    "interleave_linear_and_gate": "flashinfer_fp4_moe",
    "prepare_nvfp4_moe_layer_for_flashinfer_cutedsl": "flashinfer_fp4_moe",
    "nvfp4_swizzled_scale_to_cutedsl_mma_view": "flashinfer_fp4_moe",
    "prepare_static_weights_for_trtllm_fp4_moe": "flashinfer_fp4_moe",
    "align_fp4_moe_weights_for_fi": "flashinfer_utils",
    "align_fp4_moe_hidden_dim_for_fi": "flashinfer_utils",
    "amax_for_moe_activation_quant": "quant_utils",
    "swizzle_blockscale": "nvfp4_utils",
    "downcast_to_mxfp": "mxfp4_utils",
    "_swizzle_mxfp4": "mxfp4_utils",
}


def enter() -> None:
    """Makes vLLM's utility modules importable without its engine; NotInstalled when it is
    absent."""
    if "vllm" in sys.modules:
        return
    spec = find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise NotInstalled("no module named 'vllm'; env sync env=vllm033 fetches its Python files")
    root = Path(next(iter(spec.submodule_search_locations)))
    for name in BARE:
        module = types.ModuleType(name)
        module.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        module.__file__ = str(root / "__init__.py")
        sys.modules[name] = module
    for name in COMPILED:
        if not any(root.glob(f"{name}*.so")):
            sys.modules[f"vllm.{name}"] = types.ModuleType(f"vllm.{name}")


def function(name: str) -> Callable[..., Any]:
    """vLLM's function; NotInstalled when what it needs cannot be imported."""
    enter()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return getattr(import_module(f"{UTILS}.{HOME[name]}"), name)
    except ImportError as error:
        raise NotInstalled(f"vllm {HOME[name]}: {error}; env sync env=vllm033") from None


def probe() -> Probe:
    try:
        function("swizzle_blockscale")
    except (NotInstalled, RuntimeError) as error:
        return Probe(None, str(error))
    try:
        return Probe(version("vllm"))
    except PackageNotFoundError:
        return Probe("0.33.0, Python files only")


def call(name: str, *args: Any, **kwargs: Any) -> Any:
    """Any routine whose signature vLLM and this project share."""
    try:
        return function(name)(*args, **kwargs)
    except AssertionError as error:
        if "CUDA" in str(error):  # swizzle_blockscale ends in .cuda()
            raise NotOffered(
                f"vllm {name} moves its result to a GPU; it needs one", "NO_DEVICE"
            ) from None
        raise NotOffered(f"vllm {name} refuses: {error or 'an assertion'}") from None
    except ImportError as error:
        raise NotOffered(f"vllm {name}: {error}", "NOT_INSTALLED") from None


def _activation(name: Any) -> Any:
    enter()
    known = import_module("vllm.model_executor.layers.fused_moe.activation").MoEActivation
    return known.from_str(activations.find(name).name)


def reorder_w13_to_w31_for_flashinfer_cutedsl(activation: Any, w13: T, w13_scale: T) -> tuple[T, T]:
    moved: tuple[T, T] = call(
        "reorder_w13_to_w31_for_flashinfer_cutedsl", _activation(activation), w13, w13_scale
    )
    return moved


def _cutedsl_layer(layer: Any, *tensors: T) -> tuple[T, ...]:
    """vLLM reads the layer's enum and writes the padded sizes into its config: it gets its own."""
    parallel = types.SimpleNamespace(enable_eplb=False)
    config = types.SimpleNamespace(
        moe_parallel_config=parallel, intermediate_size_per_partition=0, hidden_dim=0,
        hidden_dim_unpadded=None,
    )  # fmt: skip
    own = types.SimpleNamespace(activation=_activation(layer.activation), moe_config=config)
    done: tuple[T, ...] = call("prepare_nvfp4_moe_layer_for_flashinfer_cutedsl", own, *tensors)
    return done


def amax_for_moe_activation_quant(a_scale: T, enable_eplb: bool, group: Any = None) -> T:
    if enable_eplb or group is not None:
        raise NotOffered(
            "vLLM's all-reduce needs its own distributed state; enable_eplb=False here"
        )
    amax: T = call("amax_for_moe_activation_quant", a_scale, False)
    return amax


def nvfp4_block_scale_interleave(scale: T) -> T:
    swizzled: T = call("swizzle_blockscale", scale.view(torch.float8_e4m3fn))
    return swizzled.view(torch.uint8).reshape(-1)


def downcast_to_mxfp(src_tensor: T, axis: int, *args: Any, **kwargs: Any) -> Any:
    if not src_tensor.is_cuda:
        raise NotOffered("vLLM's downcast_to_mxfp is a Triton kernel; it needs a GPU", "NO_DEVICE")
    if (rounding := kwargs.pop("scale_rounding", "even")) != "even":
        raise NotOffered(f"vLLM's downcast_to_mxfp rounds scales to even, not {rounding}")
    return call("downcast_to_mxfp", src_tensor, axis, *args, **kwargs)


def swizzle_mxfp4(
    quant_tensor: T, scale: T, num_warps: int = 8, *, target: str, tp_size: int = 1, **_: Any
) -> SwizzledMxfp4:
    """vLLM's `_swizzle_mxfp4`, which prepares for the GPU that it runs on and for no other."""
    if not quant_tensor.is_cuda:
        raise NotOffered(
            "vLLM's _swizzle_mxfp4 asks the GPU it runs on for the layout; there is none",
            "NO_DEVICE",
        )
    major, minor = torch.cuda.get_device_capability(quant_tensor.device)
    if target != f"sm{major}{minor}":
        raise NotOffered(
            f"vLLM's _swizzle_mxfp4 prepares for this GPU, sm{major}{minor}, not for {target}",
            "NO_DEVICE",
        )
    choice = choose_mxfp4(target, tp_size, num_warps, torch.__version__, "3.5")
    value, _flex, swizzled = call("_swizzle_mxfp4", quant_tensor, scale, num_warps)
    n, groups = scale.shape[-2:]
    wide = round_up(groups, choice.scale_pad_k)
    return SwizzledMxfp4(
        _swizzled(value, choice.value, n, quant_tensor.shape[-1], quant_tensor.shape[-1]),
        InFlexData(),
        _swizzled(swizzled, choice.scale, n, groups, wide, num_warps),
        choice.constraints, choice.reason,
    )  # fmt: skip


def _swizzled(
    tensor: Any, layout: Layout, n: int, k: int, wide: int, warps: int | None = None
) -> Swizzled:
    data = tensor.storage.data
    rows, cols = layout.storage_shape(n, wide)
    return Swizzled(
        data, memory_bytes(data, data.shape[0]).view(-1, rows, cols), layout, (n, k), warps
    )


ROUTINES: dict[str, Callable[..., Any]] = {
    **{name: partial(call, name) for name in HOME if name != "_swizzle_mxfp4"},
    "reorder_w13_to_w31_for_flashinfer_cutedsl": reorder_w13_to_w31_for_flashinfer_cutedsl,
    "prepare_nvfp4_moe_layer_for_flashinfer_cutedsl": _cutedsl_layer,
    "amax_for_moe_activation_quant": amax_for_moe_activation_quant,
    "nvfp4_block_scale_interleave": nvfp4_block_scale_interleave,
    "downcast_to_mxfp": downcast_to_mxfp,
    "swizzle_mxfp4": swizzle_mxfp4,
}


def _first(name: str, x: T, *args: Any) -> T:
    """A routine of (weight, scale) on the weight alone."""
    moved: T = ROUTINES[name](*args, x.clone(), x.clone())[0]
    return moved


def _group(size: int, x: T) -> T:
    mixed: T = call("interleave_linear_and_gate", x, size, 1)
    return mixed


def _e4m3(x: T) -> T:
    swizzled: T = call("swizzle_blockscale", x.view(torch.float8_e4m3fn))
    return swizzled.view(torch.uint8)


def _cutedsl(x: T) -> T:
    return _group(64, _first(_TO_W31, x, "silu"))


_TO_W31 = "reorder_w13_to_w31_for_flashinfer_cutedsl"
_FUNCTIONS: dict[str, Callable[[T], T]] = {
    "w13_to_w31": partial(_first, "reorder_w1w3_to_w3w1"),
    "w13_interleaved_to_w31": lambda x: _first(_TO_W31, x, "swigluoai"),
    "gate_up_interleave_8": partial(_group, 8),
    "gate_up_interleave_16": partial(_group, 16),
    "gate_up_interleave_64": partial(_group, 64),
    "block_scale_128x4": _e4m3,
    "cutedsl_w13": _cutedsl,
    "cutedsl_w13_scale": lambda x: _e4m3(_cutedsl(x)),
}  # fmt: skip
LAYOUTS: dict[str, Callable[[T], T]] = {
    name: lambda x, function=function: memory_bytes(function(x), x.shape[0])  # type: ignore[misc]
    for name, function in _FUNCTIONS.items()
}
