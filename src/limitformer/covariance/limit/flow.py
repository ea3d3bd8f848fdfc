r"""The ODE of λ = 1, γ = 1/√d: every layer adds 1/d of a deterministic amount, t = layer/d runs from 0 to 1.

This is a derivation, not a theorem: the law of large numbers that it uses is not shown to hold uniformly in the layers.
In law, one sublayer is V′ = V + M/√d + Φ/d. Here M = X fᵀ + f Xᵀ over n has mean 0 given X and the size n^{-1/2};
Φ = f fᵀ/n is its mean F(V) up to n^{-1/2} and, of a random attention, up to noise of mean 0. Fresh weights make both
noises independent from layer to layer, so d layers add M/√d up to n^{-1/2} and Φ/d up to (n d)^{-1/2}: as n → ∞ and
d → ∞, in any order and at any ratio [Hayou and Yang, 2023],

  dV/dt = Σ over the sublayers of F(V),

* **feed-forward**: F = K(V), K_αβ = c E σ(h_α) σ(h_β) with h ~ N(0, V) (`dual_kernel`). A shaped ReLU has slopes that
  meet as n → ∞: K(V) = V. The layer of one matrix has the same K: its coordinates are sums of Gaussian vectors.
* **attention** with τ = τ₀√(n n_k): logits over τ vanish, the softmax becomes p (1/m_α on what α sees), and
  F = A V Aᵀ with A = identity·I + (1 − center)·p. With the standard temperature logits stay random, and E A V Aᵀ has no
  closed form: refused.

The error at finite depth and width is of order 1/d + n^{-1/2} on a path, 1/d + 1/n in the mean.

Dual kernels K(V)_αβ = c E σ(h_α) σ(h_β), h ~ N(0, V), at infinite width; c = 1/E σ(g)², g ~ N(0, 1).

**Piecewise linear**, slopes s± with mean s̄ = (s₊ + s₋)/2 and half difference d = (s₊ − s₋)/2: σ(x) = s̄x + d|x|, and
h|h′| has mean 0, so with E|h||h′| = (2/π) √(VV′) (√(1 − ρ²) + ρ arcsin ρ)

  K = ( s̄² V_αβ + d² E|h_α||h_β| )/(s̄² + d²).

**GELU**, σ(x) = x Φ(x): write V₁₁ = a, V₂₂ = b, V₁₂ = r. Stein's identity in h, then in h′, leaves r E Φ(h)Φ(h′) and
terms with φ(h) or φ(h′), under which (h, h′) is Gaussian again. With Δ = (1 + a)(1 + b) − r²,

  K/c = r ( ¼ + arcsin(r/√((1 + a)(1 + b)))/2π ) + ( ab − r² + r²/(1 + a) + r²/(1 + b) )/(2π√Δ);

at a = b = r = 1 that is `GELU_SECOND_MOMENT`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import isclose
from typing import Annotated, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from limitformer.base.errors import NoLimitError, require
from limitformer.covariance.limit.covariance import refuse_own
from limitformer.models import GELU, Feedforward, OneMatrix, ReLU, ShapedReLU, ShapedSmooth, Start, Transformer
from limitformer.models.feedforward import GELU_SECOND_MOMENT
from limitformer.models.kinds import of_kind, register, require_exact_kind
from limitformer.models.start import as_start
from limitformer.numerics.random import key
from limitformer.numerics.watch import DONE, WHOLE, Watch
from limitformer.sampling.recording import ALL_OF_V, VALUE_FLOOR, CovarianceProcess, Outputs, Recording

Matrix = NDArray[np.float64]


def dual_kernel(part: Feedforward, v: Matrix) -> Matrix:
    """Return K(V) (tokens, tokens) at V = `v` (tokens, tokens), as the width goes to infinity."""
    return of_kind(part, DUAL_KERNELS)(part, v)


def piecewise_linear(v: Matrix, positive: float, negative: float) -> Matrix:
    mean, half = (positive + negative) / 2, (positive - negative) / 2
    deviation = np.sqrt(np.diagonal(v))
    sizes = np.outer(deviation, deviation)
    rho = np.clip(v / sizes, -1, 1)
    magnitudes = 2 / np.pi * sizes * (np.sqrt(1 - rho**2) + rho * np.arcsin(rho))
    return np.asarray((mean**2 * v + half**2 * magnitudes) / (mean**2 + half**2))


def gaussian_error(v: Matrix) -> Matrix:
    variances = np.diagonal(v)
    a, b = variances[:, None], variances[None]
    product = (1 + a) * (1 + b)
    both_below = 0.25 + np.arcsin(v / np.sqrt(product)) / (2 * np.pi)
    bends = (a * b - v**2 + v**2 / (1 + a) + v**2 / (1 + b)) / (2 * np.pi * np.sqrt(product - v**2))
    return np.asarray((v * both_below + bends) / GELU_SECOND_MOMENT)


DUAL_KERNELS: Mapping[type, Callable[[Any, Matrix], Matrix]] = {
    OneMatrix: lambda part, v: dual_kernel(part.activation, v),
    ShapedReLU: lambda part, v: v.copy(),  # both slopes go to 1
    ShapedSmooth: lambda part, v: v.copy(),  # σ_n goes to the identity
    ReLU: lambda part, v: piecewise_linear(v, 1.0, 0.0),
    GELU: lambda part, v: gaussian_error(v),
}


RELATIVE_ERROR, ABSOLUTE_ERROR = 1e-10, 1e-13  # of the solver; the second times the largest variance of the start


def flows(model: Transformer) -> bool:
    """Return whether λ = 1 and γ = 1/√depth, up to rounding."""
    return model.uniform and model.skip == 1 and isclose(model.branch * model.depth**0.5, 1, rel_tol=1e-9)


@register("limit")
@dataclass(frozen=True, kw_only=True)
class CovarianceFlow:
    """The covariance ODE of λ = 1, γ = 1/√depth, the result of `lf.limit(model)`. Width and depth have no effect.

    It is derived in docs/theory.md and tested, not proven.

    Attributes:
        model: the model that has this limit.
    """

    model: Transformer

    def __post_init__(self) -> None:
        model = self.model
        require_exact_kind(self, CovarianceFlow)
        flowing = type(model) is Transformer and flows(model)
        require(flowing, f"model must be a Transformer with lam=1 and gamma=1/sqrt(depth); got {model!r}.")
        refuse_own(model)
        if model.norm is not None:
            raise NoLimitError("No limit is proven with normalisation layers; norm must be None.")
        if model.attention is not None and model.attention.interventions[2] != "shaped":
            raise NoLimitError(
                "Attention that is not shaped, such as softmax attention, has no limit at lam=1, gamma=1/sqrt(depth) "
                "that is known, because its logits stay random as the width grows, and the mean of A V A^T over them "
                'is not known; it needs temperature="shaped". Nearest: ShapedAttention(tau0=1.0).'
            )

    @property
    def basis(self) -> str:
        """The text "derivation: lam = 1, gamma = 1/sqrt(depth)"; a limit that is proven names its theorem here."""
        return "derivation: lam = 1, gamma = 1/sqrt(depth)"

    @property
    def horizon(self) -> float:
        """The time of the last layer, 1; a layer's time is layer/depth."""
        return 1.0

    def drift(self, covariance: Annotated[ArrayLike, "tokens tokens"]) -> Annotated[Matrix, "tokens tokens"]:
        """Return dV/dt, at V = `covariance`.

        >>> import limitformer as lf
        >>> net = lf.Transformer(width=9, depth=4, gamma=0.5, lam=1.0, feedforward=lf.ReLU())
        >>> lf.limit(net).drift(np.eye(2)).round(6)
        array([[1.     , 0.31831],
               [0.31831, 1.     ]])
        """
        return self._drift(as_start(covariance).covariance)

    def _drift(self, v: Matrix) -> Matrix:
        attention, feedforward = self.model.attention, self.model.feedforward
        total = np.zeros_like(v)
        if attention is not None:
            identity, center, _ = attention.interventions
            seen = np.ones(v.shape)
            seen = np.tril(seen) if self.model.mask == "causal" else seen
            mixing = identity * np.eye(len(v)) + (1 - center) * seen / seen.sum(1, keepdims=True)  # A at logits of 0
            total += mixing @ v @ mixing.T
        if feedforward is not None:
            total += dual_kernel(feedforward, v)
        return total

    def solve(
        self, start: Start | Annotated[ArrayLike, "tokens tokens"], times: Annotated[ArrayLike, "times"] = (1.0,)
    ) -> Annotated[Matrix, "times tokens tokens"]:
        """Return V at `times`, ascending in [0, 1], from a start or a covariance matrix.

        Raises:
            InputError: not a start, or times that are not ascending in [0, 1].

        >>> import limitformer as lf
        >>> net = lf.Transformer(width=9, depth=4, gamma=0.5, lam=1.0, feedforward=lf.ReLU())
        >>> lf.limit(net).solve([[1.0]]).round(6)
        array([[[2.718282]]])
        """
        from scipy.integrate import solve_ivp  # slow to import, and workers of sweeps do not need it

        v = as_start(start).covariance
        at = checked_times(times)
        solution = solve_ivp(
            lambda _, flat: self._drift(flat.reshape(v.shape)).ravel(),
            (0.0, 1.0),
            v.ravel(),
            method="DOP853",
            t_eval=at,
            rtol=RELATIVE_ERROR,
            atol=ABSOLUTE_ERROR * float(v.diagonal().max()),
        )
        require(solution.success, f"The ODE could not be solved: {solution.message}")
        return np.asarray(solution.y.T.reshape(len(at), *v.shape))


