"""Activations of the package: each is a scalar function, and the layer made of it.

Gain, chain and network derive from the function, and the command line takes the name of the layer (`squared-relu`).
`docs/extending.md` lists what else has the name of a new one. Pass `torch=` if torch has the function, so that a test
compares the two; a function of operators alone, as `squared_relu`, also works on tensors and needs none.
"""

from math import erf, exp, sqrt, tanh

from limitformer.models.elementwise import Elementwise, Gated

__all__ = ["GeGLU", "SiLU", "SquaredReLU", "SwiGLU", "Tanh"]


def silu(x: float) -> float:
    """Return x/(1 + e⁻ˣ), also called swish."""
    return x / (1 + exp(-x))


def hyperbolic_tangent(x: float) -> float:
    """Return tanh x."""
    return tanh(x)


def squared_relu(x: float) -> float:
    """Return max(x, 0)²."""
    return 0.5 * x * (x + abs(x))


def gelu(x: float) -> float:
    """Return x Φ(x), Φ the normal distribution function."""
    return 0.5 * x * (1 + erf(x / sqrt(2)))


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
