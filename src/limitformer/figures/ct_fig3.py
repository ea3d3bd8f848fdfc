r"""[CT, Fig. 3]: the phase transition of two tokens.

Probability that two tokens, uniform at first, end antipodal, over β for d = 4, …, 10. Parameters of the caption:
40,000 trajectories, L = 100, T = 500 (so 50,000 layers), σ = 1, tolerance 10⁻³; softmax attention, Q = K = I. The range
of β is not in it: 17 values from 0 to 4. Trajectories stop early once they are certain (10⁻⁹) to stay where they are.

Left: with Wilson intervals, on the exact probability of the limit and its thresholds β_c(d) = arccosh(d − 2)/2. Middle:
simulated − exact, at L = 100 and at L = 1000. Right: its mean over some cells against L.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from limitformer.figures.claims import Claim, Run
from limitformer.figures.grids import resumable
from limitformer.figures.sphere import exact_shares, sequence, standard_error, text_of
from limitformer.limits.overlap import overlap
from limitformer.models import StochasticTransformer
from limitformer.outcomes import OUTCOMES
from limitformer.phase import phase_diagram
from limitformer.plot import RED, panels

SINGLE, ANTIPODAL, UNRESOLVED = OUTCOMES


@dataclass(frozen=True, kw_only=True)
class Config:
    """The caption's parameters; the cells `some_dims` × `some_betas` are simulated with `other_layers` as well."""

    dims: tuple[int, ...] = (4, 5, 6, 7, 8, 9, 10)
    betas: tuple[float, ...] = tuple(np.linspace(0, 4, 17).tolist())
    layers_per_unit_time: int = 100
    horizon: float = 500.0
    tolerance: float = 1e-3
    early_stop: float = 1e-9
    some_dims: tuple[int, ...] = (4, 6, 8, 10)
    some_betas: tuple[float, ...] = (1.5, 2.0, 2.5, 3.0)
    other_layers: tuple[int, ...] = (10, 25, 50, 1000)
    curve: int = 161
    samples: int = 40_000


def paper() -> Config:
    """The caption's parameters."""
    return Config()


def quick() -> Config:
    """For tests."""
    return Config(
        dims=(4, 6, 10),
        betas=(0.0, 0.5, 1.0, 2.0, 3.0, 4.0),
        horizon=100.0,
        some_dims=(4, 6),
        some_betas=(2.0, 3.0),
        other_layers=(10, 200),
        curve=41,
        samples=500,
    )


def pair(dim: int, beta: float, layers: int) -> StochasticTransformer:
    """Two tokens."""
    return StochasticTransformer(tokens=2, dim=dim, beta=beta, layers_per_unit_time=layers)


def grid(config: Config, dims: tuple[int, ...], betas: tuple[float, ...], layers: int, run: Run) -> xr.Dataset:
    """The phase diagram."""

    def diagram(store: Path | None) -> xr.Dataset:
        return phase_diagram(
            pair(dims[0], betas[0], layers),
            {"dim": dims, "beta": betas},
            horizon=config.horizon,
            samples=config.samples,
            seed=run.seed,
            tolerance=config.tolerance,
            early_stop=config.early_stop,
            threads=run.threads,
            store=store,
        )

    return resumable(diagram, run, f"layers-{layers}")


