"""`gate ab` for real on this machine's CPU: two folders of kernels, fresh processes, rounds."""

import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import kernels
from harness import UsageError
from harness.__main__ import main as harness_main
from harness.gate import ab, ab_suite, ab_worker
from harness.gate.ab_pair import Pair, Setup, worktree
from harness.gate.rules import Limits
from harness.measure import stats

ROOT = Path(kernels.__file__).resolve().parent.parent
TIMING = {
    "name": "test",
    "cache": "warm",
    "noisy_rel_iqr": 100.0,
    "min_samples": 4,
    "max_samples": 4,
    "warmup_calls": 2,
    "warmup_ms": 1.0,
}


@pytest.fixture(scope="module")
def slowed(tmp_path_factory):
    """A copy of kernels in which one routine takes a twentieth of a second more, awake: after a
    sleep the next case would find a cold core."""
    folder = tmp_path_factory.mktemp("slowed")
    shutil.copytree(
        ROOT / "kernels", folder / "kernels", ignore=shutil.ignore_patterns("__pycache__")
    )
    file = folder / "kernels" / "reference" / "nvfp4.py"
    file.write_text(
        file.read_text() + "\n\nimport time\n_plain = swizzle_blockscale\n\n\n"
        "def swizzle_blockscale(scale, *, out=None):\n"
        "    end = time.perf_counter() + 0.05\n"
        "    while time.perf_counter() < end:\n        pass\n"
        "    return _plain(scale, out=out)\n"
    )
    return folder


def setup(*cases):
    return Setup(cases, "cpu", "reference", 1, TIMING, "fork")


@pytest.mark.timeout(900)
def test_a_planted_slowdown_is_found_by_name_and_nothing_else(slowed):
    with Pair(ROOT, slowed, setup("shuffle_rows_for_trtllm", "swizzle_blockscale")) as pair:
        # four samples of a CPU that others use: the plant is 50 ms, so ask for half as much again
        findings, record = ab.judge(pair, Limits(rule=stats.Rule(effect=0.5)))
    assert [f.cell["path"] for f in findings if f.code == 1] == ["swizzle_blockscale"]
    (found,) = [f for f in findings if f.code == 1]
    assert found.verdict == "SLOWER" and "in a second comparison" in found.sentence
    case = record["cases"]["swizzle_blockscale"]
    assert np.shape(case["a_us"]) == np.shape(case["again_b_us"]) == (8, 2)
    assert case["ratio"] > 1.5 and min(min(r) for r in case["b_us"]) > 50_000
    assert record["cases"]["shuffle_rows_for_trtllm"]["verdict"] in ("SAME", "AMBIGUOUS")


def test_a_routine_that_one_side_lacks_is_new_or_lost():
    first = ab.Measured({}, {}, absent={"x": "LayoutError: no routine"})
    has, lacks = {"failed": {}}, {"failed": {"x": "LayoutError: no routine 'x'"}}
    (new,) = ab._absent("x", first, (lacks, has), setup("x"))
    assert (new.verdict, new.code) == ("NEW", 0) and "no routine 'x'" in new.sentence
    (lost,) = ab._absent("x", first, (has, lacks), setup("x"))
    assert (lost.verdict, lost.code) == ("LOST", 3) and "no routine 'x'" in lost.sentence


def test_a_folder_without_kernels_says_so(tmp_path):
    with Pair(tmp_path, tmp_path, setup("swizzle_blockscale")) as pair:
        with pytest.raises(RuntimeError, match=f"not from {tmp_path}|No module named 'kernels'"):
            pair.measure((0,), ["swizzle_blockscale"])


def test_identical_machine_code_is_the_environment():
    same = {"isa": {"k": ["1"]}, "launches": ["k"], "time": {"scope": "kernel"}}
    slow = stats.Comparison("SLOWER", "median ratio 1.1")
    assert ab._environment(slow, same, same).verdict == "ENVIRONMENT"
    for change in (
        {"isa": {"k": ["2"]}},
        {"launches": ["k", "k"]},
        {"time": {"scope": "call"}},
        {"isa": {}},
    ):
        assert ab._environment(slow, same, {**same, **change}).verdict == "SLOWER" or (
            "time" in change
        )
    called = {**same, "time": {"scope": "call"}}
    assert ab._environment(slow, called, called).verdict == "SLOWER"


def test_the_code_that_ran_is_read_from_tritons_own_cache(monkeypatch):
    """By the structure of JITFunction.device_caches in triton 3.4 to 3.9."""
    kernel = lambda name, code: SimpleNamespace(name=name, asm={"cubin": code})
    jit = SimpleNamespace(device_caches={0: ({"a": kernel("tile", b"1"), "b": kernel("tile", b"2"),
                                              "c": kernel("other", b"3")}, {}, None)})  # fmt: skip
    monkeypatch.setitem(sys.modules, "kernels.fake", SimpleNamespace(f=jit, x=3))
    found = ab_worker.isa({"tile", "elementwise"})
    assert list(found) == ["tile"] and len(found["tile"]) == 2
    jit.device_caches[0][0]["b"].asm["cubin"] = b"changed"
    assert ab_worker.isa({"tile"}) != found


@pytest.mark.parametrize("case", ab_suite.SUITE)
def test_every_case_builds_from_the_public_names(case):
    import torch

    make = ab_suite.Inputs(torch.device("cpu"), 1)
    work = ab_suite.build(case, lambda name: kernels.resolve(name, "reference"), make)
    assert work.useful_bytes > 2**20


def test_a_worktree_is_removed_and_an_unknown_revision_is_a_usage_error():
    with pytest.raises(UsageError, match="no-such-revision"), worktree("no-such-revision"):
        pass
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    with worktree("HEAD") as folder:
        assert (folder / "kernels" / "__init__.py").is_file()
    assert not folder.exists()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "--base REV is missing"),
        (["--base", "HEAD", "only=swizle"], "did you mean"),
        (["--base", "HEAD", "ony=x"], "did you mean only"),
    ],
)
def test_usage(argv, message, capsys):
    assert harness_main(["gate", "ab", *argv]) == 4
    assert message in capsys.readouterr().err
