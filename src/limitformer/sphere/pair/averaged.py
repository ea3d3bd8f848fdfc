r"""Two tokens in the limit of drawn queries and keys: a step with attention averaged, not drawn.

A layer's draw of QᵀK moves s = X¹ + X² by b|s| with a probability of the order 1/b near antipodes: steps of the limit
that draw it must be shorter than 1/b² (`limit`). But the limit knows the draws by their means alone. Those of
⟨A(X¹) ± A(X²), A(X¹) ± A(X²)⟩ are

  E|A¹ + A²|² = |s|² (1 + q̃(1 − z)/2),    E|A¹ − A²|² = |d|² (C + q̃(1 + z)/2),    E⟨A¹ + A², A¹ − A²⟩ = 0

with C and q̃ of `overlap.drawn`, so that a step of `pair` in which the square roots stand for a + b and a − b has the
coefficients of the limit. They are read from a table in u = artanh z, by cubics through four neighbours.
"""

import numpy as np
from numpy.typing import NDArray

from limitformer.numerics.elementary import logarithm
from limitformer.numerics.kernels import inlined
from limitformer.sphere.overlap.drawn import Drawn
from limitformer.sphere.overlap.position import at_artanh

PER_UNIT = 32  # points of the table in a unit of u: an error of 1e-7
LEAST = 1e-300  # w whose logarithm is taken


def averages_table(drawn: Drawn) -> NDArray[np.float64]:
    """(2, points): the two square roots at even points of u, from −`drawn.last` to `drawn.last`."""
    at = at_artanh(np.linspace(-drawn.last, drawn.last, 1 + 2 * round(PER_UNIT * drawn.last)))
    product, bend = drawn(at)
    squares = np.stack([1 + bend * at.below / 2, product + bend * at.above / 2])
    return np.asarray(np.sqrt(np.maximum(squares, 0.0)))


@inlined
def averaged_weights(w, positive, last, table):
    """In the place of (a + b, a − b)."""
    u = -0.5 * logarithm(w if w > LEAST else LEAST)
    u = min(u, last)
    place = ((u if positive else -u) + last) * ((table.shape[1] - 1) / (2.0 * last))
    k = min(max(int(place), 1), table.shape[1] - 3)
    x = place - k
    return cubic(table[0], k, x), cubic(table[1], k, x)


@inlined
def cubic(values, k, x):
    """Through the values at k − 1, …, k + 2, at k + x."""
    a, b, c, d = values[k - 1], values[k], values[k + 1], values[k + 2]
    y = x - 1.0
    outer = d * (x + 1.0) * x * y - a * x * y * (x - 2.0)
    return outer / 6.0 + 0.5 * (b * (x + 1.0) * y * (x - 2.0) - c * (x + 1.0) * x * (x - 2.0))
