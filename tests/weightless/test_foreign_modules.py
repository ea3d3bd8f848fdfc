"""Modules of unknown code: unusual random numbers and state are simulated exactly, or refused with their names."""

import functools
import random

import numpy as np
import pytest
import torch
from torch import nn

import limitformer as lf
from cases.foreign import GLOBAL, IDS, TOSSES, WIDTH, Listed, Net, Numpy, Rotated, Scaled, Tossed, net_after
from limitformer.weightless import network
from limitformer.weightless.building import build_sample

OPTIONS = {"seed": 0, "dtype": torch.float64, "progress": False}


def sizes(v):
    """Return the log of the mean variance of a token, by sample."""
    return np.log(np.trace(v, axis1=1, axis2=2) / v.shape[1])


SHARES = dict(zip(TOSSES, (0.5, 0.5, 0.25, 0.2, 0.5, 0.5, 0.25), strict=True))  # of heads


@pytest.mark.parametrize("toss", TOSSES)
def test_coin_of_the_factory_is_tossed_in_each_build(toss):
    """A coin that falls on one side in all builds is too far from its share."""
    builds, share = 64, SHARES[toss]
    heads = sum(build_sample(functools.partial(Tossed, toss), torch.float32, seed)[0].side() for seed in range(builds))
    assert abs(heads - builds * share) < 3.5 * (builds * share * (1 - share)) ** 0.5 < builds * share


def test_networks_of_a_factory_that_tosses_a_coin_are_built_one_by_one():
    """The stream is 20 times as large by heads."""
    data = lf.weightless.simulate(functools.partial(Tossed, TOSSES[0]), IDS, samples=12, **OPTIONS)
    assert "drawn by the model's own code" in data.attrs["weights"]
    assert 2 < (sizes(data.covariance.values[:, 0]) > 3.0).sum() < 10


def test_whole_networks_do_not_depend_on_the_number_of_samples():
    several, alone = (lf.weightless.simulate(Listed, IDS, samples=n, gradients=True, **OPTIONS) for n in (4, 1))
    other = lf.weightless.simulate(Listed, IDS, samples=1, gradients=True, **OPTIONS | {"seed": 1})
    for name in several.data_vars:
        np.testing.assert_array_equal(several[name][:1], alone[name])
    assert len(np.unique(several.loss)) == 4
    assert other.loss[0] != alone.loss[0]


def test_simulate_restores_the_global_generators():
    np.random.seed(3)
    before = network.random_states()
    lf.weightless.simulate(Numpy, IDS, samples=2, **OPTIONS)
    assert network.random_states() == before


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (Listed, r"extra\[\d\]\.(weight|bias) is not understood: .* takes 2\.0 KiB.*Nearest: make it a parameter\.$"),
        (
            Numpy,
            r"the law of head\.weight is not understood: it is random\. .* takes 1\.0 KiB.*"
            r"Nearest: overrides=\{'head\.weight': std\}, which is another network",
        ),
        (Scaled, "is not understood: it is random"),
    ],
)
def test_simulate_refuses_drawn_parts_larger_than_memory(factory, message, monkeypatch):
    monkeypatch.setattr(network, "available_memory", lambda: 1000)
    with pytest.raises(lf.InputError, match=message):
        lf.weightless.simulate(factory, IDS, samples=1, **OPTIONS)


def only_with_entries():
    net = Net()
    if net.head.weight.data_ptr() == 0:
        raise RuntimeError("no entries")
    return net


def test_factory_that_cannot_be_watched_stops_at_the_memory_limit(monkeypatch):
    monkeypatch.setattr(network, "available_memory", lambda: 6000)
    with pytest.raises(lf.InputError, match=r"only_with_entries takes more than .* the free memory"):
        lf.weightless.simulate(only_with_entries, IDS, samples=1, **OPTIONS)


CACHE = {}


class Cached(Net):
    """A matrix that is made once and cached."""

    def stream(self, x):
        return super().stream(x @ CACHE["matrix"])


def cached():
    CACHE.setdefault("matrix", torch.randn(WIDTH, WIDTH))
    return Cached()


def test_reading_a_matrix_without_entries_raises_an_error():
    CACHE.clear()
    with pytest.raises(lf.InputError, match="cached reads a matrix without entries in"):
        lf.weightless.simulate(cached, IDS, samples=1, **OPTIONS)
    with pytest.raises(lf.InputError, match="reads a matrix without entries"):
        lf.check(Cached(), IDS, progress=False)
    with pytest.raises(lf.InputError, match=r"embed\.weight of Net is on the meta device"):
        lf.check(Net().to("meta"), IDS, progress=False)


