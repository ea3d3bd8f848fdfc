r"""[ST, Fig. 5] (Fig. 4 of the first version): instability from an adversarial start, and how γ delays it.

Left: trajectories of the largest eigenvalue of V in an attention network whose start is adversarially large. Right:
median and 10th percentile of the stopping time t* (`stopping`) over γ. Parameters of the caption: n = d = 200,
τ₀ = 1, 100 samples, |x₀| ≈ 10√n; the start's correlation is the 0.2 of the other figures, the tokens are 4.

The limit of two tokens explodes with positive probability if and only if γ² < ½, which is marked.
"""

from dataclasses import dataclass, replace
from math import sqrt

import numpy as np
import xarray as xr
from matplotlib.figure import Figure

from limitformer.plot import GREEN, legend_below, panels, sequence
from limitformer_papers.common.claims import Claim, FigureRun
from limitformer_papers.shaped_transformer.stopping import LARGEST, Adversarial, spectrum, stopping_times


@dataclass(frozen=True, kw_only=True)
class Config(Adversarial):
    """The caption's parameters; `shown` has the γ of the trajectories, `gammas` those of the curves."""

    tau0: float = 1.0
    shown: tuple[float, ...] = (0.05, 0.1, 0.2, 0.4)
    gammas: tuple[float, ...] = (
        *(0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.12, 0.14, 0.16, 0.18),
        *(0.2, 0.22, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0),
    )
    trajectories: int = 8


paper = Config


def quick() -> Config:
    return Config(gammas=(0.02, 0.1, 0.4, 1.0), samples=40)


def compute(config: Config, run: FigureRun) -> xr.Dataset:
    """Return `stopping_time` and `pair` (gamma, sample), and the `largest` eigenvalue (shown, trajectory, depth)."""
    pair = replace(config, tokens=2)
    over = {"gamma": config.gammas}
    largest = [spectrum(config, gamma, config.tau0, run)[: config.trajectories, :, -1] for gamma in config.shown]
    return xr.Dataset(
        {
            "stopping_time": (("gamma", "sample"), stopping_times(config, config.tau0, over, run, "several").values),
            "pair": (("gamma", "sample"), stopping_times(pair, config.tau0, over, run, "pair").values),
            "largest": (("shown", "trajectory", "depth"), np.stack(largest)),
        },
        coords={"gamma": list(config.gammas), "shown": list(config.shown)},
        attrs={"tokens": config.tokens},
    )


def claims(data: xr.Dataset) -> list[Claim]:
    """A smaller γ delays the instability."""
    median, pair = data["stopping_time"].median("sample"), data["pair"].median("sample")
    falls = bool((np.diff(median.values) <= 0.05).all())
    stable = median.gamma.values[median.values == 1]
    least = pair.isel(gamma=int(pair.values.argmin()))
    between = [g for g in (0.2, 0.5) if g in median.gamma]
    return [
        Claim(f"median t* at γ = {float(median.gamma[0]):g}, the smallest", float(median[0]), bool(median[0] == 1)),
        Claim(f"median t* at γ = {float(median.gamma[-1]):g}; it falls as γ grows", float(median[-1]), falls),
        Claim("largest γ whose median t* is 1", float(stable.max(initial=0.0))),
        *(Claim(f"median t* at γ = {g:g}", float(median.sel(gamma=g))) for g in between),
        Claim(f"least median t* of two tokens, at γ = {float(least.gamma):g}", float(least)),
        Claim(f"median t* of two tokens at γ = {float(pair.gamma[-2]):g}, close to 1", float(pair[-2])),
        Claim("share of two tokens that never stop there", float((data["pair"][-2] == 1).mean())),
        Claim(f"last layer at which a drawn trajectory of γ = {passed(data)[0]:g} passes 10⁴", passed(data)[1]),
    ]


def passed(data: xr.Dataset) -> tuple[float, float]:
    """Return the largest γ in `shown`, and the layer at which its last trajectory passes 10⁴ (∞: some never do)."""
    above = data["largest"].isel(shown=-1).values > LARGEST
    return float(data["shown"][-1]), float(above.argmax(-1).max()) if above.any(-1).all() else np.inf


def draw(data: xr.Dataset) -> Figure:
    figure, (left, right) = panels(2)
    for gamma, colour in zip(data.shown.values, sequence(data.sizes["shown"]), strict=True):
        left.plot(data["largest"].sel(shown=gamma).T, color=colour, linewidth=0.8)
        left.plot([], [], color=colour, label=f"γ = {gamma:g}")
    left.axhline(LARGEST, color="black", linestyle="--", linewidth=1.2, label="t* is reached")
    left.set(xlabel="layer", ylabel="largest eigenvalue of V", yscale="log", ylim=(100, 1e7))
    legend_below(left, 3)
    times, number = data["stopping_time"], data.attrs["tokens"]
    right.plot(data.gamma, times.median("sample"), "o-", markersize=4, label=f"median, {number} tokens")
    tenth = times.quantile(0.1, dim="sample")
    right.plot(data.gamma, tenth, "s--", markersize=4, label=f"10th percentile, {number} tokens")
    right.plot(data.gamma, data["pair"].median("sample"), "^:", color=GREEN, markersize=4, label="median, 2 tokens")
    right.axvline(sqrt(1 / 2), color="gray", linewidth=1, label="γ² = ½")
    right.set(xlabel="residual strength γ", ylabel="stopping time t*", xscale="log", ylim=(0, 1.05))
    right.set_xticks([0.02, 0.05, 0.1, 0.2, 0.5, 1], [0.02, 0.05, 0.1, 0.2, 0.5, 1])
    legend_below(right, 2)
    return figure
