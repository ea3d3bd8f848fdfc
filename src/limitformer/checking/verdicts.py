r"""What the curves mean: verdicts, each by one rule, with its value, its threshold and where it begins.

A rule takes the curves of all samples and says for each sample how far it is (its severity is 1 at the threshold) and
in which layer it begins. A verdict is given where the severity is 1 or more in at least half of the samples; how sure
it is, is the part of the samples in which it is. m tokens a sequence, L blocks.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from limitformer.checking.curves import gradient_ratio
from limitformer.checking.names import names_in as names_in
from limitformer.checking.thresholds import Threshold

Array = NDArray[np.float64]
Limits = Mapping[str, float]
HEALTHY = "healthy"
AGREE = 0.5  # part of the samples that a verdict needs
SERIOUS = ("collapsed", "frozen", "grows", "dies", "vanishing", "exploding", "not finite")


class Finding(NamedTuple):
    """Of one rule: by sample what was measured, how far it is, and the layer where it begins (-1: nowhere)."""

    value: Array
    severity: Array
    layer: Array


@dataclass(frozen=True)
class Verdict:
    """One thing that is wrong, or that nothing is.

    Attributes:
        name: collapsed, grows, dies, frozen, uniform, swamped, vanishing, exploding, range, not finite or healthy.
        said: in words.
        value: the median over samples of what was measured.
        threshold: where it begins.
        source: of the threshold.
        layer: the first layer or block concerned; None where it has none.
        share: part of the samples in which it is so.
        why: one sentence.
        mends: what usually mends it.
    """

    name: str
    said: str
    value: float
    threshold: float
    source: str
    layer: int | None
    share: float
    why: str
    mends: str

    @property
    def serious(self) -> bool:
        """Whether it concerns the network's life, not only its ease."""
        return self.name in SERIOUS

    def __str__(self) -> str:
        """One line."""
        return self.said


@dataclass(frozen=True)
class Rule:
    """How one verdict is reached, and what is said of it."""

    name: str
    find: Callable[[xr.Dataset, Limits], Finding | None]
    threshold: str
    said: str  # with {value} and {layer}
    why: str
    mends: str
    falls: bool = False  # whether the value is compared with one over the threshold


def verdicts(curves: xr.Dataset, thresholds: Mapping[str, Threshold], without: tuple[str, ...] = ()) -> list[Verdict]:
    """Of all rules but those named in `without`; the serious ones first."""
    found = [one for rule in RULES if rule.name not in without for one in judged(rule, curves, thresholds)]
    if not found:
        unseen = "" if "logit_std" in curves else ", but no attention was seen"
        return [Verdict(HEALTHY, f"healthy: no threshold is reached{unseen}", np.nan, np.nan, "", None, 1.0, "", "")]
    return sorted(found, key=lambda verdict: not verdict.serious)


def judged(rule: Rule, curves: xr.Dataset, thresholds: Mapping[str, Threshold]) -> list[Verdict]:
    """The verdict of a rule, if there is one."""
    threshold = thresholds[rule.threshold]
    finding = rule.find(curves, {name: each.value for name, each in thresholds.items()})
    if finding is None:
        return []
    hit = finding.severity >= 1
    share = float(hit.mean())
    if share < AGREE or not hit.any():
        return []
    value, layer = float(np.median(finding.value[hit])), int(np.median(finding.layer[hit]))
    said = rule.said.format(value=shown(value), layer=layer)
    where = None if layer < 0 else layer
    level = 1 / threshold.value if rule.falls else threshold.value
    return [Verdict(rule.name, said, value, level, threshold.source, where, share, rule.why, rule.mends)]


