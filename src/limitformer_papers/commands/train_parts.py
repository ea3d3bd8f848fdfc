"""What the commands of `limitformer train` share: options, the runs one after the other, and their table."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Column, Table

from limitformer.base.errors import InputError, require, require_count
from limitformer.cli.report import errors, screen

OUT = Annotated[Path, typer.Option(help="Folder of the runs, one folder each.")]
WORKERS = Annotated[int, typer.Option(help="Runs at a time.")]
THREADS = Annotated[
    int | None, typer.Option(help="Threads of each run, on a CPU.", show_default="cores over --workers")
]
Summary = Mapping[str, Any]


def be_quiet() -> None:
    """Transformers' reports and bars say what ours say; of several processes of torchrun the first alone speaks."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    screen.quiet = errors.quiet = os.environ.get("RANK", "0") != "0"


def names_of(option: str, text: str, known: Sequence[str]) -> list[str]:
    """The names in a list with commas, or `InputError` for one that is not known."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        require(name in known, f"--{option} must be of {', '.join(known)}; got {name!r}.")
    require(len(set(names)) == len(names), f"--{option} has a name twice; got {text!r}.")
    return names


def threads_of(threads: int | None, workers: int) -> int | None:
    """What each run gets."""
    workers = require_count("workers", workers)
    return threads if threads is not None or workers == 1 else max(1, (os.cpu_count() or 1) // workers)


def followed(
    runs: Sequence[Any], make: Callable[[Any], Summary], workers: int, line: Callable[[Any, Summary], str]
) -> list[tuple[Any, Summary]]:
    """Make all runs and say how each ended; those that ended.

    Raises:
        InputError: some failed; the others are done.
    """
    from limitformer.base.progress import suggest_quicker

    with suggest_quicker("--preset tiny or fewer steps or epochs are quicker."):
        finished, failed = outcomes(runs, make, workers, line)
    require(not failed, failed_message(failed, len(runs)))
    return finished


def outcomes(
    runs: Sequence[Any], make: Callable[[Any], Summary], workers: int, line: Callable[[Any, Summary], str]
) -> tuple[list[tuple[Any, Summary]], list[InputError]]:
    """Make all runs, print how each ended, and return those that finished and the errors of those that failed."""
    from limitformer_papers.training.grid import run_all

    finished: list[tuple[Any, Summary]] = []
    failed: list[InputError] = []
    for number, (run, outcome) in enumerate(run_all(runs, make, workers=workers), 1):
        if isinstance(outcome, InputError):
            failed.append(outcome)
            said = f"failed: {outcome}"
        else:
            finished.append((run, outcome))
            said = line(run, outcome)
        if len(runs) > 1:
            errors.print(f"{number}/{len(runs)} {said}", highlight=False, soft_wrap=True, markup=False)
    return finished, failed


def failed_message(failed: Sequence[InputError], number: int) -> str:
    """What went wrong, of so many runs."""
    if not failed or number == 1:
        return "".join(map(str, failed))
    return f"{len(failed)} of {number} runs failed, the first with: {failed[0]}"


def spread(values: Sequence[float]) -> str:
    """Mean and standard deviation, or the one value."""
    mean = sum(values) / len(values) if values else float("nan")
    if len(values) < 2:
        return f"{mean:.3f}"
    deviation = (sum((value - mean) ** 2 for value in values) / (len(values) - 1)) ** 0.5
    return f"{mean:.3f} ± {deviation:.3f}"


def table_over_seeds(
    title: str, finished: Sequence[tuple[Any, Summary]], place: Callable[[Any], dict[str, str]], names: Sequence[str]
) -> Table:
    """One row for each place, the runs of which differ in their seed; `names` of the summaries are meant over them."""
    groups: dict[tuple[str, ...], list[Summary]] = {}
    for run, summary in finished:
        groups.setdefault(tuple(place(run).values()), []).append(summary)
    shown = [
        {"eval_loss": "held out", "train_loss": "training loss"}.get(name, name.removeprefix("eval_")) for name in names
    ]
    headings = (*place(finished[0][0]), "seeds", "diverged", *shown)
    table = Table(*(Column(name, no_wrap=True) for name in headings), title=title, title_justify="left", box=None)
    for key, summaries in sorted(groups.items()):
        ended = [one for one in summaries if not one["diverged"]]
        values = [spread([one[name] for one in ended]) if ended else "–" for name in names]
        table.add_row(*key, str(len(summaries)), str(len(summaries) - len(ended)), *values)
    return table
