r"""[CT, Fig. 6]: antipodal pairs among more than two tokens.

Share of trajectories with at least one antipodal pair at T = 500, over β = 0, 0.5, …, 8, for several N. Parameters of
the caption: d = 4, 10,000 trajectories; L = 100 and the tolerance 10⁻³ are in the text. It does not say which N it has.
Earlier times are recorded too: pairs that exist at t = 50 and not at T = 500 were metastable, as unequal clusters are
(`lifetimes`); an odd number of tokens has no other antipodal state. For N = 3 all are 2 + 1, and the
share at T is predicted from that at t = 50 by the exact mean lifetime m: times exp(−(T − 50)/m).

Trajectories that have become one cluster stop, and those that have become two continue as two points, where this
changes an outcome with probability at most 10⁻⁹ (`sphere.stopping`).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from limitformer.models import StochasticTransformer
from limitformer.plot import MARKERS, legend_below, panels, sequence
from limitformer.sphere.overlap import overlap
from limitformer.sweep import Sweep
from limitformer_papers.clustering.sphere import standard_error
from limitformer_papers.common.claims import Claim, FigureRun
from limitformer_papers.common.grids import on_grid

REPORTED = (1.0, 2.0, 3.0, 4.0, 8.0)  # β at which the shares are among the claims


@dataclass(frozen=True, kw_only=True)
class Config:
    """The caption's parameters; the last of `times` is its horizon."""

    tokens: tuple[int, ...] = (2, 3, 4, 5, 10, 20)
    dim: int = 4
    betas: tuple[float, ...] = tuple(np.linspace(0, 8, 17).tolist())
    layers_per_unit_time: int = 100
    times: tuple[float, ...] = (5.0, 20.0, 50.0, 500.0)
    tolerance: float = 1e-3
    samples: int = 10_000
    early_stop: float = 1e-9


paper = Config


def quick() -> Config:
    return Config(tokens=(2, 3, 4), betas=(0.0, 1.0, 2.0, 6.0), times=(5.0, 20.0, 200.0), samples=160)


def model_of(config: Config, tokens: int, beta: float) -> StochasticTransformer:
    return StochasticTransformer(
        tokens=tokens, dim=config.dim, beta=beta, layers_per_unit_time=config.layers_per_unit_time
    )


def compute(config: Config, run: FigureRun) -> xr.Dataset:
    """Return `probability`, `low`, `high` of an antipodal pair, and `equal`, of equal clusters (tokens, beta, time)."""
    settings = {
        "samples": config.samples,
        "seed": run.seed,
        "horizon": config.times[-1],
        "record": config.times,
        "tolerance": config.tolerance,
        "early_stop": config.early_stop,
    }
    over = {"tokens": config.tokens, "beta": config.betas}
    sweep = Sweep(model_of(config, 2, 1.0), over=over, simulate=settings, reduce={"outcomes": True})
    dataset = on_grid(sweep, run, "grid").rename(point="time")
    some = dataset.sel(outcome="antipodal pair", drop=True)
    two = [float(overlap(model_of(config, 2, beta)).antipodal_probability()) for beta in config.betas]
    return (
        some[["probability", "low", "high", "equal"]]
        .assign(two=("beta", two), lifetime=("beta", [lifetime(config, beta) for beta in config.betas]))
        .assign_attrs(samples=config.samples)
    )


def lifetime(config: Config, beta: float) -> float:
    return overlap(model_of(config, 3, beta), clusters=(2, 1)).mean_hitting_time(0.9, start=-1.0)


def claims(data: xr.Dataset) -> list[Claim]:
    """Antipodal pairs exist for every N at large β; unequal clusters have ended where they live shorter than the
    run.
    """
    last, largest = data["probability"].isel(time=-1), float(data["beta"][-1])
    least, none = float(last.sel(beta=largest).min()), float(last.sel(beta=0.0).max())
    numbers = [int(n) for n in data["tokens"].values]
    return [
        Claim(f"least share with an antipodal pair at β = {largest:g}, any N: positive", least, least > 0),
        Claim("largest share at β = 0", none, none < 0.01),
        *(claim for n in numbers for claim in claims_of(data, n)),
        *(shares_of(data, n, beta) for n in numbers for beta in REPORTED if beta in data["beta"]),
    ]


def claims_of(data: xr.Dataset, n: int) -> list[Claim]:
    if n == 2:
        return against_exact(data)
    if n % 2 == 0:
        return [left_over(data, n)]
    return [gone_claim(data, n), fall_claim(data, n), *([prediction(data)] if n == 3 else [])]


def against_exact(data: xr.Dataset) -> list[Claim]:
    """Compare two tokens with the exact probability."""
    difference = data["probability"].isel(time=-1).sel(tokens=2) - data["two"]
    errors = difference / standard_error(data["two"], int(data.attrs["samples"]))
    return [
        Claim("N = 2: largest |simulated − exact|", float(abs(difference).max())),
        Claim("the same in standard errors", float(abs(errors).max())),
    ]


def short_lived(data: xr.Dataset) -> NDArray[np.float64]:
    """Return the β at which 2 + 1 tokens live shorter than a tenth of the run."""
    betas: NDArray[np.float64] = data["beta"].values[(data["lifetime"] < float(data["time"][-1]) / 10).values]
    return betas


