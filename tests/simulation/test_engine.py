"""`simulate`: one seed gives one set of bits, errors are one line, Ctrl-C keeps the finished replicas."""

import re
import time
from types import SimpleNamespace

import numpy as np
import pytest
import xarray as xr

from interruptions import InterruptAfter, interrupt, pool_that_runs
from limitformer.base import memory, progress
from limitformer.base.errors import InputError
from limitformer.models import (
    GELU,
    LayerNorm,
    ReLU,
    ShapedAttention,
    ShapedReLU,
    SoftmaxAttention,
    Start,
    Transformer,
    equicorrelated,
    from_json,
    from_text,
)
from limitformer.numerics.lanes import LANES
from limitformer.results.storage import load, save
from limitformer.sampling import replicas
from limitformer.simulation import simulate as engine
from limitformer.simulation.processes import limit
from limitformer.simulation.simulate import Interrupted, simulate

START = np.array([[1.0, 0.3, -0.2], [0.3, 2.0, 0.1], [-0.2, 0.1, 0.5]])
MODEL = Transformer(
    width=40,
    depth=12,
    gamma=0.5,
    attention=ShapedAttention(tau0=1.0),
    feedforward=ShapedReLU(c_plus=0.0, c_minus=-1.0),
)
HEADS = Transformer(
    width=12, depth=4, gamma=0.5, attention=SoftmaxAttention(heads=3), feedforward=GELU(hidden=9), norm="pre"
)
POST = Transformer(width=2, depth=4, gamma=0.5, feedforward=ReLU(), norm=LayerNorm(placement="post"), mask="causal")
SIMULATIONS = {
    "chain": (MODEL, {}),
    "chain with heads": (HEADS, {}),
    "chain narrower than its tokens": (POST, {}),
    "limit": (limit(MODEL), {"dt": 0.02}),
    "limit, Euler-Maruyama": (limit(MODEL), {"dt": 0.02, "step": "euler-maruyama"}),
}
every_simulation = pytest.mark.parametrize(("model", "options"), SIMULATIONS.values(), ids=list(SIMULATIONS))
VARIABLES = ("covariance", "exit", "exit_cause")


def start_for(model):
    """A start of three tokens, with no more directions than the width of the model."""
    x = np.random.default_rng(0).standard_normal((3, 2))
    return x @ x.T if model is POST else START


def run(model=MODEL, samples=20, seed=5, **settings):
    return simulate(model, start_for(model), samples=samples, seed=seed, **{"threads": 1, **settings})


def assert_same_bits(one, other):
    for name in VARIABLES:
        assert one[name].values.tobytes() == other[name].values.tobytes()


def refuses(message, model=MODEL, start=START, **settings):
    with pytest.raises(InputError, match=re.escape(message)) as caught:
        simulate(model, start, **{"samples": 4, "seed": 0, "threads": 1, **settings})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("threads", "chunk"), [(1, 7), (2, 1), (None, None)])
@every_simulation
def test_threads_and_chunks_do_not_change_a_bit(model, options, threads, chunk):
    assert_same_bits(run(model, threads=threads, chunk=chunk, **options), run(model, **options))


@pytest.mark.parametrize(
    ("model", "start", "options"),
    [
        (limit(MODEL), 15 * START, {"dt": 0.02}),
        (limit(MODEL), START, {"dt": 0.25, "step": "euler-maruyama", "radius": 4.0}),
        (MODEL, START, {"radius": 3.0}),
    ],
    ids=["limit", "limit, Euler-Maruyama", "chain"],
)
def test_paths_that_end_do_not_change_their_neighbours(model, start, options):
    """Paths of one group of eight end at different times; alone each has the same bits."""
    whole, alone = (simulate(model, start, samples=16, seed=11, chunk=chunk, **options) for chunk in (16, 1))
    assert len(np.unique(whole["exit"].values)) > 1
    assert_same_bits(alone, whole)


@every_simulation
def test_replicas_and_seeds_differ(model, options):
    first, second = run(model, **options), run(model, seed=6, **options)
    last = np.concatenate([first["covariance"].values[:, -1, 0, 0], second["covariance"].values[:, -1, 0, 0]])
    assert len(np.unique(last)) == len(last)
    assert_same_bits(run(model, seed=np.int64(6), **options), second)


@every_simulation
def test_the_first_record_is_the_start(model, options):
    """They agree to rounding, and every value is finite and symmetric."""
    v = run(model, **options)["covariance"].values
    np.testing.assert_allclose(v[:, 0], np.broadcast_to(start_for(model), v[:, 0].shape), rtol=1e-13, atol=1e-14)
    assert np.isfinite(v).all()
    assert np.abs(v - v.swapaxes(-1, -2)).max() < 1e-14 * np.abs(v).max()


