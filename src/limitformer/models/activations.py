"""Activations by name: each a scalar function, and the layer made of it.

One more takes a function and three lines here, and its name in `limitformer/__init__.py`. A function that also works on
tensors, as `squared_relu` does, needs no `torch`.
"""

from math import erf, exp, sqrt, tanh

from limitformer.models.elementwise import Elementwise, Gated


def silu(x: float) -> float:
    """x/(1 + e⁻ˣ), also called swish."""
    return x / (1 + exp(-x))


def hyperbolic_tangent(x: float) -> float:
    """tanh x."""
    return tanh(x)


def squared_relu(x: float) -> float:
    """max(x, 0)²."""
    return 0.5 * x * (x + abs(x))


def gelu(x: float) -> float:
    """x Φ(x), Φ the normal distribution function."""
    return 0.5 * x * (1 + erf(x / sqrt(2)))


def SiLU(hidden: int | None = None) -> Elementwise:
    """The layer of `silu`."""
    return Elementwise(silu, hidden=hidden, torch="silu")


def Tanh(hidden: int | None = None) -> Elementwise:
    """The layer of tanh."""
    return Elementwise(hyperbolic_tangent, hidden=hidden, torch="tanh")


def SquaredReLU(hidden: int | None = None) -> Elementwise:
    """The layer of `squared_relu`, gain 2/3 [So et al., *Primer*, 2021]."""
    return Elementwise(squared_relu, hidden=hidden)


def SwiGLU(hidden: int | None = None) -> Gated:
    """The gated pair of `silu` [Shazeer, *GLU variants improve Transformer*, 2020]."""
    return Gated(silu, hidden=hidden, torch="silu")


def GeGLU(hidden: int | None = None) -> Gated:
    """The gated pair of `gelu` [the same]."""
    return Gated(gelu, hidden=hidden, torch="gelu")
