r"""The methods that a model on the sphere allows, and the choice between them.

One layer of a model on the sphere: the law of the random values and the factors in front of them.

Before the normalisation of every token, with A(Xⁱ) the attention of token i (`tokens.attention`):

  stochastic [CT, eq. 4]:  Xⁱ + V A(Xⁱ)/√L,             V_kl i.i.d. with mean 0 and variance σ²;
  hybrid [CT, eq. 7]:      Xⁱ + ω A(Xⁱ),  ω = 1/L + ε v/√L,   v i.i.d. with mean 0 and variance 1.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Any

from limitformer.base.errors import require
from limitformer.models import HybridTransformer, SphereModel, StochasticTransformer
from limitformer.models.kinds import of_kind
from limitformer.sampling.arrays import pairs_of
from limitformer.sphere.options import Method, SphereOptions
from limitformer.sphere.tokens.queries import query_constants, signed_beta


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


LAYERS: Mapping[type, Callable[[Any, float, str], SphereLayer]] = {
    StochasticTransformer: lambda m, per_unit, law: SphereLayer(step=m.sigma / sqrt(per_unit), drift=0.0, law=law),
    HybridTransformer: lambda m, per_unit, law: SphereLayer(
        step=m.epsilon / sqrt(per_unit), drift=1 / per_unit, law=law
    ),
}
# Whether one number replaces the matrix V.
ONE_NUMBER: Mapping[type, bool] = {StochasticTransformer: False, HybridTransformer: True}


def methods_of(model: SphereModel, law: str, *, limit: bool = False) -> list[Method]:
    """Return the methods that the model and the law of its values allow, the cheapest first."""
    invariant = (of_kind(model, ONE_NUMBER) or law == "gaussian") and (model.is_isotropic or model.is_fresh)
    methods: list[Method] = ["coordinates"]
    if invariant and model.tokens < model.dim:
        methods.insert(0, "gram")
    one_head = query_constants(model).heads == 1 or (limit and has_averages(model))
    has_kernel = model.moves_alike or model.attention == "softmax"  # of the overlap
    if invariant and model.tokens == 2 and one_head and has_kernel:
        methods.insert(0, "overlap")
    return methods


def has_averages(model: SphereModel) -> bool:
    """Whether steps of the limit of two tokens average attention over its draws (`pair.chain`)."""
    return model.is_fresh and model.tokens == 2 and model.attention == "softmax" and not model.is_causal


def can_merge(model: SphereModel, law: str) -> bool:
    """Whether tokens that have merged into two points continue as a pair (`stopping.merging`)."""
    gaussian = law == "gaussian" and not of_kind(model, ONE_NUMBER)
    isotropic = model.attention == "softmax" and model.is_isotropic and not (model.is_fresh or model.is_causal)
    return gaussian and isotropic and signed_beta(model) >= 0


def chosen_method(model: SphereModel, law: str, options: SphereOptions, *, limit: bool = False) -> Method:
    """Return the requested method or the cheapest one; raise `InputError` if the model does not allow it."""
    allowed, method, keep = methods_of(model, law, limit=limit), options.method, options.keep
    require(
        keep != "overlap" or model.tokens > 1,
        'One token has no overlap with another. Nearest: keep="outcome" or keep="tokens".',
    )
    if options.pairs is not None:
        pairs_of(options.pairs, model.tokens)
    if keep == "tokens":
        allowed = [m for m in allowed if m == "coordinates"]
    if method is None:
        return allowed[0]
    needs = {
        "overlap": "two tokens, QᵀK = I (or one head, drawn queries and softmax), and Gaussian values or a hybrid "
        "model",
        "gram": "tokens < dim, QᵀK = I or drawn, and Gaussian values or a hybrid model",
        "coordinates": "nothing",
    }
    require(
        method in allowed,
        f"method {method!r} needs {needs[method]}"
        + (", and cannot keep tokens" if keep == "tokens" else "")
        + f"; this model allows {', '.join(map(repr, allowed))}.",
    )
    return method
