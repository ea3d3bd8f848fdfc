"""Networks whose only list of modules is their experts, which a router chooses for a sequence or for each token."""

import sys

import numpy as np
import pytest
import torch

import limitformer as lf
from cases.foreign import Routed, Scattered
from limitformer.base.errors import InputError
from limitformer.weightless.decisions import Decisions

EXPERTS = 3
IDS = [[1, 2, 3, 1, 5]]
TOGETHER = 1  # a seed at which the first two samples choose the same expert
UNEVEN = 1  # a seed at which the router of the first network divides the tokens unevenly
OPTIONS = {"gradients": True, "dtype": torch.float64, "progress": False}


def simulate(module, samples, seed=0, **options):
    return lf.weightless.simulate(module, IDS, samples=samples, seed=seed, **OPTIONS, **options)


def test_samples_choose_their_own_experts(monkeypatch):
    several = simulate(Routed, 12, seed=TOGETHER)
    monkeypatch.setattr(sys.modules["limitformer.weightless.simulate"], "MOST_SIDE_BY_SIDE", 1)
    alone = simulate(Routed, 12, seed=TOGETHER)
    np.testing.assert_allclose(several.loss, alone.loss, rtol=1e-12)
    unused = np.isnan(alone.weight_gradient.sel(weight=[f"experts.{k}.weight" for k in range(EXPERTS)]))
    assert (unused.sum("weight") == EXPERTS - 1).all()
    assert (unused.sum("sample") < 12).sum() > 1  # samples differ


def test_wrong_twin_lets_the_first_sample_choose_for_all(monkeypatch):
    alone = simulate(Routed, 12, seed=TOGETHER)
    monkeypatch.setattr(
        Decisions, "__torch_function__", lambda self, func, types, args=(), kwargs=None: func(*args, **(kwargs or {}))
    )
    together = simulate(Routed, 12, seed=TOGETHER)
    assert not np.allclose(together.loss, alone.loss, rtol=1e-3)


def test_decisions_are_numbers_that_depend_on_weights():
    weight, given = torch.ones(2), torch.ones(2)
    mode = Decisions()
    mode.random[weight] = True
    with mode:
        assert bool((given * 2).sum() > 1)
        given + weight
        assert float(given[0]) == 1.0
        assert not mode.found
        changed = torch.zeros(4)
        changed[:2] = weight * 2
        assert not mode.found
        assert changed.max() > 1
    assert mode.found
    with Decisions() as other:
        assert weight.max().item() == 1.0
    assert not other.found


def test_experts_of_a_single_network_are_no_blocks_either():
    with pytest.raises(InputError, match=r"has no blocks.*Nearest: blocks="):
        simulate(Scattered, 1, seed=UNEVEN)
    assert np.isfinite(simulate(Scattered, 1, seed=UNEVEN, blocks="first").loss.item())


def test_experts_that_receive_some_tokens_are_no_blocks():
    with pytest.raises(InputError, match=r"other tokens in each network.*Nearest: blocks="):
        simulate(Scattered, 6)
    with pytest.raises(InputError, match=r"(other tokens in each network|no blocks).*Nearest: blocks="):
        lf.weightless.simulate_steps(Scattered, IDS, samples=4, seed=0, steps=1, optimizer="sgd", progress=False)
