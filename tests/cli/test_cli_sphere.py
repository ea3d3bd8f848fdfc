"""`limitformer phase` and `limitformer overlap`: output, files and refusals.

Runs are in this process, for speed; Ctrl-C and a pipe get a process of their own.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from decimal import Decimal
from math import isfinite

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from rich.console import Console

import limitformer as lf
from limitformer.base.errors import InputError
from limitformer.cli.app import command_of
from limitformer.cli.phase import ROWS
from limitformer.cli.sphere_options import LARGEST_COUNT, MOST_CELLS, MOST_VALUES, parse_counts, parse_grid
from limitformer.sweep.phase import phase_diagram
from sweep_grids import wait_until

SMALL = ("--layers", "20", "--horizon", "2", "--samples", "40", "--threads", "1")


@pytest.fixture
def phase(run):
    """Run a cheap phase diagram; the given options come last and override."""
    return lambda *arguments: run("phase", *SMALL, *arguments)


@pytest.fixture
def refused(refused, monkeypatch):
    """Assert that the command is refused before any work; `says` is part of the line."""
    monkeypatch.setattr("limitformer.sweep.describe.simulate", lambda *_, **__: pytest.fail("work was done"))
    monkeypatch.setattr(lf.OverlapDiffusion, "summary", lambda _: pytest.fail("work was done"))
    return lambda *arguments, says: refused(*arguments, says=re.escape(says))


def words(options):
    """Return a readable name of a case."""
    return " ".join(options) if isinstance(options, tuple) else ""


def rows(table):
    """Return the cells of a table's rows as text."""
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in table.splitlines() if line[:1] == "│"]


# Help.


@pytest.mark.parametrize("command", ["phase", "overlap"])
def test_help_fits_80_columns_and_explains_every_option(run, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "80")
    result = run(command, "--help")
    assert (result.exit_code, result.stderr) == (0, "")
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "…" not in result.stdout
    assert "For example: limitformer " + command in result.stdout
    options = command_of(command).params
    assert len(options) > 8
    for option in options:
        assert option.help
        assert option.opts[0] in result.stdout


def test_help_shows_the_defaults(run):
    text = run("phase", "--help").stdout
    for default in ("4,6,8", "0:2:0.25", "none: stochastic model", "gaussian; hybrid: uniform", "all cores", "1e-09"):
        assert f"[default: {default}]" in text or f"[default: ({default})]" in text
    assert "ranges start:stop:step" in text


@pytest.mark.parametrize(
    "example",
    ["phase --dim 4:10:1 --beta 0:4:0.25 --out out", "overlap --dim 4 --beta 2 --clusters 2,1 --start -1 --target 0.9"],
)
def test_the_example_of_the_help_runs(run, tmp_path, monkeypatch, example):
    monkeypatch.chdir(tmp_path)
    command, *options = example.split()
    assert example in " ".join(run(command, "--help").stdout.split())
    cheap = (*SMALL, "--samples", "8", "--dim", "4:5:1", "--beta", "0:4:2") if command == "phase" else ()
    assert run(command, *options, *cheap).exit_code == 0


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


@given(st.lists(ranges(), min_size=1, max_size=4))
def test_parts_are_put_together_in_their_order_or_refused_if_they_meet(cases):
    parts = [value for case in cases for value in parse_grid("beta", as_text(*case))]
    text = ", ".join(as_text(*case) for case in cases)
    if len(set(parts)) == len(parts):
        assert parse_grid("beta", text) == parts
    else:
        assert parsed(text) == (None, f"--beta has a value twice; got {text!r}.")


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, unique=True))
def test_values_come_back_as_they_were_written(values):
    assert parse_grid("epsilon", ",".join(map(repr, values))) == values


