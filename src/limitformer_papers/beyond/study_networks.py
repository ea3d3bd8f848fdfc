"""The networks, the text and the training of the studies in `docs/studies/protocol.md`.

Six families of language models of bytes, with untied heads. Every matrix is drawn from N(0, (f s)²): s is the
`initializer_range`, and f is the factor of the matrix's knob.
"""

import hashlib
import math
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention, silu

WIDTH, HEADS, TOKENS, SEQUENCES, WORDS = 96, 4, 64, 16, 256
EVALUATED = 64  # sequences on which a rate is chosen, and as many others for the loss that is reported
TAIL, LOOK = 20, 60  # steps whose mean loss tells whether a run has diverged, and how often that is asked
RIDGE, NEAR = 1e-3, 0.05  # of `koopman`
KNOBS = ("embedding", "head", "logits", "inner", "output")
FAMILIES = {  # norm, whether before a branch, after the sum or around a branch, and whether gated with rotary positions
    "gpt2": (nn.LayerNorm, "pre", False),
    "none": (nn.Identity, "pre", False),
    "sandwich": (nn.RMSNorm, "around", True),
    "llama": (nn.RMSNorm, "pre", True),
    "bert": (nn.LayerNorm, "post", False),
    "qk": (nn.RMSNorm, "pre", True),
}
KNOB_OF = {
    "table": "embedding", "places": "embedding", "head": "head", "q_proj": "logits", "k_proj": "logits",
    "up_proj": "inner", "gate_proj": "inner", "o_proj": "output", "down_proj": "output",
}  # fmt: skip


@dataclass(frozen=True)
class StudyNetwork:
    """A network of the studies. `place` moves its family's norms; the knobs are factors on standard deviations."""

    family: str
    depth: int
    std: float
    embedding: float = 1.0
    head: float = 1.0
    logits: float = 1.0
    inner: float = 1.0
    output: float = 1.0
    place: str = ""
    seed: int = 0
    width: int = WIDTH
    heads: int = HEADS

    def factor(self, matrix: str) -> float:
        """Return the factor on the standard deviation of a matrix of this name."""
        factor = getattr(self, KNOB_OF[matrix]) if matrix in KNOB_OF else 1.0
        return float(factor**0.5 if matrix in ("q_proj", "k_proj") else factor)


