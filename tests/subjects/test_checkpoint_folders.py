"""Folders of checkpoints: sound ones are measured as they are; broken and hostile ones raise one line, run nothing."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import limitformer as lf
from checkpoint_folders import BIN, REFUSED, SAFE, as_bin, as_roberta, config, resaved, save, sharded, small, tensors
from limitformer.hf import Shaping, load_shaped, shape_model
from limitformer.subjects.configurations import config_from
from limitformer.subjects.folder import load


@pytest.fixture(scope="session")
def sound(tmp_path_factory):
    """Return the folder of a small GPT-2, as `save_pretrained` writes it."""
    folder = tmp_path_factory.mktemp("sound") / "model"
    small().save_pretrained(folder)
    return folder


@pytest.fixture
def folder(sound, tmp_path):
    """Return a copy of the sound folder."""
    return Path(shutil.copytree(sound, tmp_path / "model"))


def checked(what, text=None, **options):
    return lf.check(what, text, **({"tokens": 6, "samples": 2, "law": False, "progress": False} | options))


@pytest.mark.parametrize("name", REFUSED)
def test_hostile_folder_raises_one_line_and_runs_nothing(name, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    change, says = REFUSED[name]
    change(folder)
    with pytest.raises(lf.InputError) as caught:
        checked(str(folder))
    message = str(caught.value)
    assert says in message
    assert message.isprintable()
    assert len(message) < 600
    assert not list(tmp_path.glob("**/pwned"))


def assert_loads(folder, module, dtype=torch.float32):
    """Assert that the folder holds the numbers of the module; return the weights that are not read."""
    loaded, unread = load(folder)
    assert type(loaded) is type(module)
    for key, each in module.state_dict().items():
        assert loaded.state_dict()[key].dtype == dtype
        assert torch.equal(loaded.state_dict()[key], each.to(dtype)), key
    return unread


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (transformers.GPT2LMHeadModel, {}),
        (transformers.BertForPreTraining, {}),
        (transformers.LlamaForCausalLM, {"tie_word_embeddings": True}),
        (transformers.T5ForConditionalGeneration, {}),
    ],
)
def test_loaded_folder_equals_the_saved_module(kind, options, tmp_path):
    module = small(kind, **options).eval()
    module.save_pretrained(tmp_path)
    assert assert_loads(tmp_path, module) == ()
    one, other = checked(tmp_path).curves, checked(module).curves
    assert all(np.allclose(one[name], other[name], rtol=1e-5, atol=1e-7, equal_nan=True) for name in one)


def test_unread_pooler_is_reported_and_changes_nothing(folder):
    """The file of roberta-base fits no class whole, but holds every weight of the class."""
    module = as_roberta(folder)
    unread = ("roberta.pooler.dense.bias", "roberta.pooler.dense.weight")
    assert assert_loads(folder, module) == unread
    assert "not read, as the class" in (text := str(checked(folder)))
    assert unread[0] in text


def test_weights_of_another_head_under_old_names_are_reported(folder):
    """The file of bert-base-uncased has two heads, and norms with a gamma and a beta."""
    module = resaved(folder, transformers.BertForPreTraining)
    config(folder, architectures=["BertForMaskedLM"])
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    renamed = {
        key: next((key.replace(new, name) for new, name in old.items() if new in key), key) for key in tensors(folder)
    }
    save(folder, {renamed[key]: each for key, each in tensors(folder).items()})
    loaded, unread = load(folder)
    assert {name.split(".")[1] for name in unread} == {"pooler", "seq_relationship"}
    assert all(torch.equal(each, module.state_dict()[key]) for key, each in loaded.state_dict().items())


def test_shards_and_torch_files_load_the_same_weights(folder):
    module = small()
    parts, old = (Path(shutil.copytree(folder, folder.parent / name)) for name in ("parts", "old"))
    sharded(parts)
    torch.save(tensors(old), old / BIN, _use_new_zipfile_serialization=False)
    (old / SAFE).unlink()
    as_bin(folder)
    for place in (parts, old, folder):
        assert assert_loads(place, module) == ()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_real_types_load_without_loss(dtype, folder):
    module = small().to(dtype)
    module.save_pretrained(folder)
    assert_loads(folder, module, torch.float64 if dtype == torch.float64 else torch.float32)


def test_weights_are_mapped_and_not_read(tmp_path):
    """A file of 256 MiB raises the memory of a process that lists its weights by less than a tenth of that."""
    save_file({"weight": torch.zeros(2**26)}, tmp_path / SAFE)
    code = "import sys, resource; from pathlib import Path; from limitformer.subjects.checkpoints import weights_in\n"
    code += "used = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\nbefore = used()\n"
    code += "x = weights_in(Path(sys.argv[1])); print(used() - before)"
    command = [sys.executable, "-c", code, str(tmp_path)]
    process = subprocess.run(command, capture_output=True, text=True, env=environment(), check=True)
    assert int(process.stdout) < 2**18 / 10  # KiB


def test_shaped_folder_has_the_loss_of_its_class(tmp_path):
    """The name of the folder does not matter, nor does code in it."""
    folder = tmp_path / "MaskedLM" / "good"
    shape_model(small(transformers.BertForMaskedLM), Shaping()).save_pretrained(folder)
    config(folder, **CODE)
    (folder / "evil.py").write_text("raise SystemError")
    report, same = checked(str(folder)), checked(load_shaped(folder))
    assert report.about["loss"] == same.about["loss"]
    assert "cross-entropy" in same.about["loss"]
    assert float(report.curves["loss"].squeeze()) == float(same.curves["loss"].squeeze())


def test_trained_network_may_untie_weights(tmp_path):
    """The file holds other values for a weight that the class ties."""
    module, key = small(), "lm_head.weight"
    with torch.no_grad():
        for each in module.parameters():
            each.add_(0.3 * torch.randn_like(each))
    module.save_pretrained(tmp_path)
    save(tmp_path, tensors(tmp_path) | {key: torch.randn(60, 16)})
    report = lf.check(str(tmp_path), tokens=6, samples=2, progress=False)
    assert report.trained
    assert key in {each.name for each in report.initialisation.weights}
    assert key not in report.laws.laws
    assert f"held apart, though the law ties them to others: {key}" in report.remarks()


# Names of code

CODE = {"auto_map": {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M", "AutoTokenizer": ["evil.T", None]}}
SILENT = {  # fields of config.json that must change nothing
    "code": CODE,
    "kernels": {
        "_attn_implementation": "evil/kernel",
        "attn_implementation": "evil/kernel@main:f",
        "use_kernels": True,
    },
    "files": {
        "transformers_weights": "../outside/model.safetensors",
        "_name_or_path": "/etc",
        "fusion_config": {"a": True},
    },
    "generation": {"custom_generate": "evil", "custom_pipelines": {"evil": {"impl": "evil.P"}}},
}


@pytest.mark.parametrize("name", SILENT)
def test_fields_that_name_code_are_ignored(name, folder):
    (folder / "evil.py").write_text("import pathlib; pathlib.Path('pwned').touch()")
    config(folder, **SILENT[name])
    assert assert_loads(folder, small()) == ()
    values = config_from(json.loads((folder / "config.json").read_text()))
    assert all(getattr(values, key, None) != value for key, value in SILENT[name].items())


def with_tokenizer(folder, **about):
    """Write a tokenizer of words, with further fields in its configuration."""
    words = {word: number for number, word in enumerate(["[UNK]", "to", "be", "or", "not"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | about))


def test_text_is_read_by_the_tokenizer_of_the_folder(folder, tmp_path):
    with_tokenizer(folder)
    (tmp_path / "text.txt").write_text("to be or not to be " * 1000)
    report, same = checked(folder, tmp_path / "text.txt"), checked(small(), [[1, 2, 3, 4, 1, 2]])
    np.testing.assert_allclose(report.curves["correlation"], same.curves["correlation"], rtol=1e-5)


def test_broken_tokenizer_fails_only_with_a_text(folder):
    resaved(folder, transformers.BertForMaskedLM)
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    assert checked(folder).exists
    with pytest.raises(lf.InputError, match="okenizer") as caught:
        checked(folder, "to be or not to be")
    assert "has no vocabulary: there is no tokenizer.json" in str(caught.value)
    assert "\n" not in str(caught.value)


# A separate process, whose audit hook records imports, processes, connections and questions

AUDITED = """
import sys
import limitformer as lf
def run():
    lf.check(sys.argv[1], "to be or not to be", tokens=6, samples=2, law=False, progress=False)
