"""What `python -m harness bench` runs: every fused routine at the shapes that its speed is judged
at.

A case builds its inputs on a device and gives the call. `bar` is the least share of a device copy
of the same number of bytes that the fused routine has to reach on an H200 with a cold cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch

from kernels.activations import find
from kernels.pads import FORMAT
from kernels.weights import WEIGHTS, MoEWeights, checkpoint_shapes

T = torch.Tensor
E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Case:
    """routine(*args(tensors), **kwargs). shapes: of the inputs, uint8 unless `dtypes` says
    otherwise.

    name: the routine and what sets this case apart. in_place: inputs are the outputs. reads: how
    often each input has to be read, where it is more than once: it does not fit in the cache.
    target: of a case whose routine is a path: whose layouts rank 0 of tp_size prepares, which need
    not be the device's; the one argument is then the layer.
    """

    name: str
    routine: str
    model: str
    shapes: dict[str, tuple[int, ...]]
    bar: float
    args: Callable[[dict[str, T]], tuple[Any, ...]]
    kwargs: dict[str, Any]
    dtypes: dict[str, torch.dtype]
    in_place: bool = False
    hw: str = "h200"
    tp_size: int = 1
    reads: int = 1
    target: str = ""

    @property
    def experts(self) -> int:
        return next(iter(self.shapes.values()))[0]


def _case(
    name: str, routine: str, model: str, bar: float, shapes: Mapping[str, tuple[int, ...]],
    args: Callable[[dict[str, T]], tuple[Any, ...]] | None = None, *,
    in_place: bool = False, hw: str = "h200", tp_size: int = 1,
    dtypes: dict[str, torch.dtype] | None = None, reads: int = 1, **kwargs: Any,
) -> Case:  # fmt: skip
    every = args or (lambda t: tuple(t.values()))
    return Case(
        name, routine, model, dict(shapes), bar, every, kwargs, dtypes or {}, in_place, hw, tp_size,
        reads,
    )  # fmt: skip


def _trtllm(e: int, h: int, i: int, bar: float, model: str, tp_size: int) -> Case:
    shapes = {
        "w13": (e, 2 * i, h // 2), "w2": (e, h, i // 2),
        "s13": (e, 2 * i, h // 16), "s2": (e, h, i // 16),
    }  # fmt: skip
    return _case(
        f"prepare_trtllm E={e} H={h} I={i}", "prepare_static_weights_for_trtllm_fp4_moe", model,
        bar, shapes, lambda t: (*t.values(), h, i, len(t["w13"]), True), tp_size=tp_size,
    )  # fmt: skip


def _cutedsl(e: int, h: int, i: int, bar: float, model: str, tp_size: int) -> Case:
    shapes = {
        "w13": (e, 2 * i, h // 2), "s13": (e, 2 * i, h // 16),
        "w2": (e, h, i // 2), "s2": (e, h, i // 16), "one": (e,),
    }  # fmt: skip
    dtypes = {"s13": E4M3, "s2": E4M3, "one": torch.float32}
    layer = SimpleNamespace(activation="silu")
    return _case(
        f"prepare_cutedsl E={e} H={h} I={i}", "prepare_nvfp4_moe_layer_for_flashinfer_cutedsl",
        model, bar, shapes,
        lambda t: (layer, *(t[n] for n in ("w13", "s13", "one", "one", "w2", "s2", "one", "one"))),
        dtypes=dtypes, tp_size=tp_size,
    )  # fmt: skip


def _layout(name: str, layout: str, bar: float, shape: tuple[int, ...], **more: Any) -> Case:
    """The MXFP4 routine `swizzle` with one layout of the catalog."""
    from kernels.catalog import LAYOUTS

    model = "gpt_oss_120b"
    args = lambda t: (t["x"], LAYOUTS[layout])
    return _case(name, "swizzle", model, bar, {"x": shape}, args, **more)


def _downcast(
    shape: tuple[int, ...], axis: int, dtype: torch.dtype = torch.bfloat16, name: str = ""
) -> Case:
    name = name or "downcast_to_mxfp " + "x".join(map(str, shape))
    name += (" axis 1" if axis == 1 else "") + ("" if dtype == torch.bfloat16 else " fp16")
    model = _R1 if shape[1] == 2048 else _OSS
    return _case(
        name, "downcast_to_mxfp", model, 0.90, {"x": shape}, dtypes={"x": dtype}, axis=axis
    )


def _nvfp4(dtype: torch.dtype, computed: bool = False) -> Case:
    """quantize_nvfp4 with a global scale given, or worked out, for which all is read first."""
    shapes: dict[str, tuple[int, ...]] = {"x": (128, 2048, 7168), "scale": (128,)}
    name = "quantize_nvfp4" + ("" if dtype == torch.bfloat16 else " fp16")
    dtypes = {"x": dtype, "scale": torch.float32}
    if computed:
        del shapes["scale"]
        return _case(
            name + " computed scale", "quantize_nvfp4", _R1, 0.90, shapes, dtypes=dtypes, reads=2
        )
    return _case(name, "quantize_nvfp4", _R1, 0.90, shapes, dtypes=dtypes)


def _layer(
    path: str, model: str, h: int, i: int, tp_size: int, bar: float, two: bool = False
) -> Case:
    """A whole layer of 32 experts on a rank, from the unsharded checkpoint. two: gate's and up's
    global scales differ."""
    form, activation = FORMAT[path], find("swigluoai" if model == _OSS else "silu")
    every = checkpoint_shapes(32, h, i, 2, form)
    shapes = {name: every[name] for name in WEIGHTS if name in every}
    if form == "nvfp4":
        shapes |= dict.fromkeys(("w13_scale_2", "w2_scale_2", "a13_scale", "a2_scale"), (32,))
        shapes |= {"w13_scale_2": (32, 2)} if two else {}
    absent: dict[str, Any] = dict.fromkeys(set(WEIGHTS) - set(every))
    dtypes = {name: torch.float32 for name, shape in shapes.items() if len(shape) < 3}
    if form == "nvfp4":
        dtypes |= {"w13_scale": E4M3, "w2_scale": E4M3}
    elif form == "bf16":
        dtypes = dict.fromkeys(shapes, torch.bfloat16)
    case = _case(
        f"{path} {model} TP {tp_size}" + (", two global scales" if two else ""), path, model, bar,
        shapes,
        lambda t: (MoEWeights(**t, **absent, format=form, activation=activation.name,
                              interleaved=activation.interleaved),),
        dtypes=dtypes, tp_size=tp_size,
    )  # fmt: skip
    return replace(case, target="sm100" if form == "nvfp4" else "sm90")


_W13, _MX13, _NV13 = (128, 5760, 1440), (128, 5760, 90), (128, 5760, 180)
_OSS, _R1, _QWEN = "gpt_oss_120b", "deepseek_r1_nvfp4", "qwen3_235b"

CASES: tuple[Case, ...] = (
    _case("reorder_w1w3_to_w3w1 (in place)", "reorder_w1w3_to_w3w1", _OSS, 0.95,
          {"w": _W13, "s": _MX13}, in_place=True),
    _case("reorder_w13_to_w31 plain", "reorder_w13_to_w31_for_flashinfer_cutedsl", _OSS, 0.95,
          {"w": _W13, "s": _MX13}, lambda t: ("silu", *t.values())),
    _case("reorder_w13_to_w31 swigluoai", "reorder_w13_to_w31_for_flashinfer_cutedsl", _OSS, 0.95,
          {"w": _W13, "s": _MX13}, lambda t: ("swigluoai", *t.values())),
    _case("interleave_linear_and_gate", "interleave_linear_and_gate", _OSS, 0.95,
          {"w": _W13}, group_size=64, dim=1),
    _case("shuffle_rows_for_trtllm w13", "shuffle_rows_for_trtllm", _R1, 0.95,
          {"w": (64, 4096, 3584)}),
    _case("shuffle_rows_for_trtllm tp8 w2", "shuffle_rows_for_trtllm", _R1, 0.85,
          {"w": (256, 7168, 128)}, tp_size=8),
    _case("swizzle_blockscale", "swizzle_blockscale", _OSS, 0.90, {"s": _NV13}, dtypes={"s": E4M3}),
    _case("swizzle_blockscale R1 w13", "swizzle_blockscale", _R1, 0.90, {"s": (64, 4096, 448)},
          dtypes={"s": E4M3}),
    _case("swizzle_blockscale tp8 w2", "swizzle_blockscale", _R1, 0.70, {"s": (256, 7168, 16)},
          dtypes={"s": E4M3}, tp_size=8),
    _cutedsl(128, 2880, 2880, 0.90, _OSS, 1),
    _cutedsl(256, 7168, 256, 0.80, _R1, 8),
    _trtllm(64, 7168, 2048, 0.90, _R1, 1),
    _trtllm(256, 7168, 256, 0.80, _R1, 8),
    _trtllm(128, 4096, 384, 0.80, _QWEN, 4),
    _layer("nvfp4_trtllm", _R1, 7168, 2048, 1, 0.90),
    _layer("nvfp4_trtllm", _R1, 7168, 2048, 8, 0.70),
    _layer("nvfp4_trtllm", _R1, 7168, 2048, 1, 0.80, two=True),
    _layer("nvfp4_cutedsl", _OSS, 2880, 2880, 1, 0.90),
    _layer("nvfp4_cutedsl", _OSS, 2880, 2880, 4, 0.75),
    _layer("nvfp4_cutlass", _QWEN, 4096, 1536, 4, 0.75),
    *(_layer("mxfp4_quantize", _OSS, 2880, 2880, tp_size, 0.5) for tp_size in (1, 2, 8)),
    _layer("mxfp4_quantize", _QWEN, 4096, 1536, 2, 0.5),
    _layout("Hopper value", "hopper_value_v3", 0.90, _W13),
    _layout("Hopper scale, 8 warps", "hopper_scale_w8", 0.80, _MX13),
    _layout("Hopper scale, 4 warps", "hopper_scale_w4", 0.80, _MX13),
    _layout("Hopper value tp8", "hopper_value_v3", 0.80, (128, 768, 1440), tp_size=8),
    _layout("Hopper scale tp8", "hopper_scale_w8", 0.70, (128, 768, 90), tp_size=8),
    _layout("Blackwell value", "blackwell_value", 0.95, _W13, hw="b200"),
    _layout("Blackwell scale", "blackwell_scale", 0.80, _MX13, hw="b200"),
    _layout("CDNA4 scale", "cdna4_scale", 0.80, (128, 5760, 96), hw="gfx950"),
    _layout("gfx1250 scale", "gfx1250_scale", 0.80, _MX13, hw="gfx1250"),
    *(_downcast((128, 2048, 7168), axis, dtype)
      for axis in (2, 1) for dtype in (torch.bfloat16, torch.float16)),
    _downcast((16, 5760, 2880), 2),
    _downcast((16, 5760, 2880), 1, name="downcast_to_mxfp"),
    _nvfp4(torch.bfloat16), _nvfp4(torch.float16), _nvfp4(torch.bfloat16, computed=True),
)  # fmt: skip


def inputs(case: Case, device: torch.device) -> dict[str, T]:
    """Random bytes by a fixed seed; normal values where a case asks for floats; fp32 scales are 1,
    of two columns the second .7."""
    generator = torch.Generator(device).manual_seed(sum(case.name.encode()))
    made = {}
    for name, shape in case.shapes.items():
        dtype = case.dtypes.get(name, torch.uint8)
        if dtype == torch.float32:
            made[name] = torch.ones(shape, device=device)
            if len(shape) == 2:
                made[name][:, 1] = 0.7
        elif dtype.is_floating_point and dtype != E4M3:
            made[name] = torch.randn(shape, generator=generator, device=device).to(dtype)
        else:
            drawn = torch.randint(
                0, 256, shape, generator=generator, device=device, dtype=torch.uint8
            )
            made[name] = drawn.view(dtype)
    return made


def tensors(value: Any) -> list[T]:
    """The tensors of a result, with a swizzled one's storage for its view."""
    if isinstance(value, T):
        return [value]
    if hasattr(value, "storage"):
        return [value.storage]
    if isinstance(value, (tuple, list)):
        return [t for item in value for t in tensors(item)]
    return []
