r"""[ST, Fig. 6]: the mean entropy of attention while training, by learning rate, for the first and the seventh layer.

Drawn from finished runs of `limitformer train mlm`, at the scale of those runs. Above: shaped attention (Recover);
below: Pre-LN. The entropy of a row of the softmax, in nats, is averaged over rows, heads, a fixed batch of held-out
data, and seeds. It is at most log of the length; near 0 the softmax is a point mass: entropy collapse. A cross marks
the end of a curve of which a seed diverged.

The paper states that the entropy of Pre-LN collapses at large rates and that of the shaped one does not. The claim is
judged at the largest rate at which all seeds of both reached the end, since a run that diverges has no meaningful
entropy. Other claims report the largest rate of all.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from limitformer.plot import legend_below, panels, sequence
from limitformer_papers.common.claims import Claim, FigureRun
from limitformer_papers.shaped_transformer.language_runs import (
    VARIANTS,
    below,
    best_gamma,
    curves,
    diverged,
    draw_curve,
    grid_of_runs,
    keys,
    language_runs,
    logs,
    scale_of,
    variant_label,
    with_all_seeds,
    with_gamma,
)
from limitformer_papers.training.plan import FinishedRun

DRAWN = ("shaped-recover", "pre-ln")
LARGEST: Any = {"color": "gray", "linewidth": 1, "linestyle": ":"}
AXES = ("variant", "rate", "seed")


@dataclass(frozen=True, kw_only=True)
class Config:
    """The caption's layers; networks with fewer layers use their last one."""

    layers: tuple[int, ...] = (1, 7)


paper = quick = Config


def compute(config: Config, run: FigureRun) -> xr.Dataset:
    """Return `entropy` (variant, rate, seed, layer, step) of the runs of the deepest networks, and `diverged`.

    The attribute `largest` is log of the length; `gamma` is NaN if no shaped variant was run.
    """
    all_runs = language_runs(run, DRAWN)
    depth = max(one.about["depth"] for one in all_runs)
    deepest = [one for one in all_runs if one.about["depth"] == depth]
    gamma = best_gamma(deepest)
    runs = with_all_seeds(with_gamma(deepest, {depth: gamma}))
    layers = sorted({min(layer, depth) for layer in config.layers})
    steps, values = entropies(runs, layers)
    entropy = grid_of_runs(runs, AXES, values, {"layer": layers, "step": steps})
    attributes = {"depth": depth, "gamma": gamma, "largest": float(np.log(runs[0].about["length"]))}
    return xr.Dataset(
        {"entropy": entropy, "diverged": diverged(runs, AXES)}, attrs=attributes | {"runs": scale_of(runs, deepest)}
    )


def entropies(runs: list[FinishedRun], layers: list[int]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return steps (k,) and the mean entropy over heads (run, layer, k)."""
    tables, heads = logs(runs), range(runs[0].about["heads"])
    by_layer = [[curves(tables, "entropy", layer, head) for head in heads] for layer in layers]
    means = [np.mean([values for _, values in by_head], axis=0) for by_head in by_layer]
    return by_layer[0][0][0], np.stack(means, axis=1)


def claims(data: xr.Dataset) -> list[Claim]:
    """Return the least entropy at the largest rate, and the paper's statement where both variants reach the end."""
    rate = float(data["rate"][-1])
    statements = [
        Claim(f"{label_of(data, name, rate)}, rate {rate:g}: least entropy over log(length)", least(data, name, rate))
        for name in data["variant"].values
        if bool(data["diverged"].sel(variant=name, rate=rate).notnull().any())
    ]
    both = shared(data)
    calm = [one for one in both if not bool((data["diverged"].sel(rate=one) == 1).any())]
    ratios = [ratio_claim(data, calm[-1], True)] if calm else []
    return statements + ratios + ([ratio_claim(data, both[-1], False)] if both and both[-1:] != calm[-1:] else [])


def shared(data: xr.Dataset) -> list[float]:
    """Return the rates that both variants have; none if one was not run."""
    there = data["diverged"].notnull().any("seed").reindex(variant=list(DRAWN), fill_value=False).all("variant")
    return [float(rate) for rate in data["rate"].values[there.values]]


def label_of(data: xr.Dataset, name: str, rate: float) -> str:
    """Name a variant and its number of diverged seeds."""
    return variant_label(name, data["diverged"].sel(variant=name, rate=rate))


def least(data: xr.Dataset, name: str, rate: float) -> float:
    """Return the least mean entropy over steps and layers, over log(length)."""
    mean = data["entropy"].sel(variant=name, rate=rate).mean("seed", skipna=False)
    return float(mean.min()) / float(data.attrs["largest"])


def ratio_claim(data: xr.Dataset, rate: float, judged: bool) -> Claim:
    """Return the ratio of least entropies, Pre-LN over shaped, at one rate; judged if all seeds reached the end."""
    shaped, base = (np.float64(least(data, name, rate)) for name in DRAWN)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = float(base / shaped)
    names = [label_of(data, name, rate) for name in reversed(DRAWN)]
    what = f"rate {rate:g}: least entropy of {names[0]} over that of {names[1]}"
    if not judged:
        return Claim(f"{what} (not judged: not all reached the end)", ratio)
    return Claim(
        f"{what} (the paper: it collapses, below 1/2; the largest rate at which all reached the end)",
        ratio,
        below(ratio, 0.5),
    )


def draw(data: xr.Dataset) -> Figure:
    """Draw variants in rows and layers in columns."""
    rows, columns = data.sizes["variant"], data.sizes["layer"]
    figure, axes = panels(columns, height=3.2, rows=rows)
    grid = np.reshape(axes, (rows, columns))
    for row, name in enumerate(data["variant"].values):
        gamma = f", γ = {data.attrs['gamma']:g}" if name == "shaped-recover" else ""
        for column, layer in enumerate(data["layer"].values):
            panel(grid[row, column], data.sel(variant=name, layer=layer), data.attrs["largest"])
            grid[row, column].set_title(f"{VARIANTS[name]}, layer {layer}{gamma}")
    line = Line2D([], [], label="log(length)", **LARGEST)
    legend_below(figure, 5, handles=keys(data, [line], marker="."))
    for axis in grid[-1]:
        axis.set_xlabel("step")
    figure.suptitle(data.attrs["runs"])
    return figure


def panel(axes: Axes, data: xr.Dataset, largest: float) -> None:
    mean = data["entropy"].mean("seed", skipna=False)
    for colour, rate in zip(sequence(data.sizes["rate"]), data["rate"].values, strict=True):
        draw_curve(axes, mean.sel(rate=rate), data["diverged"].sel(rate=rate), largest, color=colour, marker=".")
    axes.axhline(largest, **LARGEST)
    axes.set(ylabel="mean entropy (nats)", ylim=(0, 1.06 * largest))
