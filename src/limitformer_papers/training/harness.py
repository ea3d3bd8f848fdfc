r"""Train one run with the Trainer of Hugging Face; it can be interrupted at any time.

Each run has its own folder:

    run.json      its description, its plan, and the versions it was started with
    checkpoints/  the newest checkpoints, complete or absent
    log.parquet   the log; rows up to a checkpoint's step are on disk before the checkpoint is
    tensorboard/  the log for TensorBoard
    model/        the trained model
    summary.json  the result; a folder that has it is finished

The same call resumes where the last one stopped, to the last bit on a CPU: weights, moments, generators and log come
from the newest complete checkpoint, and the order of the data is a function of the seed and the step. A run has one
process and one GPU; a grid (`training.grid`) makes several runs at a time.

To the Trainer, a run is one long epoch: `state.epoch` is the fraction of the run that is done.

The held-out loss is the mean over all labels, Σ_b n_b loss_b / Σ_b n_b over the batches b; n_b counts the labels of b
that are not −100. Evaluation draws no random numbers, so its frequency does not change a run.
"""

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import ceil, isfinite, nan
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from filelock import FileLock, Timeout
from safetensors.torch import save_model
from torch import nn
from torch.utils.data import DataLoader
from transformers import EvalPrediction, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from limitformer.base.errors import InputError, require
from limitformer.base.files import check_writable, write_whole
from limitformer.base.progress import advance, print_line, progress_bar
from limitformer.nn import without_decay
from limitformer.subjects.configurations import quiet_transformers
from limitformer_papers.training import checkpoints
from limitformer_papers.training import plan as plans
from limitformer_papers.training.checkpoints import Checkpoint
from limitformer_papers.training.data.batches import (
    Batches,
    BatchesInEpochs,
    InEpochs,
    ignore_interrupts,
    steps_per_epoch,
)
from limitformer_papers.training.data.masking import IGNORED
from limitformer_papers.training.interrupts import Interrupt, TrainingInterrupted, deferred
from limitformer_papers.training.log import FILE, Log, curve, read_table
from limitformer_papers.training.plan import BACKEND, Plan, check_compiled, device_name, has_gpu
from limitformer_papers.training.plan import read_runs as read_runs

