r"""Two tokens on the sphere, exactly, and trajectories in three dimensions, over dim, β and σ or ε [CT].

Probabilities and mean times are those of the overlap's diffusion (`lf.overlap`), no sample drawn. Trajectories are a
few runs of the chain from tokens uniform on the sphere (`lf.simulate`), for dim = 3, where they can be drawn; all
models have the same seed.
"""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from limitformer.models import HybridTransformer, SphereModel, StochasticTransformer
from limitformer.simulation.simulate import simulate
from limitformer.sphere.overlap import overlap
from limitformer_papers.explorer.parts import axis, choice, curve, plot, short

INWARD = 0.9  # |z| at which two tokens count as together or opposite
FATE, WAIT = "Probability that two tokens end opposite", f"Mean time from overlap 0 to |z| = {INWARD:g}"
FATES = [curve("from a uniform start", "law", 0), curve("from overlap z = 0", "own", 1)]
BEYOND = {"drawn": "queries and keys drawn in each layer", "causal": "causal mask"}
FIELDS: dict[str, dict[str, Any]] = {"drawn": {"query_key": "gaussian"}, "causal": {"mask": "causal"}}
PARTED = f"Mean time from opposite to z = {INWARD:g}: opposite is left"
MODELS = {"stochastic": "stochastic (σ)", "hybrid": "hybrid (ε)", **BEYOND}
STOCHASTIC, HYBRID = {"model": "stochastic"}, {"model": "hybrid"}
KINDS = ("law", "own", "other")  # kinds of lines
DRAWN = 3  # dimension of the drawn sphere
THOUSANDTHS = 1000
GROUP = "On the sphere"  # heading of the sphere's axes
LIVED = f"Mean lifetime of unequal opposite clusters, z from −1 to {INWARD:g}"

Array = NDArray[np.float64]
Rows = Iterable[Iterable[StochasticTransformer]]  # over b or β, one for each dimension


@dataclass(frozen=True, kw_only=True)
class Config:
    """The grid, and the trajectories drawn on the sphere."""

    dims: tuple[int, ...] = (2, 3, 4, 6, 8, 16, 32)
    betas: tuple[float, ...] = tuple(np.round(np.linspace(0, 4, 9), 2).tolist())
    fine_betas: tuple[float, ...] = tuple(np.round(np.linspace(0, 4, 41), 2).tolist())
    sigmas: tuple[float, ...] = (0.5, 1.0, 2.0)
    epsilons: tuple[float, ...] = (0.0, 0.5, 0.9, 1.2, 1.6)
    fine_epsilons: tuple[float, ...] = tuple(np.round(np.linspace(0, 2, 41), 2).tolist())
    starts: tuple[float, ...] = tuple(np.round(np.linspace(-0.95, 0.95, 39), 2).tolist())
    clusters: tuple[tuple[int, int], ...] = ((2, 1), (3, 1), (3, 2))
    tokens: tuple[int, ...] = (2, 4)
    runs: int = 2
    times: tuple[float, ...] = tuple(np.round(np.linspace(0, 3, 76), 2).tolist())
    layers_per_unit_time: int = 100


def compute(config: Config, seed: int, folder: Path | None) -> dict[str, Any]:
    """Return the page's axes, plots, facts and trajectories; `folder` is not used, as this takes seconds."""
    del folder
    return {
        "axes": axes(config),
        "plots": [*of_stochastic(config), *of_hybrid(config), *of_beyond(config)],
        "facts": thresholds(config),
        "sphere": {"group": GROUP, "times": list(config.times), "sets": [paths(config, name, seed) for name in MODELS]},
        "settings": asdict(config),
        "samples": f"exact; trajectories: {config.runs} runs for dim {DRAWN}, "
        f"{config.layers_per_unit_time} layers a unit of time",
    }


