r"""Like layers among themselves: weights whose names differ by numbers alone, for a module without a law, or trained.

With n entries of kurtosis κ, the variance s² of a tensor behaves like χ²_ν/ν, ν = 2(n − 1)/(κ − 1), which is exact for
normal entries. Two questions are asked of a group of m ≥ 3.

* Of networks as they were drawn, like layers have one variance: s_i² over the pooled variance of the others has the law
  F(ν_i, Σ_{j≠i} ν_j). The layer that is farthest off is taken out and the rest asked again, so that one bad layer does
  not make the others look bad.
* Of trained ones, like layers differ. log s_i² is compared with the spread of the others: the deleted Student t
  of m − 2 degrees, exact for normal log-variances whatever their spread (Grubbs).

Unless it is said which, a module counts as drawn if more than half of its groups pass a χ² test of equal log-variances
without their farthest.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special

from limitformer.initialisation.summary import Held

LEAST = 3  # of two it cannot be said which is wrong
FACTOR = 1.5  # of trained layers, a std within it is never said to stand out
EQUAL = 0.05  # level at which variances of a group are called unequal


@dataclass(frozen=True)
class Outlier:
    """A layer that differs from its like: its std over that of the others, and a p-value by itself."""

    name: str
    ratio: float
    p: float


def pattern(name: str) -> str:
    """The name without its numbers."""
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def groups(held: Mapping[str, Held]) -> list[dict[str, Held]]:
    """Those of at least three, whose entries vary and are of one number."""
    found: dict[tuple[str, int], dict[str, Held]] = {}
    for name, each in held.items():
        if each.std > 0 and each.count > 1:
            found.setdefault((pattern(name), each.count), {})[name] = each
    return [group for group in found.values() if len(group) >= LEAST]


def outliers(held: Mapping[str, Held], level: float, trained: bool = False) -> list[Outlier]:
    """The layers that stand out; a sound drawn module has any with probability at most `level`."""
    asked = groups(held)
    drawn = not trained and sum(map(equal_variances, asked)) * 2 > len(asked)
    number = sum(map(len, asked))
    return [each for group in asked for each in standing_out(group, drawn, level / max(number, 1))]


def standing_out(group: dict[str, Held], drawn: bool, level: float) -> list[Outlier]:
    """One after the other, until none does."""
    rest, found = dict(group), []
    while len(rest) >= LEAST:
        names = list(rest)
        logs, degrees = log_variances(list(rest.values()))
        p = against_pooled(logs, degrees) if drawn else against_spread(logs)
        worst = int(np.argmin(p))
        ratio = float(np.exp((logs[worst] - np.median(np.delete(logs, worst))) / 2))
        if p[worst] > level or (not drawn and 1 / FACTOR < ratio < FACTOR):
            break
        found.append(Outlier(names[worst], ratio, float(p[worst])))
        del rest[names[worst]]
    return found


def log_variances(group: Sequence[Held]) -> tuple[np.ndarray, np.ndarray]:
    """log s² and degrees of freedom ν, with the group's median kurtosis."""
    kurtosis = max(float(np.median([each.kurtosis for each in group])), 1.2)
    counts = np.array([each.count for each in group])
    logs = np.array([2 * np.log(each.std) for each in group]) + np.log(counts / (counts - 1))
    return logs, 2 * (counts - 1) / (kurtosis - 1)


def against_pooled(logs: np.ndarray, degrees: np.ndarray) -> np.ndarray:
    """Two-sided p of each variance over the pooled one of the others."""
    found = []
    for i in range(len(logs)):
        others, weights = np.delete(logs, i), np.delete(degrees, i)
        ratio = np.exp(logs[i]) / np.average(np.exp(others), weights=weights)
        law = degrees[i], weights.sum(), ratio
        found.append(2 * min(special.fdtr(*law), special.fdtrc(*law)))
    return np.minimum(found, 1.0)


def against_spread(logs: np.ndarray) -> np.ndarray:
    """Two-sided p of the deleted Student t."""
    m, found = len(logs), []
    for i in range(m):
        others = np.delete(logs, i)
        width = max(float(others.std(ddof=1)), 1e-12) * np.sqrt(1 + 1 / (m - 1))
        found.append(2 * special.stdtr(m - 2, -abs(logs[i] - others.mean()) / width))
    return np.array(found)


def equal_variances(group: dict[str, Held]) -> bool:
    """Whether the variances of all but the farthest are those of one law."""
    logs, degrees = log_variances(list(group.values()))
    kept = np.argsort(abs(logs - np.median(logs)))[:-1]
    logs, weights = logs[kept], degrees[kept] / 2
    off = weights @ (logs - np.average(logs, weights=weights)) ** 2
    return bool(special.chdtrc(len(logs) - 1, off) > EQUAL)
