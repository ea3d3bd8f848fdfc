"""`simulate` on the sphere: one seed gives one set of bits; results store how to repeat them, also in a file."""

import re
import subprocess
import sys
import time
from dataclasses import replace
from importlib import import_module

import numpy as np
import pytest
import xarray as xr

import limitformer as lf
from interruptions import InterruptAfter, interrupt, pool_that_runs
from limitformer.numerics.lanes import LANES
from limitformer.sampling import replicas
from limitformer.simulation.simulate import Interrupted
from limitformer.sphere.pair.chain import BLOCK
from limitformer.sphere.pair.process import PreparedPair
from limitformer.sphere.tokens.process import PreparedTokens
from sphere_naive import tokens_at

PAIR = {"tokens": 2, "dim": 4, "beta": 2.0, "layers_per_unit_time": 10}
QUERY_KEY = np.random.default_rng(0).standard_normal((2, 3, 4))
TWO = lf.StochasticTransformer(**PAIR, sigma=1.3)
THREE = lf.StochasticTransformer(**{**PAIR, "tokens": 3})
FINE = lf.StochasticTransformer(**{**PAIR, "tokens": 3, "layers_per_unit_time": 50})
MANY = lf.StochasticTransformer(**{**PAIR, "tokens": 5, "dim": 3}, values="truncated normal", attention="unnormalized")
GENERAL = lf.StochasticTransformer(**{**PAIR, "tokens": 3}, query_key=QUERY_KEY)
# dim − 2 = 9 and dim − 1 = 10 degrees of freedom: by rejection, so that replicas need second attempts
WIDE = lf.StochasticTransformer(**{**PAIR, "dim": 11})
HYBRID = lf.HybridTransformer(**PAIR, epsilon=1.5)
TRIPLE = lf.HybridTransformer(**{**PAIR, "tokens": 3}, epsilon=1.5, values="rademacher")


@pytest.fixture(autouse=True)
def long_steps_are_allowed(monkeypatch):
    """Allow long steps: these tests do not depend on their accuracy."""
    monkeypatch.setattr(import_module("limitformer.sphere.chain"), "COARSEST", np.inf)


# Name → what is simulated, from where, how.
RUNS = {
    "overlap": (TWO, None, {}),
    "overlap, given": (TWO, -0.3, {"keep": "outcome", "tolerance": 0.2}),
    "overlap, wide": (WIDE, None, {}),
    "overlap, early stop": (TWO, None, {"early_stop": 0.05, "tolerance": 0.2}),
    "overlap, hybrid": (HYBRID, None, {"early_stop": 0.05, "tolerance": 0.2, "keep": "outcome"}),
    "gram": (THREE, tokens_at(0, 3, 4), {}),
    "gram, uniform": (THREE, None, {"keep": "outcome", "tolerance": 0.2}),
    "gram, wide": (WIDE, 0.4, {"method": "gram"}),
    "gram, hybrid": (TRIPLE, None, {}),
    "coordinates": (THREE, None, {"method": "coordinates"}),
    "coordinates, tokens": (THREE, tokens_at(0, 3, 4), {"keep": "tokens"}),
    "coordinates, full": (MANY, None, {"keep": "tokens"}),
    "coordinates, Q and K": (GENERAL, None, {"keep": "outcome", "tolerance": 0.2}),
    "coordinates, at an overlap": (HYBRID, 0.1, {"keep": "tokens"}),
    # Some replicas are next to ±1, some gathered, some loose: those side by side go different ways through a layer.
    "gram, near": (lf.StochasticTransformer(**{**PAIR, "tokens": 3}), None, {"horizon": 40.0}),
    "coordinates, near": (lf.StochasticTransformer(**{**PAIR, "tokens": 4}), None, {"horizon": 40.0}),
    # Some go on as two points, some arrive, some do neither.
    "gram, early stop": (FINE, None, {"horizon": 60.0, "early_stop": 0.5, "tolerance": 0.2, "keep": "outcome"}),
    "coordinates, early stop": (
        replace(FINE, tokens=4),
        None,
        {"horizon": 60.0, "early_stop": 0.5, "tolerance": 0.2, "keep": "outcome"},
    ),
    "limit, overlap": (lf.limit(TWO), None, {"dt": 0.07, "early_stop": 0.05, "tolerance": 0.2}),
    "limit, gram": (lf.limit(THREE), None, {"dt": 0.07}),
    "limit, tokens": (lf.limit(MANY), None, {"dt": 0.07, "keep": "tokens"}),
    "limit, hybrid": (lf.limit(TRIPLE), None, {"dt": 0.07, "method": "coordinates", "keep": "outcome"}),
}
every_run = pytest.mark.parametrize("name", RUNS)
# One of each method and of each that `keep` has.
some_runs = pytest.mark.parametrize(
    "name", ["overlap, early stop", "gram, uniform", "coordinates, full", "limit, tokens", "limit, gram"]
)


