"""Seven small modules in which the misreadings of `mutants.toml` must show, and the witness of one of its entries."""

from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from limitformer.stepping.simulate import training_of
from limitformer.subjects.inputs import inputs_of
from limitformer.subjects.losses import chosen_loss
from limitformer.subjects.subject import resolve
from limitformer.weightless.network import Weightless
from limitformer.weightless.simulate import accepted_inputs
from limitformer.witness import Witness, witness, witness_pass, witness_steps
from limitformer.witness.real import LOSS, Quantity

TOKENS, WIDTH, HIDDEN, HEADS, WORDS, EXPERTS, LAYERS = 16, 64, 128, 4, 96, 8, 2
CLASSES, PADDING, STEPS, SEED = 10, 5, 3, 0


class Attention(nn.Module):
    """Attention by four square projections."""

    def __init__(self, bias: bool, causal: bool = True) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias) for _ in range(4))
        self.causal = causal

    def forward(self, x):
        q, k, v = (each(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in (self.q, self.k, self.v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.o(mixed.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """Two maps with a GELU between them, or the three of LLaMA's gated one without biases."""

    def __init__(self, gated: bool) -> None:
        super().__init__()
        self.fc, self.proj = nn.Linear(WIDTH, HIDDEN, not gated), nn.Linear(HIDDEN, WIDTH, not gated)
        self.gate = nn.Linear(WIDTH, HIDDEN, False) if gated else None

    def forward(self, x):
        hidden = self.fc(x)
        gelu = self.gate is None
        return self.proj(nn.functional.gelu(hidden) if gelu else nn.functional.silu(self.gate(x)) * hidden)


class Experts(nn.Module):
    """Experts as slices of two parameters, of which each token takes the one that its router prefers."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, False)
        self.w1 = nn.Parameter(nn.init.normal_(torch.empty(EXPERTS, WIDTH, HIDDEN), std=WIDTH**-0.5))
        self.w2 = nn.Parameter(nn.init.normal_(torch.empty(EXPERTS, HIDDEN, WIDTH), std=HIDDEN**-0.5))

    def forward(self, x):
        flat = x.flatten(0, 1)
        (share, chosen), out = self.router(flat).softmax(-1).max(-1), torch.zeros_like(flat)
        for k in chosen.unique().tolist():
            place = (chosen == k).nonzero()[:, 0]
            each = nn.functional.gelu(flat[place] @ self.w1[k]) @ self.w2[k]
            out = out.index_add(0, place, share[place, None] * each)
        return out.view_as(x)


class Block(nn.Module):
    """A pre-norm block of attention and an MLP."""

    def __init__(self, norm: Any, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.ln1, self.attn, self.ln2, self.mlp = norm(WIDTH), attention, norm(WIDTH), mlp

    def forward(self, x):
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class Network(nn.Module):
    """The module of this name, with matrices of variance 1/inputs, or orthogonal ones, and biases of zero."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.images, gpt = name == "conv", name not in ("conv", "llama", "orthogonal")
        norm, count = nn.RMSNorm if name == "llama" else nn.LayerNorm, 1 if name == "shared" else LAYERS
        if self.images:
            self.patch = nn.Conv2d(3, WIDTH, 4, stride=4)
            self.depthwise = nn.Conv2d(WIDTH, WIDTH, 3, padding="same", dilation=2, groups=WIDTH)
        else:
            self.wte = nn.Embedding(WORDS, WIDTH, padding_idx=PADDING if gpt else None)
        self.wpe = nn.Embedding(TOKENS, WIDTH) if gpt else None
        mlps = [Experts() if name == "stacked" else Mlp(name == "llama") for _ in range(count)]
        self.h = nn.ModuleList(Block(norm, Attention(name != "llama", not self.images), each) for each in mlps)
        self.ln_f, self.head = norm(WIDTH), nn.Linear(WIDTH, CLASSES if self.images else WORDS, self.images)
        if gpt:
            self.head.weight = self.wte.weight
        for part in self.modules():
            if name == "orthogonal" and isinstance(part, nn.Linear):
                nn.init.orthogonal_(part.weight)
            elif isinstance(part, nn.Linear | nn.Conv2d | nn.Embedding):
                nn.init.normal_(part.weight, std=part.weight[0].numel() ** -0.5)
            if getattr(part, "bias", None) is not None:
                nn.init.zeros_(part.bias)
        if name == "frozen":
            self.h[0].requires_grad_(False)

    def forward(self, given):
        if self.images:
            x = self.patch(given)
            x = (x + self.depthwise(x)).flatten(2).mT
        else:
            x = self.wte(given)
        if self.wpe is not None:
            x = x + self.wpe(torch.arange(TOKENS, device=given.device))
        for block in [*self.h] * (LAYERS // len(self.h)):
            x = block(x)
        x = self.ln_f(x)
        return self.head(x.mean(1) if self.images else x)


def first_class(out, inputs):
    """Return the cross-entropy of the first class, for each image."""
    return -out.log_softmax(-1)[:, 0]


def given(entry: dict[str, Any]) -> tuple[Any, Any]:
    """Return the inputs and the loss of an entry."""
    generator, rows = torch.Generator().manual_seed(1), entry.get("batch", 1)
    if entry["model"] == "conv":
        return torch.randn(rows, 3, 16, 16, generator=generator), first_class
    ids = torch.randint(WORDS, (rows, TOKENS), generator=generator)
    ids[:, 3] = PADDING
    return ids, "next-token"


def two_groups(options: dict[str, Any], module: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW without weight decay of gains and biases."""
    every = list(module.parameters())
    others = {"params": [each for each in every if each.dim() < 2], "weight_decay": 0.0}
    return torch.optim.AdamW([{"params": [each for each in every if each.dim() >= 2]}, others], **options)


def witness_of(entry: dict[str, Any]) -> tuple[Witness, list[float]]:
    """Return the witness of an entry of `mutants.toml`, and the simulated losses of the pass or the steps."""
    model, (inputs, loss) = partial(Network, entry["model"]), given(entry)
    if entry["stage"] == "pass":
        network = Weightless(resolve(model), torch.float32, torch.device("cpu"))
        inputs = accepted_inputs(inputs_of(inputs, network.subject).with_batch_dim(0), network, SEED, own_loss=False)
        function = chosen_loss(loss, network.subject.task)
        most = 0 if entry.get("dtype") == "float32" else witness.MOST_IN_FLOAT64
        with patch.object(witness, "MOST_IN_FLOAT64", most):  # 0: as a model that is too large for float64
            found = witness_pass(network, inputs, function, SEED, entry["draw"])
        values, _ = witness.simulated_pass(network, inputs, function, SEED, entry["draw"])
        return found, [float(values[Quantity(LOSS)].sums[0])]
    of_user = "optimizer is a function" in entry.get("needs", "")
    named = {"name": entry["optimizer"], **entry["options"]}
    optimizer = partial(two_groups, entry["options"]) if of_user else named
    training = partial(
        training_of, model, inputs, optimizer=optimizer, rates=None, steps=STEPS, seed=SEED, unseen=None, loss=loss,
        batches=entry.get("batches", "same"), clip=entry.get("clip"), warmup=0, schedule=entry.get("schedule"),
        factors=None, overrides=None, draw=entry["draw"], batch_dim=0, blocks=None, drawn="",
    )  # fmt: skip
    found, one = witness_steps(lambda dtype: training(dtype=dtype), optimizer), training(dtype=torch.float32)
    return found, one.trajectory(one.rules[0], 0).arrays()["loss"].ravel().tolist()
