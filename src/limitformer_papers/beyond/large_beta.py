r"""β → ∞: fair coins say which side a token takes, and unequal sides come together on the time scale e^{2β}.

Left: N tokens at β = 10⁶, where attention is A(Xⁱ) = Xⁱ and one product of random matrices takes every token to ±v: how
many end on the smaller side, on the binomial law of fair coins. Middle and right: share of trajectories that are not
one cluster, over t e^{−2β}, for odd and for even N, on the sum of exponentials that coins and the leading lifetimes
give (`splits`): nothing is fitted. In the plane, d = 2, coins are nearly fair at a β whose lifetimes can be waited for;
for d > 2 they are biased by O(1/√β) (docs/large-beta.md). The papers have no such figure.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray
from scipy.stats import chisquare

from limitformer.models import StochasticTransformer
from limitformer.plot import MARKERS, PALETTE, legend_below, panels
from limitformer.sweep import Sweep
from limitformer_papers.beyond.splits import Array, coin_shares, limiting_lifetimes, still_apart
from limitformer_papers.clustering.sphere import evenly, standard_error, tokens_chain
from limitformer_papers.common.claims import Claim, FigureRun
from limitformer_papers.common.grids import on_grid

FIVE = 5  # tokens whose shares are among the claims
LEAST_P = 1e-4  # of a χ² test


@dataclass(frozen=True, kw_only=True)
class Config:
    """Coins: β and dimension where they are counted at `coin_time`. Decay: β's, up to the time `span` · e^{2β}."""

    tokens: tuple[int, ...] = (2, 3, 4, 5, 6, 7, 8, 9)
    coin_dim: int = 4
    coin_beta: float = 1e6
    coin_time: float = 30.0
    coin_layers: int = 25
    coin_samples: int = 4000
    dim: int = 2
    betas: tuple[float, ...] = (1.5, 2.5)
    layers_per_unit_time: int = 40
    span: float = 6.0
    points: int = 25
    tolerance: float = 0.01
    samples: int = 600


paper = Config


def quick() -> Config:
    return Config(
        tokens=(2, 3, 4, 5), coin_samples=400, betas=(0.75, 1.5), layers_per_unit_time=25, points=13, samples=160
    )


def model_of(beta: float, dim: int, layers: int, tokens: int = 2) -> StochasticTransformer:
    """Return a model; without `tokens` it is the base of a grid."""
    return StochasticTransformer(tokens=tokens, dim=dim, beta=beta, layers_per_unit_time=layers)


def counted(config: Config, run: FigureRun) -> Array:
    """Return how many trajectories at β = ∞ have 0, 1, … tokens on the smaller side (tokens, few)."""
    return np.array([counted_of(config, n, run) for n in config.tokens], float)


def counted_of(config: Config, tokens: int, run: FigureRun) -> NDArray[np.intp]:
    """Count for one number of tokens; trajectories that have not settled are left out."""
    model = model_of(config.coin_beta, config.coin_dim, config.coin_layers, tokens)
    times = [config.coin_time]
    ends = tokens_chain(model, times, config.coin_samples, run, keep="outcome", tolerance=config.tolerance)
    last = ends.isel(time=-1)
    smaller = tokens - last["largest_cluster"].values[last["unresolved_pairs"].values == 0]
    most = max(config.tokens) // 2 + 1
    return np.bincount(smaller, minlength=most)[:most]


def apart(config: Config, beta: float, run: FigureRun) -> xr.DataArray:
    """Return the share of trajectories that are not one cluster (tokens, scaled), at times scaled · e^{2β}."""
    layers = config.layers_per_unit_time
    times = evenly(config.span * np.exp(2 * beta), config.points, layers)
    settings = {
        "samples": config.samples,
        "seed": run.seed,
        "horizon": float(times[-1]),
        "record": times.tolist(),
        "tolerance": config.tolerance,
    }
    model = model_of(beta, config.dim, layers)
    sweep = Sweep(model, over={"tokens": config.tokens}, simulate=settings, reduce={"outcomes": True})
    single = on_grid(sweep, run, f"decay-{beta:g}")["probability"].sel(outcome="single cluster", drop=True)
    return (1 - single).rename(point="scaled").assign_coords(scaled=times * np.exp(-2 * beta))


def predicted(tokens: int, scaled: Array, dim: int) -> Array:
    """Return the limit of that share: coins, then exponentials."""
    return still_apart(scaled, coin_shares(tokens), limiting_lifetimes(tokens, dim, 0.0))


def compute(config: Config, run: FigureRun) -> xr.Dataset:
    """Return `count` (tokens, few); `apart` and `limit` (beta, tokens, scaled)."""
    shares = [apart(config, beta, run) for beta in config.betas]
    scaled = np.linspace(0, config.span, config.points)
    limit = [[predicted(n, one["scaled"].values, config.dim) for n in config.tokens] for one in shares]
    axes = ("beta", "tokens", "scaled")
    return xr.Dataset(
        {
            "count": (("tokens", "few"), counted(config, run)),
            "apart": (axes, np.array([one.transpose("tokens", "scaled").values for one in shares])),
            "limit": (axes, np.array(limit)),
        },
        coords={"tokens": list(config.tokens), "beta": list(config.betas), "scaled": scaled},
        attrs={"samples": config.samples, "dim": config.dim, "coin_beta": config.coin_beta},
    )


