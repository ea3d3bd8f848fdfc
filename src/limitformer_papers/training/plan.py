"""The plan of a run: length, learning rate and folder, common to all experiments."""

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from limitformer.base.errors import require, require_count, require_real, set_fields

Schedule = Literal["constant", "linear", "cosine"]
# Fields that do not change the result: a run may resume with other values.
FREE = ("folder", "save_every", "keep_checkpoints", "tensorboard", "threads", "loaders")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The course of one run.

    Attributes:
        folder: folder of the run.
        steps: optimiser steps.
        batch: examples in a step, over all processes.
        learning_rate: learning rate after the warm-up.
        warmup: steps in which the learning rate rises linearly from 0.
        schedule: course of the rate after that: constant, or falling to 0 at the last step, linearly or as a cosine.
        weight_decay: weight decay of AdamW, for parameters that are not in `limitformer.nn.without_decay`.
        seed: seed of the order of the data and of random numbers while training (dropout).
        save_every, log_every, evaluate_every: in steps; the last step is saved and evaluated in any case.
        keep_checkpoints: number of newest checkpoints that are kept.
        clip: largest norm of the gradient; None does not clip.
        bf16: mixed precision.
        tf32: float32 products with 10-bit factors, on a GPU (`training.device`).
        compile: whether steps are compiled, on a GPU.
        tensorboard: whether the log is written for TensorBoard too.
        threads: number of torch's threads, on a CPU; None does not change it.
        loaders: number of processes that prepare batches ahead; 0 prepares them in the run's own process.

    Raises:
        InputError: a value out of range.
    """

    folder: Path
    steps: int
    batch: int
    learning_rate: float
    warmup: int
    schedule: Schedule = "constant"
    weight_decay: float = 0.0
    seed: int = 0
    save_every: int
    log_every: int
    evaluate_every: int
    keep_checkpoints: int = 2
    clip: float | None = None
    bf16: bool = False
    tf32: bool = False
    compile: bool = False
    tensorboard: bool = True
    threads: int | None = None
    loaders: int = 0

    def __post_init__(self) -> None:
        counts = ("steps", "batch", "save_every", "log_every", "evaluate_every", "keep_checkpoints")
        set_fields(
            self, folder=Path(self.folder), **{name: require_count(name, getattr(self, name)) for name in counts}
        )
        set_fields(
            self, **{name: require_count(name, getattr(self, name), least=0) for name in ("warmup", "seed", "loaders")}
        )
        rates = {name: require_real(name, getattr(self, name)) for name in ("learning_rate", "weight_decay")}
        set_fields(self, **rates)
        require(self.learning_rate > 0, f"learning_rate must be positive; got {self.learning_rate:g}.")
        require(self.weight_decay >= 0, f"weight_decay must be at least 0; got {self.weight_decay:g}.")
        words = get_args(Schedule)
        require(self.schedule in words, f"schedule must be one of {', '.join(words)}; got {self.schedule!r}.")
        self.check_options()

    def check_options(self) -> None:
        require(
            self.warmup <= self.steps,
            f"warmup must be at most steps = {self.steps}; got {self.warmup}. Nearest: {self.steps}.",
        )
        if self.clip is not None:
            set_fields(self, clip=require_real("clip", self.clip))
            require(self.clip > 0, f"clip must be positive, or None for no clipping; got {self.clip:g}.")
        if self.threads is not None:
            set_fields(self, threads=require_count("threads", self.threads))

    def as_record(self) -> dict[str, Any]:
        """Return all fields, for JSON."""
        return asdict(self) | {"folder": str(self.folder)}


def processes() -> int:
    """Return the number of processes that `torchrun` or `accelerate launch` has started; 1 without them."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """Return the index of this process; process 0 writes."""
    return int(os.environ.get("RANK", "0"))
