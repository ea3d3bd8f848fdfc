"""Checkpoint folders that are broken or hostile, and the error of each.

Every case changes a copy of a small sound GPT-2 and lists words that the message must contain.
"""

import json
import os
import pickle
import shutil
import zipfile
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

from limitformer.hf import Shaping, shape_model

GPT2 = {"vocab_size": 60, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 24}
GPT2 |= {"bos_token_id": 1, "eos_token_id": 2}
BERT = {"vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
BERT |= {"intermediate_size": 32, "max_position_embeddings": 24}
T5 = {"vocab_size": 60, "d_model": 16, "num_layers": 2, "num_heads": 2, "d_kv": 8, "d_ff": 32}
LLAMA = BERT | {"num_key_value_heads": 1}
SAFE, BIN = "model.safetensors", "pytorch_model.bin"
CASES = {}


def small(kind=transformers.GPT2LMHeadModel, **changes):
    """Return a model with the weights that its own initialisation draws."""
    torch.manual_seed(0)
    sizes = {"gpt2": GPT2, "bert": BERT, "t5": T5, "llama": LLAMA}[kind.config_class.model_type]
    return kind(kind.config_class(**(sizes | changes)))


def case(says, *arguments):
    """Register a function that makes a folder hostile; each of the `arguments` makes one case."""

    def register(change):
        for number, one in enumerate(arguments or [()]):
            one = one if isinstance(one, tuple) else (one,)
            name = change.__name__.replace("_", " ") + (f" {number}: {str(one)[:50]}" if one else "")
            CASES[name] = (lambda folder, one=one: change(folder, *one), says)
        return change

    return register


def config(folder, **changes):
    path = Path(folder) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def tensors(folder):
    return load_file(Path(folder) / SAFE)


def save(folder, weights):
    save_file({name: each.contiguous().clone() for name, each in weights.items()}, Path(folder) / SAFE)


def as_bin(folder, content=None):
    """Store the weights as a file of torch, or other content under its name."""
    torch.save(dict(tensors(folder)) if content is None else content, Path(folder) / BIN)
    (Path(folder) / SAFE).unlink()


def raw(folder, content, name=BIN):
    """Replace the weights with bytes under a name."""
    (Path(folder) / SAFE).unlink()
    (Path(folder) / name).write_bytes(content)


def sharded(folder, **changes):
    """Store the weights in two files and an index with changed fields."""
    result = tensors(folder)
    names = list(result)
    parts = {"a.safetensors": names[:14], "b.safetensors": names[14:]}
    for file, some in parts.items():
        save_file({name: result[name].clone() for name in some}, Path(folder) / file)
    places = {name: file for file, some in parts.items() for name in some}
    (Path(folder) / SAFE).unlink()
    index = {"metadata": {}, "weight_map": places} | changes
    (Path(folder) / f"{SAFE}.index.json").write_text(json.dumps(index))
    return index


def reindex(folder, name, file):
    """Name another file in the index for one weight."""
    index = sharded(folder)
    index["weight_map"][name or next(iter(index["weight_map"]))] = file
    (Path(folder) / f"{SAFE}.index.json").write_text(json.dumps(index))


# Missing, unexpected and other weights.


@case("lacks lm_head.weight, transformer.h.0.attn.c_proj.weight")
def three_weights_of_28(folder):
    save(folder, dict(list(tensors(folder).items())[:3]))


@case("hold none")
def no_weights(folder):
    save(folder, {})


@case("lacks transformer.h.1.mlp.c_fc.bias")
def one_weight_is_missing(folder):
    result = tensors(folder)
    del result["transformer.h.1.mlp.c_fc.bias"]
    save(folder, result)


@case("lacks lm_head.weight, transformer.wte.weight")
def both_sides_of_a_tie_are_missing(folder):
    result = tensors(folder)
    del result["transformer.wte.weight"]
    save(folder, result)


@case("lacks transformer.h.2.")
def one_layer_more_in_the_configuration(folder):
    config(folder, n_layer=3)


@case("holds transformer.h.1.")
def one_layer_less_in_the_configuration(folder):
    config(folder, n_layer=1)


@case("holds evil that GPT2LMHeadModel does not have")
def one_weight_too_many(folder):
    save(folder, tensors(folder) | {"evil": torch.ones(3)})


@case("holds other shapes, transformer.ln_f.weight (7,) for (16,)")
def one_weight_of_another_shape(folder):
    save(folder, tensors(folder) | {"transformer.ln_f.weight": torch.ones(7)})


@case("holds other shapes")
def a_wider_configuration(folder):
    config(folder, n_embd=32)


@case("lacks score.weight")
def a_head_that_the_files_do_not_have(folder):
    config(folder, architectures=["GPT2ForSequenceClassification"])


@case('Nearest: "architectures": ["BertModel"]')
def a_base_model_under_the_class_of_a_head(folder):
    shutil.rmtree(folder)
    small(transformers.BertModel).save_pretrained(folder)
    config(folder, architectures=["BertForSequenceClassification"])


@case('Nearest: "architectures": ["BertForPreTraining"]')
def two_heads_under_the_class_of_one(folder):
    shutil.rmtree(folder)
    small(transformers.BertForPreTraining).save_pretrained(folder)
    config(folder, architectures=["BertForMaskedLM"])


@case("lacks decoder.block.1.")
def a_t5_without_half_of_its_decoder(folder):
    shutil.rmtree(folder)
    small(transformers.T5ForConditionalGeneration).save_pretrained(folder)
    save(folder, {name: each for name, each in tensors(folder).items() if "decoder.block.1." not in name})


@case("lacks lm_head.weight")
def an_untied_head_that_was_dropped_as_tied(folder):
    shutil.rmtree(folder)
    small(transformers.LlamaForCausalLM).save_pretrained(folder)
    save(folder, {name: each for name, each in tensors(folder).items() if name != "lm_head.weight"})


@case("every matrix in")
def weights_that_are_all_zero(folder):
    save(folder, {name: torch.zeros_like(each) for name, each in tensors(folder).items()})


@case("a quantised weight without its scale", "int8", "uint8", "int32", "int64", "bool", "float8_e4m3fn", "float8_e5m2")
def matrices_in_whole_numbers(folder, kind):
    result = tensors(folder)
    save(folder, {name: each.to(getattr(torch, kind)) if each.dim() > 1 else each for name, each in result.items()})


@case("is not a plain tensor of real numbers")
def complex_weights(folder):
    save(folder, {name: each.to(torch.complex64) for name, each in tensors(folder).items()})


@case(
    "are quantised",
    "gptq",
    "awq",
    "bitsandbytes",
    "fp8",
    "mxfp4",
    "compressed-tensors",
    "no-such-method",
    5,
)
def a_quantisation(folder, method):
    config(folder, quantization_config={"quant_method": method, "bits": 4})


@case("are quantised")
def a_quantisation_that_is_a_word(folder):
    config(folder, quantization_config="gptq")


@case("are quantised")
def a_quantisation_of_a_part(folder):
    config(folder, text_config={"quantization_config": {"quant_method": "awq"}})


@case('Nearest: "architectures": ["BertForPreTraining"]')
def two_heads_with_the_old_names_of_norms(folder):
    """The file of bert-base-uncased."""
    two_heads_under_the_class_of_one(folder)
    result = tensors(folder)
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    for new, name in old.items():
        result = {key.replace(new, name): each for key, each in result.items()}
    save(folder, result)


@case("whole: it holds roberta.more, roberta.pooler")
def a_roberta_with_something_else(folder):
    as_roberta(folder)
    save(folder, tensors(folder) | {"roberta.more": torch.ones(3)})


@case("lacks lm_head.dense.weight")
def a_roberta_without_a_part_of_its_head(folder):
    as_roberta(folder)
    save(folder, {name: each for name, each in tensors(folder).items() if name != "lm_head.dense.weight"})


def as_roberta(folder):
    """Write the file of roberta-base: a pooler and the head of a language model."""
    shutil.rmtree(folder)
    torch.manual_seed(0)
    module = transformers.RobertaForMaskedLM(transformers.RobertaConfig(**BERT))
    module.save_pretrained(folder)
    result = tensors(folder)
    result |= {
        f"roberta.pooler.dense.{name}": torch.randn(shape) for name, shape in (("weight", (16, 16)), ("bias", 16))
    }
    result["lm_head.decoder.weight"] = result["roberta.embeddings.word_embeddings.weight"]
    save(folder, result)
    return module


# Files.


@case("is a folder; it must be a file", SAFE, f"{SAFE}.index.json")
def a_file_of_weights_is_a_folder(folder, name):
    (folder / SAFE).unlink()
    (folder / name).mkdir()


@case("is a folder; it must be a file")
def the_configuration_is_a_folder(folder):
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()


@case("There is no config.json")
def no_configuration(folder):
    (folder / "config.json").unlink()


@case("not a regular file", SAFE, "config.json")
def a_file_is_a_pipe(folder, name):
    (folder / name).unlink()
    os.mkfifo(folder / name)


@case("It holds an adapter")
def an_adapter_alone(folder):
    for name in (SAFE, "config.json"):
        (folder / name).unlink()
    about = {"base_model_name_or_path": "/etc", "peft_type": "LORA", "auto_mapping": {"base_model_class": "os.system"}}
    (folder / "adapter_config.json").write_text(json.dumps(about))


@case("holds an adapter")
def an_adapter_beside_the_weights(folder):
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "/etc", "peft_type": "LORA"}')
    shutil.copy(folder / SAFE, folder / "adapter_model.safetensors")


