"""The errata of [CT] in docs/errata.md: the correction passes its test; the printed formula, its wrong twin, fails.

This file needs only NumPy and SciPy, so that checking them does not require trust in this library.
"""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from scipy.integrate import quad


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
    """s(1 − δ) ~ δ^(−3/2 + e^{−β}/ε²), the exponent that the paper uses later."""
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


def test_horizon_takes_l_times_t_layers():
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
    """Just before layer n + 1 the interpolation is already at that layer."""
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


def length_coefficients(y: np.ndarray, attention: np.ndarray) -> tuple[float, float]:
    """(drift, squared noise) of |Y|² under [CT, eq. 6], σ = 1, at any Y (d,), by the coefficients of dW_kl."""
    d = len(y)
    tangent = np.eye(d) - np.outer(y, y)
    noise = np.einsum("mk,l->mkl", tangent, attention)  # of dY_m, what dW_kl is times
    drift = (1 - d) / 2 * attention @ attention * y
    martingale = 2 * np.einsum("m,mkl->kl", y, noise)
    return float(2 * y @ drift + (noise**2).sum()), float((martingale**2).sum())


def test_length_off_the_sphere_has_a_martingale_term():
    """2σ(1 − |Y|²) YᵀdW A: the proof of Lemma 1 leaves it out, by ⟨P⊥_Y[v], Y⟩ = 0, which needs |Y| = 1."""
    y, attention = np.array([0.9, -0.6, 0.5]), np.array([0.2, 0.7, -0.4])
    r, a = y @ y, attention @ attention
    drift, noise = length_coefficients(y, attention)
    assert drift == pytest.approx(a * (r - 3) * (r - 1))  # as printed
    assert noise == pytest.approx(4 * (1 - r) ** 2 * r * a)
    assert noise > 0.1  # printed: 0
    # On the sphere both vanish, and |Y|² − 1 solves a linear equation: it stays 0.
    for turned in (y / np.sqrt(r), np.array([0.0, 0.6, -0.8])):
        assert length_coefficients(turned, attention) == pytest.approx((0, 0), abs=1e-14)


@pytest.mark.parametrize("end", [1, -1])
@pytest.mark.parametrize(("dim", "beta"), [(3, 0.4), (6, 1.1)])
def test_exponent_at_an_end_has_one_minus_y_squared(end, dim, beta):
    """d/d|log ε| ∫ψ/(1 − y²) = ψ(±1)/2, as the result of C.2 has it; with 1 ∓ y, as printed, it would be ψ(±1)."""

    def psi(y: float) -> float:
        return 2 * (dim - 2) * np.exp(beta * (1 + y)) / (np.exp(2 * beta) + np.exp(2 * beta * y))

    def growth(divisor) -> float:
        """Return the integral from ε to ε/10 of the distance from the end, per unit of |log ε|."""
        points = np.sort(end * (1 - np.array([1e-6, 1e-7])))
        return quad(lambda y: psi(y) / divisor(y), *points)[0] / np.log(10)

    stated = (dim - 2) / 2 if end == 1 else (dim - 2) / (2 * np.cosh(2 * beta))
    assert growth(lambda y: 1 - y * y) == pytest.approx(stated, rel=1e-5)
    assert growth(lambda y: 1 - end * y) == pytest.approx(2 * stated, rel=1e-5)


def test_squared_difference_is_a_sum_over_tokens():
    """[CT, eq. 16] sums over tokens 1 … N, not over layers 1 … n."""
    layer, tokens = 3, 5
    difference = np.random.default_rng(0).standard_normal((tokens, 4))
    squares = (difference**2).sum(1)
    assert squares.sum() == pytest.approx(np.linalg.norm(difference) ** 2)
    assert squares[:layer].sum() < 0.9 * np.linalg.norm(difference) ** 2


