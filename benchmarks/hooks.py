"""The cost of measuring an existing module, compared with its plain forward and backward pass: a third of GPT-2, 4 ×
128 tokens.

Seconds are the processor's, so that what else runs on the machine has no part in the ratio; blocks and vocabulary are
each a third of GPT-2's, which leaves their shares as they are.
"""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import transformers

from limitformer.checking.module import measure_module
from limitformer.subjects.inputs import inputs_of
from limitformer.subjects.losses import chosen_loss
from limitformer.subjects.subject import resolve

REPEATS = 5


def measure() -> list[tuple[str, float, str]]:
    """Return the seconds of both, measured alternately, and the median of their ratios."""
    config = transformers.GPT2Config(n_layer=4, vocab_size=16_752, bos_token_id=0, eos_token_id=0)
    model: Any = transformers.AutoModelForCausalLM.from_config(config).eval()
    ids = torch.randint(0, 16_752, (4, 128), generator=torch.Generator().manual_seed(0))
    inputs, loss = inputs_of(ids, resolve(config)), chosen_loss(None, "causal")
    weights = list(model.parameters())

    def plain() -> None:
        out = model(input_ids=ids, use_cache=False)
        torch.autograd.grad(loss(out, {"input_ids": ids}).mean(), weights, allow_unused=True)

    def looked() -> None:
        measure_module(model, inputs, loss)

    plain()
    looked()
    pairs = [(seconds(plain), seconds(looked)) for _ in range(REPEATS)]
    bare, both = (median(column) for column in zip(*pairs, strict=True))
    return [
        ("plain", bare, "s"),
        ("measured", both, "s"),
        ("measured over plain", median(b / a for a, b in pairs), ""),
    ]


def seconds(work: Callable[[], Any]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def table() -> list[dict[str, Any]]:
    return [{"what": name, "value": value, "unit": unit} for name, value, unit in measure()]
