"""Follow each step: its loss, whether it diverged or was interrupted, and the progress bar."""

from math import isfinite
from time import perf_counter
from typing import Any

import torch
from transformers import TrainerCallback

from limitformer.base.progress import advance, print_line, progress_bar
from limitformer_papers.training.interrupts import Interrupt
from limitformer_papers.training.log import Log
from limitformer_papers.training.plan import Plan


class StepMonitor(TrainerCallback):
    """Log the loss of every step over all processes, and stop a run that diverged or was interrupted.

    Attributes:
        loss: loss of the step, in this process.
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
        """Return the seconds of training, over all processes that worked on the run one after another."""
        return self.earlier + perf_counter() - self.began

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if state.is_world_process_zero:
            self.bar = progress_bar("training", self.plan.steps)

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Check the step and overrule the Trainer's decisions if the run must stop."""
        loss, interrupted = self.agreed()
        self.rows.record(state.global_step, "loss", loss)
        self.show(state.global_step, loss)
        if not isfinite(loss):
            control.should_training_stop, control.should_save, control.should_evaluate = True, False, False
            lost = f"Diverged: the loss of step {state.global_step} is {loss}. The run ends: {self.plan.folder}"
            if state.is_world_process_zero:
                print_line(lost)
        elif interrupted and state.global_step < self.plan.steps:
            control.should_training_stop, control.should_save = True, True
            self.stopped = state.global_step

    def agreed(self) -> tuple[float, bool]:
        """Return the mean loss of all processes, and whether one of them was interrupted."""
        values = torch.stack(
            [self.loss.detach().float(), self.loss.new_tensor(float(self.interrupt.requested)).float()]
        )
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(values)
            values[0] /= torch.distributed.get_world_size()
        loss, interrupted = values.tolist()
        return loss, interrupted > 0

    def show(self, step: int, loss: float) -> None:
        if self.bar is not None:
            self.bar.progress.update(self.bar.progress.tasks[0].id, description=f"training, loss {loss:.3f}")
            advance(self.bar, step)

    def close(self) -> None:
        """Remove the bar and close TensorBoard."""
        advance(self.bar, -1)
        if self.rows.board is not None:
            self.rows.board.close()
            self.rows.board = None