@case(
    "holds weights that cannot be read",
    "tf_model.h5",
    "flax_model.msgpack",
    "model.gguf",
    "ckpt.pt",
    "model-1.safetensors",
    "model.onnx",
)
def weights_of_another_kind(folder, name):
    (folder / SAFE).rename(folder / name)


@case("it is empty", SAFE, BIN)
def an_empty_file(folder, name):
    raw(folder, b"", name)


@case("cannot be read: SafetensorError", b"\xff" * 100, b"\0" * 8, b"{}" * 8, (2**62).to_bytes(8, "little") + b"{}")
def no_safetensors(folder, content):
    raw(folder, content, SAFE)


@case("cannot be read: SafetensorError", 9, 100, 3000, -1)
def a_download_that_was_broken_off(folder, size):
    content = (folder / SAFE).read_bytes()
    raw(folder, content[:size], SAFE)


@case("cannot be read: SafetensorError", '{"a": {"dtype": "F32", "shape": [9, 9], "data_offsets": [0, 8]}}', '{"a": 5}')
def a_header_that_lies(folder, header):
    raw(folder, len(header).to_bytes(8, "little") + header.encode() + b"\0" * 8, SAFE)


# Indices.


@case("only names of files in the folder itself are read", "../other/a.safetensors", "/tmp/a.safetensors")
def an_index_that_leads_out(folder, file):
    reindex(folder, None, file)


