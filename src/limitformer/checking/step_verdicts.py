r"""Verdicts on the first training steps: the learning rates at which the loss falls, and what the steps move.

A loss *falls* in a network if it is lower after the last step than before the first. With the same batch at every step
it is the loss of that batch, which the steps lower if they can lower anything. A huge step can memorise a few tokens
and ruin the network for all others: SGD at a rate of 1e30 may bring the loss of ten tokens to 0. So the loss of a batch
that no step sees must not explode meanwhile. Other batches have losses of their own, so that with them the loss of the
unseen batch is compared, the same one before and after.

A share of networks has Wilson's interval, of approximately 95 % before a rate is selected. With few networks it is
wide: all of 8 gives 68 to 100 %. A verdict
therefore counts the networks, says whether they are enough for "nine of ten", and how many would be.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from limitformer.checking.curves import place_of
from limitformer.checking.step_thresholds import (
    ACTIVATION,
    CLIPPED,
    EXPLODES,
    FASTEST,
    LOGITS,
    MUON,
    NOTE,
    RATE,
    START,
    STEP_THRESHOLDS,
    STILL,
    UNSEEN,
    UNTRAINED,
    WAKES,
)
from limitformer.checking.thresholds import BROKEN, FINE, WATCH
from limitformer.checking.verdicts import SIGNS, Verdict, number_text
from limitformer.results.outcomes import wilson

Array = NDArray[np.float64]
SAME = "same"  # of `batches`
GIVEN = "given"  # by the user, and not drawn
NAMED = 4  # kinds of weight in a sentence
GRADES = (FINE, NOTE, WATCH, BROKEN)


@dataclass(frozen=True)
class StepVerdict(Verdict):
    """One statement about the first training steps; its grade can also be note, which describes only.

    Attributes:
        rate: the learning rate that it refers to; NaN for a verdict on all rates.
    """

    rate: float = np.nan

    @property
    def sign(self) -> str:
        """✓ for fine, · for a note, ! for watch, ✗ for broken."""
        return "·" if self.grade == NOTE else SIGNS[self.grade]


def limit(name: str) -> float:
    """Return the number of a threshold."""
    threshold = STEP_THRESHOLDS[name]
    number = threshold.broken if threshold.broken is not None else threshold.watch
    assert number is not None
    return number


# Numbers by rate


def compared_loss(data: xr.Dataset) -> str:
    """Return the name of the loss that is compared: that of the batch if it is the same at every step."""
    return "loss" if data.attrs["batches"] == SAME else "loss_unseen"


def by_rate(data: xr.Dataset) -> xr.Dataset:
    """Return the counts of networks whose loss falls, and explodes, and medians over samples, each by rate.

    A loss that is not finite neither falls nor counts as finite in a median: it is infinite there.
    """
    loss = data[compared_loss(data)].transpose("rate", "sample", "step").values
    count = loss.shape[1]
    first, last = loss[:, :, 0], loss[:, :, -1]
    unseen = exploded(data["loss_unseen"].transpose("rate", "sample", "step").values)
    alone = last < first  # a comparison with NaN is false
    falls = (alone & ~unseen if compared_loss(data) == "loss" else alone).sum(1)
    low, high = wilson(falls, count)
    result: dict[str, Any] = {
        "falls": falls,
        "share": falls / count,
        "low": low,
        "high": high,
        "explodes": exploded(loss).sum(1),
        "falls_alone": alone.sum(1),
        "unseen_explodes": unseen.sum(1),
        **ends("loss", data["loss"]),
        **ends("unseen", data["loss_unseen"]),
        "gradient_first": middle(data["gradient_norm"].values[:, :, 0]),
        "clipping_least": least(data["clipping"].values),
        "output_change": middle(data["output_change"].values[:, :, -1]),
    }
    if "stream" in data:
        change, most = (
            data[name].transpose("rate", "sample", "step", "layer").values[:, :, -1]
            for name in ("stream_change", "largest")
        )
        result |= {"stream_change": middle(change[:, :, -1]), "largest": largest(most)}
    if "largest_logit" in data:
        logits = data["largest_logit"].transpose("rate", "sample", "step", ...).values[:, :, -1]
        result["largest_logit"] = largest(logits.reshape(*logits.shape[:2], -1))
    return xr.Dataset({name: ("rate", values) for name, values in result.items()}, {"rate": data["rate"].values})


def ends(name: str, loss: xr.DataArray) -> dict[str, Array]:
    """Return the medians of a loss before the first step and after the last; that of a network that diverged is ∞."""
    values = loss.transpose("rate", "sample", "step").values
    finite = np.where(np.isnan(values), np.inf, values)
    return {f"{name}_first": middle(finite[:, :, 0]), f"{name}_last": middle(finite[:, :, -1])}


def exploded(loss: Array) -> NDArray[np.bool_]:
    """Return whether a loss (…, step) is not finite at some step, or exceeds a multiple of a positive start."""
    start = loss[..., :1]
    with np.errstate(invalid="ignore"):
        above = (start > 0) & (loss > limit("explosion") * start)
    return np.asarray((~np.isfinite(loss) | above).any(-1))


def middle(values: Array, axis: int = 1) -> Array:
    """Return the median over samples; a network that diverged counts as infinite; NaN if no network has a number."""
    with np.errstate(all="ignore"):
        middles = np.median(np.where(np.isnan(values), np.inf, values), axis)
    return np.where(np.isnan(values).all(axis), np.nan, middles)


def quantile(values: Array, share: float, axis: int = 1) -> Array:
    """Return a quantile over samples, one of the values, with the conventions of `middle`."""
    numbers = np.where(np.isnan(values), np.inf, values)
    ends = np.quantile(numbers, share, axis=axis, method="inverted_cdf")
    return np.where(np.isnan(values).all(axis), np.nan, ends)


def largest(values: Array) -> Array:
    """Return the median over samples of the largest of the last dimension, which may be partly unknown."""
    known = np.where(np.isnan(values), -np.inf, values).max(-1)
    return middle(np.where(np.isneginf(known), np.nan, known))


def least(factors: Array) -> Array:
    """Return the median over samples of the smallest factor of all steps (rate, sample, step)."""
    known = np.where(np.isnan(factors), np.inf, factors).min(-1)
    return middle(np.where(np.isinf(known), np.nan, known))


def falling(table: xr.Dataset) -> NDArray[np.bool_]:
    return np.asarray(table["share"].values >= limit("falls"))


def sound_rate(table: xr.Dataset) -> int | None:
    """Return the place of the largest rate of the first run of rates at which the loss falls; None if there is none.

    A larger rate at which it falls again, above one at which it does not, is not sound.
    """
    falls, order = falling(table), np.argsort(table["rate"].values, kind="stable")
    run: int | None = None
    for k in order:
        if falls[k]:
            run = int(k)
        elif run is not None:
            break
    return run


def forgets(table: xr.Dataset, place: int) -> bool:
    """Whether the stream changes by a multiple of its size at which nothing of the start is left."""
    return "stream_change" in table and bool(table["stream_change"].values[place] >= limit("stream"))


def stated_rate(table: xr.Dataset) -> int:
    """Return the place of the rate that verdicts on weights refer to: the largest sound one, else the smallest."""
    sound = sound_rate(table)
    return int(np.argmin(table["rate"].values)) if sound is None else sound


def enough_for(share: float) -> int:
    """Return how many networks suffice to show that a share is at least this, if all of them have it.

    >>> enough_for(0.9)
    35
    """
    return next(count for count in range(1, 10**6) if wilson(count, count)[0] >= share)


# Verdicts


def step_verdicts(data: xr.Dataset) -> list[StepVerdict]:
    """Return the verdicts on the dataset of `simulate_steps`, in the order of `STEP_VERDICTS`."""
    table = by_rate(data)
    if start := start_verdict(data):
        return [start]
    place = stated_rate(table)
    at, count = data.isel(rate=place), data.sizes["sample"]
    rate = float(table["rate"][place])
    rules = (fastest_verdict, still_verdict, clipped_verdict, wakes_verdict, logits_verdict, activation_verdict)
    found = [rate_verdict(data, table), explosion_verdict(table, count), unseen_verdict(data, table)]
    found += [rule(at, rate) for rule in rules]
    found[5:5] = [untrained_verdict(data), muon_verdict(data)]
    return [each for each in found if each is not None]


def start_verdict(data: xr.Dataset) -> StepVerdict | None:
    """Return the verdict on networks that have no finite loss before the first step."""
    bad = ~np.isfinite(data[compared_loss(data)].isel(step=0, rate=0).values)
    if not bad.mean() > limit("exploded"):
        return None
    return StepVerdict(
        START,
        BROKEN,
        f"the loss is not finite before the first step, in {bad.sum()} of {len(bad)} networks",
        value=float(bad.mean()),
        threshold=limit("exploded"),
        source=STEP_THRESHOLDS["exploded"].source,
        share=float(bad.mean()),
        why="No step can be computed from such a loss.",
        mends="See what limitformer check says about this network.",
    )


def rate_verdict(data: xr.Dataset, table: xr.Dataset) -> StepVerdict:
    """Return the verdict on the largest rate at which the loss falls in nine of ten networks.

    A drawn unseen batch has nothing to learn, and so cannot show that a rate is broken.
    """
    steps, place = data.sizes["step"] - 1, sound_rate(table)
    loss, wanted = compared_loss(data), limit("falls")
    what, within = LOSSES[loss], f"within {steps} step{'' if steps == 1 else 's'}"
    common: dict[str, Any] = {"threshold": wanted, "source": STEP_THRESHOLDS["falls"].source, "why": WHY_RATE[loss]}
    if place is not None:
        return sound_verdict(data, table, place, f"{what} falls {within}", common)
    best, single = int(np.argmax(table["share"].values)), table.sizes["rate"] == 1
    open_ = "" if float(table["high"].max()) < wanted else too_few(data.sizes["sample"])
    rate, networks = rate_text(table, best), counted(table, best, data.sizes["sample"])
    sentence = f"{what} falls {within} at no rate in nine of ten networks, at best at {rate} in {networks}{open_}"
    if single:
        sentence = (
            f"{what} does not fall {within} at a rate of {rate} in nine of ten networks, but in {networks}{open_}"
        )
    untold = loss != "loss" and data.attrs.get("unseen") != GIVEN
    return StepVerdict(
        RATE, NOTE if untold else BROKEN, sentence, value=float(table["share"][best]),
        share=float(table["share"][best]), rate=float(table["rate"][best]),
        mends=OTHER_BATCH if untold else OTHER_RATES, **common,
    )  # fmt: skip


def sound_verdict(data: xr.Dataset, table: xr.Dataset, place: int, what: str, common: dict[str, Any]) -> StepVerdict:
    """Return the verdict on rates at which the loss falls; `place` is that of the largest sound one."""
    order, count = np.argsort(table["rate"].values, kind="stable").tolist(), data.sizes["sample"]
    at = order.index(place)
    above, below = order[at + 1 : at + 2], order[:at][-1:]
    edge, forgotten = not above and len(order) > 1, forgets(table, place)
    parts = [f"{what} {'up to' if len(order) > 1 else 'at'} a rate of {rate_text(table, place)}, in "
             f"{counted(table, place, count)}"]  # fmt: skip
    if forgotten:
        change = number_text(float(table["stream_change"][place]))
        parts.append(f"there the stream changes by {change} times its size")
    parts += [
        f"at {rate_text(table, k)} in {int(table['falls'][k])} of {count}{unseen_ruined(table, k)}"
        for k in (*above, *below)
    ]
    parts += ["no larger rate was tried"] if edge else []
    again = [rate_text(table, k) for k in order[at + 1 :] if falling(table)[k]]
    parts += [f"it falls again at {', '.join(again)}, beyond rates at which it does not"] if again else []
    certain = float(table["low"][place]) >= limit("falls")
    certain = certain and all(float(table["high"][k]) < limit("falls") for k in above)
    return StepVerdict(
        RATE, WATCH if edge or forgotten else FINE, "; ".join(parts) + ("" if certain else too_few(count)),
        value=float(table["rate"][place]), share=float(table["share"][place]), rate=float(table["rate"][place]),
        mends=SMALLER if forgotten else "Larger rates show where it stops." if edge else "",
        **common | {"why": f"{common['why']} {ESTIMATE}"},
    )  # fmt: skip


SMALLER = "A smaller rate or a warm-up: little of the initialisation is left at this one."
ESTIMATE = "The largest rate is a rough estimate: begin at a tenth of it, and tune."
OTHER_BATCH = "An unseen batch with something to learn: unseen=…"
OTHER_RATES = "Other rates; the loss by step shows on which side they are."
LOSSES = {"loss": "the loss of the batch", "loss_unseen": "the loss of an unseen batch"}
WHY_RATE = {
    "loss": "A rate at which the loss of one batch does not fall even on that batch is too large to begin with.",
    "loss_unseen": "The batches differ, so that their losses cannot be compared; those of one unseen batch can. An "
    "unseen batch of random ids shows only the way to a uniform guess.",
}


def counted(table: xr.Dataset, place: int, count: int) -> str:
    """Return such as "7 of 8 networks (95 %: 53 to 98 %)"."""
    low, high = float(table["low"][place]), float(table["high"][place])
    networks = f"network{'' if count == 1 else 's'}"
    return f"{int(table['falls'][place])} of {count} {networks} (95 %: {100 * low:.0f} to {100 * high:.0f} %)"


def unseen_ruined(table: xr.Dataset, place: int) -> str:
    """Return in how many more networks the loss falls, but that of an unseen batch explodes; "" if in none."""
    more = int(table["falls_alone"][place] - table["falls"][place])
    return f" (in {more} more that of an unseen batch explodes)" if more else ""


def too_few(count: int) -> str:
    """Return the remark that the networks do not settle whether nine of ten do."""
    needed = enough_for(limit("falls"))
    if count >= needed:
        return f"; {count} networks leave open whether that is nine of ten"
    return f"; {count} network{' is' if count == 1 else 's are'} too few to tell nine of ten: take {needed} or more"


def rate_text(table: xr.Dataset, place: int) -> str:
    return number_text(float(table["rate"][place]))


def explosion_verdict(table: xr.Dataset, count: int) -> StepVerdict | None:
    """Return the verdict on the smallest rate at which the loss explodes."""
    share = table["explodes"].values / count
    order = np.argsort(table["rate"].values, kind="stable")
    places = [int(k) for k in order if share[k] > limit("exploded")]
    if not places:
        return None
    place = places[0]
    networks = f"{int(table['explodes'][place])} of {count} network{'' if count == 1 else 's'}"
    larger = [int(k) for k in order if table["rate"].values[k] > table["rate"].values[place]]
    above = " and above" if larger and set(larger) <= set(places) else ""
    return StepVerdict(
        EXPLODES, BROKEN if place == order[0] else NOTE,
        f"the loss explodes at a rate of {rate_text(table, place)}{above}, in {networks}: it is not "
        f"finite, or above {limit('explosion'):g} times its start",
        value=float(table["rate"][place]), threshold=limit("explosion"), source=STEP_THRESHOLDS["explosion"].source,
        share=float(share[place]), rate=float(table["rate"][place]),
        why="A step went so far that the gradient no longer described the loss.",
        mends="Smaller rates, a warm-up, or clipping." if place == order[0] else "",
    )  # fmt: skip


def unseen_verdict(data: xr.Dataset, table: xr.Dataset) -> StepVerdict | None:
    """Return the verdict on rates at which the loss falls on the batch of the steps and explodes on an unseen one."""
    count = data.sizes["sample"]
    ruined = np.flatnonzero((table["falls_alone"].values >= limit("falls") * count) & ~falling(table))
    if not len(ruined):
        return None
    place = int(ruined[np.argmin(table["rate"].values[ruined])])
    sound = sound_rate(table) is not None
    return StepVerdict(
        UNSEEN, NOTE if sound else WATCH,
        f"at a rate of {rate_text(table, place)} the loss falls on the batch of the steps only: that of an unseen "
        f"batch goes from {number_text(float(table['unseen_first'][place]))} to "
        f"{number_text(float(table['unseen_last'][place]))}",
        value=float(table["unseen_last"][place] / table["unseen_first"][place]), threshold=limit("explosion"),
        source=STEP_THRESHOLDS["explosion"].source, share=float(table["unseen_explodes"][place]) / count,
        rate=float(table["rate"][place]),
        why="A large step can memorise a few tokens while it ruins the network for all others.",
        mends="" if sound else "Smaller rates, or more tokens.",
    )  # fmt: skip


def moved(data: xr.Dataset) -> NDArray[np.bool_]:
    """Return whether each weight has changed in most networks (step, weight), from `weight_change` at one rate.

    A weight that was zero has an infinite relative change once it moves.
    """
    change = data["weight_change"].transpose("sample", "step", "weight").values
    with np.errstate(invalid="ignore"):
        return np.asarray((change > 0).mean(0) > 0.5)


def matrices(data: xr.Dataset) -> NDArray[np.bool_]:
    return np.asarray(data["matrix"].values.astype(bool))


def fastest_verdict(data: xr.Dataset, rate: float) -> StepVerdict | None:
    """Return the matrix that changes most in the first step, over the median matrix, and the largest effect."""
    change = middle(data["weight_change"].transpose("sample", "step", "weight").values[:, 1], 0)
    names = data["weight"].values
    places = np.flatnonzero(matrices(data) & np.isfinite(change) & (change > 0))
    if len(places) < 2:
        return None
    most = places[np.argmax(change[places])]
    ratio = float(change[most] / np.median(change[places]))
    effects = middle(data["update_effect"].transpose("sample", "step", "weight").values[:, 1], 0)
    known = np.flatnonzero(np.isfinite(effects) & (effects > 0))
    effect = ""
    if len(known):
        widest = known[np.argmax(effects[known])]
        effect = f"; the largest effect on an output is that of {names[widest]}, {number_text(float(effects[widest]))}"
    watch = ratio > limit("fastest")
    return StepVerdict(
        FASTEST, WATCH if watch else NOTE,
        f"{names[most]} moves most in the first step at a rate of {number_text(rate)}: by "
        f"{percent(float(change[most]))} of its size, {number_text(ratio)} times the median matrix{effect}",
        value=ratio, threshold=limit("fastest"), source=STEP_THRESHOLDS["fastest"].source,
        layer=block_of(str(names[most])), rate=rate,
        why="A rate that suits the other matrices is too large for one that moves that much faster." if watch else "",
        mends="A parameter group with a smaller rate for it, or a larger initial size." if watch else "",
    )  # fmt: skip


def percent(share: float) -> str:
    return f"{number_text(100 * share)} %"


def block_of(name: str) -> int | None:
    """Return the number of the block of a weight from 1, None for one outside the blocks."""
    block = place_of(name)[1]
    return None if block < 0 else block + 1


def still_verdict(data: xr.Dataset, rate: float) -> StepVerdict | None:
    """Return the order in which matrices begin to move, if not all of them move in the first step."""
    moves, is_matrix = moved(data), matrices(data)
    names, steps = data["weight"].values, data.sizes["step"] - 1
    left_out = without_rule(data.expand_dims("rate"))
    considered = is_matrix & ~left_out
    first = np.where(moves.any(0), moves.argmax(0), -1)
    late = considered & (first != 1)
    if not late.any():
        return None
    never = considered & (first < 0)
    groups = [
        f"in the {ordinal(step)} step: {kinds(names[considered & (first == step)])}"
        for step in range(1, steps + 1)
        if (considered & (first == step)).any()
    ]
    if never.any():
        groups.append(f"in none of the {steps}: {kinds(names[never])}")
    zero = considered & (data["weight_size"].values == 0)
    zeros = [f"{kinds(names[those])} ({ordinal(step)} step)" for step in range(1, steps + 1)
             if (those := zero & (first == step)).any()]  # fmt: skip
    return StepVerdict(
        STILL, WATCH if never.any() else NOTE,
        f"{int(late.sum())} of {int(considered.sum())} matrices do not move in the first step at a rate of "
        f"{number_text(rate)}. They begin to move {'; '.join(groups)}"
        + (f"; zero before: {', '.join(zeros)}" if zeros else ""),
        value=float(late.sum()), rate=rate,
        why="A matrix behind a zero matrix has no gradient until that one has moved; weight decay does not count."
        + (" Those that never move may need more steps, or have no gradient at all." if never.any() else ""),
        mends="More steps, to see whether they ever do." if never.any() else "",
    )  # fmt: skip


def ordinal(step: int) -> str:
    return {1: "first", 2: "second", 3: "third"}.get(step, f"{step}th")


def kinds(names: Iterable[Any]) -> str:
    """Return the kinds of weight with their numbers: "h.*.c_proj.weight (12), lm_head.weight"."""
    counts: dict[str, int] = {}
    for name in names:
        kind = place_of(str(name))[0]
        counts[kind] = counts.get(kind, 0) + 1
    every = [f"{kind} ({count})" if count > 1 else kind for kind, count in counts.items()]
    more = len(every) - NAMED
    return ", ".join(every[:NAMED]) + (f" and {more} other kind{'' if more == 1 else 's'}" if more > 0 else "")


def without_rule(data: xr.Dataset) -> NDArray[np.bool_]:
    """Return whether each weight has a gradient at some step of every network, and yet changes at no rate and step."""
    gradient = data["weight_gradient"].transpose("rate", "sample", "step", "weight").values
    change = data["weight_change"].transpose("rate", "sample", "step", "weight").values
    with np.errstate(invalid="ignore"):
        has_gradient = np.all((gradient > 0).any(2), axis=(0, 1))
        return np.asarray(has_gradient & ~(change > 0).any((0, 1, 2)))


def untrained_verdict(data: xr.Dataset) -> StepVerdict | None:
    """Return the weights that have a gradient, but that no step changes at any rate."""
    left_out = without_rule(data)
    if not left_out.any():
        return None
    count = int(left_out.sum())
    return StepVerdict(
        UNTRAINED, WATCH,
        f"{count} weight{' has a gradient but does' if count == 1 else 's have a gradient but do'} not change at any "
        f"rate: {kinds(data['weight'].values[left_out])}",
        value=float(count),
        why="The optimiser leaves them out, gives them a rate of zero, or the changes are below the rounding of their "
        "numbers.",
        mends="See whether the parameter groups hold every parameter.",
    )  # fmt: skip


def muon_verdict(data: xr.Dataset) -> StepVerdict | None:
    """Return the tables and heads that Muon updates."""
    names = str(data.attrs.get("muon_outside", ""))
    if not names:
        return None
    return StepVerdict(
        MUON, WATCH, f"Muon updates {names}, which look up tokens or give the output",
        value=float(len(names.split(", "))),
        why="Muon is made for hidden matrices; tables and heads belong to AdamW (github.com/KellerJordan/Muon).",
        mends="A second optimiser, AdamW, for them.",
    )  # fmt: skip


def clipped_verdict(data: xr.Dataset, rate: float) -> StepVerdict | None:
    """Return the steps at which gradients are clipped, and the factors."""
    factor = middle(data["clipping"].transpose("sample", "step").values, 0)[:-1]
    with np.errstate(invalid="ignore"):
        steps = np.flatnonzero(factor < 1)
    if not len(steps):
        return None
    smallest = float(factor[steps].min())
    every = "every step" if len(steps) == len(factor) else f"step {listed(steps + 1)}"
    factors = ", ".join(number_text(float(each)) for each in factor[steps][:NAMED]) + (
        " …" if len(steps) > NAMED else ""
    )
    return StepVerdict(
        CLIPPED, NOTE,
        f"clipping acts at {every} at a rate of {number_text(rate)}: it multiplies the gradients by {factors}",
        value=smallest, rate=rate,
        why="Under SGD it scales the step. The first step of Adam, Lion and Muon does not depend on the scale of the "
        "gradient; later ones depend on its changes. A larger batch has a smaller gradient, which is clipped less.",
    )  # fmt: skip


def listed(steps: Sequence[int] | NDArray[np.int64]) -> str:
    return ", ".join(str(int(each)) for each in steps)


def wakes_verdict(data: xr.Dataset, rate: float) -> StepVerdict | None:
    """Return the branches that are zero before the first step, and the steps after which they are not."""
    if "branch" not in data:
        return None
    size = data["branch"].transpose("sample", "step", "block", "sublayer").values
    zero = (size[:, 0] == 0).all(0)
    if not zero.any():
        return None
    with np.errstate(invalid="ignore"):
        awake = ((size > 0).mean(0) > 0.5)[:, zero]  # (step, branch)
    first = np.where(awake.any(0), awake.argmax(0), -1)
    parts = [f"{int((first == step).sum())} after the {ordinal(step)} step" for step in range(1, len(awake))
             if (first == step).any()]  # fmt: skip
    parts += [f"{int((first < 0).sum())} never"] if (first < 0).any() else []
    every = int(zero.sum())
    return StepVerdict(
        WAKES, NOTE,
        f"{every} of {zero.size} branches are zero before the first step; at a rate of {number_text(rate)} they begin "
        f"to move: {', '.join(parts)}",
        value=float(every), rate=rate,
        why="Before the first step such a network shows nothing of its blocks: a check of it measures the identity.",
    )  # fmt: skip


def logits_verdict(data: xr.Dataset, rate: float) -> StepVerdict | None:
    """Return the block whose largest attention logit passes the threshold during the steps."""
    if "largest_logit" not in data:
        return None
    logits = data["largest_logit"].transpose("sample", "step", "block", "head").values
    most = middle(np.where(np.isnan(logits).all(-1), np.nan, np.fmax.reduce(logits, -1)), 0)  # (step, block)
    return passing(
        LOGITS, "logit", most, most, rate, "block", 1,
        "the largest attention logit grows from {before} to {after} in block {place} at a rate of {rate}, after {step}",
        "Softmax then picks one token, and its gradient is near zero.",
        "A smaller rate for queries and keys, norms of queries and keys, or QK-clip.",
    )  # fmt: skip


def activation_verdict(data: xr.Dataset, rate: float) -> StepVerdict | None:
    """Return the layer whose largest activation grows most, if by more than the threshold."""
    if "largest" not in data:
        return None
    most = middle(data["largest"].transpose("sample", "step", "layer").values, 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        growth = most / most[:1]
    return passing(
        ACTIVATION, "activation", growth, most, rate, "layer", 0,
        "the largest activation grows from {before} to {after} in layer {place} at a rate of {rate}, after {step}",
        "Sixteen bits round away what is small beside it, and later steps start from there.",
        "A smaller rate, a warm-up, or a norm before the branch.",
    )  # fmt: skip


def passing(
    name: str, threshold: str, values: Array, shown: Array, rate: float, place: str, begin: int, sentence: str,
    why: str, mends: str,
) -> StepVerdict | None:  # fmt: skip
    """Return a verdict if values (step, place) are above a threshold after a step, and were not before the first."""
    with np.errstate(invalid="ignore"):
        above = (values > limit(threshold)) & ~(values[:1] > limit(threshold))
    if not above.any():
        return None
    step = int(above.any(1).argmax())
    where = int(np.argmax(np.where(above[step], values[step], -np.inf)))
    after = f"{step} step{'' if step == 1 else 's'}"
    text = sentence.format(
        before=number_text(float(shown[0, where])), after=number_text(float(shown[step, where])), place=where + begin,
        rate=number_text(rate), step=after,
    )  # fmt: skip
    return StepVerdict(
        name, WATCH, text, value=float(values[step, where]), threshold=limit(threshold),
        source=STEP_THRESHOLDS[threshold].source, layer=where + begin, rate=rate, why=why, mends=mends,
    )  # fmt: skip


def failed_steps(verdicts: Sequence[StepVerdict], names: tuple[str, ...]) -> list[StepVerdict]:
    """Return the verdicts that fail for these names: of the grade watch or broken, and named or of a named grade."""
    bad = [one for one in verdicts if one.grade in (WATCH, BROKEN)]
    wanted = {WATCH: (WATCH, BROKEN), "any": (WATCH, BROKEN), BROKEN: (BROKEN,)}
    grades = {grade for name in names for grade in wanted.get(name, ())}
    return [one for one in bad if one.name in names or one.grade in grades]