def shown(value: float) -> str:
    """Three digits; thousands as one writes them."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}"


def nowhere(values: Array) -> Array:
    """No layer."""
    return np.full(len(values), -1)


def first_of(hits: Array) -> Array:
    """The first place (sample, place) that is hit, -1 if none."""
    return np.where(hits.any(1), hits.argmax(1), -1)


def collapsed(curves: xr.Dataset, limits: Limits) -> Finding | None:
    """Tokens alike at the end; from the layer after which they stay so."""
    if "correlation" not in curves:
        return None
    rho = curves["correlation"].values
    below = ~(rho >= limits["collapse"])
    since = np.where(below.any(1), rho.shape[1] - below[:, ::-1].argmax(1), 0)
    return Finding(rho[:, -1], (rho[:, -1] >= limits["collapse"]).astype(float), since)


def grows(curves: xr.Dataset, limits: Limits) -> Finding:
    """The stream at the end over that after the first block."""
    ratio = end_over_first(curves)
    return Finding(ratio, ratio / limits["stream"], nowhere(ratio))


def dies(curves: xr.Dataset, limits: Limits) -> Finding:
    """The same, the other way."""
    ratio = end_over_first(curves)
    with np.errstate(divide="ignore"):
        return Finding(ratio, 1 / ratio / limits["stream"], nowhere(ratio))


def end_over_first(curves: xr.Dataset) -> Array:
    """Size of the stream, last layer over layer 1: what the first block does to the embedding is another verdict."""
    size = curves["size"].values
    return np.asarray(size[:, -1] / size[:, min(1, size.shape[1] - 1)])


def frozen(curves: xr.Dataset, limits: Limits) -> Finding | None:
    """Logits' standard deviation, mean over heads, over √(2 ln m), in the first block where that is reached."""
    spread = spread_of_logits(curves)
    if spread is None:
        return None
    relative = spread / np.sqrt(2 * np.log(max(2, int(curves.attrs["tokens"]))))
    hits = relative >= limits["frozen"]
    most = np.nanmax(np.where(np.isnan(relative), -np.inf, relative), 1)
    return Finding(most, most / limits["frozen"], first_of(hits) + 1)


def uniform(curves: xr.Dataset, limits: Limits) -> Finding | None:
    """The largest spread of logits of any head in a block below the threshold, from some block to the end."""
    if "logit_std" not in curves:
        return None
    spread = np.nanmax(np.where(np.isnan(curves["logit_std"]), -np.inf, curves["logit_std"]), 2)
    spread = spread[:, np.isfinite(spread).all(0)]
    above = ~(spread < limits["uniform"])
    since = np.where(above.any(1), spread.shape[1] - above[:, ::-1].argmax(1), 0)
    return Finding(spread[:, -1], (spread[:, -1] < limits["uniform"]).astype(float), since + 1)


def spread_of_logits(curves: xr.Dataset) -> Array | None:
    """Mean over heads (sample, block); None where no attention was seen."""
    if "logit_std" not in curves:
        return None
    with np.errstate(invalid="ignore"):
        values = curves["logit_std"].values
        seen = ~np.isnan(values)
        return np.asarray(np.where(seen, values, 0).sum(2) / np.where(seen.any(2), seen.sum(2), np.nan))


def swamped(curves: xr.Dataset, limits: Limits) -> Finding | None:
    """The largest branch of the first block over the stream before it."""
    if "relative_branch" not in curves:
        return None
    ratio = np.nanmax(curves["relative_branch"].values[:, 0], 1)
    return Finding(ratio, ratio / limits["swamped"], np.ones(len(ratio), int))


def vanishing(curves: xr.Dataset, limits: Limits) -> Finding | None:
    """Of the kind of weight that is worst: largest over smallest gradient of its layers, smallest where it vanishes."""
    if "gradient" not in curves or curves.sizes["block"] < 2:
        return None
    ratio, least = gradient_ratio(curves["gradient"].values)
    return Finding(ratio, ratio / limits["gradient"], least + 1)


def exploding(curves: xr.Dataset, limits: Limits) -> Finding | None:
    """Gradient of the stream after the first block over that at the end."""
    if "stream_gradient" not in curves or curves.sizes["layer"] < 3:
        return None
    gradient = curves["stream_gradient"].values
    ratio = gradient[:, 1] / gradient[:, -1]
    return Finding(ratio, np.where(np.isfinite(ratio), ratio, np.inf) / limits["gradient"], np.ones(len(ratio), int))


