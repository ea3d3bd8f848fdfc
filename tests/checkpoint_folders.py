"""Small checkpoint folders, and changes that make them broken or hostile, with the error of each."""

import json
import os
import shutil

import torch
import transformers
from safetensors.torch import load_file, save_file

from limitformer.hf import Shaping, shape_model

IDS = {"bos_token_id": 1, "eos_token_id": 2}
GPT2 = {"vocab_size": 60, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 24, **IDS}
BERT = {"vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
BERT |= {"max_position_embeddings": 24}
T5 = {"vocab_size": 60, "d_model": 16, "num_layers": 2, "num_heads": 2, "d_kv": 8, "d_ff": 32}
SIZES = {"gpt2": GPT2, "bert": BERT, "roberta": BERT, "t5": T5, "llama": BERT | {"num_key_value_heads": 1}}
SAFE, BIN = "model.safetensors", "pytorch_model.bin"
INDEX = f"{SAFE}.index.json"


def small(kind=transformers.GPT2LMHeadModel, **changes):
    """Return a model with the weights that its own initialisation draws."""
    torch.manual_seed(0)
    return kind(kind.config_class(**(SIZES[kind.config_class.model_type] | changes)))


def config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def tensors(folder):
    return load_file(folder / SAFE)


def save(folder, weights):
    save_file({name: each.contiguous().clone() for name, each in weights.items()}, folder / SAFE)


def without(folder, *names):
    save(folder, {name: each for name, each in tensors(folder).items() if name not in names})


def as_bin(folder, content=None):
    """Store the weights as a file of torch, or other content under its name."""
    torch.save(dict(tensors(folder)) if content is None else content, folder / BIN)
    (folder / SAFE).unlink()


def raw(folder, content, name=BIN):
    (folder / SAFE).unlink()
    (folder / name).write_bytes(content)


def sharded(folder, repeated=(), **changes):
    """Store the weights in two files and an index with changed fields; `repeated` are in both."""
    result = tensors(folder)
    names = list(result)
    parts = {"a.safetensors": [*names[:14], *repeated], "b.safetensors": names[14:]}
    for file, some in parts.items():
        save_file({name: result[name].clone() for name in some}, folder / file)
    (folder / SAFE).unlink()
    places = {name: file for file, some in parts.items() for name in some}
    (folder / INDEX).write_text(json.dumps({"weight_map": places} | changes))


def resaved(folder, kind, **changes):
    shutil.rmtree(folder)
    module = small(kind, **changes)
    module.save_pretrained(folder)
    return module


def as_roberta(folder):
    """Write the file of roberta-base: a pooler and the head of a language model."""
    module = resaved(folder, transformers.RobertaForMaskedLM)
    pooler = {"roberta.pooler.dense.weight": torch.randn(16, 16), "roberta.pooler.dense.bias": torch.randn(16)}
    save(folder, tensors(folder) | pooler)
    return module


def linked(folder, name):
    (folder / name).rename(folder.parent / f"outside-{name}")
    (folder / name).symlink_to(folder.parent / f"outside-{name}")


def piped(folder):
    (folder / SAFE).unlink()
    os.mkfifo(folder / SAFE)


class Runs:
    """A pickle that runs code."""

    def __reduce__(self):
        return os.system, ("touch pwned",)


def untied_head_dropped(folder):
    resaved(folder, transformers.LlamaForCausalLM)
    without(folder, "lm_head.weight")


def shaped(folder, **changes):
    shape_model(small(), Shaping()).save_pretrained(folder)
    save(folder, tensors(folder) | changes)


SEVEN = {"transformer.ln_f.weight": torch.ones(7)}
OURS = '{"kind": "Transformer", "width": 8, "depth": 2, "gamma": 0.5, "feedforward": {"kind": "ReLU"}}'
REFUSED = {  # name: change of the folder of a small GPT-2, and words of the message
    # keys
    "three weights of 28": (
        lambda f: save(f, dict(list(tensors(f).items())[:3])),
        "lacks lm_head.weight, transformer.h.0.attn.c_proj.weight",
    ),
    "an untied head": (untied_head_dropped, "lacks lm_head.weight"),
    "a weight too many": (
        lambda f: save(f, tensors(f) | {"\x1b[31mevil\nname": torch.ones(3)}),
        "name that GPT2LMHeadModel does not have",
    ),
    "one weight under two names": (
        lambda f: save(f, tensors(f) | {"h.1.mlp.c_fc.weight": torch.ones(16, 64)}),
        "holds transformer.h.1.mlp.c_fc.weight also without the first word",
    ),
    "a pooler and more": (
        lambda f: (as_roberta(f), save(f, tensors(f) | {"roberta.more": torch.ones(3)})),
        "whole: it holds roberta.more, roberta.pooler",
    ),
    "another shape": (lambda f: save(f, tensors(f) | SEVEN), "other shapes, transformer.ln_f.weight (7,) for (16,)"),
    "another head": (lambda f: config(f, architectures=["GPT2ForSequenceClassification"]), "lacks score.weight"),
    # numbers
    "zeros": (lambda f: save(f, {name: 0 * each for name, each in tensors(f).items()}), "every matrix in"),
    "int8": (
        lambda f: save(f, {name: each.to(torch.int8) for name, each in tensors(f).items()}),
        "a quantised weight without its scale",
    ),
    "quantised": (lambda f: config(f, quantization_config={"quant_method": "gptq"}), "are quantised"),
    "an adapter beside": (lambda f: (f / "adapter_config.json").write_text("{}"), "holds an adapter. Nearest: merge"),
    # files
    "gguf": (lambda f: (f / SAFE).rename(f / "model.gguf"), "holds weights that cannot be read, 'model.gguf'"),
    "broken safetensors": (lambda f: raw(f, (f / SAFE).read_bytes()[:3000], SAFE), "cannot be read: SafetensorError"),
    "code": (lambda f: as_bin(f, {"transformer.wte.weight": Runs()}), "not a file of tensors alone"),
    "a training state": (lambda f: as_bin(f, {"model": dict(tensors(f)), "step": 5}), "Nearest: model.state_dict()"),
    "a pipe": (piped, "There is no file 'model.safetensors'"),
    "a link out": (lambda f: linked(f, SAFE), "is a link out of the folder"),
    "an index that leads out": (
        lambda f: sharded(f, weight_map={"lm_head.weight": "../other/a.safetensors"}),
        "only names of files in the folder itself are read",
    ),
    "two parts with one weight": (
        lambda f: sharded(f, repeated=["transformer.wte.weight"]),
        "hold 'transformer.wte.weight'",
    ),
    # configurations
    "no configuration": (lambda f: (f / "config.json").unlink(), "There is no config.json in"),
    "no JSON": (lambda f: (f / "config.json").write_text("{'a': 1}"), "must be JSON"),
    "no class": (
        lambda f: config(f, architectures=[]),
        "must name the class under 'architectures', such as GPT2LMHead",
    ),
    "another family": (lambda f: config(f, architectures=["LlamaForCausalLM"]), "a class of llama; model_type is gpt2"),
    "a Transformer": (lambda f: (f / "config.json").write_text(OURS), "declares a Transformer"),
    "too large": (lambda f: config(f, vocab_size=10**12), "more than is free. Nearest: smaller sizes"),
    # shaped models
    "shaped, plain weights": (lambda f: config(f, shaping={"residual_gamma": 0.5}), "does not hold the whole model"),
    "shaped, unknown": (lambda f: config(f, shaping={"evil": 1}), "holds no shaping that can be used"),
}
