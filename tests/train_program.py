"""A small run for tests of the harness; it can also kill itself."""

import os
import signal
from pathlib import Path

import torch
from torch import nn
from transformers import TrainerCallback

from limitformer_papers.training import checkpoints
from limitformer_papers.training.harness import Plan, train

STEPS, BATCH, EXAMPLES = 50, 8, 100


class Small(nn.Module):
    """Two layers with dropout, so that random numbers while training matter."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.first, self.dropout, self.last = nn.Linear(6, 16), nn.Dropout(dropout), nn.Linear(16, 3)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3, generator=generator)

    def forward(self, x, labels):
        logits = self.last(self.dropout(self.first(x).relu()))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class At(TrainerCallback):
    """A callback that acts at the beginning of a step."""

    def __init__(self, step: int, action) -> None:
        self.step, self.action = step, action

    def on_step_begin(self, args, state, control, **others) -> None:
        if state.global_step + 1 == self.step:
            self.action()


def items(examples: int = EXAMPLES):
    """Return points in three classes of unequal size."""
    x = torch.randn(examples, 6, generator=torch.Generator().manual_seed(1))
    labels = (x[:, 0] > 0).long() + (x[:, 1] > 1).long()
    return [{"x": x[k], "labels": labels[k]} for k in range(examples)]


def collate(several):
    return {name: torch.stack([one[name] for one in several]) for name in several[0]}


def accuracy(prediction):
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def plan_of(folder, **changes) -> Plan:
    course = {"steps": STEPS, "batch": BATCH, "learning_rate": 1e-2, "warmup": 5, "schedule": "cosine"}
    often = {"save_every": 10, "log_every": 5, "evaluate_every": 7, "tensorboard": False}
    return Plan(folder=Path(folder), **{**course, **often, **changes})


def small_run(folder, callbacks=(), dropout: float = 0.2, model=None, collate=collate, **changes):
    """Train the small model; the last batch of its evaluation has three examples."""
    data = items()
    return train(
        Small(dropout) if model is None else model,
        plan_of(folder, **changes),
        train_data=data,
        eval_data=data[:35],
        collate=collate,
        callbacks=callbacks,
        compute_metrics=accuracy,
        about={"experiment": "small", "dropout": dropout},
    )


def run_and_die(folder: str, step: int) -> None:
    """Kill the process after the files of the step's checkpoint are written, before it has its manifest."""
    torch.set_num_threads(1)
    seal = checkpoints.seal

    def die_or_seal(staged, target, notes):
        if target.name.endswith(f"-{step}"):
            os.kill(os.getpid(), signal.SIGKILL)
        seal(staged, target, notes)

    checkpoints.seal = die_or_seal
    small_run(folder)
