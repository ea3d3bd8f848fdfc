"""Tiny language models of four kinds: the rate that their first steps in law bear, and that their training bears.

* gpt2 and llama: those of transformers, the second with RMSNorm, gates and rotations;
* normed: a decoder of ours with LayerNorm before each branch and an untied head;
* plain: the same without any norm.

Starts: every matrix is drawn from N(0, s²). "small" has s = 0.02. "scaled" has s = 1/√width, divided by √(2·depth) in
the projections that end a branch. "large" has s = 0.3. Norms are 1 and biases 0.

Optimisers: SGD with momentum 0.9; AdamW as torch has it; Muon with the scale 0.2 √max(out, in) for the matrices of the
blocks, and AdamW at the same rate for all else. There is neither warm-up nor clipping.

The text is a Markov chain: each token has its own law of the next one, drawn once.
"""

import json
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from limitformer_papers.training.harness import threads  # first: its error names the missing extra

# isort: split
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from limitformer.base.files import write_whole
from limitformer.stepping import simulate_steps
from limitformer_papers.beyond.ranks import generator

Array = NDArray[np.float64]
KINDS = ("gpt2", "llama", "normed", "plain")
STARTS = ("small", "scaled", "large")
OPTIMIZERS = ("sgd", "adamw", "muon")
SAME, NEW = "same", "new"
MEASURED = ("loss", "loss_unseen", "stream_change")
ENDS = ("c_proj", "o_proj", "down_proj", "attention_out", "mlp_out")  # of projections that end a branch


@dataclass(frozen=True, kw_only=True)
class RateSizes:
    """Sizes that all networks of the study share.

    Attributes:
        heads, vocabulary, length, batch: of the networks and the text.
        steps: of the training.
        evaluated: held-out sequences.
        predicted_steps: of the steps in law.
        law_rates: the lowest and the highest rate of the steps in law, and their number, by optimiser.
        powers: of two, the lowest and the highest rate that training may try, by optimiser.
    """

    heads: int = 4
    vocabulary: int = 64
    length: int = 16
    batch: int = 8
    steps: int = 120
    evaluated: int = 64
    predicted_steps: int = 3
    law_rates: tuple[tuple[float, float, int], ...] = ((1e-6, 1e2, 13), (1e-4, 1.0, 9), (1e-4, 1.0, 9))
    powers: tuple[tuple[int, int], ...] = ((-20, 6), (-13, 1), (-13, 1))


@dataclass(frozen=True)
class RateCase:
    """A network and its optimiser."""

    kind: str
    width: int
    depth: int
    start: str
    optimizer: str

    @property
    def name(self) -> str:
        return f"{self.kind}-w{self.width}-d{self.depth}-{self.start}-{self.optimizer}"


# Networks.


