r"""Covariance of a shaped Transformer's tokens in the limit [ST, Thm 4.2], over γ, τ₀, depth/width and tokens.

Every cell is `samples` paths of the limit's SDE (`lf.limit`), from equicorrelated tokens of variance 1, up to
depth/width = 2. A path stops where |V| reaches `radius` and keeps the value of its exit, as in local convergence [ST,
Def. 4.1]; these exits are counted. For two tokens and attention only, the probabilities that their squared distance
reaches the radius, and that it explodes, are known (`covariance.limit.explosion`): for γ² ≥ ½ nothing explodes, but a
few paths reach the radius.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from limitformer.covariance.limit import CovarianceLimit
from limitformer.models import ShapedAttention, ShapedReLU, Transformer, equicorrelated
from limitformer.simulation.processes import limit
from limitformer.sweep import Sweep
from limitformer_papers.common.claims import FigureRun
from limitformer_papers.common.grids import on_grid
from limitformer_papers.explorer.parts import axis, cached, choice, curve, plot, rounded

LEVELS = (0.05, 0.5, 0.95)
LAYERS = {"attention": "attention alone", "both": "attention and a shaped ReLU layer"}
BY = ("layer", "gamma", "tau0", "tokens")
PAIR = 2  # tokens of the closed form


@dataclass(frozen=True, kw_only=True)
class Config:
    """The grid, and the settings of every cell."""

    gammas: tuple[float, ...] = tuple(np.round(np.linspace(0.1, 1, 10), 1).tolist())
    tau0s: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0)
    tokens: tuple[int, ...] = (2, 4, 8, 16)
    ratios: tuple[float, ...] = tuple(np.round(np.linspace(0, 2, 41), 2).tolist())
    layers: tuple[str, ...] = tuple(LAYERS)
    correlation: float = 0.2
    radius: float = 1e6
    c_plus: float = 0.0
    c_minus: float = -1.0
    samples: int = 512
    width: int = 100  # width of the network whose limit is taken; only depth/width matters


def compute(config: Config, seed: int, folder: Path | None) -> dict[str, Any]:
    datasets = [on_grid(sweep_of(config, layer, seed), FigureRun(seed, 1, folder), layer) for layer in config.layers]
    return {
        "axes": axes(config),
        "plots": [*curves(config, datasets), explosion(config, datasets, cached(known, folder))],
        "facts": [ever(config)],
        "settings": asdict(config),
        "samples": f"{config.samples} paths of the limit's SDE in every cell",
    }


def network(config: Config, layer: str) -> Transformer:
    """Return the network of the first γ and τ₀; the sweep sets the others."""
    feedforward = ShapedReLU(c_plus=config.c_plus, c_minus=config.c_minus) if layer == "both" else None
    depth = round(config.width * config.ratios[-1])
    attention = ShapedAttention(tau0=config.tau0s[0])
    return Transformer(
        width=config.width, depth=depth, gamma=config.gammas[0], attention=attention, feedforward=feedforward
    )


def sweep_of(config: Config, layer: str, seed: int) -> Sweep:
    """Return the sweep of correlation and variance at three levels, and of the share of paths that left, by
    depth/width.
    """
    over = {"gamma": config.gammas, "attention.tau0": config.tau0s, "start.tokens": config.tokens}
    simulate = {
        "as": "limit",
        "samples": config.samples,
        "seed": seed,
        "record": list(config.ratios),
        "radius": config.radius,
        "start": {"correlation": config.correlation, "variance": 1.0},
    }
    return Sweep(network(config, layer), over, simulate, {"quantiles": list(LEVELS), "exits": True})


def axes(config: Config) -> list[dict[str, Any]]:
    model, layers = "Model", {each: LAYERS[each] for each in config.layers}
    return [
        choice("layer", "Layers", layers, config.layers[0], model),
        axis("gamma", "Residual strength γ", config.gammas, config.gammas[len(config.gammas) // 2], model),
        axis("tau0", "Temperature τ₀", config.tau0s, config.tau0s[len(config.tau0s) // 3], model),
        axis("tokens", "Tokens", config.tokens, config.tokens[len(config.tokens) // 3], model),
        axis("ratio", "Depth/width", config.ratios, config.ratios[len(config.ratios) // 2], "Read off at"),
    ]


def curves(config: Config, found: list[xr.Dataset]) -> list[dict[str, Any]]:
    shared: dict[str, Any] = {
        "at": list(config.ratios),
        "marker": "ratio",
        "curves": [curve("median", "law", 1)],
        "band": {"label": "5 to 95 % of paths", "low": 0, "high": 2},
    }
    rho = stacked(found, "correlation_quantile")
    size = np.sqrt(stacked(found, "variance_quantile"))  # quantiles commute with monotone functions
    x = "depth/width"
    return [
        plot("Mean correlation of tokens", x, "ρ", BY, rho, range=[-1, 1], **shared),
        plot("Size of the stream (root mean square)", x, "√(tr V/m)", BY, size, log=True, **shared),
    ]


def stacked(found: list[xr.Dataset], name: str) -> np.ndarray:
    """Return (cell, column, place), cells in the order of `BY`."""
    values = np.stack([each[name].values for each in found])
    return values.reshape(-1, *values.shape[-2:])


def explosion(config: Config, found: list[xr.Dataset], of_pair: Any) -> dict[str, Any]:
    """Return the share of paths that left the ball, with its standard error, and both closed forms if they are
    known.
    """
    share, error = (np.stack([each[name].values for each in found]) for name in ("left", "left_error"))
    measured = [column.reshape(-1, len(config.ratios)) for column in (share - error, share, share + error)]
    exact = [of_pair(config, *cell) for cell in grid(config)]
    cells = np.concatenate([np.stack(measured, axis=1), np.array(exact, float)], axis=1)
    band, lines = {"label": "one standard error", "low": 0, "high": 2}, lines_of(config)
    title, shared = "Probability of an explosion", {"at": list(config.ratios), "marker": "ratio"}
    return plot(title, "depth/width", "P", BY, cells, **shared, curves=lines, band=band)


def lines_of(config: Config) -> list[dict[str, Any]]:
    size = f"{config.radius:.0e}".replace("e+0", "e")
    return [
        curve(f"share with |V| ≥ {size}", "law", 1),
        curve("exact, two tokens: explodes", "own", 3),
        curve(f"exact, two tokens: distance² ≥ {size}", "other", 4),
    ]


def grid(config: Config) -> Iterator[tuple[str, float, float, int]]:
    return product(config.layers, config.gammas, config.tau0s, config.tokens)


def known(config: Config, layer: str, gamma: float, tau0: float, tokens: int) -> list[list[Any]]:
    """Return P(explosion) and P(squared distance reaches the radius) by depth/width; None where they are unknown."""
    if layer != "attention" or tokens != PAIR:
        return [[None] * len(config.ratios)] * 2
    return [[probability(config, gamma, tau0, t, radius) for t in config.ratios] for radius in (inf, config.radius)]


def probability(config: Config, gamma: float, tau0: float, time: float | None, radius: float = inf) -> float:
    """Return P(the squared distance of two tokens reaches a radius, possibly ∞, by a time or ever)."""
    if time == 0:
        return 0.0
    sde = limit(Transformer(width=config.width, depth=1, gamma=gamma, attention=ShapedAttention(tau0=tau0)))
    assert isinstance(sde, CovarianceLimit)
    return sde.explosion_probability(equicorrelated(PAIR, config.correlation), time=time, radius=radius)


def ever(config: Config) -> dict[str, Any]:
    """Return P(explosion) at any depth, in closed form."""
    cells = [
        probability(config, gamma, tau0, None) if (layer, tokens) == ("attention", PAIR) else None
        for layer, gamma, tau0, tokens in grid(config)
    ]
    return {
        "label": "Probability of an explosion at any depth (closed form)",
        "by": list(BY),
        "cells": rounded(np.array(cells, float)),
    }
