"""Load a shaped model that was saved with `save_pretrained`: whole, or not at all.

A plain `from_pretrained` of its folder fails, with limitformer or without, whatever attention it asks for: the
configuration names an activation that there is none of, and what to call instead (`limitformer.hf.shaping.MARK`).
"""

from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from limitformer.errors import InputError, require
from limitformer.hf.families import FAMILIES
from limitformer.hf.shaping import MARK, Shaping, apply_shaping, checked_family
from limitformer.nn import Gain, Residual

ALIGNED = 64  # bytes, torch's own
# What files that are cut short, or hold something else, end in.
UNREADABLE = (OSError, RuntimeError, ValueError, KeyError, EOFError, UnpicklingError, SafetensorError)
NO_CONFIGURATION = (*UNREADABLE, TypeError, AttributeError, StrictDataclassError)


def load_shaped(folder: str | Path, **options: Any) -> PreTrainedModel:
    """A model that `shape_model` shaped, from the folder that `save_pretrained` wrote.

    Args:
        folder: with config.json and the weights.
        options: what `from_pretrained` takes (dtype, device_map, …).

    Raises:
        InputError: no such folder, a model that is not shaped, or weights that are missing, left over or do not fit.
    """
    config = read_config(Path(folder))
    kept = getattr(config, "shaping", None)
    if not isinstance(kept, dict):
        raise InputError(f"{folder} holds no shaped model. Load it with from_pretrained, then shape_model.")
    plain = plain_class(config)
    unmark(config)
    shaping = kept_shaping(kept, folder)
    loader = shaped_class(plain, shaping)
    try:
        model, report = loader.from_pretrained(folder, config=config, output_loading_info=True, **options)
    except InputError:
        raise
    except UNREADABLE as error:
        raise InputError(f"The weights in {folder} cannot be read: {first_line(error)}") from error
    check_whole(report, folder)
    model.__class__ = plain  # what `shape_model` would have given
    align(model)
    for module in model.modules():
        if isinstance(module, Gain | Residual):  # loading forgets it
            module.requires_grad_(shaping.trained)
    loaded: PreTrainedModel = model
    return loaded


def read_config(folder: Path) -> PreTrainedConfig:
    """The configuration in a folder."""
    require((folder / "config.json").is_file(), f"There is no config.json in {folder}.")
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(folder)
    except NO_CONFIGURATION as error:
        raise InputError(f"{folder / 'config.json'} cannot be read: {first_line(error)}") from error
    return config


def first_line(error: Exception) -> str:
    """Of what an error says; its name if it says nothing."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def kept_shaping(kept: dict[str, Any], folder: str | Path) -> Shaping:
    """The shaping that a configuration holds."""
    try:
        return Shaping(**kept)
    except (TypeError, InputError) as error:
        raise InputError(f"config.json in {folder} holds no shaping that can be used: {first_line(error)}") from error


def unmark(config: PreTrainedConfig) -> None:
    """Give the activation its name back."""
    if config.model_type in FAMILIES:
        name = FAMILIES[config.model_type].activation_name
        setattr(config, name, getattr(config, name).removesuffix(MARK))


def plain_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The class of `transformers` that the model had."""
    named = (config.architectures or [""])[0]
    found = getattr(transformers, named, None)
    if not (isinstance(found, type) and issubclass(found, PreTrainedModel)):
        raise InputError(f"config.json names no model of transformers; got architectures={config.architectures}.")
    return found


def shaped_class(plain: type[PreTrainedModel], shaping: Shaping) -> Any:
    """The class whose models are shaped when they are made, so that their gains are loaded with the rest."""

    class Shaped(plain):  # type: ignore[misc, valid-type]
        def __init__(self, config: PreTrainedConfig, *inputs: Any, **options: Any) -> None:
            super().__init__(config, *inputs, **options)
            self.config.shaping = None
            apply_shaping(self, checked_family(self, shaping), shaping)

    # The library knows its models, their names of weights and the outputs that they record, by module and name.
    Shaped.__name__ = Shaped.__qualname__ = plain.__name__
    Shaped.__module__ = plain.__module__
    return Shaped


def align(model: PreTrainedModel) -> None:
    """Copy weights out of the file where it has them at places on which the last bit of a product depends."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type == "cpu" and tensor.data_ptr() % ALIGNED:
            tensor.data = tensor.data.clone()


def check_whole(report: dict[str, Any], folder: str | Path) -> None:
    """`InputError` unless every weight was loaded, and none was left over."""
    for name in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        keys = sorted(map(str, report.get(name, ())))
        what = name.replace("_", " ").replace("keys", "weights")
        require(not keys, f"{folder} does not hold this model whole: {len(keys)} {what}, {', '.join(keys[:3])}.")