@case("only names of files in the folder itself", "sub/../a.safetensors", "..\\a.safetensors", "a\0.safetensors")
def an_index_with_a_path(folder, file):
    reindex(folder, None, file)


@case("must name .safetensors files", 5, None, "/etc/passwd", "a.bin")
def an_index_of_something_else(folder, file):
    reindex(folder, None, file)


@case("There is no c.safetensors in")
def a_part_that_is_missing(folder):
    reindex(folder, "more", "c.safetensors")


@case("lacks what the index names: 'more'")
def an_index_that_names_too_much(folder):
    reindex(folder, "more", "a.safetensors")


@case("must map weights to files", {}, [], "a.safetensors", None)
def an_index_without_a_map(folder, places):
    sharded(folder, weight_map=places)


@case("several files in")
def a_weight_in_two_parts(folder):
    sharded(folder)
    shutil.copy(folder / "a.safetensors", folder / "b.safetensors")
    index = {"weight_map": {"transformer.wte.weight": "a.safetensors", "lm_head.weight": "b.safetensors"}}
    names = list(load_file(folder / "a.safetensors"))
    index["weight_map"] = {names[0]: "a.safetensors", names[1]: "b.safetensors"}
    (folder / f"{SAFE}.index.json").write_text(json.dumps(index))


@case("outside the folder", SAFE, "config.json")
def a_link_out_of_the_folder(folder, name):
    (folder / name).rename(folder.parent / f"outside-{name}")
    (folder / name).symlink_to(folder.parent / f"outside-{name}")


@case("is a link to")
def a_part_that_is_a_link_out_of_the_folder(folder):
    sharded(folder)
    (folder / "a.safetensors").rename(folder.parent / "outside.safetensors")
    (folder / "a.safetensors").symlink_to("../outside.safetensors")


@case("cannot be read", SAFE, BIN, f"{SAFE}.index.json", "config.json")
def a_link_to_itself(folder, name):
    (folder / (name if name == "config.json" else SAFE)).unlink()
    (folder / name).symlink_to(name)


# Files of torch.


class Runs:
    """A pickle that runs code."""

    def __reduce__(self):
        return os.system, ("touch pwned",)


@case("not a file of tensors alone")
def a_pickle_that_runs_code(folder):
    raw(folder, pickle.dumps(Runs()))


@case("not a file of tensors alone")
def an_archive_that_runs_code(folder):
    as_bin(folder, {"transformer.wte.weight": Runs()})


