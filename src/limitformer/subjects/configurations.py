"""Configurations of transformers from JSON, files, folders and public names.

Entries that name code or other files (`auto_map`, kernels, fusions, paths) are removed before transformers reads a
configuration. A size that the family does not read is refused, since transformers would silently take its default.
"""

import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from inspect import signature
from pathlib import Path
from typing import Any

from limitformer.base.errors import InputError, nearest, require
from limitformer.base.foreign import escaped_errors, file_in, one_line, readable_name
from limitformer.models.serial import from_record, json_object
from limitformer.models.text import read_text
from limitformer.subjects.shapes import SHAPES, require_shape

# Entries that name code, kernels or other files; none of them changes the network.
LEFT_OUT = {"auto_map", "custom_pipelines", "custom_generate", "transformers_weights", "_commit_hash"}
LEFT_OUT |= {"_name_or_path", "name_or_path", "fusion_config", "distributed_config", "use_kernels", "kernel_config"}
LEFT_OUT |= {"attn_implementation", "_attn_implementation", "_attn_implementation_internal", "attn_implementation_auto"}
LEFT_OUT |= {"experts_implementation", "_experts_implementation", "_experts_implementation_internal"}

OWN_CODE = " Its folder has code of its own, which --trust-remote-code (trust_remote_code=True in Python) runs."
WEIGHTS_ENDINGS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".npz", ".onnx")
WITHOUT_FAMILY = " Nearest: of nanoGPT, or of Meta's params.json, the module itself: limitformer.check(model)."
MOST_JSON = 2**25  # bytes
MOST_LAYERS = 4096  # a configuration makes a list of them before a module is built
SPREAD = re.compile(r"(^|_)(initializer_range|initializer_factor|init_range|variance_scale|std|std_dev)$")
MOST_SPREAD = 1e6  # its sixth power, which tests need, does not overflow

# Types whose attention takes every mask for a boolean one. Masks of the plain formula are numbers, 0 where a token is
# visible, so that these types would hide exactly the visible tokens (transformers 5.24).
BOOLEAN_MASKS = {"nemotron_asr_streaming_encoder"}

# The names that families have for each size.
SIZES = (
    ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "n_blocks", "num_blocks", "depth"),
    ("hidden_size", "n_embd", "d_model", "dim", "n_embed", "embed_dim", "width", "model_dim"),
    ("num_attention_heads", "n_head", "n_heads", "num_heads", "heads"),
    ("num_key_value_heads", "n_kv_heads", "n_kv_head", "num_kv_heads", "n_query_groups"),
    ("intermediate_size", "n_inner", "d_ff", "ffn_dim", "ffn_hidden_size", "hidden_dim", "mlp_dim"),
    ("vocab_size", "padded_vocab_size", "n_vocab", "vocabulary_size"),
    ("max_position_embeddings", "n_positions", "block_size", "max_seq_len", "context_length", "n_ctx"),
)


@escaped_errors()
def config_of(model: str | Path | dict[str, Any]) -> Any:
    """Read a configuration from JSON, its file or folder, or the name of a public shape.

    JSON with a `kind` is a limitformer.Transformer.
    """
    if isinstance(model, dict):
        return config_from(model)
    if os.path.exists(model):
        return config_from(values_in(Path(model)))
    if str(model).lstrip().startswith("{"):
        return config_from(json_object(str(model), "A configuration"))
    require_shape(str(model))
    return config_from(SHAPES[str(model)][0])


