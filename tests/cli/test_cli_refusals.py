"""Refusals of commands: one line with the reason, before any work, without a file."""

import json
import re
import shlex
import sys

import pytest

import limitformer as lf

LONG = 300 * "a"  # a name may have 255 bytes
NUMBERS = "must be finite numbers or ranges start:stop:step, separated by commas; got "
MODEL = {
    "kind": "Transformer",
    "width": 200,
    "depth": 150,
    "gamma": 0.3,
    "attention": {"kind": "ShapedAttention", "tau0": 1},
}
FILES = {
    "m.json": json.dumps(MODEL),
    "sphere.json": '{"kind": "StochasticTransformer", "tokens": 2, "dim": 4, "beta": 1.0, "layers_per_unit_time": 1}',
    "list.json": "[1]",
    "over.toml": "[over]\ngamma = [0.1]\n",
    "broken.toml": "[model\n",
    "empty.txt": "",
    "two.txt": "one two",
    "long.txt": 65 * "word ",
}
# (command, part of its message); words that begin with < are files of `FILES`
REFUSALS = {
    "simulate": [
        ("simulate", "Missing argument 'MODEL.toml'. The model comes from a TOML file, and 'limitformer simulate"),
        ("simulate m.json --gamma 0.5", "No such option: --gamma. The model comes from a TOML file"),
        ("simulate m.json --samples many", "'--samples'"),
        ("simulate m.json --text", "--text' requires an argument"),
        ("simulate nowhere.toml", "Cannot read nowhere.toml: No such file"),
        ("simulate broken.toml", "broken.toml is not TOML"),
        ("simulate over.toml", "over.toml: A model's file needs the table [model]; 'limitformer simulate --help'"),
        ("simulate list.json", "list.json: A model must be a JSON object; got list"),
        ("simulate sphere.json", "sphere.json describes a StochasticTransformer, not a Transformer."),
        ("simulate m.json --set gama=1", "m.json: Transformer has no field gama"),
        ("simulate m.json --set gamma.x=1", "m.json: --set gamma.x: gamma is 0.3, which has no fields."),
        ("simulate m.json --set gamma=2", "m.json: gamma must lie in [0, 1]; got 2"),
        ("simulate m.json --set norm.placement=pre", "m.json: \"kind\" must be one of"),
        ("simulate m.json --as magic", "--as must be chain, limit or network; got 'magic'"),
        ("simulate m.json --samples 0", "samples must be at least 1; got 0"),
        ("simulate m.json --samples 1000000000000", "GiB are free. Nearest: take fewer samples"),
        ("simulate m.json --correlation -2", "correlation of 2 tokens must lie in [-1, 1]; got -2"),
        ("simulate m.json --text two.txt --variance 2", "--variance would change nothing: --text is the start"),
        ("simulate m.json --positions", "--positions would change nothing: there is no --text"),
        ("simulate m.json --text empty.txt", "must hold at least one word"),
        ("simulate m.json --text two.txt --tokens 5", "two.txt has 2 tokens; 5 were asked for"),
        ("simulate m.json --text long.txt", "has more than 64 tokens; give a number, e.g. --tokens 64"),
        ("simulate m.json --text nowhere.txt", "Cannot read the text nowhere.txt: No such file"),
        ("simulate m.json --record a,b", "--record must be numbers separated by commas, e.g. 0,50,150; got 'a,b'"),
        ("simulate m.json --record 200", "must lie in 0 … 150; got"),
        ("simulate m.json --as limit --record 0.8", "Times to record must lie in [0, 0.75]"),
        ("simulate m.json --as limit --step heun", 'step must be "factor" or "euler-maruyama"; got \'heun\''),
        ("simulate m.json --as limit --set attention.kind=SoftmaxAttention", "Softmax attention has no limit, because"),
        ("simulate m.json --as network --dt 0.1", "The network has no option dt"),
        ("simulate m.json --out m.json/data.nc", "Cannot write"),
        ("simulate m.json --out data.csv", "saved as .nc (NetCDF) or .zarr; got 'data.csv'"),
        (f"simulate m.json --out {LONG}.nc", "File name too long"),
    ],
    "phase": [
        ("phase --beta 1,2,-301", "Cell tokens = 2, dim = 4, beta = -301.0: beta must be at least -300; got -301."),
        ("phase --dim 1e30", "--dim must be whole numbers, at most 2**53; got '1e30'."),
        ("phase --tokens ' '", f"--tokens {NUMBERS}' '."),
        ("phase --beta 1,", f"--beta {NUMBERS}'' in '1,'."),
        ("phase --beta 0:1", f"--beta {NUMBERS}'0:1'."),
        ("phase --beta 1:0:0.5", "--beta has no value: the range ends before it begins; got '1:0:0.5'."),
        ("phase --beta 0:1:0", "--beta needs a positive step in start:stop:step; got '0:1:0'."),
        ("phase --beta 2,0:1:1e-9", "--beta takes at most 10,000 values in a range; got '0:1:1e-9' in "),
        ("phase --dim 4,4.0", "--dim has a value twice; got '4,4.0'."),
        ("phase --dim 2:5000:1 --beta 0:5:0.01", "The grid has 2,504,499 cells (1 tokens x 4,999 dim x 501 beta); at"),
        ("phase --epsilon 1 --sigma 2", "--sigma would change nothing: a hybrid model has --epsilon instead."),
        ("phase --epsilon 1 --heads 2 --mask causal", "--heads, --mask would change nothing: only the"),
        ("phase --tau 2", "tau would change nothing: queries and keys are fixed."),
        ("phase --early-stop nan", "--early-stop must be at least 0 (never) and below 1; got nan."),
        ("phase --samples 1e3", "; got '1e3'. See 'limitformer phase --help'."),
        ("phase --json", "No such option: --json"),
        ("phase --out m.json", "Cannot write into the folder m.json: "),
        (f"phase --store {LONG}", "File name too long|is not the store"),
    ],
    "figure": [
        ("figure st-fig9", "Unknown figure 'st-fig9'; there are st-fig1"),
        ("figure st-fig1 --scale huge", "Unknown scale 'huge'; there are paper, quick"),
        ("figure", "Missing argument 'NAME'. See 'limitformer figure --help'."),
        ("figure st-fig7 --scale quick --out . --threads 0", "threads must be at least 1"),
        ("figure st-fig1 --out m.json", "Cannot write"),
        (f"figure st-lr --out . --runs {LONG}", "File name too long"),
    ],
    "other": [
        ("paint", "No such command 'paint'"),
        ("--colour", "No such option: --colour"),
        ("overlap --dim 4", "overlap is a function of Python now: limitformer.overlap(model).summary()"),
        (f"sweep status {LONG}", "Cannot use the folder"),
        (f"transfer gpt2 --widths 64,128 --out {LONG}", "File name too long"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("command", REFUSALS)
def test_command_refuses_in_one_line_before_any_work(refused, tmp_path, monkeypatch, command):
    def no_work(*_, **__):
        pytest.fail("work was done")

    monkeypatch.setattr("limitformer.simulation.simulate.run_all", no_work)
    monkeypatch.setattr("limitformer.sweep.describe.simulate", no_work)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    for line, says in REFUSALS[command]:
        refused(*shlex.split(line), says="|".join(map(re.escape, says.split("|"))))


def test_file_that_no_command_checks_is_named_in_one_line(refused, model_file, monkeypatch):
    monkeypatch.setattr(lf, "simulate", lambda *_, **__: open("no/such/file"))  # noqa: SIM115
    refused("simulate", model_file, says=r"^Error: Cannot use no/such/file: No such file or directory\.$")


# Commands about networks answer these before they import torch.

TYPOS = [
    ("check gpt3", "no public shape, file or folder 'gpt3'. Nearest: gpt2"),
    ("check gpt2 --against gpt3", "no public shape, file or folder 'gpt3'"),
    ("check gpt2 --fail-on collapst", "--fail-on: there is no verdict 'collapst'"),
    ("check gpt2 --threshold colapse=1", "--threshold: thresholds has no 'colapse'"),
    ("check gpt2 --threshold collapse=x", "must be a number; got 'x'"),
    ("check gpt2 --threshold collapse=7", "--threshold: thresholds['collapse'] must"),
    ("check gpt2 --set n_layer=1 --set n_layer=2", "--set gives n_layer twice"),
    ("check gpt2 --shaped foo=1", "--shaped has no option 'foo'; there are gamma, tau0"),
    ("check gpt2 --shaped per_head=3", "--shaped per_head is true or false; got 3."),
    ("check gpt2 --tokens 1", "--tokens must be at least 2; got 1."),
    ("check gpt2 --samples 0", "--samples must be at least 1; got 0."),
    ("check gpt2 --text no.txt", "Cannot read the text no.txt"),
    ("design gpt2 --knobs x", "there is no knob 'x'; there are initializer_range"),
    ("design gpt2 --knobs output,logits,embedding", "knobs must be one or two names; got 3."),
    ("design gpt2 --grid outputs=1,2", "--grid has no knob 'outputs'"),
    ("design gpt2 --risk 0", "--risk must lie in (0, 1); got 0."),
    ("steps gpt2 --optimizer adamw --rates 0", "--rates must be above 0"),
    ("check nowhere.py:build", "there is no file nowhere.py."),
    ("check gpt2 --inputs nowhere.py:batch", "there is no file nowhere.py."),
    ("check gpt2 --inputs nowhere.txt", "--inputs: there is no file nowhere.txt. It takes a number"),
    ("rate gpt2 --optimizer nowhere.py:make", "there is no file nowhere.py."),
    ("steps gpt2 --optimizer adamw --loss nowhere.py:loss", "there is no file nowhere.py."),
    ("transfer nowhere.py:build --widths 8,16", "there is no file nowhere.py."),
    ("design nowhere.py:build", "there is no file nowhere.py."),
    ("compare nowhere.py:build gpt2", "there is no file nowhere.py."),
]
ASKED = """
import json, sys
from limitformer.cli import main
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["limitformer", *arguments]
    try:
        main()
    except SystemExit as end:
        print(end.code, [name for name in ("torch", "transformers", "numba", "xarray") if name in sys.modules])
"""


def test_typos_are_answered_before_anything_large_is_imported(process, tmp_path):
    lines = json.dumps([shlex.split(line) for line, _ in TYPOS])
    code, out, errors = process([sys.executable, "-c", ASKED, lines], cwd=tmp_path, capture_output=True)
    assert (code, out.splitlines()) == (0, ["2 []"] * len(TYPOS)), errors
    for answer, (line, says) in zip(errors.splitlines(), TYPOS, strict=True):
        assert answer.startswith("Error: "), line
        assert says in answer, line
