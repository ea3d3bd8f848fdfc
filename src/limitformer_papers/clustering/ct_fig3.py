r"""[CT, Fig. 3]: the phase transition of two tokens.

Probability that two tokens, uniform at first, end antipodal, over β for d = 4, …, 10. Parameters of the caption:
40,000 trajectories, L = 100, T = 500 (so 50,000 layers), σ = 1, tolerance 10⁻³; softmax attention, Q = K = I. The range
of β is not in it: 17 values from 0 to 4. Trajectories stop early once they are certain (10⁻⁹) to stay where they are.

Above: with Wilson intervals, on the exact probability of the limit and its thresholds β_c(d) = arccosh(d − 2)/2, and
the same over β and d. Below: simulated − exact, at L = 100 and at L = 1000, and its mean over some cells against L.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from limitformer.models import StochasticTransformer
from limitformer.plot import BLUE, MARKERS, RED, legend_below, panels, sequence
from limitformer.results.outcomes import OUTCOMES
from limitformer.sphere.overlap import overlap
from limitformer.sweep.phase import phase_diagram
from limitformer_papers.clustering.sphere import exact_shares, standard_error, text_of
from limitformer_papers.common.claims import Claim, FigureRun
from limitformer_papers.common.grids import resumable

SINGLE, ANTIPODAL, UNRESOLVED = OUTCOMES
THRESHOLD = "threshold $β_c(d)$"


@dataclass(frozen=True, kw_only=True)
class Config:
    """The caption's parameters; `some_dims` × `some_betas` are simulated with `other_layers` as well."""

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


paper = Config


def quick() -> Config:
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
    return StochasticTransformer(tokens=2, dim=dim, beta=beta, layers_per_unit_time=layers)


def grid(config: Config, dims: tuple[int, ...], betas: tuple[float, ...], layers: int, run: FigureRun) -> xr.Dataset:
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


def compute(config: Config, run: FigureRun) -> xr.Dataset:
    """Return the phase diagram, `curve` (dim, beta_curve), `threshold` (dim), `in_passing` (dim, beta), `bias`,
    `error`.
    """
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
        bias=(("layers", "some_dim", "some_beta"), bias), error=(("some_dim", "some_beta"), error)
    ).assign_coords(
        layers=[layers for layers, _ in by_layers], some_dim=list(config.some_dims), some_beta=list(config.some_betas)
    )


def in_passing(config: Config, data: xr.Dataset) -> NDArray[np.float64]:
    """Return the exact share that is antipodal at the horizon only: where β ≤ β_c and some were, else 0."""
    seen = (data["probability"].sel(outcome=ANTIPODAL) > 0) & (data["exact"] == 0)
    share = np.zeros(seen.shape)
    for row, column in np.argwhere(seen.values):
        model = pair(config.dims[row], config.betas[column], config.layers_per_unit_time)
        share[row, column] = exact_shares(model, [config.horizon], config.tolerance)[1, 0]
    return share


def claims(data: xr.Dataset) -> list[Claim]:
    """No pair ends antipodal below the threshold and some do above; the chain's bias vanishes with more layers."""
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
    statements = [
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
        Claim("largest unresolved share at the horizon", float(data["probability"].sel(outcome=UNRESOLVED).max())),
    ]
    if 4 in data["dim"] and 1.0 in data["beta"]:
        one = {"dim": 4, "beta": 1.0}
        statements.append(Claim("exact probability at d = 4, β = 1", float(exact.sel(one))))
        statements.append(Claim(f"the same simulated, L = {layers}", float(simulated.sel(one))))
    return statements


def mean_bias(data: xr.Dataset) -> tuple[list[int], list[float], list[float]]:
    """Return, for each L, the mean of simulated − exact over `some` cells, and its standard error."""
    count = data.sizes["some_dim"] * data.sizes["some_beta"]
    noise = float(np.sqrt((data["error"] ** 2).sum())) / count
    means = data["bias"].mean(("some_dim", "some_beta")).values.tolist()
    return data["layers"].values.tolist(), means, [noise] * len(means)


