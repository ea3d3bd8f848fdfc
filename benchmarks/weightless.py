"""A weightless GPT-2 (width 768, 12 layers, 128 tokens) against one whose weights are drawn anew for each sample."""

import time
from typing import Any

import torch
import transformers

from limitformer.weightless import simulate

TOKENS, SAMPLES = 128, 8


def measure() -> list[tuple[str, float, str]]:
    """Seconds a sample, and how many times longer the drawn network takes."""
    rows = []
    for gradients in (False, True):
        less, drawn = weightless(gradients), drawn_anew(gradients)
        what = "GPT-2, states and gradients" if gradients else "GPT-2, states"
        rows += [(f"{what}: weightless", less, "s"), (f"{what}: drawn anew", drawn, "s")]
        rows.append((f"{what}: drawn over weightless", drawn / less, ""))
    return rows


def weightless(gradients: bool) -> float:
    """Of the package."""
    options: dict[str, Any] = {"seed": 0, "gradients": gradients, "progress": False}
    simulate("gpt2", TOKENS, samples=1, **options)
    data = simulate("gpt2", TOKENS, samples=SAMPLES, **options)
    return float(data.attrs["wall_seconds"]) / SAMPLES


def drawn_anew(gradients: bool) -> float:
    """Of transformers: every weight by torch's generator, then the same measures' hidden states."""
    config = transformers.GPT2Config()
    model: Any = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    ids = torch.arange(TOKENS)[None]
    seconds = []
    for _ in range(SAMPLES):
        began = time.perf_counter()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(std=0.02)
        with torch.set_grad_enabled(gradients):
            out = model(input_ids=ids, labels=ids, use_cache=False, output_hidden_states=True)
        if gradients:
            model.zero_grad(set_to_none=True)
            out.loss.backward()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def table() -> list[dict[str, Any]]:
    """As rows."""
    return [{"what": name, "value": value, "unit": unit} for name, value, unit in measure()]
