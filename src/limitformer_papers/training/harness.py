r"""Train one run with the Trainer of Hugging Face; it can be interrupted at any time.

Each run has its own folder:

    run.json      its description, its plan, and the versions it was started with
    checkpoints/  the newest checkpoints, complete or absent
    log.parquet   the log; rows up to a checkpoint's step are on disk before the checkpoint is
    tensorboard/  the log for TensorBoard
    model/        the trained model
    summary.json  the result; a folder that has it is finished

The same call, with as many processes, resumes where the last one stopped, to the last bit on a CPU: weights,
moments, generators and log come from the newest complete checkpoint, and the order of the data is a function of the
seed and the step. Losses are means over the batch of all processes. A model whose loss is not a mean over examples
(masked language models average over masked tokens) must take `num_items_in_batch`, as models of `transformers` do;
otherwise every process would have the same weight.

To the Trainer, a run is one long epoch: `state.epoch` is the fraction of the run that is done.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from torch import nn
from transformers import TrainerCallback

from limitformer.base.errors import InputError, require
from limitformer.base.files import check_writable
from limitformer.base.progress import print_line
from limitformer.weightless.quiet import quiet_transformers
from limitformer_papers.training import runs
from limitformer_papers.training.data.batches import steps_per_epoch
from limitformer_papers.training.device import check_device, matrix_products
from limitformer_papers.training.evaluation import Metrics
from limitformer_papers.training.interrupts import deferred
from limitformer_papers.training.plan import Plan, processes, rank
from limitformer_papers.training.runs import FinishedRun as FinishedRun
from limitformer_papers.training.runs import read_runs as read_runs
from limitformer_papers.training.trainer import Collate, ResumableTrainer


def train(
    model: nn.Module,
    plan: Plan,
    *,
    train_data: Any,
    eval_data: Any,
    collate: Collate,
    callbacks: Sequence[TrainerCallback] = (),
    compute_metrics: Metrics | None = None,
    eval_collate: Collate | None = None,
    about: Mapping[str, Any],
) -> Mapping[str, float]:
    """Train `model` as planned, or resume it, or return the summary of a finished run.

    Args:
        model: called with the output of `collate`; returns a loss, and logits if there are metrics.
        plan: steps, batch, learning rate, folder, …
        train_data, eval_data: have a length and items; data that change by epoch have `set_epoch`. `eval_data` None:
            no evaluation.
        collate: a list of items to the model's keyword arguments, "labels" among them.
        callbacks: callbacks of the Trainer. A `Log` among them becomes the run's log.
        compute_metrics: that of the Trainer, for all of `eval_data`; its names become "eval_<name>".
        eval_collate: `collate` for `eval_data`; None: the same.
        about: description of the run, for JSON; a run with another description must not be in the folder.

    Returns:
        The summary: `train_loss`, the mean of the last tenth of the steps; `eval_loss` and metrics; `seconds`,
        `parameters`, `steps` done, and `diverged`: whether a loss was not finite, which ends the run, or ended above
        twice the first one. Losses and metrics of a run that diverged are NaN.

    Raises:
        InputError: another run in the folder, a batch that the processes cannot share, too few data, another
            process that trains the run, TF32 or compilation on a device without it.
        TrainingInterrupted: Ctrl-C, or the end of the time budget (`interrupts.within`); a checkpoint was written.
    """
    check(plan, train_data, eval_data)
    known = runs.opened(plan, about)
    if known is not None:
        if rank() == 0:
            print_line(f"Already finished: {plan.folder}")
        return known
    check_device(plan)
    check_writable(plan.folder)
    used = threads(plan.threads), matrix_products(plan.tf32)
    with exclusive_access(plan.folder), quiet_transformers(), used[0], used[1], deferred() as interrupt:
        trainer = ResumableTrainer(
            model, plan, train_data, eval_data, collate, list(callbacks), compute_metrics, eval_collate
        )
        trainer.monitor.interrupt = interrupt
        return trainer.train_or_resume(about)


def check(plan: Plan, train_data: Any, eval_data: Any) -> None:
    """Raise `InputError` unless the data suffice and the processes can share a batch."""
    steps_per_epoch(len(train_data), plan.batch)
    require(eval_data is None or len(eval_data) > 0, "There are no examples to evaluate on; got none.")
    number = processes()
    require(
        plan.batch % number == 0,
        f"{number} processes must divide the batch; got batch={plan.batch}. "
        f"Nearest: {max(1, plan.batch // number) * number}.",
    )


@contextmanager
def exclusive_access(folder: Path) -> Iterator[None]:
    """Hold the run's lock inside the block; the system frees the lock of a killed process."""
    if rank() > 0:
        yield
        return
    lock = FileLock(folder / ".lock", timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        nearest = "Nearest: wait until it has ended, or another folder."
        raise InputError(f"Another process is training this run: {folder}. {nearest}") from error
    try:
        yield
    finally:
        lock.release()


@contextmanager
def threads(number: int | None) -> Iterator[None]:
    """Set the number of torch's threads inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(before if number is None else number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