def claims(data: xr.Dataset) -> list[Claim]:
    """Coins are fair, and the decay is that of the limit, more closely at larger β."""
    return [*coin_claims(data), *(decay_claim(data, beta) for beta in data["beta"].values), *end_claims(data)]


def coin_claims(data: xr.Dataset) -> list[Claim]:
    five = data["count"].sel(tokens=FIVE).values[: FIVE // 2 + 1]
    values = [p_value(int(n), data["count"].sel(tokens=n).values) for n in data["tokens"].values]
    return [
        *(
            Claim(f"N = {FIVE}: share of {FIVE - few} + {few}; fair coins: {share:g}", float(five[few] / five.sum()))
            for few, share in enumerate(coin_shares(FIVE))
        ),
        Claim(
            "least p-value of χ² against fair coins, all N; not below 10⁻⁴",
            float(min(values)),
            bool(min(values) > LEAST_P),
        ),
    ]


def p_value(tokens: int, counts: Array) -> float:
    """Return χ²'s p-value of `counts` (few,) against fair coins; the rarest splits are merged."""
    expected = coin_shares(tokens) * counts.sum()
    first = max(int(np.searchsorted(np.cumsum(expected), 5.0)), 0) + 1
    seen = counts[: len(expected)]
    merged = [np.append(each[:first].sum(), each[first:]) for each in (seen, expected)]
    return float(chisquare(*merged).pvalue)


def decay_claim(data: xr.Dataset, beta: float) -> Claim:
    """Return the largest distance from the limit after the first fifth of the span."""
    late = data.sel(beta=beta, scaled=slice(0.2 * float(data["scaled"][-1]), None))
    off = float(abs(late["apart"] - late["limit"]).max())
    noise = 4 * float(standard_error(0.25, int(data.attrs["samples"])))
    last = beta == float(data["beta"][-1])
    name = f"β = {beta:g}: largest |share not in one cluster − limit|, all N"
    return Claim(name, off, bool(off < 0.05 + noise) if last else None)


def end_claims(data: xr.Dataset) -> list[Claim]:
    """Return the shares at the end at the largest β: equal sides of even N, and splits that still last."""
    shares, limit = (data[name].isel(beta=-1, scaled=-1) for name in ("apart", "limit"))
    name = "N = {}: share not in one cluster at the end; limit: {:.3f}"
    return [
        Claim(name.format(int(n), float(limit.sel(tokens=n))), float(shares.sel(tokens=n)))
        for n in data["tokens"].values
    ]


def draw(data: xr.Dataset) -> Figure:
    figure, (left, middle, right) = panels(3, height=4.4)
    draw_coins(left, data)
    for axes, odd in ((middle, 1), (right, 0)):
        for k, n in enumerate(n for n in data["tokens"].values if n % 2 == odd):
            draw_decay(axes, data.isel(beta=-1).sel(tokens=n), k, int(data.attrs["samples"]))
        axes.set_title(f"{'odd' if odd else 'even'} number of tokens, β = {float(data['beta'][-1]):g}")
        axes.set(xlabel="$t \\, e^{-2β}$", ylabel="share not in one cluster", ylim=(0, 1.03))
    left.set_title(f"β = {data.attrs['coin_beta']:,.0f}")
    left.set(xlabel="number of tokens N", ylabel="share of trajectories", ylim=(0, 0.87))
    words = {left: "fair coins", middle: "fair coins, then $e^{-t/m}$", right: "the same; equal sides stay"}
    for axes, label in words.items():
        handles = axes.get_legend_handles_labels()[0]
        legend_below(axes, 2, handles=[*handles, Line2D([], [], color="gray", label=label)])
    return figure


def draw_coins(axes: Axes, data: xr.Dataset) -> None:
    """Draw shares over N, one curve for each size of the smaller side."""
    numbers = data["tokens"].values
    for few in range(len(data["few"])):
        has = numbers[numbers >= max(2 * few, 2)]
        shares = [coin_shares(int(n))[few] for n in has]
        count = data["count"].sel(tokens=has)
        total = count.sum("few").values
        seen = count.isel(few=few).values / total
        error = [float(standard_error(p, int(n))) for p, n in zip(seen, total, strict=True)]
        axes.plot(has, shares, color=PALETTE[few], linewidth=1.2)
        look: Any = {"fmt": MARKERS[few], "markersize": 4, "capsize": 2, "linewidth": 1.2, "color": PALETTE[few]}
        axes.errorbar(has, seen, error, **look, label=f"{few} on the smaller side")


def draw_decay(axes: Axes, one: xr.Dataset, k: int, samples: int) -> None:
    axes.plot(one["scaled"], one["limit"], color=PALETTE[k], linewidth=1.2)
    error = standard_error(one["apart"].values, samples)
    look: Any = {"fmt": MARKERS[k], "markersize": 3.5, "capsize": 2, "linewidth": 1.2, "color": PALETTE[k]}
    axes.errorbar(one["scaled"][1:], one["apart"][1:], error[1:], **look, label=f"N = {int(one['tokens'])}")
