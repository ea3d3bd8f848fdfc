r"""Antipodal pairs with a feed-forward branch, which [CT] leaves to future work; the paper has no such figure.

Two tokens, orthogonal at first, pass through layers of `limitformer.nn.SphereStack` at initialisation: attention, then
a branch of strength φ. In the limit the branch adds independent noise with the variance φ² and the covariance φ²k(z)
between the tokens, k(z) = E σ(g)σ(g′)/E σ(g)² for normals of correlation z. With M = σ²|A|² + φ², K = σ²⟨A¹, A²⟩ +
φ²k(z) and the scale density s of u = artanh z,

  (log s)′ = −2z − [ (1 − d)zM + (z² + d − 2)K ]/(M − zK),   P(antipodal | u) = ∫_u^∞ s / ∫_{−∞}^∞ s.

An odd σ has k(−1) = −1: antipodes remain antipodes. For a linear σ they attract more the larger φ is. A ReLU has
k(−1) = 0: its noise is independent on the two sides, and antipodes are left at once.
"""

from dataclasses import dataclass
from functools import cache
from math import sqrt
from typing import Any

import numpy as np
import torch
import xarray as xr
from matplotlib.figure import Figure
from numpy.typing import NDArray
from scipy.integrate import cumulative_simpson, simpson
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

import limitformer as lf
from limitformer.base.progress import track
from limitformer.plot import MARKERS, PALETTE, legend_below, panels
from limitformer_papers.clustering.sphere import standard_error
from limitformer_papers.common.claims import Claim, FigureRun

HIDDEN = 8
BRANCHES: dict[str, lf.models.Feedforward] = {
    "linear": lf.ShapedReLU(c_plus=0.0, c_minus=0.0, hidden=HIDDEN),
    "tanh": lf.Tanh(hidden=HIDDEN),
    "ReLU": lf.ReLU(hidden=HIDDEN),
}
ODD = ["linear", "tanh"]
LINES = ("-", "--", ":")
U = np.linspace(-9, 9, 6001)


@dataclass(frozen=True, kw_only=True)
class Config:
    """The model, the strengths φ of the branch, and the simulations; antipodal means an overlap below −0.95."""

    dim: int = 4
    beta: float = 2.0
    layers_per_unit_time: int = 100
    strengths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    times: tuple[float, ...] = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
    samples: int = 2000


paper = Config


def quick() -> Config:
    return Config(layers_per_unit_time=40, strengths=(0.0, 1.0), times=(2.0, 5.0), samples=300)


def model_of(config: Any) -> lf.StochasticTransformer:
    sizes = {"dim": config.dim, "layers_per_unit_time": config.layers_per_unit_time}
    return lf.StochasticTransformer(tokens=2, beta=config.beta, **sizes)


def compute(config: Config, run: FigureRun) -> xr.Dataset:
    """Return `share` (branch, strength, time) of pairs that are antipodal, and `exact` (branch, strength) for ever."""
    cells = [(branch, strength) for branch in BRANCHES for strength in config.strengths]
    without = share(config, "linear", 0.0, run)
    shares = [share(config, *cell, run) if cell[1] else without for cell in track(cells, "cells")]
    size = (len(BRANCHES), len(config.strengths))
    return xr.Dataset(
        {
            "share": (("branch", "strength", "time"), np.reshape(shares, (*size, -1))),
            "exact": (("branch", "strength"), np.reshape([probability(config, *cell) for cell in cells], size)),
        },
        coords={"branch": list(BRANCHES), "strength": list(config.strengths), "time": list(config.times)},
        attrs={
            "samples": config.samples,
            "dim": config.dim,
            "beta": config.beta,
            "reference": float(lf.overlap(model_of(config)).antipodal_probability(start=0.0)),
        },
    )


@torch.no_grad()
def share(config: Config, branch: str, strength: float, run: FigureRun) -> list[float]:
    """Return the share of networks, each with one pair, whose tokens are antipodal at each time."""
    generator = torch.Generator().manual_seed(run.seed)
    part, model = BRANCHES[branch], model_of(config)
    layer = lf.nn.SphereStack(model, 1, feedforward=part if strength else None, strength=strength)
    law = lf.nn.InitialVariances.standard(config.dim, hidden=HIDDEN, gain=part.gain_at(config.dim))
    deviations = {"values": 1.0, "feedforward.0.pre.weight": sqrt(law.pre), "feedforward.0.post.weight": sqrt(law.post)}
    shapes = {name: one.shape for name, one in layer.named_parameters() if name in deviations}
    x, ends = torch.eye(2, config.dim).repeat(config.samples, 1, 1), []
    layers = [round(time * config.layers_per_unit_time) for time in config.times]
    apply = vmap(lambda weights, tokens: functional_call(layer, weights, (tokens,)))
    with sdpa_kernel(SDPBackend.MATH):  # the only kernel with a rule for vmap
        for number in range(1, layers[-1] + 1):
            draws = {name: torch.randn(config.samples, *shape, generator=generator) for name, shape in shapes.items()}
            x = apply({name: deviations[name] * draw for name, draw in draws.items()}, x)
            if number in layers:
                ends.append(float(((x[:, 0] * x[:, 1]).sum(-1) < -0.95).double().mean()))
    return ends


