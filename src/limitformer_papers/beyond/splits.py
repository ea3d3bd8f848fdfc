r"""How N tokens part at large β, and how long each way of parting lasts (docs/large-beta.md).

At β = ∞ tokens follow one product of random matrices to ±v, independent fair coins from uniform starts: p on one side
and q = N − p on the other with probability

  P(p, q) = 2 C(N, p)/2^N for p ≠ q,    C(N, p)/2^N for p = q.

On the time scale e^{2β} an unequal split ends at the rate 1/m, m the leading term of `overlap.hitting` at b → 1,

  m(p, q) = (π/(2√2)) B(½, (d − 1)/2) pq/|p² − q²| e^{2β}/σ²,

and an equal one never does. So P(not all together at t) = Σ P(p, q) e^{−t/m(p, q)}. As N → ∞ the share of the larger
cluster is ½ + |G|/(2√N) with G normal, 1/m is |G|/M with M = √N/4 times the rest, and the sum tends to
E e^{−|G|t/M} = erfcx(t/(√2 M)).
"""

from math import comb, inf

import numpy as np
from numpy.typing import ArrayLike, NDArray

from limitformer.sphere.overlap.hitting import inverse_push, leading_lifetime

Array = NDArray[np.float64]


def coin_shares(tokens: int) -> Array:
    """Return the probabilities of 0, 1, …, N//2 tokens in the smaller of the two clusters.

    >>> coin_shares(5).tolist(), coin_shares(4).tolist()
    ([0.0625, 0.3125, 0.625], [0.125, 0.5, 0.375])
    """
    ways = [comb(tokens, few) * (1 if 2 * few == tokens else 2) for few in range(tokens // 2 + 1)]
    return np.array(ways) / 2.0**tokens


def limiting_lifetimes(tokens: int, dim: int, beta: float, sigma: float = 1.0) -> Array:
    """Return m for 0, 1, …, N//2 tokens in the smaller cluster: 0 for none, ∞ for equal clusters."""
    return np.array([lifetime_of(tokens - few, few, dim, beta, sigma) for few in range(tokens // 2 + 1)])


def lifetime_of(p: int, q: int, dim: int, beta: float, sigma: float) -> float:
    if p == q:
        return inf
    return leading_lifetime(inverse_push(p, q), dim, beta, sigma, 1.0) if q else 0.0


def still_apart(times: ArrayLike, shares: Array, lifetimes: Array) -> Array:
    """Return Σ P e^{−t/m} at `times` (n,), with `shares` and `lifetimes` (k,) of the splits."""
    apart = lifetimes > 0
    rates = 1 / lifetimes[apart]
    decays: Array = np.exp(-np.asarray(times, float)[:, None] * rates)
    return decays @ shares[apart]
