"""Runs every consumer case and prints one JSON line each; `test_consume.py` reads them.

A process of its own: whether triton interprets is decided when its kernels are first imported. On a
GPU the compiled kernels run, elsewhere the interpreter. Pad bytes hold 0xFF wherever a layout has
any, scales among them; activations and scales are small, so that every sum is exact in fp32 and
equality is the only tolerance.
"""

from __future__ import annotations

import json
import os
import sys

import torch

from kernels import moe, readback
from kernels.catalog import LAYOUTS
from kernels.fused import consume
from kernels.layout import Layout

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
BLOCKS, WIDE, TALL = (16, 128, 128), (16, 128, 256), (16, 256, 128)
# name -> value layout, scale layout, n, k, scale group, x format, blocks
CASES: dict[str, tuple[str, str, int, int, int, str, tuple[int, int, int]]] = {
    "strided": ("strided", "strided", 160, 352, 32, "bf16", BLOCKS),
    "strided_2880": ("strided", "strided", 128, 2880, 32, "e2m1", BLOCKS),
    "blackwell": ("blackwell_value", "blackwell_scale", 160, 352, 32, "e2m1", BLOCKS),
    "blackwell_2880": ("blackwell_value", "blackwell_scale", 128, 2880, 32, "bf16", WIDE),
    "cdna4": ("strided", "cdna4_scale", 160, 352, 32, "bf16", WIDE),
    "cdna4_2880": ("strided", "cdna4_scale", 96, 2880, 32, "e2m1", WIDE),
    "gfx1250": ("strided", "gfx1250_scale", 160, 352, 32, "bf16", BLOCKS),
    "gfx1250_2880": ("strided", "gfx1250_scale", 128, 2880, 32, "e2m1", BLOCKS),
    "hopper_w8": ("hopper_value_v3", "hopper_scale_w8", 320, 352, 32, "bf16", TALL),
    "hopper_w8_2880": ("hopper_value_v3", "hopper_scale_w8", 256, 2880, 32, "bf16", TALL),
    "hopper_w4": ("hopper_value_v3", "hopper_scale_w4", 160, 352, 32, "bf16", BLOCKS),
    "hopper_w4_tk38": (
        "hopper_value_v3_tk38", "hopper_scale_w4_tk38", 96, 2880, 32, "bf16", BLOCKS,
    ),
    "hopper_w8_tk38": ("hopper_value_v3_tk38", "hopper_scale_w8_tk38", 160, 352, 32, "bf16", TALL),
    "hopper_v2": ("hopper_value_v2", "hopper_scale_w4", 160, 352, 32, "bf16", BLOCKS),
    "hopper_v2_tk38": ("hopper_value_v2_tk38", "hopper_scale_w4", 160, 352, 32, "bf16", BLOCKS),
    "w31": ("w13_to_w31", "w13_to_w31", 160, 352, 32, "bf16", BLOCKS),
    "pairs_to_w31": (*2 * ("w13_interleaved_to_w31",), 160, 352, 32, "bf16", BLOCKS),
    "interleave_1": ("gate_up_interleave_1", "gate_up_interleave_1", 160, 352, 32, "bf16", BLOCKS),
    "interleave_8": ("gate_up_interleave_8", "gate_up_interleave_8", 160, 352, 16, "e2m1", BLOCKS),
    "interleave_16": (*2 * ("gate_up_interleave_16",), 160, 352, 16, "bf16", BLOCKS),
    "interleave_64": (*2 * ("gate_up_interleave_64",), 256, 352, 16, "bf16", BLOCKS),
    "shuffle_16": ("trtllm_shuffle_16", "trtllm_shuffle_16", 144, 352, 16, "bf16", BLOCKS),
    "128x4": ("strided", "block_scale_128x4", 160, 352, 16, "e2m1", BLOCKS),
    "mma_view": ("strided", "cutedsl_mma_view", 160, 2896, 16, "bf16", BLOCKS),
    "trtllm_w13": ("trtllm_w13", "trtllm_w13_scale", 256, 352, 16, "bf16", BLOCKS),
    "trtllm_w2": ("trtllm_shuffle_32", "trtllm_w2_scale", 160, 352, 16, "e2m1", BLOCKS),
    "cutedsl_w13": ("cutedsl_w13", "cutedsl_w13_scale", 256, 352, 16, "e2m1", BLOCKS),
    "cutedsl_w13_pairs": (
        "cutedsl_w13_interleaved", "cutedsl_w13_interleaved_scale", 256, 352, 16, "bf16", BLOCKS,
    ),
}  # fmt: skip


