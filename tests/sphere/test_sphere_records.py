"""Recording on the sphere: some pairs and float32 give the same numbers, fewer of them."""

import json
import re

import numpy as np
import pytest

import limitformer as lf
from limitformer.base import memory
from limitformer.base.errors import InputError
from limitformer.results.datasets import tokens_of
from limitformer.results.outcomes import labels_of
from limitformer.sampling.arrays import all_pairs, bytes_of, checked_dtype, checked_pairs, pairs_of
from limitformer.simulation.processes import process_of
from limitformer.sphere.outcome import outcomes_of_overlaps
from sphere_naive import tokens_at

SIZE = {"dim": 4, "beta": 2.0, "layers_per_unit_time": 10}
FIVE = lf.StochasticTransformer(tokens=5, **SIZE)
MODELS = {
    "coordinates": (FIVE, tokens_at(3, 5, 4)),
    "gram": (lf.StochasticTransformer(tokens=3, **SIZE), None),
    "overlap": (lf.StochasticTransformer(tokens=2, **SIZE), None),
    "limit": (lf.limit(FIVE), tokens_at(3, 5, 4)),
}
PAIRS = [(3, 1), (0, 4), (1, 2)]
every_model = pytest.mark.parametrize("name", MODELS)


def run(name="coordinates", samples=19, **settings):
    model, start = MODELS[name]
    return lf.simulate(model, start, **{"samples": samples, "seed": 4, "horizon": 3.0, "threads": 1, **settings})


def refused(make, message):
    with pytest.raises(InputError, match=re.escape(message)) as caught:
        make()
    assert "\n" not in str(caught.value)


# --- pairs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("of", ["coordinates", "limit"])
def test_recorded_pairs_are_columns_of_all_pairs(of):
    """They agree to the last bit in the requested order; a neighbouring pair (the wrong twin) differs."""
    whole, part = run(of), run(of, pairs=PAIRS)
    assert part.sizes["pair"] == 3
    assert list(zip(part["first"].values, part["second"].values, strict=True)) == [(1, 3), (0, 4), (1, 2)]
    place = {pair: k for k, pair in enumerate(map(tuple, all_pairs(5).tolist()))}
    for name in ("overlap", "gap"):
        for k, pair in enumerate([(1, 3), (0, 4), (1, 2)]):
            np.testing.assert_array_equal(part[name].values[..., k], whole[name].values[..., place[pair]])
            assert (part[name].values[..., k] != whole[name].values[..., place[pair] - 1]).any()


def test_pairs_beyond_one_tile_are_right():
    """20 tokens have 190 pairs, in tiles of 64; each equals the formula on tokens of the same replicas."""
    model = lf.StochasticTransformer(tokens=20, dim=3, beta=1.0, layers_per_unit_time=10)
    settings = {"samples": 11, "seed": 0, "horizon": 1.0, "record": [0.0, 1.0], "threads": 1}
    data = lf.simulate(model, **settings)
    x = lf.simulate(model, keep="tokens", **settings)["tokens"].values
    for k, (i, j) in enumerate(all_pairs(20)):
        z = (x[:, :, i] * x[:, :, j]).sum(-1)
        np.testing.assert_allclose(data["overlap"].values[..., k], z, atol=1e-13)
        np.testing.assert_allclose(data["gap"].values[..., k], 1 - abs(z), atol=1e-13)
    counted = lf.simulate(model, keep="outcome", tolerance=0.1, **settings)
    labels = outcomes_of_overlaps(data["overlap"].values, data["gap"].values, 20, 0.1)
    np.testing.assert_array_equal(labels_of(counted, None), labels)
    assert labels[..., 2:].min() >= 0
    assert (labels.sum((0, 1)) > 0).all()


def test_outcomes_of_some_pairs_are_refused():
    """Three pairs of five tokens look like all pairs of three tokens."""
    part = run(pairs=[(0, 1), (0, 2), (1, 2)])
    assert tokens_of(part.sizes["pair"]) == 3
    refused(
        lambda: lf.outcomes(part), "outcomes needs all pairs of tokens, and 3 were kept. Leave pairs out of simulate"
    )
    assert lf.outcomes(run()).sizes["time"] == 31


def test_pairs_are_checked():
    assert checked_pairs(None) is None
    assert checked_pairs(np.array([[2, 0], [1, 4]])) == ((0, 2), (1, 4))
    for wrong in ([], [0, 1], [(0.0, 1.0)], "01", 3):
        refused(lambda: checked_pairs(wrong), "pairs must be a list of pairs of tokens, such as")  # noqa: B023
    refused(lambda: checked_pairs([(1, 1)]), "A pair is two tokens; got (1, 1).")
    refused(lambda: checked_pairs([(0, 1), (2, 3), (1, 0)]), "pairs must differ; (0, 1) is there twice.")
    refused(lambda: pairs_of(((0, 1), (2, 5)), 5), "pairs must be of tokens 0 … 4; got 5.")
    refused(lambda: pairs_of(((-1, 1),), 5), "pairs must be of tokens 0 … 4; got -1.")
    refused(lambda: run(pairs=[(0, 5)]), "pairs must be of tokens 0 … 4; got 5.")


