"""The numbers at which a verdict begins, with their sources, and the names of the verdicts of `check` and `steps`.

`check` and `design` read the same table. `watch` is where a network leaves the range that `design` calls safe; `broken`
is where training is known, or expected, to suffer. If no published number exists, the source says so. This module
imports nothing large, so that options are validated at once.
"""

import csv
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from math import inf
from typing import Any

from limitformer.base.errors import InputError, nearest, require, require_real
from limitformer.base.moved import OldAttributes
from limitformer.reports.verdict import ANY, BROKEN, WAITS, WATCH
from limitformer.stepping.updates import MOST_RATE

OURS = "a choice of limitformer's"
EVERY_INPUT = "every input"  # the condition of two unrelated inputs
VERDICTS = (  # the names in `verdicts.RULES`; a test compares them
    *("not finite", "loss", "dead", WAITS, "collapsed", "grows", "dies", "frozen", "uniform", "vanishing"),
    *("exploding", "router", "memory", "deaf", "constant", "equal", "faint", "uneven", "swamped", "range"),
)
FORMAT_VERDICTS = ("overflow", "underflow", "swallowed", "no scale", "lost", "coarse", "unchanged")  # of `formats`
STEP_VERDICTS = ("rate", "unseen", "alike", "fastest", "still", "logits", "muon")
RATE, UNSEEN, ALIKE, FASTEST, STILL, LOGITS, MUON = STEP_VERDICTS


@dataclass(frozen=True)
class Threshold(OldAttributes):
    """The numbers at which a verdict of each grade begins, and their source.

    Attributes:
        watch: the number for the grade watch; None if the verdict is never at watch.
        broken: the number for the grade broken; None if the verdict is never broken.
        source: where the numbers come from.
    """

    watch: float | None
    broken: float | None
    source: str

    def at(self, grade: str) -> float | None:
        """Return the number for a grade."""
        return self.watch if grade == WATCH else self.broken


THRESHOLDS: Mapping[str, Threshold] = {
    "loss": Threshold(
        1.0, 10.0, f"nats between the loss and ln(vocabulary), the loss of a uniform guess; both are {OURS}"
    ),
    "dead": Threshold(1e-6, 1e-6, f"gradient of a kind of weight over that of the median kind; {OURS}"),
    "collapse": Threshold(
        0.5, 0.9, f"mean correlation of tokens; rank collapse is ρ → 1 [ST; arXiv 2206.03126], both numbers are {OURS}"
    ),
    "frozen": Threshold(
        None, 1.0, "standard deviation of a row's logits over √(2 ln m): entropy collapses above 1 (arXiv 2505.24333)"
    ),
    "narrow": Threshold(0.5, None, f"effective tokens over tokens seen, least of all blocks; {OURS}"),
    "uniform": Threshold(0.995, None, f"effective tokens over tokens seen, most of all blocks; {OURS}"),
    "stream": Threshold(
        None,
        100.0,
        f"stream at the end over that after the first block; growth: arXiv 2502.05795, the number is {OURS}",
    ),
    "growth": Threshold(30.0, None, f"stream at the end over the embedding (`stream_ratio`); {OURS}"),
    "decay": Threshold(0.5, None, f"stream at the end over that before the first block; {OURS}"),
    "swamped": Threshold(
        10.0,
        None,
        f"first branch over the embedding; small branches, large shortcut: arXiv 2312.16903, the number is {OURS}",
    ),
    "gradient": Threshold(
        100.0, 1e3, f"largest over smallest gradient of like weights by layer [ST, Fig. 2], the numbers are {OURS}"
    ),
    "router": Threshold(
        0.5,
        0.1,
        "effective experts above those of tokens that all choose alike, over the same for unrelated tokens; both are "
        f"{OURS}",
    ),
    "memory": Threshold(
        None, 1.0, f"half-life in tokens of the slowest state-space head of all blocks; the number is {OURS}"
    ),
    "deaf": Threshold(
        0.999,
        None,
        f"agreement of two outputs whose inputs differ in the encoder's, image's or condition's part; {OURS}",
    ),
    "constant": Threshold(0.999, None, f"agreement of two outputs whose inputs are unrelated; {OURS}"),
    "faint": Threshold(
        0.02,
        None,
        f"largest branch of all blocks over its stream; 0.01 did not train in espnet#3454, the number is {OURS}",
    ),
    "uneven": Threshold(10.0, None, f"stream of the largest group of tokens over that of the smallest; {OURS}"),
    "activation": Threshold(1e2, None, "largest |x| of the stream: massive activations (arXiv 2402.17762)"),
    "massive": Threshold(1e3, None, "largest over median |x| of the stream: massive activations (arXiv 2402.17762)"),
    "logit": Threshold(100.0, None, "largest logit of a head: the level of QK-clip (Kimi K2, arXiv 2507.20534)"),
    "half": Threshold(65504.0, None, "largest number of float16"),
}
STEP_THRESHOLDS: Mapping[str, Threshold] = {  # of `steps`
    "falls": Threshold(None, 0.9, f"share of networks whose loss falls, nine of ten; {OURS}"),
    "explosion": Threshold(None, 2.0, f"largest loss of all steps over that before the first step; {OURS}"),
    "fastest": Threshold(
        10.0, None, f"relative change of a matrix after the first step over that of the median matrix; {OURS}"
    ),
    "stream": Threshold(10.0, None, f"change of the last stream after all steps, over its size at the start; {OURS}"),
    "logit": THRESHOLDS["logit"],
    "alike": Threshold(0.99, None, f"mean correlation of tokens at the end of the stream after a step; {OURS}"),
}
SHARES = ("collapse", "narrow", "uniform", "dead", "decay", "router", "deaf", "constant", "faint")  # in (0, 1]
RATIOS = ("stream", "growth", "gradient", "massive", "uneven")  # above 1
FALLING = ("narrow", "decay", "dead", "router", "memory", "faint")  # the verdict begins below the number


