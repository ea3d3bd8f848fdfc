r"""The sphere's page beyond [CT]: queries and keys drawn in each layer (b = βτ, τ = 1), and a causal mask; σ = 1."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from limitformer.models import StochasticTransformer
from limitformer.sphere.overlap import overlap
from limitformer_papers.explorer.fates import FATE, FATES, INWARD, WAIT, fates, waits
from limitformer_papers.explorer.parts import curve, plot

MODELS = {"drawn": "queries and keys drawn in each layer", "causal": "causal mask"}
FIELDS: dict[str, dict[str, Any]] = {"drawn": {"query_key": "gaussian"}, "causal": {"mask": "causal"}}
PARTED = f"Mean time from opposite to z = {INWARD:g}: opposite is left"


def beyond(model: StochasticTransformer, name: str) -> StochasticTransformer:
    """The same model with drawn queries and keys, or behind a mask."""
    return replace(model, **FIELDS[name])


Rows = Iterable[Iterable[StochasticTransformer]]  # over b or β, one for each dimension


def drawn_plots(models: Rows, betas: tuple[float, ...]) -> list[dict[str, Any]]:
    """Fate and mean time over b."""
    shared: dict[str, Any] = {"at": list(betas), "marker": "beta", "only": {"model": "drawn"}}
    fate, wait = [fates(row) for row in models], [waits(row) for row in models]
    return [
        plot(FATE, "b = βτ", "P", ("dim",), fate, **shared, range=[0, 1], curves=FATES),
        plot(WAIT, "b = βτ", "time", ("dim",), wait, **shared, log=True, curves=[curve("mean time", "law", 0)]),
    ]


def causal_plot(models: Rows, betas: tuple[float, ...]) -> dict[str, Any]:
    """How long opposite tokens last behind a mask, over β."""
    lived = [np.array([[overlap(each).mean_hitting_time(INWARD, start=-1.0) for each in row]]) for row in models]
    shared: dict[str, Any] = {"at": list(betas), "marker": "beta", "only": {"model": "causal"}}
    lines = [curve("mean time", "law", 0)]
    return plot(PARTED, "inverse temperature β", "time", ("dim",), lived, **shared, log=True, curves=lines)
