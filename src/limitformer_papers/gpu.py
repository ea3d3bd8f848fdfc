r"""The papers' training experiments on a GPU, some minutes at a time: `make gpu`, with docs/gpu.md.

    python -m limitformer_papers.gpu --size paper --minutes 8 --out runs

Each command resumes the first unfinished run and goes through the list until its minutes are over. When all runs of an
experiment are finished, its pictures are drawn. Everything is in OUT/gpu-SIZE:

    figures/     the pictures, with their data and claims
    so-far/      those of language models whose runs are not finished, each cut at the same step
    vit-…, …     the runs, as `limitformer train` makes them; those that are finished lose their checkpoints

TF32 and compilation (`training.plan`) are used where there is a GPU that has them.
"""

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
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
        rates, depths: of the masked language models, the first ones first; no depths are the preset's.
        documents: largest number of documents of their text.
        order: the experiments, the first one first.
    """

    vit: str
    vit_changes: Mapping[str, Any] = field(default_factory=dict)
    vit_seeds: int = 3
    mlm: str
    mlm_changes: Mapping[str, Any] = field(default_factory=dict)
    mlm_seeds: int = 2
    rates: tuple[float, ...] = (5e-4, 5e-3)
    depths: tuple[int | None, ...] = (None,)
    documents: int | None = None
    order: tuple[str, ...] = ("vit", "mlm")


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
    "medium": GpuSize(vit="fashion", vit_changes={**PAPERS, "epochs": 300, "warmup_epochs": 8}, mlm="small"),
    "paper": GpuSize(  # [ST, Fig. 6] says that entropy collapses at 1e-3
        vit="fashion",
        vit_changes={**PAPERS, "epochs": 300, "warmup_epochs": 8},
        mlm="paper",
        rates=(1e-3, 5e-4, 5e-3),
        depths=(18, 24),
        order=("mlm", "vit"),
    ),
}
CIFAR = "cifar-10-batches-bin"  # in a folder with CIFAR-10, which size paper takes in place of Fashion-MNIST


def jobs_of(size: GpuSize, root: Path, data: Path | None) -> dict[str, Jobs]:
    """Return the runs of each experiment, seeds outermost.

    Raises:
        InputError: data that are missing, before any run.
    """
    from limitformer_papers.training.data.images import read_images
    from limitformer_papers.training.plan import has_gpu, has_tf32
    from limitformer_papers.training.tasks import mlm, vit

    vision, changes = size.vit, size.vit_changes
    if size.mlm == "paper" and data is not None and (data / CIFAR).is_dir():
        vision, changes = "paper", {}
    read_images(vit.PRESETS[vision].data, data)
    options: dict[str, Any] = {"tf32": has_tf32(), "compile": has_gpu(), "tensorboard": False}
    loaders = min(MOST_LOADERS, (os.cpu_count() or 1) - 1) if has_gpu() else 0  # AutoAugment is slower than a step
    images: Any = {"out": root, "data": data, "loaders": loaders, **options, **changes}
    visions = {
        root / f"vit-{vision}" / f"{variant}-{seed}": partial(vit.run_vit, vision, variant=variant, seed=seed, **images)
        for seed in range(size.vit_seeds)
        for variant in ("constant", "random")
    }
    languages = {
        root / run.name: partial(mlm.run_mlm, run, root, documents=size.documents, **options)
        for seed, rate, depth in product(range(size.mlm_seeds), size.rates, size.depths)
        for run in mlm.grid(
            mlm.preset(size.mlm, learning_rates=(rate,), gammas=(GAMMA,), **{"depth": depth, **size.mlm_changes}),
            "stdlib",
            ("shaped-recover", "pre-ln"),
            [seed],
        )
    }
    jobs = {"vit": visions, "mlm": languages}
    return {name: jobs[name] for name in size.order}


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
            finished = finish_all(jobs, budget)
            print_plain(f"{', '.join(PICTURES[name])}: {finished} of {len(jobs)} runs are finished.")
            if finished < len(jobs):
                draw_so_far(root)
                print_plain(f"The minutes are over; the same command resumes. The runs are in {root}.")
                return False
            draw(name, root)
    print_plain(f"All is done. The runs are in {root}.")
    return True


def finish_all(jobs: Jobs, budget: Any) -> int:
    """Finish runs until the budget is spent; return how many are. The two variants of a setting share what is left."""
    from limitformer_papers.training.interrupts import Budget, time_is_up, within
    from limitformer_papers.training.plan import SUMMARY

    pairs = list(jobs.items())
    for (folder, train), (other, train_other) in zip(pairs[::2], pairs[1::2], strict=True):
        left = (budget.end - budget.clock()) / 60
        if left > 0:
            with within(Budget(left / 2, budget.clock)):
                finish(folder, train)
        if not time_is_up():
            finish(other, train_other)
        if not time_is_up():
            finish(folder, train)
    return sum((folder / SUMMARY).exists() for folder in jobs)


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


def draw_so_far(root: Path) -> None:
    """Draw the language models' pictures from runs that have begun, cut at the step that they all have reached.

    Runs with less than half of the steps of the longest one are left out.
    """
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    from limitformer_papers import make
    from limitformer_papers.training.harness import summary_of
    from limitformer_papers.training.log import FILE, curve, read_log
    from limitformer_papers.training.plan import RUN, SUMMARY, finite, read_json, write_json

    logs = {path.parent: read_log(path.parent) for path in root.glob(f"*/{FILE}")}
    done = {folder: int(curve(log, "loss")[0][-1]) for folder, log in logs.items()}
    begun = [folder for folder in logs if 2 * done[folder] >= max(done.values())]
    steps = min((done[folder] for folder in begun), default=0)
    with TemporaryDirectory() as aside:
        for folder in begun:
            log, copy = logs[folder].filter(pc.less_equal(logs[folder]["step"], steps)), Path(aside) / folder.name
            run = read_json(folder / RUN)
            copy.mkdir()
            write_json(copy / RUN, run | {"plan": run["plan"] | {"steps": steps}})
            write_json(copy / SUMMARY, {"eval_loss": None, **finite(summary_of(log, steps))})
            pq.write_table(log, copy / FILE)
        for name in PICTURES["mlm"] if begun else ():
            try:
                print_plain(f"So far: {make(name, out=root / 'so-far', runs=aside).paths[0]}")
            except InputError as error:  # nothing was logged yet that it shows
                print_plain(f"{name} is not drawn so far: {error}")


def main(
    size: Annotated[str, typer.Option(help="tiny (a test on a CPU), small, medium or paper.")] = "paper",
    minutes: Annotated[float, typer.Option(help="Wall time of this command.")] = 8.0,
    out: Annotated[Path, typer.Option(help="Folder of all runs.")] = Path("runs"),
    data: Annotated[
        Path | None, typer.Option(help="Folder of Fashion-MNIST's IDX files, or of CIFAR-10.", show_default="Debian's")
    ] = None,
) -> None:
    """Run the papers' training experiments for some minutes; the same command resumes them."""
    with errors_in_one_line():
        from limitformer_papers.training.interrupts import Budget

        continue_runs(size, Budget(minutes), out, data)


if __name__ == "__main__":
    typer.run(main)
