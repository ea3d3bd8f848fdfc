r"""Feed-forward layers, n_h the number of hidden units:

* elementwise: X ← λX + γ √(c/n_h) σ(X W_pre/√n) W_post  [ST, eq. 4];
* gated:       X ← λX + γ √(c/n_h) (σ(X W_pre/√n) ∘ X W_gate/√n) W_post, whose second factor has no σ;
* one matrix:  X ← λX + γ √(c/n) σ(X) W, which is [ST, eq. 19] at λ = 0, γ = 1, with the limit [ST, eq. 3].

The gain c = 1/E σ(g)², g ~ N(0, 1), keeps the variance of a token whose variance is 1. It is the same in gated pairs,
because the gate is independent of g and has variance 1. For a user's σ it is computed by adaptive quadrature of
σ(x)² φ(x), piece by piece, unless it is given. σ need neither have mean zero nor be smooth, but the quadrature may miss
a peak or notch that is narrower than a hundredth.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from math import exp, isclose, isfinite, pi, sqrt

import numpy as np
from numpy.polynomial import Chebyshev
from numpy.typing import NDArray

from limitformer.base.errors import require, require_count, require_real, set_fields
from limitformer.models.functions import (
    FrozenFunction,
    Function,
    freeze_functions,
    function_of,
    name_of,
    require_scalar_function,
    value_at,
)
from limitformer.models.kinds import register

# E (g Φ(g))²: Φ(g)² is the chance that two more normals h, h' lie below g, so this is E g² 1{g > h, g > h'}, the
# second moment of the largest of three over 3: (1 + √3/(2π))/3.
GELU_SECOND_MOMENT = (1 + sqrt(3) / (2 * pi)) / 3


@dataclass(frozen=True, kw_only=True)
class Feedforward:
    """The base class of feed-forward layers.

    Attributes:
        hidden: n_h; None means the width, as in [ST].
    """

    hidden: int | None = None

    def __post_init__(self) -> None:
        if self.hidden is not None:
            set_fields(self, hidden=require_count("hidden", self.hidden))

    def hidden_at(self, width: int) -> int:
        """Return n_h at this width."""
        return width if self.hidden is None else self.hidden

    def gain_at(self, width: int) -> float:
        """Return c = 1/E σ(g)² at this width."""
        kinds = "ShapedReLU, ReLU, GELU, Elementwise, Gated, ShapedSmooth or OneMatrix"
        raise TypeError(f"Feedforward is abstract: use {kinds}.")


@register("feedforward")
@dataclass(frozen=True, kw_only=True)
class ShapedReLU(Feedforward):
    """σ(x) = s₊ max(x, 0) + s₋ min(x, 0) with slopes s± = 1 + c±/√n [ST, after eq. 4]."""

    c_plus: float
    c_minus: float

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("c_plus", "c_minus"):
            set_fields(self, **{name: require_real(name, getattr(self, name))})

    def slopes(self, width: int) -> tuple[float, float]:
        """Return (s₊, s₋) at this width."""
        return 1 + self.c_plus / sqrt(width), 1 + self.c_minus / sqrt(width)

    def gain_at(self, width: int) -> float:
        positive, negative = self.slopes(width)
        second_moment = (positive**2 + negative**2) / 2
        require(second_moment > 0, f"c_plus and c_minus make both slopes zero at width {width}.")
        return 1 / second_moment


@register("feedforward")
@dataclass(frozen=True, kw_only=True)
class ReLU(Feedforward):
    """σ(x) = max(x, 0)."""

    def slopes(self, width: int) -> tuple[float, float]:
        return 1.0, 0.0

    def gain_at(self, width: int) -> float:
        return 2.0


@register("feedforward")
@dataclass(frozen=True, kw_only=True)
class GELU(Feedforward):
    """σ(x) = x Φ(x), Φ the normal distribution function."""

    def gain_at(self, width: int) -> float:
        return 1 / GELU_SECOND_MOMENT


TRIED = (-10.0, -3.0, -1.0, -0.5, 0.0, 0.5, 1.0, 3.0, 10.0)
PIECES = (-38.0, -16.0, -8.0, -4.0, -2.0, -1.0, 0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 38.0)  # beyond, φ is 0 in float64
SHORT_PIECES = (-38.0, -16.0, *(k / 16 for k in range(-128, 129)), 16.0, 38.0)  # find peaks that the others miss
PRECISION = 1e-10  # relative, of the gain


@register("feedforward")
@dataclass(frozen=True, kw_only=True)
class Elementwise(Feedforward):
    """A layer whose activation is any scalar function, as it was when the layer was made.

    Attributes:
        function: σ, from a float to a float: a function of Python that Numba can compile, or of Numba, or its path,
            "package.module:function". The attribute is a copy of it (`models.functions`).
        gain: c; None computes 1/E σ(g)².
        torch: the same σ on tensors, for networks: a function, its path, or its name in torch or torch.nn.functional.
            None looks there for a function of σ's name, and then tries σ itself on a tensor. It must agree with σ.

    Raises:
        InputError: `function` is not a function, is not finite at some number of ordinary size, or Numba cannot
            compile it; or its gain cannot be computed.

    >>> from math import tanh
    >>> def damped(x):
    ...     return x * tanh(x)
    >>> round(Elementwise(damped).gain_at(100), 6)
    1.319453
    """

    function: Function | str = field(kw_only=False)
    gain: float | None = None
    torch: Function | str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        freeze_functions(self)
        require_scalar_function(function_of(self), TRIED)
        if self.gain is not None:
            set_fields(self, gain=require_real("gain", self.gain))
            require(self.gain > 0, f"gain must be positive; got {self.gain}. None computes it.")

    def gain_at(self, width: int) -> float:
        return 1 / second_moment(function_of(self)) if self.gain is None else self.gain


@register("feedforward")
@dataclass(frozen=True, kw_only=True)
class Gated(Elementwise):
    """A gated pair: σ of one half of the pre-activations, times the other half: SwiGLU, GeGLU, GLU, …

    Attributes are those of `Elementwise`; `hidden` counts pairs, so there are three matrices of n × n_h entries.
    """


RADII = tuple(0.5**k for k in range(8))  # of the intervals around 0 on which σ is a polynomial
DEGREE = 12
AGREEMENT = 1e-7  # of derivatives on two intervals, relative to the largest if that is above 1


@register("feedforward")
@dataclass(frozen=True, kw_only=True)
class ShapedSmooth(Feedforward):
    """σ_n(x) = q√n σ(x/(q√n)) with σ(0) = 0, σ′(0) = 1 [Li, Nica and Roy, 2022], such as σ = tanh.

    Attributes:
        function: σ, as in `Elementwise`; it must be smooth at 0.
        scale: q; the layer is the more linear, the larger q is.
        torch: the same σ on tensors, as in `Elementwise`.

    Raises:
        InputError: as of `Elementwise`; or σ(0) is not 0, σ′(0) not 1, or σ not smooth at 0.

    >>> from limitformer.models import Tanh
    >>> ShapedSmooth(Tanh().function, scale=1.0).derivatives  # of second and third order at 0
    (0.0, -2.0)
    """

    function: Function | str = field(kw_only=False)
    scale: float
    torch: Function | str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        freeze_functions(self)
        function = function_of(self)
        require_scalar_function(function, TRIED)
        set_fields(self, scale=require_real("scale", self.scale))
        require(self.scale > 0, f"scale must be positive; got {self.scale}.")
        value, slope, *_ = derivatives_at_zero(function)
        nearest = f"(function(x) - {value:g})/{slope:g}" if abs(slope) > AGREEMENT else "tanh"
        require(
            abs(value) < AGREEMENT and abs(slope - 1) < AGREEMENT,
            f"function must be 0 with slope 1 at 0; {name_of(function)} is {value:g} with slope {slope:g}. Nearest: "
            f"{nearest}.",
        )

    @property
    def derivatives(self) -> tuple[float, ...]:
        """(σ″(0), σ‴(0)), to seven decimals."""
        return derivatives_at_zero(function_of(self))[2:]

    def scale_at(self, width: int) -> float:
        """Return q√n."""
        return self.scale * sqrt(width)

    def gain_at(self, width: int) -> float:
        return 1 / second_moment(function_of(self), self.scale_at(width))


@lru_cache(maxsize=1024)
def derivatives_at_zero(function: FrozenFunction) -> tuple[float, ...]:
    """Return σ(0), σ′(0), σ″(0) and σ‴(0), by polynomials on the two neighbouring intervals that agree best.

    Raises:
        InputError: no two intervals agree, so that σ is not smooth at 0.
    """

    def values(points: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.array([value_at(function, float(x)) for x in points])

    def derivatives(radius: float) -> NDArray[np.float64]:
        polynomial = Chebyshev.interpolate(values, DEGREE, domain=[-radius, radius])
        return np.array([polynomial.deriv(order)(0.0) if order else polynomial(0.0) for order in range(4)])

    fits = list(map(derivatives, RADII))
    wide, narrow = min(pairwise(fits), key=lambda pair: np.abs(pair[0] - pair[1]).max())
    error = np.abs(wide - narrow).max() / max(1.0, np.abs(narrow).max())
    require(
        error < AGREEMENT,
        f"function must have three derivatives at 0; those of {name_of(function)} are known to {error:.2g} only. "
        "Nearest: Elementwise, or a ShapedReLU for a kink at 0.",
    )
    return tuple(round(float(value), 7) + 0.0 for value in narrow)  # exactly 0 for σ″ of an odd σ


@lru_cache(maxsize=1024)
def second_moment(function: FrozenFunction, scale: float = 1.0) -> float:
    """Return E s² σ(g/s)², g ~ N(0, 1), for s = `scale`.

    Raises:
        InputError: it is 0 or infinite, or not known to `PRECISION`.
    """
    few, many = quadrature(function, PIECES, scale), quadrature(function, SHORT_PIECES, scale)
    total, error = few if is_precise(*few) and isclose(few[0], many[0], rel_tol=PRECISION) else many
    name = f"E {name_of(function)}(g)²"
    require(total > 0, f"function must not vanish; {name} is {total}.")
    require(
        is_precise(total, error),
        f"{name}, g ~ N(0, 1), is {total:g}, known to {error:.2g} only: give gain, or another σ.",
    )
    return total


def quadrature(function: FrozenFunction, pieces: Sequence[float], scale: float = 1.0) -> tuple[float, float]:
    """Return E s² σ(g/s)² by adaptive quadrature between these points, and its error; (∞, 0) where σ overflows."""
    from scipy.integrate import quad

    def integrand(x: float) -> float:
        return (scale * value_at(function, x / scale)) ** 2 * exp(-x * x / 2) / sqrt(2 * pi)

    try:
        integrals = [
            quad(integrand, *piece, epsabs=0, epsrel=1e-12, limit=200, full_output=1) for piece in pairwise(pieces)
        ]
    except OverflowError:
        return float("inf"), 0.0
    return sum(part[0] for part in integrals), sum(part[1] for part in integrals)


def is_precise(total: float, error: float) -> bool:
    return isfinite(total) and error < PRECISION * total


ACTIVATIONS = (ShapedReLU, ReLU, GELU, Elementwise, ShapedSmooth)


@register("feedforward")
@dataclass(frozen=True, kw_only=True)
class OneMatrix(Feedforward):
    """One matrix per layer, √(c/n) σ(X) W: the MLP of [ST, eq. 19] with gamma=1, a residual network with lam=1.

    σ acts on the coordinates themselves, so the model has no attention and no norm.

    Attributes:
        activation: the layer that defines σ; `hidden` of both stays None.
    """

    activation: ShapedReLU | ReLU | GELU | Elementwise | ShapedSmooth

    def __post_init__(self) -> None:
        names = ", ".join(kind.__name__ for kind in ACTIVATIONS)
        known = type(self.activation) in ACTIVATIONS
        require(known, f"activation must be one of {names}; got {self.activation!r}.")
        hidden = next((part.hidden for part in (self, self.activation) if part.hidden is not None), None)
        require(hidden is None, f"A layer of one matrix has no hidden units, hidden must be None; got {hidden}.")

    def gain_at(self, width: int) -> float:
        return self.activation.gain_at(width)
