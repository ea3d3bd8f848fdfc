r"""[ST, Fig. 6]: the mean entropy of attention while training, by learning rate, for the first and the seventh layer.

Drawn from finished runs of `limitformer train mlm`, at whatever scale those were. Above: shaped attention (Recover);
below: Pre-LN. The entropy of a row of the softmax, in nats, is meant over rows, heads, a fixed batch of held-out data,
and seeds. It is at most log of the length; near 0 the softmax is a point mass: entropy collapse.
"""

from dataclasses import dataclass

import numpy as np
import xarray as xr
from matplotlib.figure import Figure

from limitformer.figures.claims import Claim, Run
from limitformer.figures.language_runs import VARIANTS, curves, language_runs, scale_of
from limitformer.figures.st_lr import best_gamma
from limitformer.plot import PALETTE, panels
from limitformer.train.harness import FinishedRun

DRAWN = ("shaped-recover", "pre-ln")


@dataclass(frozen=True, kw_only=True)
class Config:
    """The caption's layers; the last one stands for those that a shallower network has not."""

    layers: tuple[int, ...] = (1, 7)


def paper() -> Config:
    """The only one: the runs have the scale."""
    return Config()


quick = paper


def compute(config: Config, run: Run) -> xr.Dataset:
    """`entropy` (variant, layer, rate, step), of the deepest of the runs' networks; `largest`, log of the length."""
    runs = [one for one in language_runs(run) if one.about["variant"] in DRAWN]
    depth = max(one.about["depth"] for one in runs)
    runs = [one for one in runs if one.about["depth"] == depth]
    gamma = best_gamma(runs)
    runs = [one for one in runs if one.about["variant"] == "pre-ln" or one.about["gamma"] == gamma]
    layers = sorted({min(layer, depth) for layer in config.layers})
    rates = sorted({one.plan["learning_rate"] for one in runs})
    variants = [name for name in DRAWN if any(one.about["variant"] == name for one in runs)]
    parts = [[[entropy(runs, variant, rate, layer) for rate in rates] for layer in layers] for variant in variants]
    return xr.concat(
        [xr.concat([xr.concat(row, "rate") for row in block], "layer") for block in parts], "variant"
    ).to_dataset(name="entropy").assign_coords(variant=variants, layer=layers, rate=rates).assign_attrs(
        runs=scale_of(runs), depth=depth, gamma=gamma, largest=float(np.log(runs[0].about["length"]))
    )  # fmt: skip


def entropy(runs: list[FinishedRun], variant: str, rate: float, layer: int) -> xr.DataArray:
    """The mean over heads and seeds, by step; NaN after one of them diverged."""
    chosen = [one for one in runs if one.about["variant"] == variant and one.plan["learning_rate"] == rate]
    if not chosen:
        return xr.DataArray(np.zeros(0), dims="step", coords={"step": np.zeros(0, int)})
    heads = [curves(chosen, "entropy", layer, head) for head in range(chosen[0].about["heads"])]
    mean = np.mean([values for _, values in heads], axis=(0, 1))
    return xr.DataArray(mean, dims="step", coords={"step": heads[0][0]})


def claims(data: xr.Dataset) -> list[Claim]:
    """The least entropy that each reaches at the largest rate, over the largest that there can be."""
    least = data["entropy"].isel(rate=-1).min(("step", "layer")) / data.attrs["largest"]
    rate = float(data["rate"][-1])
    found = [
        Claim(f"{VARIANTS[name]}, rate {rate:g}: least entropy over log(length)", float(least.sel(variant=name)))
        for name in data["variant"].values
    ]
    if data.sizes["variant"] == 2:
        ratio = float(least.sel(variant="pre-ln") / least.sel(variant="shaped-recover"))
        name = f"rate {rate:g}: least entropy of Pre-LN over that of shaped (the paper: it collapses, below 1/2)"
        found.append(Claim(name, ratio, bool(ratio < 0.5)))
    return found


def draw(data: xr.Dataset) -> Figure:
    """Variants in rows, layers in columns."""
    rows, columns = data.sizes["variant"], data.sizes["layer"]
    figure, axes = panels(columns, width=4.8, height=3.4, rows=rows)
    grid = np.reshape(axes, (rows, columns))
    for row, variant in enumerate(data["variant"].values):
        for column, layer in enumerate(data["layer"].values):
            panel = grid[row, column]
            for colour, rate in zip(PALETTE, data["rate"].values, strict=False):
                line = data["entropy"].sel(variant=variant, layer=layer, rate=rate).dropna("step")
                panel.plot(line["step"], line, color=colour, marker=".", label=f"rate {rate:g}")
            panel.axhline(data.attrs["largest"], color="gray", linewidth=1, linestyle=":", label="log(length)")
            panel.set(xlabel="step", ylabel="mean entropy (nats)", title=f"{VARIANTS[variant]}, layer {layer}")
            panel.set_ylim(0, 1.06 * data.attrs["largest"])
    grid[0, 0].legend(fontsize=8)
    figure.suptitle(data.attrs["runs"], fontsize=9)
    return figure