def gone_claim(data: xr.Dataset, n: int) -> Claim:
    """Odd numbers of tokens: nothing is left where the lifetime is short."""
    betas = short_lived(data)
    rest = float(data["probability"].isel(time=-1).sel(tokens=n, beta=betas).max())
    what = f"largest share where the mean lifetime of 2 + 1 is below T/10 (β ≤ {betas[-1]:g})"
    return Claim(f"N = {n}: {what}", rest, rest < 0.05)


def fall_claim(data: xr.Dataset, n: int) -> Claim:
    """Odd numbers of tokens: some pairs that existed before have ended at T."""
    early, horizon = float(data["time"][-2]), float(data["time"][-1])
    both = data["probability"].isel(time=[-2, -1]).sel(tokens=n)
    fall = both.isel(time=0) - both.isel(time=1)
    worst = int(fall.values.argmax())
    noise = 2.5 * float(np.sqrt(both.isel(beta=worst).sum() / int(data.attrs["samples"])))
    at = f"at β = {float(fall['beta'][worst]):g}"
    name = f"N = {n}: largest fall of the share from t = {early:g} to {horizon:g}, {at}"
    return Claim(name, float(fall.max()), bool(fall.max() > noise))


def prediction(data: xr.Dataset) -> Claim:
    difference = abs(predicted(data) - data["probability"].isel(time=-1).sel(tokens=3))
    noise = 4 * float(standard_error(0.25, int(data.attrs["samples"])))
    name = "N = 3: largest |simulated − predicted by the exact lifetime|"
    return Claim(name, float(difference.max()), bool(difference.max() < 0.03 + noise))


def left_over(data: xr.Dataset, n: int) -> Claim:
    """Even numbers of tokens: the pairs that are left are in equal clusters."""
    betas = short_lived(data)
    last = data.isel(time=-1).sel(tokens=n, beta=betas)
    name = f"N = {n}: of those pairs left at T, β ≤ {betas[-1]:g}, the share in equal clusters"
    return Claim(name, float((last["equal"] / last["probability"]).mean()))


def shares_of(data: xr.Dataset, n: int, beta: float) -> Claim:
    early, last = (data["probability"].isel(time=k).sel(tokens=n, beta=beta) for k in (-2, -1))
    before = f"at t = {float(early.time):g}: {float(early):.3f}"
    return Claim(f"N = {n}, β = {beta:g}: share with an antipodal pair at T ({before})", float(last))


def predicted(data: xr.Dataset) -> xr.DataArray:
    """Return the share of three tokens with an antipodal pair at T, from the share before and the mean lifetime
    (beta,).
    """
    early, last = (float(data["time"][k]) for k in (-2, -1))
    before = data["probability"].sel(tokens=3, time=early)
    return before * np.exp(-(last - early) / data["lifetime"].values)


def draw(data: xr.Dataset) -> Figure:
    """Draw even and odd numbers of tokens; dashed lines are before, solid ones at the end."""
    figure, (left, right) = panels(2, height=4.2)
    numbers = [int(n) for n in data["tokens"].values]
    early, last = (data.isel(time=k) for k in (-2, -1))
    for k, (n, colour) in enumerate(zip(numbers, sequence(len(numbers)), strict=True)):
        axes, look = right if n % 2 else left, {"color": colour, "marker": (MARKERS * 2)[k], "label": f"N = {n}"}
        draw_share(axes, last.sel(tokens=n), **look)
        axes.plot(data.beta, early["probability"].sel(tokens=n), linestyle="--", linewidth=1.2, color=colour)
    exact: Any = {"color": "black", "linestyle": ":", "linewidth": 1.6, "zorder": 4}
    left.plot(data.beta, data["two"], **exact)
    if 3 in numbers:
        right.plot(data.beta, predicted(data), **exact)
    for axes, kind in ((left, "even"), (right, "odd")):
        axes.set(xlabel="inverse temperature β", ylabel="share with an antipodal pair", ylim=(-0.03, 1.03))
        axes.set_title(f"{kind} number of tokens")
    styles = [
        Line2D([], [], color="gray", label=f"solid: at T = {float(last.time):g}"),
        Line2D([], [], color="gray", linestyle="--", linewidth=1.2, label=f"dashed: at t = {float(early.time):g}"),
        Line2D([], [], **exact, label="exact (N = 2), predicted from the dashed (N = 3)"),
    ]
    handles = sorted((h for axes in (left, right) for h in axes.get_legend_handles_labels()[0]), key=tokens_of)
    legend_below(figure, 3, handles=[*handles, *styles])
    return figure


def draw_share(axes: Axes, one: xr.Dataset, color: str, marker: str, label: str) -> None:
    p = one["probability"].values
    bars = np.abs(np.stack([p - one["low"].values, one["high"].values - p]))
    look: Any = {"fmt": f"{marker}-", "markersize": 4, "linewidth": 1.4, "capsize": 2}
    axes.errorbar(one.beta, p, bars, **look, color=color, label=label)


def tokens_of(handle: Any) -> int:
    return int(handle.get_label().removeprefix("N = "))
