r"""The transition of [CT, Fig. 3] in Transformers as people build them: drawn queries and keys, heads, a causal
mask.

Left: [CT]'s, fixed queries and keys: the probability that two tokens end antipodal leaves 0 at β_c(d). Second:
queries and keys drawn in each layer, b = βτ: antipodes only in dimension 2 and 3, at every b > 0. Third, the reason:
the rate at which log|X¹ + X²| moves at antipodes, ½[(d − 3)(1 + q/n) − (d − 1)m/n], n = 1 for heads with values of
their own, however many; n = h for h heads with one matrix of values, whose outputs are averaged (their sum over √h
moves h times as fast). It is above 0 for all d ≥ 4: the critical curve over (h, d, b) is empty. Right: behind a causal
mask antipodes never attract; their mean lifetime from −1 to 0.9. The paper has no such figure.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import limitformer as lf
from limitformer.base.progress import track
from limitformer.plot import MARKERS, PALETTE, legend_below, panels
from limitformer.sphere.overlap.drawn import at_antipodes
from limitformer_papers.clustering.sphere import standard_error
from limitformer_papers.common.claims import Claim, FigureRun

REACHED = 0.9
LINES = ("-", "--", "-.", ":")
HEADS = (1, 4)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Dimensions and temperatures of the curves and of the simulations."""

    dims: tuple[int, ...] = (2, 3, 4, 6)
    betas: tuple[float, ...] = tuple(np.round(np.linspace(0.05, 4, 80), 4).tolist())
    simulated: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0)
    horizon: float = 60.0
    causal_dims: tuple[int, ...] = (3, 4, 6)
    causal_betas: tuple[float, ...] = tuple(np.round(np.linspace(0.25, 4, 31), 4).tolist())
    causal_simulated: tuple[float, ...] = (0.5, 1.0, 1.5)
    lifetimes: float = 8.0
    records: int = 800
    samples: int = 4000


paper = Config


def quick() -> Config:
    return Config(
        dims=(2, 3, 4),
        betas=(0.5, 1.0, 1.75, 4.0),
        simulated=(2.0,),
        horizon=20.0,
        causal_dims=(3, 4),
        causal_betas=(0.5, 1.0, 4.0),
        causal_simulated=(0.5,),
        records=400,
        samples=300,
    )


def pair(dim: int, b: float, **more: Any) -> lf.StochasticTransformer:
    return lf.StochasticTransformer(tokens=2, dim=dim, beta=b, layers_per_unit_time=100, **more)


KINDS: dict[str, dict[str, Any]] = {"fixed": {}, "drawn": {"query_key": "gaussian"}}


def compute(config: Config, run: FigureRun) -> xr.Dataset:
    """Return `exact` and `share` (kind, dim, …), `rate` (heads, dim, beta), `life` and `lived` (…, dim, …)."""
    grid = [[[exact(dim, b, kind) for b in config.betas] for dim in config.dims] for kind in KINDS]
    cells = [(kind, dim, b) for kind in KINDS for dim in config.dims for b in config.simulated]
    shares = [share(config, *cell, run) for cell in track(cells, "cells")]
    causal = [(dim, beta) for dim in config.causal_dims for beta in config.causal_simulated]
    means = [mean_life(*cell, "fixed") for cell in causal]
    lived = [lifetime(config, *cell, run) for cell in track(causal, "lifetimes")]
    size = (len(KINDS), len(config.dims), len(config.simulated))
    lifetimes = [[[mean_life(d, b, kind) for b in config.causal_betas] for d in config.causal_dims] for kind in KINDS]
    life_estimates = np.array(lived).reshape(len(config.causal_dims), len(config.causal_simulated), 2)
    return xr.Dataset(
        {
            "exact": (("kind", "dim", "beta"), grid),
            "share": (("kind", "dim", "simulated"), np.reshape(shares, size)),
            "expected": (("kind", "dim", "simulated"), expected(config)),
            "rate": (("heads", "dim", "beta"), rates(config)),
            "life": (("kind", "causal_dim", "causal_beta"), lifetimes),
            "expected_life": (("causal_dim", "causal_simulated"), np.reshape(means, life_estimates.shape[:2])),
            "lived": (("causal_dim", "causal_simulated"), life_estimates[..., 0]),
            "error": (("causal_dim", "causal_simulated"), life_estimates[..., 1]),
        },
        coords={
            "kind": list(KINDS),
            "dim": list(config.dims),
            "beta": list(config.betas),
            "simulated": list(config.simulated),
            "heads": list(HEADS),
            "causal_dim": list(config.causal_dims),
            "causal_beta": list(config.causal_betas),
            "causal_simulated": list(config.causal_simulated),
        },
        attrs={"samples": config.samples, "horizon": config.horizon},
    )


