r"""[CT, Fig. 7]: how 50 tokens cluster in time.

Parameters of the caption: d = 4, N = 50, β = 5, 2,000 trajectories, T = 50; L = 100 and the tolerance 10⁻³ are those of
the paper's other experiments. A trajectory has *clustered* when every pair of tokens is together or antipodal. In
addition to the paper's fractions: how unequal the two antipodal clusters are, and their exact mean lifetime
(`lifetimes`); only equal ones last for ever.
"""

from dataclasses import dataclass

import numpy as np
import xarray as xr
from matplotlib.figure import Figure

from limitformer.models import StochasticTransformer
from limitformer.plot import BLUE, SKY, legend_below, panels
from limitformer.sphere.overlap import overlap
from limitformer_papers.clustering.sphere import (
    ANTIPODAL_COLOUR,
    SINGLE_COLOUR,
    UNRESOLVED_COLOUR,
    evenly,
    shares,
    standard_error,
    tokens_chain,
)
from limitformer_papers.common.claims import Claim, FigureRun

NEARLY_ALL = 0.95
APART = 0.9  # overlap of the two clusters at which the antipodal state is over


@dataclass(frozen=True, kw_only=True)
class Config:
    """The caption's parameters."""

    tokens: int = 50
    dim: int = 4
    beta: float = 5.0
    layers_per_unit_time: int = 100
    horizon: float = 50.0
    points: int = 201
    tolerance: float = 1e-3
    samples: int = 2000


paper = Config


def quick() -> Config:
    return Config(tokens=16, horizon=30.0, points=61, samples=100)


def compute(config: Config, run: FigureRun) -> xr.Dataset:
    """Return shares of the outcomes and the mean number of clusters (time,); `sizes` and exact `lifetime` of two
    clusters.
    """
    model = StochasticTransformer(
        tokens=config.tokens, dim=config.dim, beta=config.beta, layers_per_unit_time=config.layers_per_unit_time
    )
    times = evenly(config.horizon, config.points, config.layers_per_unit_time)
    samples = tokens_chain(model, times, config.samples, run, keep="outcome", tolerance=config.tolerance)
    last = samples.isel(time=-1)
    two = (last["clusters"] == 2) & (last["unresolved_pairs"] == 0)
    smaller = config.tokens - last["largest_cluster"].values[two.values]
    sizes = np.bincount(smaller, minlength=config.tokens // 2 + 1)
    splits = [(config.tokens - few, few) for few in range(1, (config.tokens + 1) // 2)]
    means = [overlap(model, clusters=split).mean_hitting_time(APART, start=-1.0) for split in splits]
    return (
        shares(samples)
        .assign(
            clusters=samples["clusters"].mean("sample"),
            unresolved_pairs=samples["unresolved_pairs"].mean("sample") / (config.tokens * (config.tokens - 1) / 2),
            sizes=("smaller", sizes / config.samples),
            lifetime=("unequal", means),
        )
        .assign_attrs(tokens=config.tokens, beta=config.beta, samples=config.samples)
    )


def claims(data: xr.Dataset) -> list[Claim]:
    """Tokens cluster long before the end; after that the antipodal share stays."""
    last, samples = data.isel(time=-1), int(data.attrs["samples"])
    half = data.sel(time=data.time[-1] / 2, method="nearest")
    single, antipodal, unresolved = (float(last[name]) for name in ("single", "antipodal", "unresolved"))
    drift = float(last["some_pair"] - half["some_pair"])
    noise = float(np.hypot(*standard_error([last["some_pair"], half["some_pair"]], samples)))
    clustered = data.time.values[data["unresolved"].values < 1 - NEARLY_ALL]
    first = float(clustered[0]) if len(clustered) else np.inf
    size = data["sizes"].values
    equal = float(size[-1] / size.sum()) if size.sum() and int(data.attrs["tokens"]) % 2 == 0 else 0.0
    lifetime = data["lifetime"].values
    typical = int(np.clip(np.searchsorted(np.cumsum(size), size.sum() / 2), 1, len(lifetime)))
    mean = float((size * np.arange(len(size))).sum() / size.sum()) if size.sum() else np.nan
    return [
        Claim(f"share in a single cluster at T = {float(last.time):g}", single),
        Claim(
            f"share in two antipodal clusters at T = {float(last.time):g}; it is positive", antipodal, antipodal > 0.05
        ),
        Claim(f"share unresolved at T = {float(last.time):g}", unresolved, unresolved < 0.05),
        Claim(f"time from which {NEARLY_ALL:.0%} have clustered", first, bool(first < float(last.time))),
        Claim(
            "change of the share with an antipodal pair in the second half (standard error, were the halves "
            f"independent: {noise:.4f})",
            drift,
            abs(drift) < 0.03 + 3 * noise,
        ),
        Claim("mean number of tokens in the smaller of two antipodal clusters", mean),
        Claim("share of two antipodal clusters that are equal in size, which attract each other", equal),
        Claim(f"exact mean lifetime of clusters of {split(data, 1)} tokens", float(lifetime[0])),
        Claim(f"the same of {split(data, typical)} tokens, about the median split", float(lifetime[typical - 1])),
        Claim(f"the same of {split(data, len(lifetime))} tokens, the longest", float(lifetime[-1])),
    ]


def split(data: xr.Dataset, few: int) -> str:
    return f"{int(data.attrs['tokens']) - few} + {few}"


def draw(data: xr.Dataset) -> Figure:
    figure, (left, middle, right) = panels(3, height=4.0)
    left.plot(data.time, data["single"], color=SINGLE_COLOUR, label="single cluster")
    left.plot(data.time, data["antipodal"], color=ANTIPODAL_COLOUR, label="two antipodal clusters")
    left.plot(data.time, data["some_pair"], color=ANTIPODAL_COLOUR, linestyle=":", label="some antipodal pair")
    left.plot(data.time, data["unresolved"], color=UNRESOLVED_COLOUR, linestyle="--", label="not clustered yet")
    left.set(xlabel="time t", ylabel="share of trajectories", ylim=(-0.02, 1.02))
    last, sizes = float(data["time"][-1]), data["sizes"].values[1:]
    unequal, of = data.sizes["unequal"], np.arange(1, len(sizes) + 1)
    middle.bar(of[:unequal], sizes[:unequal], color=SKY, label=f"unequal clusters, t = {last:g}")
    middle.bar(of[unequal:], sizes[unequal:], color=BLUE, label="equal ones, which stay")
    middle.set(xlabel="tokens in the smaller cluster", ylabel="share of trajectories")
    right.plot(of[:unequal], data["lifetime"], "o-", markersize=4, color=BLUE, label="exact mean lifetime")
    right.axhline(last, color="gray", linestyle="--", label=f"T = {last:g}")
    right.set(xlabel="tokens in the smaller cluster", ylabel="lifetime of the antipodal state", yscale="log")
    for axes in (left, middle, right):
        axes.set_xlim(left=0)
        legend_below(axes, 1)
    return figure
