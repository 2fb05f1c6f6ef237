"""`python -m harness checkpoint [FOLDER] [hidden=.. inter=.. experts=.. seed=..]`: FP4 checkpoints
to try.

Writes FOLDER/gpt_oss (MXFP4, one file) and FOLDER/modelopt (NVFP4, two shards and an index): one
layer each of random weights, quantized by this project and named as the real checkpoints name
them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from harness import UsageError, suggest

DEFAULTS = {"hidden": 704, "inter": 352, "experts": 4, "layer": 0, "seed": 0}
T = torch.Tensor


def main(argv: list[str]) -> int:
    """Writes both kinds and prints how to sweep them."""
    if argv and argv[0] in ("-h", "--help"):
        print(__doc__)
        return 0
    sizes = dict(DEFAULTS)
    folder = Path("outputs") / "checkpoints"
    for text in argv:
        key, equals, value = text.partition("=")
        if not equals:
            folder = Path(text)
        elif key not in sizes:
            raise UsageError(f"no setting {key!r}{suggest(key, list(sizes))}")
        elif not value.isdigit():
            raise UsageError(f"{text}: want a whole number")
        else:
            sizes[key] = int(value)
    if sizes["hidden"] % 32 or sizes["inter"] % 32 or min(sizes["hidden"], sizes["inter"]) < 32:
        raise UsageError(
            "hidden and inter must be multiples of 32: MXFP4 checkpoints hold whole blocks"
        )
    if sizes["experts"] < 1:
        raise UsageError("experts=0: a layer has at least one")
    for write, kind, target in (
        (gpt_oss, "gpt_oss", "h200"), (modelopt, "modelopt", "b200"),
    ):  # fmt: skip
        where = folder / kind
        try:
            where.mkdir(parents=True, exist_ok=True)
            write(where, **sizes)
        except OSError as error:
            raise UsageError(f"{where} cannot be written: {error.strerror}") from None
        print(
            f"{where}: python -m harness sweep hw={target} source=safetensors source.path={where}"
        )
    return 0


def weights(generator: torch.Generator, *shape: int) -> T:
    """Normal weights of the spread that such layers have, bf16."""
    return (torch.randn(*shape, generator=generator) * 0.02).to(torch.bfloat16)


def gpt_oss(folder: Path, hidden: int, inter: int, experts: int, layer: int, seed: int) -> None:
    """gpt-oss names: blocks [E, rows, K/32, 16], scales [E, rows, K/32], rows gate0, up0, ..."""
    from kernels.reference.quantize import downcast_to_mxfp

    generator = torch.Generator().manual_seed(seed)
    prefix = f"model.layers.{layer}.mlp.experts"
    tensors: dict[str, T] = {}
    for name, rows, k in (("gate_up_proj", 2 * inter, hidden), ("down_proj", hidden, inter)):
        codes, scale, *_ = downcast_to_mxfp(weights(generator, experts, rows, k), 2)
        tensors[f"{prefix}.{name}_blocks"] = codes.reshape(experts, rows, k // 32, 16)
        tensors[f"{prefix}.{name}_scales"] = scale.contiguous()
        tensors[f"{prefix}.{name}_bias"] = weights(generator, experts, rows)
    save_file(tensors, str(folder / "model.safetensors"))
    _config(folder, model_type="gpt_oss", hidden_size=hidden, intermediate_size=inter,
            num_local_experts=experts, num_experts_per_tok=min(4, experts))  # fmt: skip


def modelopt(folder: Path, hidden: int, inter: int, experts: int, layer: int, seed: int) -> None:
    """ModelOpt names, an expert at a time, over two files and an index."""
    from kernels.reference.quantize import quantize_nvfp4

    generator = torch.Generator().manual_seed(seed + 1)
    prefix = f"model.layers.{layer}.mlp.experts"
    shards: list[dict[str, T]] = [{}, {}]
    for expert in range(experts):
        both = weights(generator, 2 * inter, hidden)
        down = weights(generator, hidden, inter)
        # gate and up are quantized together: a fused kernel takes one global scale for both
        for names, matrix in ((("gate_proj", "up_proj"), both), (("down_proj",), down)):
            codes, scale, scale_2 = quantize_nvfp4(matrix)
            rows = matrix.shape[0] // len(names)
            for part, name in enumerate(names):
                own = slice(part * rows, (part + 1) * rows)
                base, out = f"{prefix}.{expert}.{name}", shards[expert % 2]
                out[f"{base}.weight"] = codes[own].contiguous()
                out[f"{base}.weight_scale"] = scale[own].contiguous()
                out[f"{base}.weight_scale_2"] = torch.as_tensor(scale_2).float().reshape(()).clone()
                amax = 1 + torch.rand((), generator=generator)
                out[f"{base}.input_scale"] = amax / (6 * 448)
    index: dict[str, str] = {}
    for number, tensors in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(tensors, str(folder / file))
        index |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": index}, indent=1)
    )
    _config(folder, model_type="deepseek_v3", hidden_act="silu", hidden_size=hidden,
            moe_intermediate_size=inter, n_routed_experts=experts,
            num_experts_per_tok=min(8, experts))  # fmt: skip


def _config(folder: Path, **values: Any) -> None:
    (folder / "config.json").write_text(json.dumps(values, indent=1))
