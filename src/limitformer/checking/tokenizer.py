"""The tokenizer in a checkpoint's folder: its data alone, copied to a folder of our own before transformers reads them.

A tokenizer's configuration can name code (`auto_map`) and other files (`tokenizer_file`, `vocab`), and so can its map
of special tokens, as transformers takes the entries of both for arguments. Of both, the copy holds the tokens and the
plain options that are known here, and nothing else; classes are those of the installed transformers.
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
OF_BYTES = ("ByT5Tokenizer", "CanineTokenizer", "PerceiverTokenizer")  # which need no vocabulary
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
        for part, whole in prefixes(text, CHARACTERS * count):
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


@escaped_errors()
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
        check_vocabulary(folder, Path(place))
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
    own = object_in(folder, CONFIGURATION)
    kind = own.get("tokenizer_class")
    require(isinstance(kind, str | None), f"tokenizer_class in {CONFIGURATION} must be a word.")
    (place / CONFIGURATION).write_text(json.dumps(known_of(own)), encoding="utf-8")
    if (folder / SPECIAL).exists():
        (place / SPECIAL).write_text(json.dumps(known_of(object_in(folder, SPECIAL))), encoding="utf-8")
    family = object_in(folder, "config.json").get("model_type")
    (place / "config.json").write_text(json.dumps({"model_type": family}), encoding="utf-8")


def object_in(folder: Path, name: str) -> dict[str, Any]:
    """The JSON object in a file of the folder, empty where there is none."""
    if not (folder / name).exists():
        return {}
    file = small_file_in(folder, name)
    return json_object(read_text(file), str(file))


def known_of(values: dict[str, Any]) -> dict[str, Any]:
    """The entries that are special tokens or plain options."""
    found = {}
    for name, value in values.items():
        if name in OPTIONS and all(is_plain(each) for each in (value if isinstance(value, list) else [value])):
            found[name] = value
        elif name in TOKENS:
            found[name] = token_of(value)
        elif name in SETS_OF_TOKENS and isinstance(value, list):
            found[name] = [token_of(each) for each in value]
        elif name == "added_tokens_decoder" and isinstance(value, dict):
            strange = [key for key in value if not key.isdecimal()]
            require(not strange, f"{name} of a tokenizer maps numbers to tokens; got {strange[:1]!r:.60}.")
            found[name] = {key: token_of(each) for key, each in value.items()}
        elif name in SETS_OF_TOKENS and isinstance(value, dict):  # by the name of what they are for
            found[name] = {key: token_of(each) for key, each in value.items() if key.endswith("_token")}
    return found


def is_plain(value: Any) -> bool:
    """Whether it is a number, a switch, or a text that is no path."""
    return value is None or isinstance(value, bool | int | float) or (isinstance(value, str) and not set(value) & PATH)


def token_of(value: Any) -> Any:
    """A token as it was written: its text, with how it stands among others."""
    if isinstance(value, dict):
        return {key: each for key, each in value.items() if key in TOKEN}
    require(isinstance(value, str | None), f"a special token must be a text; got {value!r:.60}.")
    return value


def check_vocabulary(folder: Path, place: Path) -> None:
    """Raise `InputError` where the folder's tokenizer has no vocabulary, so that it would know no word."""
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
