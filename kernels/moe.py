"""The reference MoE forward: what a model computes, in fp32 or fp64, to judge a prepared layer by.

`dense` turns checkpoint weights into plain matrices; `readback.dense_from_prepared` gives the same
value type from a prepared layer, read as its consumer addresses it. `forward` computes on either:

    out[t] = sum over the token's top-k experts of p * (W2 act(W1 x + b1, W3 x + b3) + b2)

with p the softmax over the k chosen logits. Ranks of tensor parallelism give partial outputs that
sum to the layer's (w2_bias on rank 0 only); ranks of expert parallelism give outputs of their
experts, which sum too. `forward` also returns a bound on its own rounding error, so that two orders
of summation can be compared without a chosen tolerance.

Activations follow vLLM (fused_moe/activation.py, layers/activation.py); swigluoai is gpt-oss's:
gate clipped at 7, up at -7 and 7, gate * sigmoid(1.702 * gate) * (up + 1) (gpt-oss torch/model.py
`swiglu`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from einops import rearrange

from kernels import activations, formats
from kernels.errors import LayoutError
from kernels.weights import MoEWeights

ALPHA, LIMIT = 1.702, 7.0
Tensor = torch.Tensor


@dataclass(frozen=True)
class Dense:
    """A layer as matrices of one floating dtype: gate and up [E, I, H] (gate None without one),
    down [E, H, I], biases [E, I] and [E, H] or None, activation scales (one number) or None."""

    gate: Tensor | None
    up: Tensor
    down: Tensor
    gate_bias: Tensor | None
    up_bias: Tensor | None
    down_bias: Tensor | None
    a13_scale: Tensor | None
    a2_scale: Tensor | None
    activation: str

    def matrices(self) -> dict[str, Tensor]:
        """Every tensor present, by name."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}


@dataclass(frozen=True)
class Act:
    """act(g, u) = f(g) * k(u); without a gate f(u). slope bounds |f'|; |k'| is at most 1."""

    f: Callable[[Tensor], Tensor]
    k: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]


def _same(u: Tensor) -> Tensor:
    return u


def _clip(u: Tensor) -> Tensor:
    return u.clamp(-LIMIT, LIMIT)


def _up_to(bound: float) -> Callable[[Tensor], Tensor]:
    return lambda g: torch.full_like(g, bound)


_oai = Act(
    lambda g: g.clamp(max=LIMIT) * torch.sigmoid(ALPHA * g.clamp(max=LIMIT)),
    lambda u: _clip(u) + 1,
    _up_to(1.1),
)
_relu2 = Act(lambda g: F.relu(g).square(), _same, lambda g: 2 * F.relu(g))
# The slopes are the suprema of |f'|: silu 1.0998, gelu 1.1290, rounded up.
ACTS: dict[str, Act] = {
    "silu": Act(F.silu, _same, _up_to(1.1)),
    "gelu": Act(F.gelu, _same, _up_to(1.13)),
    "gelu_tanh": Act(lambda g: F.gelu(g, approximate="tanh"), _same, _up_to(1.13)),
    "relu2": _relu2,
    "swigluoai": _oai,
    "swigluoai_uninterleave": _oai,
    "swiglustep": Act(lambda g: F.silu(g).clamp(max=LIMIT), _clip, _up_to(1.1)),
}


def act(activation: str) -> Act:
    """The function of an activation; `_no_mul` names share that of their gated form."""
    name = activations.find(activation).name
    return ACTS[name.removesuffix("_no_mul")]


def dense(weights: MoEWeights, dtype: torch.dtype = torch.float64) -> Dense:
    """Checkpoint weights as matrices. Exact in fp64; in fp32 an NVFP4 global scale rounds once."""
    w13 = decode(weights.w13_weight, weights.w13_scale, weights.format, dtype)
    w2 = decode(weights.w2_weight, weights.w2_scale, weights.format, dtype)
    rows = "pairs" if weights.interleaved else "gate|up"
    gate, up = split_rows(w13, rows, weights.gated)
    gate_bias, up_bias = split_bias(weights.w13_bias, rows, weights.gated, dtype)
    gate_2, up_2 = global_scales(weights.w13_scale_2, dtype)
    _, down_2 = global_scales(weights.w2_scale_2, dtype)
    return Dense(
        gate=None if gate is None else gate * gate_2, up=up * up_2, down=w2 * down_2,
        gate_bias=gate_bias, up_bias=up_bias,
        down_bias=None if weights.w2_bias is None else weights.w2_bias.to(dtype),
        a13_scale=_amax(weights.a13_scale, dtype), a2_scale=_amax(weights.a2_scale, dtype),
        activation=weights.activation,
    )  # fmt: skip


