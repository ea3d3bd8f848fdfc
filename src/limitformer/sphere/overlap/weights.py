r"""Attention of two clusters: p tokens at Y₁, q tokens at Y₂, ⟨Y₁, Y₂⟩ = z.

With e = e^{β(z−1)} the first cluster receives A₊ = α₊Y₁ + γ₊Y₂ and the second A₋ = α₋Y₂ + γ₋Y₁, where

  softmax:       α₊ = p/(p + qe),  γ₊ = qe/(p + qe),   α₋ = q/(q + pe),  γ₋ = pe/(q + pe),
  unnormalized:  α₊ = pe^β/N,      γ₊ = qe^{βz}/N,     α₋ = qe^β/N,      γ₋ = pe^{βz}/N,       N = p + q.

For p = q this is the attention of two tokens [CT, proof of Lemma 4]. The difference of the two mixtures is
D = |(α₊ − α₋)Y₁ + (γ₊ − γ₋)Y₂|²/(1 − z) = ((α₊−α₋)² + (γ₊−γ₋)² + 2z(α₊−α₋)(γ₊−γ₋))/(1 − z): zero only for p = q, and
computed below without cancellation at z = 1. At z = −1, 2D is the squared length of A₊ + A₋.

β may have either sign. With softmax, β → −β exchanges A₊ and A₋. Without normalisation it exchanges them too, and
multiplies both by e^{−β(1+z)}.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
from scipy.special import exprel

from limitformer.models.sphere import SphereModel
from limitformer.sphere.overlap.position import Array, Position

LARGEST_LOGIT = 650.0  # e^{−650} is a normal double


@dataclass(frozen=True)
class ClusterMixtures:
    """α₊, γ₊, α₋, γ₋ and D, one shape."""

    own_first: Array
    other_first: Array
    own_second: Array
    other_second: Array
    spread: Array

    @property
    def aligned(self) -> Array:
        """G = α₊α₋ + γ₊γ₋."""
        return self.own_first * self.own_second + self.other_first * self.other_second

    @property
    def crossed(self) -> Array:
        """X = α₊γ₋ + γ₊α₋."""
        return self.own_first * self.other_second + self.other_first * self.own_second

    @property
    def toward(self) -> Array:
        """c = γ₊ + γ₋, the attraction of the clusters."""
        return self.other_first + self.other_second


class Mixtures(Protocol):
    """Two mixtures, or their averages, as `StochasticMotion` reads them."""

    @property
    def spread(self) -> Array:
        """D, the difference of the mixtures."""

    @property
    def aligned(self) -> Array:
        """G = α₊α₋ + γ₊γ₋, or its mean."""

    @property
    def crossed(self) -> Array:
        """X = α₊γ₋ + γ₊α₋, or its mean."""


Weights = Callable[[Position], ClusterMixtures]
Averaging = Callable[[Position], Mixtures]


def softmax(p: int, q: int, beta: float, at: Position) -> ClusterMixtures:
    """Return the mixtures of softmax, whose pairs of weights add up to 1, so γ₊ − γ₋ = −(α₊ − α₋)."""
    e = np.exp(-np.minimum(abs(beta) * at.below, LARGEST_LOGIT))
    first, second = p + q * e, q + p * e
    difference = (p - q) * (p + q) * e / (first * second)
    mix = ClusterMixtures(p / first, q * e / first, q / second, p * e / second, 2 * difference**2)
    return mix if beta >= 0 else exchanged(mix)


def exchanged(mix: ClusterMixtures) -> ClusterMixtures:
    """Exchange A₊ and A₋; each is still a mixture of its own point and the other."""
    return ClusterMixtures(mix.other_second, mix.own_second, mix.other_first, mix.own_first, mix.spread)


def unnormalized(p: int, q: int, beta: float, at: Position) -> ClusterMixtures:
    """Return the mixtures of unnormalized attention."""
    x = beta * at.below
    unit, e = np.exp(beta) / (p + q), np.exp(-x)
    # (1 − e)/(1 − z) = β (1 − e^{−x})/x.
    spread = (p - q) ** 2 * (beta * exprel(-x) * -np.expm1(-x) + 2 * e)
    own = np.ones_like(e) * unit
    return ClusterMixtures(p * own, q * e * unit, q * own, p * e * unit, spread * unit**2)


def weights_of(model: SphereModel, clusters: tuple[int, int], beta: float) -> Weights:
    """Return the mixtures of `model`, with `beta` for its β, as a function of the position."""
    form = {"softmax": softmax, "unnormalized": unnormalized}[model.attention]
    return partial(form, *clusters, beta)