def skewed(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Bounded values, mean 0, variance 1, third moment 3/2: Assumption 1 holds."""
    return np.where(rng.random(shape) < 0.2, 2.0, -0.5)


def signs(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Return bounded values with mean 0, variance 1 and third moment 0."""
    return rng.choice([-1.0, 1.0], shape)


def linearised_apart(layers: int, law, samples: int = 3000) -> tuple[float, float]:
    """(E|Δ|² at T = 1, E max|Δ|²) of [CT, eq. 13] against its linearisation, eq. 14: one token, d = 2, σ = 1/2."""
    rng = np.random.default_rng(layers)
    x = np.tile([0.6, 0.8], (samples, 1))
    y, largest = x.copy(), np.zeros(samples)
    step = 1 / np.sqrt(layers)
    for _ in range(layers):
        value = 0.5 * law(rng, (samples, 2, 2))
        vx, vy = (np.einsum("nij,nj->ni", value, tokens) for tokens in (x, y))
        x = x + step * vx
        x /= np.linalg.norm(x, axis=1, keepdims=True)
        along, square = (y * vy).sum(1, keepdims=True), (vy * vy).sum(1, keepdims=True)
        second = 1.5 * along**2 * y - 0.5 * square * y - along * vy
        y = y + step * (vy - along * y) + step**2 * second
        largest = np.maximum(largest, ((x - y) ** 2).sum(1))
    return float(((x - y) ** 2).sum(1).mean()), float(largest.mean())


@pytest.fixture(scope="module")
def apart() -> dict[str, np.ndarray]:
    """(E|Δ|², E max|Δ|²) for 16, 64 and 256 layers, by the law of the values."""
    laws = {"skewed": skewed, "signs": signs}
    return {name: np.array([linearised_apart(n, law) for n in (16, 64, 256)]) for name, law in laws.items()}


def test_linear_remainder_is_of_order_one_over_l(apart):
    """|ΣR/L^{3/2}|² ≤ T²R²/L, not R²/L²: with values of a third moment it is of that order.

    Symmetric values make the remainder a martingale to leading order, and E|Δ|² falls like L⁻² as printed.
    """
    orders = {name: np.log(found[:-1, 0] / found[1:, 0]) / np.log(4) for name, found in apart.items()}
    np.testing.assert_allclose(orders["skewed"], 1, atol=0.25)
    np.testing.assert_allclose(orders["signs"], 2, atol=0.35)
    # No constant R will do in R²/L², whatever the factor from Grönwall: what it must be grows with L.
    needed = apart["skewed"][:, 0] * np.array([16, 64, 256]) ** 2
    assert needed[2] > 3 * needed[1] > 9 * needed[0]


def test_sum_of_drifts_has_a_factor_t():
    """|Σ g_k/L|² ≤ (T/L) Σ|g_k|² for TL terms (Cauchy-Schwarz, attained for equal ones); printed: (1/L) Σ|g_k|²."""
    horizon, layers = 5, 40
    g = np.ones(horizon * layers)
    squared_sum, right = (g.sum() / layers) ** 2, (g**2).sum() / layers
    assert squared_sum == pytest.approx(horizon * right)
    assert squared_sum > right


def test_paths_need_the_supremum_inside(apart):
    """max_k E|Δ_k|² → 0 does not give max_k|Δ_k| → 0 in probability: a bump of height 1 in a random layer.

    Doob's inequality puts the supremum inside at the price of a constant: E max|Δ|² falls with E|Δ|².
    """
    layers, samples = 400, 4000
    bump = np.random.default_rng(1).integers(0, layers, samples)
    paths = np.zeros((samples, layers))
    paths[np.arange(samples), bump] = 1.0
    assert (paths**2).mean(0).max() < 0.01
    assert (paths**2).max(1).mean() == 1
    for found in apart.values():
        assert (found[:, 1] < 2 * found[:, 0]).all()
        assert found[2, 1] < found[0, 1] / 8


@pytest.mark.parametrize(("dim", "a"), [(2, -0.9), (2, -0.5), (4, -0.8)])
def test_stopped_scale_function_is_above_s_of_a(dim, a):
    """S(Z_{t∧τ_a}) ∈ [S(a), S(1)]; at a itself it is S(a), which is below the printed bound a."""

    def scale_density(x: float) -> float:
        total = quad(lambda y: 2 * (dim - 2) * np.exp(1 + y) / (np.exp(2) + np.exp(2 * y)) / (1 - y * y), 0, x)[0]
        return float(np.exp(-total) / np.sqrt(1 - x * x))

    points = np.linspace(a, 0.999, 30)
    values = [quad(scale_density, 0, x)[0] for x in points]
    assert (np.diff(values) > 0).all()  # so that it stays above S(a)
    assert values[0] < a - 0.01
    if dim == 2:
        assert values[0] == pytest.approx(np.arcsin(a))


@pytest.mark.parametrize(("dim", "beta"), [(10, 0.5), (4, 2.0)])
def test_tokens_that_start_antipodal_or_together_stay(dim, beta):
    """Theorem 2 needs Z₀ ≠ ±1: from Z₀ = −1, P(A₁) > 0 is false, and so is P(A₂) = 0 for d − 2 ≥ cosh 2β."""
    rng = np.random.default_rng(2)
    first = rng.standard_normal(dim)
    first /= np.linalg.norm(first)
    moved = {}
    for z in (-1.0, 1.0, -0.9):
        across = np.eye(dim)[0] - first[0] * first
        x = np.stack([first, z * first + np.sqrt(1 - z * z) * across / np.linalg.norm(across)])
        for _ in range(20):
            weights = np.exp(beta * x @ x.T)
            attention = weights / weights.sum(1, keepdims=True) @ x
            x = x + attention @ rng.standard_normal((dim, dim)).T / 10
            x /= np.linalg.norm(x, axis=1, keepdims=True)
        moved[z] = abs(x[0] @ x[1] - z)
    # To the rounding of each layer: a layer maps (x, −x) to (x′, −x′) whatever its values.
    assert moved[-1.0] < 1e-12
    assert moved[1.0] < 1e-12
    assert moved[-0.9] > 0.01


def test_appendix_c4_proves_proposition_1():
    """The attracting ends change places at ε² = 2e^{−β}, Proposition 1; the docstrings cite it so."""
    beta = 0.7
    for epsilon, plus_attracts in (
        (0.99 * np.sqrt(2 * np.exp(-beta)), True),
        (1.01 * np.sqrt(2 * np.exp(-beta)), False),
    ):
        delta = 1e-8
        # log s(±(1 − δ)) has slope ∓δ (log s)′ in log δ; above −1 it can be integrated.
        exponents = [-sign * delta * hybrid_log_slope(sign * (1 - delta), beta, epsilon, 2) for sign in (1, -1)]
        assert [bool(e > -1) for e in exponents] == [plus_attracts, not plus_attracts]
    folder = Path(__file__).resolve().parents[2] / "src/limitformer/sphere/overlap"
    text = "".join(path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.py")))
    assert "Lemma 1]" not in text
    assert "Lemmas 1" not in text
    assert text.count("Prop. 1]") == 2


def test_hybrid_tokens_at_the_ends_stay():
    """Proposition 1 needs Z₀ ≠ ±1: there overlap has neither drift nor noise, at both sides of ε² = 2e^{−β}."""
    beta = 0.7
    for epsilon in (0.5, 2.0):
        for z in (-1.0, 1.0):
            assert hybrid_coefficients(z, beta, epsilon) == pytest.approx((0, 0), abs=1e-12)
        assert abs(hybrid_coefficients(-0.9, beta, epsilon)[1]) > 0.01


def smooth_step(x: np.ndarray) -> np.ndarray:
    """Return a smooth function that is 1 up to 2 and 0 from 4 on."""

    def bump(t: np.ndarray) -> np.ndarray:
        return np.where(t > 0, np.exp(-1 / np.maximum(t, 1e-300)), 0.0)

    return bump(4 - x) / (bump(4 - x) + bump(x - 2))


def test_cut_off_for_any_large_token_is_bounded():
    """A cut-off that is 0 only if all of ‖X‖, ‖Xⁱ‖ are ≥ 4 is as printed, and not bounded; a product of cut-offs is."""

    def auxiliary(x: np.ndarray, tokens: np.ndarray, *, every: bool) -> float:
        cuts = smooth_step(np.linalg.norm(np.vstack([x, tokens]), axis=1))
        weights = np.exp(tokens @ x)
        attention = weights / weights.sum() @ tokens
        return float(np.linalg.norm(attention) * (cuts.prod() if every else 1 - (1 - cuts).prod()))

    x = np.array([1.0, 0.0])
    for size, is_cut in ((1.9, False), (30.0, True), (300.0, True)):
        tokens = np.array([[0.6, 0.8], [0.0, size]])
        plain = np.linalg.norm(np.exp(tokens @ x) / np.exp(tokens @ x).sum() @ tokens)
        assert auxiliary(x, tokens, every=False) == pytest.approx(plain)
        assert auxiliary(x, tokens, every=True) == pytest.approx(0.0 if is_cut else plain)
    assert plain > 60  # so the printed one is not bounded
    assert auxiliary(4 * x, np.array([[4.0, 0.0], [0.0, 5.0]]), every=False) == 0  # where the paper asks for it


def overlap_drift(z: float, dim: int, beta: float) -> float:
    """Return the numerator of 2μ/σ² of [CT, App. C.2], which has the sign of the drift."""
    return float(2 * (dim - 2) * np.exp(beta * (1 + z)) - z * (np.exp(2 * beta) + np.exp(2 * beta * z)))


def test_the_drift_of_the_overlap_vanishes_inside():
    """At z = 0 for d = 2, and twice for d = 4 and a large β; the noise is positive there."""
    assert overlap_drift(0.0, 2, 1.3) == 0
    for dim, beta, changes in ((2, 1.3, 1), (4, 5.0, 2), (4, 0.5, 0)):
        signs = np.sign([overlap_drift(z, dim, beta) for z in np.linspace(-0.9999, 0.9999, 2001)])
        assert np.count_nonzero(np.diff(signs[signs != 0])) == changes
    z = np.linspace(-0.999, 0.999, 101)
    assert ((1 - z**2) / (np.exp(1) + np.exp(z)) > 0).all()


def test_antipodal_dimensions_grow_with_beta():
    """None of 4 to 10 at β = 0.5, d < 6 at β = 1, all at β = 3; the printed order is all, some, all."""
    dims = range(4, 11)
    possible = [{dim for dim in dims if dim - 2 < np.cosh(2 * beta)} for beta in (0.5, 1.0, 3.0)]
    assert possible == [set(), {4, 5}, set(dims)]
    for one, other in pairwise(np.linspace(0, 3, 50)):  # no regime has fewer dimensions than one of smaller β
        assert {d for d in dims if d - 2 < np.cosh(2 * one)} <= {d for d in dims if d - 2 < np.cosh(2 * other)}


def growth_at_minus_one(dim: int, beta: float) -> float:
    """Return the ratio of ∫ s over two decades of 1 + x, the scale density of [CT, App. C.2]; below 1 it converges."""

    def total(u: float) -> float:
        return float(quad(lambda w: (dim - 2) / np.cosh(beta * (1 + np.tanh(w))), 0, u, limit=200)[0])

    ends = np.arctanh(1 - 10.0 ** -np.arange(5, 8))
    first, second = (quad(lambda u: np.exp(total(u)) / np.cosh(u), *pair)[0] for pair in pairwise(ends))
    return float(second / first)


def test_beta_one_is_not_the_threshold_of_all_dimensions():
    """At β = 0.8 d = 4 may end antipodal, at β = 1.2 d = 10 may not: the thresholds run from 0.66 to 1.38."""
    for dim, beta, antipodal in ((4, 0.8, True), (10, 1.2, False), (4, 0.6, False), (10, 1.45, True)):
        assert bool(growth_at_minus_one(dim, beta) < 1) is antipodal
        assert bool(dim - 2 < np.cosh(2 * beta)) is antipodal
    assert np.arccosh([2, 8]) / 2 == pytest.approx([0.66, 1.38], abs=0.005)


def test_watanabe_1984a_and_1984b_are_one_paper():
    """The two entries of the references differ in capitals, a full stop and the number of the issue only."""
    title = "Diffusion approximations of some stochastic difference equations"
    first = f"{title} II. Hiroshima Mathematical Journal 14, pp. 15–34."
    second = f"{title}. ii. Hiroshima mathematical journal 14 (1), pp. 15–34."

    def plain(text: str) -> str:
        return text.casefold().replace(" (1)", "").replace(".", "")

    assert plain(first) == plain(second)
    assert plain(first) != plain(first.replace("II", "I"))  # the first part is another paper
