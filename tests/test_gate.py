"""The gate end to end on rows: each planted change gives its exit code and a sentence naming it."""

import copy
import json
from xml.etree import ElementTree as ET

import pytest

from harness import UsageError, rows
from harness.__main__ import main as harness_main
from harness.gate import baseline
from harness.gate import command as gate
from harness.gate import join as gate_join
from harness.gate import rules as gate_rules

LIMITS = gate_rules.Limits()


def row(path="mxfp4_triton", tp_size=1, hw="h200", **changes):
    cell = {
        "hw": hw,
        "model": "gpt_oss_20b",
        "path": path,
        "tp_size": tp_size,
        "tp_rank": 0,
        "ep_size": 1,
        "experts": 2,
        "impl": "reference",
        "env": "current",
        "size": "ci",
        "source": "synthetic",
        "seed": 0,
    }
    out = rows.new_row(cell)
    out |= {
        "checks": {"inverse": "pass", "formula": "pass (6 rows)", "mutation": "skip: strided"},
        "digests": {"w13_weight": "sha256:" + "ab" * 32, "w2_weight": "sha256:" + "cd" * 32},
        "layouts": {
            "w13_weight": {
                "name": "hopper_value_v3",
                "padded": [64, 64],
                "stride": [4096, 1, 64],
                "pad_bytes": 0,
            }
        },
        "decisions": {"outcome": "ok", "reason": "a sentence", "constraints": {"split_k": 1}},
        "memory": {
            "output_bytes": 10 * 2**20,
            "peak_extra_bytes": 15 * 2**20,
            "scratch_bytes": 5 * 2**20,
            "launches": 3,
            "method": "allocator record",
        },
        "provenance": {"device": "AMD EPYC", "torch": "2.13.0", "triton": "3.9.0"},
    }
    del out["memory_absent"]
    return out | changes


def timed(median, **changes):
    time = {
        "scope": "call",
        "device": "NVIDIA H200",
        "median_us": median,
        "rel_iqr": 0.005,
        "useful_bytes": 100,
        "cache": "cold",
        "backend": "event",
        "driver_major": "580",
    }
    return row(time=time | changes)


BASE = [row(), row(tp_size=8), row("nvfp4_trtllm", hw="b200")]


@pytest.fixture
def files(tmp_path):
    """Writes a baseline of BASE and a run; gives run(rows, *options) -> exit code."""
    baseline.save(
        tmp_path / "base.jsonl", BASE, gate.CLASSES[:3], who="me", why="a test", commit="c0ffee"
    )

    def run(found, *options, base="base.jsonl"):
        path = tmp_path / "run.jsonl"
        path.write_text("".join(json.dumps(r) + "\n" for r in found))
        return harness_main(["gate", f"baseline={tmp_path / base}", f"run={path}", *options])

    run.folder = tmp_path
    return run


def planted(edit, which=0):
    found = copy.deepcopy(BASE)
    edit(found[which])
    return found


def set_path(*path, to):
    def edit(r):
        for name in path[:-1]:
            r = r[name]
        r[path[-1]] = to

    return edit


def test_an_equal_run_passes_and_says_how_much_was_compared(files, capsys):
    assert files(BASE) == 0
    assert "gate: passed (exit 0); cells compared: exact 3, coverage 3, memory 3" in (
        capsys.readouterr().out
    )


