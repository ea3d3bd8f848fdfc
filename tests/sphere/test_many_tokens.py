"""The theorems of docs/many-tokens.md: numerical checks of their proofs, then the chain itself."""

from pathlib import Path

import numpy as np
import pytest
from scipy.interpolate import CubicSpline
from scipy.optimize import brentq
from scipy.special import digamma, roots_genlaguerre
from scipy.stats import poisson

import limitformer as lf
from limitformer_papers.beyond.splits import limiting_lifetimes
from sphere_naive import naive_attention, naive_layer, normalised, tokens_at
from statistics_checks import STANDARD_ERRORS

ROOT = Path(__file__).parents[2]


def model_of(tokens, beta, dim=4, layers=4, attention="softmax"):
    return lf.StochasticTransformer(tokens=tokens, dim=dim, beta=beta, layers_per_unit_time=layers, attention=attention)


def at_rest(beta):
    """Return three tokens in the plane of which the first has A = 0."""
    cosine = brentq(lambda c: np.exp(beta) + 2 * c * np.exp(beta * c), -1, -0.4)
    angle = np.arccos(cosine)
    return np.array([[1.0, 0.0], [np.cos(angle), np.sin(angle)], [np.cos(angle), -np.sin(angle)]])


# The steps of Theorem 1.


def test_not_all_tokens_can_be_at_rest():
    """Σ⟨Xⁱ, Sⁱ⟩ ≥ N(e^β − 1) for β > 0; for β < 0 it vanishes somewhere, and at β = 0 all rest at 120°."""
    for n, dim in ((3, 2), (4, 3), (7, 2)):
        for x in (tokens_at(k, n, dim) for k in range(300)):
            z = x @ x.T
            for beta in (0.2, 1.5):
                assert (z * np.exp(beta * z)).sum() >= n * (np.exp(beta) - 1) - 1e-9
    signs = {
        float(np.sign((z * np.exp(-2 * z)).sum())) for z in (x @ x.T for x in (tokens_at(k, 3, 2) for k in range(99)))
    }
    assert signs == {1.0, -1.0}
    corners = np.array([[np.cos(a), np.sin(a)] for a in 2 * np.pi * np.arange(3) / 3])
    assert np.abs(naive_attention(corners, model_of(3, 0.0, 2))).max() < 1e-15


def four_layers(x, model, seed):
    """Apply the values of Steps 2 and 3, one layer after the other; return the last state (N, d)."""
    rng, d, large = np.random.default_rng(seed), model.dim, 1e9
    x = naive_layer(x, model, rng.standard_normal((d, d)))
    e, f, *_ = np.linalg.qr(rng.standard_normal((d, d)))[0].T
    x = naive_layer(x, model, large * np.outer(e, rng.standard_normal(d)))
    x = naive_layer(x, model, 2 * np.outer(f, e))
    w = normalised(x[0]) + normalised(x[np.argmin(x @ x[0])])
    return naive_layer(x, model, large * np.outer(e, w))


@pytest.mark.parametrize("attention", ["softmax", "unnormalized"])
def test_four_layers_may_lead_to_one_cluster(attention):
    """Starts: any, one with a token at rest, and antipodal clusters of two and one; equal clusters cannot leave."""
    starts = [tokens_at(k, 5, 3) for k in range(40)]
    starts.append(np.pad(at_rest(0.2), ((0, 0), (0, 1))))
    starts.append(np.array([[1.0, 0, 0], [1.0, 0, 0], [-1.0, 0, 0]]))
    for k, x in enumerate(starts):
        end = four_layers(x, model_of(len(x), 0.2 if len(x) == 3 else 1.2, 3, attention=attention), k)
        assert (end @ end.T).min() > 1 - 1e-6
    equal = np.array([[1.0, 0, 0], [1.0, 0, 0], [-1.0, 0, 0], [-1.0, 0, 0]])
    end = four_layers(equal, model_of(4, 1.2, 3, attention=attention), 0)
    assert (end @ end.T).min() < -1 + 1e-12


@pytest.mark.parametrize(("dim", "layers"), [(2, 1), (4, 1), (4, 3)])
def test_one_cluster_attracts_at_every_number_of_layers(dim, layers):
    """E[log|P⊥Δ| − log|Y|] < 0, E log|Y| ≥ 0; distances fall at that rate and not at (d − 1)/2, the limit's."""
    rng, n = np.random.default_rng(2), 400_000
    y = layers**-0.5 * rng.standard_normal((n, dim))
    y[:, 0] += 1
    length = np.log((y**2).sum(1)) / 2
    step = 0.5 * np.log1p(-(y[:, 1] ** 2) / (y**2).sum(1)) - length
    assert length.mean() > -STANDARD_ERRORS * length.std() / n**0.5
    assert step.mean() < -0.03
    start = normalised(np.eye(dim)[0] + 1e-6 * tokens_at(3, 3, dim))
    horizon = 20.0 if layers == 1 else 8.0
    options = {"samples": 3000, "seed": 2, "horizon": horizon, "record": [0.0, horizon], "progress": False}
    data = lf.simulate(model_of(3, 1.0, dim, layers), start, **options)
    logs = np.log(data["gap"].values[..., 0])
    fall = (logs[:, 1] - logs[:, 0]) / (2 * layers * horizon)
    error = np.hypot(fall.std() / 3000**0.5, step.std() / n**0.5)
    assert abs(fall.mean() - step.mean()) < STANDARD_ERRORS * error
    assert abs(fall.mean() + (dim - 1) / 2 / layers) > STANDARD_ERRORS * error


