r"""Verdicts on the curves: one rule gives each its grade, its value, its threshold and the layer where it begins.

A rule takes the curves of all samples and returns, by sample, the measured value, its severity (1 at the threshold) and
the layer where it begins. There is a verdict if the median severity over samples is 1 or more. Its value is the median
over samples, the number in the tables and plots. Its share is the part of the samples whose severity is 1 or more. m is
the number of tokens in a sequence.

A verdict past its threshold for broken has the grade broken only if it is certain, or if a second measure agrees.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from limitformer.checking.curves import gradient_of_matrices, gradient_ratio, stream_ratio
from limitformer.checking.thresholds import EVERY_INPUT, FORMAT_VERDICTS, VERDICTS, Threshold, known_values
from limitformer.reports.verdict import ANY, BROKEN, FINE, GRADES, NOTE, WAITS, WATCH, Verdict, number_text

Array = NDArray[np.float64]
Limits = Mapping[str, float]
MOST_NAMED = 3  # kinds of weight that a verdict names
CERTAIN = ("not finite", "dead")  # broken whatever else is measured
EQUAL = 4 * 2.0**-23  # distance of a correlation from 1 that is rounding in float32
ALONE = "It is past the threshold for broken, but no other measure agrees."


class RuleResult(NamedTuple):
    """Result of one rule, by sample: measured value, severity (1 at the threshold), first layer (-1 if none)."""

    value: Array
    severity: Array
    layer: Array
    details: str = ""  # for the sentence


@dataclass(frozen=True)
class Rule:
    """A rule for a verdict of one grade, and its sentence, with {value}, {layer} and {details}."""

    name: str
    grade: str
    find: Callable[[xr.Dataset, Limits], RuleResult | None]
    threshold: str | None
    sentence: str


def verdicts(curves: xr.Dataset, thresholds: Mapping[str, Threshold], skip: tuple[str, ...] = ()) -> list[Verdict]:
    """Return the verdicts of all rules but those named in `skip`, broken ones first; or the one verdict fine."""
    rules = [rule for rule in RULES if rule.name not in skip]
    pairs = [(rule, one) for rule in rules if (one := verdict_of(rule, curves, thresholds))]
    severe = {one.name for _, one in pairs if one.severe}
    agree = len(severe) > 1 or ("frozen" in severe and any(rule.find is narrow for rule, _ in pairs))
    result = [
        one
        # Nothing can train what has no gradient or finite number, or tokens that are equal in float32.
        if not one.severe or agree or one.name in CERTAIN or (one.name == "collapsed" and one.value >= 1 - EQUAL)
        else replace(one, grade=WATCH, why=f"{ALONE} {one.why}")
        for _, one in pairs
        if one.severe or one.name not in severe
    ]
    if result:
        return sorted(result, key=lambda verdict: -GRADES.index(verdict.grade))
    unseen = "" if "logit_std" in curves else ", but no attention was seen"
    return [Verdict(FINE, FINE, f"fine: no threshold is reached{unseen}")]


def verdict_of(rule: Rule, curves: xr.Dataset, thresholds: Mapping[str, Threshold]) -> Verdict | None:
    """Apply one rule; None if the curves lack what it needs, or the median severity is below 1."""
    limits = {name: number for name, each in thresholds.items() if (number := each.at(rule.grade)) is not None}
    result = rule.find(curves, limits)
    if result is None:
        return None
    severity = np.nan_to_num(result.severity, nan=0.0, posinf=np.inf)
    hit = severity >= 1
    if not np.median(severity) >= 1:
        return None
    value, layer = float(np.median(result.value)), int(np.median(result.layer[hit]))
    number, source = (limits[rule.threshold], thresholds[rule.threshold].source) if rule.threshold else (np.nan, "")
    why, mends = WORDS[rule.name]
    return Verdict(
        name=rule.name,
        grade=rule.grade,
        said=rule.sentence.format(value=number_text(value), layer=layer, details=result.details),
        value=value,
        threshold=1 / number if rule.find is dies else number,
        source=source,
        layer=None if layer < 0 else layer,
        share=float(hit.mean()),
        why=why,
        mends=mends,
        severe=rule.grade == BROKEN,
        known=", ".join(f"{m} {number_text(v)}" for m, v in known_values().get(rule.find.__name__, {}).items()),
    )


def nowhere(values: Array) -> Array:
    return np.full(len(values), -1)


def first_of(hits: NDArray[Any]) -> Array:
    """Return the first true place of (sample, place), -1 if none."""
    return np.where(hits.any(1), hits.argmax(1), -1)


def collapsed(curves: xr.Dataset, limits: Limits) -> RuleResult | None:
    """Return the mean correlation at the end, and the layer after which it stays above the threshold."""
    if "correlation" not in curves:
        return None
    rho = curves["correlation"].values
    below = ~(rho >= limits["collapse"])
    since = np.where(below.any(1), rho.shape[1] - below[:, ::-1].argmax(1), 0)
    return RuleResult(rho[:, -1], rho[:, -1] / limits["collapse"], since)


def grows(curves: xr.Dataset, limits: Limits) -> RuleResult:
    """Return the stream at the end over that after the first block, which may change the embedding freely."""
    ratio = end_over(curves, min(1, curves.sizes["layer"] - 1))
    return RuleResult(ratio, ratio / limits["stream"], nowhere(ratio), jump(curves))


def dies(curves: xr.Dataset, limits: Limits) -> RuleResult:
    """Return the value of `grows`, with the inverse severity."""
    ratio = end_over(curves, min(1, curves.sizes["layer"] - 1))
    with np.errstate(divide="ignore"):
        return RuleResult(ratio, 1 / ratio / limits["stream"], nowhere(ratio))


def grows_from_start(curves: xr.Dataset, limits: Limits) -> RuleResult:
    """Return `stream_ratio`, as `design` does."""
    ratio = stream_ratio(curves["size"].values)
    return RuleResult(ratio, ratio / limits["growth"], nowhere(ratio), jump(curves))


def jump(curves: xr.Dataset) -> str:
    """Return words on the block after the first that multiplies the stream by twice what any other does; or nothing."""
    size = curves["size"].median("sample").values
    with np.errstate(divide="ignore", invalid="ignore"):
        factors = size[2:] / size[1:-1]
    if len(factors) < 2 or not np.isfinite(factors).all() or np.max(factors) < 2 * np.sort(factors)[-2]:
        return ""
    return f"; block {int(factors.argmax()) + 2} alone multiplies it by {number_text(float(factors.max()))}"


def dies_from_start(curves: xr.Dataset, limits: Limits) -> RuleResult:
    """Return `stream_ratio`, as `design` does."""
    ratio = stream_ratio(curves["size"].values)
    with np.errstate(divide="ignore"):
        return RuleResult(ratio, limits["decay"] / ratio, nowhere(ratio))


def end_over(curves: xr.Dataset, layer: int) -> Array:
    size = curves["size"].values
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(size[:, -1] / size[:, layer])


def frozen(curves: xr.Dataset, limits: Limits) -> RuleResult | None:
    """Return the spread of logits, mean over heads, over √(2 ln m) in the widest block; the first block over it."""
    if "logit_std" not in curves:
        return None
    spread = mean_over_heads(curves["logit_std"])
    unit = np.sqrt(2 * np.log(max(2, int(curves.attrs["tokens"]))))
    typical = np.where(np.isnan(spread), -np.inf, spread)
    block = int(np.median(typical, 0).argmax())
    there = float(np.median(typical[:, block]))
    details = f"{number_text(there)} in block {block + 1}, {number_text(there / unit)} times √(2 ln m)"
    ratio = typical[:, block] / unit
    return RuleResult(ratio, ratio / limits["frozen"], first_of(spread / unit >= limits["frozen"]) + 1, details)


def narrow(curves: xr.Dataset, limits: Limits) -> RuleResult | None:
    """Return the smallest share of effective tokens, mean over heads, and the first block below the threshold."""
    share = share_of_tokens(curves)
    if share is None:
        return None
    least = np.nanmin(np.where(np.isnan(share), np.inf, share), 1)
    return RuleResult(least, limits["narrow"] / least, first_of(share < limits["narrow"]) + 1)


def uniform(curves: xr.Dataset, limits: Limits) -> RuleResult | None:
    """Return the largest share of effective tokens, mean over heads, and the first block above the threshold."""
    share = share_of_tokens(curves)
    if share is None:
        return None
    most = np.minimum(np.nanmax(np.where(np.isnan(share), -np.inf, share), 1), 1.0)
    since = first_of(share > limits["uniform"]) + 1
    return RuleResult(most, most / limits["uniform"], since, f"{float(np.median(most)):.4f}")


def share_of_tokens(curves: xr.Dataset) -> Array | None:
    """Return effective tokens over tokens seen, mean over heads (sample, block); None without attention."""
    if "tokens_seen" not in curves:
        return None
    return mean_over_heads(curves["effective_tokens"] / curves["tokens_seen"])


def mean_over_heads(curve: xr.DataArray) -> Array:
    """Return the mean (sample, block), NaN in blocks without attention."""
    values = curve.transpose("sample", "block", "head").values
    seen = ~np.isnan(values)
    with np.errstate(invalid="ignore"):
        return np.asarray(np.where(seen, values, 0).sum(2) / np.where(seen.any(2), seen.sum(2), np.nan))


def swamped(curves: xr.Dataset, limits: Limits) -> RuleResult | None:
    """Return the largest branch of the first block over the stream before it."""
    if "relative_branch" not in curves:
        return None
    first = curves["relative_branch"].values[:, 0]
    ratio = np.where(np.isnan(first), -np.inf, first).max(1)
    return RuleResult(ratio, ratio / limits["swamped"], np.ones(len(ratio), int))


def faint(curves: xr.Dataset, limits: Limits) -> RuleResult | None:
    """Return the largest of all branches over the stream that it is added to; branches of zero wait instead."""
    if "relative_branch" not in curves:
        return None
    ratio = curves["relative_branch"].max(("block", "sublayer")).values  # without NaN
    with np.errstate(divide="ignore"):
        return RuleResult(ratio, np.where(ratio > 0, limits["faint"] / ratio, 0.0), nowhere(ratio))


def vanishing(curves: xr.Dataset, limits: Limits) -> RuleResult | None:
    """Return the largest over the smallest gradient by block, for the worst kind of weight, and its weakest block."""
    if "gradient" not in curves or curves.sizes["block"] < 2:
        return None
    gradient = gradient_of_matrices(curves)
    if not gradient.size:
        return None
    ratio, worst, least = gradient_ratio(gradient.values)
    kind, block = (int(np.bincount(each).argmax()) for each in (worst, least))
    times = float(np.median(ratio))
    details = f"differ {number_text(times)} times between blocks, least in block {block + 1}"
    details = details if np.isfinite(times) else f"are zero in block {block + 1} and not in all others"
    return RuleResult(ratio, ratio / limits["gradient"], least + 1, f"{gradient['kind'].values[kind]} {details}")


def exploding(curves: xr.Dataset, limits: Limits) -> RuleResult | None:
    """Return the gradient of the stream after the first block over that at the last layer that the loss reaches.

    The ratio is 1 where no gradient comes back, for example behind a head that starts at zero.
    """
    if "stream_gradient" not in curves or curves.sizes["layer"] < 3:
        return None
    gradient = curves["stream_gradient"].values
    reached = gradient > 0
    last = gradient.shape[1] - 1 - reached[:, ::-1].argmax(1)
    end = gradient[np.arange(len(gradient)), last]
    known = reached.any(1) & (last > 1)
    ratio = np.where(known, gradient[:, 1] / np.where(known, end, 1.0), 1.0)
    return RuleResult(ratio, ratio / limits["gradient"], np.ones(len(ratio), int))


def one_expert(curves: xr.Dataset, limits: Limits) -> RuleResult | None:
    """Return (e − k)/(u − k) in the worst block, and the first block below the threshold.

    e effective experts, u those of unrelated tokens, k those that a token chooses: 0 if all tokens choose alike.
    """
    if "effective_experts" not in curves:
        return None
    effective, unrelated, chosen = (
        curves[name].values for name in ("effective_experts", "unrelated_experts", "chosen_experts")
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        part = np.where(unrelated > chosen * (1 + 1e-6), (effective - chosen) / (unrelated - chosen), np.nan)
    part = np.clip(part, 1e-9, None)
    if np.isnan(part).all(1).any():
        return None
    worst = np.nanargmin(part, 1)[:, None]
    least = np.take_along_axis(part, worst, 1)[:, 0]
    busiest, active, apart, k = (
        float(np.median(np.take_along_axis(curves[name].values, worst, 1)))
        for name in ("busiest_expert", "effective_experts", "unrelated_experts", "chosen_experts")
    )
    details = (
        f"{number_text(active)} effective experts where it is worst, {number_text(apart)} for unrelated tokens, "
        f"{k:g} if all choose alike; the busiest takes {busiest:.0%} of the tokens"
    )
    return RuleResult(least, limits["router"] / least, first_of(part < limits["router"]) + 1, details)


def forgets(curves: xr.Dataset, limits: Limits) -> RuleResult | None:
    """Return the longest half-life of all heads of all blocks."""
    if "longest_memory" not in curves:
        return None
    longest = np.nanmax(curves["longest_memory"].values, 1)
    return RuleResult(longest, limits["memory"] / longest, nowhere(longest))


def ignores_input(curves: xr.Dataset, limits: Limits) -> RuleResult | None:
    """Return the largest agreement of the outputs for two inputs that differ in one condition."""
    if "agreement" not in curves:
        return None
    values = curves["agreement"][curves["condition"].values != EVERY_INPUT]
    if not values.size:
        return None
    most = np.array([float(values.max())])
    names = [str(name) for name in values["condition"].values[values.values >= limits["deaf"]]]
    details = f"{', '.join(names)}: the outputs for two of them agree to {float(most[0]):.5f}"
    return RuleResult(most, most / limits["deaf"], nowhere(most), details)


def constant(curves: xr.Dataset, limits: Limits) -> RuleResult | None:
    """Return the agreement of the outputs for two unrelated inputs."""
    if "agreement" not in curves or EVERY_INPUT not in curves["condition"].values:
        return None
    value = curves["agreement"].sel(condition=[EVERY_INPUT]).values
    return RuleResult(value, value / limits["constant"], nowhere(value), f"those of two agree to {float(value[0]):.5f}")


def equal(curves: xr.Dataset, limits: Limits) -> RuleResult | None:
    """Return a hit for every sample if blocks hold the same draw of a matrix, which `check.equal_layers` names."""
    every = np.ones(curves.sizes["sample"])
    return RuleResult(every, every, nowhere(every), curves.attrs["equal"]) if "equal" in curves.attrs else None


def uneven(curves: xr.Dataset, limits: Limits) -> RuleResult | None:
    """Return the stream of the largest group of tokens over that of the smallest, before the first block."""
    if "group_size" not in curves:
        return None
    sizes = curves["group_size"].isel(layer=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = sizes.max("group").values / sizes.min("group").values
    middle = sizes.median("sample")
    names = middle["group"].values
    large, small = str(names[middle.values.argmax()]), str(names[middle.values.argmin()])
    details = f"{large} are {number_text(float(np.median(ratio)))} times larger than {small} in the stream"
    return RuleResult(ratio, ratio / limits["uneven"], nowhere(ratio), details)


def massive(curves: xr.Dataset, limits: Limits) -> RuleResult | None:
    """Return the largest |x|; severe if it is also far above the median, or above the range of float16."""
    if "largest" not in curves:
        return None
    largest, typical = curves["largest"].values, curves["typical"].values
    with np.errstate(divide="ignore", invalid="ignore"):
        distance = np.fmin(largest / limits["activation"], largest / typical / limits["massive"])
    over = np.fmax(distance, largest / limits["half"])
    return RuleResult(largest.max(1), over.max(1), over.argmax(1))


def large_logits(curves: xr.Dataset, limits: Limits) -> RuleResult | None:
    """Return the largest logit of any head."""
    if "largest_logit" not in curves:
        return None
    most = np.nanmax(np.where(np.isnan(curves["largest_logit"]), -np.inf, curves["largest_logit"]), 2)
    return RuleResult(most.max(1), most.max(1) / limits["logit"], most.argmax(1) + 1)


def not_finite(curves: xr.Dataset, limits: Limits) -> RuleResult:
    """Return the first layer of the stream that holds NaN or ∞."""
    bad = ~np.isfinite(curves["size"].values)
    return RuleResult(bad.sum(1).astype(float), bad.any(1).astype(float), first_of(bad))


def gradient_not_finite(curves: xr.Dataset, limits: Limits) -> RuleResult | None:
    """Return whether the loss is NaN or ∞, or a gradient of a finite loss is ∞."""
    if "loss" not in curves:
        return None
    loss = ~np.isfinite(curves["loss"].values)
    gradient = np.zeros_like(loss)
    for name in ("gradient", "outside_gradient", "stream_gradient"):
        if name in curves:
            gradient |= np.isinf(curves[name].values).reshape(len(loss), -1).any(1)
    bad = loss | gradient
    return RuleResult(bad.astype(float), bad.astype(float), nowhere(bad), "the loss" if loss.any() else "a gradient")


def far_loss(curves: xr.Dataset, limits: Limits) -> RuleResult | None:
    """Return the distance of the loss from ln(vocabulary), in nats."""
    if "loss" not in curves or "chance" not in curves.attrs:
        return None
    loss, chance = curves["loss"].values, float(curves.attrs["chance"])
    away = np.abs(loss - chance)
    middle = float(np.median(loss))
    side = "above" if middle > chance else "below"
    details = (
        f"loss {middle:.4g} is {number_text(abs(middle - chance))} nats {side} that of a uniform guess, {chance:.4g}"
    )
    return RuleResult(away, away / limits["loss"], nowhere(away), details)


def dead(curves: xr.Dataset, limits: Limits) -> RuleResult | None:
    """Count kinds of weight without a gradient that no weight at zero explains."""
    return without_gradient(curves, limits["dead"], waiting=False)


def waiting(curves: xr.Dataset, limits: Limits) -> RuleResult | None:
    """Count kinds of weight without a gradient until another weight, which has one, moves off zero."""
    return without_gradient(curves, limits["dead"], waiting=True)


def without_gradient(curves: xr.Dataset, limit: float, waiting: bool) -> RuleResult | None:
    norms = norms_by_kind(curves)
    if norms is None:
        return None
    kinds, values = norms
    middle = np.nanmedian(values, 1)[:, None]
    with np.errstate(invalid="ignore"):
        hits = (values == 0) | (values < limit * middle)
    hits &= ~redundant(kinds, hits)
    behind = [kind in str(curves.attrs.get("behind_zero", "")).split("\n") for kind in kinds]
    hits &= np.array(behind) if waiting else ~np.array(behind)
    common = [kind for kind, share in zip(kinds, hits.mean(0), strict=True) if share >= 0.5]
    count = hits.sum(1).astype(float)
    return RuleResult(count, count, nowhere(count), dead_text(common, len(kinds), curves, waiting))


def dead_text(kinds: list[str], every: int, curves: xr.Dataset, waiting: bool) -> str:
    more = f" and {len(kinds) - MOST_NAMED} more" if len(kinds) > MOST_NAMED else ""
    named = ", ".join(kinds[:MOST_NAMED]) + more
    if waiting:
        zeros = str(curves.attrs.get("zero_weights", ""))
        return (
            f"{len(kinds)} of {every} kinds of weight have no gradient until {zeros}, zero at first, has moved: {named}"
        )
    blocking = str(curves.attrs.get("blocking", ""))
    cause = f"; held back by {blocking}, which is zero and has no gradient itself" if blocking else ""
    return f"{len(kinds)} of {every} kinds of weight have no gradient: {named}{cause}"


def norms_by_kind(curves: xr.Dataset) -> tuple[list[str], Array] | None:
    """Return kinds of weight, and |∂L/∂W| (sample, kind) over all blocks, without kinds that take no part in the loss.

    A kind that the pass reads on its way through the blocks, and to which no gradient comes back, is cut off: its
    gradient is 0. It takes no part if the loss reaches no weight of its stack (another tower, for example).
    """
    kinds: list[str] = []
    parts: list[Array] = []
    read: list[bool] = []
    if "gradient" in curves:
        each = curves["gradient"].transpose("sample", "kind", "block").values
        kinds += [str(kind) for kind in curves["kind"].values]
        parts.append(np.where(np.isnan(each).all(2), np.nan, np.sqrt(np.nansum(each**2, 2))))
        read += curves["read"].values.tolist() if "read" in curves.coords else [False] * len(curves["kind"])
    if "outside_gradient" in curves:
        kinds += [str(name) for name in curves["outside"].values]
        parts.append(curves["outside_gradient"].transpose("sample", "outside").values)
        first = curves["read_first"].values.tolist() if "read_first" in curves.coords else []
        read += first or [False] * curves.sizes["outside"]
    if not kinds:
        return None
    values = np.concatenate(parts, 1)
    missing = [bool(np.isnan(column).all()) for column in values.T]
    stacks = [kind.partition("*")[0] if "*" in kind else "" for kind in kinds]
    reached = {stack for stack, missed in zip(stacks, missing, strict=True) if stack and not missed}
    cut = [
        missed and was_read and (not stack or stack in reached or not reached)
        for missed, was_read, stack in zip(missing, read, stacks, strict=True)
    ]
    values = np.where(np.isnan(values) & np.array(cut), 0.0, values)
    known = [k for k, column in enumerate(values.T) if not np.isnan(column).any()]
    return ([kinds[k] for k in known], values[:, known]) if known else None


def redundant(kinds: list[str], hits: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return which biases lack a gradient while their weight has one (sample, kind).

    A key's bias moves all logits of a row equally, which softmax ignores: the layer still learns.
    """
    place = {kind: k for k, kind in enumerate(kinds)}
    result = np.zeros_like(hits)
    for kind, k in place.items():
        weight = place.get(f"{kind.removesuffix('bias')}weight")
        if kind.endswith("bias") and weight is not None:
            result[:, k] = ~hits[:, weight]
    return result