PLANTED = {
    "a byte fault": (
        set_path("digests", "w2_weight", to="sha256:" + "ce" * 32),
        2,
        "w2_weight: the bytes differ, sha256:cdcdcdcdcdcd is now sha256:cecececece",
    ),
    "a tensor less": (
        lambda r: r["digests"].pop("w2_weight"),
        2,
        "w2_weight: sha256:cdcdcdcdcdcd is now absent",
    ),
    "a stride": (
        set_path("layouts", "w13_weight", "stride", to=[4096, 64, 1]),
        2,
        "layouts.w13_weight.stride: [4096, 1, 64] is now [4096, 64, 1]",
    ),
    "a decision": (
        set_path("decisions", "constraints", "split_k", to=2),
        2,
        "decisions.constraints.split_k: 1 is now 2",
    ),
    "wrong bytes found by a check": (
        lambda r: r.update(status="wrong", reason="inverse: w13_weight differs at (3, 5)"),
        2,
        "wrong: inverse: w13_weight differs at (3, 5)",
    ),
    "a check that no longer runs": (
        set_path("checks", "inverse", to="skip: slow"),
        3,
        "check inverse passed in the baseline and is now skip: slow",
    ),
    "evidence that is gone": (
        lambda r: r.update(memory=None, memory_absent="FILTERED"),
        3,
        "memory was measured and is gone: FILTERED",
    ),
    "a crash": (
        lambda r: r.update(status="crashed", reason="SIGSEGV"),
        3,
        "was ok, is crashed: SIGSEGV",
    ),
    "a refusal": (lambda r: r.update(status="refused", reason="N odd"), 3, "was ok, is refused"),
    "a doubled scratch": (
        set_path("memory", "scratch_bytes", to=10 * 2**20),
        1,
        "scratch_bytes: 5,242,880 bytes is now 10,485,760 bytes, 2.00x",
    ),
    "a further launch": (set_path("memory", "launches", to=4), 1, "launches: 3 is now 4"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_change_gives_its_code_and_sentence(files, name, capsys):
    edit, code, sentence = PLANTED[name]
    assert files(planted(edit)) == code
    out = capsys.readouterr().out
    assert f"(exit {code})" in out
    assert f"h200 gpt_oss_20b mxfp4_triton tp1: {sentence}" in out.splitlines()[-1]


def test_a_dropped_cell(files, capsys):
    assert files(BASE[:2]) == 3
    assert (
        "b200 gpt_oss_20b nvfp4_trtllm tp1: the baseline has this cell, the run does not"
        in capsys.readouterr().out
    )


def test_an_empty_run(files, capsys):
    assert files([]) == 3
    assert "nothing to compare (exit 3): the run has no rows" in capsys.readouterr().out


def test_a_run_in_which_nothing_was_verified(files, capsys):
    skipped = [r | {"status": "skipped", "reason": "too large"} for r in copy.deepcopy(BASE)]
    assert files(skipped) == 3
    assert "nothing was verified (exit 3): none of the run's 3 cells is ok" in (
        capsys.readouterr().out
    )


def test_what_does_not_count(files):
    reworded = planted(set_path("decisions", "reason", to="another sentence"))
    assert files(reworded) == 0
    less = planted(set_path("memory", "scratch_bytes", to=2**20))
    assert files(less) == 0
    little = planted(set_path("memory", "scratch_bytes", to=5 * 2**20 + 1000))
    assert files(little) == 0
    assert files([*BASE, row("nvfp4_cutlass")]) == 0  # a new cell


def test_a_new_cell_that_is_wrong_fails_in_any_class(files):
    new = row("nvfp4_cutlass", status="wrong", reason="inverse: ...")
    assert files([*BASE, new], "classes=memory") == 2


def test_wrong_bytes_go_before_lost_coverage_before_memory(files, capsys):
    found = planted(set_path("memory", "scratch_bytes", to=10 * 2**20))
    assert files(found) == 1
    assert files(found[:2]) == 3
    PLANTED["a byte fault"][0](found[1])
    capsys.readouterr()
    assert files(found[:2]) == 2
    verdicts = [
        line.split("│")[1].strip()
        for line in capsys.readouterr().out.splitlines()
        if "│ " in line and line.split("│")[1].strip()
    ]
    assert verdicts == ["CHANGED", "LOST", "MORE"]


def test_two_rows_of_one_cell_are_exit_4_unless_the_first_had_failed(files, capsys):
    assert files([*BASE, row()]) == 4
    assert "two rows are of one cell, h200 gpt_oss_20b mxfp4_triton tp1" in capsys.readouterr().err
    assert files([row(status="crashed", reason="killed"), *BASE]) == 0


def test_axes_limit_both_sides(files):
    assert files(BASE[:2], "hw=h200") == 0
    assert files(BASE[:2], "hw=b200") == 3


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("clases=exact", "did you mean classes"),
        ("classes=exat", "did you mean exact"),
        ("memory_rel=lots", "is not a number"),
        ("frobnicate", "cannot read"),
    ],
)
def test_usage_errors_are_exit_4(files, capsys, option, message):
    assert files(BASE, option) == 4
    assert message in capsys.readouterr().err


