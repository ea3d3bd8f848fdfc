"""Attention weights by sequence and head, for every order in which a module may have these dimensions.

Weights have four dimensions, (sequences, heads, M, M) or (heads, sequences, M, M), three, in which sequences and heads
are one dimension, or five, in which heads are in groups. If the sizes leave the order open, `heads_come_first` compares
weights of sequences that are there twice.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

SOFTMAX = {functional.softmax, torch.softmax, Tensor.softmax}
FUSED = functional.scaled_dot_product_attention
COMPARED = 8  # attention weights
AGREEMENT = 1e-3  # of equal sequences, of which rounding may make other numbers


class UnclearHeadsError(Exception):
    """The sizes of attention weights do not show whether heads or sequences come first."""


def by_sequence_and_head(
    x: Tensor, sequences: int, samples: int, tokens: int, heads_first: bool | None
) -> Tensor | None:
    """Return logits or weights as (sequences, heads, M, ·), None of another softmax than that of attention.

    Weights of three dimensions (·, M, M) may be those of experts unless both M are the number of tokens. Those of
    windows of an image have more than one entry a sequence in their first dimension.

    Args:
        sequences: of all samples.
        heads_first: the order if the sizes do not show it; None: not known.

    Raises:
        UnclearHeadsError: the order is needed and not known.
    """
    if x.dim() == 3 and x.shape[1] == x.shape[2] == tokens and x.shape[0] % sequences == 0:
        heads = x.shape[0] // sequences
        if min(heads, sequences) > 1 and known(heads_first):
            return x.unflatten(0, (heads, sequences)).transpose(0, 1)
        return x.unflatten(0, (sequences, heads))
    if x.dim() == 5 and x.shape[0] == sequences and x.shape[3] == tokens:
        doubt = sequences > 1 and sequences in x.shape[1:3]
        return None if doubt and known(heads_first) else x.flatten(1, 2)
    if x.dim() != 4:
        return None
    usual = x.shape[0] == sequences if x.shape[2] == tokens else x.shape[0] % sequences == 0
    if x.shape[1] == sequences and (not usual or (x.shape[0] > 1 and known(heads_first))):
        return x.transpose(0, 1)
    return x if x.shape[0] % samples == 0 else None


def known(heads_first: bool | None) -> bool:
    if heads_first is None:
        raise UnclearHeadsError
    return heads_first


def is_over_last(out: Tensor, args: Any, kwargs: Any) -> bool:
    """Whether a softmax adds up to 1 over the last dimension, as that of attention does."""
    dimension = args[1] if len(args) > 1 else kwargs.get("dim", -1)
    return dimension in (-1, out.dim() - 1)


class AttentionWeights(TorchFunctionMode):
    """A mode that keeps the first results of softmaxes over the last dimension, and of torch's own attention."""

    def __init__(self) -> None:
        super().__init__()
        self.results: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func`, and keep its result."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        softmax = func in SOFTMAX and is_over_last(out, args, kwargs)
        if (softmax or func is FUSED) and out.dim() in (3, 4, 5) and len(self.results) < COMPARED:
            self.results.append(out.detach())
        return out


def heads_come_first(results: list[Tensor], sequences: int) -> bool:
    """Whether heads come before sequences, of which the second half repeats the first.

    Results that fit both orders, such as uniform weights, decide nothing.
    """
    for each in results:
        turned = each.unflatten(0, (-1, sequences)) if each.dim() == 3 and each.shape[0] % sequences == 0 else each
        usual, first = repeats(each, 0), repeats(turned, 1)
        if usual != first:
            return first
    return False


def repeats(x: Tensor, dimension: int) -> bool:
    """Whether the second half of x along a dimension is equal to the first."""
    if x.shape[dimension] % 2:
        return False
    first, second = x.chunk(2, dimension)
    return torch.allclose(first, second, atol=AGREEMENT)
