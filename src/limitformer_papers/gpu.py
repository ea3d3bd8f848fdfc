r"""The papers' training experiments on a GPU, some minutes at a time: `make gpu`, with docs/gpu.md.

    python -m limitformer_papers.gpu --size paper --minutes 8 --out runs

Each command resumes the first unfinished run and goes through the list until its minutes are over. When all runs of an
experiment are finished, its pictures are drawn. Everything is in OUT/gpu-SIZE:

    gpu.jsonl    the record, one line for each time that a command stopped or finished a run
    figures/     the pictures, with their data and claims
    vit-…, …     the runs, as `limitformer train` makes them; those that are finished lose their checkpoints

TF32 and compilation (`training.device`) are used where there is a GPU that has them.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from limitformer.base.errors import InputError, nearest, require
from limitformer.base.files import check_writable, write_whole
from limitformer.base.progress import duration
from limitformer.cli.report import errors_in_one_line, print_plain

RECORD = "gpu.jsonl"
PICTURES = {"vit": ("ct-fig2",), "mlm": ("st-lr", "st-fig6")}
GAMMA = 0.2
MOST_LOADERS = 8
HOURS = 7200.0  # seconds above which a time is printed in hours


@dataclass(frozen=True, kw_only=True)
class GpuSize:
    """The settings of all runs of one size.

    Attributes:
        vit, mlm: presets of `training.tasks.vit` and `training.tasks.mlm`.
        vit_changes, mlm_changes: fields that differ from them.
        vit_seeds, mlm_seeds: numbers of seeds.
        rates: learning rates of the masked language models.
        documents: largest number of documents of their text.
        guesses: minutes of a run of each experiment on one data-centre GPU, by counting kernels and not measured.
    """

    vit: str
    vit_changes: Mapping[str, Any] = field(default_factory=dict)
    vit_seeds: int = 3
    mlm: str
    mlm_changes: Mapping[str, Any] = field(default_factory=dict)
    mlm_seeds: int = 2
    rates: tuple[float, ...] = (5e-4, 5e-3)
    documents: int | None = None
    guesses: Mapping[str, float]


# [CT, Sec. 6] has all images, batch 128, and a warm-up of 8 epochs; the preset is for a CPU.
PAPERS = {"batch": 128, "training_images": None, "held_out_images": None}
TINY_WORDS = {
    "width": 32, "depth": 2, "heads": 2, "hidden": 64, "length": 16, "batch": 8, "vocabulary": 300,
    "steps": 12, "look_every": 4, "save_every": 8, "evaluate_every": 8,
}  # fmt: skip
SIZES = {
    "tiny": GpuSize(
        vit="tiny",
        vit_changes={"layers": 3, "dim": 8, "patch": 4, "epochs": 4, "batch": 256},
        vit_seeds=2,
        mlm="tiny",
        mlm_changes=TINY_WORDS,
        mlm_seeds=1,
        rates=(1e-3, 3e-3),
        documents=40,
        guesses={"vit": 0.02, "mlm": 0.02},
    ),
    "small": GpuSize(
        vit="fashion",
        vit_changes={**PAPERS, "epochs": 10, "warmup_epochs": 1},
        mlm="small",
        mlm_changes={"steps": 2_000},
        guesses={"vit": 4.0, "mlm": 2.0},
    ),
    "paper": GpuSize(
        vit="fashion",
        vit_changes={**PAPERS, "epochs": 300, "warmup_epochs": 8},
        mlm="small",
        guesses={"vit": 120.0, "mlm": 20.0},
    ),
}


@dataclass(frozen=True)
class TrainingJob:
    """A run: its folder, and the call that begins or resumes it."""

    folder: Path
    train: Callable[[], object]


@dataclass(frozen=True)
class Standing:
    """The standing of a run: steps done and planned, seconds of training, and its summary once it is finished."""

    step: int = 0
    steps: int = 0
    seconds: float = 0.0
    summary: Mapping[str, float] | None = None


def jobs_of(size: GpuSize, root: Path, data: Path | None) -> dict[str, list[TrainingJob]]:
    """Return the runs of each experiment, seeds outermost.

    Raises:
        InputError: data that are missing, before any run.
    """
    from limitformer_papers.training.data.images import read_images
    from limitformer_papers.training.device import has_gpu, has_tf32
    from limitformer_papers.training.tasks import mlm, vit

    require(size.vit in vit.PRESETS, f"preset must be one of {', '.join(vit.PRESETS)}; got {size.vit!r}.")
    read_images(vit.PRESETS[size.vit].data, data)
    options: dict[str, Any] = {"tf32": has_tf32(), "compile": has_gpu(), "tensorboard": False}
    loaders = min(MOST_LOADERS, (os.cpu_count() or 1) - 1) if has_gpu() else 0  # AutoAugment is slower than a step
    images: Any = {"out": root, "data": data, "loaders": loaders, **options, **size.vit_changes}
    visions = [
        TrainingJob(
            root / f"vit-{size.vit}" / f"{variant}-{seed}",
            partial(vit.run_vit, size.vit, variant=variant, seed=seed, **images),
        )
        for seed in range(size.vit_seeds)
        for variant in vit.VARIANTS
    ]
    config = mlm.preset(size.mlm, learning_rates=size.rates, gammas=(GAMMA,), seeds=size.mlm_seeds, **size.mlm_changes)
    languages = [
        TrainingJob(root / run.name, partial(mlm.run_mlm, run, root, documents=size.documents, **options))
        for run in mlm.grid(config, "stdlib", ("shaped-recover", "pre-ln"))
    ]
    return {"vit": visions, "mlm": languages}


def standing(folder: Path) -> Standing:
    """Return the standing of the run in a folder."""
    from limitformer_papers.training import checkpoints, runs

    if not (folder / runs.RUN).exists():
        return Standing()
    steps = int(runs.read_json(folder / runs.RUN)["plan"]["steps"])
    if (folder / runs.SUMMARY).exists():
        summary = runs.read_summary(folder)
        return Standing(int(summary["steps"]), steps, summary["seconds"], summary)
    checkpoint, _ = checkpoints.newest(folder / "checkpoints")
    return (
        Standing(steps=steps) if checkpoint is None else Standing(checkpoint.step, steps, checkpoint.notes["seconds"])
    )


def continue_runs(size: str, budget: Any, out: Path, data: Path | None = None) -> bool:
    """Resume the runs until all are finished or the `Budget` is spent; return whether they are finished.

    Raises:
        InputError: an unknown size, missing data, a folder that cannot be written, or a run that fails.
        TrainingInterrupted: Ctrl-C; the same call resumes.
    """
    from limitformer_papers.training.device import has_gpu
    from limitformer_papers.training.interrupts import within

    require(size in SIZES, f"size must be one of {', '.join(SIZES)}; got {size!r}.{nearest(size, SIZES)}")
    root = Path(out) / f"gpu-{size}"
    experiments = jobs_of(SIZES[size], root, data)
    check_writable(root)
    if size != "tiny" and not has_gpu():
        print_plain(
            "torch sees no GPU, and on a CPU these runs take weeks. Nearest: SIZE=tiny, or a torch for your GPU."
        )
    print_plain("\n".join(status(SIZES[size], experiments)))
    with within(budget):
        for name, jobs in experiments.items():
            if not all(finish(job, name, root) for job in jobs):
                break
            draw(name, root)
    lines = status(SIZES[size], experiments)
    done = all(standing(job.folder).summary is not None for jobs in experiments.values() for job in jobs)
    end = "All is done." if done else "The minutes are over; the same command resumes."
    print_plain("\n".join([*lines, f"{end} The record: {root / RECORD}"]))
    return done


def finish(job: TrainingJob, experiment: str, root: Path) -> bool:
    """Finish a run, record it and remove its checkpoints; record it and return False if the time is up before."""
    from limitformer_papers.training.interrupts import TrainingInterrupted, time_is_up

    if standing(job.folder).summary is None:
        if time_is_up():
            return False
        try:
            job.train()
        except TrainingInterrupted as stopped:
            record(job, experiment, root)
            if stopped.minutes is None:
                raise
            return False
    record(job, experiment, root)
    shutil.rmtree(job.folder / "checkpoints", ignore_errors=True)
    return True


def record(job: TrainingJob, experiment: str, root: Path) -> None:
    """Add a line on a run to the record, unless its last line says the same."""
    from limitformer_papers.training import runs
    from limitformer_papers.training.device import device_name

    path, now = root / RECORD, standing(job.folder)
    lines = rows_of(path) if path.exists() else {}
    run = job.folder.relative_to(root).as_posix()
    earlier = [row for row in lines.values() if row["run"] == run]
    if earlier and (earlier[-1]["step"], earlier[-1]["result"] is None) == (now.step, now.summary is None):
        return
    begun = runs.read_json(job.folder / runs.RUN)
    plan = {name: begun["plan"][name] for name in ("learning_rate", "seed", "batch", "bf16", "tf32", "compile")}
    row = {
        "experiment": experiment,
        "run": run,
        "variant": begun["about"]["variant"],
        **plan,
        "step": now.step,
        "steps": now.steps,
        "seconds": round(now.seconds, 3),
        "result": None if now.summary is None else runs.finite(now.summary),
        "begun_on": begun["device"],
        "device": device_name(),
        "versions": runs.versions(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    text = "\n".join([*lines, json.dumps(row, allow_nan=False)]) + "\n"
    write_whole(path, lambda whole: whole.write_text(text, encoding="utf-8"))


def rows_of(path: Path) -> dict[str, dict[str, Any]]:
    """Return the lines of a record with their rows; a line that was damaged is left out, and so leaves the file."""
    found = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and {"run", "step", "result"} <= row.keys():
            found[line] = row
    return found


def draw(experiment: str, root: Path) -> None:
    """Draw the pictures of a finished experiment that are not there; print why one cannot be drawn."""
    from limitformer_papers import make

    folder = root / "figures"
    for name in PICTURES[experiment]:
        if not (folder / f"{name}.json").exists():
            try:
                print_plain(f"Drawn: {make(name, out=folder, runs=root).paths[0]}")
            except InputError as error:  # for example, all runs of a variant have diverged
                print_plain(f"{name} is not drawn: {error}")


def status(size: GpuSize, experiments: Mapping[str, list[TrainingJob]]) -> Iterator[str]:
    """Yield a line for each experiment: the finished runs and steps, and the time that is left."""
    for name, jobs in experiments.items():
        all_of_them = [standing(job.folder) for job in jobs]
        finished = sum(one.summary is not None for one in all_of_them)
        shares = [1.0 if one.summary is not None else one.step / max(one.steps, 1) for one in all_of_them]
        step, seconds = (sum(getattr(one, part) for one in all_of_them) for part in ("step", "seconds"))
        left = len(jobs) - sum(shares)
        if step:  # all runs of an experiment have equally many steps
            time = f"{hours(left * max(one.steps for one in all_of_them) * seconds / step)} left, as measured so far"
        else:
            time = f"{hours(left * 60 * size.guesses[name])} on one GPU, a guess without a measurement"
        share = f"{100 * sum(shares) / len(jobs):.0f} % of the steps"
        pictures = ", ".join(PICTURES[name])
        yield f"{pictures}: {finished} of {len(jobs)} runs are finished, {share}" + (f"; {time}." if left else ".")


def hours(seconds: float) -> str:
    return f"about {seconds / 3600:.1f} h" if seconds > HOURS else duration(seconds)


def main(
    size: Annotated[str, typer.Option(help="tiny (a test on a CPU), small or paper.")] = "paper",
    minutes: Annotated[float, typer.Option(help="Wall time of this command.")] = 8.0,
    out: Annotated[Path, typer.Option(help="Folder of all runs.")] = Path("runs"),
    data: Annotated[
        Path | None, typer.Option(help="Folder of Fashion-MNIST's IDX files.", show_default="Debian's")
    ] = None,
) -> None:
    """Run the papers' training experiments for some minutes; the same command resumes them."""
    with errors_in_one_line():
        from limitformer_papers.training.interrupts import Budget

        continue_runs(size, Budget(minutes), out, data)


if __name__ == "__main__":
    typer.run(main)
