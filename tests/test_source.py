"""Real checkpoints of both kinds are read and swept; what is wrong with one is said by name."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from harness import UsageError, rows
from harness.__main__ import main
from harness.run import checkpoint, reader, source
from kernels import formats

P = "model.layers.0.mlp.experts"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    assert checkpoint.main([str(folder), "hidden=256", "inter=96", "experts=3"]) == 0
    return folder


@pytest.fixture
def gpt_oss(written: Path, tmp_path: Path) -> Path:
    """A copy of the one-file checkpoint that a test may spoil."""
    copy = tmp_path / "model.safetensors"
    copy.write_bytes((written / "gpt_oss" / "model.safetensors").read_bytes())
    return copy


def test_both_kinds_describe_themselves(written: Path) -> None:
    sizes = {"E": 3, "H": 256, "I": 96}
    one = reader.Checkpoint.open(str(written / "gpt_oss")).describe(0)
    assert {k: one[k] for k in sizes} == sizes
    assert (one["name"], one["format"], one["activation"]) == ("gpt_oss", "mxfp4", "swigluoai")
    two = reader.Checkpoint.open(str(written / "modelopt")).describe(0)
    assert {k: two[k] for k in sizes} == sizes
    assert (two["name"], two["format"], two["activation"]) == ("deepseek_v3", "nvfp4", "silu")


def test_what_is_read_is_what_was_quantized(written: Path) -> None:
    """Decoded again, each checkpoint is its random weights to within half a step of the format."""
    layer = reader.Checkpoint.open(str(written / "gpt_oss")).layer(0, None)
    generator = torch.Generator().manual_seed(0)
    want = checkpoint.weights(generator, 3, 192, 256).float()
    got = formats.dequantize_mxfp4(layer.w13_weight, layer.w13_scale)
    step = formats.decode_e8m0(layer.w13_scale).repeat_interleave(32, -1)
    assert bool(
        ((got - want).abs() <= step).all()
    )  # the widest half step of e2m1 is 1, times scale
    nv = reader.Checkpoint.open(str(written / "modelopt")).layer(0, None)
    generator = torch.Generator().manual_seed(1)
    want = checkpoint.weights(generator, 192, 256).float()
    got = formats.dequantize_nvfp4(nv.w13_weight[0], nv.w13_scale[0], nv.w13_scale_2[0])
    amax = want.unflatten(-1, (-1, 16)).abs().amax(-1).repeat_interleave(16, -1)
    assert bool(((got - want).abs() <= amax / 6 * 1.07).all())
    assert nv.w13_scale_2.shape == (3,)


def test_only_the_experts_asked_for_are_read(written: Path) -> None:
    for kind in ("gpt_oss", "modelopt"):
        whole = reader.Checkpoint.open(str(written / kind)).layer(0, None)
        part = reader.Checkpoint.open(str(written / kind)).layer(0, 2)
        assert part.experts == 2
        for name, x in part.tensors().items():
            assert torch.equal(x.view(torch.uint8), whole.tensors()[name][:2].view(torch.uint8))


@pytest.mark.parametrize(
    ("kind", "hw", "cells"), [("gpt_oss", "h200,gfx950", 4), ("modelopt", "b200", 6)]
)
def test_a_sweep_over_a_checkpoint(
    kind: str, hw: str, cells: int, written: Path, tmp_path: Path
) -> None:
    path = written / kind
    code = main(["sweep", f"hw={hw}", "source=safetensors", f"source.path={path}", "tp_size=1,2",
                 "workers=0", "codegen=false", "report=false",
                 f"out={tmp_path}", "run_id=s"])  # fmt: skip
    found = rows.read("s", tmp_path)
    assert code == 0, [row["reason"] for row in found]
    assert len(found) == cells
    assert {row["cell"]["source"] for row in found} == {"safetensors"}
    assert all(f"source.path={path}" in row["repro"] for row in found)


def test_a_checkpoint_of_the_other_format_is_refused_by_name(
    written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["source=safetensors", f"source.path={written / 'modelopt'}", f"out={tmp_path}"]
    assert main(["sweep", "hw=h200", *argv]) == 4
    assert "the checkpoint is nvfp4" in capsys.readouterr().err
    assert main(["sweep", "hw=h200", "path=mxfp4_triton", "tp_size=1", "workers=0",
                 "report=false", *argv,
                 "run_id=r"]) == 3  # fmt: skip
    assert "starts from mxfp4, the source is nvfp4" in rows.read("r", tmp_path)[0]["reason"]


def rewrite(file: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(str(file))
    change(tensors)
    save_file(tensors, str(file))


def drop(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[f"{P}.{name}"]

    return change


def rename(old: str, new: str) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors.__setitem__(f"{P}.{new}", tensors.pop(f"{P}.{old}"))


def put(name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], None]:
    return lambda tensors: tensors.__setitem__(f"{P}.{name}", make(tensors[f"{P}.{name}"]))


@pytest.mark.parametrize(
    ("change", "tensor", "says"),
    [
        (drop("down_proj_scales"), "down_proj_scales", "is missing"),
        (rename("down_proj_scales", "down_proj_scale"), "down_proj_scales", "there is"),
        (put("gate_up_proj_scales", torch.Tensor.float), "gate_up_proj_scales", "is F32"),
        (put("gate_up_proj_bias", torch.Tensor.half), "gate_up_proj_bias", "want BF16"),
        (put("down_proj_blocks", lambda x: x[:, :-1].clone()), "down_proj_", "want [3, 25"),
        (put("down_proj_scales", lambda x: x[..., None].clone()), "down_proj_scales", "3 axes"),
    ],
)
def test_a_spoilt_tensor_is_named(
    change: Callable[[Any], None], tensor: str, says: str, gpt_oss: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    rewrite(gpt_oss, change)
    out = tmp_path / "runs"
    assert (
        main(["sweep", "hw=h200", "source=safetensors", f"source.path={gpt_oss}", f"out={out}"])
        == 4
    )
    said = capsys.readouterr().err
    assert tensor in said
    assert says in said
    assert not out.exists()


def test_a_file_that_is_cut_short_is_refused(gpt_oss: Path) -> None:
    data = gpt_oss.read_bytes()
    for keep in (0, 7, 8, 100, len(data) - 1):
        gpt_oss.write_bytes(data[:keep])
        with pytest.raises(UsageError, match="cut short|no safetensors"):
            reader.Checkpoint.open(str(gpt_oss)).describe(0)


@pytest.mark.parametrize(
    "header",
    [
        {"a": {"dtype": "U8", "shape": [1 << 50], "data_offsets": [0, 1 << 50]}},
        {"a": {"dtype": "U8", "shape": [1 << 40, 1 << 40], "data_offsets": [0, 8]}},
        {"a": {"dtype": "U8", "shape": [-1], "data_offsets": [0, 8]}},
        {"a": {"dtype": "U8", "shape": [8], "data_offsets": [8, 0]}},
        {"a": {"dtype": "U9", "shape": [8], "data_offsets": [0, 8]}},
        {"a": {"dtype": "U8", "shape": "8", "data_offsets": [0, 8]}},
        {"a": {"dtype": "U8", "shape": [8]}},
        {"a": 3},
        [1, 2],
    ],
)
def test_a_lying_header_costs_no_memory(header: object, tmp_path: Path) -> None:
    text = json.dumps(header).encode()
    file = tmp_path / "a.safetensors"
    file.write_bytes(struct.pack("<Q", len(text)) + text + b"\0" * 8)
    with pytest.raises(UsageError, match="tensor 'a'|no JSON object"):
        reader.header(file)


def test_an_index_cannot_point_outside_or_at_nothing(written: Path, tmp_path: Path) -> None:
    for file in (written / "modelopt").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    index = tmp_path / "model.safetensors.index.json"
    kept = json.loads(index.read_text())["weight_map"]
    name = next(iter(kept))
    for target, says in (
        ("../../etc/passwd", "no file name"), ("gone.safetensors", "is missing"),
        (7, "no file name"),
        ("model-00002-of-00002.safetensors", "is not in"),
    ):  # fmt: skip
        index.write_text(json.dumps({"weight_map": kept | {name: target}}))
        with pytest.raises(UsageError, match=says) as caught:
            reader.Checkpoint.open(str(tmp_path))
        assert name in str(caught.value)


def test_missing_layers_and_folders_say_what_there_is(written: Path, tmp_path: Path) -> None:
    opened = reader.Checkpoint.open(str(written / "gpt_oss"))
    with pytest.raises(UsageError, match="no layer 7 with experts; layers: 0"):
        opened.describe(7)
    with pytest.raises(UsageError, match=r"no \.safetensors file"):
        reader.Checkpoint.open(str(tmp_path))
    save_file({"lm_head.weight": torch.zeros(2)}, str(tmp_path / "x.safetensors"))
    with pytest.raises(UsageError, match=r"there are lm_head\.weight"):
        reader.Checkpoint.open(str(tmp_path)).describe(0)


def test_a_bias_with_nan_is_named(gpt_oss: Path) -> None:
    rewrite(gpt_oss, put("down_proj_bias", lambda x: x * torch.nan))
    with pytest.raises(UsageError, match="down_proj_bias.*Inf or NaN"):
        reader.Checkpoint.open(str(gpt_oss)).layer(0, None)


def test_synthetic_weights_cover_their_formats_and_are_seeded() -> None:
    for form in ("mxfp4", "nvfp4", "bf16"):
        one = source.synthetic(2, 256, 128, "silu", form, seed=3)
        two = source.synthetic(2, 256, 128, "silu", form, seed=3)
        other = source.synthetic(2, 256, 128, "silu", form, seed=4)
        for name, x in one.tensors().items():
            assert torch.equal(x.view(torch.uint8), two.tensors()[name].view(torch.uint8)), name
            assert not torch.equal(x.view(torch.uint8), other.tensors()[name].view(torch.uint8)), (
                name
            )
        if form != "bf16":
            assert len(one.w13_weight.unique()) == 256
            scale = one.w13_scale.view(torch.uint8)
            assert len(scale.unique()) == (64 if form == "mxfp4" else 127)
            assert int((scale & 127).max()) < 127 or form == "mxfp4"
        else:
            assert bool(torch.isfinite(one.w13_weight).all())


def test_no_two_stretches_of_a_large_source_are_equal() -> None:
    data = source._random(5 * 8 * source._CHUNK // 2, seed=0)
    parts = data.unflatten(0, (5, -1))
    assert len({bytes(part[:64].tolist()) for part in parts}) == 5
