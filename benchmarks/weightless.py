"""A weightless GPT-2 (width 768, 12 layers, 128 tokens) compared with one whose weights are drawn for each sample.

Both give loss or states, and logits of the whole vocabulary; the weightless one its measures too (covariances, heads).
They take turns in one process and are compared in seconds of the processor, which other work disturbs least.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers

from limitformer.subjects.inputs import inputs_of
from limitformer.subjects.losses import chosen_loss
from limitformer.subjects.subject import resolve
from limitformer.weightless.network import Weightless

TOKENS, SAMPLES = 128, 5


def measure() -> list[tuple[str, float, str]]:
    """Return seconds per sample, and how many times longer the drawn network takes."""
    rows = []
    for gradients in (False, True):
        what = "GPT-2, states and gradients" if gradients else "GPT-2, states"
        times = taking_turns(ways(gradients))
        for name, seconds in times.items():
            rows.append((f"{what}: {name}", statistics.median(seconds), "s"))
        for name in list(times)[1:]:
            ratios = [drawn / less for drawn, less in zip(times[name], times["weightless"], strict=True)]
            rows.append((f"{what}: {name} over weightless", statistics.median(ratios), ""))
    return rows


def ways(gradients: bool) -> dict[str, Callable[[int], None]]:
    """Return functions that compute the sample of a given number."""
    subject = resolve("gpt2")
    network, inputs = Weightless(subject, torch.float32, torch.device("cpu")), inputs_of(TOKENS, subject)
    loss, ids = chosen_loss(None, subject.task) if gradients else None, inputs.fixed["input_ids"]

    def build() -> Any:
        return transformers.AutoModelForCausalLM.from_config(subject.config).eval()

    module = build()

    def weightless(sample: int) -> None:
        network.run(0, range(sample, sample + 1), inputs, "auto", loss)

    def filled(sample: int) -> None:
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(std=0.02)
        run(module, ids, gradients)

    def initialised(sample: int) -> None:
        run(build(), ids, gradients)

    return {"weightless": weightless, "drawn in place": filled, "drawn by its initialisation": initialised}


def run(model: Any, ids: torch.Tensor, gradients: bool) -> None:
    """Run the forward pass, and the backward pass on request."""
    model.zero_grad(set_to_none=True)
    with torch.set_grad_enabled(gradients):
        out = model(input_ids=ids, labels=ids, use_cache=False, output_hidden_states=True)
    if gradients:
        out.loss.backward()


def taking_turns(calls: dict[str, Callable[[int], None]]) -> dict[str, list[float]]:
    """Return each function's CPU seconds by sample, after a warm-up that does not count."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for sample in range(SAMPLES + 1):
        for name, call in calls.items():
            began = time.process_time()
            call(sample)
            times[name].append(time.process_time() - began)
    return {name: seconds[1:] for name, seconds in times.items()}


def table() -> list[dict[str, Any]]:
    return [{"what": name, "value": value, "unit": unit} for name, value, unit in measure()]
