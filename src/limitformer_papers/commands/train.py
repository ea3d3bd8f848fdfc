"""`limitformer train`: the papers' experiments, small on a laptop and at paper size on GPUs."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer
from rich.table import Column, Table

from limitformer.base.errors import InputError, require, require_count
from limitformer.cli.endings import begin_work
from limitformer.cli.phase import parse_counts, parse_grid
from limitformer.cli.report import errors, errors_in_one_line, screen

if TYPE_CHECKING:
    from limitformer_papers.training.interrupts import Budget
    from limitformer_papers.training.tasks.glue import GlueRun
    from limitformer_papers.training.tasks.mlm import MlmConfig, MlmRun

train = typer.Typer(help="Train the networks of both papers. A run that was stopped resumes when it is started again.")

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
PRESETS = "preset's"
Summary = Mapping[str, Any]


@train.command()
def mlm(
    preset: Annotated[str, typer.Option(help="tiny or deep (CPU, minutes), small (one GPU, hours) or paper.")] = "tiny",
    variant: Annotated[
        str,
        typer.Option(
            help="shaped-learn, shaped-recover, shaped-fixed, pre-ln or post-ln; several with commas.",
            show_default="all but shaped-fixed",
        ),
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
    """
    with errors_in_one_line():
        budget = budget_of(minutes)
        from limitformer_papers.training.tasks.mlm import preset as preset_of
        from limitformer_papers.training.tasks.mlm import run_mlm

        begin_work()
        sizes = {"depth": depth, "width": width, "heads": heads, "hidden": hidden, "length": length, "bf16": bf16}
        config = preset_of(preset, steps=steps, batch=batch, vocabulary=vocabulary, **sizes)
        runs = chosen_runs(config, data, grid, variant, learning_rate, gamma, seed)
        course: Any = {"threads": threads_of(threads, workers), "tf32": tf32, "compile": compiled}
        make = partial(run_mlm, out=out, documents=documents, **course)
        finished = finish_all(runs, make, workers, mlm_line, budget)
        title = f"mlm, {preset}, {config.steps:,} steps"
        screen.print(table_over_seeds(title, finished, mlm_place, ("train_loss", "eval_loss")))
        screen.print(f"Runs are in {out}. Their figures: limitformer figure st-lr --runs {out}", soft_wrap=True)


def chosen_runs(
    config: "MlmConfig", source: str, grid: bool, variant: str, rate: str, gamma: str, seed: str
) -> "list[MlmRun]":
    """Return the runs of the options; with `grid`, options that are not given take the preset's values."""
    from limitformer_papers.training.tasks.mlm import COMPARED, VARIANTS
    from limitformer_papers.training.tasks.mlm import grid as grid_of

    variants: Any = tuple(names_of("variant", variant, VARIANTS)) if variant else COMPARED
    shaped = any(name.startswith("shaped") for name in variants)
    require(shaped or not gamma, f"--gamma would change nothing: {' and '.join(variants)} have none.")
    rates = tuple(parse_grid("learning-rate", rate)) if rate else (config.learning_rates if grid else (1e-3,))
    gammas = tuple(parse_grid("gamma", gamma)) if gamma else (config.gammas if grid else (0.2,))
    seeds = parse_counts("seed", seed) if seed else list(range(config.seeds if grid else 1))
    return list(grid_of(replace(config, learning_rates=rates, gammas=gammas), source, variants, seeds))


def mlm_line(run: "MlmRun", summary: Any) -> str:
    """Return one line on the result of a run."""
    if summary["diverged"]:
        return f"{run.name}: diverged, {summary['steps']:,} steps"
    return f"{run.name}: training loss {summary['train_loss']:.3f}, held out {summary['eval_loss']:.3f}"


def mlm_place(run: "MlmRun") -> dict[str, str]:
    """Return a run's place in the grid, without its seed."""
    gamma = f"{run.gamma:g}" if run.is_shaped else "–"
    return {"variant": run.variant, "γ": gamma, "rate": f"{run.learning_rate:g}"}


