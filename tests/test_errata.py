"""The errata of docs/errata.md: what is right passes its test, and what is printed, its wrong twin, fails it.

Self-contained on purpose: NumPy and SciPy alone, so that nobody has to trust this library to check them.
"""

from itertools import pairwise

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.special import roots_hermitenorm, roots_legendre

# Two tokens of unequal variance, so that nothing holds by symmetry.
V = np.array([[1.3, 0.4], [0.4, 0.7]])


# Clustering in Deep Stochastic Transformers


def hybrid_coefficients(z: float, beta: float, epsilon: float) -> tuple[float, float]:
    """(drift, noise) of ⟨Y¹, Y²⟩ from the SDE of the tokens [CT, eq. 8], two tokens of the plane."""
    y = np.array([[1.0, 0.0], [z, np.sqrt(1 - z * z)]])
    attention = np.exp(beta * y @ y.T) @ y / 2
    drift, noise = np.empty((2, 2)), np.empty((2, 2))
    for i in (0, 1):
        x, a = y[i], attention[i]
        inner = x @ a
        tangent = a - inner * x
        drift[i] = epsilon**2 * (1.5 * inner**2 * x - 0.5 * (a @ a) * x - inner * a) + tangent
        noise[i] = epsilon * tangent
    mixed = drift[0] @ y[1] + y[0] @ drift[1] + noise[0] @ noise[1]
    return float(mixed), float(noise[0] @ y[1] + y[0] @ noise[1])


def hybrid_log_slope(y: float, beta: float, epsilon: float, tilt: float) -> float:
    """d log s/dy of [CT, App. C.4], with `tilt`·y in the numerator: 1 as printed, 2 as it should be."""
    return float(((np.exp(beta) - 2 / epsilon**2) * np.exp(-beta * y) + tilt * y) / (1 - y * y))


def test_hybrid_scale_density_has_2y():
    """s solves (log s)′ = −2μ/σ², μ and σ from the tokens."""
    for beta, epsilon, z in [(0.7, 0.9, -0.6), (0.7, 1.4, 0.3), (2.0, 0.5, 0.8)]:
        drift, noise = hybrid_coefficients(z, beta, epsilon)
        slope = -2 * drift / noise**2
        assert hybrid_log_slope(z, beta, epsilon, tilt=2) == pytest.approx(slope, rel=1e-12)
        assert hybrid_log_slope(z, beta, epsilon, tilt=1) != pytest.approx(slope, rel=0.05)


def test_hybrid_asymptotics_are_those_of_2y():
    """s(1 − δ) ~ δ^(−3/2 + e^{−β}/ε²), the exponent that the paper goes on with."""
    beta, epsilon = 0.7, 0.9
    stated = -1.5 + np.exp(-beta) / epsilon**2

    def exponent(tilt: float) -> float:
        # log s(1 − δ) has slope −δ·(log s)′ in log δ.
        delta = 1e-7
        return -delta * hybrid_log_slope(1 - delta, beta, epsilon, tilt)

    assert exponent(2) == pytest.approx(stated, abs=1e-5)
    assert exponent(1) != pytest.approx(stated, abs=0.4)


def scale_increment(dim: int, beta: float, near: float, far: float) -> float:
    """∫ s from 1 − near to 1 − far, the scale density of [CT, App. C.2] in u = artanh x."""

    def total(u: float) -> float:
        return float(quad(lambda w: (dim - 2) / np.cosh(beta * (1 - np.tanh(w))), 0, u, limit=200)[0])

    # dx = sech²(u) du and √(1 − x²) = sech u leave one sech.
    limits = np.arctanh(1 - near), np.arctanh(1 - far)
    return float(quad(lambda u: np.exp(-total(u)) / np.cosh(u), *limits)[0])


