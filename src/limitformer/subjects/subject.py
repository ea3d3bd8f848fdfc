"""`resolve`: what a command is asked about, as one `Subject`.

It may be the name of a public shape, a configuration of transformers, its JSON or folder, a checkpoint, a function that
builds a module, the name of such a function (`path/to/file.py:NAME`), a module, or a `limitformer.Transformer`. A model
of transformers is built on the meta device first, so that a network that is too large is refused.
"""

import inspect
import json
import os
import sys
from collections.abc import Callable, Collection, Mapping
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from limitformer.base.errors import InputError, nearest, printable, require
from limitformer.base.foreign import one_line, readable_name
from limitformer.base.memory import check_scratch
from limitformer.models import Transformer
from limitformer.models.serial import from_record
from limitformer.nn.drawn.network import Network
from limitformer.subjects.checkpoints import holds_weights
from limitformer.subjects.configurations import (
    as_plain_formulas,
    check_sizes,
    config_from,
    config_of,
    is_config,
    quiet_transformers,
)
from limitformer.subjects.size import size_of
from limitformer.subjects.user_code import names_code, user_object

if TYPE_CHECKING:
    from limitformer.hf import Shaping
    from limitformer.subjects.folder import FolderTokenizer

KEPT_VECTORS = 6  # copies of every vector in a design: networks for the values of a field, and one that runs
ANY = "**"  # stands for arguments of any name
EXISTS = "settings and shaping are for networks that are not made yet; this network has its weights already."


@dataclass(frozen=True)
class Subject:
    """A model that a command is asked about.

    Attributes:
        factory: builds a new module; it raises `InputError` for a module whose making is not known.
        name: its name in titles.
        task: seq2seq, masked, causal, image, or hidden: without a known head.
        config: the configuration of transformers; None for other models.
        kind: the class of transformers; None for other models.
        transformer: the `limitformer.Transformer` that it is, or None.
        module: the network that exists, or None.
        has_law: whether `factory` builds such modules, so that their law is known.
        tokenizer: the tokenizer of its folder; None: equal words are equal tokens.
        shaped: whether attention is shaped, so that its softmax is uniform by design.
        unread: weights of its folder that its class does not have.
    """

    factory: Callable[[], nn.Module]
    name: str
    task: str = "hidden"
    config: Any = None
    kind: type[nn.Module] | None = None
    transformer: Transformer | None = None
    module: nn.Module | None = None
    has_law: bool = True
    tokenizer: "FolderTokenizer | None" = None
    shaped: bool = False
    unread: tuple[str, ...] = ()


def resolve(
    what: Any,
    settings: Mapping[str, Any] | None = None,
    *,
    shaping: "Shaping | None" = None,
    trust_remote_code: bool = False,
    loads: bool = False,
) -> Subject:
    """Return what a command is asked about.

    Args:
        what: a name, configuration, JSON, folder, function, `path/to/file.py:NAME`, module, or `Transformer`.
        settings: other fields of the configuration or `Transformer`, or arguments of the function.
        shaping: the argument of `limitformer.hf.shape_model`; None: not shaped.
        trust_remote_code: whether the Python code in the folder of a configuration (`auto_map`) may run.
        loads: whether the weights in a folder are loaded; otherwise its configuration alone is read.

    Raises:
        InputError: `what` is not a model, has no such setting, or cannot be built or loaded.
    """
    if isinstance(what, Subject) and not settings and shaping is None:
        return what
    text = isinstance(what, str | Path) and not str(what).lstrip().startswith("{") and not names_code(what)
    path = Path(what) if text else None  # or the name of a public shape
    name = None if path is None else readable_name(path.absolute())
    if path is not None and trust_remote_code and has_code(path):
        result = subject_of(code_of_folder(path, settings or {}, loads))
    elif path is not None and loads and holds_weights(path):
        require(not settings and shaping is None, EXISTS)
        return loaded(path)
    else:
        model = model_of(what, settings)
        result = subject_of(model)
        if isinstance(what, str | Path) and names_code(what) and callable(model):  # a decorator may hide its name
            name = str(what).rpartition(":")[2]
        if path is not None and not loads and holds_weights(path):
            name = f"{name}, its configuration without its weights"
    if name is not None and result.module is None:
        result = replace(result, name=name)
    return result if shaping is None else shape(result, shaping)


def model_of(what: Any, settings: Mapping[str, Any] | None = None) -> Any:
    """Return the configuration, `Transformer`, function or module that a text means, with other settings.

    Raises:
        InputError: the model or one of the settings is unknown.
    """
    if isinstance(what, str | Path) and names_code(what):
        what = user_object(str(what))
    if isinstance(what, str | Path | dict):
        what = config_of(what)
    what = unwrapped(what)
    return with_settings(what, settings) if settings else what


