"""`limitformer steps`: its report, files and exit codes, and one line for every wrong option."""

import json
import sys

import pytest

import limitformer as lf
from limitformer.cli.options import user_object
from limitformer.cli.steps import rates_of
from limitformer.stepping.trajectory import Trajectory

SMALL = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 30, "n_positions": 16}
CODE = """
import torch
from torch import nn

def sgd(module):
    return torch.optim.SGD(module.parameters(), lr=0.5)

def frozen(module):
    return torch.optim.SGD(module.parameters(), lr=1e-30)

def ids():
    return torch.tensor([[1, 2, 3, 1, 2, 3]])

class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)
        self.blocks = nn.ModuleList([nn.Linear(8, 8)])

    def forward(self, ids, targets=None):
        logits = self.head(self.blocks[0](self.table(ids)))
        loss = None if targets is None else nn.functional.cross_entropy(logits.mT, targets)
        return logits, loss
"""
QUICK = ("--steps", "1", "--samples", "2", "--tokens", "6")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return a folder, the current one, with a configuration and the user's functions."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # of the user's file, beside it
    (tmp_path / "small.json").write_text(json.dumps(SMALL), encoding="utf-8")
    (tmp_path / "mine.py").write_text(CODE, encoding="utf-8")
    return tmp_path


@pytest.fixture
def steps(run, folder):
    """Run `limitformer steps small.json` by the user's SGD."""
    return lambda *arguments: run("steps", "small.json", "--optimizer", "mine.py:sgd", *QUICK, *arguments)


def test_steps_prints_verdicts_table_and_caveat(steps):
    result = steps("--rates", "0.01,0.1,100", "--full")
    words = " ".join(result.stdout.split())
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("  · note: not decided: the loss of the batch falls")
    assert "\nsmall.json: SGD (" in result.stdout
    assert "SGD (momentum 0, dampening 0, weight_decay 0), 3 rates, 1 step, 2 networks, 6 tokens, same batches" in words
    assert "the loss of the batch falls within 1 step up to a rate of 0.1, in 2 of 2 networks" in words
    assert [line.split()[0] for line in result.stdout.splitlines()[-12:-9]] == ["0.01", "0.1", "100"]
    assert "What to watch at a rate of 0.1; nine of ten networks lie within:" in words
    assert "nothing is said about later steps" in words


def test_steps_of_the_command_are_those_of_the_function(steps, folder):
    result = steps("--rates", "0.1", "--seed", 3, "--clip", 0.5, "--set", "n_layer=2", "--out", "new/out")
    assert result.exit_code == 0, result.output
    names = ["steps.html", "steps.csv", "steps.json", "steps.nc"]
    assert result.stdout.splitlines()[-3] == "Wrote " + ", ".join(f"new/out/{name}" for name in names)
    data = lf.load(folder / "new" / "out" / "steps.nc")
    options = {
        "optimizer": user_object("mine.py:sgd", "--optimizer"),
        "rates": [0.1],
        "steps": 1,
        "samples": 2,
        "seed": 3,
        "clip": 0.5,
    }
    report = lf.steps(str(folder / "small.json"), 6, settings={"n_layer": 2}, progress=False, **options)
    assert data["loss"].values.tolist() == report.data["loss"].values.tolist()
    assert data["clipping"].values[0, 0, 0] < 1
    assert data.sizes["block"] == 2


def test_sequences_and_fresh_batches_are_one_option(steps, folder):
    for given, words in (("fresh", "6 tokens, fresh"), ("2,fresh", "12 tokens, fresh"), ("2", "12 tokens, same")):
        result = steps("--sequences", given, "--out", "there")
        assert words in " ".join(result.stdout.split()), result.output
        assert lf.load(folder / "there" / "steps.nc").attrs["batches"] == ("fresh" if "fresh" in given else "same")


def test_function_builds_model_and_inputs(run, folder):
    result = run("steps", "mine.py:Tiny", "--optimizer", "mine.py:sgd", "--inputs", "mine.py:ids", *QUICK)
    assert result.exit_code == 0, result.output
    assert "\nTiny: " in result.stdout
    assert "6 tokens" in result.stdout


def test_loss_is_named_on_the_command_line(run, folder):
    (folder / "mine.py").write_text(f"{CODE}\ndef mean(out, inputs):\n    return out[0].mean()\n", encoding="utf-8")
    names = {"next-token": "loss: next-token cross-entropy", "mine.py:mean": "loss: mine"}
    commands = {"steps": ("--optimizer", "mine.py:sgd", *QUICK), "check": ("--tokens", 6, "--samples", 2)}
    for command, options in commands.items():
        for loss, words in names.items():
            result = run(command, "mine.py:Tiny", *options, "--loss", loss)
            assert words in " ".join(result.stdout.split()), result.output
        assert "Nearest: mse" in run(command, "mine.py:Tiny", *options, "--loss", "mser").stderr
    result = run("transfer", "small.json", "--widths", "16,32", *QUICK, "--loss", "next-token")
    assert "loss: next-token cross-entropy" in " ".join(result.stdout.split()), result.output


def test_fail_on_ends_with_one(run, steps, folder):
    still = run("steps", "small.json", "--optimizer", "mine.py:frozen", *QUICK, "--fail-on", "rate")
    assert still.exit_code == 1, still.output
    assert "does not fall within 1 step at a rate of 1e-30" in still.stdout
    passed = steps("--rates", "0.01", "--fail-on", "rate")
    assert passed.exit_code == 0, passed.output


