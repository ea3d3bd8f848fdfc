"""The tensor that a module returns, and the loss of its task."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from limitformer.base.errors import InputError, require

Loss = Callable[[Any, Mapping[str, Tensor]], Tensor]
NAMED_OUTPUTS = ("logits", "last_hidden_state")
TARGETS = ("targets", "labels")  # arguments with which a module computes its own loss
SAME_LOSS = 1e-3  # relative difference between a module's own loss and the cross-entropy of its logits
IGNORED = -100  # a label that is not counted, as in torch


def output_of(out: Any) -> Tensor:
    """Return the output proper: logits, the last hidden state, or the first tensor of two dimensions or more.

    Raises:
        InputError: there is no tensor of real numbers in the output.
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


def logits_of(out: Any) -> Tensor | None:
    """Return the output that is named `logits`, None if there is none."""
    logits = dict(parts_of(out)).get("logits")
    return logits if isinstance(logits, Tensor) and logits.dim() > 1 else None


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


def default_loss(task: str) -> Loss:
    """Return the module's own loss if the inputs have targets; else that of the task, by sequence.

    That is the task's cross-entropy, or half the mean square of the last tokens.
    """
    return partial(loss_of_targets, LOSSES.get(task, square))


def loss_of_targets(without_targets: Loss, out: Any, inputs: Mapping[str, Tensor]) -> Tensor:
    """Return the module's own loss if the inputs have targets, else `without_targets`.

    Raises:
        InputError: there are targets, and the module returns no loss.
    """
    given = next((name for name in TARGETS if inputs.get(name) is not None), None)
    if given is None or without_targets is square:
        return without_targets(out, inputs)
    own = own_loss(out, inputs)
    if own is None:
        raise InputError(f"the inputs have {given}, but the module returns no loss. Nearest: loss=…, which reads them.")
    return own


def next_token(out: Any, inputs: Mapping[str, Tensor]) -> Tensor:
    """Return the mean cross-entropy of each next token, without padding; of embeddings without ids, `square`."""
    if "input_ids" not in inputs:
        return square(out, inputs)
    return shifted(output_of(out), inputs["input_ids"], mask_in(inputs, "attention_mask"))


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
    """Return the cross-entropy of the first class."""
    logits = output_of(out)
    return functional.cross_entropy(
        logits, torch.zeros(len(logits), dtype=torch.long, device=logits.device), reduction="none"
    )


def square(out: Any, inputs: Mapping[str, Tensor]) -> Tensor:
    """Return the module's own loss, or ½|x|² of the last tokens, averaged over tokens."""
    own = own_loss(out, inputs)
    if own is not None:
        return own
    x = output_of(out)
    return x.flatten(1, -2).square().sum(-1).mean(-1) / 2 if x.dim() > 2 else x.square().sum(-1) / 2


LOSSES: Mapping[str, Loss] = {
    "causal": next_token,
    "masked": same_token,
    "seq2seq": decoder_token,
    "image": first_class,
}


def cross_entropy(logits: Tensor, ids: Tensor, counted: Tensor | None) -> Tensor:
    """Return the mean over counted tokens (rows,)."""
    require(ids.shape[1] > 0, "the loss of the next token needs two tokens or more.")
    each = functional.cross_entropy(logits.transpose(1, 2), ids, reduction="none", ignore_index=IGNORED)
    if counted is None:
        return each.mean(-1)
    return (each * counted).sum(-1) / counted.sum(-1).clamp(min=1)
