r"""Many tokens: how many clusters there are in time, how long N tokens take to gather, how long two clusters last.

Left: mean number of clusters for N up to 1,000. Middle: mean time until every pair of tokens is together or antipodal,
over N. At β = ∞ it is log(N)/σ² to first order: the token nearest to the plane ⟨v, x⟩ = 0 that divides them is at 1/N
of it (docs/many-tokens.md). Right: mean lifetime of two antipodal clusters over the share α of the larger one: exact,
its leading term (π/(2√2)) B(½, (d − 1)/2) α(1 − α)/|2α − 1| e^{2β}/σ² at large β, and as simulated from uniform starts:
time at risk over the number of ends, by the split found at `settled`. The papers have no such figure.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from limitformer.base.progress import track
from limitformer.models import StochasticTransformer
from limitformer.plot import DASHES, MARKERS, PALETTE, legend_below, panels
from limitformer.sphere.overlap import overlap
from limitformer_papers.beyond.splits import Array, limiting_lifetimes
from limitformer_papers.clustering.sphere import evenly, tokens_chain
from limitformer_papers.common.claims import Claim, FigureRun


@dataclass(frozen=True, kw_only=True)
class Config:
    """Gathering (`samples` for the least N, fewer for larger ones), lifetimes of splits, and odd N."""

    dim: int = 4
    tokens: tuple[int, ...] = (10, 30, 100, 300, 1000)
    betas: tuple[float, ...] = (3.0, 1e6)
    horizons: tuple[float, ...] = (12.0, 24.0)
    layers_per_unit_time: int = 10
    points_per_unit_time: int = 2
    tolerance: float = 0.01
    samples: int = 400
    split_tokens: int = 20
    split_betas: tuple[float, ...] = (2.0, 3.0)
    split_horizons: tuple[float, ...] = (200.0, 400.0)
    split_layers: int = 25
    settled: float = 10.0
    least_ends: int = 20
    split_samples: int = 600
    odd: tuple[int, ...] = (3, 5, 9, 15)
    odd_beta: float = 1.0
    odd_horizon: float = 150.0
    odd_samples: int = 400


paper = Config


def quick() -> Config:
    return Config(
        tokens=(10, 30),
        samples=40,
        split_tokens=5,
        split_betas=(1.5, 2.0),
        split_horizons=(100.0, 200.0),
        least_ends=10,
        split_samples=800,
        odd=(3, 5),
        odd_horizon=60.0,
        odd_samples=80,
    )


def model_of(config: Config, tokens: int, beta: float, layers: int) -> StochasticTransformer:
    return StochasticTransformer(tokens=tokens, dim=config.dim, beta=beta, layers_per_unit_time=layers)


def times_of(config: Config, horizon: float) -> Array:
    return evenly(horizon, round(horizon * config.points_per_unit_time) + 1, config.layers_per_unit_time)


def gathered(config: Config, tokens: int, beta: float, horizon: float, run: FigureRun) -> tuple[Array, float, float]:
    """Return the mean number of clusters (time,), and the mean time until all pairs are resolved with its error."""
    times = times_of(config, horizon)
    model = model_of(config, tokens, beta, config.layers_per_unit_time)
    samples = 8 * max(1, round(config.samples * config.tokens[0] / tokens / 8))  # eight run side by side
    outcomes = tokens_chain(model, times, samples, run, keep="outcome", tolerance=config.tolerance)
    done = outcomes["unresolved_pairs"].values == 0
    first = times[np.where(done.any(1), done.argmax(1), len(times) - 1)] - times[1] / 2
    return outcomes["clusters"].values.mean(0), float(first.mean()), float(first.std(ddof=1) / np.sqrt(len(first)))


def lived(config: Config, beta: float, horizon: float, run: FigureRun) -> Array:
    """Return mean lifetime and standard error (few, 2) by tokens in the smaller cluster; NaN with too few ends."""
    model = model_of(config, config.split_tokens, beta, config.split_layers)
    times = np.append(0.0, np.arange(config.settled, horizon + 1.0))
    outcomes = tokens_chain(model, times, config.split_samples, run, keep="outcome", tolerance=config.tolerance)
    few = config.split_tokens - outcomes["largest_cluster"].values[:, 1]
    two = (outcomes["clusters"].values[:, 1] == 2) & (outcomes["unresolved_pairs"].values[:, 1] == 0)
    ended = outcomes["largest_cluster"].values[:, 1:] == config.split_tokens
    last = np.where(ended.any(1), ended.argmax(1), ended.shape[1] - 1)
    half = (config.split_tokens + 1) // 2
    return np.array([risk(last[two & (few == k)], ended[two & (few == k)].any(1), config) for k in range(1, half)])


def risk(lasted: Array, over: Array, config: Config) -> tuple[float, float]:
    """Return the time at risk over the number of ends, and its standard error, from times and end flags (samples,)."""
    ends = int(over.sum())
    # An end lies half a unit before the record that shows it.
    mean = float(lasted.sum() / ends - 0.5) if ends >= config.least_ends else np.nan
    return mean, float(mean / np.sqrt(max(ends, 1)))


def exact(config: Config, beta: float) -> Array:
    """Return the exact mean times from −1 to together of unequal clusters, (few,)."""
    tokens = config.split_tokens
    model = model_of(config, tokens, beta, config.split_layers)
    splits = [(tokens - few, few) for few in range(1, (tokens + 1) // 2)]
    reached = 1 - config.tolerance
    return np.array([overlap(model, clusters=split).mean_hitting_time(reached, start=-1.0) for split in splits])


def still_two(config: Config, tokens: int, run: FigureRun) -> float:
    """Return the share of trajectories of an odd number of tokens that are not one cluster at the end."""
    model = model_of(config, tokens, config.odd_beta, config.split_layers)
    times = [config.odd_horizon]
    outcomes = tokens_chain(model, times, config.odd_samples, run, keep="outcome", tolerance=config.tolerance)
    return float((outcomes["largest_cluster"].values[:, -1] < tokens).mean())


def compute(config: Config, run: FigureRun) -> xr.Dataset:
    """Return `clusters`, `gather` (beta, tokens …); `lifetime`, `exact`, `leading` (split_beta, share …); `rest`
    (odd,).
    """
    cells = [(n, *each) for each in zip(config.betas, config.horizons, strict=True) for n in config.tokens]
    gatherings = [gathered(config, *cell, run) for cell in track(cells, "cells")]
    shape = len(config.betas), len(config.tokens)
    lives = [lived(config, *each, run) for each in zip(config.split_betas, config.split_horizons, strict=True)]
    few = np.arange(1, (config.split_tokens + 1) // 2)
    leading = [limiting_lifetimes(config.split_tokens, config.dim, beta)[few] for beta in config.split_betas]
    cell, split = ("beta", "tokens"), ("split_beta", "share")
    return xr.Dataset(
        {
            "clusters": (("tokens", "time"), np.array([one[0] for one in gatherings[: len(config.tokens)]])),
            "gather": (cell, np.array([one[1] for one in gatherings]).reshape(shape)),
            "gather_error": (cell, np.array([one[2] for one in gatherings]).reshape(shape)),
            "lifetime": ((*split, "estimate"), np.array(lives)),
            "exact": (split, np.array([exact(config, beta) for beta in config.split_betas])),
            "leading": (split, np.array(leading)),
            "rest": (("odd",), [still_two(config, n, run) for n in config.odd]),
        },
        coords={
            "beta": list(config.betas),
            "tokens": list(config.tokens),
            "time": times_of(config, config.horizons[0]),
            "split_beta": list(config.split_betas),
            "share": 1 - few / config.split_tokens,
            "odd": list(config.odd),
        },
        attrs={name: getattr(config, name) for name in ("odd_beta", "odd_horizon", "odd_samples")},
    )


def claims(data: xr.Dataset) -> list[Claim]:
    """Two clusters form, after times that grow like log N; they last as the integral says, and odd N end as one."""
    rest, beta, horizon = (data.attrs[name] for name in ("odd_samples", "odd_beta", "odd_horizon"))
    worst, most = float(data["rest"].max()), int(data["tokens"][-1])
    ends = data["clusters"].isel(tokens=-1)
    last = f"β = {float(data['beta'][0]):g}: mean number of clusters of {most:,} tokens at t = {float(ends.time[-1]):g}"
    return [
        Claim(last, float(ends[-1]), bool(ends[-1] < 2.5)),
        *(claim for beta_ in data["beta"].values for claim in gather_claims(data.sel(beta=beta_))),
        *(lifetime_claim(data.sel(split_beta=beta_)) for beta_ in data["split_beta"].values),
        Claim(
            f"largest share of odd N not in one cluster, β = {beta:g}, t = {horizon:g}, {rest} trajectories",
            worst,
            worst < 0.05,
        ),
    ]


def gather_claims(one: xr.Dataset) -> list[Claim]:
    beta, most = float(one["beta"]), int(one["tokens"][-1])
    slope, error = slope_of(one)
    return [
        Claim(f"β = {beta:g}: mean time to gather, {most:,} tokens", float(one["gather"][-1])),
        Claim(f"β = {beta:g}: growth of it per log N (standard error {error:.2f})", slope),
    ]


def slope_of(one: xr.Dataset) -> tuple[float, float]:
    """Return the slope of the mean time over log N, by weighted least squares, and its standard error."""
    x, weight = np.log(one["tokens"].values), one["gather_error"].values ** -2.0
    centred = x - (weight * x).sum() / weight.sum()
    scale = (weight * centred**2).sum()
    return float((weight * centred * one["gather"].values).sum() / scale), float(scale**-0.5)


def lifetime_claim(one: xr.Dataset) -> Claim:
    """Compare simulated with exact lifetimes for the splits of one β that have enough ends."""
    mean, error = one["lifetime"].values.T
    known = np.isfinite(mean) & (one["exact"].values > 5)
    ratio = mean[known] / one["exact"].values[known]
    weight = (one["exact"].values[known] / error[known]) ** 2
    average = float((weight * ratio).sum() / weight.sum())
    noise = 4 * float(weight.sum() ** -0.5)
    name = f"β = {float(one['split_beta']):g}: mean of simulated over exact lifetime, all splits beyond 5"
    return Claim(name, average, bool(abs(average - 1) < 0.1 + noise))


def draw(data: xr.Dataset) -> Figure:
    figure, (left, middle, right) = panels(3, height=4.4)
    for k, n in enumerate(data["tokens"].values):
        look: Any = {"color": PALETTE[k], "marker": MARKERS[k], "markersize": 3.5, "markevery": 4}
        left.plot(data["time"], data["clusters"].sel(tokens=n), **look, label=f"N = {n:,}")
    left.set(xlabel="time t", ylabel="mean number of clusters", yscale="log", xlim=(0, None))
    left.set_title(f"β = {float(data['beta'][0]):g}")
    draw_times(middle, data)
    for k, beta in enumerate(data["split_beta"].values):
        draw_lifetimes(right, data.sel(split_beta=beta), k)
    for axes in (left, middle, right):
        legend_below(axes, 2 if axes is left else 1)
    return figure


def draw_times(axes: Axes, data: xr.Dataset) -> None:
    """Draw mean times over N, and the slope of β = ∞."""
    for k, beta in enumerate(data["beta"].values):
        one = data.sel(beta=beta)
        look: Any = {"fmt": MARKERS[k] + DASHES[k], "markersize": 4, "capsize": 2, "color": PALETTE[k]}
        axes.errorbar(one["tokens"], one["gather"], one["gather_error"], **look, label=f"simulated, β = {beta:,.0f}")
    numbers = data["tokens"].values
    line = np.log(numbers / numbers[0]) + float(data["gather"].isel(beta=-1, tokens=0))
    axes.plot(numbers, line, color="gray", linestyle=":", label="slope of log(N)/σ²")
    axes.set(xlabel="number of tokens N", ylabel="mean time to gather", xscale="log", ylim=(0, None))


def draw_lifetimes(axes: Axes, one: xr.Dataset, k: int) -> None:
    beta = float(one["split_beta"])
    color = PALETTE[k]
    axes.plot(one["share"], one["exact"], color=color, linestyle=DASHES[k], label=f"exact, β = {beta:g}")
    leading: Any = {"color": color, "linestyle": DASHES[::-1][k], "linewidth": 1.1}
    axes.plot(one["share"], one["leading"], **leading, label=f"leading term, β = {beta:g}")
    mean, error = one["lifetime"].values.T
    look: Any = {"fmt": MARKERS[k], "markersize": 4, "capsize": 2, "color": color}
    axes.errorbar(one["share"], mean, error, **look, label=f"simulated, β = {beta:g}")
    axes.set(xlabel="share α of the larger cluster", ylabel="mean lifetime", yscale="log")