def draw(data: xr.Dataset) -> Figure:
    figure, ((curves, cells), (bias, by_layers)) = panels(2, width=5.2, height=4.4, rows=2)
    for look, one in zip(looks(data.sizes["dim"]), data["dim"].values, strict=True):
        draw_probability(curves, data.sel(dim=one), **look)
    curves.plot([], [], color="gray", label="exact, L → ∞")
    curves.plot([], [], color="gray", linestyle="--", label=THRESHOLD)
    curves.set(xlabel="inverse temperature β", ylabel="probability of the antipodal state", ylim=(-0.01, None))
    image = draw_cells(cells, data)
    draw_bias(bias, data)
    draw_by_layers(by_layers, data)
    for axes, columns in ((curves, 3), (cells, 1), (bias, 1), (by_layers, 1)):
        legend_below(axes, columns)
    figure.colorbar(image, ax=cells, label="probability of the antipodal state")
    return figure


def draw_cells(axes: Axes, data: xr.Dataset) -> Any:
    """Draw the simulated probability over β and d, and the phase boundary."""
    axes.grid(False)
    dims = data["dim"].values
    shares = data["probability"].sel(outcome=ANTIPODAL)
    image = axes.pcolormesh(data["beta"], dims, shares, cmap="magma", vmin=0, shading="nearest", rasterized=True)
    axes.plot(data["threshold"], dims, color="#56B4E9", linestyle="--", linewidth=2, label=THRESHOLD)
    axes.set(xlabel="inverse temperature β", ylabel="dimension d", yticks=dims)
    return image


def looks(count: int) -> list[dict[str, str]]:
    return [{"color": colour, "marker": (MARKERS * 2)[k]} for k, colour in enumerate(sequence(count))]


def draw_probability(axes: Axes, one: xr.Dataset, color: str, marker: str) -> None:
    chosen = one.sel(outcome=ANTIPODAL)
    p = chosen["probability"].values
    bars = np.abs(np.stack([p - chosen["low"].values, chosen["high"].values - p]))
    axes.plot(one.beta_curve, one["curve"], color=color, linewidth=1.2)
    points: Any = {"markersize": 3.5, "capsize": 2, "linewidth": 1}
    axes.errorbar(one.beta, p, bars, fmt=marker, color=color, label=f"d = {int(one.dim)}", **points)
    axes.axvline(float(one["threshold"]), 0, 0.12, color=color, linestyle="--", linewidth=1.2)


def draw_bias(axes: Axes, data: xr.Dataset) -> None:
    """Draw simulated − exact: each d in grey on the expected noise, its mean, and the mean with most layers."""
    samples, most, own = int(data.attrs["samples"]), int(data["layers"][-1]), data.attrs["layers"]
    difference = data["probability"].sel(outcome=ANTIPODAL) - data["exact"]
    noise = standard_error(data["exact"].values, samples)
    widest = 2 * noise.max(0)
    axes.fill_between(data.beta, -widest, widest, color="#E4E4E4", linewidth=0, label="± 2 standard errors of one d")
    axes.plot(data.beta, difference.T, ".", markersize=4, color="#808080")
    axes.plot([], [], ".", markersize=4, color="#808080", label=f"L = {own}, each d")
    mean, error = difference.mean("dim"), np.sqrt((noise**2).mean(0) / data.sizes["dim"])
    bars: Any = {"capsize": 2, "markersize": 4, "linewidth": 1.4}
    axes.errorbar(data.beta, mean, error, fmt="o-", color=BLUE, label=f"L = {own}, mean over d", **bars)
    finest = data["bias"].sel(layers=most).mean("some_dim")
    error = np.sqrt((data["error"] ** 2).mean("some_dim") / data.sizes["some_dim"])
    name = f"L = {most}, mean over d = {text_of(data['some_dim'].values.tolist())}"
    axes.errorbar(data.some_beta + 0.06, finest, error, fmt="s", color=RED, label=name, **bars)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set(xlabel="inverse temperature β", ylabel="simulated − exact")


def draw_by_layers(axes: Axes, data: xr.Dataset) -> None:
    layers, mean, noise = mean_bias(data)
    cells = data.sizes["some_dim"] * data.sizes["some_beta"]
    axes.axhline(0, color="black", linewidth=0.8)
    axes.errorbar(layers, mean, noise, fmt="o", markersize=5, color=BLUE, capsize=3, label="simulated")
    fine = np.geomspace(layers[0], layers[-1], 100)
    axes.plot(fine, mean[0] * layers[0] / fine, color="gray", linestyle="--", label="1/L through the first point")
    axes.set(xlabel="layers per unit of time L", ylabel=f"simulated − exact, mean of {cells} cells", xscale="log")
    axes.set_xticks(layers, [str(number) for number in layers])
    axes.minorticks_off()
