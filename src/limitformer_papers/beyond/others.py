r"""Networks and closed forms of three papers, which docs/what-others-computed.md compares with the exact law.

* [GG] Giorlandino and Goldt, arXiv 2505.24333v3: correlation ρ of tokens by depth. A row of attention is a Random
  Energy Model; as T → ∞ its participation ratio Σ A² is max(0, 1 − β_c/β), β_c = √(2/(1 − ρ)).
* [K] Kedia et al., arXiv 2403.09635: mean squares of a head's output, and of the gradient by its input.
* [H] Hayou, arXiv 2511.01734: f(x) = v W_L ⋯ W_1 W_0 x, and the rate of one step of gradient descent on W_1, …, W_L.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import limitformer as lf
from limitformer.stepping import simulate_steps

WEIGHTS, BIASES = 0.2, 4e-4  # [GG, Figure 1]: n times the variance of weights, and the variance of biases


def matrix(inputs: int, outputs: int, variance: float = 1.0) -> nn.Linear:
    """Return a linear map whose weights have this variance over the number of inputs."""
    result = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(result.weight, std=math.sqrt(variance / inputs))
    return result


def row_moments(rho: float, beta: float, tokens: int | None, rows: int, seed: int) -> tuple[float, float]:
    """Return Σ A² of a row of attention, and Σ A A′ of two rows, for Gaussian logits; None: the limit of [GG]."""
    if tokens is None:
        return max(0.0, 1 - math.sqrt(2 / (1 - rho)) / beta), 0.0
    first, fresh = np.random.default_rng(seed).standard_normal((2, rows, tokens))
    both = np.stack([first, rho * first + math.sqrt(1 - rho**2) * fresh])
    a = np.exp(beta * math.sqrt((1 - rho) * math.log(tokens)) * both)
    a /= a.sum(-1, keepdims=True)
    return float((a**2).sum(-1).mean()), float((a[0] * a[1]).sum(-1).mean())


def correlations(beta: float, depth: int, tokens: int | None = None, rows: int = 500) -> NDArray[np.float64]:
    """Return ρ before each layer and after the last by [GG]'s recursion from 0, with rows of so long a text."""
    result, size = [0.0], WEIGHTS + BIASES
    for layer in range(depth):
        rho = result[-1]
        same, other = (rho + (1 - rho) * each for each in row_moments(rho, beta, tokens, rows, layer))
        rho = (WEIGHTS * other + BIASES + rho) / (WEIGHTS * same + BIASES + 1)
        cosine = (WEIGHTS * rho + BIASES) / size
        relu = (math.sqrt(1 - cosine**2) + cosine * (math.pi - math.acos(cosine))) / math.pi
        branch, shared = (WEIGHTS * size / 2 * each + BIASES for each in (1.0, relu))
        result.append((shared + rho) / (branch + 1))
    return np.array(result)


@dataclass(frozen=True)
class HeadSetting:
    """A setting of [K]'s grid; σ_v = σ_g = 1, which multiply both sides of every comparison by one number."""

    width: int
    head_dim: int
    correlation: float
    query: float
    dropout: float
    above: float  # the correlation of the gradient from above
    tokens: int = 300

    def inputs(self, seed: int) -> dict[str, Tensor]:
        """Draw tokens, dropout's mask, and the gradient from above; their means over rows have their typical norms."""
        draws, m = torch.Generator().manual_seed(seed), self.tokens

        def rows(n: int, rho: float) -> Tensor:
            own, shared = (torch.randn(1, k, n, generator=draws) for k in (m, 1))
            mean = (every := math.sqrt(1 - rho) * own + math.sqrt(rho) * shared).mean(1, keepdim=True)
            return every + mean * (math.sqrt(n * (rho + (1 - rho) / m)) / mean.norm() - 1)

        mask = (torch.rand(1, m, m, generator=draws) >= self.dropout) / (1 - self.dropout)
        return {"x": rows(self.width, self.correlation), "mask": mask, "above": rows(self.head_dim, self.above)}

    def closed_form(self) -> NDArray[np.float64]:
        """Return [K]'s mean squares of the output, and of the gradient without its part through the softmax."""
        own, m, keep = 1 - self.correlation, self.tokens, 1 - self.dropout
        s = self.query**4 / self.width
        spread = own**2 * (m - 1) * s + math.exp(own * self.query**4) / keep * (4 * own**2 * s + own)
        gradient = self.head_dim / self.width * (1 + (m - 1) * self.above * keep) / (m * keep)
        return np.array([spread / m + self.correlation, gradient])

    def law(self, samples: int, seed: int) -> NDArray[np.float64]:
        """Return both mean squares by the exact law for the inputs of this seed (samples, 2)."""
        data = lf.weightless.simulate(
            partial(SingleHead, self), self.inputs(seed), samples=samples, seed=seed, gradients=True, progress=False,
            loss=lambda out, inputs: (out * inputs["above"]).sum((1, 2)),
        )  # fmt: skip
        output = np.einsum("stt->s", data.covariance.isel(layer=1)) / self.tokens
        return np.stack([output, data.stream_gradient.isel(layer=0) ** 2 / (self.tokens * self.width)], 1)


class HeadMixing(nn.Module):
    """The averages A x of tokens that one head forms."""

    def __init__(self, setting: HeadSetting) -> None:
        super().__init__()
        n = setting.width, setting.head_dim
        self.query, self.key = (matrix(*n, setting.query**2) for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor) -> Any:
        return ((self.query(x) @ self.key(x).mT / math.sqrt(self.key.out_features)).softmax(-1) * mask) @ x


class SingleHead(nn.Module):
    """The head of [K]; its values, of mean square A x, follow the averages."""

    def __init__(self, setting: HeadSetting) -> None:
        super().__init__()
        self.blocks, self.value = nn.ModuleList([HeadMixing(setting)]), matrix(setting.width, setting.head_dim)

    def forward(self, x: Tensor, mask: Tensor, above: Tensor) -> Any:
        return self.value(self.blocks[0](x, mask))


def linear_network(width: int, depth: int, inputs: int, last: float) -> nn.Sequential:
    """Build the network of [H]; n times the variance of v is `last`: 1/n for muP, 1 for the others.

    The NTK parametrisation at the rate η takes the step of the standard one at η/n, from weights of the same law.
    """
    hidden = [matrix(width, width) for _ in range(depth)]
    return nn.Sequential(matrix(inputs, width), *hidden, matrix(width, 1, last))


def half_square(target: Tensor) -> Callable[[Tensor, Any], Tensor]:
    """Return the loss ½(f − target)² of each sequence."""
    return lambda out, _: (out - target).square().flatten(1).sum(1) / 2


def best_rates(network: Callable[[], nn.Module], x: Tensor, y: Tensor, near: float, samples: int, seed: int) -> Any:
    """Return each network's rate of lowest loss after one step, by the parabola through three rates."""
    data = simulate_steps(
        network, x, optimizer=lambda module: torch.optim.SGD(module[1:-1].parameters(), lr=near),
        rates=[near / 2, near, 1.5 * near], steps=1, samples=samples, seed=seed, loss=half_square(y),
        dtype=torch.float64, progress=False,
    )  # fmt: skip
    low, middle, high = data.loss.isel(step=1).transpose("rate", "sample").values
    return near * (1 + (low - high) / (low - 2 * middle + high) / 4)
