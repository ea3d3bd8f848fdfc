r"""`Law`: the distribution from which an initialisation draws the entries of a parameter, nearly always independent."""

import functools
import math
from dataclasses import dataclass, field, replace

from scipy.special import ndtr, ndtri

from limitformer.base.errors import require

CONSTANT = "constant"
NORMAL = "normal"
UNIFORM = "uniform"
TRUNCATED = "truncated normal"
ORTHOGONAL = "orthogonal"
GIVEN = "given"  # computed values
UNKNOWN = "unknown"

FARTHEST = 36.0  # standard deviations: a normal entry lies beyond with probability 1e-284
CUT_NOTHING = 9.0  # standard deviations: a normal entry lies beyond with probability 1e-19
MOST_ROWS_NAMED = 4
ROUNDING = 1e-4  # of a standard deviation, by which the ends of a law may be rounded


@dataclass(frozen=True)
class Law:
    """Entries scale·g + shift, g standard of its kind.

    `normal`: g ~ N(0, 1). `uniform`: g ~ U(0, 1). `truncated normal`: g ~ N(0, 1) given low < g < high. `constant`: the
    number `shift`. `given`: the numbers in the module. `unknown`: for the `reason`. `orthogonal`: scale times a Haar
    matrix, or its first rows or columns, of the shape `matrix`; its entries depend on each other.
    """

    kind: str
    scale: float = 0.0
    shift: float = 0.0
    low: float = -math.inf
    high: float = math.inf
    reason: str = ""
    rows: dict[int, float] = field(default_factory=dict)  # constant rows, such as that of the padding
    source: int = -1  # the draw of the numbers g, equal for copies
    matrix: tuple[int, int] = (1, 1)  # rows and columns of an orthogonal matrix

    @property
    def random(self) -> bool:
        """Whether the entries are random."""
        return self.kind in (NORMAL, UNIFORM, TRUNCATED, ORTHOGONAL)

    @property
    def gaussian(self) -> bool:
        """Whether all entries are independent N(0, scale²)."""
        return self.kind == NORMAL and self.shift == 0.0 and not self.rows

    @property
    def mean(self) -> float:
        """The mean of an entry."""
        centre = {UNIFORM: 0.5, TRUNCATED: self.truncated_moments()[0]}.get(self.kind, 0.0)
        return self.scale * centre + self.shift

    @property
    def std(self) -> float:
        """The standard deviation of an entry."""
        width = {NORMAL: 1.0, UNIFORM: 12**-0.5, TRUNCATED: self.truncated_moments()[1]}.get(self.kind, 0.0)
        if self.kind == ORTHOGONAL:
            width = max(self.matrix) ** -0.5
        return abs(self.scale) * width

    def truncated_moments(self) -> tuple[float, float]:
        """Return mean and standard deviation of g ~ N(0, 1) given low < g < high."""
        return truncated_moments(self.low, self.high) if self.kind == TRUNCATED else (0.0, 1.0)

    def times(self, factor: float) -> "Law":
        """Return the law of an entry times `factor`."""
        rows = {row: value * factor for row, value in self.rows.items()}
        return replace(self, scale=self.scale * factor, shift=self.shift * factor, rows=rows)

    def plus(self, number: float) -> "Law":
        """Return the law of an entry plus a number."""
        rows = {row: value + number for row, value in self.rows.items()}
        return replace(self, shift=self.shift + number, rows=rows)

    def probabilities(self) -> tuple[float, float, float]:
        """Return P(g < low), P(low < g < high) and P(g > high) of g ~ N(0, 1), without cancellation."""
        below, above = float(ndtr(self.low)), float(ndtr(-self.high))
        mass = float(ndtr(-self.low)) - above if self.low > 0 else float(ndtr(self.high)) - below
        return below, mass, above

    def erfinv(self) -> "Law":
        """Return the law of erf⁻¹ of a uniform entry, a truncated normal one of variance ½."""
        low, high = (float(ndtri((1 + end) / 2)) for end in sorted((self.shift, self.shift + self.scale)))
        return replace(self, kind=TRUNCATED, scale=math.sqrt(0.5), shift=0.0, low=low, high=high)

    def within(self, least: float, most: float) -> bool:
        """Whether all entries are between `least` and `most`, up to rounding of the ends."""
        low, high = (0.0, 1.0) if self.kind == UNIFORM else (self.low, self.high)  # infinite unless it is truncated
        ends = sorted((self.scale * low + self.shift, self.scale * high + self.shift))
        slack = ROUNDING * self.std
        return self.random and not self.rows and least - slack <= ends[0] and ends[1] <= most + slack

    def clamped(self, least: float, most: float) -> "Law | None":
        """Return the law of an entry that is cut at two bounds; None if they cut more than rounding or far tails."""
        if self.within(least, most):
            return self
        reach = min(self.shift - least, most - self.shift) / self.scale if self.scale > 0 else 0.0
        if self.kind not in (NORMAL, TRUNCATED) or self.rows or reach < CUT_NOTHING:
            return None
        low, high = ((each - self.shift) / self.scale for each in (least, most))
        return replace(self, kind=TRUNCATED, low=max(self.low, low), high=min(self.high, high))

    def __str__(self) -> str:
        """Return the law as text, such as `normal, std 0.02`."""
        if self.kind == CONSTANT:
            return {0.0: "zeros", 1.0: "ones"}.get(self.shift, f"constant {self.shift:g}")
        if not self.random:
            return f"{self.kind}: {self.reason}" if self.reason else self.kind
        mean = f"mean {self.mean:.3g}, " if abs(self.mean) > 1e-12 * self.std else ""
        rows = "".join(f", row {row} is {value:g}" for row, value in self.rows.items())
        if len(self.rows) > MOST_ROWS_NAMED:
            rows = f", {len(self.rows)} rows are constant"
        wide = self.kind == TRUNCATED and -self.low > CUT_NOTHING and self.high > CUT_NOTHING
        bounds = f" (bounds of {self.low:.3g} and {self.high:.3g} std cut nothing)" if wide else ""
        gain = f"gain {self.scale:.4g}, " if self.kind == ORTHOGONAL else ""
        return f"{self.kind}, {gain}{mean}std {self.std:.4g}{bounds}{rows}"


