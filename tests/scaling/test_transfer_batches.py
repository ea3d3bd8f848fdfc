"""`transfer` over the batch, against plain torch and known rules, and over several sizes at once."""

import numpy as np
import pytest
import torch
import xarray as xr
from torch import nn
from torch.nn import functional

import limitformer as lf
from limitformer.base.errors import InputError
from limitformer.scaling.batches import batch_rule

BATCHES = [2, 8, 32]
CONFIG = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 20, "n_positions": 16}


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.hidden, self.head = nn.Embedding(20, 16), nn.Linear(16, 32), nn.Linear(32, 20)

    def forward(self, ids):
        return self.head(torch.tanh(self.hidden(self.table(ids))))


def next_token(out, inputs):
    return functional.cross_entropy(out[:, :-1].mT, inputs[""][:, 1:], reduction="none").mean(-1)


def over_batch(inputs=8, **options):
    options = {"samples": 6, "seed": 0, "steps": 1, "progress": False, "witness": False} | options
    return lf.transfer(Small, {"batch": BATCHES}, inputs, loss=next_token, **options)


def gradients_of_torch(networks):
    """Return |∂W|² (networks, batches) of plain torch networks on batches of random ids."""
    squares = np.zeros((networks, len(BATCHES)))
    for k in range(networks):
        torch.manual_seed(k)
        network = Small()
        for j, size in enumerate(BATCHES):
            ids = torch.randint(0, 20, (size, 8))
            network.zero_grad()
            next_token(network(ids), {"": ids}).mean().backward()
            squares[k, j] = sum(float(each.grad.square().sum()) for each in network.parameters())
    return squares


def test_exponents_over_the_batch_are_those_of_torch_and_their_rule_that_of_the_optimiser():
    """The twin has the same sequence in every place, so that there is no noise."""
    result = over_batch(optimizer="sgd")
    torchs = np.log(gradients_of_torch(200)) / 2
    ours = np.log(result.measures["gradient"])
    errors = np.sqrt(ours.var(0) / len(ours) + torchs.var(0) / len(torchs))
    assert (np.abs(ours.mean(0) - torchs.mean(0)) < 4 * errors).all()
    assert "the rule B." in result.notes[0]
    adam = over_batch(optimizer={"name": "adamw", "lr": 1e-3})
    assert "the rule √B." in adam.notes[0]
    assert "batch 2, 8, 32" in adam.heading
    twin = over_batch(torch.arange(8).repeat(32, 1), optimizer="sgd")
    assert np.ptp(twin.measures["gradient"], axis=1) == pytest.approx(0.0, abs=1e-6)
    assert "speak for one rate at every batch" in twin.notes[0]


def sgd(module):
    return torch.optim.SGD(module.parameters(), lr=0.1)


def adamw(module):
    return torch.optim.AdamW(module.parameters(), lr=1e-2)


def muon(module):
    rest = [each for name, each in module.named_parameters() if name != "hidden.weight"]
    return [torch.optim.Muon([module.hidden.weight], lr=0.1), torch.optim.AdamW(rest, lr=1e-3)]


def changes_of_torch(make, networks):
    """Return the root mean square of what the first step adds to the output for the batch's first sequence."""
    result = np.zeros((networks, len(BATCHES)))
    for k in range(networks):
        torch.manual_seed(1000 + k)
        start, ids = Small().state_dict(), torch.randint(0, 20, (BATCHES[-1], 8))
        for j, size in enumerate(BATCHES):
            network = Small()
            network.load_state_dict(start)
            made = make(network)
            before = network(ids[:1]).detach()
            next_token(network(ids[:size]), {"": ids[:size]}).mean().backward()
            for each in made if isinstance(made, list) else [made]:
                each.step()
            result[k, j] = float((network(ids[:1]) - before).square().mean().sqrt().detach())
    return np.log(result)


@pytest.mark.parametrize("make", [sgd, adamw, muon])
def test_effect_of_an_update_at_a_batch_and_at_four_times_its_size_is_that_of_torch(make):
    """The twin does 1.3 times as much at the larger batch."""
    ours = np.log(over_batch(optimizer=make, samples=16).measures["output change"])
    torchs = changes_of_torch(make, 200)
    for k in (0, 1):
        mine, theirs = (each[:, k + 1] - each[:, k] for each in (ours, torchs))
        error = np.sqrt(mine.var(ddof=1) / len(mine) + theirs.var(ddof=1) / len(theirs))
        assert abs(mine.mean() - theirs.mean()) < 4 * error
        assert abs(mine.mean() + np.log(1.3) - theirs.mean()) > 4 * error


def steps_like(gradient, update):
    """Return datasets with these norms (samples, sizes) of gradients and of updates, at 4, 16, … sequences."""
    return {
        4 ** (k + 1): xr.Dataset(
            {
                "gradient_norm": (("sample", "step"), gradient[:, [k, k]]),
                "weight_change": (("sample", "step", "weight"), np.stack([0 * update, update], 1)[..., k, None]),
                "weight_size": ("weight", [2.0]),
            }
        )
        for k in range(gradient.shape[1])
    }


def test_rule_ends_where_noise_is_half_of_the_gradient():
    """Squared norms |G|² + tr Σ/B with a noise scale of 64; updates as of SGD, and as of signs."""
    square = 1.0 + 64 / 4.0 ** np.arange(1, 6)
    values = np.sqrt(square) * np.exp(0.01 * np.random.default_rng(0).normal(size=(5, 1)))
    note = batch_rule(steps_like(values, values))
    assert note.startswith("Up to batch 64, above which noise is less than half")
    assert "the rule B." in note
    assert "the rule √B." in batch_rule(steps_like(values, values**0))
    assert "between 4 and 16: noise is less" in batch_rule(steps_like(values[:, 3:], values[:, 3:]))
    assert "nothing is said" in batch_rule(steps_like(values * np.nan, values))


def test_width_and_depth_grow_together():
    options = {"optimizer": "adamw", "samples": 2, "seed": 0, "steps": 1, "progress": False, "witness": False}
    both = lf.transfer(CONFIG, {"width": [16, 32], "depth": [1, 2]}, 6, **options)
    assert "depth at each width: 1, 2" in both.notes
    assert [each.sizes["layer"] for each in both.data.values()] == [2, 3]
    wide = lf.transfer(CONFIG | {"n_layer": 2}, {"width": [16, 32]}, 6, **options)
    np.testing.assert_array_equal(both.data[32].loss, wide.data[32].loss)

    def build(width, depth):
        return nn.Sequential(
            nn.Embedding(9, width), *(nn.Linear(width, width) for _ in range(depth)), nn.Linear(width, 9)
        )

    own = lf.transfer(build, {"width": [8, 16], "depth": [1, 3]}, 6, loss=next_token, **options)
    assert [len(each.weight) for each in own.data.values()] == [5, 9]


def test_sizes_that_cannot_be_run_together_give_one_clear_error():
    for over, options, message in (
        ({"width": [16, 32], "depth": [1, 2, 3]}, {}, "as many sizes each"),
        ({"batch": [2, 4], "width": [16, 32]}, {}, "over the batch nothing else can grow"),
        ({"width": [16, 32], "depth": [1, 2]}, {"rule": "mup"}, "over several sizes at once the rule must be standard"),
        ({"batch": [2, 4]}, {"rule": "mup"}, "over the batch the rule must be standard"),
        ({"batch": [0, 4]}, {}, "must be at least 1"),
    ):
        with pytest.raises(InputError, match=message):
            lf.transfer(CONFIG, over, 6, optimizer="adamw", seed=0, **options)
