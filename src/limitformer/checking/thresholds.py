"""Where a verdict begins: numbers that a user may change, and where each comes from.

Where no published number exists the source says so: such a threshold is a choice, and the verdict names it as one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

from limitformer.errors import nearest, require, require_real

OURS = "a choice of limitformer's"


@dataclass(frozen=True)
class Threshold:
    """A number and its source."""

    value: float
    source: str


THRESHOLDS: Mapping[str, Threshold] = {
    "collapse": Threshold(
        0.9, f"mean correlation of tokens; rank collapse is ρ → 1 [ST; arXiv 2206.03126], where it counts is {OURS}"
    ),
    "frozen": Threshold(
        1.0, "standard deviation of a row's logits over √(2 ln m): entropy collapses above 1 (arXiv 2505.24333)"
    ),
    "uniform": Threshold(
        0.05, f"standard deviation of a row's logits; entropy is then ln m − σ²/2, within 0.2 % of the mean ({OURS})"
    ),
    "stream": Threshold(
        100.0, f"stream at the end over that after the first block; growth: arXiv 2502.05795, the number is {OURS}"
    ),
    "swamped": Threshold(
        10.0, f"first branch over the embedding; small branches, large shortcut: arXiv 2312.16903, the number is {OURS}"
    ),
    "gradient": Threshold(
        1e3, f"largest over smallest gradient of like weights by layer [ST, Fig. 2], the number is {OURS}"
    ),
    "activation": Threshold(1e2, "largest |x| of the stream: massive activations (arXiv 2402.17762)"),
    "massive": Threshold(1e3, "largest over median |x| of the stream: massive activations (arXiv 2402.17762)"),
    "logit": Threshold(100.0, "largest logit of a head: the level of QK-clip (Kimi K2, arXiv 2507.20534)"),
    "half": Threshold(65504.0, "largest number of float16"),
}
RANGES = {"collapse": (0.0, 1.0), "stream": (1.0, inf), "gradient": (1.0, inf), "massive": (1.0, inf)}  # else above 0


def thresholds_with(changes: Mapping[str, float] | None) -> dict[str, Threshold]:
    """The thresholds, some of them the user's own.

    Raises:
        InputError: there is none of a name, or a value that nothing or everything would reach.
    """
    found = dict(THRESHOLDS)
    for name, value in (changes or {}).items():
        require(name in found, f"thresholds has no {name!r}; there are {', '.join(found)}.{nearest(name, found)}")
        number, (low, high) = require_real(f"thresholds[{name!r}]", value), RANGES.get(name, (0.0, inf))
        upper = "" if high == inf else f" and at most {high:g}"
        require(low < number <= high, f"thresholds[{name!r}] must be above {low:g}{upper}; got {number:g}.")
        found[name] = Threshold(number, "the user's own")
    return found