WEIGHTS = "weights.pt"
LAST = 0.1  # share of the steps whose mean loss is the final one
LOST = 2.0  # a run diverged if it ends above this multiple of its first loss
SCHEDULES = {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine"}
Collate = Callable[[list[Any]], dict[str, Any]]
Metrics = Callable[[EvalPrediction], dict[str, float]]


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
        InputError: another run in the folder, too few data, another process that trains the run, TF32 or compilation
            on a device without it, or several processes of torchrun.
        TrainingInterrupted: Ctrl-C, or the end of the time budget (`interrupts.within`); a checkpoint was written.
    """
    steps_per_epoch(len(train_data), plan.batch)
    require(eval_data is None or len(eval_data) > 0, "There are no examples to evaluate on; got none.")
    number = os.environ.get("WORLD_SIZE", "1")
    require(
        number == "1", f"A run has one process; torchrun has started {number}. Nearest: several runs, by --workers."
    )
    finished = plans.opened(plan, about)
    if finished is not None:
        print_line(f"Already finished: {plan.folder}")
        return finished
    plans.check_device(plan)
    check_writable(plan.folder)
    used = threads(plan.threads), plans.matrix_products(plan.tf32)
    with exclusive_access(plan.folder), quiet_transformers(), used[0], used[1], deferred() as interrupt:
        trainer = ResumableTrainer(
            model, plan, train_data, eval_data, collate, list(callbacks), compute_metrics, eval_collate
        )
        trainer.monitor.interrupt = interrupt
        return trainer.train_or_resume(about)


@contextmanager
def exclusive_access(folder: Path) -> Iterator[None]:
    """Hold the run's lock inside the block; the system frees the lock of a killed process."""
    try:
        lock = FileLock(folder / ".lock", timeout=0).acquire()
    except Timeout as error:
        nearest = "Nearest: wait until it has ended, or another folder."
        raise InputError(f"Another process is training this run: {folder}. {nearest}") from error
    with lock:
        yield


@contextmanager
def threads(number: int | None) -> Iterator[None]:
    """Set the number of torch's threads inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(before if number is None else number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class StepMonitor(TrainerCallback):
    """Log the loss of every step, show it, and stop a run that diverged or was interrupted.

    Attributes:
        loss: loss of the step.
        stopped: step at which Ctrl-C or the time budget ended it, or None.
        earlier: seconds of the run before this process.
    """

    def __init__(self, plan: Plan, log: Log) -> None:
        self.plan, self.rows = plan, log
        self.loss = torch.tensor(0.0)
        self.interrupt = Interrupt()
        self.stopped: int | None = None
        self.earlier, self.began = 0.0, perf_counter()
        self.bar: Any = None

    def seconds(self) -> float:
        """Return the seconds of training, of all processes that worked on the run one after another."""
        return self.earlier + perf_counter() - self.began

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.bar = progress_bar("training", self.plan.steps)

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Check the step and overrule the Trainer's decisions if the run must stop."""
        loss = float(self.loss.detach())
        self.rows.record(state.global_step, "loss", loss)
        if self.bar is not None:
            self.bar.progress.update(self.bar.progress.tasks[0].id, description=f"training, loss {loss:.3f}")
            advance(self.bar, state.global_step)
        if not isfinite(loss):
            control.should_training_stop, control.should_save, control.should_evaluate = True, False, False
            print_line(f"Diverged: the loss of step {state.global_step} is {loss}. The run ends: {self.plan.folder}")
        elif self.interrupt.requested and state.global_step < self.plan.steps:
            control.should_training_stop, control.should_save = True, True
            self.stopped = state.global_step

    def close(self) -> None:
        """Remove the bar and close TensorBoard."""
        advance(self.bar, -1)
        if self.rows.board is not None:
            self.rows.board.close()
            self.rows.board = None


class ResumableTrainer(Trainer):
    """The Trainer, with the order of the data, checkpoints, evaluation and log of this package."""

    model: Any
    args: Any
    train_dataset: Any
    eval_dataset: Any

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        train_data: Any,
        eval_data: Any,
        collate: Collate,
        callbacks: list[TrainerCallback],
        compute_metrics: Metrics | None,
        eval_collate: Collate | None = None,
    ) -> None:
        self.plan, self.eval_collate = plan, collate if eval_collate is None else eval_collate
        self.checkpoint_folder = plan.folder / "checkpoints"
        self.rows = next((one for one in callbacks if isinstance(one, Log)), Log())
        self.monitor = StepMonitor(plan, self.rows)
        self.compiled: Any = None
        super().__init__(
            model=model,
            args=arguments(plan, eval_data is not None),
            data_collator=collate,
            train_dataset=train_data,
            eval_dataset=eval_data,
            compute_metrics=compute_metrics,
            callbacks=[self.monitor, *(one for one in callbacks if one is not self.rows), self.rows],
        )
        self.remove_callback(PrinterCallback)
        self.rows.path = plan.folder / FILE

    def train_or_resume(self, about: Mapping[str, Any]) -> Mapping[str, float]:
        """Train from the newest checkpoint to the end and return the summary."""
        checkpoint, damaged = checkpoints.newest(self.checkpoint_folder)
        plans.write_run(self.plan, about)
        self.announce(checkpoint, damaged)
        shutil.rmtree(self.args.output_dir, ignore_errors=True)  # half-written by an earlier process
        self.resume(checkpoint)
        try:
            if checkpoint is None or checkpoint.step < self.plan.steps:
                self.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint.folder))
            else:  # it stopped between its last checkpoint and its summary
                self._load_from_checkpoint(str(checkpoint.folder))
        finally:
            self.monitor.close()
        if self.monitor.stopped is not None:
            minutes = self.monitor.interrupt.minutes
            raise TrainingInterrupted(self.plan.folder, self.monitor.stopped, self.plan.steps, minutes)
        return self.finish()

    def resume(self, checkpoint: Checkpoint | None) -> None:
        """Restore log and clock of the checkpoint."""
        step = 0 if checkpoint is None else checkpoint.step
        if checkpoint is not None:
            self.rows.restore(read_table(checkpoint.folder / FILE), step)
            self.rows.write()
            self.monitor.earlier = float(checkpoint.notes["seconds"])
        self.monitor.began = perf_counter()
        if self.plan.tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # slow to import

            # Rows that an earlier process wrote past the checkpoint are purged from the display.
            board: Any = SummaryWriter(str(self.plan.folder / "tensorboard"), purge_step=step + 1 if step else None)
            self.rows.board = board

    def announce(self, checkpoint: Checkpoint | None, damaged: list[Path]) -> None:
        """Print where the run resumes, which checkpoints are damaged, and whether the device changed."""
        if damaged:
            names = ", ".join(path.name for path in damaged)
            start = "the beginning" if checkpoint is None else checkpoint.folder.name
            print_line(f"Damaged: {names} in {self.checkpoint_folder}. The run resumes from {start}.")
        if checkpoint is None:
            return
        print_line(f"Resumes from step {checkpoint.step} of {self.plan.steps}: {self.plan.folder}")
        begun = plans.read_json(self.plan.folder / plans.RUN).get("device", device_name())
        if begun != device_name():
            print_line(f"It was begun with {begun} and has {device_name()} now: the same run, but not to the last bit.")

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return batches in an order that depends only on the seed."""
        plan = self.plan
        batches = Batches(self.train_dataset, plan.batch, plan.steps, plan.seed)
        return DataLoader(
            InEpochs(self.train_dataset),
            batch_sampler=BatchesInEpochs(batches),
            collate_fn=self.data_collator,
            num_workers=plan.loaders,
            worker_init_fn=ignore_interrupts,
        )

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Return AdamW with the moments of the papers; gains, slopes, λ, γ, norms and biases do not decay."""
        if self.optimizer is None:
            undecayed = set(without_decay(self.model))
            named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
            groups = [
                {"params": [p for name, p in named if name not in undecayed], "weight_decay": self.plan.weight_decay},
                {"params": [p for name, p in named if name in undecayed], "weight_decay": 0.0},
            ]
            self.optimizer = torch.optim.AdamW(groups, lr=self.plan.learning_rate, betas=(0.9, 0.999))
        return self.optimizer

    def training_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Make one step, compiled if so planned, and pass its loss to the monitor."""
        plain = self.compile_steps(model, inputs, *args, **kwargs) if self.plan.compile else None
        loss: torch.Tensor = super().training_step(
            self.compiled if self.plan.compile else model, inputs, *args, **kwargs
        )
        if plain is not None:
            check_compiled(plain, float(loss))
        self.monitor.loss = loss
        return loss

    def compile_steps(self, model: nn.Module, inputs: Any, number: Any = None) -> float | None:
        """Compile the model, in the first step of a command, and return its loss by plain torch; later return None.

        Evaluation and callbacks call the plain model.
        """
        if self.compiled is not None:
            return None
        self.compiled = torch.compile(model, backend=BACKEND)
        devices = [torch.cuda.current_device()] if has_gpu() else []
        with torch.no_grad(), torch.random.fork_rng(devices):
            model.train()
            loss: Any = self.compute_loss(model, self._prepare_inputs(inputs), num_items_in_batch=number)
            return float(loss)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log the Trainer's numbers except the loss, of which the monitor logs every step."""
        logged = {name: value for name, value in logs.items() if name != "loss" and not name.startswith("train_")}
        super().log(logged, *args, **kwargs)

    def evaluate(self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval") -> Any:
        """Return loss and metrics on the held-out data."""
        metrics = evaluate(
            self.model,
            self.eval_dataset if eval_dataset is None else eval_dataset,
            batch=self.plan.batch,
            collate=self.eval_collate,
            place=self._prepare_inputs,
            compute_metrics=self.compute_metrics,
        )
        named = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
        self.log(named)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, named)
        return named

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Save the weights under their own names: `save_pretrained` may rename them."""
        folder = Path(self.args.output_dir if output_dir is None else output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(self.model.state_dict(), folder / WEIGHTS)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load all weights of a checkpoint."""
        weights = torch.load(Path(resume_from_checkpoint) / WEIGHTS, map_location="cpu", weights_only=True)
        self.model.load_state_dict(weights)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Let the Trainer write to a temporary folder, add the log, then seal and rename it."""
        step = self.state.global_step
        try:
            super()._save_checkpoint(model, trial)
        except (OSError, RuntimeError) as error:  # torch reports a full disk as a failed writer
            reason = str(error).splitlines()[0]
            raise InputError(
                f"Cannot write a checkpoint into {self.checkpoint_folder}: {reason}. Earlier ones stay."
            ) from error
        name = f"{checkpoints.PREFIX}{step}"
        staged = Path(self.args.output_dir) / name
        self.rows.write()
        self.rows.write(staged / FILE)
        checkpoints.seal(staged, self.checkpoint_folder / name, {"seconds": self.monitor.seconds()})
        checkpoints.thin(self.checkpoint_folder, self.plan.keep_checkpoints)

    def finish(self) -> Mapping[str, float]:
        """Write log, model and summary; no model if the run diverged."""
        summary = self.summary()
        self.rows.write()
        if not summary["diverged"]:
            write_whole(self.plan.folder / "model", self.save_trained)
        plans.write_json(self.plan.folder / plans.SUMMARY, summary)
        return summary

    def save_trained(self, folder: Path) -> None:
        """Save the model by its own `save_pretrained`, or its weights without one."""
        folder.mkdir()
        save = getattr(self.model, "save_pretrained", None)
        if save is not None:
            save(folder)
        else:
            save_model(self.model, str(folder / "model.safetensors"))

    def summary(self) -> dict[str, float]:
        """Compute the summary from the log, so that an interrupted run has the same."""
        parameters = sum(p.numel() for p in self.model.parameters())
        more = {"seconds": self.monitor.seconds(), "parameters": parameters}
        return {**summary_of(self.rows.table(), self.plan.steps), **more}


def summary_of(log: pa.Table, steps: int) -> dict[str, float]:
    """Return losses and metrics at the end of the log of a run of `steps` steps, NaN if the run diverged."""
    done, losses = curve(log, "loss")
    names = {name for name in log["name"].to_pylist() if name.startswith("eval_")}
    results = {name: float(curve(log, name)[1][-1]) for name in sorted(names)}
    last = float(np.mean(losses[-ceil(LAST * steps) :]))
    # The loss just before NaN may be finite but a hundred thousand times too large.
    diverged = not isfinite(last) or last > LOST * losses[0] or not isfinite(results.get("eval_loss", 0.0))
    return {
        "train_loss": nan if diverged else last,
        **{name: nan if diverged else value for name, value in results.items()},
        "steps": int(done[-1]),
        "diverged": diverged,
    }


def arguments(plan: Plan, evaluates: bool) -> TrainingArguments:
    """Return the plan as arguments of a Trainer that prints and reports nothing.

    Raises:
        InputError: bf16 on a device that has none.
    """
    try:
        training_arguments = TrainingArguments(
            output_dir=str(plan.folder / "checkpoints" / "unfinished"),
            max_steps=plan.steps,
            per_device_train_batch_size=plan.batch,
            learning_rate=plan.learning_rate,
            warmup_steps=plan.warmup,
            lr_scheduler_type=SCHEDULES[plan.schedule],
            weight_decay=plan.weight_decay,
            max_grad_norm=0.0 if plan.clip is None else plan.clip,
            seed=plan.seed,
            bf16=plan.bf16,
            use_cpu=not torch.cuda.is_available(),  # other devices (MPS) are not tested
            logging_steps=plan.log_every,
            logging_nan_inf_filter=False,
            eval_strategy="steps" if evaluates else "no",
            eval_steps=plan.evaluate_every,
            save_strategy="steps",
            save_steps=plan.save_every,
            report_to="none",
            disable_tqdm=True,
            log_level="error",
            remove_unused_columns=False,
            dataloader_num_workers=0,
            dataloader_pin_memory=False,
        )
    except ValueError as error:
        if not plan.bf16:
            raise
        reason = str(error).splitlines()[0]
        raise InputError(f"bf16 is not available here: {reason} Nearest: bf16=False (--no-bf16).") from error
    if training_arguments.n_gpu > 1:  # `DataParallel` would multiply the batch
        training_arguments._n_gpu = 1
    return training_arguments


@torch.no_grad()
def evaluate(
    model: nn.Module,
    data: Any,
    *,
    batch: int,
    collate: Callable[[list[Any]], Any],
    place: Callable[[Any], Any],
    compute_metrics: Metrics | None = None,
) -> dict[str, float]:
    """Return `loss` and the metrics that `compute_metrics` computes from all predictions.

    Args:
        model: gives a loss, as its output's "loss" or first entry, and for metrics "logits", or the second.
        data: has a length and items.
        batch: items in a batch.
        collate: items to the model's keyword arguments, "labels" among them.
        place: brings them to the model's device.
        compute_metrics: as of the Trainer.
    """
    model.eval()
    labelled = total = 0.0
    predictions, targets = [], []
    for first in range(0, len(data), batch):
        inputs = place(collate([data[i] for i in range(first, min(first + batch, len(data)))]))
        outputs = model(**inputs)
        loss, logits = ("loss", "logits") if isinstance(outputs, dict) else (0, 1)
        number = float((inputs["labels"] != IGNORED).sum())
        if number > 0:  # the loss of a batch without labels is NaN
            labelled, total = labelled + number, total + number * float(outputs[loss])
        if compute_metrics is not None:
            predictions.append(outputs[logits].float().cpu().numpy())
            targets.append(inputs["labels"].cpu().numpy())
    mean = total / labelled if labelled else nan
    if compute_metrics is None:
        return {"loss": mean}
    every = EvalPrediction(predictions=np.concatenate(predictions), label_ids=np.concatenate(targets))
    return {"loss": mean, **compute_metrics(every)}
