"""The next command: it carries the user's own options, parses, runs, and ends where nothing sensible follows."""

import json
import shlex

import pytest

CODE = """
import torch
import transformers
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        y = self.norm1(x)
        x = x + self.attention(y, y, y)[0]
        return x + self.mlp(self.norm2(x))


def build(width: int = 16, words: int = 40):
    return nn.Sequential(nn.Embedding(words, width), Block(width), Block(width), nn.Linear(width, words))


def fixed():
    return build()


def large(initializer_range: float = 1.0):
    config = transformers.LlamaConfig.from_json_file("small.json")
    config.initializer_range = initializer_range
    return transformers.LlamaForCausalLM(config)


def ids():
    return torch.tensor([[1, 2, 3, 1, 2, 3, 7]])


def make(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def scaled(model):
    return torch.optim.AdamW([{"params": list(model.parameters()), "lr_scale": 0.5}], lr=1e-3)


def scale(optimizer):
    for group in optimizer.param_groups:
        group["lr"] *= group["lr_scale"]
"""
SMALL = {"model_type": "llama", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
SMALL |= {"vocab_size": 30, "intermediate_size": 32, "initializer_range": 1.0}


@pytest.fixture
def after(run, tmp_path, monkeypatch):
    """Run a command; return the words of the command that it prints at its end, or None."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my model.py").write_text(CODE, encoding="utf-8")
    (tmp_path / "small.json").write_text(json.dumps(SMALL), encoding="utf-8")

    def words(*arguments):
        result = words.result = run(*arguments)
        assert result.exit_code == 0, result.output
        assert result.stdout.count("Next:") <= 1
        last = result.stdout.splitlines()[-1]
        return shlex.split(last)[2:] if last.startswith("Next: limitformer ") else None

    return words


def test_journey_runs_from_check_to_lines_for_a_larger_width(after):
    options = ["--tokens", "8", "--set", "words=30"]
    first = after("check", "my model.py:build", *options, "--samples", "4")
    assert first == ["rate", "my model.py:build", "--optimizer", "adamw", *options]
    own = ["my model.py:make" if word == "adamw" else word for word in first]
    second = after(*own)
    assert second[:4] == ["transfer", "my model.py:build", "--widths", "16,32"]
    assert second[4:6] == own[2:4]
    assert second[6] == "--rate"
    assert second[8:] == ["--target", "64", *options]
    third = after(*second)
    assert third == [*second[:8], "--rule", "mup", *second[8:]]
    assert after(*third) is None or "--samples" in after(*third)


def test_undecided_steps_and_rates_are_followed_by_a_search(after):
    options = ["--tokens", "6", "--set", "words=30", "--clip", "1.0", "--witness", "no"]
    code = "my model.py:"
    known = ["--optimizer", f"{code}scaled", "--after-groups", f"{code}scale"]
    search = after("steps", f"{code}fixed", *known, *options[:2], *options[4:], "--samples", "2", "--sequences", "2")
    assert search == ["rate", f"{code}fixed", *known, "--tokens", "6", "--sequences", "2", *options[4:]]
    more = after(*search, "--networks", "1")
    assert more[:6] == search[:6]
    assert more[more.index("--networks") + 1] == "4"
    steps = after(*search)  # the function has no width
    assert steps[:2] == ["steps", f"{code}fixed"]
    assert {"--rates", "--after-groups", "--sequences"} <= set(steps)
    assert after("steps", f"{code}fixed", "--optimizer", "adamw", "--betas", "0.9,0.9", "--samples", "1") is None


def test_design_is_followed_by_a_check_of_its_fields(after):
    first = after("check", "small.json", "--tokens", "8", "--samples", "4", "--witness", "no")
    assert first == ["design", "small.json", "--tokens", "8"]
    asked = ["--knobs", "initializer_range", "--grid", "initializer_range=0.1,0.2"]
    second = after(*first, *asked, *["--gradient", "none", "--correlation", "none", "--scan", "4"])
    assert second[:3] == ["check", "small.json", "--tokens"]
    assert second[4] == "--set"
    assert second[5].startswith("initializer_range=0.")
    assert after(*second)[0] == "rate"


def test_code_of_design_is_pasted_before_the_next_check(after, tmp_path):
    first = after("check", "my model.py:large", "--tokens", "8", "--samples", "4", "--witness", "no")
    assert first == ["design", "my model.py:large", "--tokens", "8"]
    asked = ["--knobs", "initializer_range", "--gradient", "none", "--correlation", "none", "--scan", "4"]
    second = after(*first, *asked, "--grid", "initializer_range=0.1,0.2")
    assert second == ["check", "my model.py:new_build", "--tokens", "8"]
    code = after.result.stdout[after.result.stdout.index("from fnmatch") : after.result.stdout.index("Next:")]
    (tmp_path / "my model.py").write_text(CODE + code, encoding="utf-8")
    assert after(*second)[0] == "rate"
    kept = after("design", "my model.py:new_build", *asked, "--grid", "initializer_range=0.1,0.2", "--tokens", "8")
    assert kept[:4] == ["rate", "my model.py:new_build", "--optimizer", "adamw"]
    assert "from fnmatch" not in after.result.stdout  # nothing is changed


def test_design_at_the_end_of_its_grid_goes_on_beyond_it(after):
    asked = ["design", "small.json", "--knobs", "output,initializer_range", "--tokens", "8", "--scan", "4"]
    grid = ["--grid", "output=1", "--grid", "initializer_range=0.01,0.02"]
    more = after(*asked, *grid, "--stream", "1e5,1e6")
    assert "NOT SAFE" in after.result.stdout
    assert "config.initializer_range" not in after.result.stdout
    assert [more[k + 1] for k, word in enumerate(more) if word == "--grid"] == [
        "output=1", "initializer_range=0.02,0.04,0.08",
    ]  # fmt: skip


def test_rule_follows_only_if_it_has_entries_for_the_optimiser(after):
    quick = ["--tokens", "8", "--samples", "4", "--steps", "1", "--witness", "no"]
    grows = ["transfer", "my model.py:build", "--widths", "16,256", *quick]
    assert after(*grows)[-2:] == ["--witness", "no"]
    assert "--rule" in shlex.split(after.result.stdout.splitlines()[-1])
    assert "(rule mup)" in " ".join(after.result.stdout.split())
    assert after(*grows, "--optimizer", "muon") is None
    words = " ".join(after.result.stdout.split())
    assert "grows by a factor" in words
    assert "speaks against the transfer" in words
    assert "rule mup" not in words


def test_no_command_follows_that_would_ask_another_network(after):
    code, rate = "my model.py:", ["--optimizer", "adamw"]
    ids = ["--inputs", f"{code}ids"]
    quick = ["--tokens", "6", "--samples", "2", "--witness", "no"]
    assert after("check", f"{code}build", "--samples", "2", *ids) == ["rate", f"{code}build", *rate, *ids]
    assert after("check", f"{code}build", *quick, "--no-gradients") is None
    assert after("check", "small.json", *quick, "--shaped", "gamma=0.5") is None
    few = ["--sequences", "1", *ids]
    assert after("rate", f"{code}build", *rate, *few)[-4:] == few
    assert after("rate", f"{code}build", *rate, "--tokens", "6", "--warmup", "2") is None  # transfer has no --warmup
    assert after("rate", f"{code}build", *rate, "--tokens", "6", "--equivalent-to", "sgd") is None


COMMANDS = {
    "check": (),
    "steps": ("--optimizer", "adamw", "--rates", "0.001,100"),
    "transfer": ("--widths", "16,32", "--optimizer", "adamw"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_print_the_answer_and_everything_with_full(after, name):
    texts = []
    for more in ((), ("--full",)):
        after(name, "small.json", *COMMANDS[name], "--tokens", "8", "--samples", "4", *more)
        texts.append(after.result.stdout)
    short, full = (text.splitlines() for text in texts)
    end = next(k for k, line in enumerate(short) if line.endswith(" more lines: --full"))
    assert end <= 25  # 24 lines and an empty one
    assert int(short[end].split()[0]) == len(full) - len(short) + 2
    rest = "def optimizer(model):" if name == "transfer" else "    why: "
    assert rest not in texts[0]
    assert rest in texts[1]
    assert short[0] == full[0]
