"""One layer of a model on the sphere, as its kernels see it: what is drawn, and the factors in front."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Any

from limitformer.models import HybridTransformer, SphereModel, StochasticTransformer
from limitformer.models.kinds import of_kind


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer, or one step of a limit: `step` in front of the random values, `drift` in front of attention."""

    step: float
    drift: float
    law: str


def layer_of(model: SphereModel, per_unit_time: float, law: str) -> Layer:
    """With `per_unit_time` layers in a unit of time and values of the law."""
    return of_kind(model, LAYERS)(model, per_unit_time, law)


def stochastic_layer(model: StochasticTransformer, per_unit_time: float, law: str) -> Layer:
    """[CT, eq. 4]."""
    return Layer(step=model.sigma / sqrt(per_unit_time), drift=0.0, law=law)


def hybrid_layer(model: HybridTransformer, per_unit_time: float, law: str) -> Layer:
    """[CT, eq. 7]."""
    return Layer(step=model.epsilon / sqrt(per_unit_time), drift=1 / per_unit_time, law=law)


LAYERS: Mapping[type, Callable[[Any, float, str], Layer]] = {
    StochasticTransformer: stochastic_layer,
    HybridTransformer: hybrid_layer,
}
# Whether one number stands in the place of V.
ONE_NUMBER: Mapping[type, bool] = {StochasticTransformer: False, HybridTransformer: True}
