"""How a router spreads tokens over experts: what the choice of each token says, and what unrelated tokens would give.

p_e is the share of all choices that fall on expert e; a token makes k of them.

  busiest             the share of tokens that choose the busiest expert; at most 1
  effective_experts   exp of the entropy of p: 1 to E; k if all tokens choose the same experts
  unrelated_experts   the mean of effective_experts if each token chooses k of E experts at random, alone
"""

from collections import Counter
from collections.abc import Iterable
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor, nn

ROUTER = ("busiest_expert", "effective_experts", "unrelated_experts", "chosen_experts")
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
    share = count / (tokens * k)
    effective = torch.special.entr(share).sum(1).exp()
    unrelated = unrelated_experts(tokens, experts, k)
    return {
        "busiest_expert": count.amax(1) / tokens,
        "effective_experts": effective,
        "unrelated_experts": torch.full_like(effective, unrelated),
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
