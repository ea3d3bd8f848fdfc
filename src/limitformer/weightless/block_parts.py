r"""How a router spreads tokens over experts, and how long the heads of a state-space model remember.

p_e is the share of all choices that fall on expert e; a token makes k of them.

  busiest             the share of tokens that choose the busiest expert; at most 1
  effective_experts   exp of the entropy of p: 1 to E; k if all tokens choose the same experts
  unrelated_experts   the mean of effective_experts if each token chooses k of E experts at random, alone

A head multiplies its state by exp(−Δ A) with each token, where A = exp(A_log) and Δ = softplus(dt_bias + what the token
adds). With nothing added, the state halves every ln 2/(Δ A) tokens. Mamba has an A for each channel and state and calls
the bias dt_proj.bias; Mamba-2 and gated delta networks have one for each head.
"""

from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from math import inf, log

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

ROUTER = ("busiest_expert", "effective_experts", "unrelated_experts", "chosen_experts")
DECAYS = ("longest_memory", "median_memory")
REPEATS = 64  # of random choices


def expert_counts(parts: Iterable[nn.Module]) -> set[int]:
    """Return the numbers that may be that of the experts of a block: lengths of lists, and of stacks of matrices."""
    counts = set[int]()
    for part in parts:
        for inner in part.modules():
            if isinstance(inner, nn.ModuleList | nn.ModuleDict):
                counts |= set(Counter(type(each) for each in inner.children()).values())  # a router may be among them
            shapes = (parameter.shape for parameter in inner.parameters(recurse=False))
            counts |= {shape[0] for shape in shapes if len(shape) == 3 and min(shape) > 1}
    return counts - {1}


def load_of_experts(choices: Tensor, experts: int, samples: int, counted: Tensor | None) -> dict[str, Tensor]:
    """Summarise the load of experts, each (S,).

    Args:
        choices: the experts that each token chooses (…, k), tokens of one sample after those of another.
        experts: their number.
        counted: which tokens of a sample are not padding, in the order of `choices`; None: all.
    """
    k = choices.shape[-1]
    each = choices.reshape(samples, -1, k)
    if counted is not None and counted.numel() == each.shape[1]:
        each = each[:, counted.flatten()]
    tokens = each.shape[1]
    flat = each.reshape(samples, -1).long()
    count = torch.zeros(samples, experts, dtype=torch.float64).scatter_add_(
        1, flat.cpu(), torch.ones(flat.shape, dtype=torch.float64)
    )
    effective = torch.special.entr(count / (tokens * k)).sum(1).exp()
    return {
        "busiest_expert": count.amax(1) / tokens,
        "effective_experts": effective,
        "unrelated_experts": torch.full_like(effective, unrelated_experts(tokens, experts, k)),
        "chosen_experts": torch.full_like(effective, k),
    }


@lru_cache(maxsize=64)
def unrelated_experts(tokens: int, experts: int, chosen: int) -> float:
    """Return the mean number of effective experts of tokens that choose at random, each alone.

    >>> round(unrelated_experts(10_000, 8, 2), 2)
    8.0
    """
    chance = np.random.Generator(np.random.Philox(0))
    result = []
    for _ in range(REPEATS):
        picked = np.argpartition(chance.random((tokens, experts)), chosen - 1, axis=1)[:, :chosen]
        share = np.bincount(picked.ravel(), minlength=experts) / picked.size
        result.append(np.exp(-(share[share > 0] * np.log(share[share > 0])).sum()))
    return float(np.mean(result))


def half_lives(parts: Iterable[nn.Module]) -> Tensor | None:
    """Return the half-life in tokens of each head (or channel and state) of a block; None without state-space heads."""
    every = [half_life(inner) for part in parts for inner in part.modules()]
    known = [each.flatten() for each in every if each is not None]
    return torch.cat(known) if known else None


def half_life(part: nn.Module) -> Tensor | None:
    """Return ln 2/(Δ A) of a module that has A_log and the bias of Δ; None for any other."""
    logarithm = getattr(part, "A_log", None)
    bias = next((each for name in ("dt_bias", "dt_proj_bias") if (each := getattr(part, name, None)) is not None), None)
    if bias is None:
        bias = getattr(getattr(part, "dt_proj", None), "bias", None)
    if not isinstance(logarithm, Tensor) or not isinstance(bias, Tensor) or logarithm.is_meta or bias.is_meta:
        return None
    with torch.no_grad():
        rate = torch.exp(logarithm.double())
        limits = getattr(part, "time_step_limit", None)
        limits = limits if isinstance(limits, list | tuple) and len(limits) == 2 else (0.0, inf)
        step = functional.softplus(bias.double()).clamp(float(limits[0]), float(limits[1]))
        if rate.shape[:-1] == step.shape:  # channels, or heads and channels, each with several states
            return log(2) / (rate * step[..., None])
        if rate.numel() and step.numel() % rate.numel() == 0:  # heads, each with one bias or several
            return log(2) / (rate.reshape(-1, 1) * step.reshape(rate.numel(), -1))
    return None