@case("not a file of tensors alone")
def a_whole_module(folder):
    as_bin(folder, torch.nn.Linear(2, 2))


@case("not a whole file of torch.save", b"PK\5\6" + b"\0" * 18, b"\x80\x02N.")
def no_file_of_torch(folder, content):
    raw(folder, content)


@case("cannot be read", b"text", b"\x80", b"\x80\x02cposix\nsystem\n(S'touch pwned'\ntR.", b"PK\3\4" + b"\0" * 50)
def no_archive(folder, content):
    raw(folder, content)


@case("cannot be read", 100, 2000)
def an_archive_that_was_broken_off(folder, size):
    as_bin(folder)
    content = (folder / BIN).read_bytes()
    (folder / BIN).write_bytes(content[:size])


@case("is compressed, which torch.save does not do")
def an_archive_that_unpacks_to_more(folder):
    as_bin(folder)
    with zipfile.ZipFile(folder / BIN) as old:
        parts = {part.filename: old.read(part) for part in old.infolist()}
    with zipfile.ZipFile(folder / BIN, "w", zipfile.ZIP_DEFLATED) as new:
        for name, content in parts.items():
            new.writestr(name, content)


@case("is a dict, not a tensor. Nearest: model.state_dict()", "model", "state_dict", "optimizer")
def a_training_loops_checkpoint(folder, name):
    as_bin(folder, {name: dict(tensors(folder)), "step": 5})


@case("it holds a list, not tensors by name")
def a_list_of_tensors(folder):
    as_bin(folder, list(tensors(folder).values()))


@case("which is not a word")
def tensors_named_by_numbers(folder):
    as_bin(folder, dict(enumerate(tensors(folder).values())))


@case("is not a plain tensor of real numbers")
def sparse_weights(folder):
    as_bin(folder, {name: each.to_sparse() for name, each in tensors(folder).items()})


# Configurations.


@case(
    "must be JSON",
    b"",
    b"{",
    b"{'a': 1}",
    b'{"model_type": "gpt2",}',
    b"\xef\xbb\xbf{}",
    b'{"a": ' + b"9" * 5000 + b"}",
)
def no_json(folder, content):
    (folder / "config.json").write_bytes(content)


@case("must be JSON", b"[" * 100_000, b'{"a":' * 100_000)
def endless_brackets(folder, content):
    (folder / "config.json").write_bytes(content)


@case("at most 32 levels")
def many_levels(folder):
    deep = {}
    for _ in range(60):
        deep = {"a": deep}
    config(folder, deep=deep)


@case("must be a JSON object", b"[]", b"5", b"null", b'"gpt2"')
def no_object(folder, content):
    (folder / "config.json").write_bytes(content)


@case("not UTF-8 text", "utf-16", "utf-32")
def another_encoding(folder, name):
    (folder / "config.json").write_bytes((folder / "config.json").read_text().encode(name))


@case("'n_layer' is given twice")
def a_field_that_is_given_twice(folder):
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace('"n_layer": 2', '"n_layer": 2, "n_layer": 48'))


@case("must be a finite number")
def a_field_that_is_nan(folder):
    config(folder, initializer_range=float("nan"))


@case("must be a finite number", float("inf"), -float("inf"))
def a_field_that_is_infinite(folder, value):
    config(folder, initializer_range=value)


@case("must be a finite number")
def a_field_that_overflows(folder):
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace('"resid_pdrop": 0.1', '"resid_pdrop": 1e999'))


@case("bytes; at most")
def a_configuration_of_40_megabytes(folder):
    with (folder / "config.json").open("ab") as file:
        file.truncate(40 * 2**20)


@case("model_type must be", ["gpt2"], {}, 5, "gtp2", "../gpt2", "")
def no_family(folder, kind):
    config(folder, model_type=kind)


@case("must name its family")
def a_missing_family(folder):
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({key: values[key] for key in values if key != "model_type"}))


@case("a class of llama; model_type is gpt2. Nearest: GPT2LMHeadModel")
def the_class_of_another_family(folder):
    config(folder, architectures=["LlamaForCausalLM"])


@case("architectures", [5], {}, "GPT2LMHeadModel", [["GPT2LMHeadModel"]], 7)
def no_list_of_classes(folder, names):
    config(folder, architectures=names)


@case(
    "is not a model of transformers",
    ["utils"],
    ["pipeline"],
    ["AutoModel"],
    ["__import__"],
    ["GPT2Config"],
    ["os.system"],
)
def something_else_than_a_class(folder, names):
    config(folder, architectures=names)


