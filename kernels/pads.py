"""How far each path pads on each target: one literal table, each rule with its public source.

`intermediate` multiples hold for gate and up each by itself where there is a gate, and for the one
projection where there is none. They are what the consumer needs beyond whole scale blocks; what a
layout adds to its own storage (block scales to 128 x 4, Hopper scales to 32 rows a warp) is its
`align`.

Sources: vllm is vllm-project/vllm 0.33, under model_executor/layers: `flashinfer` is
quantization/utils/flashinfer_fp4_moe.py, `oracle` is fused_moe/oracle/mxfp4.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches

from kernels import select
from kernels.errors import LayoutError

FORMAT = {
    "nvfp4_cutedsl": "nvfp4",
    "nvfp4_trtllm": "nvfp4",
    "nvfp4_cutlass": "nvfp4",
    "mxfp4_triton": "mxfp4",
    "mxfp4_quantize": "bf16",
}
CONSUMER_FORMAT = {path: "mxfp4" if form == "bf16" else form for path, form in FORMAT.items()}
# Elements that share a scale; bf16 weights are sharded by the blocks quantizing them will make.
BLOCK = {"nvfp4": 16, "mxfp4": 32, "bf16": 32}


@dataclass(frozen=True)
class PadRule:
    """Multiples of the intermediate size (gated: per half; plain) and of the hidden size."""

    gated: int
    plain: int
    hidden_all: int
    why: str
    source: str
    hidden_plain_per_token: int | None = None
    why_hidden: str = ""
    note: str = ""

    def intermediate(self, gated: bool) -> int:
        return self.gated if gated else self.plain

    def hidden(self, activation: str, per_token: bool) -> int:
        if per_token and self.hidden_plain_per_token and activation.endswith("_no_mul"):
            return self.hidden_plain_per_token
        return self.hidden_all


RULES: dict[str, PadRule] = {
    "nvfp4_trtllm": PadRule(
        gated=64, plain=128, hidden_all=256, hidden_plain_per_token=512,
        why="gemm1 rows, gate and up together, come in tiles of 128",
        why_hidden="hidden tiles of 256 (512 for per-token scales without a gate)",
        source="vllm flashinfer, trtllm_nvfp4_hidden_alignment; vllm#46879",
    ),
    "nvfp4_cutedsl": PadRule(
        gated=64, plain=128, hidden_all=256,
        why="gate and up alternate by 64 rows, and gemm1 rows come in tiles of 128",
        why_hidden="gemm1 reads whole K tiles of 256 without a tail predicate",
        source="vllm flashinfer, prepare_nvfp4_moe_layer_for_flashinfer_cutedsl",
    ),
    "nvfp4_cutlass": PadRule(
        gated=64, plain=128, hidden_all=16,
        why="block scales of gemm1 come in tiles of 128 rows over gate and up together",
        why_hidden="whole scale blocks of 16",
        source="vllm flashinfer, prepare_nvfp4_moe_layer_for_fi_or_cutlass",
        note="vLLM 0.33 refuses a gated layer here that needs padding; padding each half is exact",
    ),
    "mxfp4_triton cuda": PadRule(
        gated=64, plain=64, hidden_all=32,
        why="triton MoE kernels take the intermediate size in multiples of 64",
        why_hidden="whole scale blocks of 32",
        source="vllm oracle, mxfp4_round_up_hidden_size_and_intermediate_size, default branch",
    ),
    "mxfp4_triton rocm": PadRule(
        gated=256, plain=256, hidden_all=256,
        why="BLOCK_K is 256 for MXFP4 weights",
        why_hidden="BLOCK_K is 256 for MXFP4 weights",
        source="vllm oracle, ROCm branch; sglang#27858, vllm#55104 on what it costs",
    ),
    "mxfp4_triton rocm silu": PadRule(
        gated=128, plain=256, hidden_all=128,
        why="BLOCK_K is 128 before and after CDNA4 where the activation is not fused",
        why_hidden="BLOCK_K is 128 before and after CDNA4 where the activation is not fused",
        source="vllm oracle, ROCm branch, triton_uses_128",
    ),
    "mxfp4_triton cpu": PadRule(
        gated=32, plain=32, hidden_all=32,
        why="whole scale blocks of 32, BLOCK_N 32",
        why_hidden="whole scale blocks of 32",
        source="vllm oracle, CPU branch",
    ),
}  # fmt: skip


def rule(path: str, target: str, activation: str) -> PadRule:
    """The rule of a path on a target; LayoutError lists close matches for an unknown path."""
    if path not in FORMAT:
        close = get_close_matches(path, FORMAT, n=2, cutoff=0.4)
        hint = f"did you mean {' or '.join(close)}? " if close else ""
        raise LayoutError(f"no path {path!r}; {hint}known: {', '.join(FORMAT)}")
    if path in RULES:
        return RULES[path]
    if target == "cpu":
        return RULES["mxfp4_triton cpu"]
    if not target.startswith("gfx"):
        return RULES["mxfp4_triton cuda"]
    if activation == "silu" and target != "gfx950":
        return RULES["mxfp4_triton rocm silu"]
    return RULES["mxfp4_triton rocm"]


def refusal(path: str, target: str) -> str:
    """Why this target has no consumer for the path, or ''."""
    served = select.paths_for(target)
    if path in served:
        return ""
    return f"no kernel on {target} reads this form; paths for it: {', '.join(served)}"
