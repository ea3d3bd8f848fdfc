"""Gaussian weights, with leading dimensions for many networks at once."""

import torch
from torch import Tensor, nn


def weight(networks: tuple[int, ...], rows: int, columns: int) -> nn.Parameter:
    """Return a weight (*networks, rows, columns) that is not drawn yet."""
    return nn.Parameter(torch.empty(*networks, rows, columns))


@torch.no_grad()
def draw_weights(module: nn.Module, generator: torch.Generator | None = None) -> None:
    """Draw every weight of `module` from N(0, 1), in place: the papers keep all scales outside the weights."""
    for parameter in module.parameters():
        parameter.normal_(generator=generator)


def linear(x: Tensor, matrix: Tensor) -> Tensor:
    """Compute x W/√rows, x (*networks, tokens, rows): the n^(−1/2) of [ST, eq. 1]."""
    return x @ matrix / matrix.shape[-2] ** 0.5
