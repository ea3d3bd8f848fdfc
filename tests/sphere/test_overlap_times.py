"""The overlap diffusion in time: mean times, the metastable gap, the Fokker-Planck equation."""

from math import asin, exp, log, pi, sqrt

import numpy as np
import pytest
from scipy.integrate import quad, solve_ivp
from scipy.linalg import solveh_banded

from limitformer.base.errors import InputError
from limitformer.models.sphere import HybridTransformer, StochasticTransformer
from limitformer.sphere.overlap import OverlapDiffusion, overlap

STANDARD_ERRORS = 4.0


def stochastic(tokens=2, dim=4, beta=1.0, **more) -> StochasticTransformer:
    return StochasticTransformer(tokens=tokens, dim=dim, beta=beta, layers_per_unit_time=100, **more)


def hybrid(tokens=2, dim=4, beta=1.0, epsilon=0.5, **more) -> HybridTransformer:
    return HybridTransformer(tokens=tokens, dim=dim, beta=beta, epsilon=epsilon, layers_per_unit_time=100, **more)


def generator(diffusion: OverlapDiffusion, function, z: float, step: float) -> float:
    """Return μm′ + g²m″/2 at z by differences."""
    ahead, here, behind = (function(z + k * step) for k in (1, 0, -1))
    drift, noise = float(diffusion.drift(z)), float(diffusion.diffusion(z))
    return drift * (ahead - behind) / (2 * step) + noise**2 / 2 * (ahead - 2 * here + behind) / step**2


def time_by_ode(diffusion: OverlapDiffusion, start: float, target: float) -> float:
    """Return the mean time up by an ODE solver.

    E = ∫M du, M′ = (2 − 2μM)/g², from u = −16, where the speed density is e^{λu}.
    """

    def rates(u):
        return float(diffusion.artanh_drift(u)), float(diffusion.artanh_diffusion(u)) ** 2

    def right(u, state):
        drift, variance = rates(u)
        return [(2 - 2 * drift * state[0]) / variance, state[0]]

    low, begin = -16.0, max(np.arctanh(start), -16.0) if start > -1 else -16.0
    drift, variance = rates(low)
    growth = log(rates(low + 1e-3)[1] / rates(low - 1e-3)[1]) / 2e-3
    state = [2 / variance / (2 * drift / variance - growth), 0.0]
    if begin > low:
        state[0] = solve_ivp(right, (low, begin), state, "LSODA", rtol=1e-11, atol=1e-20).y[0, -1]
    return float(solve_ivp(right, (begin, np.arctanh(target)), state, "LSODA", rtol=1e-11, atol=1e-12).y[1, -1])


def test_lifetime_of_unequal_clusters():
    clusters = overlap(stochastic(3, beta=2.0), (2, 1))
    assert clusters.mean_hitting_time(0.9, start=-1.0) == pytest.approx(32.66, abs=0.005)
    assert clusters.mean_hitting_time(0.9, start=-1.0) == pytest.approx(time_by_ode(clusters, -1.0, 0.9), rel=1e-6)
    # The wrong twins: (1, 2) is the same pair, (3, 2) is not, nor is dim 5.
    assert overlap(stochastic(3, beta=2.0), (1, 2)).mean_hitting_time(0.9, -1.0) == pytest.approx(32.6557, rel=1e-5)
    for other in (overlap(stochastic(5, beta=2.0), (3, 2)), overlap(stochastic(3, 5, 2.0), (2, 1))):
        assert abs(other.mean_hitting_time(0.9, -1.0) / 32.66 - 1) > 0.1


