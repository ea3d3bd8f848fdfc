"""Two builds of one model: equality of laws, and the levels of the tests where a law is not known."""

import math

import numpy as np
import torch
from torch import nn

import limitformer as lf
from limitformer.initialisation import compare
from limitformer.initialisation.builds import build_of
from limitformer.initialisation.comparison import same_law
from limitformer.initialisation.summary import summarise
from limitformer.initialisation.weight_tests import p_of_builds, p_of_numbers
from limitformer.weightless import laws
from two_builds import kinds


def test_laws_are_the_same_up_to_rounding_and_bounds_that_cut_nothing():
    wide = laws.truncated_normal(0.0, 0.02, -2.0, 2.0)
    assert same_law(wide, laws.normal(0.02))
    assert same_law(laws.normal(0.02), laws.normal(0.02 * (1 + 1e-8)))
    assert same_law(laws.uniform(-0.1, 0.3), laws.uniform(-0.3, 0.1).times(-1.0))
    assert same_law(laws.truncated_normal(0.0, 1.0, -1.0, 2.0), laws.truncated_normal(0.0, 1.0, -2.0, 1.0).times(-1.0))
    assert not same_law(laws.truncated_normal(0.0, 1.0, -1.0, 2.0), laws.truncated_normal(0.0, 1.0, -2.0, 1.0))
    assert not same_law(laws.normal(0.02), laws.normal(0.0201))
    assert not same_law(laws.normal(0.5), laws.uniform(-(0.75**0.5), 0.75**0.5))
    assert not same_law(laws.normal(0.02), laws.normal(0.02, mean=1e-4))


def draws(generator, count, scale=1.0, mean=0.0):
    """Return summaries of builds whose entries share a random factor and a random shift."""
    result = []
    for _ in range(count):
        x = generator.normal(size=(6, 8)) * math.exp(0.3 * generator.normal()) + 0.2 * generator.normal()
        result.append(summarise(torch.from_numpy(scale * x + mean)))
    return result


def test_builds_with_dependent_entries_have_the_level():
    """No level is exceeded by 3.5 standard errors of 300 pairs; entries that count as independent exceed it."""
    generator = np.random.default_rng(1)
    p = [p_of_builds(draws(generator, 12), draws(generator, 12)) for _ in range(300)]
    naive = [p_of_numbers(*draws(generator, 2)) for _ in range(300)]
    for test in ("mean", "spread", "shape"):
        for level in (0.3, 0.05, 0.01):
            bound = level + 3.5 * math.sqrt(level * (1 - level) / len(p))
            assert np.mean([each[test] <= level for each in p]) <= bound, (test, level)
    assert np.mean([each["spread"] <= 0.01 for each in naive]) > 0.2  # the wrong twin
    assert p_of_builds(draws(generator, 12), draws(generator, 12, scale=3.0))["spread"] < 1e-4
    assert p_of_builds(draws(generator, 12), draws(generator, 12, mean=2.0))["mean"] < 1e-4


def test_numbers_of_one_law_have_the_level():
    generator = np.random.default_rng(2)
    for size in (4, 20, 400):
        x, y = ([summarise(torch.from_numpy(generator.normal(size=size))) for _ in range(300)] for _ in range(2))
        p = [p_of_numbers(*pair) for pair in zip(x, y, strict=True)]
        assert set(p[0]) == ({"shape"} if size < 16 else {"shape", "mean", "spread"})
        for test in p[0]:
            for level in (0.3, 0.05, 0.01):
                bound = level + 3.5 * math.sqrt(level * (1 - level) / len(p))
                assert np.mean([each[test] <= level for each in p]) <= bound, (size, test, level)
    wide = summarise(torch.from_numpy(1.5 * generator.normal(size=400)))
    assert p_of_numbers(x[0], wide)["spread"] < 1e-8


def test_law_that_the_numbers_do_not_follow_is_not_used():
    """The code acts otherwise where its weights are on the meta device, as they are while it is read."""

    def devious():
        layer = nn.Linear(40, 40, bias=False)
        nn.init.normal_(layer.weight, 0, 0.5 if layer.weight.untyped_storage().device.type == "meta" else 0.02)
        return layer

    def plain():
        layer = nn.Linear(40, 40, bias=False)
        nn.init.normal_(layer.weight, 0, 0.02)
        return layer

    assert lf.weightless.law(devious)["weight"].std == 0.5
    assert build_of(devious, "build").laws == {}
    assert not compare(plain, devious).findings
    assert kinds(compare(devious, lambda: plain().requires_grad_(False)))["requires_grad"] == {"weight"}
