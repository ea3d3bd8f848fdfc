"""Every public array states its shape and has it (`array_shapes`)."""

import inspect
from functools import partial
from typing import Annotated

import numpy as np
import pytest
import torch
from numpy.typing import ArrayLike, NDArray

import limitformer as lf
from array_shapes import ShapeError, check_fields, checked, hints_of, members_of, shapes_in
from limitformer import nn


def mean_of_visible(logits, visible):
    return visible / visible.sum(1).reshape(-1, 1)


START = np.array([[1.0, 0.3, -0.4], [0.3, 1.6, 0.2], [-0.4, 0.2, 0.7]])
TOKENS = np.array([[0.6, 0.8], [1.0, 0.0], [0.0, -1.0]])
SIZE = {"width": 12, "depth": 2, "gamma": 0.5}
RELU = lf.ShapedReLU(c_plus=0.0, c_minus=-1.0)
SHAPED = lf.Transformer(**SIZE, attention=lf.ShapedAttention(tau0=1.0, heads=4), feedforward=RELU)
FLOW = lf.Transformer(width=12, depth=4, gamma=0.5, lam=1.0, feedforward=lf.ReLU())
SPHERE = lf.StochasticTransformer(tokens=3, dim=2, beta=1.0, layers_per_unit_time=10)
PAIR = lf.overlap(lf.StochasticTransformer(tokens=2, dim=4, beta=2.0, layers_per_unit_time=10))
SDE = lf.limit(lf.Transformer(**SIZE, attention=lf.ShapedAttention(tau0=1.0)))
ZS = np.array([[-0.5, 0.0, 0.5]])
RUN = {"samples": 2, "seed": 0, "progress": False}
PATHS = partial(lf.simulate, SHAPED, START, **RUN)  # made when it is asked for
X = torch.ones(2, 5, 12)
Q, K, V = torch.ones(2, 4, 5, 3), torch.ones(2, 2, 5, 3), torch.ones(2, 2, 5, 3)
SHAPING = {"gamma1": torch.ones(4), "gamma2": 1.0, "scale": 0.5}
PADDED = torch.ones(2, 1, 1, 5, dtype=torch.bool)
ATTENTION = nn.ShapedSelfAttention(12, 4, kv_heads=2)
BLOCK = nn.shaped_block(12, 4, gamma=0.5)
SEEN = nn.visibility(PADDED, is_causal=True, queries=5, keys=5)
ROWS = nn.visibility(torch.zeros(5, 5), queries=5, keys=5)
LOGITS = nn.Logits(Q, K, 0.5, PADDED, True)
LAYER = nn.Layer(SHAPED)
ON_SPHERE = nn.SphereStack(lf.StochasticTransformer(tokens=5, dim=12, beta=1.0, layers_per_unit_time=10), 2)
MEAN = lf.Mixing(mean_of_visible)


