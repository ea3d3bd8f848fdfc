"""A callback of transformers' Trainer that looks at the model."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from limitformer.base.errors import require_count
from limitformer.checking.metrics import Log, to_tensorboard, to_wandb
from limitformer.checking.training import Looks


class CheckTraining(TrainerCallback):
    """Look at a model in transformers' Trainer: `Trainer(…, callbacks=[CheckTraining(every=500, out="checks")])`.

    The numbers of each look also go where the Trainer reports: to the active run of Weights & Biases, and to
    TensorBoard, below `limitformer/`.

    Args:
        text, every, out, options: the arguments of `Looks`; `log` replaces the monitors of the Trainer.
    """

    def __init__(self, text: Any = None, *, every: int = 500, out: str | Path | None = None, **options: Any) -> None:
        self.settings = {"text": text, "every": require_count("every", every), "out": out, **options}
        self.looks: Looks | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **arguments: Any
    ) -> None:
        """Take the first look, in the first process only."""
        if state.is_world_process_zero and self.looks is None:
            log = self.settings.get("log") or monitors_of(args)
            self.looks = Looks(arguments["model"], **{**self.settings, "log": log})
            self.looks.look(state.global_step)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **arguments: Any
    ) -> None:
        """Take a look if it is due."""
        if self.looks is not None and state.global_step % self.looks.every == 0:
            self.looks.look(state.global_step)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **arguments: Any
    ) -> None:
        """Take the last look, and write everything."""
        if self.looks is not None:
            self.looks.look(state.global_step)
            self.looks.write()


def monitors_of(args: TrainingArguments) -> Log | None:
    """Return a function that logs to the monitors that the Trainer reports to, as far as they are running."""
    logs, named = list[Log](), [args.report_to] if isinstance(args.report_to, str) else args.report_to or []
    if "wandb" in named and getattr(sys.modules.get("wandb"), "run", None) is not None:
        logs.append(to_wandb())
    if "tensorboard" in named and args.output_dir is not None:
        from torch.utils.tensorboard import SummaryWriter

        logs.append(to_tensorboard(SummaryWriter(Path(args.output_dir) / "runs" / "limitformer")))

    def log(values: Mapping[str, float], step: int) -> None:
        for each in logs:
            each(values, step)

    return log if logs else None