def truncated(weight, edge):
    """The truncated normal of timm and other packages."""
    with torch.no_grad():
        weight.uniform_(-0.9545, 0.9545).erfinv_().mul_(0.02 * 2**0.5).add_(0.1).clamp_(min=0.1 - edge, max=0.1 + edge)


def test_watch_recognises_a_truncated_normal_in_four_steps():
    def made(edge):
        layer = nn.Linear(500, 400)
        truncated(layer.weight, edge)
        return layer

    law = lf.weightless.law(lambda: made(0.04))["weight"]
    assert law.kind == "truncated normal"
    assert (law.mean, law.std) == pytest.approx((0.1, 0.02 * 0.87962566), rel=1e-4)
    assert float(made(0.04).weight.detach().std()) == pytest.approx(law.std, rel=0.01)
    assert lf.weightless.law(lambda: made(0.03))["weight"].kind == "unknown"  # other bounds


def test_implicit_parameters_keep_their_attributes():
    class Marked(Net):
        def __init__(self):
            super().__init__()
            self.head.weight.mult = self.head.bias.mult = 2.0

        def stream(self, x):
            return super().stream(x * self.head.weight.mult * self.head.bias.mult)

    data, plain = (lf.weightless.simulate(net, IDS, samples=1, **OPTIONS) for net in (Marked, Net))
    np.testing.assert_allclose(data.covariance[:, 0], 16 * plain.covariance[:, 0], rtol=1e-12)