run()  # imports everything that is imported late
seen = []
BAD = ("subprocess.", "os.system", "os.exec", "os.posix_spawn", "os.fork", "socket.", "builtins.input", "urllib.")
def hook(event, arguments):
    if event.startswith(BAD) or (event in ("exec", "compile", "import") and "evil" in str(arguments)):
        seen.append(event)
sys.addaudithook(hook)
run()
print(seen, len(sys.stdin.read()))
"""


def environment():
    source = str(Path(lf.__file__).parents[1])
    return os.environ | {"PYTHONPATH": source, "HF_HUB_OFFLINE": "0", "OMP_NUM_THREADS": "1"}


def test_names_of_code_are_not_run_in_another_process(folder):
    with_tokenizer(folder, **CODE, name_or_path="mistralai/x", fix_mistral_regex=True)
    config(folder, **{key: value for each in SILENT.values() for key, value in each.items()})
    (folder / "evil.py").write_text("raise SystemError")
    command = [sys.executable, "-c", AUDITED, str(folder)]
    process = subprocess.run(command, input="y\n", text=True, capture_output=True, env=environment(), check=True)
    assert process.stdout.splitlines()[-1] == "[] 2"  # no question read an answer


def test_long_text_is_read_only_at_its_beginning(folder, tmp_path):
    """The file ends in bytes that are not text, behind a hole: reading it whole fails."""
    path = tmp_path / "text.txt"
    path.write_text("to be or not to be that is the question " * 100)
    with path.open("r+b") as file:
        file.seek(2**24)
        file.write(b"\xff")
    labels = ("to", "be", "or", "not", "to", "be")
    assert lf.from_text(path, width=4, tokens=6).labels == labels
    assert checked(folder, path).data["word"].values.tolist() == list(labels)
    with_tokenizer(folder)
    assert checked(folder, path).exists
    with pytest.raises(lf.InputError, match="cannot be decoded"):
        lf.from_text(path, width=4)
    longer = "to be or not to be " * 10_000
    assert lf.from_text(longer, width=4, tokens=6).labels == labels
    assert checked(folder, [longer, longer]).data.sizes["token"] == 12
