r"""[CT, Fig. 8]: two tokens have clustered long before T = 500.

Parameters of the text: d = 4, …, 10, L = 100, 2,000 trajectories, T = 50 and 100, tolerance 10⁻³, three values of β:
one below every threshold β_c(d) = arccosh(d − 2)/2 (0.66 to 1.38), β = 1, which is above those of d = 4 and 5 only, and
one above all; the paper names β = 1 only. The chain is compared with the exact law of the limit at the same times: the
mass of the Fokker-Planck equation's solution (`OverlapDiffusion.density`) beyond and between ±(1 − tolerance).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from limitformer.base.progress import track
from limitformer.models import StochasticTransformer
from limitformer.plot import MARKERS, legend_below, panels, sequence
from limitformer.sphere.overlap import overlap
from limitformer_papers.clustering.sphere import exact_shares, shares, standard_error, text_of, tokens_chain
from limitformer_papers.common.claims import Claim, FigureRun

FIRST = 0.2  # the first time after 0
EVERY = 6  # the chain is drawn at every sixth time
KINDS = ("single", "antipodal", "unresolved")


@dataclass(frozen=True, kw_only=True)
class Config:
    """The text's parameters."""

    dims: tuple[int, ...] = (4, 5, 6, 7, 8, 9, 10)
    betas: tuple[float, ...] = (0.5, 1.0, 3.0)
    layers_per_unit_time: int = 100
    horizon: float = 100.0
    points: int = 121
    tolerance: float = 1e-3
    samples: int = 2000


paper = Config


def quick() -> Config:
    return Config(dims=(4, 5, 6), points=25, samples=400)


def times_of(config: Config) -> NDArray[np.float64]:
    """Return 0, half of the horizon, and times up to it that are even in log t, each a whole number of layers."""
    spaced = np.geomspace(FIRST, config.horizon, config.points)
    layers = np.append(spaced, [0, config.horizon / 2]) * config.layers_per_unit_time
    return np.unique(np.rint(layers)) / config.layers_per_unit_time


def compute(config: Config, run: FigureRun) -> xr.Dataset:
    """Return `chain` and `limit` (kind, beta, dim, time), and `forever` (beta, dim), the exact antipodal
    probability.
    """
    times = times_of(config)
    shape = (len(config.betas), len(config.dims))
    chain, limit = (np.empty((len(KINDS), *shape, len(times))) for _ in range(2))
    forever, threshold = np.empty(shape), np.empty(len(config.dims))
    for cell in track(list(np.ndindex(*shape)), "cells"):
        model = StochasticTransformer(
            tokens=2,
            dim=config.dims[cell[1]],
            beta=config.betas[cell[0]],
            layers_per_unit_time=config.layers_per_unit_time,
        )
        samples = tokens_chain(model, times, config.samples, run, keep="outcome", tolerance=config.tolerance)
        outcome_shares = shares(samples)
        chain[:, *cell] = [outcome_shares[kind] for kind in KINDS]
        limit[:, *cell] = exact_shares(model, times, config.tolerance)
        forever[cell] = overlap(model).antipodal_probability()
        threshold[cell[1]] = overlap(model).critical_beta
    axes = ("kind", "beta", "dim", "time")
    return xr.Dataset(
        {
            "chain": (axes, chain),
            "limit": (axes, limit),
            "forever": (("beta", "dim"), forever),
            "threshold": ("dim", threshold),
        },
        coords={"kind": list(KINDS), "beta": list(config.betas), "dim": list(config.dims), "time": times},
        attrs={"samples": config.samples},
    )


