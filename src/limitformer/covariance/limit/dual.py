r"""Dual kernels K(V)_αβ = c E σ(h_α) σ(h_β), h ~ N(0, V), at infinite width; c = 1/E σ(g)², g ~ N(0, 1).

**Piecewise linear**, slopes s± with mean s̄ = (s₊ + s₋)/2 and half difference d = (s₊ − s₋)/2: σ(x) = s̄x + d|x|, and
h|h′| has mean 0, so with E|h||h′| = (2/π) √(VV′) (√(1 − ρ²) + ρ arcsin ρ)

  K = ( s̄² V_αβ + d² E|h_α||h_β| )/(s̄² + d²).

**GELU**, σ(x) = x Φ(x): write V₁₁ = a, V₂₂ = b, V₁₂ = r. Stein's identity in h, then in h′, leaves r E Φ(h)Φ(h′) and
terms with φ(h) or φ(h′), under which (h, h′) is Gaussian again. With Δ = (1 + a)(1 + b) − r²,

  K/c = r ( ¼ + arcsin(r/√((1 + a)(1 + b)))/2π ) + ( ab − r² + r²/(1 + a) + r²/(1 + b) )/(2π√Δ);

at a = b = r = 1 that is `GELU_SECOND_MOMENT`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from limitformer.models import GELU, Feedforward, OneMatrix, ReLU, ShapedReLU
from limitformer.models.feedforward import GELU_SECOND_MOMENT
from limitformer.models.kinds import of_kind

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
    ReLU: lambda part, v: piecewise_linear(v, 1.0, 0.0),
    GELU: lambda part, v: gaussian_error(v),
}
