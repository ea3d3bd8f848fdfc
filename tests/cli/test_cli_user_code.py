"""`limitformer check` of the user's own Python files, and of folders with code of their own."""

import json
import pickle
import sys

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from transformers import dynamic_module_utils

import limitformer as lf
from limitformer.base.errors import InputError
from limitformer.cli.options import require_readable, user_inputs, user_object
from limitformer.subjects.user_code import names_code

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


def test_factory_of_a_file_is_checked(run, model):
    result = run("check", f"{model}:Words", "--inputs", 7, "--samples", 2)
    assert result.exit_code == 0, result.output
    assert "Words: 2 blocks, 7 tokens" in result.output
    result = run("check", f"{model}:Words", "--inputs", f"{model}:inputs", "--samples", 2)
    assert "Words: 2 blocks, 5 tokens" in result.output


def test_wrong_name_in_a_file_is_one_line_with_the_nearest(run, model):
    result = run("check", f"{model}:Word")
    assert result.exit_code == 2
    assert "has no 'Word'. Nearest: Words." in result.output
    assert f"Nearest: {model}:NAME" in " ".join(run("check", model).output.split())
    model.write_text("1/0", encoding="utf-8")
    with pytest.raises(InputError, match="cannot be imported: ZeroDivisionError"):
        user_object(f"{model}:Words", "WHAT")


