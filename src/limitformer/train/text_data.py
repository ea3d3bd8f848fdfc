"""The data of the masked-language-model experiment: a corpus as sequences, with its tokenizer, made once and kept.

Kept in a folder named after all that decides it: the corpus's digest, the vocabulary, the length. So all runs of a
grid, and all processes of a run, read the same tokens.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from limitformer.progress import announced
from limitformer.results import write_whole
from limitformer.train.corpus import Corpus, read_corpus
from limitformer.train.plan import rank
from limitformer.train.sequences import Sequences, packed
from limitformer.train.tokenizer import load_tokenizer, save_tokenizer, train_tokenizer

LAST = "evaluation.npz"  # of the files that are written


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
        InputError: a source that cannot be read, or a vocabulary that it does not allow.
    """
    with announced(f"Reading {source}"):
        corpus = read_corpus(source, documents=documents)
    folder = Path(kept) / f"text-{corpus.digest[:16]}-{vocabulary}-{length}"
    if rank() > 0:
        wait_for(folder / LAST)
    elif not (folder / LAST).exists():
        with announced("Training the tokenizer"):
            made(corpus, vocabulary, length, folder)
    sides = {name: read_sequences(folder / f"{name}.npz") for name in ("train", "evaluation")}
    record = corpus.record() | {"vocabulary": vocabulary, "length": length}
    return TextData(load_tokenizer(folder / "tokenizer"), sides["train"], sides["evaluation"], record)


def wait_for(path: Path) -> None:
    """Until the main process has written it; if that fails, the launcher ends us too."""
    while not path.exists():
        time.sleep(0.2)


def made(corpus: Corpus, vocabulary: int, length: int, folder: Path) -> None:
    """Train the tokenizer and write the sequences; the last file says that all are there."""
    tokenizer = train_tokenizer(corpus.train, vocabulary)
    sides = {
        "train": packed(corpus.train, tokenizer, length),
        "evaluation": packed(corpus.evaluation, tokenizer, length),
    }
    save_tokenizer(tokenizer, folder / "tokenizer")
    for name, sequences in sides.items():
        write_sequences(folder / f"{name}.npz", sequences)


def write_sequences(path: Path, sequences: Sequences) -> None:
    """Write tokens and starts, whole or not at all."""

    def write(whole: Path) -> None:
        with whole.open("wb") as file:
            np.savez(file, tokens=sequences.tokens, starts=sequences.starts)

    write_whole(path, write)


def read_sequences(path: Path) -> Sequences:
    """What `write_sequences` wrote."""
    with np.load(path, allow_pickle=False) as arrays:
        return Sequences(arrays["tokens"], arrays["starts"])
