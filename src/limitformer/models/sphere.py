r"""Tokens on the unit sphere of R^dim: the two models of [CT], and their starts.

Attention mixes tokens, A(Xⁱ) = Σ_j w_ij Xʲ, with weights from exp(β⟨QXⁱ, KXʲ⟩): divided by their sum over j (softmax,
[CT, eq. 2]) or by the number of tokens (unnormalized, [CT, eq. 3]). With L layers per unit of time a layer is

  stochastic:  Xⁱ ← normalised( Xⁱ + V A(Xⁱ)/√L ),              V_kl i.i.d., mean 0, variance σ²   [CT, eq. 4],
  hybrid:      Xⁱ ← normalised( Xⁱ + (1/L + ε v/√L) A(Xⁱ) ),    v i.i.d., mean 0, variance 1       [CT, eq. 7].

One V, or v, is drawn per layer and is common to all tokens. Q, K and β act only through βQᵀK: β < 0 is −β with −K,
attention to unlike tokens. [CT] calls β an inverse temperature; its derivations hold for any real number.

[CT] fixes Q and K. Real layers have different ones: with `query_key="gaussian"` QᵀK is, in each layer, a
matrix with i.i.d. N(0, τ²) entries, or the product of two Gaussian ones with head_dim rows, whose entries have the same
variance; β and τ act only through βτ. h heads, each with its queries, keys and values, are added as in a Transformer,
(1/√h) Σ_h V_h A_h(Xⁱ), where V_h stands for the head's share of the output matrix times its values. Behind a
causal mask a token sees itself and earlier tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import copysign, log, sqrt
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from limitformer.base.errors import require, require_count, require_real, set_fields
from limitformer.models.kinds import register, require_exact_kind, require_kind
from limitformer.models.serial import LATER
from limitformer.models.start import real_array

AttentionForm = Literal["softmax", "unnormalized"]
ValueLaw = Literal["gaussian", "uniform", "rademacher", "truncated normal"]
TokenMask = Literal["none", "causal"]
Rows = tuple[tuple[float, ...], ...]

LARGEST_DIM, LARGEST_BETA, LARGEST_NOISE = 2**31, 1e6, 1e50
LEAST_BETA = -300.0  # weights are relative to a token's weight on itself: exp(2|β|) is still a double
LARGEST_LOGIT = 150.0  # a layer's step is of the order exp(150), and its fourth power is still a double
FARTHEST_NORMAL = 9.0  # no normal of a simulation exceeds it
LARGEST_TAU, MOST_HEADS, MOST_ROWS = 1e6, 10_000, 1_000_000
WITHOUT: Mapping[str, Any] = {"tau": 1.0, "head_dim": None, "heads": 1}  # where queries and keys are fixed


@dataclass(frozen=True, kw_only=True)
class SphereModel:
    """The base class of the models of [CT], with attributes as in `StochasticTransformer`."""

    tokens: int
    dim: int
    beta: float
    layers_per_unit_time: int
    attention: AttentionForm = "softmax"
    query_key: Any = None
    values: ValueLaw = "gaussian"

    @property
    def is_fresh(self) -> bool:
        """Whether QᵀK is drawn in each layer."""
        return isinstance(self.query_key, str)

    @property
    def is_causal(self) -> bool:
        """Whether a token sees only itself and earlier ones."""
        return False

    @property
    def moves_alike(self) -> bool:
        """Whether all tokens attend by one rule that is the same in all layers, as in [CT]."""
        return not (self.is_fresh or self.is_causal)

    def __post_init__(self) -> None:
        require_kind("A model on the sphere", self, "sphere model")
        set_fields(self, tokens=require_count("tokens", self.tokens), dim=require_count("dim", self.dim, least=2))
        set_fields(self, beta=require_real("beta", self.beta))
        require(self.beta >= LEAST_BETA, f"beta must be at least {LEAST_BETA:g}; got {self.beta:g}.")
        require(self.beta <= LARGEST_BETA, f"beta must be at most {LARGEST_BETA:g}; got {self.beta:g}.")
        require(self.dim <= LARGEST_DIM, f"dim must be at most {LARGEST_DIM:,}; got {self.dim}.")
        layers = require_count("layers_per_unit_time", self.layers_per_unit_time)
        set_fields(self, layers_per_unit_time=layers)
        require_known("attention", self.attention, AttentionForm)
        require_known("values", self.values, ValueLaw)
        set_fields(self, query_key=checked_pair(self.query_key, self.dim))

    def _check_overflow(self) -> None:
        """Raise `InputError` if unnormalized weights overflow; softmax is shifted by its largest logit."""
        if self.attention == "softmax":
            return
        noise = log(max(1.0, getattr(self, "sigma", 1.0), getattr(self, "epsilon", 1.0)))
        size = self.largest_bilinear
        largest = abs(self.beta) * size
        nearest = copysign((LARGEST_LOGIT - noise) / max(size, 1e-300), self.beta)
        require(
            largest + noise <= LARGEST_LOGIT,
            f"Unnormalized attention overflows: with logits up to {largest:.4g} a layer's step leaves the "
            f'range of doubles. Nearest: beta = {nearest * 0.999:.4g}, or attention="softmax".',
        )

    @property
    def largest_bilinear(self) -> float:
        """‖QᵀK‖, or a bound that a drawn QᵀK does not exceed as normals stay below `FARTHEST_NORMAL`."""
        return 1.0 if self.is_isotropic else float(np.linalg.norm(self.bilinear(), 2))

    def bilinear(self) -> NDArray[np.float64]:
        """Return QᵀK (dim, dim).

        Raises:
            InputError: it is drawn in each layer.
        """
        require(not self.is_fresh, 'With query_key="gaussian" QᵀK is another matrix in each layer.')
        if self.query_key is None:
            return np.eye(self.dim)
        query, key = (np.array(matrix) for matrix in self.query_key)
        return np.asarray(query.T @ key)

    @cached_property
    def is_isotropic(self) -> bool:
        """Whether QᵀK = I [CT, Assumption 2]: then the overlaps of the tokens are a Markov chain."""
        return self.query_key is None or (not self.is_fresh and is_multiple(self.bilinear(), 1.0))

    @cached_property
    def isotropic_beta(self) -> float | None:
        """βc if QᵀK = cI: the β that gives the same attention with QᵀK = I; None for any other Q and K, or drawn ones.

        >>> turn = np.eye(3)[[1, 2, 0]]
        >>> model = StochasticTransformer(
        ...     tokens=2, dim=3, beta=1.5, layers_per_unit_time=1, query_key=(turn, -2 * turn)
        ... )
        >>> model.isotropic_beta
        -3.0
        """
        if self.is_isotropic:
            return self.beta
        if self.is_fresh:
            return None
        matrix = self.bilinear()
        factor = float(np.trace(matrix)) / self.dim
        return self.beta * factor if is_multiple(matrix, factor) else None


@register("sphere model")
@dataclass(frozen=True, kw_only=True)
class StochasticTransformer(SphereModel):
    """The deep stochastic Transformer [CT, eq. 4].

    Attributes:
        tokens: N.
        dim: d ≥ 2, coordinates of a token.
        beta: β, inverse temperature; at least −300.
        layers_per_unit_time: L; a layer moves the tokens by a step of 1/√L.
        attention: "softmax" [CT, eq. 2] or "unnormalized" [CT, eq. 3].
        query_key: None for Q = K = identity, the pair (Q, K), each (rows, dim), or "gaussian": drawn in each layer.
        values: law of the entries of V: "gaussian", "uniform", "rademacher" (±σ) or "truncated normal" (cut at two
            standard deviations and rescaled); each with mean 0 and standard deviation σ.
        sigma: σ > 0.
        tau: τ > 0, standard deviation of the entries of a drawn QᵀK.
        head_dim: rows of drawn Q and K, whose product is QᵀK; None: the entries of QᵀK are normal.
        heads: h, each with its own values, and its own drawn queries and keys.
        mask: "none", or "causal".

    Raises:
        InputError: a value out of range, Q and K of shapes that do not fit, weights that would overflow, an option
            without effect.

    >>> StochasticTransformer(tokens=2, dim=4, beta=1.0, layers_per_unit_time=100, sigma=0.0)
    Traceback (most recent call last):
    limitformer.base.errors.InputError: sigma must be positive; got 0.0.
    """

    sigma: float = 1.0
    tau: float = field(default=1.0, metadata=LATER)
    head_dim: int | None = field(default=None, metadata=LATER)
    heads: int = field(default=1, metadata=LATER)
    mask: TokenMask = field(default="none", metadata=LATER)

    @property
    def is_causal(self) -> bool:
        return self.mask == "causal"

    @property
    def largest_bilinear(self) -> float:
        if not self.is_fresh:
            return super().largest_bilinear
        rows = self.head_dim or FARTHEST_NORMAL**2
        return self.tau * FARTHEST_NORMAL * max(1.0, FARTHEST_NORMAL / sqrt(rows))

    @property
    def logit_scale(self) -> float:
        """|β|τ, the standard deviation of a logit where queries and keys are drawn."""
        return abs(self.beta) * self.tau

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_queries()
        set_fields(self, sigma=require_real("sigma", self.sigma))
        require(self.sigma > 0, f"sigma must be positive; got {self.sigma}.")
        in_range = 1 / LARGEST_NOISE <= self.sigma <= LARGEST_NOISE
        require(in_range, f"sigma must lie in [{1 / LARGEST_NOISE:g}, {LARGEST_NOISE:g}]; got {self.sigma}.")
        self._check_overflow()

    def _check_queries(self) -> None:
        set_fields(self, tau=require_real("tau", self.tau), heads=require_count("heads", self.heads))
        require(0 < self.tau <= LARGEST_TAU, f"tau must lie in (0, {LARGEST_TAU:g}]; got {self.tau}.")
        require(self.heads <= MOST_HEADS, f"heads must be at most {MOST_HEADS:,}; got {self.heads}.")
        if self.head_dim is not None:
            set_fields(self, head_dim=require_count("head_dim", self.head_dim))
            require(self.head_dim <= MOST_ROWS, f"head_dim must be at most {MOST_ROWS:,}; got {self.head_dim}.")
        require_known("mask", self.mask, TokenMask)
        names = [name for name in ("tau", "head_dim", "heads") if getattr(self, name) != WITHOUT[name]]
        idle = f'{" and ".join(names)} would change nothing: queries and keys are fixed. Nearest: query_key="gaussian".'
        require(self.is_fresh or not names, idle)
        gaussian = self.heads == 1 or self.values == "gaussian"
        require(
            gaussian, f'{self.heads} heads need values="gaussian", whose sum is Gaussian again; got {self.values!r}.'
        )


@register("sphere model")
@dataclass(frozen=True, kw_only=True)
class HybridTransformer(SphereModel):
    """Deterministic attention with noise on its strength [CT, eq. 7]; ε = 0 is the deterministic flow [CT, Lemma 2].

    Attributes:
        tokens, dim, beta, layers_per_unit_time, attention, query_key: as in `StochasticTransformer`.
        values: law of v, with mean 0 and variance 1; [CT] assumes that it is bounded.
        epsilon: ε ≥ 0, amplitude of the noise.

    Raises:
        InputError: as in `StochasticTransformer`.

    >>> HybridTransformer(tokens=2, dim=3, beta=1.0, layers_per_unit_time=100, epsilon=-0.5)
    Traceback (most recent call last):
    limitformer.base.errors.InputError: epsilon must be at least 0; got -0.5.
    """

    values: ValueLaw = "uniform"
    epsilon: float

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            not self.is_fresh,
            'query_key="gaussian" belongs to the StochasticTransformer; the hybrid model has fixed Q and K.',
        )
        set_fields(self, epsilon=require_real("epsilon", self.epsilon))
        require(self.epsilon >= 0, f"epsilon must be at least 0; got {self.epsilon}.")
        in_range = self.epsilon == 0 or 1 / LARGEST_NOISE <= self.epsilon <= LARGEST_NOISE
        require(in_range, f"epsilon must be 0 or lie in [1e-50, 1e+50]; got {self.epsilon}.")
        self._check_overflow()


def is_multiple(matrix: NDArray[np.float64], factor: float) -> bool:
    """Whether `matrix` (dim, dim) is `factor` times the identity, up to 1e-12 relative."""
    tolerance = 1e-12 * abs(factor) if factor else 0.0
    return bool(np.allclose(matrix, factor * np.eye(len(matrix)), rtol=0, atol=tolerance))


def require_known(name: str, value: object, literal: Any) -> None:
    """Raise `InputError` unless `value` is one of the words of `literal`."""
    words = get_args(literal)
    came = repr(value) if isinstance(value, str | int | float | None) else type(value).__name__
    require(
        isinstance(value, str) and value in words, f"{name} must be one of {', '.join(map(repr, words))}; got {came}."
    )


def checked_pair(pair: Any, dim: int) -> tuple[Rows, Rows] | Literal["gaussian"] | None:
    """Return (Q, K) as tuples of rows, which can be compared and written as JSON; "gaussian" and None stay."""
    if isinstance(pair, str) and pair == "gaussian":
        return "gaussian"
    if pair is None:
        return None
    two = isinstance(pair, Sequence | np.ndarray) and len(pair) == 2
    came = repr(pair) if isinstance(pair, str) else type(pair).__name__
    two = two and not isinstance(pair, str)
    require(two, f'query_key must be None, the pair (Q, K) or "gaussian"; got {came}.')
    query, key = real_array("Q", pair[0], 2), real_array("K", pair[1], 2)
    fits = query.shape == key.shape and query.shape[1] == dim
    require(fits, f"Q and K must both be (head_dim, dim = {dim}); got {query.shape} and {key.shape}.")
    with np.errstate(over="ignore", invalid="ignore"):
        finite = bool(np.isfinite(query.T @ key).all())
    require(finite, "The product of Q and K leaves the range of doubles. Nearest: smaller entries.")
    return rows_of(query), rows_of(key)


def rows_of(matrix: NDArray[np.float64]) -> Rows:
    return tuple(tuple(row) for row in matrix.tolist())


OFF_SPHERE = 1e-9  # largest distance of a given token's length from 1


@dataclass(frozen=True, kw_only=True, eq=False)
class SphereStart:
    """The first tokens.

    Attributes:
        tokens: (tokens, dim) unit vectors; None if they are random.
        overlap: overlap of two tokens in a uniformly random position, or None.
    """

    tokens: NDArray[np.float64] | None = None
    overlap: float | None = None

    def __post_init__(self) -> None:
        require_exact_kind(self, SphereStart)

    @property
    def is_uniform(self) -> bool:
        """Whether the tokens are drawn uniformly on the sphere."""
        return self.tokens is None and self.overlap is None

    @property
    def description(self) -> str:
        """A text that is stored with the results."""
        if self.tokens is not None:
            return f"tokens {self.tokens.shape}"
        return "uniform" if self.overlap is None else f"overlap {self.overlap!r}"


def as_sphere_start(start: Any, model: SphereModel) -> SphereStart:
    """Return the start of None (uniform), a number (the overlap of two tokens) or an array (the tokens).

    Raises:
        InputError: tokens of a wrong shape or off the sphere, an overlap outside [−1, 1], or an overlap for a model
            that does not have two tokens.
    """
    if isinstance(start, SphereStart):
        start = start.overlap if start.tokens is None else start.tokens
    if start is None:
        return SphereStart()
    if getattr(start, "ndim", None) == 0:  # of NumPy or torch
        start = start.item()
    return at_overlap(start, model) if np.isscalar(start) else start_at_tokens(start, model)


def at_overlap(value: Any, model: SphereModel) -> SphereStart:
    overlap = require_real("the start's overlap", value)
    require(-1 <= overlap <= 1, f"The start's overlap must lie in [-1, 1]; got {overlap}.")
    require(
        model.tokens == 2,
        f"A number as the start is the overlap of two tokens, and the model has {model.tokens}. "
        f"Nearest: an array of unit vectors (tokens, dim) = ({model.tokens}, {model.dim}).",
    )
    return SphereStart(overlap=overlap)


def start_at_tokens(value: ArrayLike, model: SphereModel) -> SphereStart:
    """Return these tokens, rescaled to length 1."""
    x = real_array("The start", value, 2)
    shape = (model.tokens, model.dim)
    require(x.shape == shape, f"The start must be (tokens, dim) = {shape}; got {x.shape}.")
    lengths = np.linalg.norm(x, axis=1)
    worst = lengths[np.abs(lengths - 1).argmax()]
    require(
        abs(worst - 1) <= OFF_SPHERE,
        f"Tokens must lie on the unit sphere; one has length {worst:.12g}. Repair: X / norm(X, axis=1, keepdims=True).",
    )
    return SphereStart(tokens=x / lengths[:, None])
