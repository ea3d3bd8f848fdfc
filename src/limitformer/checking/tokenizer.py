"""The tokenizer in a checkpoint's folder: its data alone, copied to a folder of our own before transformers reads them.

A tokenizer's configuration can name code (`auto_map`) and other files (`tokenizer_file`, `fast_tokenizer_files`). Those
entries are left out of the copy; classes are those of the installed transformers.
"""

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from limitformer.base.errors import InputError, require
from limitformer.base.foreign import file_in, one_line, readable_name, small_file_in
from limitformer.models.serial import json_object
from limitformer.models.text import beginnings, read_text
from limitformer.weightless.configurations import LEFT_OUT

CONFIGURATION = "tokenizer_config.json"
DATA = (
    "tokenizer.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "sentencepiece.model",
    "spm.model",
)
UNREAD = LEFT_OUT | {"chat_template", "processor_class", "init_inputs", "fix_mistral_regex", "gguf_file", "cache_dir"}
MOST_DATA = 2**28  # bytes
CHARACTERS = 64  # of a text that are tried first for each token that is wanted


@dataclass
class FolderTokenizer:
    """The tokenizer of a checkpoint, read when the first text is encoded.

    Attributes:
        folder: of the checkpoint.
    """

    folder: Path
    loaded: Any = field(default=None, repr=False)

    def ids(self, text: str | Path, count: int) -> list[int]:
        """The first `count` ids of a text, or of the file it is in; fewer where it is shorter.

        As much of the text is read as decides them: a longer part must begin with the same ids.

        Raises:
            InputError: the folder holds no tokenizer that can be used, or the text cannot be read.
        """
        before: list[int] = []
        for part, whole in beginnings(text, CHARACTERS * count):
            now = self.encoded(part)
            if whole or (len(before) > count and before[:count] == now[:count]):
                break
            before = now
        return now[:count]

    def encoded(self, text: str) -> list[int]:
        """The ids of a text."""
        if self.loaded is None:
            self.loaded = tokenizer_in(self.folder)
        with one_line(f"the tokenizer in {readable_name(self.folder)} cannot encode the text"):
            ids = self.loaded(text)["input_ids"]
        known = isinstance(ids, list) and all(isinstance(each, int) for each in ids)
        require(known, f"the tokenizer in {self.folder} gives no ids.")
        return list(ids)


def folder_tokenizer(folder: Path) -> FolderTokenizer | None:
    """Of a checkpoint, or None where its folder has none."""
    return FolderTokenizer(folder) if any((folder / name).exists() for name in (*DATA, CONFIGURATION)) else None


def tokenizer_in(folder: Path) -> Any:
    """The tokenizer itself.

    Raises:
        InputError: transformers cannot make one of what the folder holds.
    """
    from transformers import AutoTokenizer

    name = readable_name(folder)
    with (
        TemporaryDirectory(prefix="limitformer-tokenizer-") as place,
        one_line(f"the tokenizer in {name} cannot be read"),
    ):
        copy_data(folder, Path(place))
        found = AutoTokenizer.from_pretrained(place, local_files_only=True, trust_remote_code=False)
    if not callable(found):
        raise InputError(f"the tokenizer in {folder} is a {type(found).__name__}, which encodes nothing.")
    return found


def copy_data(folder: Path, place: Path) -> None:
    """Copy a tokenizer's data; of its configuration and the model's, what names neither code nor files."""
    for name in DATA:
        if (folder / name).exists():
            file = file_in(folder, name)
            size = file.stat().st_size
            require(size <= MOST_DATA, f"{name} in {folder} has {size:,} bytes; at most {MOST_DATA:,} are read.")
            shutil.copyfile(file, place / name)
    own: dict[str, Any] = {}
    if (folder / CONFIGURATION).exists():
        file = small_file_in(folder, CONFIGURATION)
        own = json_object(read_text(file), str(file))
        own = {key: value for key, value in own.items() if key not in UNREAD and not key.endswith(("_file", "_files"))}
    for key in ("tokenizer_class", "model_type"):
        require(isinstance(own.get(key, ""), str | None), f"{key} in {CONFIGURATION} must be a word.")
    (place / CONFIGURATION).write_text(json.dumps(own), encoding="utf-8")
    file = small_file_in(folder, "config.json")
    family = json_object(read_text(file), str(file)).get("model_type")
    (place / "config.json").write_text(json.dumps({"model_type": family}), encoding="utf-8")
