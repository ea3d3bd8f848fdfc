r"""[CT, Fig. 9]: how fast tokens cluster, stochastic against deterministic.

The deterministic dynamics is [CT, eq. 7] with ε = 0 and softmax attention, Q = K = I. Parameters of the caption:
N = 50, L = 100, β = 0.5 up to T = 15 and β = 4.5 up to T = 30; d = 4 is in the text, the 2,000 trajectories are those
of Figs. 7 and 8. Above, as in the paper, are trajectories that have clustered: every pair of tokens is together or
antipodal, within 10⁻³. Below, not in the paper, are pairs that are neither.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.figure import Figure

from limitformer.base.progress import track
from limitformer.models import HybridTransformer, StochasticTransformer
from limitformer.plot import BLUE, RED, legend_below, panels
from limitformer_papers.clustering.sphere import evenly, shares, tokens_chain
from limitformer_papers.common.claims import Claim, FigureRun

STOCHASTIC, DETERMINISTIC = "stochastic", "deterministic"
COMPARABLE, FASTER = 1.6, 3.0  # ratios of median times: at most comparable, at least much faster


@dataclass(frozen=True, kw_only=True)
class Config:
    """The caption's parameters; one horizon for each β."""

    tokens: int = 50
    dim: int = 4
    betas: tuple[float, float] = (0.5, 4.5)
    horizons: tuple[float, float] = (15.0, 30.0)
    layers_per_unit_time: int = 100
    points: int = 151
    tolerance: float = 1e-3
    samples: int = 2000


paper = Config


def quick() -> Config:
    return Config(tokens=16, points=61, samples=100)


def compute(config: Config, run: FigureRun) -> xr.Dataset:
    """Return shares of the outcomes, `pairs` unresolved and `clusters` (beta, model, point); `time` (beta, point)."""
    cells = [
        (beta, horizon, kind) for beta, horizon in zip(config.betas, config.horizons, strict=True) for kind in (0, 1)
    ]
    parts = []
    for beta, horizon, deterministic in track(cells, "models"):
        common: dict[str, Any] = {
            "tokens": config.tokens,
            "dim": config.dim,
            "beta": beta,
            "layers_per_unit_time": config.layers_per_unit_time,
        }
        model = HybridTransformer(**common, epsilon=0.0) if deterministic else StochasticTransformer(**common)
        times = evenly(horizon, config.points, config.layers_per_unit_time)
        samples = tokens_chain(model, times, config.samples, run, keep="outcome", tolerance=config.tolerance)
        parts.append(row(samples, config.tokens))
    grid = [
        xr.concat(parts[k : k + 2], xr.DataArray([STOCHASTIC, DETERMINISTIC], dims="model", name="model"))
        for k in (0, 2)
    ]
    return xr.concat(grid, xr.DataArray(list(config.betas), dims="beta", name="beta")).assign_attrs(
        tokens=config.tokens
    )


def row(samples: xr.Dataset, tokens: int) -> xr.Dataset:
    """Return the numbers of one simulation that the figure needs, by point."""
    pairs = samples["unresolved_pairs"].mean("sample") / (tokens * (tokens - 1) / 2)
    done = (samples["unresolved_pairs"] == 0).values
    first = np.where(done.any(1), samples["time"].values[done.argmax(1)], np.inf)
    result = shares(samples).assign(pairs=pairs, clusters=samples["clusters"].mean("sample"), median=np.median(first))
    at = result["time"].values
    return result.rename_dims(time="point").drop_vars("time").assign(time=("point", at))


def claims(data: xr.Dataset) -> list[Claim]:
    """Speeds are comparable for small β; for large β stochastic is much faster, and deterministic clusters linger."""
    small, large = (data.sel(beta=beta) for beta in data["beta"].values)
    statements = []
    for one, kind in ((small, "small"), (large, "large")):
        last = one.isel(point=-1)
        fast, slow = (float(one["median"].sel(model=model)) for model in (STOCHASTIC, DETERMINISTIC))
        ratio, beta, horizon = slow / fast, float(one["beta"]), float(last["time"][0])
        holds = 1 / COMPARABLE < ratio < COMPARABLE if kind == "small" else ratio > FASTER
        word = "comparable" if kind == "small" else "stochastic is much faster"
        done = {model: 1 - float(last["unresolved"].sel(model=model)) for model in (STOCHASTIC, DETERMINISTIC)}
        statements += [
            Claim(f"median time to cluster, β = {beta:g}, stochastic", fast, bool(np.isfinite(fast))),
            Claim(f"median time to cluster, β = {beta:g}, deterministic (inf: later than T = {horizon:g})", slow),
            Claim(f"their ratio, deterministic/stochastic, β = {beta:g}: {word}", ratio, bool(holds)),
            *(
                Claim(f"share clustered at T = {horizon:g}, β = {beta:g}, {model}", share)
                for model, share in done.items()
            ),
        ]
    single = float(small["single"].isel(point=-1).min())
    waiting = float(large["unresolved"].sel(model=DETERMINISTIC).isel(point=-1))
    return [
        *statements,
        Claim(f"least share in a single cluster, β = {float(small['beta']):g}, last time", single, single > 0.9),
        Claim(
            f"share not clustered at the last time, β = {float(large['beta']):g}, deterministic: it is metastable",
            waiting,
            waiting > 0.3,
        ),
        Claim(
            f"mean number of clusters then, β = {float(large['beta']):g}, deterministic",
            float(large["clusters"].sel(model=DETERMINISTIC).isel(point=-1)),
        ),
    ]


def draw(data: xr.Dataset) -> Figure:
    """Draw a column for each β: trajectories that have clustered above, unresolved pairs below."""
    figure, axes = panels(data.sizes["beta"], height=2.9, rows=2)
    for column, beta in enumerate(data["beta"].values):
        upper, lower = axes[0, column], axes[1, column]
        for model, colour, line in ((STOCHASTIC, BLUE, "-"), (DETERMINISTIC, RED, "--")):
            one = data.sel(beta=beta, model=model)
            upper.plot(one["time"], 1 - one["unresolved"], color=colour, linestyle=line, label=model)
            lower.plot(one["time"], one["pairs"], color=colour, linestyle=line)
            upper.plot(one["time"], one["antipodal"], color=colour, linestyle=":", linewidth=2.4)
        upper.plot([], [], color="gray", linestyle=":", linewidth=2.4, label="in two antipodal clusters")
        upper.set_title(f"β = {beta:g}")
        upper.set(xlabel="time t", ylabel="share clustered", ylim=(-0.02, 1.02))
        lower.set(xlabel="time t", ylabel="share of pairs unresolved", ylim=(-0.02, 1.02))
    legend_below(figure, 3, handles=axes[0, 0].get_legend_handles_labels()[0])
    return figure