def run(name, samples=37, seed=5, **settings):
    model, start, options = RUNS[name]
    options_of_run = {"horizon": 4.2, "threads": 1, **options, **settings}
    return lf.simulate(model, start, samples=samples, seed=seed, **options_of_run)


def assert_same_bits(one, other):
    assert set(one.data_vars) == set(other.data_vars)
    for name in one.data_vars:
        assert one[name].values.tobytes() == other[name].values.tobytes()


def some(dataset, which):
    return dataset.isel(sample=which)


# --- bits -------------------------------------------------------------------------------------------------------------


@every_run
def test_threads_and_chunks_do_not_change_a_bit(name):
    """Chunks begin at replicas that are the first, the eighth and so on of a group of eight."""
    whole = run(name)
    for threads, chunk in ((2, 7), (1, 1000)):
        assert_same_bits(run(name, threads=threads, chunk=chunk), whole)
    assert_same_bits(run(name, samples=6), some(whole, slice(6)))


@pytest.mark.parametrize("name", ["overlap, wide", "overlap, early stop"])
def test_more_samples_continue_the_same_stream_across_blocks(name):
    whole = run(name, samples=BLOCK + 3 * LANES + 1)
    for samples in (BLOCK, BLOCK + 1):
        assert_same_bits(run(name, samples=samples), some(whole, slice(samples)))


@every_run
def test_replicas_and_seeds_differ(name):
    """They are compared soon after the start, before any has converged to the last bit."""
    settings = {"horizon": 0.35 if "limit" in name else 0.3, "samples": 200, "keep": "overlap"}
    gaps = [run(name, seed=seed, **settings)["gap"].values[:, -1, 0] for seed in (5, 6)]
    assert len(np.unique(gaps)) == 400


@some_runs
def test_keep_does_not_change_the_paths(name):
    """Overlaps, outcomes and tokens of one seed and method belong to the same replicas."""
    model, start, options = RUNS[name]
    options = {"tolerance": 0.2, "method": run(name, samples=1).attrs["method"], **options, "horizon": 4.2}
    data = {}
    for keep in ("overlap", "outcome", *(["tokens"] if options["method"] == "coordinates" else [])):
        data[keep] = lf.simulate(model, start, samples=60, seed=5, **{**options, "keep": keep})
    one, other = lf.outcomes(data["overlap"]), lf.outcomes(data["outcome"])
    xr.testing.assert_equal(one, other)
    assert float(one.probability.sel(outcome="unresolved")[0]) > 0
    if "tokens" in data:
        x = data["tokens"]["tokens"].values
        z = (x[..., 0, :] * x[..., 1, :]).sum(-1)
        assert np.abs(z - data["overlap"]["overlap"].values[..., 0]).max() < 1e-14


@some_runs
def test_recorded_times_are_slices_of_the_full_record(name):
    full = run(name)
    times = full["time"].values[[0, 3, -1]]
    part = run(name, record=times)
    np.testing.assert_allclose(part["time"], times, rtol=1e-13)
    assert_same_bits(part, full.isel(time=[0, 3, -1]))


def test_a_longer_horizon_continues_the_same_paths():
    """The numbers of a layer do not depend on how many layers there are."""
    for name in ("overlap", "gram", "coordinates", "coordinates, full", "overlap, hybrid"):
        short, long = run(name, horizon=2.0), run(name, horizon=4.0)
        for variable in set(short.data_vars) - {"stopped"}:
            assert short[variable].values.tobytes() == long[variable].values[:, : short.sizes["time"]].tobytes()