@given(st.lists(st.integers(-LARGEST_COUNT, LARGEST_COUNT), min_size=1, unique=True))
def test_whole_numbers_come_back_as_whole_numbers(values):
    counts = parse_counts("dim", ",".join(map(str, values)))
    assert counts == values
    assert all(type(value) is int for value in counts)


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
    assert {path.name for path in out.iterdir()} == {"phase.png", "phase.nc"}
    assert f"Wrote {out / 'phase.png'}, {out / 'phase.nc'}" in result.stdout
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
        (("--sigma", "0.5", "--values", "rademacher"), {"sigma": 0.5, "values": "rademacher"}, {}),
        (("--attention", "unnormalized", "--tokens", "3"), {"attention": "unnormalized"}, {"tokens": [3]}),
        (("--epsilon", "0.5,1.5"), {}, {"epsilon": [0.5, 1.5]}),
        (
            ("--query-key", "gaussian", "--tau", "2", "--head-dim", "3", "--heads", "2"),
            {"query_key": "gaussian", "tau": 2.0, "head_dim": 3, "heads": 2},
            {},
        ),
        (("--mask", "causal"), {"mask": "causal"}, {}),
        (("--early-stop", "0", "--tolerance", "0.1", "--horizon", "4"), {}, {}),
    ],
    ids=words,
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


def test_three_tokens_have_no_exact_column(phase):
    (row,) = rows(phase("--tokens", 3, "--dim", 4, "--beta", 1).stdout)
    assert row[0] == "1"
    assert row[-1] == ""


def test_a_narrow_terminal_or_a_pipe_loses_no_digits(phase, monkeypatch):
    options = ("--tokens", "2,3", "--dim", "4,5", "--epsilon", "0.125,1.5", "--beta", "0.5,1.0625")
    monkeypatch.setattr("limitformer.cli.phase.screen", Console(width=160))
    whole = phase(*options).stdout
    monkeypatch.setattr("limitformer.cli.phase.screen", Console(width=60))
    assert rows(phase(*options).stdout) == rows(whole)
    assert rows(whole)[-1][:4] == ["3", "5", "1.5", "1.0625"]


def test_values_keep_ten_digits(phase):
    assert [row[0] for row in rows(phase("--dim", 4, "--beta", "1.00000001,1.00000002").stdout)] == [
        "1.00000001",
        "1.00000002",
    ]


def test_a_long_table_is_thinned_out_over_all_values(phase):
    """The grid has 200 cells, 20 β for each dim; every fourth row would show only five β."""
    result = phase("--tokens", 3, "--dim", "4:13:1", "--beta", "0:1.9:0.1", "--samples", 8, "--horizon", "0.1")
    found = rows(result.stdout)
    assert len(found) == ROWS
    assert (found[0][:2], found[-1][:2]) == (["4", "0"], ["13", "1.9"])
    assert {row[0] for row in found} == {str(dim) for dim in range(4, 14)}
    assert len({row[1] for row in found}) == 20
    assert "60 of 200 cells; all of them are in the data (--out)" in result.stdout


def test_out_replaces_older_files_and_leaves_others(phase, tmp_path):
    for name in ("phase.nc", "phase.png", "notes.txt"):
        (tmp_path / name).write_text("older", encoding="utf-8")
    assert phase("--dim", 4, "--beta", "1,2", "--out", tmp_path).exit_code == 0
    assert lf.load(tmp_path / "phase.nc").sizes["beta"] == 2
    assert (tmp_path / "notes.txt").read_text(encoding="utf-8") == "older"
    assert len(list(tmp_path.iterdir())) == 3


def test_one_cell_has_a_picture_too(phase, tmp_path):
    result = phase("--dim", 4, "--beta", 1, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "phase.png").stat().st_size > 1000


# The exact quantities of the overlap.


OVERLAPS = {
    "plain": ((), {}, None),
    "equal": (("--dim", "5", "--beta", "2.5"), {"dim": 5, "beta": 2.5}, None),
    "sigma": (("--sigma", "0.5", "--attention", "unnormalized"), {"sigma": 0.5, "attention": "unnormalized"}, None),
    "unequal": (("--beta", "2", "--clusters", "2,1"), {"beta": 2.0, "tokens": 3}, (2, 1)),
    "hybrid": (("--beta", "2", "--epsilon", "1.2"), {"beta": 2.0, "epsilon": 1.2}, None),
    "flow": (("--epsilon", "0"), {"epsilon": 0.0}, None),
    "negative": (("--beta", "-1.5", "--epsilon", "1.4"), {"beta": -1.5, "epsilon": 1.4}, None),
    "negative clusters": (("--beta", "-2", "--clusters", "2,1"), {"beta": -2.0, "tokens": 3}, (2, 1)),
    "drawn": (
        ("--query-key", "gaussian", "--tau", "2", "--dim", "3"),
        {"query_key": "gaussian", "tau": 2.0, "dim": 3},
        None,
    ),
    "causal": (("--mask", "causal", "--beta", "2"), {"mask": "causal", "beta": 2.0}, None),
    "hybrid clusters": (("--epsilon", "1", "--clusters", "2,1"), {"epsilon": 1.0, "tokens": 3}, (2, 1)),
}


