"""Training steps in law; the witness compares their numbers with networks that torch trains."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import limitformer as lf
from cases.networks import IDS, Stack, mean_square
from limitformer.base.errors import InputError
from limitformer.stepping import trajectory
from training_networks import (
    BATCHES,
    next_token,
)
from weightless_families import CONFIGS


def test_clipping_is_by_the_norm_of_all_weights_together():
    """The step of plain SGD has the length lr · clip; clipping each weight by itself gives a longer one."""
    options = {"optimizer": {"name": "sgd", "lr": 0.3}, "clip": 1.0, "dtype": torch.float64, "draw": "never"}
    data = simulate(CONFIGS["gpt2"](), samples=3, **options).isel(rate=0)
    assert (data.gradient_norm[:, 0] > 2.0).all()
    np.testing.assert_allclose(data.clipping[:, 0], 1 / (data.gradient_norm[:, 0] + 1e-6))
    length = ((data.weight_change * data.weight_size)[:, 1] ** 2).sum("weight") ** 0.5
    moved = ~np.isfinite(data.weight_change[:, 1]).all("sample")  # biases, whose size at the start is zero
    assert (length <= 0.3 * 1.0001).all()
    assert (length > 0.25).all()
    assert bool(moved.any())


def simulate(model, inputs=None, **options):
    options = {"samples": 2, "seed": 0, "progress": False, "optimizer": "sgd"} | options
    return lf.weightless.simulate_steps(model, BATCHES[0] if inputs is None else inputs, **options)


def test_samples_and_rates_have_the_same_numbers_alone_and_together():
    options = {"optimizer": "muon", "batches": "fresh"}
    both = simulate(CONFIGS["gpt2"](), samples=3, rates=[1e-3, 1e-2], **options)
    alone = simulate(CONFIGS["gpt2"](), samples=2, rates=[1e-2], **options)
    same = both.sel(rate=0.01).isel(sample=slice(2))
    for name in ("loss", "loss_unseen", "stream_change", "weight_change"):
        np.testing.assert_array_equal(same[name], alone[name].isel(rate=0))
    assert (both.loss[0, :, 0] == both.loss[1, :, 0]).all()
    assert (both.loss[0, :, 1] != both.loss[1, :, 1]).all()


class Branches(nn.Module):
    """A branch that only long inputs use."""

    def __init__(self):
        super().__init__()
        self.table, self.blocks = nn.Embedding(40, 32), nn.ModuleList([nn.Linear(32, 32), nn.Linear(32, 32)])
        self.rare, self.head = nn.Linear(32, 32), nn.Linear(32, 40)
        for part in self.modules():
            if isinstance(part, nn.Linear | nn.Embedding):
                nn.init.normal_(part.weight, 0, 0.2)

    def forward(self, ids):
        x = self.table(ids)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x + self.rare(x) if int(ids[0, 0]) == 3 else x)


@pytest.mark.parametrize("draw", ["never", "always"])
def test_matrices_without_a_gradient_do_not_decay(draw):
    """Torch skips a parameter whose gradient is None; the second batch does not use `rare`."""
    decays = {"optimizer": {"name": "adamw", "lr": 0.01, "weight_decay": 10.0}, "draw": draw, "loss": next_token}
    data = simulate(Branches, batches=[BATCHES[0], BATCHES[1], BATCHES[1]], **decays, dtype=torch.float64)
    change = data.weight_change.sel(weight="rare.weight").isel(rate=0, sample=0).values
    assert change[1] > 0.0
    assert change[3] == pytest.approx(change[1])
    assert data.weight_change.sel(weight="head.weight").isel(rate=0, sample=0).values[3] > 1.5 * change[1]


class Padded(Branches):
    """A table with a row of zeros, and a bias that starts at zero and that nothing trains."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(40, 32, padding_idx=0)
        nn.init.normal_(self.table.weight, std=0.5)
        self.table.weight.data[0].zero_()
        nn.init.zeros_(self.head.bias)


