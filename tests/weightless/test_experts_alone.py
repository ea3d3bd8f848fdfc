"""Networks whose only list of modules is their experts, which a router chooses for a sequence or for each token."""

import sys

import numpy as np
import pytest
import torch
from scipy.stats import ks_2samp
from torch import nn

import limitformer as lf
from limitformer.base.errors import InputError
from limitformer.weightless.decisions import Decisions

WIDTH, WORDS, EXPERTS = 12, 20, 3
IDS = [[1, 2, 3, 1, 5]]
TOGETHER = 1  # a seed at which the first two samples choose the same expert
UNEVEN = 1  # a seed at which the router of the first network divides the tokens unevenly
OPTIONS = {"gradients": True, "dtype": torch.float64, "progress": False}


class Routed(nn.Module):
    """One expert for the whole sequence, a tied head, and no blocks."""

    def __init__(self):
        super().__init__()
        self.embed, self.first = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(EXPERTS))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=0.3)

    def of_experts(self, x):
        return self.experts[int(self.router(x[:, -1])[0].argmax())](x)

    def forward(self, ids):
        x = self.embed(ids)
        x = x + torch.tanh(self.first(x))
        return self.head(x + self.of_experts(x))


class Scattered(Routed):
    """The experts receive the tokens that were routed to them, and no others."""

    def of_experts(self, x):
        best, result = self.router(x).argmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            chosen = best == number
            if chosen.any():
                result[chosen] = expert(x[chosen])
        return result


class Untied(Scattered):
    """The wrong twin of a head that is the embedding."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        nn.init.normal_(self.head.weight, std=0.3)


class FixedTokens(Routed):
    """The wrong twin: the place of a token, and not the router, chooses its expert."""

    def of_experts(self, x):
        outputs = [self.experts[place % EXPERTS](x[:, place]) for place in range(x.shape[1])]
        return torch.stack(outputs, 1)


def simulate(module, samples, seed=0, **options):
    return lf.weightless.simulate(module, IDS, samples=samples, seed=seed, **OPTIONS, **options)


@pytest.mark.parametrize("seed", range(1, 4))
def test_samples_choose_their_own_experts(seed, monkeypatch):
    several = simulate(Routed, 12, seed)
    monkeypatch.setattr(sys.modules["limitformer.weightless.simulate"], "MOST_SIDE_BY_SIDE", 1)
    alone = simulate(Routed, 12, seed)
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
    mode.note(weight)
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


def loss_of(out, inputs):
    """Return the mean square of the logits of a word that was looked up, and of one that was not."""
    return out[:, :, [1, 7]].square().mean((1, 2))


def drawn(module, samples, seed, names):
    """Return loss and gradient norms (1 + names, samples) of networks that torch draws; NaN: no gradient."""
    torch.manual_seed(seed)
    rows = []
    for _ in range(samples):
        network = module().double()
        loss = loss_of(network(torch.tensor(IDS)), None).sum()
        loss.backward()
        gradients = {name: one.grad for name, one in network.named_parameters()}
        norms = [np.nan if gradients[name] is None else float(gradients[name].norm()) for name in names]
        rows.append([float(loss.detach()), *norms])
    return np.array(rows).T


def test_scattered_tokens_have_the_law_of_drawn_networks():
    names = ["embed.weight", "first.weight", "router.weight", "experts.1.weight"]
    data = simulate(Scattered, 600, seed=4, blocks="first", loss=loss_of)
    mine = np.array([data.loss.values, *(data.weight_gradient.sel(weight=name).values for name in names)])
    assert np.isnan(mine[3]).all()  # a hard choice has no gradient
    twins = ((Scattered, 1), (FixedTokens, 2), (Untied, 3))
    theirs, twin, untied = (drawn(each, 600, seed, names) for each, seed in twins)
    for k in (0, 1, 2, 4):
        values, others, wrong = (
            np.nan_to_num(each[k]) for each in (mine, theirs, twin)
        )  # an unused expert counts as 0
        assert ks_2samp(values, others).pvalue > 1e-3, k
    assert ks_2samp(values, wrong).pvalue < 1e-6
    assert max(ks_2samp(mine[k], untied[k]).pvalue for k in (0, 1)) < 1e-8
