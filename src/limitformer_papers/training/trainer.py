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
from limitformer_papers.training.data.batches import Batches
from limitformer_papers.training.evaluation import Metrics, evaluate
from limitformer_papers.training.interrupts import TrainingInterrupted
from limitformer_papers.training.log import FILE, Log, curve, read_table
from limitformer_papers.training.plan import Plan, processes
from limitformer_papers.training.watch import Watch

WEIGHTS = "weights.pt"
LAST = 0.1  # of the steps: their mean loss is the final one
LOST = 2.0  # times the first loss
SCHEDULES = {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine"}
Collate = Callable[[list[Any]], dict[str, Any]]


def as_parameters(optimiser: torch.optim.Optimizer) -> None:
    """A hook after a state is loaded: averages of strengths had no dimension in version 0.1 (`nn.strengths`)."""
    for parameter, state in optimiser.state.items():
        for name in ("exp_avg", "exp_avg_sq"):
            if name in state:
                state[name] = state[name].reshape(parameter.shape)


class Run(Trainer):
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
        self.watch = Watch(plan, self.rows)
        super().__init__(
            model=model,
            args=arguments(plan, eval_data is not None),
            data_collator=collate,
            train_dataset=train_data,
            eval_dataset=eval_data,
            compute_metrics=compute_metrics,
            callbacks=[self.watch, *(one for one in callbacks if one is not self.rows), self.rows],
        )
        self.remove_callback(PrinterCallback)
        self.rows.path = plan.folder / FILE if self.is_world_process_zero() else None

    @property
    def kept(self) -> Path:
        """Where checkpoints are."""
        return self.plan.folder / "checkpoints"

    def whole(self, about: Mapping[str, Any]) -> Mapping[str, float]:
        """The run from where it is to its end; the summary."""
        found, damaged = checkpoints.newest(self.kept)
        self.accelerator.wait_for_everyone()  # nobody writes while another still looks
        if self.is_world_process_zero():
            runs.write_run(self.plan, about)
            self.announce(found, damaged)
            shutil.rmtree(self.args.output_dir, ignore_errors=True)  # what an earlier process left half-written
        self.resume(found)
        try:
            if found is None or found.step < self.plan.steps:
                self.train(resume_from_checkpoint=None if found is None else str(found.folder))
            else:  # it was stopped between its last checkpoint and its summary
                self._load_from_checkpoint(str(found.folder))
        finally:
            self.watch.close()
        if self.watch.stopped is not None:
            raise TrainingInterrupted(self.plan.folder, self.watch.stopped, self.plan.steps)
        return self.finish()

    def resume(self, found: Checkpoint | None) -> None:
        """Log and clock as they were at the checkpoint."""
        step = 0 if found is None else found.step
        if found is not None:
            self.rows.restore(read_table(found.folder / FILE), step)
            self.rows.write()
            self.watch.earlier = float(found.notes["seconds"])
        self.watch.began = perf_counter()
        if self.plan.tensorboard and self.is_world_process_zero():
            from torch.utils.tensorboard import SummaryWriter  # slow to import

            # What an earlier process wrote past the checkpoint is purged from the display.
            board: Any = SummaryWriter(str(self.plan.folder / "tensorboard"), purge_step=step + 1 if step else None)
            self.rows.board = board

    def announce(self, found: Checkpoint | None, damaged: list[Path]) -> None:
        """Say where it goes on, which checkpoints are of no use, and whether the processes are other ones."""
        if damaged:
            names = ", ".join(path.name for path in damaged)
            start = "the beginning" if found is None else found.folder.name
            print_line(f"Damaged: {names} in {self.kept}. The run goes on from {start}.")
        if found is None:
            return
        print_line(f"Goes on from step {found.step} of {self.plan.steps}: {self.plan.folder}")
        before, now = runs.read_json(self.plan.folder / runs.RUN).get("processes", processes()), processes()
        if before != now:
            print_line(
                f"It was begun with {before} processes and has {now} now: the same run, but not to the last bit."
            )

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Batches in an order of our own, the same for any number of processes."""
        plan, place = self.plan, {"process": self.args.process_index, "processes": self.args.world_size}
        batches = Batches(self.train_dataset, plan.batch, plan.steps, plan.seed, **place)
        return DataLoader(self.train_dataset, batch_sampler=batches, collate_fn=self.data_collator)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """AdamW with the moments of the papers; gains, slopes, λ, γ, norms and biases do not decay."""
        if self.optimizer is None:
            alone = set(without_decay(self.model))
            named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
            groups = [
                {"params": [p for name, p in named if name not in alone], "weight_decay": self.plan.weight_decay},
                {"params": [p for name, p in named if name in alone], "weight_decay": 0.0},
            ]
            self.optimizer = torch.optim.AdamW(groups, lr=self.plan.learning_rate, betas=(0.9, 0.999))
            self.optimizer.register_load_state_dict_post_hook(as_parameters)
        return self.optimizer

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """One step; its loss goes to the watch."""
        loss: torch.Tensor = super().training_step(*args, **kwargs)
        self.watch.loss = loss
        return loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """The Trainer's numbers but the loss, of which the watch logs every step's."""
        kept = {name: value for name, value in logs.items() if name != "loss" and not name.startswith("train_")}
        super().log(kept, *args, **kwargs)

    def evaluate(self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval") -> Any:
        """Loss and metrics on the held-out data."""
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
        """The weights as they are, under their own names: `save_pretrained` may rename them."""
        if self.is_world_process_zero():
            folder = Path(self.args.output_dir if output_dir is None else output_dir)
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(self.model.state_dict(), folder / WEIGHTS)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """The weights of a checkpoint, every one of them."""
        weights = torch.load(Path(resume_from_checkpoint) / WEIGHTS, map_location="cpu", weights_only=True)
        self.model.load_state_dict(weights)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Written aside by the Trainer, with the log; then sealed and given its name."""
        step = self.state.global_step
        try:
            super()._save_checkpoint(model, trial)
        except (OSError, RuntimeError) as error:  # torch says of a full disk that its writer failed
            reason = str(error).splitlines()[0]
            raise InputError(f"Cannot write a checkpoint into {self.kept}: {reason}. What is there stays.") from error
        self.accelerator.wait_for_everyone()
        if self.is_world_process_zero():
            name = f"{checkpoints.PREFIX}{step}"
            staged = Path(self.args.output_dir) / name
            self.rows.write()
            self.rows.write(staged / FILE)
            checkpoints.seal(staged, self.kept / name, {"seconds": self.watch.seconds()})
            checkpoints.thin(self.kept, self.plan.keep_checkpoints)
        self.accelerator.wait_for_everyone()

    def finish(self) -> Mapping[str, float]:
        """Write log, model and summary; nothing of the model if it diverged."""
        summary = self.summary()
        if self.is_world_process_zero():
            self.rows.write()
            if not summary["diverged"]:
                write_whole(self.plan.folder / "model", self.save_trained)
            runs.write_json(self.plan.folder / runs.SUMMARY, summary)
        self.accelerator.wait_for_everyone()
        return summary

    def save_trained(self, folder: Path) -> None:
        """The model as its class saves it, or else its weights."""
        folder.mkdir()
        save = getattr(self.model, "save_pretrained", None)
        if save is not None:
            save(folder)
        else:
            save_model(self.model, str(folder / "model.safetensors"))

    def summary(self) -> dict[str, float]:
        """All of it from the log, so it is the same for a run that was interrupted."""
        log = self.rows.table()
        steps, losses = curve(log, "loss")
        names = {name for name in log["name"].to_pylist() if name.startswith("eval_")}
        found = {name: float(curve(log, name)[1][-1]) for name in sorted(names)}
        last = float(np.mean(losses[-ceil(LAST * self.plan.steps) :]))
        # A step before NaN, the loss of a lost run may still be a number, a hundred thousand times too large.
        diverged = not isfinite(last) or last > LOST * losses[0] or not isfinite(found.get("eval_loss", 0.0))
        return {
            "train_loss": nan if diverged else last,
            **{name: nan if diverged else value for name, value in found.items()},
            "seconds": self.watch.seconds(),
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "steps": int(steps[-1]),
            "diverged": diverged,
        }


def arguments(plan: Plan, evaluates: bool) -> TrainingArguments:
    """The plan in the Trainer's words; it prints nothing and reports to nobody.

    Raises:
        InputError: bf16 on a device that has none.
    """
    try:
        found = made(plan, evaluates)
    except ValueError as error:
        if not plan.bf16:
            raise
        reason = str(error).splitlines()[0]
        raise InputError(f"bf16 cannot be had here: {reason} Nearest: bf16=False (--no-bf16).") from error
    if found.n_gpu > 1:  # without a launcher one process takes one GPU: `DataParallel` would multiply the batch
        found._n_gpu = 1
    return found


def made(plan: Plan, evaluates: bool) -> TrainingArguments:
    """The same, with whatever the Trainer says of it."""
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
        use_cpu=not torch.cuda.is_available(),  # what else there may be (MPS) has not been tried
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