def _amax(scale: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if scale is None else scale.max().to(dtype)


def decode(codes: Tensor, scale: Tensor | None, form: str, dtype: torch.dtype) -> Tensor:
    """Packed codes [E, N, K/2] and block scales -> [E, N, K], without a global scale; exact."""
    if form == "bf16":
        return codes.to(dtype)
    if scale is None:
        raise LayoutError(f"codes {tuple(codes.shape)} of {form} have no block scales")
    if form == "nvfp4":
        return formats.dequantize_nvfp4(codes, scale).to(dtype)
    return formats.dequantize_mxfp4(codes, scale).to(dtype)


def split_rows(x: Tensor, rows: str, gated: bool) -> tuple[Tensor | None, Tensor]:
    """(gate, up) along axis 1 as `rows` orders them; (None, x) without a gate."""
    if not gated:
        return None, x
    half = x.shape[1] // 2
    first, second = (x[:, 0::2], x[:, 1::2]) if rows == "pairs" else (x[:, :half], x[:, half:])
    return (second, first) if rows == "up|gate" else (first, second)


def split_bias(
    bias: Tensor | None, rows: str, gated: bool, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """`split_rows` of a bias [E, rows] that may be absent."""
    return (None, None) if bias is None else split_rows(bias.to(dtype), rows, gated)


def global_scales(scale_2: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The global scale of gate and of up as [E, 1, 1], from [E], [E, 2] or None (then 1)."""
    if scale_2 is None:
        one = torch.ones((), dtype=dtype)
        return one, one
    both = scale_2.to(dtype) if scale_2.ndim == 2 else scale_2.to(dtype)[:, None].expand(-1, 2)
    return both[:, 0, None, None], both[:, 1, None, None]


def route(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """[T, E] router logits -> (expert ids [T, k], probabilities [T, k], softmax over the k)."""
    if not 1 <= top_k <= logits.shape[-1]:
        raise LayoutError(f"route: top_k={top_k} of {logits.shape[-1]} experts")
    values, ids = logits.topk(top_k, dim=-1)
    return ids, values.softmax(dim=-1)


def forward(
    layer: Dense,
    x: Tensor,
    ids: Tensor,
    probs: Tensor,
    *,
    expert_start: int = 0,
    quantize_activations: bool = False,
) -> tuple[Tensor, Tensor]:
    """x [T, H] in the layer's dtype -> (out [T, H], bound [T, H] on the rounding error of out).

    ids, probs [T, k] over all experts; this layer holds those from `expert_start` on. With
    `quantize_activations` x and the activation are rounded to NVFP4 under a13_scale and a2_scale
    first, as a W4A4 kernel does; the bound then holds only for equal roundings.
    """
    function = act(layer.activation)
    out, bound = torch.zeros_like(x), torch.zeros_like(x)
    unit = torch.finfo(x.dtype).eps
    gamma = unit * (layer.up.shape[-1] + layer.up.shape[-2] + ids.shape[-1] + 16)
    for e in range(layer.up.shape[0]):
        token, slot = (ids == e + expert_start).nonzero(as_tuple=True)
        if not token.numel():
            continue
        xe, p = x[token], probs[token, slot, None].to(x.dtype)
        if quantize_activations and layer.a13_scale is not None:
            xe = fake_quant_nvfp4(xe, layer.a13_scale)
        hidden, drift = _hidden(layer, function, xe, e)
        if quantize_activations and layer.a2_scale is not None:
            hidden = fake_quant_nvfp4(hidden, layer.a2_scale)
        y, y_abs = _linear(hidden, layer.down[e], layer.down_bias, e)
        out.index_add_(0, token, p * y)
        bound.index_add_(0, token, p * gamma * (drift @ layer.down[e].abs().T + y_abs))
    return out, bound


def _hidden(layer: Dense, function: Act, x: Tensor, e: int) -> tuple[Tensor, Tensor]:
    """(act(gate, up) of expert e, what its rounding error scales with)."""
    up, up_abs = _linear(x, layer.up[e], layer.up_bias, e)
    if layer.gate is None:
        hidden = function.f(up)
        return hidden, function.slope(up) * up_abs + hidden.abs()
    gate, gate_abs = _linear(x, layer.gate[e], layer.gate_bias, e)
    value, factor = function.f(gate), function.k(up)
    hidden = value * factor
    drift = function.slope(gate) * gate_abs * factor.abs() + value.abs() * up_abs
    return hidden, drift + hidden.abs()


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, e: int) -> tuple[Tensor, Tensor]:
    """(x W^T + b, |x| |W|^T + |b|): a product and the sum its rounding error scales with."""
    value, size = x @ weight.T, x.abs() @ weight.abs().T
    return (value, size) if bias is None else (value + bias[e], size + bias[e].abs())


def fake_quant_nvfp4(x: Tensor, a_scale: Tensor) -> Tensor:
    """x [T, K] rounded to NVFP4 under the global activation scale: amax / (6 * 448) of calibration.

    Per block of 16: scale = e4m3(amax / 6 / a_scale), codes = e2m1(x / (scale * a_scale)); K is
    padded with zeros to whole blocks. Source: flashinfer fp4_quantization.py, nvfp4_quantize.
    """
    k = x.shape[-1]
    blocks = rearrange(F.pad(x, (0, -k % 16)), "t (g b) -> t g b", b=16)
    amax = blocks.abs().amax(-1, keepdim=True)
    step = formats.decode_e4m3(formats.encode_e4m3(amax / 6 / a_scale)).to(x.dtype) * a_scale
    codes = formats.encode_e2m1(blocks / step.where(step > 0, torch.ones_like(step)))
    return (formats.decode_e2m1(codes).to(x.dtype) * step).flatten(-2)[..., :k]
