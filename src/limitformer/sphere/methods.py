r"""The options of `simulate` on the sphere, the methods that a model allows, and the choice between them.

One layer of a model on the sphere: the law of the random values and the factors in front of them.

Before the normalisation of every token, with A(Xⁱ) the attention of token i (`tokens.attention`):

  stochastic [CT, eq. 4]:  Xⁱ + V A(Xⁱ)/√L,             V_kl i.i.d. with mean 0 and variance σ²;
  hybrid [CT, eq. 7]:      Xⁱ + ω A(Xⁱ),  ω = 1/L + ε v/√L,   v i.i.d. with mean 0 and variance 1.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from limitformer.base.errors import require, require_real, set_fields
from limitformer.models import HybridTransformer, SphereModel, StochasticTransformer
from limitformer.models.kinds import of_kind
from limitformer.models.sphere import require_known
from limitformer.sampling.arrays import Dtype, Pairs, checked_dtype, checked_pairs, pairs_of
from limitformer.sphere.tokens.queries import query_constants, signed_beta

Method = Literal["overlap", "gram", "coordinates"]
Keep = Literal["overlap", "outcome", "tokens"]

DEFAULT_POINTS = 101
LONGEST = 1e9  # units of time


@dataclass(frozen=True, kw_only=True)
class SphereOptions:
    """The options of tokens on the sphere; `limitformer.simulate` describes them.

    Raises:
        InputError: a value is out of range.
    """

    horizon: float
    method: Method | None = None
    keep: Keep = "overlap"
    tolerance: float = 1e-3
    early_stop: float | None = None
    pairs: Pairs | None = None
    dtype: Dtype = "float64"

    def __post_init__(self) -> None:
        for name in ("horizon", "tolerance"):
            set_fields(self, **{name: require_real(name, getattr(self, name))})
        require(self.horizon > 0, f"horizon must be positive; got {self.horizon}.")
        require(self.horizon <= LONGEST, f"horizon must be at most {LONGEST:g}; got {self.horizon:g}.")
        require(0 < self.tolerance < 0.5, f"tolerance must lie in (0, 0.5); got {self.tolerance}.")
        require_known("keep", self.keep, Keep)
        if self.early_stop is not None:
            set_fields(self, early_stop=require_real("early_stop", self.early_stop))
            require(0 < self.early_stop < 1, f"early_stop must lie in (0, 1) or be None; got {self.early_stop}.")
        if self.method is not None:
            require_known("method", self.method, Method)
        set_fields(self, pairs=checked_pairs(self.pairs), dtype=checked_dtype(self.dtype))
        idle = f'would change nothing with keep="{self.keep}"; '
        require(self.pairs is None or self.keep == "overlap", f"pairs {idle}leave it out, or keep overlaps.")
        require(self.dtype == "float64" or self.keep != "outcome", f"dtype {idle}outcomes are whole numbers.")

    def default_points(self, steps: int) -> NDArray[np.int64]:
        """About a hundred step numbers, evenly spaced, from the first to the last."""
        return np.unique(np.rint(np.linspace(0, steps, DEFAULT_POINTS)).astype(np.int64))


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