def compute(config: Config, run: Run) -> xr.Dataset:
    """The phase diagram, `curve` (dim, beta_curve), `threshold` (dim), `in_passing` (dim, beta), `bias` and `error`."""
    data = grid(config, config.dims, config.betas, config.layers_per_unit_time, run)
    betas = np.linspace(min(config.betas), max(config.betas), config.curve)
    limits = [[overlap(pair(dim, beta, config.layers_per_unit_time)) for beta in betas] for dim in config.dims]
    data = data.assign(
        curve=(("dim", "beta_curve"), [[float(one.antipodal_probability()) for one in row] for row in limits]),
        threshold=("dim", [row[0].critical_beta for row in limits]),
        in_passing=(("dim", "beta"), in_passing(config, data)),
    )
    data = data.assign_coords(beta_curve=betas).assign_attrs(layers=config.layers_per_unit_time)
    own = data.sel(dim=list(config.some_dims), beta=list(config.some_betas))
    others = {layers: grid(config, config.some_dims, config.some_betas, layers, run) for layers in config.other_layers}
    by_layers = sorted((others | {config.layers_per_unit_time: own}).items())
    bias = [(one["probability"].sel(outcome=ANTIPODAL) - one["exact"]).values for _, one in by_layers]
    error = standard_error(own["exact"].values, config.samples)
    return data.assign(
        bias=(("layers", "some_dim", "some_beta"), bias),
        error=(("some_dim", "some_beta"), error),
    ).assign_coords(
        layers=[layers for layers, _ in by_layers], some_dim=list(config.some_dims), some_beta=list(config.some_betas)
    )


def in_passing(config: Config, data: xr.Dataset) -> NDArray[np.float64]:
    """Exact share that is antipodal at the horizon, though not for ever: where β ≤ β_c and some were, else 0."""
    seen = (data["probability"].sel(outcome=ANTIPODAL) > 0) & (data["exact"] == 0)
    share = np.zeros(seen.shape)
    for row, column in np.argwhere(seen.values):
        model = pair(config.dims[row], config.betas[column], config.layers_per_unit_time)
        share[row, column] = exact_shares(model, [config.horizon], config.tolerance)[1, 0]
    return share


def claims(data: xr.Dataset) -> list[Claim]:
    """No antipodal end below the threshold, some above; the chain's bias, which is gone with more layers."""
    samples, layers = int(data.attrs["samples"]), int(data.attrs["layers"])
    simulated, exact = data["probability"].sel(outcome=ANTIPODAL), data["exact"]
    inside = data["beta"] > data["threshold"]
    below = simulated.where(~inside)
    excess = (below - data["in_passing"]) / standard_error(data["in_passing"], samples)
    missing = int(((simulated == 0) & (exact * samples > 20)).sum())
    difference = (simulated - exact).where(inside)
    largest = difference.where(abs(difference) == abs(difference).max(), drop=True)
    where = f"d = {int(largest.dim[0])}, β = {float(largest.beta[0]):g}"
    most = int(data["layers"][-1])
    errors = abs(data["bias"] / data["error"])
    found = [
        Claim(
            "largest antipodal share at or below the threshold: all in passing "
            f"(exact at T: {float(data['in_passing'].max()):.2g}, for ever: 0)",
            float(below.max()),
            bool(excess.max() < 4),
        ),
        Claim(
            "cells above the threshold, with 20 antipodal ends or more expected, that have none",
            float(missing),
            missing == 0,
        ),
        Claim(f"L = {layers}: simulated − exact where it is largest ({where})", float(largest.values[0, 0])),
        Claim(
            f"L = {most}: |simulated − exact|, the largest, in standard errors",
            float(errors.sel(layers=most).max()),
            bool(errors.sel(layers=most).max() < 4),
        ),
        *(
            Claim(f"L = {number}: mean of simulated − exact over some cells (standard error {noise:.4f})", mean)
            for number, mean, noise in zip(*mean_bias(data), strict=True)
        ),
        Claim(
            "largest unresolved share at the horizon",
            float(data["probability"].sel(outcome=UNRESOLVED).max()),
        ),
    ]
    if 4 in data["dim"] and 1.0 in data["beta"]:
        one = {"dim": 4, "beta": 1.0}
        found.append(Claim("exact probability at d = 4, β = 1", float(exact.sel(one))))
        found.append(Claim(f"the same simulated, L = {layers}", float(simulated.sel(one))))
    return found


