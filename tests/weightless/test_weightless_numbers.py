"""Entries of weights: their laws, digits, and independence of threads and other entries."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import kstest, truncnorm, uniform
from torch import nn

import limitformer as lf
from limitformer.weightless import laws, numbers
from limitformer.weightless.laws import truncated_normal

LEVEL = 1e-4
COUNT = (4, 100, 501)  # 501 columns: the last one has its own block
BOUNDS = {
    "two": (-2.0, 2.0),
    "narrow": (-0.5, 0.5),
    "none": (-100.0, 100.0),
    "uneven": (-1.0, 5.0),
    "one-sided": (0.0, math.inf),
    "off-centre": (1.0, 1.5),
    "tail": (-math.inf, -3.0),
    "far": (8.0, 9.0),
    "farther": (-31.0, -30.0),
}


def drawn(law, seed=3, purpose="p", dtype=torch.float64, shape=COUNT):
    samples, rows, columns = shape
    return numbers.entries(law, seed, purpose, range(samples), range(rows), columns, dtype)


def p_value(entries, law):
    return kstest(entries.numpy().ravel(), law.cdf).pvalue


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_uniform_entries_have_their_law(dtype):
    entries = drawn(laws.uniform(-0.3, 0.5), dtype=dtype)
    assert p_value(entries, uniform(-0.3, 0.8)) > LEVEL
    assert p_value(entries, uniform(-0.31, 0.81)) < 1e-10  # the twin is 2 % too wide
    assert entries.dtype == dtype
    assert float(entries.min()) >= np.float32(-0.3)
    assert float(entries.max()) <= np.float32(0.5)


@pytest.mark.parametrize("bounds", BOUNDS)
def test_truncated_entries_are_quantiles_to_the_last_digits(bounds):
    low, high = BOUNDS[bounds]
    entries, between = drawn(truncated_normal(0.0, 1.0, low, high)), drawn(laws.uniform(0.0, 1.0))  # of the same words
    np.testing.assert_allclose(entries, truncnorm.ppf(between, low, high), rtol=2e-13, atol=2e-15)


@pytest.mark.parametrize("law", [laws.normal(1.0), laws.uniform(-1.0, 3.0), truncated_normal(0.0, 1.0, -1.0, 5.0)])
def test_entries_do_not_depend_on_threads_or_other_entries(law, monkeypatch):
    whole = drawn(law)
    monkeypatch.setattr(numbers, "PIECE", 3000)
    monkeypatch.setattr(numbers, "usable_cores", lambda: 3)
    assert torch.equal(drawn(law), whole)
    part = numbers.entries(law, 3, "p", range(1, 3), torch.tensor([77, 4]), COUNT[-1], torch.float64)
    assert torch.equal(part, whole[1:3, [77, 4]])
    assert not torch.equal(drawn(law, seed=4), whole)
    assert not torch.equal(drawn(law, purpose="q"), whole)
    single = drawn(law, dtype=torch.float32)
    assert torch.equal(single, whole.float())


@pytest.mark.parametrize("law", [laws.uniform(-1.0, 1.0), truncated_normal(0.0, 1.0, -2.0, 2.0)])
def test_neighbouring_entries_are_independent(law):
    entries = (drawn(law).numpy() - law.mean) / law.std
    places = [entries[1:] * entries[:-1], entries[:, 1:] * entries[:, :-1], entries[..., 1:] * entries[..., :-1]]
    run = COUNT[-1] // 4  # of the same block of words
    places.append(entries[..., run : 2 * run] * entries[..., :run])
    for products in places:
        assert abs(products.mean()) * math.sqrt(products.size) < 5


def test_no_two_entries_are_equal():
    """Two words of 32 bits are rarely equal; a block of words that is used twice makes many equal pairs."""
    entries = drawn(laws.uniform(0.0, 1.0), shape=(2, 20, 103))
    assert len(torch.unique(entries)) >= entries.numel() - 1


def test_negative_multiple_of_a_law_mirrors_its_entries():
    law = truncated_normal(0.2, 1.0, -0.5, 1.5)
    np.testing.assert_allclose(drawn(law.times(-2.0).plus(1.0)), 1.0 - 2.0 * drawn(law), rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0.0, 1.0, 2.0, -2.0), "must ascend"),
        ((0.0, 1.0, 2.0, 2.0), "must ascend"),
        ((0.0, 0.0, -1.0, 1.0), "positive standard deviation"),
        ((0.0, math.nan, -1.0, 1.0), "positive standard deviation"),
    ],
)
def test_bounds_without_a_law_are_refused(arguments, message):
    with pytest.raises(lf.InputError, match=message):
        truncated_normal(*arguments)


def test_bounds_beyond_doubles_have_an_unknown_law():
    def made():
        layer = torch.nn.Linear(8, 8, bias=False)
        torch.nn.init.trunc_normal_(layer.weight, mean=0.0, std=0.01, a=1.0, b=2.0)
        return torch.nn.Sequential(layer)

    law = lf.weightless.law(made)["0.weight"]
    assert law.kind == laws.UNKNOWN
    assert "its bounds 1 and 2 are more than 36 std" in law.reason


class Routed(nn.Module):
    """Tokens that a router multiplies without a gradient first."""

    def __init__(self):
        super().__init__()
        self.embed, self.router = nn.Embedding(30, 24), nn.Linear(24, 24)
        self.blocks = nn.ModuleList([nn.Linear(24, 24)])
        for each in (self.router, *self.blocks):
            nn.init.normal_(each.weight, std=0.2)

    def forward(self, ids):
        x = self.embed(ids)
        with torch.no_grad():
            gate = self.router(x).softmax(-1)
        return x + gate * self.blocks[0](x)


def test_tokens_may_be_multiplied_without_a_gradient_first():
    """The backward pass has the factors of tokens that it shares with a map outside it; float64 has them anyway."""
    ids = torch.tensor([[3, 7, 3, 9]])
    options = {"samples": 3, "seed": 0, "draw": "never", "gradients": True, "progress": False}
    single, double = (
        lf.weightless.simulate(Routed, ids, dtype=dtype, **options) for dtype in (torch.float32, torch.float64)
    )
    np.testing.assert_allclose(single["weight_gradient"], double["weight_gradient"], rtol=1e-4)