def poisoned(layout: Layout, x: torch.Tensor) -> torch.Tensor:
    """Storage of x with 0xFF in every byte that holds padding."""
    storage = layout.forward(x).contiguous()
    mask = layout.pad_mask(*x.shape[-2:])
    if (
        layout.bits
    ):  # the mask counts bytes before the bits of a word move: poison the source instead
        n, k = layout.padded(*x.shape[-2:])
        full = torch.full((*x.shape[:-2], n, k), 0xFF, dtype=torch.uint8)
        full[..., : x.shape[-2], : x.shape[-1]] = x
        return layout.forward(full).contiguous()
    storage.flatten(1)[:, mask] = 0xFF
    return storage


def run(name: str) -> dict[str, object]:
    """One case: {"name", "dequantize", "matmul"}, each "equal" or what differs first."""
    value_name, scale_name, n, k, group, x_format, blocks = CASES[name]
    value, scale = LAYOUTS[value_name], LAYOUTS[scale_name]
    draw = torch.Generator().manual_seed(len(name))
    bytes_ = lambda low, high, *shape: torch.randint(
        low, high, shape, dtype=torch.uint8, generator=draw
    )
    experts, m = (1 if k == 2880 else 2), 5
    codes = bytes_(0, 256, experts, n, k // 2)
    scales = bytes_(*((124, 131) if group == 32 else (0x30, 0x48)), experts, n, k // group)
    storage, s_storage = poisoned(value, codes), poisoned(scale, scales)
    form = "mxfp4" if group == 32 else "nvfp4"
    fetched = [
        readback.fetch(s.flatten(1), lay, n, cols)
        for s, lay, cols in ((storage, value, k // 2), (s_storage, scale, k // group))
    ]
    scale_type = torch.uint8 if group == 32 else torch.float8_e4m3fn
    judge = moe.decode(fetched[0], fetched[1].view(scale_type), form, torch.float32)

    w, s = storage.to(DEVICE), s_storage.to(DEVICE)
    reader = consume.dequantize_launch(
        value, scale, n=n, k=k, experts=experts, group=group, block=256 if GPU else 8192
    )
    found = {"name": name, "dequantize": verdict(consume.dequantize(w, s, reader).cpu(), judge)}

    # NVFP4 scales have no dot_scaled below sm100 (and triton's interpreter reads them as e8m0):
    # plain.
    plain = not GPU or group == 16
    warps = 8 if "w8" in scale_name else 4
    launch = consume.matmul_launch(
        value, scale, m=m, n=n, k=k, experts=experts, group=group, blocks=blocks, x_format=x_format,
        out_type="fp32", plain=plain, num_warps=warps, num_stages=2,
    )  # fmt: skip
    if x_format == "bf16":
        x = torch.randint(-4, 5, (experts, m, k), generator=draw).bfloat16()
        x_scale, dense = None, x.double()
    else:
        x = bytes_(0, 256, experts, m, k // 2)
        x_scale = bytes_(*((126, 129) if group == 32 else (0x30, 0x40)), experts, m, k // group)
        dense = moe.decode(x, x_scale.view(scale_type), form, torch.float64)
    y = consume.matmul(
        x.to(DEVICE), w, s, launch, None if x_scale is None else x_scale.to(DEVICE)
    ).cpu()
    return found | {"matmul": verdict(y.double(), dense @ judge.double().mT)}


def verdict(got: torch.Tensor, want: torch.Tensor) -> str:
    """equal, or how many elements differ, and the first of them."""
    if torch.equal(got, want):
        return "equal"
    wrong = (got != want).nonzero()
    at = tuple(wrong[0].tolist())
    return f"{len(wrong)} of {got.numel()} differ, first at {at}: {got[at]}, judge {want[at]}"


if __name__ == "__main__":
    if not GPU:
        os.environ["TRITON_INTERPRET"] = (
            "1"  # read when the kernels' module is imported, at a launch
        )
    for case in sys.argv[1:] or CASES:
        print(json.dumps(run(case)), flush=True)
