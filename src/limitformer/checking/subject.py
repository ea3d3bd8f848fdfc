"""The subject of a check: how it is made, the module if it exists, its inputs and its loss."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from limitformer.base.errors import InputError, nearest, require
from limitformer.base.foreign import readable_name
from limitformer.checking.folder import FolderTokenizer, folder_tokenizer, has_code, load, with_code
from limitformer.hf import Shaping, shape_model
from limitformer.hf.shaping import require_shaping
from limitformer.initialisation.builds import unwrapped
from limitformer.models import Start, Transformer, equicorrelated, from_text
from limitformer.models.serial import from_record
from limitformer.models.start import as_start
from limitformer.models.text import words_of
from limitformer.nn.drawn.simulate import torch_seed
from limitformer.weightless.building import refuse_scripted
from limitformer.weightless.checkpoints import holds_weights as holds_weights
from limitformer.weightless.classes import task_of
from limitformer.weightless.configurations import config_from, config_of
from limitformer.weightless.inputs import Inputs, ids_in, inputs_of
from limitformer.weightless.losses import TASKS, Choice, ChosenLoss, output_of
from limitformer.weightless.models import Blueprint, blueprint_of, is_config

READOUT = "a random readout"


@dataclass(frozen=True)
class Subject:
    """A network to check.

    Attributes:
        name: its name in titles.
        blueprint: how it is made, which gives its law; None for a module whose making is not known.
        module: the network that exists; None for a configuration or a factory.
        tokenizer: the tokenizer of its folder; None: equal words are equal tokens.
        shaped: whether attention is shaped, so that its softmax is uniform by design.
        unread: weights of its folder that its class does not have.
    """

    name: str
    blueprint: Blueprint | None
    module: nn.Module | None = None
    tokenizer: FolderTokenizer | None = None
    shaped: bool = False
    unread: tuple[str, ...] = ()


def subject_of(
    what: Any,
    settings: Mapping[str, Any] | None = None,
    shaping: Shaping | None = None,
    trust_remote_code: bool = False,
) -> Subject:
    """Resolve any subject of `check`, with changed fields of its configuration, and shaped.

    Raises:
        InputError: `what` is not a subject, or its configuration does not have such a field.
    """
    what = unwrapped(what)
    if shaping is not None:
        require_shaping(shaping)
    name = readable_name(Path(what)) if isinstance(what, str) and not what.lstrip().startswith("{") else None
    if trust_remote_code and isinstance(what, str | Path) and has_code(Path(what)):
        what = with_code(Path(what), holds_weights(what))
    if isinstance(what, nn.Module) or holds_weights(what):
        option = "settings" if settings else "shaping" if shaping else None
        require(option is None, f"{option} are for configurations; this network has its weights already.")
        return existing(what) if isinstance(what, nn.Module) else loaded(Path(what))
    blueprint = blueprint_of(with_fields(what, settings) if settings else what)
    blueprint = blueprint if name is None else replace(blueprint, name=name)
    if shaping is not None:
        blueprint = shaped(blueprint, shaping)
    return Subject(blueprint.name, blueprint, shaped=shaping is not None or centred(blueprint.transformer))


def centred(model: Transformer | None) -> bool:
    """Return whether a Transformer's attention subtracts the mean."""
    return model is not None and model.attention is not None and bool(model.attention.interventions[1])


def with_fields(what: Any, settings: Mapping[str, Any]) -> Any:
    """Return the configuration, or the Transformer, with some fields changed."""
    what = config_of(what) if isinstance(what, str | Path | dict) else what
    if isinstance(what, Transformer):
        return replaced(what, settings)
    if not hasattr(what, "to_dict"):
        raise InputError(f"settings are for configurations; got {type(what).__name__}. Nearest: change the factory.")
    values = what.to_dict()
    for name in settings:
        known = f"the configuration of {what.model_type} has no field {name!r}.{nearest(name, values)}"
        require(name in values, known)
    if "num_hidden_layers" in settings and "layer_types" not in settings:
        values.pop("layer_types", None)  # as long as the depth; the class fills it again
    return config_from(values | dict(settings))


def replaced(model: Transformer, settings: Mapping[str, Any]) -> Transformer:
    names = [field.name for field in fields(model)]
    for name in settings:
        require(name in names, f"Transformer has no field {name!r}.{nearest(name, names)}")
    return replace(model, **{name: from_record(value) for name, value in settings.items()})


def shaped(blueprint: Blueprint, shaping: Shaping) -> Blueprint:
    """Return a blueprint that shapes the model after making it."""
    if blueprint.config is None:
        raise InputError(f"shaping is for configurations of transformers; got {blueprint.name}.")
    factory: Any = blueprint.factory  # of a model of transformers
    return replace(blueprint, factory=lambda: shape_model(factory(), shaping), name=f"{blueprint.name}, shaped")