def checked_times(times: ArrayLike) -> Matrix:
    """Return `times` as an array; raise `InputError` unless it ascends in [0, 1]."""
    at = np.asarray(times, np.float64)
    good = (
        at.ndim == 1 and at.size > 0 and bool((at >= 0).all() and (at <= 1 + 1e-12).all() and (np.diff(at) > 0).all())
    )
    require(good, f"times must ascend within [0, 1], where a layer's time is layer/depth; got {times!r}.")
    return np.minimum(at, 1.0)


@dataclass(frozen=True, kw_only=True, eq=False)
class FlowPath(CovarianceProcess):
    """The process that `simulate` runs: the solution from one start at chosen times, equal in all samples.

    Attributes:
        model: the ODE.
        start: its input tokens.
        times: times to record, ascending in [0, 1]; None for those of the layers.
        recording: quantities to record.
    """

    model: CovarianceFlow
    start: Start
    times: NDArray[Any] | None
    recording: Recording = ALL_OF_V
    axis: str = field(default="time", init=False)
    description: str = field(default="limit", init=False)
    unit: str = field(default="layer/depth", init=False)

    def __post_init__(self) -> None:
        self.points  # noqa: B018  # raises before any work

    @property
    def points(self) -> Matrix:
        """The times that are recorded."""
        depth = self.model.model.depth
        return checked_times(np.arange(depth + 1) / depth if self.times is None else self.times)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that are stored with the results."""
        return {"start": self.start.description, **self.recording.settings(VALUE_FLOOR)}

    def prepare(self, seed: int) -> "SolvedPath":
        """Solve the ODE. Nothing is random, but an invalid seed raises as in other processes."""
        key(seed, "flow")
        return SolvedPath(self.model.solve(self.start, self.points), self.recording)


class SolvedPath:
    """The solved path. Several threads may call `run`."""

    def __init__(self, covariance: Matrix, recording: Recording) -> None:
        self.covariance = covariance
        self.recording = recording

    def run(self, first: int, outputs: Outputs, watch: Watch) -> None:
        """Write the path to all replicas; none leaves the ball."""
        self.recording.fill(self.covariance, outputs)
        watch[WHOLE] = watch[DONE] = len(outputs["exits"])
