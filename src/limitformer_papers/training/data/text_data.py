"""The data of the masked-language-model experiment: a corpus as sequences, with its tokenizer, computed once and
stored.

The folder is named after all that decides its content: the corpus's digest, the vocabulary, the length. So all runs
of a grid read the same tokens. The first run computes them; the others wait.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock
from transformers import PreTrainedTokenizerFast

from limitformer.base.files import check_writable
from limitformer.base.progress import delayed_notice
from limitformer_papers.training.data.corpus import Corpus, read_corpus
from limitformer_papers.training.data.sequences import Sequences, read_packed, write_packed
from limitformer_papers.training.data.tokenizer import load_tokenizer, save_tokenizer, train_tokenizer

LAST = "evaluation.npy"  # the last file to be written


@dataclass(frozen=True)
class TextData:
    """Sequences to train on and to evaluate on, their tokenizer, and the values that identify them."""

    tokenizer: PreTrainedTokenizerFast
    train: Sequences
    evaluation: Sequences
    record: dict[str, Any]


def text_data(source: str, vocabulary: int, length: int, folder_of_all: Path, documents: int | None = None) -> TextData:
    """Return packed sequences of `length` tokens; a first call writes them, later ones read them.

    Raises:
        InputError: a source that cannot be read, or a vocabulary that it does not allow.
    """
    with delayed_notice(f"Reading {source}") as begin:
        begin()
        corpus = read_corpus(source, documents=documents)
    folder = Path(folder_of_all) / f"text-{corpus.digest[:16]}-{vocabulary}-{length}"
    if not (folder / LAST).exists():
        check_writable(folder)
        with FileLock(folder / ".lock"), delayed_notice("Training the tokenizer") as begin:
            begin()
            if not (folder / LAST).exists():  # another run may just have written them
                write_text_data(corpus, vocabulary, length, folder)
    sides = {name: read_packed(folder / f"{name}.npy", length) for name in ("train", "evaluation")}
    record = corpus.record() | {"vocabulary": vocabulary, "length": length}
    return TextData(load_tokenizer(folder / "tokenizer"), sides["train"], sides["evaluation"], record)


def write_text_data(corpus: Corpus, vocabulary: int, length: int, folder: Path) -> None:
    """Train the tokenizer and write the sequences; the last file marks them as complete."""
    tokenizer = train_tokenizer(corpus.train, vocabulary)
    save_tokenizer(tokenizer, folder / "tokenizer")
    for name, documents in (("train", corpus.train), ("evaluation", corpus.evaluation)):
        write_packed(folder / f"{name}.npy", documents, tokenizer, length)
