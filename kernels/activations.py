"""The MoE activations, as far as weight preparation cares: has w13 a gate half, and how its rows
come.

Names are vLLM's (`MoEActivation` values). What each computes is in `moe.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from kernels.errors import LayoutError


@dataclass(frozen=True)
class Activation:
    """gated: w13 holds gate and up rows. interleaved: they come as gate0, up0, gate1, up1, ..."""

    name: str
    gated: bool = True
    interleaved: bool = False


ACTIVATIONS: dict[str, Activation] = {
    a.name: a
    for a in (
        Activation("silu"),
        Activation("gelu"),
        Activation("gelu_tanh"),
        Activation("relu2"),
        Activation("swigluoai", interleaved=True),
        Activation("swigluoai_uninterleave"),
        Activation("swiglustep"),
        Activation("silu_no_mul", gated=False),
        Activation("gelu_no_mul", gated=False),
        Activation("gelu_tanh_no_mul", gated=False),
        Activation("relu2_no_mul", gated=False),
    )
}


def find(activation: object) -> Activation:
    """An activation by name, or by an enum member whose value is the name (as vLLM passes it)."""
    if isinstance(activation, Activation):
        return activation
    name = str(getattr(activation, "value", activation)).lower()
    if name not in ACTIVATIONS:
        raise LayoutError(f"unknown MoE activation {name!r}; known: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]