def with_settings(model: Any, settings: Mapping[str, Any]) -> Any:
    """Return a model with other fields of its configuration, or a function with other arguments."""
    if isinstance(model, Subject):
        require(model.module is None, EXISTS)
        model = model.transformer or model.config or model.factory
    if isinstance(model, Transformer):
        require_names(settings, [field.name for field in fields(model)], "Transformer has no field")
        return replace(model, **{name: from_record(value) for name, value in settings.items()})
    if is_config(model):
        values = model.to_dict()
        require_names(settings, values, f"the configuration of {model.model_type} has no field")
        if "num_hidden_layers" in settings and "layer_types" not in settings:
            values.pop("layer_types", None)  # as long as the depth; the class fills it again
        return config_from(values | dict(settings))
    require(not isinstance(model, nn.Module), EXISTS)
    require(callable(model), f"settings are for configurations and functions; got {type(model).__name__}.")
    require_names(settings, arguments_of(model), f"{printable(name_of(model))} has no argument")
    return called_with(model, settings)


def called_with(function: Callable[..., Any], settings: Mapping[str, Any]) -> Callable[..., Any]:
    """Return the function with these arguments, under its own name."""
    result = partial(function, **settings)
    vars(result)["__name__"] = name_of(function)
    return result


def require_names(settings: Mapping[str, Any], known: Collection[str], lacks: str) -> None:
    """Raise `InputError` unless all settings are known."""
    for name in settings:
        require(name in known or ANY in known, f"{lacks} {name!r}.{nearest(name, known)}")


def name_of(function: Any) -> str:
    inner = function.func if isinstance(function, partial) and not hasattr(function, "__name__") else function
    return str(getattr(inner, "__name__", "module"))


def signature_of(function: Any, follow_wrapped: bool = True) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function, follow_wrapped=follow_wrapped).parameters.values())
    except (TypeError, ValueError):  # they are not known
        return []


