"""Build a model and a start from the options of `limitformer simulate` or from files."""

import re
import sys
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from limitformer.base.errors import InputError, require

if TYPE_CHECKING:
    from limitformer.models import Start, Transformer

LONGEST_TEXT = 64  # tokens; a longer text needs --tokens

ATTENTION_OPTIONS = ("tau0", "heads", "head_dim")
INTERVENTIONS = ("identity", "center", "temperature")
SHAPED_RELU_OPTIONS = ("c_plus", "c_minus")
MODEL_OPTIONS = (
    *("width", "depth", "gamma", "lam", "attention", "feedforward", "hidden", "one_matrix", "norm", "mask"),
    *ATTENTION_OPTIONS,
    *INTERVENTIONS,
    *SHAPED_RELU_OPTIONS,
)


def refuse_options_without_effect(on_command_line: set[str], chosen: dict[str, Any]) -> None:
    """Raise `InputError` if an option on the command line has no effect together with the others."""
    idle = (
        (chosen["model_file"] is not None, MODEL_OPTIONS, "--model describes the whole model"),
        (chosen["attention"] == "none", ATTENTION_OPTIONS, "there is no attention"),
        (chosen["attention"] != "shaped", INTERVENTIONS, "the attention is not shaped"),
        (
            chosen["feedforward"] != "shaped-relu",
            SHAPED_RELU_OPTIONS,
            "the feed-forward layer is not a shaped ReLU",
        ),
        (chosen["feedforward"] == "none", ("hidden", "one_matrix"), "there is no feed-forward layer"),
        (chosen["one_matrix"], ("hidden",), "a layer of one matrix has no hidden units"),
        (chosen["text"] is not None, ("correlation", "variance"), "--text is the start"),
        (chosen["text"] is None, ("positions",), "there is no --text"),
    )
    for applies, names, reason in idle:
        strange = [f"--{name.replace('_', '-')}" for name in names if name in on_command_line]
        require(not (applies and strange), f"{', '.join(strange)} would change nothing: {reason}.")


def model_of(chosen: dict[str, Any]) -> "Transformer":
    """Return the Transformer in the JSON file, or build it from the options. User functions may be in this folder."""
    from limitformer.models import Transformer

    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    if chosen["model_file"] is not None:
        return read_model(chosen["model_file"])
    require(chosen["mask"] in ("none", "causal"), f"--mask must be none or causal; got {chosen['mask']!r}.")
    return Transformer(
        **{name: chosen[name] for name in ("width", "depth", "gamma", "lam")},
        attention=attention_part(chosen),
        feedforward=feedforward_part(chosen),
        norm=norm_part(chosen["norm"]),
        mask=None if chosen["mask"] == "none" else chosen["mask"],
    )


def attention_part(chosen: dict[str, Any]) -> Any:
    from limitformer.models import Mixing, ShapedAttention, SoftmaxAttention
    from limitformer.models.functions import is_path

    kinds = {"shaped": ShapedAttention, "softmax": SoftmaxAttention, "none": None}
    name = chosen["attention"]
    if is_path(name):
        return Mixing(name, **{option: chosen[option] for option in ATTENTION_OPTIONS})
    require(name in kinds, f"--attention must be one of {', '.join(kinds)}, or package.module:function; got {name!r}.")
    kind = kinds[name]
    return None if kind is None else kind(**fields_among(chosen, kind))


def feedforward_part(chosen: dict[str, Any]) -> Any:
    """The feed-forward sublayer that the options declare."""
    from limitformer.models import GELU, Elementwise, OneMatrix, ReLU, ShapedReLU, activations
    from limitformer.models.functions import is_path

    kinds = {"shaped-relu": ShapedReLU, "relu": ReLU, "gelu": GELU, "none": None}
    layers = {option_name(name): getattr(activations, name) for name in activations.__all__}
    name = chosen["feedforward"]
    part: Any = None
    if name in kinds:
        kind = kinds[name]
        part = None if kind is None else kind(**fields_among(chosen, kind))
    else:
        listed = ", ".join([*kinds, *layers])
        known = name in layers or is_path(name)
        require(known, f"--feedforward must be one of {listed}, or package.module:function; got {name!r}.")
        part = layers.get(name, partial(Elementwise, name))(hidden=chosen["hidden"])
    return OneMatrix(activation=part) if chosen["one_matrix"] else part


def option_name(name: str) -> str:
    """Return `squared-relu` for `SquaredReLU`."""
    return re.sub("(?<=[a-z])(?=[A-Z][a-z])", "-", name).lower()


def fields_among(chosen: dict[str, Any], kind: Any) -> dict[str, Any]:
    """Select the options that are fields of the part."""
    return {field.name: chosen[field.name] for field in fields(kind)}


def norm_part(name: str) -> Any:
    from limitformer.models import LayerNorm, RMSNorm

    kinds: dict[str, Any] = {
        "none": None,
        "pre-layer": LayerNorm(placement="pre"),
        "post-layer": LayerNorm(placement="post"),
        "pre-rms": RMSNorm(placement="pre"),
        "post-rms": RMSNorm(placement="post"),
    }
    require(name in kinds, f"--norm must be one of {', '.join(kinds)}; got {name!r}.")
    return kinds[name]


def read_model(path: Path) -> "Transformer":
    from limitformer.models import Transformer, from_json
    from limitformer.models.text import read_text

    try:
        model = from_json(read_text(path))
    except InputError as error:
        raise InputError(f"--model {path}: {error}") from error
    require(
        isinstance(model, Transformer),
        f"--model {path} describes a {type(model).__name__}, not a Transformer.",
    )
    return model


def start_of(chosen: dict[str, Any], width: int) -> "Start":
    from limitformer.models import equicorrelated

    if chosen["text"] is not None:
        positions = "sinusoidal" if chosen["positions"] else None
        return text_start(chosen["text"], width, chosen["tokens"], positions, chosen["seed"])
    tokens = 2 if chosen["tokens"] is None else chosen["tokens"]
    return equicorrelated(tokens, chosen["correlation"], chosen["variance"])


def text_start(path: Path, width: int, tokens: int | None, positions: Any, seed: int) -> "Start":
    from limitformer.models import from_text
    from limitformer.models.text import words_of

    if tokens is None:
        few = len(words_of(path, LONGEST_TEXT + 1)) <= LONGEST_TEXT
        message = f"{path} has more than {LONGEST_TEXT} tokens; give a number, e.g. --tokens {LONGEST_TEXT}."
        require(few, message)
    return from_text(path, width=width, tokens=tokens, positions=positions, seed=seed)