def test_interrupted_steps_print_and_write_the_finished_networks(steps, folder, monkeypatch):
    def arrays(self, real=Trajectory.arrays):
        if self.sample == 1:
            raise KeyboardInterrupt
        return real(self)

    monkeypatch.setattr(Trajectory, "arrays", arrays)
    result = steps("--out", "out")
    assert result.exit_code == 130
    assert "1 of 2 networks" in " ".join(result.stdout.split())
    assert "PARTIAL" in result.stdout
    assert result.stderr == "Interrupted; this is about the finished network.\n"
    assert lf.load(folder / "out" / "steps.nc").sizes["sample"] == 1
    monkeypatch.setattr(Trajectory, "arrays", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
    result = steps("--out", "other")
    assert (result.exit_code, result.stdout) == (130, "")
    assert result.stderr == "Interrupted; nothing was written.\n"
    assert list((folder / "other").iterdir()) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1e-5:1e-2:4", [1e-5, 1e-4, 1e-3, 1e-2]),
        ("1:4:3", [1.0, 2.0, 4.0]),
        ("0.3", [0.3]),
        ("0.3, 1e-3", [0.3, 1e-3]),
        (None, None),
    ],
)
def test_rates_are_read(text, expected):
    assert rates_of(text) == expected


@pytest.mark.parametrize("name", ["sgd", "muon"])
def test_optimizers_by_name_train(run, folder, name):
    result = run("steps", "small.json", "--optimizer", name, *QUICK, "--rates", "1e-3", "--weight-decay", 0.1)
    assert result.exit_code == 0, result.output
    assert f"\nsmall.json: {name} (" in result.stdout
    assert "falls within 1 step at a rate of 0.001, in 2 of 2 networks" in " ".join(result.stdout.split())


REFUSALS = [
    (("--optimizer", "adamw2"), r"--optimizer is not FILE.py:NAME, and has no 'adamw2'; there are .*Nearest: adamw\."),
    (("--rates", "0"), r"--rates must be above 0 and at most 100; got 0\. Nearest: rates from 1e-5 to 1\."),
    (("--rates", "1e-3,nan"), r"--rates must be above 0 .*got nan"),
    (("--rates", "1e-3,0.001"), r"--rates gives a rate twice"),
    (("--rates", "1e-3:1e-2"), r"--rates takes LOW:HIGH:N, such as 1e-5:1e-2:7"),
    (("--rates", "1e-3,1e-2:1e-1:3"), r"--rates takes LOW:HIGH:N, such as 1e-5:1e-2:7"),
    (("--rates", "1e-2:1e-3:4"), r"LOW below HIGH.*Nearest: 0\.001:0\.01:4"),
    (("--rates", "1e-3:1e-2:1"), r"N in --rates LOW:HIGH:N must be at least 2; got 1"),
    (("--rates", "1e-3:1e-2:1000"), r"at most 100 rates"),
    (("--rates", "low"), r"--rates takes numbers, such as 1e-3; got 'low'"),
    (("--tokens", "1"), r"--tokens must be at least 2; got 1"),
    (("--warmup", "-1"), r"--warmup must be at least 0; got -1"),
    (("--clip", "0"), r"--clip must be above 0 and finite; got 0"),
    (("--batches", "fresh"), r"No such option: --batches\. Nearest: --sequences fresh, or 16,fresh\."),
    (("--sequences", "frehs"), r"--sequences takes B, fresh, or B,fresh, such as 16,fresh; got 'frehs'"),
    (("--sequences", "4,8"), r"--sequences takes B, fresh, or B,fresh, such as 16,fresh; got '4,8'"),
    (("--sequences", "0,fresh"), r"--sequences must be at least 1; got 0"),
    (("--betas", "0.9,1"), r"--betas takes two numbers in \[0, 1\)"),
    (
        ("--optimizer", "sgd", "--betas", "0.9,0.9"),
        r"--betas is for adam, adamw, lion and muon, not for sgd",
    ),
    (("--optimizer", "sgd", "--momentum", "1"), r"--momentum must lie in \[0, 1\)"),
    (("--weight-decay", "-1"), r"--weight-decay must be 0 or above"),
    (("--optimizer", "mine.py:sgd", "--weight-decay", "1"), r"--weight-decay: a function sets its options itself"),
    (("--fail-on", "rats"), r"--fail-on: there is no verdict 'rats'.*Nearest: rate"),
    (("--text", "none.txt"), r"Cannot read the text none\.txt"),
    (("--text", "small.json", "--inputs", "4"), r"--text and --inputs cannot both be given"),
    (("--set", "n_layers=2"), r"no field 'n_layers'"),
    (("--out", " "), r"--out must be a folder"),
]


def test_wrong_options_give_one_line(refused, folder):
    for arguments, says in REFUSALS:
        optimizer = () if "--optimizer" in arguments else ("--optimizer", "adamw")
        refused("steps", "small.json", *optimizer, *arguments, says=says)


def test_unknown_networks_give_one_line(refused, folder):
    refused("steps", "gpt3", "--optimizer", "adamw", says=r"no public shape.*Nearest: gpt2")
    refused("steps", "mine.py", "--optimizer", "adamw", says=r"mine\.py is Python\. Nearest: mine\.py:NAME")
    refused("steps", "mine.py:Tinny", "--optimizer", "mine.py:sgd", says=r"mine\.py has no 'Tinny'\. Nearest: Tiny")
    refused("steps", "mine.py:xyz", "--optimizer", "mine.py:sgd", says=r"mine\.py has no 'xyz'\. It has .*Tiny")
    refused("steps", "small.json", says="Missing option '--optimizer'")