@pytest.mark.parametrize(
    ("model", "record"), [(MODEL, [0, 4]), (HEADS, (2.0, 3.0)), (POST, np.array([1, 4], np.int32))]
)
def test_recorded_layers_are_slices_of_the_full_record(model, record):
    part = run(model, record=record)
    assert part["depth"].values.tolist() == list(record)
    assert_same_bits(part, run(model).sel(depth=list(record)))


@pytest.mark.parametrize("step", ["factor", "euler-maruyama"])
@pytest.mark.parametrize("record", [[0.0, 0.1, 0.3], [0.02, 0.2]], ids=str)
def test_recorded_times_are_slices_of_the_full_record(record, step):
    settings = {"dt": 0.02, "step": step}
    part = run(limit(MODEL), record=record, **settings)
    np.testing.assert_allclose(part["time"], record, rtol=1e-12)
    assert_same_bits(part, run(limit(MODEL), **settings).sel(time=part["time"], method="nearest"))


def test_the_step_is_shortened_to_meet_the_horizon():
    assert run(limit(MODEL), dt=0.01).sizes["time"] == 31
    assert run(limit(MODEL)).sizes["time"] == 31
    assert run(limit(MODEL), dt=5.0, step="euler-maruyama").sizes["time"] == 2


@every_simulation
def test_a_saved_result_can_be_repeated(model, options, tmp_path):
    """A saved file has the model, start, seed, recorded points and step."""
    data = load(save(run(model, samples=3, radius=50.0, **options), tmp_path / "a.nc"))
    assert data.attrs["description"] == ("chain" if isinstance(model, Transformer) else "limit")
    assert data.attrs["wall_seconds"] > 0
    start = Start(covariance=data["start_covariance"].values)
    settings = {name: data.attrs[name] for name in ("seed", "samples", "radius")}
    step = {name: data.attrs[name] for name in ("dt", "step") if name in data.attrs}
    axis = data["covariance"].dims[1]
    again = simulate(from_json(data.attrs["model"]), start, record=data[axis].values, **settings, **step)
    assert_same_bits(again, data)


def test_starts_and_covariances_are_one():
    start = equicorrelated(tokens=3, correlation=0.2)
    ours, theirs = (simulate(MODEL, v, samples=2, seed=0) for v in (start, start.covariance.tolist()))
    assert_same_bits(ours, theirs)
    assert ours.attrs["start"] == start.description
    text = simulate(MODEL, from_text("a b a", width=9), samples=2, seed=0)
    assert text["label"].values.tolist() == ["a", "b", "a"]


LIMIT = {"model": limit(MODEL)}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"samples": 0}, "samples must be at least 1; got 0."),
        ({"samples": 1.0}, "samples must be a whole number; got 1.0."),
        ({"seed": -1}, "seed must be a whole number from 0 to 2**63 - 1; got -1."),
        ({"seed": 2**63}, "seed must be a whole number from 0 to 2**63 - 1; got 9223372036854775808."),
        ({"seed": 0.5}, "seed must be a whole number from 0 to 2**63 - 1; got 0.5."),
        ({"threads": 0}, "threads must be at least 1; got 0."),
        ({"chunk": "7"}, "chunk must be a whole number; got '7'."),
        ({"radius": 0}, "radius must lie in (0, 1e+100] for float64; got 0."),
        ({"radius": np.nan}, "radius must be finite; got nan."),
        ({"start": [[1.0, 2.0], [2.0, 1.0]]}, "The start must be positive semi-definite"),
        ({"start": "covariance"}, "The start must be an array of numbers; got str."),
        ({"model": limit}, "simulate needs a model or limit(model); got function."),
        ({"model": MODEL.attention}, "simulate needs a model or limit(model); got ShapedAttention."),
        ({"record": []}, "record must be a list of layers or times; got []."),
        ({"record": [[1, 2]]}, "record must be a list of layers or times; got [[1, 2]]."),
        ({"record": [True]}, "record must be a list of layers or times; got [True]."),
        ({"record": [2, 2]}, "record must be strictly ascending; got [2, 2]."),
        ({"record": np.array([3, 2], np.uint8)}, "record must be strictly ascending; got"),
        ({"record": [1, np.nan, 2]}, "record must be strictly ascending; got [1, nan, 2]."),
        ({"record": [0.5]}, "Layers to record must be whole numbers; got [0.5]."),
        ({"record": [2, 13]}, "Layers to record must lie in 0 … 12; got [ 2 13]."),
        ({"step": "factor", "dt": 0.1}, "A chain has no option dt, step; it has keep"),
        ({"gradients": 1}, "gradients must be True or False; got 1."),
        (LIMIT | {"record": [0.1, 0.31]}, "Times to record must lie in [0, 0.3]; got [0.1  0.31]."),
        (LIMIT | {"record": [np.nan]}, "Times to record must lie in [0, 0.3]; got [nan]."),
        (LIMIT | {"dt": 0}, "dt must be positive; got 0.0."),
        (LIMIT | {"dt": np.inf}, "dt must be finite; got inf."),
        (LIMIT | {"step": "heun"}, 'step must be "factor" or "euler-maruyama"; got \'heun\'.'),
        (LIMIT | {"steps": 3}, "A limit has no option steps; it has keep, pairs, dtype, radius, dt, step, gradients."),
    ],
)
def test_simulate_refuses_wrong_arguments_in_one_line(settings, message):
    refuses(message, **settings)


