"""What looks at each step: its loss, whether it diverged or was interrupted, and the progress bar."""

from math import isfinite
from time import perf_counter
from typing import Any

import torch
from transformers import TrainerCallback

from limitformer.base.progress import advance, print_line, progress_bar
from limitformer_papers.training.interrupts import Interrupt
from limitformer_papers.training.log import Log
from limitformer_papers.training.plan import Plan


class Watch(TrainerCallback):
    """Logs the loss of every step over all processes, and stops a run that diverged or was interrupted.

    Attributes:
        loss: of the step, in this process.
        stopped: the step at which Ctrl-C ended it, None if none did.
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
        """Seconds of training, over all processes that worked on the run one after the other."""
        return self.earlier + perf_counter() - self.began

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Show a bar, in the main process."""
        if state.is_world_process_zero:
            self.bar = progress_bar("training", self.plan.steps)

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Look at the step; the Trainer's own decisions have been made and may be overruled."""
        loss, interrupted = self.agreed()
        self.rows.record(state.global_step, "loss", loss)
        self.show(state.global_step, loss)
        if not isfinite(loss):
            control.should_training_stop, control.should_save, control.should_evaluate = True, False, False
            lost = f"Diverged: the loss of step {state.global_step} is {loss}. The run ends: {self.plan.folder}"
            self.say(state, lost)
        elif interrupted and state.global_step < self.plan.steps:
            control.should_training_stop, control.should_save = True, True
            self.stopped = state.global_step

    def agreed(self) -> tuple[float, bool]:
        """The mean loss of all processes, and whether one of them was interrupted."""
        values = torch.stack([self.loss.detach().float(), self.loss.new_tensor(float(self.interrupt.heard)).float()])
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(values)
            values[0] /= torch.distributed.get_world_size()
        loss, heard = values.tolist()
        return loss, heard > 0

    def show(self, step: int, loss: float) -> None:
        """The bar, with the loss."""
        if self.bar is not None:
            self.bar.progress.update(self.bar.task, description=f"training, loss {loss:.3f}")
            advance(self.bar, step)

    def say(self, state: Any, line: str) -> None:
        """One line, in the main process."""
        if state.is_world_process_zero:
            print_line(line)

    def close(self) -> None:
        """Take the bar away."""
        advance(self.bar, -1)
        if self.rows.board is not None:
            self.rows.board.close()
            self.rows.board = None
