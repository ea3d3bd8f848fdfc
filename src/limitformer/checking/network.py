"""The measurements of one network and the verdicts on it: what a report, its page and its picture show."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xarray as xr

from limitformer.checking.curves import CURVES, inside, kind_and_block, over_heads, surprises
from limitformer.checking.thresholds import failing
from limitformer.checking.verdicts import failed
from limitformer.initialisation.recipes import RecipeComparison
from limitformer.initialisation.report import InitialisationReport
from limitformer.reports.verdict import Verdict, grade_of, number_text
from limitformer.subjects.losses import READOUT
from limitformer.weightless.law import LawTable
from limitformer.weightless.laws import CONSTANT
from limitformer.witness import Witness

UNLIKELY = 0.01
LISTED = 4  # names in a remark
FEW = 3  # points, of which one may lie outside by chance
MOST_WEIGHTS = 4
LONGEST = 38  # characters of a name in the comparison
RANDOM_READOUT = "this loss does not test the size of the head: --loss next-token (loss=) does, if the output is logits"
NO_ATTENTION = "no attention was seen: no softmax of a known form, nor torch's own"


@dataclass(frozen=True)
class Change:
    """One line of the comparison, in words: what was measured, this network's number, and that of a new one."""

    name: str
    now: str
    new: str


@dataclass(frozen=True)
class CheckedNetwork:
    """The measurements of one network, and the verdicts on it; `Report` lists the attributes."""

    name: str
    exists: bool
    curves: xr.Dataset
    band: xr.Dataset | None
    data: xr.Dataset
    laws: LawTable | None
    about: Mapping[str, Any]
    initialisation: InitialisationReport | None = None
    verdicts: list[Verdict] = field(default_factory=list)
    stack: str = ""
    stacks: "tuple[CheckedNetwork, ...]" = ()
    recipe: RecipeComparison | None = None
    witness: Witness | None = None
    formats: xr.Dataset | None = None
    rounding: xr.Dataset | None = None

    @property
    def trained(self) -> bool:
        """Whether this network was trained: its weights clearly differ from the law of its initialisation.

        Training moves weights that start constant, such as gains of norms and biases. If nearly all random weights
        differ and these are still constant, it is another initialisation, which has verdicts.
        """
        weights = self.initialisation
        if not self.exists or weights is None or self.laws is None or not weights.trained:
            return False
        laws = self.laws.laws  # a weight that the law ties, and this network does not, has no law of its own
        constant = [each for each in weights.weights if each.name in laws and laws[each.name].kind == CONSTANT]
        moved = sum(each.std > 0 or each.mean != laws[each.name].shift for each in constant)
        return bool(2 * moved >= len(constant))

    @property
    def apart(self) -> list[str]:
        """The weights that the law ties to others and this network does not."""
        if self.initialisation is None or self.laws is None:
            return []
        tied = {name for names in self.laws.tied.values() for name in names}
        return [each.name for each in self.initialisation.weights if each.name in tied]

    @property
    def grade(self) -> str | None:
        """fine, note (by a number format), watch or broken, the worst of all verdicts; None for a trained network."""
        return None if self.trained else grade_of(self.verdicts)

    def failed(self, names: str | None = "any") -> list[Verdict]:
        """Return the verdicts that fail a check for `names`.

        Args:
            names: verdicts and grades, separated by commas. A verdict fails at its worst grade: `collapsed` at broken,
                `swamped`, which is never broken, at watch. `broken` is any verdict of that grade, `watch` or `any` is
                every verdict.

        Raises:
            InputError: a name is neither a verdict nor a grade.
        """
        return failed(self.verdicts, failing(names))

    @property
    def within_law(self) -> dict[str, float]:
        """The share of each curve of an existing network that lies in the law's band, except curves of few points."""
        if self.band is None or not self.exists:
            return {}
        parts = inside(self.curves, self.band)
        return {str(name): float(each.mean()) for name, each in parts.items() if int(each.notnull().sum()) >= FEW}

    @property
    def unlike_law(self) -> dict[str, float]:
        """The curves of an existing network whose probability under its law is below 0.01, with that probability."""
        if self.band is None or not self.exists:
            return {}
        pairs = sorted(surprises(self.curves, self.band).items(), key=lambda pair: pair[1])
        return {name: p for name, p in pairs if p < UNLIKELY}

    def changes(self) -> list[Change]:
        """Return how a trained network differs from one at initialisation: the ends of its curves, and its weights."""
        ends = [change for name, curve in CURVES.items() if curve.change and (change := curve_change(self, name))]
        return ends + weight_changes(self)

    @property
    def heading(self) -> str:
        """Depth, tokens, whether this is a network or samples of its law, and the loss that was differentiated."""
        blocks, tokens = self.curves.sizes["layer"] - 1, self.about["tokens"]
        samples = self.curves.sizes["sample"]
        law = f"law at initialisation, {samples} sample{'' if samples == 1 else 's'}"
        stack = f" of {self.stack}" if self.stack else ""
        loss = f", loss: {self.about['loss']}" if "loss" in self.curves else ""
        words = "1 token" if tokens == 1 else f"{tokens} tokens"
        return f"{blocks} blocks{stack}, {words}, {'this network' if self.exists else law}{loss}"

    @property
    def proof(self) -> str:
        """The sentence of the witness; empty without one."""
        return "" if self.witness is None else self.witness.in_words(self.curves.sizes["sample"])

    def remarks(self) -> list[str]:
        """Return the loss next to that of a uniform guess, the curves unlike the law, and a summary of the weights."""
        lines = [] if "logit_std" in self.curves else [NO_ATTENTION]
        if "equal_samples" in self.about:
            lines.append(str(self.about["equal_samples"]))
        if "chosen" in self.about:
            lines.append(f"inputs chosen for it: {self.about['chosen']}")
        if "loss" in self.curves:
            guess = f", of a uniform guess {self.about['chance']:.4g}" if "chance" in self.about else ""
            lines.append(f"loss {float(self.curves['loss'].median()):.4g}{guess}")
            if self.about.get("loss") == READOUT:
                lines.append(RANDOM_READOUT)
        if "frozen" in self.about:
            lines.append(frozen_in_words(int(self.about["frozen"])))
        unlike = [] if self.trained else [f"{name} (p {p:.0e})" for name, p in self.unlike_law.items()]
        if unlike:
            lines.append(f"unlike its law: {', '.join(unlike[:LISTED])}{' and more' if len(unlike) > LISTED else ''}")
        if self.stacks or any(sign in str(self.about.get("blocks", "")) for sign in (", ", "(")):
            lines.append(f"blocks: {self.about['blocks']}")
        if self.exists and self.laws is None:
            lines.append("no law is known of this network: the verdicts take it for one that is not trained")
        if "unread" in self.about:
            lines.append(f"not read, as the class of the network does not have them: {self.about['unread']}")
        if self.trained and (apart := self.apart):
            lines.append(f"held apart, though the law ties them to others: {', '.join(apart[:LISTED])}")
        if self.initialisation is not None:
            lines.append(f"weights: {self.initialisation.summary}")
        return lines


