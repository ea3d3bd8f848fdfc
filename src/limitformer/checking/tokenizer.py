"""Load the tokenizer of a checkpoint's folder: only its data, copied to a temporary folder that transformers reads.

A tokenizer's configuration and its map of special tokens can name code (`auto_map`) and other files (`tokenizer_file`,
`vocab`), because transformers takes their entries for arguments. The copy holds only the tokens and the plain options
that are listed here; classes are those of the installed transformers.
"""

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from limitformer.base.errors import InputError, require
from limitformer.base.foreign import escaped_errors, file_in, one_line, readable_name, small_file_in
from limitformer.models.serial import json_object
from limitformer.models.text import prefixes, read_text

CONFIGURATION, SPECIAL = "tokenizer_config.json", "special_tokens_map.json"
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
DATA = (*VOCABULARY, "added_tokens.json")
OF_BYTES = ("ByT5Tokenizer", "CanineTokenizer", "PerceiverTokenizer")  # these need no vocabulary
TOKENS = {f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")}
SETS_OF_TOKENS = {"additional_special_tokens", "extra_special_tokens", "added_tokens_decoder"}
TOKEN = {"content", "single_word", "lstrip", "rstrip", "normalized", "special", "__type"}
OPTIONS = {"tokenizer_class", "model_max_length", "max_len", "padding_side", "truncation_side", "model_input_names"}
OPTIONS |= {"add_prefix_space", "add_bos_token", "add_eos_token", "add_dummy_prefix_space", "trim_offsets", "errors"}
OPTIONS |= {"do_lower_case", "do_lowercase", "do_basic_tokenize", "never_split", "strip_accents", "keep_accents"}
OPTIONS |= {"tokenize_chinese_chars", "remove_space", "do_lowercase_and_remove_accent", "normalization", "legacy"}
OPTIONS |= {"clean_up_tokenization_spaces", "spaces_between_special_tokens", "split_special_tokens", "offset"}
OPTIONS |= {"extra_ids", "src_lang", "tgt_lang", "language", "task", "predict_timestamps", "add_special_tokens"}
PATH = set("/\\")
MOST_DATA = 2**28  # bytes
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
    return FolderTokenizer(folder) if any((folder / name).exists() for name in (*DATA, CONFIGURATION)) else None


@escaped_errors()
def tokenizer_in(folder: Path) -> Any:
    """Load the tokenizer.

    Raises:
        InputError: transformers cannot build one from the files of the folder.
    """
    from transformers import AutoTokenizer

    name = readable_name(folder)
    with (
        TemporaryDirectory(prefix="limitformer-tokenizer-") as place,
        one_line(f"the tokenizer in {name} cannot be read"),
    ):
        copy_data(folder, Path(place))
        check_vocabulary(folder, Path(place))
        tokenizer = AutoTokenizer.from_pretrained(place, local_files_only=True, trust_remote_code=False)
    if not callable(tokenizer):
        raise InputError(f"the tokenizer in {folder} is a {type(tokenizer).__name__}, which cannot encode text.")
    return tokenizer


def copy_data(folder: Path, place: Path) -> None:
    """Copy a tokenizer's data, and of both configurations only entries that name neither code nor files."""
    for name in DATA:
        if (folder / name).exists():
            file = file_in(folder, name)
            size = file.stat().st_size
            require(size <= MOST_DATA, f"{name} in {folder} has {size:,} bytes; at most {MOST_DATA:,} are read.")
            shutil.copyfile(file, place / name)
    own = object_in(folder, CONFIGURATION)
    kind = own.get("tokenizer_class")
    require(isinstance(kind, str | None), f"tokenizer_class in {CONFIGURATION} must be a word.")
    (place / CONFIGURATION).write_text(json.dumps(safe_entries(own)), encoding="utf-8")
    if (folder / SPECIAL).exists():
        (place / SPECIAL).write_text(json.dumps(safe_entries(object_in(folder, SPECIAL))), encoding="utf-8")
    family = object_in(folder, "config.json").get("model_type")
    (place / "config.json").write_text(json.dumps({"model_type": family}), encoding="utf-8")


def object_in(folder: Path, name: str) -> dict[str, Any]:
    """Return the JSON object in a file of the folder, empty if there is no such file."""
    if not (folder / name).exists():
        return {}
    file = small_file_in(folder, name)
    return json_object(read_text(file), str(file))


def safe_entries(values: dict[str, Any]) -> dict[str, Any]:
    """Return the entries that are special tokens or plain options."""
    entries: dict[str, Any] = {}
    for name, value in values.items():
        if name in OPTIONS and all(is_plain(each) for each in (value if isinstance(value, list) else [value])):
            entries[name] = value
        elif name in TOKENS:
            entries[name] = token_of(value)
        elif name in SETS_OF_TOKENS and isinstance(value, list):
            entries[name] = [token_of(each) for each in value]
        elif name == "added_tokens_decoder" and isinstance(value, dict):
            strange = [key for key in value if not key.isdecimal()]
            require(not strange, f"{name} of a tokenizer maps numbers to tokens; got {strange[:1]!r:.60}.")
            entries[name] = {key: token_of(each) for key, each in value.items()}
        elif name in SETS_OF_TOKENS and isinstance(value, dict):  # by the purpose of each token
            entries[name] = {key: token_of(each) for key, each in value.items() if key.endswith("_token")}
    return entries


def is_plain(value: Any) -> bool:
    """Return whether a value is a number, a switch, or a text that is not a path."""
    return value is None or isinstance(value, bool | int | float) or (isinstance(value, str) and not set(value) & PATH)


def token_of(value: Any) -> Any:
    """Return a token as it was written: its text, and how it combines with others."""
    if isinstance(value, dict):
        return {key: each for key, each in value.items() if key in TOKEN}
    require(isinstance(value, str | None), f"a special token must be a text; got {value!r:.60}.")
    return value


def check_vocabulary(folder: Path, place: Path) -> None:
    """Raise `InputError` if the folder's tokenizer has no vocabulary."""
    there = [name for name in VOCABULARY if (place / name).exists()]
    own = object_in(place, CONFIGURATION).get("tokenizer_class") or ""
    family = object_in(place, "config.json").get("model_type")
    if not there and (own.removesuffix("Fast") in OF_BYTES or family in ("canine", "perceiver")):
        return
    require(
        bool(there),
        f"The tokenizer in {folder} has no vocabulary: there is no tokenizer.json, nor any of "
        f"{', '.join(VOCABULARY[1:])}. Nearest: tokenizer.save_pretrained into the folder, or token ids for a text.",
    )
    half = {"vocab.json": "merges.txt", "merges.txt": "vocab.json"}.get(there[0]) if len(there) == 1 else None
    require(half is None, f"The tokenizer in {folder} has {there[0]}, but neither {half} nor tokenizer.json beside it.")
