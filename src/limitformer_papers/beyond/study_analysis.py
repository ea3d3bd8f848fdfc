"""The numbers of `docs/studies/protocol.md`, from the files that `study_runs` writes.

python -m limitformer_papers.beyond.study_analysis FORETOLD.jsonl RUNS.jsonl
"""

import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, stats

from limitformer_papers.beyond.ranks import p_value, ranks, within
from limitformer_papers.beyond.study_networks import WORDS, loss_of_frequencies
from limitformer_papers.beyond.study_runs import (
    CHOOSE,
    FAMILIES_OF,
    GRID,
    RATES,
    TEST,
    Row,
    best_place,
    diverges,
    next_place,
    rates_of,
    rows_in,
)

Array = NDArray[np.float64]
OURS = ("grade", "verdicts", "distance", "gradients' ratio")
MARGIN, LEVEL, COVERED = 0.2, 0.025, 0.8


def auroc(x: Array, fails: NDArray[np.bool_]) -> float:
    """Return the probability that a network that fails has the larger x; ties count half."""
    many, few = int(fails.sum()), int((~fails).sum())
    return float((ranks(x)[fails].sum() - many * (many + 1) / 2) / (many * few)) if many and few else math.nan


def auroc_interval(area: float, many: int, few: int) -> tuple[float, float]:
    """Return Newcombe's interval (method 5): A with |area − A| = z √var(A), the variance that of Hanley and McNeil."""
    if not many or not few or math.isnan(area):
        return 0.0, 1.0
    z, more = stats.norm.ppf(0.975), (many + few) / 2 - 1

    def excess(a: float) -> float:
        variance = a * (1 - a) * (1 + more * (1 - a) / (2 - a) + more * a / (1 + a)) / (many * few)
        return float((area - a) ** 2 - z**2 * variance)

    inside = min(max(area, 1e-9), 1 - 1e-9)  # at 0 and 1 the variance is 0
    low = optimize.brentq(excess, 0.0, inside) if area > 0 else 0.0
    high = optimize.brentq(excess, inside, 1.0) if area < 1 else 1.0
    return float(low), float(high)


def jackknife(of: Callable[[NDArray[np.intp]], float], clusters: Sequence[Any], least: float = 0.0, level: float = 0.95
              ) -> tuple[float, float]:  # fmt: skip
    """Return the interval of a statistic of members: delete one cluster at a time, Student's t of clusters − 1.

    It reaches at least as far as that of a normal statistic with the standard error `least`.
    """
    names, labels = np.unique([str(each) for each in clusters], return_inverse=True)
    values = np.array([of(np.flatnonzero(labels != k)) for k in range(len(names))])
    half = stats.t.ppf((1 + level) / 2, len(names) - 1) * math.sqrt((len(names) - 1) * values.var())
    half = max(half, stats.norm.ppf((1 + level) / 2) * least)
    middle = of(np.arange(len(labels)))
    return middle - half, middle + half


def rho_interval(x: Array, y: Array, families: Array, clusters: Sequence[Any]) -> tuple[float, float]:
    """Return the 95 % interval of ρ within families, on the scale of artanh."""
    least = math.sqrt(1.06 / max(1, len(x) - 3 * len(np.unique(families))))
    ends = jackknife(lambda k: math.atanh(np.clip(within(x[k], y[k], families[k]), -0.999, 0.999)), clusters, least)
    return math.tanh(ends[0]), math.tanh(ends[1])


def sign_flips(differences: Array) -> float:
    """Return the two-sided p of a mean of clusters, over all their signs."""
    every = (np.arange(2 ** len(differences))[:, None] >> np.arange(len(differences)) & 1) * 2.0 - 1
    return float(np.mean(np.abs(every @ differences) >= abs(differences.sum()) - 1e-12))


