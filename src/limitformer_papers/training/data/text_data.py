"""The data of the masked-language-model experiment: a corpus as sequences, with its tokenizer, made once and kept.

Kept in a folder named after all that decides it: the corpus's digest, the vocabulary, the length. So all runs of a
grid, and all processes of a run, read the same tokens. The first to come makes them; the others wait for it.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock
from transformers import PreTrainedTokenizerFast

from limitformer.base.errors import InputError
from limitformer.base.files import check_writable
from limitformer.base.progress import notice_if_slow
from limitformer_papers.training.data.corpus import Corpus, read_corpus
from limitformer_papers.training.data.sequences import Sequences, read_packed, write_packed
from limitformer_papers.training.data.tokenizer import load_tokenizer, save_tokenizer, train_tokenizer
from limitformer_papers.training.plan import rank

LAST = "evaluation.npy"  # of the files that are written
LONGEST = 3600.0  # seconds in which the main process makes them


@dataclass(frozen=True)
class TextData:
    """Sequences to train on and to evaluate on, their tokenizer, and what identifies them."""

    tokenizer: PreTrainedTokenizerFast
    train: Sequences
    evaluation: Sequences
    record: dict[str, Any]


def text_data(source: str, vocabulary: int, length: int, kept: Path, documents: int | None = None) -> TextData:
    """Packed sequences of `length` tokens; a first call writes them into `kept`, later ones read them.

    Raises:
        InputError: a source that cannot be read, a vocabulary that it does not allow, or nothing to read on this
            machine, where another one should have written.
    """
    with notice_if_slow(f"Reading {source}"):
        corpus = read_corpus(source, documents=documents)
    folder = Path(kept) / f"text-{corpus.digest[:16]}-{vocabulary}-{length}"
    if rank() > 0:
        wait_for(folder / LAST)
    elif not (folder / LAST).exists():
        make_alone(corpus, vocabulary, length, folder)
    sides = {name: read_packed(folder / f"{name}.npy", length) for name in ("train", "evaluation")}
    record = corpus.record() | {"vocabulary": vocabulary, "length": length}
    return TextData(load_tokenizer(folder / "tokenizer"), sides["train"], sides["evaluation"], record)


def wait_for(path: Path) -> None:
    """Until the main process has written it; if that fails, the launcher ends us too.

    Raises:
        InputError: it has not for an hour.
    """
    end = time.monotonic() + LONGEST
    while not path.exists():
        if time.monotonic() > end:
            raise InputError(
                f"The main process has not written {path} in {LONGEST:g} seconds, or not where this one looks. "
                "Nearest: a folder of runs (--out) on a disk that all machines share."
            )
        time.sleep(0.2)


def make_alone(corpus: Corpus, vocabulary: int, length: int, folder: Path) -> None:
    """Make the files, unless another run is doing so: then wait until it has."""
    check_writable(folder)
    with FileLock(folder / ".lock"), notice_if_slow("Training the tokenizer"):
        if not (folder / LAST).exists():
            made(corpus, vocabulary, length, folder)


def made(corpus: Corpus, vocabulary: int, length: int, folder: Path) -> None:
    """Train the tokenizer and write the sequences; the last file says that all are there."""
    tokenizer = train_tokenizer(corpus.train, vocabulary)
    save_tokenizer(tokenizer, folder / "tokenizer")
    for name, documents in (("train", corpus.train), ("evaluation", corpus.evaluation)):
        write_packed(folder / f"{name}.npy", documents, tokenizer, length)
