"""`limitformer train glue`: fine-tuning on tasks of GLUE."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from limitformer.cli.endings import begin_work
from limitformer.cli.report import errors_in_one_line, screen
from limitformer.cli.sphere_options import parse_counts
from limitformer_papers.commands.train_parts import (
    OUT,
    THREADS,
    WORKERS,
    be_quiet,
    finish_all,
    names_of,
    table_over_seeds,
    threads_of,
)

if TYPE_CHECKING:
    from limitformer_papers.training.tasks.glue import GlueRun


def glue(
    pretrained: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run of `train mlm`.")],
    data: Annotated[Path, typer.Option(help="Folder with the tasks' files as published.")],
    task: Annotated[str, typer.Option(help="CoLA, MRPC or RTE; separate several by commas.")] = "CoLA",
    out: OUT = Path("runs/glue"),
    epochs: Annotated[int, typer.Option(help="Number of epochs.")] = 5,
    learning_rate: Annotated[float, typer.Option(help="Learning rate after the warm-up.")] = 5e-4,
    batch: Annotated[int, typer.Option(help="Sentences or pairs per step.")] = 16,
    seed: Annotated[str, typer.Option(help="Seeds of the new head and of the order of the data.")] = "0",
    workers: WORKERS = 1,
    threads: THREADS = None,
) -> None:
    """Fine-tune a pretrained model on tasks of GLUE [ST, Table 2].

    For example: limitformer train glue runs/shaped-learn-d18-gamma0.2-lr0.001-seed0 --task CoLA --data glue/CoLA
    """
    with errors_in_one_line():
        be_quiet()
        from limitformer_papers.training.tasks.glue import GlueRun, Task, run_glue

        begin_work()
        tasks: Any = names_of("task", task, get_args(Task))
        course: Any = {"epochs": epochs, "learning_rate": learning_rate, "batch": batch}
        seeds = parse_counts("seed", seed)
        runs = [GlueRun(pretrained=pretrained, task=one, seed=k, **course) for one in tasks for k in seeds]
        make = partial(run_glue, data=data, out=out, threads=threads_of(threads, workers))
        finished = finish_all(runs, make, workers, line_of)
        for one in tasks:
            chosen = [(run, summary) for run, summary in finished if run.task == one]
            screen.print(table_over_seeds(f"{one}, {pretrained.name}", chosen, place_of, scores_of(chosen[0][1])))
        screen.print(f"Runs are in {out}.", soft_wrap=True)


def scores_of(summary: Any) -> list[str]:
    """Return the names of the task's scores."""
    return [name for name in summary if name.startswith("eval_")]


def line_of(run: "GlueRun", summary: Any) -> str:
    """Return one line on the result of a run."""
    scores = ", ".join(f"{name.removeprefix('eval_')} {summary[name]:.3f}" for name in scores_of(summary))
    return f"{run.task}, seed {run.seed}: {'diverged' if summary['diverged'] else scores}"


def place_of(run: "GlueRun") -> dict[str, str]:
    """Return a run's settings, without its seed."""
    return {"task": run.task, "rate": f"{run.learning_rate:g}"}