def frozen_in_words(count: int) -> str:
    """Return a sentence on weights that are not trained."""
    weights = "1 weight is" if count == 1 else f"{count} weights are"
    return f"{weights} frozen (requires_grad=False), without verdicts on gradients and steps"


def stack_like(part: CheckedNetwork, network: CheckedNetwork, other: CheckedNetwork | None) -> CheckedNetwork | None:
    """Return the stack of another network that has the place of `part` in `network`."""
    if other is None or part is network:
        return other
    return next((each for each in other.stacks if each.name == part.name), None)


def curve_change(network: CheckedNetwork, name: str) -> Change | None:
    """Compare the last layer, or the block of attention that is farthest from a new network's."""
    if network.band is None or name not in network.curves or name not in network.band:
        return None
    if name == "loss" and "chance" not in network.about:
        return None
    curve, band = over_heads(network.curves[name].isel(sample=0)), over_heads(network.band[name])
    low, middle, high = (np.atleast_1d(band.sel(edge=edge).values) for edge in ("low", "middle", "high"))
    values = np.atleast_1d(curve.values)[: len(middle)]
    if not (np.isfinite(values) & np.isfinite(middle)).any():
        return None
    place = len(values) - 1
    title = CURVES[name].change
    if "block" in curve.dims:
        with np.errstate(divide="ignore", invalid="ignore"):
            place = int(np.nanargmax(np.abs(np.log(values / middle))))
        title = f"{title} {place + 1}"
    return Change(title, number_text(values[place]), f"{number_text(low[place])} to {number_text(high[place])}")


def weight_changes(network: CheckedNetwork) -> list[Change]:
    """Return the kinds of random weight whose standard deviation differs most from the law's, as ratios."""
    if network.initialisation is None or network.laws is None:
        return []
    ratios: dict[str, list[float]] = {}
    for weight in network.initialisation.weights:
        law = network.laws.laws.get(weight.name)
        if law is not None and law.std > 0 and weight.std > 0:
            ratios.setdefault(kind_and_block(weight.name)[0], []).append(weight.std / law.std)
    medians = {kind: float(np.median(each)) for kind, each in ratios.items()}
    most = sorted(medians, key=lambda kind: -abs(math.log(medians[kind])))[:MOST_WEIGHTS]
    return [
        Change(f"std of {shortened(kind, LONGEST - 7)}", f"{number_text(medians[kind])} × law", "1 × law")
        for kind in most
    ]


def shortened(name: str, length: int) -> str:
    """Return the last parts of a dotted name that fit."""
    parts = name.split(".")
    while len(name) > length and len(parts) > 1:
        parts = parts[1:]
        name = f"…{'.'.join(parts)}"
    return name
