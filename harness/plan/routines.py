"""Every routine of `kernels` as a path of its own: `path=swizzle_blockscale`.

The table is literal: how a routine is called on a rank's share of a layer, and what must come out,
which is a layout of a matrix, or values that are worked out in another way in `expected`. The
names are what config lists; nothing here imports torch. `mxfp4_quantize` is missing: the layer
path of that name runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness.run.share import Share


@dataclass(frozen=True)
class Want:
    """What one result must be: `layout` of `source` [E, n, k], or `rows(list of rows)` of values.

    pad_k: k of the source is padded to this multiple before the layout (sm90 scale groups).
    """

    name: str
    source: Any
    layout: str | None = None
    rows: Callable[[Any], Any] | None = None
    pad_k: int = 1


@dataclass(frozen=True)
class Call:
    """One call: its arguments, and what each result must be, in the order of the results."""

    args: Sequence[Any]
    wants: Sequence[Want]
    kwargs: dict[str, Any] = field(default_factory=dict)
    unpack: Callable[[Any], Sequence[Any]] = lambda x: x if isinstance(x, tuple) else (x,)


@dataclass(frozen=True)
class Routine:
    """format: of the layer it is tried on. calls: on a share. promise: `new` memory, `in_place`, a
    `view` of its input, or `either` (the input itself where there is nothing to do). gated: it
    needs a gate. source: where its contract is published."""

    source: str
    format: str
    calls: Callable[[Share], list[Call]]
    promise: str = "new"
    gated: bool = False


_FI = "vllm quantization/utils/flashinfer_fp4_moe.py"
_NV = "vllm quantization/utils/nvfp4_utils.py"
_MX = "vllm quantization/utils/mxfp4_utils.py"
_FQ = "flashinfer fp4_quantization.py"
_OCP = "OCP Microscaling Formats v1.0, section 5"


def _each(
    names: str, layout: str, kwargs: dict[str, Any] | None = None
) -> Callable[[Share], list[Call]]:
    """One call for each tensor, whose one result is a layout of it."""
    return lambda s: [
        Call((s[name],), (Want(name, s[name], layout),), kwargs or {}) for name in names.split()
    ]


def _reorder(s: Share) -> list[Call]:
    kept = {name: s[name].clone() for name in ("w13_weight", "w13_scale")}
    wants = [Want(name, kept[name], "w13_to_w31") for name in kept]
    return [Call((s["w13_weight"], s["w13_scale"]), wants)]


def _w31(s: Share) -> list[Call]:
    layout = "w13_interleaved_to_w31" if s.interleaved else "w13_to_w31"
    wants = [Want(name, s[name], layout) for name in ("w13_weight", "w13_scale")]
    return [Call((s.activation, s["w13_weight"], s["w13_scale"]), wants)]


def _flat_scales(s: Share) -> list[Call]:
    return [
        Call((s.bytes(name),), (Want(name, s.bytes(name), "block_scale_128x4"),))
        for name in ("w13_scale", "w2_scale")
    ]


def _mma_view(s: Share) -> list[Call]:
    return [
        Call((s.swizzled(name),), (Want(name, s.bytes(name), "cutedsl_mma_view"),))
        for name in ("w13_scale", "w2_scale")
    ]


def _amax(s: Share) -> list[Call]:
    return [
        Call((s[n], False), (Want(n, None, rows=s.expected("amax", s[n])),))
        for n in ("a13_scale", "a2_scale")
    ]


def _cutedsl(s: Share) -> list[Call]:
    names = ("w13_weight", "w13_scale", "w13_scale_2", "a13_scale",
             "w2_weight", "w2_scale", "w2_scale_2", "a2_scale")  # fmt: skip
    rows, scale = (
        ("cutedsl_w13", "cutedsl_w13_scale") if s.gated else ("strided", "cutedsl_mma_view")
    )
    layouts = {"w13_weight": rows, "w13_scale": scale, "w2_weight": "strided",
               "w2_scale": "cutedsl_mma_view"}  # fmt: skip
    padded = s.padded(64 if s.gated else 128, 256)
    wants = [
        Want(n, padded[n], layouts[n]) if n in layouts
        else Want(n, None, rows=s.expected("shared" if n.startswith("a") else "same", s[n]))
        for n in names
    ]  # fmt: skip
    layer = SimpleNamespace(activation=s.separated, moe_config=None)
    return [Call((layer, *(s.plain(n) for n in names)), wants)]


def _trtllm(s: Share) -> list[Call]:
    first = (
        ("trtllm_w13", "trtllm_w13_scale") if s.gated else ("trtllm_shuffle_32", "trtllm_w2_scale")
    )
    layouts = dict(zip(
        ("w13_weight", "w13_scale", "w2_weight", "w2_scale"),
        (*first, "trtllm_shuffle_32", "trtllm_w2_scale"), strict=True,
    ))  # fmt: skip
    p = {name: s.plain(name) for name in layouts}
    args = (p["w13_weight"], p["w2_weight"], p["w13_scale"], p["w2_scale"],
            s.hidden, s.intermediate, s.experts, s.gated)  # fmt: skip
    return [Call(args, [Want(name, p[name], layout) for name, layout in layouts.items()])]


def _align(hidden: bool) -> Callable[[Share], list[Call]]:
    def calls(s: Share) -> list[Call]:
        names = ("w13_weight", "w13_scale", "w2_weight", "w2_scale")
        padded = s.padded(1, 256) if hidden else s.padded(64, 1)
        wants = [Want(name, padded[name], "strided") for name in names]
        more = (256,) if hidden else (s.gated, 64)
        args = (*(s.plain(name) for name in names), *more)
        return [Call(args, wants, unpack=lambda result: result[:4])]

    return calls


def _swizzle_mxfp4(s: Share) -> list[Call]:
    out = []
    for w in ("w13", "w2"):
        value, scale = s[f"{w}_weight"], s[f"{w}_scale"]
        wants = (Want(f"{w}_weight", value, s.choice.value.name),
                 Want(f"{w}_scale", scale, s.choice.scale.name, pad_k=s.choice.scale_pad_k),
                 )  # fmt: skip
        kwargs = {"target": s.target, "tp_size": s.tp_size, "generation": s.generation}
        out.append(Call((value, scale, s.num_warps), wants, kwargs,
                        unpack=lambda r: (r.value.storage, r.scale.storage)))  # fmt: skip
    return out


def _downcast(s: Share) -> list[Call]:
    return [
        Call((x, x.ndim - 1), (Want(f"{w}_weight", None, rows=s.expected("mxfp4_codes", x)),
                               Want(f"{w}_scale", None, rows=s.expected("mxfp4_scale", x))),
             unpack=lambda r: r[:2])
        for w, x in (("w13", s["w13_weight"]), ("w2", s["w2_weight"]))
    ]  # fmt: skip


def _dequantize(form: str) -> Callable[[Share], list[Call]]:
    return lambda s: [
        Call((s[f"{w}_weight"], s[f"{w}_scale"]), (Want(
            f"{w}_weight", None,
            rows=s.expected(f"{form}_values", s[f"{w}_weight"], s.bytes(f"{w}_scale")),
        ),))
        for w in ("w13", "w2")
    ]  # fmt: skip


def _pack(s: Share) -> list[Call]:
    return [
        Call((s.codes(n),), (Want(n, None, rows=s.expected("same", s[n])),))
        for n in ("w13_weight", "w2_weight")
    ]


def _unpack(s: Share) -> list[Call]:
    return [
        Call((s[n],), (Want(n, None, rows=s.expected("codes", s[n])),))
        for n in ("w13_weight", "w2_weight")
    ]


ROUTINES: dict[str, Routine] = {
    "reorder_w1w3_to_w3w1": Routine(_FI, "nvfp4", _reorder, "in_place", gated=True),
    "reorder_w13_to_w31_for_flashinfer_cutedsl": Routine(_FI, "nvfp4", _w31, gated=True),
    "interleave_linear_and_gate": Routine(
        _FI, "nvfp4",
        _each("w13_weight w13_scale", "gate_up_interleave_64", {"group_size": 64, "dim": 1}),
        gated=True,
    ),
    "shuffle_rows_for_trtllm": Routine(
        f"{_FQ} shuffle_matrix_a", "nvfp4",
        _each("w13_weight w2_weight", "trtllm_shuffle_32"),
    ),
    "swizzle_blockscale": Routine(_NV, "nvfp4", _each("w13_scale w2_scale", "block_scale_128x4")),
    "nvfp4_block_scale_interleave": Routine(_FQ, "nvfp4", _flat_scales),
    "nvfp4_swizzled_scale_to_cutedsl_mma_view": Routine(_FI, "nvfp4", _mma_view, "view"),
    "amax_for_moe_activation_quant": Routine(_FI, "nvfp4", _amax),
    "prepare_nvfp4_moe_layer_for_flashinfer_cutedsl": Routine(_FI, "nvfp4", _cutedsl, "either"),
    "prepare_static_weights_for_trtllm_fp4_moe": Routine(_FI, "nvfp4", _trtllm),
    "align_fp4_moe_weights_for_fi": Routine(_FI, "nvfp4", _align(hidden=False), "either"),
    "align_fp4_moe_hidden_dim_for_fi": Routine(_FI, "nvfp4", _align(hidden=True), "either"),
    "swizzle_mxfp4": Routine(_MX, "mxfp4", _swizzle_mxfp4, "either"),
    "downcast_to_mxfp": Routine("triton_kernels numerics_details/mxfp.py", "bf16", _downcast),
    "dequantize_mxfp4": Routine(_OCP, "mxfp4", _dequantize("mxfp4")),
    "dequantize_nvfp4": Routine(
        "NVIDIA NVFP4: e2m1 in blocks of 16, e4m3 scales, one fp32 scale", "nvfp4",
        _dequantize("nvfp4"),
    ),
    "pack_e2m1": Routine(f"{_OCP}.3.3", "mxfp4", _pack),
    "unpack_e2m1": Routine(f"{_OCP}.3.3", "mxfp4", _unpack),
}  # fmt: skip
