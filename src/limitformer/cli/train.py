"""`limitformer train`: the papers' experiments, small on a laptop and at paper size on GPUs."""

import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer
from rich.table import Column, Table

from limitformer.cli.report import clear_endings, errors, screen
from limitformer.errors import require

if TYPE_CHECKING:
    from limitformer.train.mlm import MlmConfig, MlmRun

OUT = Annotated[Path, typer.Option(help="Folder of the runs, one folder each.")]
THREADS = Annotated[int | None, typer.Option(help="Threads of each process.", show_default="torch's own")]
SEEDS = Annotated[int, typer.Option(help="Seed of weights, masks and the order of the data.")]

train = typer.Typer(help="Train the networks of both papers. A run that was stopped goes on when it is started again.")


def quieten() -> None:
    """The reports and bars of transformers say what ours say; read when it is imported, here and in workers."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


@train.command("mlm")
def mlm(
    preset: Annotated[str, typer.Option(help="tiny (CPU, minutes), small (one GPU, hours) or paper.")] = "tiny",
    variant: Annotated[
        str, typer.Option(help="shaped-learn, shaped-recover, pre-ln or post-ln.", show_default="all with --grid")
    ] = "",
    learning_rate: Annotated[float | None, typer.Option(help="Rate after the warm-up.", show_default="grid's")] = None,
    gamma: Annotated[float | None, typer.Option(help="γ of the shaped variants.", show_default="grid's")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of weights, masks and order.", show_default="grid's")] = None,
    data: Annotated[
        str, typer.Option(help="stdlib, a folder or file of text, a saved dataset, or names on the hub joined by +.")
    ] = "stdlib",
    documents: Annotated[int | None, typer.Option(help="At most so many documents of a dataset.")] = None,
    out: OUT = Path("runs"),
    grid: Annotated[bool, typer.Option("--grid", help="All runs of the preset's grid, then a table.")] = False,
    workers: Annotated[int, typer.Option(help="Runs at a time, with --grid.")] = 1,
    threads: THREADS = None,
    steps: Annotated[int | None, typer.Option(help="Steps.", show_default="preset's")] = None,
    depth: Annotated[int | None, typer.Option(help="Blocks.", show_default="preset's")] = None,
    width: Annotated[int | None, typer.Option(help="n.", show_default="preset's")] = None,
    heads: Annotated[int | None, typer.Option(help="Heads.", show_default="preset's")] = None,
    hidden: Annotated[int | None, typer.Option(help="Hidden width.", show_default="preset's")] = None,
    length: Annotated[int | None, typer.Option(help="Tokens in a sequence.", show_default="preset's")] = None,
    batch: Annotated[int | None, typer.Option(help="Sequences in a step.", show_default="preset's")] = None,
    vocabulary: Annotated[int | None, typer.Option(help="Of the tokenizer.", show_default="preset's")] = None,
) -> None:
    """Masked language modelling [ST, App. D]: shaped Transformers against Pre-LN and Post-LN.

    For example: limitformer train mlm --preset tiny --variant shaped-recover --learning-rate 1e-3
    The whole grid: limitformer train mlm --preset tiny --grid --workers 2 --threads 1
    Several GPUs: torchrun --nproc-per-node 8 -m limitformer train mlm --preset paper --variant shaped-learn
    """
    with clear_endings():
        quieten()
        from limitformer.train.grid import rows_of, run_all
        from limitformer.train.mlm import preset as preset_of
        from limitformer.train.mlm import run_mlm

        sizes = {"depth": depth, "width": width, "heads": heads, "hidden": hidden, "length": length}
        config = preset_of(preset, steps=steps, batch=batch, vocabulary=vocabulary, **sizes)
        runs = chosen_runs(config, data, grid, variant, learning_rate, gamma, seed)
        require(grid or workers == 1, f"--workers {workers} needs --grid: one run has one worker.")
        finished = []
        make = partial(run_mlm, out=out, threads=threads, documents=documents)
        for run, summary in run_all(runs, make, workers=workers):
            finished.append((run, summary))
            errors.print(f"{len(finished)}/{len(runs)} {line_of(run.name, summary)}", highlight=False, soft_wrap=True)
        screen.print(table_of(f"mlm, {preset}, {config.steps} steps", rows_of(finished)))
        screen.print(f"Runs are in {out}; figures of them: limitformer figure st-lr --runs {out}", highlight=False)


def chosen_runs(
    config: "MlmConfig",
    source: str,
    whole: bool,
    variant: str,
    rate: float | None,
    gamma: float | None,
    seed: int | None,
) -> "list[MlmRun]":
    """The one run, or those of the grid that the options leave."""
    from limitformer.train.mlm import VARIANTS, MlmRun
    from limitformer.train.mlm import grid as grid_of

    require(whole or variant != "", f"--variant is needed without --grid: one of {', '.join(VARIANTS)}.")
    require(variant in ("", *VARIANTS), f"--variant must be one of {', '.join(VARIANTS)}; got {variant!r}.")
    named = {"learning_rates": rate, "gammas": gamma}
    changes: dict[str, Any] = {name: (value,) for name, value in named.items() if value is not None}
    config = replace(config, **changes)
    variants: Any = (variant,) if variant else VARIANTS
    if whole:
        runs = list(grid_of(config, source, variants))
        return runs if seed is None else [replace(run, seed=seed) for run in runs if run.seed == 0]
    shaped = variant.startswith("shaped")
    require(shaped or gamma is None, f"--gamma would change nothing: {variant} has none.")
    place = {"learning_rate": config.learning_rates[0], "gamma": config.gammas[-1] if shaped else 0.0}
    return [MlmRun(config=config, variant=variants[0], seed=seed or 0, source=source, **place)]


def line_of(name: str, summary: Any) -> str:
    """How one run ended."""
    if summary["diverged"]:
        return f"{name}: diverged at step {summary['steps']}"
    return f"{name}: training loss {summary['train_loss']:.3f}, held out {summary['eval_loss']:.3f}"


def table_of(title: str, rows: list[dict[str, Any]]) -> Table:
    """One row for each variant, γ and learning rate."""
    names = Column("variant", no_wrap=True)
    table = Table(names, "γ", "rate", "seeds", "diverged", "training loss", "held out", title=title)
    for row in rows:
        gamma = f"{row['gamma']:g}" if row["gamma"] else "–"
        losses = [f"{row[name]:.3f} ± {row[f'{name}_sd']:.3f}" for name in ("train_loss", "eval_loss")]
        losses = losses if row["seeds"] > 1 else [loss.partition(" ")[0] for loss in losses]
        counts = [str(row["seeds"]), str(row["diverged"])]
        table.add_row(row["variant"], gamma, f"{row['learning_rate']:g}", *counts, *losses)
    return table


@train.command("glue")
def glue(
    pretrained: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run of `train mlm`.")],
    task: Annotated[str, typer.Option(help="CoLA, MRPC or RTE.")],
    data: Annotated[Path, typer.Option(help="Folder with the task's files, in their public format.")],
    out: OUT = Path("runs/glue"),
    epochs: Annotated[int, typer.Option(help="Epochs.")] = 5,
    learning_rate: Annotated[float, typer.Option(help="Rate after the warm-up.")] = 5e-4,
    batch: Annotated[int, typer.Option(help="Sentences or pairs in a step.")] = 16,
    seed: SEEDS = 0,
    threads: THREADS = None,
) -> None:
    """Fine-tune a pretrained model on a task of GLUE [ST, Table 2].

    For example: limitformer train glue runs/shaped-learn-d18-gamma0.2-lr0.001-seed0 --task CoLA --data glue/CoLA
    """
    with clear_endings():
        quieten()
        from limitformer.train.glue import GlueRun, run_glue

        course: Any = {"epochs": epochs, "learning_rate": learning_rate, "batch": batch, "seed": seed}
        run = GlueRun(pretrained=pretrained, task=task, **course)  # type: ignore[arg-type]
        summary = run_glue(run, data, out, threads=threads)
        scores = {name: value for name, value in summary.items() if name.startswith("eval_")}
        shown = ", ".join(f"{name.removeprefix('eval_')} {value:.3f}" for name, value in scores.items())
        screen.print(f"{task}: {shown}. Written to {out / run.name}", highlight=False, soft_wrap=True)


@train.command("vit")
def vit(
    preset: Annotated[
        str, typer.Option(help="tiny (digits, a minute), digits (128 layers) or paper (CIFAR-10).")
    ] = "tiny",
    variant: Annotated[str, typer.Option(help="constant or random.", show_default="both with --grid")] = "",
    seed: Annotated[int, typer.Option(help="Seed of weights, order and augmentation.")] = 0,
    data: Annotated[Path | None, typer.Option(help="Folder of CIFAR-10's python files.")] = None,
    out: OUT = Path("runs"),
    grid: Annotated[bool, typer.Option("--grid", help="Both variants and --seeds seeds.")] = False,
    seeds: Annotated[int, typer.Option(help="Seeds of --grid, from 0.")] = 5,
    workers: Annotated[int, typer.Option(help="Runs at a time, with --grid.")] = 1,
    threads: THREADS = None,
    epochs: Annotated[int | None, typer.Option(help="Epochs.", show_default="preset's")] = None,
    layers: Annotated[int | None, typer.Option(help="Layers.", show_default="preset's")] = None,
) -> None:
    """A vision transformer of attention alone, with random values against one identity [CT, Fig. 2].

    For example: limitformer train vit --preset tiny --variant random
    The whole figure: limitformer train vit --preset tiny --grid --workers 2 --threads 1
    """
    with clear_endings():
        quieten()
        from limitformer.train.grid import run_all
        from limitformer.train.vit import Variant

        require(grid or variant != "", f"--variant is needed without --grid: {' or '.join(get_args(Variant))}.")
        require(grid or workers == 1, f"--workers {workers} needs --grid: one run has one worker.")
        variants = [variant] if variant else list(get_args(Variant))
        runs = [(name, one) for one in (range(seeds) if grid else [seed]) for name in variants]
        named = {"epochs": epochs, "layers": layers}
        sizes: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
        make = partial(one_vit, preset=preset, out=out, data=data, threads=threads, **sizes)
        for done, (run, summary) in enumerate(run_all(runs, make, workers=workers), 1):
            name = f"{run[0]}, seed {run[1]}"
            outcome = "diverged" if summary["diverged"] else f"accuracy {summary['eval_accuracy']:.4f}"
            errors.print(f"{done}/{len(runs)} {name}: {outcome}", highlight=False, soft_wrap=True)
        screen.print(f"Runs are in {out}; the figure of both: limitformer figure ct-fig2 --runs {out}", highlight=False)


def one_vit(run: tuple[str, int], *, preset: str, **options: Any) -> Any:
    """One run: (variant, seed)."""
    from limitformer.train.vit import run_vit

    return run_vit(preset, variant=run[0], seed=run[1], **options)  # type: ignore[arg-type]
