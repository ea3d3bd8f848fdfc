"""Phase diagrams: each cell is a separate simulation, the exact column is that of `overlap`, the picture shows both.

Cells have few layers and samples where only equality of numbers matters.
"""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from matplotlib.collections import QuadMesh
from matplotlib.container import ErrorbarContainer

import limitformer as lf
from limitformer.base.errors import InputError
from limitformer.plot import style
from limitformer.sweep.describe import model_seed as cell_seed
from limitformer.sweep.grid import cells
from limitformer.sweep.phase import phase_diagram
from limitformer.sweep.show import FINE, MOST_CURVES, draw

BASE = lf.StochasticTransformer(tokens=2, dim=4, beta=1.0, layers_per_unit_time=20)
HYBRID = lf.HybridTransformer(tokens=2, dim=4, beta=1.0, epsilon=1.2, layers_per_unit_time=20)
GRID = {"dim": [4, 6], "beta": [0.5, 1.0, 2.5]}
VARIABLES = ("probability", "low", "high")


def cells_of(base, over):
    return [cell.model for cell in cells(base, over)]


def diagram(base=BASE, over=GRID, **options):
    return phase_diagram(base, over, **{"horizon": 3.0, "samples": 40, "seed": 3, "threads": 1, **options})


def assert_same_bits(one, other):
    for name in (*VARIABLES, "exact"):
        np.testing.assert_array_equal(one[name].values, other[name].values)


@pytest.fixture
def no_work(monkeypatch):
    monkeypatch.setattr("limitformer.sweep.describe.simulate", lambda *_, **__: pytest.fail("work was done"))


# The simulated numbers.


@pytest.mark.parametrize(("base", "early_stop"), [(BASE, None), (HYBRID, 1e-3), (replace(BASE, tokens=3), 1e-3)])
def test_a_cell_is_a_simulation_with_its_own_seed(base, early_stop):
    options = {"horizon": 3.0, "tolerance": 0.02, "early_stop": early_stop}
    data = diagram(base, level=0.8, **options)
    for dim, beta in product(*GRID.values()):
        model = replace(base, dim=dim, beta=beta)
        samples = lf.simulate(model, samples=40, seed=cell_seed(3, model), record=[3.0], **options)
        direct = lf.outcomes(samples, level=0.8).isel(time=0)
        for name in VARIABLES:
            np.testing.assert_array_equal(data[name].sel(dim=dim, beta=beta).values, direct[name].values)


def test_diagram_from_a_store_has_the_order_of_its_caller(tmp_path):
    """A store keeps the order in which its values were added."""
    grid = {"dim": [6, 4], "beta": [4.0, 1.0]}
    diagram(store=tmp_path / "s.sweep", over={name: sorted(values) for name, values in grid.items()})
    again = diagram(store=tmp_path / "s.sweep", over=grid)
    assert again["beta"].values.tolist() == grid["beta"]
    assert_same_bits(again, diagram(over=grid))


def deviations(data, exact):
    """Return (simulated − exact)/(binomial standard error) of every cell."""
    error = np.sqrt(exact * (1 - exact) / data.attrs["samples"])
    return (data["probability"].sel(outcome="antipodal pair").values - exact) / error


@pytest.mark.slow
def test_simulated_and_exact_agree_and_a_wrong_twin_does_not():
    """At L = 1000; 100 000 samples of two of these cells are within one standard error."""
    base = replace(BASE, layers_per_unit_time=1000)
    over = {"dim": [3, 4], "beta": [1.5, 2.5]}
    data = phase_diagram(base, over, horizon=60.0, samples=2000, seed=1)
    assert (data["probability"].sel(outcome="unresolved").values == 0).all()
    assert np.abs(deviations(data, data["exact"].values)).max() < 4
    twin = [float(lf.overlap(replace(cell, dim=cell.dim + 1)).antipodal_probability()) for cell in cells_of(base, over)]
    assert np.abs(deviations(data, np.reshape(twin, (2, 2)))).max() > 4


# The exact numbers.


@pytest.mark.parametrize(("base", "over"), [(BASE, GRID), (HYBRID, {"epsilon": [1.05, 1.3], "beta": [1.0, 2.0]})])
def test_exact_column_is_that_of_overlap(base, over):
    data = diagram(base, over)
    expected = [float(lf.overlap(model).antipodal_probability()) for model in cells_of(base, over)]
    assert data["exact"].values.ravel().tolist() == expected
    assert max(expected) > 0.01


def test_model_that_overlap_refuses_is_simulated():
    """β = 151 is beyond the range of `overlap` for the hybrid model; other cells are not affected."""
    data = diagram(HYBRID, {"beta": [1.0, 151.0]})
    assert np.isnan(data["exact"].values).tolist() == [False, True]
    assert np.isfinite(data["probability"].values).all()


# Any field can be an axis.


# What is refused, before any work.


