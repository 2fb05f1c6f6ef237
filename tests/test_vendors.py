"""The real libraries, in their envs: two Triton versions, both triton_kernels, FlashInfer on the
CPU.

Builds what the cache of environments lacks (about 800 MB of wheels, once; most of it Triton, and
vLLM's wheel, of which one folder is kept). Where the index cannot be reached the tests are skipped
with pip's reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from harness.compare import versions as compare_env
from harness.env import envs
from harness.env import worker as env_worker
from harness.env.envs import EnvError
from harness.env.worker import Worker
from harness.plan import grid
from harness.vendor import table

pytestmark = pytest.mark.timeout(600)


def built(name: str) -> envs.Env:
    env = envs.load(name)
    try:
        envs.sync(env)
    except EnvError as error:
        pytest.skip(f"env {name} cannot be built here: {error}")
    return env


def verdicts(env: str, vendor: str) -> dict[tuple[str, str], str]:
    """(layout, n x k) -> verdict, and its detail where it has one."""
    with Worker(built(env)) as worker:
        found = worker.call("layouts", 300, name=vendor)
    return {
        (r["layout"], "x".join(map(str, r["shape"]))): f"{r['verdict']}: {r['detail']}".strip(": ")
        for r in found
    }


@pytest.fixture(autouse=True)
def _no_workers_left() -> Iterator[None]:
    yield
    env_worker.close_all()


def test_triton_kernels_3_5_as_vllm_vendors_it() -> None:
    found = verdicts("tk35", "triton_kernels")
    for layout in ("hopper_value_v2", "hopper_value_v3", "blackwell_value", "blackwell_scale"):
        assert {v for (name, _), v in found.items() if name == layout} == {"equal"}
    # It refuses CDNA4 scales that are not whole 32 x 8 tiles (gpt-oss has 90 groups) ...
    assert found["cdna4_scale", "256x8"] == "equal"
    assert found["cdna4_scale", "2880x90"].startswith("refused: ")
    # ... and pads Hopper scale groups to 2 where the consumer reads 4: 90 groups are 2 short.
    assert found["hopper_scale_w8", "512x92"] == "equal"
    assert "529920 bytes an expert and 541696" in found["hopper_scale_w8", "5760x90"]
    assert found["gfx1250_scale", "256x8"].startswith("absent: ")


def test_triton_kernels_3_8_leaves_blackwell_padding_unwritten() -> None:
    found = verdicts("tk38", "triton_kernels")
    for layout in ("hopper_value_v3", "hopper_scale_w8", "blackwell_scale", "cdna4_scale"):
        assert {v for (name, _), v in found.items() if name == layout} == {"equal"}
    assert found["blackwell_value", "256x128"] == "equal"
    assert found["blackwell_value", "2880x1440"].startswith(
        "differs: padding only: 552960 of 8847360 bytes, first at expert 0, offset 1440: 0xff"
    )
    # Fewer than 4 groups are not padded to the 4 that its own kernel's tile has.
    assert "128 bytes an expert and 512" in found["gfx1250_scale", "32x1"]


def test_flashinfer_on_the_cpu() -> None:
    found = verdicts("flashinfer013", "flashinfer")
    for layout in ("gate_up_interleave_1", "cutedsl_mma_view"):
        assert {v for (name, _), v in found.items() if name == layout} == {"equal"}
    assert found["trtllm_shuffle_32", "2880x1440"] == "equal"
    assert found["trtllm_w13", "256x128"] == "equal"
    assert found["trtllm_shuffle_32", "130x48"].startswith("refused: ")
    assert found["block_scale_128x4", "256x8"].startswith("absent: ")
    assert "needs a GPU" in found["block_scale_128x4", "256x8"]


def test_a_sweep_runs_each_cell_under_its_versions() -> None:
    built("tk35"), built("tk38")
    planned = grid.plan(
        [
            "hw=b200",
            "model=ragged",
            "path=mxfp4_triton",
            "tp_size=1",
            "env=tk35,tk38",
            "impl=triton_kernels",
        ]
    )
    by: dict[str, dict[str, Any]] = {
        cell["env"]["name"]: env_worker.execute(cell, {}) for cell in planned.cells
    }
    assert by["tk35"]["provenance"]["triton"] == "3.6.0"
    assert by["tk38"]["provenance"]["triton"] == "3.8.0"
    assert by["tk35"]["provenance"]["triton_kernels"].startswith("3.5")
    assert by["tk38"]["cell"]["generation"] == "3.8"
    assert by["tk35"]["status"] == "ok", by["tk35"]["reason"]
    assert by["tk38"]["status"] == "wrong"
    assert "padding of blackwell_value" in by["tk38"]["reason"]


def test_compare_says_where_two_implementations_differ(capsys: pytest.CaptureFixture[str]) -> None:
    built("tk38")
    code = compare_env.main(
        ["env=tk38", "impl=reference,triton_kernels", "hw=b200", "model=ragged", "tp_size=1",
         "path=mxfp4_triton", "judge=false"]
    )  # fmt: skip
    said = capsys.readouterr().out
    assert code == 1
    assert "impl: reference | triton_kernels; compared 1 of 1 cells" in said
    assert "bytes w13_weight: blackwell_value of" in said
    assert "padding only" in said
    assert "python -m harness sweep hw=b200 model=ragged path=mxfp4_triton" in said


def test_the_table_of_a_missing_env_says_not_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("FP4_MOE_ENVS", str(tmp_path))
    columns = (("tk35", "triton_kernels", "old"),)
    (record,) = table.collect(columns)
    assert record.verdict == "absent"
    assert record.detail.startswith("NOT_INSTALLED: ")
    text = "\n".join(table._lines([record], columns))
    assert "NOT_INSTALLED" in text