@train.command()
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
        from limitformer_papers.training.tasks.glue import GlueRun, Task, run_glue

        begin_work()
        tasks: Any = names_of("task", task, get_args(Task))
        course: Any = {"epochs": epochs, "learning_rate": learning_rate, "batch": batch}
        seeds = parse_counts("seed", seed)
        runs = [GlueRun(pretrained=pretrained, task=one, seed=k, **course) for one in tasks for k in seeds]
        make = partial(run_glue, data=data, out=out, threads=threads_of(threads, workers))
        finished = finish_all(runs, make, workers, glue_line)
        for one in tasks:
            chosen = [(run, summary) for run, summary in finished if run.task == one]
            screen.print(table_over_seeds(f"{one}, {pretrained.name}", chosen, glue_place, scores_of(chosen[0][1])))
        screen.print(f"Runs are in {out}.", soft_wrap=True)


def scores_of(summary: Any) -> list[str]:
    """Return the names of the task's scores."""
    return [name for name in summary if name.startswith("eval_")]


def glue_line(run: "GlueRun", summary: Any) -> str:
    """Return one line on the result of a run."""
    scores = ", ".join(f"{name.removeprefix('eval_')} {summary[name]:.3f}" for name in scores_of(summary))
    return f"{run.task}, seed {run.seed}: {'diverged' if summary['diverged'] else scores}"


def glue_place(run: "GlueRun") -> dict[str, str]:
    """Return a run's settings, without its seed."""
    return {"task": run.task, "rate": f"{run.learning_rate:g}"}


@train.command()
def vit(
    preset: Annotated[
        str,
        typer.Option(
            help="tiny (digits, a minute), digits (128 layers, minutes), fashion (Fashion-MNIST) or paper (CIFAR-10)."
        ),
    ] = "tiny",
    variant: Annotated[str, typer.Option(help="constant, untied or random.", show_default="all three")] = "",
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
    epochs: Annotated[int | None, typer.Option(help="Number of epochs.", show_default=PRESETS)] = None,
    layers: Annotated[int | None, typer.Option(help="Number of layers.", show_default=PRESETS)] = None,
    learning_rate: Annotated[
        float | None, typer.Option(help="Learning rate of all variants.", show_default=PRESETS)
    ] = None,
) -> None:
    """Train a vision transformer with attention only: random values against one identity [CT, Fig. 2].

    For example: limitformer train vit --preset tiny --variant random
    The figure's runs: limitformer train vit --preset tiny --seed 0:4:1 --workers 2
    """
    with errors_in_one_line():
        budget = budget_of(minutes)
        from limitformer_papers.training.tasks.vit import OWN_RATES, Variant

        begin_work()
        variants = names_of("variant", variant, get_args(Variant)) if variant else list(get_args(Variant))
        runs = [(name, one) for one in parse_counts("seed", seed) for name in variants]
        named = {"epochs": epochs, "layers": layers, "learning_rate": learning_rate}
        sizes: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
        if learning_rate is not None:
            sizes |= dict.fromkeys(OWN_RATES.values(), learning_rate)
        course: Any = {"threads": threads_of(threads, workers), "tf32": tf32, "compile": compiled}
        make = partial(one_run, preset=preset, out=out, data=data, **course, **sizes)
        finished = finish_all(runs, make, workers, vit_line, budget)
        names = ("train_loss", "eval_loss", "eval_accuracy")
        screen.print(table_over_seeds(f"vit, {preset}", finished, lambda run: {"variant": run[0]}, names))
        screen.print(f"Runs are in {out}. Their figure: limitformer figure ct-fig2 --runs {out}", soft_wrap=True)


def one_run(run: tuple[str, int], *, preset: str, **options: Any) -> Any:
    from limitformer_papers.training.tasks.vit import run_vit

    variant: Any = run[0]
    return run_vit(preset, variant=variant, seed=run[1], **options)


def vit_line(run: tuple[str, int], summary: Any) -> str:
    """Return one line on the result of a run."""
    outcome = "diverged" if summary["diverged"] else f"accuracy {summary['eval_accuracy']:.4f}"
    return f"{run[0]}, seed {run[1]}: {outcome}"


def budget_of(minutes: float | None) -> "Budget | None":
    """Return the time budget of the command, which begins now."""
    from limitformer_papers.training.interrupts import Budget

    return None if minutes is None else Budget(minutes)


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
