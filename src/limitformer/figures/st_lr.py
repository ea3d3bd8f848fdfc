r"""[ST v1, Fig. 5]: training loss by learning rate, shaped attention (Recover, solid) against Pre-LN (dashed).

Drawn from finished runs of `limitformer train mlm`, at whatever scale those were. One panel a depth; curves are means
over seeds of the loss over the last steps; a curve ends where a run diverged. Of several γ the one with the least
held-out loss, over all learning rates, is drawn.
"""

from dataclasses import dataclass

import numpy as np
import xarray as xr
from matplotlib.figure import Figure

from limitformer.figures.claims import Claim, Run
from limitformer.figures.language_runs import VARIANTS, curves, language_runs, scale_of, smoothed
from limitformer.plot import PALETTE, panels
from limitformer.train.harness import FinishedRun

DRAWN = {"shaped-recover": "-", "pre-ln": "--"}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Curves are means over 1/`smoothing` of the steps; the final loss is over the last tenth."""

    smoothing: int = 40


def paper() -> Config:
    """The only one: the runs have the scale."""
    return Config()


quick = paper


def compute(config: Config, run: Run) -> xr.Dataset:
    """`loss` (depth, variant, rate, seed, step), `final` (depth, variant, rate, seed), `diverged` likewise, `gamma`."""
    runs = [one for one in language_runs(run) if one.about["variant"] in DRAWN]
    depths = sorted({one.about["depth"] for one in runs})
    gamma = {depth: best_gamma([one for one in runs if one.about["depth"] == depth]) for depth in depths}
    kept = [one for one in runs if one.about["variant"] == "pre-ln" or one.about["gamma"] == gamma[one.about["depth"]]]
    data = in_grid(kept, max(1, kept[0].plan["steps"] // config.smoothing))
    data["gamma"] = ("depth", [gamma[depth] for depth in depths])
    data.attrs |= {"runs": scale_of(kept)}
    return data


def best_gamma(runs: list[FinishedRun]) -> float:
    """γ with the least mean held-out loss; NaN if there are no shaped runs."""
    shaped = [one for one in runs if one.about["variant"] == "shaped-recover" and not one.summary["diverged"]]
    losses = {
        gamma: np.mean([one.summary["eval_loss"] for one in shaped if one.about["gamma"] == gamma])
        for gamma in {one.about["gamma"] for one in shaped}
    }
    return min(losses, key=lambda gamma: losses[gamma], default=float("nan"))


def in_grid(runs: list[FinishedRun], window: int) -> xr.Dataset:
    """The runs as one dataset; NaN where there is none."""
    steps, values = curves(runs, "loss")
    axes = {
        "depth": sorted({one.about["depth"] for one in runs}),
        "variant": [name for name in DRAWN if any(one.about["variant"] == name for one in runs)],
        "rate": sorted({one.plan["learning_rate"] for one in runs}),
        "seed": sorted({one.plan["seed"] for one in runs}),
    }
    shape = tuple(map(len, axes.values()))
    loss, final, diverged = np.full((*shape, len(steps)), np.nan), np.full(shape, np.nan), np.full(shape, np.nan)
    for one, curve in zip(runs, smoothed(values, window), strict=True):
        place = (one.about["depth"], one.about["variant"], one.plan["learning_rate"], one.plan["seed"])
        index = tuple(axis.index(value) for axis, value in zip(axes.values(), place, strict=True))
        loss[index], diverged[index] = curve, one.summary["diverged"]
        final[index] = np.inf if one.summary["diverged"] else one.summary["train_loss"]
    names = tuple(axes)
    return xr.Dataset(
        {"loss": ((*names, "step"), loss), "final": (names, final), "diverged": (names, diverged)},
        coords=axes | {"step": steps},
    )


def claims(data: xr.Dataset) -> list[Claim]:
    """The shaped variant's final loss depends less on the learning rate; what each is at the largest."""
    found = []
    final = data["final"].mean("seed")
    for depth in data["depth"].values:
        here = final.sel(depth=depth)
        for variant in data["variant"].values:
            for rate in data["rate"].values:
                value = float(here.sel(variant=variant, rate=rate))
                found.append(Claim(f"d = {depth}, {VARIANTS[variant]}, rate {rate:g}: final training loss", value))
        if set(DRAWN) <= set(data["variant"].values) and data.sizes["rate"] > 1:
            found.append(spread_claim(int(depth), here))
    return found


def spread_claim(depth: int, final: xr.DataArray) -> Claim:
    """Worst minus best final loss over learning rates, shaped over Pre-LN."""
    spread = {name: float(final.sel(variant=name).max() - final.sel(variant=name).min()) for name in DRAWN}
    ratio = spread["shaped-recover"] / spread["pre-ln"] if spread["pre-ln"] > 0 else float("nan")
    name = f"d = {depth}: spread of the final loss over learning rates, shaped over Pre-LN (the paper: below 1)"
    return Claim(name, ratio, bool(ratio < 1))


def draw(data: xr.Dataset) -> Figure:
    """One panel a depth."""
    figure, axes = panels(data.sizes["depth"], width=5.2, height=4.2)
    mean = data["loss"].mean("seed", skipna=False)
    for panel, depth in zip(np.atleast_1d(axes), data["depth"].values, strict=True):
        for variant in data["variant"].values:
            for colour, rate in zip(PALETTE, data["rate"].values, strict=False):
                line = mean.sel(depth=depth, variant=variant, rate=rate)
                label = f"{VARIANTS[variant]}, rate {rate:g}"
                panel.plot(data["step"], line, DRAWN[variant], color=colour, label=label)
        gamma = float(data["gamma"].sel(depth=depth))
        panel.set(xlabel="step", ylabel="training loss (nats)", title=f"d = {depth}, γ = {gamma:g}")
        panel.legend(fontsize=8)
    figure.suptitle(data.attrs["runs"], fontsize=9)
    return figure
