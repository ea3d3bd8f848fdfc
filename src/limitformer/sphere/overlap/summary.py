"""All exact quantities of an overlap for JSON: None for a quantity without meaning, "inf" for infinity."""

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from math import isnan
from typing import Any

from limitformer.base.errors import InputError
from limitformer.models.serial import as_record

LIFETIME_TARGET = 0.9
FEW_LAYERS = 1, 10  # in a unit of time, for which a threshold is computed


def summary_of(diffusion: Any) -> dict[str, Any]:
    rates = diffusion.rates
    return {
        "model": as_record(diffusion.model),
        "beta": diffusion.beta,
        "clusters": list(diffusion.clusters),
        "boundaries": {
            name: asdict(end) | {"exponent": json_number(end.exponent)}
            for name, end in diffusion.boundaries._asdict().items()
        },
        "critical_beta": known(lambda: diffusion.critical_beta),
        "critical_beta_of_layers": {
            str(layers): known(partial(diffusion.critical_beta_of_layers, layers)) for layers in FEW_LAYERS
        },
        "critical_epsilon": known(lambda: diffusion.critical_epsilon),
        "certain_epsilon": known(lambda: diffusion.certain_epsilon),
        "antipodal_probability": both_starts(diffusion.antipodal_probability),
        "log_antipodal_probability": both_starts(diffusion.log_antipodal_probability),
        "single_cluster_probability": both_starts(diffusion.single_cluster_probability),
        "rates": {"minus": json_number(rates.minus), "plus": json_number(rates.plus)},
        "metastable": metastable(diffusion),
    }


def metastable(diffusion: Any) -> dict[str, Any] | None:
    """Return the lifetime from −1 and the speed measure of the gap, for unequal clusters and for a causal mask."""
    if diffusion.motion.minus.growth == 0:
        return None
    lifetime = json_number(diffusion.mean_hitting_time(LIFETIME_TARGET, start=-1.0))
    asymptote = known(lambda: diffusion.lifetime_asymptote(LIFETIME_TARGET))
    record = {"mean_lifetime": lifetime, "target": LIFETIME_TARGET, "lifetime_asymptote": asymptote}
    try:
        gap = diffusion.metastable_gap()
    except InputError:
        return record | {"barrier": None, "median_gap": None, "mean_gap": None}
    return record | {"barrier": gap.barrier, "median_gap": gap.median, "mean_gap": gap.mean}


def both_starts(probability: Callable[..., Any]) -> dict[str, Any]:
    """Return `probability` for a uniform start and for a start at overlap 0."""
    return {"uniform": json_number(float(probability())), "zero": json_number(float(probability(start=0.0)))}


def known(value: Callable[[], float]) -> float | str | None:
    """Return `value()`, or None if it raises `InputError`."""
    try:
        return json_number(value())
    except InputError:
        return None


def json_number(value: float) -> float | str | None:
    """Return None for nan, and the strings "inf" and "-inf", because JSON has no such numbers."""
    if isnan(value):
        return None
    return value if abs(value) < float("inf") else str(value)
