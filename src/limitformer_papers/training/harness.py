r"""What all experiments share: one run of the Trainer of Hugging Face, which can be interrupted at any time.

A run lives in a folder of its own:

    run.json      what it is, its plan, the versions it was started with
    checkpoints/  the newest ones, whole or not there
    log.parquet   the log; rows up to a checkpoint's step are on disk before the checkpoint is
    tensorboard/  the same for TensorBoard
    model/        what was trained
    summary.json  how it ended; a folder that has it is finished

The same call, with as many processes, goes on where the last one stopped, to the last bit on a CPU: weights, moments,
generators and log come from the newest complete checkpoint, and the order of the data is a function of the seed and the
step. Losses are means over the batch of all processes. A model whose loss is no mean over examples (masked language
models have a mean over masked tokens) must take `num_items_in_batch`, as models of `transformers` do; else processes
would count alike.

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
from transformers.utils import logging

from limitformer.base.errors import InputError, require
from limitformer.base.files import check_writable
from limitformer.base.progress import print_line
from limitformer_papers.training import runs
from limitformer_papers.training.data.batches import steps_per_epoch
from limitformer_papers.training.evaluation import Metrics
from limitformer_papers.training.interrupts import deferred
from limitformer_papers.training.plan import Plan, processes, rank
from limitformer_papers.training.runs import FinishedRun as FinishedRun
from limitformer_papers.training.runs import read_runs as read_runs
from limitformer_papers.training.trainer import Collate, Run


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
    """Train `model` as planned, or go on with it, or return at once what came out.

    Args:
        model: called with what `collate` makes; gives a loss, and logits where there are metrics.
        plan: steps, batch, learning rate, folder, …
        train_data, eval_data: have a length and items; data that change by epoch have `set_epoch`. `eval_data` None:
            no evaluation.
        collate: a list of items to the model's keyword arguments, "labels" among them.
        callbacks: of the Trainer. A `Log` among them becomes the run's log.
        compute_metrics: as of the Trainer, for all of `eval_data`; its names become "eval_<name>".
        eval_collate: `collate` for `eval_data`; None: the same.
        about: what is run, to JSON: another run in the folder must not have another.

    Returns:
        The summary: `train_loss`, the mean of the last tenth of the steps; `eval_loss` and metrics; `seconds`,
        `parameters`, `steps` done, and `diverged`: whether a loss was not finite, when the run ends, or ended above
        twice the first one. Losses and metrics of a run that diverged are NaN.

    Raises:
        InputError: another run in the folder, a batch that the processes cannot share, too few data, another
            process at work on the run.
        TrainingInterrupted: Ctrl-C; a checkpoint is there.
    """
    check(plan, train_data, eval_data)
    known = runs.opened(plan, about)
    if known is not None:
        if rank() == 0:
            print_line(f"Was finished before: {plan.folder}")
        return known
    check_writable(plan.folder)
    with alone(plan.folder), quiet(), threads(plan.threads), deferred() as interrupt:
        run = Run(model, plan, train_data, eval_data, collate, list(callbacks), compute_metrics, eval_collate)
        run.watch.interrupt = interrupt
        return run.whole(about)


def check(plan: Plan, train_data: Any, eval_data: Any) -> None:
    """Raise `InputError` unless the data suffice and processes can share a batch."""
    steps_per_epoch(len(train_data), plan.batch)
    require(eval_data is None or len(eval_data) > 0, "There are no examples to evaluate on; got none.")
    number = processes()
    require(
        plan.batch % number == 0,
        f"{number} processes must divide the batch; got batch={plan.batch}. "
        f"Nearest: {max(1, plan.batch // number) * number}.",
    )


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Nobody else works on the run in the block; the system frees the lock of a process that was killed."""
    if rank() > 0:
        yield
        return
    lock = FileLock(folder / ".lock", timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        nearest = "Nearest: wait until it has ended, or another folder."
        raise InputError(f"Another process is at work on this run: {folder}. {nearest}") from error
    try:
        yield
    finally:
        lock.release()


@contextmanager
def quiet() -> Iterator[None]:
    """Transformers without its own bars and messages, inside the block only; the Trainer sets their level, too."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def threads(number: int | None) -> Iterator[None]:
    """Torch with so many threads, inside the block only."""
    before = torch.get_num_threads()
    torch.set_num_threads(before if number is None else number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