RULES = (
    Rule("not finite", BROKEN, not_finite, None, "the stream is NaN or infinite from layer {layer} on"),
    Rule("not finite", BROKEN, gradient_not_finite, None, "{details} is NaN or infinite"),
    Rule("loss", BROKEN, far_loss, "loss", "{details}"),
    Rule("loss", WATCH, far_loss, "loss", "{details}"),
    Rule("dead", BROKEN, dead, "dead", "{details}"),
    Rule(WAITS, WATCH, waiting, "dead", "{details}"),
    Rule(
        "collapsed", BROKEN, collapsed, "collapse",
        "rank collapse from layer {layer}: mean correlation {value} at the end",
    ),
    Rule(
        "collapsed", WATCH, collapsed, "collapse",
        "tokens grow alike from layer {layer}: mean correlation {value} at the end",
    ),
    Rule("grows", BROKEN, grows, "stream", "the stream grows {value} times after the first block{details}"),
    Rule("grows", WATCH, grows_from_start, "growth", "the stream at the end is {value} times the embedding{details}"),
    Rule("dies", BROKEN, dies, "stream", "the stream falls to {value} of what it is after the first block"),
    Rule("dies", WATCH, dies_from_start, "decay", "the stream at the end is {value} of the embedding"),
    Rule("frozen", BROKEN, frozen, "frozen", "attention frozen from block {layer}: logits spread {details}"),
    Rule(
        "frozen", WATCH, narrow, "narrow",
        "attention is narrow from block {layer}: it takes in {value} of the tokens it sees",
    ),
    Rule(
        "uniform", WATCH, uniform, "uniform",
        "attention is uniform from block {layer}: it takes in {details} of the tokens it sees",
    ),
    Rule("vanishing", BROKEN, vanishing, "gradient", "gradients of {details}"),
    Rule("vanishing", WATCH, vanishing, "gradient", "gradients of {details}"),
    Rule(
        "exploding", BROKEN, exploding, "gradient",
        "the gradient of the stream grows {value} times towards the input",
    ),
    Rule(
        "exploding", WATCH, exploding, "gradient",
        "the gradient of the stream grows {value} times towards the input",
    ),
    Rule("router", BROKEN, one_expert, "router",
        "the router sends tokens to the same experts from block {layer}: {details}",
    ),
    Rule("router", WATCH, one_expert, "router", "the router favours some experts from block {layer}: {details}"),
    Rule(
        "memory", BROKEN, forgets, "memory",
        "no state-space head remembers more than one token: the longest half-life, in tokens, is {value}",
    ),
    Rule("deaf", WATCH, ignores_input, "deaf", "the output hardly depends on {details}"),
    Rule("constant", WATCH, constant, "constant", "the output hardly depends on the input: {details}"),
    Rule("equal", WATCH, equal, None, "blocks begin with equal weights: {details}"),
    Rule("faint", WATCH, faint, "faint", "no branch of any block is more than {value} of the stream"),
    Rule("uneven", WATCH, uneven, "uneven", "{details}"),
    Rule("swamped", WATCH, swamped, "swamped", "the first block's branch is {value} times the embedding"),
    Rule("range", WATCH, massive, "activation", "largest activation {value} in layer {layer}"),
    Rule("range", WATCH, large_logits, "logit", "largest logit {value} in block {layer}"),
)  # fmt: skip