@pytest.mark.parametrize(
    "diffusion",
    [
        overlap(stochastic(dim=5, beta=0.5, sigma=1.3)),
        overlap(stochastic(5, 3, 1.0, attention="unnormalized"), (4, 1)),
        overlap(stochastic(3, 2, 1.5), (2, 1)),
        overlap(hybrid(beta=1.5)),
        overlap(hybrid(5, beta=-1.0, epsilon=1.5), (3, 2)),
    ],
)
def test_mean_hitting_time_by_two_routes(diffusion):
    """Quadrature against an ODE solver, and the equation Lm = −1."""
    time = diffusion.mean_hitting_time(0.8, start=-0.7)
    assert time == pytest.approx(time_by_ode(diffusion, -0.7, 0.8), rel=1e-6)
    value = generator(diffusion, lambda z: diffusion.mean_hitting_time(0.8, z), 0.1, 2e-4)
    assert value == pytest.approx(-1, abs=2e-4)
    assert diffusion.mean_hitting_time(0.8, start=0.8) == 0
    # Half-way and on is the whole way: the overlap is continuous.
    parts = diffusion.mean_hitting_time(0.2, -0.7) + diffusion.mean_hitting_time(0.8, 0.2)
    assert time == pytest.approx(parts, rel=1e-12)


@pytest.mark.parametrize("epsilon", [1.5, 2.0])
def test_times_down_where_only_minus_one_attracts(epsilon):
    pair = overlap(hybrid(beta=1.0, epsilon=epsilon))
    assert pair.mean_hitting_time(0.9, start=-0.5) == np.inf
    value = generator(pair, lambda z: pair.mean_hitting_time(-0.6, z), 0.2, 2e-4)
    assert value == pytest.approx(-1, abs=1e-3)
    parts = pair.mean_hitting_time(0.1, 0.7) + pair.mean_hitting_time(-0.6, 0.1)
    assert pair.mean_hitting_time(-0.6, 0.7) == pytest.approx(parts, rel=1e-12)
    far = 1 - 1e-14
    assert pair.mean_exit_time(-0.6, far, 0.7) < pair.mean_hitting_time(-0.6, 0.7)
    if epsilon == 2.0:  # of the paths, e^{−u/2} reach `far`
        assert pair.mean_exit_time(-0.6, far, 0.7) == pytest.approx(pair.mean_hitting_time(-0.6, 0.7), rel=3e-3)


def test_times_that_are_infinite():
    above, below = overlap(stochastic(beta=1.0)), overlap(stochastic(beta=0.5))
    assert above.mean_hitting_time(0.9, start=0.0) == np.inf  # it may end antipodal
    assert below.mean_hitting_time(0.9, start=0.0) < np.inf
    assert below.mean_hitting_time(-0.9, start=0.0) == np.inf  # it may end in one cluster
    at_threshold = overlap(stochastic(dim=3, beta=0.0))
    assert at_threshold.mean_hitting_time(0.9, start=0.0) == np.inf  # reached, but late
    assert at_threshold.return_probability(0.9, -0.9) == 1
    assert overlap(stochastic(3), (2, 1)).mean_hitting_time(-0.5, start=0.5) == np.inf


@pytest.mark.parametrize(
    "diffusion",
    [overlap(stochastic(dim=6, beta=1.6)), overlap(stochastic(7, 3, 1.0), (5, 2)), overlap(hybrid(epsilon=1.3))],
)
def test_mean_exit_time_solves_its_equation(diffusion):
    value = generator(diffusion, lambda z: diffusion.mean_exit_time(-0.8, 0.9, z), 0.3, 2e-4)
    assert value == pytest.approx(-1, abs=2e-4)
    assert diffusion.mean_exit_time(-0.8, 0.9, -0.8) == diffusion.mean_exit_time(-0.8, 0.9, 0.9) == 0
    assert diffusion.mean_exit_time(-0.8, 0.9, 0.9 - 1e-6) < 1e-3


