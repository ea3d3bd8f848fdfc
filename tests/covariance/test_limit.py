"""Drift and noise of the limit: against nested sums, against the chain at a large width, and along whole paths."""

from math import acos, exp, log, pi, sqrt

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.stats import ks_2samp

import limitformer as lf
import own_parts_example as own
from limitformer.numerics.random import key, replica_normals
from statistics_checks import STANDARD_ERRORS, assert_same_law, covariance_standard_errors, standard_errors

V4 = np.array([[1.0, 0.4, -0.3, 0.2], [0.4, 1.7, 0.5, -0.1], [-0.3, 0.5, 0.8, 0.3], [0.2, -0.1, 0.3, 1.3]])
PAIRS = np.triu_indices(4)
PAPER = "euler-maruyama"  # its step
GAMMA, TAU0 = 0.8, 0.5
ATTENTION = lf.ShapedAttention(tau0=TAU0)
# Slopes that differ a lot but whose mean is 1, so that the kink is large and the next order small.
KINK = lf.ShapedReLU(c_plus=1.5, c_minus=-1.5)

THEOREMS = {
    "Theorem 3.2": {"feedforward": KINK},
    "Theorem 4.2": {"attention": ATTENTION},
    "Corollary 4.3": {"attention": ATTENTION, "feedforward": KINK},
    "causal": {"attention": ATTENTION, "mask": "causal"},
    "causal, both": {"attention": ATTENTION, "feedforward": KINK, "mask": "causal"},
    "hidden width 3n": {"feedforward": lf.ShapedReLU(c_plus=1.5, c_minus=-1.5, hidden=6000)},
}
BEND = lf.ShapedSmooth(own.shifted_tanh, scale=0.7)
SMOOTH = {
    "smooth": {"feedforward": BEND},
    "smooth, both": {"attention": ATTENTION, "feedforward": BEND},
    "smooth, causal, both": {"attention": ATTENTION, "feedforward": BEND, "mask": "causal"},
}


def model(name, width=2000, depth=1, gamma=GAMMA):
    return lf.Transformer(width=width, depth=depth, gamma=gamma, **(THEOREMS | SMOOTH)[name])


# ---------------------------------------------------------------- coefficients against nested sums


def first_moment(v, a, d, b, o):
    """S₁^{αδ,βω} [ST, eq. 10]."""
    mean = v.mean(1)
    return v[a, b] * (v[d, o] - mean[d] - mean[o] + v.mean())


def second_moment(v, a, d):
    """S₂^{αδ} [ST, eq. 10]."""
    return v[a, a] * (v[d, d] - 2 * v.mean(1)[d] + 2 * v.mean() - np.trace(v) / len(v))


def drift_by_sums(v, gamma, tau0, sign=1.0):
    """b of [ST, Thm 4.2] as printed; wrong twins multiply the second sum by another `sign`."""
    m, b = len(v), np.zeros_like(v)
    for i in range(m):
        for j in range(m):
            for n in range(m):
                for k in range(m):
                    b[i, j] += v[n, k] * first_moment(v, i, n, j, k) / m**2
                b[i, j] += sign * (v[j, n] * second_moment(v, i, n) + v[i, n] * second_moment(v, j, n)) / (2 * m)
    return gamma**2 / tau0**2 * b


def relu_drift_by_sums(v, gamma, kink):
    """b_res of [ST, eq. 6] as printed."""
    b = np.zeros_like(v)
    for i in range(len(v)):
        for j in range(len(v)):
            rho = min(1.0, v[i, j] / sqrt(v[i, i] * v[j, j]))
            nu = kink**2 / (2 * pi) * (sqrt(1 - rho**2) - rho * acos(rho))
            b[i, j] = gamma**2 * nu * sqrt(v[i, i] * v[j, j])
    return b


