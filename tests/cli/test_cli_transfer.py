"""`limitformer transfer`: its table, files, and one line for every wrong option."""

import json

import pytest
import torch

import limitformer as lf
from limitformer.stepping.trajectory import Trajectory

SMALL = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 30, "n_positions": 16}
QUICK = ("--steps", "1", "--samples", "2", "--tokens", "6")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.json").write_text(json.dumps(SMALL), encoding="utf-8")
    return tmp_path


def test_command_prints_exponents_and_writes_files(run, folder):
    result = run("transfer", "small.json", "--widths", "16,32,64", "--rate", "1e-3", "--out", "found", *QUICK)
    assert result.exit_code == 0, result.stderr
    assert "width 16" in result.stdout
    assert "exponent" in result.stdout
    names = {path.name for path in (folder / "found").iterdir()}
    assert names == {f"transfer.{kind}" for kind in ("html", "json", "csv", "nc", "png")}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "give sizes by --widths, --depths or --over"),
        (("--widths", "16,32", "--over", "batch=1,2"), "--over excludes --widths and --depths"),
        (("--widths", "16,wide"), "sizes must be whole numbers"),
        (("--widths", "16,32", "--rule", "mumup"), "--rule must be one of"),
        (("--widths", "16,32", "--optimizer", "adamax"), "--optimizer must be one of"),
        (("--widths", "16,32", "--set", "depth=3"), "the configuration of gpt2 has no field 'depth'"),
        (("--over", "n_embd"), "--over takes NAME=N"),
        (("--widths", "16,32", "--fail-on", "rate"), "--fail-on must be transfer; got 'rate'"),
        (("--widths", "16,32", "--fail-on", "transfer", "--samples", "3"), "--fail-on transfer needs --samples 4 or"),
        (("--over", "batch=1,2", "--sequences", "2"), "over the batch its sizes are the numbers of sequences"),
        (("--widths", "16,32", "--inputs", "nothing.txt"), "--inputs: there is no file nothing.txt"),
        (("--widths", "16,32", "--base", "0"), "--base must be a size of at least 1; got 0"),
    ],
)
def test_wrong_options_of_transfer_give_one_line(run, folder, options, message):
    result = run("transfer", "small.json", *options)
    assert result.exit_code == 2
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def interrupted_at(monkeypatch, width, sample):
    """Press Ctrl-C when this network begins."""

    def arrays(self, real=Trajectory.arrays):
        if self.sample == sample and self.network.module.transformer.wte.weight.shape[-1] == width:
            raise KeyboardInterrupt
        return real(self)

    monkeypatch.setattr(Trajectory, "arrays", arrays)


def test_interrupted_transfer_prints_and_writes_the_finished_sizes(run, folder, monkeypatch):
    interrupted_at(monkeypatch, 64, 1)
    result = run("transfer", "small.json", "--widths", "16,32,64", "--out", "found", *QUICK)
    assert result.exit_code == 130
    assert result.stderr == "Interrupted; this is about the finished networks of 2 sizes: 2 and 2.\n"
    assert "PARTIAL, as it was interrupted: of 2 networks at each size" in result.stdout
    record = json.loads((folder / "found" / "transfer.json").read_text(encoding="utf-8"))
    assert record["sizes"] == [16, 32]


@pytest.mark.parametrize(("verdict", "code"), [(False, 1), (None, 0)])
def test_fail_on_transfer_is_the_exit_code(run, folder, monkeypatch, verdict, code):
    monkeypatch.setattr("limitformer.scaling.transfer.Transfer.transfers", verdict)
    command = ("transfer", "small.json", "--widths", "16,32", "--steps", "1", "--samples", "4", "--tokens", "6")
    assert run(*command, "--fail-on", "transfer").exit_code == code


CODE = """
import torch
from torch import nn


class Tiny(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.table, self.head = nn.Embedding(30, width), nn.Linear(width, 30)
        self.blocks = nn.ModuleList([nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width))])

    def forward(self, ids):
        x = self.table(ids)
        return self.head(x + self.blocks[0](x))


def build(width=16):
    return Tiny(width)


def make(module):
    return torch.optim.AdamW([{"params": list(module.parameters()), "lr_scale": 0.5}], lr=1e-2)


def scale(optimizer):
    for group in optimizer.param_groups:
        group["lr"] *= group["lr_scale"]
"""


def test_target_and_keys_of_groups_are_options(run, folder):
    (folder / "code.py").write_text(CODE, encoding="utf-8")
    command = ("transfer", "code.py:build", "--widths", "16,32", "--optimizer", "code.py:make", *QUICK)
    refused = run(*command)
    assert refused.exit_code == 2
    assert "has lr_scale, which is not understood. Nearest: after_groups (--after-groups)" in refused.stderr
    result = run(*command, "--after-groups", "code.py:scale", "--rule", "mup", "--target", "64", "--full")
    assert result.exit_code == 0, result.stderr
    assert "AdamW (lr 0.005, " in result.stdout
    assert "What to set at width 64, rule mup, base 16:" in result.stdout
    assert "at 64, predicted" in result.stdout
    for name in ("steps", "rate"):
        few = ("--samples", "1") if name == "steps" else ("--networks", "1")
        few += ("--tokens", "6")
        scaled = run(name, "code.py:build", "--optimizer", "code.py:make", "--after-groups", "code.py:scale", *few)
        assert scaled.exit_code == 0, scaled.stderr
        assert "0.005" in scaled.stdout


def test_inputs_and_sequences_are_the_batch_of_every_size(run, folder):
    ids = [[1, 2, 3, 1, 2, 3, 7], [4, 5, 4, 6, 4, 5, 1], [8, 9, 9, 9, 2, 1, 0]]
    (folder / "data.py").write_text(
        f"import torch\n\n\ndef batch():\n    return torch.tensor({ids})\n", encoding="utf-8"
    )
    options = ("--inputs", "data.py:batch", "--sequences", "2", "--json")
    result = run("transfer", "small.json", "--widths", "16,32", *QUICK, *options)
    assert result.exit_code == 0, result.stderr
    own = json.loads(result.stdout)["measures"]

    def measures(rows, sequences):
        given, known = torch.tensor(ids)[:rows, :6], {"optimizer": "adamw", "steps": 1, "samples": 2, "seed": 0}
        result = lf.transfer(SMALL, {"width": [16, 32]}, given, **known, sequences=sequences, progress=False)
        return result.record()["measures"]

    assert own == measures(2, 2) == measures(3, 2)
    assert own != measures(3, None)
