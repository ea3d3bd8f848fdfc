r"""[ST, Sec. 5]: does a learning rate hold where width and depth grow together?

"We believe it's possible to extract optimal hyperparameters from networks with not only a much smaller width, but
smaller depth as well", since the forward pass has a limit at constant d/n. The paper has no experiment on it.

Drawn from finished runs of `limitformer train mlm` at several widths, each at one depth, and several rates. A panel is
a variant, a curve a size: the held-out loss at the end over the rate, its mean over seeds with a bar from the least to
the largest; a cross is a rate at which a seed diverged. The best rate has the least mean.
"""

from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from limitformer.base.errors import require
from limitformer.plot import MARKERS, panels, sequence
from limitformer_papers.common.claims import Claim, FigureRun, NoConfig
from limitformer_papers.shaped_transformer.language_runs import (
    CROSS,
    PLACE,
    VARIANTS,
    diverged,
    final,
    grid_of_runs,
    language_runs,
    scale_of,
    setting,
)

AXES = ("variant", "width", "rate", "seed")
GROWING = ("width", "hidden", "heads")  # with the depth
paper = quick = NoConfig


def compute(config: NoConfig, run: FigureRun) -> xr.Dataset:
    """Return the held-out `loss` at the end and `diverged` (variant, width, rate, seed), and `depth` (width).

    The loss of a run that diverged is ∞.
    """
    runs = language_runs(run, place=(*PLACE, *GROWING))
    sizes = sorted({(setting(one, "width"), setting(one, "depth")) for one in runs})
    widths = [width for width, _ in sizes]
    require(
        len(sizes) > 1 and len(set(widths)) == len(sizes),
        f"The figure needs several widths, each at one depth; the finished runs have (width, depth) = {sizes}. "
        "Nearest: limitformer train mlm --width 128 --depth 12.",
    )
    loss = grid_of_runs(runs, AXES, [final(one, "eval_loss") for one in runs])
    grid = " × ".join(f"{count} {name}" for name, count in loss.sizes.items())
    require(
        len(runs) == loss.size and bool(loss.notnull().all()),
        f"The figure needs one run of each variant at each width, rate and seed, {grid} = {loss.size}; there are "
        f"{len(runs)}. Nearest: finish the grid, and a folder for each γ and number of heads.",
    )
    depths = xr.DataArray([depth for _, depth in sizes], dims="width")
    parts = {"loss": loss, "diverged": diverged(runs, AXES), "depth": depths}
    return xr.Dataset(parts, attrs={"runs": scale_of(runs)})


def claims(data: xr.Dataset) -> list[Claim]:
    """Return each size's best rate, its change, and what the first size's best rate costs at the last one.

    The best rate is NaN where a seed diverged at each.
    """
    found, loss = [], data["loss"].mean("seed")
    for name in data["variant"].values:
        part = loss.sel(variant=name)
        best = part.where(np.isfinite(part)).idxmin("rate")
        for width, depth, rate in zip(data["width"].values, data["depth"].values, best.values, strict=True):
            found.append(Claim(f"{VARIANTS[name]}, n = {width}, d = {depth}: best rate", float(rate)))
        rates = part["rate"].values
        inside = all(rates.min() < rate < rates.max() for rate in best.values[[0, -1]])
        change = float(np.log2(best[-1] / best[0]))
        said = f"{VARIANTS[name]}: change of the best rate over the sizes, in powers of two (the paper: 0)"
        found.append(Claim(said, change, change == 0 if inside else None))
        last = part.isel(width=-1)
        regret = float(last.where(last["rate"] == best.values[0]).min() - last.min())
        found.append(Claim(f"{VARIANTS[name]}: regret at the last size of the first one's best rate, in nats", regret))
    return found


def draw(data: xr.Dataset) -> Figure:
    """Draw a panel for each variant."""
    figure, axes = panels(data.sizes["variant"], height=3.8)
    for panel, name in zip(axes, data["variant"].values, strict=True):
        draw_variant(panel, data.sel(variant=name))
        panel.set(xscale="log", xlabel="learning rate", title=VARIANTS[name])
    axes[0].set_ylabel("held-out loss (nats)")
    if bool(data["diverged"].any()):
        axes[-1].plot([], [], color="gray", label="a seed diverged", **CROSS)
    axes[-1].legend()
    figure.suptitle(data.attrs["runs"])
    return figure


def draw_variant(axes: Axes, data: xr.Dataset) -> None:
    loss = data["loss"].mean("seed")
    means = loss.where(np.isfinite(loss))  # a gap where a seed diverged
    low, high = (float(means.min()), float(means.max())) if bool(means.notnull().any()) else (0.0, 1.0)
    for k, colour in enumerate(sequence(data.sizes["width"])):
        one, mean = data.isel(width=k), means.isel(width=k)
        bars = [mean - one["loss"].min("seed"), one["loss"].max("seed") - mean]
        style: Any = {"color": colour, "marker": MARKERS[k % len(MARKERS)], "markersize": 4, "capsize": 2}
        axes.errorbar(mean["rate"], mean, bars, label=f"n = {int(one['width'])}, d = {int(one['depth'])}", **style)
        lost = mean["rate"][mean.isnull().values]
        axes.plot(lost, [high + (0.1 + 0.07 * k) * (high - low)] * len(lost), color=colour, **CROSS)
