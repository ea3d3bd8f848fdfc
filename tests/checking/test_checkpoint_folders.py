"""Folders of checkpoints: sound ones are measured as they are; hostile ones raise one line and run nothing."""

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
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

import hostile_folders as hostile
import limitformer as lf
from hostile_folders import CASES, GPT2, SAFE, small
from limitformer.checking.folder import load
from limitformer.checking.tokenizer import FolderTokenizer
from limitformer.cli.app import app
from limitformer.hf import ShapedTransformerConfig, ShapedTransformerForMaskedLM, Shaping, load_shaped, shape_model
from limitformer.weightless.configurations import config_from

SRC = Path(lf.__file__).parents[1]
TESTS = Path(hostile.__file__).parent


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


def loaded_from(folder):
    """Load a folder all of whose weights are read."""
    module, unread = load(folder)
    assert unread == ()
    return module


def checked(what, text=None, **options):
    return lf.check(what, text, **({"tokens": 6, "samples": 2, "law": False, "progress": False} | options))


def test_hostile_folders_are_many():
    assert len(CASES) >= 80


@pytest.mark.parametrize("name", CASES)
def test_hostile_folder_raises_one_line_and_runs_nothing(name, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    change, says = CASES[name]
    change(folder)
    with pytest.raises(lf.InputError) as caught:
        checked(str(folder))
    message = str(caught.value)
    assert says in message
    assert message.isprintable()
    assert len(message) < 600
    assert not list(tmp_path.glob("**/pwned"))


def same_numbers(folder, module):
    one, other = checked(folder).curves, checked(module).curves
    return all(np.allclose(one[name], other[name], rtol=1e-5, atol=1e-7, equal_nan=True) for name in one)


SOUND = {
    "GPT-2 with tied weights": lambda: small(),
    "GPT-2 without a head": lambda: small(transformers.GPT2Model),
    "BERT": lambda: small(transformers.BertForMaskedLM),
    "BERT with two heads": lambda: small(transformers.BertForPreTraining),
    "BERT without a head": lambda: small(transformers.BertModel),
    "Llama": lambda: small(transformers.LlamaForCausalLM),
    "Llama with tied weights": lambda: small(transformers.LlamaForCausalLM, tie_word_embeddings=True),
    "a classifier": lambda: small(transformers.BertForSequenceClassification, num_labels=3),
    "T5": lambda: small(transformers.T5ForConditionalGeneration),
}


def test_unread_pooler_is_reported_and_changes_nothing(folder):
    """The file of roberta-base fits no class whole, but holds every weight of the class."""
    module = hostile.as_roberta(folder).eval()
    loaded, unread = load(folder)
    assert unread == ("roberta.pooler.dense.bias", "roberta.pooler.dense.weight")
    for key, each in module.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], each), key
    assert same_numbers(folder, module)
    assert "not read, as the class" in str(checked(folder))
    assert "roberta.pooler.dense.bias" in str(checked(folder))
    assert "not read" not in str(checked(module))


def test_nan_weights_have_a_verdict(folder):
    hostile.save(folder, {name: each * torch.nan for name, each in hostile.tensors(folder).items()})
    report = checked(folder, gradients=False)
    assert report.grade == "broken"
    assert "not finite" in {one.name for one in report.verdicts}


def test_command_refuses_an_empty_output_folder(folder):
    result = CliRunner().invoke(app, ["check", str(folder), "--out", ""])
    assert result.exit_code == 2
    assert "--out must be a folder" in result.output


@pytest.mark.parametrize("name", SOUND)
def test_loaded_folder_equals_the_saved_module(name, tmp_path):
    module = SOUND[name]().eval()
    module.save_pretrained(tmp_path)
    loaded = loaded_from(tmp_path)
    assert type(loaded) is type(module)
    for key, each in module.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], each), key
    assert same_numbers(tmp_path, module)


