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

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from limitformer.checking.curves import kind_and_block
from limitformer.checking.thresholds import (
    ALIKE,
    FASTEST,
    LOGITS,
    MUON,
    RATE,
    STEP_THRESHOLDS,
    STILL,
    UNSEEN,
)
from limitformer.reports.verdict import BROKEN, FINE, NOTE, WATCH, Verdict, number_text
from limitformer.results.outcomes import wilson

Array = NDArray[np.float64]
SAME = "same"  # of `batches`
GIVEN = "given"  # by the user, and not drawn
NAMED = 4  # kinds of weight in a sentence


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
    """Return a quantile that is one of the samples; NaN is treated as in `middle`."""
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


def step_verdicts(data: xr.Dataset) -> list[Verdict]:
    """Return the verdicts on the dataset of `simulate_steps`, in the order of `STEP_VERDICTS`."""
    table = by_rate(data)
    bad = ~np.isfinite(data[compared_loss(data)].isel(step=0, rate=0).values)
    if 1 - bad.mean() < limit("falls"):
        sentence = f"the loss is not finite before the first step, in {bad.sum()} of {len(bad)} networks"
        share = float(bad.mean())
        why, mends = "No step can be computed from such a loss.", "See what limitformer check says about this network."
        return [step_verdict(RATE, BROKEN, sentence, share, "falls", share=share, why=why, mends=mends)]
    place = stated_rate(table)
    at, rate = data.isel(rate=place), float(table["rate"][place])
    first, alike = rate_verdict(data, table), alike_verdict(at, rate)
    if alike is not None:
        remark = f"Tokens become alike at a rate of {number_text(rate)}; smaller ones may be better."
        first = replace(first, mends=f"{first.mends} {remark}")
    verdicts = [first, unseen_verdict(data, table), alike]
    verdicts += [rule(at, rate) for rule in (fastest_verdict, still_verdict, logits_verdict)]
    verdicts.append(muon_verdict(data))
    return [each for each in verdicts if each is not None]


def step_verdict(name: str, grade: str, said: str, value: float, threshold: str = "", **words: Any) -> Verdict:
    """Return a verdict with the number and the source of its threshold, if it has one."""
    known: dict[str, Any] = (
        {"threshold": limit(threshold), "source": STEP_THRESHOLDS[threshold].source} if threshold else {}
    )
    return Verdict(name, grade, said, value, **known, **words)


def rate_verdict(data: xr.Dataset, table: xr.Dataset) -> Verdict:
    """Return the verdict on the largest rate at which the loss falls in nine of ten networks.

    A drawn unseen batch has nothing to learn, and so cannot show that a rate is broken.
    """
    steps, place = data.sizes["step"] - 1, sound_rate(table)
    loss, count = compared_loss(data), data.sizes["sample"]
    what, within = LOSSES[loss], f"within {steps} step{'' if steps == 1 else 's'}"
    if place is not None:
        return sound_verdict(table, place, count, f"{what} falls {within}", WHY_RATE[loss])
    best, single = int(np.argmax(table["share"].values)), table.sizes["rate"] == 1
    open_ = "" if float(table["high"].max()) < limit("falls") else too_few(count)
    rate, networks = rate_text(table, best), counted(table, best, count)
    sentence = (
        f"{what} falls {within} at no rate in nine of ten networks; the best rate is {rate}, in {networks}{open_}"
    )
    if single:
        sentence = (
            f"{what} does not fall {within} at a rate of {rate} in nine of ten networks, but in {networks}{open_}"
        )
    unseen_is_drawn = loss != "loss" and data.attrs.get("unseen") != GIVEN
    share = float(table["share"][best])
    return step_verdict(
        RATE, NOTE if unseen_is_drawn else BROKEN, sentence, share, "falls", share=share,
        rate=float(table["rate"][best]), why=WHY_RATE[loss], mends=OTHER_BATCH if unseen_is_drawn else OTHER_RATES,
    )  # fmt: skip


def sound_verdict(table: xr.Dataset, place: int, count: int, what: str, why: str) -> Verdict:
    """Return the verdict on rates at which the loss falls; `place` is that of the largest sound one."""
    order = np.argsort(table["rate"].values, kind="stable").tolist()
    at = order.index(place)
    above, below = order[at + 1 : at + 2], order[:at][-1:]
    edge = not above and len(order) > 1
    forgotten = "stream_change" in table and bool(table["stream_change"].values[place] >= limit("stream"))
    parts = [f"{what} {'up to' if len(order) > 1 else 'at'} a rate of {rate_text(table, place)}, in "
             f"{counted(table, place, count)}"]  # fmt: skip
    if forgotten:
        change = number_text(float(table["stream_change"][place]))
        parts.append(f"there the stream changes by {change} times its size")
    parts += [
        f"at {rate_text(table, k)} in {int(table['falls'][k])} of {count}"
        + (f" (in {more} more it falls, but the loss of an unseen batch explodes)" if more else "")
        for k in (*above, *below)
        for more in (int(table["falls_alone"][k] - table["falls"][k]),)
    ]
    parts += ["no larger rate was tried"] if edge else []
    again = [rate_text(table, k) for k in order[at + 1 :] if falling(table)[k]]
    parts += [f"it falls again at {', '.join(again)}, beyond rates at which it does not"] if again else []
    certain = float(table["low"][place]) >= limit("falls")
    certain = certain and all(float(table["high"][k]) < limit("falls") for k in above)
    rate = float(table["rate"][place])
    return step_verdict(
        RATE, WATCH if edge or forgotten else FINE if certain else NOTE,
        ("" if certain else "not decided: ") + "; ".join(parts) + ("" if certain else too_few(count)), rate, "falls",
        share=float(table["share"][place]), rate=rate, why=why,
        mends=SMALLER if forgotten else "Larger rates show where it stops." if edge else SEARCH,
    )  # fmt: skip


