"""Weightless networks against the models that transformers draws; the whole table is `make laws`."""

import numpy as np
import pytest

from limitformer.weightless.maps import NeverDrawnMap
from limitformer.weightless.roots import size_of
from weightless_families import CONFIGS, drawn, p_values, paired, weightless

LEVEL = 1e-4
SAMPLES = 1200


@pytest.fixture(scope="module")
def networks():
    """Drawn networks with norms before a branch, after the sum, after the branch, and on queries and keys."""
    return {family: drawn(family, SAMPLES // 2) for family in ("llama", "bert", "olmo2")}


@pytest.mark.parametrize("family", ["llama", "bert", "olmo2"])
def test_states_and_gradients_have_the_law_of_drawn_models(family, networks):
    p = p_values(paired(weightless(family, SAMPLES), networks[family]))
    assert len(p) > 30
    assert min(p.values()) > LEVEL / len(p), sorted(p.items(), key=lambda each: each[1])[:3]


def test_wrong_twin_with_fresh_backward_numbers_is_rejected(networks, monkeypatch):
    def forgetful(ctx, d):
        n, *tensors = ctx.saved_tensors
        numbers, root = ctx.numbers, ctx.kind(*tensors)
        numbers.add_squared_gradient((root.factor.mT @ d).square().sum((-1, -2)))
        n = numbers.gaussian("twin", *n.shape[1:])
        fresh = numbers.scale * size_of(d) @ numbers.gaussian("backward", d.shape[1], root.width)
        return fresh + root.along(numbers.scale * d @ n.mT - root.onto(fresh)), None, None, None, None

    monkeypatch.setattr(NeverDrawnMap, "backward", staticmethod(forgetful))
    assert min(p_values(paired(weightless("olmo2", SAMPLES), networks["olmo2"])).values()) < 1e-8


def test_wrong_twin_with_another_standard_deviation_is_rejected(networks):
    wrong = weightless("llama", SAMPLES, overrides={"*.down_proj.weight": 0.25})
    assert min(p_values(paired(wrong, networks["llama"])).values()) < 1e-8


def test_padding_row_is_zero_as_in_drawn_models():
    padded = [3, 0, 3, 9, 0]
    data, networks = weightless("bert", 400, inputs=padded), drawn("bert", 200, inputs=padded)
    p = p_values(paired(data, networks))
    assert min(p.values()) > LEVEL / len(p)
    unpadded = p_values(paired(weightless("bert", 400, inputs=[3, 8, 3, 9, 8]), networks))
    assert min(unpadded.values()) < 1e-6


def test_every_family_runs_without_drawing_most_weights():
    for family in CONFIGS:
        data = weightless(family, 2)
        assert np.isfinite(data.loss.values).all()
        assert "never drawn" in data.attrs["weights"] or family == "modernbert"