def test_a_step_too_long_for_the_factor_step_is_refused():
    """At gamma = 1, (2m − 1) a² + eta = 5 (1/2 + 1) + 1/4 = 7.75, whose inverse is 0.129."""
    strong = Transformer(
        width=4,
        depth=40,
        gamma=1.0,
        attention=ShapedAttention(tau0=1.0),
        feedforward=ShapedReLU(c_plus=0, c_minus=-1),
    )
    refuses("dt must be below 0.129 for 3 tokens and this gamma; got 0.143.", model=limit(strong), dt=0.1429)
    assert np.isfinite(run(limit(strong), dt=0.125, record=[10.0])["covariance"].values).all()


def test_a_start_with_more_directions_than_the_width_is_refused():
    narrow = Transformer(width=2, depth=3, gamma=0.5, feedforward=ReLU())
    refuses("The start spreads in 3 directions, more than width=2 has. Nearest: width=3.", model=narrow)


def test_a_record_that_does_not_fit_the_memory_is_refused(monkeypatch):
    """20 samples of 13 layers, with exits and coordinates, take 19,076 bytes, three quarters of the free memory."""
    monkeypatch.setattr(memory, "available_memory", lambda: 25_435)
    assert run().sizes["depth"] == 13
    monkeypatch.setattr(memory, "available_memory", lambda: 25_434)
    with pytest.raises(InputError, match=re.escape("Nearest: record at most 12 depths, or dtype=")):
        run()
    assert run(record=list(range(12))).sizes["depth"] == 12
    monkeypatch.setattr(memory, "available_memory", lambda: None)
    assert run().sizes["depth"] == 13


GIB = 2**30
GROUPS = {  # files of a control group of 8 GiB with 3 GiB in use, of which 1 GiB can be reclaimed
    "version 2": {"memory.max": 8 * GIB, "memory.current": 3 * GIB, "memory.stat": f"anon 5\ninactive_file {GIB}\n"},
    "version 1": {
        "memory/memory.limit_in_bytes": 8 * GIB,
        "memory/memory.usage_in_bytes": 3 * GIB,
        "memory/memory.stat": f"inactive_file 7\ntotal_inactive_file {GIB}\n",
    },
}


@pytest.mark.parametrize("version", GROUPS)
def test_the_memory_of_a_container_counts(monkeypatch, tmp_path, version):
    (tmp_path / "memory").mkdir()
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    monkeypatch.setattr(memory, "free_in_system", lambda: 64 * GIB)
    assert memory.available_memory() == 64 * GIB
    for name, content in GROUPS[version].items():
        (tmp_path / name).write_text(f"{content}\n")
    assert memory.available_memory() == 6 * GIB


@pytest.mark.parametrize(("name", "threads"), [("chain", 1), ("chain", 2), ("limit", 2)])
def test_ctrl_c_keeps_finished_replicas(monkeypatch, name, threads):
    """It keeps whole chunks from the first on, at least two, with the bits of an unbroken run."""
    model, options = SIMULATIONS[name]
    whole = run(model, samples=40, **options)
    monkeypatch.setattr(replicas, "wait", InterruptAfter(2))
    slow_down(monkeypatch, model)
    with pytest.raises(Interrupted) as caught:
        run(model, samples=40, chunk=3, threads=threads, **options)
    partial = caught.value.partial
    finished = partial.sizes["sample"]
    assert 6 <= finished < 40
    assert finished % 3 == 0
    assert_same_bits(partial, whole.isel(sample=slice(finished)))
    assert partial.attrs["samples"] == finished
    assert str(caught.value) == f"interrupted after {finished} samples"
    xr.testing.assert_identical(partial["label"], whole["label"])


def slow_down(monkeypatch, model):
    """Slow down the chunks of the prepared process, so that Ctrl-C comes before the last has begun."""
    process = engine.process_of(model, start_for(model), None, {})
    kind = type(process.prepare(0))
    quick = kind.run

    def slow(self, *arguments):
        time.sleep(0.05)
        return quick(self, *arguments)

    monkeypatch.setattr(kind, "run", slow)


