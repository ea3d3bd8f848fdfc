"""A callback of transformers' Trainer that looks at the model."""

from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from limitformer.base.errors import require_count
from limitformer.checking.training import Looks


class CheckTraining(TrainerCallback):
    """Look at a model in transformers' Trainer: `Trainer(…, callbacks=[CheckTraining(every=500, out="checks")])`.

    Args:
        text, every, out, options: the arguments of `Looks`.
    """

    def __init__(self, text: Any = None, *, every: int = 500, out: str | Path | None = None, **options: Any) -> None:
        self.settings = {"text": text, "every": require_count("every", every), "out": out, **options}
        self.looks: Looks | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **arguments: Any
    ) -> None:
        """Take the first look, in the first process only."""
        if state.is_world_process_zero and self.looks is None:
            self.looks = Looks(arguments["model"], **self.settings)
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