@case("not a model by itself")
def the_class_of_all_models(folder):
    config(folder, architectures=["PreTrainedModel"])


@case("must name the class under 'architectures', such as GPT2LMHeadModel", [], None)
def no_class(folder, names):
    config(folder, architectures=names)


@case("which has no weights")
def a_transformer_of_ours(folder):
    (folder / "config.json").write_text(
        '{"kind": "Transformer", "width": 8, "depth": 2, "gamma": 0.5, "feedforward": {"kind": "ReLU"}}'
    )


@case(
    "cannot be made",
    {"n_embd": -16},
    {"n_embd": 0},
    {"n_head": 0},
    {"n_head": 3},
    {"n_embd": "16"},
    {"n_layer": 2.5},
    {"n_layer": None},
    {"vocab_size": True},
    {"vocab_size": -1},
    {"vocab_size": 0},
    {"n_positions": [24]},
    {"activation_function": "os.system"},
    {"activation_function": ["gelu"]},
    {"n_embd": 10**9, "n_head": 1},
    {"dtype": "os.system"},
)
def a_size_that_is_none(folder, values):
    config(folder, **values)


@case("dtype must be", "load", "int8", "float8_e4m3fn")
def a_type_that_is_none(folder, name):
    config(folder, dtype=name)


@case(
    "must be at most",
    {"n_layer": 10**9},
    {"n_layer": 10_000},
    {"num_labels": 10**9},
    {"n_layer": 10**400},
    {"n_positions": 10**10},
)
def a_size_that_cannot_be_listed(folder, values):
    config(folder, **values)


@case("must be at least 0 and below 1,000,000", 1e300, 1e30, 1e6, -0.02, -1)
def a_standard_deviation_that_is_none(folder, value):
    config(folder, initializer_range=value)


@case("are free. Nearest: smaller sizes", {"vocab_size": 10**12})
def a_size_that_does_not_fit(folder, values):
    config(folder, **values)


@case("describes")
def a_configuration_far_larger_than_the_files(folder):
    config(folder, n_embd=2048, n_layer=2)


@case("have no entries", "n_positions")
def a_size_of_zero(folder, name):
    config(folder, **{name: 0})


@case("has no field ['num_layers']")
def a_size_in_the_words_of_another_family(folder):
    shutil.rmtree(folder)
    small(transformers.LlamaForCausalLM).save_pretrained(folder)
    values = json.loads((folder / "config.json").read_text())
    values["num_layers"] = values.pop("num_hidden_layers")
    (folder / "config.json").write_text(json.dumps(values))


@case("are one field of gpt2, and differ")
def a_size_that_is_given_twice(folder):
    config(folder, hidden_size=32)


@case("[31mevil  name that GPT2LMHeadModel does not have")
def a_name_that_colours_the_terminal(folder):
    save(folder, tensors(folder) | {"\x1b[31mevil\n\nname": torch.ones(2)})


@case("must be at most")
def a_field_that_colours_the_terminal(folder):
    config(folder, **{"\x1b[31m_layers": 10**9})


@case("[31m")
def a_part_that_colours_the_terminal(folder):
    reindex(folder, "more", "\x1b[31m.safetensors")
    shutil.copy(folder / "b.safetensors", folder / "\x1b[31m.safetensors")


# Shaped models.


def shape(folder):
    """Replace the model with the same model, shaped."""
    shape_model(small(), Shaping()).save_pretrained(folder)


@case("every matrix in")
def a_shaped_model_of_zeros(folder):
    shape(folder)
    save(folder, {name: torch.zeros_like(each) for name, each in tensors(folder).items()})


@case("holds other shapes, transformer.ln_f.weight (7,) for (16,)")
def a_shaped_model_with_a_weight_of_another_shape(folder):
    shape(folder)
    save(folder, tensors(folder) | {"transformer.ln_f.weight": torch.ones(7)})


@case("names code under", {"auto_map": {"AutoConfig": "code.C"}}, {"attn_implementation": "evil/kernel"})
def a_shaped_model_that_names_code(folder, values):
    config(folder, shaping={"residual_gamma": 0.5}, **values)


@case("config.json", {"evil": 1}, 5, {"residual_gamma": "a"})
def a_shaping_that_is_none(folder, shaping):
    config(folder, shaping=shaping)


@case("does not hold the whole model")
def a_plain_model_that_says_it_is_shaped(folder):
    config(folder, shaping={"residual_gamma": 0.5})


@case("names no model of transformers")
def a_shaped_model_of_no_class(folder):
    config(folder, shaping={}, architectures=["pipeline"])