def test_lifetimes_grow_like_exp_two_beta_for_softmax_only():
    def lifetime(beta, sizes, form):
        model = stochastic(sum(sizes), 4, beta, attention=form)
        return overlap(model, sizes).mean_hitting_time(0.9, start=-1.0)

    slope = log(lifetime(12.0, (2, 1), "softmax") / lifetime(11.0, (2, 1), "softmax"))
    assert slope == pytest.approx(2.0, abs=0.01)
    # The prefactor is pq/|p² − q²|, which is e^{−2β}/δ.
    ratio = lifetime(12.0, (26, 24), "softmax") / lifetime(12.0, (2, 1), "softmax")
    assert ratio == pytest.approx((26 * 24 / 100) / (2 / 3), rel=5e-3)
    # Without normalisation the larger cluster moves faster by the factor p/q at every β: only the clock e^{2β} is left.
    clock = [lifetime(beta, (2, 1), "unnormalized") * exp(2 * beta) for beta in (11.0, 12.0)]
    assert clock[1] / clock[0] == pytest.approx(1.0, abs=0.02)


def lifetime_ratio(beta, sizes=(2, 1), dim=4, target=0.9, sigma=1.0):
    """Return the exact lifetime over its leading term."""
    clusters = overlap(stochastic(sum(sizes), dim, beta, sigma=sigma), sizes)
    return clusters.mean_hitting_time(target, start=-1.0) / clusters.lifetime_asymptote(target)


@pytest.mark.parametrize(("sizes", "dim", "target"), [((2, 1), 4, 0.9), ((26, 24), 2, -0.6), ((1, 5), 7, 0.3)])
def test_lifetime_tends_to_its_leading_term(sizes, dim, target):
    """Agreement to 1e-6 at β = 140 for several p and q, dim, σ and targets."""
    assert lifetime_ratio(140.0, sizes, dim, target, sigma=0.7) == pytest.approx(1, abs=1e-6)
    assert lifetime_ratio(-140.0, sizes, dim, target, sigma=0.7) == pytest.approx(1, abs=1e-6)
    if dim > 2:  # in the plane nothing pulls the clusters together, and the leading term is nearly all
        assert abs(lifetime_ratio(4.0, sizes, dim, target) - 1) > 1e-3
    leading = overlap(stochastic(sum(sizes), dim, 140.0), sizes)
    # The wrong twins: b left out, and B(½, dim/2) for B(½, (dim − 1)/2).
    start_free = leading.lifetime_asymptote(0.0)
    assert start_free / leading.lifetime_asymptote(target) != pytest.approx(1, abs=0.05)
    more = overlap(stochastic(sum(sizes), dim + 1, 140.0), sizes)
    assert more.lifetime_asymptote(target) / leading.lifetime_asymptote(target) < 0.95


@pytest.mark.parametrize(("p", "q", "dim"), [(2, 1, 7), (5, 1, 3)])
def test_leading_term_has_the_stated_error(p, q, dim):
    """The relative error is (d − 2)(p/q + q/p) e^{−β(1 − b)}/(β²(1 − b²)^{3/2}(π/2 + arcsin b)); here b = 0."""
    beta = 20.0
    remainder = (1 - lifetime_ratio(beta, (p, q), dim, 0.0)) * exp(beta) * beta**2 * pi / 2
    assert remainder == pytest.approx((dim - 2) * (p / q + q / p), rel=0.03)
    assert remainder != pytest.approx((dim - 1) * (p / q + q / p), rel=0.1)
    assert remainder != pytest.approx((dim - 2) * 2, rel=0.1)


@pytest.mark.parametrize(("scaled", "ratio"), [(2, 2.1), (4, 1.53), (10, 1.221)])
def test_stated_error_is_a_first_term(scaled, ratio):
    """At b = 0.9 it is larger than the true error by factors that the page prints and that tend to 1."""
    b, beta = 0.9, scaled / 0.1
    for (p, q), dim in (((2, 1), 4), ((3, 2), 6)):
        stated = (dim - 2) * (p / q + q / p) * exp(-scaled) / (beta**2 * (1 - b * b) ** 1.5 * (pi / 2 + asin(b)))
        assert stated / (1 - lifetime_ratio(beta, (p, q), dim, b)) == pytest.approx(ratio, rel=0.01)


