r"""The Transformer of [ST, eq. 11]: `depth` layers, each an attention and a feed-forward sublayer.

  Z = λX + γ A X W_V/√n,   X′ = λZ + γ √(c/n_h) σ(Z W_pre/√n) W_post,   all weights i.i.d. N(0, 1).

Without attention it is the ResNet of [ST, eq. 4], without feed-forward the attention model of [ST, eq. 1]. A layer of
one matrix (`OneMatrix`) stands alone: X′ = λX + γ √(c/n) σ(X) W.
"""

from dataclasses import dataclass
from math import sqrt
from typing import Literal

from limitformer.errors import keep, require, require_count, require_real
from limitformer.models.attention import Attention
from limitformer.models.feedforward import Feedforward, OneMatrix
from limitformer.models.kinds import known, require_itself, require_kind
from limitformer.models.norm import LayerNorm, Norm


@known("transformer")
@dataclass(frozen=True, kw_only=True)
class Transformer:
    """A Transformer at initialisation [ST, eq. 11].

    Attributes:
        width: n, coordinates of a token.
        depth: d, number of layers.
        gamma: γ in [0, 1], strength of the residual branches.
        attention: the attention sublayer; None leaves it out.
        feedforward: the feed-forward sublayer; None leaves it out.
        norm: `LayerNorm` or `RMSNorm` with their placement; "pre" and "post" stand for LayerNorm there.
        mask: "causal" lets token α see the tokens up to α; None lets it see all.
        lam: λ ≥ 0; None means √(1 − γ²), which keeps the variance of the tokens.

    Raises:
        InputError: a value out of range, or neither sublayer.

    >>> Transformer(width=200, depth=150, gamma=0.6, attention=None, feedforward=None)
    Traceback (most recent call last):
    limitformer.errors.InputError: A Transformer needs attention, feedforward or both; got neither.
    """

    width: int
    depth: int
    gamma: float
    attention: Attention | None = None
    feedforward: Feedforward | None = None
    norm: Norm | Literal["pre", "post"] | None = None
    mask: Literal["causal"] | None = None
    lam: float | None = None

    def __post_init__(self) -> None:
        require_itself(self, Transformer)
        keep(self, width=require_count("width", self.width), depth=require_count("depth", self.depth))
        keep(self, gamma=require_real("gamma", self.gamma))
        require(0 <= self.gamma <= 1, f"gamma must lie in [0, 1]; got {self.gamma}. [ST] uses 1/sqrt(8).")
        self._check_parts()
        if isinstance(self.norm, str):
            keep(self, norm=LayerNorm(placement=self.norm))
        keep(self, lam=None if self.lam is None else require_real("lam", self.lam))
        require(self.skip >= 0, f"lam must be at least 0; got {self.lam}.")

    def _check_parts(self) -> None:
        present = self.attention is not None or self.feedforward is not None
        require(present, "A Transformer needs attention, feedforward or both; got neither.")
        for family in ("attention", "feedforward"):
            part = getattr(self, family)
            if part is not None:
                require_kind(family, part, family, "None")
        if self.norm is not None and not (isinstance(self.norm, str) and self.norm in ("pre", "post")):
            require_kind("norm", self.norm, "norm", '"pre"', '"post"', "None")
        require(self.mask in (None, "causal"), f'mask must be None or "causal"; got {self.mask!r}.')
        alone = self.attention is None and self.norm is None
        require(
            alone or type(self.feedforward) is not OneMatrix,
            "OneMatrix acts on the coordinates of the tokens and stands alone: attention and norm must be None.",
        )
        if self.attention is not None:
            self.attention.key_dim(self.width)
        if self.feedforward is not None:
            self.feedforward.gain(self.width)

    @property
    def skip(self) -> float:
        """λ as a number."""
        return sqrt(1 - self.gamma**2) if self.lam is None else self.lam

    @property
    def normalisation(self) -> Norm | None:
        """`norm` without its shorthands."""
        assert not isinstance(self.norm, str)
        return self.norm