def existing(module: nn.Module) -> Subject:
    """Return a module as a subject, with its law if its configuration gives one."""
    refuse_scripted(module)
    kind = type(module).__name__
    config = getattr(module, "config", None)
    if not isinstance(module, PreTrainedModel):  # others, such as PEFT's, are not made from their configuration alone
        return Subject(kind, None, module)
    is_shaped = getattr(config, "shaping", None) is not None
    return Subject(kind, None if is_shaped else blueprint_of(module), module, shaped=is_shaped)


def loaded(folder: Path) -> Subject:
    """Load a checkpoint from its folder, with its tokenizer if it has one."""
    module, unread = load(folder)
    name = readable_name(folder.absolute())
    return replace(existing(module), name=name, tokenizer=folder_tokenizer(folder), unread=unread)


def task_and_config(subject: Subject) -> Blueprint:
    """Return the blueprint that inputs and loss depend on, even if its law is not known."""
    if subject.blueprint is not None:
        return subject.blueprint
    config: Any = getattr(subject.module, "config", None)
    kind: Any = type(subject.module)
    if not is_config(config):
        return Blueprint(nn.Module, subject.name, "hidden")
    return Blueprint(nn.Module, subject.name, task_of(kind, config), config, kind=kind)


def inputs_for(subject: Subject, text: Any, tokens: int) -> Inputs:
    """Return the inputs that the network is called with.

    Raises:
        InputError: the text is too short, or the inputs do not fit.
    """
    blueprint = task_and_config(subject)
    if blueprint.transformer is not None:
        return inputs_of(start_of(text, blueprint.transformer, tokens), blueprint)
    check_text(text)
    if text is None:
        return inputs_of(1 if blueprint.task == "image" else tokens, blueprint)
    if is_text(text):
        every = [text] if isinstance(text, str | Path) else text
        if subject.tokenizer is None:  # the rest of a long text is not read
            text = [" ".join(words_of(one, tokens)) for one in every]
        else:  # of each text as many as the shortest has
            ids_of = [subject.tokenizer.ids(one, tokens) for one in every]
            text = [one[: min(map(len, ids_of))] for one in ids_of]
    elif blueprint.kind is not None and (ids := ids_in(text)) is not None:
        text = ids[..., :tokens]
    inputs = inputs_of(text, blueprint)
    ids = inputs.fixed.get("input_ids")
    if ids is None or inputs.counted is not None:
        return inputs
    require(ids.shape[1] >= 2, f"a text must have two tokens or more; got {ids.shape[1]}.")
    if inputs.choices:
        return inputs
    short = {name: each[:, :tokens] if each.shape == ids.shape else each for name, each in inputs.fixed.items()}
    return replace(inputs, fixed=short)


def start_of(text: Any, model: Transformer, tokens: int) -> Start:
    """Return the start of a Transformer: unrelated tokens, the first words of a text as random vectors, or `text`.

    No more than `width` tokens can be unrelated.
    """
    check_text(text)
    if text is None:
        return equicorrelated(min(tokens, model.width), 0.0)
    if isinstance(text, str | Path):
        return from_text(" ".join(words_of(text, tokens)), width=model.width)
    return as_start(text)


def readout(seed: int) -> Choice:
    """Return the choice of ⟨x, g⟩ of the last tokens, with a direction g ~ N(0, I) for each.

    ½|x|² would have no gradient behind a norm, which makes it constant.
    """

    def product(out: Any, inputs: Mapping[str, Tensor]) -> Tensor:
        x = output_of(out)
        g = torch.randn(x.shape[1:], generator=torch.Generator().manual_seed(torch_seed(seed, "readout")))
        return (x * g.to(x.device, x.dtype)).flatten(1).sum(1) / max(1, x.shape[1:-1].numel())

    return lambda out, inputs: (READOUT, product)


def about_loss(blueprint: Blueprint, loss: ChosenLoss) -> dict[str, Any]:
    """Return the name of the loss that ran, and the loss of a uniform guess among its tokens or classes."""
    count = getattr(blueprint.config, "num_labels" if blueprint.task == "image" else "vocab_size", None)
    count = count if loss.name == TASKS.get(blueprint.task, ("",))[0] else loss.classes
    return {"loss": loss.name} | ({"chance": float(np.log(count))} if isinstance(count, int) and count > 0 else {})


def check_text(text: Any) -> None:
    empty = isinstance(text, list | tuple) and not text
    require(not empty, f"text must hold at least one text or token; got {text!r}. Nearest: None, for unrelated tokens.")


def is_text(text: Any) -> bool:
    """Return whether `text` is a string, a path or a list of these."""
    several = isinstance(text, list | tuple) and all(isinstance(one, str | Path) for one in text)
    return isinstance(text, str | Path) or (several and bool(text))