def expected(config: Config) -> list[list[list[float]]]:
    return [[[exact(dim, b, kind) for b in config.simulated] for dim in config.dims] for kind in KINDS]


def exact(dim: int, b: float, kind: str) -> float:
    """Return P(antipodal) of two tokens that start orthogonal."""
    return float(lf.overlap(pair(dim, b, **KINDS[kind])).antipodal_probability(start=0.0))


def share(config: Config, kind: str, dim: int, b: float, run: FigureRun) -> float:
    """Return the share of simulated pairs, orthogonal at first, within 10⁻³ of −1 at the horizon."""
    limit = lf.limit(pair(dim, b, **KINDS[kind]))
    options: dict[str, Any] = {"samples": config.samples, "seed": run.seed, "threads": run.threads, "progress": False}
    paths = lf.simulate(limit, 0.0, horizon=config.horizon, record=[config.horizon], **options)
    return float((paths["overlap"].values < -0.999).mean())


def rates(config: Config) -> list[list[list[float]]]:
    """Return the rate at antipodes for σ = 1, of heads with their own values and of several that share them."""
    at = [at_antipodes(b) for b in config.betas]
    return [[[((d - 3) * (1 + q / n) - (d - 1) * m / n) / 2 for m, q in at] for d in config.dims] for n in HEADS]


def mean_life(dim: int, beta: float, kind: str) -> float:
    """Return the exact mean time from −1 to `REACHED` behind a causal mask."""
    model = pair(dim, beta, mask="causal", **KINDS[kind])
    return float(lf.overlap(model).mean_hitting_time(REACHED, start=-1.0))


def lifetime(config: Config, dim: int, beta: float, run: FigureRun) -> tuple[float, float]:
    """Return the simulated mean lifetime of pairs with fixed queries, and its standard error."""
    horizon = config.lifetimes * mean_life(dim, beta, "fixed")
    times = np.linspace(0, horizon, config.records + 1)
    options: dict[str, Any] = {"samples": config.samples, "seed": run.seed, "threads": run.threads, "progress": False}
    paths = lf.simulate(lf.limit(pair(dim, beta, mask="causal")), -1.0, horizon=horizon, record=times, **options)
    above = paths["overlap"].values[:, :, 0] > REACHED
    ended = np.where(above.any(1), above.argmax(1), above.shape[1] - 1)
    lengths = paths["time"].values[ended] - (times[1] - times[0]) / 2
    return float(lengths.mean()), float(lengths.std() / len(lengths) ** 0.5)


def claims(data: xr.Dataset) -> list[Claim]:
    """Antipodes attract in the same dimensions by formula and by simulation."""
    drawn, fixed = data.sel(kind="drawn"), data.sel(kind="fixed")
    samples = int(data.attrs["samples"])
    high, low = data["dim"].values >= 4, data["dim"].values <= 3
    worst = max(float(abs(error).max()) for error in (errors(drawn, samples, low), errors(fixed, samples, low)))
    late = data["lived"] - data["expected_life"]
    attracts, leaves = data["rate"][:, low], data["rate"][:, high]
    none, some = drawn["exact"][high], drawn["exact"][low]
    bound = 4 * data["error"] + 0.02 * data["expected_life"]
    return [
        Claim("drawn, d ≥ 4: largest probability of antipodes", float(none.max()), bool(none.max() == 0)),
        Claim("drawn, d ≤ 3: least probability of antipodes", float(some.min()), bool(some.min() > 0)),
        Claim("fixed, d ≥ 4: largest probability of antipodes", float(fixed["exact"][high].max())),
        Claim("drawn, d ≥ 4: largest simulated share near antipodes at the horizon", float(drawn["share"][high].max())),
        Claim("d ≤ 3: largest |simulated − exact|, in standard errors", worst, worst < 4),
        Claim("least rate at antipodes, d ≥ 4, own or shared values", float(leaves.min()), bool(leaves.min() > 0)),
        Claim("largest rate at antipodes, d ≤ 3", float(attracts.max()), bool(attracts.max() < 0)),
        Claim(
            "causal: largest |simulated − exact| lifetime, in standard errors",
            float(abs(late / data["error"]).max()),
            bool((abs(late) < bound).all()),
        ),
        Claim("causal, drawn: longest mean lifetime", float(drawn["life"].max())),
        Claim("causal, fixed: growth of the logarithm of the lifetime with β at the end: toward 2", growth(data)),
    ]


