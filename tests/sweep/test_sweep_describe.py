"""`Sweep`: its cells, their seeds, and refusals before any work."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

import limitformer as lf
from limitformer.base.errors import InputError
from limitformer.models import equicorrelated
from limitformer.sweep.describe import seed_of, start_of
from limitformer.sweep.run import compute_sweep
from sweep_grids import GRID, NETWORK, PAIR, sweep, values_equal

MOMENTS = {"moments": True}
TABLE = {"tokens": 3, "correlation": 0.2, "variance": 2.0}


def computed(*arguments, **options):
    return compute_sweep(sweep(*arguments, **options), threads=1, progress=False)


def network(over, **simulate):
    settings = {"samples": 6, "seed": 2, "start": TABLE, **simulate}
    return lf.Sweep(NETWORK, over=over, simulate=settings, reduce=MOMENTS)


def seeds(description):
    return [seed_of(description, cell) for cell in description.cells()]


# Cells.


def test_cells_are_the_product_of_the_axes_the_last_one_fastest():
    description = sweep()
    assert description.shape == (2, 3)
    cells = list(description.cells())
    assert [cell.index for cell in cells] == list(np.ndindex(2, 3))
    assert [(cell.model.dim, cell.model.beta) for cell in cells] == list(product(*GRID.values()))
    assert all(replace(cell.model, dim=PAIR.dim, beta=PAIR.beta) == PAIR for cell in cells)


def test_dotted_names_set_fields_of_parts_all_at_once():
    over = {"attention.tau0": [0.5, 2.0], "gamma": [0.1, 0.4]}
    models = [cell.model for cell in network(over).cells()]
    assert [(model.attention.tau0, model.gamma) for model in models] == list(product(*over.values()))
    assert all(model.width == NETWORK.width for model in models)


# Seeds.


def test_cell_does_not_depend_on_the_grid():
    whole = computed()
    for dim, beta in product(*GRID.values()):
        alone = computed({"beta": [beta], "dim": [dim]}, replace(PAIR, dim=9, beta=7.0))
        for name in whole.data_vars:
            assert values_equal(alone[name].isel(beta=0, dim=0), whole[name].sel(dim=dim, beta=beta))


@pytest.mark.parametrize(
    ("base", "over", "simulate"),
    [
        (NETWORK, {"start.correlation": [0.1, 0.2, 0.7]}, {"start": TABLE}),
        (PAIR, {"seed": [3, 1, 2**62]}, {"horizon": 1.0}),
    ],
    ids=lambda value: str(value)[:40],
)
def test_cell_does_not_depend_on_other_starts_and_seeds(base, over, simulate):
    (name, values), settings = *over.items(), {"samples": 6, **simulate}
    whole = compute_sweep(lf.Sweep(base, over=over, simulate=settings), threads=1, progress=False)
    for k, value in enumerate(values):
        one = lf.Sweep(base, over={name: [value]}, simulate=settings)
        alone = compute_sweep(one, threads=1, progress=False)
        for result in whole.data_vars:
            assert values_equal(alone[result][0], whole[result][k])


def test_seeds_of_cells_differ():
    found = seeds(sweep({**GRID, "seed": [1, 2], "start.overlap": [0.1, 0.2]}))
    assert len(set(found)) == len(found) == 24
    assert all(0 <= seed < 2**63 for seed in found)
    assert set(seeds(sweep(seed=2))).isdisjoint(seeds(sweep(seed=3)))
    assert seeds(sweep(seed=np.int64(2))) == seeds(sweep(seed=2))


def test_the_seed_as_an_axis_is_the_seed_of_the_sweep():
    whole = computed({"seed": [5, 9], **GRID})
    for seed in (5, 9):
        one = computed(seed=seed)
        for name in one.data_vars:
            assert values_equal(whole[name].sel(seed=seed), one[name])


# Starts, and what is simulated.


def test_fields_of_the_start_are_axes():
    description = network({"start.correlation": [0.0, 0.4], "start.tokens": [2, 4]})
    for cell in description.cells():
        start = start_of(description, cell)
        correlation, tokens = cell.changes["start.correlation"], cell.changes["start.tokens"]
        expected = equicorrelated(tokens=tokens, correlation=correlation, variance=2.0)
        np.testing.assert_array_equal(start.covariance, expected.covariance)


def test_option_as_limit_simulates_the_limit():
    description = sweep({"beta": [0.5, 1.0]}, keep={"samples": True}, **{"as": "limit"}, dt=0.05)
    data = compute_sweep(description, threads=1, progress=False)
    for k, cell in enumerate(description.cells()):
        settings = {"samples": 12, "seed": seed_of(description, cell), "horizon": 1.0, "dt": 0.05, "record": [1.0]}
        direct = lf.simulate(lf.limit(cell.model), threads=1, **settings)
        assert values_equal(data["overlap"][k], direct["overlap"])
        chain = lf.simulate(cell.model, threads=1, **{name: value for name, value in settings.items() if name != "dt"})
        assert not values_equal(data["overlap"][k], chain["overlap"])


# Refusals before any work.


@pytest.fixture
def no_work(monkeypatch):
    monkeypatch.setattr("limitformer.sweep.describe.simulate", lambda *_, **__: pytest.fail("work was done"))


REFUSED = {
    "no model": (lambda: lf.Sweep(None, over=GRID, simulate={"samples": 1}), "A sweep needs a model; got NoneType."),
    "unknown field": (
        lambda: sweep({"betta": [1.0]}),
        "Cell betta = 1.0: StochasticTransformer has no field ",
    ),
    "part that is absent": (
        lambda: network({"feedforward.hidden": [1]}),
        "Cell feedforward.hidden = 1: Transformer has no part 'feedforward' to set hidden of; it is None.",
    ),
    "empty axis": (lambda: sweep({"dim": [3], "beta": []}), "The axis 'beta' has no value; a grid needs at least one"),
    "refused value": (
        lambda: sweep({"dim": [4, 1], "beta": [0.5]}),
        "Cell dim = 1, beta = 0.5: dim must be at least 2; got 1.",
    ),
    "common seed": (lambda: sweep(common_seed="no"), "common_seed must be true or false; got 'no'."),
    "start": (
        lambda: network({"start.corelation": [0.1]}),
        "Cell start.corelation = 0.1: A start has no field corelation; it has tokens, correlation, variance.",
    ),
    "no horizon": (
        lambda: lf.Sweep(PAIR, over=GRID, simulate={"samples": 1}),
        "Cell dim = 4, beta = 0.0: A model on the sphere needs a horizon: how many units of time.",
    ),
    "option": (lambda: sweep(horzon=1.0), "Cell dim = 4, beta = 0.0: A chain on the sphere has no option horzon; it"),
    "reserved": (lambda: sweep(threads=2, chunk=8), "A sweep sets chunk, threads itself; leave it out."),
    "record": (lambda: sweep(record="first"), 'record must be "last", "all" or a list; got \'first\'.'),
    "reduction": (lambda: sweep(keep={"moment": True}), "A sweep's keep has no field 'moment'. Nearest: moments."),
    "coverage": (lambda: sweep(keep={"outcomes": {"level": 1.0}}), "outcomes must be true or have a level in (0, 1)"),
    "ends": (
        lambda: sweep(keep={"stopping_times": {"largest": "x"}}),
        "stopping_times must be true or have numbers smallest < largest; got {'largest': 'x'}.",
    ),
    "shapes that differ": (
        lambda: network({"depth": [2, 3]}, record="all"),
        "Cell depth = 3 has 4 points of 3 tokens, and the first cell 3 of 3: they do not fit one array.",
    ),
}


@pytest.mark.parametrize(("make", "says"), REFUSED.values(), ids=list(REFUSED))
def test_sweep_is_refused_before_any_work(no_work, make, says):
    with pytest.raises(InputError) as raised:
        make()
    assert str(raised.value).startswith(says)
    assert "\n" not in str(raised.value)