def probability(config: Any, branch: str, strength: float) -> float:
    """Return P(antipodal) of the limit."""
    u, z, d = U, np.tanh(U), config.dim
    own = 1 / (1 + np.exp(-config.beta * (1 - z)))
    other, noise = 1 - own, strength**2
    m = own**2 + other**2 + 2 * own * other * z + noise
    k = 2 * own * other + (own**2 + other**2) * z + noise * kernel(branch)
    slope = -2 * z - ((1 - d) * z * m + (z**2 + d - 2) * k) / (m - z * k)
    if slope[0] <= 0:
        return 0.0
    log_s = cumulative_simpson(slope, x=u, initial=0.0)
    s = np.exp(log_s - log_s.max())
    above = simpson(s[u >= 0], x=u[u >= 0]) - s[-1] / slope[-1]
    below = simpson(s[u <= 0], x=u[u <= 0]) + s[0] / slope[0]
    return float(above / (above + below))


@cache
def kernel(branch: str) -> NDArray[np.float64]:
    """Return k(z) at u in `U`; a ReLU's is the arc-cosine kernel."""
    z = np.tanh(U)
    if branch == "linear":
        return z
    if branch == "ReLU":
        return np.asarray((np.sqrt(1 - z**2) + (np.pi - np.arccos(z)) * z) / np.pi)
    x, w = np.polynomial.hermite_e.hermegauss(80)
    second = z[:, None, None] * x[:, None] + np.sqrt(1 - z**2)[:, None, None] * x
    products = np.einsum("i,j,i,zij->z", w, w, np.tanh(x), np.tanh(second))
    return np.asarray(products / (w @ np.tanh(x) ** 2 * w.sum()))


def claims(data: xr.Dataset) -> list[Claim]:
    """Odd branches keep antipodes and a ReLU does not, by formula and by simulation."""
    odd, relu, last = data.sel(branch=ODD), data.sel(branch="ReLU"), data["share"][..., -1]
    errors = (last.sel(branch=ODD) - odd["exact"]) / standard_error(odd["exact"].values, int(data.attrs["samples"]))
    exact, reference = float(data["exact"][0, 0]), float(data.attrs["reference"])
    growth = odd["exact"].diff("strength")
    without, strongest = float(relu["share"][0, -1]), float(relu["share"][-1, -1])
    return [
        Claim("no branch: P(antipodal), that of lf.overlap", exact, abs(exact - reference) < 1e-8),
        Claim(
            "linear, tanh: largest |simulated − exact|, in standard errors",
            float(abs(errors).max()),
            bool(abs(errors).max() < 4),
        ),
        Claim(
            "linear, tanh: least growth of P(antipodal) from one strength to the next",
            float(growth.min()),
            bool(growth.min() > 0),
        ),
        Claim(
            "ReLU: largest P(antipodal) at a strength above 0",
            float(relu["exact"][1:].max()),
            bool(relu["exact"][1:].max() == 0),
        ),
        Claim(
            "strongest ReLU: share at the horizon, over that without a branch",
            strongest / without,
            strongest < without / 20,
        ),
        Claim("weakest ReLU: share at the horizon", float(relu["share"][1, -1])),
    ]


def draw(data: xr.Dataset) -> Figure:
    figure, (left, right) = panels(2, height=3.6)
    samples, fine = int(data.attrs["samples"]), np.linspace(0, float(data["strength"].max()), 41)[1:]
    for k, branch in enumerate(data["branch"].values):
        look: Any = {"color": PALETTE[k], "linestyle": LINES[k]}
        here = data["share"].sel(branch=branch)[:, -1].values
        left.plot(fine, [probability(Config(**shape_of(data)), branch, phi) for phi in fine], **look, label=branch)
        bars = 2 * standard_error(here, samples)
        left.errorbar(data["strength"], here, bars, color=PALETTE[k], marker=MARKERS[k], markersize=4, linestyle="none")
    for k, phi in enumerate(data["strength"].values):
        relu = data["share"].sel(branch="ReLU", strength=phi)
        right.plot(data["time"], relu, color=PALETTE[k], marker=MARKERS[k], markersize=4, label=f"ReLU, φ = {phi:g}")
    title = f"points: at time {float(data['time'][-1]):g}; curves: exact, for ever"
    left.set(xlabel="strength φ of the branch", ylabel="share of antipodal pairs", title=title)
    right.set(xlabel="time", ylabel="share of antipodal pairs", title="ReLU, by time")
    legend_below(figure, 4, handles=[*left.get_legend_handles_labels()[0], *right.get_legend_handles_labels()[0]])
    return figure


def shape_of(data: xr.Dataset) -> dict[str, Any]:
    return {"dim": int(data.attrs["dim"]), "beta": float(data.attrs["beta"])}