def test_shards_and_torch_files_load_the_same_weights(folder):
    module = small()
    whole = loaded_from(folder).state_dict()
    module.save_pretrained(folder / "parts", max_shard_size="8KB")
    assert len(list((folder / "parts").glob("*.safetensors"))) > 2
    hostile.as_bin(shutil.copytree(folder, folder / "torch"))
    old = Path(shutil.copytree(folder, folder / "old", ignore=shutil.ignore_patterns("parts", "torch")))
    torch.save(load_file(old / SAFE), old / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    (old / SAFE).unlink()
    for name in ("parts", "torch", "old"):
        loaded = loaded_from(folder / name).state_dict()
        assert all(torch.equal(loaded[key], each) for key, each in whole.items()), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_real_types_load_without_loss(dtype, folder):
    module = small().to(dtype)
    module.save_pretrained(folder)
    loaded = loaded_from(folder)
    expected = torch.float64 if dtype == torch.float64 else torch.float32
    for key, each in module.state_dict().items():
        assert loaded.state_dict()[key].dtype == expected
        assert torch.equal(loaded.state_dict()[key], each.to(expected)), key
    assert np.isfinite(checked(folder).curves["loss"]).all()


def test_shaped_models_are_loaded(folder):
    shape_model(small(), Shaping()).save_pretrained(folder)
    assert checked(folder).exists
    sizes = {"vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    own = ShapedTransformerForMaskedLM(ShapedTransformerConfig(**sizes, intermediate_size=32))
    own.save_pretrained(folder / "own")
    assert type(loaded_from(folder / "own")) is ShapedTransformerForMaskedLM


@pytest.mark.parametrize("kind", [transformers.GPT2LMHeadModel, transformers.BertForMaskedLM])
def test_shaped_folder_has_the_loss_of_its_class(kind, tmp_path):
    """The name of the folder does not matter."""
    folder = tmp_path / "MaskedLM" / "good"
    shape_model(small(kind), Shaping()).save_pretrained(folder)
    report, same = checked(str(folder)), checked(load_shaped(folder))
    assert report.about["loss"] == same.about["loss"]
    assert "cross-entropy" in same.about["loss"]
    assert float(report.curves["loss"].squeeze()) == float(same.curves["loss"].squeeze())


UNTIED = {  # a weight that the class ties, stored with other values
    "GPT-2": (transformers.GPT2LMHeadModel, "lm_head.weight"),
    "Llama": (lambda: small(transformers.LlamaForCausalLM, tie_word_embeddings=True), "lm_head.weight"),
    "BERT": (transformers.BertForMaskedLM, "cls.predictions.decoder.weight"),
    "T5": (transformers.T5ForConditionalGeneration, "lm_head.weight"),
}


@pytest.mark.parametrize("name", UNTIED)
def test_trained_network_may_untie_weights(name, tmp_path):
    kind, key = UNTIED[name]
    module = small(kind) if isinstance(kind, type) else kind()
    with torch.no_grad():
        for each in module.parameters():
            each.add_(0.3 * torch.randn_like(each))
    module.save_pretrained(tmp_path)
    hostile.save(tmp_path, hostile.tensors(tmp_path) | {key: torch.randn(60, 16)})
    report = lf.check(str(tmp_path), tokens=6, samples=2, progress=False)
    assert report.trained
    assert key in {each.name for each in report.initialisation.weights}
    assert report.laws is not None
    assert key not in report.laws.laws
    assert f"held apart, though the law ties them to others: {key}" in report.remarks()


def test_code_in_a_shaped_folder_is_not_run(folder, monkeypatch):
    """`load_shaped` refuses nothing here: the class is the library's."""
    shape_model(small(), Shaping()).save_pretrained(folder)
    hostile.config(folder, **CODE)
    (folder / "evil.py").write_text("raise SystemError")
    monkeypatch.setattr("sys.stdin", None)  # any question would fail
    assert type(load_shaped(folder)) is transformers.GPT2LMHeadModel


def test_buffers_of_older_versions_are_ignored(folder):
    result = hostile.tensors(folder) | {"transformer.h.0.attn.bias": torch.ones(1, 1, 24, 24, dtype=torch.bool)}
    hostile.save(folder, result)
    assert checked(folder).exists


def test_links_of_the_hub_cache_are_followed(folder, tmp_path):
    snapshot, blobs = tmp_path / "models--a" / "snapshots" / "1234", tmp_path / "models--a" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for file in folder.iterdir():
        shutil.copy(file, blobs / f"0{file.name}")
        (snapshot / file.name).symlink_to(f"../../blobs/0{file.name}")
    assert checked(snapshot).exists


def test_folder_name_outside_utf8_is_printed_and_written(folder, tmp_path):
    strange = os.fsdecode(os.fsencode(tmp_path) + b"/mod\xffel")
    shutil.copytree(folder, strange)
    report = checked(strange)
    report.save(tmp_path / "out")
    assert report.name == "mod�el"


# Names of code.

CODE = {"auto_map": {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M", "AutoTokenizer": ["evil.T", None]}}
SILENT = {  # fields of config.json that must change nothing
    "code": CODE,
    "code of a repository": {"auto_map": {name: f"a/b--{code}" for name, code in {"AutoModel": "evil.M"}.items()}},
    "a kernel": {"_attn_implementation": "evil/kernel", "attn_implementation": "evil/kernel@main:f"},
    "kernels": {"experts_implementation": "evil", "use_kernels": True, "kernel_config": {"RMSNorm": "evil/kernel"}},
    "fusions": {"fusion_config": {"patch_embeddings": True}},
    "other weights": {"transformers_weights": "../outside/model.safetensors"},
    "names": {"_name_or_path": "/etc", "name_or_path": "evil/model", "_commit_hash": "1"},
    "generation": {"custom_generate": "evil", "custom_pipelines": {"evil": {"impl": "evil.P"}}},
}


@pytest.mark.parametrize("name", SILENT)
def test_fields_that_name_code_are_ignored(name, folder):
    (folder / "evil.py").write_text("import pathlib; pathlib.Path('pwned').touch()")
    hostile.config(folder, **SILENT[name])
    assert same_numbers(folder, small())
    config = config_from(json.loads((folder / "config.json").read_text()))
    assert all(getattr(config, key, None) != value for key, value in SILENT[name].items())
    law = lf.check(str(folder / "config.json"), tokens=6, samples=2, progress=False)
    clean = lf.check(small().config, tokens=6, samples=2, progress=False)
    np.testing.assert_array_equal(law.curves["correlation"], clean.curves["correlation"])


def with_tokenizer(folder, **about):
    """Write a tokenizer of words, with further fields in its configuration and its map of special tokens."""
    words = {word: number for number, word in enumerate(["[UNK]", "to", "be", "or", "not"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | about))
    (folder / "special_tokens_map.json").write_text(json.dumps({"unk_token": "[UNK]"} | about))


ESCAPES = {
    "code": CODE,
    "old code": {"auto_map": ["evil.T", None]},
    "files": {"tokenizer_file": "../outside/a", "vocab_file": "/etc/passwd", "special_tokens_map_file": "/etc/passwd"},
    "versions": {"fast_tokenizer_files": ["../outside/tokenizer.4.0.0.json"]},
    "templates": {"chat_template": "{{ ''.__class__.__mro__[1].__subclasses__() }}", "processor_class": "os.system"},
    "arguments": {"init_inputs": ["/etc/passwd"], "gguf_file": "/etc/passwd"},
    "names": {"name_or_path": "mistralai/x", "fix_mistral_regex": True},
    "vocabularies": {
        "vocab": "../outside/a",
        "merges": "/etc/passwd",
        "spm_file": "/etc/passwd",
        "vocab_file": "/etc/passwd",
    },
    "sentencepiece": {"sp_model_kwargs": {"model_file": "/etc/passwd"}, "language_codes": "/etc/passwd"},
    "tokens": {"extra_special_tokens": {"vocab_file": "/etc/passwd", "tokenizer_file": "/etc/passwd"}},
    "languages": {"src_lang": "../outside/a", "mecab_kwargs": {"mecab_dic": "/etc"}},
}


@pytest.mark.parametrize("name", ESCAPES)
def test_tokenizer_uses_only_its_data(name, folder):
    with_tokenizer(folder, **ESCAPES[name])
    report = checked(folder, "to be or not to be", tokens=6)
    same = checked(small(), [[1, 2, 3, 4, 1, 2]])
    np.testing.assert_allclose(report.curves["correlation"], same.curves["correlation"], rtol=1e-5)


def test_text_file_is_read_by_the_tokenizer_of_the_folder(folder, tmp_path):
    with_tokenizer(folder)
    (tmp_path / "text.txt").write_text("to be or not to be " * 1000)
    report, same = checked(folder, tmp_path / "text.txt"), checked(small(), [[1, 2, 3, 4, 1, 2]])
    np.testing.assert_allclose(report.curves["correlation"], same.curves["correlation"], rtol=1e-5)


BROKEN = {
    "no JSON": ("tokenizer.json", b"{"),
    "no tokenizer": ("tokenizer.json", b'{"model": 5}'),
    "not UTF-8": ("tokenizer_config.json", b"\xff\xfe"),
    "a list": ("tokenizer_config.json", b"[]"),
    "a class of numbers": ("tokenizer_config.json", b'{"tokenizer_class": 5}'),
    "a function": ("tokenizer_config.json", b'{"tokenizer_class": "pipeline"}'),
    "repeated key": ("tokenizer_config.json", b'{"a": 1, "a": 2}'),
    "tokens": ("tokenizer_config.json", b'{"added_tokens_decoder": {"a": 5}}'),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_tokenizer_fails_only_with_a_text(name, folder):
    with_tokenizer(folder)
    file, content = BROKEN[name]
    (folder / file).write_bytes(content)
    assert checked(folder).exists
    with pytest.raises(lf.InputError, match="tokenizer") as caught:
        checked(folder, "to be or not to be")
    assert "\n" not in str(caught.value)


FILES_OF_WORDS = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4, "to": 5, "be": 6, "or": 7, "not": 8}


@pytest.mark.parametrize("about", [{}, {"do_lower_case": True, "tokenizer_class": "BertTokenizer"}], ids=str)
def test_tokenizer_reads_its_known_options(about, tmp_path):
    small(transformers.BertForMaskedLM).save_pretrained(tmp_path)
    (tmp_path / "vocab.txt").write_text("\n".join(FILES_OF_WORDS))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(about | {"vocab_file": "/etc/passwd"}))
    (tmp_path / "special_tokens_map.json").write_text('{"tokenizer_file": "/etc/passwd", "unk_token": "[UNK]"}')
    ids = FolderTokenizer(tmp_path).ids("to be OR not", 6)
    assert ids == [2, 5, 6, 7, 8, 3]


@pytest.mark.parametrize(
    ("kind", "name", "files", "says"),
    [
        (transformers.BertForMaskedLM, "BertTokenizer", (), "has no vocabulary: there is no tokenizer.json"),
        (transformers.T5ForConditionalGeneration, "T5Tokenizer", (), "has no vocabulary"),
        (transformers.GPT2LMHeadModel, "GPT2Tokenizer", (), "has no vocabulary"),
        (transformers.GPT2LMHeadModel, "GPT2Tokenizer", ("vocab.json",), "but neither merges.txt nor tokenizer.json"),
        (transformers.GPT2LMHeadModel, "GPT2Tokenizer", ("merges.txt",), "but neither vocab.json nor tokenizer.json"),
    ],
)
def test_tokenizer_without_vocabulary_fails_only_with_a_text(kind, name, files, says, tmp_path):
    small(kind).save_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name}))
    for file in files:
        (tmp_path / file).write_text("{}")
    assert checked(str(tmp_path)).exists
    with pytest.raises(lf.InputError, match=says):
        checked(str(tmp_path), "to be or not to be")


def test_byte_tokenizer_needs_no_vocabulary(tmp_path):
    small(transformers.T5ForConditionalGeneration, vocab_size=384).save_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "ByT5Tokenizer"}')
    assert FolderTokenizer(tmp_path).ids("abc", 3) == [100, 101, 102]


