r"""What GLUE scores a task by, from the counts of right and wrong positives and negatives, p⁺, p⁻, n⁺, n⁻.

* CoLA: Matthews correlation, (p⁺n⁺ − p⁻n⁻)/√((p⁺ + p⁻)(p⁺ + n⁻)(n⁺ + p⁻)(n⁺ + n⁻)), 0 where that is 0/0;
* MRPC: accuracy and F1 = 2p⁺/(2p⁺ + p⁻ + n⁻), 0 where that is 0/0; [ST, Table 2] does not say which it has;
* RTE: accuracy.

Letters: + right, − wrong; p said to be 1, n said to be 0. In GLUE's MRPC 1 is a paraphrase.
"""

from collections.abc import Callable
from math import sqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from limitformer.base.errors import require
from limitformer_papers.training.data.glue_data import Task


class Counts(NamedTuple):
    """p⁺, p⁻, n⁺, n⁻."""

    right_positive: int
    wrong_positive: int
    right_negative: int
    wrong_negative: int


def counts(predictions: ArrayLike, labels: ArrayLike) -> Counts:
    """The four counts of two rows of zeros and ones.

    Raises:
        InputError: rows of different lengths, empty ones, or other numbers.
    """
    said, true = np.asarray(predictions), np.asarray(labels)
    message = f"predictions and labels must be two rows of one length, at least 1; got {said.shape} and {true.shape}."
    require(said.ndim == 1 and said.shape == true.shape and said.size > 0, message)
    require(bool(np.isin(said, (0, 1)).all() and np.isin(true, (0, 1)).all()), "Predictions and labels are 0 or 1.")
    right = said == true
    return Counts(*(int(np.sum(a & b)) for a in (said == 1, said == 0) for b in (right, ~right)))


def matthews(c: Counts) -> float:
    """Matthews correlation, in [−1, 1]."""
    product = c.right_positive * c.right_negative - c.wrong_positive * c.wrong_negative
    positives, negatives = c.right_positive + c.wrong_negative, c.right_negative + c.wrong_positive
    said = (c.right_positive + c.wrong_positive) * (c.right_negative + c.wrong_negative)
    return product / sqrt(said * positives * negatives) if said * positives * negatives else 0.0


def accuracy(c: Counts) -> float:
    """The share that is right."""
    return (c.right_positive + c.right_negative) / sum(c)


def f1(c: Counts) -> float:
    """The harmonic mean of precision and recall of class 1."""
    total = 2 * c.right_positive + c.wrong_positive + c.wrong_negative
    return 2 * c.right_positive / total if total else 0.0


METRICS: dict[Task, dict[str, Callable[[Counts], float]]] = {
    "CoLA": {"matthews": matthews},
    "MRPC": {"accuracy": accuracy, "f1": f1},
    "RTE": {"accuracy": accuracy},
}


def score(task: Task, predictions: ArrayLike, labels: ArrayLike) -> dict[str, float]:
    """The metrics of a task by name, of predicted classes against true ones.

    >>> score("RTE", [0, 1, 1], [0, 1, 0])
    {'accuracy': 0.6666666666666666}
    """
    require(task in METRICS, f"task must be one of {', '.join(METRICS)}; got {task!r}.")
    found = counts(predictions, labels)
    return {name: metric(found) for name, metric in METRICS[task].items()}
