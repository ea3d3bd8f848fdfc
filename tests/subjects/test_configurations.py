"""Configurations from JSON, files and folders: each refusal, and the sizes that are refused before they take memory."""

import json
import shutil
from functools import partial

import pytest
import transformers

import limitformer as lf
from limitformer.subjects.configurations import config_from

GPT2 = {"model_type": "gpt2", "vocab_size": 60, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 24}
LLAMA = {"model_type": "llama"}
REFUSED = {  # words of the message, and a configuration
    'such as "model_type": "gpt2"; got None. Nearest: of nanoGPT': {"n_layer": 2, "n_head": 2, "n_embd": 16},
    'Nearest: "model_type": "llama", the family of LlamaForCausalLM': {"architectures": ["LlamaForCausalLM"]},
    "Nearest: gpt2.": {"model_type": "GPT-2"},
    "Nearest: llama.": {"model_type": "llama3"},
    "Nearest: t5.": {"model_type": "google/t5-small"},
    "which --trust-remote-code": {"model_type": "none", "auto_map": {}},
    "llama has no field ['n_layer'] and would take its default": LLAMA | {"n_layer": 2},
    "Nearest: 'num_layers'": {"model_type": "t5", "d_model": 16, "n_layers": 2},
    "leaves num_decoder_layers as it is": {"model_type": "t5", "num_hidden_layers": 2},
    "are one field of gpt2, and differ": {"model_type": "gpt2", "n_embd": 16, "hidden_size": 32},
    "n_layer of gpt2 must be at most 4,096": GPT2 | {"n_layer": 10**9},
    "without its matrices": GPT2 | {"n_embd": 10**8, "n_head": 1},
    "gpt2 cannot be made": GPT2 | {"n_head": 3},
    "dtype must be": GPT2 | {"dtype": "int8"},
    "musicgen cannot be read: ValueError: Multiple valid text configs": {
        "model_type": "musicgen",
        "text_encoder": {"model_type": "t5"},
        "audio_encoder": {},
    },
}


@pytest.mark.parametrize("message", REFUSED)
def test_configuration_is_refused(message, monkeypatch):
    monkeypatch.setattr("limitformer.base.memory.available_memory", lambda: 2**34)
    with pytest.raises(lf.InputError) as caught:
        lf.weightless.law(REFUSED[message])
    assert message in str(caught.value)


@pytest.mark.parametrize("value", [1e30, -0.02, float("nan")])
@pytest.mark.parametrize("command", [lf.check, lf.design])
def test_impossible_standard_deviation_is_refused(command, value):
    for make in (dict, lambda values: transformers.GPT2Config(**values)):
        with pytest.raises(lf.InputError, match="initializer_range of gpt2 must be at least 0 and below 1,000,000"):
            command(make(GPT2 | {"initializer_range": value}))


def test_large_recordings_are_refused_before_any_pass(monkeypatch):
    """Covariances of 8 networks of 2 blocks with 64 tokens take 6.3 MB in four copies; 2 networks take less."""
    config = transformers.GPT2Config(**(GPT2 | {"n_positions": 64, "vocab_size": 100}))
    monkeypatch.setattr("limitformer.base.memory.available_memory", lambda: 5 * 2**20)
    check = partial(lf.check, config, tokens=64, gradients=False, progress=False)
    with pytest.raises(lf.InputError, match=r"Recording 8 networks of 2 blocks with 64 tokens takes 6\.0 MiB"):
        check(samples=8)
    assert check(samples=2).curves.sizes["sample"] == 2
    with pytest.raises(lf.InputError, match="Recording 8 networks of 2 blocks with 64 tokens"):
        lf.design(config, tokens=64, progress=False)  # those of a report; the others are in memory one at a time


def test_other_fields_are_accepted():
    """An old name of a size, a size for each layer, and a field that is not a size."""
    table = lf.weightless.law({"model_type": "bloom", "n_embed": 16, "n_head": 2, "n_layer": 2, "vocab_size": 60})
    assert table.shapes["transformer.word_embeddings.weight"] == (60, 16)
    config = transformers.AutoConfig.for_model("gemma3n_text")
    assert config.vocab_size_per_layer_input > 4096
    assert config_from(config.to_dict()).vocab_size_per_layer_input == config.vocab_size_per_layer_input


def test_files_are_refused_with_the_folder_that_is_meant(tmp_path, monkeypatch):
    for step in (900, 1000):
        (tmp_path / "run" / f"checkpoint-{step}").mkdir(parents=True)
        (tmp_path / "run" / f"checkpoint-{step}" / "config.json").write_text(json.dumps(GPT2))
    with pytest.raises(lf.InputError, match=r"There is no config\.json in .*/run. Nearest: .*/run/checkpoint-1000\."):
        lf.check(tmp_path / "run")
    (tmp_path / "weights.gguf").touch()
    with pytest.raises(lf.InputError, match=r"is a file of weights\. Nearest: its folder"):
        lf.check(str(tmp_path / "weights.gguf"))
    shutil.copy(tmp_path / "run" / "checkpoint-900" / "config.json", tmp_path)
    monkeypatch.setattr("limitformer.subjects.configurations.MOST_JSON", 2**5)
    with pytest.raises(lf.InputError, match=r"has more than 32 bytes"):
        lf.check(str(tmp_path / "config.json"))
