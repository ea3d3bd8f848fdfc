"""Two tokens by their overlap: tokens that coincide, or are antipodes, stay so; all others return from any gap."""

import numpy as np
import pytest

import limitformer as lf
from limitformer.sphere.pair.chain import LEAST

HYBRID = lf.HybridTransformer(tokens=2, dim=3, beta=1.0, epsilon=1.2, attention="unnormalized", layers_per_unit_time=20)
REPELLING = lf.StochasticTransformer(tokens=2, dim=10, beta=0.5, layers_per_unit_time=20)  # −1 repels, +1 attracts
LONG_STEPS = lf.HybridTransformer(tokens=2, dim=3, beta=3.0, epsilon=1.5, layers_per_unit_time=2)
UNNORMALIZED = lf.StochasticTransformer(tokens=2, dim=4, beta=2.0, attention="unnormalized", layers_per_unit_time=20)
MODELS = {"hybrid": HYBRID, "repelling": REPELLING, "long steps": LONG_STEPS, "unnormalized": UNNORMALIZED}
MODELS |= {f"limit, {name}": lf.limit(model) for name, model in MODELS.items()}


def run(model, start, horizon, samples=64, record=None):
    return lf.simulate(model, start, samples=samples, seed=3, method="overlap", horizon=horizon, record=record)


def start_at(model, gap, sign):
    """Return the start of two tokens whose 1 − |z| is `gap`."""
    first, across = np.eye(model.dim)[:2]
    return np.array([first, sign * first + np.sqrt(2 * gap) * across])


# --- exactly ±1 -------------------------------------------------------------------------------------------------------


def test_coinciding_tokens_stay_in_two_former_failures():
    """A floor once made 100 % antipodal by T = 200, and 95 % at +1 by T = 150; nearby tokens do that."""
    cases = ((HYBRID, 1.0, 200.0), (REPELLING, -1.0, 150.0))
    for model, end, horizon in cases:
        together = run(model, end, horizon, samples=200)["overlap"].values
        parted = run(model, start_at(model, 1e-12, end), horizon, samples=200)["overlap"].values
        assert (together == end).all()
        assert (parted[:, -1] * end < -0.5).mean() > 0.5


# --- next to ±1 -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [HYBRID, LONG_STEPS])
def test_a_gap_passes_below_the_least_double_and_comes_back(model):
    """A layer multiplies a small gap by a factor that does not depend on it: 1e-100 and 1e-306 move alike.

    A floor of w at 1e-300 (a former defect) would lift the second at once.
    """
    path, low = (
        run(model, start_at(model, gap, 1.0), 15.0, 400, range(16))["gap"].values[..., 0] for gap in (1e-100, 1e-306)
    )
    seen = (low[:, -1] > 4 * LEAST) & (path.max(1) < 1e-20)
    assert (low.min(1)[seen] == 2 * LEAST).sum() > 20
    assert np.log(path / low)[seen, -1] == pytest.approx(206 * np.log(10), abs=1e-9)


def test_gap_below_the_least_double_is_written_positive():
    """Only coinciding tokens have a gap of 0."""
    falling = lf.StochasticTransformer(tokens=2, dim=30, beta=0.3, layers_per_unit_time=20)
    gaps = run(falling, start_at(falling, 1e-300, 1.0), 40.0)["gap"].values
    assert (gaps[:, -1] == 2 * LEAST).all()
    assert (gaps >= 2 * LEAST).all()