@pytest.mark.parametrize("dim", [2, 3, 5])
def test_scale_density_is_integrable_at_plus_one(dim):
    """S(1) < ∞: each decade of 1 − x adds a fixed fraction of the one before. Divergence needs ≥ 1."""
    decades = [scale_increment(dim, 1.0, 10.0**-k, 10.0 ** -(k + 1)) for k in (4, 5, 6)]
    ratios = [later / earlier for earlier, later in pairwise(decades)]
    assert ratios == pytest.approx([10 ** (-(dim - 1) / 2)] * 2, rel=1e-3)
    assert not any(ratio >= 1 for ratio in ratios)


def overlap_with_start(layers: int, layers_per_unit_time: int, seed: int) -> np.ndarray:
    """⟨X_layers, X_0⟩ of one token under [CT, eq. 4], σ = 1, dim = 4, Gaussian values: 20,000 samples."""
    rng = np.random.default_rng(seed)
    x = np.zeros((20_000, 4))
    x[:, 0] = 1.0
    for _ in range(layers):
        # With one token A = X, |X| = 1, so V X is standard normal.
        x += rng.standard_normal(x.shape) / np.sqrt(layers_per_unit_time)
        x /= np.linalg.norm(x, axis=1, keepdims=True)
    return x[:, 0]


def test_horizon_takes_layers_per_unit_time_times_horizon_layers():
    """Brownian motion on the sphere: E⟨X_T, X_0⟩ = exp(−(dim − 1)T/2). L in all would stop at time 1."""
    horizon, per_unit_time = 0.5, 400
    layers = round(per_unit_time * horizon)
    expected = np.exp(-1.5 * horizon)
    errors = {}
    for name, step in {"L per unit of time": per_unit_time, "L in all": layers}.items():
        sample = overlap_with_start(layers, step, seed=3)
        errors[name] = abs(sample.mean() - expected) / (sample.std() / np.sqrt(len(sample)))
    assert errors["L per unit of time"] < 4
    assert errors["L in all"] > 20
    assert 100 * 500 == 50_000  # the caption of Fig. 3 has L = 100 and T = 500, the text "L = 50,000"


def interpolate(grid: np.ndarray, t: float, layers_per_unit_time: int, factor: float) -> float:
    """[CT, eq. 5] with `factor` in front of (t − n/L): L as it should be, 1/L as printed."""
    n = int(np.floor(t * layers_per_unit_time))
    return float(grid[n] + (t - n / layers_per_unit_time) * factor * (grid[n + 1] - grid[n]))


def test_interpolation_meets_the_next_layer():
    """Just before layer n + 1 the interpolation has to be there already."""
    grid, per_unit_time = np.array([0.3, -1.1, 2.0]), 8
    before = 2 / per_unit_time - 1e-12
    assert interpolate(grid, before, per_unit_time, factor=per_unit_time) == pytest.approx(grid[2], abs=1e-9)
    assert interpolate(grid, before, per_unit_time, factor=1 / per_unit_time) != pytest.approx(grid[2], abs=1)


def squared_noise(z: float, beta: float) -> float:
    """Var dZ/dt of two tokens with softmax attention and σ = 1, from [CT, eq. 6]: the squares of what W_kl is times."""
    y = np.array([[1.0, 0.0, 0.0], [z, np.sqrt(1 - z * z), 0.0]])
    weights = np.exp(beta * y @ y.T)
    attention = weights / weights.sum(1, keepdims=True) @ y
    coefficients = np.zeros((3, 3))
    for i in (0, 1):
        tangent = np.eye(3) - np.outer(y[i], y[i])
        coefficients += np.outer(tangent @ y[1 - i], attention[i])
    return float((coefficients**2).sum())


@pytest.mark.parametrize("z", [-0.9, -0.2, 0.6])
def test_softmax_overlap_noise_has_a_root_of_two(z):
    beta = 1.3
    own, other = np.exp(beta), np.exp(beta * z)
    printed = (1 - z * z) ** 2 * (own**2 + other**2) / (own + other) ** 2
    assert squared_noise(z, beta) == pytest.approx(2 * printed, rel=1e-12)
    assert abs(squared_noise(z, beta) / printed - 1) > 0.9


# The Shaped Transformer


