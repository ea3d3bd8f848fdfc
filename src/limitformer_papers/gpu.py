r"""The papers' training experiments on a GPU, some minutes at a time: `make gpu`, with docs/gpu.md.

    python -m limitformer_papers.gpu --size paper --minutes 8 --out runs

Each command resumes the first unfinished run and goes through the list until its minutes are over. When all runs of an
experiment are finished, its pictures are drawn. Everything is in OUT/gpu-SIZE:

    figures/     the pictures, with their data and claims
    vit-…, …     the runs, as `limitformer train` makes them; those that are finished lose their checkpoints

TF32 and compilation (`training.plan`) are used where there is a GPU that has them.
"""

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from limitformer.base.errors import InputError, nearest, require
from limitformer.base.files import check_writable
from limitformer.cli.report import errors_in_one_line, print_plain

PICTURES = {"vit": ("ct-fig2",), "mlm": ("st-lr", "st-fig6")}
GAMMA = 0.2
MOST_LOADERS = 8
Jobs = Mapping[Path, Callable[[], object]]  # the folder of a run → the call that begins or resumes it


@dataclass(frozen=True, kw_only=True)
class GpuSize:
    """The settings of all runs of one size.

    Attributes:
        vit, mlm: presets of `training.tasks.vit` and `training.tasks.mlm`.
        vit_changes, mlm_changes: fields that differ from them.
        vit_seeds, mlm_seeds: numbers of seeds.
        rates: learning rates of the masked language models.
        documents: largest number of documents of their text.
    """

    vit: str
    vit_changes: Mapping[str, Any] = field(default_factory=dict)
    vit_seeds: int = 3
    mlm: str
    mlm_changes: Mapping[str, Any] = field(default_factory=dict)
    mlm_seeds: int = 2
    rates: tuple[float, ...] = (5e-4, 5e-3)
    documents: int | None = None


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
        vit_seeds=1,
        mlm="tiny",
        mlm_changes=TINY_WORDS,
        mlm_seeds=1,
        rates=(3e-3,),
        documents=40,
    ),
    "small": GpuSize(
        vit="fashion",
        vit_changes={**PAPERS, "epochs": 10, "warmup_epochs": 1},
        mlm="small",
        mlm_changes={"steps": 2_000},
    ),
    "paper": GpuSize(vit="fashion", vit_changes={**PAPERS, "epochs": 300, "warmup_epochs": 8}, mlm="small"),
}


def jobs_of(size: GpuSize, root: Path, data: Path | None) -> dict[str, Jobs]:
    """Return the runs of each experiment, seeds outermost.

    Raises:
        InputError: data that are missing, before any run.
    """
    from limitformer_papers.training.data.images import read_images
    from limitformer_papers.training.plan import has_gpu, has_tf32
    from limitformer_papers.training.tasks import mlm, vit

    read_images(vit.PRESETS[size.vit].data, data)
    options: dict[str, Any] = {"tf32": has_tf32(), "compile": has_gpu(), "tensorboard": False}
    loaders = min(MOST_LOADERS, (os.cpu_count() or 1) - 1) if has_gpu() else 0  # AutoAugment is slower than a step
    images: Any = {"out": root, "data": data, "loaders": loaders, **options, **size.vit_changes}
    visions = {
        root / f"vit-{size.vit}" / f"{variant}-{seed}": partial(
            vit.run_vit, size.vit, variant=variant, seed=seed, **images
        )
        for seed in range(size.vit_seeds)
        for variant in vit.VARIANTS
    }
    config = mlm.preset(size.mlm, learning_rates=size.rates, gammas=(GAMMA,), seeds=size.mlm_seeds, **size.mlm_changes)
    languages = {
        root / run.name: partial(mlm.run_mlm, run, root, documents=size.documents, **options)
        for run in mlm.grid(config, "stdlib", ("shaped-recover", "pre-ln"))
    }
    return {"vit": visions, "mlm": languages}


def continue_runs(size: str, budget: Any, out: Path, data: Path | None = None) -> bool:
    """Resume the runs until all are finished or the `Budget` is spent; return whether they are finished.

    Raises:
        InputError: an unknown size, missing data, a folder that cannot be written, or a run that fails.
        TrainingInterrupted: Ctrl-C; the same call resumes.
    """
    from limitformer_papers.training.interrupts import within
    from limitformer_papers.training.plan import has_gpu

    require(size in SIZES, f"size must be one of {', '.join(SIZES)}; got {size!r}.{nearest(size, SIZES)}")
    root = Path(out) / f"gpu-{size}"
    experiments = jobs_of(SIZES[size], root, data)
    check_writable(root)
    if size != "tiny" and not has_gpu():
        print_plain(
            "torch sees no GPU, and on a CPU these runs take weeks. Nearest: SIZE=tiny, or a torch for your GPU."
        )
    with within(budget):
        for name, jobs in experiments.items():
            finished = sum(finish(folder, train) for folder, train in jobs.items())
            print_plain(f"{', '.join(PICTURES[name])}: {finished} of {len(jobs)} runs are finished.")
            if finished < len(jobs):
                print_plain(f"The minutes are over; the same command resumes. The runs are in {root}.")
                return False
            draw(name, root)
    print_plain(f"All is done. The runs are in {root}.")
    return True


def finish(folder: Path, train: Callable[[], object]) -> bool:
    """Finish a run and remove its checkpoints; return False if the time is up before."""
    from limitformer_papers.training.interrupts import TrainingInterrupted, time_is_up
    from limitformer_papers.training.plan import SUMMARY

    if not (folder / SUMMARY).exists():
        if time_is_up():
            return False
        try:
            train()
        except TrainingInterrupted as stopped:
            if stopped.minutes is None:
                raise
            return False
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    return True


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