# A separate process, whose audit hook records files, imports, processes and questions.

AUDITED = """
import json, os, sys
from pathlib import Path
import limitformer as lf
import limitformer.checking, limitformer.hf, transformers, tokenizers, torch, safetensors.torch
root, folders = Path(sys.argv[1]).resolve(), sys.argv[2:]
def run(folder, text):
    try:
        lf.check(folder, text, tokens=6, samples=2, law=False, progress=False)
        return "measured"
    except lf.InputError as error:
        return str(error)
run(str(root / "sound"), "to be or not to be")  # imports everything that is imported late
seen, watching = [], False
BAD = ("subprocess.", "os.system", "os.exec", "os.posix_spawn", "os.fork", "socket.", "builtins.input", "urllib.")
def hook(event, arguments):
    if not watching:
        return
    if event == "open" and isinstance(arguments[0], (str, bytes)):
        path = Path(os.path.realpath(os.fsdecode(arguments[0])))
        if path.is_relative_to(root / "outside") or str(path) == "/etc/passwd":
            seen.append(f"opened {path}")
    elif event == "import" and "evil" in str(arguments[0]):
        seen.append(f"imported {arguments[0]}")
    elif event in ("exec", "compile") and "evil" in str(arguments):
        seen.append(f"{event} {arguments}")
    elif event.startswith(BAD):
        seen.append(event)
sys.addaudithook(hook)
watching = True
answers = {folder: run(folder, "to be or not to be") for folder in folders}
watching = False
print(json.dumps({"seen": seen, "answers": answers, "input": sys.stdin.read()}))
"""


