"""All exact quantities of an overlap as plain values, for JSON: None where one has no meaning, "inf" for infinity."""

from collections.abc import Callable
from dataclasses import asdict
from math import isnan
from typing import Any

from limitformer.base.errors import InputError
from limitformer.models.serial import as_record

LIFETIME_TARGET = 0.9


def summary_of(diffusion: Any) -> dict[str, Any]:
    """The dict of `OverlapDiffusion.summary`."""
    rates = diffusion.rates
    return {
        "model": as_record(diffusion.model),
        "beta": diffusion.beta,
        "clusters": list(diffusion.clusters),
        "boundaries": {name: end_of(end) for name, end in diffusion.boundaries._asdict().items()},
        "critical_beta": known(lambda: diffusion.critical_beta),
        "critical_epsilon": known(lambda: diffusion.critical_epsilon),
        "certain_epsilon": known(lambda: diffusion.certain_epsilon),
        "antipodal_probability": both_starts(diffusion.antipodal_probability),
        "log_antipodal_probability": both_starts(diffusion.log_antipodal_probability),
        "single_cluster_probability": both_starts(diffusion.single_cluster_probability),
        "rates": {"minus": plain(rates.minus), "plus": plain(rates.plus)},
        "metastable": metastable(diffusion),
    }


def metastable(diffusion: Any) -> dict[str, Any] | None:
    """Lifetime from −1 and law of the gap of clusters that leave it: unequal ones, and tokens behind a causal mask."""
    if diffusion.motion.minus.growth == 0:
        return None
    lifetime = plain(diffusion.mean_hitting_time(LIFETIME_TARGET, start=-1.0))
    asymptote = known(lambda: diffusion.lifetime_asymptote(LIFETIME_TARGET))
    record = {"mean_lifetime": lifetime, "target": LIFETIME_TARGET, "lifetime_asymptote": asymptote}
    try:
        gap = diffusion.metastable_gap()
    except InputError:
        return record | {"barrier": None, "median_gap": None, "mean_gap": None}
    return record | {"barrier": gap.barrier, "median_gap": gap.median, "mean_gap": gap.mean}


def both_starts(probability: Callable[..., Any]) -> dict[str, Any]:
    """`probability` of a start uniform on the sphere and of overlap 0."""
    return {"uniform": plain(float(probability())), "zero": plain(float(probability(start=0.0)))}


def end_of(end: Any) -> dict[str, Any]:
    """A `Boundary` with a plain exponent."""
    return asdict(end) | {"exponent": plain(end.exponent)}


def known(value: Callable[[], float]) -> float | str | None:
    """`value()`, or None where the model refuses it."""
    try:
        return plain(value())
    except InputError:
        return None


def plain(value: float) -> float | str | None:
    """None for nan; "inf" and "-inf", which JSON has no numbers for."""
    if isnan(value):
        return None
    return value if abs(value) < float("inf") else str(value)