def arguments_of(function: Any) -> dict[str, Any]:
    """Return the defaults of the arguments that a function takes by name; None: it has no default."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = signature_of(function)
    known = {p.name: None if p.default is p.empty else p.default for p in parameters if p.kind in named}
    return known | ({ANY: None} if any(p.kind is p.VAR_KEYWORD for p in parameters) else {})


def subject_of(model: Any) -> Subject:
    """Return a configuration, a `Transformer`, a function or a module as a subject.

    Raises:
        InputError: it is none of these, or cannot be built.
    """
    if isinstance(model, Subject):
        return model
    if isinstance(model, Transformer):
        centred = model.attention is not None and bool(model.attention.interventions[1])
        return Subject(lambda: Network(model), "Transformer", transformer=model, shaped=centred)
    if isinstance(model, nn.Module):
        return subject_of_module(model)
    if is_config(model):
        return subject_of_config(model)
    if callable(model):
        name, variable = name_of(model), (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        parameters = signature_of(model, follow_wrapped=False)  # a decorator may supply the arguments
        needed = ", ".join(each.name for each in parameters if each.default is each.empty and each.kind not in variable)
        hint = f"Nearest: a function without arguments, such as def build(): return {printable(name)}(…)."
        require(not needed, f"{printable(name)} needs the argument {needed}. {hint}")
        return Subject(model, name)
    raise InputError(
        "The model must be a configuration of transformers, its folder or JSON, the name of a public shape, a function "
        f"that builds a module, a module, or a limitformer.Transformer; got {printable(f'{model!r:.60}')}. "
        "Nearest: a name of limitformer.shapes()."
    )


def subject_of_config(config: Any) -> Subject:
    from limitformer.subjects.classes import auto_class, named_class, task_of

    with one_line(f"{config.model_type} cannot be read"):
        check_sizes(config.to_dict(), config.model_type)
        config = as_plain_formulas(deepcopy(config))
    kind = named_class(config)
    kind, make = auto_class(config) if kind is None else (kind, partial(kind, config))
    size = size_of(make, config.model_type)
    what = f"{config.model_type} of these sizes, without its matrices,"
    check_scratch(4 * KEPT_VECTORS * size.vectors, what, "smaller sizes")
    return Subject(make, config.model_type, task_of(kind, config), config, kind=kind)


def subject_of_module(module: nn.Module) -> Subject:
    """Return a network that exists, with its law if it is built again from its configuration.

    That is so for models of transformers; others, such as PEFT's, are not made from their configuration alone.
    """
    refuse_scripted(module)
    kind = type(module)
    config: Any = getattr(module, "config", None)
    transformers: Any = sys.modules.get("transformers")
    if not is_config(config):
        return Subject(partial(refuse_existing, kind.__name__), kind.__name__, module=module, has_law=False)
    from limitformer.subjects.classes import task_of

    task, shaped = task_of(kind, config), getattr(config, "shaping", None) is not None
    if shaped or not isinstance(module, transformers.PreTrainedModel):
        refuse = partial(refuse_existing, kind.__name__)
        return Subject(refuse, kind.__name__, task, config, kind, module=module, has_law=False, shaped=shaped)
    check_sizes(config.to_dict(), config.model_type)
    config = as_plain_formulas(deepcopy(config))
    if not is_built_from(module, config):
        refuse = partial(refuse_existing, kind.__name__, ", and is not what its class builds from its configuration")
        return Subject(refuse, kind.__name__, task, config, kind, module=module, has_law=False)
    return Subject(partial(kind, config), kind.__name__, task, config, kind, module=module)


def is_built_from(module: nn.Module, config: Any) -> bool:
    """Return whether a module's class builds its parameters, by names and shapes, from the configuration alone.

    A user's class may take more arguments, which the module does not keep.
    """
    kind: Any = type(module)
    own = not kind.__module__.startswith("transformers.")
    if own and len(arguments_of(kind).keys() - {ANY}) > 1:
        return False
    shapes = {name: tuple(each.shape) for name, each in module.named_parameters(remove_duplicate=False)}
    return shapes == size_of(partial(kind, config), kind.__name__).names


def refuse_scripted(module: nn.Module) -> None:
    """Raise `InputError` for code that torch.jit runs, which cannot be watched."""
    parts = [name for name, part in module.named_modules() if isinstance(part, torch.jit.ScriptModule)]
    place = " of ".join([*filter(None, parts[:1]), type(module).__name__])
    require(not parts, f"{place} is scripted by torch.jit. Nearest: the module without torch.jit.")


def refuse_existing(name: str, why: str = "") -> NoReturn:
    raise InputError(
        f"a module has its weights already{why}; got {name}. Nearest: a function that builds it, such as lambda: "
        f"{name}(…)."
    )


def unwrapped(module: Any) -> Any:
    """Return the module inside a compiled one, or inside one that is trained on several devices."""
    while isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel) or hasattr(module, "_orig_mod"):
        inner = getattr(module, "_orig_mod", None)
        module = module.module if inner is None else inner
    return module


def loaded(folder: Path) -> Subject:
    """Load a checkpoint from its folder, with its tokenizer if it has one."""
    from limitformer.subjects.folder import folder_tokenizer, load

    module, unread = load(folder)
    name = readable_name(folder.absolute())
    return replace(subject_of_module(module), name=name, tokenizer=folder_tokenizer(folder), unread=unread)


def shape(subject: Subject, shaping: "Shaping") -> Subject:
    """Return a subject whose model is shaped after it is made."""
    from limitformer.hf import shape_model
    from limitformer.hf.settings import require_shaping

    require_shaping(shaping)
    require(subject.module is None, EXISTS)
    require(subject.config is not None, f"shaping is for configurations of transformers; got {subject.name}.")
    factory: Any = subject.factory  # of a model of transformers
    return replace(
        subject, factory=lambda: shape_model(factory(), shaping), name=f"{subject.name}, shaped", shaped=True
    )


def has_code(path: Path) -> bool:
    """Whether a folder, or its config.json, names code of its own."""
    file = path / "config.json" if os.path.isdir(path) else path
    try:
        return isinstance(json.loads(file.read_text(encoding="utf-8")).get("auto_map"), dict)
    except (OSError, ValueError, AttributeError):
        return False


def code_of_folder(path: Path, settings: Mapping[str, Any], loads: bool) -> Subject | nn.Module:
    """Return how the code in a folder makes its network, or the network of its weights.

    Raises:
        InputError: it names no class of a model, lacks a setting, cannot be built, or its files lack weights.
    """
    import transformers

    from limitformer.subjects.classes import AUTO_CLASSES, task_of

    folder = path if path.is_dir() else path.parent
    name, options = readable_name(folder.absolute()), {"trust_remote_code": True, "local_files_only": True}
    with quiet_transformers(), one_line(f"the code in {name} cannot be run"):
        config: Any = as_plain_formulas(transformers.AutoConfig.from_pretrained(folder, **options, **settings))
        require_names(settings, config.to_dict(), f"the configuration of {name} has no field")
        auto = next((each for _, each, _ in AUTO_CLASSES if each in config.auto_map), None)
        if auto is None:
            raise InputError(f"auto_map of {name} must name a class for a task, such as 'AutoModelForCausalLM'.")
        maker: Any = getattr(transformers, auto)
        if loads and holds_weights(path):
            require(not settings, EXISTS)
            module, report = maker.from_pretrained(folder, config=config, output_loading_info=True, **options)
            missing = sorted(report["missing_keys"])
            require(not missing, f"{name} lacks the weight {''.join(missing[:1])}.")
            network: nn.Module = module
            return network
        make = partial(maker.from_config, config, trust_remote_code=True)
        with torch.device("meta"):
            kind: Any = type(make())
    return Subject(make, name, task_of(kind, config), config, kind=kind)
