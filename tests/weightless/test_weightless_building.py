"""Modules built for each sample: entries of unknown law, numbers that depend on each other, large matrices."""

import contextlib
import copy
import math

import numpy as np
import pytest
import torch
from scipy.stats import ks_2samp, kstest
from torch import nn
from torch.nn.utils import parametrizations

import limitformer as lf
from limitformer.nn.drawn.simulate import torch_seed
from limitformer.weightless.building import build_sample, build_twice, drawn_module

N, LEVEL = 48, 1e-4


class Holder(nn.Module):
    """A square matrix that `change` initialises."""

    def __init__(self, change):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(N, N))
        nn.init.normal_(self.weight, std=0.1)
        with torch.no_grad():
            change(self)


def logarithm(net):
    net.weight.uniform_(1, 16).log_()


def inverse_softplus(net):
    steps = torch.exp(torch.rand(N, N) * (math.log(0.1) - math.log(0.001)) + math.log(0.001)).clamp(min=0.004)
    net.weight.copy_(steps + torch.log(-torch.expm1(-steps)))


def eye_and_noise(net):
    net.weight = nn.Parameter(torch.eye(N) + 0.1 * torch.randn(N, N))


def two_parts(net):
    net.weight.copy_(torch.cat([torch.empty(N // 2, N).normal_(0, std) for std in (0.1, 0.5)]))


def masked(net):
    net.weight.mul_(torch.ones(N, N).tril())


def orthogonal_rows(net):
    nn.init.orthogonal_(net.weight[: N // 2])


def sparse(net):
    nn.init.sparse_(net.weight, 0.5, std=0.3)


def of_unit_norm(net):
    net.weight /= float(net.weight.norm())


def read_as_array(net):
    net.weight.div_(float(np.abs(net.weight.detach().numpy()).max()))


def expanded(net):
    net.weight = nn.Parameter(torch.randn(1, N).expand(N, N))


def of_numpy(net):
    net.weight.copy_(torch.from_numpy(np.random.standard_normal((N, N))))


def multiplied_in_a_list(net):
    torch._foreach_mul_([net.weight.data], 0.1)


def added_with_a_factor(net):
    net.weight.data.add_(1.0, alpha=2.0)


CHANGES = [logarithm, inverse_softplus, eye_and_noise, two_parts, masked, orthogonal_rows, sparse, of_numpy]
CHANGES += [multiplied_in_a_list, added_with_a_factor]


def statistics(weights):
    """Return numbers that depend on the law of the entries, their places and their dependence."""
    w = torch.stack(list(weights)).double()
    corners = [w[:, :4, :4], w[:, -4:, :4], w[:, :4, -4:], w[:, -4:, -4:]]
    values = {"diagonal": w.diagonal(0, 1, 2), "entries": w[:, ::7, ::7], "sums": w.sum(1), "norms": w.norm(dim=2)}
    values |= {f"corner {k}": each for k, each in enumerate(corners)} | {"product": (w @ w.mT)[:, 0, 1:9]}
    return {name: each.flatten().numpy() for name, each in values.items()}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_entries_of_unknown_law_have_the_law_of_drawn_ones(change):
    def factory():
        return Holder(change)

    builds = [build_sample(factory, torch.float32, seed) for seed in range(12)]
    assert not any(laws for _, laws in builds)  # no weight is left to be drawn by its law
    with torch.random.fork_rng():
        torch.manual_seed(1)
        drawn = [factory().weight.detach() for _ in range(12)]
    assert_one_law([module.weight.detach() for module, _ in builds], drawn)


def assert_one_law(mine, theirs):
    """Assert that matrices have the law of others, and that they do not if they are 1.5 times as large."""
    ours, drawn, twin = map(statistics, (mine, theirs, [1.5 * each for each in mine]))
    for name in drawn:
        assert ks_2samp(ours[name], drawn[name]).pvalue > LEVEL, name
    assert min(ks_2samp(twin[name], drawn[name]).pvalue for name in drawn) < LEVEL


def test_equal_rows_are_drawn_once():
    weights = [build_sample(lambda: Holder(expanded), torch.float32, seed)[0].weight.detach() for seed in range(12)]
    rows = torch.stack([each[0] for each in weights]).flatten()
    assert all(torch.equal(each, each[:1].expand(N, N)) for each in weights)
    assert kstest(rows, "norm").pvalue > LEVEL
    assert kstest(2 * rows, "norm").pvalue < LEVEL


def test_entries_that_the_code_reads_are_those_of_the_build():
    for seed in range(3):
        normed, scaled = (
            build_sample(lambda c=c: Holder(c), torch.float32, seed)[0] for c in (of_unit_norm, read_as_array)
        )
        assert float(normed.weight.detach().norm()) == pytest.approx(1.0, rel=1e-6)
        assert float(scaled.weight.detach().abs().max()) == pytest.approx(1.0, rel=1e-6)


def test_recurrent_layers_run_with_computed_weights():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.LSTM(8, 8, batch_first=True)
            nn.init.orthogonal_(self.layer.weight_hh_l0)

        def forward(self, x):
            return x + self.layer(x)[0]

    data = lf.weightless.simulate(lambda: Stack(Recurrent), X, samples=2, **OPTIONS)
    module, _ = build_sample(lambda: Stack(Recurrent), torch.float64, 3)
    layer = module.blocks[0].layer
    assert layer.weight_hh_l0.shape == (32, 8)
    torch.testing.assert_close(layer.weight_hh_l0.T @ layer.weight_hh_l0, torch.eye(8, dtype=torch.float64))
    assert all(a is b for a, b in zip(layer.all_weights[0], layer.parameters(), strict=True))
    assert (data.weight_gradient.values > 0).all()


class Dependent(nn.Module):
    """Numbers that are computed from each other, in every place."""

    def __init__(self):
        super().__init__()
        self.linear, self.free = nn.Linear(N, N), nn.Linear(N, N)
        self.back = nn.Parameter(self.linear.weight.detach().T.clone())
        self.register_buffer("norms", self.linear.weight.detach().norm(dim=1))
        self.register_buffer("inverse", 1 / self.linear.bias.detach())
        self.listed = [self.linear.weight, self.linear.weight.detach()[0]]
        steps = torch.rand(N)
        self.steps, self.log_steps = nn.Parameter(steps), steps.log()
        self.normed = parametrizations.weight_norm(nn.Linear(N, N))
        table = torch.empty(N, N)
        table.copy_(steps.expand(N, N))
        self.table = nn.Parameter(table)


def test_numbers_of_a_build_depend_on_each_other_as_in_the_module():
    module, laws = build_sample(Dependent, torch.float64, 5)
    weight = module.linear.weight
    assert list(laws) == ["free.weight"]  # the only one that nothing else depends on
    assert weight.detach().std().item() == pytest.approx(1 / math.sqrt(3 * N), rel=0.05)
    torch.testing.assert_close(module.back, weight.T)
    torch.testing.assert_close(module.norms, weight.norm(dim=1))
    torch.testing.assert_close(module.inverse, 1 / module.linear.bias)
    assert module.listed[0] is weight
    torch.testing.assert_close(module.listed[1], weight[0])
    torch.testing.assert_close(module.steps.log(), module.log_steps)
    torch.testing.assert_close(module.table, module.steps.expand(N, N))
    torch.testing.assert_close(module.normed.parametrizations.weight.original0[:, 0], module.normed.weight.norm(dim=1))


def halves(net):
    angles = torch.outer(torch.arange(N), torch.linspace(1, 2, N // 2))
    table = torch.empty(N, N)
    table[:, ::2], table[:, 1::2] = angles.sin(), angles.cos()
    net.weight = nn.Parameter(table)


def on_the_device_of_a_weight(net):
    net.register_buffer("places", torch.arange(N, device=net.weight.device)[:, None] * 2.0)
    net.register_buffer("sevens", torch.full((3, 5), 7.0, device=net.weight.device).cumsum(1))
    net.register_buffer("numbers", torch.tensor([[1.0, 2.0], [3.0, 4.0]], device=net.weight.device) ** 2)
    net.register_buffer("more", net.weight.new_tensor([5.0, 6.0]))
    net.register_buffer("copied", torch.linspace(0, 1, N).to(net.weight.device))


def given_rows(net):
    net.weight = nn.Parameter(torch.zeros(N, N))
    net.weight.T[:3] = torch.arange(3 * N).view(3, N) + 0.0


def sparse_buffer(net):
    net.register_buffer("pairs", torch.ones(4, 4).tril().to_sparse(), persistent=False)


FIXED = [halves, on_the_device_of_a_weight, given_rows, sparse_buffer]


@pytest.mark.parametrize("change", FIXED, ids=lambda change: change.__name__)
def test_fixed_numbers_have_their_values(change):
    built, real = build_twice(lambda: Holder(change), torch.float32), Holder(change)
    assert (built.rebuilt, built.doubts) == ({}, {})
    pairs = dict(real.named_buffers()) | ({} if built.laws["weight"].random else {"weight": real.weight.detach()})
    assert pairs
    for name, value in pairs.items():
        mine = getattr(built.module, name).detach()
        torch.testing.assert_close(mine.to_dense(), value.to_dense())


def test_entries_that_nothing_writes_to_are_refused():
    def change(net):
        net.weight = nn.Parameter(torch.empty(N, N))
        net.weight[3:] = torch.ones(N)

    with pytest.raises(lf.InputError, match="nothing writes to a part of weight while"):
        build_twice(lambda: Holder(change), torch.float32)


def test_large_constants_and_empty_copies_take_no_memory():
    def zeros():
        net = nn.ParameterList([torch.zeros(10**6, 10**6), torch.ones(10**6, 10**6)])
        for one in net:
            nn.init.normal_(one, std=0.5)
        return net

    def made_on_meta():
        with torch.device("meta"):
            net = nn.Sequential(nn.Linear(10**6, 10**6), nn.LayerNorm(8))
        net.to_empty(device="cpu")
        for part in net:
            part.reset_parameters()
        return net

    assert [law.std for law in lf.weightless.law(zeros).laws.values()] == [0.5, 0.5]
    table = lf.weightless.law(made_on_meta)
    assert str(table["0.weight"]) == f"uniform, std {1 / math.sqrt(3 * 10**6):.4g}"
    assert str(table["1.weight"]) == "ones"


class Stack(nn.Module):
    """Blocks in sequence."""

    def __init__(self, block, times=2):
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(times))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


X = np.random.Generator(np.random.Philox(1)).standard_normal((1, 5, 8))
OPTIONS = {"seed": 0, "dtype": torch.float64, "progress": False, "gradients": True}


class Shared(nn.Module):
    """A block that uses each of its weights twice."""

    def __init__(self):
        super().__init__()
        self.maps = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x):
        CALLS.append(1)
        for map_ in self.maps:
            x = x + map_(map_(x))
        return x


CALLS = []


def test_compiled_modules_run_eagerly():
    plain, whole, blocks = (
        lf.weightless.simulate(each, X, samples=2, **OPTIONS).loss.values
        for each in (
            lambda: Stack(Shared),
            lambda: torch.compile(Stack(Shared), backend="eager"),
            lambda: Stack(lambda: torch.compile(Shared(), backend="eager")),
        )
    )
    np.testing.assert_array_equal(plain, whole)
    assert np.isfinite(blocks).all()


@pytest.mark.parametrize("change", [nn.Module.half, nn.Module.cpu, copy.deepcopy])
def test_casts_and_copies_of_a_module_keep_its_laws(change):
    factories = lambda: Stack(Shared), lambda: change(Stack(Shared))
    plain, changed = (lf.weightless.simulate(each, X, samples=2, **OPTIONS) for each in factories)
    np.testing.assert_array_equal(plain.loss, changed.loss)


class Positions(nn.Module):
    """A network with a parameter that nothing initialises, as those of checkpoints only."""

    def __init__(self, shape, is_read):
        super().__init__()
        self.blocks, self.is_read = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)), is_read
        self.positions = nn.Parameter(torch.empty(shape))

    def forward(self, x):
        x = x + self.positions if self.is_read else x
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("shape", [(4, 8), (8,)], ids=["matrix", "vector"])
def test_uninitialised_parameter_is_refused_by_name_if_the_pass_reads_it(shape):
    options = {"samples": 2, "seed": 0, "gradients": True, "progress": False}
    x = torch.ones(1, 4, 8)
    with pytest.raises(lf.InputError, match=r"^positions of .* is never initialised: .*overrides={'positions': 0.02}"):
        lf.weightless.simulate(lambda: Positions(shape, True), x, **options)
    unread = lf.weightless.simulate(lambda: Positions(shape, False), x, **options)
    given = lf.weightless.simulate(lambda: Positions(shape, True), x, overrides={"positions": 0.02}, **options)
    assert np.isfinite(unread.loss).all()
    assert np.isfinite(given.loss).all()
    assert not torch.are_deterministic_algorithms_enabled()


def test_writes_of_numpy_and_operations_that_fail_draw_the_network_whole():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(16, 16, bias=False) for _ in range(2)])
            for layer in self.layers:
                nn.init.normal_(layer.weight)
                entries = layer.weight.detach().numpy()
                entries *= 3

        def forward(self, x):
            for layer in self.layers:
                x = x + layer(x)
            return x

    class Caught(Shared):
        def __init__(self):
            super().__init__()
            with contextlib.suppress(RuntimeError):
                self.layers[0].weight @ torch.ones(3)

    x = torch.ones(1, 1, 16)
    data = lf.weightless.simulate(Shared, x, samples=2, seed=0, progress=False)
    assert "NumPy" in data.attrs["kept"]
    for sample in range(2):  # each is the network that the code makes of its seed
        module = drawn_module(Shared, torch.float32, torch_seed(0, f"weightless build {sample}"))
        size = float((x + module.layers[0](x)).detach().square().mean())
        assert float(data["covariance"][sample, 1, 0, 0]) == pytest.approx(size, rel=1e-5)
    caught = lf.weightless.simulate(Caught, x, samples=3, seed=0, progress=False)
    assert "fails while" in caught.attrs["kept"]
    assert (caught["covariance"].values[:, 1, 0, 0] > 0).all()
