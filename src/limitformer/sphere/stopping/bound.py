r"""A bound on the probability that two tokens ever return, which lets a replica stop.

Let y = artanh z, and let y_tol < 0 be the edge of the antipodal tolerance. If for some r > 0

  Λ(y) = E[ exp(r(y′ − y)) | y ] ≤ 1   for all y ≤ y_tol,

where one layer leads from y to y′, then exp(r y) is a supermartingale until y rises above y_tol, and

  P( y ever above y_tol | y ) ≤ exp( −r (y_tol − y) )                        (Doob's maximal inequality).

The bound holds for the chain itself, at finite L, not for its limit. Λ is computed by quadrature over the variables of
the step (`pair.chain`), at y_tol, at −∞ and between. The largest r is reduced by 2 % so that Λ < 1. No replica stops if
a quadrature of lower order disagrees, or if one layer moves the tokens far. At +1 the same holds for −y.
"""

from functools import cache, reduce

import numpy as np
from numpy.typing import NDArray

from limitformer.sphere.pair.chain import LEAST, PairConstants
from limitformer.sphere.tokens.values import CUT_DEVIATION, CUT_MASS, GAUSSIAN, RADEMACHER, UNIFORM

Array = NDArray[np.float64]
Rule = tuple[Array, Array]  # nodes and weights that sum to 1

LARGEST_EXPONENT = 10.0  # a larger one is not needed, and its moments would need a finer quadrature
MARGIN = 0.98
SHORTEST_STEP, LONGEST_STEP = 1e-4, 0.2  # below, ratios are rounding errors; above, quadratures may agree by chance
LONGEST_BOUNDED_STEP = 0.45  # where |v| ≤ 2.28, so that 1 + ω(a ± b) cannot vanish
FRACTIONS = (0.0, 0.01, 0.1, 0.35, 0.7, 1.0)  # of w at the edge, where Λ is evaluated
ORDERS = (4, 6)


@cache
def stops(constants: PairConstants, tolerance: float, level: float) -> tuple[float, float]:
    """Return w at +1 and at −1; below it a replica leaves the tolerance with probability at most `level`.

    0 stands for no bound.
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
    """Whether a layer moves the tokens little enough for the quadratures, and by more than rounding."""
    largest = max(float(c.max()) for c in coefficients(constants, positive, places(edge)))
    bounded = constants.hybrid and constants.law != GAUSSIAN
    longest = LONGEST_BOUNDED_STEP if bounded else LONGEST_STEP
    return SHORTEST_STEP <= largest * (constants.step + constants.drift) <= longest


def agree(coarse: float, fine: float) -> bool:
    """Whether the exponents of both orders are positive and equal to 1 %."""
    return min(coarse, fine) > 0 and abs(coarse / fine - 1) < 0.01


def exponent(law: tuple[Array, Array]) -> float:
    """Return the largest r with Λ ≤ 1, from log(w′/w) (places, nodes) and weights of the nodes; 0 for none."""
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
    """Return the product rule: its nodes by variable, and its weights."""
    nodes = [grid.ravel() for grid in np.meshgrid(*(rule[0] for rule in rules), indexing="ij")]
    weights = reduce(np.multiply.outer, [rule[1] for rule in rules])
    return nodes, np.asarray(weights).ravel()


def normal_rule(order: int) -> Rule:
    nodes, weights = np.polynomial.hermite_e.hermegauss(order)
    return nodes, weights / weights.sum()


def chi_square_rule(degrees: int, order: int) -> Rule:
    """Return the Gauss-Laguerre rule for χ², from its Jacobi matrix, which does not overflow for many degrees."""
    if degrees == 0:
        return np.zeros(1), np.ones(1)
    k = np.arange(order)
    a = degrees / 2 - 1
    side = np.sqrt(k[1:] * (k[1:] + a))
    values, vectors = np.linalg.eigh(np.diag(2 * k + a + 1) + np.diag(side, 1) + np.diag(side, -1))
    return 2 * values, vectors[0] ** 2


def value_rule(law: int, order: int) -> Rule:
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
    """Return values of w (places, 1) from 0 to the edge of the tolerance."""
    return np.maximum(np.array(FRACTIONS)[:, None] * edge, 1e-200)


def coefficients(constants: PairConstants, positive: bool, w: Array) -> tuple[Array, Array]:
    """Return the coefficients a ± b of the longer, a ∓ b of the shorter of sum and difference."""
    e = np.exp(-2 * constants.beta * (w if positive else 1.0) / (1 + w))
    scale = constants.fixed if constants.fixed > 0 else 1 / (1 + e)
    of_sum, of_difference = scale * (1 + e), scale * (1 - e)
    return (of_sum, of_difference) if positive else (of_difference, of_sum)


def stochastic_ratios(constants: PairConstants, positive: bool, edge: float, order: int) -> tuple[Array, Array]:
    """Return log(w′/w) (places, nodes) of `pair.chain.move_pairs`, and weights."""
    w = places(edge)
    big, small = (constants.step * c for c in coefficients(constants, positive, w))
    return log_ratios(constants.dim, order, w, big, small)


def log_ratios(dim: int, order: int, w: Array, big: Array, small: Array) -> tuple[Array, Array]:
    """Return log(w′/w) (places, nodes) and weights for the coefficients c_b, c_s (places, 1)."""
    normal, chi = normal_rule(order), chi_square_rule(dim - 2, order - 1)
    (h, h_, g, g_, rho, chi_), weights = combined([normal, normal, normal, normal, chi, chi])
    q = (1 + big * h) ** 2 + big**2 * (h_**2 + rho)
    m = big * h_ / np.sqrt(q)
    along = w * (m + small * g) ** 2
    across = (np.sqrt(((1 + big * h) ** 2 + big**2 * rho) / q) + small * g_) ** 2 + small**2 * chi_
    difference = q - along - w * across
    root = np.sqrt(difference**2 + 4 * q * w * across)
    # exp(±2y′) itself is needed, also beyond 1, where big and small have changed places.
    direct = np.log(4 * q * across) - 2 * np.log(root + np.abs(difference))
    swapped = 2 * np.log(root + np.abs(difference)) - np.log(4 * q * across) - 2 * np.log(w)
    return np.where(difference >= 0, direct, swapped), weights


def hybrid_ratios(constants: PairConstants, positive: bool, edge: float, order: int) -> tuple[Array, Array]:
    """Return log(w′/w) (places, nodes) of `pair.chain.stretch_pairs`, and weights."""
    nodes, weights = value_rule(constants.law, 4 * order)
    w = places(edge)
    of_big, of_small = coefficients(constants, positive, w)
    omega = constants.drift + constants.step * nodes
    with np.errstate(divide="ignore"):
        return 2 * np.log(np.abs(1 + omega * of_small)) - 2 * np.log(np.abs(1 + omega * of_big)), weights