class Counting(Net):
    """A counter of calls, stored in one of several ways, that multiplies the output."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.number, self.calls, self.seen = kind, 0, [], {}
        self.register_buffer("buffer", torch.zeros(()))

    def count(self):
        self.buffer += 1
        self.number += 1
        self.calls.append(1)
        self.seen[len(self.seen)] = torch.ones(())
        GLOBAL["calls"] = GLOBAL.get("calls", 0) + 1
        kinds = {"buffer": float(self.buffer), "number": self.number, "list": len(self.calls), "dict": len(self.seen)}
        return (kinds | {"global": GLOBAL["calls"]})[self.kind]

    def forward(self, ids):
        return super().forward(ids) * self.count()

    def stream(self, x):
        return super().stream(x) * (1 + 0.01 * self.number)


@pytest.mark.parametrize(("kind", "samples"), [("buffer", 1), ("number", 5), ("list", 1), ("dict", 5)])
def test_state_changed_by_a_pass_is_restored_before_the_next(kind, samples):
    counting = lf.weightless.simulate(lambda: Counting(kind), IDS, samples=samples, gradients=True, **OPTIONS)
    plain = lf.weightless.simulate(Net, IDS, samples=samples, gradients=True, **OPTIONS)
    assert list(counting.covariance.dims) == list(plain.covariance.dims)
    np.testing.assert_allclose(counting.covariance, plain.covariance, rtol=1e-9)
    np.testing.assert_allclose(counting.loss, plain.loss, rtol=1e-9)
    again = lf.weightless.simulate(lambda: Counting(kind), IDS, samples=samples, gradients=True, **OPTIONS)
    np.testing.assert_array_equal(counting.loss, again.loss)


def test_check_restores_an_existing_module():
    module = Counting("buffer").train()
    lf.check(module, IDS, progress=False)
    assert (float(module.buffer), module.number, module.calls, module.seen) == (0.0, 0, [], {})
    assert module.training
    assert module.blocks[0].norm.training


def test_modules_whose_calls_differ_are_refused():
    for model in (lambda: Counting("global"), Counting("global")):
        with pytest.raises(lf.InputError, match="when it is called again with the same inputs"):
            lf.check(model, IDS, samples=4, progress=False)


class Noisy(Net):
    """A module whose passes draw random numbers."""

    def __init__(self, draw):
        super().__init__()
        self.draw = draw

    def stream(self, x):
        return super().stream(x * (1 + self.draw()))


@pytest.mark.parametrize("draw", [np.random.rand, random.random, lambda: torch.rand(())])
def test_modules_that_draw_random_numbers_in_a_pass_are_refused(draw):
    for model in (lambda: Noisy(draw), Noisy(draw)):
        with pytest.raises(lf.InputError, match="draws random numbers of its own when it runs"):
            lf.check(model, IDS, samples=4, progress=False)


def test_modules_that_change_a_matrix_in_a_pass_are_refused():
    class Learning(Net):
        def stream(self, x):
            self.zeros.data.add_(1.0)
            with torch.no_grad():
                self.zeros.mul_(2.0)
            return super().stream(x)

        def __init__(self):
            super().__init__()
            self.zeros = nn.Parameter(torch.zeros(3, 3))

    for model in (Learning, Learning()):
        with pytest.raises(lf.InputError, match="Learning changes its parameter zeros when it runs"):
            lf.check(model, IDS, samples=1, progress=False)


def test_factories_with_varying_parameters_are_refused():
    def made():
        net = Rotated()
        net.more = nn.ModuleList(nn.Linear(2, 2) for _ in range(random.randrange(1, 10**6) % 7))
        return net

    with pytest.raises(lf.InputError, match="has other parameters each time it is built"):
        lf.weightless.simulate(made, IDS, samples=8, **OPTIONS)


def seeded(net):
    torch.manual_seed(0)
    nn.init.normal_(net.head.weight)


def forked(net):
    with torch.random.fork_rng():
        nn.init.normal_(net.head.weight)
    nn.init.normal_(net.blocks[0].up.weight)


def another_generator(net):
    net.head.weight.data.normal_(generator=torch.Generator().manual_seed(3))


def another_generator_of_a_truncated_normal(net):
    nn.init.trunc_normal_(net.head.weight, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (seeded, "sets the state of torch's generator"),
        (forked, "sets the state"),
        (another_generator, "draws from a generator of its own"),
        (another_generator_of_a_truncated_normal, "draws from a generator of its own"),
    ],
)
def test_factories_that_set_seeds_draw_whole_networks(change, reason):
    data = lf.weightless.simulate(functools.partial(net_after, change), IDS, samples=3, **OPTIONS)
    assert "drawn by the model's own code" in data.attrs["weights"]
    assert reason in data.attrs["kept"]


def test_generator_among_attributes_has_unknown_law():
    factory = functools.partial(net_after, lambda net: setattr(net, "source", random.Random()))
    data = lf.weightless.simulate(factory, IDS, samples=1, **OPTIONS)
    assert data.attrs["kept"] == "source: it is a generator of random numbers"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda net: net.register_buffer("b", torch.randn(WIDTH)), "b: it is random"),
        (lambda net: setattr(net, "b", random.random()), "b: it is random, and neither a parameter nor a buffer"),
    ],
)
def test_random_buffer_or_number_is_drawn_by_the_module(change, reason):
    data = lf.weightless.simulate(functools.partial(net_after, change), IDS, samples=1, **OPTIONS)
    assert reason in data.attrs["kept"].split("; ")


def test_lazy_layers_are_refused():
    def factory():
        return nn.Sequential(nn.LazyLinear(4))

    message = r"0\.weight of Sequential belongs to a lazy layer, and has no shape .* Nearest: the layer with its sizes"
    for call in (lf.weightless.law, lambda model: lf.weightless.simulate(model, np.ones((1, 2, 8)), samples=1, seed=0)):
        with pytest.raises(lf.InputError, match=message):
            call(factory)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_scripted_modules_are_refused():
    def factory():
        return nn.Sequential(torch.jit.script(nn.Linear(8, 8)))

    message = r"^0 of Sequential is scripted by torch\.jit\. Nearest: the module without torch\.jit\.$"
    for call in (lf.weightless.law, lambda model: lf.check(model(), np.ones((1, 2, 8)), blocks=["0"])):
        with pytest.raises(lf.InputError, match=message):
            call(factory)


class NeedsSizes(nn.Module):
    def __init__(self, width, depth, bias=True):
        raise AssertionError("never called")


def test_function_with_arguments_is_refused_with_a_repair():
    says = r"NeedsSizes needs the argument width, depth\. Nearest: a function without arguments, .*: return NeedsSizes"
    with pytest.raises(lf.InputError, match=says):
        lf.weightless.law(NeedsSizes)
    with pytest.raises(lf.InputError, match=r"a function of the size, such as def build\(width\)"):
        lf.transfer(lambda: None, {"width": [8, 16]}, optimizer="adam", seed=0)


def test_function_that_returns_one_module_is_refused():
    module = nn.Linear(8, 8)
    with pytest.raises(lf.InputError, match=r"returns the same module at each call\. Nearest: a function that builds"):
        lf.weightless.law(lambda: module)