# The metastable gap.


def test_gap_density_is_a_density_with_its_median_and_mean():
    gap = overlap(stochastic(3, beta=2.0), (2, 1)).metastable_gap()
    end = 1 + gap.barrier
    assert quad(gap.density, 0, end, limit=200)[0] == pytest.approx(1, abs=1e-7)
    assert quad(gap.density, 0, gap.median, limit=200)[0] == pytest.approx(0.5, abs=1e-7)
    assert quad(lambda w: w * gap.density(w), 0, end, limit=200)[0] == pytest.approx(gap.mean, rel=1e-7)
    assert gap.density([1.001 * end, 2.0]).tolist() == [0, 0]


def test_gap_is_the_law_that_the_equation_settles_to_while_the_state_lasts():
    clusters = overlap(stochastic(3, beta=4.0), (2, 1))
    gap = clusters.metastable_gap()
    law = clusters.density([200.0], start=-1.0)
    inside = law.density.isel(time=0).where(law.overlap < gap.barrier, 0.0)
    mass = np.cumsum(inside.values) / inside.values.sum()
    u = np.interp(0.5, mass, law.artanh_overlap.values + law.attrs["spacing"] / 2)
    assert 2 / (1 + exp(-2 * u)) == pytest.approx(gap.median, rel=0.01)
    assert float(overlap(stochastic(3, beta=3.9), (2, 1)).metastable_gap().median) != pytest.approx(gap.median, rel=0.1)


def medians_below_the_barrier(beta, spacing=0.005):
    """Return the medians of the gap by the speed measure and by the quasi-stationary law, and its mean exit time.

    The coefficients are those of docs/unequal-clusters.md for (2, 1) and d = 4. The generator (ψ′/s)′/m on a grid in u
    is killed at the barrier, and its inverse is iterated.
    """
    top = float(np.arctanh(overlap(stochastic(3, beta=beta), (2, 1)).metastable_gap().barrier))
    u = top - spacing * np.arange(round((top + 22) / spacing), 0, -1)
    z, above, e = np.tanh(u), 2 / (1 + np.exp(-2 * u)), np.exp(beta * (np.tanh(u) - 1))
    own, other = 2 / (2 + e), 1 / (1 + 2 * e)
    mismatch, same, crossed = (
        2 * (own - other) ** 2,
        own * other + (1 - own) * (1 - other),
        own + other - 2 * own * other,
    )
    slope = -z - 2 * (2 * above * crossed - z * mismatch) / (mismatch + 2 * above * same)
    log_s = np.append(0.0, np.cumsum((slope[1:] + slope[:-1]) / 2 * spacing))
    s = np.exp(log_s - log_s.max())
    speed = 2 / ((mismatch / above + 2 * same) * s)
    flux = np.append(1 / np.sqrt(s[1:] * s[:-1]), 1 / s[-1]) / spacing**2
    diagonal = (flux + np.append(0.0, flux[:-1])) / speed
    beside = -flux[:-1] / np.sqrt(speed[:-1] * speed[1:])
    bands = np.array([np.append(0.0, beside), diagonal])
    vector, size = np.sqrt(speed), 0.0
    for _ in range(60):
        vector = solveh_banded(bands, vector)
        size = float(np.linalg.norm(vector))
        vector /= size

    def median(density):
        mass = np.cumsum(density) - density / 2
        return 2 / (1 + exp(-2 * np.interp(0.5, mass / density.sum(), u)))

    return median(speed), median(vector * np.sqrt(speed)), size


@pytest.mark.parametrize(
    ("beta", "speed", "quasi", "exit_time"),
    [(2.0, 0.00421, 0.00317, 17.43), (4.0, 1.3012e-6, 1.289e-6, 1626)],
)
def test_gap_is_the_speed_measure_and_not_the_quasi_stationary_law(beta, speed, quasi, exit_time):
    gap = overlap(stochastic(3, beta=beta), (2, 1)).metastable_gap()
    medians = medians_below_the_barrier(beta)
    assert medians[:2] == pytest.approx((speed, quasi), rel=2e-3)
    assert medians[2] == pytest.approx(exit_time, rel=1e-3)
    assert gap.median == pytest.approx(medians[0], rel=1e-3)
    assert gap.median != pytest.approx(medians[1], rel=5e-3)


