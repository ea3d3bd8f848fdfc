"""Thirty small networks: their best learning rates, and what their first three steps say in law.

python -m benchmarks.rates.pilot train trained.jsonl: ten rates each, 150 steps without warm-up, gradients clipped to
norm 1. A language model of bytes of Python's standard library. Every line of the file is one run; a run that is in the
file is not repeated.

python -m benchmarks.rates.pilot first first.jsonl: the losses of the first three steps by `limitformer`, for four
networks drawn from the law of each architecture, at rising rates, on a batch as trained and on one of 64 tokens.

python -m benchmarks.rates.pilot compare trained.jsonl first.jsonl: for each criterion and batch, critical over best
rate, its scatter and its rank correlation with the best rate.

python -m benchmarks.rates.pilot table trained.jsonl first.jsonl: the table of `limitformer.rates.tuning`.
"""

import csv
import json
import math
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor, nn
from torch.nn import functional

from limitformer.stepping.simulate import training_of

STEPS, SEQUENCES, TOKENS = 150, 16, 64
TAIL = 20  # steps whose mean is the final loss of training
FILES = 150  # of the standard library
HELD_OUT = 0.1  # of the bytes
RATES = {"adamw": [1e-4 * 2**k for k in range(10)], "muon": [4e-4 * 2**k for k in range(10)]}
SIZES = {"as trained": (SEQUENCES, TOKENS), "small": (2, 32)}
FIRST_RATES = [4e-4 * 1.6**k for k in range(24)]  # to 20
NETWORKS = 4
CRITERIA = {  # whether a network bears a rate, by the losses of the batch and of an unseen one (steps + 1)
    "falls": lambda loss, unseen: loss[-1] < loss[0],
    "falls at once": lambda loss, unseen: loss[1] < loss[0],
    "never above its start": lambda loss, unseen: bool((loss <= loss[0]).all()),
    "falls at every step": lambda loss, unseen: bool((np.diff(loss) < 0).all()),
    "unseen rises by less than .5": lambda loss, unseen: unseen[-1] < unseen[0] + 0.5,
    "unseen falls": lambda loss, unseen: unseen[-1] < unseen[0],
}
MUON_OVER_ADAMW = 5.0  # rate of hidden matrices over that of all other weights, where Muon updates the former


@dataclass(frozen=True)
class Architecture:
    """A network of the pilot, and its optimiser."""

    number: int
    width: int
    layers: int
    std: float
    norm: str  # pre, post
    kind: str  # LayerNorm, RMSNorm
    gated: bool  # SwiGLU in place of GELU
    scaled: bool  # whether matrices that write into the stream are divided by √(2 layers)
    optimizer: str


def architectures(count: int = 30, seed: int = 20261128) -> list[Architecture]:
    """Return the networks: every fifth trains with Muon, every third is post-norm, the rest is drawn."""
    rng = np.random.default_rng(seed)
    result = []
    for k in range(count):
        width, layers = int(rng.choice([48, 64, 96, 128])), round(float(np.exp(rng.uniform(math.log(3), math.log(16)))))
        std = float(f"{np.exp(rng.uniform(math.log(0.015), math.log(0.12))):.2g}")
        kind, gated, scaled = (
            str(rng.choice(["LayerNorm", "RMSNorm"])),
            bool(rng.random() < 0.4),
            bool(rng.random() < 0.4),
        )
        norm, optimizer = "post" if k % 3 == 2 else "pre", "muon" if k % 5 == 4 else "adamw"
        result.append(Architecture(k, width, layers, std, norm, kind, gated, scaled, optimizer))
    return result