@pytest.mark.parametrize(("chunks", "finished"), [((), 0), ((0, 7, 21), 14)])
def test_chunks_that_finish_out_of_order_are_cut_to_a_prefix(monkeypatch, chunks, finished):
    """No chunk may be finished; a chunk after a missing one does not count."""
    whole = run(samples=25)
    monkeypatch.setattr(replicas, "ThreadPoolExecutor", pool_that_runs(*chunks))
    monkeypatch.setattr(replicas, "wait", interrupt)
    with pytest.raises(Interrupted) as caught:
        run(samples=25, chunk=7)
    assert_same_bits(caught.value.partial, whole.isel(sample=slice(finished)))
    assert caught.value.partial.sizes["sample"] == finished


def test_an_error_in_a_chunk_is_not_swallowed():
    def fail(part, watch):
        raise ZeroDivisionError(part)

    with pytest.raises(ZeroDivisionError):
        replicas.run_parts(fail, replicas.slices(0, 3, 1), 2, lambda done: None)


@pytest.mark.parametrize(("first", "samples", "chunk"), [(8, 25, 7), (0, 7, 7), (8, 8, 3), (0, 3, 1000)])
def test_slices_hold_every_replica_once_and_in_order(first, samples, chunk):
    parts = replicas.slices(first, samples, chunk)
    assert [k for part in parts for k in range(part.start, part.stop)] == list(range(first, samples))
    assert all(0 < part.stop - part.start <= chunk for part in parts)


@pytest.mark.parametrize(
    ("samples", "threads", "seconds"), [(1, 1, 0.0), (7, 64, 1e3), (9, 2, 1e-3), (1000, 1, 1e-3), (100_003, 2, 1e-7)]
)
def test_trials_and_the_parts_after_them_hold_every_replica_once(monkeypatch, samples, threads, seconds):
    """It holds for any time per replica; all parts but the last begin and end on whole batches."""
    clock, ran = SimpleNamespace(now=10.0), []

    def run_parts(run, parts, threads, show):
        ran.append(parts)
        done = sum(part.stop - part.start for part in parts)
        clock.now += done * seconds
        return done, False

    monkeypatch.setattr(replicas, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    monkeypatch.setattr(replicas, "run_parts", run_parts)
    assert replicas.run_all(None, samples, threads, None, None) == (samples, False)
    *trials, parts = ran
    assert_whole([part for parts in ran for part in parts], samples)
    assert [len(trial) for trial in trials] == [1] * len(trials)
    took = [seconds * (trial.stop - trial.start) for (trial,) in trials]
    assert all(each < replicas.TRIAL_SECONDS for each in took[:-1])
    assert not parts or took[-1] >= replicas.TRIAL_SECONDS
    assert all(part.stop - part.start <= max(LANES, 2 * replicas.CHUNK_SECONDS / seconds) for part in parts)


def assert_whole(parts, samples):
    assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])]
    assert parts[-1].stop == samples
    assert all((part.stop - part.start) % LANES == 0 for part in parts[:-1])


def bars_of(monkeypatch, patience, **settings):
    """Return the bars of one run, with `patience` for `PATIENCE`."""
    bars, make = [], engine.progress_bar
    monkeypatch.setattr(engine, "progress_bar", lambda *arguments: bars.append(make(*arguments)) or bars[-1])
    monkeypatch.setattr(progress, "PATIENCE", patience)
    run(samples=10, chunk=7, **settings)
    return bars


@pytest.fixture
def terminal(monkeypatch):
    """Let standard error count as a terminal."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")


def test_progress_without_terminal_prints_once_a_minute(monkeypatch, capsys):
    """Lines have the time left; with infinite `PATIENCE`, as in worker processes, none is printed."""
    clock = iter([100.0, 100.5, 130.0, 161.0, 170.0, 222.0, 500.0])
    monkeypatch.setattr(progress, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    bar = progress.progress_bar("chain samples", 10_000)
    for done in (4000, 4100.5, 5000.25, 5100, 9000):
        progress.advance(bar, done)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "chain samples: 5,000 of 10,000, about 5 min left",
        "chain samples: 9,000 of 10,000, about 24 s left",
    ]
    monkeypatch.setattr(progress, "PATIENCE", np.inf)
    progress.advance(bar, 9500)
    assert capsys.readouterr() == ("", "")


def test_the_bar_shows_only_after_a_while(monkeypatch, capsys, terminal):
    quick, slow = (bars_of(monkeypatch, patience)[0] for patience in (1000.0, 0.0))
    assert not quick.visible
    assert slow.visible
    assert not slow.progress.live.is_started
    out, err = capsys.readouterr()
    assert out == ""
    assert "━" in err