def normal(std: float, mean: float = 0.0) -> Law:
    """Return the law N(mean, std²)."""
    return Law(NORMAL, scale=std, shift=mean)


def uniform(low: float, high: float) -> Law:
    """Return the law U(low, high)."""
    return Law(UNIFORM, scale=high - low, shift=low)


def truncated_normal(mean: float, std: float, low: float, high: float) -> Law:
    """Return the law N(mean, std²) between `low` and `high`; it is unknown where its probability underflows.

    Raises:
        InputError: the law does not exist.
    """
    require(std > 0, f"a truncated normal law needs a positive standard deviation; got {std!r}.")
    require(low < high, f"the bounds of a truncated normal law must ascend; got {low!r} and {high!r}.")
    if (low - mean) / std > FARTHEST or (high - mean) / std < -FARTHEST:
        return Law(
            UNKNOWN, reason=f"its bounds {low:g} and {high:g} are more than {FARTHEST:g} std from its mean {mean:g}"
        )
    return Law(TRUNCATED, scale=std, shift=mean, low=(low - mean) / std, high=(high - mean) / std)


def orthogonal(gain: float, rows: int, columns: int) -> Law:
    """Return the law of `nn.init.orthogonal_`."""
    return Law(ORTHOGONAL, scale=gain, matrix=(rows, columns))


def constant(value: float) -> Law:
    """Return the law of entries that all are `value`."""
    return Law(CONSTANT, shift=value)


@functools.cache
def truncated_moments(low: float, high: float) -> tuple[float, float]:
    """Return mean and standard deviation of N(0, 1) between `low` and `high`; cached, as SciPy is slow."""
    from scipy.stats import truncnorm  # slow to import

    mean, variance = truncnorm.stats(low, high)
    return float(mean), math.sqrt(variance)
