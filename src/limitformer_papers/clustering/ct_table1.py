r"""[CT, Table 1, eq. 1]: which scaling of a residual network has an ODE, which an SDE, and which has neither.

X_{n+1} = X_n + α_L V_n f(X_n), n = 0 … L − 1. The table has α = 1/L with V = I, whose limit is dX = f(X) dt, and
α = 1/√L with V_ij i.i.d. N(0, 1), whose limit is dX = dW f(X). Here all four pairs of α and V, at growing L, for
f(x) = x, where everything has a closed form. With r = |X|/|X_0| after L layers, d = dim X and u = X_0/|X_0|:

  α = 1/L,  V = I:       X = (1 + 1/L)^L X_0 → e X_0, with an error of order 1/L;
  α = 1/√L, V random:    log r → N((d − 2)/2, 1), by Itô's formula: d log r = ½(d − 2) dt + dB;
  α = 1/L,  V random:    E|X/|X_0| − u|² = (1 + d/L²)^L − 1 → d/L: nothing moves, noises average out;
  α = 1/√L, V = I:       log r = L log(1 + 1/√L) → √L − ½: no limit.
"""

from dataclasses import dataclass

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from scipy.special import ndtri
from scipy.stats import kstest

from limitformer.base.progress import track
from limitformer.plot import RED, legend_below, panels, sequence
from limitformer_papers.common.claims import Claim, FigureRun

Array = NDArray[np.float64]
SCALES = ("1/L", "1/√L")
LAWS = ("identity", "random")
PATHS = 3  # single networks that are drawn
QUANTILES = (0.05, 0.5, 0.95)


@dataclass(frozen=True, kw_only=True)
class Config:
    """d, the depths L, and the numbers of drawn times and networks; the paper has no numbers."""

    dim: int = 4
    layers: tuple[int, ...] = (8, 64, 1024)
    points: int = 129
    samples: int = 4000


paper = Config


def quick() -> Config:
    return Config(layers=(8, 32, 256), points=17, samples=1000)


def compute(config: Config, run: FigureRun) -> xr.Dataset:
    """Return, of log r, `band` (scale, law, layers, point, quantile), `paths` (…, point, path), `end` (…, sample).

    `moved` (scale, law, layers, sample) is |X/|X_0| − u|² at the end.
    """
    cells = [(scale, law, layers) for scale in SCALES for law in LAWS for layers in config.layers]
    networks = [network(config, *cell, run.seed) for cell in track(cells, "networks")]
    grid = (len(SCALES), len(LAWS), len(config.layers))
    log_length, moved = (np.stack(part).reshape(*grid, *part[0].shape) for part in zip(*networks, strict=True))
    places = ("scale", "law", "layers")
    return xr.Dataset(
        {
            "band": ((*places, "point", "quantile"), np.moveaxis(np.quantile(log_length, QUANTILES, axis=-1), 0, -1)),
            "paths": ((*places, "point", "path"), log_length[..., :PATHS]),
            "end": ((*places, "sample"), log_length[..., -1, :]),
            "moved": ((*places, "sample"), moved),
        },
        coords={
            "scale": list(SCALES),
            "law": list(LAWS),
            "layers": list(config.layers),
            "quantile": list(QUANTILES),
            "time": ("point", np.linspace(0, 1, config.points)),
        },
        attrs={"dim": config.dim},
    )


def network(config: Config, scale: str, law: str, layers: int, seed: int) -> tuple[Array, Array]:
    """Return log r (point, sample) and the squared distance from the start (sample,) of [CT, eq. 1].

    Between two layers X is constant: at time t it is that of layer ⌊tL⌋.
    """
    random = np.random.Generator(np.random.Philox([seed, layers, SCALES.index(scale)]))
    alpha = 1 / layers if scale == "1/L" else layers**-0.5
    x = np.zeros((config.samples, config.dim))
    x[:, 0] = 1.0
    start, log_length = x.copy(), [np.zeros(config.samples)]
    for _ in range(layers):
        if law == "identity":
            x = x + alpha * x
        else:
            values = random.standard_normal((config.samples, config.dim, config.dim))
            x = x + alpha * np.einsum("skl,sl->sk", values, x)
        log_length.append(np.log(np.linalg.norm(x, axis=1)))
    at = np.floor(np.linspace(0, layers, config.points) + 1e-9).astype(int)
    return np.stack(log_length)[at], ((x - start) ** 2).sum(1)


def claims(data: xr.Dataset) -> list[Claim]:
    """Both rows of the table hold, and the other two pairs have no such limit."""
    ends, deepest = data["end"], int(data["layers"][-1])
    return [
        *ode_claims(ends.sel(scale="1/L", law="identity").isel(sample=0)),
        sde_claim(ends.sel(scale="1/√L", law="random", layers=deepest), data.attrs["dim"]),
        *still_claims(data["moved"].sel(scale="1/L", law="random"), data.attrs["dim"]),
        growth_claim(ends.sel(scale="1/√L", law="identity").isel(sample=0)),
    ]


