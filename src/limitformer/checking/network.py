"""One network that was checked."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from limitformer.checking.curves import over_heads, place_of
from limitformer.checking.verdicts import shown

if TYPE_CHECKING:
    from limitformer.checking.report import Report

CURVES = {
    "correlation": "mean correlation at the end",
    "size": "stream at the end",
    "effective_rank": "rank of the tokens at the end",
    "logit_std": "logit std, block",
    "effective_tokens": "effective tokens, block",
    "loss": "loss",
}

MOST_WEIGHTS = 4

LONGEST = 38  # characters of a name in the table


@dataclass(frozen=True)
class Change:
    """One line of the comparison, in words: what was measured, this network's number, and that of a new one."""

    name: str
    now: str
    new: str


def changes_of(report: "Report") -> list[Change]:
    """Curves beside the law's band, and the kinds of weight whose standard deviation moved most."""
    found = [change for name in CURVES if (change := curve_change(report, name)) is not None]
    return found + weight_changes(report)


def curve_change(report: "Report", name: str) -> Change | None:
    """The last layer, or the block of attention that is farthest from a new network's."""
    if report.band is None or name not in report.curves or name not in report.band:
        return None
    if name == "loss" and "chance" not in report.about:
        return None
    curve, band = over_heads(report.curves[name].isel(sample=0)), over_heads(report.band[name])
    low, middle, high = (np.atleast_1d(band.sel(edge=edge).values) for edge in ("low", "middle", "high"))
    values = np.atleast_1d(curve.values)[: len(middle)]
    if not (np.isfinite(values) & np.isfinite(middle)).any():
        return None
    place = len(values) - 1
    title = CURVES[name]
    if "block" in curve.dims:
        with np.errstate(divide="ignore", invalid="ignore"):
            place = int(np.nanargmax(np.abs(np.log(values / middle))))
        title = f"{title} {place + 1}"
    return Change(title, shown(values[place]), f"{shown(low[place])} to {shown(high[place])}")


def weight_changes(report: "Report") -> list[Change]:
    """The kinds of random weight whose standard deviation differs most from the law's, as a ratio."""
    if report.initialisation is None or report.laws is None:
        return []
    ratios: dict[str, list[float]] = {}
    for weight in report.initialisation.weights:
        law = report.laws.laws.get(weight.name)
        if law is not None and law.std > 0 and weight.std > 0:
            ratios.setdefault(place_of(weight.name)[0], []).append(weight.std / law.std)
    typical = {kind: float(np.median(each)) for kind, each in ratios.items()}
    most = sorted(typical, key=lambda kind: -abs(math.log(typical[kind])))[:MOST_WEIGHTS]
    return [Change(f"std of {short(kind, LONGEST - 7)}", f"{shown(typical[kind])} × law", "1 × law") for kind in most]


def short(name: str, length: int) -> str:
    """The last parts of a dotted name that fit."""
    parts = name.split(".")
    while len(name) > length and len(parts) > 1:
        parts = parts[1:]
        name = f"…{'.'.join(parts)}"
    return name
