"""Options, outcomes and tables shared by the commands of `limitformer train`."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Column, Table

from limitformer.base.errors import InputError, require, require_count
from limitformer.cli.report import errors, screen

if TYPE_CHECKING:
    from limitformer_papers.training.interrupts import Budget

OUT = Annotated[Path, typer.Option(help="Folder of all runs; each has its own folder in it.")]
WORKERS = Annotated[int, typer.Option(help="Number of runs at a time.")]
THREADS = Annotated[
    int | None, typer.Option(help="Number of threads of each run, on a CPU.", show_default="cores over --workers")
]
MINUTES = Annotated[
    float | None,
    typer.Option(
        help="Wall time of the command; then runs save and stop, with exit code 75, and the same command resumes.",
        show_default="until all is done",
    ),
]
TF32 = Annotated[bool, typer.Option(help="Faster float32 products with 10-bit factors, on an Ampere GPU or later.")]
COMPILE = Annotated[bool, typer.Option("--compile/--no-compile", help="Compile the steps (torch.compile), on a GPU.")]
Summary = Mapping[str, Any]


def budget_of(minutes: float | None) -> "Budget | None":
    """Return the time budget of the command, which begins now."""
    from limitformer_papers.training.interrupts import Budget

    return None if minutes is None else Budget(minutes)


def be_quiet() -> None:
    """Let only the first of torchrun's processes print."""
    screen.quiet = errors.quiet = os.environ.get("RANK", "0") != "0"


def names_of(option: str, text: str, known: Sequence[str]) -> list[str]:
    """Return the names in a list with commas, or raise `InputError` for an unknown one."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        require(name in known, f"--{option} must be of {', '.join(known)}; got {name!r}.")
    require(len(set(names)) == len(names), f"--{option} lists a name twice; got {text!r}.")
    return names


def threads_of(threads: int | None, workers: int) -> int | None:
    """Return the number of threads of each run."""
    workers = require_count("workers", workers)
    return threads if threads is not None or workers == 1 else max(1, (os.cpu_count() or 1) // workers)


def finish_all(
    runs: Sequence[Any],
    make: Callable[[Any], Summary],
    workers: int,
    line: Callable[[Any, Summary], str],
    budget: "Budget | None" = None,
) -> list[tuple[Any, Summary]]:
    """Make all runs, print how each ended, and return them with their summaries; each reason to fail is printed once.

    Raises:
        InputError: some runs failed; the others are finished.
        TrainingInterrupted, GridInterrupted: Ctrl-C, or the budget is spent.
    """
    from limitformer.base.progress import suggest_quicker
    from limitformer_papers.training.grid import run_all
    from limitformer_papers.training.interrupts import within

    finished: list[tuple[Any, Summary]] = []
    failed: list[int] = []
    reasons: dict[str, int] = {}  # why runs failed → the first of them
    with within(budget), suggest_quicker("--preset tiny or fewer steps or epochs are quicker."):
        for number, (run, outcome) in enumerate(run_all(runs, make, workers=workers), 1):
            if isinstance(outcome, InputError):
                failed.append(number)
                first = reasons.setdefault(str(outcome), number)
                text = f"failed: {outcome}" if first == number else f"failed as {first}/{len(runs)} did"
            else:
                finished.append((run, outcome))
                text = line(run, outcome)
            if len(runs) > 1:
                errors.print(f"{number}/{len(runs)} {text}", highlight=False, soft_wrap=True, markup=False)
    if failed:
        why = f"{len(reasons)} reasons" if len(reasons) > 1 else "reason"
        several = f"{len(failed)} of {len(runs)} runs failed, for the {why} above."
        raise InputError(next(iter(reasons)) if len(runs) == 1 else several)
    return finished


def spread(values: Sequence[float]) -> str:
    """Return mean and standard deviation, or the only value."""
    mean = sum(values) / len(values) if values else float("nan")
    if len(values) < 2:
        return f"{mean:.3f}"
    deviation = (sum((value - mean) ** 2 for value in values) / (len(values) - 1)) ** 0.5
    return f"{mean:.3f} ± {deviation:.3f}"


def table_over_seeds(
    title: str, finished: Sequence[tuple[Any, Summary]], place: Callable[[Any], dict[str, str]], names: Sequence[str]
) -> Table:
    """Return a table with one row per place, where runs differ in their seed; `names` are averaged over seeds."""
    groups: dict[tuple[str, ...], list[Summary]] = {}
    for run, summary in finished:
        groups.setdefault(tuple(place(run).values()), []).append(summary)
    titles = [
        {"eval_loss": "held out", "train_loss": "training loss"}.get(name, name.removeprefix("eval_")) for name in names
    ]
    headings = (*place(finished[0][0]), "seeds", "diverged", *titles)
    table = Table(*(Column(name, no_wrap=True) for name in headings), title=title, title_justify="left", box=None)
    for key, summaries in sorted(groups.items()):
        ended = [one for one in summaries if not one["diverged"]]
        values = [spread([one[name] for one in ended]) if ended else "–" for name in names]
        table.add_row(*key, str(len(summaries)), str(len(summaries) - len(ended)), *values)
    return table
