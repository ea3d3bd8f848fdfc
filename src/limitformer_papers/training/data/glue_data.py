r"""CoLA, MRPC and RTE from the files in which they are published, with no quoting: a " in a sentence is a ".

| task | files of "train"; of "dev"                                        | columns between tabs                      |
|------|-------------------------------------------------------------------|-------------------------------------------|
| CoLA | in_domain_train.tsv; in_domain_dev.tsv with out_of_domain_dev.tsv | source, label, mark, sentence; no header  |
|      | train.tsv; dev.tsv (GLUE's dev.tsv is both of the above)          | the same                                  |
| MRPC | train.tsv; dev.tsv (GLUE)                                         | Quality, IDs, #1 String, #2 String        |
|      | msr_paraphrase_train.txt; msr_paraphrase_test.txt (not GLUE's)    | the same                                  |
| RTE  | train.tsv; dev.tsv                                                | index, sentence1, sentence2, label        |

The first complete set of files is read. Files are searched in the folder, in its subfolder TASK, as in GLUE's archives,
and in `raw`, as in CoLA's own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from limitformer.base.errors import InputError, require
from limitformer.models.text import read_text

Task = Literal["CoLA", "MRPC", "RTE"]
Split = Literal["train", "dev"]
SPLITS: tuple[Split, ...] = ("train", "dev")


@dataclass(frozen=True)
class Example:
    """One or two sentences and their class: 1 is acceptable (CoLA), a paraphrase (MRPC), not entailed (RTE)."""

    sentences: tuple[str, ...]
    label: int


@dataclass(frozen=True, kw_only=True)
class Format:
    """The file format of a task.

    Attributes:
        files: for each split, alternative sets of files.
        header: column names in the first line; None without such a line.
        columns: number of columns.
        label, sentences: indices of these columns.
        labels: text of the label's column for 0, 1.
    """

    files: dict[Split, tuple[tuple[str, ...], ...]]
    header: tuple[str, ...] | None
    columns: int
    label: int
    sentences: tuple[int, ...]
    labels: tuple[str, str]


GLUE_FILES: dict[Split, tuple[str, ...]] = {"train": ("train.tsv",), "dev": ("dev.tsv",)}
FORMATS: dict[Task, Format] = {
    "CoLA": Format(
        files={
            "train": (("in_domain_train.tsv",), GLUE_FILES["train"]),
            "dev": (("in_domain_dev.tsv", "out_of_domain_dev.tsv"), GLUE_FILES["dev"]),
        },
        header=None,
        columns=4,
        label=1,
        sentences=(3,),
        labels=("0", "1"),
    ),
    "MRPC": Format(
        files={
            "train": (GLUE_FILES["train"], ("msr_paraphrase_train.txt",)),
            "dev": (GLUE_FILES["dev"], ("msr_paraphrase_test.txt",)),
        },
        header=("Quality", "#1 ID", "#2 ID", "#1 String", "#2 String"),
        columns=5,
        label=0,
        sentences=(3, 4),
        labels=("0", "1"),
    ),
    "RTE": Format(
        files={"train": (GLUE_FILES["train"],), "dev": (GLUE_FILES["dev"],)},
        header=("index", "sentence1", "sentence2", "label"),
        columns=4,
        label=3,
        sentences=(1, 2),
        labels=("entailment", "not_entailment"),
    ),
}
TASKS = tuple(FORMATS)


def read_glue(task: Task, folder: str | Path, split: Split) -> list[Example]:
    """Return the examples of a split.

    Raises:
        InputError: an unknown task or split, missing files, or a line that is not as the format has it.
    """
    require(task in FORMATS, f"task must be one of {', '.join(TASKS)}; got {task!r}.")
    require(split in SPLITS, f"split must be one of {', '.join(SPLITS)}; got {split!r}.")
    format_ = FORMATS[task]
    paths = find_files(task, Path(folder).expanduser(), format_.files[split])
    return [example for path in paths for example in read_examples(path, format_)]


def find_files(task: Task, folder: Path, sets: Sequence[Sequence[str]]) -> list[Path]:
    """Return the first complete set of files."""
    require(folder.is_dir(), f"No such folder for {task}: {folder}.")
    for names in sets:
        for place in (folder, folder / task, folder / "raw"):
            paths = [place / name for name in names]
            if all(path.is_file() for path in paths):
                return paths
    wanted = ", or ".join(" with ".join(names) for names in sets)
    raise InputError(f"{task} is not in {folder}: it needs {wanted}.")


def read_examples(path: Path, format_: Format) -> list[Example]:
    # Not splitlines, which also splits at characters such as U+2028 within sentences.
    lines = read_text(path).removeprefix("\ufeff").replace("\r\n", "\n").removesuffix("\n").split("\n")
    rows = [(number, line.split("\t")) for number, line in enumerate(lines, 1)]
    if format_.header is not None:
        first = tuple(rows[0][1])
        message = f"{path}:1: the columns must be {', '.join(format_.header)}; got {', '.join(first)}."
        require(first == format_.header, message)
        rows = rows[1:]
    require(bool(rows) and rows[0][1] != [""], f"{path} has no examples.")
    return [example_of(f"{path}:{number}", row, format_) for number, row in rows]


def example_of(place: str, row: list[str], format_: Format) -> Example:
    require(len(row) == format_.columns, f"{place}: a line has {format_.columns} columns between tabs; got {len(row)}.")
    label, sentences = row[format_.label], tuple(row[column].strip() for column in format_.sentences)
    require(label in format_.labels, f"{place}: the label must be {' or '.join(format_.labels)}; got {label!r}.")
    require(all(sentences), f"{place}: a sentence is empty.")
    return Example(sentences, format_.labels.index(label))
