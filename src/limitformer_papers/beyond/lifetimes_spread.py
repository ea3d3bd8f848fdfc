r"""The lifetimes of unequal clusters hold for tight clusters; these are those of loose ones.

`lifetimes` starts with p tokens at e and q at −e exactly. Here every token starts at (±e + s g)/|±e + s g|, g standard
normal: two tokens opposite a third, over the spread s. Left: the chain's mean time until all overlaps are above 0.9;
the exact mean lifetime of tight clusters, from −1; and the same exact formula from the overlap that the centres of the
two clusters have at the start, which is above −1. Right: the pair before that time: the share of pairs whose tokens are
ever apart by more than 0.1, and the share of pairs that *split*, so that one token comes nearer to the third one. The
paper has no such figure.
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
from limitformer.simulation.simulate import simulate
from limitformer.sphere.overlap import OverlapDiffusion, overlap
from limitformer.sweep.describe import model_seed
from limitformer_papers.beyond.lifetimes import LINES, times_of
from limitformer_papers.common.claims import Claim, FigureRun

CLUSTERS = (2, 1)
TOGETHER = 0.9
Tokens = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Config:
    """Spreads and β; each cell has `samples` trajectories, `repeats` from each random start."""

    dim: int = 4
    betas: tuple[float, ...] = (1.0, 1.5)
    spreads: tuple[float, ...] = (0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5)
    claimed: float = 0.3
    layers_per_unit_time: int = 200
    lifetimes: float = 8.0
    records_per_lifetime: int = 800  # few records would delay the recorded end
    repeats: int = 8
    samples: int = 2400


paper = Config


def quick() -> Config:
    return Config(betas=(1.0,), spreads=(0.01, 0.3), layers_per_unit_time=50, lifetimes=6.0, samples=640)


def model_of(config: Config, beta: float) -> StochasticTransformer:
    return StochasticTransformer(
        tokens=sum(CLUSTERS), dim=config.dim, beta=beta, layers_per_unit_time=config.layers_per_unit_time
    )


def starts_of(config: Config, spread: float, seed: int) -> Tokens:
    """Return random starts (starts, 3, dim): two tokens about e, one about −e."""
    rng = np.random.Generator(np.random.Philox(seed))
    x = spread * rng.standard_normal((config.samples // config.repeats, sum(CLUSTERS), config.dim))
    x[..., 0] += np.repeat([1.0, -1.0], CLUSTERS)
    return np.asarray(x / np.linalg.norm(x, axis=-1, keepdims=True))


def from_centres(clusters: OverlapDiffusion, starts: Tokens) -> float:
    """Return the mean exact time to `TOGETHER`, starting from the overlap of the pair's middle and the third token."""
    middle = starts[:, :2].sum(1)
    z = (middle * starts[:, 2]).sum(1) / np.linalg.norm(middle, axis=1)
    grid = np.tanh(np.linspace(-5.0, np.arctanh(TOGETHER), 120))
    times = [clusters.mean_hitting_time(TOGETHER, start=float(overlap)) for overlap in grid]
    return float(np.interp(z, grid, times).mean())


def ended(
    config: Config, model: StochasticTransformer, start: Tokens, horizon: float, seed: int, run: FigureRun
) -> Tokens:
    """Return, for each trajectory (repeats, 3), its lifetime, whether the pair was ever loose, and whether it split."""
    times = times_of(horizon, round(config.lifetimes * config.records_per_lifetime), config.layers_per_unit_time)
    paths = simulate(
        model,
        start,
        samples=config.repeats,
        seed=seed,
        threads=run.threads,
        record=times.tolist(),
        horizon=float(times[-1]),
        progress=False,
    )
    pair, first, second = np.moveaxis(paths["overlap"].values, 2, 0)  # 01, 02, 12
    over = np.minimum(np.minimum(first, second), pair) > TOGETHER
    last = np.where(over.any(1), over.argmax(1), len(times) - 1)
    before = np.arange(len(times)) < last[:, None]
    loose = ((pair < TOGETHER) & before).any(1)
    split = ((pair < np.maximum(first, second)) & before).any(1)
    return np.stack([times[last] - (times[1] - times[0]) / 2, loose, split], axis=1)


