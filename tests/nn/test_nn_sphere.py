"""Layers of tokens on the sphere that train: their equations, the law of the chain, gradients, one training step."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.func import functional_call, vmap
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import limitformer as lf
from limitformer.base.errors import InputError
from limitformer.nn.sphere import WEIGHTS, SphereStack
from sphere_naive import naive_layer, normalised, overlaps_of, tokens_at
from statistics_checks import assert_same_law

SAMPLES, LAYERS = 2500, 6
START = tokens_at(5, 3, 4)
BASE = {"tokens": 3, "dim": 4, "beta": 1.7, "layers_per_unit_time": LAYERS}
FEW = {"layers_per_unit_time": 2, "beta": 0.6}
PAIR = np.random.default_rng(3).standard_normal((2, 2, 4))
LINEAR = lf.OneMatrix(activation=lf.ShapedReLU(c_plus=0.0, c_minus=0.0))
STOCHASTIC, HYBRID = lf.StochasticTransformer(**BASE), lf.HybridTransformer(**BASE, epsilon=0.7)
MODELS = {
    "softmax": STOCHASTIC,
    "unnormalized": replace(STOCHASTIC, beta=0.6, attention="unnormalized"),
    "uniform": replace(STOCHASTIC, values="uniform", **FEW),
    "rademacher": replace(STOCHASTIC, values="rademacher", **FEW),
    "truncated normal": replace(STOCHASTIC, values="truncated normal", **FEW),
    "Q and K, unnormalized": replace(STOCHASTIC, query_key=PAIR, beta=0.3, attention="unnormalized"),
    "drawn, entries": replace(STOCHASTIC, query_key="gaussian", tau=0.8),
    "drawn, two heads, causal": replace(
        STOCHASTIC, query_key="gaussian", tau=0.8, head_dim=2, heads=2, mask="causal", layers_per_unit_time=3
    ),
    "hybrid": HYBRID,
    "hybrid, unnormalized": replace(HYBRID, beta=0.6, attention="unnormalized"),
}


def stack_of(model, seed=0, layers=LAYERS, **options):
    return SphereStack(model, layers, generator=torch.Generator().manual_seed(seed), **options).double()


@torch.no_grad()
def overlaps(model, **options):
    """Return the overlaps of three tokens after one unit of time of independent networks, by pair.

    All networks take their weights from one stack that is `SAMPLES` times as deep.
    """
    layers, generator = model.layers_per_unit_time, torch.Generator().manual_seed(7)
    stack, deep = (SphereStack(model, size, generator=generator, **options) for size in (layers, SAMPLES * layers))
    split = {name: getattr(deep, name) for name in WEIGHTS}
    split = {name: one.unflatten(0, (SAMPLES, layers)) for name, one in split.items() if len(one) > 1}
    for layer in range(len(stack.feedforward)):
        posts = [branch.post.weight for branch in deep.feedforward[layer::layers]]
        split[f"feedforward.{layer}.post.weight"] = torch.stack(posts)
    x = torch.tensor(START, dtype=torch.float32)
    with sdpa_kernel(SDPBackend.MATH):  # the only kernel with a rule for vmap
        ends = vmap(lambda weights: functional_call(stack, weights, (x,)))(split)
    return by_pair(overlaps_of(normalised(ends.double().numpy())))


def by_pair(z):
    return {f"z{k}": z[:, k].round(6) for k in range(3)} | {"z0 z1": (z[:, 0] * z[:, 1]).round(6)}


def chain(model):
    paths = lf.simulate(model, START, horizon=1.0, samples=20_000, seed=1, record=[1.0], progress=False)
    return by_pair(paths.overlap.values[:, 0])


def stronger(model):
    name = "sigma" if isinstance(model, lf.StochasticTransformer) else "epsilon"
    return replace(model, **{name: 1.2 * getattr(model, name)})


@pytest.mark.parametrize("name", MODELS)
def test_untrained_sphere_stack_has_the_law_of_the_chain(name):
    """The wrong twin has a σ or ε that is 20% larger."""
    model = MODELS[name]
    assert_same_law(overlaps(model), chain(model), wrong=overlaps(stronger(model)))


def test_law_of_the_chain_rejects_layers_that_do_not_normalise(monkeypatch):
    model = MODELS["softmax"]
    exact, right = chain(model), overlaps(model)
    monkeypatch.setattr(functional, "normalize", lambda x, dim: x)
    assert_same_law(right, exact, wrong=overlaps(model))


def test_linear_branch_has_the_law_of_values_of_tokens_that_attend_to_themselves():
    """At β = 10⁶ a token sees itself alone, and σ = 10⁻⁶ switches the values off."""
    still = replace(STOCHASTIC, sigma=1e-6)
    branch, wrong = (overlaps(still, feedforward=LINEAR, strength=phi) for phi in (0.7, 0.7 * 1.2))
    assert_same_law(branch, chain(replace(STOCHASTIC, beta=1e6, sigma=0.7)), wrong=wrong)


@pytest.mark.parametrize("name", ["softmax", "unnormalized", "Q and K, unnormalized", "hybrid", "hybrid, unnormalized"])
def test_sphere_stack_equals_the_equations_with_the_same_values(name):
    model = MODELS[name]
    stack, x = stack_of(model), START
    for value in stack.values.detach().numpy():
        x = naive_layer(x, model, value[0] / getattr(model, "sigma", 1.0) if value.size > 1 else value[0, 0, 0])
    with torch.no_grad():
        np.testing.assert_allclose(stack(torch.tensor(START)).numpy(), x, atol=1e-6)  # the form starts in float32


def test_heads_and_mask_of_the_sphere_stack_equal_their_sum():
    model = MODELS["drawn, two heads, causal"]
    stack = stack_of(model, layers=1)
    moved = START.copy()
    for query, key, value in zip(
        *(each[0].detach().numpy() for each in (stack.query, stack.key, stack.values)), strict=True
    ):
        weights = np.tril(np.exp(model.beta * (START @ query.T) @ (START @ key.T).T))
        moved += weights / weights.sum(1, keepdims=True) @ START @ value.T / np.sqrt(2 * 3)
    np.testing.assert_allclose(stack(torch.tensor(START)).detach().numpy(), normalised(moved), atol=1e-12)


@pytest.mark.parametrize("shared_values", [False, True])
def test_feedforward_branch_equals_its_equation(shared_values):
    stack = stack_of(STOCHASTIC, feedforward=lf.ReLU(hidden=7), strength=0.4, shared_values=shared_values)
    x = START
    for layer, branch in enumerate(stack.feedforward):
        x = naive_layer(x, STOCHASTIC, stack.values[0 if shared_values else layer, 0].detach().numpy())
        pre, post = branch.pre.weight.detach().numpy(), branch.post.weight.detach().numpy()
        x = normalised(x + 0.4 * np.maximum(2.0 * x @ pre.T, 0) @ post.T / np.sqrt(LAYERS))
    tokens = torch.tensor(START).expand(2, 5, 3, 4)
    np.testing.assert_allclose(stack(tokens).detach().numpy(), np.broadcast_to(x, tokens.shape), atol=1e-12)


def test_feedforward_branch_preserves_the_variance_of_entries():
    stack = stack_of(STOCHASTIC, layers=1000, feedforward=lf.ReLU(hidden=7))
    for name, variance in (("pre", 1 / 4), ("post", 2 / 7)):  # 28,000 entries: 3% are 3.5 standard errors
        entries = torch.stack([getattr(branch, name).weight.detach() for branch in stack.feedforward])
        assert float(entries.var()) == pytest.approx(variance, rel=0.03)


@pytest.mark.parametrize("trained", [(), ("values",), ("query", "key"), ("query", "key", "values")])
@pytest.mark.parametrize("name", ["softmax", "drawn, two heads, causal", "hybrid, unnormalized"])
def test_gradients_reach_the_trained_weights_alone(name, trained):
    stack = stack_of(MODELS[name], trained=trained, feedforward=lf.GELU())
    stack(torch.tensor(START))[..., 0].sum().backward()
    branch = {name for name, _ in stack.named_parameters() if name.startswith("feedforward")}
    assert len(branch) == 2 * LAYERS
    nonzero = {name for name, one in stack.named_parameters() if one.grad is not None and bool((one.grad != 0).any())}
    assert nonzero == branch | set(trained)


@pytest.mark.parametrize("name", MODELS)
def test_sphere_stack_trains_and_stays_on_the_sphere(name):
    stack, x = stack_of(MODELS[name], feedforward=LINEAR, strength=0.3), torch.tensor(START)
    optimiser = torch.optim.SGD(stack.parameters(), lr=1e-2)
    losses = []
    for _ in range(2):
        y = stack(x)
        losses.append((y - x.roll(1, -1)).square().sum())
        optimiser.zero_grad()
        losses[-1].backward()
        optimiser.step()
    assert losses[1] < losses[0]
    np.testing.assert_allclose(y.norm(dim=-1).detach().numpy(), 1.0, atol=1e-12)


def test_layers_share_fixed_queries_and_shared_values():
    shapes = {
        name: [tuple(p.shape) for p in stack_of(MODELS[name], **options).parameters()]
        for name, options in (("softmax", {}), ("hybrid", {"shared_values": True}), ("drawn, two heads, causal", {}))
    }
    assert shapes == {
        "softmax": [(1, 1, 4, 4), (1, 1, 4, 4), (6, 1, 4, 4)],
        "hybrid": [(1, 1, 4, 4), (1, 1, 4, 4), (1, 1, 1, 1)],
        "drawn, two heads, causal": [(6, 2, 2, 4), (6, 2, 2, 4), (6, 2, 4, 4)],
    }
    with pytest.raises(InputError, match="trained may contain query, key, values; got value"):
        SphereStack(STOCHASTIC, 1, trained=("value",))