# The Fokker-Planck equation.


def total(law):
    return law.density.sum("artanh_overlap") * law.attrs["spacing"] + law.below + law.above


def negative(law):
    """Return the mass at u < 0, with half of the cell at 0."""
    share = 0.5 - 0.5 * np.sign(law.artanh_overlap.round(9))
    return (law.density * share).sum("artanh_overlap") * law.attrs["spacing"] + law.below


def expectation(law, function):
    """Return E[function(u)], with `function` at ±∞ for the tallies."""
    inner = (law.density * function(law.artanh_overlap)).sum("artanh_overlap") * law.attrs["spacing"]
    return (inner + law.below * function(-np.inf) + law.above * function(np.inf)).values


LAWS = [
    (overlap(stochastic()), None),
    (overlap(stochastic(dim=10, beta=20.0)), 0.3),
    (overlap(stochastic(dim=64, beta=0.5)), -0.9),
    (overlap(stochastic(3, beta=3.0), (2, 1)), -1.0),
    (overlap(hybrid(beta=2.0, epsilon=1.2)), 0.4),
    (overlap(hybrid(epsilon=0.5, attention="unnormalized")), None),
]


@pytest.mark.parametrize(("diffusion", "start"), LAWS)
def test_mass_is_conserved_and_positive(diffusion, start):
    law = diffusion.density([0.0, 0.01, 1.0, 300.0], start=start, steps=100)
    np.testing.assert_allclose(total(law), 1, rtol=0, atol=1e-12)
    assert float(law.density.min()) >= -1e-14
    assert float(law.below.min()) >= 0
    assert float(law.above.min()) >= 0
    expected = float(diffusion.antipodal_probability(start)) if not diffusion.motion.minus.growth < 0 else None
    if expected is not None:
        assert float(negative(law)[-1]) == pytest.approx(expected, abs=5e-4)


@pytest.mark.parametrize("diffusion", [overlap(stochastic(beta=1.5)), overlap(hybrid(beta=2.0, epsilon=1.2))])
def test_mass_after_a_long_time_equals_the_scale_function(diffusion):
    """The chain has the hitting probabilities of the diffusion from one point; from a density, to second order."""
    point = diffusion.density([2000.0], start=0.2, spacing=0.1)
    assert float(negative(point)[0]) == pytest.approx(float(diffusion.antipodal_probability(0.2)), abs=1e-8)
    errors = []
    for spacing in (0.12, 0.06):
        law = diffusion.density([2000.0], spacing=spacing)
        errors.append(float(negative(law)[0]) - float(diffusion.antipodal_probability()))
    assert abs(errors[1]) < 2e-4
    assert errors[0] / errors[1] == pytest.approx(4, abs=0.2)


