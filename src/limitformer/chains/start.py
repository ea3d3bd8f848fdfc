r"""The factor R₀ of a start: R₀R₀ᵀ = V₀, its first column the tokens' means where a LayerNorm needs them.

The vector of ones, e = 1/√n, is one direction more. If the tokens' means are known, R₀ = [means | factor of
V₀ − means meansᵀ]. If not, the tokens lie in a uniformly random position: seen from them, e is a random unit vector
of R^n, drawn for each sample, and a reflection makes it the first coordinate.
"""

import numpy as np
from numpy.typing import NDArray

from limitformer.errors import require
from limitformer.factor import root
from limitformer.kernels import kernel
from limitformer.models import Start
from limitformer.random import next_chi, next_normal


def start_factor(start: Start, width: int, with_means: bool) -> tuple[NDArray[np.float64], bool]:
    """R₀ (tokens, r), r = min(tokens + with_means, width), and whether each sample must turn it at random.

    Raises:
        InputError: more directions than the width has.
    """
    rank = start.rank()
    require(
        rank <= width,
        f"The start spreads in {rank} directions, more than width={width} has. Nearest: width={rank}.",
    )
    columns = min(start.tokens + with_means, width)
    if not with_means:
        return root(start.covariance, columns), False
    if start.means is None:
        return root(start.covariance, columns), True
    centred = start.covariance - np.outer(start.means, start.means)
    return np.column_stack([start.means, root(centred, columns - 1)]), False


@kernel
def turn_at_random(stream, factor, e, spread, width):
    """Reflect `factor` (m, r) so that its first coordinate is a random unit vector of R^width, seen from the tokens.

    Its first `spread` columns are the tokens' own directions; one more column, if any, holds what e has outside.
    `e` (r,) is scratch.
    """
    m, r = factor.shape
    squared = 0.0
    for k in range(r):
        e[k] = 0.0
    for k in range(spread):
        e[k] = next_normal(stream)
        squared += e[k] ** 2
    outside = next_chi(stream, width - spread) if width > spread else 0.0
    if r > spread:
        e[spread] = outside
    norm = np.sqrt(squared + outside**2)
    # P = I − 2vvᵀ/|v|² with v = e − (1, 0, …) sends e to the first coordinate and turns nothing else's length.
    length = 0.0
    for k in range(r):
        e[k] = e[k] / norm - (1.0 if k == 0 else 0.0)
        length += e[k] ** 2
    for i in range(m):
        inner = 0.0
        for k in range(r):
            inner += factor[i, k] * e[k]
        for k in range(r):
            factor[i, k] -= 2.0 * inner / length * e[k]