class Attention(nn.Module):
    """Causal attention with four heads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inward, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        queries, keys, values = self.inward(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """A GELU network of four times the width, or a gated one of the same size."""

    def __init__(self, width: int, gated: bool) -> None:
        super().__init__()
        hidden = 8 * width // 3 if gated else 4 * width
        self.inward = nn.Linear(width, 2 * hidden if gated else hidden, bias=False)
        self.out, self.gated = nn.Linear(hidden, width, bias=False), gated

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inward(x)
        if self.gated:
            gate, hidden = hidden.chunk(2, -1)
            return self.out(functional.silu(gate) * hidden)
        return self.out(functional.gelu(hidden))


class Block(nn.Module):
    """Attention and a feed-forward network, each with its norm."""

    def __init__(self, one: Architecture) -> None:
        super().__init__()
        norm = nn.LayerNorm if one.kind == "LayerNorm" else nn.RMSNorm
        self.first, self.second, self.post = norm(one.width), norm(one.width), one.norm == "post"
        self.attention, self.feedforward = Attention(one.width), FeedForward(one.width, one.gated)

    def forward(self, x: Tensor) -> Tensor:
        if self.post:
            x = self.first(x + self.attention(x))
            return self.second(x + self.feedforward(x))
        x = x + self.attention(self.first(x))
        return x + self.feedforward(self.second(x))


class Network(nn.Module):
    """A language model of `words` words."""

    def __init__(self, one: Architecture, words: int) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(words, one.width), nn.Embedding(TOKENS, one.width)
        self.blocks = nn.ModuleList(Block(one) for _ in range(one.layers))
        self.norm, self.head = nn.LayerNorm(one.width), nn.Linear(one.width, words, bias=False)
        for name, each in self.named_modules():
            if isinstance(each, nn.Linear | nn.Embedding):
                inside = one.scaled and name.endswith(".out")
                nn.init.normal_(each.weight, std=one.std / math.sqrt(2 * one.layers) if inside else one.std)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids) + self.places.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def adamw(parameters: list[nn.Parameter], rate: float) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.95), weight_decay=0.1)


def optimizers(module: Network, kind: str, rate: float) -> list[torch.optim.Optimizer]:
    """Return AdamW, or Muon for matrices of the blocks and AdamW for the rest at a fixed part of its rate."""
    if kind == "adamw":
        return [adamw(list(module.parameters()), rate)]
    hidden = [each for each in module.blocks.parameters() if each.dim() == 2]
    inside = {id(each) for each in hidden}
    rest = [each for each in module.parameters() if id(each) not in inside]
    return [torch.optim.Muon(hidden, lr=rate), adamw(rest, rate / MUON_OVER_ADAMW)]


def text() -> tuple[Tensor, Tensor, int]:
    """Return ids of bytes for training and held out, and the number of different bytes."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:FILES]
    values = np.frombuffer(b"".join(each.read_bytes() for each in files), dtype=np.uint8)
    used, ids = np.unique(values, return_inverse=True)
    cut = int((1 - HELD_OUT) * len(ids))
    return torch.tensor(ids[:cut]), torch.tensor(ids[cut:]), len(used)


def batch(ids: Tensor, sequences: int, generator: torch.Generator) -> Tensor:
    """Return sequences of ids (sequences, TOKENS + 1) from random places."""
    starts = torch.randint(0, len(ids) - TOKENS - 1, (sequences,), generator=generator)
    return torch.stack([ids[start : start + TOKENS + 1] for start in starts])


