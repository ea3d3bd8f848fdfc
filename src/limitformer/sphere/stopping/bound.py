r"""When a replica of two tokens may stop: a bound on the chance that it ever comes back.

Let y = artanh z, and y_tol < 0 the edge of what counts as antipodal. If for some r > 0

  Λ(y) = E[ exp(r(y′ − y)) | y ] ≤ 1   for all y ≤ y_tol,

one layer leading from y to y′, then exp(r y) is a supermartingale until y rises above y_tol, and

  P( y ever above y_tol | y ) ≤ exp( −r (y_tol − y) )                        (Doob's maximal inequality).

This is a bound for the chain itself, at its finite L, not for its limit. Λ is computed by quadrature from the variables
of the step (`pair`), at y_tol, at −∞ and between; the largest r is taken back by 2 % so that Λ stays clear of 1, and
there is no stop where a quadrature of lower order does not confirm it, or where one layer moves the tokens far. At +1
the same holds for −y.
"""

from functools import cache, reduce

import numpy as np
from numpy.typing import NDArray

from limitformer.sphere.pair.chain import LEAST, PairConstants
from limitformer.sphere.tokens.values import CUT_DEVIATION, CUT_MASS, GAUSSIAN, RADEMACHER, UNIFORM

Array = NDArray[np.float64]
Rule = tuple[Array, Array]  # nodes and weights that sum to 1

LARGEST_EXPONENT = 10.0  # a larger one is not needed, and its moments would ask more of the quadrature
MARGIN = 0.98
SHORTEST_STEP, LONGEST_STEP = 1e-4, 0.2  # below, the ratios are rounding; above, quadratures may agree by accident
LONGEST_BOUNDED_STEP = 0.45  # where |v| ≤ 2.28, so that 1 + ω(a ± b) cannot vanish
FRACTIONS = (0.0, 0.01, 0.1, 0.35, 0.7, 1.0)  # of w at the edge, where Λ is looked at
ORDERS = (4, 6)


@cache
def stops(constants: PairConstants, tolerance: float, level: float) -> tuple[float, float]:
    """(w at +1, w at −1) below which a replica comes back out of the tolerance with a chance of at most `level`.

    0 where there is no bound.
    """
    edge = tolerance / (2 - tolerance)
    ratios = hybrid_ratios if constants.hybrid else stochastic_ratios
    bounds = []
    for positive in (True, False):
        coarse, fine = (exponent(ratios(constants, positive, edge, order)) for order in ORDERS)
        w = (
            edge * level ** (2 / (MARGIN * fine))
            if is_short(constants, positive, edge) and agree(coarse, fine)
            else 0.0
        )
        bounds.append(w if w > LEAST * 1e6 else 0.0)
    return bounds[0], bounds[1]


def is_short(constants: PairConstants, positive: bool, edge: float) -> bool:
    """Whether a layer moves the tokens so little that the quadratures can be relied on, and not less than they see."""
    largest = max(float(c.max()) for c in coefficients(constants, positive, places(edge)))
    bounded = constants.hybrid and constants.law != GAUSSIAN
    longest = LONGEST_BOUNDED_STEP if bounded else LONGEST_STEP
    return SHORTEST_STEP <= largest * (constants.step + constants.drift) <= longest


def agree(coarse: float, fine: float) -> bool:
    """Whether there is an exponent, and quadratures of both orders have found it."""
    return min(coarse, fine) > 0 and abs(coarse / fine - 1) < 0.01


def exponent(law: tuple[Array, Array]) -> float:
    """The largest r with Λ ≤ 1 everywhere, from log(w′/w) (places, nodes) and the nodes' weights; 0: none."""
    logs, weights = law

    def above_one(r: float) -> bool:
        return bool((np.exp(0.5 * r * logs) @ weights).max() > 1)

    low, high = 1e-3, LARGEST_EXPONENT
    if above_one(low):
        return 0.0
    if not above_one(high):
        return high
    for _ in range(40):
        middle = 0.5 * (low + high)
        low, high = (low, middle) if above_one(middle) else (middle, high)
    return low


def combined(rules: list[Rule]) -> tuple[list[Array], Array]:
    """Every combination of the rules' nodes, and its weight."""
    nodes = [grid.ravel() for grid in np.meshgrid(*(rule[0] for rule in rules), indexing="ij")]
    weights = reduce(np.multiply.outer, [rule[1] for rule in rules])
    return nodes, np.asarray(weights).ravel()


