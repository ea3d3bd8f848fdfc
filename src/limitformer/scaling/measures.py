"""The measures of `transfer` at each size, and its conclusion: which effects of the steps depend on the size."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from limitformer.reports.report import csv_of
from limitformer.scaling.exponents import (
    LEAST_SIZES,
    LEVEL,
    SIZE_FREE,
    Band,
    Exponent,
    band,
    half_width,
    is_size_free,
    weights_at,
)
from limitformer.scaling.lines import Lines
from limitformer.scaling.roles import kind_of
from limitformer.scaling.rules import RULES
from limitformer.scaling.sizes import DEPTH, WIDTH
from limitformer.stepping.updates import OPTIMIZERS
from limitformer.witness import Witness

STREAM, OUTPUT, EFFECT = "stream change at the end", "output change", "effect of "
START, LOGITS = "stream at the start", "change of attention logits"
EFFECTS = ("update_effect", "lookup_effect")
DECIDING = (EFFECT, STREAM, START, LOGITS)  # the names of measures of the verdict begin so
MOST_NETWORKS = 1000  # that the number of networks that decide is sought among
FALL = "fall of the loss"
STANDARD = "standard"  # the rule
HINTS = {
    "mup": " muP divides the head's output and the rates of hidden matrices by the width (rule mup).",
    "completep": " CompleteP divides the branches by the depth (rule completep).",
}
LEAST_NETWORKS = 4  # at each size, for a verdict; a choice of limitformer's
GROWS, FREE = 0.2, 0.25  # |exponent| of effects beyond which a rate does not transfer, and within which it does
ROUNDING = 100  # epsilons of the floating type: a stream that changes by less at every size counts as unchanged
WORDS = {True: "size-free", False: "depends", None: "unclear"}
ABOUT = (
    "Gradients come from these tokens alone: a larger batch has other gradients, under Adam other signs, under Muon "
    "other directions. Nothing is said about steps that were not computed."
)


@dataclass(frozen=True)
class MeasuredSizes:
    """Measures of the first training steps by size, and their exponents; `Transfer` lists the attributes."""

    over: str
    sizes: tuple[int, ...]
    rule: str
    optimizer: str
    data: Mapping[int, xr.Dataset]
    measures: Mapping[str, NDArray[np.float64]]
    exponents: Mapping[str, Exponent]
    notes: Sequence[str] = field(default_factory=tuple)
    witness: Witness | None = None
    target: int | None = None
    lines: Lines | None = None

    @property
    def proof(self) -> str:
        """The sentence of the witness; empty without one."""
        if self.witness is None:
            return ""
        words = self.witness.in_words(sum(each.sizes["sample"] for each in self.data.values()))
        return words.replace("witnessed:", f"witnessed at {self.over} {self.sizes[0]}:", 1)

    @property
    def reach(self) -> int:
        """The size at which the effects of the verdict are: the target, or the largest of the sizes."""
        return self.target or self.sizes[-1]

    @property
    def deciding(self) -> list[str]:
        """The measures of the verdict: effects of updates, changes of stream and logits, and the stream's start."""
        return [name for name in self.exponents if name.startswith(DECIDING)]

    def is_known(self, name: str) -> bool:
        """Whether enough networks have positive values of a measure at every size."""
        return len(self.positive(name)) >= LEAST_NETWORKS

    def powers(self, name: str) -> NDArray[np.float64]:
        """Return the power of the size by which a measure changes from the smallest size to `reach`, by network."""
        weights = weights_at(self.sizes, self.reach) - weights_at(self.sizes, self.sizes[0])
        powers: NDArray[np.float64] = np.log(self.positive(name)) @ weights / math.log(self.reach / self.sizes[0])
        return powers

    def growth(self, name: str) -> Band:
        """Return how many times as large a measure of the verdict is at `reach` as at the smallest size.

        The bands of all measures of the verdict hold together in 95 % of repetitions.
        """
        power, ratio = band(self.powers(name), len(self.deciding)), self.reach / self.sizes[0]
        with np.errstate(over="ignore"):
            return Band(*(float(np.float64(ratio) ** each) for each in (power.value, power.low, power.high)))

    def prediction(self, name: str) -> Band:
        """Return a measure of the typical network at `reach`, with the band that holds with those of the verdict."""
        each = band(np.log(self.positive(name)) @ weights_at(self.sizes, self.reach), max(1, len(self.deciding)))
        with np.errstate(over="ignore"):
            return Band(*map(float, np.exp([each.value, each.low, each.high])))

    @property
    def transfers(self) -> bool | None:
        """Whether the rate transfers, as far as these steps show; None if more samples are needed.

        It does not if the band of a measure of the verdict is beyond ± `GROWS`, as a power of the size; these bands
        hold together. It does if the own interval of each is within ± `FREE`: all must be, so that no correction for
        their number is needed. A measure of fewer than `LEAST_NETWORKS` networks decides nothing.
        """
        if self.not_finite:
            return None
        if self.depending():
            return False
        own = [band(self.powers(name)) for name in self.deciding]
        free = all(map(self.is_known, self.deciding)) and all(x.low >= -FREE and x.high <= FREE for x in own)
        return True if own and free else None

    @property
    def networks_needed(self) -> int | None:
        """The number of networks that would decide if they scatter as these; None if `MOST_NETWORKS` would not."""
        counts = np.arange(LEAST_NETWORKS, MOST_NETWORKS + 1)
        free, beyond = np.ones(len(counts), dtype=bool), np.zeros(len(counts), dtype=bool)
        for name in self.deciding:
            powers = self.powers(name)
            size, spread = abs(float(powers.mean())), float(powers.std(ddof=1)) if len(powers) > 1 else math.inf
            free &= size + half_width(spread, counts, 1) <= FREE
            beyond |= size - half_width(spread, counts, len(self.deciding)) > GROWS
        enough = counts[free | beyond]
        return int(enough[0]) if len(enough) else None

    @property
    def not_finite(self) -> dict[int, int]:
        """The number of networks at each size whose loss or stream is not finite after the steps; {} without any."""
        counts = {}
        for size, data in self.data.items():
            each = measures_at(data)
            counts[size] = int((~np.isfinite(each.get(STREAM, each[OUTPUT]) + each[FALL])).sum())
        return {size: count for size, count in counts.items() if count}

    def depending(self) -> dict[str, Band]:
        """Return the growth of measures of the verdict that depend on the size, the head first, then the largest."""
        known = {name: band(self.powers(name), len(self.deciding)) for name in self.deciding if self.is_known(name)}
        beyond = {name: each for name, each in known.items() if each.low > GROWS or each.high < -GROWS}
        names = sorted(beyond, key=lambda name: ("head" not in name, -abs(beyond[name].value)))
        return {name: self.growth(name) for name in names}

    @property
    def span(self) -> str:
        """The sizes that the verdict is about, in words."""
        if self.target:
            return f"from {self.over} {self.sizes[0]:,} to {self.target:,}, as these sizes predict"
        return f"over {self.over} {self.sizes[0]:,} to {self.reach:,}"

    @property
    def conclusion(self) -> str:
        """Whether the learning rate transfers, in a few words."""
        if self.not_finite:
            counts = ", ".join(
                f"{count} of {self.data[size].sizes['sample']} networks at {self.over} {size}"
                for size, count in self.not_finite.items()
            )
            if not all(np.isfinite(each["loss"].isel(step=0)).all() for each in self.data.values()):
                return f"The loss or the stream is not finite in {counts}, in some before the first step."
            return (
                f"At this rate the loss or the stream is not finite after the steps in {counts}: nothing can be "
                "said of its transfer. Nearest: a smaller rate."
            )
        few = min((len(self.positive(name)) for name in self.deciding), default=LEAST_NETWORKS)
        if self.transfers is None and few < LEAST_NETWORKS:
            return (
                f"No verdict on the learning rate over the {self.over}: it needs {LEAST_NETWORKS} networks at each "
                f"size that have all measures, and there {'is' if few == 1 else 'are'} {few}. Nearest: more samples."
            )
        if self.transfers is None:
            needed = self.networks_needed
            nearest = f"{needed} networks at each {self.over}, if they scatter as these" if needed else "other sizes"
            return f"These networks do not decide whether the learning rate transfers {self.span}. Nearest: {nearest}."
        if self.transfers:
            return (
                f"No effect of these steps changes {self.span}: nothing in them speaks against the transfer of the "
                "learning rate."
            )
        (name, each), *others = self.depending().items()
        change = "grows" if each.value > 1 else "falls"
        sentence = f"The {name} {change} by a factor of {each} {self.span}"
        more = ""
        if others:
            several = f"{len(others)} other measures" if len(others) > 1 else "one other measure"
            more = f", and {several} of the verdict depend{'s' * (len(others) == 1)} on the {self.over}"
        against = "This speaks against the transfer of the learning rate."
        return f"{sentence}{more}. {against}{HINTS.get(self.nearest_rule, '')}"

    @property
    def nearest_rule(self) -> str:
        """The rule under which these measures may not grow; empty if none has entries for the optimisers."""
        name = {WIDTH: "mup", DEPTH: "completep"}.get(self.over, "")
        if not name or self.rule != STANDARD or self.transfers is not False:
            return ""
        groups = json.loads(self.data[self.sizes[0]].attrs["groups"])
        kinds = {OPTIMIZERS[each["optimizer"].lower()].column for each in groups}
        grows = next(iter(self.depending().values())).value > 1
        return name if grows and kinds and kinds <= RULES[name].steps.keys() else ""

    @property
    def heading(self) -> str:
        """The sizes, rule, optimiser, steps, networks, and the loss that ran."""
        counts = sorted({each.sizes["sample"] for each in self.data.values()})
        steps = next(iter(self.data.values())).sizes["step"] - 1
        sizes = ", ".join(map(str, self.sizes))
        networks = " to ".join(map(str, (counts[0], counts[-1])[: len(counts)]))
        return (
            f"{self.over} {sizes}; rule {self.rule}; {self.optimizer}; {steps} step{'' if steps == 1 else 's'}; "
            f"{networks} network{'' if counts == [1] else 's'} at each size; loss: {self.loss}"
        )

    @property
    def loss(self) -> str:
        """The name of the loss that ran."""
        return next((str(each.attrs["loss"]) for each in self.data.values()), "")

    @property
    def about(self) -> str:
        """The limits of these numbers."""
        return ABOUT

    @property
    def legend(self) -> list[str]:
        """The meaning of the columns and words of the table."""
        law = "c n^a (1 + b/√n) of three and more sizes" if len(self.sizes) > LEAST_SIZES else "a power: of two sizes"
        predicted = f"The law is {law}; predictions have bands that hold together. " if self.target else ""
        return [
            f"Numbers are medians over networks. Exponent a ± b, over {self.over} {self.sizes[0]:,} to "
            f"{self.sizes[-1]:,}: the measure is 2^a times as large at twice the {self.over}; ± b is the {LEVEL:.0%} "
            f"interval. {predicted or 'Do not extrapolate: name a target for a prediction with its band.'}".rstrip(),
            f"size-free: the interval is within ± {SIZE_FREE:g}, so that the measure does not depend on the "
            f"{self.over}. depends: the interval is beyond ± {SIZE_FREE:g}. unclear: it is neither; more networks "
            "(samples) decide. –: a value is zero or not finite.",
            f"The verdict is about {len(self.deciding)} measures {self.span}: effects of updates, changes of the "
            "stream and of attention logits, and the stream at the start. The rate does not transfer if the power of "
            f"one, between these two sizes, is beyond ± {GROWS:g}, by bands that hold together in {LEVEL:.0%} of "
            f"repetitions; it does if the {LEVEL:.0%} interval of each is within ± {FREE:g}. It is not known where the "
            f"loss or the stream of a network is not finite, or with fewer than {LEAST_NETWORKS} networks. k of n "
            "networks: the exponent is that of the networks with positive values at every size.",
        ]

    def word(self, name: str) -> str:
        """Return "size-free", "depends" or "unclear"; "" for a measure without an exponent."""
        each = self.exponents.get(name)
        return "" if each is None else WORDS[is_size_free(each)]

    def positive(self, name: str) -> NDArray[np.float64]:
        """Return the values (samples, sizes) of a measure in the networks where all are positive."""
        return positive_rows(self.measures[name])

    def cells(self) -> list[list[str]]:
        """Return the table of measures as text, its head first."""
        head = ["measure", *(f"{self.over} {size}" for size in self.sizes), "exponent", ""]
        head[-1:-1] = [f"at {self.target:,}, predicted"] if self.target else []
        result = [head]
        for row in self.rows():
            each, name = self.exponents.get(row["measure"]), row["measure"]
            values = [row[str(size)] for size in self.sizes]
            texts = [f"{value:.3g}" if math.isfinite(value) else "–" for value in values]
            some = each is not None and row["networks"] < len(self.measures[name])
            count = f" ({row['networks']} of {len(self.measures[name])} networks)" if some else ""
            texts += ["–" if each is None else str(each)]
            texts += ["–" if each is None else str(self.prediction(name))] if self.target else []
            result.append([name, *texts, self.word(name) + count])
        return result

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each measure: medians by size, exponent and interval, and whether it is size-free."""
        rows = []
        for name, values in self.measures.items():
            each = self.exponents.get(name)
            row: dict[str, Any] = {"measure": name}
            row |= {str(size): median(values[:, k]) for k, size in enumerate(self.sizes)}
            row |= {"exponent": each.value, "low": each.low, "high": each.high} if each else {}
            row["size-free"] = None if each is None else is_size_free(each)
            row["networks"] = len(self.positive(name))
            if name in self.deciding:
                growth = self.growth(name)
                row |= {"growth": growth.value, "growth low": growth.low, "growth high": growth.high}
            if each and self.target:
                at = self.prediction(name)
                row |= {f"at {self.target}": at.value, "at low": at.low, "at high": at.high}
            rows.append(row)
        return rows

    def csv(self) -> str:
        """Return the rows as comma-separated values."""
        columns = ["measure", *map(str, self.sizes), "exponent", "low", "high", "size-free", "networks"]
        columns += ["growth", "growth low", "growth high"]
        columns += [f"at {self.target}", "at low", "at high"] if self.target else []
        return csv_of(columns, self.rows())

    def record(self) -> dict[str, Any]:
        """Return the result as JSON holds it."""
        rows = [{key: finite_or_none(value) for key, value in row.items()} for row in self.rows()]
        return {
            "over": self.over, "sizes": list(self.sizes), "target": self.target,
            "rule": self.rule, "optimizer": self.optimizer,
            "groups": {str(size): json.loads(each.attrs["groups"]) for size, each in self.data.items()},
            "loss": self.loss, "conclusion": self.conclusion, "transfers": self.transfers, "measures": rows,
            "networks needed": self.networks_needed if self.transfers is None else None,
            "lines": None if self.lines is None else self.lines.record(),
            "notes": list(self.notes), "witness": None if self.witness is None else self.witness.record(),
        }  # fmt: skip

    def dataset(self) -> xr.Dataset:
        """Return the measures (measure, sample, size)."""
        values = np.stack(list(self.measures.values()))
        data = xr.Dataset({"value": (("measure", "sample", "size"), values)})
        return data.assign_coords(measure=list(self.measures), size=list(self.sizes)).assign_attrs(
            over=self.over, rule=self.rule, optimizer=self.optimizer, loss=self.loss
        )


def measures_of(data: Mapping[int, xr.Dataset]) -> dict[str, NDArray[np.float64]]:
    """Return the measures (samples, sizes) after the first step and after the last, by name; NaN for missing ones."""
    each = [measures_at(one) for one in data.values()]
    names = [name for name in each[0] if all(name in one for one in each)]
    most = max(one.sizes["sample"] for one in data.values())
    result = {
        name: np.stack([np.pad(one[name], (0, most - len(one[name])), constant_values=np.nan) for one in each], 1)
        for name in names
    }
    rounding = ROUNDING * np.finfo(next(iter(data.values())).attrs["dtype"]).eps
    for change, whole in ((STREAM, "stream at the end"), (LOGITS, "attention logits")):
        for name in (change, f"{change}, first step"):
            if name in result and not (result[name] >= rounding * result[whole]).any():
                result[name] = result[name] * 0.0  # at no size is it more than rounding
    return result


def measures_at(data: xr.Dataset) -> dict[str, NDArray[np.float64]]:
    """Return the measures (samples,) of one size; changes of stream and output are root mean squares."""
    last, first, start = data.isel(step=-1), data.isel(step=1), data.isel(step=0)
    steps = {"": last} | ({", first step": first} if data.sizes["step"] > 2 else {})
    result: dict[str, Any] = {}
    if "stream" in data:
        size = start.stream.isel(layer=-1)  # a rule may change it: the change itself must not depend on the size
        result |= {"stream at the start": start.stream.isel(layer=0), "stream at the end": size}
        result |= {f"{STREAM}{when}": each.stream_change.isel(layer=-1) * size for when, each in steps.items()}
        result["largest activation"] = last.largest.max("layer")
    result |= {"output": data.output.isel(step=0), "gradient": data.gradient_norm.isel(step=0)}
    result |= {f"{OUTPUT}{when}": each.output_change for when, each in steps.items()}
    result[FALL] = data.loss.isel(step=0) - last.loss
    if "logit_std" in data:
        result["attention logits"] = last.logit_std.mean(["block", "head"])
        changes = {when: (each.logit_change**2).mean(["block", "head"]) ** 0.5 for when, each in steps.items()}
        result |= {f"{LOGITS}{when}": each for when, each in changes.items()}
    kinds: dict[str, list[str]] = {}
    for weight in data.weight.values[data.matrix.values]:
        kinds.setdefault(kind_of(str(weight)), []).append(str(weight))
    for kind, names in kinds.items():
        update, lookup = ((first[key].sel(weight=names) ** 2).mean("weight") ** 0.5 for key in EFFECTS)
        if bool(np.isfinite(update).all()):
            result[f"{EFFECT}{kind.removesuffix('.weight')}, first step"] = update
        if bool(np.isfinite(lookup).all()) and not bool((lookup == update).all()):  # of a table that is a head, too
            result[f"{EFFECT}{kind.removesuffix('.weight')} as a table, first step"] = lookup
    return {name: np.asarray(value, float) for name, value in result.items()}


def positive_rows(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return values[np.isfinite(values).all(1) & (values > 0).all(1)]


def median(values: NDArray[np.float64]) -> float:
    """Return the median of the finite values; NaN without any."""
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if len(finite) else math.nan


def finite_or_none(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