def environment(**more):
    paths = os.pathsep.join([str(SRC), str(TESTS)])
    return os.environ | {"PYTHONPATH": paths, "HF_HUB_OFFLINE": "0", "OMP_NUM_THREADS": "1"} | more


def test_folder_opens_no_other_file_and_runs_no_code(sound, tmp_path):
    """An audit hook records each file that is opened, each import, process and connection."""
    (tmp_path / "outside").mkdir()
    shutil.copy(sound / SAFE, tmp_path / "outside" / SAFE)
    shutil.copy(sound / SAFE, tmp_path / "outside" / "a.safetensors")
    for name in ("a", "tokenizer.4.0.0.json"):
        (tmp_path / "outside" / name).write_text("{}")
    folders, measured = [], []
    escapes = {f"config {name}": (fields, {}) for name, fields in SILENT.items()}
    escapes |= {f"tokenizer {name}": ({}, fields) for name, fields in ESCAPES.items()}
    for name, (fields, about) in {"sound": ({}, {}), **escapes}.items():
        place = Path(shutil.copytree(sound, tmp_path / name))
        hostile.config(place, **fields)
        with_tokenizer(place, **about)
        measured.append(str(place))
    refused = [
        name for name in CASES if any(word in name for word in ("index", "link", "runs code", "adapter", "no archive"))
    ]
    for number, name in enumerate(refused):
        place = Path(shutil.copytree(sound, tmp_path / f"refused{number}"))
        CASES[name][0](place)
        if name.startswith("an index that leads out"):
            hostile.shutil.copy(tmp_path / "outside" / SAFE, tmp_path / "other.safetensors")
        folders.append(str(place))
    for place in [*measured, *folders]:
        (Path(place) / "evil.py").write_text(f"open({str(tmp_path / 'pwned')!r}, 'w')")
    command = [sys.executable, "-c", AUDITED, str(tmp_path), *measured, *folders]
    process = subprocess.run(
        command, input="y\n" * 50, text=True, capture_output=True, cwd=tmp_path, env=environment(), check=True
    )
    result = json.loads(process.stdout.splitlines()[-1])
    assert result["seen"] == []
    assert result["input"] == "y\n" * 50  # no question read an answer
    assert not list(tmp_path.glob("**/pwned"))
    assert {result["answers"][place] for place in measured} == {"measured"}
    assert all(result["answers"][place] != "measured" for place in folders)