def normal_rule(order: int) -> Rule:
    """Gauss-Hermite for N(0, 1)."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(order)
    return nodes, weights / weights.sum()


def chi_square_rule(degrees: int, order: int) -> Rule:
    """Gauss-Laguerre for χ², from its Jacobi matrix: nothing overflows, however many degrees."""
    if degrees == 0:
        return np.zeros(1), np.ones(1)
    k = np.arange(order)
    a = degrees / 2 - 1
    side = np.sqrt(k[1:] * (k[1:] + a))
    values, vectors = np.linalg.eigh(np.diag(2 * k + a + 1) + np.diag(side, 1) + np.diag(side, -1))
    return 2 * values, vectors[0] ** 2


def value_rule(law: int, order: int) -> Rule:
    """For the law of the hybrid's v."""
    if law == GAUSSIAN:
        return normal_rule(order)
    if law == RADEMACHER:
        return np.array([-1.0, 1.0]), np.array([0.5, 0.5])
    x, weights = np.polynomial.legendre.leggauss(2 * order)
    if law == UNIFORM:
        return np.sqrt(3) * x, weights / 2
    cut = 2 * x
    density = np.exp(-(cut**2) / 2) / np.sqrt(2 * np.pi) / CUT_MASS
    weights = 2 * weights * density
    return cut / CUT_DEVIATION, weights / weights.sum()


def places(edge: float) -> Array:
    """Values of w (places, 1), from the end of the interval to the edge of the tolerance."""
    return np.maximum(np.array(FRACTIONS)[:, None] * edge, 1e-200)


def coefficients(constants: PairConstants, positive: bool, w: Array) -> tuple[Array, Array]:
    """Of attention on the longer and on the shorter of sum and difference: (a ± b, a ∓ b)."""
    e = np.exp(-2 * constants.beta * (w if positive else 1.0) / (1 + w))
    scale = constants.fixed if constants.fixed > 0 else 1 / (1 + e)
    of_sum, of_difference = scale * (1 + e), scale * (1 - e)
    return (of_sum, of_difference) if positive else (of_difference, of_sum)


def stochastic_ratios(constants: PairConstants, positive: bool, edge: float, order: int) -> tuple[Array, Array]:
    """log(w′/w) (places, nodes) of `pair.move_pairs`, and weights."""
    w = places(edge)
    big, small = (constants.step * c for c in coefficients(constants, positive, w))
    return log_ratios(constants.dim, order, w, big, small)


def log_ratios(dim: int, order: int, w: Array, big: Array, small: Array) -> tuple[Array, Array]:
    """log(w′/w) (places, nodes) and weights, of two vectors with the coefficients c_b, c_s, (places, 1) as w."""
    normal, chi = normal_rule(order), chi_square_rule(dim - 2, order - 1)
    (h, h_, g, g_, rho, chi_), weights = combined([normal, normal, normal, normal, chi, chi])
    q = (1 + big * h) ** 2 + big**2 * (h_**2 + rho)
    m = big * h_ / np.sqrt(q)
    along = w * (m + small * g) ** 2
    across = (np.sqrt(((1 + big * h) ** 2 + big**2 * rho) / q) + small * g_) ** 2 + small**2 * chi_
    difference = q - along - w * across
    root = np.sqrt(difference**2 + 4 * q * w * across)
    # Below, what counts is exp(±2y′) itself, also beyond 1, where big and small have changed places.
    direct = np.log(4 * q * across) - 2 * np.log(root + np.abs(difference))
    swapped = 2 * np.log(root + np.abs(difference)) - np.log(4 * q * across) - 2 * np.log(w)
    return np.where(difference >= 0, direct, swapped), weights


def hybrid_ratios(constants: PairConstants, positive: bool, edge: float, order: int) -> tuple[Array, Array]:
    """log(w′/w) (places, nodes) of `pair.stretch_pairs`, and weights."""
    nodes, weights = value_rule(constants.law, 4 * order)
    w = places(edge)
    of_big, of_small = coefficients(constants, positive, w)
    omega = constants.drift + constants.step * nodes
    with np.errstate(divide="ignore"):
        return 2 * np.log(np.abs(1 + omega * of_small)) - 2 * np.log(np.abs(1 + omega * of_big)), weights
