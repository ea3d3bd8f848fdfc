r"""The limit of gradients and of the tangent kernel, as depth and width grow together, in the manner of [ST, Fig. 1].

Left and second: density of the tangent kernel of the loss, Σ_W |∂loss/∂W|²/n³, of the exact chain and of the SDE
(docs/gradient-limit.md), for shaped attention alone and with a shaped ReLU; the grey line is the frozen kernel, in
which V, M and Ψ move by their drifts alone. Third: gradient of the stream by layer, |∂loss/∂X|/n. Right: KS distance of
the kernel's laws by width, and the noise of the samples. Parameters are those of [ST, Fig. 1]. The paper has no such
figure.
"""

from dataclasses import dataclass
from math import sqrt
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from limitformer.base.progress import track
from limitformer.covariance.limit import CovarianceLimit
from limitformer.models import ShapedAttention, ShapedReLU, Start, Transformer, equicorrelated
from limitformer.plot import BLACK, BLUE, MARKERS, RED, Array, density, draw_densities, legend_below, panels
from limitformer.simulation.processes import limit
from limitformer.simulation.simulate import simulate
from limitformer_papers.beyond.gradient_coefficients import GradientCoefficients
from limitformer_papers.common.claims import Claim, FigureRun, ks_distance, ks_noise

ATTENTION, BOTH = "attention", "attention and ReLU"
QUANTILES = (0.05, 0.5, 0.95)
DISTANCES = (0.01, 0.02, 0.05, 0.1, 0.2)  # ticks


@dataclass(frozen=True, kw_only=True)
class Config:
    """[ST, Fig. 1] with the widths of the distances."""

    width: int = 200
    widths: tuple[int, ...] = (12, 25, 50, 100, 200, 400)
    horizon: float = 0.75
    gamma: float = 1 / sqrt(8)
    tau0: float = 1.0
    correlation: float = 0.2
    c_minus: float = -1.0
    dt: float = 0.005
    samples: int = 2**14


paper = Config


def quick() -> Config:
    return Config(width=120, widths=(12, 120), samples=2**9, dt=0.01)


def model_of(config: Config, part: str, width: int) -> Transformer:
    relu = {"feedforward": ShapedReLU(c_plus=0.0, c_minus=config.c_minus)} if part == BOTH else {}
    attention = ShapedAttention(tau0=config.tau0)
    depth = round(config.horizon * width)
    parts: dict[str, Any] = {"attention": attention, **relu}
    return Transformer(width=width, depth=depth, gamma=config.gamma, **parts)


def gradients(model: Any, start: Start, config: Config, run: FigureRun, **options: Any) -> xr.Dataset:
    """Simulate with gradients; a path that exploded has infinite ones."""
    settings: dict[str, Any] = {"samples": config.samples, "seed": run.seed, "threads": run.threads, **options}
    return simulate(model, start, gradients=True, progress=False, **settings).fillna(np.inf)


def kernel_of(chain: xr.Dataset, width: int) -> Array:
    """Return Σ_W |∂loss/∂W|²/n³ of the chain's samples."""
    kernel: Array = (chain["weight_gradient"].values ** 2).sum(1) / width**3
    return kernel


def frozen_kernel(sde: CovarianceLimit, start: Start, steps: int) -> float:
    """Return the kernel of V, M and Ψ that move by their drifts alone."""
    dt = sde.horizon / steps
    path = [start.covariance]
    for _ in range(steps):
        path.append(path[-1] + dt * sde.drift(path[-1]))
    alignment, spread, rate, kernel = path[-1] / len(path[-1]), np.zeros_like(path[-1]), 0.0, 0.0
    for v in path[-2::-1]:
        drifts = GradientCoefficients(sde, v, alignment, spread).drift()
        alignment, spread = alignment + dt * drifts[0], spread + dt * drifts[1]
        before, rate = rate, sde.gamma**2 * float((v * spread).sum())
        kernel += dt * (before + rate) / 2
    weights = (1 if sde.tau0 is not None else 0) + (2 if sde.kink is not None else 0)
    return weights * kernel


def compute(config: Config, run: FigureRun) -> xr.Dataset:
    """Return kernels of chain and SDE, quantiles of the stream's gradient, and distances by width."""
    start = equicorrelated(tokens=2, correlation=config.correlation)
    one = [part_of(config, part, start, run) for part in track((ATTENTION, BOTH), "parts")]
    return xr.concat(one, xr.DataArray([ATTENTION, BOTH], dims="part", name="part"), data_vars="all")


