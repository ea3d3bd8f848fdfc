"""Weightless networks against networks that transformers draws, with the loss that each model computes itself.

For each type, samples of one number each are compared by Kolmogorov–Smirnov tests: size and correlation of the stream
after the last block, standard deviation of the logits, loss, and gradient norms of the first and the last matrix of the
blocks. A wrong twin, whose weights have another standard deviation, is compared with the same drawn networks.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from scipy.stats import ks_2samp
from torch import Tensor, nn

import limitformer as lf
from benchmarks.zoo.configurations import parts_of, small_config, task_of
from benchmarks.zoo.inputs import ids_for

SAMPLES, TOKENS, TWIN = 300, 8, 1.05
SPREADS = ("initializer_range", "initializer_factor", "init_std", "initializer_std")  # what the twin multiplies
Statistics = dict[str, NDArray[np.float64]]


def compare(kind: str, samples: int = SAMPLES) -> dict[str, Any]:
    """Return the least p-value of a type, that of its wrong twin, and their statistics."""
    config = small_config(kind)
    task, auto = task_of(config)
    inputs, labels = inputs_and_labels(config, task)

    def weightless(one: Any) -> Any:
        return lf.weightless.simulate(one, inputs, samples=samples, seed=1, gradients=True, progress=False)

    data = weightless(deepcopy(config))
    blocks = data.attrs["blocks"].split("; ")[-1].split(": ")[0]
    if not list(make_model(config, auto).get_submodule(blocks).children()):
        raise ValueError(f"the blocks {blocks} are not one list")
    weights = matrices_in(data, blocks)
    theirs = drawn(config, auto, inputs, labels, blocks, weights, samples)
    ours = statistics(data, weights, theirs)
    p = {name: float(ks_2samp(ours[name], theirs[name]).pvalue) for name in ours}
    row = {"type": kind, "task": task, "blocks": blocks, "p": min(p.values()), "least": min(p, key=p.__getitem__)}
    row |= {"statistics": len(p), "samples": samples, "weights": weights}
    twin = twin_of(config)
    if twin is not None:
        ours = statistics(weightless(twin), weights, theirs)
        row["twin"] = min(float(ks_2samp(ours[name], theirs[name]).pvalue) for name in ours)
    return row


def inputs_and_labels(config: Any, task: str) -> tuple[dict[str, Tensor], Tensor]:
    """Return inputs for both sides, and the labels with which the model computes its own loss."""
    ids = ids_for(config)[:, :TOKENS]
    if task == "seq2seq":  # the decoder reads the labels one later, as the model makes it
        start = getattr(config, "decoder_start_token_id", None) or 0
        decoder = torch.cat([torch.full_like(ids[:, :1], start), ids[:, :-1]], 1)
        return {"input_ids": ids, "decoder_input_ids": decoder}, ids
    if task not in ("causal", "masked"):
        raise ValueError(f"a model for the task {task!r} computes no loss on its own ids")
    return {"input_ids": ids}, ids


def matrices_in(data: Any, blocks: str) -> list[str]:
    """Return the first and the last matrix of the blocks that always has a gradient."""
    gradients = data["weight_gradient"].values
    alive = np.isfinite(gradients).all(0) & (gradients > 0).all(0) & data["matrix"].values
    names = [str(name) for name in data["weight"].values[alive] if str(name).startswith(f"{blocks}.")]
    return list(dict.fromkeys([names[0], names[-1]])) if names else []


def twin_of(config: Any) -> Any:
    """Return the configuration with larger weights, None if no field sets their size."""
    twin, fields = deepcopy(config), 0
    for part in parts_of(twin):
        for name in SPREADS:
            if isinstance(getattr(part, name, None), float | int) and getattr(part, name):
                setattr(part, name, TWIN * getattr(part, name))
                fields += 1
    return twin if fields else None


def statistics(data: Any, weights: list[str], like: Statistics) -> Statistics:
    """Return the statistics of weightless networks that the drawn ones have."""
    last = data["covariance"].values[:, -1]
    tokens = int(np.isfinite(last[0].diagonal()).sum())
    result = of_streams(last[:, :tokens, :tokens]) | {"loss": data["loss"].values}
    result |= {"logits": data["logits_std"].values} if "logits" in like else {}
    return result | {name: data["weight_gradient"].sel(weight=name).values for name in weights}


def of_streams(covariance: NDArray[np.float64]) -> Statistics:
    """Return size of the last token and its correlation with the first, from covariances (samples, tokens, tokens)."""
    first, last, both = covariance[:, 0, 0], covariance[:, -1, -1], covariance[:, 0, -1]
    return {"size": np.sqrt(last), "correlation": both / np.sqrt(first * last)}


def drawn(
    config: Any, auto: str, inputs: dict[str, Tensor], labels: Tensor, blocks: str, weights: list[str], samples: int
) -> Statistics:
    """Return the statistics of networks that transformers draws."""
    rows = []
    for sample in range(samples):
        torch.manual_seed(10_000 + sample)
        model = make_model(config, auto)
        with last_stream(model, blocks) as streams:
            out = model(**inputs, labels=labels)
        out.loss.backward()
        x = streams[-1].detach().double()[0]
        row = {name: values[0] for name, values in of_streams((x @ x.mT / x.shape[-1])[None].numpy()).items()}
        row["loss"] = out.loss.item()
        if isinstance(out.logits, Tensor):
            row["logits"] = out.logits.double().std().item()
        named = dict(model.named_parameters())
        rows.append(row | {name: named[name].grad.double().norm().item() for name in weights})
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}


def make_model(config: Any, auto: str) -> Any:
    return getattr(transformers, auto).from_config(deepcopy(config)).eval()


@contextmanager
def last_stream(model: nn.Module, blocks: str) -> Iterator[list[Tensor]]:
    """Collect what the last of these blocks returns."""
    streams: list[Tensor] = []
    last = list(model.get_submodule(blocks).children())[-1]

    def collect(_: nn.Module, __: Any, out: Any) -> None:
        streams.append(out if isinstance(out, Tensor) else out[0])

    hook = last.register_forward_hook(collect)
    try:
        yield streams
    finally:
        hook.remove()
