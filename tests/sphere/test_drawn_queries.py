"""Drawn queries and keys, heads and causal masks: chains have the law of layers by n × n loops."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

import limitformer as lf
from limitformer.base.errors import NoLimitError
from limitformer.sphere.limit import largest_weight
from limitformer.sphere.methods import methods_of
from sphere_naive import normalised, overlaps_of, tokens_at
from statistics_checks import assert_same_law

SAMPLES, LAYERS = 12_000, 8
BASE = {"beta": 3.0, "layers_per_unit_time": 4}
FRESH = {"query_key": "gaussian", "tau": 0.8}
TAU = {"tau": 0.2}


def stochastic(tokens, dim, **more):
    return lf.StochasticTransformer(**{**BASE, "tokens": tokens, "dim": dim, "sigma": 1.1, **more})


# Name → the model, and what its wrong twins have instead.
CASES = {
    "2 in 3": (stochastic(2, 3, **FRESH), [TAU, {"query_key": None, "tau": 1.0}]),
    "2 in 6, rows": (stochastic(2, 6, **FRESH, head_dim=1), [TAU]),
    "3 in 5, rows": (stochastic(3, 5, **FRESH, head_dim=2), [TAU]),
    "4 in 3, heads": (stochastic(4, 3, **FRESH, heads=3), [TAU]),
    "3 in 4, heads, rows, causal": (stochastic(3, 4, **FRESH, heads=2, head_dim=2, mask="causal"), [{"mask": "none"}]),
    "2 in 4, causal, drawn": (stochastic(2, 4, **FRESH, mask="causal"), [TAU, {"query_key": None, "tau": 1.0}]),
    "4 in 5, causal": (stochastic(4, 5, mask="causal"), [{"mask": "none"}, {"beta": 1.0}]),
    "3 in 4, unnormalized, causal": (
        stochastic(3, 4, beta=0.8, mask="causal", attention="unnormalized"),
        [{"mask": "none"}],
    ),
}


def naive_queries(model, rng, samples):
    """Return QᵀK (samples, dim, dim) of one head."""
    if model.query_key is None:
        return np.eye(model.dim)
    if model.head_dim is None:
        return model.tau * rng.standard_normal((samples, model.dim, model.dim))
    query, key = rng.standard_normal((2, samples, model.head_dim, model.dim))
    return model.tau / model.head_dim**0.5 * np.swapaxes(query, -1, -2) @ key


def naive_attention(x, model, bilinear, shift=0):
    """Return A(Xⁱ) (samples, N, d), token by token; `shift` moves the mask."""
    out = np.empty_like(x)
    for i in range(model.tokens):
        seen = min(i + 1 + shift, model.tokens) if model.mask == "causal" else model.tokens
        keyed = x[:, i, None] @ bilinear  # (samples, 1, d)
        logits = model.beta * (keyed @ np.swapaxes(x[:, :seen], -1, -2))[:, 0]
        weights = np.exp(logits)
        weights /= weights.sum(1, keepdims=True) if model.attention == "softmax" else model.tokens
        out[:, i] = np.einsum("nj,nja->na", weights, x[:, :seen])
    return out


def naive_run(model, start, samples, seed, *, shared_values=False, shift=0):
    """Return tokens (samples, N, d) after LAYERS layers with every matrix drawn in full."""
    rng = np.random.default_rng(seed)
    x = np.broadcast_to(start, (samples, *start.shape)).copy()
    for _ in range(LAYERS):
        update, values = np.zeros_like(x), rng.standard_normal((samples, model.dim, model.dim))
        for _ in range(model.heads):
            a = naive_attention(x, model, naive_queries(model, rng, samples), shift)
            update += np.einsum("nab,nib->nia", values, a) / model.heads**0.5
            values = values if shared_values else rng.standard_normal(values.shape)
        x = normalised(x + model.sigma / model.layers_per_unit_time**0.5 * update)
    return x


def statistics(overlaps):
    """Return the overlaps of all pairs, their mean and their maximum."""
    named = {f"pair {k}": overlaps[:, k] for k in range(overlaps.shape[1])}
    return named | {"mean": overlaps.mean(1), "largest": overlaps.max(1)}


def start_of(model):
    return tokens_at(model.tokens + model.dim, model.tokens, model.dim)


@cache
def reference(name):
    model = CASES[name][0]
    return statistics(overlaps_of(naive_run(model, start_of(model), SAMPLES, seed=3)))


def by_chain(model, method, seed=5):
    paths = lf.simulate(
        model, start_of(model), samples=SAMPLES, seed=seed, horizon=LAYERS / 4, method=method, progress=False
    )
    return statistics(paths.overlap.values[:, -1].reshape(SAMPLES, -1))


def changed(model, twin):
    record = {name: getattr(model, name) for name in model.__dataclass_fields__}
    return lf.StochasticTransformer(**{**record, **twin})


@pytest.mark.parametrize("name", CASES)
def test_chains_have_the_law_of_layers_with_every_matrix_drawn(name):
    model, twins = CASES[name]
    methods = methods_of(model, "gaussian")
    for method in methods:
        assert_same_law(by_chain(model, method), reference(name), by_chain(changed(model, twins[0]), "coordinates"))
    for twin in twins[1:]:
        wrong = changed(model, twin)
        assert_same_law(by_chain(model, methods[0]), reference(name), by_chain(wrong, methods_of(wrong, "gaussian")[0]))


def test_heads_have_separate_values():
    model = CASES["4 in 3, heads"][0]
    shared = naive_run(model, start_of(model), SAMPLES, seed=3, shared_values=True)
    assert_same_law(by_chain(model, "coordinates"), reference("4 in 3, heads"), statistics(overlaps_of(shared)))


def test_causal_mask_includes_the_token_itself():
    model = CASES["4 in 5, causal"][0]
    off_by_one = naive_run(model, start_of(model), SAMPLES, seed=3, shift=1)
    assert_same_law(by_chain(model, "gram"), reference("4 in 5, causal"), statistics(overlaps_of(off_by_one)))


def test_later_tokens_change_nothing_behind_a_causal_mask():
    options = {"samples": 50, "seed": 1, "horizon": 2.0, "method": "coordinates", "progress": False, "pairs": [(0, 1)]}
    start = tokens_at(9, 5, 3)
    other = np.concatenate([start[:3], -start[3:]])
    model = stochastic(5, 3, mask="causal")
    first, second = (lf.simulate(model, x, **options).overlap.values for x in (start, other))
    np.testing.assert_allclose(first, second, rtol=0, atol=1e-12)
    unmasked = [lf.simulate(stochastic(5, 3), x, **options).overlap.values for x in (start, other)]
    assert np.abs(unmasked[0] - unmasked[1]).max() > 0.1


@pytest.mark.parametrize("method", ["overlap", "gram", "coordinates"])
def test_gaps_at_antipodes_keep_their_digits(method):
    """In dimension 3 antipodes attract: log(1 + z) falls at its exact rate, far below the resolution of coordinates."""
    model = lf.StochasticTransformer(tokens=2, dim=3, beta=1.0, layers_per_unit_time=200, query_key="gaussian", tau=2.0)
    paths = lf.simulate(model, -1 + 2e-16, samples=400, seed=2, horizon=8.0, method=method, progress=False)
    logs = np.log(paths.gap.values)
    expected = 2 * float(lf.overlap(model).artanh_drift(-300.0)) * 8.0
    change = logs[:, -1] - logs[:, 0]
    error = change.std() / len(change) ** 0.5
    assert abs(change.mean() - expected) < 4 * error + 0.02 * abs(expected)
    assert logs[:, -1].min() < -45


def test_identical_and_antipodal_tokens_stay_unless_a_mask_parts_them():
    options = {"samples": 16, "seed": 1, "horizon": 3.0, "progress": False}
    for start in (1.0, -1.0):
        drawn = lf.simulate(stochastic(2, 3, **FRESH), start, **options)
        assert (drawn.overlap.values == start).all()
    for more in ({}, FRESH):
        together = lf.simulate(stochastic(2, 3, mask="causal", **more), 1.0, **options)
        assert (together.overlap.values == 1).all()
        causal = lf.simulate(stochastic(2, 3, mask="causal", **more), -1.0, **options)
        assert (causal.overlap.values[:, 0] == -1).all()
        assert (causal.gap.values[:, 1:] > 0).all()


def test_limit_averages_over_heads_and_draws():
    """The limit does not depend on the number of heads."""
    model = lf.StochasticTransformer(tokens=2, dim=4, beta=2.0, layers_per_unit_time=1, query_key="gaussian")
    joined = lf.StochasticTransformer(tokens=2, dim=4, beta=2.0, layers_per_unit_time=1, query_key="gaussian", heads=5)
    options = {"samples": 4000, "horizon": 1.0, "progress": False, "method": "gram"}
    one, five = (
        {"z": lf.simulate(lf.limit(each), -0.4, seed=seed, **options).overlap.values[:, -1, 0]}
        for seed, each in ((1, model), (2, joined))
    )
    shallow = lf.StochasticTransformer(tokens=2, dim=4, beta=2.0, layers_per_unit_time=3)
    chain = {"z": lf.simulate(shallow, -0.4, seed=3, **options).overlap.values[:, -1, 0]}
    assert_same_law(one, five, chain)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"query_key": "normal"}, 'query_key must be None, the pair \\(Q, K\\) or "gaussian"'),
        ({"tau": 2.0}, 'tau would change nothing.*query_key="gaussian"'),
        ({**FRESH, "tau": 0.0}, "tau must lie in"),
        ({**FRESH, "heads": 0}, "heads must be"),
        ({**FRESH, "heads": 2, "values": "uniform"}, '2 heads need values="gaussian"'),
        ({"mask": np.tril(np.ones((3, 3)))}, "mask must be one of"),
        ({**FRESH, "heads": 10**9}, "heads must be at most 10,000"),
        ({**FRESH, "attention": "unnormalized", "beta": 100.0}, "Unnormalized attention overflows"),
    ],
)
def test_bad_input_is_one_line(fields, says):
    with pytest.raises(lf.InputError, match=says) as error:
        stochastic(2, 4, **fields)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("head_dim", [None, 9])
def test_without_normalisation_the_step_follows_the_mean_square_of_the_weights(head_dim):
    """E w² for the logit of a token with itself, each matrix drawn in full, equals the weight in the rate."""
    model = stochastic(2, 4, tau=0.4, attention="unnormalized", query_key="gaussian", head_dim=head_dim)
    rng, shape = np.random.default_rng(3), (200_000, head_dim or 1)
    product = (rng.standard_normal(shape) * rng.standard_normal(shape)).sum(1) / shape[1] ** 0.5
    logits = model.logit_scale * (rng.standard_normal(shape[0]) if head_dim is None else product)
    squares, exact = np.exp(2 * logits), largest_weight(model) ** 2
    assert abs(squares.mean() - exact) < 4 * squares.std() / len(squares) ** 0.5
    wrong = largest_weight(replace(model, tau=1.1 * model.tau)) ** 2
    assert abs(squares.mean() - wrong) > 4 * squares.std() / len(squares) ** 0.5


def test_weights_of_infinite_variance_have_no_limit():
    common = {"attention": "unnormalized", "query_key": "gaussian", "tau": 0.5, "beta": 2.0}
    with pytest.raises(NoLimitError, match=r"Nearest: head_dim above 4\(βτ\)² = 4, or attention"):
        lf.limit(stochastic(2, 4, head_dim=4, **common))
    assert np.isfinite(lf.limit(stochastic(2, 4, head_dim=5, **common)).fastest_rate)
    assert np.isfinite(lf.limit(stochastic(2, 4, head_dim=4, **{**common, "attention": "softmax"})).fastest_rate)
