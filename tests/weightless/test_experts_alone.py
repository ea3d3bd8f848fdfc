"""Networks whose only list of modules is their experts, which a router chooses for a sequence or for each token."""

import numpy as np
import pytest
import torch

import limitformer as lf
from cases.foreign import Routed, Scattered
from limitformer.base.errors import InputError

EXPERTS = 3
IDS = [[1, 2, 3, 1, 5]]
TOGETHER = 1  # a seed at which the first two samples choose the same expert
UNEVEN = 1  # a seed at which the router of the first network divides the tokens unevenly
OPTIONS = {"gradients": True, "dtype": torch.float64, "progress": False}


def simulate(module, samples, seed=0, **options):
    return lf.weightless.simulate(module, IDS, samples=samples, seed=seed, **OPTIONS, **options)


def test_samples_choose_their_own_experts():
    several = simulate(Routed, 12, seed=TOGETHER)
    unused = np.isnan(several.weight_gradient.sel(weight=[f"experts.{k}.weight" for k in range(EXPERTS)]))
    assert (unused.sum("weight") == EXPERTS - 1).all()
    assert (unused.sum("sample") < 12).sum() > 1  # samples differ


def test_experts_of_a_single_network_are_no_blocks_either():
    with pytest.raises(InputError, match=r"has no blocks.*Nearest: blocks="):
        simulate(Scattered, 1, seed=UNEVEN)
    assert np.isfinite(simulate(Scattered, 1, seed=UNEVEN, blocks="first").loss.item())


def test_experts_that_receive_some_tokens_are_no_blocks():
    with pytest.raises(InputError, match=r"other tokens in each network.*Nearest: blocks="):
        simulate(Scattered, 6, blocks="experts.*")
    with pytest.raises(InputError, match=r"no blocks.*Nearest: blocks="):
        simulate(Scattered, 6)
    with pytest.raises(InputError, match=r"(other tokens in each network|no blocks).*Nearest: blocks="):
        lf.weightless.simulate_steps(Scattered, IDS, samples=4, seed=0, steps=1, optimizer="sgd", progress=False)
