r"""A network's tokens as a leader and differences from it, so that collapsed tokens keep their digits.

Let x₁ be the first token and δ_α = x_α − x₁. Where tokens collapse, x_α holds few digits of δ_α, and the gradients of
queries lose even more: they are of second order, in the differences at their layer and in those that reach the output,
so below 10⁻¹⁶ they are rounding. Here x₁ and δ are carried separately, and no layer subtracts nearly equal numbers:

* attention: rows of A sum to 1, so Σ_β A_αβ x_β W = x₁W + Σ_β A_αβ δ_β W; softmax ignores what is common to a row, so
  its logits are q_α · δ_β W_K;
* feed-forward: σ(z₁ + ζ) − σ(z₁), σ piecewise linear, is taken slope by slope;
* LayerNorm: with centred c of x₁ and e of δ, s² = |c|²/n + ε and s'² = s² + 2⟨c, e⟩/n + |e|²/n, the difference is
  e/s' − c (s'² − s²)/(s s'(s + s')).

These are identities: the result is the network's, and so are its derivatives. The first token may be the leader with
any mask; with a causal one its difference stays zero.

Shapes: b batch, m tokens, n width; x₁ is (b, 1, n), δ is (b, m, n).
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from limitformer.base.errors import require
from limitformer.nn.drawn import Attention, Feedforward, Layer, Network, Norm
from limitformer.nn.drawn.network import linear


class Tokens(NamedTuple):
    """The leader x₁ and the differences δ."""

    leader: Tensor
    difference: Tensor

    def whole(self) -> Tensor:
        """Return x_α = x₁ + δ_α: (b, m, n)."""
        return self.leader + self.difference


def apart(x: Tensor) -> Tokens:
    """Split tokens (b, m, n) into the first one and differences from it."""
    return Tokens(x[:, :1], x - x[:, :1])


def check(network: Network) -> None:
    """Raise `InputError` unless these identities hold for `network`."""
    for layer in network.layers:
        assert isinstance(layer, Layer)
        attention, feedforward = layer.attention, layer.feedforward
        standard = attention is None or type(attention) is Attention
        require(standard, "Leader and differences need shaped or softmax attention; got user-defined attention.")
        one_head = attention is None or (attention.output is None and attention.identity == attention.center)
        require(
            one_head, "Leader and differences need one head, and rows of A that sum to 1: identity and center alike."
        )
        two_matrices = feedforward is None or isinstance(feedforward, Feedforward)
        require(two_matrices, "Leader and differences need a feed-forward layer of two matrices; got OneMatrix.")
        linear_pieces = feedforward is None or not callable(feedforward.activation)
        require(linear_pieces, "Leader and differences need ReLU or ShapedReLU, which are piecewise linear.")


def run(network: Network, tokens: Tokens) -> Tokens:
    """Return the output of `network` as leader and differences."""
    check(network)
    for layer in network.layers:
        assert isinstance(layer, Layer)
        tokens = run_layer(layer, tokens)
    return tokens


def run_layer(layer: Layer, tokens: Tokens) -> Tokens:
    """Apply attention, then feed-forward, each with its residual and its normalisation."""
    if layer.attention is not None:
        branch = attended(layer.attention, normalised(layer.pre, tokens), layer.visible(tokens.difference))
        tokens = normalised(layer.post, added(layer.strengths[0], tokens, branch))
    if layer.feedforward is not None:
        assert isinstance(layer.feedforward, Feedforward)
        branch = fed_forward(layer.feedforward, normalised(layer.pre, tokens))
        tokens = normalised(layer.post, added(layer.strengths[-1], tokens, branch))
    return tokens


def added(strengths: tuple[float, float], tokens: Tokens, branch: Tokens) -> Tokens:
    skip, gamma = strengths
    return Tokens(*(skip * x + gamma * f for x, f in zip(tokens, branch, strict=True)))


def attended(part: Attention, tokens: Tokens, visible: Tensor) -> Tokens:
    queries, keys = linear(tokens.whole(), part.query), linear(tokens.difference, part.key)
    logits = queries @ keys.mT / part.temperature
    a = torch.softmax(logits.masked_fill(~visible, -torch.inf), -1)
    mixed = a @ tokens.difference
    if part.center:
        seen = visible.to(a.dtype)
        mixed = mixed - (seen / seen.sum(-1, keepdim=True)) @ tokens.difference + tokens.difference
    return Tokens(linear(tokens.leader, part.value), linear(mixed, part.value))


def fed_forward(part: Feedforward, tokens: Tokens) -> Tokens:
    assert not callable(part.activation)
    positive, negative = part.activation
    z, change = linear(tokens.leader, part.pre), linear(tokens.difference, part.pre)
    # Of max(z + ζ, 0) − max(z, 0); the rest of ζ is that of the other slope.
    above = torch.where(z > 0, torch.maximum(change, -z), (z + change).clamp(min=0))
    turned = positive * above + negative * (change - above)
    leader = positive * z.clamp(min=0) + negative * z.clamp(max=0)
    return Tokens(*(part.gain * linear(x, part.post) for x in (leader, turned)))


def normalised(part: object, tokens: Tokens) -> Tokens:
    """Apply LayerNorm, RMSNorm or nothing."""
    if isinstance(part, nn.Identity):
        return tokens
    assert isinstance(part, Norm)
    assert part.scale is None
    c, e = (centred(x) for x in tokens) if part.subtract_mean else tokens
    more = (2 * c * e + e.square()).mean(-1, keepdim=True)
    variance = c.square().mean(-1, keepdim=True) + part.eps
    s, s_ = variance.sqrt(), (variance + more).sqrt()
    return Tokens(c / s, e / s_ - c * (more / (s * s_ * (s + s_))))


def centred(x: Tensor) -> Tensor:
    return x - x.mean(-1, keepdim=True)
