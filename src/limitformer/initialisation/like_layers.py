r"""Compare like layers, whose names differ only by numbers, in a module that is trained or has no law.

With n entries of kurtosis κ, the variance s² of a tensor behaves like χ²_ν/ν, ν = 2(n − 1)/(κ − 1), which is exact for
normal entries. A group has m ≥ 3 layers.

* In a network as it was drawn, like layers have one variance: s_i² over the pooled variance of the others has the law
  F(ν_i, Σ_{j≠i} ν_j). The farthest layer is removed and the others are compared again, so that one bad layer does not
  make the others look bad.
* In a trained network, like layers differ. log s_i² is compared with the spread of the others: the deleted Student t of
  m − 2 degrees, exact for normal log-variances of any spread (Grubbs).

By default a module counts as drawn if more than half of its groups pass a χ² test of equal log-variances without their
farthest layer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special

from limitformer.initialisation.summary import TensorSummary

LEAST = 3  # layers; of two, either may be the wrong one
FACTOR = 1.5  # a trained layer whose std is within it never stands out
EQUAL = 0.05  # level of the test of equal variances


@dataclass(frozen=True)
class Outlier:
    """A layer that differs from its like: its std over that of the others, and its own p-value."""

    name: str
    ratio: float
    p: float


def pattern(name: str) -> str:
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def listed(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + ", …" * (len(names) > 3)


def groups(summaries: Mapping[str, TensorSummary]) -> list[dict[str, TensorSummary]]:
    """Return groups of at least three weights of one pattern and one number of entries, which vary."""
    result: dict[tuple[str, int], dict[str, TensorSummary]] = {}
    for name, each in summaries.items():
        if each.std > 0 and each.count > 1:
            result.setdefault((pattern(name), each.count), {})[name] = each
    return [group for group in result.values() if len(group) >= LEAST]


def outliers(summaries: Mapping[str, TensorSummary], level: float, trained: bool = False) -> list[Outlier]:
    """Return the layers that stand out; a sound drawn module has any with probability at most `level`."""
    asked = groups(summaries)
    drawn = not trained and sum(map(equal_variances, asked)) * 2 > len(asked)
    number = sum(map(len, asked))
    return [each for group in asked for each in standing_out(group, drawn, level / max(number, 1))]


def standing_out(group: dict[str, TensorSummary], drawn: bool, level: float) -> list[Outlier]:
    """Remove the farthest layer, one after the other, until none stands out."""
    rest, result = dict(group), []
    while len(rest) >= LEAST:
        names = list(rest)
        logs, degrees = log_variances(list(rest.values()))
        p = against_pooled(logs, degrees) if drawn else against_spread(logs)
        worst = int(np.argmin(p))
        ratio = float(np.exp((logs[worst] - np.median(np.delete(logs, worst))) / 2))
        if p[worst] > level or (not drawn and 1 / FACTOR < ratio < FACTOR):
            break
        result.append(Outlier(names[worst], ratio, float(p[worst])))
        del rest[names[worst]]
    return result


def log_variances(group: Sequence[TensorSummary]) -> tuple[np.ndarray, np.ndarray]:
    """Return log s² and degrees of freedom ν, with the group's median kurtosis."""
    kurtosis = max(float(np.median([each.kurtosis for each in group])), 1.2)
    counts = np.array([each.count for each in group])
    logs = np.array([2 * np.log(each.std) for each in group]) + np.log(counts / (counts - 1))
    return logs, 2 * (counts - 1) / (kurtosis - 1)


def against_pooled(logs: np.ndarray, degrees: np.ndarray) -> np.ndarray:
    """Return the two-sided p of each variance over the pooled one of the others."""
    p = []
    for i in range(len(logs)):
        others, weights = np.delete(logs, i), np.delete(degrees, i)
        ratio = np.exp(logs[i]) / np.average(np.exp(others), weights=weights)
        law = degrees[i], weights.sum(), ratio
        p.append(2 * min(special.fdtr(*law), special.fdtrc(*law)))
    return np.minimum(p, 1.0)


def against_spread(logs: np.ndarray) -> np.ndarray:
    """Return the two-sided p of the deleted Student t."""
    m, p = len(logs), []
    for i in range(m):
        others = np.delete(logs, i)
        width = max(float(others.std(ddof=1)), 1e-12) * np.sqrt(1 + 1 / (m - 1))
        p.append(2 * special.stdtr(m - 2, -abs(logs[i] - others.mean()) / width))
    return np.array(p)


def equal_variances(group: dict[str, TensorSummary]) -> bool:
    """Return whether the variances of all but the farthest are equal."""
    logs, degrees = log_variances(list(group.values()))
    near = np.argsort(abs(logs - np.median(logs)))[:-1]
    logs, weights = logs[near], degrees[near] / 2
    off = weights @ (logs - np.average(logs, weights=weights)) ** 2
    return bool(special.chdtrc(len(logs) - 1, off) > EQUAL)