def outcome(runs: list[Row], unigrams: float) -> Row:
    """Return what a network's runs gave: the loss at the best rate, that of a uniform guess if all diverged."""
    sound = [run for run in runs if run["choose"] is not None]
    best = min(sound, key=lambda run: run["choose"], default={"loss": math.inf})
    trains = sum(run["loss"] <= unigrams - MARGIN for run in sound)
    return {"loss": min(best["loss"], math.log(WORDS)), "trains": trains, "diverged": len(runs) - len(sound)}


def outcomes(runs: list[Row], unigrams: float) -> dict[tuple[str, int], Row]:
    """Return the outcome by kind and seed of the networks with all their runs, of studies 1 and 2."""
    groups: dict[tuple[str, int], list[Row]] = {}
    for run in runs:
        if run["study"] < 3:
            groups.setdefault((run["kind"], run["seed"]), []).append(run)
    return {key: outcome(each, unigrams) for key, each in groups.items() if len(each) == len(RATES)}


def verdicts_study(foretold: list[Row], ends: dict[tuple[str, int], Row], unigrams: float) -> list[str]:
    """Return the lines of study 1."""
    lines, halves = [], {}
    for half in (CHOOSE, TEST):
        rows = [r for r in foretold if r["study"] == 1 and r["family"] in FAMILIES_OF[half] and ("", r["seed"]) in ends]
        if not rows:
            continue
        y, trains, diverged = (
            np.array([ends["", row["seed"]][key] for row in rows]) for key in ("loss", "trains", "diverged")
        )
        numbers = {name: np.array([row["numbers"][name] for row in rows], float) for name in rows[0]["numbers"]}
        numbers |= {"depth": np.array([row["depth"] for row in rows], float)}
        families, clusters = np.array([r["family"] for r in rows]), [(r["family"], r["depth"]) for r in rows]
        halves[half] = numbers, y, families, clusters
        fails = y > unigrams - MARGIN
        lines.append(
            f"study 1, {half}: {len(rows)} networks, {fails.sum()} fail, {(diverged > 0).sum()} diverge somewhere"
        )
        lines.append(f"  {'':24} {'ρ, loss':24} {'AUROC, fails':22} ρ, rates that do not train; AUROC, diverges")
        few = [len({c for c, f in zip(clusters, fails, strict=True) if f == wanted}) for wanted in (True, False)]
        for name, x in numbers.items():
            rho, area = within(x, y, families), auroc(x, fails)
            low, high = rho_interval(x, y, families, clusters)
            ends_of = "{:.2f} to {:.2f}".format(*auroc_interval(area, *few))
            more = f"{within(x, -trains, families):5.2f}; {auroc(x, diverged > 0):.2f}"
            lines.append(f"  {name:24} {rho:5.2f} ({low:5.2f} to {high:5.2f})  {area:5.2f} ({ends_of})  {more}")
    if len(halves) < 2:
        return lines
    numbers, y, families, _ = halves[CHOOSE]
    first = {name: within(x, y, families) for name, x in numbers.items()}
    ours = max(OURS, key=lambda name: first[name])
    rival = max((name for name in first if name not in OURS), key=lambda name: first[name])
    numbers, y, families, clusters = halves[TEST]
    a, b = numbers[ours], numbers[rival]
    p, found = p_value(a, y, families, 1), within(a, y, families)
    low, high = jackknife(lambda k: within(a[k], y[k], families[k]) - within(b[k], y[k], families[k]), clusters,
                          level=1 - LEVEL)  # fmt: skip
    lines.append(f"H1a: {ours}, ρ {found:.2f} held out, p {p:.4f}: {'holds' if p < LEVEL and found > 0 else 'fails'}")
    return [*lines, f"H1b: ρ above that of {rival}, by {low:.2f} to {high:.2f}: {'holds' if low > 0 else 'fails'}"]


