"""What becomes of two tokens, and when, as both parts of the sphere's page show it."""

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from limitformer.models import SphereModel
from limitformer.sphere.overlap import overlap
from limitformer_papers.explorer.parts import curve

INWARD = 0.9  # |z| at which two tokens count as together or opposite
FATE, WAIT = "Probability that two tokens end opposite", f"Mean time from overlap 0 to |z| = {INWARD:g}"
FATES = [curve("from a uniform start", "law", 0), curve("from overlap z = 0", "own", 1)]

Array = NDArray[np.float64]


def antipodal(model: SphereModel, start: Any = None) -> Any:
    """P(two tokens end opposite), from a uniform start or from overlaps."""
    return overlap(model).antipodal_probability(start=start)


def apart(model: SphereModel) -> float:
    """Mean time until two tokens of overlap 0 are nearly together or opposite."""
    return overlap(model).mean_exit_time(-INWARD, INWARD, start=0.0)


def fates(models: Iterable[SphereModel]) -> Array:
    """(2, models): P(opposite) from a uniform start, and from overlap 0."""
    return np.array([[float(antipodal(each)), float(antipodal(each, 0.0))] for each in models]).T


def waits(models: Iterable[SphereModel]) -> Array:
    """(1, models): how long two tokens take to decide."""
    return np.array([[apart(each) for each in models]])