def errors(one: xr.Dataset, samples: int, low: Any) -> xr.DataArray:
    """Return simulated − exact over the standard error, for d ≤ 3."""
    exactly = one["expected"][low]
    return (one["share"][low] - exactly) / standard_error(exactly.values, samples)


def growth(data: xr.Dataset) -> float:
    """Return d log(lifetime)/dβ over the last two β, averaged over dimensions."""
    last = np.log(data["life"].sel(kind="fixed").values[:, -2:])
    return float(np.diff(last, axis=1).mean() / np.diff(data["causal_beta"].values[-2:])[0])


def draw(data: xr.Dataset) -> Figure:
    figure, (fixed, drawn, rate, causal) = panels(4, height=4.2)
    for axes, kind in ((fixed, "fixed"), (drawn, "drawn")):
        draw_probability(axes, data.sel(kind=kind))
    fixed.set(title="fixed queries and keys [CT]", xlabel="β", ylabel="P(antipodal), orthogonal start")
    drawn.set(title="drawn in each layer", xlabel="b = βτ", ylabel="P(antipodal), orthogonal start")
    draw_rates(rate, data)
    draw_lifetimes(causal, data)
    legend_below(figure, 6, handles=[*rate.get_legend_handles_labels()[0], causal.get_legend_handles_labels()[0][-1]])
    return figure


def draw_probability(axes: Axes, one: xr.Dataset) -> None:
    bars: Any = {"markersize": 4, "capsize": 2, "linestyle": "none"}
    for k, dim in enumerate(one["dim"].values):
        look: Any = {"color": PALETTE[k], "linestyle": LINES[k]}
        here = one.sel(dim=dim)
        axes.plot(one["beta"], here["exact"], **look, label=f"d = {dim}")
        error = 2 * standard_error(here["share"].values, int(one.attrs["samples"]))
        axes.errorbar(one["simulated"], here["share"], error, color=PALETTE[k], marker=MARKERS[k], **bars)
    axes.set(ylim=(-0.02, 0.6))


def draw_rates(axes: Axes, data: xr.Dataset) -> None:
    for k, dim in enumerate(data["dim"].values):
        axes.plot(
            data["beta"], data["rate"].sel(dim=dim, heads=1), color=PALETTE[k], linestyle=LINES[k], label=f"d = {dim}"
        )
        axes.plot(
            data["beta"], data["rate"].sel(dim=dim, heads=HEADS[1]), color=PALETTE[k], linestyle=LINES[k], linewidth=0.7
        )
    axes.axhline(0, color="black", linewidth=0.8)
    axes.plot([], [], color="gray", linewidth=0.7, label=f"third: {HEADS[1]} heads, shared values")
    axes.set(title="drawn: rate at antipodes", xlabel="b = βτ", ylabel="rate of log distance, σ = 1")


def draw_lifetimes(axes: Axes, data: xr.Dataset) -> None:
    bars: Any = {"markersize": 4, "capsize": 2, "linestyle": "none"}
    for k, dim in enumerate(data["causal_dim"].values):
        look: Any = {"color": PALETTE[k + 1], "linestyle": LINES[k + 1]}
        here = data.sel(causal_dim=dim)
        axes.plot(data["causal_beta"], here["life"].sel(kind="fixed"), **look, label=f"d = {dim}")
        axes.plot(data["causal_beta"], here["life"].sel(kind="drawn"), **look, linewidth=0.7)
        axes.errorbar(
            data["causal_simulated"],
            here["lived"],
            2 * here["error"],
            color=PALETTE[k + 1],
            marker=MARKERS[k + 1],
            **bars,
        )
    axes.plot([], [], color="gray", linewidth=0.7, linestyle="--", label="right: drawn queries and keys, over b")
    axes.set(title="behind a causal mask", xlabel="β", ylabel="mean lifetime of antipodes", yscale="log")
