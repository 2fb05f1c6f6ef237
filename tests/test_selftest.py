"""The device selftest's own logic, as far as no GPU is needed."""

import numpy as np
import pytest
import torch

from harness import UsageError
from harness.gate import ab_suite, selftest


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_a_gpu_nothing_is_verified(capsys):
    assert selftest.main([]) == 3
    assert "nothing was verified (exit 3)" in capsys.readouterr().out


def test_usage():
    with pytest.raises(UsageError, match="takes out=FOLDER"):
        selftest.main(["ouut=x"])


def test_a_part_that_fails_is_recorded_and_does_not_end_the_rest(tmp_path):
    found = {"ok": {}, "spent_s": {}, "failed": {}}
    with selftest._part("timer", found, tmp_path):
        raise RuntimeError("no memory")
    assert found["failed"] == {"timer": "RuntimeError: no memory"} and "timer" in found["spent_s"]
    assert (tmp_path / "selftest.json").is_file()


def test_the_planted_and_the_twice_timed_routines_are_in_the_suite():
    assert selftest.PLANTED in ab_suite.SUITE
    assert set(selftest.TIMED_TWICE) <= set(ab_suite.SUITE) and len(selftest.TIMED_TWICE) == 5


def test_gates_count_alarms_by_the_statistics_alone(monkeypatch):
    """A statistical SLOWER is an alarm even where equal code makes it ENVIRONMENT."""

    class NoPair:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

    verdicts = iter(["SAME", "SLOWER"])

    def judge(pair, limits, probes):
        case = {"verdict": "ENVIRONMENT", "statistical": next(verdicts), "ratio": 1.0, "floor": 0.0}
        return [], {"cases": {"x": case}}

    monkeypatch.setattr(selftest, "_pair", lambda folder: NoPair())
    monkeypatch.setattr(selftest.ab, "probe", lambda pair: ({}, {}))
    monkeypatch.setattr(selftest.ab, "judge", judge)
    found = selftest.gates(2, np.inf, {})
    assert (found["ok"], found["alarms"]) == (False, [[], ["x"]])
    none = selftest.gates(2, 0.0, {})  # a budget that is spent gives no gates, and that is no pass
    assert (none["ok"], none["gates"]) == (False, 0)
