"""`limitformer transfer`: its table, files, and one line for every wrong option."""

import json

import pytest

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
    assert names == {"transfer.json", "transfer.csv", "transfer.nc", "transfer.png"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "give sizes by one of --widths, --depths and --over"),
        (("--widths", "16,32", "--depths", "1,2"), "give sizes by one of"),
        (("--widths", "16,wide"), "sizes must be whole numbers"),
        (("--widths", "16,32", "--rule", "mumup"), "--rule must be one of"),
        (("--widths", "16,32", "--optimizer", "adamax"), "--optimizer must be one of"),
        (("--widths", "16,32", "--rate", "1e6"), "--rate must be above 0"),
        (("--widths", "16,32", "--tokens", "1"), "--tokens must be at least 2"),
        (("--widths", "16,32", "--set", "depth=3"), "the configuration has no field depth"),
        (("--over", "n_embd"), "--over takes NAME=N"),
    ],
)
def test_wrong_options_of_transfer_give_one_line(run, folder, options, message):
    result = run("transfer", "small.json", *options)
    assert result.exit_code == 2
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
