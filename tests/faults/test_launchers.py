"""The same grid through every launcher: same cells, same digests; and what a kill leaves behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import faulty_sweeps as faulty
import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from harness import UsageError, rows
from harness.run import launch, launch_ray, pool
from harness.run.journal import state_of

GRID = [
    "hw=b200", "model=ragged", "path=nvfp4_cutlass,swizzle_blockscale", "tp_size=1,2",
    "codegen=false", "report=false",
]  # fmt: skip


def sweep(out: Path, name: str, *more: str) -> dict[str, rows.Row]:
    """Through the command line in a process of its own; rows by cell."""
    done = subprocess.run(
        [sys.executable, "-m", "harness", "sweep", *GRID, f"out={out}", f"run_id={name}", *more],
        capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    log = [path.read_text() for path in (out / name).glob("launches/*/log.txt")]
    assert done.returncode == 0, (done.stdout, done.stderr, log)
    assert state_of(out / name) == "done"
    found = rows.read(out / name)
    for row in found:
        rows.validate(row)
    assert len(found) == 4
    return {rows.key(row["cell"]): row for row in found}


@pytest.fixture(scope="module")
def basic(tmp_path_factory: pytest.TempPathFactory) -> dict[str, rows.Row]:
    return sweep(tmp_path_factory.mktemp("basic"), "basic")


def same(found: dict[str, rows.Row], want: dict[str, rows.Row]) -> None:
    assert set(found) == set(want)
    for key, row in found.items():
        assert row["status"] == want[key]["status"] == "ok"
        assert row["digests"] == want[key]["digests"]
        assert row["checks"] == want[key]["checks"]
        assert row["repro"] == want[key]["repro"]


@pytest.mark.parametrize("launcher", ["joblib", "submitit_local"])
def test_same_digests_through_hydra_launchers(
    launcher: str, tmp_path: Path, basic: dict[str, rows.Row]
) -> None:
    same(sweep(tmp_path, launcher, f"hydra/launcher={launcher}", "batches=2"), basic)
    assert len(list(tmp_path.glob("*/launches/*/rows*.jsonl"))) == 2


def test_same_digests_on_a_ray_cluster_of_two_nodes(
    tmp_path: Path, basic: dict[str, rows.Row]
) -> None:
    cluster = (
        "import sys\n"
        "from ray.cluster_utils import Cluster\n"
        "head = {'num_cpus': 1, 'include_dashboard': False}\n"
        "made = Cluster(initialize_head=True, head_node_args=head)\n"
        "made.add_node(num_cpus=1)\n"
        "print(made.address, flush=True)\n"
        "sys.stdin.read()\n"
        "made.shutdown()\n"
    )
    ray = subprocess.Popen(
        [sys.executable, "-c", cluster], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    with ray:
        assert ray.stdout is not None
        address = ray.stdout.readline().strip()
        given = ("hydra/launcher=ray", f"hydra.launcher.address='{address}'", "batches=2")
        same(sweep(tmp_path, "ray", *given), basic)
        ray.communicate(timeout=60)
    assert launch_ray.options(["hydra/launcher=ray"])["num_gpus"] == 0


# Hydra checks a preset against the plugin's schema of that name, which is wanted, and warns of it.
@pytest.mark.filterwarnings("ignore:(?s).*is validated against ConfigStore schema:UserWarning")
def test_slurm_preset_composes_and_gives_the_script_that_it_says() -> None:
    from hydra_plugins.hydra_submitit_launcher.config import SlurmQueueConf
    from submitit.slurm.slurm import _make_sbatch_string

    given = ["hydra/launcher=submitit_slurm", "folder=x", "batch=0",
             "hydra.launcher.partition=h200", "hydra.launcher.array_parallelism=8"]  # fmt: skip
    with initialize_config_dir(str(launch.CONF), version_base="1.3"):
        whole = compose("launch", given, return_hydra_config=True)
    preset: dict[str, Any] = OmegaConf.to_container(whole.hydra.launcher)  # type: ignore[assignment]
    known = set(OmegaConf.structured(SlurmQueueConf).keys())
    assert set(preset) <= known
    assert preset["_target_"] == SlurmQueueConf._target_
    direct = {
        "gpus_per_node",
        "cpus_per_task",
        "nodes",
        "partition",
        "account",
        "qos",
        "constraint",
    }
    script = _make_sbatch_string(
        "run", "folder", map_count=4, array_parallelism=preset["array_parallelism"],
        time=preset["timeout_min"], mem=f"{preset['mem_gb']}GB", job_name=preset["name"],
        ntasks_per_node=preset["tasks_per_node"], **{key: preset[key] for key in direct},
    )  # fmt: skip
    for line in ("--partition=h200", "--gpus-per-node=1", "--cpus-per-task=8", "--time=240",
                 "--mem=64GB", "--array=0-3%4"):  # fmt: skip
        assert f"#SBATCH {line}" in script, script


def test_unknown_launcher_and_engine_that_fails_are_sentences(site: Any) -> None:
    with pytest.raises(UsageError, match="did you mean joblib"):
        launch.chosen(["hw=b200", "hydra/launcher=jolib"])
    assert launch.chosen(["hw=b200"]) == ("basic", [])
    argv = site.argv(site.stub(), 2, "run_id=one", "hydra/launcher=joblib",
                     "hydra.launcher.no_such=1")  # fmt: skip
    assert site.run(argv) == 4
    assert "joblib ended with code 1 and left 2 of 2 cells: " in site.said()
    assert "go on with: python -m harness sweep resume=one" in site.said()
    assert "Traceback" not in site.said()
    assert site.run(["resume=one", f"out={site.out}", "report=false"]) == 0
    assert len(site.rows()) == 2


def test_kill_of_a_launching_sweep_loses_no_row_that_a_job_wrote(site: Any) -> None:
    """kill -9 of the sweep; the jobs end by themselves, and resume merges what they wrote."""
    argv = site.argv(site.stub(0.3), 30, "run_id=one", "hydra/launcher=joblib", "batches=2")
    pid = site.start(argv)
    until = time.monotonic() + 90
    while not list(site.out.glob("one/launches/*/rows1.jsonl")) and time.monotonic() < until:
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    faulty.ended(pid)
    assert state_of(site.out / "one") == "interrupted"
    (place,) = site.out.glob("one/launches/*")
    (place / "stop").touch()  # what they would find out 120 s later
    assert site.nothing_left(60)
    written = launch.left_behind(site.out / "one")
    assert 1 <= len(written) < 30
    merged = site.rows()
    assert len(merged) <= len(written)
    site.stub(0.0)
    assert site.run(["resume=one", f"out={site.out}", "report=false", "workers=2"]) == 0
    after = {row["cell"]["seed"]: row for row in site.rows()}
    assert len(after) == len(site.rows()) == 30
    assert all(after[row["cell"]["seed"]] == row for row in written)


def test_jobs_end_when_the_sweep_shows_no_life(tmp_path: Path) -> None:
    import threading

    (tmp_path / "alive").touch()
    clock = iter(range(0, 10_000, 50))
    stop = pool.Stop()
    launch._watch(tmp_path, stop, threading.Event(), now=lambda: float(next(clock)))
    assert stop


def test_interrupt_of_a_launching_sweep(site: Any) -> None:
    argv = site.argv(site.stub(0.3), 40, "run_id=one", "hydra/launcher=joblib", "batches=2")
    pid = site.start(argv)
    until = time.monotonic() + 90
    while not site.out.joinpath("one/rows.jsonl").exists() and time.monotonic() < until:
        time.sleep(0.05)
    os.kill(pid, signal.SIGINT)
    assert faulty.ended(pid) == 3, site.said()
    kept = site.rows()
    assert 1 <= len(kept) < 40
    assert state_of(site.out / "one") == "interrupted"
    assert f"interrupted: {len(kept)} cells are kept" in site.said()
