"""What the kernels know of β, Q and K."""

from math import copysign

import numpy as np
from numpy.typing import NDArray

from limitformer.models import SphereModel, StochasticTransformer
from limitformer.sphere.tokens.queries import QueryConstants


def signed_beta(model: SphereModel) -> float:
    """β, or |β| where `signed_bilinear` has its sign; times τ where QᵀK/τ is drawn."""
    if isinstance(model, StochasticTransformer) and model.is_fresh:
        return model.logit_scale
    return model.beta if model.is_isotropic else abs(model.beta)


def signed_bilinear(model: SphereModel, coordinates: int) -> NDArray[np.float64]:
    """QᵀK with the sign of β: the kernels take |β|, so that the largest logit has the largest weight.

    Empty where it is the identity; room for (coordinates, coordinates) where it is drawn.
    """
    if model.is_fresh:
        return np.zeros((coordinates, coordinates))
    return np.zeros((0, 0)) if model.is_isotropic else copysign(1.0, model.beta) * model.bilinear()


def query_constants(model: SphereModel) -> QueryConstants:
    """What a layer draws for its queries and keys."""
    if isinstance(model, StochasticTransformer) and model.is_fresh:
        return QueryConstants(True, model.head_dim or 0, model.heads)
    return QueryConstants(False, 0, 1)
