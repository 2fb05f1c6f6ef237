"""Every fused kernel at small shapes under compute-sanitizer: out-of-bounds accesses and races.

    python -m harness.measure.sanitize          runs memcheck and racecheck on this machine's GPU
    python -m harness.measure.sanitize run [I/N]  only the kernels, each result against the
                                        reference (or every N-th of them, to fill Triton's cache)

Shapes are ragged, strided and padded on purpose, so that every mask is used. Exit code 0 when both
tools are clean and all bytes equal, 2 otherwise, 3 where the tool or a GPU is missing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace

import torch

import kernels
from harness.run.source import synthetic
from kernels.catalog import LAYOUTS
from kernels.layout import Layout
from kernels.pads import FORMAT
from kernels.prepare import prepare

TOOLS = ("memcheck", "racecheck")
SHAPES = ((130, 90), (36, 45))
LAYOUTS_RUN = (  # every kind of plan: rows, padded rows, parts, words, halves, bytes, bits
    "w13_to_w31", "gate_up_interleave_8", "trtllm_w13", "blackwell_value", "cutedsl_w13",
    "block_scale_128x4", "trtllm_w13_scale", "cutedsl_w13_interleaved_scale", "blackwell_scale",
    "hopper_scale_w4", "cdna4_scale", "gfx1250_scale", "hopper_value_v2", "hopper_value_v3",
    "hopper_value_v3_tk38",
)  # fmt: skip


def layout_bytes(layout: Layout, n: int, k: int, dtype: torch.dtype, how: str) -> bool:
    """Whether forward and back of one matrix pair equal the reference; how: its strides."""
    from kernels.fused.rearrange import rearrange, restore

    n += n % layout.parts
    x = torch.randint(0, 120, (2, n + 3, k + 5), device="cuda").to(dtype)[:, 3:, 5:]
    x = {"sliced": x, "dense": x.contiguous(), "turned": x.mT.contiguous().mT}[how]
    storage = rearrange(layout, x)
    same = torch.equal(storage, layout.forward(x))
    return same and torch.equal(restore(layout, storage, n, k), x)


def routines() -> dict[str, bool]:
    """The kernels beside the layouts': the in-place exchange and the quantizers."""
    twice = lambda name: (kernels.resolve(name, "fused"), kernels.resolve(name, "reference"))
    found = {}
    for n, k in SHAPES:
        x = torch.randint(0, 120, (2, n, k), dtype=torch.uint8, device="cuda")
        both = [(x.clone(), x[:, :, :1].clone()) for _ in range(2)]
        for routine, pair in zip(twice("reorder_w1w3_to_w3w1"), both, strict=True):
            routine(*pair)
        found[f"swap {n}x{k}"] = all(map(torch.equal, both[0], both[1]))
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for axis in (1, 2):
            x = torch.randn((2, 66, 68), device="cuda").to(dtype)
            got, want = (f(x, axis)[:2] for f in twice("downcast_to_mxfp"))
            found[f"downcast_to_mxfp {dtype} {axis}"] = all(map(torch.equal, got, want))
        x = torch.randn((2, 96, 70), device="cuda").to(dtype)  # three blocks of two rows a word
        got, want = (f(x, 1)[:2] for f in twice("downcast_to_mxfp"))
        found[f"downcast_to_mxfp {dtype} whole blocks"] = all(map(torch.equal, got, want))
        for n, k in ((33, 64), (3, 4112)):  # any shape's kernel, and that of long rows
            x = torch.randn((2, n, k + 16), device="cuda").to(dtype)[..., :k]
            got, want = (f(x) for f in twice("quantize_nvfp4"))
            same = all(map(torch.equal, map(bits, got), map(bits, want)))
            found[f"quantize_nvfp4 {dtype} {n}x{k}"] = same
    return found


def layers() -> dict[str, bool]:
    """Whole layers on the last of two ranks: shares in place, two global scales made one, rows of
    gate and up in one tile, the small tensors."""
    found = {}
    for path, target in (
        ("nvfp4_trtllm", "sm100"), ("nvfp4_cutedsl", "sm100"), ("nvfp4_cutlass", "sm100"),
        ("mxfp4_triton", "sm90"), ("mxfp4_triton", "gfx950"),
    ):  # fmt: skip
        weights = synthetic(3, 96, 352, "silu", FORMAT[path], device="cuda")
        if weights.w13_scale_2 is not None:
            two = torch.stack([weights.w13_scale_2, weights.w13_scale_2 * 0.7], 1)
            weights = replace(weights, w13_scale_2=two)
        got, want = (
            prepare(path, weights, target=target, tp_size=2, tp_rank=1, impl=impl).tensors
            for impl in ("fused", "reference")
        )
        same = (torch.equal(bits(got[name]), bits(x)) for name, x in want.items())
        found[f"{path} {target}"] = all(same)
    return found


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def run(part: int, parts: int) -> int:
    """Launch every kernel, or every parts-th layout; print what differs."""
    found = routines() | layers() if part == 0 else {}
    for name in LAYOUTS_RUN[part::parts]:
        for n, k in SHAPES:
            for how in ("dense", "sliced", "turned"):
                for dtype in (torch.uint8, torch.int16):
                    if dtype == torch.uint8 or (how == "dense" and not LAYOUTS[name].bits):
                        same = layout_bytes(LAYOUTS[name], n, k, dtype, how)
                        found[f"{name} {n}x{k} {dtype} {how}"] = same
    torch.cuda.synchronize()
    wrong = [name for name, same in found.items() if not same]
    print(f"sanitize: {len(found) - len(wrong)} of {len(found)} cases equal the reference")
    print("".join(f"  differs: {name}\n" for name in wrong), end="")
    return 2 if wrong else 0


def main(argv: list[str]) -> int:
    """Both tools, side by side."""
    if not torch.cuda.is_available() or not (tool := shutil.which("compute-sanitizer")):
        print("sanitize: needs a GPU and compute-sanitizer (NO_DEVICE)", file=sys.stderr)
        return 3
    command = [sys.executable, "-m", "harness.measure.sanitize", "run"]
    if argv[:1] == ["run"]:
        part, parts = map(int, (argv[1] if argv[1:] else "0/1").split("/"))
        return run(part, parts)
    count = len(LAYOUTS_RUN)
    warm = [
        subprocess.Popen([*command, f"{i}/{count}"], stdout=subprocess.DEVNULL)
        for i in range(count)
    ]
    for filling in warm:
        filling.wait()
    # Without PyTorch's caching every tensor is an allocation of its own: its end is checked.
    env = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    started = {
        name: subprocess.Popen(
            [tool, f"--tool={name}", "--error-exitcode=9", *command],
            env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for name in TOOLS
    }  # fmt: skip
    bad = 0
    for name, process in started.items():
        text, _ = process.communicate()
        bad += process.returncode != 0
        print(f"{name}: exit {process.returncode}\n" + "\n".join(text.splitlines()[-6:]))
    return 2 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
