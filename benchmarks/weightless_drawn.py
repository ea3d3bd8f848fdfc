"""Weightless networks that must draw their weights, compared with networks that torch draws: forward, backward,
measures.

Convolutions, a Transformer of torch (uniform weights) and a vision Transformer (truncated normal ones). Both sides take
turns in one process, and the ratio is that of the processor's seconds of a sample, the median over the turns.
"""

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.weightless import taking_turns
from limitformer.subjects.inputs import inputs_of
from limitformer.subjects.losses import chosen_loss
from limitformer.subjects.subject import resolve
from limitformer.weightless.network import Weightless


class Patches(nn.Module):
    """A convolution of overlapping patches, and two small layers on the 400 tokens of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(4, 32, 8, stride=4)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 32)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """Images to the first token of each."""
        x = self.convolution(x).flatten(2).mT
        for layer in self.layers:
            x = x + layer(x)
        return x[:, :1]


class Convolutions(nn.Module):
    """Three convolutions (Mnih et al., 2015) before a stream of one token per image."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 32, 8, stride=4), nn.Conv2d(32, 64, 4, stride=2)
        self.third, self.head = nn.Conv2d(64, 64, 3), nn.Linear(3136, 512)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(512, 512)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """Images to tokens (B, 1, 512)."""
        x = torch.relu(self.third(torch.relu(self.second(torch.relu(self.first(x))))))
        x = self.head(x.flatten(1))[:, None]
        for layer in self.layers:
            x = x + layer(torch.relu(x))
        return x


class Encoder(nn.Module):
    """Blocks of torch's own Transformer, which has uniform weights, on tokens (B, M, width)."""

    def __init__(self, width: int = 512, depth: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(depth)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Truncated(Encoder):
    """The encoder at a vision Transformer's width, with truncated normal weights."""

    def __init__(self) -> None:
        super().__init__(width=768, depth=4)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.trunc_normal_(parameter, std=0.02, a=-0.04, b=0.04)


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "a convolution of 8 × 400 patches": (Patches, (8, 4, 84, 84)),
    "three convolutions, 8 images": (Convolutions, (8, 4, 84, 84)),
    "TransformerEncoderLayer, uniform weights, 128 tokens": (Encoder, (1, 128, 512)),
    "truncated normal weights, 197 tokens": (Truncated, (1, 197, 768)),
}


def ways(factory: Callable[[], nn.Module], x: Tensor) -> dict[str, Callable[[int], None]]:
    """Return functions that compute the sample of a given number with its gradients."""
    subject = resolve(factory)
    network, inputs = Weightless(subject, torch.float32, torch.device("cpu")), inputs_of(x, subject)
    loss = chosen_loss(None, subject.task)

    def weightless(sample: int) -> None:
        network.run(0, range(sample, sample + 1), inputs, "auto", loss)

    def drawn(sample: int) -> None:
        out = factory().eval()(x.clone().requires_grad_())
        loss(out, {}).mean().backward()

    return {"weightless": weightless, "drawn": drawn}


def table() -> list[dict[str, Any]]:
    """Return the milliseconds per sample and how many times longer the weightless network takes."""
    rows = []
    for name, (factory, size) in CASES.items():
        x = torch.rand(size, generator=torch.Generator().manual_seed(0))
        turns = taking_turns(ways(factory, x))
        ratios = [mine / theirs for mine, theirs in zip(turns["weightless"], turns["drawn"], strict=True)]
        times = {way: 1e3 * statistics.median(seconds) for way, seconds in turns.items()}
        rows.append({"what": name, **times, "weightless over drawn": statistics.median(ratios)})
    return rows
