"""The parameters β, Q and K of a model as the kernels take them."""

from math import copysign

import numpy as np
from numpy.typing import NDArray

from limitformer.models import SphereModel, StochasticTransformer
from limitformer.sphere.tokens.queries import QueryConstants


def signed_beta(model: SphereModel) -> float:
    """Return β for QᵀK = I, βτ for a drawn QᵀK/τ, else |β|; `signed_bilinear` then has the sign."""
    if isinstance(model, StochasticTransformer) and model.is_fresh:
        return model.logit_scale
    return model.beta if model.is_isotropic else abs(model.beta)


def signed_bilinear(model: SphereModel, coordinates: int) -> NDArray[np.float64]:
    """Return QᵀK with the sign of β; the kernels take |β|, so that the largest logit has the largest weight.

    The array is empty if QᵀK = I, and zeros (coordinates, coordinates) to fill if QᵀK is drawn.
    """
    if model.is_fresh:
        return np.zeros((coordinates, coordinates))
    return np.zeros((0, 0)) if model.is_isotropic else copysign(1.0, model.beta) * model.bilinear()


def query_constants(model: SphereModel) -> QueryConstants:
    """Return the law of the drawn queries and keys; one head without draws if they are fixed."""
    if isinstance(model, StochasticTransformer) and model.is_fresh:
        return QueryConstants(True, model.head_dim or 0, model.heads)
    return QueryConstants(False, 0, 1)
