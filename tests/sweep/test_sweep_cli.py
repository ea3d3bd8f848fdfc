"""`limitformer sweep`: results, printed tables, files and refusals.

Runs are in this process, for speed; `test_sweep_processes.py` tests Ctrl-C.
"""

import csv
import re
from importlib import import_module
from itertools import product

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

import limitformer as lf
from limitformer.cli.app import app
from limitformer.sweep.show import MOST_CURVES, interval, picture, selected
from sweep_grids import GRID, assert_same_bits, cell_path, sweep
from sweep_grids import run as run_here

work = import_module("limitformer.sweep.run")
TEXT = """
[model]
kind = "StochasticTransformer"
tokens = 2
dim = 4
beta = 1.0
layers_per_unit_time = 20
[over]
dim = [4, 6]
beta = [0.0, 0.5, 1.0]
[simulate]
samples = 12
horizon = 1.0
seed = 1
[keep]
moments = true
outcomes = true
samples = true
"""


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Run the command line here, on a wide terminal without colours; the example lies in sweep.toml."""
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sweep.toml").write_text(TEXT)
    runner = CliRunner()
    return lambda *arguments: runner.invoke(app, ["sweep", *(str(argument) for argument in arguments)])


@pytest.fixture
def store(tmp_path):
    path = tmp_path / "here.sweep"
    run_here(sweep(), path)
    return path


@pytest.fixture
def refused(run, tmp_path):
    """Check a refusal: exit code 2, one line on stderr, nothing on stdout, no file changed."""

    def check(*arguments, says):
        before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
        result = run(*arguments)
        assert result.exit_code == 2, result.output
        assert result.stdout == ""
        assert re.fullmatch(r"Error: .*\n", result.stderr)
        assert says in result.stderr
        assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()} == before

    return check


def rows(output):
    """Return the cells of a table as text, its head first."""
    lines = [line for line in output.splitlines() if line[:1] in "│┃"]
    return [[cell.strip() for cell in re.split("[│┃]", line)[1:-1]] for line in lines if line]


# run.


def test_run_gives_the_bits_of_python(run, store):
    result = run("run", "sweep.toml", "--store", "s.sweep", "--workers", 1)
    assert (result.exit_code, result.stdout) == (0, "6 of 6 cells are done: s.sweep\n")
    assert_same_bits("s.sweep", store)
    result = run("run", "sweep.toml", "--store", "s.sweep", "--workers", 1)
    assert (result.exit_code, result.stdout) == (0, "6 of 6 cells are done, 6 of them before: s.sweep\n")


def test_run_extends_with_the_option_extend(run, refused, tmp_path):
    run("run", "sweep.toml", "--store", "s.sweep", "--workers", 1)
    (tmp_path / "sweep.toml").write_text(TEXT.replace("[4, 6]", "[4, 6, 8]"))
    refused(
        "run", "sweep.toml", "--store", "s.sweep", "--workers", 1, says="s.sweep has no dim = 8. Nearest: extend it"
    )
    result = run("run", "sweep.toml", "--store", "s.sweep", "--workers", 1, "--extend")
    assert (result.exit_code, result.stdout) == (0, "9 of 9 cells are done, 6 of them before: s.sweep\n")


def test_run_lists_failed_cells_and_exits_with_one(run, store, tmp_path, monkeypatch):
    honest = work.compute

    def compute(description, cell, **options):
        if cell.model.beta == 0.5:
            raise RuntimeError("[bold]no[/bold]\nreally")
        return honest(description, cell, **options)

    with monkeypatch.context() as patch:
        patch.setattr(work, "compute", compute)
        result = run("run", "sweep.toml", "--store", "s.sweep", "--workers", 1)
    assert (result.exit_code, result.stdout) == (1, "4 of 6 cells are done: s.sweep\n")
    assert result.stderr.startswith("2 cells have failed:\n  (0, 1): RuntimeError: [bold]no[/bold]")
    assert "  (1, 1): RuntimeError" in result.stderr
    status = run("status", "s.sweep").stdout
    assert dict(rows(status))["failed"] == "2"
    assert dict(rows(status))["done"] == "4 (66.7%)"
    assert "RuntimeError: [bold]no[/bold]" in status
    kept = run("run", "sweep.toml", "--store", "s.sweep", "--workers", 1, "--no-retry-failed")
    assert (kept.exit_code, kept.stdout) == (1, "4 of 6 cells are done, 4 of them before: s.sweep\n")
    again = run("run", "sweep.toml", "--store", "s.sweep", "--workers", 1)
    assert (again.exit_code, again.stdout) == (0, "6 of 6 cells are done, 4 of them before: s.sweep\n")
    assert_same_bits("s.sweep", store)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--workers", "0"), "workers must be at least 1; got 0."),
        (("--dask", "tcp://127.0.0.1:1", "--workers", "2"), "--workers would change nothing: Dask has its own."),
        (("--dask", "tcp://nowhere"), "No Dask scheduler answers at tcp://nowhere: missing port number"),
        (("--store", "sweep.toml"), "sweep.toml is there and is not the store of a sweep. Choose another folder."),
        (("--store", "s3://a/b"), "s3:/a/b is an address, and only paths of this machine can be used."),
    ],
    ids=str,
)
def test_run_refuses_in_one_line(refused, arguments, says):
    refused("run", "sweep.toml", *(() if "--store" in arguments else ("--store", "s.sweep")), *arguments, says=says)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (
            "beta = [0.0, 0.5, 1.0]",
            "betta = [1.0]",
            "sweep.toml: Cell dim = 4, betta = 1.0: StochasticTransformer has no field 'betta'. Near",
        ),
        ("[4, 6]", "[4, 1]", "sweep.toml: Cell dim = 1, beta = 0.0: dim must be at least 2; got 1."),
        ("[4, 6]", "[]", "sweep.toml: The axis 'dim' has no value"),
        ("[over]", "[over", "sweep.toml is not TOML: "),
    ],
    ids=str,
)
def test_run_refuses_a_bad_file_in_one_line(refused, tmp_path, run, old, new, says):
    (tmp_path / "sweep.toml").write_text(TEXT.replace(old, new))
    refused("run", "sweep.toml", "--store", "s.sweep", says=says)


# status.


# show.


def test_show_prints_the_data(run, store):
    head, *found = rows(run("show", store, "--variable", "overlap_mean").stdout)
    assert head == ["dim", "beta", "overlap_mean"]
    data = lf.load_sweep(store)["overlap_mean"].squeeze("point")
    expected = [[f"{d:g}", f"{b:g}", f"{float(data.sel(dim=d, beta=b)):.6g}"] for d, b in product(*GRID.values())]
    assert found == expected


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--variable", "overlap_men"), "The sweep has no field 'overlap_men'. Nearest: overlap_mean, "),
        (("--variable", "overlap_mean", "--at", "dim=5"), "dim has no value 5; it has 4, 6."),
        (
            ("--variable", "overlap_mean", "--at", "dim"),
            "--at must be NAME=VALUE, NAME one of dim, beta, point",
        ),
        (
            ("--variable", "overlap_mean", "--at", "gamma=1"),
            "--at must be NAME=VALUE, NAME one of dim, beta, point",
        ),
    ],
    ids=str,
)
def test_show_refuses_in_one_line(refused, store, arguments, says):
    refused("show", store, *arguments, says=says)


def drawn(path):
    """Return the number of colours in a picture."""
    with Image.open(path) as image:
        return len(image.convert("RGB").getcolors(maxcolors=2**24))


def test_show_draws_curves_and_maps(run, store, tmp_path):
    result = run("show", store, "--variable", "overlap_mean", "--out", "curves.png")
    assert result.exit_code == 0, result.output
    assert result.stdout.endswith("Wrote curves.png\n")
    over = {"dim": list(range(3, 4 + MOST_CURVES)), "beta": [0.1 * k for k in range(9)]}
    run_here(sweep(over, keep={"moments": True}), tmp_path / "map.sweep")
    assert run("show", "map.sweep", "--out", "map.png").exit_code == 0
    assert drawn("curves.png") > 20
    assert drawn("map.png") > 40
    words = ("show", store, "--variable", "probability", "--at", "dim=4", "--out", "words.svg")
    assert run(*words).exit_code == 0
    assert "<svg" in (tmp_path / "words.svg").read_text()


@pytest.mark.parametrize(
    ("variable", "low", "high"),
    [
        (
            "overlap_mean",
            lambda data: data.overlap_mean - data.overlap_error,
            lambda data: data.overlap_mean + data.overlap_error,
        ),
        ("probability", lambda data: data.low, lambda data: data.high),
        ("overlap_variance", None, None),
    ],
)
def test_pictures_have_the_interval_of_a_mean_or_probability(store, variable, low, high):
    data = lf.load_sweep(store)
    at = ["dim=4", *(["outcome=antipodal pair"] if variable == "probability" else [])]
    within = interval(data, variable, at)
    figure = picture(selected(data, variable, at), within)
    assert "dim = 4" in figure.axes[0].get_title()
    if low is None:
        assert within is None
        assert figure.axes[0].collections[:] == []
        return
    expected = [selected(data.assign(edge=edge(data)), "edge", at) for edge in (low, high)]
    assert within[0].values == pytest.approx(expected[0].values)
    assert within[1].values == pytest.approx(expected[1].values)
    for band, lower in zip(figure.axes[0].collections, np.atleast_2d(within[0].values.T), strict=True):
        assert np.isin(lower.astype(np.float32), band.get_paths()[0].vertices[:, 1].astype(np.float32)).all()


# export.


@pytest.mark.parametrize("name", ["out.nc", "out.zarr"])
def test_export_has_all_arrays(run, store, name):
    result = run("export", store, name)
    assert (result.exit_code, result.stdout) == (0, f"Wrote {name}\n")
    data, ours = lf.load(name), lf.load_sweep(store)
    assert set(data.variables) == set(ours.variables)
    for variable in ours.variables:
        assert data[variable].dims == ours[variable].dims
        assert data[variable].values.tolist() == ours[variable].values.tolist()
    assert data.attrs["sweep"] == ours.attrs["sweep"]


def test_export_writes_a_table(run, tmp_path):
    path = tmp_path / "s.sweep"
    run_here(sweep(keep={"moments": True}), path)
    assert run("export", path, "out.csv").exit_code == 0
    with open("out.csv", newline="") as file:
        found = list(csv.DictReader(file))
    data = lf.load_sweep(path)
    assert len(found) == 6
    for row in found:
        cell = data.sel(dim=int(row["dim"]), beta=float(row["beta"])).isel(point=0)
        for name in ("overlap_mean", "overlap_variance", "overlap_error"):
            assert float(row[name]) == float(cell[name])
        assert int(row["status"]) == 1


def test_show_and_export_name_damaged_cells_and_warn_of_mixed_code(run, refused, store, tmp_path, monkeypatch):
    monkeypatch.setattr("limitformer.sweep.store.origin", lambda: "limitformer 9.9")
    cell_path(store, (0, 0)).unlink()
    run_here(sweep(), store)
    line = f"Careful: 2 different codes made the cells of {store}: limitformer 0.*; limitformer 9.9.\n"
    for arguments in (("show", store, "--variable", "overlap_mean"), ("export", store, "a.nc")):
        assert re.fullmatch(line, run(*arguments).stderr)
    cell_path(store, (0, 0)).write_bytes(b"junk")
    refused(
        "show", store, says=f"{store} has damaged cells. Nearest: delete them and run the sweep again: {store}/cells/"
    )
