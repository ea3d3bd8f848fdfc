"""`blueprint_of`: how to build a user's model.

The model is a configuration, its JSON or folder, a public shape, a factory, or a Transformer.
"""

import inspect
import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from limitformer.base.errors import InputError, printable, require
from limitformer.base.foreign import one_line
from limitformer.models import Transformer
from limitformer.nn.drawn.network import Network
from limitformer.weightless.configurations import check_sizes, config_of
from limitformer.weightless.sizes import KEPT_VECTORS, require_room, size_of

# Types whose attention takes every mask for a boolean one. Masks of the plain formula are numbers, 0 where a token is
# visible, so that these types would hide exactly the visible tokens (transformers 5.24).
BOOLEAN_MASKS = {"nemotron_asr_streaming_encoder"}


@dataclass(frozen=True)
class Blueprint:
    """How a module is built, and its task."""

    factory: Callable[[], nn.Module]
    name: str
    task: str  # seq2seq, masked, causal, image, or hidden: without a known head
    config: Any = None  # of transformers
    transformer: Transformer | None = None
    kind: type[nn.Module] | None = None  # a class of transformers


def blueprint_of(model: Any) -> Blueprint:
    """Return the blueprint of a model.

    Raises:
        InputError: it is not a model, or cannot be built.
    """
    if isinstance(model, Blueprint):
        return model
    if isinstance(model, Transformer):
        return Blueprint(lambda: Network(model), "Transformer", "hidden", transformer=model)
    if isinstance(model, str | Path | dict):
        return blueprint_of(config_of(model))
    if isinstance(model, nn.Module):
        return blueprint_of_module(model)
    if is_config(model):
        return blueprint_of_config(model)
    if callable(model):
        name = getattr(model, "__name__", "module")
        needed = ", ".join(needed_arguments(model))
        hint = f"Nearest: a function without arguments, such as def build(): return {printable(name)}(…)."
        require(not needed, f"{printable(name)} needs the argument {needed}. {hint}")
        return Blueprint(model, name, "hidden")
    raise InputError(
        "The model must be a configuration of transformers, its folder or JSON, the name of a public shape, a function "
        f"that builds a module, or a limitformer.Transformer; got {printable(f'{model!r:.60}')}. "
        "Nearest: a name of limitformer.shapes()."
    )


def needed_arguments(function: Callable[..., Any]) -> list[str]:
    """Return the arguments without a default; none if they are not known."""
    try:
        # A decorator may supply the arguments of the function that it wraps.
        parameters = inspect.signature(function, follow_wrapped=False).parameters.values()
    except (TypeError, ValueError):
        return []
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [each.name for each in parameters if each.default is each.empty and each.kind not in variable]


def is_config(model: Any) -> bool:
    """Whether `model` is a configuration of transformers."""
    transformers: Any = sys.modules.get("transformers")  # None: then nothing is its configuration
    return transformers is not None and isinstance(model, transformers.PreTrainedConfig)


def blueprint_of_config(config: Any) -> Blueprint:
    from limitformer.weightless.classes import auto_class, named_class, task_of

    with one_line(f"{config.model_type} cannot be read"):
        check_sizes(config.to_dict(), config.model_type)
        config = as_plain_formulas(deepcopy(config))
    kind = named_class(config)
    kind, make = auto_class(config) if kind is None else (kind, partial(kind, config))
    size = size_of(make, config.model_type)
    require_room(KEPT_VECTORS * size.vectors, f"{config.model_type} of these sizes, without its matrices,")
    return Blueprint(make, config.model_type, task_of(kind, config), config, kind=kind)


def blueprint_of_module(model: nn.Module) -> Blueprint:
    """Return the blueprint of a module with a configuration, from which it is built again."""
    from limitformer.weightless.classes import task_of

    config: Any = getattr(model, "config", None)
    if not is_config(config):
        raise InputError(
            f"a module has its weights already; got {type(model).__name__}. "
            f"Nearest: a function that builds it, such as lambda: {type(model).__name__}(…)."
        )
    check_sizes(config.to_dict(), config.model_type)
    config, kind = as_plain_formulas(deepcopy(config)), type(model)
    return Blueprint(partial(kind, config), config.model_type, task_of(kind, config), config, kind=kind)


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
