"""The tensor that a module returns, and the loss that is differentiated: the one that was asked for, or a known one.

`chosen_loss` resolves a loss in all places. It is chosen at the first output, and then has a name.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from limitformer.base.errors import InputError, first_line, nearest, require
from limitformer.nn.drawn.simulate import torch_seed

Loss = Callable[[Any, Mapping[str, Tensor]], Tensor]
Choice = Callable[[Any, Mapping[str, Tensor]], tuple[str, Loss]]  # the name of a loss, and its function
NEXT_TOKEN, MEAN_SQUARE = "next-token", "mse"  # losses that have a name
OWN, NEXT = "the module's own", "next-token cross-entropy"
NAMED_OUTPUTS = ("logits", "last_hidden_state")
TARGETS = ("targets", "labels")  # arguments with which a module computes its own loss
SAME_LOSS = 1e-3  # relative difference between a module's own loss and the cross-entropy of its logits
READOUT = "a random readout"
IGNORED = -100  # a label that is not counted, as in torch


def output_of(out: Any) -> Tensor:
    """Return the output proper: logits, the last hidden state, or the first tensor of two dimensions or more.

    Raises:
        InputError: the output has no tensor of real numbers.
    """
    if isinstance(out, Tensor):
        return out
    named = dict(parts_of(out))
    for name in NAMED_OUTPUTS:
        if isinstance(named.get(name), Tensor):
            return named[name]
    tensors = sorted(real_tensors(out), key=lambda each: each.dim() < 2)  # one of two dimensions, if there is one
    if not tensors:
        others = [f"{name} ({each.dtype})" for name, each in parts_of(out) if isinstance(each, Tensor)]
        what = f"{type(out).__name__}{' of ' if others else ''}{', '.join(others)}"
        raise InputError(f"the module must return a tensor of real numbers, or several; got {what}.")
    return tensors[0]


def own_loss(out: Any, inputs: Mapping[str, Any]) -> Tensor | None:
    """Return the loss that a module computed itself, None if it did not.

    It is the only output, `loss` by name, or the first single number if the module was given targets.
    """
    if isinstance(out, Tensor):
        return out if out.dim() == 0 else None
    named = dict(parts_of(out)).get("loss")
    if isinstance(named, Tensor):
        return named
    tensors = list(real_tensors(out))
    targets = any(inputs.get(name) is not None for name in TARGETS)
    return next((each for each in tensors if each.dim() == 0 and (targets or len(tensors) == 1)), None)


def classes_of(loss: Tensor, out: Any, inputs: Mapping[str, Tensor]) -> int | None:
    """Return the number of classes if a module's own loss is the mean cross-entropy of its logits; else None."""
    targets = next((each for name in TARGETS if isinstance(each := inputs.get(name), Tensor)), None)
    if targets is None or targets.is_floating_point():
        return None
    for logits in real_tensors(out):
        if logits.dim() == targets.dim() + 1 and logits.shape[:-1] == targets.shape and logits.shape[-1] > 1:
            value = functional.cross_entropy(logits.detach().flatten(0, -2).float(), targets.flatten().long())
            if torch.isclose(value, loss.detach().float().mean(), rtol=SAME_LOSS):
                return int(logits.shape[-1])
    return None