class TinyDecoder(nn.Module):
    """A decoder as people write it: learnt positions, blocks of attention and of a hidden layer, an untied head."""

    def __init__(self, width: int, depth: int, heads: int, vocabulary: int, length: int, normed: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(TinyBlock(width, heads, normed) for _ in range(depth))
        self.norm = nn.LayerNorm(width) if normed else nn.Identity()
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class TinyBlock(nn.Module):
    def __init__(self, width: int, heads: int, normed: bool) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = (nn.LayerNorm(width) if normed else nn.Identity() for _ in range(2))
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (
            part(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).flatten(2))
        y = x + self.mlp_out(functional.gelu(self.mlp_in(self.norm2(x))))
        return y


def network_of(case: RateCase, sizes: RateSizes) -> nn.Module:
    """Build the network and draw its weights."""
    module = architecture_of(case, sizes)
    scale = {"small": 0.02, "scaled": case.width**-0.5, "large": 0.3}[case.start]
    for name, parameter in module.named_parameters():
        if parameter.dim() < 2:
            continue  # norms are 1
        ends = case.start == "scaled" and name.split(".")[-2] in ENDS
        nn.init.normal_(parameter, 0.0, scale / (2 * case.depth) ** 0.5 if ends else scale)
    for part in module.modules():
        bias = getattr(part, "bias", None)
        if isinstance(bias, nn.Parameter):
            nn.init.zeros_(bias)
    return module


def architecture_of(case: RateCase, sizes: RateSizes) -> nn.Module:
    common: dict[str, Any] = {"vocab_size": sizes.vocabulary, "use_cache": False, "attn_implementation": "eager"}
    common |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    if case.kind == "gpt2":
        return GPT2LMHeadModel(GPT2Config(
            **common, n_embd=case.width, n_layer=case.depth, n_head=sizes.heads, n_positions=sizes.length,
            embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0,
        ))  # fmt: skip
    if case.kind == "llama":
        return LlamaForCausalLM(LlamaConfig(
            **common, hidden_size=case.width, num_hidden_layers=case.depth, num_attention_heads=sizes.heads,
            intermediate_size=3 * case.width, max_position_embeddings=sizes.length,
        ))  # fmt: skip
    return TinyDecoder(case.width, case.depth, sizes.heads, sizes.vocabulary, sizes.length, case.kind == "normed")


def optimizers_of(name: str, rate: float, module: nn.Module) -> list[torch.optim.Optimizer]:
    """Return the optimisers of a module; the same function serves the law and the training."""
    every = list(module.parameters())
    if name == "sgd":
        return [torch.optim.SGD(every, lr=rate, momentum=0.9)]
    if name == "adamw":
        return [torch.optim.AdamW(every, lr=rate)]
    inside = {id(p) for part in module.modules() if isinstance(part, nn.ModuleList) for p in part.parameters()}
    hidden = [p for p in every if id(p) in inside and p.dim() == 2]
    rest = [p for p in every if id(p) not in inside or p.dim() != 2]
    muon = torch.optim.Muon(hidden, lr=rate, weight_decay=0.0, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(rest, lr=rate)]


def sequence_losses(out: Any, inputs: Mapping[str, Tensor]) -> Tensor:
    """Return the mean loss of the next tokens, one number a sequence."""
    ids = inputs[""] if "" in inputs else next(iter(inputs.values()))
    logits = out if isinstance(out, Tensor) else out.logits
    losses = functional.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
    return losses.mean(1)


# The text.


def markov_text(sizes: RateSizes, seed: int, rows: int) -> NDArray[np.int64]:
    """Draw sequences (row, token) of the chain; the chain is the same for every seed."""
    law = generator(0).dirichlet(np.full(sizes.vocabulary, 0.1), sizes.vocabulary).cumsum(1)
    random = generator(1 + seed)
    ids = np.empty((rows, sizes.length), np.int64)
    ids[:, 0] = random.integers(0, sizes.vocabulary, rows)
    for t in range(1, sizes.length):
        passed = law[ids[:, t - 1]] < random.random(rows)[:, None]
        ids[:, t] = np.minimum(passed.sum(1), sizes.vocabulary - 1)
    return ids


def batches_of_text(sizes: RateSizes, seed: int, number: int) -> Tensor:
    """Return batches (step, sequence, token)."""
    ids = torch.from_numpy(markov_text(sizes, seed, number * sizes.batch))
    return ids.view(number, sizes.batch, sizes.length)


# The law, and the training.


def law_rates_of(optimizer: str, sizes: RateSizes) -> Array:
    """Return the learning rates of the steps in law."""
    return np.asarray(np.geomspace(*sizes.law_rates[OPTIMIZERS.index(optimizer)]), np.float64)


def tries_of(optimizer: str, sizes: RateSizes) -> Array:
    """Return the learning rates that training may try: powers of two."""
    low, high = sizes.powers[OPTIMIZERS.index(optimizer)]
    return np.asarray(2.0 ** np.arange(low, high + 1), np.float64)


def steps_in_law(case: RateCase, sizes: RateSizes, samples: int, seed: int) -> dict[str, Array]:
    """Return `MEASURED` by (batches, rate, sample, step); the stream's change is the largest of all layers."""
    batches = batches_of_text(sizes, 1000 + seed, sizes.predicted_steps + 2)
    unseen, of_steps = batches[-1], list(batches[:-1])
    every = []
    for choice in (SAME, of_steps):
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore", RuntimeWarning)  # of means of numbers that overflowed
            data = simulate_steps(
                partial(network_of, case, sizes), of_steps[0], optimizer=partial(optimizers_of, case.optimizer, 1.0),
                rates=law_rates_of(case.optimizer, sizes).tolist(), steps=sizes.predicted_steps, samples=samples,
                seed=seed, batches=choice, unseen=unseen, loss=sequence_losses, progress=False, draw="always",
            )  # fmt: skip
        every.append(
            {key: data[key].values for key in MEASURED} | {"stream_change": largest(data["stream_change"].values)}
        )
    return {key: np.array([one[key] for one in every]) for key in MEASURED}


def largest(changes: Array) -> Array:
    """Return the largest entry of the last axis; NaN, of numbers that overflowed, counts as infinity."""
    return np.asarray(np.where(np.isnan(changes), np.inf, changes).max(-1))


def trained_at(case: RateCase, sizes: RateSizes, rate: float, seed: int) -> tuple[float, float]:
    """Train one network; return its held-out losses before and after (infinite if a number overflowed)."""
    torch.manual_seed(seed)
    module = network_of(case, sizes)
    optimizers = optimizers_of(case.optimizer, rate, module)
    held_out = batches_of_text(sizes, 999, -(-sizes.evaluated // sizes.batch)).flatten(0, 1)
    start = loss_on(module, held_out)
    for ids in batches_of_text(sizes, seed, sizes.steps):
        for each in optimizers:
            each.zero_grad()
        loss = sequence_losses(module(ids), {"": ids}).mean()
        if not torch.isfinite(loss):
            return start, float("inf")
        loss.backward()
        for each in optimizers:
            each.step()
    end = loss_on(module, held_out)
    return start, end if np.isfinite(end) else float("inf")


def loss_on(module: nn.Module, ids: Tensor) -> float:
    with torch.no_grad():
        return float(sequence_losses(module(ids), {"": ids}).mean())


def training_of(case: RateCase, sizes: RateSizes, seed: int, near: Array | None = None) -> tuple[float, Array]:
    """Return the loss before training, and after it by rate (try,), NaN where a rate was not tried.

    Every other rate is tried until two of these diverge, or those `near` what the losses of another seed say; then the
    neighbours of the best one and of the first that diverged.
    """
    rates = tries_of(case.optimizer, sizes)
    ends, start = np.full(len(rates), np.nan), np.nan

    def attempt(k: int) -> None:
        nonlocal start
        if 0 <= k < len(rates) and np.isnan(ends[k]):
            start, ends[k] = trained_at(case, sizes, float(rates[k]), seed)

    if near is None:
        for k in range(0, len(rates), 2):
            attempt(k)
            two = ends[k - 2 : k + 1 : 2] if k >= 2 else np.array([0.0])
            if np.isinf(two).all() or ((two >= start).all() and np.nanmin(ends) < start):
                break
    else:
        attempt(int(np.nanargmin(near)))
        for k in range(first_diverged(near, start), len(rates)):
            attempt(k)
            if ends[k] >= start:
                break
    best, first = int(np.nanargmin(ends)), first_diverged(ends, start)
    for k in (best - 1, best + 1, first - 1):
        attempt(k)
    return float(start), ends


def first_diverged(ends: Array, start: float) -> int:
    """Return the place of the lowest rate above the best one after which the loss is not below its start.

    It is the number of rates if there is none, and the lowest of all such rates if no rate improved the loss. A rate
    below the best one that leaves the loss as it was is too low.
    """
    not_below = np.append(ends, np.inf) >= start
    best = int(np.nanargmin(ends))
    if ends[best] < start:
        not_below[:best] = False
    return int(np.flatnonzero(not_below)[0])


def outcome_of(case: RateCase, sizes: RateSizes, samples: int, seed: int, folder: Path) -> dict[str, Any]:
    """Return the steps in law and the training of a case with two seeds, read from the folder if they are there."""
    path = folder / f"{case.name}.json"
    if not path.is_file():
        with threads(1):  # the number of threads changes the last bits of sums
            law = {key: value.tolist() for key, value in steps_in_law(case, sizes, samples, seed).items()}
            start, end = training_of(case, sizes, 2 * seed)
            again = training_of(case, sizes, 2 * seed + 1, end)
        outcome = {"case": asdict(case), **law, "start": [start, again[0]], "end": [end.tolist(), again[1].tolist()]}
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, lambda part: part.write_text(json.dumps(outcome), encoding="utf-8"))
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return record
