"""Every routine of `kernels` as a path of its own: `path=swizzle_blockscale`.

The table is literal and imports nothing heavy: config lists its names, `cell` runs its entries.
`mxfp4_quantize` is not in it: the layer path of that name runs it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Routine:
    """source: where the routine's contract is published."""

    source: str


_FI = "vllm quantization/utils/flashinfer_fp4_moe.py"
_NV = "vllm quantization/utils/nvfp4_utils.py"
_MX = "vllm quantization/utils/mxfp4_utils.py"

ROUTINES: dict[str, Routine] = {
    "reorder_w1w3_to_w3w1": Routine(_FI),
    "reorder_w13_to_w31_for_flashinfer_cutedsl": Routine(_FI),
    "interleave_linear_and_gate": Routine(_FI),
    "shuffle_rows_for_trtllm": Routine("flashinfer fp4_quantization.py shuffle_matrix_a"),
    "swizzle_blockscale": Routine(_NV),
    "nvfp4_block_scale_interleave": Routine("flashinfer fp4_quantization.py"),
    "nvfp4_swizzled_scale_to_cutedsl_mma_view": Routine(_FI),
    "amax_for_moe_activation_quant": Routine(_FI),
    "prepare_nvfp4_moe_layer_for_flashinfer_cutedsl": Routine(_FI),
    "prepare_static_weights_for_trtllm_fp4_moe": Routine(_FI),
    "align_fp4_moe_weights_for_fi": Routine(_FI),
    "align_fp4_moe_hidden_dim_for_fi": Routine(_FI),
    "swizzle_mxfp4": Routine(_MX),
    "downcast_to_mxfp": Routine("triton_kernels numerics_details/mxfp.py"),
    "dequantize_mxfp4": Routine("OCP Microscaling Formats v1.0, section 5"),
    "dequantize_nvfp4": Routine("NVIDIA NVFP4: e2m1 in blocks of 16, e4m3 scales, one fp32 scale"),
    "pack_e2m1": Routine("OCP Microscaling Formats v1.0, section 5.3.3"),
    "unpack_e2m1": Routine("OCP Microscaling Formats v1.0, section 5.3.3"),
}
