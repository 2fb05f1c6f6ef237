"""Every layout of the project, as one literal each: read this file first.

A pattern maps a matrix (n output features, k columns along the contraction, in elements of the
tensor: packed bytes for FP4 values, one byte per block for scales) to storage. See `layout.Layout`
for what each field means. Names ending in `_tk38` are what triton_kernels' 3.8 generation writes
where it differs from the 3.5.1 generation that vLLM vendors.

Sources are cited by short name:
  triton_kernels   triton-lang/triton,
  python/triton_kernels/triton_kernels/tensor_details/layout_details flashinfer
  flashinfer-ai/flashinfer, flashinfer/fp4_quantization.py and fused_moe/core.py cublas
  NVIDIA cuBLAS documentation, "1D Block Scaling Factors Layout" vllm             vllm-project/vllm,
  model_executor/layers/quantization/utils
"""

from __future__ import annotations

from dataclasses import replace
from difflib import get_close_matches

from kernels.errors import LayoutError
from kernels.layout import Layout

GENERATIONS = ("3.5", "3.8")

# Output bit i of a word of four packed bytes is source bit HOPPER_TWIDDLE[i]. Each pair of nibbles
# lands where two bf16 lanes find sign, exponent and mantissa with one shift and one mask each.
HOPPER_TWIDDLE = (
    16, 17, 18, 8, 9, 10, 0, 1, 2, 19, 25, 26, 11, 24, 27, 3,
    20, 21, 22, 12, 13, 14, 4, 5, 6, 23, 29, 30, 15, 28, 31, 7,
)  # fmt: skip

_HOPPER_VALUE = "(r0 w0 t0 s) (r1 q w1 t1 c) -> (r0 t0) (r1 s t1 q w1 w0 c)"
_HOPPER_SCALE = "(r a w b t) (rk kk) -> (r w) (rk a t kk b)"

