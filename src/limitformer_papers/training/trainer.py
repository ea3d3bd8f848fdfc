"""The Trainer of Hugging Face with the order of the data, checkpoints, evaluation and log of this package."""

import shutil
from collections.abc import Callable, Mapping
from math import ceil, isfinite, nan
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_model
from torch import nn
from torch.utils.data import DataLoader
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from limitformer.base.errors import InputError
from limitformer.base.files import write_whole
from limitformer.base.progress import print_line
from limitformer.nn import without_decay
from limitformer_papers.training import checkpoints, runs
from limitformer_papers.training.checkpoints import Checkpoint
from limitformer_papers.training.data.batches import Batches, BatchesInEpochs, InEpochs, ignore_interrupts
from limitformer_papers.training.device import BACKEND, check_compiled, device_name, has_gpu
from limitformer_papers.training.evaluation import Metrics, evaluate
from limitformer_papers.training.interrupts import TrainingInterrupted
from limitformer_papers.training.log import FILE, Log, curve, read_table
from limitformer_papers.training.monitor import StepMonitor
from limitformer_papers.training.plan import Plan, processes

WEIGHTS = "weights.pt"
LAST = 0.1  # share of the steps whose mean loss is the final one
LOST = 2.0  # a run diverged if it ends above this multiple of its first loss
SCHEDULES = {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine"}
Collate = Callable[[list[Any]], dict[str, Any]]


def as_parameters(optimiser: torch.optim.Optimizer) -> None:
    """Reshape averages of strengths, which had no dimension in version 0.1 (`nn.strengths`), after a state is
    loaded.
    """
    for parameter, state in optimiser.state.items():
        for name in ("exp_avg", "exp_avg_sq"):
            if name in state:
                state[name] = state[name].reshape(parameter.shape)


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
        self.rows.path = plan.folder / FILE if self.is_world_process_zero() else None

    @property
    def checkpoint_folder(self) -> Path:
        return self.plan.folder / "checkpoints"

    def train_or_resume(self, about: Mapping[str, Any]) -> Mapping[str, float]:
        """Train from the newest checkpoint to the end and return the summary."""
        checkpoint, damaged = checkpoints.newest(self.checkpoint_folder)
        self.accelerator.wait_for_everyone()  # all have read before one writes
        if self.is_world_process_zero():
            runs.write_run(self.plan, about)
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
        if self.plan.tensorboard and self.is_world_process_zero():
            from torch.utils.tensorboard import SummaryWriter  # slow to import

            # Rows that an earlier process wrote past the checkpoint are purged from the display.
            board: Any = SummaryWriter(str(self.plan.folder / "tensorboard"), purge_step=step + 1 if step else None)
            self.rows.board = board

    def announce(self, checkpoint: Checkpoint | None, damaged: list[Path]) -> None:
        """Print where the run resumes, which checkpoints are damaged, and whether the number of processes changed."""
        if damaged:
            names = ", ".join(path.name for path in damaged)
            start = "the beginning" if checkpoint is None else checkpoint.folder.name
            print_line(f"Damaged: {names} in {self.checkpoint_folder}. The run resumes from {start}.")
        if checkpoint is None:
            return
        print_line(f"Resumes from step {checkpoint.step} of {self.plan.steps}: {self.plan.folder}")
        begun = runs.read_json(self.plan.folder / runs.RUN)
        for name, now, unit in (("processes", processes(), " processes"), ("device", device_name(), "")):
            if (before := begun.get(name, now)) != now:
                line = f"It was begun with {before}{unit} and has {now} now: the same run, but not to the last bit."
                print_line(line)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return batches in an order that is the same for any number of processes."""
        plan, place = self.plan, {"process": self.args.process_index, "processes": self.args.world_size}
        batches = Batches(self.train_dataset, plan.batch, plan.steps, plan.seed, **place)
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
            self.optimizer.register_load_state_dict_post_hook(as_parameters)
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
            process=self.args.process_index,
            processes=self.args.world_size,
        )
        named = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
        self.log(named)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, named)
        return named

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Save the weights under their own names: `save_pretrained` may rename them."""
        if self.is_world_process_zero():
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
        self.accelerator.wait_for_everyone()
        if self.is_world_process_zero():
            name = f"{checkpoints.PREFIX}{step}"
            staged = Path(self.args.output_dir) / name
            self.rows.write()
            self.rows.write(staged / FILE)
            checkpoints.seal(staged, self.checkpoint_folder / name, {"seconds": self.monitor.seconds()})
            checkpoints.thin(self.checkpoint_folder, self.plan.keep_checkpoints)
        self.accelerator.wait_for_everyone()

    def finish(self) -> Mapping[str, float]:
        """Write log, model and summary; no model if the run diverged."""
        summary = self.summary()
        if self.is_world_process_zero():
            self.rows.write()
            if not summary["diverged"]:
                write_whole(self.plan.folder / "model", self.save_trained)
            runs.write_json(self.plan.folder / runs.SUMMARY, summary)
        self.accelerator.wait_for_everyone()
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
        log = self.rows.table()
        steps, losses = curve(log, "loss")
        names = {name for name in log["name"].to_pylist() if name.startswith("eval_")}
        results = {name: float(curve(log, name)[1][-1]) for name in sorted(names)}
        last = float(np.mean(losses[-ceil(LAST * self.plan.steps) :]))
        # The loss just before NaN may be finite but a hundred thousand times too large.
        diverged = not isfinite(last) or last > LOST * losses[0] or not isfinite(results.get("eval_loss", 0.0))
        return {
            "train_loss": nan if diverged else last,
            **{name: nan if diverged else value for name, value in results.items()},
            "seconds": self.monitor.seconds(),
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "steps": int(steps[-1]),
            "diverged": diverged,
        }


def arguments(plan: Plan, evaluates: bool) -> TrainingArguments:
    """Return the plan as arguments of a Trainer that prints and reports nothing.

    Raises:
        InputError: bf16 on a device that has none.
    """
    try:
        training_arguments = trainer_arguments(plan, evaluates)
    except ValueError as error:
        if not plan.bf16:
            raise
        reason = str(error).splitlines()[0]
        raise InputError(f"bf16 is not available here: {reason} Nearest: bf16=False (--no-bf16).") from error
    if training_arguments.n_gpu > 1:  # `DataParallel` would multiply the batch
        training_arguments._n_gpu = 1
    return training_arguments


def trainer_arguments(plan: Plan, evaluates: bool) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(plan.folder / "checkpoints" / "unfinished"),
        max_steps=plan.steps,
        per_device_train_batch_size=plan.batch // processes(),
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
