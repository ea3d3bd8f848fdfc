"""Load the tokenizer of a checkpoint's folder by transformers, without code of the folder."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from limitformer.base.errors import require
from limitformer.base.foreign import escaped_errors, one_line, readable_name
from limitformer.models.text import prefixes
from limitformer.weightless.configurations import quiet_transformers

CONFIGURATION = "tokenizer_config.json"
VOCABULARY = (
    "tokenizer.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "sentencepiece.model",
    "spm.model",
)
OF_BYTES = ("ByT5Tokenizer", "CanineTokenizer", "PerceiverTokenizer")  # these need no vocabulary
CHARACTERS = 64  # of a text, for each token, in the first attempt


@dataclass
class FolderTokenizer:
    """The tokenizer of a checkpoint, loaded when the first text is encoded.

    Attributes:
        folder: the checkpoint's folder.
    """

    folder: Path
    loaded: Any = field(default=None, repr=False)

    def ids(self, text: str | Path, count: int) -> list[int]:
        """Return the first `count` ids of a text, or of the file it is in; fewer if it is shorter.

        Only as much of the text is read as decides them: a longer part must begin with the same ids.

        Raises:
            InputError: the folder holds no usable tokenizer, or the text cannot be read.
        """
        before: list[int] = []
        for part, whole in prefixes(text, CHARACTERS * count):
            now = self.encode(part)
            if whole or (len(before) > count and before[:count] == now[:count]):
                break
            before = now
        return now[:count]

    def encode(self, text: str) -> list[int]:
        if self.loaded is None:
            self.loaded = tokenizer_in(self.folder)
        with one_line(f"the tokenizer in {readable_name(self.folder)} cannot encode the text"):
            ids = self.loaded(text)["input_ids"]
        valid = isinstance(ids, list) and all(isinstance(each, int) for each in ids)
        require(valid, f"the tokenizer in {self.folder} gives no ids.")
        return list(ids)


def folder_tokenizer(folder: Path) -> FolderTokenizer | None:
    """Return the tokenizer of a checkpoint, or None if its folder has none."""
    return FolderTokenizer(folder) if any((folder / name).exists() for name in (*VOCABULARY, CONFIGURATION)) else None


@escaped_errors()
def tokenizer_in(folder: Path) -> Any:
    """Load the tokenizer.

    Raises:
        InputError: transformers cannot build one from the files of the folder.
    """
    from transformers import AutoTokenizer

    with quiet_transformers(), one_line(f"the tokenizer in {readable_name(folder)} cannot be read"):
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        kind = type(tokenizer).__name__.removesuffix("Fast")
    require(
        any((folder / name).exists() for name in VOCABULARY) or kind in OF_BYTES,
        f"The tokenizer in {folder} has no vocabulary: there is no tokenizer.json, nor any of "
        f"{', '.join(VOCABULARY[1:])}. Nearest: tokenizer.save_pretrained into the folder, or token ids for a text.",
    )
    return tokenizer
