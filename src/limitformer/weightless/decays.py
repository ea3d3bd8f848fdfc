r"""How long the heads of a state-space model remember.

A head multiplies its state by exp(−Δ A) with each token, where A = exp(A_log) and Δ = softplus(dt_bias + what the token
adds). With nothing added, the state halves every ln 2/(Δ A) tokens. Mamba has an A for each channel and state and calls
the bias dt_proj.bias; Mamba-2 and gated delta networks have one for each head.
"""

from collections.abc import Iterable
from math import inf, log

import torch
from torch import Tensor, nn
from torch.nn import functional

DECAYS = ("longest_memory", "median_memory")


def half_lives(parts: Iterable[nn.Module]) -> Tensor | None:
    """Return the half-life in tokens of each head (or channel and state) of a block; None without state-space heads."""
    found = [half_life(inner) for part in parts for inner in part.modules()]
    known = [each.flatten() for each in found if each is not None]
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
