"""Sweeps end to end: rows, manifest, exit codes, refusals, and a wrong layout that is caught."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from harness import rows
from harness.__main__ import main
from harness.plan import grid
from harness.plan.routines import ROUTINES
from harness.run import runs

ROOT = Path(__file__).parent.parent
HERE = ["workers=0", "codegen=false", "report=false"]


def run(tmp_path: Path, *overrides: str) -> tuple[int, list[rows.Row]]:
    """A sweep in this process: its exit code and rows."""
    code = main(["sweep", *overrides, *HERE, f"out={tmp_path}", "run_id=one"])
    return code, rows.read("one", tmp_path)


@pytest.mark.parametrize("hw", ["h200", "b200", "gfx950"])
def test_every_default_path_of_a_target(
    hw: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = run(tmp_path, f"hw={hw}", "model=ragged,nemotron_nano", "tp_size=1,8")
    assert code == 0, [row["reason"] for row in found]
    paths = 5 if hw == "b200" else 2
    assert len(found) == paths * 2 * 2
    for row in found:
        rows.validate(row)
        assert row["status"] == "ok"
        assert set(row["digests"]) >= {"w13_weight", "w13_scale", "w2_weight", "w2_scale"}
        assert set(row["layouts"]) <= set(row["digests"])
        assert row["time"] is None
        assert row["time_absent"] == "NO_DEVICE"
        assert row["memory"]["output_bytes"] > 0
        done = set(row["checks"])
        assert done >= {
            "bijection", "inverse", "formula", "values", "pad_fill", "strides", "poisoned_source",
            "written_whole", "mutation", "real_inverse", "real_formula", "inputs_unchanged",
            "shards_equal_whole", "consumer_reads_it", "order",
        }  # fmt: skip
    out = capsys.readouterr().out
    assert out.rstrip().splitlines()[-1] == f"run: {tmp_path / 'one'}"
    assert "time measured for 0 of" in out


def test_the_manifest_holds_every_cell_before_any_row(tmp_path: Path) -> None:
    planned = grid.plan(["hw=b200", "model=ragged", f"out={tmp_path}", "run_id=m"])
    folder = runs.make_folder(planned, ["hw=b200"])
    manifest = rows.manifest("m", tmp_path)
    assert not (folder / "rows.jsonl").exists()
    assert grid.thaw(manifest) == planned.cells
    assert manifest["count"] == len(planned.cells) == 20
    assert str(Path.home()) not in json.dumps(manifest["machine"])


def test_the_same_cell_gives_the_same_bytes_twice(tmp_path: Path) -> None:
    one = run(tmp_path / "a", "hw=h200", "model=ragged", "path=mxfp4_triton", "tp_size=2")[1]
    two = run(tmp_path / "b", "hw=h200", "model=ragged", "path=mxfp4_triton", "tp_size=2")[1]
    assert one[0]["digests"] == two[0]["digests"]
    other = run(
        tmp_path / "c", "hw=h200", "model=ragged", "path=mxfp4_triton", "tp_size=2", "seed=1"
    )
    assert one[0]["digests"] != other[1][0]["digests"]


def test_every_routine_is_a_path(tmp_path: Path) -> None:
    names = ",".join(ROUTINES)
    code, found = run(tmp_path, "hw=h200", f"path={names}", "model=ragged,gpt_oss_20b", "tp_size=1")
    assert code == 0, [row["reason"] for row in found if row["status"] != "refused"]
    by_name = {(row["cell"]["path"], row["cell"]["model"]): row for row in found}
    assert len(by_name) == 2 * len(ROUTINES)
    refused = {key for key, row in by_name.items() if row["status"] == "refused"}
    trtllm = "prepare_static_weights_for_trtllm_fp4_moe"
    assert refused == {(trtllm, "ragged"), (trtllm, "gpt_oss_20b")}
    assert "must be divisible by 128" in by_name[trtllm, "ragged"]["reason"]


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["tp_size=2", "tp_rank=2"], "tp_rank"),
        (["model.H=33"], "33"),
        (["model.I=7"], "7"),
        (["path=reorder_w1w3_to_w3w1", "model=nemotron_nano"], "has no gate"),
        (["path=nvfp4_trtllm"], "no kernel on sm90"),
        (["ep_size=9"], "9"),
    ],
)
def test_what_cannot_be_done_is_refused_with_its_reason(
    overrides: list[str], says: str, tmp_path: Path
) -> None:
    base = {"hw": "h200", "model": "ragged", "path": "mxfp4_triton", "tp_size": "1"}
    named = {text.split("=")[0] for text in overrides}
    given = [f"{k}={v}" for k, v in base.items() if k not in named]
    code, found = run(tmp_path, *given, *overrides)
    assert code == 3  # nothing was verified
    assert [row["status"] for row in found] == ["refused"]
    assert says in found[0]["reason"]


def test_one_group_and_one_row_are_served(tmp_path: Path) -> None:
    code, found = run(tmp_path, "hw=h200,gfx950,b200", "model=ragged", "model.H=32", "model.I=32",
                      "tp_size=1,2")  # fmt: skip
    assert code == 0
    assert {row["status"] for row in found} == {"ok"}


def test_a_cell_that_cannot_fit_says_so_before_it_starts(tmp_path: Path) -> None:
    code, found = run(tmp_path, "hw=b200", "model=kimi_k2,ragged", "path=nvfp4_trtllm", "size=full",
                      "tp_size=1", "memory_gib=2")  # fmt: skip
    assert code == 0
    by_model = {row["cell"]["model"]: row for row in found}
    assert by_model["ragged"]["status"] == "ok"
    assert by_model["ragged"]["cell"]["experts"] == 5
    big = by_model["kimi_k2"]
    assert (big["status"], big["time_absent"]) == ("skipped", "OOM")
    assert "384 experts would take about" in big["reason"]


def test_usage_errors_leave_no_run_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for argv, says in (
        (["hw=b2000"], "did you mean b200"),
        (["hw=b200", "tp_size=0"], "tp_size=0: want at least 1"),
        (["hw=b200", "experts=0"], "experts=0: want at least 1"),
        (["hw=b200", "run_id=../x"], "run_id='../x'"),
        (["hw=b200", "model=glob(zzz*)"], "no value left"),
        (["source=safetensors", "source.path=nowhere"], "there is no such file"),
    ):
        assert main(["sweep", *argv, f"out={tmp_path}"]) == 4
        assert says in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_taken_run_id_is_not_overwritten(tmp_path: Path) -> None:
    assert run(tmp_path, "hw=h200", "model=ragged", "path=mxfp4_triton", "tp_size=1")[0] == 0
    before = (tmp_path / "one" / "rows.jsonl").read_bytes()
    assert run(tmp_path, "hw=h200", "model=ragged", "path=mxfp4_triton", "tp_size=1")[0] == 4
    assert (tmp_path / "one" / "rows.jsonl").read_bytes() == before


def test_ten_thousand_cells_are_planned_at_once() -> None:
    import time

    start = time.process_time()
    planned = grid.plan(["hw=b200", "seed=range(0,46)"])
    assert len(planned.cells) == 46 * 220
    assert len({cell["key"] for cell in planned.cells}) == 46 * 220
    assert time.process_time() - start < 5


@pytest.mark.parametrize(
    ("layout", "old", "new", "path", "hw"),
    [
        ("block_scale_128x4", "(ni no kk)", "(no ni kk)", "nvfp4_cutlass", "b200"),
        ("hopper_value", "(r1 s t1 q w1 w0 c)", "(r1 s t1 q w0 w1 c)", "mxfp4_triton", "h200"),
        ("cdna4_scale", "(rk c n b a)", "(rk c n a b)", "mxfp4_triton", "gfx950"),
    ],
)
def test_a_wrong_layout_makes_the_sweep_exit_2_and_names_the_place(
    layout: str, old: str, new: str, path: str, hw: str, tmp_path: Path
) -> None:
    """Two axes swapped in the catalog of a scratch copy: forward, inverse and index map agree with
    each other and are all wrong, so only the vendor's formula can tell."""
    for folder in ("kernels", "harness", "conf"):
        shutil.copytree(
            ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__")
        )
    catalog = tmp_path / "kernels" / "catalog.py"
    text = catalog.read_text()
    assert old in text
    catalog.write_text(text.replace(old, new))
    done = subprocess.run(
        [sys.executable, "-m", "harness", "sweep", f"hw={hw}", "model=ragged", f"path={path}",
         "tp_size=1", "workers=0", "codegen=false", "report=false",
         "run_id=x"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stdout + done.stderr
    said = " ".join(done.stdout.split())
    assert f"{hw} ragged {path} tp_size=1" in said
    assert "wrong: formula: w" in said
    assert "first at [0, " in said
    (row,) = rows.read(tmp_path / "results" / "runs" / "x")
    assert row["status"] == "wrong"
    assert row["time_absent"] == "INCORRECT"
    assert layout in row["reason"]
