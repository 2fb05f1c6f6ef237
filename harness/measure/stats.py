"""What a set of times says, and whether two sets differ: pure functions of numbers.

A cell's samples within one process agree far better than two processes do (memory placement,
clocks, code alignment: Kalibera and Jones, "Rigorous benchmarking in reasonable time", ISMM
2013), so the unit of evidence in a comparison is the process, never the sample. A round holds
four fresh processes in the order A B B A, which cancels a drift that is linear within the round;
a comparison holds K = 8 rounds. `a` and `b` are the processes' medians, `[..., K, 2]`, in
microseconds; leading axes are independent cells, so that a thousand gates are judged at once.

SLOWER needs every one of: sign-flip p <= 0.01, median ratio >= 1 + max(3 %, 3 x the A/A floor),
bootstrap 95 % bound > 1.01, a difference >= 1 us, and all of that again in a second, independent
comparison. What meets some of these is AMBIGUOUS, and says which it missed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats as sps

Array = NDArray[np.float64]

VERDICTS = ("SLOWER", "LOST", "NOT_COMPARABLE", "AMBIGUOUS", "NEW", "ENVIRONMENT", "FASTER", "SAME")
# The standard error of a median of n normal values is sqrt(pi/2) that of their mean.
MEDIAN_EFFICIENCY = float(np.sqrt(np.pi / 2))


@dataclass(frozen=True)
class Rule:
    """What it takes to call a cell slower (or, mirrored, faster)."""

    rounds: int = 8
    p: float = 0.01
    effect: float = 0.03  # least change of the median ratio
    floor_factor: float = 3.0  # or this many A/A floors, whichever is larger
    bound: float = 1.01  # the interval must lie beyond this ratio
    confidence: float = 0.95
    min_us: float = 1.0
    resamples: int = 2000
    seed: int = 0


@dataclass(frozen=True)
class Comparison:
    """The verdict on one cell, the numbers it rests on, and the reason in words."""

    verdict: str
    reason: str
    ratio: float | None = None  # median over rounds of time B / time A
    low: float | None = None  # bootstrap interval of that median
    high: float | None = None
    p: float | None = None  # one-sided, in the direction of the ratio
    floor: float | None = None  # A/A floor, relative
    threshold: float | None = None  # ratio that counts as a change
    delta_us: float | None = None
    rounds: int | None = None
    retry: bool = False  # a second comparison would decide


def summarize(samples: Array | list[float]) -> dict[str, Any]:
    """Median, quartiles, minimum, relative IQR and the indices of outliers (Tukey's fences).

    Outliers are named, never dropped: every figure is over all samples.
    """
    x = np.asarray(samples, dtype=np.float64)
    if x.ndim != 1 or x.size == 0:
        raise ValueError(f"samples: expected a non-empty list of numbers, got shape {x.shape}")
    q1, median, q3 = np.quantile(x, (0.25, 0.5, 0.75))
    reach = 1.5 * (q3 - q1)
    outliers = np.flatnonzero((x < q1 - reach) | (x > q3 + reach))
    return {
        "median": float(median),
        "q1": float(q1),
        "q3": float(q3),
        "min": float(x.min()),
        "rel_iqr": float((q3 - q1) / median) if median > 0 else float("inf"),
        "outliers": [int(i) for i in outliers],
    }


def round_ratios(a: Array, b: Array) -> Array:
    """log(B / A) of each round, `[..., K]`: the mean log time of its two Bs less that of its As."""
    if a.shape != b.shape or a.shape[-1] != 2:
        raise ValueError(f"rounds: expected two arrays [..., K, 2], got {a.shape} and {b.shape}")
    if not (np.all(a > 0) and np.all(b > 0)):
        raise ValueError("rounds: every time must be above zero")
    out: Array = np.log(b).mean(-1) - np.log(a).mean(-1)
    return out


def sign_flip_p(d: Array) -> Array:
    """One-sided p that the mean of `d [..., K]` is this high though each sign were a coin's.

    Exact: all 2^K sign patterns (256 at K = 8, so the least p is 1/256). Equal to
    `scipy.stats.permutation_test(permutation_type='samples')`, which a test checks; written as
    one matrix product because scipy's takes 2 ms for each cell.
    """
    k = d.shape[-1]
    if not 1 <= k <= 16:
        raise ValueError(f"sign flip: 1 to 16 rounds can be enumerated, got {k}")
    signs = 1.0 - 2.0 * ((np.arange(2**k)[:, None] >> np.arange(k)) & 1)
    flipped = d @ signs.T
    observed = d.sum(-1, keepdims=True)
    slack = 1e-12 * np.abs(d).sum(-1, keepdims=True)
    out: Array = (flipped >= observed - slack).mean(-1)
    return out


def bootstrap_interval(d: Array, rule: Rule) -> tuple[Array, Array]:
    """Percentile bootstrap interval of the median of `d [..., K]` over its rounds."""
    if d.shape[-1] < 2:
        return d.min(-1), d.max(-1)
    result = sps.bootstrap(
        (d,),
        np.median,
        axis=-1,
        method="percentile",
        vectorized=True,
        n_resamples=rule.resamples,
        confidence_level=rule.confidence,
        batch=max(1, int(2e7 / max(1, d.size))),
        rng=np.random.default_rng(rule.seed),
    )
    interval = result.confidence_interval
    return np.asarray(interval.low), np.asarray(interval.high)


def aa_floor(a: Array, b: Array) -> Array:
    """How far the median ratio of equal code strays: its standard error, relative, `[...]`.

    Estimated where code is equal for certain: from the two As and the two Bs of each round
    (2K pairs, each with variance 2 s^2 for process noise s). The round ratio is a mean of two
    Bs less a mean of two As, so its variance is s^2, and the median of K of them has standard
    error 1.25 s / sqrt(K). A drift within the round widens it: the safe side.
    """
    k = a.shape[-2]
    gaps = np.concatenate(
        [np.log(a[..., 0]) - np.log(a[..., 1]), np.log(b[..., 0]) - np.log(b[..., 1])], axis=-1
    )
    out: Array = MEDIAN_EFFICIENCY * np.sqrt((gaps**2).mean(-1) / 2) / np.sqrt(k)
    return out


def evidence(a: Array, b: Array, rule: Rule, *, lazy: bool = False) -> dict[str, Array]:
    """Every number of the rule for each cell, its tests (`has_*`), and `slower`: all passed.

    lazy: bootstrap only the cells that passed every other test, NaN elsewhere; same `slower`.
    """
    d = round_ratios(a, b)
    ratio = np.exp(np.median(d, -1))
    floor = aa_floor(a, b)
    threshold = 1 + np.maximum(rule.effect, rule.floor_factor * floor)
    delta = np.median(b.mean(-1) - a.mean(-1), -1)
    p = sign_flip_p(d)
    tests = {
        "has_effect": ratio >= threshold,
        "has_p": p <= rule.p,
        "has_microsecond": delta >= rule.min_us,
        "has_rounds": np.full(ratio.shape, d.shape[-1] >= rule.rounds),
    }
    todo = np.logical_and.reduce(list(tests.values())) if lazy else np.ones(ratio.shape, bool)
    low, high = np.full(ratio.shape, np.nan), np.full(ratio.shape, np.nan)
    if todo.any():
        low[todo], high[todo] = (np.exp(x) for x in bootstrap_interval(d[todo], rule))
    tests["has_bound"] = low > rule.bound
    slower = np.logical_and.reduce(list(tests.values()))
    return {
        "ratio": ratio,
        "low": low,
        "high": high,
        "p": p,
        "floor": floor,
        "threshold": threshold,
        "delta_us": delta,
        "slower": slower,
        **tests,
    }


MISSED = {
    "has_p": "p = {p:.4f} over {rounds} rounds is above {rule.p}",
    "has_bound": "the interval {low:.3f} to {high:.3f} does not clear {rule.bound}",
    "has_microsecond": "the difference of {delta_us:.2f} us is below {rule.min_us:g} us",
    "has_rounds": "{rounds} rounds are fewer than {rule.rounds}",
}


def _call(a: Array, b: Array, rule: Rule) -> tuple[str, str, dict[str, Any]]:
    """What one comparison of one cell says (no second one asked for): verdict, reason, numbers."""
    numbers = {k: v.item() for k, v in evidence(a[None], b[None], rule).items()}
    numbers["rounds"] = a.shape[-2]
    ratio, low, high, threshold = (numbers[k] for k in ("ratio", "low", "high", "threshold"))
    if numbers["has_effect"]:
        missed = [
            text.format(**numbers, rule=rule) for test, text in MISSED.items() if not numbers[test]
        ]
        return ("AMBIGUOUS" if missed else "SLOWER"), "; ".join(missed), numbers
    if 1 / ratio >= threshold:
        mirrored, why, other = _call(b, a, rule)
        numbers["p"] = other["p"]
        return ("FASTER" if mirrored == "SLOWER" else "AMBIGUOUS"), why, numbers
    if high < threshold:
        return "SAME", f"within {threshold - 1:.1%} of the base", numbers
    return (
        "AMBIGUOUS",
        (
            f"the interval {low:.3f} to {high:.3f} reaches past the threshold "
            f"{threshold:.3f}: too noisy to call the same"
        ),
        numbers,
    )


def compare(
    a: Array, b: Array, rule: Rule | None = None, again: tuple[Array, Array] | None = None
) -> Comparison:
    """Judge one cell: `a` and `b` are `[K, 2]` process medians in us, A the base and B the change.

    SLOWER and FASTER need `again`, the rounds of a second comparison, to agree; without it the
    verdict is AMBIGUOUS and `retry` is set.
    """
    rule = rule or Rule()
    verdict, why, e = _call(np.asarray(a, np.float64), np.asarray(b, np.float64), rule)
    retry = False
    if verdict in ("SLOWER", "FASTER") and again is None:
        why = f"looks {verdict.lower()}; a second comparison has to agree"
        verdict, retry = "AMBIGUOUS", True
    elif verdict in ("SLOWER", "FASTER") and again is not None:
        second, _, s = _call(
            np.asarray(again[0], np.float64), np.asarray(again[1], np.float64), rule
        )
        first, both = f"median ratio {e['ratio']:.3f}", second == verdict
        why = (
            f"{first}, and {s['ratio']:.3f} in a second comparison"
            if both
            else (f"{first} is {verdict}, but a second comparison is {second} at {s['ratio']:.3f}")
        )
        verdict = verdict if both else "AMBIGUOUS"
    return Comparison(
        verdict,
        why,
        e["ratio"],
        e["low"],
        e["high"],
        e["p"],
        e["floor"],
        e["threshold"],
        e["delta_us"],
        e["rounds"],
        retry,
    )


# What two times must share before they are compared, and how a row or a process states it.
COMPARABLE = (
    "device",
    "driver_major",
    "torch",
    "triton",
    "scope",
    "backend",
    "cache",
    "useful_bytes",
)


def not_comparable(old: dict[str, Any], new: dict[str, Any]) -> str | None:
    """Why two times may not be compared (each a flat dict with the keys of COMPARABLE), or None."""
    for key in COMPARABLE:
        if old.get(key) != new.get(key):
            return f"{key}: {old.get(key)!r} in the base, {new.get(key)!r} here"
    return None