class StudyBlock(nn.Module):
    """Causal attention and a feed-forward network, with the norms of the family."""

    def __init__(self, one: StudyNetwork) -> None:
        super().__init__()
        norm, place, self.gated = FAMILIES[one.family]
        self.place, linear = one.place or place, partial(nn.Linear, bias=False)
        width, self.heads = one.width, one.heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (linear(width, width) for _ in range(4))
        hidden = 8 * width // 3 if self.gated else 4 * width
        self.up_proj, self.down_proj = linear(width, hidden), linear(hidden, width)
        self.gate_proj = linear(width, hidden) if self.gated else nn.Identity()
        own = nn.RMSNorm if one.family == "qk" else nn.Identity
        self.q_norm, self.k_norm = own(width // one.heads), own(width // one.heads)
        around = norm if self.place == "around" else nn.Identity
        self.norms = nn.ModuleList(each(width) for each in (norm, norm, around, around))

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = (
            part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = self.q_norm(q), self.k_norm(k)
        if self.gated:
            q, k = rotate(q), rotate(k)
        return self.o_proj(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

    def feedforward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x) if self.gated else gelu(self.up_proj(x)))

    def forward(self, x: Tensor) -> Tensor:
        for k, branch in enumerate((self.attention, self.feedforward)):
            if self.place == "post":
                x = self.norms[k](x + branch(x))
            else:
                x = x + self.norms[k + 2](branch(self.norms[k](x)))
        return x


def rotate(x: Tensor) -> Tensor:
    """Return rotary positions applied to queries or keys (sequence, head, token, coordinate)."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[2])[:, None] / 10_000 ** (torch.arange(half) / half)
    a, b, cosines, sines = x[..., :half], x[..., half:], angles.cos(), angles.sin()
    return torch.cat([a * cosines - b * sines, b * cosines + a * sines], -1)


class Decoder(nn.Module):
    """The language model; its weights are drawn when it is built."""

    def __init__(self, one: StudyNetwork, initializer_range: float) -> None:
        super().__init__()
        norm, place, gated = FAMILIES[one.family]
        post = (one.place or place) == "post"
        self.table = nn.Embedding(WORDS, one.width)
        self.places = None if gated else nn.Embedding(TOKENS, one.width)
        self.start, self.norm = (norm(one.width) if wanted else nn.Identity() for wanted in (post, not post))
        self.blocks = nn.ModuleList(StudyBlock(one) for _ in range(one.depth))
        self.head = nn.Linear(one.width, WORDS, bias=False)
        for name, each in self.named_modules():
            if isinstance(each, nn.Linear | nn.Embedding):
                nn.init.normal_(each.weight, std=initializer_range * one.factor(name.split(".")[-1]))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids) if self.places is None else self.table(ids) + self.places.weight[: ids.shape[1]]
        x = self.start(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def builder_of(one: StudyNetwork) -> Callable[..., Decoder]:
    """Return a function that builds the network, as `check` and `rate` take it."""
    return lambda initializer_range=one.std: Decoder(one, initializer_range)


@cache
def text() -> tuple[tuple[Tensor, Tensor, Tensor], str]:
    """Return bytes of Python's standard library to train on, to choose a rate on and to report, and their hash.

    Of its files, by name, every tenth is for choosing, and every tenth from the sixth on for the report.
    """
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    kinds = [{0: 1, 5: 2}.get(k % 10, 0) for k in range(len(files))]
    parts = [
        b"".join(f.read_bytes() for f, kind in zip(files, kinds, strict=True) if kind == part) for part in range(3)
    ]
    train, choose, report = (torch.tensor(np.frombuffer(part, np.uint8).astype(np.int64)) for part in parts)
    return (train, choose, report), hashlib.sha256(b"|".join(parts)).hexdigest()[:12]


def batch(ids: Tensor, sequences: int, seed: int) -> Tensor:
    """Return sequences of ids (sequences, TOKENS + 1) from random places."""
    starts = torch.randint(0, len(ids) - TOKENS - 1, (sequences,), generator=torch.Generator().manual_seed(seed))
    return torch.stack([ids[start : start + TOKENS + 1] for start in starts])


def batch_of(one: StudyNetwork, step: int) -> Tensor:
    """Return the batch of a step of a network's training; that of step −1 is for what is foretold."""
    return batch(text()[0][0], SEQUENCES, 100_000 * (one.seed + 1) + step)


def loss_of(module: nn.Module, ids: Tensor) -> Tensor:
    return cross_entropy(module(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def loss_of_frequencies() -> float:
    """Return the loss on the text to report of predicting by the training text's frequencies of bytes."""
    train, _, report = text()[0]
    counts = torch.bincount(train, minlength=WORDS) + 1.0
    return float(-(counts / counts.sum()).log()[batch(report, EVALUATED, 0)[:, 1:]].mean())


def adamw(module: nn.Module, rate: float = 1e-3) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.1)


Prepare = Callable[[nn.Module, float], list[torch.optim.Optimizer]]  # of a drawn network and a rate


def plain(module: nn.Module, rate: float) -> list[torch.optim.Optimizer]:
    return [adamw(module, rate)]


def train(one: StudyNetwork, rate: float, steps: int, warmup: int, prepare: Prepare = plain) -> dict[str, Any]:
    """Train a network; its losses on the two held-out texts are None if it diverged.

    `prepare` changes the drawn network and makes its optimisers. A run diverged if a loss is not finite, or if at a
    look the mean of the last losses is above both the first loss and that of a uniform guess; it ends there.
    """
    began, losses = time.process_time(), list[float]()
    torch.manual_seed(one.seed)
    module = Decoder(one, one.std)
    optimizers = prepare(module, rate)
    own = [(group, group["lr"]) for each in optimizers for group in each.param_groups]
    for step in range(steps):
        for group, full in own:
            group["lr"] = full * min(1.0, (step + 1) / max(1, warmup))
        loss = loss_of(module, batch_of(one, step))
        losses.append(loss.item())
        rises = np.mean(losses[-TAIL:]) > max(losses[0], math.log(WORDS)) and step % LOOK == LOOK - 1
        if rises or not math.isfinite(losses[-1]):
            break
        module.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        for each in optimizers:
            each.step()
    with torch.no_grad():
        ends = [loss_of(module, batch(part, EVALUATED, 0)).item() for part in text()[0][1:]]
    sound = not rises and all(map(math.isfinite, [losses[-1], *ends]))
    choose, report = ends if sound else (None, None)
    seconds = round(time.process_time() - began, 1)
    return {"first": finite(losses[0]), "choose": choose, "loss": report, "steps": len(losses), "seconds": seconds}


def finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def koopman(one: StudyNetwork) -> tuple[float, float]:
    """Return RKSP's spectral radius, the largest of all blocks, and near-unit mass, the mean (formulas: protocol)."""
    torch.manual_seed(one.seed)
    module, streams = Decoder(one, one.std), list[NDArray[np.float64]]()
    for block in module.blocks:
        block.register_forward_hook(lambda _, inputs, out: streams.extend(rows_of(x) for x in (inputs[0], out)))
    with torch.no_grad():
        module(batch_of(one, -1)[:, :-1])
    if not all(np.isfinite(x).all() for x in streams):
        return math.inf, math.nan
    radii = [eigenvalues(x, y) for x, y in zip(streams[::2], streams[1::2], strict=True)]
    return max(float(each.max()) for each in radii), float(np.mean(np.abs(np.concatenate(radii) - 1) < NEAR))


def rows_of(x: Tensor) -> NDArray[np.float64]:
    rows = x.flatten(0, 1).double().numpy()
    return np.asarray(rows - rows.mean(0))


def eigenvalues(x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the sizes of the eigenvalues of L⁻¹ Cxy L⁻ᵀ of centred rows, LLᵀ = Cxx + ridge."""
    c = x.T @ x / len(x)
    root = np.linalg.cholesky(c + (RIDGE * np.trace(c) / len(c) + 1e-300) * np.eye(len(c)))
    left = np.linalg.solve(root, x.T @ y / len(x))
    return np.asarray(np.abs(np.linalg.eigvals(np.linalg.solve(root, left.T))))