COMMANDS = {
    "three weights of 28": "lacks lm_head.weight",
    "an archive that runs code": "not a file of tensors alone",
    "the class of another family": "a class of llama",
    "a missing family": "must name its family",
}


@pytest.mark.parametrize("name", COMMANDS)
def test_command_refuses_hostile_folders(name, folder, tmp_path):
    CASES[name][0](folder)
    code = "from limitformer.cli import main; main()"
    process = subprocess.run(
        [sys.executable, "-c", code, "check", str(folder), "--tokens", "6"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment(),
        check=False,
    )
    assert process.returncode == 2, process.stderr
    assert process.stdout == ""
    assert process.stderr.startswith("Error: ")
    assert COMMANDS[name] in process.stderr
    assert process.stderr.count("\n") == 1
    assert not list(tmp_path.glob("**/pwned"))


# Sizes beyond memory.


def test_large_recordings_are_refused_before_any_pass(monkeypatch):
    """Covariances of 8 networks of 2 blocks with 64 tokens take 6.3 MB in four copies; 2 networks take less."""
    config = small(n_positions=64, vocab_size=100).config
    monkeypatch.setattr("limitformer.base.memory.available_memory", lambda: 5 * 2**20)
    options = {"tokens": 64, "gradients": False, "progress": False}
    with pytest.raises(lf.InputError, match=r"Recording 8 networks of 2 blocks with 64 tokens takes 6\.0 MiB"):
        lf.check(config, samples=8, **options)
    assert lf.check(config, samples=2, **options).curves.sizes["sample"] == 2
    with pytest.raises(lf.InputError, match="Recording 64 networks of 2 blocks with 32 tokens"):
        lf.design(config, progress=False)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n_layer": 10_000}, "n_layer of gpt2 must be at most 4,096"),
        ({"n_embd": 10**9, "n_head": 1}, "gpt2 cannot be made"),
        ({"n_embd": 10**8, "n_head": 1}, "without its matrices"),
        ({"n_head": 10**9}, "gpt2 cannot be made"),
        ({"n_layer": 10**9}, "must be at most 4,096"),
    ],
    ids=str,
)
@pytest.mark.parametrize("command", [lf.check, lf.design, lf.weightless.law])
def test_configuration_beyond_memory_is_refused(command, fields, message, monkeypatch):
    monkeypatch.setattr("limitformer.weightless.sizes.available_memory", lambda: 2**34)
    with pytest.raises(lf.InputError, match=message):
        command(GPT2 | {"model_type": "gpt2"} | fields)


