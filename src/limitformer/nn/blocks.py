r"""Blocks of a Transformer that trains, and stacks of blocks.

* shaped:  X ← λX + γ f(X),  with shaped attention and a shaped ReLU, λ and γ trained, no normalisation [ST, App. D];
* Pre-LN:  X ← X + f(LN(X)), with softmax attention;
* Post-LN: X ← LN(X + f(X)), with softmax attention.

`stack_of` builds the network that a `limitformer.Transformer` declares; untrained, it has the law of the exact chain.

In shapes: b batch, m tokens, n width.
"""

from collections.abc import Callable, Mapping
from math import sqrt
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from limitformer import models
from limitformer.base.errors import InputError, require, require_count
from limitformer.models.kinds import of_kind
from limitformer.nn.drawn.network import Norm
from limitformer.nn.drawn.own import torch_elementwise, torch_shaped
from limitformer.nn.gains import Gain, TrainableShapedReLU
from limitformer.nn.initialisation import InitialVariances, draw
from limitformer.nn.rounding import to_half_dtype
from limitformer.nn.self_attention import ShapedSelfAttention
from limitformer.nn.strengths import Residual, Sum
from limitformer.nn.visibility import Mask, Visibility, visibility

Make = Callable[[], nn.Module]
Tokens = Annotated[Tensor, "b m n"]
AnyTokens = Annotated[Tensor, "... n"]


class FeedForward(nn.Module):
    """σ(X W_pre) W_post: tokens (*, n) to (*, n).

    Args:
        width: n.
        hidden: n_h.
        activation: σ, entry by entry.
        bias: whether there are biases; they start at 0.
    """

    def __init__(self, width: int, hidden: int, activation: nn.Module, *, bias: bool = False) -> None:
        super().__init__()
        self.pre = nn.Linear(width, hidden, bias=bias)
        self.activation = activation
        self.post = nn.Linear(hidden, width, bias=bias)

    def forward(self, x: AnyTokens) -> AnyTokens:
        """Compute σ(X W_pre) W_post."""
        result: Tensor = self.post(self.activation(self.pre(to_half_dtype(x, self.pre.weight))))
        return result


class ActivatedLinear(nn.Module):
    """σ(X) W, a feed-forward layer of one matrix without biases: tokens (*, n) to (*, n)."""

    def __init__(self, width: int, activation: nn.Module) -> None:
        super().__init__()
        self.activation = activation
        self.post = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.post(self.activation(x))
        return result


class Block(nn.Module):
    """Attention, then feed-forward, each X ← post(residual(X, f(pre(X)))): tokens (b, m, n) to (b, m, n).

    Args:
        attention: module of (tokens, mask, is_causal); None omits it.
        feedforward: module of tokens; None omits it.
        residual: builds the residual of a sublayer.
        pre, post: build its normalisations.
    """

    def __init__(
        self,
        attention: nn.Module | None,
        feedforward: nn.Module | None,
        *,
        residual: Make = Sum,
        pre: Make = nn.Identity,
        post: Make = nn.Identity,
    ) -> None:
        super().__init__()
        self.attention, self.feedforward = attention, feedforward
        parts = [name for name in ("attention", "feedforward") if getattr(self, name) is not None]
        require(bool(parts), "A block needs attention, feedforward or both; got neither.")
        self.residual = nn.ModuleDict({name: residual() for name in parts})
        self.pre = nn.ModuleDict({name: pre() for name in parts})
        self.post = nn.ModuleDict({name: post() for name in parts})

    def forward(
        self, x: Tokens, mask: Mask | Visibility | None = None, is_causal: bool = False, **cache: Any
    ) -> Tokens:
        """Compute the block's output; `mask` as for `shaped_attention`; `cache`: arguments of the attention."""
        if self.attention is not None:
            x = self.add("attention", x, self.attention(self.pre["attention"](x), mask, is_causal, **cache))
        if self.feedforward is not None:
            x = self.add("feedforward", x, self.feedforward(self.pre["feedforward"](x)))
        return x

    def add(self, name: str, x: Tokens, branch: Tokens) -> Tokens:
        """Compute post(residual(X, f))."""
        result: Tensor = self.post[name](self.residual[name](x, branch))
        return result


