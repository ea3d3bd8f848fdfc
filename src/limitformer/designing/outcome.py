"""How networks do at one setting of a design: the risk that one misses the objective, and what was measured."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import special

from limitformer.checking.report import Report
from limitformer.designing.objective import Array, Band

LEVEL = 0.9  # of the interval of a risk


def clopper_pearson(misses: Any, samples: int) -> tuple[Array, Array]:
    """Return the ends of the 90 % interval of the probability of a miss; arrays of any shape."""
    k, n, tail = np.asarray(misses), samples, (1 - LEVEL) / 2
    low = np.where(k == 0, 0.0, special.betaincinv(k, n - k + 1, tail))
    return low, np.where(k == n, 1.0, special.betaincinv(k + 1, n - k, 1 - tail))


@dataclass(frozen=True)
class Risk:
    """The share of independent networks that miss an objective.

    The interval is that of Clopper and Pearson [Biometrika 26, 1934]. It holds the probability with a confidence of at
    least 90 %; its upper end is too low with a probability of at most 5 %.
    """

    misses: int
    samples: int

    @property
    def estimate(self) -> float:
        """The part that misses."""
        return self.misses / self.samples

    @property
    def interval(self) -> Band:
        """The ends of the 90 % interval."""
        low, high = clopper_pearson(self.misses, self.samples)
        return float(low), float(high)

    def __str__(self) -> str:
        """Return text such as `3 of 64 networks miss it: risk 0.047 (0.013 to 0.12)`."""
        low, high = self.interval
        return f"{self.misses} of {self.samples} networks miss it: risk {self.estimate:.2g} ({low:.2g} to {high:.2g})"


@dataclass(frozen=True)
class Outcome:
    """How networks at one setting do, from a seed that had no part in choosing the setting.

    Attributes:
        setting: the value of each knob.
        risk: how many networks miss the objective.
        missed: how many miss each part of it.
        values: 5 %, median and 95 % of each measured value.
        report: the report of `check`.
        exact: numbers that are known exactly, such as the probability of an explosion.
    """

    setting: dict[str, float]
    risk: Risk
    missed: dict[str, int]
    values: dict[str, tuple[float, float, float]]
    report: Report
    exact: dict[str, float]

    def cell(self, name: str) -> str:
        """Return the median of a value, its 5 % and 95 %, and how many networks miss it."""
        low, middle, high = self.values[name]
        missed = self.missed[name]
        return f"{middle:.3g} ({low:.3g} to {high:.3g}){f', {missed} miss' if missed else ''}"

    def record(self) -> dict[str, Any]:
        """Return the outcome as JSON holds it; numbers that are not finite become None."""
        low, high = self.risk.interval
        values = {name: [v if v - v == 0 else None for v in each] for name, each in self.values.items()}
        risk = {"misses": self.risk.misses, "samples": self.risk.samples, "estimate": self.risk.estimate}
        return {
            "setting": self.setting,
            "risk": {**risk, "interval": [low, high], "level": LEVEL},
            "missed": self.missed,
            "values": values,
            "verdicts": [str(verdict) for verdict in self.report.verdicts],
            **self.exact,
        }
