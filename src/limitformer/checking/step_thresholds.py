"""The numbers at which a verdict on training steps begins, with their sources, and the names of these verdicts.

This module imports nothing large, so that options are validated at once.
"""

from collections.abc import Mapping
from typing import Any

from limitformer.base.errors import nearest, require
from limitformer.checking.thresholds import ANY, BROKEN, OURS, WATCH, Threshold

NOTE = "note"  # the grade of a verdict that describes, and neither praises nor warns
RATE, EXPLODES, UNSEEN, START, FASTEST, STILL = "rate", "explodes", "unseen", "start", "fastest", "still"
UNTRAINED, CLIPPED, WAKES, LOGITS, ACTIVATION = "untrained", "clipped", "wakes", "logits", "activation"
MUON = "muon"
STEP_VERDICTS = (START, RATE, EXPLODES, UNSEEN, FASTEST, STILL, UNTRAINED, MUON, CLIPPED, WAKES, LOGITS, ACTIVATION)

STEP_THRESHOLDS: Mapping[str, Threshold] = {
    "falls": Threshold(None, 0.9, f"share of networks whose loss falls, nine of ten; {OURS}"),
    "explosion": Threshold(None, 2.0, f"largest loss of all steps over that before the first step; {OURS}"),
    "exploded": Threshold(None, 0.1, f"share of networks that explode, more than one of ten; {OURS}"),
    "fastest": Threshold(
        10.0, None, f"relative change of a matrix after the first step over that of the median matrix; {OURS}"
    ),
    "stream": Threshold(10.0, None, f"change of the last stream after all steps, over its size at the start; {OURS}"),
    "logit": Threshold(100.0, None, "largest logit of a head: the level of QK-clip (Kimi K2, arXiv 2507.20534)"),
    "activation": Threshold(10.0, None, f"largest |x| of the stream over that before the first step; {OURS}"),
}


LARGEST_RATE = 100.0  # MOST_RATE of `weightless.steps.rules`, which imports torch; a test compares them


def valid_rate(name: str, value: Any) -> float:
    """Return a learning rate; raise `InputError` unless it is a number above 0 and at most LARGEST_RATE."""
    rate = value.item() if hasattr(value, "item") and not isinstance(value, str) else value  # of NumPy or torch
    number = isinstance(rate, int | float) and not isinstance(rate, bool)
    require(number, f"{name} must be a number, such as 1e-3; got {value!r}.")
    fits = 0 < rate <= LARGEST_RATE
    require(fits, f"{name} must be above 0 and at most {LARGEST_RATE:g}; got {rate:g}. Nearest: rates from 1e-5 to 1.")
    return float(rate)


def failing_steps(text: str | None) -> tuple[str, ...]:
    """Return the names in "rate,still", "broken", "watch" or "any".

    Raises:
        InputError: there is no verdict or grade of that name.
    """
    require(text is None or isinstance(text, str), f'names must be a text, such as "rate,still"; got {text!r}.')
    names = () if text is None else tuple(name.strip() for name in text.split(","))
    known = (*STEP_VERDICTS, WATCH, BROKEN, ANY)
    for name in names:
        require(name in known, f"there is no verdict {name!r}; there are {', '.join(known)}.{nearest(name, known)}")
    return names
