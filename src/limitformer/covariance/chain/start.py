r"""The factor R₀ of a start: R₀R₀ᵀ = V₀, its first column the tokens' means where a LayerNorm needs them.

The vector of ones, e = 1/√n, is one more direction. If the tokens' means are known, R₀ = [means | factor of
V₀ − means meansᵀ]. If not, the tokens lie in a uniformly random position: seen from them, e is a random unit vector
of R^n, drawn for each sample, and a reflection makes it the first coordinate.
"""

import numpy as np
from numpy.typing import NDArray

from limitformer.base.errors import require
from limitformer.models import Start
from limitformer.models.start import rank_of
from limitformer.numerics.factor import root
from limitformer.numerics.kernels import kernel
from limitformer.numerics.lanes import everywhere, load, square_root, store, where_positive
from limitformer.numerics.random import next_chi, next_normal


def start_factor(start: Start, width: int, with_means: bool) -> tuple[NDArray[np.float64], bool]:
    """Return R₀ (tokens, r), r = min(tokens + with_means, width), and whether each sample must turn it at random.

    Raises:
        InputError: the start spreads in more directions than the width has.
    """
    rank = start.rank()
    require(
        rank <= width, f"The start spreads in {rank} directions, more than width={width} has. Nearest: width={rank}."
    )
    columns = min(start.tokens + with_means, width)
    if not with_means:
        return root(start.covariance, columns), False
    if start.means is None:
        return root(start.covariance, columns), True
    centred = start.covariance - np.outer(start.means, start.means)
    spread = rank_of(centred)
    require(
        spread < width,
        f"The start spreads in {spread} directions in addition to its means, more than width={width} has. "
        f"Nearest: width={spread + 1}.",
    )
    return np.column_stack([start.means, root(centred, columns - 1)]), False


@kernel
def turn_at_random(stream, factor, e, spread, width):
    """Reflect `factor` (m, r) so that its first coordinate is a random unit vector of R^width, seen from the tokens.

    Its first `spread` columns are the directions of the tokens; one more column, if any, is the part of e outside.
    `e` (r, 1) is scratch.
    """
    m, r = factor.shape[0], factor.shape[1]
    squared = everywhere(0.0)
    for k in range(spread):
        g = next_normal(stream)
        store(e, k, 0, g)
        squared = squared + g * g
    if r > spread:
        outside = next_chi(stream, width - spread)
        store(e, spread, 0, outside)
        squared = squared + outside * outside
    # P = I − 2vvᵀ/|v|² with v = e − (1, 0, …) sends e to the first coordinate and keeps all lengths.
    scale, length = 1.0 / square_root(squared), everywhere(0.0)
    for k in range(r):
        v = scale * load(e, k, 0) - (1.0 if k == 0 else 0.0)
        store(e, k, 0, v)
        length = length + v * v
    inverse = where_positive(length, 2.0 / length)  # 0 where e is already the first coordinate
    for i in range(m):
        share = everywhere(0.0)
        for k in range(r):
            share = share + load(factor, i, k) * load(e, k, 0)
        share = share * inverse
        for k in range(r):
            store(factor, i, k, load(factor, i, k) - share * load(e, k, 0))