def loss_of(module: nn.Module, ids: Tensor) -> Tensor:
    return functional.cross_entropy(module(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def train(one: Architecture, rate: float, training: Tensor, held_out: Tensor, words: int) -> dict[str, object]:
    """Train a network, and return its losses; a loss that is not finite ends the run."""
    torch.manual_seed(one.number)
    module = Network(one, words)
    every, generator = optimizers(module, one.optimizer, rate), torch.Generator().manual_seed(one.number)
    losses: list[float] = []
    for _ in range(STEPS):
        loss = loss_of(module, batch(training, SEQUENCES, generator))
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            break
        for each in every:
            each.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        for each in every:
            each.step()
    finished = len(losses) == STEPS and math.isfinite(losses[-1])
    with torch.no_grad():
        unseen = loss_of(module, batch(held_out, 64, torch.Generator().manual_seed(0))).item()
    final = float(np.mean(losses[-TAIL:])) if finished else math.inf
    return {"final": final, "held_out": unseen if finished else math.inf, "losses": [round(each, 4) for each in losses]}


def first_steps(
    one: Architecture, size: str, training: Tensor, held_out: Tensor, words: int
) -> Iterator[dict[str, object]]:
    """Yield the losses of the first steps of each network at rising rates, until every criterion has failed."""
    sequences, tokens = SIZES[size]
    generator = torch.Generator().manual_seed(one.number)
    seen, unseen = (batch(ids, sequences, generator)[:, :tokens] for ids in (training, held_out))
    work = training_of(
        lambda: Network(one, words), seen, optimizer=lambda module: optimizers(module, one.optimizer, FIRST_RATES[0]),
        rates=FIRST_RATES, steps=3, seed=one.number, unseen=unseen, loss="next-token", clip=1.0,
    )  # fmt: skip
    for sample in range(NETWORKS):
        failed: set[str] = set()
        for rule in work.rules:
            losses = work.trajectory(rule, sample).losses()
            row = {"number": one.number, "size": size, "sample": sample, "rate": rule.base}
            yield row | {"losses": losses[0].round(4).tolist(), "unseen": losses[1].round(4).tolist()}
            failed |= {name for name, bears in CRITERIA.items() if not bears(*losses)}
            if len(failed) == len(CRITERIA):
                break


def best_rate(runs: list[dict[str, Any]]) -> float:
    """Return the rate of the lowest held-out loss, by a parabola through the best of the rates and its neighbours."""
    runs = sorted(runs, key=lambda run: run["rate"])
    x, y = np.log([run["rate"] for run in runs]), np.array([run["held_out"] for run in runs])
    k = int(np.argmin(y))
    if k in (0, len(y) - 1) or not np.isfinite(y[k - 1 : k + 2]).all():
        return math.exp(x[k])
    a, b, _ = np.polyfit(x[k - 1 : k + 2], y[k - 1 : k + 2], 2)
    return math.exp(np.clip(-b / (2 * a), x[k - 1], x[k + 1]))


def critical_rate(rows: list[dict[str, Any]], criterion: str) -> float:
    """Return the geometric mean of the networks' critical rates, each between the last rate borne and the next."""
    logs = []
    for sample in range(NETWORKS):
        own = sorted((row for row in rows if row["sample"] == sample), key=lambda row: row["rate"])
        bears = [CRITERIA[criterion](np.array(row["losses"]), np.array(row["unseen"])) for row in own]
        first = bears.index(False)
        logs.append((math.log(own[first - 1]["rate"]) + math.log(own[first]["rate"])) / 2 if first else math.nan)
    return math.exp(np.mean(logs))


def table(trained: Path, first: Path, size: str = "as trained", criterion: str = "falls") -> list[dict[str, Any]]:
    """Return a row for each network that is trained at all rates: what it is, its critical and its best rate."""
    runs, rows, result = rows_in(trained), rows_in(first), []
    for one in architectures():
        own = [run for run in runs if run["number"] == one.number]
        steps = [row for row in rows if row["number"] == one.number and row["size"] == size]
        if len(own) == len(RATES[one.optimizer]) and steps:
            known = {name: getattr(one, name) for name in ("number", "optimizer", "norm", "width", "layers", "std")}
            rates = {"critical": critical_rate(steps, criterion), "best": best_rate(own)}
            result.append(known | {name: float(f"{each:.4g}") for name, each in rates.items()})
    return result


def compare(trained: Path, first: Path) -> None:
    """Print how well the critical rate by each criterion and batch goes with the best rate."""
    for size in SIZES:
        for criterion in CRITERIA:
            rows = table(trained, first, size, criterion)
            critical, best = (np.array([row[name] for row in rows]) for name in ("critical", "best"))
            logs = np.log(critical / best)[np.isfinite(critical)]
            rho = stats.spearmanr(critical, best, nan_policy="omit").statistic
            middle, scatter = math.exp(logs.mean()), math.exp(logs.std(ddof=1))
            print(f"{size}, {criterion}: {len(logs)} networks, {middle:.1f}, scatter × {scatter:.2f}, ρ {rho:.2f}")


def rows_in(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def main() -> None:
    torch.set_num_threads(1)
    kind, path = sys.argv[1], Path(sys.argv[2])
    if kind in ("compare", "table"):
        if kind == "compare":
            compare(path, Path(sys.argv[3]))
            return
        rows = table(path, Path(sys.argv[3]))
        writer = csv.DictWriter(sys.stdout, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return
    training, held_out, words = text()
    if kind == "first":
        done = {(row["number"], row["size"]) for row in rows_in(path)}
        for one in architectures():
            for size in SIZES:
                if (one.number, size) in done:
                    continue
                rows = list(first_steps(one, size, training, held_out, words))
                with path.open("a", encoding="utf-8") as file:
                    file.write("".join(json.dumps(row) + "\n" for row in rows))
                print(one, size, len(rows), time.process_time(), flush=True)
        return
    done = {(row["number"], row["rate"]) for row in rows_in(path)}
    for one in architectures():
        for rate in RATES[one.optimizer]:
            if (one.number, rate) in done:
                continue
            began = time.process_time()
            result = {**asdict(one), "rate": rate, **train(one, rate, training, held_out, words)}
            result["seconds"] = round(time.process_time() - began, 1)
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(result) + "\n")
            print(one, rate, result["final"], result["seconds"], flush=True)


if __name__ == "__main__":
    main()
