"""Shaped attention compared with the plain fused kernel: time of forward and backward, and memory for long texts.

The two run in turn in one process and the ratio is the median over the turns; memory is that of all tensors at
their peak.
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import BertConfig, BertForMaskedLM

from limitformer.hf import shape_model
from limitformer.nn.blocks import Block, Stack, shaped_block
from limitformer.nn.self_attention import ShapedSelfAttention
from limitformer.nn.shaped_attention import shaped_attention
from limitformer.nn.visibility import Visibility, visibility

BATCH, LENGTH, WIDTH, HEADS = 8, 256, 512, 8
LONG = 4096
MASKS = ("none", "causal", "padding", "padding and causal")
OF_MODULES = (*MASKS, "ones", "ones and causal")
WANTED_ATTENTION, WANTED_MODULE, WANTED_STEP, WANTED_MEMORY = 1.2, 1.2, 1.04, 1.1
Work = Callable[[], object]


def inputs(batch: int, length: int, width: int = WIDTH, heads: int = HEADS) -> list[Tensor]:
    """Queries, keys, values and the gradient of the result, laid out as projections leave them."""
    generator = torch.Generator().manual_seed(0)
    shape = (batch, length, heads, width // heads)
    tensors = [torch.randn(shape, generator=generator).transpose(1, 2) for _ in range(4)]
    return [x.requires_grad_(i < 3) for i, x in enumerate(tensors)]


def padding_mask(batch: int, length: int) -> Tensor:
    """Return a mask (batch, 1, 1, length) of texts with different ends."""
    ends = torch.linspace(length // 2, length, batch).long()
    return (torch.arange(length) < ends[:, None])[:, None, None]


def prepared(kind: str, batch: int, length: int) -> Visibility:
    """Prepare one of `OF_MODULES`, as a model does once for all layers."""
    mask = padding_mask(batch, length) if kind.startswith("padding") else None
    if kind.startswith("ones"):
        mask = torch.ones(batch, 1, 1, length, dtype=torch.bool)
    return visibility(mask, is_causal=kind.endswith("causal"), queries=length, keys=length)


def steps(kind: str, batch: int = BATCH, length: int = LENGTH) -> tuple[Work, Work]:
    """Return forward-and-backward functions of shaped attention with trained gains and of plain attention."""
    query, key, value, gradient = inputs(batch, length)
    gains = [torch.ones(HEADS, requires_grad=True) for _ in range(2)]
    seen = prepared(kind, batch, length)
    scale = (WIDTH // HEADS) ** -0.5
    leaves = [query, key, value, *gains]

    def backward(result: Tensor) -> None:
        result.backward(gradient)
        for leaf in leaves:
            leaf.grad = None

    def shaped() -> None:
        backward(shaped_attention(query, key, value, gamma1=gains[0], gamma2=gains[1], scale=scale, mask=seen))

    def plain() -> None:
        options = {"attn_mask": seen.mask, "is_causal": seen.causal, "scale": scale}
        backward(functional.scaled_dot_product_attention(query, key, value, **options))

    return shaped, plain


def seconds(work: Work) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def ratio(shaped: Work, plain: Work, turns: int) -> dict[str, float]:
    """Return the median milliseconds of both, and the median of their ratios."""
    for work in (shaped, plain) * 3:
        work()
    times = np.array([(seconds(shaped), seconds(plain)) for _ in range(turns)])
    shaped_ms, plain_ms = (float(x) for x in 1e3 * np.median(times, axis=0))
    return {"shaped_ms": shaped_ms, "sdpa_ms": plain_ms, "ratio": float(np.median(times[:, 0] / times[:, 1]))}


def time_ratio(kind: str) -> dict[str, float]:
    return ratio(*steps(kind), turns=30)


def module_ratio(kind: str) -> dict[str, float]:
    """Compare the module, with its projections, to the same module without gains."""
    return ratio(module_step(kind, True), module_step(kind, False), turns=30)


def step_ratio(kind: str = "none", depth: int = 4) -> dict[str, float]:
    """Compare a training step of a stack of shaped blocks to one without gains."""
    return ratio(training_step(kind, depth, True), training_step(kind, depth, False), turns=10)


def module_step(kind: str, gains: bool) -> Work:
    module = made_block(gains).attention
    assert isinstance(module, ShapedSelfAttention)
    x, gradient = torch.randn(BATCH, LENGTH, WIDTH, requires_grad=True), torch.randn(BATCH, LENGTH, WIDTH)
    seen = prepared(kind, BATCH, LENGTH)

    def step() -> None:
        module(x, seen).backward(gradient)
        module.zero_grad()
        x.grad = None

    return step


def made_block(gains: bool) -> Block:
    block = shaped_block(WIDTH, HEADS, gamma=0.2)
    assert isinstance(block.attention, ShapedSelfAttention)
    if not gains:
        block.attention.gamma1 = block.attention.gamma2 = None
    return block


def training_step(kind: str, depth: int, gains: bool) -> Work:
    blocks = [made_block(gains) for _ in range(depth)]
    stack = Stack(blocks, is_causal=kind.endswith("causal"))
    optimiser = torch.optim.Adam(stack.parameters(), lr=1e-4)
    x = torch.randn(BATCH, LENGTH, WIDTH)
    mask = padding_mask(BATCH, LENGTH) if kind.startswith("padding") else None

    def step() -> None:
        optimiser.zero_grad()
        stack(x, mask).square().mean().backward()
        optimiser.step()

    return step


def peak(kind: str, shaped: bool, what: str) -> int:
    """Return the peak bytes of tensors in one forward and backward pass of `LONG` tokens, minus those before it."""
    work = steps(kind, 2, LONG)[0 if shaped else 1] if what == "attention" else long_block(kind, shaped)
    work()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        work()
    assert profile.profiler is not None
    assert profile.profiler.kineto_results is not None
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    allocated = np.cumsum([e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())])
    return int(allocated.max())


def long_block(kind: str, shaped: bool) -> Work:
    block = made_block(shaped)
    x = torch.randn(2, LONG, WIDTH)
    seen = prepared(kind, 2, LONG)
    return lambda: block(x, seen).square().mean().backward()


def memory_ratio(kind: str, what: str = "block") -> dict[str, float]:
    """Return the megabytes of both (inputs included) and their ratio. `what` is "block" or "attention"."""
    inputs_held = 4 if what == "attention" else 1
    input_bytes = inputs_held * 2 * LONG * WIDTH * 4
    shaped, plain = (peak(kind, flag, what) + input_bytes for flag in (True, False))
    return {"shaped_MB": shaped / 1e6, "sdpa_MB": plain / 1e6, "ratio": shaped / plain}


def bert_ratio() -> dict[str, float]:
    """Compare a training step of a stock BERT of two layers, shaped by `hf.shape_model`, to the same model with
    sdpa."""
    return ratio(bert_step(True), bert_step(False), turns=10)


def bert_step(shaped: bool) -> Work:
    sizes: dict[str, Any] = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "intermediate_size": 4 * WIDTH}
    model = BertForMaskedLM(BertConfig(vocab_size=1000, num_hidden_layers=2, **sizes))
    model = shape_model(model) if shaped else model
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-4)
    ids, seen = torch.randint(5, 1000, (BATCH, LENGTH)), padding_mask(BATCH, LENGTH)[:, 0, 0].long()

    def step() -> None:
        optimiser.zero_grad()
        model(ids, attention_mask=seen, labels=ids).loss.backward()
        optimiser.step()

    return step


def table() -> list[dict[str, Any]]:
    """Return all rows, on one thread and on all."""
    rows: list[dict[str, Any]] = []
    threads = torch.get_num_threads()
    for count in sorted({1, threads}):
        torch.set_num_threads(count)
        at = f"{count} thread{'s' if count > 1 else ''}"
        rows += [{"what": f"call, {kind}, {at}", "wanted": WANTED_ATTENTION, **time_ratio(kind)} for kind in MASKS]
        rows += [
            {"what": f"module, {kind}, {at}", "wanted": WANTED_MODULE, **module_ratio(kind)} for kind in OF_MODULES
        ]
        rows += [{"what": f"model step, {kind}, {at}", "wanted": WANTED_STEP, **step_ratio(kind)} for kind in MASKS[:3]]
        rows.append({"what": f"BERT step, padding, {at}", "wanted": WANTED_STEP, **bert_ratio()})
    torch.set_num_threads(threads)
    return rows


def memory_table() -> list[dict[str, Any]]:
    kinds = ((kind, what) for what in ("attention", "block") for kind in MASKS[:3])
    return [{"what": f"{what}, {kind}", "wanted": WANTED_MEMORY, **memory_ratio(kind, what)} for kind, what in kinds]