def test_sizes_leave_out_constant_rows_and_a_zero_that_stays_has_no_change():
    def all_but_the_bias(module):
        return torch.optim.SGD([p for name, p in module.named_parameters() if name != "head.bias"], lr=0.1)

    data = simulate(Padded, BATCHES[1], loss=next_token, optimizer=all_but_the_bias, samples=1)
    assert float(data.weight_size.sel(weight="table.weight")) == pytest.approx(0.5 * (39 * 32) ** 0.5)
    assert (data.weight_change.sel(weight="head.bias") == 0.0).all()


def test_warm_up_scales_the_first_step():
    slow = simulate(CONFIGS["gpt2"](), optimizer={"name": "sgd", "lr": 0.01}, warmup=4, dtype=torch.float64)
    fast = simulate(CONFIGS["gpt2"](), optimizer={"name": "sgd", "lr": 0.01}, dtype=torch.float64)
    some = np.isfinite(fast.weight_change[0, 0, 1])
    np.testing.assert_allclose(slow.weight_change[0, 0, 1][some], fast.weight_change[0, 0, 1][some] / 4, rtol=1e-6)


def test_a_rate_that_explodes_ends_in_nan_and_leaves_the_others_alone():
    data = simulate(Branches, loss=next_token, rates=[1e-3, 100.0], steps=8, optimizer={"name": "sgd", "momentum": 0.9})
    assert data.loss.sel(rate=1e-3).notnull().all()
    last = data.loss.sel(rate=100.0)[:, -1]
    assert (last.isnull() | (last > 100 * data.loss.sel(rate=100.0)[:, 0])).all()


def test_weights_of_large_matrices_are_not_drawn_and_small_ones_are():
    large = {"model_type": "llama", "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 1}
    large |= {"num_attention_heads": 8, "vocab_size": 512}
    assert simulate(large, 4, samples=1).attrs["weights"].startswith("1 rows, 8 undrawn")
    assert "undrawn" not in simulate(CONFIGS["llama"](), samples=1).attrs["weights"]


REFUSALS = [
    ({"inputs": 1}, "the loss of the next token needs two tokens or more"),
    ({"rates": []}, "rates must have at least one"),
    ({"steps": 0}, "steps must be at least 1"),
    ({"samples": 0}, "samples must be at least 1"),
    ({"batches": [[1, 2, 3]] * 3}, r"batches\[0\] must have the shapes of the first batch, input_ids \(1, 5\)"),
    ({"batches": [BATCHES[0]]}, "batches must have inputs for each of the 3 steps"),
    ({"batches": "other"}, 'batches must be "same", "fresh" or a list'),
    ({"unseen": [1, 2]}, "unseen must have the shapes of the first batch"),
    ({"clip": -1.0}, "clip must be a number above 0"),
    ({"draw": "sometimes"}, 'draw must be "auto", "never" or "always"'),
    ({"dtype": torch.float16}, "dtype must be torch.float32 or torch.float64"),
    ({"rates": [0.0]}, "a learning rate must be above 0 and at most 100"),
]


def test_bad_arguments_give_one_clear_error():
    for options, message in REFUSALS:
        with pytest.raises(InputError, match=message):
            simulate(CONFIGS["gpt2"](), **({"inputs": BATCHES[0]} | options))


def test_ctrl_c_keeps_finished_networks(monkeypatch):
    arrays, calls = trajectory.Trajectory.arrays, []

    def interrupted(self):
        calls.append(self.sample)
        if self.sample == 2:
            raise KeyboardInterrupt
        return arrays(self)

    monkeypatch.setattr(trajectory.Trajectory, "arrays", interrupted)
    with pytest.raises(lf.Interrupted) as stopped:
        simulate(CONFIGS["gpt2"](), samples=4)
    assert stopped.value.partial.sizes["sample"] == 2


class Seeded(Stack):
    """A network that is the same each time."""

    def __init__(self, depth=2):
        torch.manual_seed(3)
        super().__init__(depth=depth)


class SeededInPart(Stack):
    """A network whose table alone is the same each time."""

    def __init__(self, depth=2):
        super().__init__(depth=depth)
        nn.init.normal_(self.e.weight, generator=torch.Generator().manual_seed(3))


OPTIONS = {"optimizer": "sgd", "seed": 0, "loss": mean_square}
RUNS = {
    "steps": lambda kind, ids: lf.steps(kind, ids, samples=2, **OPTIONS),
    "rate": lambda kind, ids: lf.rate(kind, ids, networks=4, **OPTIONS),
    "equivalent_rates": lambda kind, ids: lf.equivalent_rates(kind, ids, other="adam", networks=2, **OPTIONS),
    "transfer": lambda kind, ids: lf.transfer(kind, {"depth": (1, 2)}, ids, samples=2, **OPTIONS),
}


@pytest.mark.parametrize("name", RUNS)
def test_code_that_makes_the_same_network_each_time_has_no_law(name):
    with pytest.raises(InputError, match="Seeded makes the same network each time, as it sets a seed"):
        RUNS[name](Seeded, IDS)
    RUNS[name](SeededInPart, IDS)


WEIGHTS = Stack().state_dict()


def loaded():
    network = Stack()
    network.load_state_dict(WEIGHTS)
    return network


def loaded_in_place():
    """The laws of its weights cannot be read."""
    network = Stack()
    for name, each in network.named_parameters():
        each.data = WEIGHTS[name].clone()
    return network


def loaded_with_unused_layer():
    network = loaded()
    network.pooler = nn.Linear(8, 8)
    return network


def seeded_before_a_read():
    network = Stack()
    torch.manual_seed(3)
    assert not network.e.weight.isnan().any()
    nn.init.normal_(network.e.weight)
    for each in network.parameters():
        nn.init.normal_(each, std=0.1)
    return network


def seeded_with_uninitialised_weight():
    network = Seeded()
    network.unused = nn.Parameter(torch.empty(3))
    return network


@pytest.mark.parametrize(
    "make", [loaded, loaded_in_place, loaded_with_unused_layer, seeded_before_a_read, seeded_with_uninitialised_weight]
)
def test_steps_take_only_one_network_of_a_function_that_repeats_it(make):
    lf.steps(make, IDS, samples=1, **OPTIONS)
    message = "have the same loss" if make is loaded_with_unused_layer else f"{make.__name__} makes the same network"
    with pytest.raises(InputError, match=message):
        lf.steps(make, IDS, samples=2, **OPTIONS)


class RandomFeatures(nn.Module):
    """A network whose weights are constants and whose buffer is random; its output is not 0, so that it trains."""

    def __init__(self):
        super().__init__()
        self.register_buffer("features", torch.randn(16, 32))
        self.head = nn.Linear(32, 16)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, ids):
        return self.head(self.features[ids].tanh()) - 1.0


