"""Values worked out the plain way, to check routines whose result is no layout of their input.

Slow and literal on purpose: decimal tables, float64, nearest by distance. Nothing here is shared
with `kernels`, so an error there is not repeated here. Each function gives, for a tensor, a
function of row numbers (along the last but one axis) to the values of those rows, so that a large
tensor is sampled.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

T = torch.Tensor
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # e2m1, OCP MX v1.0 table 5
Rows = Callable[[T], T]


def rows_of(kind: str, *tensors: T) -> Rows:
    """The expected rows of one kind of result; `kind` is a key of the table below."""
    return lambda rows: _KINDS[kind](rows, *tensors)


def codes(packed: T) -> T:
    """Bytes [..., n] -> codes [..., 2n], the low nibble first."""
    return torch.stack([packed % 16, packed // 16], dim=-1).flatten(-2)


def values(code: T) -> T:
    """e2m1 codes -> float64."""
    table = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)], dtype=torch.float64)
    return table[code.long()]


def e8m0(byte: T) -> T:
    """Bytes -> float64: 2^(b - 127), 255 is NaN."""
    power = torch.pow(torch.tensor(2.0, dtype=torch.float64), byte.double() - 127)
    return torch.where(byte == 255, torch.nan, power)


def e4m3(byte: T) -> T:
    """e4m3fn bytes -> float64, from sign, exponent (bias 7) and mantissa."""
    byte = byte.long()
    exponent, mantissa = byte >> 3 & 15, (byte & 7).double() / 8
    normal = torch.pow(torch.tensor(2.0, dtype=torch.float64), exponent.double() - 7) * (
        1 + mantissa
    )
    size = torch.where(exponent == 0, mantissa * 2.0**-6, normal)
    size = torch.where(byte & 127 == 127, torch.nan, size)
    return torch.where(byte >= 128, -size, size)


def mxfp4(x: T) -> tuple[T, T]:
    """[..., L] of whole or short blocks of 32 -> (codes [..., L], e8m0 bytes [..., ceil(L/32)]).

    Scale rounding `even`: the largest magnitude as fp32 plus 2^21 in its bits (a quarter of the
    binade up, so 1.75 and more go up), its exponent less 2. Elements: nearest by distance, ties to
    the even code.
    """
    length = x.shape[-1]
    blocks = torch.nn.functional.pad(x.float(), (0, -length % 32)).unflatten(-1, (-1, 32))
    amax = blocks.abs().amax(-1)
    exponent = ((amax.view(torch.int32) + 0x200000) >> 23 & 0xFF) - 2
    byte = exponent.clamp(0, 254).to(torch.uint8)
    size = (blocks.double() / e8m0(byte)[..., None]).abs()
    code = torch.zeros_like(size, dtype=torch.uint8)
    for lower in range(7):  # halfway to the next magnitude goes up only where that code is even
        halfway = (MAGNITUDES[lower] + MAGNITUDES[lower + 1]) / 2
        code += size >= halfway if lower % 2 else size > halfway
    code += torch.signbit(blocks) * torch.tensor(8, dtype=torch.uint8)
    return code.flatten(-2)[..., :length], byte


def _packed(code: T) -> T:
    low, high = code.unflatten(-1, (-1, 2)).unbind(-1)
    return (low + high * 16).to(torch.uint8)


def _scaled(rows: T, packed: T, scale: T, block: int, decode: Callable[[T], T]) -> T:
    value = values(codes(packed[:, rows]))
    factor = decode(scale[:, rows]).repeat_interleave(block, -1)[..., : value.shape[-1]]
    return (value * factor).float()


_KINDS: dict[str, Callable[..., T]] = {
    "same": lambda rows, x: x[:, rows] if x.ndim > 2 else x,
    "amax": lambda rows, x: torch.tensor(max(x.flatten().tolist()), dtype=torch.float32),
    "shared": lambda rows, x: torch.full((len(x),), max(x.flatten().tolist()), dtype=torch.float32),
    "codes": lambda rows, packed: codes(packed[:, rows]),
    "mxfp4_codes": lambda rows, x: _packed(mxfp4(x[:, rows])[0]),
    "mxfp4_scale": lambda rows, x: mxfp4(x[:, rows])[1],
    "mxfp4_values": lambda rows, packed, scale: _scaled(rows, packed, scale, 32, e8m0),
    "nvfp4_values": lambda rows, packed, scale: _scaled(rows, packed, scale, 16, e4m3),
}
