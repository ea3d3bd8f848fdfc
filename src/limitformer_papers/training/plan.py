"""The plan of a run, the device that trains it, and its folder, common to all experiments.

`run.json` describes a run, and `summary.json` has the result of a finished one.

TF32 rounds the factors of a float32 product to 10 bits on GPUs of NVIDIA's generation Ampere and later ones.
Compilation (`torch.compile`) fuses the small operations between products. It is for GPUs only: on a CPU it takes
minutes of a C++ compiler and gains little. Compiled steps are equal to plain ones up to rounding, so a run keeps what
it was begun with, and `check_compiled` compares the first loss of every command.
"""

import json
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, asdict, dataclass, fields
from datetime import UTC, datetime
from importlib.metadata import version
from math import isfinite, nan
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from limitformer.base.errors import InputError, require, require_count, require_real, set_fields
from limitformer.base.extras import package_version
from limitformer.base.files import write_whole

Schedule = Literal["constant", "linear", "cosine"]
# Fields that do not change the result: a run may resume with other values.
FREE = ("folder", "save_every", "keep_checkpoints", "tensorboard", "threads", "loaders")
RUN, SUMMARY = "run.json", "summary.json"
AMPERE = (8, 0)  # the compute capability from which on GPUs have TF32
BACKEND = "inductor"
NEAR = 1e-2  # relative difference of a plain and a compiled loss: bfloat16 has 8 bits


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
        checked: dict[str, Any] = {name: require_count(name, getattr(self, name)) for name in counts}
        checked |= {name: require_count(name, getattr(self, name), least=0) for name in ("warmup", "seed", "loaders")}
        checked |= {name: require_real(name, getattr(self, name)) for name in ("learning_rate", "weight_decay")}
        checked |= {} if self.clip is None else {"clip": require_real("clip", self.clip)}
        checked |= {} if self.threads is None else {"threads": require_count("threads", self.threads)}
        set_fields(self, folder=Path(self.folder), **checked)
        words, steps = get_args(Schedule), self.steps
        require(self.learning_rate > 0, f"learning_rate must be positive; got {self.learning_rate:g}.")
        require(self.weight_decay >= 0, f"weight_decay must be at least 0; got {self.weight_decay:g}.")
        require(self.schedule in words, f"schedule must be one of {', '.join(words)}; got {self.schedule!r}.")
        late = f"warmup must be at most steps = {steps}; got {self.warmup}. Nearest: {steps}."
        require(self.warmup <= steps, late)
        clips = self.clip is None or self.clip > 0
        require(clips, f"clip must be positive, or None for no clipping; got {self.clip}.")

    def as_record(self) -> dict[str, Any]:
        """Return all fields, for JSON."""
        return asdict(self) | {"folder": str(self.folder)}


# The device.


def has_gpu() -> bool:
    return torch.cuda.is_available()


def has_tf32() -> bool:
    return has_gpu() and torch.cuda.get_device_capability() >= AMPERE


def device_name() -> str:
    """Return the name of the GPU that this process uses, or the kind of its CPU."""
    return torch.cuda.get_device_name() if has_gpu() else f"CPU {platform.machine()}"


def check_device(plan: Plan) -> None:
    """Raise `InputError` if the plan needs more than this device has."""
    here = f"this is {device_name()}"
    require(
        has_tf32() or not plan.tf32,
        f"tf32 needs a GPU of NVIDIA's generation Ampere or later; {here}. Nearest: tf32=False (--no-tf32).",
    )
    require(has_gpu() or not plan.compile, f"compile needs a GPU; {here}. Nearest: compile=False (--no-compile).")