def causal_drift_by_sums(v, gamma, tau0):
    """The same moments with row α's softmax over the tokens up to α, written without any shared quantity."""
    m, b = len(v), np.zeros_like(v)
    centre = [np.zeros((m, m)) for _ in range(m)]
    for a in range(m):
        centre[a][: a + 1, : a + 1] = np.eye(a + 1) - 1 / (a + 1)
    for i in range(m):
        for j in range(m):
            for n in range(i + 1):
                for k in range(j + 1):
                    moment = v[i, j] * (centre[i] @ v @ centre[j].T)[n, k]
                    b[i, j] += v[n, k] * moment / ((i + 1) * (j + 1))
            b[i, j] += sum(v[j, n] * causal_second_moment(v, i, n) for n in range(i + 1)) / (2 * (i + 1))
            b[i, j] += sum(v[i, n] * causal_second_moment(v, j, n) for n in range(j + 1)) / (2 * (j + 1))
    return gamma**2 / tau0**2 * b


def causal_second_moment(v, a, d):
    seen = v[: a + 1, : a + 1]
    return v[a, a] * (v[d, d] - 2 * seen.mean(0)[d] + 2 * seen.mean() - np.trace(seen) / (a + 1))


def diffusion_by_sums(v, gamma, tau0):
    """Σ of [ST, Thm 4.2] as printed, over the pairs α ≤ β."""
    m, pairs = len(v), list(zip(*np.triu_indices(len(v)), strict=True))
    sigma = np.zeros((len(pairs), len(pairs)))
    for row, (a, b) in enumerate(pairs):
        for column, (d, o) in enumerate(pairs):
            linear = v[a, d] * v[b, o] + v[a, o] * v[b, d]
            attention = sum(
                v[a, k] * v[d, n] * first_moment(v, b, k, o, n)
                + v[a, k] * v[o, n] * first_moment(v, b, k, d, n)
                + v[b, n] * v[d, k] * first_moment(v, a, n, o, k)
                + v[b, n] * v[o, k] * first_moment(v, a, n, d, k)
                for n in range(m)
                for k in range(m)
            )
            sigma[row, column] = gamma**2 * (2 - gamma**2) * linear + gamma**4 / tau0**2 * attention / m**2
    return sigma


@pytest.mark.fast
def test_theorem_4_2_drift():
    """The drift agrees to 1e-12; with the second-order term off by a thousandth, or its sign turned, it does not."""
    limit = lf.limit(model("Theorem 4.2"))
    exact = drift_by_sums(V4, GAMMA, TAU0)
    assert np.abs(limit.drift(V4) - exact).max() < 1e-12 * np.abs(exact).max()
    for sign, least in ((0.999, 5e-5), (-1.0, 0.1)):
        assert np.abs(limit.drift(V4) - drift_by_sums(V4, GAMMA, TAU0, sign=sign)).max() > least


@pytest.mark.fast
def test_theorem_3_2_drift():
    limit = lf.limit(model("Theorem 3.2"))
    exact = relu_drift_by_sums(V4, GAMMA, 3.0)
    assert np.abs(limit.drift(V4) - exact).max() < 1e-12 * np.abs(exact).max()


@pytest.mark.fast
def test_corollary_4_3_drift():
    both = lf.limit(model("Corollary 4.3")).drift(V4)
    parts = lf.limit(model("Theorem 3.2")).drift(V4) + lf.limit(model("Theorem 4.2")).drift(V4)
    assert np.abs(both - parts).max() < 1e-12


def test_causal_drift():
    """The drift is that of nested sums; the first token sees only itself, so its variance has no drift."""
    drift = lf.limit(model("causal")).drift(V4)
    exact = causal_drift_by_sums(V4, GAMMA, TAU0)
    assert np.abs(drift - exact).max() < 1e-12 * np.abs(exact).max()
    assert abs(drift[0, 0]) < 1e-15
    assert np.abs(drift - lf.limit(model("Theorem 4.2")).drift(V4)).max() > 0.1


def test_drift_at_a_large_and_singular_covariance():
    """Three tokens of norm 10√n, two of them equal; the error is relative to the largest entry."""
    v = 100 * np.array([[1.0, 0.3, 1.0], [0.3, 1.2, 0.3], [1.0, 0.3, 1.0]])
    exact = drift_by_sums(v, GAMMA, TAU0)
    assert np.abs(lf.limit(model("Theorem 4.2")).drift(v) - exact).max() < 1e-12 * np.abs(exact).max()