def values_in(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file, or in the config.json of a folder."""
    if not path.is_dir():
        is_weights = path.suffix in WEIGHTS_ENDINGS
        require(not is_weights, f"{path} is a file of weights. Nearest: its folder, with a config.json in it.")
        return json_object(read_text(path, MOST_JSON), str(path))
    if not (path / "config.json").exists():
        inner = [each for each in path.glob("*") if (each / "config.json").is_file()]
        latest = max(inner, key=lambda each: (len(each.name), each.name), default=None)  # checkpoint-900 before -1000
        hint = "" if latest is None else f" Nearest: {latest}."
        if (path / "adapter_config.json").exists():
            hint = " It holds an adapter. Nearest: its base model with the adapter merged into it (merge_and_unload)."
        raise InputError(f"There is no config.json in {path}.{hint}")
    with one_line(f"config.json in {readable_name(path)} cannot be read"):
        return object_in(path, "config.json")


def object_in(folder: Path, name: str) -> dict[str, Any]:
    """Return the JSON object in a file of a folder."""
    return json_object(read_text(file_in(folder, name), MOST_JSON), f"{name} in {folder}")


@escaped_errors()
def config_from(values: dict[str, Any]) -> Any:
    """Make a configuration of transformers from its JSON."""
    import torch
    import transformers
    from transformers import CONFIG_MAPPING, AutoConfig

    if "kind" in values and "model_type" not in values:
        return from_record(values, imports=False)
    own_code = "auto_map" in values
    values = data_of(values)
    kind = values.get("model_type")
    if not isinstance(kind, str):
        names = values.get("architectures")
        named = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
        family = getattr(getattr(getattr(transformers, named, None), "config_class", None), "model_type", None)
        hint = f' Nearest: "model_type": "{family}", the family of {named}.' if family else WITHOUT_FAMILY
        raise InputError(f'a configuration must name its family, such as "model_type": "gpt2"; got {kind!r:.60}.{hint}')
    if kind not in CONFIG_MAPPING:
        raise InputError(
            f"model_type must be one that the installed transformers has; got {kind!r}."
            f"{OWN_CODE if own_code else family_like(kind)}"
        )
    check_sizes(values, kind)
    with quiet_transformers(), one_line(f"the configuration of {kind} cannot be made"):
        config = AutoConfig.for_model(**values)
        refuse_unread(config, values)
        known = (None, "auto", torch.float64, torch.float32, torch.float16, torch.bfloat16)
        dtype = getattr(config, "dtype", None)
        require(dtype in known, f"dtype must be float32, float16, bfloat16 or float64; got {dtype!s:.60}.")
    return config


def family_like(kind: str) -> str:
    """Return ` Nearest: …` with the family that a name such as GPT-2, llama3 or bert-base-uncased means."""
    from transformers import CONFIG_MAPPING

    if kind == "shaped_transformer":  # a checkpoint of limitformer 0.2
        return " Nearest: limitformer.check in Python, after import limitformer_papers.training.architecture."
    word = kind.lower().rpartition("/")[2]
    known = list(CONFIG_MAPPING.keys())
    squeezed = word.replace("-", "").replace("_", "")
    same = [name for name in known if name.replace("-", "").replace("_", "") == squeezed]
    begins = [name for name in known if word.startswith(name)]
    matches = same or sorted(begins, key=len)[-1:]
    return f" Nearest: {matches[0]}." if matches else nearest(word, known)


def data_of(values: Any) -> Any:
    """Copy JSON without entries that name code or files."""
    if isinstance(values, dict):
        if values.keys() == {"__float__"}:  # how transformers writes ∞
            return float(values["__float__"])
        return {name: data_of(value) for name, value in values.items() if name not in LEFT_OUT}
    return [data_of(value) for value in values] if isinstance(values, list | tuple) else values


def check_sizes(values: Any, family: str) -> None:
    """Raise `InputError` for numbers of which a class would make too long a list, or that cannot be a std."""
    for name, value in numbers_in(values):
        layers = name in SIZES[0] or name.split("_")[-1] == "layers"
        require(not layers or value <= MOST_LAYERS, f"{name} of {family} must be at most {MOST_LAYERS:,}; got more.")
        drawn = not SPREAD.search(name) or 0 <= value < MOST_SPREAD
        require(drawn, f"{name} of {family} must be at least 0 and below {MOST_SPREAD:,.0f}; got {value:g}.")


def numbers_in(values: Any, name: str = "") -> Iterator[tuple[str, int | float]]:
    """Yield every number at any level, with the last name above it."""
    if isinstance(values, int | float) and not isinstance(values, bool):
        yield name, values
    parts: Iterable[tuple[str, Any]] = ()
    if isinstance(values, dict):
        parts = ((str(key), value) for key, value in values.items())
    elif isinstance(values, list | tuple):
        parts = ((name, value) for value in values)
    for inner, value in parts:
        yield from numbers_in(value, inner)


def refuse_unread(config: Any, values: dict[str, Any]) -> None:
    """Raise `InputError` for a size under another family's name, and for contradicting or incomplete sizes."""
    kind, family = type(config), values["model_type"]
    aliases = dict(kind.attribute_map)
    known = {field.name for field in fields(kind)} | set(signature(kind).parameters) | aliases.keys()
    for names in SIZES:
        read = [name for name in names if name in known]
        if not read or any(name in values for name in read):
            continue
        repair = aliases.get(read[0], read[0])
        unread = [name for name in names if name in values and getattr(config, repair, None) != values[name]]
        require(not unread, f"{family} has no field {unread[:1]} and would take its default. Nearest: {repair!r}.")
    for alias, name in aliases.items():
        twice = alias in values and name in values and values[alias] != values[name]
        require(not twice, f"{alias!r} and {name!r} are one field of {family}, and differ.")
    halved = "num_decoder_layers" in known and "num_hidden_layers" in values
    if halved and not values.keys() & {"num_layers", "num_decoder_layers"}:
        raise InputError(f"num_hidden_layers of {family} leaves num_decoder_layers as it is. Nearest: 'num_layers'.")


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers within the with statement, as errors are raised in one line; restore its level and bars."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def is_config(model: Any) -> bool:
    """Whether `model` is a configuration of transformers."""
    transformers: Any = sys.modules.get("transformers")  # None: then nothing is its configuration
    return transformers is not None and isinstance(model, transformers.PreTrainedConfig)


def as_plain_formulas(config: Any) -> Any:
    """Set attention and experts to plain formulas, which `Measure` can watch, where these are right."""
    for part in {id(c): c for c in (config, config.get_text_config())}.values():
        part._attn_implementation = "eager"
        part._experts_implementation = "eager"
    for name in {"", *(config.sub_configs or ())}:
        part = getattr(config, name) if name else config
        if getattr(part, "model_type", "") in BOOLEAN_MASKS:
            part._attn_implementation = "sdpa"
    return config
