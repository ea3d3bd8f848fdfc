"""The command line: its output, its files, and its exit codes.

Most runs are in this process, for speed; those that need a process of their own (Ctrl-C, `python -m`) get one.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import limitformer as lf
import limitformer_papers
from limitformer.base.errors import MissingExtraError
from limitformer.cli.app import app, commands_of
from limitformer.cli.report import say_error
from limitformer_papers import FIGURES

SMALL = ("--width", "16", "--depth", "4", "--samples", "6", "--threads", "1")
ZEN = Path(limitformer_papers.__file__).parent / "data" / "zen-of-python.txt"
COMMAND = [sys.executable, "-m", "limitformer"]


@pytest.fixture
def simulate(run):
    return lambda *arguments: run("simulate", *SMALL, *arguments)


def spawn(*arguments, command=COMMAND, **options):
    """Start the command line in a new process."""
    environment = {**os.environ, "COLUMNS": "160", "PYTHONIOENCODING": "utf-8"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "encoding": "utf-8"}
    return subprocess.Popen([*command, *map(str, arguments)], env=environment, **pipes, **options)


def finished(process):
    """Return exit code, stdout and stderr at the end."""
    with process:
        try:
            out, err = process.communicate(timeout=300)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    return process.returncode, out, err


# Help, version, list.


@pytest.mark.parametrize("command", [(), ("figure",), ("simulate",)], ids=["limitformer", "figure", "simulate"])
def test_help_of_everything(run, command):
    result = run(*command, "--help")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "Usage:" in result.stdout
    assert "--help" in result.stdout


def test_no_command_shows_the_help(run):
    assert run().stdout == run("--help").stdout
    assert (run().exit_code, run().stderr) == (0, "")


def test_help_names_every_choice_and_group(run):
    text = run("simulate", "--help").stdout
    for group in ("Model", "Start", "Simulation"):
        assert f"─ {group} ─" in text
    for choice in ("softmax", "gelu", "post-rms", "causal", "euler-maruyama", "network (needs torch)", ".zarr"):
        assert choice in text


def test_version(run):
    result = run("--version")
    assert result.exit_code == 0
    assert re.fullmatch(r"limitformer(, not installed| \d+\.\d+\.\d+\S*)\n", result.stdout)


def test_figure_list_names_every_figure(run):
    result = run("figure", "list")
    assert result.exit_code == 0
    for name, shows in FIGURES.items():
        assert name in result.stdout
        assert shows.split("; ")[0] in result.stdout


# Figures.


def test_quick_figure(run, tmp_path):
    result = run("figure", "st-fig7", "--scale", "quick", "--out", tmp_path / "new" / "out", "--threads", 1)
    assert result.exit_code == 0, result.output
    assert "KS distance of network and SDE" in result.stdout
    assert "yes" in result.stdout
    names = {path.name for path in (tmp_path / "new" / "out").iterdir()}
    assert names == {"st-fig7.png", "st-fig7.nc", "st-fig7.json"}
    assert all(str(tmp_path / "new" / "out" / name) in result.stdout for name in names)


def test_figure_takes_the_seed(run, tmp_path):
    run("figure", "st-fig7", "--scale", "quick", "--seed", 5, "--out", tmp_path, "--threads", 1)
    assert json.loads((tmp_path / "st-fig7.json").read_text(encoding="utf-8"))["seed"] == 5


# Simulations.


def rows_of(table):
    """Return the numbers in the first column of a table."""
    return [float(value) for value in re.findall(r"^│\s*([\d.]+) │", table, flags=re.MULTILINE)]


@pytest.mark.parametrize(
    ("kind", "axis", "last"), [("chain", "depth", 4), ("limit", "time", 0.25), ("network", "depth", 4)]
)
def test_simulate_prints_a_table(run, kind, axis, last):
    arguments = [argument for argument in SMALL if kind != "network" or argument not in ("--threads", "1")]
    result = run("simulate", *arguments, "--as", kind)
    assert result.exit_code == 0, result.output
    assert f"{kind}, 6 samples, 2 tokens" in result.stdout
    for column in (axis, "mean ρ", "mean |ρ|", "5 % … 95 % of ρ", "median variance"):
        assert column in result.stdout
    assert rows_of(result.stdout)[0] == 0
    assert rows_of(result.stdout)[-1] == pytest.approx(last)
    assert "0.2000" in result.stdout


@pytest.mark.parametrize(("kind", "described"), [("chain", "chain"), ("network", "network")])
def test_gradients_are_in_the_table_and_in_the_data(run, tmp_path, kind, described):
    small = [argument for argument in SMALL if kind != "network" or argument not in ("--threads", "1")]
    result = run("simulate", *small, "--as", kind, "--gradients", "--out", tmp_path / "data.nc")
    assert result.exit_code == 0, result.output
    assert f"{described}, 6 samples, 2 tokens" in result.stdout
    assert "median |∂X|" in result.stdout
    assert "median |∂W|: attention.query" in result.stdout
    data = lf.load(tmp_path / "data.nc")
    assert data["stream_gradient"].shape == (6, data.sizes["depth"])
    assert "layers.0.attention.value" in data["weight"].values


@pytest.mark.parametrize("lam", ["1e300", "1e30", "1e20"])
def test_gradients_that_are_lost_are_counted(run, lam):
    for options in (SMALL, (*SMALL[:-2], "--as", "network")):
        table = run("simulate", *options, "--lam", lam, "--gradients").stdout
        assert "6 samples have no gradients (NaN), which need all layers within the ball" in " ".join(table.split())


@pytest.mark.parametrize(
    "options", [("--lam", "2"), ("--lam", "0"), ("--lam", "1e-300"), ("--as", "network")], ids=" ".join
)
def test_gradients_that_are_finite_need_no_word(run, options):
    small = SMALL if "network" not in options else SMALL[:-2]
    table = run("simulate", *small, "--gradients", *options).stdout
    assert "median |∂X|" in table
    assert "no gradients" not in table


def test_gradients_of_a_limit_are_in_units_of_the_width(run, tmp_path):
    result = run("simulate", *SMALL, "--as", "limit", "--gradients", "--out", tmp_path / "data.nc")
    assert result.exit_code == 0, result.output
    for words in ("median |∂X|", "median |∂W|: attention.query", "in units of the width; median of Σ |∂W|²"):
        assert words in result.stdout
    assert lf.load(tmp_path / "data.nc")["tangent_kernel"].shape == (6,)


def test_same_seed_same_table(simulate):
    first, second, other = (simulate("--seed", seed).stdout for seed in (3, 3, 4))
    assert first == second
    assert first != other


@pytest.mark.parametrize("ending", [".nc", ".zarr"])
@pytest.mark.parametrize(("kind", "record"), [("chain", "0,1,4"), ("limit", "0,0.1,0.25")])
def test_out_writes_the_data_that_was_asked_for(simulate, tmp_path, ending, kind, record):
    path = tmp_path / "new" / f"data{ending}"
    result = simulate("--as", kind, "--record", record, "--seed", 9, "--out", path)
    assert result.exit_code == 0, result.output
    assert f"Wrote {path}" in result.stdout
    data = lf.load(path)
    assert data["covariance"].shape == (6, 3, 2, 2)
    assert data.attrs["seed"] == 9
    assert data.attrs["description"] == kind
    assert [path.name for path in path.parent.iterdir()] == [path.name]


def test_out_replaces_an_older_file(simulate, tmp_path):
    path = tmp_path / "data.nc"
    path.write_text("older", encoding="utf-8")
    assert simulate("--out", path).exit_code == 0
    assert lf.load(path).sizes["sample"] == 6


def test_record_keeps_those_layers_alone(simulate):
    assert rows_of(simulate("--record", "1,3").stdout) == [1, 3]


def test_one_token_has_no_correlation(simulate):
    result = simulate("--tokens", 1)
    assert result.exit_code == 0
    assert "nan" not in result.stdout


def test_collapse_shows_how_far_from_one(simulate):
    result = simulate("--attention", "softmax", "--feedforward", "none", "--gamma", 1, "--depth", 3)
    assert re.search(r"1 - \de-\d\d", result.stdout)


def test_samples_that_explode_are_counted(simulate):
    result = simulate("--gamma", 1, "--lam", 1, "--depth", 400, "--width", 8)
    assert "6 samples left the ball" in result.stdout


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--attention", "softmax", "--heads", "4", "--head-dim", "3", "--tau0", "0.7"),
        ("--attention", "none", "--feedforward", "gelu", "--hidden", "20"),
        ("--feedforward", "relu", "--norm", "post-rms", "--mask", "causal"),
        ("--feedforward", "none", "--norm", "pre-layer", "--gamma", "1", "--lam", "1"),
        ("--c-plus", "0.5", "--c-minus", "-0.25"),
        ("--attention", "none", "--one-matrix", "--feedforward", "gelu", "--gamma", "1"),
    ],
    ids=" ".join,
)
def test_model_goes_through_its_file(run, tmp_path, options):
    size = ("--width", "16", "--depth", "4")
    shown = run("simulate", *size, *options, "--show-model")
    assert shown.exit_code == 0, shown.output
    path = tmp_path / "model.json"
    path.write_text(shown.stdout, encoding="utf-8")
    again = run("simulate", "--model", path, "--show-model")
    assert again.stdout == shown.stdout
    rest = ("--samples", "6", "--threads", "1", "--seed", "2")
    assert run("simulate", "--model", path, *rest).stdout == run("simulate", *size, *options, *rest).stdout


def test_options_reach_the_model(run):
    shown = json.loads(
        run("simulate", "--show-model", "--attention", "softmax", "--heads", 4, "--norm", "pre-layer").stdout
    )
    assert (shown["attention"]["kind"], shown["attention"]["heads"]) == ("SoftmaxAttention", 4)
    assert (shown["norm"]["kind"], shown["norm"]["placement"]) == ("LayerNorm", "pre")
    assert (shown["width"], shown["depth"]) == (200, 150)
    assert shown["gamma"] == 8**-0.5


def test_the_limit_of_lambda_one_is_the_same_in_every_sample(run):
    """The limit is an ODE: it has no options of an SDE, and all quantiles of the correlation are equal."""
    options = (
        "--as",
        "limit",
        "--attention",
        "none",
        "--feedforward",
        "relu",
        "--lam",
        1,
        "--depth",
        16,
        "--gamma",
        0.25,
    )
    result = run("simulate", *options, "--samples", 7, "--record", "0,1")
    assert result.exit_code == 0, result.output
    assert "limit, 7 samples" in result.stdout
    assert re.search(r"│ +1 │ +0\.3\d+ │ +0\.3\d+ │ +(0\.3\d+) … \1 │ +2\.718 │", result.stdout)
    refused = run("simulate", *options, "--dt", 0.1)
    assert "A deterministic limit has no option dt" in refused.output


def test_text_of_a_real_file(simulate, tmp_path):
    result = simulate("--text", ZEN, "--tokens", 12, "--out", tmp_path / "zen.nc")
    assert result.exit_code == 0, result.output
    assert "chain, 6 samples, 12 tokens" in result.stdout
    assert "ρ over all samples and pairs of tokens" in result.stdout
    assert list(lf.load(tmp_path / "zen.nc").label.values[:4]) == ["the", "zen", "of", "python"]


def test_a_short_text_is_taken_whole(simulate, tmp_path):
    text = tmp_path / "short.txt"
    text.write_text("to be or not to be", encoding="utf-8")
    plain, placed = simulate("--text", text), simulate("--text", text, "--positions")
    assert "6 tokens" in plain.stdout
    assert "6 tokens" in placed.stdout
    assert plain.stdout != placed.stdout


# What is refused.


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--gamma", "1.5"), r"gamma must lie in \[0, 1\]; got 1\.5"),
        (("--gamma", "nan"), "gamma must be finite"),
        (("--gamma", "half"), "'--gamma'.*See '.* simulate --help'"),
        (("--no-such-option",), "--no-such-option.*See '.* simulate --help'"),
        (("stray",), r"unexpected extra argument.*stray"),
        (("--width",), "--width.*requires an argument"),
        (("--width", "0"), "width must be at least 1; got 0"),
        (("--depth", "-1"), "depth must be at least 1; got -1"),
        (("--lam", "-1"), "lam must be at least 0"),
        (("--tau0", "0"), "tau0 must be positive"),
        (("--heads", "3"), "heads must divide width; got width=200, heads=3. Nearest: 2 or 4"),
        (
            ("--attention", "sparse"),
            "--attention must be one of shaped, softmax, none, or package.module:function; got 'sparse'",
        ),
        (("--feedforward", "sillu"), "--feedforward must be one of shaped-relu, relu, gelu, none, .*silu, .*'sillu'"),
        (("--norm", "pre"), "--norm must be one of none, pre-layer, post-layer, pre-rms, post-rms; got 'pre'"),
        (("--mask", "window"), "--mask must be none or causal; got 'window'"),
        (("--attention", "none", "--feedforward", "none"), "needs attention, feedforward or both"),
        (("--one-matrix",), "OneMatrix acts on the coordinates of the tokens: attention and norm must be None"),
        (("--one-matrix", "--hidden", "9"), "--hidden would change nothing: a layer of one matrix has no hidden units"),
        (("--one-matrix", "--feedforward", "none"), "--one-matrix would change nothing: there is no feed-forward"),
        (("--as", "magic"), "--as must be chain, limit or network; got 'magic'"),
        (("--samples", "0"), "samples must be at least 1; got 0"),
        (("--threads", "0"), "threads must be at least 1; got 0"),
        (("--seed", "-1"), r"seed must be .* got -1"),
        (("--tokens", "0"), "tokens must be at least 1; got 0"),
        (("--correlation", "-2"), r"correlation of 2 tokens must lie in \[-1, 1\]; got -2"),
        (("--correlation", "-0.6", "--tokens", "3"), r"correlation of 3 tokens must lie in \[-0\.5, 1\]"),
        (("--variance", "0"), "variance must be positive"),
        (("--samples", "1000000000000"), "GiB are free. Nearest: take fewer samples"),
        (("--tokens", "20000000"), "GiB, more than is free. Nearest: fewer tokens"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bad_model_or_start(refused, options, says):
    refused("simulate", *options, says=says)


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ("a,b", "--record must be numbers separated by commas, e.g. 0,50,150; got 'a,b'"),
        ("", "--record must be numbers"),
        ("1,", "--record must be numbers"),
        ("0,nan", "--record must be numbers"),
        ("inf", "--record must be numbers"),
        ("5,3", "record must be strictly ascending"),
        ("3,3", "record must be strictly ascending"),
        ("0.5", "must be whole numbers"),
        ("200", "must lie in 0 … 150; got"),
        ("-1", "must lie in 0 … 150; got"),
        (",".join(map(str, range(500))), "must lie in 0 … 150; got"),
    ],
    ids=lambda value: value[:20],
)
def test_bad_record(refused, record, says):
    refused("simulate", f"--record={record}", says=says)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--record", "0.8"), r"Times to record must lie in \[0, 0\.75\]"),
        (("--dt", "0"), "dt must be positive"),
        (("--step", "heun"), 'step must be "factor" or "euler-maruyama"; got \'heun\''),
        (("--attention", "softmax"), "Softmax attention has no limit, because"),
        (("--norm", "pre-layer"), "No limit is proven with normalisation"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bad_limit(refused, options, says):
    refused("simulate", "--as", "limit", *options, says=says)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--as", "network", "--dt", "0.1"), "The network has no option dt"),
        (("--as", "network", "--threads", "2"), "The network has no option threads"),
        (("--as", "network", "--step", "factor"), "The network has no option step"),
        (("--dt", "0.1"), "chain has no option dt"),
        (("--attention", "none", "--tau0", "2"), "--tau0 would change nothing: there is no attention"),
        (("--feedforward", "relu", "--c-plus", "1"), "--c-plus would change nothing"),
        (("--feedforward", "none", "--hidden", "8"), "--hidden would change nothing"),
        (("--text", "t.txt", "--correlation", "0.5"), "--correlation would change nothing: --text is the start"),
        (("--positions",), "--positions would change nothing: there is no --text"),
        (("--model", "m.json", "--width", "9", "--gamma", "0.1"), "--width, --gamma would change nothing: --model"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_options_that_would_change_nothing(refused, options, says):
    refused("simulate", *options, says=says)


def test_network_without_torch_names_the_extra(refused, monkeypatch):
    monkeypatch.delitem(sys.modules, "limitformer.nn", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    says = re.escape("This needs torch, which is not installed: pip install 'limitformer[torch]'.")
    refused("simulate", "--as", "network", "--width", "8", "--depth", "2", says=says)
    assert str(MissingExtraError("torch", "torch")).startswith("This needs torch")


TEXTS = {
    "empty": (b"", "must hold at least one word; file holds none"),
    "blank": (b" \n\t\n", "must hold at least one word"),
    "latin-1": ("déjà vu".encode("latin-1"), "not UTF-8 text: byte 1 cannot be decoded"),
    "NUL bytes": (b"a\0b", "binary file"),
    "too short": (b"one two", "file has 2 tokens; 5 were asked for"),
}


@pytest.mark.parametrize("text", TEXTS)
def test_bad_text(refused, tmp_path, text):
    content, says = TEXTS[text]
    (tmp_path / "file").write_bytes(content)
    refused("simulate", "--text", "file", "--tokens", "5", says=says)


def test_text_that_is_missing_or_a_folder(refused, tmp_path):
    refused("simulate", "--text", "nowhere.txt", says=r"Cannot read .*nowhere\.txt: No such file")
    refused("simulate", "--text", tmp_path, says="Cannot read .*: Is a directory")


def test_long_text_asks_how_much_of_it(refused):
    refused("simulate", "--text", ZEN, says=r"has more than 64 tokens; give a number, e\.g\. --tokens 64")


MODELS = {
    "not JSON": ("{", "A model must be JSON; line 1 is not"),
    "empty": ("", "A model must be JSON"),
    "list": ("[1]", "A model must be a JSON object; got list"),
    "unknown kind": ('{"kind": "RNN"}', "\"kind\" must be one of .*Transformer, .*; got 'RNN'"),
    "no kind": ('{"width": 8}', '"kind" must be one of'),
    "a part": ('{"kind": "ReLU"}', r"file\.json describes a ReLU, not a Transformer"),
    "unknown field": ('{"kind": "ReLU", "size": 3}', "ReLU has no field size; it has hidden"),
    "missing field": ('{"kind": "Transformer", "width": 8}', "Transformer: .*missing"),
    "a word for a number": (
        '{"kind": "Transformer", "width": "big", "depth": 3, "gamma": 0.3}',
        "width must be a whole number; got 'big'",
    ),
    "out of range": (
        '{"kind": "Transformer", "width": 8, "depth": 3, "gamma": 2, "feedforward": {"kind": "ReLU"}}',
        r"gamma must lie in \[0, 1\]",
    ),
}


@pytest.mark.parametrize("model", MODELS)
def test_bad_model_file(refused, tmp_path, model):
    content, says = MODELS[model]
    (tmp_path / "file.json").write_text(content, encoding="utf-8")
    refused("simulate", "--model", "file.json", says=f"--model file.json.*{says}" if model != "a part" else says)


def test_model_file_missing_or_binary(refused, tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    refused("simulate", "--model", "nowhere.json", says=r"--model nowhere\.json: .*No such file")
    refused("simulate", "--model", "binary", says="not UTF-8")
    refused("simulate", "--model", tmp_path, says="Is a directory")


def no_work(*_, **__):
    pytest.fail("work was done")


def test_out_that_cannot_be_written_before_any_work(refused, tmp_path, monkeypatch):
    monkeypatch.setattr(lf, "simulate", no_work)
    (tmp_path / "file").write_text("here before", encoding="utf-8")
    (tmp_path / "folder.nc").mkdir()
    refused("simulate", "--out", "file/data.nc", says="Cannot write")
    refused("simulate", "--out", "folder.nc", says=r"Cannot write folder\.nc")
    refused("simulate", "--out", "data.csv", says=r"saved as \.nc \(NetCDF\) or \.zarr; got 'data\.csv'")
    refused("simulate", "--out", "data", says=r"saved as \.nc")
    assert (tmp_path / "file").read_text(encoding="utf-8") == "here before"


LONG = 300 * "a"  # a name may have 255 bytes


@pytest.mark.parametrize(
    "arguments",
    [
        ("simulate", "--out", f"{LONG}.nc"),
        ("simulate", "--out", f"{LONG}.zarr"),
        ("simulate", "--out", f"{LONG}/a.nc"),
        ("simulate", "--text", LONG),
        ("simulate", "--model", LONG),
        ("phase", "--out", LONG),
        ("phase", "--store", LONG),
        ("figure", "st-fig1", "--out", LONG),
        ("figure", "st-lr", "--out", ".", "--runs", LONG),
        ("sweep", "status", LONG),
        ("sweep", "export", LONG, "a.nc"),
        ("sweep", "run", LONG, "--store", "s"),
        ("check", "gpt2", "--out", LONG),
        ("design", "gpt2", "--out", LONG),
        ("steps", "gpt2", "--optimizer", "sgd", "--inputs", LONG),
        ("transfer", "gpt2", "--widths", "64,128", "--out", LONG),
        ("initialisation", f"{LONG}.py:a", f"{LONG}.py:b"),
        ("train", "glue", LONG, "--data", LONG),
    ],
    ids=lambda arguments: " ".join(arguments).replace(LONG, "LONG"),
)
def test_name_that_is_too_long_is_refused_before_any_work(refused, monkeypatch, arguments):
    monkeypatch.setattr(lf, "simulate", no_work)
    refused(*arguments, says="File name too long|is not the store")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("figure", "st-fig9"), "Unknown figure 'st-fig9'; there are st-fig1"),
        (("figure", "st-fig1", "--scale", "huge"), "Unknown scale 'huge'; there are paper, quick"),
        (("figure",), "Missing argument.*See '.* figure --help'"),
        (("figure", "st-fig1", "--size", "3"), "No such option.*--size.*See '.* figure --help'"),
        (("figure", "st-fig7", "--scale", "quick", "--threads", "0"), "threads must be at least 1"),
        (("paint",), "No such command 'paint'.*See '.* --help'"),
        (("--colour",), "No such option.*--colour"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bad_figure_or_command(refused, tmp_path, arguments, says):
    (tmp_path / "out").mkdir()
    refused(*arguments, says=says)


def test_figure_into_a_folder_that_cannot_be_written(refused, tmp_path):
    (tmp_path / "file").write_text("here before", encoding="utf-8")
    refused("figure", "st-fig1", "--out", "file", says="Cannot write")


def test_a_bug_is_not_taken_for_bad_input(run, monkeypatch):
    monkeypatch.setattr(lf, "simulate", lambda *_, **__: 1 / 0)
    result = run("simulate", *SMALL)
    assert isinstance(result.exception, ZeroDivisionError)
    assert result.exit_code == 1


def test_file_that_no_command_checks_is_named_in_one_line(refused, monkeypatch):
    monkeypatch.setattr(lf, "simulate", lambda *_, **__: Path("no", "such", "file").read_text(encoding="utf-8"))
    refused("simulate", *SMALL, says=r"^Error: Cannot use no/such/file: No such file or directory\.$")


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
    model = lf.Transformer(width=16, depth=4, gamma=0.5, feedforward=lf.ReLU())
    data = lf.simulate(model, lf.equicorrelated(2, 0.2), samples=6, seed=0, threads=1)
    return lf.Interrupted(data.isel(sample=slice(0, samples)))


def test_interruption_before_the_first_sample_writes_nothing(simulate, tmp_path, monkeypatch):
    monkeypatch.setattr(lf, "simulate", interrupt(partial(0)))
    result = simulate("--out", tmp_path / "data.nc")
    assert (result.exit_code, result.stdout) == (130, "")
    assert result.stderr == "Interrupted; nothing was written.\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["chain", "network"])
def test_interruption_keeps_the_samples_that_were_finished(run, tmp_path, monkeypatch, kind):
    monkeypatch.setattr(lf if kind == "chain" else lf.nn, "simulate", interrupt(partial(4)))
    result = run("simulate", *SMALL[:-2], "--as", kind, "--out", tmp_path / "data.nc")
    assert result.exit_code == 130
    assert "chain, 4 samples" in result.stdout
    assert result.stderr == "Interrupted; the table shows the 4 finished samples.\n"
    assert lf.load(tmp_path / "data.nc").sizes["sample"] == 4


def test_interrupted_figure_writes_nothing(run, tmp_path, monkeypatch):
    monkeypatch.setattr("limitformer_papers.shaped_transformer.st_fig7.compute", interrupt(KeyboardInterrupt()))
    result = run("figure", "st-fig7", "--out", tmp_path)
    assert (result.exit_code, result.stdout) == (130, "")
    assert result.stderr == "Interrupted; nothing was written.\n"
    assert list(tmp_path.iterdir()) == []


TELLING = """
import limitformer.simulation.simulate as engine
from limitformer.cli import main

