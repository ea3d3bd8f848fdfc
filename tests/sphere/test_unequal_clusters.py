"""The theorems of docs/unequal-clusters.md: numerical checks of each step of their proofs, with any Q and K."""

from dataclasses import replace

import numpy as np
import pytest

import limitformer as lf
from sphere_naive import naive_attention, naive_layer, tokens_at
from statistics_checks import STANDARD_ERRORS

QUERY_KEY = tuple(np.random.default_rng(6).standard_normal((2, 3, 4)) / 3)
SPLITS = [(2, 1), (1, 3), (4, 2)]


def model_of(p, q, **more):
    fields = {"dim": 4, "beta": 1.3, "layers_per_unit_time": 64, "sigma": 0.8, "query_key": QUERY_KEY}
    return lf.StochasticTransformer(tokens=p + q, **{**fields, **more})


def antipodal(p, q, y):
    """Return p tokens at y and q at −y (p + q, d)."""
    return np.repeat([1.0, -1.0], [p, q])[:, None] * y


def mismatch(p, q, model, y):
    """Return δ = a₊ − a₋, which is never 0 for p ≠ q, for any yᵀQᵀKy."""
    c = model.beta * y @ model.bilinear() @ y
    if model.attention == "unnormalized":
        return 2 * (p - q) * np.cosh(c) / (p + q)
    return 2 * (p * p - q * q) / (p * p + q * q + 2 * p * q * np.cosh(2 * c))


@pytest.mark.parametrize(("p", "q"), SPLITS)
@pytest.mark.parametrize("changes", [{}, {"beta": -2.0}, {"beta": 0.0}, {"attention": "unnormalized"}], ids=str)
def test_attention_of_unequal_antipodal_clusters_does_not_cancel(p, q, changes):
    """A₊ + A₋ = δy; for equal sizes it is 0."""
    model = model_of(p, q, **changes)
    for y in tokens_at(1, 5, 4):
        a = naive_attention(antipodal(p, q, y), model)
        np.testing.assert_allclose(a[0] + a[-1], mismatch(p, q, model, y) * y, rtol=1e-12, atol=1e-14)
        equal = naive_attention(antipodal(3, 3, y), replace(model, tokens=6))
        assert np.abs(equal[0] + equal[-1]).max() < 1e-13


def test_the_mismatch_has_a_lower_bound():
    """2|p² − q²|/(p² + q² + 2pq cosh 2β‖S‖), S the symmetric part of QᵀK, attained along its largest eigenvector."""
    model = model_of(2, 1)
    symmetric = (model.bilinear() + model.bilinear().T) / 2
    values, vectors = np.linalg.eigh(symmetric)
    largest = np.abs(values).argmax()
    bound = 6 / (5 + 4 * np.cosh(2 * model.beta * np.abs(values).max()))
    mismatches = [abs(mismatch(2, 1, model, y)) for y in tokens_at(2, 2000, 4)]
    assert min(mismatches) > bound
    assert abs(mismatch(2, 1, model, vectors[:, largest])) == pytest.approx(bound)
    # The wrong twin: the smallest eigenvalue.
    assert min(mismatches) < 6 / (5 + 4 * np.cosh(2 * model.beta * np.abs(values).min()))


def generator(x, i, j, model, common=True):
    """Return G|xⁱ + xʲ|² from drift and covariance of the SDE [CT, eq. 6], with common or separate noise."""
    limit = lf.limit(model)
    total, drift, noise = x[i] + x[j], limit.drift(x), limit.diffusion(x)
    covariance = noise[i, :, i] + noise[j, :, j] + (noise[i, :, j] + noise[j, :, i] if common else 0)
    return 2 * total @ (drift[i] + drift[j]) + np.trace(covariance)


@pytest.mark.parametrize(("p", "q"), SPLITS)
@pytest.mark.parametrize("attention", ["softmax", "unnormalized"])
def test_generator_is_positive_only_at_unequal_antipodal_clusters(p, q, attention):
    """It is (d − 1)σ²δ²: positive for p ≠ q, 0 for p = q; with separate noise for each token it is not 0."""
    model, y = model_of(p, q, attention=attention), tokens_at(3, 1, 4)[0]
    x, last = antipodal(p, q, y), p + q - 1
    expected = 3 * 0.8**2 * mismatch(p, q, model, y) ** 2
    assert generator(x, 0, last, model) == pytest.approx(expected, rel=1e-10)
    assert abs(generator(x, 0, last, model, common=False) / expected - 1) > 0.1
    equal = replace(model, tokens=4)
    assert generator(antipodal(2, 2, y), 0, 3, equal) == pytest.approx(0, abs=1e-13)
    assert generator(antipodal(2, 2, y), 0, 3, equal, common=False) > 0.1


