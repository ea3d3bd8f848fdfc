"""The errata of [ST] in docs/errata.md: the correction passes each test, and the printed statement, the twin, fails.

The tests need only NumPy and SciPy, so that a reader can check them without trust in this library.
"""

from itertools import pairwise

import numpy as np
import pytest
from scipy.special import roots_hermitenorm, roots_legendre

# Two tokens of unequal variance: no statement may hold by symmetry.
V = np.array([[1.3, 0.4], [0.4, 0.7]])


def logits(variance: float, divisor: float, width: int, key_dim: int, seed: int) -> np.ndarray:
    """Draw 20,000 of ⟨x W_Q, y W_K⟩/divisor, entries of both weights N(0, variance), |x|² = |y|² = width."""
    rng = np.random.default_rng(seed)
    scale = np.sqrt(width * variance)
    queries, keys = scale * rng.standard_normal((2, 20_000, key_dim))
    return (queries * keys).sum(1) / divisor


def test_query_variance_is_n_to_minus_three_halves():
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
    """The error falls like τ⁻³ and the weights sum to one; as printed it falls like τ⁻², and they do not."""
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
    """Return c K₁(ρ) = E σ(g)σ(h)/E σ(g)², by quadrature over the angle of the Gaussian pair."""
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
    """Return ν(ρ) of [ST, eq. 6]."""
    return float((c_plus - c_minus) ** 2 / (2 * np.pi) * (np.sqrt(1 - rho**2) - rho * np.arccos(rho)))


def nu_of_appendix_b(rho: float, c_plus: float, c_minus: float) -> float:
    """Return ν(ρ) as printed in [ST, App. B], before Lemma B.1."""
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
    values, vectors = np.linalg.eigh(matrix)
    return vectors * np.sqrt(values) @ vectors.T


def test_independent_noises_add_their_covariances():
    """Cov(Σ^½ ξ + Σ_res^½ ξ′) = Σ + Σ_res; [ST, eq. 32] prints Σ + Σ_res^½."""
    first, second = V, np.array([[0.2, -0.1], [-0.1, 0.9]])
    joint = np.hstack([root(first), root(second)])  # (ξ, ξ′) has covariance I
    assert joint @ joint.T == pytest.approx(first + second, abs=1e-14)
    assert joint @ joint.T != pytest.approx(first + root(second), abs=0.05)


def mixed_variance(spread: float) -> float:
    """Return E (A V Aᵀ)_11 of two tokens and shaped attention; logits Y/τ have covariance `spread`² V ⊗ V."""
    nodes, weights = roots_hermitenorm(60)
    difference = spread * np.sqrt(V[0, 0] * (V[0, 0] - 2 * V[0, 1] + V[1, 1])) * nodes
    q = 1 / (1 + np.exp(-difference)) - 0.5
    first, second = 1 + q, -q  # the row of A
    values = first**2 * V[0, 0] + 2 * first * second * V[0, 1] + second**2 * V[1, 1]
    return float(weights @ values / weights.sum())


def test_noise_has_a_remainder_of_second_order():
    """E (T₁^11)² = 4 V_11 E(A V Aᵀ)_11 differs from 4 V_11² by O(s²), s² = n_k/τ²; printed: O(n_k τ⁻³)."""

    def remainder(spread: float) -> float:
        return 4 * V[0, 0] * (mixed_variance(spread) - V[0, 0])

    order = np.log2(remainder(0.02) / remainder(0.01))
    assert order == pytest.approx(2, abs=0.01)
    assert order != pytest.approx(3, abs=0.5)
    # The coefficient is the drift of Thm 4.2: S₁ and S₂ of two tokens give V_11 D²/16.
    d = V[0, 0] - 2 * V[0, 1] + V[1, 1]
    assert remainder(0.01) / 0.01**2 == pytest.approx(4 * V[0, 0] * V[0, 0] * d * d / 16, rel=1e-3)


SLOPE = (0.3, -1.0)  # c₊, c₋


def shaped_relu(x: np.ndarray, width: int) -> np.ndarray:
    positive, negative = (1 + c / np.sqrt(width) for c in SLOPE)
    return positive * np.maximum(x, 0) + negative * np.minimum(x, 0)


def he_constant(width: int) -> float:
    """Return c of [ST, eq. 4]: 1/c = E σ_s(g)²."""
    positive, negative = (1 + c / np.sqrt(width) for c in SLOPE)
    return 2 / (positive**2 + negative**2)


def tokens_of(width: int) -> np.ndarray:
    """Return X (2, width) with XXᵀ/width = V."""
    rows = np.linalg.qr(np.random.default_rng(0).standard_normal((width, 2)))[0].T
    return np.sqrt(width) * np.linalg.cholesky(V) @ rows


def test_gamma_is_the_strength_of_the_residual_branch():
    """In a layer of [ST, eq. 1] with A = I a token is scaled by λ; the text of the paper says γ."""
    width, gamma = 32, 0.3
    lam = np.sqrt(1 - gamma**2)
    x = tokens_of(width)
    weights = np.random.default_rng(1).standard_normal((4000, width, width))
    moved = lam * x[0] + gamma * x[0] @ weights / np.sqrt(width)
    scales = moved @ x[0] / (x[0] @ x[0])
    error = scales.std() / np.sqrt(len(scales))
    assert abs(scales.mean() - lam) < 4 * error
    assert abs(scales.mean() - gamma) > 40 * error


