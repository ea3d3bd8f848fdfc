"""The inputs of a module: texts, ids, images, or tokens of a given covariance; of a long text its first tokens."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import Parameter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from limitformer.base.errors import InputError, first_line, require, require_count
from limitformer.models import Start, Transformer, as_start, equicorrelated, from_text
from limitformer.models.text import words_of
from limitformer.nn.drawn.simulate import TokenLaw, torch_seed
from limitformer.subjects.choices import Choice, choices_of, first_accepted, parameters_of
from limitformer.subjects.losses import TARGETS
from limitformer.subjects.subject import Subject

OTHER_INPUTS = ("decoder_", "pixel_", "labels", "encoder_", "input_values", "input_features")  # with other lengths
POSITIONAL = "#"  # begins the names of positional arguments after the first, whose name is empty


@dataclass(frozen=True)
class Inputs:
    """The arguments of one sample's pass; every tensor has `rows` sequences in dimension `batch_dim`."""

    fixed: dict[str, Tensor]
    options: dict[str, Any]
    rows: int
    labels: tuple[str, ...] = ()
    tokens: TokenLaw | None = None  # drawn for each sample
    batch_dim: int = 0
    choices: list[Choice] = field(default_factory=list)  # proposals, of which the first that runs is taken
    proposed: bool = False  # whether they come from a proposal
    free: bool = False  # whether a number of tokens stood for ids, so that others serve as well

    def __post_init__(self) -> None:
        require(self.rows > 0, "the inputs must have at least one sequence; got none. Nearest: a number of tokens.")

    @property
    def counted(self) -> Tensor | None:
        """The tokens (B, M) that are not padding; None without an attention_mask."""
        mask = self.fixed.get("attention_mask")
        return None if mask is None or mask.dim() != 2 else mask.bool().movedim(self.batch_dim, 0)

    @property
    def length(self) -> int | None:
        """The number of ids in a sequence; None if the first input is not ids."""
        first = next(iter(self.fixed.values()), None)
        ids = first is not None and first.dim() == 2 and not first.is_floating_point()
        return int(first.shape[1 - self.batch_dim]) if first is not None and ids else None

    def with_batch_dim(self, batch_dim: int) -> "Inputs":
        """Return the inputs with sequences in this dimension.

        Raises:
            InputError: it is not 0 or 1, the inputs have no second dimension, or an attention_mask does not fit.
        """
        require(batch_dim in (0, 1) and not isinstance(batch_dim, bool), f"batch_dim must be 0 or 1; got {batch_dim}.")
        result = self
        if batch_dim == 1:
            fits = self.tokens is None and all(each.dim() > 1 for each in self.fixed.values())
            require(fits, "batch_dim=1 needs inputs of two dimensions or more. Nearest: batch_dim=0.")
            result = replace(self, rows=next(iter(self.fixed.values())).shape[1], batch_dim=1)
        mask, counted = self.fixed.get("attention_mask"), result.counted
        if mask is None or counted is None:
            return result
        kind = ("sequences", "tokens") if batch_dim == 0 else ("tokens", "sequences")
        for name, each in self.fixed.items():
            fits = name == "attention_mask" or each.dim() < 2 or each.shape[:2] == mask.shape
            is_vector = each.dim() == 2 and each.is_floating_point()  # one vector a sequence, without tokens
            require(
                fits or is_vector or each.dim() > 3 or name.startswith(OTHER_INPUTS),
                f"attention_mask must be ({', '.join(kind)}) like {name or 'the input'}, {tuple(each.shape[:2])}; got "
                f"{tuple(mask.shape)}.",
            )
        empty = (~counted.any(1)).nonzero().flatten().tolist()
        require(not empty, f"attention_mask hides every token of sequence {''.join(map(str, empty[:1]))}.")
        return result

    def first_accepted(self, call: Callable[["Inputs"], Any], measure: Callable[["Inputs"], Any]) -> "Inputs":
        """Return the first of the proposed inputs with which the module can be called and measured."""
        if len(self.choices) < 2:
            return self
        own = partial(replace, self, choices=[])
        choice = first_accepted(
            self.choices, lambda each: call(own(fixed=each.fixed)), lambda each: measure(own(fixed=each.fixed))
        )
        return own(fixed=choice.fixed)

    def __str__(self) -> str:
        """Return the names of the tensors with their shapes."""
        return ", ".join(f"{name.strip(POSITIONAL)} {tuple(each.shape)}".strip() for name, each in self.fixed.items())

    @property
    def chosen(self) -> bool:
        """Whether more than a text was chosen for the user."""
        return self.proposed and set(self.fixed) != {"input_ids"}

    def repeated(self, times: int) -> "Inputs":
        """Return the inputs with each sequence `times` times."""
        fixed = {name: torch.cat([each] * times, self.batch_dim) for name, each in self.fixed.items()}
        return replace(self, fixed=fixed, rows=times * self.rows)

    def part(self, rows: slice) -> "Inputs":
        """Return some of the sequences; what does not have one for each sequence stays."""
        where = (slice(None),) * self.batch_dim + (rows,)
        fixed = {
            name: each[where] if each.dim() > self.batch_dim and each.shape[self.batch_dim] == self.rows else each
            for name, each in self.fixed.items()
        }
        return replace(self, fixed=fixed, rows=len(range(self.rows)[rows]), choices=[])

    def with_sequences(self, sequences: int | None) -> "Inputs":
        """Return the first of the sequences, or as many of ids that are free; None: all.

        Raises:
            InputError: there are fewer.
        """
        if sequences is None:
            return self
        require(self.tokens is None, "sequences needs a network that reads ids; this one draws its tokens itself.")
        if self.free:
            return self.part(slice(0, 1)).repeated(sequences)
        require(
            self.rows >= sequences,
            f"the inputs must have {sequences} sequences; got {self.rows}. Nearest: a number of tokens, for which ids "
            "are drawn, or a list of texts.",
        )
        return self.part(slice(0, sequences))

    def sequence_of(self, tokens: int) -> Tensor:
        """Return the sequence of each of the `tokens` that are not padding."""
        if self.counted is not None and int(self.counted.sum()) == tokens:
            return self.counted.nonzero()[:, 0]
        return torch.arange(self.rows).repeat_interleave(max(1, tokens // self.rows))

    def of(self, seed: int, samples: range, dtype: torch.dtype) -> dict[str, Any]:
        """Return the arguments for samples side by side."""
        if self.tokens is not None:
            seeds = [torch_seed(seed, f"weightless tokens {sample}") for sample in samples]
            drawn = [self.tokens.tokens(1, torch.Generator().manual_seed(each)).to(dtype) for each in seeds]
            return {"x": torch.cat(drawn).requires_grad_()}
        many = {name: value.repeat(len(samples), *[1] * (value.dim() - 1)) for name, value in self.fixed.items()}
        every = {  # the stream may begin with numbers; a module may change a copy of them in place
            name: each.to(dtype).requires_grad_().clone() if each.is_floating_point() else each
            for name, each in many.items()
        } | self.options
        positional = sorted((k for k in every if not k or k.startswith(POSITIONAL)), key=lambda k: int(k[1:] or 0))
        return {name: every[name] for name in (*positional, *every)}


def inputs_of(inputs: Any, subject: Subject, sequences: int | None = None) -> Inputs:
    """Make the inputs of a model from the argument `inputs` of the public functions.

    With a number of sequences, a number of tokens stands for ids that are drawn later: any of the vocabulary.

    Raises:
        InputError: it does not fit the model.
    """
    if sequences is not None:
        require_count("sequences", sequences)
    if isinstance(inputs, Inputs):
        return inputs
    count = isinstance(inputs, int) and not isinstance(inputs, bool)
    if subject.transformer is not None:
        start = equicorrelated(min(inputs, subject.transformer.width), 0.0) if count else as_start(inputs)
        return Inputs({}, {}, 1, start.labels or (), TokenLaw(start, subject.transformer))
    if count and sequences is not None:
        inputs = " ".join(["0"] * require_count("inputs", inputs))
    arguments = inputs if isinstance(inputs, tuple) else ()  # one of numbers or texts is one argument
    if isinstance(inputs, Mapping) or any(each is None or isinstance(each, Tensor | Mapping) for each in arguments):
        return inputs_by_name(named_values(inputs), options_of(subject))
    result = inputs_of_factory(inputs) if subject.kind is None else inputs_of_class(inputs, subject)
    return replace(result, free=count)


def options_of(subject: Subject) -> dict[str, Any]:
    """Return further arguments of a language model of transformers."""
    return {"use_cache": False} if subject.task in ("causal", "seq2seq") else {}


def named_values(inputs: Any) -> dict[str, Any]:
    """Return arguments by name; positional ones have names that no argument can have. A mapping at the end is named.

    The entries of a dictionary argument are listed by name; `call_with` rebuilds the dictionary.

    Raises:
        InputError: more than one dictionary is an argument.
    """
    positional = [] if isinstance(inputs, Mapping) else list(inputs)
    named: dict[str, Any] = {}
    for each in (inputs,) if isinstance(inputs, Mapping) else (positional.pop(),) if is_mapping(positional) else ():
        named = {str(name): value for name, value in each.items() if value is not None}
    if is_mapping(positional):
        named = {**positional.pop(), **named}
    inside = [name for name, each in named.items() if isinstance(each, Mapping)]
    if len(inside) == 1:
        named = {**named.pop(inside[0]), **named}
    others = [f"argument {k + 1}" for k, each in enumerate(positional) if isinstance(each, Mapping)]
    others += [name for name, each in named.items() if isinstance(each, Mapping)]
    require(
        not others,
        f"one dictionary may be an argument, not several, nor one inside another; got more: {', '.join(others)}. "
        "Nearest: a module whose forward takes tensors by name.",
    )
    return {f"{POSITIONAL}{k}" if k else "": each for k, each in enumerate(positional)} | named


def is_mapping(arguments: list[Any]) -> bool:
    return bool(arguments) and isinstance(arguments[-1], Mapping)


def inputs_by_name(values: dict[str, Any], options: dict[str, Any]) -> Inputs:
    """Make the inputs from named arguments; texts, numbers, flags and whatever is not an array is passed as it is."""
    fixed = dict[str, Tensor]()
    for name, each in values.items():
        tensor = tensor_of(each)
        if tensor is None:
            options = options | {name: each}
        else:
            fixed[name] = tensor
    require(bool(fixed), "inputs must name at least one tensor; got none.")
    return Inputs(fixed, options, len(next(iter(fixed.values()))))


def tensor_of(value: Any) -> Tensor | None:
    """Return an array or a list of numbers as a tensor; None for anything else, such as a flag or a text."""
    if value is None or isinstance(value, bool | int | float | str | Mapping):
        return None
    try:
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        return None
    return tensor if tensor.dim() > 0 else None


def ids_in(value: Any) -> Tensor | None:
    """Return an array of whole numbers as a tensor; None for anything else."""
    tensor = tensor_of(value)
    return None if tensor is None or tensor.is_floating_point() else tensor


def call_with(module: Any, arguments: Mapping[str, Any]) -> Any:
    """Call a module with arguments by name; those with the name of a position come first, in their order.

    Targets that `forward` does not take are left out: a loss reads them.

    Names that `forward` does not have form one dictionary, if `forward` needs exactly one more argument.

    Raises:
        InputError: `forward` does not take that dictionary.
    """
    positional = [each for name, each in arguments.items() if not name or name.startswith(POSITIONAL)]
    named = {name: each for name, each in arguments.items() if name and not name.startswith(POSITIONAL)}
    parameters = parameters_of(module)
    dictionary = {name: each for name, each in named.items() if name not in parameters}
    argument = argument_of(dictionary, parameters, len(positional), named)
    if argument is None:  # targets that `forward` does not take are for the loss alone
        takes = {each.kind for each in parameters.values()}
        unknown = set() if not parameters or Parameter.VAR_KEYWORD in takes else set(TARGETS) - set(parameters)
        return module(*positional, **{name: each for name, each in named.items() if name not in unknown})
    known = {name: each for name, each in named.items() if name in parameters}
    try:
        return module(*positional, **known, **{argument: dictionary})
    except (KeyError, TypeError, AttributeError) as error:
        own, names = type(module).__name__, ", ".join(dictionary)
        raise InputError(
            f"{own} has no argument {names}, and does not take one dictionary of them as {argument}: "
            f"{type(error).__name__}: {first_line(error)}. Nearest: tensors for {', '.join(parameters)}."
        ) from error


def argument_of(
    dictionary: Mapping[str, Any], parameters: Mapping[str, Parameter], positional: int, named: Mapping[str, Any]
) -> str | None:
    """Return the argument that takes a dictionary of unknown names: the only one that is needed and not given."""
    kinds = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    if not dictionary or any(each.kind is Parameter.VAR_KEYWORD for each in parameters.values()):
        return None
    rest = list(parameters.items())[positional:]
    needed = [name for name, each in rest if each.kind in kinds and each.default is Parameter.empty]
    missing = [name for name in needed if name not in named]
    return missing[0] if len(missing) == 1 else None


def with_targets(inputs: Inputs, module: Any) -> Inputs:
    """Add the next token as target, if a module reads ids and has an argument for targets; the last has the first.

    Targets that are given by position are given by name instead, so that the loss of the module is recognised.
    """
    parameters = parameters_of(module)
    inputs = replace(inputs, fixed=by_name(inputs.fixed, parameters), options=by_name(inputs.options, parameters))
    target = next((name for name in TARGETS if name in parameters), None)
    ids = inputs.fixed.get("")
    several = len(inputs.fixed) + len(inputs.options) > 1
    if target is None or ids is None or several or ids.is_floating_point() or ids.dim() != 2:
        return inputs
    return replace(inputs, fixed=inputs.fixed | {target: ids.roll(-1, 1 - inputs.batch_dim)})


def by_name(arguments: dict[str, Any], parameters: Mapping[str, Parameter]) -> dict[str, Any]:
    """Return positional arguments after the first under the names of their parameters, where a name can be given."""
    names = [name if each.kind is Parameter.POSITIONAL_OR_KEYWORD else "" for name, each in parameters.items()]

    def name_of(key: str) -> str:
        place = int(key[1:]) if key.startswith(POSITIONAL) else 0
        return names[place] if 0 < place < len(names) and names[place] else key

    return {name_of(key): each for key, each in arguments.items()}


def inputs_of_factory(inputs: Any) -> Inputs:
    """Make the first argument of a user's module."""
    texts = isinstance(inputs, list | tuple) and any(isinstance(each, str | Path) for each in inputs)
    if texts or isinstance(inputs, int | str | Path):
        inputs = ids_of(inputs, None)[0]
    tensor = tensor_of(inputs)
    if tensor is None:
        raise InputError(f"inputs must be a number of tokens, texts or an array; got {inputs!r:.60}.")
    if tensor.dim() == 1 and not tensor.is_floating_point():
        tensor = tensor[None]  # ids of one sequence
    return Inputs({"": tensor}, {}, len(tensor))


def inputs_of_class(inputs: Any, subject: Subject) -> Inputs:
    """Make the inputs of a class of transformers: a text, and whatever else its `forward` reads.

    Images and sounds are given as an array for the class's main argument, or chosen. A number is that of distinct
    tokens, or of images for a classifier of images.
    """
    kind, config = subject.kind, subject.config
    names, main = parameters_of(kind), getattr(kind, "main_input_name", "input_ids")
    if all(each.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD) for each in names.values()):  # PEFT's wrapper
        tokens, words = ids_of(inputs, config)
        return Inputs({"input_ids": tokens}, options_of(subject), len(tokens), words)
    reads_text = bool({"input_ids", "decoder_input_ids"} & names.keys())
    array = None if isinstance(inputs, int | str | Path) else tensor_of(inputs)
    is_real = array is not None and array.is_floating_point() and main != "input_ids"
    ids: Tensor | None = None
    labels, rows = tuple[str, ...](), 1
    if array is not None and is_real:
        require(main in names, f"{subject.name} must have its inputs by name, such as {next(iter(names), 'x')!r}.")
        rows = len(array)
    elif subject.task == "image" and main == "pixel_values" and isinstance(inputs, int):
        rows = inputs
    elif reads_text:
        ids, labels = ids_of(inputs, config)
    elif not isinstance(inputs, int):
        raise InputError(f"{subject.name} reads no text. Nearest: an array for its argument {main!r}.")
    choices = choices_of(kind, config, ids, rows, subject.task == "seq2seq")
    if array is not None and is_real:
        size = next((tuple(each.fixed[main].shape[1:]) for each in choices if main in each.fixed), ())
        fits = subject.task != "image" or tuple(array.shape[1:]) == size
        require(fits, f"images must be (number, {', '.join(map(str, size))}); got {tuple(array.shape)}.")
        choices = [replace(each, fixed=each.fixed | {main: array}) for each in choices if main in each.fixed]
        choices = choices[:1] or [Choice({main: array})]
    require(bool(choices), f"no inputs are known for {subject.name}. Nearest: named tensors for {', '.join(names)}.")
    return Inputs(
        choices[0].fixed,
        options_of(subject),
        rows if ids is None else len(ids),
        labels,
        choices=choices,
        proposed=True,
    )


def ids_of(inputs: Any, config: Any) -> tuple[Tensor, tuple[str, ...]]:
    """Return ids (sequences, tokens), and the words of the first text, of a number of tokens, texts or ids.

    A network with random weights depends only on which tokens are equal, so words are numbered in their order.
    """
    if isinstance(inputs, int | np.integer) and not isinstance(inputs, bool):
        require(bool(inputs >= 1), f"inputs must be at least one token; got {inputs}.")
        return numbered([[str(k) for k in range(inputs)]], config), ()
    if isinstance(inputs, str | Path):
        inputs = [inputs]
    if isinstance(inputs, list | tuple) and inputs and all(isinstance(each, str | Path) for each in inputs):
        words = [words_of(text) for text in inputs]
        shortest = min(map(len, words))
        return numbered([each[:shortest] for each in words], config), tuple(words[0][:shortest])
    try:
        ids = torch.as_tensor(inputs)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(
            f"inputs must be texts, ids, a number of tokens, or named tensors; got {inputs!r:.60}."
        ) from error
    ids = ids[None] if ids.dim() == 1 else ids
    require(
        ids.dim() == 2 and not ids.is_floating_point() and ids.numel() > 0,
        f"ids must be whole numbers (tokens,) or (sequences, tokens); got {ids.dtype} {tuple(ids.shape)}.",
    )
    return ids.long(), ()


def numbered(words: list[list[str]], config: Any) -> Tensor:
    """Number distinct words by ids that are not special."""
    special = set[Any]()
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        each = getattr(config, name, None)
        special |= set(each) if isinstance(each, list | tuple) else {each}
    vocabulary = getattr(config, "vocab_size", None)
    distinct = dict.fromkeys(word for text in words for word in text)
    free = (k for k in range(10**9) if k not in special)
    ids = {word: next(free) for word in distinct}
    if vocabulary is not None and max(ids.values()) >= vocabulary:
        raise InputError(f"{len(distinct)} distinct tokens need a larger vocabulary than {vocabulary}.")
    return torch.tensor([[ids[word] for word in text] for text in words])


def inputs_for(subject: Subject, text: Any, tokens: int, sequences: int | None = None) -> Inputs:
    """Return the inputs that the network is called with.

    Args:
        subject: the network.
        text: texts, ids or an array; None for unrelated tokens.
        tokens: of a sequence, at most.
        sequences: into which one text is cut; None: one.

    Raises:
        InputError: the text is too short, or the inputs do not fit.
    """
    if subject.transformer is not None:
        return inputs_of(start_of(text, subject.transformer, tokens), subject)
    check_text(text)
    if text is None:
        return inputs_of(1 if subject.task == "image" else tokens, subject, sequences)
    if is_text(text):
        every = texts_in(text, tokens, sequences)
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


def texts_in(text: Any, tokens: int, sequences: int | None) -> list[str | Path]:
    """Return the texts of a batch; a single one is cut into `sequences`, unless that is None."""
    every = [text] if isinstance(text, str | Path) else list(text)
    return [*cut(every[0], sequences, tokens)] if sequences is not None and len(every) == 1 else every


def cut(text: str | Path, sequences: int, tokens: int) -> list[str]:
    """Return as many texts of as many words, one after the other in a text.

    >>> cut("A rose is a rose is a rose.", 2, 3)
    ['a rose is', 'a rose is']
    """
    words = words_of(text, sequences * tokens)
    name = str(text) if isinstance(text, Path) else "the text"
    require(
        len(words) == sequences * tokens,
        f"{sequences} sequences of {tokens} tokens need {sequences * tokens} words; {name} has {len(words)}.",
    )
    return [" ".join(words[k * tokens : (k + 1) * tokens]) for k in range(sequences)]


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