def shaped_block(
    width: int,
    heads: int,
    *,
    gamma: float,
    hidden: int | None = None,
    kv_heads: int | None = None,
    tau0: float = 1.0,
    per_head: bool = True,
    bias: bool = False,
    float32: bool = False,
) -> Block:
    """Build the shaped block of [ST, App. D]: s₋ = 1 − 1/√n, γ₁ = γ₂ = 1, λ² + γ² = 1; `hidden` None means 4 width.

    In [ST] γ₁ and γ₂ are one number each; with `per_head` each head has its own.
    """
    width, hidden = require_count("width", width), 4 * width if hidden is None else require_count("hidden", hidden)
    slope = 1 - 1 / sqrt(width)
    block = Block(
        ShapedSelfAttention(width, heads, kv_heads=kv_heads, tau0=tau0, per_head=per_head, bias=bias, float32=float32),
        FeedForward(width, hidden, TrainableShapedReLU(negative=slope), bias=bias),
        residual=lambda: Residual(gamma),
    )
    draw(block, InitialVariances.shaped(width, hidden=hidden, gain=2 / (1 + slope**2)))
    return block


def pre_ln_block(
    width: int, heads: int, *, hidden: int | None = None, kv_heads: int | None = None, bias: bool = False
) -> Block:
    """Build the Pre-LN block with softmax attention and ReLU; `hidden` None means 4 width."""
    return norm_block(width, heads, "pre", hidden, kv_heads, bias)


def post_ln_block(
    width: int, heads: int, *, hidden: int | None = None, kv_heads: int | None = None, bias: bool = False
) -> Block:
    """Build the Post-LN block with softmax attention and ReLU; `hidden` None means 4 width."""
    return norm_block(width, heads, "post", hidden, kv_heads, bias)


def norm_block(width: int, heads: int, place: str, hidden: int | None, kv_heads: int | None, bias: bool) -> Block:
    width, hidden = require_count("width", width), 4 * width if hidden is None else require_count("hidden", hidden)
    block = Block(
        ShapedSelfAttention(width, heads, kv_heads=kv_heads, gamma1=None, gamma2=None, bias=bias),
        FeedForward(width, hidden, nn.ReLU(), bias=bias),
        **{place: lambda: nn.LayerNorm(width)},
    )
    draw(block, InitialVariances.standard(width, hidden=hidden, gain=2.0))
    return block


