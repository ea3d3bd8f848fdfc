"""Sweeps from TOML files, and refusals in one line."""

import pytest

import limitformer as lf
from limitformer.base.errors import InputError
from limitformer.sweep.file import read_sweep

ISSUE = """
[model]
kind = "StochasticTransformer"
tokens = 2
dim = 4
beta = 1.0
layers_per_unit_time = 100
[over]
dim = [4, 6, 8]
beta = { start = 0.0, stop = 2.0, step = 0.25 }
[simulate]
samples = 2000
horizon = 20.0
seed = 0
[keep]
outcomes = true
"""
NETWORK = """
[model]
kind = "Transformer"
width = 20
depth = 6
gamma = 0.5
[model.attention]
kind = "ShapedAttention"
tau0 = 1.0
[simulate]
samples = 4
[simulate.start]
tokens = 3
"""


@pytest.fixture
def read(tmp_path):
    def reads(text):
        file = tmp_path / "sweep.toml"
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        return read_sweep(file)

    return reads


def test_example_of_the_documentation_is_read(read):
    description = read(ISSUE)
    assert description.base == lf.StochasticTransformer(tokens=2, dim=4, beta=1.0, layers_per_unit_time=100)
    assert description.over == {"dim": [4, 6, 8], "beta": [0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0]}
    assert (description.settings["samples"], description.settings["seed"]) == (2000, 0)
    assert description.settings["horizon"] == 20.0
    assert description.reduce == {"outcomes": {"level": 0.95}}
    assert list(description.over) == ["dim", "beta"]


def test_file_has_all_options_of_python(read):
    text = ISSUE.replace(
        "horizon = 20.0", 'horizon = 2.0\nas = "limit"\ndt = 0.02\nrecord = [1.0, 2.0]\ncommon_seed = true'
    )
    text = text.replace("outcomes = true", "outcomes = { level = 0.9 }\nquantiles = [0.5]\nks = false")
    settings = {"samples": 2000, "horizon": 2.0, "seed": 0, "as": "limit", "dt": 0.02, "record": [1.0, 2.0]}
    keep = {"outcomes": {"level": 0.9}, "quantiles": [0.5]}
    over = {"dim": [4, 6, 8], "beta": [k / 4 for k in range(9)]}
    expected = lf.Sweep(
        lf.StochasticTransformer(tokens=2, dim=4, beta=1.0, layers_per_unit_time=100),
        over=over,
        simulate={**settings, "common_seed": True},
        reduce=keep,
    )
    assert read(text) == expected


AXES = {
    "[0.5, 1]": [0.5, 1],
    "{ start = 0.0, stop = 0.3, step = 0.1 }": [0.0, 0.1, 0.2, 0.3],
    "{ start = 0, stop = 1, step = 0.3 }": [0.0, 0.3, 0.6, 0.9],
    "{ start = 2, stop = 8, step = 3 }": [2, 5, 8],
    "{ start = 0.0, stop = 1.0, count = 5 }": [0.0, 0.25, 0.5, 0.75, 1.0],
    '{ start = 0.01, stop = 100, count = 5, scale = "log" }': [0.01, 0.1, 1.0, 10.0, 100.0],
    '{ start = 1e-20, stop = 1e-16, count = 3, scale = "log" }': [1e-20, 1e-18, 1e-16],
    "{ start = 3.0, stop = 1.0, count = 3 }": [3.0, 2.0, 1.0],
}


@pytest.mark.parametrize("axis", AXES)
def test_axis_has_the_values_of_its_range(read, axis):
    found = read(ISSUE.replace("{ start = 0.0, stop = 2.0, step = 0.25 }", axis)).over["beta"]
    assert found == AXES[axis]
    assert [type(value) for value in found] == [type(value) for value in AXES[axis]]


@pytest.mark.parametrize(
    "over",
    [
        '"attention.tau0" = [0.5, 1.0]\n"start.correlation" = { start = 0.0, stop = 0.5, step = 0.25 }',
        "attention.tau0 = [0.5, 1.0]\nstart.correlation = { start = 0.0, stop = 0.5, count = 3 }",
        "[over.attention]\ntau0 = [0.5, 1.0]\n[over.start]\ncorrelation = [0.0, 0.25, 0.5]",
        "attention = { tau0 = [0.5, 1.0] }\nstart = { correlation = { start = 0.0, stop = 0.5, step = 0.25 } }",
    ],
    ids=["quoted", "dotted", "tables", "inline"],
)
def test_dotted_names_are_fields_of_parts_and_of_the_start(read, over):
    description = read(f"{NETWORK}\n[over]\n{over}")
    assert description.over == {"attention.tau0": [0.5, 1.0], "start.correlation": [0.0, 0.25, 0.5]}
    assert [cell.model.attention.tau0 for cell in description.cells()] == [0.5] * 3 + [1.0] * 3


REFUSED = {
    "not TOML": ("[model", " is not TOML: "),
    "not text": (b"\xff\xfe", " is not TOML: "),
    "keep is no table": ('keep = "all"\n' + ISSUE[: ISSUE.index("[keep]")], ": [keep] must be a table; got 'all'."),
    "unknown section": (ISSUE + "[simulation]\n", ": A sweep's file has no field 'simulation'. Nearest: simulate."),
    "value": (ISSUE.replace("[4, 6, 8]", "[4, 1]"), ": Cell dim = 1, beta = 0.0: dim must be at least 2; got 1."),
    "no end": (ISSUE.replace("stop = 2.0, ", ""), ": The axis 'beta' must be a list, {start, stop, step}, or "),
    "step of zero": (ISSUE.replace("step = 0.25", "step = 0"), ": The axis 'beta' needs a positive step; got 0."),
    "infinite": (ISSUE.replace("stop = 2.0", "stop = inf"), ": The axis 'beta' must have finite numbers; got "),
    "too many": (ISSUE.replace("step = 0.25", "step = 1e-9"), ": The axis 'beta' has 2,000,000,000 values; at most "),
    "log of zero": (ISSUE.replace("step = 0.25", 'count = 2, scale = "log"'), ": The axis 'beta' needs positive ends"),
}


@pytest.mark.parametrize(("text", "says"), REFUSED.values(), ids=list(REFUSED))
def test_bad_file_is_refused_in_one_line(read, tmp_path, monkeypatch, text, says):
    monkeypatch.setattr("limitformer.sweep.describe.simulate", lambda *_, **__: pytest.fail("work was done"))
    with pytest.raises(InputError) as raised:
        read(text)
    assert str(raised.value).startswith(f"{tmp_path / 'sweep.toml'}{says}")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("name", "reason"), [("none.toml", "No such file"), (".", "Is a directory")])
def test_unreadable_file_is_refused(tmp_path, name, reason):
    with pytest.raises(InputError, match=f"^Cannot read .*: {reason}"):
        read_sweep(tmp_path / name)