@pytest.mark.parametrize("layers", [1, 25])
def test_an_odd_number_of_tokens_comes_together(layers):
    """Three and five tokens at β = 1, also from antipodal clusters; some replicas of four stay in two and two."""
    options = {"samples": 800, "seed": 4, "keep": "outcome", "tolerance": 0.01, "progress": False}
    horizon = 300.0 if layers == 1 else 100.0
    shares = {}
    for n in (3, 4, 5):
        start = None if n != 5 else np.array([[1.0, 0, 0]] * 3 + [[-1.0, 0, 0]] * 2)
        data = lf.simulate(model_of(n, 1.0, 3, layers), start, horizon=horizon, record=[horizon], **options)
        shares[n] = (data["largest_cluster"].values[:, -1] < n).mean()
    assert max(shares[3], shares[5]) < 0.006
    assert shares[4] > 0.02


# Theorem 2, Proposition 3.


LATE = 20.0


def mean_time(tokens, layers, samples, seed):
    """Return the mean first time with all |z| ≥ 0.99 at β = ∞ in the plane, and its standard error."""
    rng = np.random.default_rng(seed)
    x = normalised(rng.standard_normal((samples, tokens, 2)))
    times = np.full(samples, LATE)
    for n in range(1, round(LATE * layers)):
        x = normalised(x + x @ rng.standard_normal((len(x), 2, 2)) / layers**0.5)
        here = np.flatnonzero(times == LATE)
        near = np.abs((x * x[:, :1]).sum(-1)).min(1) >= 0.99
        times[here[near]], x = n / layers, x[~near]
    return times.mean(), times.std() / samples**0.5


def test_the_time_to_gather_grows_like_the_logarithm():
    """20 to 400 tokens: the time grows by log(20)/γ, γ = 1.10 at L = 25, d = 2; half or twice of it is rejected."""
    (few, error), (many, other) = mean_time(20, 25, 500, 1), mean_time(400, 25, 500, 2)
    error, growth = np.hypot(error, other), np.log(20) / 1.10
    assert abs(many - few - growth) < STANDARD_ERRORS * error
    assert abs(many - few - growth / 2) > STANDARD_ERRORS * error
    assert abs(many - few - 2 * growth) > STANDARD_ERRORS * error


def gathering_rate(dim, layers, nodes=60):
    """Return γ = −L E log sin∠(My, Mη̂) by quadrature over My; the mean over Mη̂ is that of log χ², a Poisson mixture."""
    counts = np.arange(8 * layers + 100)[:, None]

    def mean_log(freedom, shift):
        return np.log(2) + (poisson.pmf(counts, shift / 2) * digamma(freedom / 2 + counts)).sum(0)

    x, weights = np.polynomial.hermite_e.hermegauss(nodes)
    squares, others = roots_genlaguerre(nodes, (dim - 2) / 2 - 1)
    along, across, rest = (each.ravel() for each in np.meshgrid(x, x, 2 * squares, indexing="ij"))
    weights = np.einsum("i,j,k", weights, weights, others).ravel()
    cosine = across**2 / ((layers**0.5 + along) ** 2 + across**2 + rest)  # squared, of My and η̂
    shifts = np.linspace(0, layers, 2001)
    means = CubicSpline(shifts, mean_log(dim - 1, shifts))(layers * (1 - cosine))
    return float(-layers / 2 * (np.average(means, weights=weights) - mean_log(dim, np.array([layers]))[0]))


@pytest.mark.parametrize(("layers", "printed"), [(10, 0.8626), (25, 0.9561)])
def test_rate_of_gathering_equals_quadrature(layers, printed):
    """The page's numbers, by quadrature and by matrices; 0.95 at L = 25 (the wrong twin) is rejected."""
    exact = gathering_rate(4, layers)
    assert exact == pytest.approx(printed, abs=5e-5)
    assert exact == pytest.approx(gathering_rate(4, layers, 90), abs=1e-5)
    assert str(printed) in (ROOT / "docs/many-tokens.md").read_text()
    rng, simulated = np.random.default_rng(1), []
    for _ in range(8):
        m = np.eye(4)[:2] + rng.standard_normal((250_000, 2, 4)) / layers**0.5  # two columns of M
        cosine = (m[:, 0] * m[:, 1]).sum(1) ** 2 / ((m[:, 0] ** 2).sum(1) * (m[:, 1] ** 2).sum(1))
        simulated.append(-layers / 2 * np.log1p(-cosine))
    mean, error = np.mean(simulated), np.std(simulated) / 2_000_000**0.5
    assert abs(mean - exact) < STANDARD_ERRORS * error
    assert abs(mean - (0.95 if layers == 25 else 0.87)) > STANDARD_ERRORS * error


def test_lifetimes_depend_on_shares_alone():
    """3 + 2 and 300 + 200 tokens: one diffusion, and one leading term; 4 + 1 is another."""

    def of(p, q):
        return lf.overlap(model_of(p + q, 2.5), clusters=(p, q)).mean_hitting_time(0.9, start=-1.0)

    assert of(300, 200) == pytest.approx(of(3, 2), rel=1e-9)
    assert of(4, 1) < 0.3 * of(3, 2)
    alpha, rest = 0.6, np.pi / (2 * 2**0.5) * (np.pi / 2) * np.exp(5.0)  # B(½, 3/2) = π/2
    for n in (5, 500):
        lifetime = limiting_lifetimes(n, 4, 2.5)[2 * n // 5]
        assert lifetime == pytest.approx(rest * alpha * (1 - alpha) / (2 * alpha - 1))
