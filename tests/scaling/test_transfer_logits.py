"""The change of attention logits along their gradient, against torch's own gradients and steps of the same weights."""

import gc
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from limitformer.stepping.simulate import simulate_steps
from limitformer.weightless.observers.stream import MeasuredStack
from training_networks import next_token

WIDTH, HEADS, WORDS = 16, 2, 20
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2]])


class Block(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind, self.seen = kind, None
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        if self.kind == "fused":
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            logits = q @ k.mT / math.sqrt(WIDTH // HEADS)
            if self.kind == "plain torch":
                logits.retain_grad()
                self.seen = logits
            mask = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
            y = logits.masked_fill(mask, -torch.inf).softmax(-1) @ v
        return x + y.transpose(1, 2).flatten(2)


class Model(nn.Module):
    """A decoder whose entries are computed, so that every route has the same."""

    def __init__(self, kind):
        super().__init__()
        self.table, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.blocks = nn.ModuleList(Block(kind) for _ in range(2))
        with torch.no_grad():
            for number, each in enumerate(self.parameters()):
                entries = torch.arange(each.numel(), dtype=torch.float64).reshape(each.shape)
                each.copy_((torch.sin(1.7 * entries + number) * 1.5).float())

    def forward(self, ids):
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def by_torch(steps):
    """Return the changes of logits (block, head) along their gradient, and the whole ones."""
    module = Model("plain torch").double()
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-2)
    for step in range(steps + 1):
        loss = next_token(module(IDS), {"": IDS}).mean()
        if step == 0:
            loss.backward()
            start = [block.seen.detach().clone() for block in module.blocks]
            pulls = [block.seen.grad.clone() for block in module.blocks]
        elif step < steps:
            loss.backward()
        if step < steps:
            optimizer.step()
            optimizer.zero_grad()
    seen = torch.ones(IDS.shape[1], IDS.shape[1]).tril()
    moved = [
        (block.seen.detach() - a)[0] * seen / seen.sum().sqrt() for block, a in zip(module.blocks, start, strict=True)
    ]
    along = [
        (m * p[0] / p[0].norm(dim=(-1, -2), keepdim=True)).sum((-1, -2)).abs()
        for m, p in zip(moved, pulls, strict=True)
    ]
    return torch.stack(along).numpy(), torch.stack([m.norm(dim=(-1, -2)) for m in moved]).numpy()


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("kind", ["fused", "softmax"])
def test_change_of_logits_is_that_of_torch(kind, steps):
    data = simulate_steps(
        lambda: Model(kind), IDS, optimizer={"name": "sgd", "lr": 1e-2}, steps=steps, samples=1, seed=0,
        loss=next_token, dtype=torch.float64, progress=False,
    )  # fmt: skip
    own, (along, whole) = data.logit_change.isel(rate=0, sample=0).values, by_torch(steps)
    np.testing.assert_array_equal(own[0], 0.0)
    np.testing.assert_allclose(own[-1], along, rtol=1e-8)
    assert not np.allclose(own[-1], whole, rtol=0.05)  # wrong twin: in any direction


@pytest.mark.parametrize("kind", ["fused", "softmax"])
def test_measured_networks_are_freed(kind):
    """A hook that held its stack, and so the graph whose node holds the hook, would never be freed."""

    def build():
        model = Model(kind)
        nn.init.normal_(model.head.weight)
        return model

    def alive(samples):
        simulate_steps(build, IDS, optimizer="sgd", steps=1, samples=samples, seed=0, loss=next_token, progress=False)
        gc.collect()
        return sum(type(each) is MeasuredStack for each in gc.get_objects())

    assert alive(1) == alive(4)
