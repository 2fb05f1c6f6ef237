"""Where a Triton kernel may run: on the tensor's GPU, or on the CPU under TRITON_INTERPRET=1."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import triton

from kernels.errors import LayoutError


def launchable(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """The tensor's device as a context for a launch; LayoutError where no kernel can run."""
    if tensor.device.type == "cpu":
        if not triton.knobs.runtime.interpret:
            raise LayoutError(
                f"a fused routine got a CPU tensor {tuple(tensor.shape)}: use impl='reference', "
                "move it to a GPU, or set TRITON_INTERPRET=1 before Python starts"
            )
        return nullcontext()
    return getattr(torch, tensor.device.type).device(tensor.device)