def axes(config: Config) -> list[dict[str, Any]]:
    model, drawn, middle = "Model", GROUP, len(config.betas) // 2
    runs = [k + 1 for k in range(config.runs)]
    return [
        choice("model", "Kind", MODELS, "stochastic", model),
        axis("dim", "Dimension", config.dims, config.dims[len(config.dims) // 3], model),
        axis("beta", "Inverse temperature β", config.betas, config.betas[middle], model),
        axis("sigma", "Noise σ", config.sigmas, config.sigmas[len(config.sigmas) // 2], model, only=STOCHASTIC),
        axis("epsilon", "Noise ε", config.epsilons, config.epsilons[-2], model, only=HYBRID),
        axis("tokens", "Tokens", config.tokens, config.tokens[-1], drawn),
        axis("run", "Run", runs, runs[0], drawn),
        axis("time", "Time", config.times, config.times[-1], drawn),
    ]


def stochastic(config: Config, dim: int, beta: float, sigma: float = 1.0, tokens: int = 2) -> StochasticTransformer:
    layers = config.layers_per_unit_time
    return StochasticTransformer(tokens=tokens, dim=dim, beta=beta, sigma=sigma, layers_per_unit_time=layers)


def hybrid(config: Config, dim: int, beta: float, epsilon: float, tokens: int = 2) -> HybridTransformer:
    layers = config.layers_per_unit_time
    return HybridTransformer(tokens=tokens, dim=dim, beta=beta, epsilon=epsilon, layers_per_unit_time=layers)


def lifetime(config: Config, clusters: tuple[int, int], dim: int, beta: float, sigma: float) -> float:
    model = stochastic(config, dim, beta, sigma, sum(clusters))
    return overlap(model, clusters=clusters).mean_hitting_time(INWARD, start=-1.0)


def lifetimes(config: Config, dim: int, sigma: float) -> Array:
    return np.array(
        [[lifetime(config, each, dim, beta, sigma) for beta in config.fine_betas] for each in config.clusters]
    )


def of_stochastic(config: Config) -> list[dict[str, Any]]:
    """Return plots of the fate over β and over the start, and of mean times over β."""
    betas, noisy = config.fine_betas, list(product(config.dims, config.sigmas))
    fate = [fates(stochastic(config, dim, beta) for beta in betas) for dim in config.dims]
    wait = [waits(stochastic(config, dim, beta, sigma) for beta in betas) for dim, sigma in noisy]
    starts = [stochastic(config, dim, beta) for dim, beta in product(config.dims, config.betas)]
    shared: dict[str, Any] = {"at": list(betas), "marker": "beta", "only": STOCHASTIC}
    x, by, lived = "inverse temperature β", ("dim", "sigma"), [lifetimes(config, *each) for each in noisy]
    lines = [curve(f"{p} + {q} tokens", KINDS[k], k) for k, (p, q) in enumerate(config.clusters)]
    return [
        plot(FATE, x, "P", ("dim",), fate, **shared, range=[0, 1], curves=FATES),
        by_start(config, ("dim", "beta"), STOCHASTIC, starts),
        plot(WAIT, x, "time", by, wait, **shared, log=True, curves=[curve("mean time", "law", 0)]),
        plot(LIVED, x, "time", by, lived, **shared, log=True, curves=lines),
    ]


def of_hybrid(config: Config) -> list[dict[str, Any]]:
    """Return plots of the fate over ε and over the start, and of the mean time over ε."""
    epsilons, cells = config.fine_epsilons, list(product(config.dims, config.betas))
    fate = [fates(hybrid(config, dim, beta, epsilon) for epsilon in epsilons) for dim, beta in cells]
    wait = [waits(hybrid(config, DRAWN, beta, epsilon) for epsilon in epsilons) for beta in config.betas]
    starts = [hybrid(config, DRAWN, *each) for each in product(config.betas, config.epsilons)]
    shared: dict[str, Any] = {"at": list(epsilons), "marker": "epsilon", "only": HYBRID}
    x = "noise ε"
    return [
        plot(FATE, x, "P", ("dim", "beta"), fate, **shared, range=[0, 1], curves=FATES),
        by_start(config, ("beta", "epsilon"), HYBRID, starts),
        plot(WAIT, x, "time", ("beta",), wait, **shared, log=True, curves=[curve("mean time", "law", 0)]),
    ]


def of_beyond(config: Config) -> list[dict[str, Any]]:
    """Return plots for drawn queries and keys, and for a causal mask."""
    betas = config.fine_betas
    drawn, causal = (
        [[beyond(stochastic(config, dim, beta), name) for beta in betas] for dim in config.dims] for name in BEYOND
    )
    return [*drawn_plots(drawn, betas), causal_plot(causal, betas)]


def by_start(
    config: Config, by: tuple[str, str], only: dict[str, str], models: Iterable[SphereModel]
) -> dict[str, Any]:
    """Return the plot of P(opposite) over the overlap with which two tokens start."""
    at, lines = list(config.starts), [curve("probability", "law", 0)]
    cells = [[antipodal(each, np.array(at))] for each in models]
    title = "The same, by the overlap at the start"
    return plot(title, "overlap z at the start", "P", by, cells, at=at, range=[0, 1], only=only, curves=lines)


def thresholds(config: Config) -> list[dict[str, Any]]:
    above = [overlap(stochastic(config, dim, 1.0)).critical_beta for dim in config.dims]
    edges = [overlap(hybrid(config, DRAWN, beta, 1.0)) for beta in config.betas]
    return [
        {"label": "Two tokens may end opposite above β =", "by": ["dim"], "only": STOCHASTIC, "cells": short(above)},
        {
            "label": "Two tokens may end opposite above ε =",
            "by": ["beta"],
            "only": HYBRID,
            "cells": short([each.critical_epsilon for each in edges]),
        },
        {
            "label": "They are certain to above ε =",
            "by": ["beta"],
            "only": HYBRID,
            "cells": short([each.certain_epsilon for each in edges]),
        },
    ]


def paths(config: Config, name: str, seed: int) -> dict[str, Any]:
    """Return positions of all tokens at all times in thousandths, (run, time, token, coordinate) flattened."""
    noise = {"stochastic": ["sigma"], "hybrid": ["epsilon"]}.get(name, [])
    cells = [thousandths(tokens) for model in models(config, name) for tokens in trajectories(config, model, seed)]
    return {"only": {"model": name}, "by": ["beta", *noise, "tokens", "run"], "cells": cells}


def models(config: Config, name: str) -> Iterator[SphereModel]:
    """Yield models over β, noise and tokens, the last fastest."""
    noises = {"stochastic": config.sigmas, "hybrid": config.epsilons}.get(name, (1.0,))  # beyond [CT] only σ = 1
    for beta, noise, tokens in product(config.betas, noises, config.tokens):
        if name == "hybrid":
            yield replace(hybrid(config, DRAWN, beta, noise), tokens=tokens)
        else:
            model = replace(stochastic(config, DRAWN, beta, noise), tokens=tokens)
            yield model if name == "stochastic" else beyond(model, name)


def trajectories(config: Config, model: SphereModel, seed: int) -> Array:
    record = list(config.times)
    dataset = simulate(
        model,
        horizon=record[-1],
        samples=config.runs,
        seed=seed,
        keep="tokens",
        record=record,
        threads=1,
        progress=False,
    )
    return np.asarray(dataset["tokens"].values, np.float64)


def thousandths(tokens: Array) -> list[int]:
    return [int(each) for each in np.rint(tokens * THOUSANDTHS).ravel()]


def antipodal(model: SphereModel, start: Any = None) -> Any:
    """Return P(two tokens end opposite), from a uniform start or from overlaps."""
    return overlap(model).antipodal_probability(start=start)


def apart(model: SphereModel) -> float:
    """Return the mean time until two tokens of overlap 0 are nearly together or opposite."""
    return overlap(model).mean_exit_time(-INWARD, INWARD, start=0.0)


def fates(models: Iterable[SphereModel]) -> Array:
    """Return (2, models): P(opposite) from a uniform start, and from overlap 0."""
    return np.array([[float(antipodal(each)), float(antipodal(each, 0.0))] for each in models]).T


def waits(models: Iterable[SphereModel]) -> Array:
    """Return (1, models): mean times until two tokens are together or opposite."""
    return np.array([[apart(each) for each in models]])


def beyond(model: StochasticTransformer, name: str) -> StochasticTransformer:
    """Return the model with drawn queries and keys, or behind a mask."""
    return replace(model, **FIELDS[name])


def drawn_plots(models: Rows, betas: tuple[float, ...]) -> list[dict[str, Any]]:
    shared: dict[str, Any] = {"at": list(betas), "marker": "beta", "only": {"model": "drawn"}}
    fate, wait = [fates(row) for row in models], [waits(row) for row in models]
    return [
        plot(FATE, "b = βτ", "P", ("dim",), fate, **shared, range=[0, 1], curves=FATES),
        plot(WAIT, "b = βτ", "time", ("dim",), wait, **shared, log=True, curves=[curve("mean time", "law", 0)]),
    ]


def causal_plot(models: Rows, betas: tuple[float, ...]) -> dict[str, Any]:
    lived = [np.array([[overlap(each).mean_hitting_time(INWARD, start=-1.0) for each in row]]) for row in models]
    shared: dict[str, Any] = {"at": list(betas), "marker": "beta", "only": {"model": "causal"}}
    lines = [curve("mean time", "law", 0)]
    return plot(PARTED, "inverse temperature β", "time", ("dim",), lived, **shared, log=True, curves=lines)
