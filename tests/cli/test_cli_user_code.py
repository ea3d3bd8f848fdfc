"""`limitformer check` of the user's own Python files, and of folders with code of their own."""

import json

import pytest
from transformers import dynamic_module_utils

from limitformer.base.errors import InputError
from limitformer.cli.user_code import names_code, user_inputs, user_object

MODEL = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x):
        return x + self.linear(self.norm(x))

class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(30, 8), nn.ModuleList(Block() for _ in range(2))

    def forward(self, ids, flag=False):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return x

def inputs():
    return {"ids": torch.arange(5)[None], "flag": True}
"""
CONFIGURATION = """
from transformers import PretrainedConfig

class OwnConfig(PretrainedConfig):
    model_type = "own-for-tests"

    def __init__(self, depth=2, **options):
        self.depth = depth
        super().__init__(**options)
"""
MODELING = """
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput
from .configuration_own import OwnConfig

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x):
        return x + self.linear(self.norm(x))

class OwnForCausalLM(PreTrainedModel):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.embed, self.head = nn.Embedding(30, 8), nn.Linear(8, 30)
        self.blocks = nn.ModuleList(Block() for _ in range(config.depth))
        self.post_init()

    def _init_weights(self, part):
        if isinstance(part, nn.Linear | nn.Embedding):
            nn.init.normal_(part.weight, std=0.1)

    def forward(self, input_ids, **options):
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return CausalLMOutput(logits=self.head(x))
"""


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "own_model.py"
    path.write_text(MODEL, encoding="utf-8")
    return path


def test_text_names_code_if_a_name_follows_a_colon():
    assert names_code("a/b.py:make")
    assert names_code("package.module:make")
    assert not any(map(names_code, ("gpt2", "a/b.py", '{"a":b}', "C:\\x", "folder/x:make", "b.py:1")))


def test_factory_of_a_file_is_checked(run, model):
    result = run("check", f"{model}:Words", "--inputs", 7, "--samples", 2)
    assert result.exit_code == 0, result.output
    assert "Words: 2 blocks, 7 tokens" in result.output
    result = run("check", f"{model}:Words", "--inputs", f"{model}:inputs", "--samples", 2)
    assert "Words: 2 blocks, 5 tokens" in result.output


def test_factory_of_a_module_is_imported_from_the_current_folder(model, monkeypatch):
    monkeypatch.chdir(model.parent)
    assert user_object("own_model:Words", "WHAT").__name__ == "Words"


def test_wrong_name_in_a_file_is_one_line_with_the_nearest(run, model):
    result = run("check", f"{model}:Word")
    assert result.exit_code == 2
    assert "has no 'Word'. Nearest: Words." in result.output
    assert f"Nearest: {model}:NAME" in " ".join(run("check", model).output.split())
    model.write_text("1/0", encoding="utf-8")
    with pytest.raises(InputError, match="cannot be imported: ZeroDivisionError"):
        user_object(f"{model}:Words", "WHAT")


def test_inputs_are_a_number_a_file_or_a_function(model, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("some words", encoding="utf-8")
    assert user_inputs("64") == 64
    assert user_inputs(str(text)) == text
    assert user_inputs(f"{model}:inputs")["flag"] is True
    with pytest.raises(InputError, match="there is no file"):
        user_inputs("nowhere.txt")


def test_code_of_a_folder_runs_only_if_it_is_trusted(run, tmp_path, monkeypatch):
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "configuration_own.py").write_text(CONFIGURATION, encoding="utf-8")
    (folder / "modeling_own.py").write_text(MODELING, encoding="utf-8")
    names = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    values = {"model_type": "own-for-tests", "depth": 3, "vocab_size": 30, "auto_map": names}
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    refused = run("check", folder, "--samples", 2)
    assert refused.exit_code == 2
    assert "--trust-remote-code" in " ".join(refused.output.split())
    trusted = run("check", folder, "--samples", 2, "--tokens", 6, "--trust-remote-code")
    assert trusted.exit_code == 0, trusted.output
    assert "own: 3 blocks, 6 tokens" in trusted.output
    assert "of a uniform guess 3.401" in trusted.output  # ln 30: a causal model