def massive(curves: xr.Dataset, limits: Limits) -> Finding | None:
    """Largest |x| where it is also far above the median, or above what float16 holds."""
    if "largest" not in curves:
        return None
    largest, typical = curves["largest"].values, curves["typical"].values
    with np.errstate(divide="ignore", invalid="ignore"):
        how_far = np.fmin(largest / limits["activation"], largest / typical / limits["massive"])
    over = np.fmax(how_far, largest / limits["half"])
    return Finding(largest.max(1), over.max(1), over.argmax(1))


def large_logits(curves: xr.Dataset, limits: Limits) -> Finding | None:
    """Largest logit of any head."""
    if "largest_logit" not in curves:
        return None
    most = np.nanmax(np.where(np.isnan(curves["largest_logit"]), -np.inf, curves["largest_logit"]), 2)
    return Finding(most.max(1), most.max(1) / limits["logit"], most.argmax(1) + 1)


def not_finite(curves: xr.Dataset, limits: Limits) -> Finding:
    """The first layer of the stream that holds NaN or ∞."""
    bad = ~np.isfinite(curves["size"].values)
    return Finding(bad.sum(1).astype(float), bad.any(1).astype(float), first_of(bad))


RULES = (
    Rule(
        "not finite", not_finite, "half", "not finite from layer {layer} on",
        "The stream holds NaN or ∞ there.", "Look at what this layer divides by, and at its weights.",
    ),
    Rule(
        "collapsed", collapsed, "collapse", "rank collapse from layer {layer}: mean correlation {value} at the end",
        "Attention averages tokens in every layer; alike tokens give queries and keys no gradient.",
        "A smaller residual strength, a norm before the branch, shaped attention, or fewer layers.",
    ),
    Rule(
        "grows", grows, "stream", "the stream grows {value} times after the first block",
        "Branches multiply the stream; in pre-norm networks late layers then do nothing.",
        "Output projections divided by √(2·layers), or λ² + γ² = 1.",
    ),
    Rule(
        "dies", dies, "stream", "the stream falls to {value} of what it is after the first block",
        "The skip connection takes away more than the branches give.", "A larger λ or γ.", falls=True,
    ),
    Rule(
        "frozen", frozen, "frozen", "attention frozen from block {layer}: logits spread {value} times √(2 ln m)",
        "Softmax over unrelated tokens picks one, and its gradient is zero.",
        "A smaller initializer_range of queries and keys, norms of queries and keys, or a larger temperature.",
    ),
    Rule(
        "uniform", uniform, "uniform", "attention uniform from block {layer}: logits have deviation {value}",
        "Every head takes the mean of what it sees, whatever queries and keys are.",
        "A larger initializer_range of queries and keys, a smaller temperature; first see whether tokens collapse.",
    ),
    Rule(
        "vanishing", vanishing, "gradient", "gradients differ {value} times between layers, least in block {layer}",
        "One learning rate cannot serve layers whose gradients differ that much.",
        "A norm before the branch in the place of one after it, shaped attention, a smaller γ.",
    ),
    Rule(
        "exploding", exploding, "gradient", "the gradient of the stream grows {value} times towards the input",
        "Errors grow on their way back through the layers.", "A smaller γ, or a norm before the branch.",
    ),
    Rule(
        "swamped", swamped, "swamped", "the first block's branch is {value} times the embedding",
        "What the embedding says is forgotten at once; rates tuned for one of them are wrong for the other.",
        "An embedding of standard deviation 1 or times √width, or output projections divided by √(2·layers).",
    ),
    Rule(
        "range", massive, "activation", "largest activation {value} in layer {layer}",
        "Sixteen bits round what is small beside it; float16 ends at 65,504.", "bfloat16 with a norm, or a smaller γ.",
    ),
    Rule(
        "range", large_logits, "logit", "largest logit {value} in block {layer}",
        "Logits of this size saturate attention and have been seen before divergence.",
        "Norms of queries and keys, or a larger temperature.",
    ),
)  # fmt: skip

NAMES = tuple(dict.fromkeys(rule.name for rule in RULES))