def cell(config: Config, beta: float, spread: float, run: FigureRun) -> NDArray[np.float64]:
    """Return the mean lifetime, its standard error, the mean from the centres, and the shares of loose and split
    pairs.
    """
    model = model_of(config, beta)
    clusters = overlap(model, clusters=CLUSTERS)
    horizon = config.lifetimes * clusters.mean_hitting_time(TOGETHER, start=-1.0)
    seed = model_seed(run.seed, model, f"spread {spread!r}")
    starts = starts_of(config, spread, seed)
    outcomes = np.array([ended(config, model, x, horizon, (seed + k) % 2**63, run) for k, x in enumerate(starts)])
    lives = outcomes[..., 0].mean(1)  # trajectories from one start are alike
    error = lives.std(ddof=1) / np.sqrt(len(lives))
    return np.array([lives.mean(), error, from_centres(clusters, starts), *outcomes[..., 1:].mean((0, 1))])


def compute(config: Config, run: FigureRun) -> xr.Dataset:
    """Return `lifetime`, `error`, `centres`, `loose`, `split` (beta, spread); `tight` (beta,)."""
    cells = [(beta, spread) for beta in config.betas for spread in config.spreads]
    numbers = np.array([cell(config, *one, run) for one in track(cells, "cells")])
    numbers = numbers.reshape(len(config.betas), len(config.spreads), 5)
    names = ("lifetime", "error", "centres", "loose", "split")
    tight = [overlap(model_of(config, beta), CLUSTERS).mean_hitting_time(TOGETHER, -1.0) for beta in config.betas]
    return xr.Dataset(
        {name: (("beta", "spread"), numbers[..., k]) for k, name in enumerate(names)} | {"tight": ("beta", tight)},
        coords={"beta": list(config.betas), "spread": list(config.spreads)},
        attrs={"layers_per_unit_time": config.layers_per_unit_time, "claimed": config.claimed, "dim": config.dim},
    )


def claims(data: xr.Dataset) -> list[Claim]:
    """Tight clusters have the exact lifetime and loose ones a shorter one, mostly because of where their centres
    start.
    """
    beta, spread = float(data["beta"][0]), float(data.attrs["claimed"])
    small, at = data.sel(beta=beta).isel(spread=0), data.sel(beta=beta, spread=spread)
    tight, life, error = float(at["tight"]), float(at["lifetime"]), float(at["error"])
    near = abs(float(small["lifetime"]) - tight) / float(small["error"])
    centres = float(at["centres"])
    return [
        Claim(f"exact mean lifetime of tight clusters, β = {beta:g}", tight),
        Claim(f"spread {float(small['spread']):g}: the chain's, in standard errors from it", near, near < 4),
        Claim(
            f"spread {spread:g}: the chain's (standard error {error:.2f}); shorter",
            life,
            bool(life < tight - 3 * error),
        ),
        Claim(
            f"spread {spread:g}: the exact formula from where the centres start; nearer",
            centres,
            bool(abs(life - centres) < abs(life - tight)),
        ),
        Claim(f"spread {spread:g}: share of pairs that are ever apart by more than 0.1", float(at["loose"])),
        Claim(
            f"spread {spread:g}: share of pairs that split; more than of tight ones",
            float(at["split"]),
            bool(at["split"] > small["split"] + 0.02),
        ),
    ]


def draw(data: xr.Dataset) -> Figure:
    figure, (left, right) = panels(2, height=4.4)
    spread = data["spread"].values
    for beta, colour, line in zip(data["beta"].values, PALETTE, LINES, strict=False):
        one, scale = data.sel(beta=beta), float(data["tight"].sel(beta=beta))
        life: Any = {"yerr": one["error"] / scale, "fmt": "o", "capsize": 2, "markersize": 4, "color": colour}
        left.errorbar(spread, one["lifetime"] / scale, **life)
        look: Any = {"color": colour, "linestyle": line}
        left.plot(spread, one["centres"] / scale, **look, label=f"exact, from the centres, β = {beta:g}")
        for name, marker, what in (("loose", "o", "apart"), ("split", "s", "split")):
            right.plot(spread, one[name], **look, marker=marker, markersize=4, label=f"{what}, β = {beta:g}")
    left.plot([], [], "o", color="gray", markersize=4, label=f"chain, L = {data.attrs['layers_per_unit_time']}")
    left.axhline(1.0, color="gray", linestyle=":", label="tight clusters, exact")
    left.set(xlabel="spread s of the tokens at the start", ylabel="mean lifetime over that of tight clusters")
    right.set(xlabel="spread s of the tokens at the start", ylabel="share of pairs", ylim=(0, 1))
    for axes in (left, right):
        legend_below(axes, 2)
    return figure