# A call of everything public whose signature has an array.
CALLS = [
    (lf.correlation, PATHS),
    (lf.outputs, PATHS, {"units": 4, "seed": 0}),
    (lf.from_covariance, START.tolist()),
    (lf.from_tokens, TOKENS),
    (lf.simulate, SHAPED, lf.from_covariance(START), RUN | {"record": [0, 2]}),
    (lf.simulate, SPHERE, TOKENS, RUN | {"horizon": 1.0}),
    (lf.recording_size, SHAPED, START, {"samples": 2, "record": [0, 2]}),
    (lf.CovarianceLimit.drift, SDE, START),
    (lf.CovarianceLimit.diffusion, SDE, START),
    (lf.CovarianceLimit.explosion_probability, SDE, START[:2, :2]),
    (lf.CovarianceFlow.drift, lf.limit(FLOW), START),
    (lf.CovarianceFlow.solve, lf.limit(FLOW), START, [0.5, 1.0]),
    (lf.TokenLimit.attention, lf.limit(SPHERE), TOKENS),
    (lf.TokenLimit.drift, lf.limit(SPHERE), TOKENS),
    (lf.TokenLimit.diffusion, lf.limit(SPHERE), TOKENS),
    (lf.OverlapDiffusion.drift, PAIR, ZS),
    (lf.OverlapDiffusion.diffusion, PAIR, 0.5),
    (lf.OverlapDiffusion.artanh_drift, PAIR, ZS),
    (lf.OverlapDiffusion.artanh_diffusion, PAIR, ZS),
    (lf.OverlapDiffusion.scale_density, PAIR, ZS),
    (lf.OverlapDiffusion.log_antipodal_probability, PAIR),
    (lf.OverlapDiffusion.antipodal_probability, PAIR, ZS),
    (lf.OverlapDiffusion.single_cluster_probability, PAIR, ZS),
    (lf.OverlapDiffusion.return_probability, PAIR, 0.9, ZS),
    (lf.OverlapDiffusion.density, PAIR, [0.1, 0.2]),
    (lf.Mixing.require_tokens, MEAN, START > 0),
    (lf.Transformer.strengths.fget, SHAPED),
    (nn.simulate, SHAPED, START, RUN | {"device": "cpu"}),
    (nn.Network.forward, nn.Network(SHAPED), X),
    (nn.Layer.forward, LAYER, X),
    (nn.Layer.add, LAYER, X, torch.tanh, 1.0, 0.5),
    (nn.Layer.visible, LAYER, X),
    (nn.FeedForward.forward, BLOCK.feedforward, X),
    (nn.Block.forward, BLOCK, X, PADDED, True),
    (nn.Block.add, BLOCK, "attention", X, X),
    (nn.Stack.forward, nn.stack_of(SHAPED), X),
    (nn.SphereStack.forward, ON_SPHERE, X),
    (nn.SphereStack.attention, ON_SPHERE, X, torch.ones(1, 12, 12)),
    (nn.TrainableShapedReLU.forward, nn.TrainableShapedReLU(negative=0.5), X),
    (nn.Residual.forward, nn.Residual(0.5), X, X),
    (nn.Gain.forward, nn.Gain(1.0, 4)),
    (nn.attention_matrix, Q, K, SHAPING),
    (nn.shaped_attention, Q, K, V, SHAPING | {"mask": PADDED, "is_causal": True}),
    (nn.ShapedSelfAttention.forward, ATTENTION, X, SEEN),
    (nn.ShapedSelfAttention.projections, ATTENTION, X),
    (nn.ShapedSelfAttention.step, ATTENTION, X[:, :1], (K[..., :3], V[..., :3])),
    (nn.ShapedSelfAttention.matrix, ATTENTION, X),
    (nn.ShapedSelfAttention.split, ATTENTION, X),
    (nn.visibility, PADDED, {"queries": 5, "keys": 5}),
    (nn.Visibility.means, ROWS, V),
    (nn.Visibility.adjoint, ROWS, torch.ones(2, 2, 2, 5, 3), 5),
    (nn.Visibility.shares, SEEN, V),
    (nn.Visibility.as_mask, SEEN),
    (nn.Visibility.weights, ROWS, V),
    (nn.entropy, LOGITS),
    (nn.Logits.rows, LOGITS),
    (nn.Logits.places, LOGITS),
    (nn.Logits.visible, LOGITS),
]
PARTS = [lf.from_tokens(TOKENS), SEEN, LOGITS]


def public():
    """Return the functions and dataclasses among the public names, each once."""
    names = [*((lf, name) for name in lf.__all__), *((nn, name) for name in dir(nn))]
    found = [member for module, name in names for member in members_of(getattr(module, name))]
    return [member for member in dict.fromkeys(found) if member.__module__.startswith("limitformer")]


def test_public_arrays_state_their_shape():
    bare = [member.__qualname__ for member in public() if any(None in shapes_in(h) for h in hints_of(member).values())]
    assert bare == []


def test_every_stated_shape_has_a_call():
    said = {inspect.unwrap(member) for member in public() if any(map(shapes_in, hints_of(member).values()))}
    assert said == {inspect.unwrap(call[0]) for call in CALLS} | {type(part) for part in PARTS}


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call[0].__qualname__)
def test_arrays_have_the_shapes_of_signatures(call):
    function, *arguments = call
    named = arguments.pop() if isinstance(arguments[-1], dict) else {}
    checked(function)(*(one() if isinstance(one, partial) else one for one in arguments), **named)


@pytest.mark.parametrize("part", PARTS, ids=lambda part: type(part).__name__)
def test_fields_have_their_shapes(part):
    check_fields(part)


# Wrong twins.


def outer(x: Annotated[ArrayLike, "tokens"], y: Annotated[ArrayLike, "dim"]) -> Annotated[NDArray, "dim tokens"]:
    """Return an outer product (tokens, dim)."""
    return np.outer(x, y)


def test_result_of_another_shape_is_rejected():
    checked(outer)([1.0, 2.0], [3.0, 4.0])  # indistinguishable
    with pytest.raises(ShapeError, match=r"^the result is \(2, 3\), not \(dim tokens\)$"):
        checked(outer)([1.0, 2.0], [3.0, 4.0, 5.0])


def test_arguments_of_inconsistent_shapes_are_rejected():
    with pytest.raises(ShapeError, match=r"^value is \(2, 2, 4, 3\), not \(b g k d\)$"):
        checked(nn.shaped_attention)(Q, K, V[:, :, :4], **SHAPING)
    with pytest.raises(ShapeError, match=r"^covariance is \(2, 3\), not \(tokens tokens\)$"):
        checked(lf.from_covariance)(START[:2])
