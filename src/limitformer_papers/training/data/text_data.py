"""The data of the masked-language-model experiment: a corpus as sequences, with its tokenizer, computed once and
stored.

The folder is named after all that decides its content: the corpus's digest, the vocabulary, the length. So all runs
of a grid, and all processes of a run, read the same tokens. The first process computes them; the others wait.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock
from transformers import PreTrainedTokenizerFast

from limitformer.base.errors import InputError
from limitformer.base.files import check_writable
from limitformer.base.progress import delayed_notice
from limitformer_papers.training.data.corpus import Corpus, read_corpus
from limitformer_papers.training.data.sequences import Sequences, read_packed, write_packed
from limitformer_papers.training.data.tokenizer import load_tokenizer, save_tokenizer, train_tokenizer
from limitformer_papers.training.plan import rank

LAST = "evaluation.npy"  # the last file to be written
LONGEST = 3600.0  # seconds that other processes wait


@dataclass(frozen=True)
class TextData:
    """Sequences to train on and to evaluate on, their tokenizer, and the values that identify them."""

    tokenizer: PreTrainedTokenizerFast
    train: Sequences
    evaluation: Sequences
    record: dict[str, Any]


def text_data(source: str, vocabulary: int, length: int, folder_of_all: Path, documents: int | None = None) -> TextData:
    """Return packed sequences of `length` tokens; a first call writes them into `kept`, later ones read them.

    Raises:
        InputError: a source that cannot be read, a vocabulary that it does not allow, or no files on this machine
            after another one should have written them.
    """
    with delayed_notice(f"Reading {source}") as begin:
        begin()
        corpus = read_corpus(source, documents=documents)
    folder = Path(folder_of_all) / f"text-{corpus.digest[:16]}-{vocabulary}-{length}"
    if rank() > 0:
        wait_for(folder / LAST)
    elif not (folder / LAST).exists():
        make_alone(corpus, vocabulary, length, folder)
    sides = {name: read_packed(folder / f"{name}.npy", length) for name in ("train", "evaluation")}
    record = corpus.record() | {"vocabulary": vocabulary, "length": length}
    return TextData(load_tokenizer(folder / "tokenizer"), sides["train"], sides["evaluation"], record)


def wait_for(path: Path) -> None:
    """Wait until the main process has written the file; if it fails, the launcher ends this process too.

    Raises:
        InputError: the file is missing after an hour.
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
    """Write the files, or wait while another run does so."""
    check_writable(folder)
    with FileLock(folder / ".lock"), delayed_notice("Training the tokenizer") as begin:
        begin()
        if not (folder / LAST).exists():
            write_text_data(corpus, vocabulary, length, folder)


def write_text_data(corpus: Corpus, vocabulary: int, length: int, folder: Path) -> None:
    """Train the tokenizer and write the sequences; the last file marks them as complete."""
    tokenizer = train_tokenizer(corpus.train, vocabulary)
    save_tokenizer(tokenizer, folder / "tokenizer")
    for name, documents in (("train", corpus.train), ("evaluation", corpus.evaluation)):
        write_packed(folder / f"{name}.npy", documents, tokenizer, length)