def part_of(config: Config, part: str, start: Start, run: FigureRun) -> xr.Dataset:
    points = np.linspace(0, 1, 16)
    sde = limit(model_of(config, part, config.width))
    assert isinstance(sde, CovarianceLimit)
    times = (points * sde.horizon).tolist()
    paths = gradients(sde, start, config, run, dt=config.dt, record=times)
    kernel, distances, streams = paths["tangent_kernel"].values, [], paths["stream_gradient"].values
    of_chain = network = np.empty(0)
    for width in config.widths:
        model = model_of(config, part, width)
        layers = np.rint(points * model.depth).astype(int)
        chain = gradients(model, start, config, run, record=np.unique(layers).tolist())
        distances.append(ks_distance(kernel_of(chain, width), kernel))
        if width == config.width:
            network = kernel_of(chain, width)
            of_chain = chain["stream_gradient"].sel(depth=layers).values / width
    return xr.Dataset(
        {
            "network": ("sample", network),
            "sde": ("sample", kernel),
            "network_stream": (("quantile", "time"), np.quantile(of_chain, QUANTILES, axis=0)),
            "sde_stream": (("quantile", "time"), np.quantile(streams, QUANTILES, axis=0)),
            "distance": ("width", distances),
            "frozen": frozen_kernel(sde, start, round(sde.horizon / config.dt)),
        },
        coords={"time": times, "quantile": list(QUANTILES), "width": list(config.widths)},
        attrs={"samples": config.samples, "shown": config.width},
    )


def claims(data: xr.Dataset) -> list[Claim]:
    """Chain and SDE agree at the figure's width, their distance falls with it, and a frozen kernel does not agree."""
    return [claim for part in data["part"].values for claim in claims_of(data.sel(part=part), str(part))]


def claims_of(one: xr.Dataset, part: str) -> list[Claim]:
    network, sde, shown = one["network"].values, one["sde"].values, int(one.attrs["shown"])
    noise = ks_noise(network, sde)
    distance = ks_distance(network, sde)
    frozen = ks_distance(np.full_like(network, float(one["frozen"])), network)
    first = float(one["distance"][0])
    middle = float(np.median(sde))
    return [
        Claim(
            f"{part}: KS distance of chain and SDE, kernel, n = {shown} (sampling noise: {noise:.3f})",
            distance,
            distance < max(0.05, noise),
        ),
        Claim(f"{part}: the same at n = {int(one['width'][0])}; it falls", first, distance < first),
        Claim(f"{part}: KS distance of the frozen kernel; above 0.4", frozen, frozen > 0.4),
        Claim(f"{part}: median of the SDE's kernel", middle),
        Claim(f"{part}: median of the chain's kernel over it", float(np.median(network)) / middle),
        Claim(f"{part}: frozen kernel over the SDE's median", float(one["frozen"]) / middle),
        Claim(f"{part}: the kernel's 95 % quantile over its 5 % quantile, SDE", spread_of(sde)),
    ]


def spread_of(values: Array) -> float:
    low, high = np.quantile(values, [0.05, 0.95])
    return float(high / low)


def draw(data: xr.Dataset) -> Figure:
    figure, (left, second, third, right) = panels(4, height=4.2)
    for axes, part in ((left, ATTENTION), (second, BOTH)):
        draw_kernel(axes, data.sel(part=part))
        axes.set(title=part, xlabel=r"$\log_{10}$ of the tangent kernel$/n^3$", ylabel="density")
    draw_streams(third, data.sel(part=BOTH))
    for k, part in enumerate(data["part"].values):
        one = data.sel(part=part)
        right.plot(one["width"], one["distance"], marker=MARKERS[k], color=(BLUE, RED)[k], label=part)
    samples = np.zeros(int(data.attrs["samples"]))
    right.axhline(ks_noise(samples, samples), color="gray", linestyle=":", label="noise of the samples")
    right.set(xscale="log", yscale="log", title="chain against SDE", xlabel="width n", ylabel="KS distance, kernel")
    widths = data["width"].values
    right.set_xticks(widths, [str(width) for width in widths])
    right.set_yticks(DISTANCES, [str(distance) for distance in DISTANCES])
    right.minorticks_off()
    for axes in (left, third, right):  # the second panel has the curves of the first
        legend_below(axes, 1)
    return figure


def draw_kernel(axes: Axes, one: xr.Dataset) -> None:
    network, sde = (np.log10(one[name].values[np.isfinite(one[name].values)]) for name in ("network", "sde"))
    low, high = np.quantile(sde, [0.002, 0.99])
    grid = np.linspace(low - 0.3, high + 0.3, 200)
    draw_densities(axes, network, sde, grid, density)
    axes.axvline(np.log10(float(one["frozen"])), color=BLACK, linestyle=":", label="frozen kernel")


def draw_streams(axes: Axes, one: xr.Dataset) -> None:
    """Draw median and band from 5 to 95 % of |∂loss/∂X|/n."""
    low, middle, high = one["network_stream"].values
    axes.fill_between(one["time"], low, high, color=BLUE, alpha=0.2, linewidth=0)
    axes.plot(one["time"], middle, color=BLUE, label="network, 5 to 95 %")
    for k, values in enumerate(one["sde_stream"].values):
        axes.plot(one["time"], values, color=RED, linestyle="--", label="SDE, the same quantiles" if k == 1 else None)
    axes.set(title=BOTH, xlabel="layer / n", ylabel=r"$|\partial\,$loss$/\partial X|/n$", ylim=(0, None))
