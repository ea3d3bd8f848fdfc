"""`limitformer check --apply-fix`: before, after and the lines; what is refused; Ctrl-C."""

import json

import pytest

from limitformer.designing import fixes

SMALL = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 60}
SMALL |= {"intermediate_size": 64, "initializer_range": 0.6}
QUICK = ("--tokens", "8", "--samples", "2", "--witness", "no")


@pytest.fixture
def check(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.json").write_text(json.dumps(SMALL), encoding="utf-8")
    return lambda *options: run("check", "small.json", *QUICK, *options)


def test_before_after_and_lines_are_printed_and_written(check, tmp_path):
    text = check("--apply-fix", "--out", "found").stdout
    value = json.loads(text.partition("config.initializer_range = ")[2].splitlines()[0])
    before, after = text.index("small.json: 2 blocks"), text.index(f"small.json with initializer_range={value:g}: 2 ")
    assert before < after < text.index("ends with initializer_range 0.6 →") < text.index("# on the command line: --set")
    assert "Next:" not in text
    record = json.loads((tmp_path / "found" / "check.json").read_text(encoding="utf-8"))
    assert record["lines"].startswith(f"config.initializer_range = {value:g}")
    assert record["fix"] in text
    assert json.loads(check("--apply-fix", "--json").stdout)["lines"] == record["lines"]
    assert record["lines"].splitlines()[0] in (tmp_path / "found" / "check.html").read_text(encoding="utf-8")


def test_check_names_the_option_if_a_verdict_may_have_a_fix(check):
    alarmed, fine = check().stdout, check("--set", "initializer_range=0.15").stdout
    assert f"Fix: limitformer check small.json {' '.join(QUICK)} --apply-fix\n" in alarmed
    assert "Fix: " not in fine
    assert "Next: limitformer rate small.json" in fine
    assert "Next: limitformer rate" not in alarmed
    assert "nothing to fix: " in check("--set", "initializer_range=0.15", "--apply-fix").stdout


def test_fix_is_of_one_network_without_weights(refused, tmp_path):
    (tmp_path / "trained").mkdir()
    (tmp_path / "trained" / "model.safetensors").write_bytes(b"")
    refused("check", "gpt2", "llama-3-8b", "--apply-fix", says="--apply-fix is for one network. Nearest: one WHAT.")
    refused("check", "gpt2", "--vary", "n_layer=2,3", "--apply-fix", says="--apply-fix is for one network.")
    refused("check", "gpt2", "--against", "gpt2", "--apply-fix", says="in place of --against")
    refused("check", "trained", "--apply-fix", says="a fix is for a configuration: trained/config.json")


FLAWED = """
from torch import nn

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())

def build():
    model = nn.Sequential(nn.Embedding(60, 32), *[Block(32) for _ in range(6)], nn.LayerNorm(32), nn.Linear(32, 60))
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            nn.init.normal_(weight, std={"0": 1.0, "8": 2.0}.get(name[0], BRANCH))
    return model
"""


@pytest.mark.parametrize(("branch", "after"), [("0.1", "rate"), ("4.0", "check")])
def test_next_command_depends_on_the_verdict_that_a_fix_leaves(branch, after, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "flawed.py").write_text(FLAWED.replace("BRANCH", branch), encoding="utf-8")
    text = run("check", "flawed.py:build", *QUICK, "--apply-fix").stdout
    line = next(each for each in text.splitlines() if each.startswith("Next, with these lines in flawed.py: "))
    assert f": limitformer {after} flawed.py:new_build " in line
    assert ("--apply-fix" in line) == (after == "check")


def test_verdict_without_a_knob_leads_to_the_code(run, tmp_path, monkeypatch):
    """A gate takes the place of the sum, so that no matrix writes to the stream: `design` would refuse it, too."""
    monkeypatch.chdir(tmp_path)
    mean = "self.down(self.norm(x).mean(1, keepdim=True).expand_as(x))"
    gated = f"g = self.up(x).sigmoid(); return g * x + (1 - g) * {mean}"
    (tmp_path / "gated.py").write_text(
        FLAWED.replace("return x + self.down(self.up(self.norm(x)).relu())", gated)
        .replace("2.0", "0.1")
        .replace("BRANCH", "0.1")
    )
    text = run("check", "gated.py:build", *QUICK, "--apply-fix").stdout
    assert "rank collapse" in text
    assert text.rstrip().endswith("Nearest: a change of its code, as the verdict says")


def test_ctrl_c_during_the_tries_prints_the_first_report(check, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(fixes, "check", interrupted)
    result = check("--apply-fix", "--out", "found")
    assert result.exit_code == 130
    assert "small.json: 2 blocks" in result.stdout
    assert "config." not in result.stdout
    assert "Interrupted; these were written: " in result.stderr
