"""`limitformer phase`: grids of numbers, output and files."""

import re
from decimal import Decimal
from math import isfinite

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import limitformer as lf
from limitformer.base.errors import InputError
from limitformer.cli.phase import parse_counts, parse_grid
from limitformer.sweep.phase import phase_diagram

SMALL = ("--layers", "20", "--horizon", "2", "--samples", "40", "--threads", "1")


@pytest.fixture
def phase(run):
    """Run a cheap phase diagram; the given options come last and override."""
    return lambda *arguments: run("phase", *SMALL, *arguments)


def rows(table):
    """Return the cells of a table's rows as text."""
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in table.splitlines() if line[:1] == "│"]


# Grids of numbers.


@st.composite
def ranges(draw):
    """Draw (start, count, step, distance of the end beyond the last value) in decimals."""
    unit = Decimal(1).scaleb(-draw(st.integers(0, 6)))
    start, step = draw(st.integers(-1000, 1000)) * unit, draw(st.integers(1, 500)) * unit
    return start, draw(st.integers(1, 40)), step, step * draw(st.integers(0, 9)) / 10


def as_text(start, count, step, beyond):
    return f"{start:f}:{start + (count - 1) * step + beyond:f}:{step:f}"


@given(ranges())
def test_a_range_holds_its_ends_and_all_between(case):
    start, count, step, beyond = case
    values = parse_grid("beta", as_text(*case))
    assert values == [float(start + k * step) for k in range(count)]
    assert (np.diff(values) > 0).all()
    if beyond == 0:
        assert values[-1] == float(start + (count - 1) * step)


def parsed(text):
    """Return the values, or the error message."""
    try:
        return parse_grid("beta", text), None
    except InputError as error:
        return None, str(error)


@given(st.text("0123456789:,.e+-_ naif", max_size=12))
def test_any_text_is_finite_numbers_or_refused_in_one_line(text):
    values, message = parsed(text)
    assert (values is None) != (message is None)
    if message is not None:
        assert message.startswith("--beta ")
        assert repr(text) in message
        assert "\n" not in message
    if values is not None:
        assert 0 < len(set(values)) == len(values)
        assert all(type(value) is float and isfinite(value) for value in values)


def test_tenths_are_tenths():
    """In doubles 3·0.1 is not 0.3, and the cell would have another seed."""
    assert parse_grid("beta", "0:0.5:0.1") == [0.0, 0.1, 0.2, 0.3, 0.4, 0.5]
    assert parse_grid("epsilon", "0:4e-15:1e-15") == [0.0, 1e-15, 2e-15, 3e-15, 4e-15]
    assert parse_counts("dim", "4:10:3,11,1e3") == [4, 7, 10, 11, 1000]


# The table, the data and the picture of a phase diagram.


def test_table_is_the_data(phase, tmp_path):
    out = tmp_path / "new" / "out"
    result = phase("--dim", "4,5", "--beta", "0.5:2.5:1", "--seed", 3, "--out", out)
    assert result.exit_code == 0, result.output
    assert {path.name for path in out.iterdir()} == {"phase.png", "phase.pdf", "phase.nc"}
    assert f"Wrote {out / 'phase.png'}, {out / 'phase.pdf'}, {out / 'phase.nc'}" in result.stdout
    data = lf.load(out / "phase.nc")
    assert data["exact"].dims == ("tokens", "dim", "beta")
    header = ("dim", "beta", "single", "antipodal", "95 % interval", "unresolved", "exact")
    assert re.search(r" ┃ +".join(header), result.stdout)
    cells = [data.sel(tokens=2, dim=dim, beta=beta) for dim in (4, 5) for beta in (0.5, 1.5, 2.5)]
    expected = [
        [
            *(f"{one.dim.item()}", f"{one.beta.item()}"),
            *(f"{p:.4f}" for p in one["probability"].values[:2]),
            f"{one['low'].values[1]:.4f} … {one['high'].values[1]:.4f}",
            f"{one['probability'].values[2]:.4f}",
            f"{one['exact'].item():.4f}",
        ]
        for one in cells
    ]
    assert rows(result.stdout) == expected
    assert "tokens = 2, 40 samples a cell, T = 2" in result.stdout
    with Image.open(out / "phase.png") as picture:
        assert picture.format == "PNG"
        assert min(picture.size) > 400
        assert len(picture.convert("RGB").getcolors(maxcolors=2**24)) > 20


@pytest.mark.parametrize(
    ("options", "base", "over"),
    [
        (
            ("--sigma", "0.5", "--values", "rademacher", "--attention", "unnormalized", "--tokens", "3"),
            {"sigma": 0.5, "values": "rademacher", "attention": "unnormalized"},
            {"tokens": [3]},
        ),
        (("--epsilon", "0.5,1.5"), {}, {"epsilon": [0.5, 1.5]}),
        (
            ("--query-key", "gaussian", "--tau", "2", "--head-dim", "3", "--heads", "2", "--mask", "causal"),
            {"query_key": "gaussian", "tau": 2.0, "head_dim": 3, "heads": 2, "mask": "causal"},
            {},
        ),
        (("--early-stop", "0", "--tolerance", "0.1", "--horizon", "4"), {}, {}),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_options_reach_the_diagram(phase, tmp_path, options, base, over):
    result = phase("--dim", 5, "--beta", 1.5, "--seed", 4, *options, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    kind = lf.HybridTransformer if over.get("epsilon") else lf.StochasticTransformer
    start = {"epsilon": 0.5} if over.get("epsilon") else {}
    model = kind(tokens=2, dim=5, beta=1.5, layers_per_unit_time=20, **base, **start)
    special = {"early_stop": None, "tolerance": 0.1, "horizon": 4.0} if "--tolerance" in options else {"horizon": 2.0}
    direct = phase_diagram(model, {"beta": [1.5], **over}, samples=40, seed=4, **special)
    data = lf.load(tmp_path / "phase.nc").squeeze()
    for name in ("probability", "low", "high", "exact"):
        np.testing.assert_array_equal(data[name].values, direct.squeeze()[name].values)
    assert data.attrs.get("early_stop") == direct.attrs.get("early_stop")


def test_same_seed_same_table_whatever_the_threads(phase):
    first, second, other = (
        phase("--seed", seed, "--threads", threads, "--beta", "1:3:1").stdout
        for seed, threads in ((3, 1), (3, 2), (4, 1))
    )
    assert first == second
    assert first != other


def test_interruption_writes_nothing(phase, tmp_path, monkeypatch):
    model = lf.StochasticTransformer(tokens=2, dim=3, beta=1.0, layers_per_unit_time=10)
    data = lf.simulate(model, horizon=1.0, samples=8, seed=0, threads=1)

    def interrupted(*_, **__):
        raise lf.Interrupted(data)

    monkeypatch.setattr("limitformer.sweep.describe.simulate", interrupted)
    result = phase("--out", tmp_path)
    assert (result.exit_code, result.stdout) == (130, "")
    assert result.stderr == "Interrupted; nothing was written.\n"
    assert list(tmp_path.iterdir()) == []
