r"""Tests of whether tensors of two builds have one law, where their code does not tell it.

* One has a law, the other is a set of numbers: the tests of `weight_tests` and `lines`.
* Both are random (K builds each, from their own seeds): mean, log std and log kurtosis of each build are numbers of
  which K are independent, whatever the entries of one build are; Welch's t compares them.
* One is random, the other a set of numbers: the t of one more build.
* Both are numbers: entries count as independent. Welch's t of the means, F of the variances with degrees of freedom
  that follow from the kurtosis, and the Kolmogorov-Smirnov distance of the samples, the only test of few entries.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from scipy import special, stats
from torch import Tensor

from limitformer.initialisation.lines import line_p_values
from limitformer.initialisation.summary import LONG, TensorSummary
from limitformer.initialisation.weight_tests import p_values
from limitformer.weightless.laws import Law

STATISTICS = ("mean", "spread", "shape")
LEAST = 16  # entries; fewer may agree by chance where numbers are coarse
FINEST = 1e-4  # in standard deviations: smaller differences are rounding


def moments(summary: TensorSummary) -> tuple[float, float, float]:
    """Return mean, log std and log kurtosis; a constant has no spread."""
    if summary.std <= 0:
        return summary.mean, -math.inf, 0.0
    return summary.mean, math.log(summary.std), math.log(summary.kurtosis)


def p_of_builds(a: Sequence[TensorSummary], b: Sequence[TensorSummary]) -> dict[str, float]:
    """Return the p-value of each statistic; one of the two may be a single set of numbers."""
    if any(each.std <= 0 for each in (*a, *b)):
        constant = [all(each.std <= 0 for each in one) for one in (a, b)]
        return {"spread": 0.0} if constant[0] != constant[1] else {}
    scale = float(np.median([each.std for each in (*a, *b)]))
    unit = np.array([scale, 1.0, 1.0])
    x, y = (np.array([moments(each) for each in one]) / unit for one in (a, b))
    return {name: welch(x[:, k], y[:, k]) for k, name in enumerate(STATISTICS)}


def welch(x: np.ndarray, y: np.ndarray) -> float:
    """Return the two-sided p-value of equal means; a single number has the variance of the others."""
    apart = abs(float(x.mean() - y.mean()))
    if len(x) == 1 or len(y) == 1:
        many = x if len(x) > 1 else y
        error, degrees = many.std(ddof=1) * math.sqrt(1 + 1 / len(many)), len(many) - 1
    else:
        u, v = x.var(ddof=1) / len(x), y.var(ddof=1) / len(y)
        error = math.sqrt(u + v)
        degrees = (u + v) ** 2 / (u**2 / (len(x) - 1) + v**2 / (len(y) - 1)) if u + v > 0 else len(x) + len(y) - 2
    return float(2 * special.stdtr(degrees, -apart / max(error, FINEST)))


def p_of_numbers(a: TensorSummary, b: TensorSummary) -> dict[str, float]:
    """Return the p-value of each statistic of two sets of independent entries; of few entries, of the shape only."""
    if min(a.std, b.std) <= 0:
        return {"spread": 0.0}
    result = {"shape": float(stats.ks_2samp(a.sample, b.sample, method="auto").pvalue)}
    if min(a.count, b.count) >= LEAST:
        one, other = ((each.mean, each.std * math.sqrt(each.count / (each.count - 1)), each.count) for each in (a, b))
        result["mean"] = float(stats.ttest_ind_from_stats(*one, *other, equal_var=False).pvalue)
        excess = max(a.kurtosis, b.kurtosis, 3.0) - 1
        degrees = [2 * (each.count - 1) / excess for each in (a, b)]
        ratio = (one[1] / other[1]) ** 2
        result["spread"] = float(2 * min(special.fdtr(*degrees, ratio), special.fdtrc(*degrees, ratio)))
    return result


def p_of_law(values: Tensor, summary: TensorSummary, law: Law) -> dict[str, float]:
    """Return the p-values of numbers against a random law; 0 is what the law excludes."""
    if summary.odd:
        return {"NaN": 0.0}
    if not summary.count:
        return {}
    result = p_values(summary, law) | line_p_values(values, summary, law)
    if summary.constant and summary.count >= LONG:
        result["constant"] = 0.0
    if any(dead_lines(summary)):
        result["dead rows"] = 0.0
    if any(not bool((values[row] == value).all()) for row, value in law.rows.items()):
        result["fixed rows"] = 0.0
    return result


def dead_lines(each: TensorSummary) -> tuple[int, int]:
    """Count rows and columns that are all zero; lines of few entries do not count."""
    if each.dead or not len(each.rows):
        return 0, 0
    long = len(each.columns) >= LONG, len(each.rows) >= LONG
    return int((each.rows == 0).sum()) * long[0], int((each.columns == 0).sum()) * long[1]


def same_values(a: Tensor, b: Tensor, rtol: float = 0.0, atol: float = 0.0) -> bool:
    """Return whether two tensors are equal up to rounding to the coarser of their types, or up to `rtol` and `atol`."""
    if a.shape != b.shape or a.is_meta or b.is_meta:
        return False
    if a.dtype == b.dtype and a.layout == b.layout == torch.strided and a.device == b.device and torch.equal(a, b):
        return True
    a, b = (each.to_dense() if each.layout != torch.strided else each for each in (a.detach().cpu(), b.detach().cpu()))
    if not a.is_floating_point() or not b.is_floating_point():
        return bool(torch.equal(a, b)) if a.dtype == b.dtype else bool((a == b).all())
    accuracy = max(rtol, *(4 * torch.finfo(each.dtype).eps for each in (a, b)))
    return bool(torch.allclose(a.double(), b.double(), rtol=accuracy, atol=atol, equal_nan=True))