def test_second_order_in_space_and_time():
    pair = overlap(stochastic())
    grids = [expectation(pair.density([2.0], 0.0, spacing=h, steps=800), np.tanh)[0] for h in (0.2, 0.1, 0.05)]
    assert (grids[0] - grids[1]) / (grids[1] - grids[2]) == pytest.approx(4, abs=0.4)
    times = [expectation(pair.density([2.0], 0.0, spacing=0.1, steps=n), np.tanh)[0] for n in (100, 200, 400)]
    assert (times[0] - times[1]) / (times[1] - times[2]) == pytest.approx(4, abs=0.8)


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize(
    ("diffusion", "start", "time"),
    [
        (overlap(stochastic(dim=5, beta=1.4)), 0.1, 1.0),
        (overlap(stochastic(5), (4, 1)), -0.6, 1.0),
        (overlap(stochastic(dim=128, beta=0.5)), 0.0, 0.01),
        (overlap(stochastic(dim=64, beta=3.0)), 0.2, 0.03),
    ],
    ids=["5", "4 and 1", "128", "64"],
)
def test_moments_equal_those_of_simulated_paths(diffusion, start, time):
    """One case has a drift that crosses a cell of width 0.05 before the noise does."""
    rng, n, dt = np.random.default_rng(3), 20_000, 0.0025 * time
    u = np.full(n, np.arctanh(start))
    for _ in range(round(time / dt)):
        u = u + dt * diffusion.artanh_drift(u) + sqrt(dt) * diffusion.artanh_diffusion(u) * rng.normal(size=n)
    law, twin = (diffusion.density([t], start) for t in (time, 1.15 * time))
    for function in (np.tanh, lambda x: np.tanh(x) ** 2, lambda x: np.tanh(x - 1)):
        samples = function(u)
        error = samples.std() / sqrt(n)
        assert abs(samples.mean() - expectation(law, function)[0]) < STANDARD_ERRORS * error + 2e-4
    assert abs(np.tanh(u).mean() - expectation(twin, np.tanh)[0]) > STANDARD_ERRORS * np.tanh(u).std() / sqrt(n)


def test_rates_are_the_speeds_of_the_two_humps():
    pair = overlap(stochastic(dim=3, beta=2.0))
    law = pair.density([7.0, 9.0], start=0.0)
    for side, sign, rate in (
        (law.artanh_overlap < 0, -1, pair.rates.minus),
        (law.artanh_overlap > 0, 1, pair.rates.plus),
    ):
        hump = law.density.where(side, 0.0)
        mean = (hump * law.artanh_overlap).sum("artanh_overlap") / hump.sum("artanh_overlap")
        assert sign * float(mean[1] - mean[0]) == pytest.approx(rate, rel=0.04)
    assert np.isnan(overlap(stochastic(beta=0.5)).rates.minus)
    assert pair.rates.plus == pytest.approx(2.0)


PAIR, WIDE = overlap(stochastic()), overlap(stochastic(dim=256, beta=0.5))
UNNORMALIZED = overlap(stochastic(3, attention="unnormalized"), (2, 1))
UNEQUAL = "Only unequal clusters of the stochastic model"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PAIR.mean_hitting_time(0.9, -1.0), "start must be above -1: two tokens there stay there"),
        (lambda: PAIR.mean_hitting_time(1.0, 0.0), "target must lie strictly between -1 and 1; got 1."),
        (lambda: PAIR.mean_exit_time(0.5, 0.9, 0.0), "low, start and high must be in order; got 0.5, 0, 0.9"),
        (lambda: PAIR.metastable_gap(), UNEQUAL + " are metastable"),
        (lambda: overlap(stochastic(4), (2, 2)).lifetime_asymptote(0.9), UNEQUAL + ", and tokens behind a causal mask"),
        (lambda: UNNORMALIZED.lifetime_asymptote(0.9), r"Lifetimes grow like e\^\{2\|beta\|\} only with softmax"),
        (lambda: overlap(stochastic(3, beta=0.1), (2, 1)).metastable_gap(), "No metastable state"),
        (lambda: overlap(hybrid(epsilon=0.0)).density([1.0]), "There is no density without noise"),
        (lambda: PAIR.density([1.0, 0.5]), "times must be finite, increasing and at least 0"),
        (lambda: PAIR.density([0.0]), "times must end after 0."),
        (lambda: WIDE.density([0.01], 0.0, spacing=0.05), "spacing must be at most .* for this model, or its noise"),
        (lambda: PAIR.density([1.0], steps=2), "steps must be at least 8; got 2."),
        (lambda: overlap(hybrid(beta=20.0, epsilon=1.2)).density([1.0]), "needs .* cells; the limit is 200000"),
    ],
)
def test_refusals(make, message):
    with pytest.raises(InputError, match=message):
        make()