def mean_bias(data: xr.Dataset) -> tuple[list[int], list[float], list[float]]:
    """For each L the mean of simulated − exact over `some` cells, and its standard error."""
    count = data.sizes["some_dim"] * data.sizes["some_beta"]
    noise = float(np.sqrt((data["error"] ** 2).sum())) / count
    means = data["bias"].mean(("some_dim", "some_beta")).values.tolist()
    return data["layers"].values.tolist(), means, [noise] * len(means)


def draw(data: xr.Dataset) -> Figure:
    """Probability, bias, bias over L."""
    figure, (left, middle, right) = panels(3, width=4.6, height=4.0)
    colours = dict(zip(data["dim"].values.tolist(), sequence(data.sizes["dim"]), strict=True))
    for dim, colour in colours.items():
        draw_probability(left, data.sel(dim=dim), colour)
    left.plot([], [], color="gray", label="exact, L → ∞")
    left.plot([], [], color="gray", linestyle="--", label="threshold $β_c(d)$")
    left.set(xlabel="inverse temperature β", ylabel="probability of the antipodal state", ylim=(-0.01, None))
    left.legend(fontsize=8, loc="upper left")
    draw_bias(middle, data, colours)
    layers, mean, noise = mean_bias(data)
    right.axhline(0, color="black", linewidth=0.8)
    right.errorbar(layers, mean, noise, fmt="o", markersize=5, color=RED, capsize=3, label="simulated")
    fine = np.geomspace(layers[0], layers[-1], 100)
    right.plot(fine, mean[0] * layers[0] / fine, color="gray", linestyle="--", label="∝ 1/L")
    right.set(xlabel="layers per unit of time L", ylabel="simulated − exact, mean", xscale="log")
    right.set_xticks(layers, layers)
    right.minorticks_off()
    right.legend(fontsize=8)
    dims, betas = (text_of(data[name].values.tolist()) for name in ("some_dim", "some_beta"))
    right.set_title(f"mean over d = {dims}; β = {betas}", fontsize=9)
    return figure


def draw_probability(axes: Axes, one: xr.Dataset, colour: str) -> None:
    """Points with intervals, the exact curve and its threshold, of one dimension."""
    chosen = one.sel(outcome=ANTIPODAL)
    p = chosen["probability"].values
    bars = np.abs(np.stack([p - chosen["low"].values, chosen["high"].values - p]))
    axes.plot(one.beta_curve, one["curve"], color=colour, linewidth=1.4)
    axes.errorbar(one.beta, p, bars, fmt="o", markersize=3.5, color=colour, capsize=2, label=f"d = {int(one.dim)}")
    axes.axvline(float(one["threshold"]), 0, 0.12, color=colour, linestyle="--", linewidth=1.2)


def draw_bias(axes: Axes, data: xr.Dataset, colours: dict[int, str]) -> None:
    """Simulated − exact: a point for each dimension, the mean of all, and with the most layers."""
    samples, most = int(data.attrs["samples"]), int(data["layers"][-1])
    difference = data["probability"].sel(outcome=ANTIPODAL) - data["exact"]
    for dim, colour in colours.items():
        axes.plot(data.beta, difference.sel(dim=dim), "o", markersize=3.5, color=colour, alpha=0.7)
    for dim in data["some_dim"].values:
        finest = data["bias"].sel(layers=most, some_dim=dim)
        axes.plot(data.some_beta + 0.04, finest, "s", markersize=5, mfc="white", color=colours[int(dim)])
    noise = np.sqrt((standard_error(data["exact"].values, samples) ** 2).sum(0)) / len(colours)
    axes.errorbar(data.beta, difference.mean("dim"), noise, color="black", linewidth=1.2, capsize=2)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.plot([], [], "o", color="gray", markersize=4, label=f"L = {data.attrs['layers']}, each d")
    axes.plot([], [], color="black", label=f"L = {data.attrs['layers']}, mean over d")
    axes.plot([], [], "s", color="gray", mfc="white", markersize=5, label=f"L = {most}")
    axes.set(xlabel="inverse temperature β", ylabel="simulated − exact")
    axes.legend(fontsize=8, loc="upper left")
