r"""The layers of [CT, eqs. 4 and 7] with weights that train, and a feed-forward branch, future work of [CT].

A layer maps tokens X (n, d) on the unit sphere to tokens on it, with A as in `limitformer.models.sphere`:

  stochastic:  Xⁱ ← normalised( Xⁱ + Σ_h V_h A_h(Xⁱ)/√(h L) ),
  hybrid:      Xⁱ ← normalised( Xⁱ + (1/L + ε v/√L) A(Xⁱ) ),
  then, with a branch F of strength φ,  Xⁱ ← normalised( Xⁱ + φ F(√d Xⁱ)/√L ).

The entries of √d Xⁱ are of order 1 and F preserves their variance, so a linear F moves tokens as values with σ = φ move
tokens that attend only to themselves. Weights start from the law of the declaration: V and v as they stand in the
equations, QᵀK as the pair (Q, K), with K = I where the entries of QᵀK are independent, F as in
`InitialVariances.standard`.

In shapes: n tokens, d coordinates of a token, h heads, k head_dim, l layers or 1.
"""

from collections.abc import Callable, Collection, Mapping
from math import sqrt
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from limitformer.base.errors import require, require_count, require_real
from limitformer.models import Feedforward, HybridTransformer, SphereModel, StochasticTransformer
from limitformer.models.kinds import of_kind
from limitformer.nn.blocks import feedforward_of
from limitformer.nn.initialisation import InitialVariances, draw
from limitformer.sphere.tokens.values import CUT_DEVIATION, SQRT_3

Tokens = Annotated[Tensor, "*batch n d"]
PerHead = Annotated[Tensor, "*batch h n d"]
WEIGHTS = ("query", "key", "values")


class SphereStack(nn.Module):
    """Layers of a model on the sphere: unit vectors (*, n, d) to unit vectors, for any number n of tokens.

    Fixed queries and keys are shared by all layers and stay shared in training; drawn ones differ between layers.

    Args:
        model: a `StochasticTransformer` or a `HybridTransformer`; L is its `layers_per_unit_time`, its `tokens` are not
            read.
        layers: number of layers.
        shared_values: whether all layers have one V or v.
        trained: which of "query", "key" and "values" have gradients.
        feedforward: F, different in each layer and always trained; None omits it.
        strength: φ.
        generator: draws the weights; None takes torch's own.

    Attributes:
        query, key: Q and K (l, h, k, d).
        values: V (l, h, d, d) of the stochastic model, v (l, 1, 1, 1) of the hybrid one.
        feedforward: one module for each layer; empty without F.

    Raises:
        InputError: another kind of model, `trained` has another name, or F is a gated pair.
    """

    def __init__(
        self,
        model: SphereModel,
        layers: int,
        *,
        shared_values: bool = False,
        trained: Collection[str] = WEIGHTS,
        feedforward: Feedforward | None = None,
        strength: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        unknown = sorted(set(trained) - set(WEIGHTS))
        require(not unknown, f"trained may contain {', '.join(WEIGHTS)}; got {', '.join(unknown)}.")
        self.model, self.layers = model, require_count("layers", layers)
        self.strength = require_real("strength", strength)
        values = of_kind(model, FIRST_VALUES)(model, 1 if shared_values else self.layers, generator)
        query, key = queries_and_keys(model, self.layers, generator)
        self.query = nn.Parameter(query, requires_grad="query" in trained)
        self.key = nn.Parameter(key, requires_grad="key" in trained)
        self.values = nn.Parameter(values, requires_grad="values" in trained)
        self.feedforward = nn.ModuleList()
        if feedforward is not None:
            self.feedforward.extend(feedforward_of(feedforward, model.dim, True) for _ in range(self.layers))
            sizes: Any = {"hidden": feedforward.hidden_at(model.dim), "gain": feedforward.gain_at(model.dim)}
            draw(self.feedforward, InitialVariances.standard(model.dim, **sizes), generator)

    def forward(self, x: Tokens) -> Tokens:
        """Compute the tokens after the last layer."""
        form = self.model.beta * self.query.mT @ self.key
        weights = (each.expand(self.layers, -1, -1, -1).unbind(0) for each in (form, self.values))
        for layer, (bilinear, values) in enumerate(zip(*weights, strict=True)):
            mixed = self.attention(x, bilinear)
            x = functional.normalize(x + of_kind(self.model, MOVES)(self.model, mixed, values), dim=-1)
            if self.feedforward:
                branch = self.feedforward[layer](sqrt(self.model.dim) * x)
                scale = self.strength / sqrt(self.model.layers_per_unit_time)
                x = functional.normalize(x + scale * branch, dim=-1)
        return x

    def attention(self, x: Tokens, form: Annotated[Tensor, "h d d"]) -> PerHead:
        """Compute A of every head for the forms βQᵀK."""
        causal, number = self.model.is_causal, x.shape[-2]
        query, x = torch.einsum("...nd,hde->...hne", x, form), x[..., None, :, :]  # one product for the whole batch
        if self.model.attention == "softmax":
            tokens = x.expand_as(query)
            return functional.scaled_dot_product_attention(query, tokens, tokens, is_causal=causal, scale=1.0)
        weights = (query @ x.mT).exp() / number
        return (weights.tril() if causal else weights) @ x


def queries_and_keys(
    model: SphereModel, layers: int, generator: torch.Generator | None
) -> tuple[Annotated[Tensor, "l h k d"], Annotated[Tensor, "l h k d"]]:
    if not isinstance(model, StochasticTransformer) or not model.is_fresh:
        pair = (torch.eye(model.dim),) * 2 if model.query_key is None else map(torch.tensor, model.query_key)
        query, key = (matrix[None, None].clone() for matrix in pair)
        return query, key
    shape = (layers, model.heads, model.head_dim or model.dim, model.dim)
    query = torch.randn(shape, generator=generator)
    if model.head_dim is None:
        return model.tau * query, torch.eye(model.dim).repeat(*shape[:2], 1, 1)
    scale = sqrt(model.tau) / model.head_dim**0.25
    return scale * query, scale * torch.randn(shape, generator=generator)


def draw_values(law: str, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
    """Draw numbers with mean 0 and variance 1 (`limitformer.sphere.tokens.values`)."""
    if law == "gaussian":
        return torch.randn(shape, generator=generator)
    if law == "truncated normal":
        return nn.init.trunc_normal_(torch.empty(shape), a=-2.0, b=2.0, generator=generator) / CUT_DEVIATION
    if law == "uniform":
        return SQRT_3 * (2 * torch.rand(shape, generator=generator) - 1)
    return 2.0 * torch.randint(2, shape, generator=generator) - 1.0


FIRST_VALUES: Mapping[type, Callable[[Any, int, torch.Generator | None], Tensor]] = {
    StochasticTransformer: lambda model, layers, generator: (
        model.sigma * draw_values(model.values, (layers, model.heads, model.dim, model.dim), generator)
    ),
    HybridTransformer: lambda model, layers, generator: draw_values(model.values, (layers, 1, 1, 1), generator),
}
# The step before the normalisation, from the attention (*, h, n, d) and the values of a layer.
MOVES: Mapping[type, Callable[[Any, Tensor, Tensor], Tensor]] = {
    StochasticTransformer: lambda model, mixed, values: (
        torch.einsum("...hnd,hed->...ne", mixed, values) / sqrt(model.heads * model.layers_per_unit_time)
    ),
    HybridTransformer: lambda model, mixed, v: (
        (1 / model.layers_per_unit_time + model.epsilon * v / sqrt(model.layers_per_unit_time)) * mixed
    ).sum(-3),
}