def run_all(*arguments, run=engine.run_all):
    print("at work", flush=True)
    return run(*arguments)

engine.run_all = run_all
main()
"""


def test_sigint_ends_a_long_simulation_with_a_whole_file_or_none(tmp_path):
    """The signal arrives at an unknown moment, so both endings are correct."""
    path = tmp_path / "data.nc"
    long = ("--width", 64, "--depth", 100, "--samples", 500_000, "--record", "0,100", "--threads", 1)
    process = spawn("simulate", *long, "--out", path, command=[sys.executable, "-c", TELLING])
    assert process.stdout.readline() == "at work\n"
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    code, out, err = finished(process)
    assert code == 130
    assert "Traceback" not in err
    check_interrupted(path, out, err)


def check_interrupted(path, out, err):
    """Assert that nothing was finished and written, or that a whole file holds the finished samples."""
    if "Interrupted; nothing was written." in err:
        assert list(path.parent.iterdir()) == []
        return
    data = lf.load(path)
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    assert 0 < data.sizes["sample"] == data.attrs["samples"] < 500_000
    assert f"Interrupted; the table shows the {data.sizes['sample']} finished samples." in err
    assert f"chain, {data.sizes['sample']} samples, 2 tokens" in out
    assert bool((data["covariance"][:, 0] == data["covariance"][0, 0]).all())


# As a program of its own.


def test_python_m_limitformer_simulates(tmp_path):
    code, out, err = finished(spawn("simulate", *SMALL, "--out", tmp_path / "data.zarr"))
    assert code == 0, err
    assert "chain, 6 samples, 2 tokens" in out
    assert lf.load(tmp_path / "data.zarr").sizes["sample"] == 6


def test_python_m_limitformer_refuses_in_one_line():
    code, out, err = finished(spawn("simulate", "--gamma", "1.5", "--depth", "3"))
    assert (code, out) == (2, "")
    assert re.fullmatch(r"Error: gamma must lie in \[0, 1\]; got 1\.5\..*\n", err)


ENCODINGS = {
    "cp1252": {"PYTHONIOENCODING": "cp1252"},
    "POSIX": {"LC_ALL": "POSIX"},
    "ASCII": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
}


SEVERAL_COMMANDS = """
import sys
from limitformer.cli import main
for arguments in ("overlap --help", "overlap --dim 4 --beta 1", "figure list"):
    sys.argv = ["limitformer", *arguments.split()]
    try:
        main()
    except SystemExit as end:
        assert not end.code, arguments
