r"""The loss of a model on held-out data, the same for any number of processes.

The loss is the mean over everything that has a label, Σ_b n_b loss_b / Σ_b n_b over the batches b, n_b the labels of b
that are not −100. Batches are the same for any number of processes; process r of R takes r, r + R, r + 2R, …
Nothing is drawn, so how often a run evaluates does not change it.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import EvalPrediction

Metrics = Callable[[EvalPrediction], dict[str, float]]
IGNORED = -100  # the label of what has none


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
    """`loss`, and what `compute_metrics` makes of all predictions.

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
    found: list[tuple[int, Any, Any]] = []
    for first in range(process * batch, len(data), processes * batch):
        inputs = place(collate([data[i] for i in range(first, min(first + batch, len(data)))]))
        outputs = model(**inputs)
        labels = inputs["labels"]
        number = float((labels != IGNORED).sum())
        if number > 0:  # the loss of a batch without labels is nan
            sums += torch.tensor([number, number * float(part(outputs, "loss", 0))], dtype=torch.float64)
        if compute_metrics is not None:
            found.append((first, part(outputs, "logits", 1).float().cpu().numpy(), labels.cpu().numpy()))
    number, loss = together(sums).tolist()
    metrics = {} if compute_metrics is None else compute_metrics(joined(collected(found)))
    return {"loss": loss / number if number else float("nan"), **metrics}


def part(outputs: Any, name: str, place: int) -> torch.Tensor:
    """An entry of what a model gives, which has names or is a tuple."""
    found: torch.Tensor = outputs[name] if isinstance(outputs, dict) else outputs[place]
    return found


def together(sums: torch.Tensor) -> torch.Tensor:
    """The sums over all processes."""
    parts = collected([sums])
    return torch.stack(parts).sum(0)


def collected(found: list[Any]) -> list[Any]:
    """The lists of all processes, one after the other."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return found
    everyone: list[list[Any]] = [[] for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather_object(everyone, found)
    return [one for several in everyone for one in several]


def joined(found: list[tuple[int, Any, Any]]) -> EvalPrediction:
    """All predictions and labels, in the order of the data."""
    ordered = sorted(found, key=lambda entry: entry[0])
    predictions, labels = (np.concatenate([entry[k] for entry in ordered]) for k in (1, 2))
    return EvalPrediction(predictions=predictions, label_ids=labels)
