r"""How long two unequal antipodal clusters last: a question that [CT, Sec. 6] leaves open.

p tokens at e, q at −e. For p = q they stay; for p ≠ q the two clusters move by different amounts, the overlap is pushed
away from −1 and the state ends. The two clusters are one diffusion of their overlap, whose mean time from −1 to 0.9 is
an exact integral (`OverlapDiffusion.mean_hitting_time`). Left: over β for softmax attention, with the chain's mean at
L = 100 from the recorded times at which one token of each cluster first has an overlap over 0.9, and the slope e^{2β}.
Right: for unnormalised attention, where strength grows with β and so does the pace. The paper has no such figure.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.figure import Figure
from numpy.typing import NDArray

from limitformer.base.progress import track
from limitformer.models import StochasticTransformer
from limitformer.plot import PALETTE, legend_below, panels
from limitformer.sphere.overlap import overlap
from limitformer_papers.clustering.sphere import tokens_chain
from limitformer_papers.common.claims import Claim, FigureRun

SOFTMAX, UNNORMALIZED = "softmax", "unnormalized"
LINES = ("-", "--", "-.")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Clusters, β of the exact curves and of the chain; the chain runs `lifetimes` times the exact mean."""

    clusters: tuple[tuple[int, int], ...] = ((2, 1), (3, 1), (3, 2))
    dim: int = 4
    reached: float = 0.9
    betas: tuple[float, ...] = tuple(np.round(np.linspace(0.5, 6, 56), 4).tolist())
    simulated: tuple[float, ...] = (0.5, 1.0, 1.5, 2.0, 2.5)
    fine_at: float = 2.0
    fine_layers: int = 1000
    layers_per_unit_time: int = 100
    lifetimes: float = 12.0
    records_per_lifetime: int = 100
    equal: tuple[int, int] = (2, 2)
    samples: int = 2000


paper = Config


def quick() -> Config:
    return Config(
        clusters=((2, 1), (3, 2)),
        betas=(1.0, 1.5, 2.0, 4.0, 5.0, 6.0),
        simulated=(1.0, 1.5),
        fine_at=1.5,
        fine_layers=200,
        samples=120,
    )


def model_of(
    config: Config, clusters: tuple[int, int], beta: float, attention: str, layers: int
) -> StochasticTransformer:
    return StochasticTransformer(
        tokens=sum(clusters),
        dim=config.dim,
        beta=beta,
        layers_per_unit_time=layers,
        attention=attention,  # type: ignore[arg-type]
    )


def exact(config: Config, clusters: tuple[int, int], beta: float, attention: str = SOFTMAX) -> float:
    model = model_of(config, clusters, beta, attention, config.layers_per_unit_time)
    return overlap(model, clusters=clusters).mean_hitting_time(config.reached, start=-1.0)


def apart(clusters: tuple[int, int], dim: int) -> NDArray[np.float64]:
    """Return p tokens at the first unit vector and q opposite (p + q, dim)."""
    start = np.zeros((sum(clusters), dim))
    start[:, 0] = np.repeat([1.0, -1.0], clusters)
    return start


def times_of(horizon: float, records: int, layers: int) -> NDArray[np.float64]:
    """Return equidistant times, a whole number of layers each."""
    spacing = max(1, round(horizon * layers / records))
    return np.arange(0, round(horizon * layers) + spacing, spacing) / layers


def lived(
    config: Config, clusters: tuple[int, int], beta: float, layers: int, run: FigureRun
) -> tuple[float, float, float]:
    """Return the chain's mean lifetime, its standard error, and the largest 1 − z within a cluster."""
    horizon = config.lifetimes * exact(config, clusters, beta)
    times = times_of(horizon, round(config.lifetimes * config.records_per_lifetime), layers)
    model = model_of(config, clusters, beta, SOFTMAX, layers)
    samples = tokens_chain(model, times, config.samples, run, start=apart(clusters, config.dim))
    across, within = pairs_of(samples, clusters)
    over = samples["overlap"].values[..., across] > config.reached
    ended = np.where(over.any(1), over.argmax(1), len(times) - 1)
    lengths = times[ended] - (times[1] - times[0]) / 2
    spread = float((1 - samples["overlap"].values[..., within]).max(initial=0.0))
    return *mean_and_error(lengths), spread


def mean_and_error(lengths: NDArray[np.float64]) -> tuple[float, float]:
    """Return the mean of independent lengths (samples,) and its standard error."""
    return float(lengths.mean()), float(lengths.std(ddof=1) / np.sqrt(len(lengths)))


def pairs_of(samples: xr.Dataset, clusters: tuple[int, int]) -> tuple[int, NDArray[np.bool_]]:
    """Return the pair of the first token of each cluster, and which pairs are within a cluster."""
    first, second = samples["first"].values, samples["second"].values
    across = int(np.flatnonzero((first == 0) & (second == clusters[0]))[0])
    return across, (first < clusters[0]) == (second < clusters[0])


