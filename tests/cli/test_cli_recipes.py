"""`limitformer recipes`, and `limitformer check --recipe`."""

import json

import pytest

from limitformer.initialisation.recipes import recipes

SMALL = {"model_type": "gpt2", "n_embd": 48, "n_layer": 4, "n_head": 4, "n_positions": 24, "vocab_size": 96}
SMALL |= {"bos_token_id": 1, "eos_token_id": 2}


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "small.json"
    path.write_text(json.dumps(SMALL), encoding="utf-8")
    return path


@pytest.mark.fast
def test_every_recipe_is_listed(run):
    result = run("recipes")
    assert (result.exit_code, result.stderr) == (0, "")
    names = [line.split()[0] for line in result.stdout.splitlines() if line and not line.startswith("Next")]
    assert names == list(recipes())


@pytest.mark.fast
def test_one_recipe_is_printed_with_its_settings_and_source(run):
    result = run("recipes", "megatron,std=0.006")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0] == "megatron: Megatron-LM"
    assert "  settings: std = 0.006" in lines
    assert "        return normal(std / sqrt(2 * w.depth))" in lines
    assert "    WRITES = ('attention output', 'feed-forward out')" in lines
    assert "transformer_config.py at d98e8a64" in result.stdout


@pytest.mark.fast
@pytest.mark.parametrize(
    ("command", "says"),
    [
        (("recipes", "gtp2"), r"one of 23 names; got 'gtp2'\. Nearest: gpt2"),
        (
            ("check", "gpt2", "--recipe", "megatron,sd=1"),
            r"--recipe: recipe megatron has no setting 'sd'\. It has std\.",
        ),
        (("check", "gpt2", "--recipe", "nowhere.py:ours"), r"there is no file nowhere\.py"),
    ],
)
def test_unknown_recipes_are_refused(refused, command, says):
    refused(*command, says=says)


def test_check_prints_the_comparison(run, config, tmp_path):
    result = run(
        "check", config, "--recipe", "megatron,std=0.01", "--tokens", 8, "--samples", 1, "--out", tmp_path / "report"
    )
    assert (result.exit_code, result.stderr) == (0, "")
    assert "7 of 10 kinds of weight differ from recipe megatron" in result.stdout
    row = next(line for line in result.stdout.splitlines() if line.startswith("  ≠  attention output"))
    assert row.split()[-1] == "2"
    record = json.loads((tmp_path / "report" / "check.json").read_text(encoding="utf-8"))
    assert record["recipe"]["settings"] == {"std": 0.01}


def test_own_recipe_is_read_from_a_file(run, config, tmp_path):
    file = tmp_path / "house.py"
    file.write_text(
        "from limitformer.initialisation.recipes.law import normal\n\n"
        "def ours(w, std=0.02):\n    return normal(std) if w.role == 'position embedding' else None\n",
        encoding="utf-8",
    )
    options = ("--tokens", 8, "--samples", 1, "--no-gradients")
    assert (
        "0 of 1 kinds of weight differ from recipe ours"
        in run("check", config, "--recipe", f"{file}:ours", *options).stdout
    )
    result = run("check", config, "--recipe", f"{file}:ours,std=0.01", *options)
    assert "1 of 1 kinds of weight differ from recipe ours: position embedding" in result.stdout
    assert "settings: std = 0.01" in run("recipes", f"{file}:ours,std=0.01").stdout
