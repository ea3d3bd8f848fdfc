r"""Attention layers: X ← λX + γ A X W_V/√n, with A made from the logits Y of queries and keys.

Letters of [ST]: n `width`, n_k `head_dim`, m tokens, τ the temperature, Y = X (W_Q/√n)(W_K/√n)ᵀ Xᵀ.

* shaped attention [ST, eq. 9]:   A = I + softmax(Y/τ) − 11ᵀ/m,  τ = τ₀ √(n n_k);
* softmax attention [ST, eq. 2]:  A = softmax(Y/τ),              τ = τ₀ √n_k.

With a mask, row α sees m_α tokens: the softmax runs over them and 1/m becomes 1/m_α there, 0 elsewhere.
With `heads=None` the value matrix is n × n and nothing follows it, as in [ST, eq. 1]. With `heads=h` each head has
its own n × n_k queries, keys and values; the heads' outputs are laid side by side and an output projection
(h n_k × n, divided by √(h n_k)) leads back to the width.
"""

from dataclasses import dataclass
from typing import Literal

from limitformer.base.errors import InputError, require, require_count, require_real, set_fields
from limitformer.models.kinds import register

Temperature = Literal["shaped", "standard"]


@dataclass(frozen=True, kw_only=True)
class Attention:
    """The base class of attention sublayers. Use `ShapedAttention`, `SoftmaxAttention` or `Mixing`.

    Attributes:
        tau0: τ₀ > 0.
        heads: None for [ST, eq. 1], else the number of heads that an output projection joins.
        head_dim: n_k; None means width, or width/heads with several heads.
    """

    tau0: float
    heads: int | None = None
    head_dim: int | None = None

    @property
    def interventions(self) -> tuple[bool, bool, Temperature]:
        """(identity, center, temperature): the modifications of [ST, eq. 9] that this attention makes."""
        raise TypeError("Attention is abstract: use ShapedAttention, SoftmaxAttention or Mixing.")

    def __post_init__(self) -> None:
        set_fields(self, tau0=require_real("tau0", self.tau0))
        require(self.tau0 > 0, f"tau0 must be positive; got {self.tau0}.")
        for name in ("heads", "head_dim"):
            if getattr(self, name) is not None:
                set_fields(self, **{name: require_count(name, getattr(self, name))})

    def require_mask(self, mask: str | None) -> None:
        """Raise `InputError` if A cannot be formed under that mask."""

    def key_dim(self, width: int) -> int:
        """Return n_k at this width; raise `InputError` unless the heads divide the width."""
        return dim_of_heads(width, self.heads or 1, self.head_dim)

    def temperature_at(self, width: int) -> float:
        """Return τ at this width."""
        scale = {"shaped": width, "standard": 1}[self.interventions[2]]
        return self.tau0 * (scale * self.key_dim(width)) ** 0.5


def dim_of_heads(width: int, heads: int, head_dim: int | None) -> int:
    """Return n_k, which is width/heads unless `head_dim` is given.

    Raises:
        InputError: heads do not divide the width.
    """
    if head_dim is not None:
        return require_count("head_dim", head_dim)
    if width % heads:
        near = sorted((k for k in range(1, width + 1) if width % k == 0), key=lambda k: (abs(k - heads), k))[:2]
        raise InputError(
            f"heads must divide width; got width={width}, heads={heads}. "
            f"Nearest: {' or '.join(map(str, sorted(near)))}, or give head_dim."
        )
    return width // heads


def require_temperature(temperature: object) -> None:
    require(
        temperature in ("shaped", "standard"),
        f'temperature must be "shaped" or "standard"; got {temperature!r}.',
    )


@register("attention")
@dataclass(frozen=True, kw_only=True)
class ShapedAttention(Attention):
    """A = I + softmax(Y/τ) − 11ᵀ/m with τ = τ₀ √(n n_k) [ST, eq. 9], or with some of its modifications [ST, Fig. 4].

    Attributes:
        identity: add I.
        center: subtract 1/m.
        temperature: "shaped" for τ₀ √(n n_k), "standard" for τ₀ √n_k.
    """

    identity: bool = True
    center: bool = True
    temperature: Temperature = "shaped"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("identity", "center"):
            value = getattr(self, name)
            require(isinstance(value, bool), f"{name} must be True or False; got {value!r}.")
        require_temperature(self.temperature)

    @property
    def interventions(self) -> tuple[bool, bool, Temperature]:
        return self.identity, self.center, self.temperature


@register("attention")
@dataclass(frozen=True, kw_only=True)
class SoftmaxAttention(Attention):
    """A = softmax(Y/τ) with τ = τ₀ √n_k [ST, eq. 2]: the unshaped attention of every stock Transformer."""

    tau0: float = 1.0

    @property
    def interventions(self) -> tuple[bool, bool, Temperature]:
        return False, False, "standard"
