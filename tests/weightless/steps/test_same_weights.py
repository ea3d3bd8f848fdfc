"""Networks that torch trains from the weights of `steps`, number by number, and wrong twins.

A matrix that is never drawn is known by products only. They are completed to a matrix with any remainder, which then
takes torch's own steps. `test_training_steps` compares the law of the products with drawn networks.
"""

import numpy as np
import pytest
import torch
from torch.nn import functional

import limitformer as lf
from limitformer.weightless.steps.weights import TrainedWeights
from own_optimizers import Lion, SingleDeviceMuonWithAuxAdam
from training_networks import Custom, full_precision, next_token

SAMPLES, STEPS = 2, 3
IDS = torch.tensor([[3, 7, 3, 9, 5], [8, 7, 4, 4, 11]])


def muon(module, eps=1e-7, nesterov=True):
    hidden = [each for name, each in module.named_parameters() if each.dim() == 2 and "blocks" in name]
    rest = [each for each in module.parameters() if all(each is not one for one in hidden)]
    mine = torch.optim.Muon(hidden, lr=0.05, weight_decay=0.1, eps=eps, nesterov=nesterov)
    return [mine, torch.optim.AdamW(rest, lr=0.01)]


def muon_with_adam(module):
    hidden = [each for name, each in module.named_parameters() if each.dim() == 2 and "blocks" in name]
    rest = [each for each in module.parameters() if all(each is not one for one in hidden)]
    groups = [{"params": hidden, "use_muon": True, "lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}]
    adam = {"params": rest, "use_muon": False, "lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-10, "weight_decay": 0.0}
    return SingleDeviceMuonWithAuxAdam([*groups, adam])


def simple(kind, **options):
    return lambda module: kind(module.parameters(), **options)


SGD, ADAM, ADAMW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW
OPTIMIZERS = {  # each with a wrong twin
    "sgd": (simple(SGD, lr=0.3, momentum=0.9, dampening=0.3), simple(SGD, lr=0.3, momentum=0.9)),
    "nesterov": (
        simple(SGD, lr=0.3, momentum=0.9, nesterov=True, weight_decay=0.1),
        simple(SGD, lr=0.3, momentum=0.9, weight_decay=0.1),
    ),
    "adam": (simple(ADAM, lr=0.02, weight_decay=0.2), simple(ADAMW, lr=0.02, weight_decay=0.2)),
    "adamw": (simple(ADAMW, lr=0.02, weight_decay=0.2), simple(ADAMW, lr=0.02, weight_decay=0.0)),
    "lion": (simple(Lion, lr=0.01, weight_decay=0.2), simple(Lion, lr=0.01, weight_decay=0.2, betas=(0.99, 0.9))),
    "muon": (muon, lambda module: muon(module, nesterov=False)),
    "muon with eps": (lambda module: muon(module, eps=1.0), muon),
    "muon with adam": (muon_with_adam, muon),
}  # fmt: skip


def square(out, inputs):
    return out.flatten(1).square().mean(1)


def of_class(out, inputs):
    return functional.cross_entropy(out.mean(1), inputs[""][:, 0], reduction="none")


LOSSES = {"next token": next_token, "mean square": square, "class": of_class}


class Large(Custom):
    def __init__(self):
        super().__init__(width=48, blocks=1)


def completed(matrix, generator):
    """The matrix whose products are known, with a random remainder."""
    q, n = matrix.left.basis, matrix.left.image
    p, m = matrix.right.basis, matrix.right.image.mT
    rest = matrix.scale * torch.randn(matrix.shape, generator=generator, dtype=torch.float64)
    rest = rest - rest @ p.mT @ p + m @ p
    return q.mT @ n + rest - q.mT @ (q @ rest)


def starts_of(weights, shapes, sample):
    """The weights of the start by name; rows of a table that no pass has read are zero."""
    generator = torch.Generator().manual_seed(sample)
    starts = {name: each.initial.clone() for name, each in weights.entries.items()}
    for name, table in weights.rows.items():
        starts[name] = torch.zeros(shapes[name], dtype=torch.float64)
        for row, values in table.read.items():
            starts[name][row] = values
    return starts | {name: completed(parts[None].initial, generator) for name, parts in weights.matrices.items()}


def by_law(optimizer, loss, monkeypatch):
    """Losses (samples, steps + 1) and the weights of the start of each network."""
    starts, release = [], TrainedWeights.release
    shapes = {name: each.shape for name, each in Large().named_parameters()}

    def keep(self):
        starts.append((self.sample, starts_of(self, shapes, self.sample)))
        release(self)

    with monkeypatch.context() as patched:
        patched.setattr(TrainedWeights, "release", keep)
        data = lf.weightless.simulate_steps(
            Large, IDS, optimizer=optimizer, loss=loss, steps=STEPS, samples=SAMPLES, seed=0, draw="never",
            dtype=torch.float64, progress=False,
        )  # fmt: skip
    assert "undrawn" in data.attrs["weights"] or optimizer is OPTIMIZERS["adam"][0]  # whose decay needs entries
    return data.loss.values[0], dict(starts)


def by_torch(start, optimizer, loss):
    module = Large().double()
    for name, each in module.named_parameters():
        each.data.copy_(start[name])
    optimizers, losses = optimizer(module), []
    optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
    for _ in range(STEPS + 1):
        module.zero_grad()
        value = loss(module(IDS), {"": IDS}).mean()
        losses.append(float(value.detach()))
        value.backward()
        with full_precision():
            for each in optimizers:
                each.step()
    return losses


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_networks_that_torch_trains_from_the_same_weights_have_the_same_losses(optimizer, loss, monkeypatch):
    right, twin = OPTIMIZERS[optimizer]
    losses, starts = by_law(right, LOSSES[loss], monkeypatch)
    assert sorted(starts) == list(range(SAMPLES))
    theirs = [by_torch(starts[sample], right, LOSSES[loss]) for sample in range(SAMPLES)]
    np.testing.assert_allclose(losses, theirs, rtol=1e-7)
    wrong = np.array([by_torch(starts[sample], twin, LOSSES[loss]) for sample in range(SAMPLES)])
    assert (np.abs(losses / wrong - 1)[:, 1:].max(1) > 1e-4).all()