def parts_of(out: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of an output with their names, empty in a tuple or list."""
    if isinstance(out, Mapping):
        yield from ((str(name), each) for name, each in out.items())
    elif hasattr(out, "_fields"):  # a named tuple
        yield from zip(out._fields, out, strict=True)
    elif isinstance(out, tuple | list):
        yield from (("", each) for each in out)
    elif is_dataclass(out):
        yield from ((field.name, getattr(out, field.name)) for field in fields(out))


def real_tensors(out: Any) -> Iterator[Tensor]:
    """Yield all tensors of floating-point numbers in an output, in their order."""
    if isinstance(out, Tensor):
        if out.is_floating_point():
            yield out
        return
    for _, each in parts_of(out):
        yield from real_tensors(each)


class ChosenLoss:
    """A loss that is chosen at the first output.

    Attributes:
        name: its name; empty before the first output.
        classes: the number of classes of the cross-entropy of the next token or of targets, or of a module's own; else
            None.
        numbers: how many it returned at the last output: one for each sequence, or one for all together.
    """

    def __init__(self, choose: Choice) -> None:
        self.choose, self.name = choose, ""
        self.function: Loss | None = None
        self.classes: int | None = None
        self.numbers = 0

    def __call__(self, out: Any, inputs: Mapping[str, Tensor]) -> Tensor:
        if self.function is None:
            self.name, self.function = self.choose(out, inputs)
            if self.function is require_own:
                self.classes = classes_of(require_own(out, inputs), out, inputs)
            elif self.name == NEXT or self.function is cross_entropy_of_targets:
                self.classes = output_of(out).shape[-1]
        value = self.function(out, inputs)
        self.numbers = value.numel() if isinstance(value, Tensor) else 0
        return value


def chosen_loss(loss: Loss | str | None, task: str, otherwise: Choice | None = None, batch_dim: int = 0) -> ChosenLoss:
    """Return the loss that was asked for; else that of the model's task, the module's own, or `otherwise`.

    Args:
        loss: "next-token", "mse", or a function of output and inputs that returns one number for each sequence.
        task: the task of a model of transformers, which is used if the inputs have ids and no targets.
        otherwise: chooses the loss of a module that has neither; None: ½|x|² of the last tokens.
        batch_dim: the dimension of the inputs that counts sequences.

    Raises:
        InputError: the name is not a loss.
    """
    if loss is not None:
        named: dict[str, tuple[str, Loss]] = {
            NEXT_TOKEN: (NEXT, partial(next_token, batch_dim=batch_dim)),
            MEAN_SQUARE: ("mean squared error", partial(mean_square_error, batch_dim=batch_dim)),
        }
        known = f"loss must be {', '.join(map(repr, named))} or a function (--loss FILE.py:NAME); got {loss!r:.60}."
        require(loss in named if isinstance(loss, str) else callable(loss), known + nearest(str(loss), named))
        pair = named[loss] if isinstance(loss, str) else (name_of(loss), of_user(loss))
        return ChosenLoss(lambda out, inputs: pair)

    def choose(out: Any, inputs: Mapping[str, Tensor]) -> tuple[str, Loss]:
        name, of_task, needed = TASKS.get(task, ("", square, ()))
        if task in TASKS and target_in(inputs) is not None:
            return OWN, require_own
        if task in TASKS and (not needed or any(key in inputs for key in needed)):
            return name, of_task
        if own_loss(out, inputs) is not None:
            return OWN, require_own
        return ("½|x|² of the last tokens", square) if otherwise is None else otherwise(out, inputs)

    return ChosenLoss(choose)


def of_user(loss: Loss) -> Loss:
    """Return a user's loss whose error says what it receives."""

    def call(out: Any, inputs: Mapping[str, Tensor]) -> Tensor:
        try:
            return loss(out, inputs)
        except (TypeError, KeyError, AttributeError, IndexError) as error:
            names = ", ".join(map(repr, inputs))
            raise InputError(
                f"the loss {name_of(loss)} fails: {type(error).__name__}: {first_line(error)}. It receives the output "
                f"and the inputs by name; here the names are {names} ('' is the first argument)."
            ) from error

    return call


def name_of(function: Any) -> str:
    """Return the name of a user's function, with its module."""
    name, module = getattr(function, "__name__", type(function).__name__), getattr(function, "__module__", None)
    return name if module in (None, "__main__", "builtins") else f"{module}.{name}"


def loss_of_shapes(
    model: str, vocabularies: Collection[int], widths: Collection[int], batch_dim: int, otherwise: Choice | None = None
) -> Choice:
    """Return the choice of the loss of a module that computes none, from the shapes of its output.

    Whole numbers as `targets` or `labels`, one for each row of logits, have their cross-entropy. Ids (…, tokens) with
    an output (…, tokens, words) have the cross-entropy of the next token, if a table that is looked up has just as
    many rows as the output has words, and the stream has another width. So a stream of hidden units is never taken for
    logits, and a head that is larger than the table must be asked for by `loss="next-token"`.

    Args:
        model: its name in errors.
        vocabularies: the numbers of rows of its tables, without those of positions.
        widths: the widths of its streams and tables.
        batch_dim: the dimension of the inputs that counts sequences.
        otherwise: chooses the loss that the shapes leave open; None: an error.

    Raises:
        InputError: the shapes leave the loss open (when the loss is chosen).
    """

    def choose(out: Any, inputs: Mapping[str, Tensor]) -> tuple[str, Loss]:
        output, targets = output_of(out), target_in(inputs)
        words = output.shape[-1]
        if targets is not None:
            name, values = targets
            if not values.is_floating_point() and values.shape == output.shape[:-1] and words > 1:
                return f"cross-entropy with {name}", cross_entropy_of_targets
            reason = f"its output is {tuple(output.shape)} and {name} are {tuple(values.shape)} of {values.dtype}"
        elif (ids := ids_in(inputs)) is None or output.shape[:-1] != ids[1].shape:
            reason = f"its output {tuple(output.shape)} has no numbers for each of its ids"
        elif words in widths:
            reason = f"the {words} numbers of each token may be its hidden units, which are as many"
        elif words not in vocabularies:
            reason = f"no table that it looks up has as many rows as each token has numbers, {words}"
        else:
            return NEXT, partial(next_token, batch_dim=batch_dim)
        if otherwise is not None:
            return otherwise(out, inputs)
        raise InputError(
            f"{model} computes no loss, and its shapes leave it open: {reason}. Nearest: loss= (--loss) next-token if "
            "its output predicts the next id, mse with targets in the inputs, or a function of output and inputs "
            "(--loss FILE.py:NAME)."
        )

    return choose


def target_in(inputs: Mapping[str, Any]) -> tuple[str, Tensor] | None:
    """Return the targets with their name; None without any."""
    return next(((name, each) for name in TARGETS if isinstance(each := inputs.get(name), Tensor)), None)


def ids_in(inputs: Mapping[str, Any]) -> tuple[str, Tensor] | None:
    """Return the ids with their name: those of the decoder, `input_ids`, the first argument, or the only ones."""
    known = {
        name: each
        for name, each in inputs.items()
        if isinstance(each, Tensor) and each.dim() == 2 and not each.is_floating_point() and each.dtype != torch.bool
        and name not in TARGETS and "mask" not in name
    }  # fmt: skip
    name = next((name for name in ("decoder_input_ids", "input_ids", "") if name in known), None)
    if name is None:
        return next(iter(known.items())) if len(known) == 1 else None
    return name, known[name]


def require_own(out: Any, inputs: Mapping[str, Tensor]) -> Tensor:
    """Return the loss that a module computed itself.

    Raises:
        InputError: it returned none.
    """
    own, (name, _) = own_loss(out, inputs), target_in(inputs) or ("other numbers", None)
    if own is None:
        raise InputError(f"the inputs have {name}, but the module returns no loss. Nearest: loss=…, which reads them.")
    return own


def mean_square_error(out: Any, inputs: Mapping[str, Tensor], batch_dim: int = 0) -> Tensor:
    """Return the mean square of output minus targets (sequences,)."""
    x, target = output_of(out), target_in(inputs)
    if target is None or target[1].shape != x.shape:
        got = "no targets" if target is None else f"{target[0]} {tuple(target[1].shape)}"
        raise InputError(
            "the loss mse needs targets or labels in the inputs, of the shape of the output, "
            f'{tuple(x.shape)}; got {got}. Nearest: inputs={{"x": …, "targets": …}}.'
        )
    each = (x - target[1].detach().to(x)).square().movedim(batch_dim if x.dim() > 1 else 0, 0)
    return each.reshape(len(each), -1).mean(1)


def cross_entropy_of_targets(out: Any, inputs: Mapping[str, Tensor]) -> Tensor:
    """Return the mean cross-entropy of all targets, a single number, without those that torch ignores."""
    target = target_in(inputs)
    assert target is not None  # or this loss would not have been chosen
    return functional.cross_entropy(output_of(out).flatten(0, -2), target[1].flatten().long(), ignore_index=IGNORED)


def next_token(out: Any, inputs: Mapping[str, Tensor], batch_dim: int = 0) -> Tensor:
    """Return the mean cross-entropy of each next token, without padding; there may be other logits before them."""
    logits, (name, ids) = output_of(out), ids_in(inputs) or ("", torch.empty(0))
    if ids.dim() != 2 or logits.dim() != 3 or logits.shape[batch_dim] != ids.shape[batch_dim]:
        got = ", ".join(
            f"{key} {tuple(each.shape)}".strip() for key, each in inputs.items() if isinstance(each, Tensor)
        )
        raise InputError(
            f"the loss next-token needs ids (…, tokens) and an output (…, tokens, words); got {got} and "
            f"{tuple(logits.shape)}. Nearest: loss=…, a function of output and inputs."
        )
    largest = int(ids.max())
    require(largest < logits.shape[-1], f"the id {largest} is beyond the {logits.shape[-1]} numbers of the output.")
    mask = mask_in(inputs, "decoder_attention_mask" if name == "decoder_input_ids" else "attention_mask")
    mask = None if mask is None else mask.movedim(batch_dim, 0)
    return shifted(logits.movedim(batch_dim, 0), ids.movedim(batch_dim, 0), mask)


def shifted(logits: Tensor, ids: Tensor, mask: Tensor | None) -> Tensor:
    counted = None if mask is None else mask[:, 1:] * mask[:, :-1]
    return cross_entropy(logits[:, -ids.shape[1] :][:, :-1], ids[:, 1:], counted)


def same_token(out: Any, inputs: Mapping[str, Tensor]) -> Tensor:
    """Return the mean cross-entropy of the tokens themselves, without padding; there may be more logits after them."""
    ids = inputs["input_ids"]
    return cross_entropy(output_of(out)[:, : ids.shape[1]], ids, mask_in(inputs, "attention_mask"))


def decoder_token(out: Any, inputs: Mapping[str, Tensor]) -> Tensor:
    """Return the mean cross-entropy of the token that follows each token of the decoder.

    A decoder of as many tokens as the encoder is taken to read the encoder's tokens, one later. So is one that is given
    none, because BART and its relatives then shift the encoder's tokens themselves.
    """
    ids, read = inputs.get("input_ids"), inputs.get("decoder_input_ids")
    if read is None or (ids is not None and ids.shape == read.shape):
        return same_token(out, inputs)
    return shifted(output_of(out), read, mask_in(inputs, "decoder_attention_mask"))


def mask_in(inputs: Mapping[str, Tensor], name: str) -> Tensor | None:
    mask = inputs.get(name)
    return mask if isinstance(mask, Tensor) and mask.dim() == 2 else None


def first_class(out: Any, inputs: Mapping[str, Tensor]) -> Tensor:
    logits = output_of(out)
    return functional.cross_entropy(logits, logits.new_zeros(len(logits), dtype=torch.long), reduction="none")


def square(out: Any, inputs: Mapping[str, Tensor]) -> Tensor:
    """Return ½|x|² of the last tokens, averaged over tokens."""
    x = output_of(out)
    return x.flatten(1, -2).square().sum(-1).mean(-1) / 2 if x.dim() > 2 else x.square().sum(-1) / 2


TASKS: Mapping[str, tuple[str, Loss, tuple[str, ...]]] = {  # name, loss, and inputs of which it needs one
    "causal": (NEXT, next_token, ("input_ids",)),
    "masked": ("cross-entropy of the tokens themselves", same_token, ("input_ids",)),
    "seq2seq": ("cross-entropy of the decoder's next token", decoder_token, ("input_ids", "decoder_input_ids")),
    "image": ("cross-entropy of the first class", first_class, ()),
}


def cross_entropy(logits: Tensor, ids: Tensor, counted: Tensor | None) -> Tensor:
    """Return the mean over counted tokens (rows,)."""
    require(ids.shape[1] > 0, "the loss of the next token needs two tokens or more.")
    each = functional.cross_entropy(logits.transpose(1, 2), ids, reduction="none", ignore_index=IGNORED)
    if counted is None:
        return each.mean(-1)
    return (each * counted).sum(-1) / counted.sum(-1).clamp(min=1)


def readout(seed: int) -> Choice:
    """Return the choice of ⟨x, g⟩ of the last tokens, with a direction g ~ N(0, I) for each.

    ½|x|² would have no gradient behind a norm, which makes it constant.
    """

    def product(out: Any, inputs: Mapping[str, Tensor]) -> Tensor:
        x = output_of(out)
        g = torch.randn(x.shape[1:], generator=torch.Generator().manual_seed(torch_seed(seed, "readout")))
        return (x * g.to(x.device, x.dtype)).flatten(1).sum(1) / max(1, x.shape[1:-1].numel())

    return lambda out, inputs: (READOUT, product)