@pytest.mark.parametrize(
    ("value", "kind"), [('"the quick\\nbrown fox " * 99', "str"), ("3", "int"), ("[1, 2]", "list")]
)
def test_constant_in_place_of_a_model_is_one_short_line(run, model, value, kind):
    model.write_text(f"{MODEL}\n\nWORD = {value}\n", encoding="utf-8")
    result = run("check", f"{model}:WORD")
    assert result.exit_code == 2
    needed = "a function that builds a module, a module, or a configuration"
    assert result.stderr.startswith(f"Error: {model}:WORD is of type {kind}; it must be {needed}. Nearest: one of ")
    assert "Words" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_files_import_their_own_neighbours(tmp_path):
    """Another folder may have a file of the same name, and a file may be edited."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "neighbour.py").write_text(f"NAME = {name!r}")
        (tmp_path / name / "model.py").write_text("from neighbour import NAME\ndef build(): return NAME\n")
    objects = [user_object(f"{tmp_path / name / 'model.py'}:build") for name in ("first", "second", "first")]
    assert [each() for each in objects] == ["first", "second", "first"]
    (tmp_path / "first" / "neighbour.py").write_text("NAME = 'edited since'")
    assert user_object(f"{tmp_path / 'first' / 'model.py'}:build")() == "edited since"


def test_objects_of_one_file_share_their_classes(tmp_path):
    """`--optimizer model.py:make` may ask whether a part of `model.py:build` is of a class."""
    (tmp_path / "parts.py").write_text("class Part: pass\n", encoding="utf-8")
    code = "from parts import Part\nclass Own: pass\ndef build(): return Part(), Own()\n"
    (tmp_path / "model.py").write_text(f"{code}def asks(a, b): return isinstance(a, Part), isinstance(b, Own)\n")
    (tmp_path / "asking.py").write_text("from model import asks\n", encoding="utf-8")
    made = user_object(f"{tmp_path / 'model.py'}:build")()
    assert user_object(f"{tmp_path / 'model.py'}:asks")(*made) == (True, True)
    assert user_object(f"{tmp_path / 'asking.py'}:asks")(*made) == (True, True)


def test_files_of_two_folders_stay_where_no_neighbour_has_their_name(tmp_path):
    """Classes of one file are still pickled, and known to workers, after a file of another folder ran."""
    for folder, file in (("models", "user_model"), ("runs", "user_run")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{file}.py").write_text("class Mine: pass\ndef make(): return Mine()\n")
    first, second = (user_object(f"{tmp_path / name}.py:make") for name in ("runs/user_run", "models/user_model"))
    assert type(pickle.loads(pickle.dumps(first()))) is type(first())
    assert type(pickle.loads(pickle.dumps(second()))) is type(second())


def test_packages_installed_below_the_folder_keep_their_state(tmp_path, monkeypatch):
    """A virtual environment may be in the folder: its packages stay, also where an edited file runs again."""
    (tmp_path / "installed").mkdir()
    for place in (tmp_path / "installed" / "installed_below.py", tmp_path / "user_beside.py"):
        place.write_text("", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path / "installed"))
    (tmp_path / "model.py").write_text("import installed_below, user_beside\ndef build(): pass\n", encoding="utf-8")
    found = []
    for _ in range(2):
        user_object(f"{tmp_path / 'model.py'}:build")
        found.append((sys.modules["installed_below"], sys.modules["user_beside"]))
        (tmp_path / "user_beside.py").write_text("edited = True", encoding="utf-8")
    assert found[0][0] is found[1][0]
    assert found[0][1] is not found[1][1]


def test_paths_that_exist_are_not_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert names_code("run:best")
    (tmp_path / "run:best").mkdir()
    assert not names_code("run:best")


def test_inputs_are_a_number_a_file_or_a_function(model, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("some words", encoding="utf-8")
    assert user_inputs("64") == 64
    assert user_inputs(str(text)) == text
    assert user_inputs(f"{model}:inputs")["flag"] is True
    with pytest.raises(InputError, match="there is no file"):
        require_readable(None, "nowhere.txt")


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
    options = ("--samples", 2, "--tokens", 6, "--trust-remote-code")
    assert "own with depth=5: 5 blocks, 6 tokens" in run("check", folder, *options, "--set", "depth=5").output
    assert "the configuration of own has no field 'dept'. Nearest: depth" in run(
        "check", folder, *options, "--set", "dept=5"
    ).output.replace("\n", " ")


def test_sys_exit_in_a_file_or_its_function_is_an_error_with_its_place(run, model):
    model.write_text(f"{MODEL}\nimport sys\ndef make(): sys.exit(3)\n", encoding="utf-8")
    lines = [run("check", f"{model}:make").stderr]
    model.write_text(f"{MODEL}\nimport sys\nsys.exit(3)\n", encoding="utf-8")
    lines.append(run("check", f"{model}:Words").stderr)
    assert all(f"sys.exit(3) in {model}, line" in line and line.count("\n") == 1 for line in lines), lines


def test_an_interrupted_command_lists_the_files_that_it_wrote(run, model, tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("limitformer.reports.report.save", interrupted)
    result = run("check", f"{model}:Words", "--inputs", 4, "--samples", 2, "--out", "out")
    assert (result.exit_code, result.stderr) == (
        130,
        "Interrupted; these were written: out/check.html, out/check.json, out/check.png.\n",
    )
    assert sorted(each.name for each in (tmp_path / "out").iterdir()) == ["check.html", "check.json", "check.png"]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # torch's, of the checkpoint
def test_mixed_types_and_reentrant_checkpoints_are_refused_with_the_repair(model):
    Words = user_object(f"{model}:Words", "WHAT")
    ids = torch.tensor([[1, 2, 3]])
    mixed = Words()
    mixed.blocks[0].double()
    with pytest.raises(InputError, match=r"types torch\.float32, torch\.float64\. Nearest: module\.float\(\)\.$"):
        lf.check(mixed, ids)
    reentrant = Words()
    inner = reentrant.blocks[1].forward
    reentrant.blocks[1].forward = lambda x: checkpoint(inner, x, use_reentrant=True)
    with pytest.raises(InputError, match=r"a checkpoint is reentrant\. Nearest: use_reentrant=False in it\.$"):
        lf.check(reentrant, ids)


def test_function_behind_a_decorator_has_the_name_by_which_it_is_called(tmp_path):
    (tmp_path / "model.py").write_text(
        f"from functools import wraps\n{MODEL}\n@wraps(Words)\ndef mended():\n    return Words()\n", encoding="utf-8"
    )
    names = [
        lf.check(f"{tmp_path / 'model.py'}:{name}", tokens=8, samples=1, progress=False).name
        for name in ("Words", "mended")
    ]
    assert names == ["Words", "mended"]
