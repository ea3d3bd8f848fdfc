"""Halted kernels return within a layer, and report the finished replicas."""

import threading

import numpy as np
import pytest

import limitformer as lf
from limitformer.numerics.watch import DONE, HALT, WHOLE, halt, new_watch
from limitformer.sampling import replicas
from limitformer.simulation.processes import process_of
from limitformer.sphere.pair.chain import BLOCK

ENDLESS = 10**15  # layers
START = np.array([[1.0, 0.2], [0.2, 1.0]])
PARTS = {"attention": lf.ShapedAttention(tau0=1.0), "feedforward": lf.ShapedReLU(c_plus=0.0, c_minus=-1.0)}
DEEP = lf.Transformer(width=8, depth=ENDLESS, gamma=1e-9, **PARTS)
PLAIN = lf.Transformer(width=8, depth=8, gamma=0.1, **PARTS)
ONE_MATRIX = lf.Transformer(width=8, depth=ENDLESS, gamma=1e-9, feedforward=lf.OneMatrix(activation=lf.ReLU()))
PAIR = lf.StochasticTransformer(tokens=2, dim=4, beta=1.0, layers_per_unit_time=10**6)
SPHERE = {"horizon": ENDLESS / 10**6, "keep": "outcome"}
CASES = {
    "chain": (DEEP, START, [0, ENDLESS], {}),
    "one matrix": (ONE_MATRIX, START, [0, ENDLESS], {}),
    "limit": (lf.limit(PLAIN), START, [0.0, 1.0], {"dt": 5e-10}),
    "limit, Euler-Maruyama": (lf.limit(PLAIN), START, [0.0, 1.0], {"dt": 5e-10, "step": "euler-maruyama"}),
    "overlap": (PAIR, None, [0.0, 1e9], SPHERE),
    "gram": (PAIR, None, [0.0, 1e9], {**SPHERE, "method": "gram"}),
    "coordinates": (PAIR, None, [0.0, 1e9], {**SPHERE, "method": "coordinates"}),
}


@pytest.mark.parametrize(("model", "start", "record", "options"), CASES.values(), ids=list(CASES))
def test_halted_kernel_returns_early(model, start, record, options):
    process = process_of(model, start, np.array(record), dict(options))
    prepared, outputs, watch = process.prepare(0), process.outputs(8), new_watch()
    prepared.run(0, process.outputs(0), new_watch())  # compiled beforehand
    runner = threading.Thread(target=prepared.run, args=(0, outputs, watch), daemon=True)
    runner.start()
    while watch[DONE] == 0 and runner.is_alive():
        pass
    halt(watch)
    runner.join(timeout=60)
    assert not runner.is_alive()
    assert watch[WHOLE] == 0
    assert 0 < watch[DONE] < 1e-3


def test_ctrl_c_in_the_first_group_returns_no_samples(monkeypatch):
    """The engine halts its kernels; otherwise it would wait for months."""

    def interrupt(pending, **settings):
        raise KeyboardInterrupt

    monkeypatch.setattr(replicas, "wait", interrupt)
    watches = []

    def work():
        with pytest.raises(lf.Interrupted) as caught:
            lf.simulate(DEEP, START, samples=3, seed=0, record=[0, ENDLESS])
        watches.append(caught.value.partial.sizes["sample"])

    runner = threading.Thread(target=work, daemon=True)
    runner.start()
    runner.join(timeout=120)
    assert watches == [0]


def test_halt_keeps_outcomes_of_finished_replicas():
    """The first block of pairs is finished before the halt: its outcomes have the bits of a complete run."""
    model = lf.StochasticTransformer(tokens=2, dim=4, beta=1.0, layers_per_unit_time=100)
    process = process_of(model, None, np.array([400.0]), {"horizon": 400.0, "keep": "outcome"})
    whole, part, watch = process.outputs(BLOCK), process.outputs(2 * BLOCK), new_watch()
    process.prepare(0).run(0, whole, new_watch())
    part["outcome"][:] = -1
    runner = threading.Thread(target=process.prepare(0).run, args=(0, part, watch), daemon=True)
    runner.start()
    while watch[WHOLE] == 0 and runner.is_alive():
        pass
    halt(watch)
    runner.join(timeout=60)
    assert watch[WHOLE] in (BLOCK, 2 * BLOCK)
    np.testing.assert_array_equal(part["outcome"][:BLOCK], whole["outcome"])
    assert (part["outcome"][int(watch[WHOLE]) :] == -1).all()


def test_unfinished_part_ends_the_count():
    parts = replicas.slices(0, 30, 10)
    watches = np.array([[0.0, 10, 10], [1.0, 8, 9.5], [0.0, 10, 10]])
    assert replicas.whole_replicas(parts, watches) == 18
    assert HALT == 0
