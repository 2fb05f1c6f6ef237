"""Which layouts and constraints a target takes: pure decision tables, no device is asked.

A target is an architecture string: sm80 sm90 sm100 sm103 sm120, gfx942 gfx950 gfx1250, or cpu. It
need not be the machine this runs on. MXFP4 weights have their scale blocks along K. The rules are
those of vllm mxfp4_utils.py `_swizzle_mxfp4` and triton_kernels layout.py
`make_default_matmul_mxfp4_w_layout`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import lru_cache

from packaging.version import InvalidVersion, Version

from kernels import catalog
from kernels.errors import LayoutError
from kernels.layout import Layout

TARGETS = ("sm80", "sm90", "sm100", "sm103", "sm120", "gfx942", "gfx950", "gfx1250", "cpu")
HOPPER_MIN_TORCH = Version("2.8.1")  # below it the Hopper swizzle is off (vllm mxfp4_utils.py)

_NVFP4 = ("nvfp4_cutedsl", "nvfp4_trtllm", "nvfp4_cutlass")
_MXFP4 = ("mxfp4_triton", "mxfp4_quantize")

# Paths with a consumer on the target. TRT-LLM gen and CuteDSL grouped GEMM kernels are built for
# sm100 and sm103 only; the CUTLASS fp4 MoE also for sm120 (flashinfer fused_moe); fp4 tensor cores
# start there.
PATHS_FOR: dict[str, tuple[str, ...]] = {
    "sm80": _MXFP4,
    "sm90": _MXFP4,
    "sm100": _NVFP4 + _MXFP4,
    "sm103": _NVFP4 + _MXFP4,
    "sm120": ("nvfp4_cutlass", *_MXFP4),
    "gfx942": _MXFP4,
    "gfx950": _MXFP4,
    "gfx1250": _MXFP4,
    "cpu": _MXFP4,
}

# Rows of one gate or up group in a gated grouped GEMM epilogue (flashinfer issue 4874).
GATE_UP_GROUP: dict[str, int] = {"sm100": 64, "sm103": 16, "sm120": 8}


@dataclass(frozen=True)
class Choice:
    """Layouts and kernel constraints of MXFP4 weights on one target, and why."""

    value: Layout
    scale: Layout
    reason: str
    source: str
    constraints: Mapping[str, object] = field(default_factory=dict)
    warning: str | None = None
    scale_pad_k: int = 1  # scale groups are padded to this multiple before the layout


def check_target(target: str) -> str:
    """The target itself, or LayoutError with the close matches."""
    if target in TARGETS:
        return target
    close = get_close_matches(str(target), TARGETS, n=2, cutoff=0.4)
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    raise LayoutError(f"unknown target {target!r}; {hint}known: {', '.join(TARGETS)}")


def paths_for(target: str) -> tuple[str, ...]:
    """The preparation paths that have a consumer on the target."""
    return PATHS_FOR[check_target(target)]


def should_use_cdna4_mx_scale_swizzle(target: str, tp_size: int) -> bool:
    """gfx950 and tp_size <= 2: the swizzled scales need BLOCK_K % 256 == 0, which the tiles chosen
    for the smaller shards do not have. One predicate for loader and kernel alike (vllm issue
    44804)."""
    return check_target(target) == "gfx950" and tp_size <= 2


@lru_cache(maxsize=64)
def hopper_swizzle_supported(torch_version: str) -> bool:
    """Whether this torch is at least 2.8.1, read as a version: 2.8.1+cu128 and 2.9.0.dev20250801
    are, 2.8.1rc1 and 2.8.0 are not."""
    try:
        return Version(torch_version) >= HOPPER_MIN_TORCH
    except InvalidVersion:
        raise LayoutError(f"torch version {torch_version!r} cannot be read as a version") from None


def choose_mxfp4(
    target: str,
    tp_size: int = 1,
    num_warps: int = 8,
    torch_version: str = "2.9.0",
    generation: str = "3.5",
) -> Choice:
    """Value and scale layout of MXFP4 weights (blocks along K) for a target, with the rule that
    chose.

    tp_size matters on gfx950 only, num_warps, torch_version and generation on sm90 only. Raises
    LayoutError for an unknown target or generation, or tp_size < 1.
    """
    check_target(target)
    catalog.check_generation(generation)
    if tp_size < 1:
        raise LayoutError(f"tp_size={tp_size}; want at least 1")
    strided = catalog.LAYOUTS["strided"]
    vllm = "vllm mxfp4_utils.py _swizzle_mxfp4"
    if target == "gfx950":
        if should_use_cdna4_mx_scale_swizzle(target, tp_size):
            return Choice(
                strided, catalog.LAYOUTS["cdna4_scale"],
                "gfx950 at TP <= 2 has tiles with BLOCK_K % 256 == 0: CDNA4 scales", vllm,
            )  # fmt: skip
        return Choice(
            strided, strided,
            f"gfx950 at TP {tp_size} > 2 has tiles with BLOCK_K < 256: no CDNA4 scales", vllm,
        )  # fmt: skip
    if target == "gfx1250":
        return Choice(
            strided,
            catalog.LAYOUTS["gfx1250_scale"],
            "gfx1250 reads scales in 128 x 4 tiles for wmma_scale",
            vllm,
        )
    if target == "sm90":
        if not hopper_swizzle_supported(torch_version):
            return Choice(
                strided, strided, f"torch {torch_version} is older than {HOPPER_MIN_TORCH}", vllm,
                {"split_k": 1},
                warning=f"MXFP4 on Hopper with torch {torch_version} < {HOPPER_MIN_TORCH}: the "
                "swizzle is off and the matmul slower; use a newer torch",
                scale_pad_k=4,
            )  # fmt: skip
        return Choice(
            catalog.hopper_value(3, generation), catalog.hopper_scale(num_warps, generation),
            f"sm90 casts FP4 to bf16 for wgmma: by fragment, scales by {num_warps} warps", vllm,
            {"split_k": 1}, scale_pad_k=4,
        )  # fmt: skip
    if target in ("sm100", "sm103", "sm120"):
        return Choice(
            catalog.LAYOUTS["blackwell_value"], catalog.LAYOUTS["blackwell_scale"],
            "native MXFP4 tensor cores read 128x4 scale tiles, and TMA rows of 128 bytes", vllm,
            {"is_persistent": True, "epilogue_subtile": 1},
        )  # fmt: skip
    return Choice(
        strided,
        strided,
        f"{target} has no block-scaled matrix instruction: loads with strides",
        vllm,
    )
