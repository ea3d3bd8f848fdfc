r"""Sources of documents: Python's own source, texts on this machine, or a data set of Hugging Face `datasets`.

| source                              | documents, in this order                                                     |
|-------------------------------------|------------------------------------------------------------------------------|
| `stdlib`                            | .py files of this Python's standard library, without tests, sorted by path   |
| a folder                            | its .txt, .py and .md files, subfolders too, sorted by path                  |
| a file with one of these endings    | its paragraphs: blocks of lines between empty ones                           |
| a folder that `save_to_disk` wrote  | rows of the column "text"; of a `DatasetDict`, those of "train"              |
| `name[@revision][:configuration]`   | the same of a data set on the hub                                            |

BookCorpus is a loading script, which `datasets` no longer runs; the hub has it as Parquet at another revision. The
nearest to [ST, App. D.1], whose Wikipedia is 20220301.en, is thus
"wikimedia/wikipedia:20231101.en+bookcorpus/bookcorpus@refs/convert/parquet".
"""

import os
import re
import sysconfig
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import datasets
from datasets.exceptions import DatasetsError

from limitformer.base.errors import InputError, require
from limitformer.models.text import read_text

ENDINGS = (".txt", ".py", ".md")
COLUMN = "text"
FOREIGN = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
# Generated when Python is built, with that machine's paths.
BUILT = ("_sysconfigdata", "config-")
HUB_NAME = re.compile(r"(?P<name>[\w.-]+(/[\w.-]+)?)(@(?P<revision>[\w./-]+))?(:(?P<configuration>[\w.-]+))?")


def read_source(source: str, documents: int | None = None) -> Sequence[str]:
    """Return the first `documents` of one source (None: all), blank ones included.

    Raises:
        InputError: the source does not exist or cannot be read.
    """
    if source == "stdlib":
        return [read_text(path) for path in standard_library()[:documents]]
    path = Path(source).expanduser()
    if path.is_file():
        require(path.suffix in ENDINGS, f"{path} is not a text: a file must end in {', '.join(ENDINGS)}.")
        return re.split(r"\n\s*\n", read_text(path))[:documents]
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        return read_saved(path, documents)
    if path.is_dir():
        files = [file for file in path.rglob("*") if file.suffix in ENDINGS and file.is_file()]
        require(bool(files), f"No texts in the folder {path}: it needs files that end in {', '.join(ENDINGS)}.")
        return [
            read_text(file) for file in sorted(files, key=lambda file: file.relative_to(path).as_posix())[:documents]
        ]
    return read_hub(source, documents)


def standard_library() -> list[Path]:
    """Return the .py files of the standard library, without tests and files generated at build time."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for folder, inside, names in os.walk(root):
        inside[:] = [name for name in inside if is_library(name)]
        files += [Path(folder, name) for name in names if name.endswith(".py") and is_library(name)]
    require(bool(files), f"No .py files of the standard library in {root}; give a folder of texts instead.")
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())


def is_library(name: str) -> bool:
    """Return whether a file or folder of that name is the same on every machine with this Python."""
    return name not in FOREIGN and not name.startswith(BUILT)


def read_saved(folder: Path, documents: int | None) -> Sequence[str]:
    """Return the documents of a folder that `save_to_disk` wrote."""
    try:
        loaded = datasets.load_from_disk(str(folder))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{folder} is not whole: save_to_disk wrote it, but it cannot be loaded ({error}).") from error
    if isinstance(loaded, datasets.DatasetDict):
        splits = ", ".join(loaded)
        require("train" in loaded, f'{folder} has no split "train"; it has {splits}. Nearest: save the split you want.')
        loaded = loaded["train"]
    require_column(str(folder), loaded.column_names)
    return column(loaded if documents is None else loaded.select(range(min(documents, len(loaded)))))


def read_hub(source: str, documents: int | None) -> Sequence[str]:
    """Return the documents of a data set on the hub; a part is streamed, without a full download."""
    parts = HUB_NAME.fullmatch(source)
    if parts is None:
        raise InputError(f"No such file or folder: {source}.")
    try:
        loaded = datasets.load_dataset(
            parts["name"],
            parts["configuration"],
            revision=parts["revision"],
            split="train",
            streaming=documents is not None,
        )
        require_column(source, loaded.column_names)
        return column(loaded) if documents is None else [row[COLUMN] or "" for row in islice(loaded, documents)]
    except InputError:
        raise
    # ValueError is an unknown configuration or split, RuntimeError a loading script.
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{source} is neither a file or folder here nor a data set on the hub: {reason}") from error


def require_column(source: str, names: list[str] | None) -> None:
    """Raise `InputError` unless there is a column of texts."""
    known = names is not None and COLUMN in names
    require(known, f'{source} has no column "{COLUMN}"; it has {", ".join(names or ["none"])}. Rename one.')


def column(dataset: datasets.Dataset) -> Sequence[str]:
    """Return the texts, read from disk on demand: a Wikipedia does not fit into memory."""
    filled: Sequence[str] = dataset.with_format(None)[COLUMN]
    return filled