@pytest.mark.fast
def test_theorem_4_2_diffusion():
    limit = lf.limit(model("Theorem 4.2"))
    exact = diffusion_by_sums(V4, GAMMA, TAU0)
    assert np.abs(limit.diffusion(V4) - exact).max() < 1e-12 * exact.max()
    without = diffusion_by_sums(V4, GAMMA, 1e9)
    assert np.abs(limit.diffusion(V4) - without).max() > 0.1


@pytest.mark.parametrize(("name", "ratio"), [("Theorem 3.2", 1), ("hidden width 3n", 3)])
def test_dense_diffusion_of_hidden_units(name, ratio):
    """Σ is (2λ²γ² + γ⁴(1 + 1/r)) Σ_lin; the wrong twin has units without a fluctuation."""
    sigma = lf.limit(model(name)).diffusion(V4)
    skip, branch = 2 * (1 - GAMMA**2) * GAMMA**2, GAMMA**4
    assert np.abs(sigma - (skip + branch * (1 + 1 / ratio)) * linear_diffusion(V4)).max() < 1e-12 * sigma.max()
    assert np.abs(sigma - (skip + branch) * linear_diffusion(V4)).max() > 1e-3 * sigma.max()


# ---------------------------------------------------------------- the chain's one step against b and Σ


def one_step(process, samples, start=V4, **options):
    """Return ΔV over the pairs α ≤ β at the last recorded point: (samples, pairs)."""
    dataset = lf.simulate(process, start, samples=samples, seed=4, progress=False, **options)
    pairs = np.triu_indices(len(start))
    return dataset["covariance"].values[:, -1][:, pairs[0], pairs[1]] - start[pairs]


