"""Looks for transformers' Trainer."""

from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from limitformer.checking.training import Looks
from limitformer.errors import require_count


class CheckTraining(TrainerCallback):
    """Looks for transformers' Trainer: `Trainer(…, callbacks=[CheckTraining(every=500, out="checks")])`.

    Args:
        text, every, out, options: as of `Looks`.
    """

    def __init__(self, text: Any = None, *, every: int = 500, out: str | Path | None = None, **options: Any) -> None:
        self.settings = {"text": text, "every": require_count("every", every), "out": out, **options}
        self.looks: Looks | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """The first look, by the first process alone."""
        if state.is_world_process_zero and self.looks is None:
            self.looks = Looks(given["model"], **self.settings)
            self.looks.look(state.global_step)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        """A look where it is due."""
        if self.looks is not None and state.global_step % self.looks.every == 0:
            self.looks.look(state.global_step)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        """The last look; everything is written."""
        if self.looks is not None:
            self.looks.look(state.global_step)
            self.looks.write()
