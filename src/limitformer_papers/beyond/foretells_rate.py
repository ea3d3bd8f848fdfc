r"""Do the first steps in law foretell the largest learning rate? A study of tiny networks, half of them held out.

**Cases**: a kind of network, a width, a depth, a start of the weights and an optimiser (`rate_networks`). SGD and AdamW
have all four pairs of width and depth of every kind, Muon two of them; the starts take turns.

**Law**: `limitformer.stepping.simulate_steps`, three steps of four networks at rates whose logarithms are evenly
spaced, on one batch of the text ("same") and on a new batch at each step ("new").

**Training**: the same code of network and optimiser, 120 steps on the same text, two seeds, at powers of two. Two rates
are measured, each the geometric mean of the seeds:

* *best*: that with the lowest held-out loss, from which on doubling the rate improves nothing;
* *diverging*: the lowest above it after which the held-out loss is not finite, or not below its start; ∞ if there is
  none.

**Rules** say of a network whether a rate is too large: the loss of the batch, or of one that no step sees, does not
fall in one step, or in three; or the stream changes by more than its own size. The largest rate that is not too large
is interpolated between the logarithms of neighbouring rates, linearly in the logarithm of the loss over its start, or
of the change. A rule predicts the rate that nine of ten networks bear. Two further rules predict the geometric mean of
the rates with the lowest loss.

**Halves** are drawn by the seed, balanced over everything that makes a case. One rule is chosen: that with the largest
ρ (Spearman's, `ranks`) within optimisers in the choosing half, the mean over the two measured rates. For each of these
there is a hypothesis: in the held-out half ρ within optimisers is above 0, with p < 0.025 over permutations. It is
within them because optimisers differ by orders of magnitude, which needs no prediction.

**Baselines**: one constant rate for each optimiser, and c/width with one such c. They, and the chosen rule, are
multiplied by the median factor of the choosing half, and compared in the held-out half by |log₂| of predicted over
measured. The first rule, the same batch in three steps, is what `simulate_steps` is documented for; it needs no choice
and is reported too.

Added when the rates had been seen, so it decides nothing: ρ of having norms at all, and ρ of the rule among the
networks with norms. One correction was made then, too: in one case of the choosing half, the lowest rates left the loss
exactly as it was, which counted as diverging. It counts now only above the best rate, and that case was run again.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from limitformer.base.progress import track
from limitformer.plot import BLACK, BLUE, GREEN, ORANGE, RED, panels
from limitformer_papers.beyond.foretells import (
    CHOOSE,
    LEVEL,
    TEST,
    cell_folder,
    confirmed,
    draw_cases,
    draw_rho,
    figure_legend,
    half,
    name_rows,
)
from limitformer_papers.beyond.ranks import correlations, generator, p_value, parts_of, ranks, spearman, within
from limitformer_papers.beyond.rate_networks import (
    KINDS,
    MEASURED,
    NEW,
    OPTIMIZERS,
    SAME,
    STARTS,
    Array,
    RateCase,
    RateSizes,
    first_diverged,
    law_rates_of,
    outcome_of,
    tries_of,
)  # fmt: skip
from limitformer_papers.common.claims import Claim, FigureRun

ATTRIBUTES = ("kind", "width", "depth", "start", "optimizer")
SHARE = 0.9  # of the networks must bear the predicted rate
ALIKE = 0.4  # logarithm of a ratio of losses of two networks of one law, and two batches
COLOURS = dict(zip(OPTIMIZERS, (BLUE, ORANGE, GREEN), strict=True))
PILOTS = ("gpt2-w64-d6-large-muon", "normed-w64-d6-small-adamw", "plain-w64-d2-large-sgd")


@dataclass(frozen=True, kw_only=True)
class Config:
    """The cases; the default is that of the study: 40.

    Attributes:
        kinds, optimizers, widths, depths: all their combinations, of which Muon has every other one.
        sizes: of all networks.
        samples: networks of the law of each case.
    """

    kinds: tuple[str, ...] = KINDS
    optimizers: tuple[str, ...] = OPTIMIZERS
    widths: tuple[int, ...] = (32, 64)
    depths: tuple[int, ...] = (2, 6)
    sizes: RateSizes = field(default_factory=RateSizes)
    samples: int = 4


paper = Config


def quick() -> Config:
    sizes = RateSizes(
        heads=2, vocabulary=16, length=8, batch=4, steps=8, evaluated=8,
        law_rates=((1e-2, 1e2, 4), (1e-3, 1.0, 4), (1e-3, 1.0, 4)), powers=((-5, 3), (-8, 0), (-8, 0)),
    )  # fmt: skip
    return Config(kinds=("normed",), optimizers=("sgd", "adamw"), widths=(8, 16), depths=(1,), sizes=sizes, samples=2)


def cases_of(config: Config) -> list[RateCase]:
    """Return the cases; the starts take turns."""
    return [
        RateCase(kind, width, depth, STARTS[(a + b + 2 * i + j) % len(STARTS)], optimizer)
        for a, kind in enumerate(config.kinds)
        for b, optimizer in enumerate(config.optimizers)
        for i, width in enumerate(config.widths)
        for j, depth in enumerate(config.depths)
        if optimizer != "muon" or (i + j + a) % 2 == 0
    ]


def held_out_of(cases: list[RateCase], seed: int) -> NDArray[np.bool_]:
    """Return which cases are held out: half, drawn by the seed again and again until the halves are balanced.

    The pilots were seen while the study was written, so that they are in the choosing half.
    """
    random = generator(seed)
    held_out = np.arange(len(cases)) % 2 == 1
    groups = [[getattr(one, key) for one in cases] for key in ATTRIBUTES]
    pilots = np.array([one.name in PILOTS for one in cases])
    while True:
        random.shuffle(held_out)
        if not (held_out & pilots).any() and all(balanced(held_out, group) for group in groups):
            return held_out


def balanced(held_out: NDArray[np.bool_], group: list[Any]) -> bool:
    """Return whether the numbers of cases of each value in the two halves differ by two at most."""
    values = np.array([str(value) for value in group])
    return all(abs(2 * held_out[values == value].sum() - (values == value).sum()) <= 2 for value in set(values))


def compute(config: Config, run: FigureRun) -> xr.Dataset:
    """Return `MEASURED` (batches, case, place, sample, step) at `law_rate` (case, place); the losses before training
    `first` (seed, case) and after it `end` (seed, case, try) at `tried` (case, try). NaN fills up rates.
    """
    cases = cases_of(config)
    with cell_folder(config, run) as folder:
        of_case = partial(outcome_of, sizes=config.sizes, samples=config.samples, seed=run.seed, folder=folder)
        outcomes = [of_case(case) for case in track(cases, "networks")]
    law_rates = [law_rates_of(case.optimizer, config.sizes) for case in cases]
    tries = [tries_of(case.optimizer, config.sizes) for case in cases]
    parts: dict[str, Any] = {
        "law_rate": (("case", "place"), filled(law_rates)),
        "tried": (("case", "try"), filled(tries)),
        "first": (("seed", "case"), np.transpose([one["start"] for one in outcomes])),
        "end": (("seed", "case", "try"), filled([one["end"] for one in outcomes]).swapaxes(0, 1)),
    }
    for key in MEASURED:
        arrays = [np.moveaxis(np.array(one[key]), 0, 1) for one in outcomes]  # (rate, batches, sample, step)
        longest = max(map(len, law_rates))
        every = np.full((len(cases), longest, *arrays[0].shape[1:]), np.nan)
        for k, array in enumerate(arrays):
            every[k, : len(array)] = array
        parts[key] = ("batches", "case", "place", "sample", "step"), np.moveaxis(every, 2, 0)
    along: dict[str, Any] = {key: [getattr(case, key) for case in cases] for key in ATTRIBUTES}
    along["half"] = np.where(held_out_of(cases, run.seed), TEST, CHOOSE)
    return xr.Dataset(parts, {"batches": [SAME, NEW], **{key: ("case", value) for key, value in along.items()}})


def filled(rows: Sequence[Any]) -> Array:
    """Return arrays (…, length) of different lengths as one, with NaN behind the shorter ones."""
    arrays = [np.asarray(row, np.float64) for row in rows]
    longest = max(array.shape[-1] for array in arrays)
    pad = [[(0, 0)] * (array.ndim - 1) + [(0, longest - array.shape[-1])] for array in arrays]
    return np.array([np.pad(array, width, constant_values=np.nan) for array, width in zip(arrays, pad, strict=True)])


# Rules, and what is measured.


@dataclass(frozen=True)
class RateRule:
    """A rule that turns the steps in law into a rate.

    Attributes:
        batches: those of the steps, "same" or "new".
        key: what is looked at after `step` steps.
        lowest: whether the rule predicts the rate with the lowest loss.
    """

    batches: str
    key: str
    step: int
    lowest: bool = False


DEFAULT = "same batch, 3 steps"
RULES = {
    DEFAULT: RateRule(SAME, "loss", 3),
    "same batch, 1 step": RateRule(SAME, "loss", 1),
    "new batches, 3 steps": RateRule(NEW, "loss", 3),
    "unseen batch, 1 step": RateRule(SAME, "loss_unseen", 1),
    "unseen batch, 3 steps on one": RateRule(SAME, "loss_unseen", 3),
    "unseen batch, 3 steps on new": RateRule(NEW, "loss_unseen", 3),
    "stream, 1 step": RateRule(SAME, "stream_change", 1),
    "stream, 3 steps": RateRule(SAME, "stream_change", 3),
    "lowest loss, same batch": RateRule(SAME, "loss", 3, lowest=True),
    "lowest loss, unseen batch": RateRule(NEW, "loss_unseen", 3, lowest=True),
}


def predicted(data: xr.Dataset, name: str) -> Array:
    """Return the rate that a rule predicts, by case."""
    rule = RULES[name]
    values = data[rule.key].sel(batches=rule.batches).values
    values = np.where(np.isnan(values), np.inf, values)  # a number that overflowed
    after = values[..., min(rule.step, values.shape[-1] - 1)]
    with np.errstate(divide="ignore", invalid="ignore"):
        excess = np.log(after) if rule.key == "stream_change" else np.log(after) - np.log(values[..., 0])
    excess = np.where(np.isnan(excess), np.inf, excess)
    rates = []
    for case, logarithms in enumerate(np.log(data["law_rate"].values)):
        number = int(np.isfinite(logarithms).sum())
        places, of_rates = logarithms[:number], excess[case, :number]  # (rate,), (rate, sample)
        if rule.lowest:
            rates.append(places[of_rates.argmin(0)].mean())
        else:
            rates.append(np.quantile([largest_below(places, one) for one in of_rates.T], 1 - SHARE))
    return np.exp(rates)


def largest_below(places: Array, excess: Array) -> float:
    """Return the place after the last negative excess where the excess is 0; the first or the last place if all the
    excesses have one sign.
    """
    below = np.flatnonzero(excess < 0)
    if not len(below) or below[-1] == len(places) - 1:
        return float(places[below[-1]] if len(below) else places[0])
    k = below[-1]
    part = excess[k] / (excess[k] - excess[k + 1]) if np.isfinite(excess[k + 1]) else 0.0
    return float(places[k] + part * (places[k + 1] - places[k]))


BEST, DIVERGING = "best", "diverging"


def measured(data: xr.Dataset, what: str) -> Array:
    """Return the best or the diverging rate, by seed and case."""
    start, end, tried = data["first"].values, data["end"].values, data["tried"].values
    if what == BEST:
        places = np.where(np.isnan(end), np.inf, end).argmin(-1)
        return np.take_along_axis(tried, places.T, 1).T
    rates = np.full(start.shape, np.inf)
    for seed, case in np.ndindex(start.shape):
        place = first_diverged(end[seed, case], float(start[seed, case]))
        rates[seed, case] = tried[case, place] if place < len(tried[case]) else np.inf
    return rates


def mean_measured(data: xr.Dataset, what: str) -> Array:
    """Return the geometric mean over the seeds, by case."""
    return np.asarray(np.exp(np.log(measured(data, what)).mean(0)))


# Statistics.


def present(data: xr.Dataset) -> list[str]:
    """Return the optimisers of the cases."""
    return [one for one in OPTIMIZERS if one in data["optimizer"].values]


def rho_of(data: xr.Dataset, name: str, what: str) -> float:
    """Return ρ of predicted and measured rates, the mean over optimisers."""
    return within(predicted(data, name), mean_measured(data, what), data["optimizer"].values)


def chosen(data: xr.Dataset) -> str:
    """Return the rule with the largest ρ in the choosing half, the mean over the measured rates."""
    there = half(data, CHOOSE)
    return max(RULES, key=lambda name: rho_of(there, name, BEST) + rho_of(there, name, DIVERGING))


def interval_within(x: Array, y: Array, groups: NDArray[Any], seed: int, draws: int = 2000) -> tuple[float, float]:
    """Return the ends of the 95 % interval of the mean of ρ over groups; pairs are drawn within groups."""
    random, total = generator(seed), np.zeros(draws)
    parts = parts_of(groups)
    for part in parts:
        pairs = part[random.integers(0, len(part), (draws, len(part)))]
        total += correlations(ranks(x[pairs]), ranks(y[pairs])) / len(parts)
    low, high = np.quantile(total, (0.025, 0.975))
    return float(low), float(high)


def factors(data: xr.Dataset, name: str, what: str) -> Array:
    """Return measured over predicted, of the cases that have both."""
    ratio = mean_measured(data, what) / predicted(data, name)
    return np.asarray(ratio[np.isfinite(ratio)])


def errors(data: xr.Dataset, base: Array, what: str) -> Array:
    """Return |log₂| of a prediction over what was measured (held-out case,), NaN where nothing diverged.

    Args:
        base: the prediction (case,), to be multiplied by the median factor of the choosing half for each optimiser.
    """
    rate, optimizer, held_out = mean_measured(data, what), data["optimizer"].values, data["half"].values == TEST
    ratio = np.log2(rate / base)
    ratio[~np.isfinite(ratio)] = np.nan
    for one in np.unique(optimizer):
        of_one = optimizer == one
        known = ratio[of_one & ~held_out & np.isfinite(ratio)]
        ratio[of_one] -= np.median(known) if len(known) else 0.0
    return np.asarray(np.abs(ratio[held_out]))


def claims(data: xr.Dataset) -> list[Claim]:
    """Return the choice and the two hypotheses first, then numbers that decide nothing."""
    best, there = chosen(data), half(data, CHOOSE)
    mean = (rho_of(there, best, BEST) + rho_of(there, best, DIVERGING)) / 2
    parts = [(name, what, side) for name in RULES for what in (BEST, DIVERGING) for side in (CHOOSE, TEST)]
    return [
        Claim(f"chosen in the {CHOOSE} half is the rule: {best}; its mean ρ there", mean),
        *[one for what in (BEST, DIVERGING) for one in hypothesis(data, best, what)],
        *[one for what in (BEST, DIVERGING) for one in accuracy(data, best, what)],
        *[one for what in (BEST, DIVERGING) for one in between_seeds(data, what)],
        *safety(data, best),
        of_the_law(data),
        *[Claim(f"ρ of {name} and the {what} rate, {side}", rho_of(half(data, side), name, what))
          for name, what, side in parts],
    ]  # fmt: skip


def hypothesis(data: xr.Dataset, name: str, what: str) -> list[Claim]:
    """Return whether the held-out half confirms the rule; judged from ten cases on."""
    there = half(data, TEST)
    x, y, groups, number = (
        predicted(there, name),
        mean_measured(there, what),
        there["optimizer"].values,
        there.sizes["case"],
    )
    rho, p = within(x, y, groups), p_value(x, y, groups, 1)
    low, high = interval_within(x, y, groups, 2)
    holds = confirmed(p, rho > 0, number)
    by_optimizer = []
    for one in present(there):
        part = groups == one
        label = f"{what} rate: ρ of {one} alone, {part.sum()} held-out cases"
        by_optimizer.append(Claim(label, spearman(x[part], y[part])))
    return [
        Claim(f"{what} rate: ρ in the {TEST} half of {number}; the hypothesis: above 0, p < {LEVEL:g}", rho, holds),
        Claim(f"{what} rate: p of that, over permutations", p),
        Claim(f"{what} rate: lower end of the 95 % interval", low),
        Claim(f"{what} rate: upper end of the 95 % interval", high),
        *by_optimizer,
        Claim(f"{what} rate: ρ over all optimisers together", spearman(x, y)),
        Claim(f"{what} rate: ρ of 1/width, {TEST} half", within(1 / there["width"].values, y, groups)),
        *afterwards(there, x, y, what),
    ]


def afterwards(data: xr.Dataset, x: Array, y: Array, what: str) -> list[Claim]:
    """Return numbers added when the rates had been seen: what norms alone foretell, and the rule among them alone."""
    normed, groups = data["kind"].values != "plain", data["optimizer"].values
    among = within(x[normed], y[normed], groups[normed]) if normed.any() else 0.0
    return [
        Claim(
            f"{what} rate: ρ of having norms, {TEST} half (added afterwards)", within(normed.astype(float), y, groups)
        ),
        Claim(f"{what} rate: ρ of the rule among {normed.sum()} {TEST} cases with norms (added afterwards)", among),
    ]


def accuracy(data: xr.Dataset, name: str, what: str) -> list[Claim]:
    """Return the factor between measured and predicted rates, and the errors of the rule and of the baselines."""
    there = half(data, TEST)
    quartiles = quartiles_of(factors(there, name, what))
    ones = np.ones(data.sizes["case"])
    bases = {"the rule": predicted(data, name), "a constant rate": ones, "c/width": 1 / data["width"].values}
    every = {base: errors(data, rates, what) for base, rates in bases.items()}
    better = (every["the rule"] < every["a constant rate"]).sum()
    by_optimizer = []
    for one in present(there):
        part = there.isel(case=np.flatnonzero(there["optimizer"].values == one))
        label = f"{what} rate over the predicted one, {one}, {TEST}: median"
        by_optimizer.append(Claim(label, median_of(factors(part, name, what))))
    return [
        *[Claim(f"{what} rate over the predicted one, {TEST}: {label}", value)
          for label, value in zip(("lower quartile", "median", "upper quartile"), quartiles, strict=True)],
        *by_optimizer,
        Claim(f"{what} rate over that of the rule {DEFAULT}, {TEST}: median", median_of(factors(there, DEFAULT, what))),
        *[Claim(f"{what} rate: median |log₂| of the error of {base}, {TEST}", median_of(values[np.isfinite(values)]))
          for base, values in every.items()],
        Claim(f"{what} rate: cases of {int(np.isfinite(every['the rule']).sum())} in which the rule errs less than the "
              "constant", float(better)),
    ]  # fmt: skip


def median_of(values: Array) -> float:
    return float(np.median(values)) if len(values) else float("nan")


def quartiles_of(values: Array) -> list[float]:
    return [float(one) for one in np.quantile(values, (0.25, 0.5, 0.75))] if len(values) else [float("nan")] * 3


def between_seeds(data: xr.Dataset, what: str) -> list[Claim]:
    """Return how well one seed predicts the other, which bounds any prediction."""
    first, second = measured(data, what)
    rho = within(first, second, data["optimizer"].values)
    return [Claim(f"{what} rate: ρ of the two seeds of all cases", rho)]


def safety(data: xr.Dataset, name: str) -> list[Claim]:
    """Return how often training at the predicted rate would have diverged."""
    there = half(data, TEST)
    ratio = predicted(there, name) / mean_measured(there, DIVERGING)
    never = np.isinf(mean_measured(data, DIVERGING)).sum()
    return [
        Claim(f"{TEST} cases whose predicted rate is at least the diverging one", float((ratio >= 1).sum())),
        Claim(f"{TEST} cases for which a third of it is", float((ratio / 3 >= 1).sum())),
        Claim(f"cases of {data.sizes['case']} in which no rate diverged", float(never)),
    ]


def of_the_law(data: xr.Dataset) -> Claim:
    """Return whether the law describes the networks that were trained, by their losses before training."""
    law = data["loss"].sel(batches=SAME).isel(place=0, step=0).mean("sample").values
    difference = float(np.abs(np.log(law / data["first"].values)).max())
    what = f"largest |ln| of the law's loss at the start over a trained network's: below {ALIKE:g}"
    return Claim(what, difference, difference < ALIKE)


def draw(data: xr.Dataset) -> Figure:
    """Draw predicted against measured rates, and ρ of all rules in both halves."""
    figure, axes = panels(3, height=4.2)
    best, held_out, looks = chosen(data), half(data, TEST), {DIVERGING: (RED, "-", -0.15), BEST: (BLUE, "--", 0.15)}
    for panel, (what, (colour, line, shift)) in zip(axes, looks.items(), strict=False):
        scatter(panel, data, best, what)
        for at, name in enumerate(RULES):
            x, y = predicted(held_out, name), mean_measured(held_out, what)
            ends = interval_within(x, y, held_out["optimizer"].values, 2)
            rhos = [rho_of(half(data, side), name, what) for side in (CHOOSE, TEST)]
            draw_rho(axes[2], at + shift, rhos, ends, size=4, color=colour, linestyle=line, linewidth=1.2)
    name_rows(axes[2], list(RULES), best)
    axes[2].set(xlabel="ρ within optimisers", ylabel="rule")
    lines = [
        Line2D([], [], color=BLACK, linestyle=":", linewidth=1, label="equal"),
        Line2D([], [], color=RED, linewidth=1.4, label="ρ with diverging"),
        Line2D([], [], color=BLUE, linewidth=1.4, linestyle="--", label="ρ with best"),
    ]
    figure_legend(figure, 8, present(data), COLOURS, lines)
    return figure


def scatter(axes: Axes, data: xr.Dataset, best: str, what: str) -> None:
    """Draw both rates of each case; rates that never diverged are at the upper edge."""
    x, y = predicted(data, best), mean_measured(data, what)
    y = np.minimum(y, 2 * float(np.nanmax(data["tried"].values)))
    draw_cases(axes, x, y, data["optimizer"].values, data["half"].values, COLOURS)
    ends = [min(x.min(), y.min()) / 2, 2 * max(x.max(), y.max())]
    axes.plot(ends, ends, color=BLACK, linestyle=":", linewidth=1)
    rhos = [f"{rho_of(half(data, side), best, what):.2f} {side}" for side in (CHOOSE, TEST)]
    axes.set(xscale="log", yscale="log", xlabel="predicted rate", ylabel=f"{what} rate", title=f"ρ = {', '.join(rhos)}")