def ode_claims(ends: xr.DataArray) -> list[Claim]:
    """The solution of the ODE is e^t, and the error of log r (layers,) falls like 1/L."""
    errors, layers = np.abs(np.exp(ends.values) / np.e - 1), ends["layers"].values
    order = float(np.log(errors[-2] / errors[-1]) / np.log(layers[-1] / layers[-2]))
    return [
        Claim(
            f"α = 1/L, V = I, L = {layers[-1]}: relative distance from the ODE",
            float(errors[-1]),
            bool(errors[-1] < 1 / layers[-1]),
        ),
        Claim("its order in 1/L: one", order, 0.9 < order < 1.1),
    ]


def sde_claim(ends: xr.DataArray, dim: int) -> Claim:
    """Compare log r (sample,) with the law of the SDE."""
    distance = float(kstest(ends.values - (dim - 2) / 2, "norm").statistic)
    noise = float(np.sqrt(-np.log(0.001 / 2) / 2 / ends.size))
    name = f"α = 1/√L, V random, L = {int(ends['layers'])}: KS distance from the SDE (sampling noise: {noise:.3f})"
    return Claim(name, distance, distance < noise)


def still_claims(moved: xr.DataArray, dim: int) -> list[Claim]:
    """Squared distances (layers, sample) have the exact mean, which goes to 0."""
    layers, mean = moved["layers"].values, moved.mean("sample").values
    exact = (1 + dim / layers[-1] ** 2) ** layers[-1] - 1
    error = float(moved[-1].std()) / moved.sizes["sample"] ** 0.5
    order = float(np.log(mean[-2] / mean[-1]) / np.log(layers[-1] / layers[-2]))
    return [
        Claim(
            f"α = 1/L, V random, L = {layers[-1]}: mean squared distance from the start (exact: {exact:.5f})",
            float(mean[-1]),
            bool(abs(mean[-1] - exact) < 4 * error),
        ),
        Claim("its order in 1/L: one, so nothing moves as L grows", order, 0.9 < order < 1.1),
    ]


def growth_claim(ends: xr.DataArray) -> Claim:
    """Log r (layers,) grows like √L."""
    layers = ends["layers"].values
    order = float(np.log(ends[-1] / ends[-2]) / np.log(layers[-1] / layers[-2]))
    return Claim("α = 1/√L, V = I: order in L of log r, ½: it has no limit", order, 0.45 < order < 0.56)


def draw(data: xr.Dataset) -> Figure:
    """Draw a panel for each pair of α and V: median and 5 % to 95 % of log r by time, for each L, and the limit."""
    figure, axes = panels(2, height=3.0, rows=2)
    titles = {
        ("1/L", "identity"): "V = I: an ODE",
        ("1/L", "random"): "V random: nothing moves",
        ("1/√L", "identity"): "V = I: no limit",
        ("1/√L", "random"): "V random: an SDE",
    }
    for row, scale in enumerate(SCALES):
        for column, law in enumerate(LAWS):
            panel = axes[row, column]
            fan(panel, data.sel(scale=scale, law=law))
            panel.set_title(f"α = {scale}, {titles[scale, law]}")
            panel.set(xlabel="time t = layer/L", ylabel="log( |X| / |X₀| )", xlim=(0, 1))
    time = data["time"].values
    draw_limits(axes, time, data.attrs["dim"])
    axes[0, 1].set_ylim(-1.1, 1.1)
    handles = axes[1, 1].get_legend_handles_labels()[0]
    legend_below(figure, len(handles), handles=handles)
    return figure


def fan(panel: Axes, data: xr.Dataset) -> None:
    """Draw quantiles over the samples for each L, and single networks of the largest L if they differ."""
    for layers, colour in zip(data["layers"].values, sequence(data.sizes["layers"]), strict=True):
        low, middle, high = data["band"].sel(layers=layers).values.T
        panel.fill_between(data["time"], low, high, color=colour, alpha=0.15, linewidth=0)
        panel.plot(data["time"], middle, color=colour, label=f"L = {layers}")
    if float(data["end"][-1].std()) > 0:
        panel.plot(data["time"], data["paths"][-1], color="gray", linewidth=0.6, alpha=0.8)


def draw_limits(axes: NDArray[np.object_], time: Array, dim: int) -> None:
    """Draw the limits: e^t, no motion, and the median and 5 % to 95 % of the SDE."""
    style = {"color": RED, "linestyle": "--", "linewidth": 1.3}
    axes[0, 0].plot(time, time, **style)
    axes[0, 1].plot(time, 0 * time, **style)
    for level in QUANTILES:
        axes[1, 1].plot(time, (dim - 2) / 2 * time + ndtri(level) * np.sqrt(time), **style)
    axes[1, 1].plot([], [], label="limit", **style)
    axes[1, 1].plot([], [], color="gray", linewidth=0.6, label="single networks")