def fixes_study(foretold: list[Row], ends: dict[tuple[str, int], Row]) -> list[str]:
    """Return the lines of study 2: differences of losses, the mean over architectures."""
    rows = {row["seed"]: row for row in foretold if row["study"] == 1}
    seeds = [seed for kind, seed in ends if kind == "fix" and {("", seed), ("placebo", seed)} <= ends.keys()]
    clusters = [(rows[seed]["family"], rows[seed]["depth"]) for seed in seeds]
    if len(set(clusters)) < 3:
        return []
    lines = [f"study 2: {len(seeds)} networks of {len(set(clusters))} architectures"]
    for one, other in (("fix", "placebo"), ("fix", ""), ("placebo", "")):
        d = np.array([ends[one, seed]["loss"] - ends[other, seed]["loss"] for seed in seeds])
        means = np.array([d[[c == each for c in clusters]].mean() for each in sorted(set(clusters))])
        half = stats.t.ppf(0.975, len(means) - 1) * means.std(ddof=1) / math.sqrt(len(means))
        low, high, p = means.mean() - half, means.mean() + half, sign_flips(means)
        lines.append(f"  {one} − {other or 'unchanged'}: {means.mean():.3f} ({low:.3f} to {high:.3f}), p {p:.4f}")
    return lines


def best_rate(own: dict[int, Row]) -> float:
    """Return the rate of the lowest loss, by a parabola through the best rate and its neighbours."""
    k = best_place(own)
    around = np.array([own[j]["choose"] if j in own else None for j in (k - 1, k, k + 1)], float)
    if np.isnan(around).any():
        return GRID[k]
    a, b, _ = np.polyfit([-1, 0, 1], around, 2)
    return float(GRID[k] * 2 ** np.clip(-b / (2 * a), -1, 1)) if a > 0 else GRID[k]


def rates_study(foretold: list[Row], runs: list[Row]) -> list[str]:
    """Return the lines of study 3, without and with warm-up."""
    lines = []
    for warmup in sorted({run["warmup"] for run in runs if run["study"] == 3}):
        cases = []
        for row in (row for row in foretold if row["study"] == 3):
            own = rates_of(runs, row["seed"], warmup)
            if own and next_place(own) is None:
                best, high = best_rate(own), [GRID[k] for k in own if k > best_place(own) and diverges(own[k])]
                inside = row["low"] is not None and row["low"] < best < row["high"]
                cases.append((row["family"], inside, best, row["borne"] or math.nan, min(high, default=math.inf)))
        if not cases:
            continue
        families, inside, rates, borne, over = map(np.array, zip(*cases, strict=True))
        test = stats.binomtest(int(inside.sum()), len(cases), COVERED, alternative="less")
        low, up = stats.binomtest(int(inside.sum()), len(cases)).proportion_ci(0.95, "exact")
        lines.append(f"H3, warm-up {warmup}: the range holds the best rate of {inside.sum()} of {len(cases)} networks "
                     f"({low:.2f} to {up:.2f}); p of {COVERED:.0%} or more {test.pvalue:.4f}")  # fmt: skip
        lines += [f"  {f}: {inside[families == f].sum()} of {(families == f).sum()}" for f in np.unique(families)]
        for name, rate in (("best", rates), ("diverging", over)):
            known = np.isfinite(borne) & np.isfinite(rate)
            if known.sum() > 2:
                x, y, groups = borne[known], rate[known], families[known]
                logs, p, rho = np.log2(y / x), p_value(x, y, groups, 3), within(x, y, groups)
                lines.append(f"  {name} rate over the rate that nine of ten bear: 2^{np.median(logs):.2f}, "
                             f"scatter 2^{logs.std(ddof=1):.2f}, ρ within families {rho:.2f}, p {p:.4f}")  # fmt: skip
    return lines


def analysis(foretold: list[Row], runs: list[Row], unigrams: float) -> list[str]:
    ends = outcomes(runs, unigrams)
    return [*verdicts_study(foretold, ends, unigrams), *fixes_study(foretold, ends), *rates_study(foretold, runs)]


if __name__ == "__main__":
    print("\n".join(analysis(rows_in(Path(sys.argv[1])), rows_in(Path(sys.argv[2])), loss_of_frequencies())))
