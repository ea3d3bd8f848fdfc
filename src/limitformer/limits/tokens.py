r"""The infinite-depth limit of tokens on the sphere: L to infinity, layers/L → t.

* stochastic [CT, Thm 1, eq. 6]:  dYⁱ = −(d − 1)σ²/2 |Aⁱ|² Yⁱ dt + σ P⊥ⁱ dW Aⁱ,  the same for every law of the values
  (proven there for bounded ones; the Gaussian law is tested here);
* hybrid [CT, Lemma 3, eq. 8]:    dYⁱ = [ε² F(Yⁱ, Aⁱ) + P⊥ⁱ Aⁱ] dt + ε P⊥ⁱ Aⁱ dB,
  F(x, a) = (3/2)⟨x, a⟩² x − |a|² x/2 − ⟨x, a⟩ a.

Aⁱ is attention at token i, P⊥ⁱ the projection onto the tangent space there, W a d × d matrix of Brownian motions. Plain
Euler leaves the sphere; the step of `simulate` is the layer itself with L = 1/dt and Gaussian values, whose rows are
normalised, and whose weak error is of order dt.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from limitformer.errors import require
from limitformer.models import HybridTransformer, SphereModel, StochasticTransformer
from limitformer.models.serial import register
from limitformer.models.sphere_start import at_tokens

Matrix = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class TokenLimit:
    """The SDE of tokens on the sphere, made by `lf.limit(model)`.

    Attributes:
        model: what it is the limit of; its layers per unit of time and the law of its values have no effect.
    """

    model: SphereModel

    def __post_init__(self) -> None:
        known = isinstance(self.model, StochasticTransformer | HybridTransformer)
        require(known, f"model must be a StochasticTransformer or a HybridTransformer; got {self.model!r}.")

    def attention(self, tokens: ArrayLike) -> Matrix:
        """A(Yⁱ) (tokens, dim) at Y = `tokens` (tokens, dim) [CT, eqs 2, 3].

        >>> import limitformer as lf
        >>> model = lf.StochasticTransformer(tokens=2, dim=2, beta=0.0, layers_per_unit_time=1)
        >>> lf.limit(model).attention(np.eye(2))
        array([[0.5, 0.5],
               [0.5, 0.5]])
        """
        y = self._checked(tokens)
        keys = y if self.model.query_key is None else y @ self.model.bilinear()
        logits = self.model.beta * (keys @ y.T)
        if self.model.attention == "unnormalized":
            return np.asarray(np.exp(logits) @ y / len(y))
        weights = np.exp(logits - logits.max(1, keepdims=True))
        return np.asarray(weights / weights.sum(1, keepdims=True) @ y)

    def drift(self, tokens: ArrayLike) -> Matrix:
        """Of dY (tokens, dim) at Y = `tokens` (tokens, dim)."""
        y, a = self._checked(tokens), self.attention(tokens)
        along, squared = (y * a).sum(1, keepdims=True), (a * a).sum(1, keepdims=True)
        if isinstance(self.model, HybridTransformer):
            second = 1.5 * along**2 * y - 0.5 * squared * y - along * a
            return np.asarray(self.model.epsilon**2 * second + a - along * y)
        assert isinstance(self.model, StochasticTransformer)
        return np.asarray((1 - self.model.dim) / 2 * self.model.sigma**2 * squared * y)

    def diffusion(self, tokens: ArrayLike) -> NDArray[np.float64]:
        """Cov(dYⁱ_k, dYʲ_l)/dt (tokens, dim, tokens, dim) at Y = `tokens` (tokens, dim), dense, for checks."""
        y, a = self._checked(tokens), self.attention(tokens)
        tangent = np.eye(y.shape[1]) - y[:, :, None] * y[:, None, :]
        if isinstance(self.model, HybridTransformer):
            noise = self.model.epsilon * np.einsum("ikl,il->ik", tangent, a)
            return np.einsum("ik,jl->ikjl", noise, noise)
        assert isinstance(self.model, StochasticTransformer)
        common = self.model.sigma**2 * (a @ a.T)
        return np.asarray(np.einsum("ij,ikx,jxl->ikjl", common, tangent, tangent))

    def _checked(self, tokens: ArrayLike) -> Matrix:
        found = at_tokens(tokens, self.model).tokens
        assert found is not None
        return found


register(TokenLimit)
