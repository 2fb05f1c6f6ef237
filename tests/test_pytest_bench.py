"""pytest-benchmark's JSON as rows."""

import json

import pytest

from harness import UsageError, rows
from harness.gate import baseline
from harness.gate import join as gate_join
from harness.gate import rules as gate_rules
from harness.measure import pytest_bench


def entry(**changes):
    cell = {"hw": "cpu", "model": "gpt_oss_120b", "path": "swizzle_blockscale", "tp_size": 1,
            "tp_rank": 0, "ep_size": 1, "experts": 2, "impl": "reference", "env": "current",
            "size": "ci", "source": "synthetic", "seed": 0}  # fmt: skip
    info = {"cell": cell, "useful_bytes": 4_000_000, "cache": "warm", "device": "a CPU",
            "torch": "2.13.0", "triton": "3.9.0", "checks": {"repeatable": "pass"}}  # fmt: skip
    return {"name": "test_reference[x]", "extra_info": info,
            "stats": {"data": [0.001, 0.002, 0.003, 0.002]}} | changes  # fmt: skip


def write(path, *entries):
    path.write_text(json.dumps({"benchmarks": entries, "commit_info": {"id": "c0ffee"}}))
    return path


def test_a_benchmark_is_a_row_like_any_other(tmp_path):
    (row,) = pytest_bench.read(write(tmp_path / "b.json", entry()))
    rows.validate(row)
    assert row["status"] == "ok" and row["time"]["median_us"] == pytest.approx(2000)
    assert row["time"]["samples_us"] == [1000, 2000, 3000, 2000]
    assert row["time"]["gb_per_s"] == pytest.approx(2.0)
    assert (row["time"]["cache"], row["time"]["backend"]) == ("warm", "pytest-benchmark")
    assert row["provenance"]["commit"] == "c0ffee"


def test_the_gate_compares_two_of_them(tmp_path):
    path = write(tmp_path / "b.json", entry())
    baseline.save(tmp_path / "b.jsonl", baseline.load_run(str(path)), gate_rules.CLASSES,
                  who="me", why="x")  # fmt: skip
    _, old = baseline.load(tmp_path / "b.jsonl")
    findings, compared = gate_join.compare(old, pytest_bench.read(path), gate_rules.Limits())
    assert compared["time"] == 1 and [f.verdict for f in findings] == ["SAME"]


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (entry(extra_info={}), "lacks cell, useful_bytes"),
        (entry(stats={}), "lacks stats.data"),
    ],
)
def test_what_a_row_needs_and_lacks_is_named(tmp_path, broken, message):
    with pytest.raises(UsageError, match=message):
        pytest_bench.read(write(tmp_path / "b.json", broken))


def test_another_json_is_a_usage_error(tmp_path):
    (tmp_path / "b.json").write_text("[]")
    with pytest.raises(UsageError, match="no pytest-benchmark JSON"):
        pytest_bench.read(tmp_path / "b.json")
