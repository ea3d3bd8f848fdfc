"""Models, optimisers and batches of tests of training steps."""

import math
from contextlib import contextmanager

import torch
import transformers
from torch import nn
from torch.nn import functional

from weightless_families import CONFIGS, SIZE

BATCHES = [[3, 7, 3, 9, 5], [8, 7, 4, 4, 11], [3, 12, 9, 6, 5]]  # ids that are equal, in one batch and in several
UNSEEN = [13, 7, 9, 2, 5]


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


MODELS = {
    "gpt2": CONFIGS["gpt2"], "mixtral": CONFIGS["mixtral"], "albert": albert, "custom": lambda: Custom,
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


@contextmanager
def full_precision():
    """Let torch's Muon compute in the precision of its matrices, as the law does, and not in bfloat16."""
    before = torch.Tensor.bfloat16
    torch.Tensor.bfloat16 = lambda self: self.clone()
    try:
        yield
    finally:
        torch.Tensor.bfloat16 = before


class Small(nn.Module):
    """A table, a hidden layer and a head, without blocks."""

    def __init__(self):
        super().__init__()
        self.table, self.hidden, self.head = nn.Embedding(10, 16), nn.Linear(16, 32), nn.Linear(32, 10, bias=False)

    def forward(self, ids):
        return self.head(torch.tanh(self.hidden(self.table(ids))))
