r"""One layer of a model on the sphere: the law of the random values and the factors in front of them.

Before the normalisation of every token, with A(Xⁱ) the attention of token i (`tokens.attention`):

  stochastic [CT, eq. 4]:  Xⁱ + V A(Xⁱ)/√L,             V_kl i.i.d. with mean 0 and variance σ²;
  hybrid [CT, eq. 7]:      Xⁱ + ω A(Xⁱ),  ω = 1/L + ε v/√L,   v i.i.d. with mean 0 and variance 1.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Any

from limitformer.models import HybridTransformer, SphereModel, StochasticTransformer
from limitformer.models.kinds import of_kind


@dataclass(frozen=True, kw_only=True)
class SphereLayer:
    """One layer, or one step of a limit.

    `step` is the factor of random values of variance 1, `drift` the factor of attention itself.
    """

    step: float
    drift: float
    law: str


def layer_of(model: SphereModel, per_unit_time: float, law: str) -> SphereLayer:
    """Return the layer of `model` with `per_unit_time` layers per unit of time and values of the law."""
    return of_kind(model, LAYERS)(model, per_unit_time, law)


def stochastic_layer(model: StochasticTransformer, per_unit_time: float, law: str) -> SphereLayer:
    return SphereLayer(step=model.sigma / sqrt(per_unit_time), drift=0.0, law=law)


def hybrid_layer(model: HybridTransformer, per_unit_time: float, law: str) -> SphereLayer:
    return SphereLayer(step=model.epsilon / sqrt(per_unit_time), drift=1 / per_unit_time, law=law)


LAYERS: Mapping[type, Callable[[Any, float, str], SphereLayer]] = {
    StochasticTransformer: stochastic_layer,
    HybridTransformer: hybrid_layer,
}
# Whether one number replaces the matrix V.
ONE_NUMBER: Mapping[type, bool] = {StochasticTransformer: False, HybridTransformer: True}