# fmt: off
LAYOUTS: dict[str, Layout] = {
    layout.name: layout
    for layout in (
        Layout(
            "strided", "n k -> n k", view="cols_rows",
            consumer="any kernel that loads with strides",
            aliases=("StridedLayout", "linear"),
            source="triton_kernels strided.py",
            note="Checkpoint order: k contiguous, seen by the consumer as [K, N].",
        ),
        # Rows of w13: gate (w1) and up (w3).
        Layout(
            "w13_to_w31", "(g h) k -> (g h) k", {"g": 2}, align=(2, 1), flip=("g",),
            consumer="FlashInfer CUTLASS and CuteDSL fp4 MoE (up first)",
            aliases=("reorder_w1w3_to_w3w1", "w31"),
            source="vllm flashinfer_fp4_moe.py",
            note="The two halves of the rows change places; doing it twice is the identity.",
        ),
        Layout(
            "w13_interleaved_to_w31", "(h g) k -> (g h) k", {"g": 2}, align=(2, 1), flip=("g",),
            consumer="FlashInfer CuteDSL, from checkpoints with rows gate0, up0, gate1, up1, ...",
            aliases=("swigluoai_to_w31",),
            source="vllm flashinfer_fp4_moe.py",
            note="Alternating gate and up rows are separated, and up goes first.",
        ),
        Layout(
            "gate_up_interleave_1", "(g h) k -> (h g) k", {"g": 2}, align=(2, 1),
            consumer="TRT-LLM gated kernels before the shuffle; triton swigluoai",
            aliases=("reorder_rows_for_gated_act_gemm",),
            source="flashinfer fused_moe/core.py",
            note="Rows alternate gate, up, gate, up.",
        ),
        Layout(
            "gate_up_interleave_8", "(g h s) k -> (h g s) k", {"g": 2, "s": 8}, align=(16, 1),
            consumer="SM120 and SM103 gated grouped GEMM",
            aliases=("interleave_linear_and_gate_8",),
            source="flashinfer issue 4874 (group size per architecture)",
            note="Groups of 8 gate rows and 8 up rows alternate.",
        ),
        Layout(
            "gate_up_interleave_16", "(g h s) k -> (h g s) k", {"g": 2, "s": 16}, align=(32, 1),
            consumer="SM103 gated grouped GEMM",
            aliases=("interleave_linear_and_gate_16",),
            source="flashinfer issue 4874 (group size per architecture)",
            note="Groups of 16 gate rows and 16 up rows alternate.",
        ),
        Layout(
            "gate_up_interleave_64", "(g h s) k -> (h g s) k", {"g": 2, "s": 64}, align=(128, 1),
            consumer="FlashInfer CuteDSL gated grouped GEMM",
            aliases=("interleave_linear_and_gate",),
            source="vllm flashinfer_fp4_moe.py",
            note="Groups of 64 gate rows and 64 up rows alternate.",
        ),
        Layout(
            "trtllm_shuffle_16", "(r a b) k -> (r b a) k", {"a": 8, "b": 2}, align=(16, 1),
            consumer="TRT-LLM gen kernels, epilogue tile below 128",
            aliases=("shuffle_matrix_a_16",),
            source="flashinfer utils.py get_shuffle_block_size",
            note="Inside 16 rows, row 2a+b moves to 8b+a.",
        ),
        Layout(
            "trtllm_shuffle_32", "(r a b) k -> (r b a) k", {"a": 8, "b": 4}, align=(32, 1),
            consumer="TRT-LLM gen kernels, epilogue tile 128",
            aliases=("shuffle_matrix_a", "trtllm_w2"),
            source="flashinfer utils.py get_shuffle_block_size",
            note="Inside 32 rows, row 4a+b moves to 8b+a.",
        ),
        # Block scales.
        Layout(
            "block_scale_128x4", "(rn no ni) (rk kk) -> (rn rk) (ni no kk)",
            {"no": 4, "ni": 32, "kk": 4}, align=(128, 4),
            consumer="cuBLAS, CUTLASS, TRT-LLM and CuteDSL NVFP4 GEMMs",
            aliases=(
                "swizzle_blockscale",
                "nvfp4_block_scale_interleave",
                "block_scale_interleave",
                "128x4",
            ),
            source="cublas; flashinfer fp4_quantization.py",
            note="Each 128 x 4 block becomes 512 bytes; rows 32 apart are neighbours of 4 bytes.",
        ),
        Layout(
            "cutedsl_mma_view", "(rn no ni) (rk kk) -> (rn rk) (ni no kk)",
            {"no": 4, "ni": 32, "kk": 4}, align=(128, 4), view="mma_6d",
            consumer="FlashInfer CuteDSL grouped GEMM",
            aliases=("convert_sf_to_mma_layout", "nvfp4_swizzled_scale_to_cutedsl_mma_view"),
            source="flashinfer cute_dsl/utils.py",
            note=(
                "128x4 storage seen as (32, 4, M/128, 4, K/4, E): strides change, memory does not."
            ),
        ),
        Layout(
            "blackwell_scale", "(rn no ni) (rk kk) -> (rn rk) (ni no kk)",
            {"no": 4, "ni": 32, "kk": 4}, align=(128, 8), view="blackwell_5d",
            consumer="triton_kernels matmul on sm100 and newer",
            aliases=("BlackwellMXScaleLayout",),
            source="triton_kernels blackwell_scale.py",
            note="The 128x4 tile, with k padded to 8 where NVFP4 pads to 4.",
        ),
        *(
            Layout(
                f"hopper_scale_w{w}{suffix}", _HOPPER_SCALE,
                {"a": 2, "w": w, "b": 2, "t": 8, "kk": 2}, align=(32 * w, align_k),
                view="cols_rows",
                consumer=f"triton_kernels matmul on sm90 with {w} warps",
                aliases=(
                    *alias,
                    *(("hopper_scale", "HopperMXScaleLayout") if w == 8 and not suffix else ()),
                ),
                source=f"triton_kernels hopper_scale.py; {why}",
                note=f"32 x 2 fragments of {w} warps; the bytes depend on the number of warps.",
            )
            for w in (4, 8)
            for suffix, align_k, alias, why in (
                ("", 4, (), "vllm mxfp4_utils.py pads groups to 4 (issue 47303)"),
                ("_tk38", 2, (), "the 3.8 generation masks in the kernel"),
            )
        ),
        Layout(
            "cdna4_scale", "(rn a n) (rk b c) -> rn (rk c n b a)",
            {"a": 2, "n": 16, "b": 2, "c": 4}, align=(32, 8), view="cols_rows",
            consumer="triton_kernels matmul on gfx950",
            aliases=("CDNA4MXScaleLayout", "GFX950MXScaleLayout", "cdna4"),
            source="triton_kernels cdna4_scale.py",
            note=(
                "A 32 x 8 tile per mfma_scale 16x16x128 pair: each lane's four scales are one word."
            ),
        ),
        Layout(
            "gfx1250_scale", "(rn a n) (rk c) -> rn (rk n a c)", {"a": 4, "n": 32, "c": 4},
            align=(128, 4), view="cols_rows",
            consumer="triton_kernels matmul on gfx1250",
            aliases=("GFX1250MXScaleLayout",),
            source="triton_kernels gfx1250_scale.py",
            note="A 128 x 4 tile for wmma_scale: a lane's 16 scales are neighbours.",
        ),
        # FP4 values; k counts packed bytes.
        *(
            Layout(
                f"hopper_value_v{version}{suffix}", _HOPPER_VALUE,
                {"w0": 2, "t0": 4, "s": 2, "q": 4 // c, "w1": 2, "t1": 4, "c": c}, align=align,
                bits=HOPPER_TWIDDLE, view="cols_rows",
                consumer=f"triton_kernels matmul on {arch} (mma v{version}, weights cast to bf16)",
                aliases=("hopper_value", "HopperMXValueLayout")
                if version == 3 and not suffix
                else (),
                source="triton_kernels hopper_value.py",
                note="A thread's bytes of four mma tiles are one word, its bits twiddled for bf16.",
            )
            for version, c, arch in ((2, 4, "sm80"), (3, 1, "sm90"))
            for suffix, align in (("", (16, 32)), ("_tk38", (64, 64)))
        ),
        Layout(
            "blackwell_value", "n k -> n k", align=(1, 128), view="cols_rows",
            consumer="triton_kernels matmul on sm100 and newer (TMA rows of 128 bytes)",
            aliases=("BlackwellMXValueLayout",),
            source="triton_kernels blackwell_value.py",
            note="Checkpoint order with the packed k padded to 128 bytes.",
        ),
        # One-pass composites: a whole chain of the above as one pattern, proved equal in the tests.
        Layout(
            "trtllm_w13", "(g r a b) k -> (r b g a) k", {"g": 2, "a": 8, "b": 2}, align=(128, 1),
            consumer="TRT-LLM gen gated gemm1 weights",
            source="flashinfer fused_moe/core.py; gate_up_interleave_1 then trtllm_shuffle_32",
            note="Rows interleaved by one, then shuffled inside 32 rows.",
        ),
        Layout(
            "trtllm_w13_scale", "(g rn no a b) (rk kk) -> (rn rk) (b g a no kk)",
            {"g": 2, "no": 4, "a": 8, "b": 2, "kk": 4}, align=(128, 4),
            consumer="TRT-LLM gen gated gemm1 scales",
            source="flashinfer fused_moe/core.py; trtllm_w13 then block_scale_128x4",
            note="The row order of the weights, then the 128x4 swizzle.",
        ),
        Layout(
            "trtllm_w2_scale", "(rn no a b) (rk kk) -> (rn rk) (b a no kk)",
            {"no": 4, "a": 8, "b": 4, "kk": 4}, align=(128, 4),
            consumer="TRT-LLM gen gemm2 scales, and gemm1 scales without a gate",
            source="flashinfer fused_moe/core.py; trtllm_shuffle_32 then block_scale_128x4",
            note="The 32-row shuffle, then the 128x4 swizzle.",
        ),
        Layout(
            "cutedsl_w13", "(g h s) k -> (h g s) k", {"g": 2, "s": 64}, align=(128, 1), flip=("g",),
            consumer="FlashInfer CuteDSL gated gemm1 weights",
            source="vllm flashinfer_fp4_moe.py; w13_to_w31 then gate_up_interleave_64",
            note="Groups of 64 up rows and 64 gate rows alternate, up first.",
        ),
        Layout(
            "cutedsl_w13_scale", "(g rn s ni) (rk kk) -> (rn rk) (ni g s kk)",
            {"g": 2, "s": 2, "ni": 32, "kk": 4}, align=(128, 4), flip=("g",), view="mma_6d",
            consumer="FlashInfer CuteDSL gated gemm1 scales",
            source="vllm flashinfer_fp4_moe.py; cutedsl_w13 then block_scale_128x4",
            note="The row order of the weights, then the 128x4 swizzle.",
        ),
        Layout(
            "cutedsl_w13_interleaved", "(h s g) k -> (h g s) k", {"g": 2, "s": 64}, align=(128, 1),
            flip=("g",),
            consumer="FlashInfer CuteDSL gated gemm1 weights, from rows gate0, up0, gate1, ...",
            source="vllm flashinfer_fp4_moe.py; w13_interleaved_to_w31 then gate_up_interleave_64",
            note="Alternating rows become groups of 64 up rows and 64 gate rows, up first.",
        ),
        Layout(
            "cutedsl_w13_interleaved_scale", "(rn s ni g) (rk kk) -> (rn rk) (ni g s kk)",
            {"g": 2, "s": 2, "ni": 32, "kk": 4}, align=(128, 4), flip=("g",), view="mma_6d",
            consumer="FlashInfer CuteDSL gated gemm1 scales, from rows gate0, up0, gate1, ...",
            source="vllm flashinfer_fp4_moe.py; cutedsl_w13_interleaved then block_scale_128x4",
            note="The row order of the weights, then the 128x4 swizzle.",
        ),
    )
}
# fmt: on

ALIASES: dict[str, str] = {alias: name for name, lay in LAYOUTS.items() for alias in lay.aliases}


def find(name: str) -> Layout:
    """A layout by its name or a vendor's; LayoutError lists close matches for an unknown one."""
    if (key := ALIASES.get(name, name)) in LAYOUTS:
        return LAYOUTS[key]
    close = get_close_matches(name, [*LAYOUTS, *ALIASES], n=3, cutoff=0.4)
    hint = f"did you mean {', '.join(close)}? " if close else ""
    raise LayoutError(f"no layout {name!r}; {hint}known: {', '.join(LAYOUTS)}")


def hopper_scale(num_warps: int = 8, generation: str = "3.5") -> Layout:
    """Hopper scale layout of `num_warps` (a power of 2) as that triton_kernels generation pads
    it."""
    check_generation(generation)
    if num_warps < 1 or num_warps & (num_warps - 1):
        raise LayoutError(f"hopper_scale: num_warps={num_warps} is no power of 2")
    suffix = "_tk38" if generation == "3.8" else ""
    if (name := f"hopper_scale_w{num_warps}{suffix}") in LAYOUTS:
        return LAYOUTS[name]
    base = LAYOUTS[f"hopper_scale_w8{suffix}"]
    return replace(
        base, name=name, sizes={**base.sizes, "w": num_warps},
        align=(32 * num_warps, base.align[1]),
        consumer=f"triton_kernels matmul on sm90 with {num_warps} warps", aliases=(),
        note=f"32 x 2 fragments of {num_warps} warps; the bytes depend on the number of warps.",
    )  # fmt: skip


def hopper_value(mma_version: int = 3, generation: str = "3.5") -> Layout:
    """Hopper value layout for mma version 2 or 3 as that triton_kernels generation pads it."""
    check_generation(generation)
    if mma_version not in (2, 3):
        raise LayoutError(f"hopper_value: mma_version={mma_version}; known: 2, 3")
    return LAYOUTS[f"hopper_value_v{mma_version}{'_tk38' if generation == '3.8' else ''}"]


def check_generation(generation: str) -> None:
    """Raise LayoutError for a triton_kernels generation this project does not describe."""
    if generation not in GENERATIONS:
        raise LayoutError(
            f"generation {generation!r} of triton_kernels; known: {', '.join(GENERATIONS)}"
        )
