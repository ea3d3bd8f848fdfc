r"""The sphere's page beyond [CT]: queries and keys drawn in each layer (b = βτ, τ = 1), and a causal mask; σ = 1."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from limitformer.figures.explorer.parts import curve, plot
from limitformer.models import StochasticTransformer
from limitformer.sphere.overlap import overlap

MODELS = {"drawn": "queries and keys drawn in each layer", "causal": "causal mask"}
FIELDS: dict[str, dict[str, Any]] = {"drawn": {"query_key": "gaussian"}, "causal": {"mask": "causal"}}
PARTED = "Mean time from opposite to z = 0.9: opposite is left"


def beyond(model: StochasticTransformer, name: str) -> StochasticTransformer:
    """The same model with drawn queries and keys, or behind a mask."""
    return replace(model, **FIELDS[name])


def drawn_plots(
    fates: Iterable[Any], waits: Iterable[Any], betas: tuple[float, ...], shown: Any
) -> list[dict[str, Any]]:
    """Fate and mean time over b; `shown` has the titles and curves of the page."""
    shared: dict[str, Any] = {"at": list(betas), "marker": "beta", "only": {"model": "drawn"}}
    fate, wait, curves = shown
    return [
        plot(fate, "b = βτ", "P", ("dim",), list(fates), **shared, range=[0, 1], curves=curves),
        plot(wait, "b = βτ", "time", ("dim",), list(waits), **shared, log=True, curves=[curve("mean time", "law", 0)]),
    ]


def causal_plot(models: Iterable[Iterable[StochasticTransformer]], betas: tuple[float, ...]) -> dict[str, Any]:
    """How long opposite tokens last behind a mask, over β."""
    lived = [np.array([[overlap(each).mean_hitting_time(0.9, start=-1.0) for each in row]]) for row in models]
    shared: dict[str, Any] = {"at": list(betas), "marker": "beta", "only": {"model": "causal"}}
    lines = [curve("mean time", "law", 0)]
    return plot(PARTED, "inverse temperature β", "time", ("dim",), lived, **shared, log=True, curves=lines)
