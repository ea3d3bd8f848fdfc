"""Activations of the package: each is a scalar function, and the layer made of it.

Gain, chain and network derive from the function, and the command line takes the name of the layer (`squared-relu`).
The gradients of the chain need its derivative, in `DERIVATIVES`.
`docs/extending.md` says where else a new one has a name. Pass `torch=` if torch has the function, so that a test
compares the two; a function of operators alone, as `squared_relu`, also works on tensors and needs none.
"""

from collections.abc import Callable, Mapping
from math import erf, exp, pi, sqrt, tanh

from limitformer.models.feedforward import Elementwise, Gated
from limitformer.models.functions import FrozenFunction, freeze, python_function

__all__ = ["GeGLU", "SiLU", "SquaredReLU", "SwiGLU", "Tanh"]


def silu(x: float) -> float:
    """Return x/(1 + e⁻ˣ), also called swish."""
    return x / (1 + exp(-x))


def hyperbolic_tangent(x: float) -> float:
    return tanh(x)


def squared_relu(x: float) -> float:
    """Return max(x, 0)²."""
    return 0.5 * x * (x + abs(x))


def gelu(x: float) -> float:
    """Return x Φ(x), Φ the normal distribution function."""
    return 0.5 * x * (1 + erf(x / sqrt(2)))


def silu_derivative(x: float) -> float:
    """Return s(1 + x(1 − s)), s = 1/(1 + e⁻ˣ)."""
    s = 1 / (1 + exp(-x))
    return s * (1 + x * (1 - s))


def hyperbolic_tangent_derivative(x: float) -> float:
    """Return 1 − tanh² x."""
    return 1 - tanh(x) ** 2


def squared_relu_derivative(x: float) -> float:
    """Return 2 max(x, 0)."""
    return x + abs(x)


def gelu_derivative(x: float) -> float:
    """Return Φ(x) + x φ(x), φ the normal density."""
    return 0.5 * (1 + erf(x / sqrt(2))) + x * exp(-x * x / 2) / sqrt(2 * pi)


Scalar = Callable[[float], float]

DERIVATIVES: Mapping[Scalar, Scalar] = {
    silu: silu_derivative,
    hyperbolic_tangent: hyperbolic_tangent_derivative,
    squared_relu: squared_relu_derivative,
    gelu: gelu_derivative,
}


def derivative_of(function: FrozenFunction) -> FrozenFunction | None:
    """Return the derivative of a function of this module, None of any other.

    >>> derivative_of(SiLU().function)(0.0)
    0.5
    """
    derivative = DERIVATIVES.get(python_function(function.original))
    return None if derivative is None else freeze(derivative)


def SiLU(hidden: int | None = None) -> Elementwise:
    """Make the layer of `silu`."""
    return Elementwise(silu, hidden=hidden, torch="silu")


def Tanh(hidden: int | None = None) -> Elementwise:
    """Make the layer of tanh."""
    return Elementwise(hyperbolic_tangent, hidden=hidden, torch="tanh")


def SquaredReLU(hidden: int | None = None) -> Elementwise:
    """Make the layer of `squared_relu`, gain 2/3 [So et al., *Primer*, 2021]."""
    return Elementwise(squared_relu, hidden=hidden)


def SwiGLU(hidden: int | None = None) -> Gated:
    """Make the gated pair of `silu` [Shazeer, *GLU variants improve Transformer*, 2020]."""
    return Gated(silu, hidden=hidden, torch="silu")


def GeGLU(hidden: int | None = None) -> Gated:
    """Make the gated pair of `gelu` [Shazeer, 2020]."""
    return Gated(gelu, hidden=hidden, torch="gelu")