CHAIN_SAMPLES = {
    "Theorem 3.2": 200_000,
    "Theorem 4.2": 1_500_000,
    "Corollary 4.3": 200_000,
    "causal": 1_500_000,
    "causal, both": 200_000,
    "hidden width 3n": 80_000,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", THEOREMS)
def test_one_layer_has_the_drift_and_covariance_of_the_limit(name):
    """At width 2000; b with its sign turned and Σ without the part of attention or hidden units are rejected."""
    chain = model(name)
    limit, n = lf.limit(chain), chain.width
    moved = one_step(chain, CHAIN_SAMPLES[name], record=[1])
    b, sigma = limit.drift(V4)[PAIRS], limit.diffusion(V4)
    assert np.abs(standard_errors(n * moved, b)).max() < STANDARD_ERRORS
    assert np.abs(standard_errors(n * moved, -b)).max() > STANDARD_ERRORS
    assert np.abs(covariance_standard_errors(sqrt(n) * moved, sigma)).max() < STANDARD_ERRORS
    wrong = GAMMA**2 * (2 - GAMMA**2) * linear_diffusion(V4)
    assert np.abs(covariance_standard_errors(sqrt(n) * moved, wrong)).max() > STANDARD_ERRORS


def linear_diffusion(v):
    """Σ_lin [ST, Thm 3.2]."""
    (a, b), (d, o) = ((x[:, None] for x in PAIRS), (x[None] for x in PAIRS))
    return v[a, d] * v[b, o] + v[a, o] * v[b, d]


def moments(limit, start, step):
    """Return E ΔV/dt and Cov ΔV/dt of one step over the pairs, the covariance up to O(dt), without sampling.

    V′ is a sum of known functions of its normals, which follow from the seed. Twice as many paths as functions
    determine the coefficients to rounding. All functions but the first have mean 0, so the first coefficient is the
    mean. They are orthonormal except the kinks, whose share is O(dt), so the squares of their coefficients are the
    covariance.
    """
    normals = normals_of(limit, len(start), step)
    i, j = np.triu_indices(normals.shape[1])
    squares = (normals[:, i] * normals[:, j] - (i == j)) / np.where(i == j, sqrt(2), 1)
    kinks = kinks_of(normals[:, -len(start) :], start) if limit.kink and step == "factor" else normals[:, :0]
    paths = 2 * (1 + normals.shape[1] + len(i) + kinks.shape[1])
    design = np.hstack([np.ones((len(normals), 1)), normals, squares, kinks])[:paths]
    moved = one_step(limit, paths, start, record=[limit.horizon], dt=limit.horizon, step=step) / sqrt(limit.horizon)
    fitted = np.linalg.lstsq(design, moved)[0]
    assert np.abs(design @ fitted - moved).max() < 1e-7 * np.abs(moved).max(), (
        "a step has other functions of its normals"
    )
    return fitted[0] / sqrt(limit.horizon), fitted[1:].T @ fitted[1:]


def normals_of(limit, m, step):
    """Return the normals of a step (paths, count): linear noise, mixing, and the bend of the factor step."""
    linear = m * m if step == PAPER else m * (m + 1) // 2
    bend = m if (limit.kink or limit.second) and step == "factor" else 0
    return replica_normals(key(4, f"limit {step}"), 2000, linear + (m * m if limit.tau0 else 0) + bend)


def kinks_of(normals, v):
    """Return |h_α h_β| minus its mean for α < β, h ~ N(0, V) from the root of V that begins a path."""
    a, b = np.triu_indices(len(v), 1)
    root = np.linalg.cholesky(v)
    root[-1, -1] *= -1  # the sign of the reflected factor
    h = np.abs(normals @ root.T)
    size = np.sqrt(np.diag(v))[a] * np.sqrt(np.diag(v))[b]
    rho = v[a, b] / size
    return h[:, a] * h[:, b] - 2 / pi * size * (np.sqrt(1 - rho**2) + rho * np.arcsin(rho))


def agree(estimate, exact):
    """Return whether the error is below a millionth of the largest entry."""
    return bool(np.abs(estimate - exact).max() < 1e-6 * np.abs(exact).max())


@pytest.mark.parametrize("step", ["factor", PAPER])
@pytest.mark.parametrize("name", ["Theorem 3.2", "Theorem 4.2", "Corollary 4.3", "causal", "causal, both", *SMOOTH])
def test_one_step_has_the_drift_and_covariance_of_the_limit(name, step):
    """The moments agree as dt → 0; a drift or covariance that is off by 1e-5 is rejected."""
    limit = lf.limit(model(name, width=10**7))
    b, sigma = limit.drift(V4)[PAIRS], limit.diffusion(V4)
    drift, covariance = moments(limit, V4, step)
    for moment, exact in ((drift, b), (covariance, sigma)):
        assert agree(moment, exact)
        assert not agree(moment, (1 + 1e-5) * exact)


def test_error_of_a_factor_step_is_of_second_order():
    """Half the step halves the error of Cov ΔV/dt; an error of order 3/2 has a ratio of 1.41.

    At τ₀ = 1 a step of 0.1 is short enough to be one step.
    """
    attention = lf.ShapedAttention(tau0=1.0)

    def covariance(dt):
        limit = lf.limit(lf.Transformer(width=10_000, depth=round(10_000 * dt), gamma=GAMMA, attention=attention))
        return moments(limit, V4, "factor")[1]

    long, middle, short = map(covariance, (0.1, 0.05, 0.025))
    first, second = long - middle, middle - short
    assert 1.9 < (first * second).sum() / (second**2).sum() < 2.1


def test_factor_step_keeps_the_mean_log_of_a_distance():
    """Mixing turns d into d (C + √x g)², and E log (C + √x g)² is (ρ − 1) x, as in the SDE, up to O(x⁴).

    C² comes from the mean of a step. A hundredth more of its second order is rejected.
    """
    gamma, start = 0.6, lf.equicorrelated(2, -0.2, 3.0).covariance  # of equal tokens, whose second order vanishes
    limit = lf.limit(lf.Transformer(width=10_000, depth=100, gamma=gamma, attention=lf.ShapedAttention(tau0=1.0)))
    distance, rho = 2 * (start[0, 0] - start[0, 1]), (1 - gamma**2) / gamma**2
    x = gamma**4 * distance**2 / 16 * limit.horizon
    grown = moments(limit, start, "factor")[0] @ [1, -2, 1] * limit.horizon / distance  # E d′/d − 1 = C² − 1 + x

    def excess(squared):
        def integrand(g):
            return 2 * log(sqrt(squared) + sqrt(x) * g) * exp(-g * g / 2) / sqrt(2 * pi)

        return quad(integrand, -8, 8, epsabs=1e-13, limit=200)[0] - (rho - 1) * x

    assert abs(excess(1 + grown - x)) < 20 * x**4
    assert abs(excess(1 + grown - x + 0.01 * (rho**2 / 2 - rho + 1.5) * x**2)) > 100 * x**4


# ---------------------------------------------------------------- whole paths


def last_correlations(process, start, **options):
    dataset = lf.simulate(process, start, **{"samples": 10_000, "seed": 6, "progress": False, **options})
    rho = lf.correlation(dataset).values[:, -1]
    return {"ρ_01": rho[:, 0, 1], "ρ_02": rho[:, 0, 2], "V_00": dataset["covariance"].values[:, -1, 0, 0]}


V3 = V4[:3, :3]


def test_attention_does_not_act_on_parallel_tokens_of_any_variance():
    """At ρ = 1 V C = 0, so P and W vanish, and V/V₀ has the law of a ResNet for every V₀.

    A P that is computed as a difference of terms of the size of V² is noise here, and paths explode.
    """
    attention = lf.limit(lf.Transformer(width=100, depth=50, gamma=0.5, attention=lf.ShapedAttention(tau0=1.0)))
    start = lf.equicorrelated(tokens=3, correlation=1.0, variance=1e9)
    dataset = lf.simulate(attention, start, samples=4_000, seed=8, record=[0.5])
    assert not dataset["exit_cause"].any()
    growth = dataset["covariance"].values[:, 0] / 1e9
    assert np.abs(growth - growth[:, :1, :1]).max() < 1e-6 * growth.max()
    single = lf.simulate(attention, [[1.0]], samples=4_000, seed=9, record=[0.5])["covariance"].values[:, 0, 0, 0]
    assert ks_2samp(growth[:, 0, 0], single).pvalue > 1e-4
    assert ks_2samp(1.2 * growth[:, 0, 0], single).pvalue < 1e-4


@pytest.mark.slow(keep=1)
@pytest.mark.parametrize("parts", ["attention", "both", "causal"])
def test_a_deep_chain_has_the_law_of_the_limit(parts):
    """At width 100 and depth 50; the limit of a third less time is rejected.

    The errors of width and step are below the noise: 30,000 chains and 100,000 paths show none.
    """
    feedforward = lf.ShapedReLU(c_plus=0.0, c_minus=-1.0)
    chosen = {
        "attention": {},
        "both": {"feedforward": feedforward},
        "causal": {"mask": "causal"},
    }[parts]
    attention = lf.ShapedAttention(tau0=1.0)
    chain = lf.Transformer(width=100, depth=50, gamma=0.5, attention=attention, **chosen)
    shorter = lf.Transformer(width=100, depth=33, gamma=0.5, attention=attention, **chosen)
    limit, wrong = lf.limit(chain), lf.limit(shorter)
    samples = {"samples": 30_000, "dt": 0.005}
    assert_same_law(
        last_correlations(chain, V3, record=[50], samples=10_000),
        last_correlations(limit, V3, record=[limit.horizon], **samples),
        wrong=last_correlations(wrong, V3, record=[wrong.horizon], **samples),
    )


def test_residual_strength_is_a_change_of_time():
    """Only γ² T matters for a ResNet [ST, after Thm 3.2]; the same T with another γ is rejected."""
    relu = lf.ShapedReLU(c_plus=0.0, c_minus=-1.0)

    def correlations(gamma, depth):
        limit = lf.limit(lf.Transformer(width=100, depth=depth, gamma=gamma, feedforward=relu))
        dataset = lf.simulate(limit, V3, samples=10_000, seed=depth, record=[limit.horizon], dt=0.005)
        return lf.correlation(dataset).values[:, -1, 0, 1]

    quick, slow = correlations(1.0, 25), correlations(0.5, 100)
    assert ks_2samp(quick, slow).pvalue > 1e-4
    assert ks_2samp(quick, correlations(0.5, 25)).pvalue < 1e-4


def test_lambda_one_has_the_correlations_of_normalised_strengths():
    """At λ = 1, γ = 1/√d the correlations are exactly those of λ and γ over √(λ² + γ²)."""
    relu = lf.ShapedReLU(c_plus=0.0, c_minus=-1.0)
    d, gamma = 50, 50**-0.5
    free = lf.Transformer(width=40, depth=d, gamma=gamma, lam=1.0, feedforward=relu)
    normalised = lf.Transformer(width=40, depth=d, gamma=gamma / sqrt(1 + gamma**2), feedforward=relu)
    rho = [lf.correlation(lf.simulate(net, V3, samples=100, seed=0)).values for net in (free, normalised)]
    assert np.abs(rho[0] - rho[1]).max() < 1e-10


# ---------------------------------------------------------------- refusals

WHOLE = {"width": 64, "depth": 32, "gamma": 0.5, "attention": lf.ShapedAttention(tau0=1.0)}


@pytest.mark.parametrize(
    ("changes", "needs"),
    [
        ({"lam": 1.0}, r"lam\*\*2 \+ gamma\*\*2"),
        ({"norm": "pre"}, "norm must be None"),
        ({"attention": lf.SoftmaxAttention()}, "Softmax attention has no limit, because"),
        ({"attention": lf.ShapedAttention(tau0=1.0, identity=False)}, "identity=True"),
        ({"attention": lf.ShapedAttention(tau0=1.0, center=False)}, "center=True"),
        ({"attention": lf.ShapedAttention(tau0=1.0, temperature="standard")}, 'temperature="shaped"'),
        ({"attention": lf.ShapedAttention(tau0=1.0, heads=4)}, "heads must be None"),
        ({"feedforward": lf.ReLU()}, "ShapedReLU"),
        ({"attention": None, "feedforward": lf.OneMatrix(activation=lf.ReLU())}, "No limit: ReLU bends every layer"),
    ],
    ids=str,
)
def test_limit_refuses_models_without_a_limit(changes, needs):
    with pytest.raises(lf.NoLimitError, match=needs):
        lf.limit(lf.Transformer(**{**WHOLE, **changes}))


@pytest.mark.parametrize(
    ("parts", "basis"),
    [
        ({"attention": ATTENTION}, "[ST, Theorem 4.2]"),
        ({"feedforward": KINK}, "[ST, Theorem 3.2]"),
        ({"feedforward": KINK, "mask": "causal"}, "[ST, Theorem 3.2]"),
        ({"attention": ATTENTION, "feedforward": KINK}, "[ST, Corollary 4.3]"),
        ({"feedforward": lf.OneMatrix(activation=KINK), "gamma": 1.0}, "[ST, equation 3]"),
        ({"feedforward": lf.OneMatrix(activation=KINK)}, "derivation: one matrix a layer at gamma < 1"),
        ({"attention": ATTENTION, "mask": "causal"}, "derivation: a causal mask"),
        (
            {"feedforward": lf.ShapedReLU(c_plus=0.5, c_minus=-1.0, hidden=40)},
            "derivation: a hidden width other than the width",
        ),
        ({"feedforward": BEND}, "derivation: a smooth shaped activation"),
        ({"feedforward": lf.ReLU(), "gamma": 0.1, "lam": 1.0}, "derivation: lam = 1, gamma = 1/sqrt(depth)"),
    ],
)
def test_limit_names_its_theorem_or_says_derivation(parts, basis):
    assert lf.limit(lf.Transformer(**{"width": 80, "depth": 100, "gamma": 0.6, **parts})).basis == basis


def test_limit_refuses_a_configuration_and_names_check():
    with pytest.raises(lf.InputError, match=r"limit needs a model; got \w+\. Nearest: limitformer\.check"):
        lf.limit("gpt2")
