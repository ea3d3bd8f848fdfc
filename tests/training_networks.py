"""Networks trained by torch, and the statistics by which the law of training steps is compared with them."""

import math
from contextlib import contextmanager

import numpy as np
import torch
import transformers
from torch import nn
from torch.nn import functional

import limitformer as lf
from limitformer.subjects.inputs import inputs_of
from limitformer.subjects.losses import chosen_loss, output_of
from limitformer.subjects.subject import resolve
from weightless_families import CONFIGS, SIZE, draw_again

BATCHES = [[3, 7, 3, 9, 5], [8, 7, 4, 4, 11], [3, 12, 9, 6, 5]]  # ids that are equal, in one batch and in several
UNSEEN = [13, 7, 9, 2, 5]
STEPS = len(BATCHES)


class Custom(nn.Module):
    """A user's module: a tied head, one shared matrix that two places use, gains, biases, squared ReLU."""

    def __init__(self, width=24, vocabulary=40, blocks=2):
        super().__init__()
        self.table = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(8, width)
        self.blocks = nn.ModuleList([CustomBlock(width) for _ in range(blocks)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.table.weight
        for part in self.modules():
            if isinstance(part, nn.Linear | nn.Embedding):
                nn.init.normal_(part.weight, 0, 0.2)

    def forward(self, ids):
        x = self.table(ids) + self.places(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class CustomBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.RMSNorm(width, eps=1e-6)
        self.key = nn.Linear(width, width)  # of queries and keys
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        z = self.norm1(x)
        mask = torch.triu(torch.full((x.shape[1], x.shape[1]), -torch.inf), 1).to(x)
        a = torch.softmax(self.key(z) @ self.key(z.roll(1, -1)).mT / math.sqrt(x.shape[-1]) + mask, -1)
        x = x + self.out(a @ self.value(z))
        return x + self.down(functional.relu(self.up(self.norm2(x))).square())


def next_token(out, inputs):
    """The loss of a user's module, by sequence."""
    ids = inputs[""]
    return functional.cross_entropy(out[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none").mean(-1)


def albert():
    return transformers.AlbertConfig(
        **SIZE | {"num_hidden_layers": 4}, embedding_size=16, num_hidden_groups=1, inner_group_num=1,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, classifier_dropout_prob=0.0,
    )  # fmt: skip


ALBERT = "albert.encoder.albert_layer_groups.0"
MODELS = {  # by name: the model, the module whose last output is the stream, a weight of the inside
    "llama": (CONFIGS["llama"], "model.layers.2", "model.layers.1.mlp.down_proj.weight"),
    "gpt2": (CONFIGS["gpt2"], "transformer.h.2", "transformer.h.1.mlp.c_fc.weight"),
    "bert": (CONFIGS["bert"], "bert.encoder.layer.2", "bert.encoder.layer.1.attention.self.query.weight"),
    "mixtral": (CONFIGS["mixtral"], "model.layers.2", "model.layers.1.mlp.experts.down_proj"),
    "albert": (albert, ALBERT, f"{ALBERT}.albert_layers.0.ffn.weight"),
    "custom": (lambda: Custom, "blocks.1", "blocks.0.key.weight"),
}  # fmt: skip


def hidden_matrices(module):
    """Matrices that are neither looked up nor give the output."""
    tables = {id(part.weight) for part in module.modules() if isinstance(part, nn.Embedding)}
    heads = {id(each) for name, each in module.named_parameters() if "head" in name or "decoder" in name}
    return [each for each in module.parameters() if each.dim() == 2 and id(each) not in tables | heads]


def muon(module):
    hidden = hidden_matrices(module)
    rest = [each for each in module.parameters() if all(each is not one for one in hidden)]
    return [
        torch.optim.Muon(hidden, lr=0.05, momentum=0.9, weight_decay=0.1),
        torch.optim.AdamW(rest, lr=0.02, betas=(0.9, 0.95), weight_decay=0.0),
    ]


OPTIMIZERS = {
    "sgd": (lambda module: torch.optim.SGD(module.parameters(), lr=0.3, momentum=0.9, weight_decay=0.02), None),
    "adamw": (
        lambda module: torch.optim.AdamW(module.parameters(), lr=0.02, betas=(0.9, 0.95), weight_decay=0.5), 1.0,
    ),
    "muon": (muon, None),
}  # fmt: skip


def trained_by_law(model, optimizer, samples, seed=1, draw="never", **options):
    """Return the statistics of networks in law (samples,), by name."""
    make, _, inner = MODELS[model]
    factory, clip = OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer
    options = {"loss": next_token if model == "custom" else None, "dtype": torch.float64} | options
    data = lf.weightless.simulate_steps(
        make(), BATCHES[0], optimizer=factory, clip=clip, steps=STEPS, samples=samples, seed=seed, batches=BATCHES,
        unseen=UNSEEN, draw=draw, progress=False, **options,
    ).isel(rate=0)  # fmt: skip
    result = {f"loss {t}": data.loss.values[:, t] for t in range(STEPS + 1)}
    result |= {f"unseen loss {t}": data.loss_unseen.values[:, t] for t in range(STEPS + 1)}
    result |= {f"gradient {t}": data.gradient_norm.values[:, t] for t in range(STEPS)}
    result |= {f"stream change {t}": data.stream_change.values[:, t, -1] for t in (1, 2, 3)}
    result |= {f"output change {t}": data.output_change.values[:, t] for t in (1, 3)}
    inside = data.sel(weight=inner)
    change = inside.weight_change * inside.weight_size
    return result | {"inner change": change.values[:, 2], "inner gradient": inside.weight_gradient.values[:, 1]}


def trained_by_torch(model, optimizer, samples, seed=0):
    """Return the same statistics of networks that transformers draws and torch trains."""
    torch.manual_seed(seed)
    make, stream, inner = MODELS[model]
    factory, clip = OPTIMIZERS[optimizer]
    subject = resolve(make())
    module = subject.factory().double().eval()
    loss = chosen_loss(None, subject.task)
    batches = [inputs_of(each, subject).of(0, range(1), torch.float64) for each in [*BATCHES, UNSEEN]]
    rows = []
    for _ in range(samples):
        draw_again(module)
        rows.append(train(module, factory(module), clip, loss, batches, stream, inner))
    return {key: np.array([row[key] for row in rows]) for key in rows[0]}


def train(module, optimizers, clip, loss, batches, stream, inner):
    optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
    weight, row, start = dict(module.named_parameters())[inner], {}, weight_of(module, inner)
    first = probe(module, batches[0], stream)
    for t in range(STEPS + 1):
        here = batches[min(t, STEPS - 1)]
        now = probe(module, batches[0], stream)
        if t:
            row[f"stream change {t}"] = float((now[0] - first[0]).norm() / first[0].norm())
            row[f"output change {t}"] = float((now[1] - first[1]).square().mean().sqrt())
        with torch.no_grad():
            row[f"unseen loss {t}"] = float(loss(call(module, batches[-1]), batches[-1]).mean())
        module.zero_grad(set_to_none=True)
        value = loss(call(module, here), here).mean()
        row[f"loss {t}"] = float(value.detach())
        if t == STEPS:
            break
        value.backward()
        gradients = [each.grad for each in module.parameters() if each.grad is not None]
        row[f"gradient {t}"] = math.sqrt(sum(float(each.square().sum()) for each in gradients))
        if t == 1:
            row["inner gradient"] = float(weight.grad.norm())
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
        with full_precision():
            for each in optimizers:
                each.step()
        if t == 1:
            row["inner change"] = float((weight.detach() - decay_of(optimizers, weight, 2) * start).norm())
    return row


@contextmanager
def full_precision():
    """Let torch's Muon compute in the precision of its matrices, as the law does, and not in bfloat16."""
    before = torch.Tensor.bfloat16
    torch.Tensor.bfloat16 = lambda self: self.clone()
    try:
        yield
    finally:
        torch.Tensor.bfloat16 = before


def weight_of(module, name):
    return dict(module.named_parameters())[name].detach().clone()


def decay_of(optimizers, weight, steps):
    """The factor that weight decay gives the initial weight, by its recursion."""
    group = next(g for o in optimizers for g in o.param_groups if any(p is weight for p in g["params"]))
    rate, decay = group["lr"], group["weight_decay"]
    if "dampening" not in group:
        return (1 - rate * decay) ** steps
    a, buffer = 1.0, None  # SGD's decay is part of its gradient, and of its momentum
    for _ in range(steps):
        buffer = decay * a if buffer is None else group["momentum"] * buffer + decay * a
        a -= rate * buffer
    return a


def call(module, arguments):
    named = dict(arguments)
    return module(named.pop("")) if "" in named else module(**named)


def probe(module, arguments, stream):
    """Return the stream after a module, and the output."""
    seen = []
    hook = module.get_submodule(stream).register_forward_hook(
        lambda part, args, out: seen.append((out[0] if isinstance(out, tuple) else out).detach().clone())
    )
    with torch.no_grad():
        out = output_of(call(module, arguments))
    hook.remove()
    return seen[-1], out.detach().clone()