def logits(variance: float, divisor: float, width: int, key_dim: int, seed: int) -> np.ndarray:
    """⟨x W_Q, y W_K⟩/divisor, entries of both weights N(0, variance): 20,000 samples, |x|² = |y|² = width."""
    rng = np.random.default_rng(seed)
    scale = np.sqrt(width * variance)
    queries, keys = scale * rng.standard_normal((2, 20_000, key_dim))
    return (queries * keys).sum(1) / divisor


def test_query_and_key_weights_have_variance_width_to_minus_three_halves():
    """τ = √(n n_k) with weights N(0, 1)/√n has the logits of τ = √n_k with weights N(0, n^(−3/2))."""
    width, key_dim = 64, 8
    wanted = logits(1 / width, np.sqrt(width * key_dim), width, key_dim, seed=1).std()
    standard_error = np.sqrt(2) * wanted / np.sqrt(20_000)  # generous: kurtosis 3 + 6/key_dim, two samples
    right = logits(width**-1.5, np.sqrt(key_dim), width, key_dim, seed=2).std()
    printed = logits(width**-2.0, np.sqrt(key_dim), width, key_dim, seed=2).std()
    assert abs(right - wanted) < 4 * standard_error
    assert abs(printed - wanted) > 40 * standard_error
    assert printed == pytest.approx(right / np.sqrt(width))  # the temperature would be off by √n


def softmax_to_second_order(y: np.ndarray, tau: float, sign: int) -> np.ndarray:
    """[ST, eq. 8], sign = −1 in front of (mean(y²) − mean(y)²); the paper prints +1."""
    m, centred = len(y), y - y.mean()
    return 1 / m + centred / (tau * m) + (centred**2 + sign * (centred**2).mean()) / (2 * tau**2 * m)


def test_softmax_expansion_subtracts_the_variance():
    """Right: the error falls like τ⁻³ and the weights sum to one. Printed: τ⁻², and they do not."""
    y = np.array([0.9, -0.4, 0.3, 1.7])

    def error(tau: float, sign: int) -> float:
        exact = np.exp(y / tau) / np.exp(y / tau).sum()
        return float(np.abs(softmax_to_second_order(y, tau, sign) - exact).max())

    def order(sign: int) -> float:
        return float(np.log2(error(64, sign) / error(128, sign)))

    assert order(-1) == pytest.approx(3, abs=0.05)
    assert order(+1) == pytest.approx(2, abs=0.05)
    assert softmax_to_second_order(y, 2.0, -1).sum() == pytest.approx(1, abs=1e-14)
    assert softmax_to_second_order(y, 2.0, +1).sum() != pytest.approx(1, abs=0.05)


SLOPES = [(0.2, 0.3, -1.0), (-0.6, 0.5, -0.7), (0.9, -0.2, 1.1)]


def shaped_kernel(rho: float, c_plus: float, c_minus: float, width: int) -> float:
    """c K₁(ρ) = E σ(g)σ(h)/E σ(g)², by quadrature along the angle of the Gaussian pair."""
    positive, negative = 1 + c_plus / np.sqrt(width), 1 + c_minus / np.sqrt(width)
    # g = r cos θ, h = r cos(θ − arccos ρ), E r² = 2; the kinks lie where a cosine changes sign.
    angle = np.arccos(rho)
    kinks = np.sort(np.mod([np.pi / 2, -np.pi / 2, angle + np.pi / 2, angle - np.pi / 2], 2 * np.pi))
    edges = np.concatenate([[0], kinks, [2 * np.pi]])
    nodes, weights = roots_legendre(40)
    total = 0.0
    for low, high in pairwise(edges):
        theta = low + (high - low) * (nodes + 1) / 2
        product = np.ones_like(theta)
        for x in (np.cos(theta), np.cos(theta - angle)):
            product *= positive * np.maximum(x, 0) + negative * np.minimum(x, 0)
        total += (high - low) / 2 * weights @ product
    return float(2 * total / (2 * np.pi) / ((positive**2 + negative**2) / 2))


def nu(rho: float, c_plus: float, c_minus: float) -> float:
    """[ST, eq. 6]."""
    return float((c_plus - c_minus) ** 2 / (2 * np.pi) * (np.sqrt(1 - rho**2) - rho * np.arccos(rho)))


