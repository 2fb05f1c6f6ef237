"""How often the gate's statistics are wrong, by simulation with known truth: seeded and vectorised.

`python -m harness.gate.simulate [FIGURE.svg]` prints the tables of docs/gate.md and draws its
figure.

A cell's process median is t * exp(process + drift): `process` is normal with the stated standard
deviation, `drift` moves over the whole gate by up to 3 % in all, linearly, on top of a random walk
of 0.1 % a process; both sides of a round live in the same drift, in the order A B B A. With
`spikes`, one process in fifty is slower by 10 %. A gate fails if any of its cells is SLOWER in the
first comparison and in the second, independent one. Cells of equal code take 5 to 2000 us; the
changed ones 50 to 2000 us, since below 20 us a change of 5 % is less than the 1 us that the rule
asks for and is never called.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from harness.measure.stats import Array, Rule, evidence

ORDER = np.array([0, 1, 1, 0])  # A B B A
DRIFT = 0.03
WALK = 0.001


@dataclass(frozen=True)
class World:
    """noise: standard deviation between processes, relative. effect: true change of B, relative."""

    noise: float
    effect: float = 0.0
    spikes: bool = False
    fastest_us: float = 5.0


def rounds(
    world: World, gates: int, cells: int, rule: Rule, rng: np.random.Generator
) -> tuple[Array, Array]:
    """Medians of one comparison: two arrays [gates, cells, K, 2] in us."""
    shape = (gates, cells, rule.rounds * 4)
    base = np.exp(rng.uniform(np.log(world.fastest_us), np.log(2000.0), (gates, cells, 1)))
    slope = rng.uniform(-DRIFT, DRIFT, (gates, 1, 1)) * np.linspace(0, 1, shape[-1])
    walk = np.cumsum(rng.normal(0, WALK, (gates, 1, shape[-1])), axis=-1)
    log = np.log(base) + rng.normal(0, world.noise, shape) + slope + walk
    if world.spikes:
        log += np.log(1.1) * (rng.random(shape) < 0.02)
    log = log.reshape(gates, cells, rule.rounds, 4)
    log[..., ORDER == 1] += np.log1p(world.effect)
    time = np.exp(log)
    return time[..., ORDER == 0], time[..., ORDER == 1]


def slower(world: World, gates: int, cells: int, rule: Rule, seed: int) -> Array:
    """Whether each cell of each gate ends as SLOWER, [gates, cells] of 0 or 1."""
    rng = np.random.default_rng(seed)
    first = evidence(*rounds(world, gates, cells, rule, rng), rule, lazy=True)["slower"]
    out = np.zeros(first.shape)
    suspects = np.argwhere(first)
    if len(suspects):  # only suspects are measured again; the truth of a cell stays what it was
        again = evidence(*rounds(world, len(suspects), 1, rule, rng), rule, lazy=True)["slower"]
        out[tuple(suspects.T)] = again[:, 0]
    return out


NOISES = (0.003, 0.01, 0.02)


def false_alarms(gates: int = 1000, cells: int = 20, seed: int = 2026) -> dict[str, int]:
    """Gates with an alarm among `gates` gates of equal code, for each noise, plain and spiked."""
    rule = Rule()
    return {
        f"{noise:.1%}{', spikes' if spikes else ''}": int(
            slower(World(noise, 0.0, spikes), gates, cells, rule, seed + i).any(axis=1).sum()
        )
        for i, (noise, spikes) in enumerate((n, s) for s in (False, True) for n in NOISES)
    }


def power(noise: float, effect: float, gates: int = 1000, seed: int = 77) -> float:
    """Part of `gates` gates of one truly changed cell that find it."""
    return float(slower(World(noise, effect, fastest_us=50.0), gates, 1, Rule(), seed).mean())


def figure(path: Path, gates: int = 400) -> None:
    """Detected part against the true change, for each noise."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcParams["svg.hashsalt"] = "gate"
    effects = np.array([0, 1, 2, 2.5, 3, 3.5, 4, 4.5, 5, 6, 7, 8, 10]) / 100
    fig, ax = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    for noise, color, marker in zip(NOISES, ("#0072B2", "#E69F00", "#D55E00"), "os^", strict=True):
        ax.plot(
            100 * effects,
            [power(noise, e, gates) for e in effects],
            color=color,
            marker=marker,
            ms=4,
            label=f"{noise:.1%} between processes",
        )
    ax.axvline(5, color="0.6", lw=0.8, ls="--")
    ax.set(
        xlabel="true slowdown (%)",
        ylabel="gates that find it",
        ylim=(-0.02, 1.02),
        title="Detection by the gate: 8 rounds of A B B A, twice",
    )
    ax.legend(frameon=False, loc="lower right")
    fig.savefig(path, metadata={"Date": None})
    plt.close(fig)


def main(argv: list[str]) -> int:
    print("| noise | A/A gates of 20 cells | with an alarm |\n|---|---|---|")
    for name, alarms in false_alarms().items():
        print(f"| {name} | 1000 | {alarms} |")
    print("\n| noise | +3 % | +4 % | +5 % | +7 % | +10 % |\n|---|---|---|---|---|---|")
    for noise in NOISES:
        found = " | ".join(f"{power(noise, e):.3f}" for e in (0.03, 0.04, 0.05, 0.07, 0.10))
        print(f"| {noise:.1%} | {found} |")
    if argv:
        figure(Path(argv[0]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
