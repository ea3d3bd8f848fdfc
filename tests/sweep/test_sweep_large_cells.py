"""Cells that do not fit into the memory are announced before the first cell runs."""

import pytest

import limitformer as lf
from limitformer.sweep import describe
from limitformer.sweep import run as run_module
from limitformer.sweep.describe import too_large

BASE = lf.StochasticTransformer(tokens=2, dim=4, beta=1.0, layers_per_unit_time=10)
SETTINGS = {"samples": 4, "horizon": 0.2}
KEEP = {"moments": True}


def sweep(over, **settings):
    return lf.Sweep(BASE, over=over, simulate=SETTINGS | settings, reduce=KEEP)


def announced(capsys, description, store, **options):
    """Run a sweep in this process, and return the report and the lines about its models."""
    report = lf.run_sweep(description, store, workers=1, threads=1, **options)
    return report, [line for line in capsys.readouterr().err.splitlines() if "fit into the memory" in line]


def test_cell_that_is_too_large_is_announced_before_the_first_cell_runs(tmp_path, capsys, monkeypatch):
    order = []

    def completed(*arguments, real=run_module.completed, **options):
        order.append(capsys.readouterr().err)
        return real(*arguments, **options)

    monkeypatch.setattr(run_module, "completed", completed)
    description = sweep({"tokens": [2, 10**7, 3]})
    report = lf.run_sweep(description, tmp_path / "s.sweep", workers=1, threads=1)
    (before,) = order
    assert "A model does not fit into the memory, and will fail. Cell tokens = 10000000: " in before
    assert (report.done, report.failed, list(report.errors)) == (2, 1, [(1,)])


def test_models_are_counted_once_whatever_the_number_of_seeds(tmp_path, capsys):
    description = sweep({"tokens": [2, 10**7, 2 * 10**7], "seed": [0, 1, 2]})
    report, lines = announced(capsys, description, tmp_path / "s.sweep")
    assert report.failed == 6
    assert len(lines) == 1
    assert lines[0].startswith("2 models do not fit into the memory, and will fail. Cell tokens = 10000000, seed = 0: ")


def test_sweep_of_cells_that_fit_says_nothing(tmp_path, capsys):
    description = sweep({"tokens": [2, 3]})
    assert announced(capsys, description, tmp_path / "s.sweep")[1] == []
    assert announced(capsys, description, tmp_path / "s.sweep")[1] == []
    assert announced(capsys, sweep({"tokens": [2, 10**7]}), tmp_path / "t.sweep", progress=False)[1] == []


@pytest.mark.parametrize("largest", [0, 1])
def test_ends_of_the_axes_of_a_large_grid_are_tried(monkeypatch, largest):
    monkeypatch.setattr(describe, "MOST_MEASURED", 30)
    tokens = [10**7, *range(2, 41)] if largest == 0 else [*range(2, 41), 10**7]
    tried = []
    real = describe.check_memory
    monkeypatch.setattr(describe, "check_memory", lambda *arguments: (tried.append(arguments), real(*arguments)))
    reasons = too_large(sweep({"tokens": tokens, "beta": [0.0, 0.5, 1.0]}))
    assert len(tried) <= 30
    assert len(reasons) == 3
    assert all(reason.startswith("Cell tokens = 10000000, beta = ") for reason in reasons)
