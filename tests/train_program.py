"""A small run for tests of the harness; it can also kill itself, or be one of two processes."""

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


class Masked(Small):
    """A model whose loss is a mean over labelled examples, as in masked language models."""

    def forward(self, x, labels, num_items_in_batch=None, **others):
        logits = self.last(self.dropout(self.first(x).relu()))
        number = (labels != -100).sum() if num_items_in_batch is None else num_items_in_batch
        loss = nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum") / number
        return {"loss": loss, "logits": logits}


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


def masked(several):
    """Hide some labels, not equally many in each half of a batch."""
    batch = collate(several)
    return batch | {"labels": torch.where(batch["x"][:, 2] > 0.3, -100, batch["labels"])}


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


def masked_run(folder, **changes):
    """Train the small model with labels hidden."""
    return small_run(folder, dropout=0.0, model=Masked(0.0), collate=masked, **changes)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_in_save(step: int) -> None:
    """Kill the process after a checkpoint's files are written, before it has its manifest."""
    seal = checkpoints.seal
    checkpoints.seal = lambda staged, target, notes: (
        die() if target.name.endswith(f"-{step}") else seal(staged, target, notes)
    )


def run_and_die(folder: str, how: str, step: int) -> None:
    """Kill the process at a step, or while its checkpoint is saved."""
    torch.set_num_threads(1)
    if how == "save":
        die_in_save(step)
    small_run(folder, [At(step, die)] if how == "step" else [])


def command_line(arguments: list[str], processes: int = 1) -> None:
    """Run `limitformer` with these arguments, in one of `processes` processes that share the run."""
    from typer.testing import CliRunner

    from limitformer.cli.app import app

    torch.set_num_threads(1)
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert (torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1) == processes


def one_of_two(rank: int, port: int, folder: str) -> None:
    """Make both kinds of runs, as one of two processes of `torchrun`."""
    torch.set_num_threads(1)
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    os.environ |= {name: str(value) for name, value in ranks.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    small_run(Path(folder) / "plain", dropout=0.0)
    masked_run(Path(folder) / "masked")
    assert torch.distributed.get_world_size() == 2
