"""`blueprint_of`: how to build a user's model.

The model is a configuration, its JSON or folder, a public shape, a factory, or a Transformer. One of transformers is
built on the meta device first, so that a network that is too large is refused.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from limitformer.base.errors import InputError, printable, require
from limitformer.base.foreign import one_line
from limitformer.base.memory import SHARE, available_memory, readable
from limitformer.models import Transformer
from limitformer.nn.drawn.network import Network
from limitformer.weightless.configurations import check_sizes, config_of

MOST_MODULES = 60_000  # four thousand layers of GPT-2; each module costs some kilobytes and some milliseconds
KEPT_VECTORS = 6  # copies of every vector in a design: networks for the values of a field, and one that runs

# Types whose attention takes every mask for a boolean one. Masks of the plain formula are numbers, 0 where a token is
# visible, so that these types would hide exactly the visible tokens (transformers 5.24).
BOOLEAN_MASKS = {"nemotron_asr_streaming_encoder"}


@dataclass(frozen=True)
class Size:
    """Numbers of entries.

    Attributes:
        whole: entries of all parameters and buffers.
        vectors: entries of those with fewer than two dimensions, which have values even in a network without weights.
        names: the shape of each parameter; tied ones have several names.
    """

    whole: int
    vectors: int
    names: dict[str, tuple[int, ...]]


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


def size_of(make: Callable[[], nn.Module], name: str) -> Size:
    """Return the size of the module that `make` builds, on the meta device.

    Raises:
        InputError: it cannot be built, has more than `MOST_MODULES` modules, or an embedding without entries.
    """
    with one_line(f"{name} cannot be made"), counted(name), torch.device("meta"):
        module = make()
    every = {id(each): each for each in (*module.parameters(), *module.buffers())}.values()
    shapes = {key: tuple(each.shape) for key, each in module.named_parameters(remove_duplicate=False)}
    empty = [key for key, shape in shapes.items() if 0 in shape]
    tables = [key for key in empty if isinstance(module.get_submodule(key.rpartition(".")[0]), nn.Embedding)]
    refused = tables or (empty if 2 * len(empty) > len(shapes) else [])  # DINOv3 may have no register tokens
    require(not refused, f"{name} cannot be made: {refused[:1]} would have no entries, as one of its sizes is 0.")
    vectors = sum(each.numel() for each in every if each.dim() < 2 or not each.is_floating_point())
    return Size(sum(each.numel() for each in every), vectors, shapes)


@contextmanager
def counted(name: str) -> Iterator[None]:
    """Raise `InputError` once more than `MOST_MODULES` modules are built within the with statement."""
    number = 0

    def count(*_: Any) -> None:
        nonlocal number
        number += 1
        if number > MOST_MODULES:
            raise InputError(f"{name} has more than {MOST_MODULES:,} modules, which do not fit. Nearest: fewer layers.")

    hook = register_module_module_registration_hook(count)
    try:
        yield
    finally:
        hook.remove()


def require_room(entries: int, what: str, itemsize: int = 4) -> None:
    """Raise `InputError` unless `entries` numbers fit the free memory."""
    available, needed = available_memory(), entries * itemsize
    if available is not None and needed > SHARE * available:
        raise InputError(f"{what} takes {readable(needed)}; {readable(available)} are free. Nearest: smaller sizes.")