def compute(config: Config, run: FigureRun) -> xr.Dataset:
    """Return `exact` (attention, split, beta), `lifetime`, `error`, `spread` (split, simulated), `fine`,
    `equal_gap`.
    """
    cells = [(clusters, beta) for clusters in config.clusters for beta in config.simulated]
    estimates = np.array([lived(config, *cell, config.layers_per_unit_time, run) for cell in track(cells, "cells")])
    estimates = estimates.reshape(len(config.clusters), len(config.simulated), 3)
    first = config.clusters[0]
    fine = lived(config, first, config.fine_at, config.fine_layers, run)
    means = [
        [[exact(config, clusters, beta, attention) for beta in config.betas] for clusters in config.clusters]
        for attention in (SOFTMAX, UNNORMALIZED)
    ]
    return xr.Dataset(
        {
            "exact": (("attention", "split", "beta"), means),
            "lifetime": (("split", "simulated"), estimates[..., 0]),
            "error": (("split", "simulated"), estimates[..., 1]),
            "spread": (("split", "simulated"), estimates[..., 2]),
            "fine": (("estimate",), [fine[0], fine[1], exact(config, first, config.fine_at)]),
            "equal_gap": ((), stays(config, run)),
        },
        coords={
            "attention": [SOFTMAX, UNNORMALIZED],
            "split": [f"{p} + {q}" for p, q in config.clusters],
            "beta": list(config.betas),
            "simulated": list(config.simulated),
            "estimate": ["mean", "standard error", "exact"],
        },
        attrs={
            "dim": config.dim,
            "fine_layers": config.fine_layers,
            "fine_at": config.fine_at,
            "layers_per_unit_time": config.layers_per_unit_time,
        },
    )


def stays(config: Config, run: FigureRun) -> float:
    """Return the largest 1 + z that two equal clusters reach within the time that unequal ones last."""
    beta, horizon = config.fine_at, config.lifetimes * exact(config, config.clusters[0], config.fine_at)
    model = model_of(config, config.equal, beta, SOFTMAX, config.layers_per_unit_time)
    times = times_of(horizon, 200, config.layers_per_unit_time)
    samples = tokens_chain(model, times, min(config.samples, 200), run, start=apart(config.equal, config.dim))
    across, _ = pairs_of(samples, config.equal)
    return float((1 + samples["overlap"].values[..., across]).max())


def slopes(data: xr.Dataset) -> xr.DataArray:
    """Return d log(mean lifetime)/dβ between β = 4 and the last β, (split,)."""
    exact_means = data["exact"].sel(attention=SOFTMAX)
    means = exact_means.copy(data=np.log(exact_means.values))
    first = float(data["beta"].sel(beta=4.0, method="nearest"))
    return (means.isel(beta=-1) - means.sel(beta=first)) / (float(data["beta"][-1]) - first)


def claims(data: xr.Dataset) -> list[Claim]:
    """Unequal clusters part after the exact mean time, which grows like e^{2β}; equal ones stay."""
    mean, error, limit = data["fine"].values
    at, name = data.attrs["fine_at"], str(data["split"].values[0])
    exact_at = data["exact"].sel(attention=SOFTMAX).interp(beta=data["simulated"].values).values
    bias = (data["lifetime"].values - exact_at) / data["error"].values
    growth = slopes(data)
    spread = float(data["spread"].max())
    return [
        Claim(f"exact mean lifetime of {name} at β = {at:g}", float(limit)),
        Claim(
            f"the chain's, L = {data.attrs['fine_layers']} (standard error {error:.2f}; within 3 of them)",
            float(mean),
            bool(abs(mean - limit) < 3 * error),
        ),
        *(
            Claim(f"growth of the logarithm with β, from β = 4 on, {split}: 2", float(rate), bool(abs(rate - 2) < 0.05))
            for split, rate in zip(growth["split"].values, growth.values, strict=True)
        ),
        Claim(
            f"largest difference of the chain at L = {data.attrs['layers_per_unit_time']} and the limit, in standard "
            "errors",
            float(np.abs(bias).max()),
        ),
        Claim("largest 1 − z of two tokens of one cluster, any time", spread, spread < 1e-12),
        Claim(
            "largest 1 + z of equal clusters, any time: they stay",
            float(data["equal_gap"]),
            bool(data["equal_gap"] < 1e-12),
        ),
    ]


def draw(data: xr.Dataset) -> Figure:
    figure, (left, right) = panels(2, height=4.0)
    looks: list[Any] = [{"color": colour, "linestyle": line} for colour, line in zip(PALETTE, LINES, strict=False)]
    for attention, axes in ((SOFTMAX, left), (UNNORMALIZED, right)):
        for look, split in zip(looks, data["split"].values, strict=False):
            exact_means = data["exact"].sel(attention=attention, split=split)
            axes.plot(data["beta"], exact_means, **look, label=f"{split} tokens, exact")
        axes.set(xlabel="inverse temperature β", ylabel="mean lifetime of the antipodal state", yscale="log")
    points: Any = {"fmt": "o", "markersize": 4, "capsize": 2}
    for look, split in zip(looks, data["split"].values, strict=False):
        one = data.sel(split=split)
        left.errorbar(data["simulated"], one["lifetime"], one["error"], **points, color=look["color"])
    left.plot([], [], "o", color="gray", markersize=4, label=f"chain, L = {data.attrs['layers_per_unit_time']}")
    steep = data["beta"].values[data["beta"].values >= 3]
    base = float(data["exact"].isel(attention=0, split=0).sel(beta=steep[0], method="nearest"))
    rate = 0.35 * base * np.exp(2 * (steep - steep[0]))
    left.plot(steep, rate, color="gray", linestyle=":", label="slope of $e^{2β}$")
    left.set_title("softmax attention")
    right.set_title("unnormalised attention")
    legend_below(figure, 5, handles=left.get_legend_handles_labels()[0])
    return figure
