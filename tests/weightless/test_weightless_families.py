"""Weightless networks of one family against those that transformers draws; the witness compares the other types."""

import pytest

from weightless_families import drawn, p_values, paired, weightless

LEVEL = 1e-4
SAMPLES = 1200


@pytest.fixture(scope="module")
def networks():
    return drawn("llama", SAMPLES // 2)


@pytest.mark.slow
def test_states_and_gradients_have_the_law_of_drawn_models(networks):
    p = p_values(paired(weightless("llama", SAMPLES), networks))
    assert len(p) > 30
    assert min(p.values()) > LEVEL / len(p), sorted(p.items(), key=lambda each: each[1])[:3]


@pytest.mark.slow
def test_wrong_twin_with_another_standard_deviation_is_rejected(networks):
    wrong = weightless("llama", SAMPLES, overrides={"*.down_proj.weight": 0.25})
    assert min(p_values(paired(wrong, networks)).values()) < 1e-8
