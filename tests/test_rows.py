"""The row's schema, its file, and the exit code that rows add up to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness import UsageError, rows

CELL = {
    "hw": "b200", "model": "ragged", "path": "mxfp4_triton", "tp_size": 1, "tp_rank": 0,
    "ep_size": 1, "experts": 2, "impl": "reference", "env": "current", "size": "ci",
    "source": "synthetic", "seed": 0,
}  # fmt: skip


def test_new_rows_are_valid_in_every_status() -> None:
    for status in rows.STATUSES:
        rows.validate(rows.new_row(CELL, status, None if status == "ok" else "why"))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"status": "fine"}, "status 'fine'"),
        ({"status": "refused"}, "without a reason"),
        ({"time": None, "time_absent": None}, "time_absent"),
        ({"codegen_absent": "BECAUSE"}, "codegen_absent"),
        ({"checks": {"round_trip": "fail: w13"}}, "failed check"),
        ({"status": "wrong", "reason": "x", "time": {"median_us": 1.0}}, "with a time"),
        ({"cell": {"hw": "b200"}}, "cell.model"),
    ],
)
def test_invalid_rows_are_refused(change: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        rows.validate(rows.new_row(CELL) | change)


def test_a_run_is_read_back_and_a_torn_tail_is_left_out(tmp_path: Path) -> None:
    run = tmp_path / "one"
    run.mkdir()
    (run / "manifest.json").write_text("{}")
    for seed in range(3):
        rows.append(run / "rows.jsonl", rows.new_row(CELL | {"seed": seed}))
    with (run / "rows.jsonl").open("a") as file:
        file.write('{"schema": 1, "cell": {"hw"')
    for name in ("latest", "one", str(run), str(run / "rows.jsonl")):
        assert [r["cell"]["seed"] for r in rows.read(name, tmp_path)] == [0, 1, 2]
    with pytest.raises(UsageError, match="the newest are: one"):
        rows.run_dir("two", tmp_path)


def test_a_damaged_middle_is_said(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("{]\n" + json.dumps(rows.new_row(CELL)) + "\n")
    with pytest.raises(UsageError, match=r"rows\.jsonl:1"):
        rows.read(path)


@pytest.mark.parametrize(
    ("statuses", "expected", "code"),
    [
        (["ok", "refused", "skipped"], 3, 0),
        (["ok", "wrong", "crashed"], 3, 2),
        (["ok", "crashed"], 2, 3),
        (["ok", "timeout"], 2, 3),
        (["ok", "oom"], 2, 3),
        (["refused"], 1, 3),
        ([], 0, 3),
        (["ok"], 2, 3),
    ],
)
def test_exit_code(statuses: list[str], expected: int, code: int) -> None:
    made = [rows.new_row(CELL, s, None if s == "ok" else "why") for s in statuses]
    assert rows.exit_code(made, expected) == code


def test_names_never_leave_the_folder() -> None:
    for name in ("../../etc", "a/b", "", "..", "<script>", "x" * 500, "naïve ☃"):
        safe = rows.safe_name(name)
        assert Path(safe).name == safe
        assert safe not in ("", ".", "..")
        assert len(safe) <= 80
