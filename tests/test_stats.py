"""The gate's statistics: against scipy, on exact cases, over thousands of simulated gates."""

import numpy as np
import pytest
from scipy import stats as sps

from harness.gate import simulate
from harness.measure import stats

RULE = stats.Rule()


def medians(ratio: float, noise: float, seed: int, us: float = 100.0):
    rng = np.random.default_rng(seed)
    a, b = us * np.exp(rng.normal(0, noise, (2, RULE.rounds, 2)))
    return a, ratio * b


def test_summary_names_outliers_and_drops_nothing():
    s = stats.summarize([10.0, 11, 12, 11, 10, 100])
    assert s["outliers"] == [5] and s["min"] == 10 and s["median"] == 11
    assert s["rel_iqr"] == pytest.approx((s["q3"] - s["q1"]) / 11)
    with pytest.raises(ValueError, match="non-empty"):
        stats.summarize([])


@pytest.mark.parametrize("seed", range(6))
def test_sign_flip_equals_scipys_exact_permutation_test(seed):
    d = np.random.default_rng(seed).normal(0.01, 0.02, 8)
    expected = sps.permutation_test(
        (d, np.zeros(8)),
        lambda x, y, axis: np.mean(x - y, axis=axis),
        permutation_type="samples",
        alternative="greater",
        n_resamples=np.inf,
        vectorized=True,
    ).pvalue
    assert stats.sign_flip_p(d) == pytest.approx(expected)


def test_eight_rounds_in_one_direction_give_the_least_p():
    assert stats.sign_flip_p(np.arange(1.0, 9.0)) == 1 / 256
    assert stats.sign_flip_p(-np.arange(1.0, 9.0)) == 1.0
    # One small round the other way is the second most extreme pattern: still within 0.01.
    assert stats.sign_flip_p(np.array([-1.0, 2, 3, 4, 5, 6, 7, 8])) == 2 / 256


def test_lazy_evidence_decides_the_same():
    rng = np.random.default_rng(1)
    a = 100 * np.exp(rng.normal(0, 0.02, (400, 8, 2)))
    b = 104 * np.exp(rng.normal(0, 0.02, (400, 8, 2)))
    full, lazy = stats.evidence(a, b, RULE), stats.evidence(a, b, RULE, lazy=True)
    assert 0 < full["slower"].sum() < 400
    assert np.array_equal(full["slower"], lazy["slower"])


def test_a_drift_through_the_round_cancels():
    time = 100 * (1 + 0.2 * np.arange(32) / 31).reshape(8, 4)  # 20 % slower by the end
    d = stats.round_ratios(time[:, [0, 3]], time[:, [1, 2]])
    assert np.abs(d).max() < 1e-4


def test_the_floor_is_the_spread_of_the_median_ratio_of_equal_code():
    rng = np.random.default_rng(3)
    a, b = 100 * np.exp(rng.normal(0, 0.02, (2, 4000, 8, 2)))
    strays = np.std(np.median(stats.round_ratios(a, b), -1))
    assert np.median(stats.aa_floor(a, b)) == pytest.approx(strays, rel=0.12)


@pytest.mark.parametrize(("ratio", "verdict"), [(1.0, "SAME"), (1.08, "SLOWER"), (0.9, "FASTER")])
def test_verdict_with_a_second_comparison_that_agrees(ratio, verdict):
    found = stats.compare(*medians(ratio, 0.005, 0), again=medians(ratio, 0.005, 1))
    assert found.verdict == verdict and found.reason and found.rounds == 8
    assert found.low <= found.ratio <= found.high


def test_slower_has_to_recur():
    once = stats.compare(*medians(1.08, 0.005, 0))
    assert (once.verdict, once.retry) == ("AMBIGUOUS", True)
    twice = stats.compare(*medians(1.08, 0.005, 0), again=medians(1.0, 0.005, 1))
    assert twice.verdict == "AMBIGUOUS" and "second comparison is SAME" in twice.reason


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"us": 10.0}, "is below 1 us"),  # +8 % of 10 us
        ({"rounds": 4}, "4 rounds are fewer than 8"),
        ({"flip": True}, "above 0.01"),
    ],
)
def test_a_missing_condition_is_named(change, why):
    a, b = medians(1.08, 0.002, 0, us=change.get("us", 100.0))
    if "rounds" in change:
        a, b = a[:4], b[:4]
    if "flip" in change:
        b[2:4] = a[2:4] / 1.09
    found = stats.compare(a, b, again=(a, b))
    assert found.verdict == "AMBIGUOUS" and why in found.reason


def test_too_noisy_to_call_the_same():
    found = stats.compare(*medians(1.0, 0.15, 5))
    assert found.verdict in ("AMBIGUOUS", "SAME") and found.threshold > 1.1


@pytest.mark.parametrize("key", stats.COMPARABLE)
def test_what_was_not_measured_alike_is_not_compared(key):
    old = dict.fromkeys(stats.COMPARABLE, "x")
    assert stats.not_comparable(old, dict(old)) is None
    assert stats.not_comparable(old, {**old, key: "y"}).startswith(f"{key}: 'x' in the base, 'y'")


def test_a_thousand_gates_of_equal_code_raise_at_most_one_alarm():
    """20 cells a gate, at 0.3, 1 and 2 % between processes, drifting, without and with spikes."""
    alarms = simulate.false_alarms(gates=1000, cells=20)
    assert len(alarms) == 6 and sum(alarms.values()) <= 1, alarms


@pytest.mark.parametrize(("noise", "least"), [(0.003, 0.95), (0.01, 0.95), (0.02, 0.80)])
def test_a_true_slowdown_of_five_percent_is_found(noise, least):
    assert simulate.power(noise, 0.05) >= least


def test_the_simulation_would_show_a_gate_that_cries_wolf():
    """With effect, interval and recurrence given up, alarms appear: the check can fail."""
    world, rng = simulate.World(0.02), np.random.default_rng(0)
    careless = stats.Rule(effect=0.0, floor_factor=0.0, bound=0.0, min_us=0.0)
    a, b = simulate.rounds(world, 200, 20, careless, rng)
    assert stats.evidence(a, b, careless, lazy=True)["slower"].any(axis=1).mean() > 0.05