SMALLER = "A smaller rate or a warm-up: little of the initialisation is left at this one."
SEARCH = "limitformer rate searches the largest rate in each network, and returns the range to tune in."
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


def too_few(count: int) -> str:
    """Return the remark that the networks do not settle whether nine of ten do."""
    needed = enough_for(limit("falls"))
    if count >= needed:
        return f"; {count} networks leave open whether that is nine of ten"
    return f"; {count} network{' is' if count == 1 else 's are'} too few to tell nine of ten: take {needed} or more"


def rate_text(table: xr.Dataset, place: int) -> str:
    return number_text(float(table["rate"][place]))


def unseen_verdict(data: xr.Dataset, table: xr.Dataset) -> Verdict | None:
    """Return the verdict on rates at which the loss falls on the batch of the steps and explodes on an unseen one."""
    count = data.sizes["sample"]
    ruined = np.flatnonzero((table["falls_alone"].values >= limit("falls") * count) & ~falling(table))
    if not len(ruined):
        return None
    place = int(ruined[np.argmin(table["rate"].values[ruined])])
    sound = sound_rate(table) is not None
    before, after = (float(table[f"unseen_{when}"][place]) for when in ("first", "last"))
    return step_verdict(
        UNSEEN, NOTE if sound else WATCH,
        f"at a rate of {rate_text(table, place)} the loss falls only on the batch of the steps; the loss of an unseen "
        f"batch goes from {number_text(before)} to {number_text(after)}",
        after / before, "explosion", share=float(table["unseen_explodes"][place]) / count,
        rate=float(table["rate"][place]),
        why="A large step can memorise a few tokens while it ruins the network for all others.",
        mends="" if sound else "Smaller rates, or more tokens.",
    )  # fmt: skip


def alike_verdict(data: xr.Dataset, rate: float) -> Verdict | None:
    """Return the step after which all tokens are alike at the end of the stream, if they were not before.

    It is a note, as sound networks may pass through such a state while they learn the frequencies of tokens.
    """
    if "correlation" not in data:
        return None
    ends = middle(data["correlation"].isel(layer=-1).transpose("sample", "step").values, 0)
    above = ends > limit("alike")
    if above[0] or not above.any():
        return None
    step = int(above.argmax())
    return step_verdict(
        ALIKE, NOTE,
        f"tokens become alike at a rate of {number_text(rate)}: their mean correlation at the end goes from "
        f"{number_text(float(ends[0]))} to {number_text(float(ends[step]))} in {step} step{'' if step == 1 else 's'}",
        float(ends[step]), "alike", rate=rate,
        why="Networks that first learn the frequencies of tokens may pass through this state. If the correlation does "
        "not fall again, all tokens give one output.",
        mends="If the loss stays at that of frequencies: a smaller rate, a warm-up, or norms before the branches.",
    )  # fmt: skip


def moved(data: xr.Dataset) -> NDArray[np.bool_]:
    """Return whether each weight has changed in most networks (step, weight), from `weight_change` at one rate.

    A weight that was zero has an infinite relative change once it moves.
    """
    change = data["weight_change"].transpose("sample", "step", "weight").values
    with np.errstate(invalid="ignore"):
        return np.asarray((change > 0).mean(0) > 0.5)


def fastest_verdict(data: xr.Dataset, rate: float) -> Verdict | None:
    """Return the matrix that changes most in the first step, over the median matrix, and the largest effect."""
    change, effects = (
        middle(data[name].transpose("sample", "step", "weight").values[:, 1], 0)
        for name in ("weight_change", "update_effect")
    )
    names = data["weight"].values
    places = np.flatnonzero(data["matrix"].values.astype(bool) & np.isfinite(change) & (change > 0))
    if len(places) < 2:
        return None
    most = places[np.argmax(change[places])]
    ratio, percent = float(change[most] / np.median(change[places])), number_text(100 * float(change[most]))
    known = np.flatnonzero(np.isfinite(effects) & (effects > 0))
    effect = ""
    if len(known):
        widest = known[np.argmax(effects[known])]
        effect = f"; the largest effect on an output is that of {names[widest]}, {number_text(float(effects[widest]))}"
    watch, block = ratio > limit("fastest"), kind_and_block(str(names[most]))[1]
    return step_verdict(
        FASTEST, WATCH if watch else NOTE,
        f"{names[most]} moves most in the first step at a rate of {number_text(rate)}: by {percent} % of its size, "
        f"{number_text(ratio)} times the median matrix{effect}",
        ratio, "fastest", layer=None if block < 0 else block + 1, rate=rate,
        why="A rate that suits the other matrices is too large for one that moves that much faster." if watch else "",
        mends="A parameter group with a smaller rate for it, or a larger initial size." if watch else "",
    )  # fmt: skip