def test_chains_limits_and_methods_have_separate_streams():
    """No two of them have a common last overlap at one seed; otherwise comparisons between them prove nothing."""
    last = {}
    for method in ("overlap", "gram", "coordinates"):
        for kind, options in (("chain", {}), ("limit", {"dt": 0.1})):
            model = TWO if kind == "chain" else lf.limit(TWO)
            data = lf.simulate(model, 0.3, samples=500, seed=5, horizon=1.0, record=[1.0], method=method, **options)
            last[method, kind] = data["overlap"].values.ravel()
    values = np.array(list(last.values()))
    correlations = np.corrcoef(values)
    np.fill_diagonal(correlations, 0)
    assert np.abs(correlations).max() < 5 / 500**0.5


# --- early stops ------------------------------------------------------------------------------------------------------

FINE = {**PAIR, "layers_per_unit_time": 50}
STOPPER = lf.StochasticTransformer(**FINE)
STOPPING = {
    "two tokens": (STOPPER, {}),
    "hybrid": (lf.HybridTransformer(**FINE, epsilon=1.5), {}),
    "dim 2": (lf.StochasticTransformer(**{**FINE, "dim": 2}), {}),
    "limit": (lf.limit(STOPPER), {"dt": 0.03}),
}


@pytest.mark.parametrize(("model", "options"), STOPPING.values(), ids=list(STOPPING))
def test_stopped_replicas_agree_with_unstopped_ones_up_to_their_stop(model, options):
    """They agree bit for bit; after the stop they repeat their last overlap."""
    run = {"samples": 600, "seed": 5, "horizon": 21.0, "tolerance": 0.1, **options}
    free = lf.simulate(model, **run)
    data = lf.simulate(model, early_stop=0.3, **run)
    stopped, times = data["stopped"].values, data["time"].values
    assert set(free.data_vars) | {"stopped"} == set(data.data_vars)
    before = times[None] <= stopped[:, None] + 1e-9
    for name in ("overlap", "gap"):
        one, other = free[name].values[..., 0], data[name].values[..., 0]
        assert one[before].tobytes() == other[before].tobytes()
        assert (one != other)[~before].mean() > 0.9
    assert np.isfinite(stopped).mean() > 0.1
    plus, minus = data.attrs["stop_gaps"]
    z, gap = (data[name].values[..., 0] for name in ("overlap", "gap"))
    for k in np.flatnonzero(np.isfinite(stopped)):
        after = times >= stopped[k] - 1e-9
        assert len(np.unique(z[k, after])) <= 1
        assert gap[k, -1] < (plus if z[k, -1] > 0 else minus) < 0.1
    np.testing.assert_array_equal(free["overlap"].values[:, 0], data["overlap"].values[:, 0])


def test_replicas_stop_at_the_first_check_below_the_bound():
    """Checks are every 16 layers."""
    run = {"samples": 300, "seed": 5, "horizon": 8.0, "record": np.arange(401) / 50, "tolerance": 0.1}
    free, stopped = lf.simulate(STOPPER, **run), lf.simulate(STOPPER, early_stop=0.3, **run)
    plus, minus = stopped.attrs["stop_gaps"]
    z, gap = (free[name].values[:, ::16, 0] for name in ("overlap", "gap"))
    below = gap < np.where(z > 0, plus, minus)
    expected = np.where(below.any(1), 16 / 50 * below.argmax(1), np.inf)
    np.testing.assert_allclose(stopped["stopped"].values, expected, rtol=1e-12)
    assert len(np.unique(expected)) > 5


# --- results ----------------------------------------------------------------------------------------------------------


def test_a_single_token_can_be_saved(tmp_path):
    """It has no pairs and is one cluster."""
    model = lf.StochasticTransformer(**{**PAIR, "tokens": 1})
    data = lf.simulate(model, samples=3, seed=0, horizon=1.0, keep="outcome")
    loaded = lf.load(lf.save(data, tmp_path / "a.zarr"))
    with pytest.raises(lf.InputError, match="One token has no overlap with another"):
        lf.simulate(model, samples=3, seed=0, horizon=1.0)
    assert (lf.outcomes(loaded).probability.sel(outcome="single cluster") == 1).all()