def claims(data: xr.Dataset) -> list[Claim]:
    """Pairs are antipodal exactly above the thresholds; T = 50 is long enough; chain and limit agree."""
    low, middle, high = data["beta"].values
    last = data["chain"].isel(time=-1)
    antipodal = last.sel(kind="antipodal")
    always = float(antipodal.sel(beta=high).min())
    above_it = data["dim"][data["threshold"] < middle]
    above = antipodal.sel(beta=middle, dim=above_it)
    samples = int(data.attrs["samples"])
    halfway = data["chain"].sel(time=data.time[-1] / 2, method="nearest")
    moved = abs(last - halfway).sel(kind="antipodal")
    late = last.sel(kind="unresolved")
    difference = abs(data["chain"] - data["limit"])
    errors = difference / standard_error(data["limit"].values, samples)
    worst = {float(beta): float(late.sel(beta=beta).max()) for beta in data["beta"].values}
    return [
        passing(data, low, data["dim"]),
        passing(data, middle, data["dim"][~(data["threshold"] < middle)]),
        Claim(
            f"least antipodal share at β = {middle:g} in dimensions {text_of(above.dim.values.tolist())}",
            float(above.min()),
            bool(above.min() > 0),
        ),
        Claim(f"least antipodal share at β = {high:g}, above all thresholds", always, always > 0),
        Claim("largest change of the antipodal share from T/2 to T", float(moved.max()), bool(moved.max() < 0.02)),
        *(Claim(f"largest unresolved share at T, β = {beta:g}", share) for beta, share in worst.items()),
        Claim("largest difference of chain and limit, any time and share", float(difference.max())),
        Claim(
            "the same at T, in standard errors (the chain's bias at finite L included)",
            float(errors.isel(time=-1).max()),
        ),
    ]


def passing(data: xr.Dataset, beta: float, dims: xr.DataArray) -> Claim:
    """Below the threshold pairs are antipodal only in passing: as many as in the limit at T, and none for ever."""
    chosen = data.sel(beta=beta, dim=dims, kind="antipodal").isel(time=-1)
    share, limit = chosen["chain"], chosen["limit"]
    noise = standard_error(limit.values, int(data.attrs["samples"]))
    holds = bool((chosen["forever"] == 0).all() and (share.values <= limit.values + 4 * noise).all())
    what = f"largest antipodal share at T, β = {beta:g}, d = {text_of(dims.values.tolist())}, below the thresholds"
    return Claim(
        f"{what}: all in passing (exact at T: {float(limit.max()):.2g}, for ever: 0)", float(share.max()), holds
    )


def draw(data: xr.Dataset) -> Figure:
    """Draw a column for each β, unresolved above and antipodal below."""
    figure, axes = panels(data.sizes["beta"], height=2.8, rows=2)
    for column, beta in enumerate(data["beta"].values):
        for row, kind in enumerate(("unresolved", "antipodal")):
            one = axes[row, column]
            draw_curves(one, data.sel(kind=kind, beta=beta))
            one.set(xlabel="time t", ylabel=f"share {kind}", xscale="log")
            if kind == "unresolved":
                one.set(yscale="log", ylim=(1 / (2 * data.attrs["samples"]), 1.5))
            else:
                one.set_ylim(-0.01, 0.4)
        axes[0, column].set_title(f"β = {beta:g}")
    handles = axes[0, 0].get_legend_handles_labels()[0]
    styles = [
        Line2D([], [], color="gray", linestyle="", marker="o", markersize=4, label="simulated"),
        Line2D([], [], color="gray", linewidth=1.2, label="exact, L → ∞"),
    ]
    legend_below(figure, 5, handles=[*handles, *styles])
    return figure


def draw_curves(axes: Axes, one: xr.Dataset) -> None:
    """Draw the exact law for each d, and the chain at a few of the times."""
    times, few = one.time.values, slice(1, None, EVERY)
    for k, (dim, colour) in enumerate(zip(one["dim"].values, sequence(one.sizes["dim"]), strict=True)):
        at = one.sel(dim=dim)
        look: Any = {"color": colour, "marker": (MARKERS * 2)[k], "markersize": 4}
        axes.plot(times[1:], at["limit"][1:], color=colour, linewidth=1.2)
        axes.plot(times[few], at["chain"][few], linestyle="", **look)
        axes.plot([], [], **look, linewidth=1.2, label=f"d = {dim}")
