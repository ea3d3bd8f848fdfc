"""The command line: help, completion, `simulate` and its files. Most runs are in this process, for speed."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

import limitformer as lf
from limitformer.cli.app import COMMANDS, app, command_of
from limitformer.cli.report import say_error
from limitformer_papers import FIGURES

COMMAND = [sys.executable, "-m", "limitformer"]
MODEL = lf.Transformer(
    width=16,
    depth=4,
    gamma=8**-0.5,
    attention=lf.ShapedAttention(tau0=1.0),
    feedforward=lf.ShapedReLU(c_plus=0, c_minus=-1),
)


@pytest.fixture
def simulate(run, model_file):
    return lambda *arguments: run("simulate", model_file, "--samples", 6, *arguments)


# Help, version, list, completion.


def leaves(command):
    return (
        [leaf for each in command.commands.values() for leaf in leaves(each)]
        if hasattr(command, "commands")
        else [command]
    )


@pytest.mark.parametrize("name", COMMANDS)
def test_help_fits_80_columns_and_explains_every_option(run, monkeypatch, name):
    monkeypatch.setenv("COLUMNS", "80")
    result = run(name, "--help")
    assert (result.exit_code, result.stderr) == (0, "")
    assert max(map(len, result.stdout.splitlines())) <= 80
    for command in leaves(command_of(name)):
        assert all(option.help for option in command.params), command.name


def test_no_command_shows_the_help(run):
    assert run().stdout == run("--help").stdout
    assert (run().exit_code, run().stderr) == (0, "")


def test_version(run):
    result = run("--version")
    assert result.exit_code == 0
    assert re.fullmatch(r"limitformer( not installed| \d+\.\d+\.\d+\S*)\n", result.stdout)


def test_help_and_lists_do_not_wait_for_the_heavy_imports():
    commands = "for c in (['simulate', '--help'], ['figure', 'list']): app(c, standalone_mode=False)\n"
    code = f"import sys; from limitformer.cli.app import app\n{commands}"
    heavy = "print([name for name in ('torch', 'scipy.stats', 'matplotlib', 'xarray') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code + heavy], capture_output=True, encoding="utf-8", check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("check llama-3-4", ["llama-3-405b"]),
        ("figure st-fig1", ["st-fig1"]),
        ("recipes t5-", ["t5-v1.1"]),
        ("check no-such", []),
    ],
)
def test_shell_completes_names(typed, offered, monkeypatch, capfd):
    for name, value in {"COMP_WORDS": f"limitformer {typed}", "COMP_CWORD": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("_LIMITFORMER_COMPLETE", "complete_bash")
    with pytest.raises(SystemExit):
        app(prog_name="limitformer")
    assert capfd.readouterr().out.split() == offered


# Figures.


def test_figure_list_names_every_figure(run):
    result = run("figure", "list")
    assert result.exit_code == 0
    for name, shows in FIGURES.items():
        assert name in result.stdout
        assert shows.split("; ")[0] in result.stdout


def test_quick_figure(run, tmp_path):
    out = tmp_path / "new" / "out"
    result = run("figure", "st-fig7", "--scale", "quick", "--seed", 5, "--out", out, "--threads", 1)
    assert result.exit_code == 0, result.output
    assert "KS distance of network and SDE" in result.stdout
    names = {path.name for path in out.iterdir()}
    assert names == {"st-fig7.png", "st-fig7.nc", "st-fig7.json"}
    assert all(str(out / name) in result.stdout for name in names)
    assert json.loads((out / "st-fig7.json").read_text(encoding="utf-8"))["seed"] == 5


# Models from files.


def setting(changes):
    """Return an option --set for each of the changes."""
    return [word for change in changes.split() for word in ("--set", change)]


def test_the_model_of_the_help_is_simulated(run, tmp_path):
    text = re.search(r"\[model\] *\n( \w+ = .*\n)+", run("simulate", "--help").stdout)[0]
    (tmp_path / "model.toml").write_text(text, encoding="utf-8")
    shown = run("simulate", tmp_path / "model.toml", "--show-model")
    assert lf.from_json(shown.stdout) == replace(MODEL, width=200, depth=150)


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ("", {}),
        ("gamma=0.3 attention.tau0=2", {"gamma": 0.3, "attention": lf.ShapedAttention(tau0=2)}),
        ("attention.kind=SoftmaxAttention", {"attention": lf.SoftmaxAttention(tau0=1.0)}),
        ("norm.kind=LayerNorm norm.placement=pre", {"norm": "pre"}),
        ('attention=null feedforward={"kind":"GELU"}', {"attention": None, "feedforward": lf.GELU()}),
        ("mask=causal gamma=[0.1,0.2,0.3,0.4]", {"mask": "causal", "gamma": [0.1, 0.2, 0.3, 0.4]}),
    ],
    ids=str,
)
def test_model_has_the_values_of_file_and_options(run, model_file, changes, fields):
    shown = run("simulate", model_file, *setting(changes), "--show-model")
    assert lf.from_json(shown.stdout) == replace(MODEL, **fields)
    path = model_file.with_name("model.json")
    path.write_text(shown.stdout, encoding="utf-8")
    assert run("simulate", path, "--show-model").stdout == shown.stdout


def test_data_are_those_of_the_library(simulate, tmp_path):
    assert simulate("--seed", 9, "--set", "depth=3", "--out", tmp_path / "data.nc").exit_code == 0
    data = lf.load(tmp_path / "data.nc")
    direct = lf.simulate(replace(MODEL, depth=3), lf.equicorrelated(2, 0.2), samples=6, seed=9)
    np.testing.assert_array_equal(data["covariance"].values, direct["covariance"].values)


# Simulations.


def rows_of(table):
    """Return the numbers in the first column of a table."""
    return [float(value) for value in re.findall(r"^│\s*([\d.]+) │", table, flags=re.MULTILINE)]


@pytest.mark.parametrize(
    ("kind", "axis", "last"), [("chain", "depth", 4), ("limit", "time", 0.25), ("network", "depth", 4)]
)
def test_simulate_prints_a_table(simulate, kind, axis, last):
    result = simulate("--as", kind)
    assert result.exit_code == 0, result.output
    assert f"{kind}, 6 samples, 2 tokens" in result.stdout
    for column in (axis, "mean ρ", "mean |ρ|", "5 % … 95 % of ρ", "median variance"):
        assert column in result.stdout
    assert rows_of(result.stdout)[0] == 0
    assert rows_of(result.stdout)[-1] == pytest.approx(last)
    assert "0.2000" in result.stdout


@pytest.mark.parametrize("kind", ["chain", "network"])
def test_gradients_are_in_the_table_and_in_the_data(simulate, tmp_path, kind):
    result = simulate("--as", kind, "--gradients", "--out", tmp_path / "data.nc")
    assert result.exit_code == 0, result.output
    assert "median |∂X|" in result.stdout
    assert "median |∂W|: attention.query" in result.stdout
    assert "no gradients" not in result.stdout
    data = lf.load(tmp_path / "data.nc")
    assert data["stream_gradient"].shape == (6, data.sizes["depth"])
    assert "layers.0.attention.value" in data["weight"].values


def test_gradients_of_a_limit_are_printed_at_their_first_time(simulate, tmp_path):
    """Other recorded times change nothing of the line; the data have the median."""
    lines = {}
    for record in ("0", "0,0.1"):
        result = simulate("--as", "limit", "--gradients", "--record", record, "--out", tmp_path / "data.nc")
        assert result.exit_code == 0, result.output
        lines[record] = re.sub(r"\s+", " ", re.search(r"median \|∂W\|[^;]*?query \S+", result.stdout).group())
    assert len(set(lines.values())) == 1
    norms = lf.load(tmp_path / "data.nc")["weight_gradient"].sel(weight="attention.query")
    assert f"query {float(norms.isel(time=0).median()):.3g}," in lines["0"]
    assert f"query {float(norms.median()):.3g}," not in lines["0"]


def test_gradients_that_are_lost_are_counted(simulate):
    table = simulate("--set", "lam=1e30", "--gradients").stdout
    assert "6 samples have no gradients (NaN), which need all layers within the ball" in " ".join(table.split())


@pytest.mark.parametrize(("kind", "record", "ending"), [("chain", "0,1,4", ".nc"), ("limit", "0,0.1,0.25", ".zarr")])
def test_out_writes_the_data_that_was_asked_for(simulate, tmp_path, ending, kind, record):
    path = tmp_path / "new" / f"data{ending}"
    result = simulate("--as", kind, "--record", record, "--seed", 9, "--out", path)
    assert result.exit_code == 0, result.output
    assert f"Wrote {path}" in result.stdout
    assert rows_of(result.stdout) == [float(point) for point in record.split(",")]
    data = lf.load(path)
    assert data["covariance"].shape == (6, 3, 2, 2)
    assert data.attrs["seed"] == 9
    assert data.attrs["description"] == kind
    assert [path.name for path in path.parent.iterdir()] == [path.name]


def test_a_bug_is_not_taken_for_bad_input(simulate, monkeypatch):
    monkeypatch.setattr(lf, "simulate", lambda *_, **__: 1 / 0)
    result = simulate()
    assert isinstance(result.exception, ZeroDivisionError)
    assert result.exit_code == 1


def test_an_error_is_one_line_whatever_it_says(capsys):
    say_error("a first line\n  and a second,\r\nand a third\n")
    assert capsys.readouterr().err == "Error: a first line and a second, and a third\n"


# Ctrl-C.


def interrupt(error):
    def interrupted(*_, **__):
        raise error

    return interrupted


def partial(samples):
    """Return the exception that `simulate` raises on Ctrl-C after this many samples."""
    data = lf.simulate(MODEL, lf.equicorrelated(2, 0.2), samples=6, seed=0, threads=1)
    return lf.Interrupted(data.isel(sample=slice(0, samples)))


def test_interruption_before_the_first_sample_writes_nothing(simulate, tmp_path, monkeypatch):
    monkeypatch.setattr(lf, "simulate", interrupt(partial(0)))
    result = simulate("--out", tmp_path / "out" / "data.nc")
    assert (result.exit_code, result.stdout) == (130, "")
    assert result.stderr == "Interrupted; nothing was written.\n"
    assert not list(tmp_path.rglob("data*"))


def test_interruption_keeps_the_samples_that_were_finished(simulate, tmp_path, monkeypatch):
    monkeypatch.setattr(lf, "simulate", interrupt(partial(4)))
    result = simulate("--out", tmp_path / "data.nc")
    assert result.exit_code == 130
    assert "chain, 4 samples" in result.stdout
    assert result.stderr == "Interrupted; the table shows the 4 finished samples.\n"
    assert lf.load(tmp_path / "data.nc").sizes["sample"] == 4


# As a program of its own.


ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
SEVERAL_COMMANDS = """
import sys
from limitformer.cli import main
for arguments in ("phase --help", "figure list"):
    sys.argv = ["limitformer", *arguments.split()]
    try:
        main()
    except SystemExit as end:
        assert not end.code, arguments
