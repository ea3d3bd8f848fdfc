"""`load_shaped`: load a shaped model that `save_pretrained` wrote, completely or not at all.

`from_pretrained` fails for its folder, with or without limitformer and for any attention: the configuration names an
activation that does not exist, and the function to call instead (`limitformer.hf.settings`).
"""

from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from limitformer.base.errors import InputError, first_line, require
from limitformer.hf.attention import ATTENTION
from limitformer.hf.settings import OUTPUT_ATTENTIONS, Shaping, recorded_class, unmark
from limitformer.hf.shaping import apply_shaping, checked_family
from limitformer.nn import Gain, Residual

ALIGNED = 64  # bytes, the alignment of torch
# Exceptions for files that are truncated or of another format.
UNREADABLE = (OSError, RuntimeError, ValueError, KeyError, EOFError, UnpicklingError, SafetensorError)
NO_CONFIGURATION = (*UNREADABLE, TypeError, AttributeError, StrictDataclassError)
# Options of `from_pretrained` that configurations have too.
FOR_WEIGHTS = ("dtype", "torch_dtype", "quantization_config")
# Options for files of a hub, which the configuration and the weights need.
FOR_BOTH: tuple[str, ...] = ("cache_dir", "force_download", "local_files_only", "proxies", "revision")
FOR_BOTH += ("subfolder", "token", "trust_remote_code")
KINDS = ("missing_keys", "unexpected_keys", "mismatched_keys")


def load_shaped(
    folder: str | Path,
    model_class: type[PreTrainedModel] | None = None,
    *,
    output_loading_info: bool = False,
    **options: Any,
) -> Any:
    """Load a model that `shape_model` shaped, from the folder that `save_pretrained` wrote, or from a hub.

    Args:
        folder: a folder with config.json and the weights, or the name of a model on the hub or in its cache.
        model_class: None means the class that was saved. Another class of the family has a new head.
        output_loading_info: whether to return (model, the loading info of `from_pretrained`).
        options: options of `from_pretrained` (dtype, device_map, num_labels, ignore_mismatched_sizes, revision, …).

    Raises:
        InputError: the folder is missing, the model is not shaped, or weights are missing, unexpected or do not fit.
            Weights of the head may, with another `model_class` or `ignore_mismatched_sizes`.
    """
    config, options = read_config(folder, {"trust_remote_code": False} | options)
    stored = getattr(config, "shaping", None)
    if not isinstance(stored, dict):
        raise InputError(f"{folder} holds no shaped model. Load it with from_pretrained, then shape_model.")
    saved = None if model_class is not None else recorded_class(config)
    stock_class = checked_class(model_class, config) if saved is None else saved
    unmark(config)
    try:
        shaping = Shaping(**stored)
    except (TypeError, InputError) as error:
        raise InputError(f"config.json in {folder} holds no shaping that can be used: {first_line(error)}") from error
    loader = shaped_class(stock_class, shaping)
    try:
        model, info = loader.from_pretrained(folder, config=config, output_loading_info=True, **options)
    except InputError:
        raise
    except UNREADABLE as error:
        only_sizes = "ignore_mismatched_sizes" in str(error)
        repair = " Nearest: ignore_mismatched_sizes=True, if a head has another size." if only_sizes else ""
        raise InputError(f"The weights in {folder} cannot be read: {first_line(error)}{repair}") from error
    pooler = {name for name, _ in model.named_parameters() if name.startswith("pooler.")}
    if saved is not None and pooler and pooler <= set(info["missing_keys"]):  # saved without one, as in language models
        model.pooler = None
        info["missing_keys"] = set(info["missing_keys"]) - pooler
    check_complete(info, folder, model, other_head=saved is None)
    model.__class__ = stock_class  # as after `shape_model`
    align(model)
    for module in model.modules():
        if isinstance(module, Gain | Residual):  # which loading does not restore
            module.requires_grad_(shaping.trained)
    return (model, info) if output_loading_info else model


