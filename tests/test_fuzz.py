"""2,000 random overrides, shapes, dtypes and mangled safetensors headers, seeded: each time a
result or an error that says in a sentence what is wrong; no other exception, and no hang."""

from __future__ import annotations

import json
import random
import struct
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import kernels
from harness import UsageError, rows
from harness.plan import config, grid
from harness.run.cell import run_cell
from harness.run.reader import Checkpoint
from kernels.errors import LayoutError

OVERRIDES, SHAPES, CELLS, HEADERS = 400, 700, 100, 800
assert OVERRIDES + SHAPES + CELLS + HEADERS == 2000
ODD = [
    "", " ", "null", "true", "nan", "inf", "-1", "0", "1e400", "99999999999999999999", "1.5", "a,b",
    "[1,2]", "{a:1}", "'", '"', "\\", "$", "${hw}", "${oc.env:HOME}", "${a:", "../../etc/passwd",
    "glob(*)", "glob(zzz)", "range(0,3)", "range(5,0)", "choice(1,2)", "sort(1)", "interval(0,1)",
    "b200", "h2oo", "é", "\x00", "\n", "x" * 5000, "=", "==", "???", "_target_", "1,2,4", "0,1",
]  # fmt: skip


def sentence(error: BaseException) -> str:
    """The message, which must be one a person can use."""
    text = str(error)
    assert 8 <= len(text) < 12_000, repr(text[:200])
    assert "Traceback" not in text
    assert " object at 0x" not in text
    return text


def overrides(dice: random.Random) -> list[str]:
    keys = [*config.Config.__annotations__, *(f"model.{k}" for k in "EHI"), "source.path",
            "source.layer", "impl.import", "env.python", "hydra.x", "nonsense", "hw.arch", "a.b.c",
            "timing.min_samples"]  # fmt: skip
    out = ["path=swizzle_blockscale", "model=ragged", "tp_size=1"]
    for _ in range(dice.randint(1, 3)):
        key, value = dice.choice(keys), dice.choice(ODD)
        if dice.random() < 0.3:
            value += dice.choice(ODD)
        text = f"{dice.choice(['', '', '', '+', '++', '~'])}{key}={value}"
        if dice.random() < 0.2:
            at = dice.randrange(len(text))
            text = text[:at] + chr(dice.randrange(32, 0x250)) + text[at + 1 :]
        out.append(text)
    dice.shuffle(out)
    return out


def test_overrides() -> None:
    dice, seen = random.Random(1), Counter[str]()
    for turn in range(OVERRIDES):
        given = overrides(dice)
        start = time.monotonic()
        try:
            planned = grid.plan(given)
            assert planned.cells
            seen["planned"] += 1
        except UsageError as error:
            sentence(error)
            seen["refused"] += 1
        except Exception as error:
            pytest.fail(f"turn {turn}: {given!r:.400}: {type(error).__name__}: {error!s:.300}")
        assert time.monotonic() - start < 30
    assert seen["refused"] > OVERRIDES / 3
    assert seen["planned"] > 5


DTYPES = (torch.uint8, torch.int8, torch.int32, torch.float16, torch.bfloat16, torch.float32,
          torch.float64, torch.bool, torch.float8_e4m3fn)  # fmt: skip


def tensor(dice: random.Random, dtypes: tuple[torch.dtype, ...] = DTYPES) -> torch.Tensor:
    sizes = (0, 1, 2, 3, 4, 5, 8, 16, 31, 32, 33, 64, 90, 96, 128, 130)
    shape = [dice.choice(sizes) for _ in range(dice.randint(0, 4))]
    made = torch.zeros(shape, dtype=torch.uint8).to(dice.choice(dtypes))
    if made.dim() > 1 and dice.random() < 0.3:
        made = made.transpose(-1, -2)
    return made


ONE = (
    "swizzle_blockscale", "nvfp4_block_scale_interleave", "interleave_linear_and_gate",
    "nvfp4_swizzled_scale_to_cutedsl_mma_view", "mxfp4_quantize", "unpack_e2m1", "pack_e2m1",
)  # fmt: skip
TWO = ("reorder_w1w3_to_w3w1", "swizzle_mxfp4", "dequantize_mxfp4")


def calls(dice: random.Random) -> tuple[str, list[Any], dict[str, Any]]:
    name = dice.choice(ONE + TWO)
    # half of the calls get a dtype that the routine may take, so that shapes are tried as well
    good = (torch.uint8, torch.float8_e4m3fn) if dice.random() < 0.5 else DTYPES
    given = [tensor(dice, good) for _ in range(2 if name in TWO else 1)]
    options: dict[str, Any] = {}
    if name == "swizzle_mxfp4":
        options = {"target": dice.choice(["sm90", "sm100", "gfx950", "sm80", "sm1", ""])}
    if name == "interleave_linear_and_gate":
        options = {"group_size": dice.choice([0, -1, 1, 8, 64]), "dim": dice.randint(-5, 5)}
    return name, given, options