"""


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_characters_that_the_terminal_lacks_are_replaced(encoding):
    """β and the lines of tables give no traceback."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("LC_", "LANG", "PYTHONIO"))}
    environment = {**kept, "COLUMNS": "160", **ENCODINGS[encoding]}
    done = subprocess.run([sys.executable, "-c", SEVERAL_COMMANDS], env=environment, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.count(b"limitformer") >= 1


def test_help_and_lists_do_not_wait_for_the_heavy_imports():
    commands = "for c in (['simulate', '--help'], ['figure', 'list']): app(c, standalone_mode=False)\n"
    code = f"import sys; from limitformer.cli.app import app\n{commands}"
    heavy = "print([name for name in ('torch', 'scipy.stats', 'matplotlib', 'xarray') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code + heavy], capture_output=True, encoding="utf-8", check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_interventions_are_options(run):
    model = run("simulate", "--no-identity", "--no-center", "--temperature", "standard", "--show-model")
    record = json.loads(model.stdout)["attention"]
    assert (record["identity"], record["center"], record["temperature"]) == (False, False, "standard")


def test_interventions_need_shaped_attention(refused):
    idle = "--identity would change nothing: the attention is not shaped"
    refused("simulate", "--attention", "softmax", "--no-identity", says=idle)


def test_a_radius_stops_paths_and_the_table_says_why(run):
    found = run("simulate", "--as", "limit", "--radius", "2", "--samples", "50", "--gamma", "0.9")
    assert found.exit_code == 0
    assert "samples left the ball and keep their last values" in found.stdout


def test_times_of_a_short_limit_are_distinct(run):
    """Four layers of width 200 are two steps, which have three times."""
    found = run("simulate", "--as", "limit", "--depth", "4", "--samples", "20")
    assert re.findall(r"^│ +([0-9.]+) │", found.stdout, re.MULTILINE) == ["0", "0.01", "0.02"]


def test_package_whose_commands_cannot_be_loaded_gives_a_warning_and_no_commands(capsys):
    broken = EntryPoint("broken", "limitformer.cli.app:no_commands", "limitformer.commands")
    assert commands_of(broken) == {}
    assert "Warning: the commands of limitformer.cli.app:no_commands cannot be loaded" in capsys.readouterr().err
    assert "figure" in commands_of(EntryPoint("papers", "limitformer_papers.commands:COMMANDS", "limitformer.commands"))


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("check llama-3-4", ["llama-3-405b"]),
        ("steps gpt2-m", ["gpt2-medium"]),
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