def test_choices_without_effect_are_refused():
    refused(lambda: run(keep="outcome", pairs=[(0, 1)]), 'pairs would change nothing with keep="outcome"')
    refused(lambda: run(keep="tokens", pairs=[(0, 1)]), 'pairs would change nothing with keep="tokens"')
    refused(lambda: run(keep="outcome", dtype="float32"), "outcomes are whole numbers.")
    for wrong in ("float16", 32):
        refused(lambda: run(dtype=wrong), f"dtype must be one of float64, float32; got {wrong!r}.")  # noqa: B023
    assert [checked_dtype(kind) for kind in (np.float32, "f4", float)] == ["float32", "float32", "float64"]


# --- float32 ----------------------------------------------------------------------------------------------------------


@every_model
def test_float32_is_float64_rounded_once(name):
    """Overlaps and gaps of every method; rounding the tokens first would give other gaps."""
    whole, half = run(name), run(name, dtype="float32")
    for variable in ("overlap", "gap"):
        assert half[variable].dtype == np.float32
        np.testing.assert_array_equal(half[variable].values, whole[variable].values.astype(np.float32))
        assert (half[variable].values != whole[variable].values).any()
    assert (half.attrs["dtype"], whole.attrs["dtype"]) == ("float32", "float64")
    small = whole["gap"].values[whole["gap"].values < 1e-9]
    if len(small):
        assert (1 - abs(half["overlap"].values)).min() == 0.0 < half["gap"].values.min()


def test_files_store_pairs_and_types(tmp_path):
    part = run(pairs=PAIRS, dtype="float32")
    again = lf.load(lf.save(part, tmp_path / "a.nc"))
    for name in part.variables:  # NetCDF has whole numbers of 32 bits
        assert again[name].dtype == part[name].dtype or part[name].dtype.kind == "i"
        np.testing.assert_array_equal(again[name].values, part[name].values)
    assert (again.attrs["dtype"], json.loads(again.attrs["pairs"])) == ("float32", [[1, 3], [0, 4], [1, 2]])
    assert int(again.attrs["recorded_bytes"]) == part.attrs["recorded_bytes"]
    refused(lambda: lf.outcomes(again), "outcomes needs all pairs")


# --- what it takes ----------------------------------------------------------------------------------------------------


NET = lf.Transformer(width=50, depth=6, gamma=0.3, attention=lf.ShapedAttention(tau0=1.0))
TAKEN = {
    "all pairs": (FIVE, tokens_at(3, 5, 4), {"horizon": 3.0}),
    "one pair": (FIVE, None, {"horizon": 3.0, "pairs": [(1, 3)], "record": [3.0]}),
    "tokens": (FIVE, None, {"horizon": 3.0, "keep": "tokens"}),
    "outcome": (lf.limit(FIVE), None, {"horizon": 3.0, "keep": "outcome"}),
    "chain": (NET, np.eye(40), {"keep": "pairs", "record": [6]}),
    "limit": (lf.limit(NET), np.eye(3), {}),
    "flow": (
        lf.limit(lf.Transformer(width=30, depth=6, lam=1.0, gamma=6**-0.5, attention=NET.attention)),
        np.eye(3),
        {},
    ),
}


@pytest.mark.parametrize("name", TAKEN)
def test_size_of_one_sample_includes_coordinates(name):
    """Coordinates matter for one sample; without them (the wrong twin) the size falls short."""
    model, start, options = TAKEN[name]
    data = lf.simulate(model, start, samples=1, seed=0, progress=False, **options)
    names = data["label"].nbytes if "label" in data.coords else 0
    stopped = 0 if names else 8  # when the sample stopped, shown with `early_stop` alone
    size = lf.recording_size(model, start, samples=1, **options)
    assert size == data.nbytes - names + stopped
    process = process_of(model, start, options.pop("record", None), options)
    assert bytes_of(process.shapes(1)) < size - 8


def test_refusal_names_smaller_recordings(monkeypatch):
    monkeypatch.setattr(memory, "available_memory", lambda: 100_000)
    size = "Recording 19 samples at 31 times takes 92.7 KiB; 97.7 KiB are free. Nearest: record at most 24 times"
    refused(run, f'{size}, or dtype="float32" for half of it, or fewer than these 10 pairs, or keep="outcome".')
    assert run(dtype="float32").sizes["pair"] == 10
    assert run(pairs=PAIRS).sizes["pair"] == 3
    monkeypatch.setattr(memory, "available_memory", lambda: 10_000)
    refused(lambda: run(pairs=PAIRS, dtype="float32"), 'or fewer than these 3 pairs, or keep="outcome".')
    refused(lambda: run(keep="outcome", samples=100), "Nearest: record at most 4 times.")


def test_many_tokens_are_refused_before_their_pairs_are_listed(monkeypatch):
    """Two billion tokens have 10¹⁸ pairs."""
    model = lf.StochasticTransformer(tokens=2**31, dim=4, beta=1.0, layers_per_unit_time=10)
    for keep in ("overlap", "outcome", "tokens"):
        refused(lambda: lf.simulate(model, samples=1, seed=0, horizon=1.0, keep=keep), "more than is free")  # noqa: B023