class Stack(nn.Module):
    """Blocks one after the other, which share one prepared mask: tokens (b, m, n) to (b, m, n)."""

    def __init__(self, blocks: list[Block], *, is_causal: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.is_causal = is_causal

    def forward(self, x: Tokens, mask: Mask | None = None) -> Tokens:
        """Compute the last block's output, in the dtype of `x`; `mask` is as for `shaped_attention`."""
        tokens, dtype = x.shape[-2], x.dtype
        visible = visibility(mask, is_causal=self.is_causal, queries=tokens, keys=tokens, device=x.device)
        for block in self.blocks:
            x = block(x, visible)  # float32 if the attention returns float32
        return x.to(dtype)


def stack_of(model: models.Transformer, generator: torch.Generator | None = None, *, trained: bool = True) -> Stack:
    """Build the trainable network of a declaration, drawn from its law; `trained`: whether gains, λ and γ are trained.

    Raises:
        InputError: attention without `heads`, which has no output projection; a user-defined rule; a gated pair.
    """
    strengths = model.strengths.tolist()
    blocks = [block_of(model, trained, strengths[layer % len(strengths)]) for layer in range(model.depth)]
    stack = Stack(blocks, is_causal=model.mask == "causal")
    draw(stack, variances_of(model), generator)
    return stack


def variances_of(model: models.Transformer) -> InitialVariances:
    part, feedforward = model.attention, model.feedforward
    shaped = part is not None and part.interventions[2] == "shaped"
    joined = None if part is None else (part.heads or 1) * part.key_dim(model.width)
    hidden = None if feedforward is None else feedforward.hidden_at(model.width)
    gain = 1.0 if feedforward is None else feedforward.gain_at(model.width)
    law = InitialVariances.shaped if shaped else InitialVariances.standard
    return law(model.width, joined=joined, hidden=hidden, gain=gain)


def block_of(model: models.Transformer, trained: bool, strengths: list[list[float]]) -> Block:
    """Build one block of a declaration, not drawn yet; `strengths` are λ and γ of its sublayers."""
    remaining = iter(strengths)  # a block builds its residuals in this order
    norm = model.normalisation
    places = {} if norm is None else {norm.placement: lambda: norm_of(norm, model.width)}
    return Block(
        None if model.attention is None else attention_of(model.attention, model.width, trained),
        None if model.feedforward is None else feedforward_of(model.feedforward, model.width, trained),
        residual=lambda: Residual(*reversed(next(remaining)), trained=trained),
        **places,
    )


def attention_of(part: models.Attention, width: int, trained: bool) -> ShapedSelfAttention:
    if type(part) is models.Mixing:
        raise InputError(f"Networks that train have shaped or softmax attention; got {part!r}. Nearest: nn.Network.")
    if part.heads is None:
        raise InputError("A network that trains has an output projection; got heads=None. Nearest: heads=1.")
    identity, center, _ = part.interventions
    return ShapedSelfAttention(
        width,
        part.heads,
        head_dim=part.key_dim(width),
        tau0=part.tau0,
        gamma1=1.0 if identity else None,
        gamma2=1.0 if center else None,
        trained=trained,
    )


def feedforward_of(part: models.Feedforward, width: int, trained: bool) -> FeedForward | ActivatedLinear:
    if type(part) is models.OneMatrix:
        return ActivatedLinear(width, activation_of(part.activation, width, trained))
    if type(part) is models.Gated:
        raise InputError(f"Networks that train have no gated pairs yet; got {part!r}. Nearest: nn.Network.")
    return FeedForward(width, part.hidden_at(width), activation_of(part, width, trained))


def activation_of(part: models.Feedforward, width: int, trained: bool) -> nn.Module:
    """Build σ of a declaration; `trained`: whether the negative slope of a shaped ReLU has a gradient."""
    return of_kind(part, ACTIVATIONS)(part, width, trained)


class Pointwise(nn.Module):
    """A user function, entry by entry."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def shaped_relu_of(part: models.ShapedReLU, width: int, trained: bool) -> nn.Module:
    positive, negative = part.slopes(width)
    return TrainableShapedReLU(positive=positive, negative=negative, trained=trained)


ACTIVATIONS: Mapping[type, Callable[[Any, int, bool], nn.Module]] = {
    models.ShapedReLU: shaped_relu_of,
    models.ReLU: lambda part, width, trained: nn.ReLU(),
    models.GELU: lambda part, width, trained: nn.GELU(),
    models.Elementwise: lambda part, width, trained: Pointwise(torch_elementwise(part)),
    models.ShapedSmooth: lambda part, width, trained: Pointwise(torch_shaped(part, width)),
}
NORMS: Mapping[type, Callable[[Any, int], nn.Module]] = {
    models.LayerNorm: lambda part, width: nn.LayerNorm(width, eps=part.eps),
    models.RMSNorm: lambda part, width: nn.RMSNorm(width, eps=part.eps),
    models.RadialNorm: lambda part, width: Norm(part),
}


def norm_of(part: models.Norm, width: int) -> nn.Module:
    return of_kind(part, NORMS)(part, width)


def without_decay(model: nn.Module) -> list[str]:
    """List the names of the parameters that weight decay must not touch: gains, slopes, λ, γ, norms and biases."""
    names = []
    for path, module in model.named_modules():
        for name, _ in module.named_parameters(recurse=False):
            if isinstance(module, Gain | Residual) or type(module).__name__.endswith("Norm") or name == "bias":
                names.append(f"{path}.{name}" if path else name)
    return names
