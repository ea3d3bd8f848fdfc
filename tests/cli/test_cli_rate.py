"""`limitformer rate`: its answer, files, next command and exit codes, and one line for every wrong option."""

import json
import re
import shlex
import sys

import pytest

from limitformer.rates import rate as module

SMALL = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 30, "n_positions": 16}
CODE = """
import torch

def sgd(module):
    return torch.optim.SGD(module.parameters(), lr=0.5)

def build():
    norms = torch.nn.RMSNorm(8), torch.nn.RMSNorm(8)
    return torch.nn.Sequential(torch.nn.Embedding(30, 8), torch.nn.Linear(8, 8), *norms, torch.nn.Linear(8, 30))

def batch():
    return torch.tensor([[1, 2, 3, 1, 2, 3], [4, 5, 6, 7, 8, 9]])
"""


@pytest.fixture
def rate(run, tmp_path, monkeypatch):
    """Run `limitformer rate small.json` by the user's SGD on the user's batch."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.json").write_text(json.dumps(SMALL), encoding="utf-8")
    (tmp_path / "mine.py").write_text(CODE, encoding="utf-8")
    usual = ("rate", "small.json", "--optimizer", "mine.py:sgd", "--inputs", "mine.py:batch", "--witness", "no")

    def rate(*arguments):
        monkeypatch.setattr(sys, "argv", ["limitformer", *usual, *arguments])
        return run(*usual, *arguments)

    return rate


def test_rate_prints_the_answer_and_writes_files(rate, tmp_path):
    result = rate("--out", "there")
    assert result.exit_code == 0, result.output
    record = json.loads((tmp_path / "there" / "rate.json").read_text(encoding="utf-8"))
    assert record["decided"]
    assert " ".join(result.stdout.split()).startswith(record["answer"])
    command = shlex.split(result.stdout.splitlines()[-1])
    assert command[:3] == ["Next:", "limitformer", "transfer"]
    assert command[command.index("--inputs") + 1] == "mine.py:batch"
    page = (tmp_path / "there" / "rate.html").read_text(encoding="utf-8")
    assert record["answer"] in page
    assert "input_ids (2, 6)" in page


def test_steps_follow_for_a_function_without_a_width(rate, run):
    result = run("rate", "mine.py:build", "--optimizer", "mine.py:sgd", "--tokens", "6", "--witness", "no")
    assert result.exit_code == 0, result.output
    low, high = re.match("Tune between ([0-9.e-]+) and ([0-9.e-]+)[;.]", result.stdout).groups()
    command = shlex.split(result.stdout.splitlines()[-1])
    assert command[:4] == ["Next:", "limitformer", "steps", "mine.py:build"]
    assert float(low) < float(command[command.index("--rates") + 1]) < float(high)


def test_answer_that_is_not_decided_ends_with_the_command_that_would(rate, run):
    result = rate("--networks", "1")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("Not decided: 3 more networks, about ")
    assert "Provisional: the critical rate of one network is " in " ".join(result.stdout.split())
    command = result.stdout.splitlines()[-1]
    assert command.startswith("Next: limitformer rate")
    assert re.search(r"--networks 4 --minutes \d+ ", command)
    again = run(*shlex.split(command.removeprefix("Next: limitformer ")), "--minutes", "60")
    assert again.exit_code == 0, again.output
    assert "4 networks" in again.stdout


def test_interruption_prints_the_finished_networks(rate, monkeypatch):
    plain = module.search

    def stopped(training, network, *rest):
        if network == 2:
            raise KeyboardInterrupt
        return plain(training, network, *rest)

    monkeypatch.setattr(module, "search", stopped)
    result = rate()
    assert result.exit_code == 130
    assert "2 networks" in " ".join(result.stdout.split())
    assert "finished networks" in result.stderr
    assert result.stdout.splitlines()[-1].startswith("Next: limitformer rate small.json")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--minutes", "0"), "--minutes must be above 0"),
        (("--equivalent-to", "adamw", "--steps", "2"), "--steps and --witness: --equivalent-to compares"),
        (("--equivalent-to", "adamw", "--minutes", "1"), "--minutes and --witness: --equivalent-to"),
        (("--equivalent-to", "adamw", "--warmup", "4"), "--warmup and --witness: --equivalent-to"),
        (("--sequences", "2,fresh"), "'--sequences'"),
        (("--networks", "0"), "--networks must be"),
        (("--clip", "-1"), "--clip must be above 0"),
        (("--text", "mine.py"), "--text and --inputs cannot both be given"),
        (("--optimizer", "adamv"), "Nearest: adam"),
        (("--optimizer", "mine.py:sdg"), "Nearest: sgd"),
    ],
)
def test_wrong_options_are_one_line(rate, arguments, words):
    result = rate(*arguments)
    assert result.exit_code == 2
    assert words in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