def test_broken_baselines_are_exit_4(files, capsys):
    assert files(BASE, base="none.jsonl") == 4
    assert "no baseline" in capsys.readouterr().err
    text = (files.folder / "base.jsonl").read_text().splitlines()
    for name, lines, message in [
        ("cut", text[:-1], "says 3 cells, the file holds 2"),
        ("torn", [*text[:-1], text[-1][:50]], "cannot be read"),
        ("headless", text[1:], "does not begin with its header"),
    ]:
        (files.folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
        assert files(BASE, base=f"{name}.jsonl") == 4
        assert message in capsys.readouterr().err


def test_markdown_and_junit(files):
    hostile = "w13 | <script>alert(1)</script>\x07 differs"
    found = planted(lambda r: r.update(status="wrong", reason=hostile))
    md, xml = files.folder / "gate.md", files.folder / "out" / "gate.xml"
    assert files(found, f"markdown={md}", f"junit={xml}") == 2
    text = md.read_text()
    assert "<script>" not in text and "w13 \\| &lt;script>" in text
    assert "accepted by me on" in text and "python -m harness sweep hw=h200" in text
    suite = ET.parse(xml).getroot()
    assert (suite.get("tests"), suite.get("failures")) == ("3", "1")
    assert "<script>alert(1)</script> differs" in suite.find(".//failure").get("message")
    assert files([], f"junit={xml}") == 3
    assert "NOTHING" in {f.get("type") for f in ET.parse(xml).getroot().iter("failure")}


def test_accept_says_who_when_and_why_and_round_trips(files, tmp_path, capsys):
    path = tmp_path / "new.jsonl.gz"
    run = tmp_path / "run.jsonl"
    run.write_text("".join(json.dumps(r) + "\n" for r in BASE))
    ask = ["gate", "accept", f"baseline={path}", f"run={run}", "who=Ada", "why=first"]
    assert harness_main(ask) == 0
    header, kept = baseline.load(path)
    assert (header["who"], header["why"], header["cells"]) == ("Ada", "first", 3)
    assert header["when"].startswith("20") and header["classes"] == ["exact", "coverage", "memory"]
    assert all("repro" not in r and "spent_ms" not in r for r in kept)
    assert kept[0]["checks"]["formula"] == "pass"
    assert harness_main(["gate", f"baseline={path}", f"run={run}"]) == 0
    run.write_text("".join(json.dumps(r) + "\n" for r in planted(PLANTED["a byte fault"][0])))
    capsys.readouterr()
    assert harness_main(ask) == 0  # accepting says what changes
    assert "against the old baseline: wrong or changed bytes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("found", "why", "message"),
    [
        ([row(status="wrong", reason="x")], "w", "cannot be accepted"),
        ([row(status="crashed", reason="x"), row(tp_size=2)], "w", "run them again"),
        ([row(status="refused", reason="x")], "w", "nothing to accept"),
        ([row()], " ", "needs who=NAME and why="),
    ],
)
def test_accept_refuses(tmp_path, found, why, message):
    with pytest.raises(UsageError, match=message):
        baseline.save(tmp_path / "b.jsonl", found, gate.CLASSES, who="me", why=why)
    assert not (tmp_path / "b.jsonl").exists()


def test_a_stored_time_alone_never_fails_the_gate():
    same = gate_rules.time(timed(100.0), timed(101.0), LIMITS)
    slow = gate_rules.time(timed(100.0), timed(300.0), LIMITS)
    assert (same.verdict, same.code) == ("SAME", 0)
    assert (slow.verdict, slow.code) == ("AMBIGUOUS", 0) and "gate ab" in slow.sentence
    other = gate_rules.time(timed(100.0), timed(300.0, device="NVIDIA B200"), LIMITS)
    assert other.verdict == "NOT_COMPARABLE" and "NVIDIA B200" in other.sentence


def test_times_of_another_device_leave_nothing_to_compare(files, capsys):
    baseline.save(files.folder / "t.jsonl", [timed(100.0)], gate.CLASSES, who="me", why="x")
    assert files([timed(100.0)], base="t.jsonl") == 0
    assert files([timed(100.0, device="NVIDIA B200")], base="t.jsonl") == 3
    assert "nothing to compare (exit 3) in class time; device:" in capsys.readouterr().out
    gone = [timed(100.0) | {"time": None, "time_absent": "NO_DEVICE"}]
    assert files(gone, base="t.jsonl") == 3
    assert "time was measured and is gone: NO_DEVICE" in capsys.readouterr().out
    assert files(gone, "classes=exact,memory", base="t.jsonl") == 0


def test_a_refusal_that_is_lifted_is_a_decision():
    was, now = row(status="refused", reason="128 does not divide 96"), row()
    (found,) = [f for f in gate_join.compare([was], [now], LIMITS)[0] if f.code]
    assert found.code == 2 and "was refused, is ok" in found.sentence