@pytest.mark.parametrize("value", [1e300, 1e30, -0.02])
@pytest.mark.parametrize("command", [lf.check, lf.design, lf.weightless.law])
@pytest.mark.parametrize("make", [dict, lambda values: transformers.GPT2Config(**values)], ids=["JSON", "object"])
def test_impossible_standard_deviation_is_refused(make, command, value):
    with pytest.raises(lf.InputError, match="initializer_range of gpt2 must be at least 0 and below 1,000,000"):
        command(make(GPT2 | {"model_type": "gpt2", "initializer_range": value}))


@pytest.mark.parametrize(
    "values",
    [
        {"model_type": "distilbert", "max_position_embeddings": 10**8, "sinusoidal_pos_embds": True},
        {"model_type": "xlm", "max_position_embeddings": 10**8, "sinusoidal_embeddings": True},
        {"model_type": "gptj", "n_positions": 10**10},
        {"model_type": "ctrl", "n_positions": 10**10},
        {"model_type": "gpt_neo", "num_layers": 2, "attention_types": [[["global"], 10**9]]},
        {"model_type": "swin", "depths": [2, 10**9]},
    ],
    ids=str,
)
def test_enormous_lists_are_refused_before_they_are_built(values):
    with pytest.raises(lf.InputError, match="must be at most"):
        lf.weightless.law(values)


def test_longest_published_context_is_accepted():
    assert config_from({"model_type": "llama", "max_position_embeddings": 10_485_760}).max_position_embeddings > 10**7


def test_experts_are_counted_while_they_are_built(monkeypatch):
    monkeypatch.setattr("limitformer.weightless.sizes.MOST_MODULES", 100)
    with pytest.raises(lf.InputError, match="gpt2 has more than 100 modules"):
        lf.weightless.law(GPT2 | {"model_type": "gpt2", "n_layer": 50})


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
    several = checked(folder, [longer, longer]).data
    assert several.sizes["token"] == 12


def test_endless_device_is_refused():
    limit = "import resource; resource.setrlimit(resource.RLIMIT_AS, (2**33, 2**33))"  # or it would exhaust the machine
    code = f"{limit}\nimport pathlib\nfrom limitformer.models.text import read_text\n"
    code += "read_text(pathlib.Path('/dev/zero'))"
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment(), check=False
    )
    assert process.stderr.splitlines()[-1].endswith("/dev/zero is not a regular file.")


def test_oversized_configuration_file_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("limitformer.weightless.configurations.MOST_JSON", 2**10)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"' + " " * 2**11 + "}")
    with pytest.raises(lf.InputError, match=r"has more than 1,024 bytes"):
        checked(str(tmp_path / "config.json"))


