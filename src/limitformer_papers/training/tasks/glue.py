r"""Fine-tune on CoLA, MRPC or RTE [ST, App. D, Table 2]: 5 epochs, Adam, rate 5e-4, batch 16.

The model is that of a finished masked-language run, with a linear classifier on the mean of the visible tokens. A
sentence pair is [CLS] A [SEP] B [SEP], cut to the model's longest sequence from the longer sentence's end. Gains that
Recover has set to zero are not trained here either. The paper does not mention a schedule: here the rate rises over the
first tenth of the steps, then falls linearly to 0.
"""

import hashlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef
from torch import Tensor
from transformers import AutoModelForSequenceClassification, EvalPrediction, PreTrainedTokenizerFast

from limitformer.base.errors import InputError, require, require_count, require_real
from limitformer.nn import Recover, gains
from limitformer_papers.training.data.batches import steps_per_epoch
from limitformer_papers.training.data.glue_data import Example, Task, read_glue
from limitformer_papers.training.data.tokenizer import load_tokenizer
from limitformer_papers.training.harness import train
from limitformer_papers.training.plan import RUN, SUMMARY, Plan, read_json
from limitformer_papers.training.tasks.mlm import TOKENIZER

MODEL = "model"  # in the folder of a run
# Scores of a task: functions of true and predicted labels (n,). [ST, Table 2] does not say which score of MRPC it has.
METRICS: dict[Task, dict[str, Callable[..., float]]] = {
    "CoLA": {"matthews": matthews_corrcoef},
    "MRPC": {"accuracy": accuracy_score, "f1": partial(f1_score, zero_division=0.0)},
    "RTE": {"accuracy": accuracy_score},
}


@dataclass(frozen=True, kw_only=True)
class GlueRun:
    """A fine-tuning: the folder of a finished masked-language run, a task, and the paper's hyperparameters."""

    pretrained: Path
    task: Task
    epochs: int = 5
    learning_rate: float = 5e-4
    batch: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        tasks = get_args(Task)
        require(self.task in tasks, f"task must be one of {', '.join(tasks)}; got {self.task!r}.")
        require_count("epochs", self.epochs)
        require_count("batch", self.batch)
        require_count("seed", self.seed, least=0)
        require(require_real("learning_rate", self.learning_rate) > 0, "learning_rate must be positive.")

    @property
    def name(self) -> str:
        """The name of its folder, within one for each pretrained run."""
        return f"{Path(self.pretrained).name}/{self.task.lower()}-lr{self.learning_rate:g}-seed{self.seed}"


def run_glue(run: GlueRun, data: Path, out: Path, *, threads: int | None = None) -> Mapping[str, float]:
    """Fine-tune, resume or read the run `out`/`run.name`; return its summary, with the task's scores.

    Raises:
        InputError: no finished run in the folder, or files of the task that are missing or broken.
    """
    variant = checked_variant(Path(run.pretrained))
    sides = {split: read_glue(run.task, data, split) for split in ("train", "dev")}
    tokenizer = load_tokenizer(Path(run.pretrained) / TOKENIZER)
    model = classifier(Path(run.pretrained) / MODEL, run.seed, variant)
    encoded = {name: GlueDataset(examples, tokenizer, longest(model)) for name, examples in sides.items()}
    steps = run.epochs * steps_per_epoch(len(encoded["train"]), run.batch)
    return train(
        model,
        plan_of(run, Path(out), steps, threads),
        train_data=encoded["train"],
        eval_data=encoded["dev"],
        collate=Padding(int(tokenizer.pad_token_id)),
        compute_metrics=partial(score, run.task),
        about=about(run, variant, sides),
    )