def test_the_generator_is_that_of_a_layer():
    """One layer from antipodal clusters: the mean of L|X⁺ + X⁻|², and exactly 0 for equal ones."""
    y, n = tokens_at(3, 1, 4)[0], 40_000
    model = model_of(3, 1, layers_per_unit_time=10_000)
    values = np.random.default_rng(8).standard_normal((n, 4, 4))
    moved = naive_layer(antipodal(3, 1, y), model, values)
    samples = 10_000 * ((moved[:, 0] + moved[:, -1]) ** 2).sum(1)
    error = samples.std() / np.sqrt(n)
    expected = 3 * 0.8**2 * mismatch(3, 1, model, y) ** 2
    assert abs(samples.mean() - expected) < STANDARD_ERRORS * error
    assert abs(samples.mean() - expected * 4 / 3) > STANDARD_ERRORS * error  # d for d − 1
    equal = naive_layer(antipodal(2, 2, y), model, values)
    assert np.abs(equal[:, 0] + equal[:, -1]).max() < 1e-15


def nearly_antipodal(p, q, gap, count):
    """Return tight clusters anywhere on the sphere, with |x⁺ + x⁻|² from 0 to `gap`."""
    rng = np.random.default_rng(9)
    for y, across in zip(tokens_at(5, count, 4), rng.standard_normal((count, 4)), strict=True):
        tangent = across - across @ y * y
        other = -y + np.sqrt(gap * rng.uniform()) * tangent / np.linalg.norm(tangent)
        yield np.repeat([y, other / np.linalg.norm(other)], [p, q], axis=0)


def test_clusters_leave_within_the_bound_of_the_proof():
    """E τ ≤ sup f/inf Gf for the time at which f = |x⁺ + x⁻|² exceeds 0.02; equal clusters never do."""
    edge, y = 0.02, np.eye(4)[0]
    model = model_of(2, 1, layers_per_unit_time=400)
    least = min(generator(x, 0, 2, model) for x in nearly_antipodal(2, 1, edge, 500))
    assert least > 0
    times = np.arange(201) / 200
    options = {"samples": 200, "seed": 4, "horizon": 1.0, "record": times, "progress": False}
    f = 2 * (1 + lf.simulate(model, antipodal(2, 1, y), **options)["overlap"].values[:, :, 1])
    exits = np.where((f > edge).any(1), times[(f > edge).argmax(1)], np.inf)
    assert exits.mean() < edge / least
    assert exits.mean() > 0.05 * edge / least
    equal = lf.simulate(replace(model, tokens=4), antipodal(2, 2, y), **{**options, "samples": 8})
    assert (1 + equal["overlap"].values[:, :, 1]).max() < 1e-12


def test_no_two_of_three_tokens_stay_antipodal():
    """A¹ + A² ≠ 0 for X² = −X¹ and any third token, Q and K; two pairs of four tokens can stay."""
    rng = np.random.default_rng(11)
    least = np.inf
    for attention in ("softmax", "unnormalized"):
        for y, z in zip(tokens_at(6, 100, 4), tokens_at(7, 100, 4), strict=True):
            model = model_of(2, 1, attention=attention, query_key=tuple(rng.standard_normal((2, 2, 4)) / 2))
            a = naive_attention(np.array([y, -y, z]), model)
            least = min(least, float(np.linalg.norm(a[0] + a[1])))
            four = naive_attention(np.array([y, -y, z, -z]), replace(model, tokens=4))
            assert np.linalg.norm(four[0] + four[1]) < 1e-13
    assert least > 0.01


# In the plane, at β = 0.


def in_plane(tokens, beta, layers, **more):
    return lf.StochasticTransformer(tokens=tokens, dim=2, beta=beta, layers_per_unit_time=layers, **more)


def cross_ratio(tokens):
    """Return (x₀ − x₂)(x₁ − x₃)/((x₀ − x₃)(x₁ − x₂)) of unit complex numbers (…, 4, 2), which is real."""
    x = tokens[..., 0] + 1j * tokens[..., 1]
    ratio = (x[..., 0] - x[..., 2]) * (x[..., 1] - x[..., 3]) / ((x[..., 0] - x[..., 3]) * (x[..., 1] - x[..., 2]))
    assert np.abs(ratio.imag).max() < 1e-9 * np.abs(ratio).max()
    return ratio.real