def attention_change(spread: float) -> tuple[float, float]:
    """Return mean and mean square of A₁₂ − δ₁₂ of three tokens, logits N(0, `spread`² W), by quadrature."""
    factor = np.linalg.cholesky(np.array([[1.0, 0.3, -0.2], [0.3, 2.0, 0.1], [-0.2, 0.1, 0.5]]))
    nodes, weights = roots_hermitenorm(24)
    x = np.stack(np.meshgrid(nodes, nodes, nodes, indexing="ij")).reshape(3, -1)
    mass = np.prod(np.meshgrid(weights, weights, weights, indexing="ij"), axis=0).ravel()
    logits = spread * factor @ x
    change = np.exp(logits[1]) / np.exp(logits).sum(0) - 1 / 3
    return float(mass @ change / mass.sum()), float(mass @ change**2 / mass.sum())


def test_order_one_over_n_holds_in_the_mean_only():
    """Logits over τ have the variance n_k/τ² = 1/(τ₀² n): the mean of A − I falls like 1/n, A − I itself like 1/√n."""
    width = 400
    means, squares = zip(*(attention_change(1 / np.sqrt(n)) for n in (width, 4 * width)), strict=True)
    assert means[0] / means[1] == pytest.approx(4, rel=0.02)
    assert np.sqrt(squares[0] / squares[1]) == pytest.approx(2, rel=0.02)
    assert np.sqrt(squares[0] / squares[1]) != pytest.approx(4, rel=0.3)  # as printed
    assert np.sqrt(squares[1]) > 50 * abs(means[1])


def branch(width: int, samples: int, *, printed: bool = False) -> np.ndarray:
    """Return ⟨f(X)¹, f(X)²⟩/n (samples,) of [ST, eq. 22]; `printed` has W^post in the second σ_s, as App. B."""
    rng = np.random.default_rng(5)
    before, after = rng.standard_normal((2, samples, width, width))
    x = tokens_of(width) / np.sqrt(width)
    first = shaped_relu(x[0] @ before, width)
    second = shaped_relu(x[1] @ (after if printed else before), width)
    first, second = (np.einsum("sj,sji->si", hidden, after) for hidden in (first, second))
    return he_constant(width) / width**2 * (first * second).sum(1)


def test_squared_branch_has_the_first_weights_twice():
    """Its mean is √(V₁₁V₂₂) c K₁(ρ); with W^post instead of the second W^pre it is nearly 0."""
    width, scale = 16, np.sqrt(V[0, 0] * V[1, 1])
    expected = scale * shaped_kernel(V[0, 1] / scale, *SLOPE, width)
    for printed in (False, True):
        sample = branch(width, 20_000, printed=printed)
        deviation = abs(sample.mean() - expected) / (sample.std() / np.sqrt(len(sample)))
        assert bool(deviation < 4) is not printed
        assert bool(deviation > 20) is printed


def test_covariance_is_divided_by_n_without_c():
    """V of Definition 3.1 starts at XXᵀ/n, as in Theorem 3.2; with c/n of App. B it starts elsewhere.

    Both follow one recursion, which is homogeneous: V ↦ λ²V + γ² √(V_αα V_ββ) c K₁(ρ) in the mean.
    """
    width, gamma = 32, 0.6
    x, scale = tokens_of(width), np.sqrt(V[0, 0] * V[1, 1])
    branches, c = branch(width, 4000), he_constant(width)
    # The cross products of X and f have mean zero.
    moved = (1 - gamma**2) * (x[0] @ x[1]) / width + gamma**2 * branches
    error = gamma**2 * branches.std() / np.sqrt(len(branches))

    def after(start: np.ndarray) -> float:
        root = np.sqrt(start[0, 0] * start[1, 1])
        kernel = shaped_kernel(start[0, 1] / root, *SLOPE, width)
        return float((1 - gamma**2) * start[0, 1] + gamma**2 * root * kernel)

    assert abs(moved.mean() - after(V)) < 4 * error
    assert abs(moved.mean() - after(c * V)) > 5 * error
    assert after(c * V) == pytest.approx(c * after(V))
    assert c - 1 == pytest.approx(-sum(SLOPE) / np.sqrt(width), rel=0.2)
    assert scale == pytest.approx(np.linalg.norm(x[0]) * np.linalg.norm(x[1]) / width)