# Configurations of other libraries.


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 24, "bias": False, "dropout": 0.0},
            "sizes of nanoGPT",
        ),
        (
            {"args": {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 24}},
            "under 'args' it has the sizes of nanoGPT",
        ),
        ({"dim": 64, "n_layers": 2, "n_heads": 2, "multiple_of": 32}, "Meta's Llama"),
        ({"architectures": ["LlamaForCausalLM"]}, '"model_type": "llama", the family of LlamaForCausalLM'),
        ({"config": {"model_type": "gpt2"}}, "the object under 'config'"),
        ({"Model_Type": "gpt2"}, "got 'Model_Type'"),
        ({}, 'such as "model_type": "gpt2"; got none'),
        ({"model_type": ["gpt2"]}, "must be one word"),
        ({"model_type": "GPT-2"}, "Nearest: gpt2"),
        ({"model_type": "llama3"}, "Nearest: llama"),
        ({"model_type": "google/t5-small"}, "Nearest: t5"),
        ({"model_type": "bert-base-uncased"}, "Nearest: bert"),
        ({"model_type": "llama", "n_layer": 2}, "llama has no field ['n_layer'] and would take its default"),
        ({"model_type": "t5", "d_model": 16, "n_layers": 2}, "Nearest: 'num_layers'"),
        ({"model_type": "t5", "num_hidden_layers": 2}, "leaves num_decoder_layers as it is"),
        ({"model_type": "gpt2", "n_embd": 16, "hidden_size": 32}, "are one field of gpt2, and differ"),
    ],
    ids=str,
)
def test_configuration_of_another_library_is_recognised(values, message):
    with pytest.raises(lf.InputError) as caught:
        lf.weightless.law(values)
    assert message in str(caught.value)
    assert "exaone" not in str(caught.value)


def suggested_json(values):
    """Return the configuration that the message suggests."""
    with pytest.raises(lf.InputError) as caught:
        lf.weightless.law(values)
    message = str(caught.value)
    return json.loads(message[message.index("{") : message.index("}") + 1])


def test_suggestion_for_nanogpt_has_its_laws():
    """karpathy/nanoGPT, model.py: normal of 0.02, divided by √(2 n_layer) where a branch ends."""
    suggestion = suggested_json(
        {"n_layer": 8, "n_head": 2, "n_embd": 16, "block_size": 24, "vocab_size": 60, "bias": True}
    )
    table = lf.weightless.law(suggestion)
    assert table["transformer.wte.weight"].std == pytest.approx(0.02)
    assert table["transformer.h.3.attn.c_proj.weight"].std == pytest.approx(0.02 / 4)
    assert table["transformer.h.3.mlp.c_proj.weight"].std == pytest.approx(0.02 / 4)
    assert suggestion["activation_function"] == "gelu"
    assert (suggestion["n_positions"], suggestion["vocab_size"]) == (24, 60)


def test_suggestion_for_meta_llama_has_its_sizes():
    """Llama 3 8B, params.json and the published configuration."""
    suggestion = suggested_json(
        {"dim": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "vocab_size": 128256}
        | {"multiple_of": 1024, "ffn_dim_multiplier": 1.3, "norm_eps": 1e-05, "rope_theta": 500000.0}
    )
    assert (suggestion["intermediate_size"], suggestion["num_key_value_heads"], suggestion["hidden_size"]) == (
        14336,
        8,
        4096,
    )


def test_old_field_name_of_a_family_is_accepted():
    table = lf.weightless.law({"model_type": "bloom", "n_embed": 16, "n_head": 2, "n_layer": 2, "vocab_size": 60})
    assert table.shapes["transformer.word_embeddings.weight"] == (60, 16)


def test_configuration_of_two_texts_is_one_line():
    with pytest.raises(lf.InputError, match="musicgen cannot be read: ValueError: Multiple valid text configs"):
        lf.weightless.law({"model_type": "musicgen", "text_encoder": {"model_type": "t5"}, "audio_encoder": {}})


def test_list_of_sizes_is_not_a_number_of_layers():
    config = transformers.AutoConfig.for_model("gemma3n_text")
    assert config.vocab_size_per_layer_input > 4096
    assert config_from(config.to_dict()).vocab_size_per_layer_input == config.vocab_size_per_layer_input


@pytest.mark.parametrize("name", [SAFE, "weights.gguf", "ckpt.pt"])
def test_weights_file_is_refused_with_its_folder(name, folder):
    (folder / name).touch()
    with pytest.raises(lf.InputError, match=r"is a file of weights\. Nearest: its folder"):
        checked(str(folder / name))


def test_folder_of_checkpoints_is_refused_with_the_last(folder, tmp_path):
    for step in (900, 1000):
        shutil.copytree(folder, tmp_path / "run" / f"checkpoint-{step}")
    with pytest.raises(lf.InputError, match=r"There is no config\.json in .*/run. Nearest: .*/run/checkpoint-1000\."):
        checked(tmp_path / "run")