WORDS = {  # by name: why it matters, and the usual fix
    "not finite": (
        "A number there is NaN or ∞.",
        "Look at what that layer divides by, and at its weights.",
    ),
    "loss": (
        "Before training a network knows no more than a uniform guess; a larger loss means that its logits are too "
        "large.",
        "A smaller standard deviation of the output head, or of the embedding that it is tied to; muP and T5 divide by "
        "the width or its root.",
    ),
    "dead": (
        "What has no gradient does not learn.",
        "See whether a factor in front of it is zero, constant or cancelled.",
    ),
    WAITS: (
        "A weight that starts at zero holds back what stands behind it for a step or more; adapters and adaLN-Zero do "
        "so on purpose.",
        "None is needed.",
    ),
    "collapsed": (
        "Attention averages tokens in every layer; tokens that are alike give queries and keys no gradient.",
        "A smaller residual strength, a norm before the branch if it has none, shaped attention, or fewer layers.",
    ),
    "grows": (
        "Branches multiply the stream; in pre-norm networks late layers then do little.",
        "Output projections divided by √(2·layers), a larger embedding, or λx + γf for x + f with λ² + γ² = 1.",
    ),
    "dies": ("The skip connection takes away more than the branches give.", "A larger λ or γ."),
    "frozen": (
        "Softmax picks few of the tokens, and its gradient is near zero.",
        "A smaller initializer_range of queries and keys, norms of queries and keys, or a larger temperature.",
    ),
    "uniform": (
        "Every head takes the mean of what it sees, whatever queries and keys are.",
        "A larger initializer_range of queries and keys, a smaller temperature; first see whether tokens collapse.",
    ),
    "vanishing": (
        "One learning rate cannot serve layers whose gradients differ that much.",
        "A norm before the branch instead of after it, shaped attention, a smaller γ.",
    ),
    "exploding": (
        "Errors grow on their way back through the layers.",
        "A smaller γ, or a norm before the branch if it has none.",
    ),
    "router": (
        "Tokens that are alike are routed alike: the other experts get no tokens, and no gradient.",
        "See whether tokens collapse; a norm or noise before the router, a balancing loss or bias, or first layers "
        "without experts.",
    ),
    "memory": (
        "The state of each head halves within a token, so it passes nothing on.",
        "The published start: Δ log-uniform between 0.001 and 0.1 (dt_bias is its inverse softplus), A between 1 and "
        "16; see whether a second initialisation has overwritten it.",
    ),
    "deaf": (
        "What reads that input adds almost nothing to the stream; training from scratch ignores it for long.",
        "A larger standard deviation of cross-attention or of the projection of that input, or a smaller stream.",
    ),
    "equal": (
        "Copies of one block start as one function, and are trained apart.",
        "Build each block by itself; nn.TransformerEncoder and copy.deepcopy copy one.",
    ),
    "constant": (
        "What all inputs share, such as biases or positions, is all that is left of them at the end.",
        "See whether tokens collapse; a larger standard deviation of the embedding, or smaller positions and biases.",
    ),
    "faint": (
        "The stream is so large that the blocks hardly change it, and a step of the optimiser hardly changes what they "
        "add.",
        "A smaller embedding (standard deviation 1/√width before a factor √width), or larger branches; LayerScale "
        "begins so on purpose.",
    ),
    "uneven": (
        "Attention and norms follow the larger group; the smaller one is noise beside it.",
        "Scale one of the two embeddings, or a norm after the projection of the smaller or larger one.",
    ),
    "swamped": (
        "The first block overwrites the embedding; a rate tuned for one of them is wrong for the other.",
        "An embedding of standard deviation 1 or times √width, or output projections divided by √(2·layers).",
    ),
    "range": (
        "Sixteen bits round away what is small beside it, float16 ends at 65,504, and such logits saturate attention.",
        "bfloat16 with a norm, norms of queries and keys, a larger temperature, or a smaller γ.",
    ),
}


def failed(verdicts: list[Verdict], names: tuple[str, ...]) -> list[Verdict]:
    """Return the verdicts that fail a check for these names.

    A verdict's name asks for its worst threshold: collapsed fails past that for broken; swamped, which is never broken,
    at watch. `broken` asks for any verdict of that grade, `watch` and `any` for every verdict but `waits for zeros`.
    """
    worst = {name: BROKEN if any(r.grade == BROKEN for r in RULES if r.name == name) else WATCH for name in VERDICTS}
    worst |= dict.fromkeys(FORMAT_VERDICTS, WATCH)

    def fails(one: Verdict) -> bool:
        if (WATCH in names or ANY in names) and one.name != WAITS and one.grade != NOTE:
            return True
        if one.grade == BROKEN and BROKEN in names:
            return True
        return one.name in names and (one.severe or worst[one.name] == WATCH)

    return [one for one in verdicts if one.name in worst and fails(one)]