@pytest.mark.parametrize(
    ("over", "says"),
    [
        ({"dim": [4, 5], "beta": [1.0, -301.0]}, "Cell dim = 4, beta = -301.0: beta must be at least -300; got -301."),
        ({"layers_per_unit_time": [20, 7]}, "Cell layers_per_unit_time = 7: horizon must be a whole number of layers"),
        ({"width": [3]}, "Cell width = 3: StochasticTransformer has no field 'width'. It has tokens, dim, beta, "),
        ({"beta": 1.0}, "The axis 'beta' must be a list of values; got 1.0."),
        ({"beta": {1.0, 2.0}}, "The axis 'beta' must be a list of values; got {1.0, 2.0}."),
        ({"query_key": [None, (np.eye(4), np.eye(4))]}, "The axis 'query_key' must be numbers or words; got list."),
    ],
    ids=str,
)
def test_bad_axis_before_any_work(no_work, over, says):
    with pytest.raises(InputError) as raised:
        diagram(over=over, horizon=0.5)
    assert str(raised.value).startswith(says)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"horizon": 0.33}, "Cell dim = 4, beta = 0.5: horizon must be a whole number of layers"),
        ({"samples": 0}, "samples must be at least 1; got 0."),
        ({"tolerance": 0.0}, r"tolerance must lie in (0, 0.5); got 0.0."),
        ({"early_stop": 0.0}, r"early_stop must lie in (0, 1) or be None; got 0.0."),
        ({"level": 1.0}, "level must lie in (0, 1); got 1.0."),
        ({"threads": 0}, "threads must be at least 1; got 0."),
        ({"seed": 2**63}, "seed must be a whole number from 0 to 2**63 - 1; got 9223372036854775808."),
    ],
    ids=str,
)
def test_bad_option_before_any_work(no_work, options, says):
    with pytest.raises(InputError) as raised:
        diagram(**options)
    assert str(raised.value).startswith(says)


# The picture.


def picture(data):
    """Draw a diagram and return its axes and figure."""
    with style():
        figure = draw(data)
    return figure.axes[0], figure


def curves(panel):
    return [container for container in panel.containers if isinstance(container, ErrorbarContainer)]


def labels(panel):
    return [text.get_text() for text in panel.get_legend().get_texts()]


def exact_lines(panel, points):
    """Return the lines without markers that have `points` points."""
    return [line for line in panel.lines if line.get_marker() == "None" and len(line.get_xdata()) == points]


def test_curves_points_and_intervals_are_the_data():
    data = diagram()
    panel, _ = picture(data)
    assert labels(panel) == ["exact, L → ∞", "d = 4", "d = 6"]
    assert len(curves(panel)) == 2
    for dim, curve in zip(GRID["dim"], curves(panel), strict=True):
        one = data.sel(dim=dim, outcome="antipodal pair")
        points, _, (bars,) = curve.lines
        np.testing.assert_allclose(points.get_xdata(), GRID["beta"])
        np.testing.assert_allclose(points.get_ydata(), one["probability"])
        ends = np.array(bars.get_segments())[..., 1]
        np.testing.assert_allclose(ends, np.stack([one["low"], one["high"]], -1), atol=1e-15)


def test_exact_curves_are_fine_and_end_in_the_exact_column():
    data = diagram()
    panel, _ = picture(data)
    lines = exact_lines(panel, FINE)
    assert len(lines) == 2
    for dim, line in zip(GRID["dim"], lines, strict=True):
        one = data.sel(dim=dim)
        np.testing.assert_allclose(line.get_ydata()[[0, -1]], one["exact"].values[[0, -1]])
        middle = np.argmin(np.abs(line.get_xdata() - 1.0))
        at = replace(BASE, dim=dim, beta=float(line.get_xdata()[middle]))
        assert line.get_ydata()[middle] == float(lf.overlap(at).antipodal_probability())


def wide(over=None):
    """Return a diagram that is drawn as a map: both axes have more than `MOST_CURVES` values."""
    over = over or {"dim": [12 - k for k in range(MOST_CURVES + 1)], "beta": [0.5 * k for k in range(9)]}
    return diagram(replace(BASE, tokens=3), over, samples=8, horizon=0.5)


def test_map_has_every_cell_in_its_place():
    data = wide()
    data["probability"][:] = np.random.Generator(np.random.Philox(3)).uniform(size=data["probability"].shape)
    panel, figure = picture(data)
    (mesh,) = (artist for artist in panel.collections if isinstance(artist, QuadMesh))
    shown = data["probability"].sel(outcome="antipodal pair").sortby("dim").transpose("dim", "beta")
    np.testing.assert_array_equal(np.asarray(mesh.get_array()).reshape(shown.shape), shown.values)
    assert (panel.get_xlabel(), panel.get_ylabel()) == ("inverse temperature β", "dimension d")
    assert figure.axes[1].get_ylabel() == "probability of an antipodal pair"
    assert mesh.get_clim() == (0, 1)