def checked_variant(folder: Path) -> str:
    """Return the variant of the finished masked-language run in `folder`, or raise `InputError`."""
    lost = (folder / SUMMARY).exists() and bool(read_json(folder / SUMMARY).get("diverged"))
    require(not lost, f"The run in {folder} diverged and has no model. Nearest: a run with a smaller learning rate.")
    whole = all((folder / name).exists() for name in (RUN, SUMMARY, MODEL, TOKENIZER))
    nearest = "Nearest: the folder of one run, which has run.json, summary.json, model and tokenizer."
    require(whole, f"{folder} holds no finished masked-language run. {nearest}")
    description = read_json(folder / RUN).get("about", {})
    experiment = description.get("experiment")
    require(experiment == "mlm", f"{folder} holds another experiment, {experiment!r}.")
    return str(description["variant"])


def classifier(folder: Path, seed: int, variant: str) -> Any:
    """Return the pretrained model with a new head, drawn from the seed."""
    torch.manual_seed(seed)
    try:
        model = AutoModelForSequenceClassification.from_pretrained(
            folder, num_labels=2, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise InputError(f"The model in {folder} cannot be read: {str(error).splitlines()[0]}") from error
    if variant == "shaped-recover":
        Recover().prepare(model)
        require(all(not bool(gain.value.any()) for gain in gains(model)), f"The run in {folder} has not recovered.")
    return model


def longest(model: Any) -> int:
    return int(model.config.max_position_embeddings)


def plan_of(run: GlueRun, out: Path, steps: int, threads: int | None) -> Plan:
    """Return the plan of a run, evaluated once an epoch."""
    each = max(1, steps // run.epochs)
    return Plan(
        folder=out / run.name,
        steps=steps,
        batch=run.batch,
        learning_rate=run.learning_rate,
        warmup=steps // 10,
        schedule="linear",
        seed=run.seed,
        save_every=each,
        log_every=max(1, each // 10),
        evaluate_every=each,
        threads=threads,
    )


def about(run: GlueRun, variant: str, sides: Mapping[str, Sequence[Example]]) -> dict[str, Any]:
    """Return the description of a run, with digests of the weights and the examples."""
    weights = (Path(run.pretrained) / MODEL / "model.safetensors").read_bytes()
    pretrained = {"pretrained": Path(run.pretrained).name, "variant": variant, "weights": digest(weights)}
    data = {name: {"examples": len(some), "digest": digest(repr(some).encode())} for name, some in sides.items()}
    return {"experiment": "glue", "task": run.task, "epochs": run.epochs, **pretrained, "data": data}


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class GlueDataset(torch.utils.data.Dataset[dict[str, Any]]):
    """Examples as {"input_ids", "label"}, cut to `length` tokens."""

    def __init__(self, examples: Sequence[Example], tokenizer: PreTrainedTokenizerFast, length: int) -> None:
        columns = [list(column) for column in zip(*(one.sentences for one in examples), strict=True)]
        options: dict[str, Any] = {"truncation": True, "max_length": length, "split_special_tokens": True}
        self.ids = tokenizer(*columns, **options)["input_ids"]
        self.labels = [one.label for one in examples]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.ids[index], "label": self.labels[index]}


@dataclass(frozen=True)
class Padding:
    """Collate items to a batch, padded at the right to the longest."""

    padding: int

    def __call__(self, items: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Return "input_ids" and "attention_mask" (batch, longest), and "labels" (batch,)."""
        rows = [torch.tensor(item["input_ids"]) for item in items]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=self.padding)
        lengths = torch.tensor([len(row) for row in rows])
        seen = (torch.arange(ids.shape[1])[None] < lengths[:, None]).long()
        return {"input_ids": ids, "attention_mask": seen, "labels": torch.tensor([item["label"] for item in items])}


def score(task: Task, predicted: EvalPrediction) -> dict[str, float]:
    """Return the scores of a task by name, from logits (n, 2) and labels (n,)."""
    classes = np.asarray(predicted.predictions).argmax(-1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # if all examples have one class, the Matthews correlation is 0
        return {name: float(metric(predicted.label_ids, classes)) for name, metric in METRICS[task].items()}
