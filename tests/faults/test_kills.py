"""SIGKILL at random moments, of the sweep and of its workers; then resume: no row is lost,
doubled or changed, and no process stays."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from contextlib import suppress
from typing import Any

import faulty_sweeps as faulty
import pytest

from harness import rows
from harness.run.journal import state_of

CELLS = 24
SECONDS = 0.02  # of one cell: a run takes about 0.5 s


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Rows by cell of a run that nothing happens to."""
    site = faulty.Site(tmp_path_factory.mktemp("whole"))
    assert site.run(site.argv(site.stub(SECONDS), CELLS, "run_id=one")) == 0, site.said()
    return faulty.without_times(site.rows(), site)


def test_fifty_kills_of_the_sweep_then_resume(site: Any, undisturbed: dict[str, Any]) -> None:
    """Each kill comes anywhere between the start and the end of a run, and resume finishes it; two
    of three kills hit a run that is itself a resumed one."""
    dice = random.Random(20261130)
    stub = site.stub(SECONDS)
    kills = inside = rounds = 0
    while kills < 50:
        rounds += 1
        name = f"run{rounds}"
        argv = site.argv(stub, CELLS, f"run_id={name}")
        for _turn in range(3):
            pid = site.start(argv)
            if dice.random() < 0.8:  # else it may be killed before the run has begun
                _wait(lambda: state_of(site.out / name) in ("running", "done"))  # noqa: B023
            time.sleep(dice.uniform(0.0, 0.5))
            os.kill(pid, signal.SIGKILL)
            code = faulty.ended(pid)
            if code != -signal.SIGKILL:
                assert code == 0, site.said()
            kills += code == -signal.SIGKILL
            assert site.nothing_left(), site.processes()
            if not (site.out / name / "manifest.json").is_file():
                break  # before the run began: there is nothing to resume
            before = site.rows(name)
            whole = code == 0 or (len(before) == CELLS and state_of(site.out / name) == "done")
            assert state_of(site.out / name) == ("done" if whole else "interrupted")
            inside += 0 < len(before) < CELLS
            if whole:
                break
            argv = [f"resume={name}", f"out={site.out}", "report=false", "workers=2"]
        if not (site.out / name / "manifest.json").is_file():
            continue
        again = [f"resume={name}", f"out={site.out}", "report=false", "workers=2"]
        assert site.run(again) == 0, site.said()
        after = site.rows(name)
        assert after[: len(before)] == before  # what was finished is as it was
        assert faulty.without_times(after, site) == undisturbed
        assert state_of(site.out / name) == "done"
    assert inside >= 10  # or the kills would prove little


def test_fifty_kills_of_workers(site: Any) -> None:
    """The cell under way is crashed and says SIGKILL; every other is ok; the totals are right."""
    dice = random.Random(7)
    kills = 0
    ending = threading.Event()

    def killer() -> None:
        nonlocal kills
        while kills < 50 and not ending.is_set():
            time.sleep(dice.uniform(0.01, 0.15))
            for pid in site.processes()[:1]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    kills += 1

    pid = site.start(site.argv(site.stub(0.05), 400, "run_id=one"))
    thread = threading.Thread(target=killer)
    thread.start()
    try:
        code = faulty.ended(pid, 200)
    finally:
        ending.set()
        thread.join()
    found = site.rows()
    assert len(found) == len({row["cell"]["seed"] for row in found}) == 400
    crashed = [row for row in found if row["status"] == "crashed"]
    assert kills == 50
    assert 25 <= len(crashed) <= 50  # a kill between two cells, or of a process just ended, is free
    assert all("SIGKILL" in row["reason"] for row in crashed)
    assert len([row for row in found if row["status"] == "ok"]) == 400 - len(crashed)
    assert code == 3
    assert f"400 cells: {400 - len(crashed)} ok" in site.said()


def test_one_interrupt_finishes_the_cells_under_way_a_second_leaves_at_once(site: Any) -> None:
    argv = site.argv(site.stub(0.4), 40, "run_id=one")
    pid = site.start(argv)
    _wait(lambda: len(site.rows()) >= 2 if (site.out / "one").is_dir() else False)
    os.kill(pid, signal.SIGINT)
    assert faulty.ended(pid) == 3
    kept = site.rows()
    assert 2 <= len(kept) < 40
    assert {row["status"] for row in kept} == {"ok"}
    assert state_of(site.out / "one") == "interrupted"
    assert f"interrupted: {len(kept)} cells are kept, {40 - len(kept)} are left" in site.said()
    pid = site.start(["resume=one", f"out={site.out}", "report=false", "workers=2"])
    _wait(lambda: len(site.rows()) >= len(kept) + 2)
    os.kill(pid, signal.SIGTERM)
    time.sleep(0.05)
    start = time.monotonic()
    os.kill(pid, signal.SIGINT)
    assert faulty.ended(pid) == 3
    assert time.monotonic() - start < 2
    assert site.nothing_left(1.0), site.processes()
    assert state_of(site.out / "one") == "interrupted"
    site.stub(0.0)
    assert site.run(["resume=one", f"out={site.out}", "report=false", "workers=2"]) == 0
    found = site.rows()
    assert len(found) == len({row["cell"]["seed"] for row in found}) == 40
    assert found[: len(kept)] == kept


def _wait(ready: Any, seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_resume_refuses_what_changed_unless_forced(
    site: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from harness.run import runs

    stub = site.stub(0.3)
    pid = site.start(site.argv(stub, 10, "run_id=one"))
    _wait(lambda: (site.out / "one" / "rows.jsonl").is_file())
    os.kill(pid, signal.SIGKILL)
    faulty.ended(pid)
    again = ["resume=one", f"out={site.out}", "report=false", "workers=2"]
    for what, name, value in (
        ("the code", "code_digest", "sha256:other"),
        ("the versions", "machine", {**runs.machine(), "versions": {"torch": "0.1"}}),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(runs, name, lambda value=value: value)
            assert site.run(again) == 4
        assert f"{what} changed since this run began" in site.said()
    assert site.run([*site.argv(stub, 11), "resume=one"]) == 4
    assert "the grid changed" in site.said()
    assert state_of(site.out / "one") == "interrupted"
    with monkeypatch.context() as patch:
        patch.setattr(runs, "code_digest", lambda: "sha256:other")
        assert site.run([*again, "resume_force=true"]) == 0, site.said()
    assert len({row["cell"]["seed"] for row in site.rows()}) == 10
    assert rows.exit_code(site.rows(), 10) == 0
