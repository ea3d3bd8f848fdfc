"""The arithmetic of optimisers against torch's own, on tensors, on cores and by blocks."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import limitformer as lf
from limitformer.stepping import entrywise
from limitformer.stepping.entrywise import EntrywiseHistory, StoredUpdates
from limitformer.stepping.updates import SGD, Adam, AdamW, CoreUpdate, Lion, Muon, SignSGD, TensorUpdate
from statistics_checks import assert_same_law
from training_networks import full_precision, next_token


class Signum(torch.optim.Optimizer):
    """The method of Bernstein et al., arXiv 1802.04434, with weight decay."""

    def __init__(self, parameters, lr, momentum, weight_decay):
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        """Change the parameters by signs."""
        for group in self.param_groups:
            for each in (each for each in group["params"] if each.grad is not None):
                mean = self.state[each].setdefault("mean", torch.zeros_like(each))
                mean.mul_(group["momentum"]).add_((1 - group["momentum"]) * each.grad)
                each.sub_(group["lr"] * (mean.sign() + group["weight_decay"] * each))


SHAPE, STEPS = (7, 5), 5
SKIPPED = 2  # the step without a gradient
ADAMW = AdamW(0.03, 0.4, betas=(0.8, 0.9), eps=1e-6)
RULES = {
    "sgd": (SGD(0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
    "momentum": (
        SGD(0.1, 0.3, momentum=0.8, dampening=0.2),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.8, dampening=0.2, weight_decay=0.3),
    ),
    "nesterov": (
        SGD(0.1, 0.3, momentum=0.8, nesterov=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.8, nesterov=True, weight_decay=0.3),
    ),
    "adam": (Adam(0.03, 0.4), lambda p: torch.optim.Adam(p, lr=0.03, weight_decay=0.4)),
    "adamw": (ADAMW, lambda p: torch.optim.AdamW(p, lr=0.03, weight_decay=0.4, betas=(0.8, 0.9), eps=1e-6)),
    "muon": (
        Muon(0.03, 0.4, momentum=0.8),
        lambda p: torch.optim.Muon(p, lr=0.03, weight_decay=0.4, momentum=0.8),
    ),
    "muon rms": (
        Muon(0.03, 0.1, momentum=0.8, nesterov=False, scale="rms"),
        lambda p: torch.optim.Muon(
            p, lr=0.03, weight_decay=0.1, momentum=0.8, nesterov=False, adjust_lr_fn="match_rms_adamw"
        ),
    ),
}
RULES["signsgd"] = (
    SignSGD(0.03, 0.4, momentum=0.6),
    lambda p: Signum(p, lr=0.03, momentum=0.6, weight_decay=0.4),
)
LION = Lion(0.03, 0.4, betas=(0.9, 0.95))


def gradients(rank=3):
    """Factors of a gradient for each step, A (rank, 7) and B (rank, 5)."""
    generator = torch.Generator().manual_seed(1)
    return [
        tuple(torch.randn(rank, size, generator=generator, dtype=torch.float64) for size in SHAPE) for _ in range(STEPS)
    ]


def start():
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def by_tensor(rule):
    """The values after each step, at rates that change, one step being without a gradient."""
    update, value, values = TensorUpdate(rule), start(), []
    for step, (a, b) in enumerate(gradients()):
        value = update.step(value, a.mT @ b, 1.0 + 0.5 * step) if step != SKIPPED else value
        values.append(value)
    return values


@pytest.mark.parametrize("name", RULES)
def test_steps_on_a_tensor_are_those_of_torch(name):
    rule, make = RULES[name]
    parameter = torch.nn.Parameter(start())
    optimizer = make([parameter])
    with full_precision():
        for step, ((a, b), mine) in enumerate(zip(gradients(), by_tensor(rule), strict=True)):
            parameter.grad = None if step == SKIPPED else a.mT @ b
            optimizer.param_groups[0]["lr"] = rule.lr * (1.0 + 0.5 * step)
            optimizer.step()
            torch.testing.assert_close(mine, parameter.detach(), rtol=1e-12, atol=1e-12)


def test_steps_of_lion_are_those_of_its_paper():
    value, momentum = start(), torch.zeros(SHAPE, dtype=torch.float64)
    for step, ((a, b), mine) in enumerate(zip(gradients(), by_tensor(LION), strict=True)):
        if step != SKIPPED:
            g, rate = a.mT @ b, 0.03 * (1.0 + 0.5 * step)
            value = value - rate * (torch.sign(0.9 * momentum + 0.1 * g) + 0.4 * value)
            momentum = 0.95 * momentum + 0.05 * g
        torch.testing.assert_close(mine, value, rtol=1e-12, atol=1e-12)


class Tokens(nn.Module):
    """A table and two maps, whose matrices are Gaussian: they stay undrawn."""

    def __init__(self):
        super().__init__()
        self.table, self.map, self.head = nn.Embedding(20, 16), nn.Linear(16, 24), nn.Linear(24, 20, bias=False)
        for each in (self.map.weight, self.head.weight):
            nn.init.normal_(each, 0, 0.2)

    def forward(self, ids):
        return self.head(torch.tanh(self.map(self.table(ids)).cumsum(1)))


def drawn(ids, momentum, networks):
    """The losses of three steps of plain torch networks, and the sizes of the updates."""
    rows = []
    for seed in range(networks):
        torch.manual_seed(seed)
        network, row = Tokens(), {}
        start = {name: each.detach().clone() for name, each in network.named_parameters()}
        optimizer = Signum(network.parameters(), lr=0.02, momentum=momentum, weight_decay=0.3)
        for step in range(4):
            loss = next_token(network(ids), {"": ids}).mean()
            row[f"loss {step}"] = loss.item()
            if step < 3:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        decay = (1 - 0.02 * 0.3) ** 3
        row |= {name: (each - decay * start[name]).norm().item() for name, each in network.named_parameters()}
        rows.append(row)
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}


def test_signsgd_has_the_law_of_drawn_networks():
    """The twin has no momentum."""
    optimizer, ids = {"name": "signsgd", "lr": 0.02, "momentum": 0.6, "weight_decay": 0.3}, torch.arange(12)[None] % 7
    data = lf.weightless.simulate_steps(
        Tokens, ids, loss=next_token, optimizer=optimizer, samples=150, seed=0, draw="never", progress=False
    ).isel(rate=0)
    changes = data.weight_change * data.weight_size
    ours = {f"loss {step}": data.loss[:, step].values for step in range(4)}
    ours |= {name: changes.sel(weight=name)[:, 3].values for name in data.weight.values}
    assert_same_law(ours, drawn(ids, 0.6, 600), drawn(ids, 0.0, 600))


def by_core(rule):
    """The values after each step of a W₀ + QᵀK P, with bases that grow."""
    generator = torch.Generator().manual_seed(3)
    q, p = (torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))[0].mT for size in SHAPE)
    update, values = CoreUpdate(rule, SHAPE), []
    for step, (a, b) in enumerate(gradients(1)):
        a, b = a @ q[: step + 2].mT, b @ p[: step + 1].mT  # coefficients in the bases of now
        if step != SKIPPED:
            update.add(a.mT @ b, 1.0 + 0.5 * step)
        k, l = update.core.shape
        values.append(update.a * start() + q[:k].mT @ update.core @ p[:l])
    return values, (q, p)


@pytest.mark.parametrize("name", ["sgd", "momentum", "nesterov", "muon", "muon rms"])
def test_steps_on_a_core_are_those_on_the_matrix(name):
    rule = RULES[name][0]
    values, (q, p) = by_core(rule)
    update, value = TensorUpdate(rule), start()
    for step, ((a, b), mine) in enumerate(zip(gradients(1), values, strict=True)):
        a, b = a @ q[: step + 2].mT @ q[: step + 2], b @ p[: step + 1].mT @ p[: step + 1]
        value = update.step(value, a.mT @ b, 1.0 + 0.5 * step) if step != SKIPPED else value
        torch.testing.assert_close(mine, value, rtol=1e-10, atol=1e-10)
    buffer_without_decay = replace(rule, weight_decay=0.0)
    if rule.weight_decay:
        assert not torch.allclose(by_core(buffer_without_decay)[0][-1], value, atol=1e-3)


def by_history(rule, dtype=torch.float64, kind=EntrywiseHistory):
    history = kind(rule, SHAPE)
    for step, (a, b) in enumerate(gradients()):
        if step != SKIPPED:
            history.add(a.to(dtype), 0.5 * b.to(dtype), 2.0, 1.0 + 0.5 * step)
    return history


@pytest.mark.parametrize("rule", [ADAMW, LION, RULES["signsgd"][0]], ids=["adamw", "lion", "signsgd"])
@pytest.mark.parametrize(
    ("dtype", "kind"),
    [(torch.float64, EntrywiseHistory), (torch.float64, StoredUpdates), (torch.float32, StoredUpdates)],
)
def test_products_with_updates_by_entries_are_those_of_the_whole_matrix(rule, dtype, kind):
    history, value = by_history(rule, dtype, kind), by_tensor(rule)[-1]
    update = (value - history.decay * start()).to(dtype)
    z, d = (torch.randn(4, size, generator=torch.Generator().manual_seed(9), dtype=dtype) for size in SHAPE)
    close = {"rtol": 1e-10, "atol": 1e-10} if dtype == torch.float64 else {"rtol": 2e-4, "atol": 1e-5}
    torch.testing.assert_close(history.times(z), z @ update, **close)
    torch.testing.assert_close(history.times_transpose(d), d @ update.mT, **close)
    torch.testing.assert_close(history.rows(torch.tensor([4, 1])), update[[4, 1]], **close)
    assert history.squared() == pytest.approx(float(update.double().square().sum()), rel=1e-4)


def test_twins_without_bias_correction_or_with_coupled_decay_are_others():
    right = by_tensor(ADAMW)[-1]
    coupled = by_tensor(Adam(**vars(ADAMW)))[-1]
    uncorrected = EntrywiseHistory(ADAMW, SHAPE)
    for a, b in gradients()[:2]:
        uncorrected.add(a, b, 1.0, 1.0)
    numbers = uncorrected.recursion(torch.float64)
    numbers[:, 3], numbers[:, 4] = 0.03, 1.0
    stacked = torch.stack([a.mT @ b for a, b in gradients()[:2]]).numpy()
    out, true = np.empty(SHAPE), np.empty(SHAPE)
    entrywise.update_block(numbers, stacked, out)
    entrywise.update_block(uncorrected.recursion(torch.float64), stacked, true)
    assert np.abs(out - true).max() > 0.01
    assert float((coupled - right).abs().max()) > 0.01


@pytest.mark.parametrize(("cores", "kind"), [(1, EntrywiseHistory), (4, StoredUpdates), (4, EntrywiseHistory)])
def test_blocks_have_the_same_bits_for_any_number_of_threads(cores, kind, monkeypatch):
    def products():
        generator, history = torch.Generator().manual_seed(5), kind(ADAMW, (96, 300))
        for _ in range(2):
            history.add(*(torch.randn(6, size, generator=generator) for size in (96, 300)), 1.0, 1.0)
        z, d = (torch.randn(3, size, generator=generator) for size in (96, 300))
        return history.times(z), history.times_transpose(d), history.squared()

    monkeypatch.setattr(entrywise, "BLOCK_BYTES", 2**13)
    before = products()
    monkeypatch.setattr(entrywise, "usable_cores", lambda: cores)
    entrywise.pool.cache_clear()
    after = products()
    entrywise.pool.cache_clear()
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[1], after[1])
    assert before[2] == after[2]