def diffusion(fields, clusters):
    kind = lf.HybridTransformer if "epsilon" in fields else lf.StochasticTransformer
    fields = {"tokens": 2, "dim": 4, "beta": 1.0, "layers_per_unit_time": 1, **fields}
    return lf.overlap(kind(**fields), clusters=clusters)


def strict_json(text):
    """Parse strict JSON, without NaN and Infinity."""
    return json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))


@pytest.mark.parametrize("case", OVERLAPS)
def test_json_is_the_summary(run, case):
    options, fields, clusters = OVERLAPS[case]
    result = run("overlap", *options, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    assert strict_json(result.stdout) == json.loads(json.dumps(diffusion(fields, clusters).summary()))


@pytest.mark.parametrize("case", OVERLAPS)
def test_table_is_the_json(run, case):
    options = OVERLAPS[case][0]
    record = strict_json(run("overlap", *options, "--json").stdout)
    shown = dict(rows(run("overlap", *options).stdout))
    for group in ("antipodal_probability", "single_cluster_probability"):
        for kind, value in record[group].items():
            assert shown[f"{group}: {kind}".replace("_", " ")] == (
                f"{value:.6g}" if value != int(value) else f"{value:g}"
            )
    assert shown["model: kind"] == record["model"]["kind"]
    assert shown["boundaries: minus: kind"] == record["boundaries"]["minus"]["kind"]
    assert "None" not in shown.values()
    assert not any("_" in name for name in shown)


@pytest.mark.parametrize(
    ("case", "start", "target"),
    [
        ("plain", 0.25, None),
        ("plain", -1.0, None),
        ("plain", 1.0, None),
        ("plain", 0.25, 0.25),
        ("plain", -0.5, 0.9),
        ("unequal", -1.0, 0.9),
        ("unequal", -0.5, None),
        ("hybrid", 0.1, 0.9),
        ("hybrid clusters", 0.1, None),
        ("negative", -0.3, 0.9),
        ("flow", 0.1, 0.9),
    ],
)
def test_start_and_target_are_answered(run, case, start, target):
    options, fields, clusters = OVERLAPS[case]
    asked = ("--start", start) + (() if target is None else ("--target", target))
    result = run("overlap", *options, *asked, "--json")
    assert result.exit_code == 0, result.output
    found, exact = strict_json(result.stdout), diffusion(fields, clusters)
    assert found["start"] == start
    assert found["antipodal_probability_from_start"] == float(exact.antipodal_probability(start=start))
    assert ("mean_hitting_time" in found) == (target is not None)
    if target is not None:
        assert float(found["mean_hitting_time"]) == exact.mean_hitting_time(target, start=start)


@pytest.mark.parametrize(
    "form", [("--start", "-0.5", "--target", "-0.9"), ("--start=-0.5", "--target=-0.9")], ids=words
)
def test_negative_overlaps_are_values_and_not_options(run, form):
    found = strict_json(run("overlap", *form, "--json").stdout)
    assert (found["start"], found["target"]) == (-0.5, -0.9)


def test_infinite_times_are_said_so(run):
    result = run("overlap", "--epsilon", "1.2", "--beta", "2", "--start", "0.1", "--target", "0.9")
    assert dict(rows(result.stdout))["mean hitting time"] == "inf"


@pytest.mark.parametrize("columns", [60, 80])
def test_table_fits_the_terminal(run, monkeypatch, columns):
    monkeypatch.setattr("limitformer.cli.overlap.screen", Console(width=columns))
    result = run("overlap", "--clusters", "2,1")
    assert max(map(len, result.stdout.splitlines())) == columns
    assert "…" not in result.stdout


# What is refused.


NUMBERS = "must be finite numbers or ranges start:stop:step, separated by commas; got "


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--beta", "-301"), "beta must be at least -300; got -301."),
        (("--beta", "1,2,-301"), "Cell tokens = 2, dim = 4, beta = -301.0: beta must be at least -300; got -301."),
        (("--beta", "-301:1:0.5"), "beta must be at least -300; got -301."),
        (("--dim", "1"), "dim must be at least 2; got 1."),
        (("--dim", "-3"), "dim must be at least 2; got -3."),
        (("--dim", "4,1"), "Cell tokens = 2, dim = 1, beta = 0.0: dim must be at least 2; got 1."),
        (("--dim", "2.5"), "--dim must be whole numbers, at most 2**53; got '2.5'."),
        (("--dim", "1e30"), "--dim must be whole numbers, at most 2**53; got '1e30'."),
        (("--tokens", "0"), "tokens must be at least 1; got 0."),
        (("--tokens", "1.5"), "--tokens must be whole numbers"),
        (("--beta", ""), f"--beta {NUMBERS}''."),
        (("--dim", ""), f"--dim {NUMBERS}''."),
        (("--tokens", " "), f"--tokens {NUMBERS}' '."),
        (("--epsilon", ""), f"--epsilon {NUMBERS}''."),
        (("--beta", "1,"), f"--beta {NUMBERS}'' in '1,'."),
        (("--beta", "a,b"), f"--beta {NUMBERS}'a' in 'a,b'."),
        (("--beta", "0:1"), f"--beta {NUMBERS}'0:1'."),
        (("--beta", "0:1:2:3"), f"--beta {NUMBERS}'0:1:2:3'."),
        (("--beta", "nan"), f"--beta {NUMBERS}'nan'."),
        (("--beta", "inf"), f"--beta {NUMBERS}'inf'."),
        (("--epsilon", "1,nan"), f"--epsilon {NUMBERS}'nan' in '1,nan'."),
        (("--beta", "0:inf:1"), f"--beta {NUMBERS}'0:inf:1'."),
        (("--beta", "1e999"), f"--beta {NUMBERS}'1e999'."),
        (("--beta", "1:0:0.5"), "--beta has no value: the range ends before it begins; got '1:0:0.5'."),
        (("--beta", "0:1:0"), "--beta needs a positive step in start:stop:step; got '0:1:0'."),
        (("--beta", "0:1:-1"), "--beta needs a positive step in start:stop:step; got '0:1:-1'."),
        (("--beta", "2,0:1:1e-9"), f"--beta takes at most {MOST_VALUES:,} values in a range; got '0:1:1e-9' in "),
        (("--beta", "0:1:5e-324"), f"--beta takes at most {MOST_VALUES:,} values in a range"),
        (("--beta", "1,1"), "--beta has a value twice; got '1,1'."),
        (("--dim", "4,4.0"), "--dim has a value twice; got '4,4.0'."),
        (("--beta", "0:1:0.1,0.3"), "--beta has a value twice; got '0:1:0.1,0.3'."),
        (
            ("--dim", "2:5000:1", "--beta", "0:5:0.01"),
            f"The grid has 2,504,499 cells (1 tokens x 4,999 dim x 501 beta); at most {MOST_CELLS:,} are taken.",
        ),
        (("--epsilon", "1", "--sigma", "2"), "--sigma would change nothing: a hybrid model has --epsilon instead."),
        (("--epsilon", "-1"), "epsilon must be at least 0; got -1.0."),
        (("--sigma", "0"), "sigma must be positive; got 0.0."),
        (("--sigma", "nan"), "sigma must be finite; got nan."),
        (("--attention", "unnormalized", "--beta", "1000"), "Unnormalized attention overflows: with logits up to 1000"),
        (("--attention", "unnormalized", "--beta", "1,1000"), "Cell tokens = 2, dim = 4, beta = 1000.0: Unnormalized"),
        (("--attention", "sparse"), "attention must be one of 'softmax', 'unnormalized'; got 'sparse'."),
        (("--values", "cauchy"), "values must be one of 'gaussian', 'uniform', 'rademacher', 'truncated normal'; got"),
        (("--layers", "0"), "--layers must be at least 1; got 0."),
        (("--layers", "1.5"), "; got '1.5'. See 'limitformer phase --help'."),
        (("--horizon", "0"), "horizon must be positive; got 0.0."),
        (("--horizon", "nan"), "horizon must be finite; got nan."),
        (
            ("--horizon", "1.005"),
            "horizon must be a whole number of layers, 100 in a unit of time; got 1.005. Nearest:",
        ),
        (("--samples", "0"), "samples must be at least 1; got 0."),
        (("--samples", "1e3"), "; got '1e3'. See 'limitformer phase --help'."),
        (("--tolerance", "0"), "tolerance must lie in (0, 0.5); got 0.0."),
        (("--tolerance", "0.5"), "tolerance must lie in (0, 0.5); got 0.5."),
        (("--early-stop", "-1"), "--early-stop must be at least 0 (never) and below 1; got -1."),
        (("--early-stop", "2"), "--early-stop must be at least 0 (never) and below 1; got 2."),
        (("--early-stop", "nan"), "--early-stop must be at least 0 (never) and below 1; got nan."),
        (("--seed", "-1"), "seed must be a whole number from 0 to 2**63 - 1; got -1."),
        (("--threads", "0"), "threads must be at least 1; got 0."),
        (("--json",), "No such option: --json"),
        (("stray",), "unexpected extra argument(s) (stray). See 'limitformer phase --help'."),
    ],
    ids=words,
)
def test_bad_phase(refused, options, says):
    refused("phase", *options, says=says)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--beta", "-301"), "beta must be at least -300; got -301."),
        (("--beta", "nan"), "beta must be finite; got nan."),
        (("--beta", "1000", "--attention", "unnormalized"), "Unnormalized attention overflows: with logits up to 1000"),
        (("--dim", "1"), "dim must be at least 2; got 1."),
        (("--dim", "-4"), "dim must be at least 2; got -4."),
        (("--dim", "2.5"), "; got '2.5'. See 'limitformer overlap --help'."),
        (("--attention", "sparse"), "attention must be one of 'softmax', 'unnormalized'; got 'sparse'."),
        (("--sigma", "0"), "sigma must be positive; got 0.0."),
        (("--sigma", "2", "--epsilon", "1"), "--sigma would change nothing: a hybrid model has --epsilon instead."),
        (("--epsilon", "-1"), "epsilon must be at least 0; got -1.0."),
        (("--epsilon", "nan"), "epsilon must be finite; got nan."),
        (("--clusters", "1"), "--clusters must be two whole numbers separated by a comma; got '1'."),
        (("--clusters", "2,x"), "--clusters must be two whole numbers separated by a comma; got '2,x'."),
        (("--clusters", "1,2,3"), "--clusters must be two whole numbers separated by a comma; got '1,2,3'."),
        (("--clusters", "1.5,2"), "--clusters must be two whole numbers separated by a comma; got '1.5,2'."),
        (("--clusters", ""), "--clusters must be two whole numbers separated by a comma; got ''."),
        (("--clusters", "0,3"), "A cluster must be at least 1; got 0."),
        (("--clusters", "-1,3"), "A cluster must be at least 1; got -1."),
        (
            ("--clusters", "2,1", "--beta", "151"),
            "Unequal clusters and the hybrid model need |beta| <= 150 here; got 151.",
        ),
        (("--query-key", "normal"), "query_key must be None, the pair (Q, K) or \"gaussian\"; got 'normal'."),
        (("--tau", "2"), "tau would change nothing: queries and keys are fixed."),
        (("--epsilon", "1", "--heads", "2", "--mask", "causal"), "--heads, --mask would change nothing: only the"),
        (("--mask", "causal", "--clusters", "2,1"), "Behind a causal mask tokens of one cluster attend to"),
        (("--query-key", "gaussian", "--attention", "unnormalized"), "With drawn queries and keys the coefficients"),
        (("--target", "0.5"), "--target needs --start, where the mean time begins."),
        (("--start", "2"), "start must lie in [-1, 1]; got 2.0."),
        (("--start", "-1.5"), "start must lie in [-1, 1]; got -1.5."),
        (("--start", "nan"), "start must lie in [-1, 1]; got nan."),
        (("--start", "half"), "; got 'half'. See 'limitformer overlap --help'."),
        (("--start", "-1", "--target", "0.5"), "start must be above -1: two tokens there stay there for ever."),
        (("--start", "-1", "--target", "0.5", "--clusters", "2,2"), "start must be above -1: two tokens there stay"),
        (("--start", "1", "--target", "0.5"), "start must be below 1: two tokens there stay there for ever."),
        (("--start", "0", "--target", "2"), "target must lie in [-1, 1]; got 2.0."),
        (("--start", "0", "--target", "1"), "target must lie strictly between -1 and 1; got 1."),
        (("--start", "0", "--target", "nan"), "target must lie in [-1, 1]; got nan."),
        (("--samples", "1"), "No such option: --samples. See 'limitformer overlap --help'."),
    ],
    ids=words,
)
def test_bad_overlap(refused, options, says):
    refused("overlap", *options, says=says)


