"""Full disks, folders that cannot be written, torn rows, two sweeps at once, clocks that jump."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import faulty_sweeps as faulty
import pytest

from harness import UsageError, rows
from harness.run.journal import Journal, RowsLost, state_of

RESUME = ("report=false", "workers=2")


def test_full_disk_keeps_every_finished_row(site: Any) -> None:
    """RLIMIT_FSIZE gives the write error of a full disk in the middle of a line, at any user."""
    assert site.run(site.argv(site.stub(), 12, "run_id=one")) == 0
    file = site.out / "one" / "rows.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:2]))
    limit = len(b"".join(lines[:5])) + len(lines[5]) // 2
    again = ["resume=one", f"out={site.out}", *RESUME]
    assert faulty.ended(_limited(site, again, limit)) == 4
    kept = site.rows()
    assert len(kept) == 5
    assert file.read_bytes().endswith(b"}\n")  # the part of a line that went in was taken back
    assert "File too large after 5 rows, which are kept; make room, then: python -m harness" in (
        site.said()
    )
    assert state_of(site.out / "one") == "interrupted"
    assert site.run(again) == 0
    after = site.rows()
    assert after[:5] == kept
    assert len({row["cell"]["seed"] for row in after}) == len(after) == 12


def _limited(site: Any, argv: list[str], limit: int) -> int:
    """A forked sweep whose files may not grow beyond `limit` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        pid: int = site.start(argv)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return pid


def _mounted(folder: Path, *options: str) -> bool:
    folder.mkdir()
    mount = shutil.which("mount")
    if mount is None or os.getuid() != 0:
        return False
    done = subprocess.run([mount, "-t", "tmpfs", *options, "none", folder], check=False)
    return done.returncode == 0


def test_no_space_on_a_small_file_system(site: Any) -> None:
    """ENOSPC itself, where this process may mount one."""
    small = site.folder / "small"
    if not _mounted(small, "-o", "size=64k"):
        pytest.skip("a tmpfs needs the right to mount; the full disk above needs none")
    try:
        argv = [x for x in site.argv(site.stub(), 60) if not x.startswith("out=")]
        code = site.run([*argv, f"out={small}", "run_id=one"])
        assert code == 4
        assert "No space left on device" in site.said()
        kept = rows.read(small / "one")
        assert 1 <= len(kept) < 60
        assert f"after {len(kept)} rows" in site.said()
        assert state_of(small / "one") == "interrupted"
    finally:
        subprocess.run(["umount", small], check=True)


def test_read_only_folder_is_a_sentence_and_leaves_nothing(site: Any) -> None:
    if _mounted(readonly := site.folder / "ro", "-o", "ro"):
        try:
            argv = [x for x in site.argv(site.stub(), 2) if not x.startswith("out=")]
            assert site.run([*argv, f"out={readonly}"]) == 4
            assert "cannot be made: Read-only file system; set out=FOLDER" in site.said()
        finally:
            subprocess.run(["umount", readonly], check=True)
    site.out.write_text("a file in the folder's place")
    assert site.run(site.argv(site.stub(), 2)) == 4
    assert "cannot be made: Not a directory; set out=FOLDER" in site.said()
    assert "Traceback" not in site.said()
    assert site.out.read_text() == "a file in the folder's place"


def test_run_folder_that_became_unwritable(site: Any) -> None:
    """A folder in the place of rows.jsonl stands for one that may not be written (root may)."""
    assert site.run(site.argv(site.stub(), 2, "run_id=one")) == 0
    (site.out / "one" / ".lock").unlink()
    (site.out / "one" / ".lock").mkdir()
    assert site.run(["resume=one", f"out={site.out}", *RESUME]) == 4
    assert "one cannot be written: Is a directory" in site.said()


