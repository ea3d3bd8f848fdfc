"""The argument `text` of the public functions as inputs of a subject: its first tokens."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from limitformer.base.errors import require
from limitformer.models import Start, Transformer, equicorrelated, from_text
from limitformer.models.start import as_start
from limitformer.models.text import words_of
from limitformer.subjects.inputs import Inputs, ids_in, inputs_of
from limitformer.subjects.subject import Subject


def inputs_for(subject: Subject, text: Any, tokens: int) -> Inputs:
    """Return the inputs that the network is called with.

    Raises:
        InputError: the text is too short, or the inputs do not fit.
    """
    if subject.transformer is not None:
        return inputs_of(start_of(text, subject.transformer, tokens), subject)
    check_text(text)
    if text is None:
        return inputs_of(1 if subject.task == "image" else tokens, subject)
    if is_text(text):
        every = [text] if isinstance(text, str | Path) else text
        if subject.tokenizer is None:  # the rest of a long text is not read
            text = [" ".join(words_of(one, tokens)) for one in every]
        else:  # of each text as many as the shortest has
            ids_of = [subject.tokenizer.ids(one, tokens) for one in every]
            text = [one[: min(map(len, ids_of))] for one in ids_of]
    elif subject.kind is not None and (ids := ids_in(text)) is not None:
        text = ids[..., :tokens]
    inputs = inputs_of(text, subject)
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


def check_text(text: Any) -> None:
    empty = isinstance(text, list | tuple) and not text
    require(not empty, f"text must hold at least one text or token; got {text!r}. Nearest: None, for unrelated tokens.")


def is_text(text: Any) -> bool:
    """Return whether `text` is a string, a path or a list of these."""
    several = isinstance(text, list | tuple) and all(isinstance(one, str | Path) for one in text)
    return isinstance(text, str | Path) or (several and bool(text))