def read_config(folder: str | Path, options: dict[str, Any]) -> tuple[PreTrainedConfig, dict[str, Any]]:
    """Return the configuration, changed by the options that are its entries, and the other options."""
    require("config" not in options, "load_shaped reads the configuration itself. Nearest: its entries, num_labels=3.")
    kind = options.get("attn_implementation") or ATTENTION
    require(kind == ATTENTION, f"A shaped model has the attention {ATTENTION!r}; got attn_implementation={kind!r}.")
    local = isinstance(folder, Path) or folder.startswith((".", "/", "~")) or Path(folder).exists()
    place = Path(folder) / options.get("subfolder", "")
    require(not local or (place / "config.json").is_file(), f"There is no config.json in {place}.")
    later = {name: options[name] for name in options if name in FOR_WEIGHTS}
    both = {name: options[name] for name in options if name in FOR_BOTH}
    own = {name: value for name, value in options.items() if name not in later and name != "output_attentions"}
    try:
        config, unused = AutoConfig.from_pretrained(folder, return_unused_kwargs=True, **own)
    except NO_CONFIGURATION as error:
        raise InputError(f"{Path(folder) / 'config.json'} cannot be read: {first_line(error)}") from error
    if "output_attentions" in options:
        setattr(config, OUTPUT_ATTENTIONS, options["output_attentions"])
    return config, both | unused | later


def checked_class(model_class: Any, config: PreTrainedConfig) -> Any:
    """Return the class; raise `InputError` unless its models have such a configuration."""
    fits = isinstance(model_class, type) and issubclass(model_class, PreTrainedModel)
    fits = fits and isinstance(model_class.config_class, type) and isinstance(config, model_class.config_class)
    if not fits:
        kind, name = config.model_type, getattr(model_class, "__name__", repr(model_class))
        raise InputError(f"model_class must be a class of models of {kind!r}, such as the saved one; got {name}.")
    return model_class


def shaped_class(stock_class: type[PreTrainedModel], shaping: Shaping) -> Any:
    """Derive a class that shapes its models when it builds them, so that their gains are loaded with the rest."""

    class Shaped(stock_class):  # type: ignore[misc, valid-type]
        def __init__(self, config: PreTrainedConfig, *inputs: Any, **options: Any) -> None:
            super().__init__(config, *inputs, **options)
            self.config.shaping = None
            apply_shaping(self, checked_family(self, shaping), shaping)

    # The library finds names of weights and recorded outputs by the class's module and name.
    for name in ("__name__", "__qualname__", "__module__"):
        setattr(Shaped, name, getattr(stock_class, name))
    return Shaped


def check_complete(info: dict[str, Any], folder: str | Path, model: PreTrainedModel, other_head: bool) -> None:
    """Raise `InputError` if weights are missing or unexpected; those of another head may be."""
    for kind in KINDS:
        keys = sorted(key if isinstance(key, str) else key[0] for key in info.get(kind, ()))
        if other_head or kind == "mismatched_keys":
            keys = [key for key in keys if is_of_base(key, model)]
        fault = kind.replace("_", " ").replace("keys", "weights")
        require(not keys, f"{folder} does not hold the whole model: {len(keys)} {fault}, {', '.join(keys[:3])}.")


def is_of_base(key: str, model: PreTrainedModel) -> bool:
    """Whether a weight belongs to the base model; a pooler counts as a head."""
    blocks = model.base_model.shaped_blocks
    base = {name for name, _ in model.base_model.named_parameters()}
    own = key.removeprefix(f"{model.base_model_prefix}.")
    return "pooler." not in key and (own in base or f".{blocks}." in f".{own}")


def align(model: PreTrainedModel) -> None:
    """Copy weights that the file has at unaligned addresses, on which the last bits of a product depend."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type == "cpu" and tensor.data_ptr() % ALIGNED:
            tensor.data = tensor.data.clone()
