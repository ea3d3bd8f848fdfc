"""`limitformer train vit`: the vision experiment."""

from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from limitformer.cli.endings import begin_work
from limitformer.cli.report import errors_in_one_line, screen
from limitformer.cli.sphere_options import parse_counts
from limitformer_papers.commands.train_parts import (
    COMPILE,
    MINUTES,
    OUT,
    TF32,
    THREADS,
    WORKERS,
    be_quiet,
    budget_of,
    finish_all,
    names_of,
    table_over_seeds,
    threads_of,
)

Place = tuple[str, int]  # (variant, seed)


def vit(
    preset: Annotated[
        str,
        typer.Option(
            help="tiny (digits, a minute), digits (128 layers, minutes), fashion (Fashion-MNIST) or paper (CIFAR-10)."
        ),
    ] = "tiny",
    variant: Annotated[str, typer.Option(help="constant or random.", show_default="both")] = "",
    seed: Annotated[str, typer.Option(help="Seeds, separated by commas or as 0:4:1.")] = "0",
    data: Annotated[
        Path | None,
        typer.Option(
            help="Folder of Fashion-MNIST's four IDX files, or that holds CIFAR-10's binary version, "
            "cifar-10-batches-bin.",
            show_default="Debian's, for Fashion-MNIST",
        ),
    ] = None,
    out: OUT = Path("runs"),
    workers: WORKERS = 1,
    threads: THREADS = None,
    minutes: MINUTES = None,
    tf32: TF32 = False,
    compiled: COMPILE = False,
    epochs: Annotated[int | None, typer.Option(help="Number of epochs.", show_default="preset's")] = None,
    layers: Annotated[int | None, typer.Option(help="Number of layers.", show_default="preset's")] = None,
    learning_rate: Annotated[
        float | None, typer.Option(help="Learning rate of both variants.", show_default="preset's")
    ] = None,
) -> None:
    """Train a vision transformer with attention only: random values against one identity [CT, Fig. 2].

    For example: limitformer train vit --preset tiny --variant random
    The figure's runs: limitformer train vit --preset tiny --seed 0:4:1 --workers 2
    """
    with errors_in_one_line():
        be_quiet()
        budget = budget_of(minutes)
        from limitformer_papers.training.tasks.vit import Variant

        begin_work()
        variants = names_of("variant", variant, get_args(Variant)) if variant else list(get_args(Variant))
        runs = [(name, one) for one in parse_counts("seed", seed) for name in variants]
        named = {"epochs": epochs, "layers": layers, "learning_rate": learning_rate}
        sizes: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
        if learning_rate is not None:
            sizes["random_learning_rate"] = learning_rate
        course: Any = {"threads": threads_of(threads, workers), "tf32": tf32, "compile": compiled}
        make = partial(one_run, preset=preset, out=out, data=data, **course, **sizes)
        finished = finish_all(runs, make, workers, line_of, budget)
        names = ("train_loss", "eval_loss", "eval_accuracy")
        screen.print(table_over_seeds(f"vit, {preset}", finished, lambda run: {"variant": run[0]}, names))
        screen.print(f"Runs are in {out}. Their figure: limitformer figure ct-fig2 --runs {out}", soft_wrap=True)


def one_run(run: Place, *, preset: str, **options: Any) -> Any:
    from limitformer_papers.training.tasks.vit import run_vit

    variant: Any = run[0]
    return run_vit(preset, variant=variant, seed=run[1], **options)


def line_of(run: Place, summary: Any) -> str:
    """Return one line on the result of a run."""
    outcome = "diverged" if summary["diverged"] else f"accuracy {summary['eval_accuracy']:.4f}"
    return f"{run[0]}, seed {run[1]}: {outcome}"