"""


def test_characters_that_the_terminal_lacks_are_replaced():
    """β and the lines of tables give no traceback."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("LC_", "LANG", "PYTHONIO"))}
    done = subprocess.run(
        [sys.executable, "-c", SEVERAL_COMMANDS], env={**kept, **ASCII}, capture_output=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"st-fig1" in done.stdout


def test_python_m_limitformer_refuses_in_one_line(process, model_file):
    code, out, err = process([*COMMAND, "simulate", model_file, "--set", "gamma=1.5"])
    assert (code, out) == (2, "")
    assert re.fullmatch(r"Error: .*model\.toml: gamma must lie in \[0, 1\]; got 1\.5\..*\n", err)


@pytest.mark.parametrize(
    "words",
    [
        ["check", "MODEL"],
        ["check", "MODEL", "MODEL"],
        ["compare", "MODEL", "MODEL"],
        ["steps", "MODEL", "--optimizer", "adamw"],
        ["transfer", "MODEL", "--optimizer", "adamw", "--widths", "32,64", "--rate", "1e-3"],
    ],
    ids=lambda words: f"{words[0]} {len(words)}",
)
def test_json_alone_is_printed_for_scripts(run, tmp_path, words):
    """One document, with nothing before or after it."""
    model = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 50, "n_positions": 32}
    path = tmp_path / "model.json"
    path.write_text(json.dumps(model))
    samples = "4" if words[0] == "transfer" else "2"
    arguments = [str(path) if word == "MODEL" else word for word in words]
    result = run(*arguments, "--tokens", 8, "--samples", samples, "--json")
    assert result.exit_code == 0, result.output
    assert isinstance(json.loads(result.stdout), dict)
