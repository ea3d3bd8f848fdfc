"""`limitformer train mlm`: masked language modelling."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from limitformer.base.errors import require
from limitformer.cli.endings import begin_work
from limitformer.cli.report import errors_in_one_line, screen
from limitformer.cli.sphere_options import parse_counts, parse_grid
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

if TYPE_CHECKING:
    from limitformer_papers.training.tasks.mlm import MlmConfig, MlmRun

PRESETS = "preset's"


def mlm(
    preset: Annotated[str, typer.Option(help="tiny (CPU, minutes), small (one GPU, hours) or paper.")] = "tiny",
    variant: Annotated[
        str,
        typer.Option(help="shaped-learn, shaped-recover, pre-ln or post-ln; several with commas.", show_default="all"),
    ] = "",
    learning_rate: Annotated[
        str, typer.Option(help="Learning rates, separated by commas.", show_default="1e-3; the grid's with --grid")
    ] = "",
    gamma: Annotated[
        str, typer.Option(help="γ of the shaped variants, with commas.", show_default="0.2; the grid's with --grid")
    ] = "",
    seed: Annotated[
        str, typer.Option(help="Seeds of weights, masks and data order.", show_default="0; the grid's with --grid")
    ] = "",
    data: Annotated[
        str, typer.Option(help="stdlib, a folder or file of text, a saved data set, or names on the hub joined by +.")
    ] = "stdlib",
    documents: Annotated[int | None, typer.Option(help="Largest number of documents of each source.")] = None,
    out: OUT = Path("runs"),
    grid: Annotated[
        bool, typer.Option("--grid", help="Train all rates, γ and seeds of the preset, unless given.")
    ] = False,
    workers: WORKERS = 1,
    threads: THREADS = None,
    minutes: MINUTES = None,
    tf32: TF32 = False,
    compiled: COMPILE = False,
    steps: Annotated[int | None, typer.Option(help="Number of steps.", show_default=PRESETS)] = None,
    depth: Annotated[int | None, typer.Option(help="Number of blocks.", show_default=PRESETS)] = None,
    width: Annotated[int | None, typer.Option(help="Width n.", show_default=PRESETS)] = None,
    heads: Annotated[int | None, typer.Option(help="Number of heads.", show_default=PRESETS)] = None,
    hidden: Annotated[int | None, typer.Option(help="Hidden width.", show_default=PRESETS)] = None,
    length: Annotated[int | None, typer.Option(help="Tokens per sequence.", show_default=PRESETS)] = None,
    batch: Annotated[int | None, typer.Option(help="Sequences per step.", show_default=PRESETS)] = None,
    vocabulary: Annotated[int | None, typer.Option(help="Tokens of the tokenizer.", show_default=PRESETS)] = None,
    bf16: Annotated[bool | None, typer.Option(help="Train in mixed precision.", show_default=PRESETS)] = None,
) -> None:
    """Masked language modelling [ST, App. D]: shaped Transformers against Pre-LN and Post-LN.

    For example: limitformer train mlm --preset tiny --variant shaped-recover,pre-ln
    The whole grid: limitformer train mlm --preset tiny --grid --workers 2
    Several GPUs: torchrun --nproc-per-node 8 -m limitformer train mlm --preset paper --variant shaped-learn
    """
    with errors_in_one_line():
        be_quiet()
        budget = budget_of(minutes)
        from limitformer_papers.training.tasks.mlm import preset as preset_of
        from limitformer_papers.training.tasks.mlm import run_mlm

        begin_work()
        sizes = {"depth": depth, "width": width, "heads": heads, "hidden": hidden, "length": length, "bf16": bf16}
        config = preset_of(preset, steps=steps, batch=batch, vocabulary=vocabulary, **sizes)
        runs = chosen_runs(config, data, grid, variant, learning_rate, gamma, seed)
        course: Any = {"threads": threads_of(threads, workers), "tf32": tf32, "compile": compiled}
        make = partial(run_mlm, out=out, documents=documents, **course)
        finished = finish_all(runs, make, workers, line_of, budget)
        title = f"mlm, {preset}, {config.steps:,} steps"
        screen.print(table_over_seeds(title, finished, place_of, ("train_loss", "eval_loss")))
        screen.print(f"Runs are in {out}. Their figures: limitformer figure st-lr --runs {out}", soft_wrap=True)


def chosen_runs(
    config: "MlmConfig", source: str, grid: bool, variant: str, rate: str, gamma: str, seed: str
) -> "list[MlmRun]":
    """Return the runs of the options; with `grid`, options that are not given take the preset's values."""
    from limitformer_papers.training.tasks.mlm import VARIANTS
    from limitformer_papers.training.tasks.mlm import grid as grid_of

    variants: Any = tuple(names_of("variant", variant, VARIANTS)) if variant else VARIANTS
    shaped = any(name.startswith("shaped") for name in variants)
    require(shaped or not gamma, f"--gamma would change nothing: {' and '.join(variants)} have none.")
    rates = tuple(parse_grid("learning-rate", rate)) if rate else (config.learning_rates if grid else (1e-3,))
    gammas = tuple(parse_grid("gamma", gamma)) if gamma else (config.gammas if grid else (0.2,))
    seeds = parse_counts("seed", seed) if seed else list(range(config.seeds if grid else 1))
    return list(grid_of(replace(config, learning_rates=rates, gammas=gammas), source, variants, seeds))


def line_of(run: "MlmRun", summary: Any) -> str:
    """Return one line on the result of a run."""
    if summary["diverged"]:
        return f"{run.name}: diverged, {summary['steps']:,} steps"
    return f"{run.name}: training loss {summary['train_loss']:.3f}, held out {summary['eval_loss']:.3f}"


def place_of(run: "MlmRun") -> dict[str, str]:
    """Return a run's place in the grid, without its seed."""
    gamma = f"{run.gamma:g}" if run.is_shaped else "–"
    return {"variant": run.variant, "γ": gamma, "rate": f"{run.learning_rate:g}"}