def test_shapes_and_dtypes() -> None:
    dice, seen = random.Random(2), Counter[str]()
    for turn in range(SHAPES):
        name, given, options = calls(dice)
        shapes = [(x.dtype, list(x.shape), x.stride()) for x in given]
        try:
            kernels.resolve(name, "reference")(*given, **options)
            seen["served"] += 1
        except LayoutError as error:
            sentence(error)
            seen["refused"] += 1
        except Exception as error:
            pytest.fail(f"turn {turn}: {name}{shapes} {options}: {type(error).__name__}: {error}")
    assert seen["refused"] > 100
    assert seen["served"] > 50


def test_cells_of_random_sizes() -> None:
    """Through the harness: every outcome is a valid row, and none is crashed."""
    dice = random.Random(3)
    paths = [
        "mxfp4_triton",
        "nvfp4_cutlass",
        "nvfp4_trtllm",
        "swizzle_blockscale",
        "downcast_to_mxfp",
    ]
    (base,) = grid.plan(
        ["hw=b200", "model=ragged", "path=mxfp4_triton", "tp_size=1", "codegen=false",
         "judge=false", "experts=1"]
    ).cells  # fmt: skip
    options = {name: config.plain(config.hydra_config([f"path={name}"]))["path"] for name in paths}
    for turn in range(CELLS):
        name, sizes = dice.choice(paths), {}
        for key in ("H", "I"):
            sizes[key] = dice.choice([1, 2, 7, 16, 31, 32, 33, 48, 64, 90, 96, 128, 160, 257])
        tp = dice.choice([1, 2, 3, 5, 8, 64])
        rank = dice.choice([0, 0, 1, tp - 1, tp, -1])
        activation = dice.choice(["silu", "swigluoai", "relu2_no_mul", "nonsense", ""])
        model = base["model"] | sizes | {"activation": activation}
        cell = base | {"path": options[name], "model": model, "tp_size": tp, "tp_rank": rank}
        cell["cell"] = base["cell"] | {"path": name, "tp_size": tp, "tp_rank": rank}
        row = run_cell(cell)
        rows.validate(row)
        told = f"turn {turn}: {name} {sizes} {activation!r} tp {rank}/{tp}: {row['reason']}"
        assert row["status"] in ("ok", "refused"), told
        if row["status"] == "refused":
            sentence(LayoutError(row["reason"]))


def headers(dice: random.Random) -> Iterator[bytes]:
    """Bytes of files: a right header with a few things made wrong, or a right file cut and hit."""
    wild: list[Any] = [None, -1, 0, 1, 2**31, 2**62, 2**80, 1.5, "x", [], {}, [0], [1, 2], True,
                       "U8", "F4", [0, 2**63], [8, 0], "../x"]  # fmt: skip
    while True:
        expert = "model.layers.0.mlp.experts."
        made: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at = 0
        for name, shape in (
            ("gate_up_proj_blocks", [2, 64, 1, 16]), ("gate_up_proj_scales", [2, 64, 1]),
            ("down_proj_blocks", [2, 32, 1, 16]), ("down_proj_scales", [2, 32, 1]),
            ("gate_up_proj_bias", [2, 64]), ("down_proj_bias", [2, 32]),
        ):  # fmt: skip
            dtype = "BF16" if name.endswith("bias") else "U8"
            size = torch.Size(shape).numel() * (2 if dtype == "BF16" else 1)
            made[expert + name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
            at += size
        for _ in range(dice.randint(0, 3)):
            entry = made[dice.choice([key for key in made if key != "__metadata__"])]
            if isinstance(entry, dict) and entry:
                key = dice.choice(list(entry))
                if isinstance(entry[key], list) and entry[key] and dice.random() < 0.6:
                    entry[key][dice.randrange(len(entry[key]))] = dice.choice(wild)
                else:
                    entry[key] = dice.choice(wild)
        if dice.random() < 0.2:
            made[
                dice.choice(["../../../etc/x", "", "\x00", "model.layers.99999999999999999999.a"])
            ] = dice.choice(wild)
        text = json.dumps(made).encode()
        length = len(text) if dice.random() < 0.8 else dice.choice([0, 1, 2**31, 2**63, 2**64 - 1])
        whole = bytearray(struct.pack("<Q", length) + text + bytes(at))
        for _ in range(dice.choice([0, 0, 0, 1, 5])):
            whole[dice.randrange(min(len(whole), len(text) + 8))] = dice.randrange(256)
        if dice.random() < 0.2:
            del whole[dice.randrange(len(whole)) :]
        yield bytes(whole)


def test_mangled_headers(tmp_path: Path) -> None:
    """Whatever a header claims, nothing of its size is allocated before it is found to be so."""
    dice, seen = random.Random(4), Counter[str]()
    made = headers(dice)
    for turn in range(HEADERS):
        file = tmp_path / f"{turn}.safetensors"
        data = next(made)
        file.write_bytes(data)
        try:
            found = Checkpoint.open(str(file))
            model = found.describe(0)
            found.layer(0, 1)
            assert rows.safe_name(str(model["name"])) == model["name"]
            seen["read"] += 1
        except (UsageError, LayoutError) as error:
            sentence(error)
            seen["refused"] += 1
        except Exception as error:
            pytest.fail(f"turn {turn}: {type(error).__name__}: {error!s:.300}; {data[:600]!r}")
        file.unlink()
    assert seen["refused"] > HEADERS / 2
    assert seen["read"] > 20
