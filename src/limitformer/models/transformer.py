r"""The Transformer of [ST, eq. 11]: `depth` layers, each an attention and a feed-forward sublayer.

  Z = λX + γ A X W_V/√n,   X′ = λZ + γ √(c/n_h) σ(Z W_pre/√n) W_post,   all weights i.i.d. N(0, 1).

λ and γ may differ from layer to layer and from sublayer to sublayer: a sequence has one entry for each layer, a number
or a pair for its attention and its feed-forward sublayer. By default λ = √(1 − γ²), sublayer by sublayer, and γ ≤ 1;
with a given λ, γ is any number ≥ 0.

Without attention it is the ResNet of [ST, eq. 4], without feed-forward the attention model of [ST, eq. 1]. A layer of
one matrix (`OneMatrix`) excludes attention and norm: X′ = λX + γ √(c/n) σ(X) W.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from numbers import Real
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray

from limitformer.base.errors import require, require_count, require_real, set_fields
from limitformer.models.attention import Attention
from limitformer.models.feedforward import Feedforward, OneMatrix
from limitformer.models.kinds import register, require_exact_kind, require_kind
from limitformer.models.norm import LayerNorm, Norm

Pair = tuple[float, float]
Strength = float | tuple[float | Pair, ...]
Given = float | Sequence[float | Sequence[float]]


def checked_strength(name: str, value: Any, depth: int, sublayers: int) -> Strength:
    """Return `value` as a float, or as a tuple of floats and pairs, one for each layer.

    Raises:
        InputError: `value` is neither a number nor a sequence of that length, or has pairs for single sublayers.

    >>> checked_strength("gamma", [0.5, (0.1, 0.2)], 2, 2)
    (0.5, (0.1, 0.2))
    """
    if isinstance(value, np.ndarray) and value.ndim > 0:
        value = value.tolist()
    if not isinstance(value, Sequence) or isinstance(value, str | bytes | bytearray):
        return require_real(name, value)
    require(len(value) == depth, f"{name} must be a number, or have one entry a layer, {depth}; got {len(value)}.")
    return tuple(checked_entry(f"{name}[{layer}]", entry, sublayers) for layer, entry in enumerate(value))


def checked_entry(name: str, entry: Any, sublayers: int) -> float | Pair:
    if isinstance(entry, Real) or not isinstance(entry, Sequence) or isinstance(entry, str | bytes | bytearray):
        return require_real(name, entry)
    pair = sublayers == 2 and len(entry) == 2
    wanted = "a number or a pair (attention, feed-forward)" if sublayers == 2 else "a number, for its only sublayer"
    require(pair, f"{name} must be {wanted}; got {entry!r}.")
    return require_real(name, entry[0]), require_real(name, entry[1])


def table_of(strength: Strength, sublayers: int) -> NDArray[np.float64]:
    """Return the strength of every sublayer, (depth, sublayers); (1, sublayers) if one number holds for all."""
    entries = strength if isinstance(strength, tuple) else (strength,)
    return np.array([entry if isinstance(entry, tuple) else (entry,) * sublayers for entry in entries], np.float64)


def check_strengths(gamma: Strength, lam: Strength | None, sublayers: int) -> None:
    """Raise `InputError` unless γ ≥ 0, λ ≥ 0, and γ ≤ 1 without a given λ."""
    g = table_of(gamma, sublayers)
    if lam is None:
        values = gamma if isinstance(gamma, float) else f"{g.min():g} to {g.max():g}"
        inside = bool((g >= 0).all() and (g <= 1).all())
        require(inside, f"gamma must lie in [0, 1]; got {values}. [ST] uses 1/sqrt(8); above 1 give lam too.")
        return
    require(bool((g >= 0).all()), f"gamma must be at least 0; got {g.min():g}.")
    least = lam if isinstance(lam, float) else table_of(lam, sublayers).min()
    require(bool(least >= 0), f"lam must be at least 0; got {least}.")


def strengths_of(gamma: Strength, lam: Strength | None, sublayers: int) -> NDArray[np.float64]:
    """Return λ and γ of every sublayer, (depth, sublayers, 2); one row if all layers have the same numbers."""
    g = table_of(gamma, sublayers)
    skips = np.array([[sqrt(1 - x**2) for x in row] for row in g.tolist()]) if lam is None else table_of(lam, sublayers)
    return np.stack(np.broadcast_arrays(skips, g), -1)


@register("transformer")
@dataclass(frozen=True, kw_only=True)
class Transformer:
    """A Transformer at initialisation [ST, eq. 11].

    Attributes:
        width: n, coordinates of a token.
        depth: d, number of layers.
        gamma: γ in [0, 1], strength of the residual branches; any number ≥ 0 if `lam` is given. A sequence has an
            entry for each layer: a number, or a pair for its attention and its feed-forward sublayer.
        attention: the attention sublayer; None omits it.
        feedforward: the feed-forward sublayer; None omits it.
        norm: `LayerNorm`, `RMSNorm` or `RadialNorm`; "pre" and "post" mean a LayerNorm placed there.
        mask: "causal" lets token α see the tokens up to α; None lets it see all.
        lam: λ ≥ 0, or such a sequence; None means √(1 − γ²), which keeps the variance of the tokens.

    Raises:
        InputError: a value out of range, or neither sublayer.

    >>> Transformer(width=200, depth=150, gamma=0.6, attention=None, feedforward=None)
    Traceback (most recent call last):
    limitformer.base.errors.InputError: A Transformer needs attention, feedforward or both; got neither.
    """

    width: int
    depth: int
    gamma: Given
    attention: Attention | None = None
    feedforward: Feedforward | None = None
    norm: Norm | Literal["pre", "post"] | None = None
    mask: Literal["causal"] | None = None
    lam: Given | None = None

    def __post_init__(self) -> None:
        require_exact_kind(self, Transformer)
        set_fields(self, width=require_count("width", self.width), depth=require_count("depth", self.depth))
        self._check_parts()
        gamma = checked_strength("gamma", self.gamma, self.depth, self.sublayers)
        lam = None if self.lam is None else checked_strength("lam", self.lam, self.depth, self.sublayers)
        check_strengths(gamma, lam, self.sublayers)
        set_fields(self, gamma=gamma, lam=lam)
        if isinstance(self.norm, str):
            set_fields(self, norm=LayerNorm(placement=self.norm))

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
            "OneMatrix acts on the coordinates of the tokens: attention and norm must be None.",
        )
        if self.attention is not None:
            self.attention.key_dim(self.width)
            self.attention.require_mask(self.mask)
        if self.feedforward is not None:
            self.feedforward.gain_at(self.width)

    @property
    def sublayers(self) -> int:
        """The number of sublayers of a layer: 1 or 2."""
        return (self.attention is not None) + (self.feedforward is not None)

    @property
    def strengths(self) -> Annotated[NDArray[np.float64], "layers sublayers 2"]:
        """λ and γ of every sublayer; a single row if these are two numbers for all layers."""
        return strengths_of(self.gamma, self.lam, self.sublayers)  # type: ignore[arg-type]  # checked to be `Strength`s

    @property
    def uniform(self) -> bool:
        """Whether γ and λ are one number each for all layers and sublayers."""
        return isinstance(self.gamma, float) and not isinstance(self.lam, tuple)

    @property
    def branch(self) -> float:
        """γ as a number; raises `InputError` if it differs by layer or sublayer."""
        return float(self._only_strengths()[1])

    @property
    def skip(self) -> float:
        """λ as a number; raises `InputError` if it differs by layer or sublayer."""
        return float(self._only_strengths()[0])

    def _only_strengths(self) -> NDArray[np.float64]:
        require(self.uniform, "This takes one gamma and one lam for all layers and sublayers; got sequences.")
        only: NDArray[np.float64] = self.strengths[0, 0]
        return only

    @property
    def normalisation(self) -> Norm | None:
        """The norm, also if it was declared by the shorthand "pre" or "post"."""
        assert not isinstance(self.norm, str)
        return self.norm
