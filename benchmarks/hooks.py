"""What measuring a module that exists costs over its plain pass forward and backward: GPT-2, 4 sequences of 128."""

import time
from collections.abc import Callable
from typing import Any

import torch
import transformers

from limitformer.checking.existing import measured
from limitformer.weightless.inputs import default_loss, inputs_of
from limitformer.weightless.models import blueprint_of

REPEATS = 7


def measure() -> list[tuple[str, float, str]]:
    """Seconds of both, by turns, and their ratio."""
    config = transformers.GPT2Config()
    model: Any = transformers.AutoModelForCausalLM.from_config(config).eval()
    ids = torch.randint(0, 50_000, (4, 128), generator=torch.Generator().manual_seed(0))
    inputs, loss = inputs_of(ids, blueprint_of(config)), default_loss("causal")
    weights = list(model.parameters())

    def plain() -> None:
        out = model(input_ids=ids, use_cache=False)
        torch.autograd.grad(loss(out, {"input_ids": ids}).mean(), weights, allow_unused=True)

    pairs = [(seconds(plain), seconds(lambda: measured(model, inputs, loss))) for _ in range(REPEATS)]
    bare, looked = (min(column) for column in zip(*pairs, strict=True))
    return [("plain", bare, "s"), ("measured", looked, "s"), ("measured over plain", looked / bare, "")]


def seconds(work: Callable[[], Any]) -> float:
    """Wall time."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def table() -> list[dict[str, Any]]:
    """As rows."""
    return [{"what": name, "value": value, "unit": unit} for name, value, unit in measure()]
