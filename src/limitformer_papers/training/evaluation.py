r"""The loss of a model on held-out data, the same for any number of processes.

The loss is the mean over all labels, Σ_b n_b loss_b / Σ_b n_b over the batches b; n_b counts the labels of b that are
not −100. Batches are the same for any number of processes; process r of R takes r, r + R, r + 2R, …
Evaluation draws no random numbers, so its frequency does not change a run.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import EvalPrediction

Metrics = Callable[[EvalPrediction], dict[str, float]]
IGNORED = -100  # the label of a token without a target


@torch.no_grad()
def evaluate(
    model: nn.Module,
    data: Any,
    *,
    batch: int,
    collate: Callable[[list[Any]], Any],
    place: Callable[[Any], Any],
    compute_metrics: Metrics | None = None,
    process: int = 0,
    processes: int = 1,
) -> dict[str, float]:
    """Return `loss` and the metrics that `compute_metrics` computes from all predictions.

    Args:
        model: gives a loss, as its output's "loss" or first entry, and for metrics "logits", or the second.
        data: has a length and items.
        batch: items in a batch.
        collate: items to the model's keyword arguments, "labels" among them.
        place: brings them to the model's device.
        compute_metrics: as of the Trainer.
        process, processes: r and R.
    """
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64)
    batches: list[tuple[int, Any, Any]] = []
    for first in range(process * batch, len(data), processes * batch):
        inputs = place(collate([data[i] for i in range(first, min(first + batch, len(data)))]))
        outputs = model(**inputs)
        labels = inputs["labels"]
        number = float((labels != IGNORED).sum())
        if number > 0:  # the loss of a batch without labels is NaN
            sums += torch.tensor([number, number * float(part(outputs, "loss", 0))], dtype=torch.float64)
        if compute_metrics is not None:
            batches.append((first, part(outputs, "logits", 1).float().cpu().numpy(), labels.cpu().numpy()))
    number, loss = together(sums).tolist()
    metrics = {} if compute_metrics is None else compute_metrics(joined(collected(batches)))
    return {"loss": loss / number if number else float("nan"), **metrics}


def part(outputs: Any, name: str, place: int) -> torch.Tensor:
    """Return an entry of a model's output, a mapping or a tuple."""
    entry: torch.Tensor = outputs[name] if isinstance(outputs, dict) else outputs[place]
    return entry


def together(sums: torch.Tensor) -> torch.Tensor:
    parts = collected([sums])
    return torch.stack(parts).sum(0)


def collected(items: list[Any]) -> list[Any]:
    """Return the lists of all processes, concatenated."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return items
    everyone: list[list[Any]] = [[] for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather_object(everyone, items)
    return [one for several in everyone for one in several]


def joined(batches: list[tuple[int, Any, Any]]) -> EvalPrediction:
    """Return all predictions and labels, in the order of the data."""
    ordered = sorted(batches, key=lambda entry: entry[0])
    predictions, labels = (np.concatenate([entry[k] for entry in ordered]) for k in (1, 2))
    return EvalPrediction(predictions=predictions, label_ids=labels)