def test_out_that_cannot_be_written_before_any_work(refused, tmp_path):
    (tmp_path / "file").write_text("here before", encoding="utf-8")
    refused("phase", "--out", "file", says="Cannot write into the folder file: ")
    refused("phase", "--out", "file/below", says="Cannot write into the folder file/below: ")
    assert (tmp_path / "file").read_text(encoding="utf-8") == "here before"


# Endings.


def partial():
    """Return the exception that `simulate` raises on Ctrl-C."""
    model = lf.StochasticTransformer(tokens=2, dim=3, beta=1.0, layers_per_unit_time=10)
    return lf.Interrupted(lf.simulate(model, horizon=1.0, samples=8, seed=0, threads=1))


@pytest.mark.parametrize("error", [KeyboardInterrupt, partial])
def test_interruption_writes_nothing(phase, tmp_path, monkeypatch, error):
    raised = error()

    def interrupted(*_, **__):
        raise raised

    monkeypatch.setattr("limitformer.sweep.describe.simulate", interrupted)
    result = phase("--out", tmp_path)
    assert (result.exit_code, result.stdout) == (130, "")
    assert result.stderr == "Interrupted; nothing was written.\n"
    assert list(tmp_path.iterdir()) == []


def spawn(*arguments):
    """Start the command line in a new process."""
    environment = {**os.environ, "COLUMNS": "160", "PYTHONIOENCODING": "utf-8"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "encoding": "utf-8"}
    command = [sys.executable, "-m", "limitformer", *map(str, arguments)]
    return subprocess.Popen(command, env=environment, **pipes)


def test_sigint_ends_a_long_diagram_in_one_line(tmp_path):
    """The folder exists before the first cell, which takes minutes, so the signal arrives during work."""
    out = tmp_path / "out"
    process = spawn("phase", "--samples", 500_000, "--early-stop", 0, "--threads", 1, "--out", out)
    try:
        wait_until(lambda: out.exists() or process.poll() is not None, 300)
        assert out.exists(), process.communicate()
        time.sleep(0.5)
        assert process.poll() is None, process.communicate()
        process.send_signal(signal.SIGINT)
        printed, err = process.communicate(timeout=300)
    finally:
        process.kill()
    assert (process.returncode, printed) == (130, "")
    assert err.splitlines()[-1] == "Interrupted; nothing was written."
    assert "Traceback" not in err
    assert list(out.iterdir()) == []


def test_json_goes_through_a_pipe():
    first = spawn("overlap", "--clusters", "2,1", "--start", "-1", "--target", "0.9", "--json")
    with first:
        tool = [sys.executable, "-m", "json.tool"]
        done = subprocess.run(tool, stdin=first.stdout, capture_output=True, encoding="utf-8", check=True)
    assert json.loads(done.stdout)["clusters"] == [2, 1]