@contextmanager
def matrix_products(tf32: bool) -> Iterator[None]:
    """Compute products of float32 matrices inside the block in TF32, or exactly."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def check_compiled(plain: float, compiled: float) -> None:
    """Raise `InputError` if the loss of a compiled step is not that of the plain one, up to rounding."""
    apart = abs(plain - compiled)  # NaN if the run diverges, which is not the compiler's fault
    require(
        not apart > NEAR * abs(plain),
        f"The compiled model has the loss {compiled:.6g}, the plain one {plain:.6g}. Nearest: compile=False "
        "(--no-compile).",
    )


# The folder.


@dataclass(frozen=True)
class FinishedRun:
    """A finished run: its description, its plan, its summary and its folder."""

    about: Mapping[str, Any]
    plan: Mapping[str, Any]
    summary: Mapping[str, float]
    path: Path


def finite(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return `content` with None for values that are not finite, which JSON cannot express."""
    return {
        name: None if isinstance(value, float) and not isfinite(value) else value for name, value in content.items()
    }


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file, whole or not at all; values that are not finite become null."""
    write_whole(path, lambda whole: whole.write_text(json.dumps(finite(content), indent=2) + "\n"))


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that `write_json` wrote, or raise `InputError`."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}. Nearest: another folder, or without that file.") from error
    require(isinstance(content, dict), f"{path} is not a file that limitformer wrote.")
    return dict(content)


def versions() -> dict[str, str]:
    packages = ("torch", "transformers", "accelerate", "numpy")
    return {"limitformer": package_version(), "python": platform.python_version()} | {n: version(n) for n in packages}


def opened(plan: Plan, about: Mapping[str, Any]) -> dict[str, float] | None:
    """Check that the plan's folder holds no other run; return the summary if it holds this one, finished.

    Raises:
        InputError: another run is there, or a damaged `run.json`.
    """
    requested = {"about": json_copy(about), "plan": plan.as_record()}
    path = plan.folder / RUN
    if not path.exists():
        return None
    stored = read_json(path)
    differing = differences(stored, requested)
    require(not differing, f"{plan.folder} holds another run: {'; '.join(differing)}. Nearest: another folder.")
    return read_summary(plan.folder) if (plan.folder / SUMMARY).exists() else None


def json_copy(about: Mapping[str, Any]) -> dict[str, Any]:
    """Return `about` after a round trip through JSON."""
    try:
        return dict(json.loads(json.dumps(dict(about))))
    except (TypeError, ValueError) as error:
        raise InputError(f"The description of a run must go to JSON: {error}.") from error


def differences(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Return the differences that change results: "learning_rate is 0.1 there, 0.2 here".

    A field that the plan of an older version lacks has its default.
    """
    lines, defaults = [], {field.name: field.default for field in fields(Plan) if field.default is not MISSING}
    for part, known in (("about", {}), ("plan", defaults)):
        there, here = (dict(flat(known | dict(run.get(part, {})))) for run in (found, wanted))
        names = [name for name in {**here, **there} if part == "about" or name not in FREE]
        lines += [
            f"{name} is {there.get(name, 'missing')!r} there, {here.get(name, 'missing')!r} here"
            for name in names
            if there.get(name, "missing") != here.get(name, "missing")
        ]
    return lines


def flat(settings: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield nested settings under their full names, such as "data.source"."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def write_run(plan: Plan, about: Mapping[str, Any]) -> None:
    """Write `run.json`, unless it exists."""
    if not (plan.folder / RUN).exists():
        started = datetime.now(UTC).isoformat(timespec="seconds")
        content = {"about": json_copy(about), "plan": plan.as_record(), "versions": versions(), "started": started}
        write_json(plan.folder / RUN, content | {"device": device_name()})


def read_summary(folder: Path) -> dict[str, float]:
    """Read the summary of the run in `folder`."""
    return {name: nan if value is None else value for name, value in read_json(folder / SUMMARY).items()}


def read_runs(folder: str | Path) -> list[FinishedRun]:
    """Return all finished runs in `folder` and below, by path.

    Raises:
        InputError: there are none.
    """
    folder = Path(folder)
    require(folder.is_dir(), f"No such folder of runs: {folder}.")
    begun = sorted(path.parent for path in folder.rglob(RUN))
    runs = [finished(path) for path in begun if (path / SUMMARY).exists()]
    require(
        bool(runs),
        f"No finished runs in {folder}{f', {len(begun)} unfinished' if begun else ''}. "
        "Nearest: start some with `limitformer train`; the same command finishes one that was interrupted.",
    )
    return runs


def finished(path: Path) -> FinishedRun:
    run = read_json(path / RUN)
    require("about" in run and "plan" in run, f"{path / RUN} is not a file that limitformer wrote.")
    return FinishedRun(run["about"], run["plan"], read_summary(path), path)