def start_from(data):
    """Return the start stored in the file."""
    if "start_tokens" in data:
        return data["start_tokens"].values
    match = re.fullmatch(r"overlap (.*)", data.attrs["start"])
    return float(match.group(1)) if match else None


@every_run
def test_stored_result_contains_all_that_repeats_it(name, tmp_path):
    """The file has model, start, seed, times and options."""
    data = lf.load(lf.save(run(name, samples=3), tmp_path / "a.nc"))
    assert data.attrs["model"] == lf.to_json(RUNS[name][0])
    names = ("samples", "horizon", "method", "keep", "tolerance", "early_stop", "dt")
    settings = {key: data.attrs[key] for key in names if key in data.attrs}
    again = lf.simulate(
        lf.from_json(data.attrs["model"]),
        start_from(data),
        seed=int(data.attrs["seed"]),
        record=data["time"].values,
        **settings,
    )
    assert_same_bits(again, data)
    np.testing.assert_array_equal(again["time"], data["time"])


# --- Ctrl-C -----------------------------------------------------------------------------------------------------------


def slow_down(monkeypatch):
    """Make chunks slow, so that Ctrl-C comes before the last of them has begun."""
    for prepared in (PreparedPair, PreparedTokens):

        def slow(self, *arguments, quick=prepared.run):
            time.sleep(0.05)
            return quick(self, *arguments)

        monkeypatch.setattr(prepared, "run", slow)


@pytest.mark.parametrize(("name", "threads"), [("overlap, early stop", 1), ("coordinates, tokens", 2)])
def test_ctrl_c_returns_the_finished_samples(monkeypatch, name, threads):
    """At least two whole chunks return, with the bits of an uninterrupted run."""
    whole = run(name, samples=40)
    monkeypatch.setattr(replicas, "wait", InterruptAfter(2))
    slow_down(monkeypatch)
    with pytest.raises(Interrupted) as caught:
        run(name, samples=40, chunk=3, threads=threads)
    partial = caught.value.partial
    finished = partial.sizes["sample"]
    assert 6 <= finished < 40
    assert finished % 3 == 0
    assert_same_bits(partial, some(whole, slice(finished)))
    assert partial.attrs["samples"] == finished


@some_runs
def test_ctrl_c_before_the_first_chunk_returns_no_samples(monkeypatch, name, tmp_path):
    """The empty dataset can be saved, and `outcomes` refuses it."""
    monkeypatch.setattr(replicas, "ThreadPoolExecutor", pool_that_runs(7))
    monkeypatch.setattr(replicas, "wait", interrupt)
    with pytest.raises(Interrupted) as caught:
        run(name, samples=25, chunk=7)
    partial = caught.value.partial
    assert partial.sizes["sample"] == 0
    assert partial.attrs["samples"] == 0
    if partial.attrs["keep"] != "tokens":
        with pytest.raises(lf.InputError, match=r"outcomes needs at least one sample; got none\."):
            lf.outcomes(partial)
    assert lf.load(lf.save(partial, tmp_path / "a.zarr")).sizes["sample"] == 0


# --- compiling --------------------------------------------------------------------------------------------------------

COUNT_MISSES = """
import limitformer as lf
from limitformer.sphere.pair import chain as pair
from limitformer.sphere.tokens import process as run
options = {"tokens": 2, "dim": 4, "beta": 2.0, "layers_per_unit_time": 10}
for model in (lf.StochasticTransformer(**options), lf.HybridTransformer(**options, epsilon=1.0)):
    for method in ("overlap", "gram", "coordinates"):
        lf.simulate(model, samples=9, seed=0, horizon=1.0, method=method)
kernels = (pair.run_pairs, pair.run_block, run.run_tokens, run.run_lanes)
print(sum(len(kernel.stats.cache_misses) for kernel in kernels), len(run.run_tokens.stats.cache_hits))
"""


def test_second_process_compiles_nothing():
    """It loads the kernels from disk, so no kernel signature depends on the process."""
    counts = [
        subprocess.run([sys.executable, "-c", COUNT_MISSES], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    ]
    assert counts[1] == "0 1\n"
