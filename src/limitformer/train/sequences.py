r"""Documents as sequences of tokens, for a `DataLoader` or a `Trainer`.

* `packed`: [CLS] document [SEP] [CLS] document [SEP] … cut every `length` tokens. No padding; the last tokens that
  do not fill a sequence are left out, fewer than `length` of the whole corpus.
* `separate`: [CLS] document [SEP], one sequence for each document, cut to `length`; `MaskedCollator` pads them.

An item is {"input_ids": LongTensor (length,), "example": int}, its own index: what masks depend on. A `Trainer` needs
`remove_unused_columns=False`, or it takes "example" away.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerFast

from limitformer.errors import require, require_count
from limitformer.train.tokenizer import BATCH, ids_of


class Sequences(Dataset[dict[str, Any]]):
    """Sequences of tokens in one row of memory: number k is `tokens[starts[k]:starts[k + 1]]`."""

    def __init__(self, tokens: NDArray[Any], starts: NDArray[np.int64]) -> None:
        self.tokens, self.starts = tokens, starts

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(f"There are {len(self)} sequences; got index {index}.")
        ids = self.tokens[self.starts[index] : self.starts[index + 1]]
        return {"input_ids": torch.from_numpy(ids.astype(np.int64)), "example": int(index)}


def packed(documents: Sequence[str], tokenizer: PreTrainedTokenizerFast, length: int) -> Sequences:
    """Sequences of exactly `length` tokens, documents one after the other.

    Raises:
        InputError: documents too short for one sequence.
    """
    length = require_count("length", length, least=2)
    tokens = np.concatenate([np.concatenate(rows) for rows in encoded(documents, tokenizer)])
    message = f"length must be at most {len(tokens)}, the tokens of these {len(documents)} documents; got {length}."
    require(len(tokens) >= length, message)
    whole = len(tokens) // length
    return Sequences(tokens[: whole * length], np.arange(whole + 1, dtype=np.int64) * length)


def separate(documents: Sequence[str], tokenizer: PreTrainedTokenizerFast, length: int) -> Sequences:
    """One sequence of at most `length` tokens for each document; a longer one keeps its beginning and [SEP]."""
    length = require_count("length", length, least=3)
    rows = [shortened(row, length) for batch in encoded(documents, tokenizer) for row in batch]
    starts = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64)
    return Sequences(np.concatenate(rows), starts)


def shortened(row: NDArray[Any], length: int) -> NDArray[Any]:
    """At most `length` tokens, the last one kept."""
    return row if len(row) <= length else np.concatenate([row[: length - 1], row[-1:]])


def encoded(documents: Sequence[str], tokenizer: PreTrainedTokenizerFast) -> Iterator[list[NDArray[Any]]]:
    """The tokens of documents, a batch at a time, in the smallest integers that hold the vocabulary."""
    require(len(documents) > 0, "Sequences need at least one document; got none.")
    dtype = np.min_scalar_type(len(tokenizer) - 1)
    for first in range(0, len(documents), BATCH):
        batch = [documents[k] for k in range(first, min(first + BATCH, len(documents)))]
        yield [np.array(row, dtype) for row in ids_of(tokenizer, batch)]
