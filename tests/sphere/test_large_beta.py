"""The theorems of docs/large-beta.md: tokens at β = ∞ by products of random matrices, and their consequences."""

import numpy as np
import pytest
from scipy.special import erfcx
from scipy.stats import chisquare, gamma, kstest

import limitformer as lf
from limitformer_papers.beyond.splits import coin_shares, limiting_lifetimes, still_apart
from sphere_naive import naive_attention, naive_layer, normalised, overlaps_of, tokens_at
from statistics_checks import ALPHA, STANDARD_ERRORS


def model_of(tokens, beta, dim=4, layers=25):
    return lf.StochasticTransformer(tokens=tokens, dim=dim, beta=beta, layers_per_unit_time=layers)


def products(dim, layers, time, samples, seed):
    """Return Φ (samples, d, d), products of I + G/√L with standard normal G, rescaled now and then."""
    rng = np.random.default_rng(seed)
    total = np.broadcast_to(np.eye(dim), (samples, dim, dim)).copy()
    for _ in range(round(time * layers)):
        total += rng.standard_normal((samples, dim, dim)) @ total / layers**0.5
        total /= np.linalg.norm(total, axis=(1, 2), keepdims=True)
    return total


# Attention at large β.


def test_attention_is_the_identity_up_to_the_root_of_beta():
    """|Aⁱ − Xⁱ| ≤ (N − 1)/√(eβ) everywhere; at the worst distance it falls like β^{−1/2} and not like 1/β."""
    worst = {}
    for beta in (4.0, 40.0, 600.0):
        distances = []
        for r in np.linspace(0.1, 4, 200) / np.sqrt(beta):
            angle = 2 * np.arcsin(min(r / 2, 1))
            x = np.array([[1.0, 0, 0], *[[np.cos(angle), np.sin(angle), 0]] * 3])
            distances.append(np.abs(np.linalg.norm(naive_attention(x, model_of(4, beta, 3)) - x, axis=1)).max())
        for x in (tokens_at(k, 4, 3) for k in range(200)):
            distances.append(np.linalg.norm(naive_attention(x, model_of(4, beta, 3)) - x, axis=1).max())
        worst[beta] = max(distances) * np.sqrt(beta)
    assert max(worst.values()) < 3 / np.sqrt(np.e)
    assert worst[600.0] == pytest.approx(worst[40.0], rel=0.02)
    assert worst[600.0] > 0.5


def test_layers_tend_to_those_of_infinite_beta():
    """β E|X − X^∞|² is bounded at t = 1 for equal values from uniform starts, and E|X − X^∞|² falls."""
    rng, layers, samples = np.random.default_rng(3), 50, 2000
    start = normalised(rng.standard_normal((samples, 3, 3)))
    values = rng.standard_normal((layers, samples, 3, 3))
    free = start
    for v in values:
        free = normalised(free + free @ np.swapaxes(v, -1, -2) / layers**0.5)
    distances = {}
    for beta in (6.0, 60.0, 600.0):
        x, model = start, model_of(3, beta, 3, layers)
        for v in values:
            x = naive_layer(x, model, v)
        distances[beta] = ((x - free) ** 2).sum(-1).mean()
    assert distances[600.0] < distances[60.0] / 3 < distances[6.0] / 9
    assert max(beta * square for beta, square in distances.items()) < 40


# Products of random matrices.


@pytest.mark.parametrize(("dim", "layers"), [(2, 4), (4, 1), (4, 100)])
def test_the_second_direction_falls_behind_by_a_random_walk(dim, layers):
    """log|η| falls by −E log sin∠(My, Mη̂) > 0 per layer; in the limit σ² per unit of time, not (d − 1)σ²/2."""
    rng, time = np.random.default_rng(5), 12 if layers > 1 else 60
    step, one, n = layers**-0.5, np.eye(dim), 400_000
    y, x = (one[k] + step * rng.standard_normal((n, dim)) for k in (0, 1))
    cosine = (x * y).sum(1) / np.linalg.norm(x, axis=1) / np.linalg.norm(y, axis=1)
    walk = 0.5 * np.log1p(-(cosine**2))
    steps, samples = round(time * layers), 1500
    first, second = np.zeros((2, samples)), None
    phi = np.broadcast_to(np.eye(dim)[:, :2], (samples, dim, 2)).copy()
    for _ in range(steps):  # area of the two columns over the square of the first, in logarithms
        phi = phi + step * rng.standard_normal((samples, dim, dim)) @ phi
        length = np.linalg.norm(phi[:, :, 0], axis=1)
        across = phi[:, :, 1] - ((phi[:, :, 0] * phi[:, :, 1]).sum(1) / length**2)[:, None] * phi[:, :, 0]
        first += np.log(np.stack([length, np.linalg.norm(across, axis=1)]))
        phi = np.stack([phi[:, :, 0], across], axis=2) / np.stack([length, np.linalg.norm(across, axis=1)], -1)[:, None]
    second = (first[1] - first[0]) / steps
    error = np.hypot(second.std() / samples**0.5, walk.std() / n**0.5)
    assert walk.mean() < 0
    assert abs(second.mean() - walk.mean()) < STANDARD_ERRORS * error
    if layers == 100:
        assert -layers * walk.mean() == pytest.approx(1, abs=0.03)
        assert abs(layers * second.mean() + 1.5) > STANDARD_ERRORS * layers * error


