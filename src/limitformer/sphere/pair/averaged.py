r"""Two tokens in the limit of drawn queries and keys: a step with attention averaged, not drawn.

Near antipodes, one draw of QᵀK moves s = X¹ + X² by b|s| with a probability of order 1/b. Steps of the limit that draw
it must be shorter than 1/b² (`limit`). But the limit depends only on means over the draws. Those of
⟨A(X¹) ± A(X²), A(X¹) ± A(X²)⟩ are

  E|A¹ + A²|² = |s|² (1 + q̃(1 − z)/2),    E|A¹ − A²|² = |d|² (C + q̃(1 + z)/2),    E⟨A¹ + A², A¹ − A²⟩ = 0

with C and q̃ of `overlap.drawn`. A step of `pair.chain` with the square roots of these factors for a + b and a − b has
the coefficients of the limit. A table in u = artanh z holds them, interpolated by cubics through four points.
"""

import numpy as np
from numpy.typing import NDArray

from limitformer.numerics.elementary import logarithm
from limitformer.numerics.kernels import inlined
from limitformer.sphere.overlap.drawn import DrawnAttention
from limitformer.sphere.overlap.position import at_artanh

PER_UNIT = 32  # points of the table in a unit of u: an error of 1e-7
LEAST = 1e-300  # w whose logarithm is taken


def averages_table(drawn: DrawnAttention) -> NDArray[np.float64]:
    """Return the two square roots (2, points) at even points of u, from −`drawn.last` to `drawn.last`."""
    at = at_artanh(np.linspace(-drawn.last, drawn.last, 1 + 2 * round(PER_UNIT * drawn.last)))
    product, bend = drawn(at)
    squares = np.stack([1 + bend * at.below / 2, product + bend * at.above / 2])
    return np.asarray(np.sqrt(np.maximum(squares, 0.0)))


@inlined
def averaged_weights(w, positive, last, table):
    """Return the averages that replace a + b and a − b."""
    u = -0.5 * logarithm(w if w > LEAST else LEAST)
    u = min(u, last)
    place = ((u if positive else -u) + last) * ((table.shape[1] - 1) / (2.0 * last))
    k = min(max(int(place), 1), table.shape[1] - 3)
    x = place - k
    return cubic(table[0], k, x), cubic(table[1], k, x)


@inlined
def cubic(values, k, x):
    """Evaluate at k + x the cubic through the values at k − 1, …, k + 2."""
    a, b, c, d = values[k - 1], values[k], values[k + 1], values[k + 2]
    y = x - 1.0
    outer = d * (x + 1.0) * x * y - a * x * y * (x - 2.0)
    return outer / 6.0 + 0.5 * (b * (x + 1.0) * y * (x - 2.0) - c * (x + 1.0) * x * (x - 2.0))
