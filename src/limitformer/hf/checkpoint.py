"""Load a shaped model that was saved with `save_pretrained`: whole, or not at all.

A plain `from_pretrained` of its folder fails, with limitformer or without, whatever attention it asks for: the
configuration names an activation that there is none of, and what to call instead (`limitformer.hf.marks`).
"""

from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from limitformer.base.errors import InputError, first_line, require
from limitformer.hf.attention import ATTENTION
from limitformer.hf.families import FAMILIES
from limitformer.hf.marks import WISH, recorded_class, unmark
from limitformer.hf.shaping import Shaping, apply_shaping, checked_family
from limitformer.nn import Gain, Residual

ALIGNED = 64  # bytes, torch's own
# What files that are cut short, or hold something else, end in.
UNREADABLE = (OSError, RuntimeError, ValueError, KeyError, EOFError, UnpicklingError, SafetensorError)
NO_CONFIGURATION = (*UNREADABLE, TypeError, AttributeError, StrictDataclassError)
# What `from_pretrained` takes for itself, though configurations have a word of that name.
FOR_WEIGHTS = ("dtype", "torch_dtype", "quantization_config")
# Where a hub's files are found: both the configuration and the weights need it.
FOR_BOTH = (
    "cache_dir",
    "force_download",
    "local_files_only",
    "proxies",
    "revision",
    "subfolder",
    "token",
    "trust_remote_code",
)
KINDS = ("missing_keys", "unexpected_keys", "mismatched_keys")
Report = dict[str, Any]


def load_shaped(
    folder: str | Path,
    model_class: type[PreTrainedModel] | None = None,
    *,
    output_loading_info: bool = False,
    **options: Any,
) -> Any:
    """A model that `shape_model` shaped, from the folder that `save_pretrained` wrote, or from a hub.

    Args:
        folder: with config.json and the weights; or a model's name on the hub, or in its cache.
        model_class: None means the class that was saved. Another of the same family has another head, which is new.
        output_loading_info: whether the result is (model, what `from_pretrained` says of the weights).
        options: what `from_pretrained` takes (dtype, device_map, num_labels, ignore_mismatched_sizes, revision, …).

    Raises:
        InputError: no such folder, a model that is not shaped, or weights that are missing, left over or do not fit;
            of another head, or with `ignore_mismatched_sizes`, those of the head may.
    """
    config, options = read_config(folder, {"trust_remote_code": False} | options)
    kept = getattr(config, "shaping", None)
    if not isinstance(kept, dict):
        raise InputError(f"{folder} holds no shaped model. Load it with from_pretrained, then shape_model.")
    saved = None if model_class is not None else recorded_class(config)
    plain = checked_class(model_class, config) if saved is None else saved
    unmark(config)
    shaping = kept_shaping(kept, folder)
    model, report = loaded(shaped_class(plain, shaping), folder, config, options)
    if saved is not None:
        leave_out_pooler(model, report)
    check_whole(report, folder, model, other_head=saved is None)
    model.__class__ = plain  # what `shape_model` would have given
    align(model)
    for module in model.modules():
        if isinstance(module, Gain | Residual):  # loading forgets it
            module.requires_grad_(shaping.trained)
    return (model, report) if output_loading_info else model


def read_config(folder: str | Path, options: dict[str, Any]) -> tuple[PreTrainedConfig, dict[str, Any]]:
    """The configuration, with those of the options that are its own; the other options."""
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
        setattr(config, WISH, options["output_attentions"])
    return config, both | unused | later


def kept_shaping(kept: dict[str, Any], folder: str | Path) -> Shaping:
    """The shaping that a configuration holds."""
    try:
        return Shaping(**kept)
    except (TypeError, InputError) as error:
        raise InputError(f"config.json in {folder} holds no shaping that can be used: {first_line(error)}") from error


def checked_class(model_class: Any, config: PreTrainedConfig) -> type[PreTrainedModel]:
    """A class of models for this configuration."""
    is_model = isinstance(model_class, type) and issubclass(model_class, PreTrainedModel)
    name = getattr(model_class, "__name__", repr(model_class))
    require(is_model, f"model_class must be a class of models, such as BertForSequenceClassification; got {name}.")
    kind = type(config)
    fits = isinstance(model_class.config_class, type) and issubclass(kind, model_class.config_class)
    require(fits, f"model_class must be one of the family {config.model_type!r}, which was saved; got {name}.")
    found: type[PreTrainedModel] = model_class
    return found


def shaped_class(plain: type[PreTrainedModel], shaping: Shaping) -> Any:
    """The class whose models are shaped when they are made, so that their gains are loaded with the rest."""

    class Shaped(plain):  # type: ignore[misc, valid-type]
        def __init__(self, config: PreTrainedConfig, *inputs: Any, **options: Any) -> None:
            super().__init__(config, *inputs, **options)
            self.config.shaping = None
            apply_shaping(self, checked_family(self, shaping), shaping)

    # The library knows its models, their names of weights and the outputs that they record, by module and name.
    Shaped.__name__, Shaped.__qualname__, Shaped.__module__ = plain.__name__, plain.__qualname__, plain.__module__
    return Shaped


def loaded(
    loader: Any, folder: str | Path, config: PreTrainedConfig, options: dict[str, Any]
) -> tuple[PreTrainedModel, Report]:
    """The model, and the library's report of its weights."""
    try:
        model, report = loader.from_pretrained(folder, config=config, output_loading_info=True, **options)
    except InputError:
        raise
    except UNREADABLE as error:
        way_out = " Nearest: ignore_mismatched_sizes=True, where a head has another size." * sizes_differ(error)
        raise InputError(f"The weights in {folder} cannot be read: {first_line(error)}{way_out}") from error
    return model, report


def sizes_differ(error: Exception) -> bool:
    """Whether the library refused weights for their sizes alone."""
    return "ignore_mismatched_sizes" in str(error)


def check_whole(report: Report, folder: str | Path, model: PreTrainedModel, other_head: bool) -> None:
    """`InputError` unless every weight was loaded and none was left over; of a head that is another one, they may."""
    for kind in KINDS:
        keys = sorted(key if isinstance(key, str) else key[0] for key in report.get(kind, ()))
        if other_head or kind == "mismatched_keys":
            keys = [key for key in keys if is_of_base(key, model)]
        what = kind.replace("_", " ").replace("keys", "weights")
        require(not keys, f"{folder} does not hold this model whole: {len(keys)} {what}, {', '.join(keys[:3])}.")


def leave_out_pooler(model: PreTrainedModel, report: Report) -> None:
    """A base model that was saved without a pooler, as language models have it, gets none: it would be drawn anew."""
    pooler = {name for name, _ in model.named_parameters() if name.startswith("pooler.")}
    if pooler and pooler <= set(report["missing_keys"]):
        untyped: Any = model
        untyped.pooler = None
        report["missing_keys"] = set(report["missing_keys"]) - pooler


def is_of_base(key: str, model: PreTrainedModel) -> bool:
    """Whether a weight is one of the base model: a block's, an embedding's; a pooler is a head."""
    blocks = FAMILIES[model.config.model_type].blocks
    base = {name for name, _ in model.base_model.named_parameters()}
    own = key.removeprefix(f"{model.base_model_prefix}.")
    return "pooler." not in key and (own in base or f".{blocks}." in f".{own}")


def align(model: PreTrainedModel) -> None:
    """Copy weights out of the file where it has them at places on which the last bit of a product depends."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type == "cpu" and tensor.data_ptr() % ALIGNED:
            tensor.data = tensor.data.clone()