@pytest.fixture(scope="module")
def ends():
    """Return Φ at t = 30, d = 3, so that its second direction is far behind."""
    return products(3, 25, 30.0, 4000, 7)


def test_one_random_direction_decides_the_sides_of_all_tokens(ends):
    """Φx/|Φx| = ± one direction with the sign of ⟨v, x⟩ for all tokens; v is uniform on the sphere."""
    _, scales, rows = np.linalg.svd(ends)
    assert np.median(scales[:, 1] / scales[:, 0]) < 1e-10
    v, x = rows[:, 0], tokens_at(4, 6, 3)
    moved = normalised(x @ np.swapaxes(ends, 1, 2))
    side = np.sign(v @ x.T)
    product = (side[:, :, None] * side[:, None, :])[:, *np.triu_indices(6, 1)]
    assert (np.abs(overlaps_of(moved) - product).max(1) < 1e-3).mean() > 0.99
    assert kstest(np.abs(v[:, 0]), "uniform").pvalue > ALPHA  # Archimedes: uniform on (0, 1) for d = 3
    assert kstest(np.abs(normalised(v * [1, 1, 2])[:, 2]), "uniform").pvalue < ALPHA


def test_pair_separates_with_probability_angle_over_pi(ends):
    """The matrices and the library's chain agree from z = 0.3; (1 − z)/2 is rejected."""
    z = 0.3
    x = np.array([[1.0, 0, 0], [z, np.sqrt(1 - z * z), 0]])
    share_by_matrices = (overlaps_of(normalised(x @ np.swapaxes(ends, 1, 2)))[:, 0] < 0).mean()
    ours = lf.simulate(model_of(2, 1e6), z, samples=8000, seed=1, horizon=30.0, record=[30.0], progress=False)
    chain = (ours["overlap"].values[:, 0, 0] < 0).mean()
    exact = np.arccos(z) / np.pi
    for share, n in ((share_by_matrices, len(ends)), (chain, 8000)):
        error = np.sqrt(exact * (1 - exact) / n)
        assert abs(share - exact) < STANDARD_ERRORS * error
        assert abs(share - (1 - z) / 2) > STANDARD_ERRORS * error


def test_three_tokens_stay_together_with_probability_from_their_angles():
    """P(one cluster) = 1 − (θ₁₂ + θ₁₃ + θ₂₃)/2π from any start."""
    x = tokens_at(12, 3, 4)
    angles = np.arccos(overlaps_of(x))
    exact, n = 1 - angles.sum() / (2 * np.pi), 8000
    ends = lf.simulate(
        model_of(3, 1e6), x, samples=n, seed=2, horizon=30.0, record=[30.0], keep="outcome", progress=False
    )
    share = (ends["largest_cluster"].values[:, -1] == 3).mean()
    error = np.sqrt(exact * (1 - exact) / n)
    assert abs(share - exact) < STANDARD_ERRORS * error
    assert abs(share - 0.25) > STANDARD_ERRORS * error  # that of a uniform start


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("values", ["gaussian", "rademacher"])
def test_sides_are_fair_coins(values):
    """Five tokens at β = 10⁶ for every law of the values; at β = 1 the sides are not fair coins."""
    for beta, fair in ((1e6, True), (1.0, False)):
        model = lf.StochasticTransformer(tokens=5, dim=4, beta=beta, layers_per_unit_time=25, values=values)
        ends = lf.simulate(
            model, samples=3000, seed=3, horizon=30.0, record=[30.0], keep="outcome", tolerance=0.1, progress=False
        )
        settled = ends["unresolved_pairs"].values[:, -1] == 0
        counts = np.bincount(5 - ends["largest_cluster"].values[settled, -1], minlength=3)
        assert bool(chisquare(counts, coin_shares(5) * counts.sum()).pvalue > ALPHA) is fair
        assert not fair or settled.mean() > 0.98


