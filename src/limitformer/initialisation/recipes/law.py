"""The weight that a recipe takes, and its law: kind, mean and standard deviation of an entry, or the entries."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from limitformer.base.errors import nearest, require
from limitformer.weightless import laws
from limitformer.weightless.laws import Law

# The sizes of a weight that a recipe may read, and what each is.
SIZES = {
    "width": "of the stream of the weight's stack",
    "depth": "number of blocks of its stack",
    "layer": "index of its block, from 0",
    "heads": "number of heads",
    "head_dim": "dimension of a head",
    "fan_in": "inputs of the weight",
    "fan_out": "outputs of the weight",
    "rows": "of the tensor",
    "columns": "of the tensor",
    "vocabulary": "rows of the embedding of tokens",
}


class UnknownSizeError(Exception):
    """A recipe reads a size of a weight that is not known."""


@dataclass
class Weight:
    """A weight of a model, as recipes see it; its sizes are attributes too, such as `weight.depth`.

    Attributes:
        name: of the parameter.
        shape: of the parameter.
        roles: one, or several of a fused weight; empty: not clear.
        reason: why its role is not clear.
        stack: the list of blocks that it belongs to, such as `transformer.h`.
        sizes: numbers by the names of `limitformer.initialisation.recipes.SIZES`; None is not known.
    """

    name: str
    shape: tuple[int, ...]
    roles: tuple[str, ...] = ()
    reason: str = ""
    stack: str = ""
    sizes: dict[str, float | None] = field(default_factory=dict)

    @property
    def role(self) -> str:
        """The role, such as `attention output`."""
        return self.roles[0]

    @property
    def i(self) -> np.ndarray:
        """The indices of the entries of a row."""
        return np.arange(self.columns)

    def __getattr__(self, name: str) -> Any:
        """Return one of `SIZES`."""
        if name not in SIZES:
            raise AttributeError(f"a weight has no {name!r}.{nearest(name, SIZES)}")
        if self.sizes.get(name) is None:
            raise UnknownSizeError(f"its {name} is not known")
        return self.sizes[name]


def known_as(name: str, tied: bool | None = None, names: Mapping[str, str] | None = None) -> Callable[[Any], Any]:
    """Return a decorator that gives a recipe a name, and what a function of one weight cannot say.

    Args:
        name: for `limitformer check --recipe`.
        tied: whether the head shares the weights of the embedding; None: both are published.
        names: {role: pattern of weights' names} for roles that this architecture alone has: regular expressions, which
            come before the names that every recipe shares.
    """

    def named(law: Any) -> Any:
        law.known_as, law.tied, law.names = name, tied, dict(names or {})
        return law

    return named


EVERYWHERE = (-math.inf, math.inf)


@dataclass(frozen=True)
class ComparedLaw:
    """The law of a weight, in the code or in a recipe.

    Attributes:
        kind: as in `limitformer.weightless.laws`.
        mean: of an entry.
        std: of an entry; of entries that are not random, over the entries.
        cut: the bounds of a truncated normal, in its own standard deviations before truncation.
        values: the entries, if they are neither random nor all equal.
    """

    kind: str
    mean: float
    std: float
    cut: tuple[float, float] = EVERYWHERE
    values: np.ndarray | None = None

    @property
    def random(self) -> bool:
        """Whether entries are random, not constant or given."""
        return self.kind not in (laws.CONSTANT, laws.GIVEN)

    @property
    def wide(self) -> bool:
        """Whether it is a truncated normal whose bounds cut nothing."""
        return self.kind == laws.TRUNCATED and -self.cut[0] > laws.CUT_NOTHING and self.cut[1] > laws.CUT_NOTHING

    @property
    def rms(self) -> float:
        """The root mean square of the entries."""
        return math.hypot(self.mean, self.std)

    def __str__(self) -> str:
        """Return the law as short text, such as `normal 0.02`."""
        if self.kind == laws.CONSTANT:
            return {0.0: "zeros", 1.0: "ones"}.get(self.mean, f"constant {self.mean:.4g}")
        if self.values is not None:
            return f"numbers, rms {self.rms:.4g}"
        kind = {laws.TRUNCATED: "truncated"}.get(self.kind, self.kind)
        centre = f"mean {self.mean:.3g}, " if abs(self.mean) > 0.02 * self.std else ""
        return f"{laws.NORMAL if self.wide else kind} {centre}{self.std:.4g}"


def compared_law(law: Law) -> ComparedLaw:
    """Return a law that has a mean and a standard deviation as it is compared."""
    return ComparedLaw(law.kind, law.mean, law.std, (law.low, law.high) if law.kind == laws.TRUNCATED else EVERYWHERE)


def normal(std: float, mean: float = 0.0) -> ComparedLaw:
    """Return the law N(mean, std²)."""
    require(not std < 0, f"a standard deviation must not be negative; got {std:g}.")
    return compared_law(laws.normal(float(std), float(mean)))


def uniform(low: float, high: float | None = None) -> ComparedLaw:
    """Return U(low, high), or U(−low, low)."""
    low, high = (-low, low) if high is None else (low, high)
    require(not low > high, f"the ends of a uniform law must ascend; got {low:g} and {high:g}.")
    return compared_law(laws.uniform(float(low), float(high)))


def truncated(std: float, cut: float) -> ComparedLaw:
    """Return N(0, std²) between ±cut·std, whose standard deviation is smaller than `std`."""
    return compared_law(laws.truncated_normal(0.0, float(std), -float(cut * std), float(cut * std)))


def rescaled_truncated(std: float, cut: float) -> ComparedLaw:
    """Return a normal law that is cut at ±`cut` of its own standard deviations, and then has standard deviation std."""
    return truncated(std / laws.truncated_moments(-float(cut), float(cut))[1], cut)


def constant(value: float) -> ComparedLaw:
    """Return the law of entries that all are `value`."""
    return compared_law(laws.constant(float(value)))


def orthogonal(weight: Weight, gain: float) -> ComparedLaw:
    """Return the law of a Haar matrix of the weight's shape times `gain`."""
    return compared_law(laws.orthogonal(float(gain), int(weight.rows), int(weight.columns)))


def log_uniform(low: float, high: float) -> ComparedLaw:
    """Return the law of log u, u ~ U(low, high)."""
    first, second = ((high * math.log(high) ** k - low * math.log(low) ** k) / (high - low) for k in (1, 2))
    mean = first - 1
    return ComparedLaw("log of uniform", mean, math.sqrt(second - 2 * mean - mean**2))


def values(numbers: Any) -> ComparedLaw:
    """Return entries that are these numbers, of any shape that can be broadcast to the weight's."""
    numbers = np.asarray(numbers, dtype=np.float64)
    return ComparedLaw(laws.GIVEN, float(numbers.mean()), float(numbers.std()), values=numbers)
