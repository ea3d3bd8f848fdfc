"""What a user means by a model: a configuration, its JSON or folder, a public shape, a factory, or a Transformer."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from limitformer.errors import InputError, nearest
from limitformer.models import Transformer
from limitformer.models.serial import from_record, json_object
from limitformer.models.text import read_text
from limitformer.nn.network import Network
from limitformer.weightless.shapes import configuration_of

AUTO_CLASSES = (  # what a configuration alone stands for: the first task that its family has
    ("seq2seq", "AutoModelForSeq2SeqLM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING"),
    ("masked", "AutoModelForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING"),
    ("causal", "AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING"),
    ("image", "AutoModelForImageClassification", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING"),
)


@dataclass(frozen=True)
class Blueprint:
    """How a module is made, and what it is for."""

    factory: Callable[[], nn.Module]
    name: str
    task: str  # seq2seq, masked, causal, image, or hidden: no head that is known
    config: Any = None  # of transformers
    transformer: Transformer | None = None


def blueprint_of(model: Any) -> Blueprint:
    """Of anything that `limitformer.weightless` takes.

    Raises:
        InputError: it is nothing of the kind.
    """
    if isinstance(model, Blueprint):
        return model
    if isinstance(model, Transformer):
        return Blueprint(lambda: Network(model), "Transformer", "hidden", transformer=model)
    if isinstance(model, str | Path | dict):
        return blueprint_of(config_of(model))
    if isinstance(model, nn.Module):
        return of_module(model)
    if hasattr(model, "model_type") and hasattr(model, "to_dict"):
        return of_config(model)
    if callable(model):
        return Blueprint(model, getattr(model, "__name__", "module"), "hidden")
    raise InputError(
        f"model must be a configuration of transformers, its folder or JSON, the name of a public shape, a function "
        f"that makes a module, or a limitformer.Transformer; got {type(model).__name__}."
    )


def of_config(config: Any) -> Blueprint:
    """Of a configuration of transformers."""
    import transformers

    config = eager(deepcopy(config))
    known = [getattr(transformers, name, None) for name in config.architectures or ()]
    if known and known[0] is not None:
        return Blueprint(partial(known[0], config), config.model_type, task_of(known[0].__name__), config)
    fitting = [(task, auto) for task, auto, mapping in AUTO_CLASSES if type(config) in getattr(transformers, mapping)]
    task, auto = fitting[0] if fitting else ("hidden", "AutoModel")
    return Blueprint(partial(getattr(transformers, auto).from_config, config), config.model_type, task, config)


def task_of(name: str) -> str:
    """Of a class of transformers."""
    known = {"CausalLM": "causal", "LMHead": "causal", "MaskedLM": "masked", "ImageClassification": "image"}
    known["ConditionalGeneration"] = "seq2seq"
    return next((task for word, task in known.items() if word in name), "hidden")


def of_module(model: nn.Module) -> Blueprint:
    """Of a module that exists: made again from its configuration, if it has one."""
    config = getattr(model, "config", None)
    if not hasattr(config, "model_type"):
        raise InputError(
            f"a module has its weights already; got {type(model).__name__}. "
            f"Nearest: a function that makes it, such as lambda: {type(model).__name__}(…)."
        )
    config, kind = eager(deepcopy(config)), type(model)
    return Blueprint(partial(kind, config), config.model_type, task_of(kind.__name__), config)


def config_of(model: str | Path | dict[str, Any]) -> Any:
    """Of JSON, its file or folder, or the name of a public shape; JSON with a `kind` is a limitformer.Transformer."""
    if isinstance(model, dict):
        return config_from(model)
    path = Path(model)
    try:
        exists = path.exists()
    except (OSError, ValueError):
        exists = False
    if exists:
        file = path / "config.json" if path.is_dir() else path
        return config_from(json_object(read_text(file), str(file)))
    if str(model).lstrip().startswith("{"):
        return config_from(json_object(str(model), "A configuration"))
    return configuration_of(str(model))


def config_from(values: dict[str, Any]) -> Any:
    """A configuration of transformers from its JSON."""
    from transformers import CONFIG_MAPPING, AutoConfig

    if "kind" in values:
        return from_record(values)
    kind = values.get("model_type")
    if kind not in CONFIG_MAPPING:
        hint = nearest(kind, CONFIG_MAPPING.keys())
        raise InputError(f"model_type must be one that the installed transformers has; got {kind!r}.{hint}")
    try:
        return AutoConfig.for_model(**values)
    except Exception as error:  # whatever their own checks raise
        why = " ".join(str(error).split())
        raise InputError(f"the configuration of {kind} cannot be made: {why:.300}") from error


def eager(config: Any) -> Any:
    """With attention and experts as plain formulas, so that they can be watched."""
    for part in {id(c): c for c in (config, config.get_text_config())}.values():
        part._attn_implementation = "eager"
        part._experts_implementation = "eager"
    return config