@pytest.mark.parametrize("cut", [1, 7, 200])
def test_torn_last_line_is_done_again(site: Any, cut: int) -> None:
    assert site.run(site.argv(site.stub(), 6, "run_id=one")) == 0
    file = site.out / "one" / "rows.jsonl"
    whole = site.rows()
    os.truncate(file, file.stat().st_size - cut)
    kept = site.rows()
    assert kept == whole[: 6 if cut == 1 else 5]  # a line that lacks its newline still reads
    assert site.run(["resume=one", f"out={site.out}", *RESUME]) == 0
    after = site.rows()
    assert after[:5] == whole[:5]
    assert faulty.without_times(after, site) == faulty.without_times(whole, site)


def test_a_line_that_was_edited_is_named_never_dropped(site: Any) -> None:
    assert site.run(site.argv(site.stub(), 3, "run_id=one")) == 0
    file = site.out / "one" / "rows.jsonl"
    lines = file.read_text().splitlines()
    file.write_text("\n".join([lines[0], "{", lines[2]]) + "\n")
    assert site.run(["resume=one", f"out={site.out}", *RESUME]) == 4
    assert "rows.jsonl:2 is no JSON; was the file edited?" in site.said()


def test_folder_without_a_manifest_is_no_run(site: Any) -> None:
    (site.out / "one").mkdir(parents=True)
    assert site.run(["resume=one", f"out={site.out}", *RESUME]) == 4
    assert "has no manifest.json: not a run folder" in site.said()


def test_two_sweeps_at_once_into_one_results_folder(site: Any) -> None:
    argv = site.argv(site.stub(0.02), 12)
    pids = [site.start([*argv, f"run_id=run{n}"], f"log{n}") for n in range(3)]
    unnamed = [site.start(argv, f"log{n}") for n in (3, 4)]
    assert [faulty.ended(pid) for pid in (*pids, *unnamed)] == [0] * 5
    runs = sorted(site.out.iterdir())
    assert len(runs) == 5
    want = faulty.without_times(site.rows("run0"), site)
    assert all(faulty.without_times(site.rows(run.name), site) == want for run in runs)


def test_two_sweeps_at_once_into_one_run(site: Any) -> None:
    stub = site.stub(0.4)
    first = site.start(site.argv(stub, 24, "run_id=one"), "log1")
    file = site.out / "one" / "rows.jsonl"
    until = time.monotonic() + 60
    while not file.is_file() and time.monotonic() < until:
        time.sleep(0.01)
    assert state_of(site.out / "one") == "running"
    assert site.run(["resume=one", f"out={site.out}", *RESUME], "log2") == 4
    assert "is being written by another sweep" in site.said("log2")
    assert site.run(site.argv(stub, 24, "run_id=one"), "log3") == 4
    assert "exists; choose another run_id" in site.said("log3")
    assert faulty.ended(first) == 0
    assert len({row["cell"]["seed"] for row in site.rows()}) == len(site.rows()) == 24
    assert state_of(site.out / "one") == "done"


def test_clock_that_jumps(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wall clock goes back a day, then forward a year, at every look at it."""
    turn = iter(range(10**9))
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + (-86400, 3.2e7)[next(turn) % 2])
    assert site.run(site.argv(site.stub(0.02, hang=3), 8, "run_id=one", "limit_s=4")) == 3
    found = {row["cell"]["seed"]: row for row in site.rows()}
    assert len(found) == 8
    assert found.pop(3)["status"] == "timeout"
    for row in found.values():
        assert row["status"] == "ok"
        assert 0 <= row["spent_ms"].get("total", 0) < 60_000


def test_journal_refuses_what_is_no_row(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    with pytest.raises(ValueError, match="row without"):
        journal.append({"schema": 1})
    with pytest.raises(UsageError, match="another sweep"):
        Journal(tmp_path)
    journal.state("running")
    assert state_of(tmp_path) == "running"
    journal.close()
    assert state_of(tmp_path) == "interrupted"
    assert not (tmp_path / "rows.jsonl").exists()
    assert issubclass(RowsLost, UsageError)
    assert json.loads((tmp_path / "state.json").read_text()) == {"state": "running"}