def test_shares_of_coins_equal_enumeration():
    """Enumeration of all tosses of six coins; the shares add up to 1 for any N."""
    tosses = (np.arange(2**6)[:, None] >> np.arange(6)) & 1
    smaller = np.minimum(tosses.sum(1), 6 - tosses.sum(1))
    np.testing.assert_allclose(coin_shares(6), np.bincount(smaller) / 2**6)
    for n in (2, 7, 40):
        assert coin_shares(n).sum() == pytest.approx(1)


# β → ∞ for two tokens, and times of the order e^{2β}.


def test_two_tokens_tend_to_the_angle():
    """P(antipodal) → arccos(z)/π, its distance like β^{−1/2} for d > 2; in the plane it is that at every β."""
    for z in (-0.6, 0.3):
        exact = np.arccos(z) / np.pi
        off = [
            exact - float(lf.overlap(model_of(2, beta)).antipodal_probability(z)) for beta in (400.0, 1600.0, 6400.0)
        ]
        assert 0 < off[2] < 0.01
        assert off[0] / off[1] == pytest.approx(2, abs=0.1)
        assert off[1] / off[2] == pytest.approx(2, abs=0.05)
        for beta in (0.0, 2.0):
            assert float(lf.overlap(model_of(2, beta, 2)).antipodal_probability(z)) == pytest.approx(exact)


def test_lifetimes_are_exponential():
    """Two clusters from −1, by the law of their overlap: P(not yet together at t) → e^{−t/m}, not two such times."""
    scaled = np.array([0.3, 1.0, 2.0])

    def apart(beta):
        pair = lf.overlap(model_of(3, beta), clusters=(2, 1))
        mean = pair.mean_hitting_time(1 - 1e-6, start=-1.0)
        law = pair.density(mean * scaled, start=-1.0)
        low = law["density"].where(law["overlap"] < 0.9, 0.0).sum("artanh_overlap") * law.attrs["spacing"]
        return law["below"].values + low.values

    off = {beta: np.abs(apart(beta) - np.exp(-scaled)).max() for beta in (2.0, 4.0)}
    assert off[4.0] < 0.01
    assert off[2.0] > 5 * off[4.0]
    assert np.abs(apart(4.0) - gamma(2, scale=0.5).sf(scaled)).max() > 0.1


def test_the_limiting_lifetime_is_that_of_the_exact_integral():
    """m(p, q) is what the mean time to an overlap near 1 tends to; half of it, for b = 0, is not."""
    lifetimes = limiting_lifetimes(5, 2, 12.0)
    assert lifetimes[0] == 0
    for few in (1, 2):
        exact = lf.overlap(model_of(5, 12.0, 2), clusters=(5 - few, few)).mean_hitting_time(1 - 1e-6, start=-1.0)
        assert lifetimes[few] / exact == pytest.approx(1, abs=0.005)
    assert limiting_lifetimes(4, 3, 2.0)[-1] == np.inf
    assert limiting_lifetimes(5, 4, 1.0, sigma=2.0)[1] == pytest.approx(limiting_lifetimes(5, 4, 1.0)[1] / 4)


def test_many_coins_and_their_exponentials_are_erfcx():
    """Σ P e^{−t/m} → erfcx(s/√2) at t = s M, M = √N/4 times the rest; an exponential of the mean rate is not that."""
    times = np.array([0.1, 0.5, 1.0, 3.0])

    def off(n):
        rest = limiting_lifetimes(n, 4, 0.0)[n // 2] * 4 * n / (n * n - 1)  # pq/(p² − q²) = (N² − 1)/4N at q = N//2
        survival = still_apart(times * np.sqrt(n) / 4 * rest, coin_shares(n), limiting_lifetimes(n, 4, 0.0))
        return np.abs(survival - erfcx(times / np.sqrt(2)))

    assert off(1001).max() < 1e-3
    assert off(1001).max() < off(101).max() / 3
    assert np.abs(np.exp(-times * np.sqrt(2 / np.pi)) - erfcx(times / np.sqrt(2))).max() > 0.1
