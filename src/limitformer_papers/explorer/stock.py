r"""Stock architectures before training, over family, width, depth and `initializer_range`: the curves of `lf.check`.

Every cell is the exact law of what the installed transformers makes of a configuration (`limitformer.weightless`), on
unrelated tokens: head dimension 64, hidden units four times the width, all else as the family has it.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from limitformer.base.progress import track
from limitformer.checking.check import check
from limitformer.subjects.shapes import decoder, encoder, gpt2
from limitformer_papers.explorer.parts import axis, cached, choice, curve, plot, rounded

FAMILIES = {
    "gpt2": "GPT-2",
    "bert": "BERT",
    "llama": "Llama",
    "qwen3": "Qwen 3 (normed queries and keys)",
    "gemma3_text": "Gemma 3 (norms on both sides)",
    "olmo2": "OLMo 2 (norm after the branch)",
}
ENCODERS = ("bert",)
HEAD_DIM, HIDDEN, VOCABULARY = 64, 4, 50304
BY = ("family", "width", "depth", "range")


class CheckedCurve(NamedTuple):
    """A curve of a check, and how it is drawn."""

    name: str
    title: str
    y: str
    log: bool
    limits: tuple[float, float] | None


PLOTS = (
    CheckedCurve("correlation", "Mean correlation of tokens", "ρ", False, (-0.2, 1)),
    CheckedCurve("size", "Size of the stream (root mean square)", "√(tr V/m)", True, None),
    CheckedCurve("effective_tokens", "Effective tokens of attention", "exp of the entropy", False, None),
    CheckedCurve("logit_std", "Standard deviation of attention's logits", "σ", True, None),
    CheckedCurve("stream_gradient", "Gradient of the loss in the stream", "|∂L/∂X|", True, None),
)


@dataclass(frozen=True, kw_only=True)
class Config:
    """The grid, and the settings of every cell."""

    families: tuple[str, ...] = tuple(FAMILIES)
    widths: tuple[int, ...] = (128, 512, 2048)
    depths: tuple[int, ...] = (6, 12, 24)
    ranges: tuple[float, ...] = (0.01, 0.02, 0.04, 0.08)
    tokens: int = 32
    samples: int = 4


def compute(config: Config, seed: int, folder: Path | None) -> dict[str, Any]:
    law = cached(check_curves, folder)
    results = [law(config, seed, *cell) for cell in track(list(grid(config)), "cells")]
    return {
        "axes": axes(config),
        "plots": [plot_of(each, [cell["curves"][each.name] for cell in results]) for each in PLOTS],
        "facts": [{"label": "Verdicts of check", "by": list(BY), "cells": [cell["verdicts"] for cell in results]}],
        "settings": asdict(config),
        "samples": f"{config.samples} networks of the law in every cell, {config.tokens} unrelated tokens",
    }


def grid(config: Config) -> Iterator[tuple[str, int, int, float]]:
    return product(config.families, config.widths, config.depths, config.ranges)


def axes(config: Config) -> list[dict[str, Any]]:
    """Return the axes, the family's own settings first."""
    model, families = "Configuration", {each: FAMILIES[each] for each in config.families}
    return [
        choice("family", "Family", families, config.families[0], model),
        axis("width", "Width", config.widths, config.widths[len(config.widths) // 2], model),
        axis("depth", "Depth (blocks)", config.depths, config.depths[len(config.depths) // 2], model),
        axis("range", "initializer_range", config.ranges, config.ranges[len(config.ranges) // 3], model),
    ]


def configuration(family: str, width: int, depth: int, spread: float) -> dict[str, Any]:
    heads, hidden = width // HEAD_DIM, HIDDEN * width
    if family == "gpt2":
        return gpt2(width, depth, heads) | {"initializer_range": spread}
    if family in ENCODERS:
        return encoder(family, width, depth, heads, hidden, vocab_size=VOCABULARY, initializer_range=spread)
    more = {"initializer_range": spread, "head_dim": HEAD_DIM} if family != "olmo2" else {"initializer_range": spread}
    return decoder(family, width, depth, heads, heads, hidden, VOCABULARY, **more)


def check_curves(config: Config, seed: int, *cell: Any) -> dict[str, Any]:
    """Return low, middle and high of each curve by layer, and the verdicts in words."""
    report = check(configuration(*cell), tokens=config.tokens, samples=config.samples, seed=seed, progress=False)
    assert report.band is not None  # several samples have one
    curves = {}
    for name in (each.name for each in PLOTS):
        band = report.band[name]
        inner = [dim for dim in band.dims if dim not in ("edge", "layer", "block")]  # heads: the typical one
        curves[name] = rounded(band.median(inner).transpose("edge", ...).values)
    return {"curves": curves, "verdicts": [str(each) for each in report.verdicts]}


def plot_of(quantity: CheckedCurve, cells: list[Any]) -> dict[str, Any]:
    """Return one plot; blocks are counted from 1."""
    first = 1 if quantity.name in ("effective_tokens", "logit_std") else 0
    numbers = [np.array(each, float) for each in cells]
    result = plot(
        quantity.title, "block" if first else "layer", quantity.y, BY, numbers, log=quantity.log, range=quantity.limits
    )
    band = {"label": "90 % of new networks", "low": 0, "high": 2}
    return result | {"first": first, "curves": [curve("middle of the law", "law", 1)], "band": band}
