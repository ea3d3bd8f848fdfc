r"""The infinite-depth limit of tokens on the sphere: L to infinity, layers/L → t.

* stochastic [CT, Thm 1, eq. 6]:  dYⁱ = −(d − 1)σ²/2 |Aⁱ|² Yⁱ dt + σ P⊥ⁱ dW Aⁱ,  the same for every law of the values
  (proven there for bounded ones; the Gaussian law is tested here);
* drawn queries and keys, or heads: the same with the mean E⟨Aⁱ, Aʲ⟩ over the draws instead of ⟨Aⁱ, Aʲ⟩;
* hybrid [CT, Lemma 3, eq. 8]:    dYⁱ = [ε² F(Yⁱ, Aⁱ) + P⊥ⁱ Aⁱ] dt + ε P⊥ⁱ Aⁱ dB,
  F(x, a) = (3/2)⟨x, a⟩² x − |a|² x/2 − ⟨x, a⟩ a.

Aⁱ is attention at token i, P⊥ⁱ the projection onto the tangent space there, W a d × d matrix of Brownian motions. Plain
Euler leaves the sphere; the step of `simulate` is the layer itself with L = 1/dt and Gaussian values, whose rows are
normalised, and whose weak error is of order dt times the rate at which a layer moves tokens (`fastest_rate`):

* stochastic: a layer turns a token by an angle of mean square (d − 1) σ²|A|² dt, and attention changes with the overlap
  on the scale 1/β, so σ² max|A|² (d − 1 + |β|‖QᵀK‖);
* drawn QᵀK, b = |β|τ: attention averaged over its draws has the rate σ²(d − 1)(1 + b). A step that draws QᵀK itself
  moves antipodes apart by b times their distance with a probability of order 1/b, and must resolve b²:
  σ² max|A|² (d − 1 + b² + b√d);
* hybrid: a layer multiplies by 1 + w (dt + ε dB), w an attention weight, so max w + ε² max w²;

with max|A| = max w = 1 for softmax and e^{|β|‖QᵀK‖} for unnormalized attention. With drawn queries √E w² replaces the
latter: e^{b²} for normal entries, and (1 − 4b²/k)^{−k/4} for a product, infinite for 4b² ≥ k. A longer step is not a
step of the limit but a chain of few layers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import exp, inf, isinf, log1p, sqrt
from typing import Annotated, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from limitformer.base.errors import NoLimitError
from limitformer.models import HybridTransformer, SphereModel, StochasticTransformer
from limitformer.models.kinds import of_kind, register, require_exact_kind, require_kind
from limitformer.models.sphere import start_at_tokens
from limitformer.sphere.overlap.drawn import DrawnAttention
from limitformer.sphere.overlap.position import at_overlap

LARGEST_EXPONENT = 300.0  # its square is still a double

Matrix = NDArray[np.float64]
Tensor = NDArray[np.float64]
Tokens = Annotated[Matrix, "tokens dim"]
TokensLike = Annotated[ArrayLike, "tokens dim"]


@register("limit")
@dataclass(frozen=True, kw_only=True)
class TokenLimit:
    """The SDE of tokens on the sphere, made by `lf.limit(model)`.

    Attributes:
        model: the finite model; its layers per unit of time and the law of its values have no effect.
    """

    model: SphereModel

    def __post_init__(self) -> None:
        require_exact_kind(self, TokenLimit)
        require_kind("model", self.model, "sphere model")
        if self.model.attention == "unnormalized" and isinf(log_weight(self.model)):
            assert isinstance(self.model, StochasticTransformer)
            raise NoLimitError(
                f"Without normalisation, head_dim={self.model.head_dim} and βτ = {self.model.logit_scale:g} give "
                "weights of infinite variance, and layers no limit. Nearest: head_dim above "
                f'4(βτ)² = {4 * self.model.logit_scale**2:g}, or attention="softmax".'
            )

    @property
    def fastest_rate(self) -> float:
        """The largest rate at which a step can move the tokens, in 1/time."""
        return of_kind(self.model, RATES)(self.model)

    def attention(self, tokens: TokensLike) -> Tokens:
        """Return A(Yⁱ) (tokens, dim) at Y = `tokens` (tokens, dim) (`sphere.tokens.attention`).

        >>> import limitformer as lf
        >>> model = lf.StochasticTransformer(tokens=2, dim=2, beta=0.0, layers_per_unit_time=1)
        >>> lf.limit(model).attention(np.eye(2))
        array([[0.5, 0.5],
               [0.5, 0.5]])
        """
        y = self._checked(tokens)
        if self.model.is_fresh:
            raise NoLimitError(
                'With query_key="gaussian" attention is random at every depth; the limit has its averages in `drift` '
                "and `diffusion`, for two tokens."
            )
        keys = y if self.model.query_key is None else y @ self.model.bilinear()
        logits = self.model.beta * (keys @ y.T)
        if self.model.is_causal:
            logits = np.where(np.tri(len(y), dtype=bool), logits, -np.inf)
        if self.model.attention == "unnormalized":
            return np.asarray(np.exp(logits) @ y / len(y))
        weights = np.exp(logits - logits.max(1, keepdims=True))
        return np.asarray(weights / weights.sum(1, keepdims=True) @ y)

    def drift(self, tokens: TokensLike) -> Tokens:
        """Return the drift of Y (tokens, dim) at Y = `tokens` (tokens, dim)."""
        y = self._checked(tokens)
        if self.model.is_fresh:
            return spherical_drift(self.model, y, averaged_products(self.model, y))
        return of_kind(self.model, DRIFTS)(self.model, y, self.attention(tokens))

    def diffusion(self, tokens: TokensLike) -> Annotated[Tensor, "tokens dim tokens dim"]:
        """Return Cov(dYⁱ_k, dYʲ_l)/dt (tokens, dim, tokens, dim) at Y = `tokens` (tokens, dim), dense, for checks."""
        y = self._checked(tokens)
        tangent = np.eye(y.shape[1]) - y[:, :, None] * y[:, None, :]
        if self.model.is_fresh:
            return common_noise(self.model, tangent, averaged_products(self.model, y))
        a = self.attention(tokens)
        return of_kind(self.model, DIFFUSIONS)(self.model, tangent, a)

    def _checked(self, tokens: ArrayLike) -> Matrix:
        y = start_at_tokens(tokens, self.model).tokens
        assert y is not None
        return y


def spherical_drift(model: SphereModel, y: Matrix, products: Matrix) -> Matrix:
    """Return −(d − 1)σ²/2 |Aⁱ|² Yⁱ (tokens, dim) from ⟨Aⁱ, Aʲ⟩ (tokens, tokens), or their averages."""
    assert isinstance(model, StochasticTransformer)
    return np.asarray((1 - model.dim) / 2 * model.sigma**2 * np.diag(products)[:, None] * y)


def hybrid_drift(model: HybridTransformer, y: Matrix, a: Matrix) -> Matrix:
    """Return ε² F(Yⁱ, Aⁱ) + P⊥ⁱ Aⁱ (tokens, dim)."""
    along, squared = (y * a).sum(1, keepdims=True), (a * a).sum(1, keepdims=True)
    second = 1.5 * along**2 * y - 0.5 * squared * y - along * a
    return np.asarray(model.epsilon**2 * second + a - along * y)


def common_noise(model: SphereModel, tangent: Tensor, products: Matrix) -> Tensor:
    """Return σ² ⟨Aⁱ, Aʲ⟩ P⊥ⁱ P⊥ʲ (tokens, dim, tokens, dim) from ⟨Aⁱ, Aʲ⟩, or their averages, and the projections."""
    assert isinstance(model, StochasticTransformer)
    common = model.sigma**2 * products
    return np.asarray(np.einsum("ij,ikx,jxl->ikjl", common, tangent, tangent))


def hybrid_diffusion(model: HybridTransformer, tangent: Tensor, a: Matrix) -> Tensor:
    """Return ε² (P⊥ⁱ Aⁱ)(P⊥ʲ Aʲ)ᵀ (tokens, dim, tokens, dim)."""
    noise = model.epsilon * np.einsum("ikl,il->ik", tangent, a)
    return np.einsum("ik,jl->ikjl", noise, noise)


def averaged_products(model: SphereModel, y: Matrix) -> Matrix:
    """Return E⟨Aⁱ, Aʲ⟩ (tokens, tokens) over drawn queries and keys, for one or two tokens `y` (tokens, dim)."""
    if len(y) == 1:
        return np.ones((1, 1))
    if len(y) > 2 or model.attention != "softmax" or model.is_causal:
        raise NoLimitError(
            "With drawn queries and keys the averages of attention are known only for two tokens, softmax and no mask. "
            "Nearest: `simulate`, whose steps draw them."
        )
    assert isinstance(model, StochasticTransformer)
    at = at_overlap(float(y[0] @ y[1]))
    mix = DrawnAttention(model.logit_scale, head_dim=model.head_dim).averages(at)
    across = float(mix.crossed + at.z * mix.aligned)
    along = float(1 - at.below * (mix.crossed - mix.spread / 2))
    return np.array([[along, across], [across, along]])


def largest_logit(model: SphereModel) -> float:
    """Return |β|‖QᵀK‖, or b² + b√d if QᵀK is drawn."""
    if isinstance(model, StochasticTransformer) and model.is_fresh:
        return model.logit_scale**2 + model.logit_scale * sqrt(model.dim)
    return abs(model.beta) * model.largest_bilinear


def largest_weight(model: SphereModel) -> float:
    """Return max|A| for unit tokens, or its root mean square over drawn queries and keys."""
    return 1.0 if model.attention == "softmax" else exp(min(log_weight(model), LARGEST_EXPONENT))


def log_weight(model: SphereModel) -> float:
    """Return log max w, or log √E w² if QᵀK is drawn."""
    if not (isinstance(model, StochasticTransformer) and model.is_fresh):
        return abs(model.beta) * model.largest_bilinear
    b, k = model.logit_scale, model.head_dim
    if k is None:
        return b**2
    return -k / 4 * log1p(-4 * b**2 / k) if 4 * b**2 < k else inf


def averaged_rate(model: SphereModel) -> float:
    """Return the rate σ²(d − 1)(1 + b) of steps with attention averaged over drawn queries and keys."""
    assert isinstance(model, StochasticTransformer)
    return model.sigma**2 * (model.dim - 1) * (1 + model.logit_scale)


RATES: Mapping[type, Callable[[Any], float]] = {
    StochasticTransformer: lambda m: m.sigma**2 * largest_weight(m) ** 2 * (m.dim - 1 + largest_logit(m)),
    HybridTransformer: lambda m: largest_weight(m) + (m.epsilon * largest_weight(m)) ** 2,
}
DRIFTS: Mapping[type, Callable[[Any, Matrix, Matrix], Matrix]] = {
    StochasticTransformer: lambda model, y, a: spherical_drift(model, y, a @ a.T),
    HybridTransformer: hybrid_drift,
}
DIFFUSIONS: Mapping[type, Callable[[Any, Tensor, Matrix], Tensor]] = {
    StochasticTransformer: lambda model, tangent, a: common_noise(model, tangent, a @ a.T),
    HybridTransformer: hybrid_diffusion,
}