def test_outputs_are_normal_only_given_the_covariance():
    """X W_out/√n is (m, n_out) and normal given V; with a random V_T its fourth moment is E V² and not (E V)²."""
    rng, width, units = np.random.default_rng(8), 48, 3
    x = tokens_of(width)
    weights = rng.standard_normal((20_000, width, units))
    outputs = x @ weights / np.sqrt(width)
    assert outputs.shape[1:] == (len(V), units)
    with pytest.raises(ValueError, match="matmul"):
        weights @ x  # the printed order
    assert np.mean(outputs[:, 0] * outputs[:, 1]) == pytest.approx(V[0, 1], abs=0.03)
    sizes = np.exp(rng.standard_normal(20_000) / 2)  # V_T is `sizes` times V
    mixed = np.sqrt(sizes)[:, None, None] * outputs
    for first, size in ((outputs, np.ones(1)), (mixed, sizes)):  # E y² y′² of two units
        products = first[:, 0, 0] ** 2 * first[:, 0, 1] ** 2
        error = products.std() / np.sqrt(len(products))
        assert abs(products.mean() - np.mean(size**2) * V[0, 0] ** 2) < 4 * error
        independent = abs(products.mean() - np.mean(size) ** 2 * V[0, 0] ** 2) < 4 * error
        assert bool(independent) is (first is outputs)


def test_residual_layer_adds_two_gamma_squared():
    """n Var V′₁₂ of one layer of [ST, eq. 4] is that of Σ_res, and not of Σ_lin as in eq. 27; so for n(E V′ − V)."""
    width, gamma, rng = 64, 0.4, np.random.default_rng(4)
    lam, x = np.sqrt(1 - gamma**2), tokens_of(width)
    moved = []
    for _ in range(40):
        before, after = rng.standard_normal((2, 250, width, width))
        f = shaped_relu(x @ before / np.sqrt(width), width) @ after * np.sqrt(he_constant(width) / width)
        next_x = lam * x + gamma * f
        moved.append(np.einsum("sj,sj->s", next_x[:, 0], next_x[:, 1]) / width)
    variance = width * np.var(moved)
    linear = V[0, 0] * V[1, 1] + V[0, 1] ** 2
    assert variance == pytest.approx(2 * gamma**2 * linear, rel=0.1)
    assert variance != pytest.approx(linear, rel=0.5)
    scale = np.sqrt(V[0, 0] * V[1, 1])
    drift = scale * nu(V[0, 1] / scale, *SLOPE)  # of b_ReLU
    error = width * np.std(moved) / np.sqrt(np.size(moved))
    exact = width * gamma**2 * (scale * shaped_kernel(V[0, 1] / scale, *SLOPE, width) - V[0, 1])
    assert abs(width * (np.mean(moved) - V[0, 1]) - exact) < 4 * error
    assert exact == pytest.approx(gamma**2 * drift, rel=0.5)
    assert exact != pytest.approx(drift, rel=0.5)


def test_exchanged_weights_transpose_the_logits():
    """The Y of App. C.1 is the transpose of that of eq. 2, with other attention; both have one second moment."""
    width, key_dim, rng = 32, 3, np.random.default_rng(6)
    x = tokens_of(width)
    queries, keys = rng.standard_normal((2, 20_000, width, key_dim))
    right, printed = (x @ a @ b.transpose(0, 2, 1) @ x.T / width for a, b in ((queries, keys), (keys, queries)))
    np.testing.assert_allclose(printed, right.transpose(0, 2, 1), rtol=1e-9, atol=1e-9)
    rows = [np.exp(y) / np.exp(y).sum(2, keepdims=True) for y in (right, printed)]
    assert np.abs(rows[0] - rows[1]).max() > 0.5
    for y in (right, printed):
        products = y[:, 0, 0] * y[:, 1, 1]
        error = products.std() / np.sqrt(len(products))
        assert abs(products.mean() - key_dim * V[0, 1] ** 2) < 4 * error


def test_inner_products_of_a_layer_are_divided_by_n():
    """V′ = λ²V + (λγ⟨x, f⟩ + …)/n exactly; [ST, App. B] has λ²X for λ²V, which has another shape, and not 1/n."""
    width, gamma = 64, 0.4
    lam, x = np.sqrt(1 - gamma**2), tokens_of(width)
    f = np.random.default_rng(9).standard_normal(x.shape)
    inner = lam * gamma * (x @ f.T + f @ x.T) + gamma**2 * f @ f.T
    moved = (lam * x + gamma * f) @ (lam * x + gamma * f).T / width
    assert lam**2 * V + inner / width == pytest.approx(moved)
    assert np.abs(lam**2 * V + inner - moved).min() > 1
    assert x.shape != V.shape


TABLE_2 = {  # [ST, Table 2], the means: COLA, MRPC, RTE
    "18, baseline": (0.139, 0.797, 0.504),
    "18, learn": (0.182, 0.813, 0.528),
    "18, recover": (0.221, 0.809, 0.520),
    "24, baseline": (0.022, 0.785, 0.480),
    "24, learn": (0.150, 0.812, 0.513),
    "24, recover": (0.211, 0.803, 0.529),
}


@pytest.mark.parametrize(("value", "right"), [(0.748, True), (74.8, False)])
def test_mrpc_score_of_bert_is_a_fraction(value, right):
    """Scores of MRPC are shares of 408 or 1,725 pairs, two thirds of them paraphrases; 74.8 is not a share."""
    others = [row[1] for row in TABLE_2.values()]
    assert bool(0.5 < value / np.mean(others) < 2) is right
    assert bool(0.66 < value < 1) is right