@cache
def known_values() -> dict[str, dict[str, float]]:
    """Return the numbers of eight well-known models, by the name of the rule in `verdicts` and of the model.

    `benchmarks/known_models.py` writes them: medians of two networks of 128 unrelated tokens.

    >>> known_values()["collapsed"]["gpt2-xl"]
    0.711499
    """
    text = files("limitformer.checking").joinpath("known-models.csv").read_text(encoding="utf-8")
    result: dict[str, dict[str, float]] = {}
    for row in csv.DictReader(text.splitlines()):
        result.setdefault(row["measure"], {})[row["model"]] = float(row["value"])
    return result


def thresholds_with(changes: Mapping[str, Any] | None) -> dict[str, Threshold]:
    """Return the thresholds, some of them changed by the user.

    Args:
        changes: a number by name, which replaces `broken` (`watch` if it is never broken), or a pair (watch, broken).

    Raises:
        InputError: a name is not a threshold, or a value is out of range.
    """
    valid = changes is None or isinstance(changes, Mapping)
    require(valid, f'thresholds must be a dict, such as {{"collapse": 0.99}}; got {changes!r}.')
    result = dict(THRESHOLDS)
    for name, value in (changes or {}).items():
        require(name in result, f"thresholds has no {name!r}; there are {', '.join(result)}.{nearest(name, result)}")
        result[name] = replace(result[name], **changed_numbers(name, value, result[name]), source="set by the user")
    return result


def changed_numbers(name: str, value: Any, before: Threshold) -> dict[str, float]:
    both = before.watch is not None and before.broken is not None
    if isinstance(value, list | tuple) or (isinstance(value, str) and "," in value):
        parts = value.split(",") if isinstance(value, str) else value
        require(both and len(parts) == 2, f"thresholds[{name!r}] takes {'two numbers' if both else 'one number'}.")
        watch, broken = (valid_number(name, part) for part in parts)
        in_order = watch >= broken if name in FALLING else watch <= broken
        require(in_order, f"thresholds[{name!r}] must be watch, then broken; got {watch:g}, {broken:g}.")
        return {WATCH: watch, BROKEN: broken}
    number = valid_number(name, value)
    if before.broken is None:
        return {WATCH: number}
    # One number moves the verdict's worst grade; the milder one never begins after it.
    limit = max if name in FALLING else min
    return {BROKEN: number} | ({WATCH: limit(number, before.watch)} if before.watch is not None else {})


def valid_number(name: str, value: Any) -> float:
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError as error:
            raise InputError(f"thresholds[{name!r}] must be a number; got {value!r}.") from error
    number = require_real(f"thresholds[{name!r}]", value)
    low, high = (1.0, inf) if name in RATIOS else (0.0, 1.0) if name in SHARES else (0.0, inf)
    upper = "" if high == inf else f" and at most {high:g}"
    require(low < number <= high, f"thresholds[{name!r}] must be above {low:g}{upper}; got {number:g}.")
    return number


def valid_rate(name: str, value: Any) -> float:
    """Return a learning rate; raise `InputError` unless it is a number above 0 and at most MOST_RATE."""
    rate = value.item() if hasattr(value, "item") and not isinstance(value, str) else value  # of NumPy or torch
    number = isinstance(rate, int | float) and not isinstance(rate, bool)
    require(number, f"{name} must be a number, such as 1e-3; got {value!r}.")
    fits = 0 < rate <= MOST_RATE
    require(fits, f"{name} must be above 0 and at most {MOST_RATE:g}; got {rate:g}. Nearest: rates from 1e-5 to 1.")
    return float(rate)


def failing(text: str | None, verdicts: tuple[str, ...] = (*VERDICTS, *FORMAT_VERDICTS)) -> tuple[str, ...]:
    """Return names of verdicts or grades from a text that separates them by commas, such as "collapsed,frozen".

    Raises:
        InputError: a name is neither a verdict nor a grade.
    """
    require(text is None or isinstance(text, str), f'names must be a text, such as "broken"; got {text!r}.')
    names = () if text is None else tuple(name.strip() for name in text.split(","))
    known = (*verdicts, WATCH, BROKEN, ANY)
    for name in names:
        require(name in known, f"there is no verdict {name!r}; there are {', '.join(known)}.{nearest(name, known)}")
    return names