@pytest.mark.parametrize("attention", ["softmax", "unnormalized"])
def test_tokens_in_the_plane_move_by_moebius_maps_at_beta_zero(attention):
    """The cross-ratio of four tokens is constant, up to the 1/√L of a chain; at β = 1 it is not."""
    angles = np.array([0.1, 1.2, 2.9, 4.4])
    start = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    before = cross_ratio(start)

    def spread(beta, layers):
        model = in_plane(4, beta, layers, attention=attention)
        data = lf.simulate(model, start, samples=600, seed=2, horizon=0.5, record=[0.5], keep="tokens", progress=False)
        return np.log(cross_ratio(data["tokens"].values[:, 0]) / before).std()

    coarse, fine = spread(0.0, 100), spread(0.0, 1600)
    assert coarse / fine == pytest.approx(4, rel=0.2)
    assert fine < 0.02
    assert spread(1.0, 1600) > 10 * fine


def stratonovich_correction(field, angles, step=1e-5):
    """Return ½ Σ_kj (∂_j g_i^k) g_j^k of a vector field g (tokens, noises) of angles, by differences."""
    unit = np.eye(len(angles)) * step
    slopes = np.stack([(field(angles + each) - field(angles - each)) / (2 * step) for each in unit])  # (j, i, k)
    return 0.5 * np.einsum("jik,jk->i", slopes, field(angles))


def test_ito_and_stratonovich_agree_only_after_the_change_of_clock():
    """In the clock ∫σ²|m|² the fields are those of one angle each; before, |m| depends on all of them."""
    sigma = 0.8

    def after(angles):
        return np.stack([-np.sin(angles), np.cos(angles)], axis=1)

    def before(angles):
        return sigma * abs(np.exp(1j * angles).mean()) * after(angles)

    for angles in (np.array([0.4, 1.9]), np.array([0.1, 1.2, 2.9, 4.4])):
        np.testing.assert_allclose(stratonovich_correction(after, angles), 0, atol=1e-9)
        assert np.abs(stratonovich_correction(before, angles)).max() > 0.01
    phi = 0.4 - 1.9
    expected = -(sigma**2) / 8 * np.sin(phi) * (1 - np.cos(phi))
    np.testing.assert_allclose(stratonovich_correction(before, np.array([0.4, 1.9]))[0], expected, rtol=1e-8)


@pytest.fixture(scope="module")
def fates():
    """Return outcomes of four tokens in the plane at three times, for β = 0 and β = 1."""
    options = {"samples": 800, "seed": 1, "horizon": 160.0, "record": [10.0, 40.0, 160.0], "keep": "outcome"}
    return {beta: lf.simulate(in_plane(4, beta, 25), progress=False, **options) for beta in (0.0, 1.0)}


def test_equal_clusters_do_not_attract_in_the_plane_at_beta_zero(fates):
    """All tokens meet, the last ones like t^{−1/2}; at β = 1 a third of the replicas end in two clusters of two."""
    zero, one = (fates[beta] for beta in (0.0, 1.0))
    for data, share in ((zero, 0.0), (one, 0.33)):
        ended = ((data["unresolved_pairs"] == 0) & (data["antipodal_pairs"] > 0)).values[:, -1].mean()
        assert abs(ended - share) < 0.05
    late = (zero["unresolved_pairs"] > 0).mean("sample").values
    single = ((zero["clusters"] == 1) & (zero["unresolved_pairs"] == 0)).mean("sample").values
    np.testing.assert_allclose(late + single, 1, atol=0.004)
    # From t = 40 to 160 by a half; exponential decay as at β = 1 would leave nothing.
    error = np.sqrt(late[2] * (1 - late[2]) / 800) / late[1]
    assert abs(late[2] / late[1] - 0.5) < STANDARD_ERRORS * error
    assert (one["unresolved_pairs"] > 0).mean("sample").values[2] == 0
    # Two tokens of overlap z end antipodal with probability ½ − arcsin(z)/π, as the exact overlap has it.
    pair = lf.overlap(in_plane(2, 0.0, 50))
    assert float(pair.antipodal_probability(0.3)) == pytest.approx(0.5 - np.arcsin(0.3) / np.pi)
