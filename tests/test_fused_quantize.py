"""The fused quantizers: the interpreted suite in a process of its own, and code for six targets."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.codegen.compiler import compile_many
from kernels.fused.quantize import ACROSS, BLOCKS, LARGEST, TILES

ROOT = Path(__file__).resolve().parents[1]
TARGETS = ("sm90", "sm100", "sm120", "gfx942", "gfx950", "gfx1250")
STRIDES = ("x", "q", "s")


def launch(
    *,
    dtype: str = "bf16",
    block: int = 32,
    flat: bool = True,
    pairs: int = 0,
    turned: bool = False,
) -> dict[str, Any]:
    """One specialisation of quantize_kernel as the host launches it; 16: any multiple of 16."""
    integers = dict.fromkeys(("length", "rows", "middle", "k_tiles", "row_tiles"), 16)
    integers |= {f"{t}_{a}": 16 for t in STRIDES for a in ("k", "row", "mid", "out")}
    integers |= {f"g_{axis}": 16 for axis in ("row", "mid", "out")}
    integers |= {"q_k": 1, ("x_row" if turned else "x_k"): 1, "s_k": 1}
    if flat:
        integers |= {"rows": 1, "middle": 1, "row_tiles": 1}
    tiles = TILES["nvidia"] if pairs else TILES["other"]
    kinds = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    tile, warps = tiles[block, kinds[dtype]] if flat else (4096, 4)
    source = {"bf16": "*bf16", "fp16": "*fp16", "fp32": "*fp32"}[dtype]
    return {
        "module": "kernels.fused.quantize_kernels",
        "kernel": "quantize_kernel",
        "pointers": {
            "x_ptr": "*i32" if pairs else source,
            "q_ptr": "*i32",
            "s_ptr": "*u8",
            "g_ptr": "*u8" if block == 32 else "*fp32",
        },
        "integers": integers,
        "constants": {
            "BLOCK_R": 1 if flat else 64, "BLOCK_K": tile if flat else 128, "BLOCK": block,
            "BIAS": 0x200000, "SATURATE": block == 16, "DROP_NAN": False, "WORDS": True,
            "PAIRS": pairs,
        },
        "num_warps": warps,
        "num_stages": 3,
    }  # fmt: skip


def direct(module: str, constants: dict[str, Any], warps: int, ones: str = "") -> dict[str, Any]:
    """A kernel of pairs of its own module, which has no specialisation but its constants."""
    kernel = getattr(import_module(f"kernels.fused.{module}"), f"{module}_kernel")
    kinds = {"x_ptr": "*i32", "q_ptr": "*i32", "s_ptr": "*u8", "g_ptr": "*fp32"}
    pointers = {name: kind for name, kind in kinds.items() if name in kernel.arg_names}
    integers = {n: 16 for n in kernel.arg_names if n not in pointers and n not in constants}
    return {
        "module": kernel.fn.__module__, "kernel": f"{module}_kernel", "pointers": pointers,
        "integers": integers | dict.fromkeys(ones.split(), 1), "constants": constants,
        "num_warps": warps, "num_stages": 3,
    }  # fmt: skip


PER_PROGRAM, STEPS, LARGEST_WARPS = LARGEST["other"]
LARGEST_FINITE = {
    "module": "kernels.fused.quantize_kernels", "kernel": "largest_finite_kernel",
    "pointers": {"x_ptr": "*bf16", "out_ptr": "*i32"},
    "integers": dict.fromkeys(("numel", "x_matrix", "x_row", "columns"), 16) | {"x_k": 1},
    "constants": {"BLOCK": PER_PROGRAM, "TIMES": STEPS, "DENSE": True},
    "num_warps": LARGEST_WARPS, "num_stages": 3,
}  # fmt: skip
LAUNCHES = {
    "largest_finite": LARGEST_FINITE,
    "mxfp4_bf16": launch(),
    "mxfp4_fp16": launch(dtype="fp16"),
    "mxfp4_fp32": launch(dtype="fp32"),
    "mxfp4_across_rows": launch(flat=False, turned=True),
    "nvfp4_bf16": launch(block=16),
}
FAST_FP32 = launch(dtype="fp32") | {"num_warps": TILES["nvidia"][32, torch.float32][1]}
FAST_FP32["constants"]["BLOCK_K"] = TILES["nvidia"][32, torch.float32][0]
PAIRED = {
    "mxfp4_pairs": launch(pairs=1),
    "mxfp4_pairs_fp16": launch(pairs=2, dtype="fp16"),
    "nvfp4_pairs": launch(pairs=1, block=16),
    "mxfp4_fp32_fast": FAST_FP32,
}
WIDTH, DEPTH, WIDTH_WARPS = ACROSS
OPTIONS = {"W": WIDTH, "K": DEPTH, "BIAS": 0x200000, "SATURATE": False}
for half in (False, True):
    PAIRED[f"mxfp4_across_pairs_{half}"] = direct(
        "quantize_across", OPTIONS | {"HALF": half}, WIDTH_WARPS, "s_k"
    )
    PAIRED[f"nvfp4_blocks_{half}"] = direct(
        "quantize_blocks", {"B": BLOCKS[0], "TIMES": BLOCKS[1], "HALF": half}, BLOCKS[2], "g_row"
    )


def small(
    module: str, kernel: str, pointers: str, integers: str, **constants: Any
) -> dict[str, Any]:
    """A kernel whose launch has nothing but sizes. pointers: NAME=TYPE words."""
    return {
        "module": f"kernels.fused.{module}", "kernel": kernel,
        "pointers": dict(word.split("=") for word in pointers.split()),
        "integers": dict.fromkeys(integers.split(), 16), "constants": constants,
        "num_warps": 4, "num_stages": 3,
    }  # fmt: skip


SMALL = {
    f"dequantize {'mxfp4' if e8m0 else 'nvfp4'}": small(
        "dequantize", "_dequantize_kernel", "q_ptr=*u8 s_ptr=*u8 g_ptr=*fp32 out_ptr=*fp32",
        "numel width groups matrix", GROUP=16 if e8m0 else 8, E8M0=e8m0, BLOCK=1024,
    )
    for e8m0 in (True, False)
} | {
    "pack": small(
        "dequantize", "_pack_kernel", "codes_ptr=*u8 packed_ptr=*u8", "numel", BLOCK=1024
    ),
    "unpack": small(
        "dequantize", "_unpack_kernel", "packed_ptr=*u8 codes_ptr=*u8", "numel", BLOCK=1024
    ),
    "per_expert": {
        "module": "kernels.fused.per_expert", "kernel": "per_expert_kernel",
        "pointers": {f"{name}{i}": "*fp32" for i in range(4) for name in ("x", "out")},
        "integers": {f"sizes{i}": (32, 2, 2, 1, 32) for i in range(4)},
        "constants": {"OVER_ALL": (False, False, True, True), "MANY": 4, "BLOCK": 256},
        "num_warps": 2, "num_stages": 3,
    },
}  # fmt: skip


@pytest.mark.timeout(1800)
def test_suite_against_the_reference(suite: Callable[..., None]) -> None:
    suite("quantize_suite.py", least=55)


@pytest.mark.parametrize("target", TARGETS)
def test_code_has_no_spill_and_wide_loads(target: str) -> None:
    launches = LAUNCHES | (PAIRED if target.startswith("sm") else {})
    records = compile_many([(launch, target) for launch in launches.values()])
    for name, record in zip(launches, records, strict=True):
        assert record["spills"] == 0 and record["stack_bytes"] == 0, (name, record)
        wide = 8 if "across_pairs" in name else 16  # 128 contiguous bytes of two k a warp
        assert max(map(int, record["global_loads"])) == wide, (name, record)


@pytest.mark.parametrize("target", TARGETS)
def test_code_of_the_small_kernels_has_no_spill(target: str) -> None:
    for name, record in zip(
        SMALL, compile_many([(launch, target) for launch in SMALL.values()]), strict=True
    ):
        assert record["spills"] == 0 and record["stack_bytes"] == 0, (name, record)


def test_a_size_or_stride_of_one_is_a_constant_and_compiles() -> None:
    """triton makes a plain number of it, which the interpreter does not."""
    launches = LAUNCHES | PAIRED | SMALL
    compile_many([(ones(launch), "sm90") for launch in launches.values()])


def ones(launch: dict[str, Any]) -> dict[str, Any]:
    one = lambda v: (1,) * len(v) if isinstance(v, tuple) else 1
    return launch | {"integers": {name: one(v) for name, v in launch["integers"].items()}}