def test_steps_take_networks_that_differ_in_buffers_or_by_overrides():
    for make, overrides in ((RandomFeatures, None), (Seeded, {"*.weight": 0.1})):
        data = lf.steps(make, IDS, samples=2, overrides=overrides, **OPTIONS).data
        assert len(set(data.gradient_norm.values[..., 0].ravel())) == 2


def test_steps_refuse_a_network_of_other_depth_each_time():
    depths = iter(range(1, 100))
    with pytest.raises(InputError, match="has other parameters each time"):
        lf.steps(lambda: Seeded(next(depths)), IDS, samples=2, **OPTIONS)


def test_correlation_is_that_of_tokens_of_one_sequence_in_a_real_training():
    """The twin counts pairs of two sequences as well."""
    ids = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
    data = lf.weightless.simulate_steps(
        Seeded, ids, optimizer="sgd", rates=[0.5], steps=2, samples=1, seed=0, progress=False, loss=mean_square
    )
    module, ours, twin = Seeded(), [], []
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    for _ in range(3):
        x = module(ids)
        unit = functional.normalize(x.detach().flatten(0, 1), dim=-1)
        rho = unit @ unit.mT
        pairs = torch.ones_like(rho).triu(1).bool()
        twin.append(float(rho[pairs].mean()))
        ours.append(float(rho[pairs & torch.block_diag(*[torch.ones(5, 5)] * 2).bool()].mean()))
        optimizer.zero_grad()
        mean_square(x, None).mean().backward()
        optimizer.step()
    assert np.allclose(data.correlation.values[0, 0, :, -1], ours, atol=1e-5)
    assert not np.allclose(ours, twin, atol=1e-2)