def nu_of_appendix_b(rho: float, c_plus: float, c_minus: float) -> float:
    """ν as it stands in [ST, App. B], before Lemma B.1."""
    return float((c_plus + c_minus) ** 2 / (2 * np.pi) * (np.sqrt(1 - rho**2) + rho * np.arccos(rho)))


@pytest.mark.parametrize(("rho", "c_plus", "c_minus"), SLOPES)
def test_nu_has_two_minus_signs(rho, c_plus, c_minus):
    """ν(ρ) = lim n (c K₁(ρ) − ρ)."""
    width = 10**10
    limit = width * (shaped_kernel(rho, c_plus, c_minus, width) - rho)
    assert nu(rho, c_plus, c_minus) == pytest.approx(limit, abs=1e-4)
    assert nu_of_appendix_b(rho, c_plus, c_minus) != pytest.approx(limit, abs=0.02)


def test_the_residual_drift_carries_gamma_squared():
    """E V′ − V of one layer, exact: γ²(√(V_αα V_ββ) c K₁ − V_αβ); the proof of Thm 3.2 drops γ²."""
    width, gamma, slopes = 10**8, 0.5, (0.3, -1.0)
    scale = np.sqrt(V[0, 0] * V[1, 1])
    rho = V[0, 1] / scale
    moved = gamma**2 * (scale * shaped_kernel(rho, *slopes, width) - V[0, 1])
    assert width * moved == pytest.approx(gamma**2 * scale * nu(rho, *slopes), rel=2e-3)
    assert width * moved != pytest.approx(scale * nu(rho, *slopes), rel=0.5)


def root(matrix: np.ndarray) -> np.ndarray:
    """The symmetric square root."""
    values, vectors = np.linalg.eigh(matrix)
    return vectors * np.sqrt(values) @ vectors.T


def test_independent_noises_add_their_covariances():
    """Cov(Σ^½ ξ + Σ_res^½ ξ′) = Σ + Σ_res; [ST, eq. 32] prints Σ + Σ_res^½."""
    first, second = V, np.array([[0.2, -0.1], [-0.1, 0.9]])
    joint = np.hstack([root(first), root(second)])  # (ξ, ξ′) has covariance I
    assert joint @ joint.T == pytest.approx(first + second, abs=1e-14)
    assert joint @ joint.T != pytest.approx(first + root(second), abs=0.05)


def mixed_variance(spread: float) -> float:
    """E (A V Aᵀ)_11 for two tokens and shaped attention; logits Y/τ Gaussian, covariance `spread`² V ⊗ V."""
    nodes, weights = roots_hermitenorm(60)
    difference = spread * np.sqrt(V[0, 0] * (V[0, 0] - 2 * V[0, 1] + V[1, 1])) * nodes
    q = 1 / (1 + np.exp(-difference)) - 0.5
    first, second = 1 + q, -q  # the row of A
    values = first**2 * V[0, 0] + 2 * first * second * V[0, 1] + second**2 * V[1, 1]
    return float(weights @ values / weights.sum())


def test_first_order_noise_has_a_remainder_of_second_order():
    """E (T₁^11)² = 4 V_11 E(A V Aᵀ)_11 differs from 4 V_11² by O(s²), s² = n_k/τ²; printed: O(n_k τ⁻³)."""

    def remainder(spread: float) -> float:
        return 4 * V[0, 0] * (mixed_variance(spread) - V[0, 0])

    order = np.log2(remainder(0.02) / remainder(0.01))
    assert order == pytest.approx(2, abs=0.01)
    assert order != pytest.approx(3, abs=0.5)
    # The coefficient is the drift of Thm 4.2: S₁ and S₂ of two tokens give V_11 D²/16.
    d = V[0, 0] - 2 * V[0, 1] + V[1, 1]
    assert remainder(0.01) / 0.01**2 == pytest.approx(4 * V[0, 0] * V[0, 0] * d * d / 16, rel=1e-3)
