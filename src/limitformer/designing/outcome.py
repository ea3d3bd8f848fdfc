"""How networks at one setting do."""

from dataclasses import dataclass

from scipy import special

from limitformer.checking.report import Report
from limitformer.designing.objective import LEVEL, Band


@dataclass(frozen=True)
class Risk:
    """How often networks miss an objective, from independent ones.

    The interval is that of Clopper and Pearson [Biometrika 26, 1934]: it holds the probability with 90 % or more, and
    what exceeds its upper end has 5 % or less.
    """

    misses: int
    samples: int

    @property
    def estimate(self) -> float:
        """The part that misses."""
        return self.misses / self.samples

    @property
    def interval(self) -> Band:
        """Ends of the interval of 90 %."""
        k, n, tail = self.misses, self.samples, (1 - LEVEL) / 2
        low = 0.0 if k == 0 else float(special.betaincinv(k, n - k + 1, tail))
        high = 1.0 if k == n else float(special.betaincinv(k + 1, n - k, 1 - tail))
        return low, high

    def __str__(self) -> str:
        """Such as `3 of 64 miss, risk 0.047 (0.013 to 0.12)`."""
        low, high = self.interval
        return f"{self.misses} of {self.samples} networks miss it: risk {self.estimate:.2g} ({low:.2g} to {high:.2g})"


@dataclass(frozen=True)
class Outcome:
    """How networks at one setting do, of a seed that had no part in choosing it.

    Attributes:
        setting: by knob.
        risk: how many networks miss the objective.
        missed: how many miss each part of it.
        values: 5 %, median and 95 % of what was asked, and of what else was measured.
        report: of `check`.
        beside: what is known exactly, such as the probability of an explosion.
    """

    setting: dict[str, float]
    risk: Risk
    missed: dict[str, int]
    values: dict[str, tuple[float, float, float]]
    report: Report
    beside: dict[str, float]
