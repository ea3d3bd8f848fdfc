r"""Documents as sequences of tokens, for a `DataLoader` or a `Trainer`.

`packed` is [CLS] document [SEP] [CLS] document [SEP] … cut every `length` tokens, without padding; the last
tokens, fewer than `length`, are left out. `write_packed` and `read_packed` use a file, whose tokens are read on demand.

An item is {"input_ids": LongTensor (length,), "example": int}; masks depend on the index "example". A `Trainer` needs
`remove_unused_columns=False`, or it removes "example".
"""

from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerFast

from limitformer.base.errors import InputError, require, require_count
from limitformer.base.files import write_whole
from limitformer_papers.training.data.tokenizer import BATCH, ids_of


class Sequences(Dataset[dict[str, Any]]):
    """Sequences of `length` tokens in one array, in memory or in a file, which they fill."""

    def __init__(self, tokens: NDArray[Any], length: int) -> None:
        self.tokens, self.length = tokens, length

    def __len__(self) -> int:
        return len(self.tokens) // self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(f"There are {len(self)} sequences; got index {index}.")
        ids = self.tokens[index * self.length : (index + 1) * self.length]
        return {"input_ids": torch.from_numpy(np.array(ids, np.int64)), "example": int(index)}


def packed(documents: Sequence[str], tokenizer: PreTrainedTokenizerFast, length: int) -> Sequences:
    """Return sequences of exactly `length` tokens, documents one after another.

    Raises:
        InputError: documents too short for one sequence.
    """
    length = require_count("length", length, least=2)
    tokens = np.concatenate(list(encoded(documents, tokenizer)))
    return Sequences(tokens[: filled_length(len(tokens), len(documents), length)], length)


def filled_length(tokens: int, documents: int, length: int) -> int:
    """Return the number of tokens that fill sequences, or raise `InputError` if they fill none."""
    message = f"length must be at most {tokens}, the tokens of these {documents} documents; got {length}."
    require(tokens >= length, message)
    return tokens // length * length


def write_packed(path: Path, documents: Sequence[str], tokenizer: PreTrainedTokenizerFast, length: int) -> None:
    """Write the sequences of `packed` to a `.npy` file, whole or not at all, one batch of documents at a time.

    Raises:
        InputError: documents too short for one sequence, or a file that cannot be written.
    """
    length = require_count("length", length, least=2)

    def write(aside: Path) -> None:
        with aside.open("wb") as file:
            dtype, tokens = smallest(tokenizer), 0
            begin(file, dtype, 0)
            first = file.tell()
            for row in encoded(documents, tokenizer):
                file.write(row.tobytes())
                tokens += len(row)
            filled = filled_length(tokens, len(documents), length)
            file.truncate(first + filled * dtype.itemsize)
            file.seek(0)
            begin(file, dtype, filled)
            assert file.tell() == first  # NumPy leaves room for a number that grows

    write_whole(path, write)


def begin(file: IO[bytes], dtype: np.dtype[Any], number: int) -> None:
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (number,)}
    np.lib.format.write_array_header_1_0(file, header)


def read_packed(path: Path, length: int) -> Sequences:
    """Open a file that `write_packed` wrote; tokens are read on demand.

    Raises:
        InputError: no such file, or a damaged one.
    """
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"{path} is damaged ({reason}). Nearest: delete {path.parent}; it is made again.") from error
    return Sequences(tokens, length)


def encoded(documents: Sequence[str], tokenizer: PreTrainedTokenizerFast) -> Iterator[NDArray[Any]]:
    """Yield the tokens of documents in order, a batch of documents at a time."""
    require(len(documents) > 0, "Sequences need at least one document; got none.")
    dtype = smallest(tokenizer)
    for first in range(0, len(documents), BATCH):
        rows = ids_of(tokenizer, [documents[k] for k in range(first, min(first + BATCH, len(documents)))])
        yield np.fromiter(chain.from_iterable(rows), dtype, sum(map(len, rows)))


def smallest(tokenizer: PreTrainedTokenizerFast) -> np.dtype[Any]:
    """Return the smallest integer type that holds the vocabulary."""
    return np.dtype(np.min_scalar_type(len(tokenizer) - 1))
