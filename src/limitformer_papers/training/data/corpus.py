r"""A corpus: documents to train on and documents to evaluate on.

A document is for evaluation if BLAKE2b-64 of its UTF-8 text, as a number from 0 to 2⁶⁴ − 1, lies below s 2⁶⁴, s the
share of evaluation. So the side of a document depends only on its own text: not on the machine, the order or other
documents, and copies of one document are never on both sides.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from limitformer.base.errors import InputError, require, require_count, require_real
from limitformer_papers.training.data.sources import read_source

HASH_BYTES = 8


@dataclass(frozen=True)
class Selected(Sequence[str]):
    """The documents `rows` of `documents`, which are not copied."""

    documents: Sequence[str]
    rows: list[int]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return Selected(self.documents, self.rows[index])
        return self.documents[self.rows[index]]


@dataclass(frozen=True)
class Corpus:
    """Documents on both sides, and the values that identify them.

    Attributes:
        source: the source's name.
        train, evaluation: the documents, in the order of the source.
        digest: SHA-256, hexadecimal, of all documents that are not blank, in order, and of their sides.
    """

    source: str
    train: Sequence[str]
    evaluation: Sequence[str]
    digest: str

    def record(self) -> dict[str, Any]:
        """Return the values that identify the corpus, for JSON."""
        return {
            "source": self.source,
            "documents": {"train": len(self.train), "evaluation": len(self.evaluation)},
            "digest": self.digest,
        }


def read_corpus(source: str, *, share: float = 0.05, documents: int | None = None) -> Corpus:
    """Read and split a corpus.

    Args:
        source: one of those in `limitformer_papers.training.data.sources`, or several joined by "+".
        share: approximate share of documents for evaluation.
        documents: number of documents taken from the beginning of each source; None takes all.

    Raises:
        InputError: a source that cannot be read, or too few documents to have some on both sides.
    """
    share = require_real("share", share)
    require(0 < share < 1, f"share must lie between 0 and 1; got {share}. The default is 0.05.")
    documents = None if documents is None else require_count("documents", documents)
    require(isinstance(source, str) and bool(source.strip()), f"source must be a name; got {source!r}.")
    parts = [source] if Path(source).expanduser().exists() else source.split("+")
    texts = [read_source(part.strip(), documents) for part in parts]
    return split(source, texts[0] if len(texts) == 1 else Chained(texts), share)


class Chained(Sequence[str]):
    """Sequences in a row, which are not copied."""

    def __init__(self, parts: list[Sequence[str]]) -> None:
        self.parts = parts

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def __iter__(self) -> Iterator[str]:
        for part in self.parts:
            yield from part

    def __getitem__(self, index: Any) -> Any:
        for part in self.parts:
            if index < len(part):
                return part[index]
            index -= len(part)
        raise IndexError(index)


def split(source: str, documents: Sequence[str], share: float) -> Corpus:
    """Return the corpus of these documents, without blank ones."""
    sides: dict[bool, list[int]] = {False: [], True: []}
    whole = hashlib.sha256()
    for row, document in enumerate(documents):
        if document and not document.isspace():
            hashed = hash_of(document)
            evaluation = is_evaluation(hashed, share)
            sides[evaluation].append(row)
            whole.update(hashed + bytes([evaluation]))
    train, evaluation_rows = sides[False], sides[True]
    if not train or not evaluation_rows:
        raise InputError(
            f"{source} has {len(train)} documents to train on and {len(evaluation_rows)} to evaluate on; both are "
            f"needed. Nearest: more documents, a single file (its paragraphs are the documents), or another share "
            f"than {share:g}."
        )
    return Corpus(source, Selected(documents, train), Selected(documents, evaluation_rows), whole.hexdigest())


def hash_of(document: str) -> bytes:
    return hashlib.blake2b(document.encode("utf-8", "surrogatepass"), digest_size=HASH_BYTES).digest()


def is_evaluation(hashed: bytes, share: float) -> bool:
    """Return whether a document with this hash is for evaluation."""
    return int.from_bytes(hashed, "big") < share * 2 ** (8 * HASH_BYTES)