def still_verdict(data: xr.Dataset, rate: float) -> Verdict | None:
    """Return the order in which matrices begin to move, if not all of them move in the first step."""
    moves, is_matrix = moved(data), data["matrix"].values.astype(bool)
    names, steps = data["weight"].values, data.sizes["step"] - 1
    first = np.where(moves.any(0), moves.argmax(0), -1)
    late, never = is_matrix & (first != 1), is_matrix & (first < 0)
    if not late.any():
        return None
    groups = [
        f"in the {ordinal(step)} step: {kinds(names[is_matrix & (first == step)])}"
        for step in range(1, steps + 1)
        if (is_matrix & (first == step)).any()
    ]
    if never.any():
        groups.append(f"in none of the {steps}: {kinds(names[never])}")
    zero = is_matrix & (data["weight_size"].values == 0)
    zeros = [f"{kinds(names[those])} ({ordinal(step)} step)" for step in range(1, steps + 1)
             if (those := zero & (first == step)).any()]  # fmt: skip
    return step_verdict(
        STILL, WATCH if never.any() else NOTE,
        f"{int(late.sum())} of {int(is_matrix.sum())} matrices do not move in the first step at a rate of "
        f"{number_text(rate)}. They begin to move {'; '.join(groups)}"
        + (f"; zero before: {', '.join(zeros)}" if zeros else ""),
        float(late.sum()), rate=rate,
        why="A matrix behind a zero matrix has no gradient until that one has moved; weight decay does not count."
        + (NEVER if never.any() else ""),
        mends="More steps, to see whether they ever do." if never.any() else "",
    )  # fmt: skip


NEVER = (
    " Those that never move may need more steps, have no gradient at all, or be left out by the optimiser; see whether "
    "its parameter groups hold every parameter."
)


def ordinal(step: int) -> str:
    return {1: "first", 2: "second", 3: "third"}.get(step, f"{step}th")


def kinds(names: Iterable[Any]) -> str:
    """Return the kinds of weight with their numbers: "h.*.c_proj.weight (12), lm_head.weight"."""
    counts: dict[str, int] = {}
    for name in names:
        kind = kind_and_block(str(name))[0]
        counts[kind] = counts.get(kind, 0) + 1
    every = [f"{kind} ({count})" if count > 1 else kind for kind, count in counts.items()]
    more = len(every) - NAMED
    return ", ".join(every[:NAMED]) + (f" and {more} other kind{'' if more == 1 else 's'}" if more > 0 else "")


def logits_verdict(data: xr.Dataset, rate: float) -> Verdict | None:
    """Return the block whose largest attention logit passes the threshold after a step, and was below it before."""
    if "largest_logit" not in data:
        return None
    logits = data["largest_logit"].transpose("sample", "step", "block", "head").values
    most = middle(np.where(np.isnan(logits).all(-1), np.nan, np.fmax.reduce(logits, -1)), 0)  # (step, block)
    with np.errstate(invalid="ignore"):
        above = (most > limit("logit")) & ~(most[:1] > limit("logit"))
    if not above.any():
        return None
    step = int(above.any(1).argmax())
    block = int(np.argmax(np.where(above[step], most[step], -np.inf)))
    return step_verdict(
        LOGITS, WATCH,
        f"the largest attention logit grows from {number_text(float(most[0, block]))} to "
        f"{number_text(float(most[step, block]))} in block {block + 1} at a rate of {number_text(rate)}, after {step} "
        f"step{'' if step == 1 else 's'}",
        float(most[step, block]), "logit", layer=block + 1, rate=rate,
        why="Softmax then picks one token, and its gradient is near zero.",
        mends="A smaller rate for queries and keys, norms of queries and keys, or QK-clip.",
    )  # fmt: skip


def muon_verdict(data: xr.Dataset) -> Verdict | None:
    """Return the tables and heads that Muon updates."""
    names = str(data.attrs.get("muon_outside", ""))
    if not names:
        return None
    return Verdict(
        MUON, WATCH, f"Muon updates {names}, which look up tokens or give the output",
        value=float(len(names.split(", "))),
        why="Muon is made for hidden matrices; tables and heads belong to AdamW (github.com/KellerJordan/Muon).",
        mends="A second optimiser, AdamW, for them.",
    )  # fmt: skip
