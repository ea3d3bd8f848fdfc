"""Watched laws against the moments of drawn models."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

import limitformer as lf
from cases.foreign import Layers, Residual, linear
from limitformer.subjects.subject import resolve
from limitformer.weightless import laws, network
from limitformer.weightless.numbers import entries as draw_entries
from weightless_families import CONFIGS


@pytest.mark.parametrize("family", ["gpt2", "modernbert", "t5", "deepseek_v3"])
def test_law_has_the_moments_of_a_drawn_model(family):
    table, torch_state = lf.weightless.law(CONFIGS[family]()), torch.get_rng_state()
    torch.manual_seed(0)
    model = resolve(CONFIGS[family]()).factory()
    torch.set_rng_state(torch_state)
    drawn = dict(model.named_parameters())
    assert set(table.laws) == set(drawn)
    for name, law in table.laws.items():
        entries = drawn[name].detach().double()
        if law.rows:
            random_rows = [row for row in range(len(entries)) if row not in law.rows]
            assert all(bool((entries[row] == value).all()) for row, value in law.rows.items())
            entries = entries[random_rows]
        error = law.std / math.sqrt(entries.numel())
        assert abs(float(entries.mean()) - law.mean) <= 5 * error, name
        assert abs(float(entries.std(correction=0)) - law.std) <= 5 * error, (name, str(law))


@pytest.mark.parametrize(
    ("shape", "pattern", "std"),
    [
        ("gpt2", "transformer.h.7.attn.c_proj.weight", 0.02 / math.sqrt(24)),
        ("t5-small", "encoder.block.0.layer.0.SelfAttention.q.weight", (512 * 64) ** -0.5),
        ("modernbert-base", "model.layers.3.attn.Wqkv.weight", 0.02 * 0.87962566103423978),
    ],
)
def test_laws_at_public_shapes(shape, pattern, std):
    assert lf.weightless.law(shape)[pattern].std == pytest.approx(std, rel=1e-6)


def test_module_with_default_initialisation_has_a_uniform_law():
    table = lf.weightless.law(lambda: nn.Sequential(nn.Linear(50, 8), nn.LayerNorm(8)))
    assert str(table["0.weight"]) == f"uniform, std {1 / math.sqrt(150):.4g}"
    assert table["0.bias"].std == pytest.approx(1 / math.sqrt(150))
    assert str(table["1.weight"]) == "ones"


def test_watch_follows_overwrites_and_multiples():
    def made():
        module = nn.Linear(30, 20)
        nn.init.normal_(module.weight, std=0.5)
        with torch.no_grad():
            module.weight.mul_(0.1).add_(2.0)
            module.bias.zero_()
        return module

    table = lf.weightless.law(made)
    assert (table["weight"].mean, table["weight"].std) == pytest.approx((2.0, 0.05))
    assert str(table["bias"]) == "zeros"


@pytest.mark.parametrize("draw", [lambda: torch.randn(6, 4) * 0.3, lambda: torch.normal(0.0, 0.3, (6, 4))])
def test_watch_follows_a_parameter_computed_from_random_numbers(draw):
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(draw())

    assert str(lf.weightless.law(Own)["w"]) == "normal, std 0.3"


def test_watch_names_dependent_entries_as_reason():
    def made():
        module = nn.Linear(6, 6, bias=False)
        nn.init.sparse_(module.weight, 0.5)
        return nn.ModuleDict({"layers": nn.ModuleList([module])})

    assert str(lf.weightless.law(made)["layers.0.weight"]) == "unknown: its entries depend on each other"
    assert nn.init.orthogonal_(torch.empty(2, 2)).det().abs() == pytest.approx(1.0)  # torch's own is back
    assert nn.init.dirac_(torch.empty(2, 2, 1)).sum() == 2.0


def test_law_table_has_ties_and_counts():
    table = lf.weightless.law("gpt2")
    assert table.count == 124_439_808
    assert table.tied["transformer.wte.weight"] == ("lm_head.weight",)
    assert table.dataset().sizes["weight"] == len(table) == 148
    assert "transformer.h.*.mlp.c_fc.weight ×12" in str(table)


@pytest.mark.parametrize(
    ("law", "mean", "std"),
    [
        (laws.uniform(-1.0, 3.0), 1.0, 4 / math.sqrt(12)),
        (laws.truncated_normal(0.0, 2.0, -4.0, 4.0), 0.0, 2 * 0.87962566103423978),
        (laws.truncated_normal(1.0, 1.0, 1.0, math.inf), 1 + math.sqrt(2 / math.pi), math.sqrt(1 - 2 / math.pi)),
        (laws.normal(0.3, mean=2.0).times(-2.0).plus(1.0), -3.0, 0.6),
    ],
)
def test_entries_of_a_law_have_its_moments(law, mean, std):
    assert (law.mean, law.std) == pytest.approx((mean, std), rel=1e-12)
    entries = draw_entries(law, 1, "p", range(1), range(100), 1000, torch.float64)
    assert float(entries.mean()) == pytest.approx(mean, abs=5 * std / 10**2.5)
    assert float(entries.std()) == pytest.approx(std, rel=0.02)


def test_every_public_shape_has_a_blueprint():
    for name, numbers in lf.weightless.shapes().items():
        assert numbers["source"]
        assert resolve(name).config.model_type == numbers["model_type"]
    assert len(lf.weightless.shapes()) >= 30


class Difference(nn.Module):
    """x + f(x) − g(x)."""

    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x):
        return x + self.first(x) - self.second(x)


def deep_copy(first, second):
    return copy.deepcopy(first)


def shared_data(first, second):
    second.weight.data = first.weight.data
    return second


def shared_storage(first, second):
    with torch.no_grad():
        second.weight.set_(first.weight)
    return second


@pytest.mark.parametrize(
    ("share", "std"), [(deep_copy, None), (shared_data, 0.3), (shared_storage, laws.uniform(-1.0, 1.0))]
)
def test_copied_weights_have_equal_numbers_under_every_law(share, std):
    def factory():
        first, second = linear(), linear()
        return Layers(Difference(first, share(first, second)), Difference(linear(), linear()))

    x = np.random.Generator(np.random.Philox(1)).standard_normal((1, 3, 8))
    overrides = None if std is None else {"layers.0.*.weight": std}
    options = {"samples": 3, "seed": 0, "dtype": torch.float64, "overrides": overrides, "progress": False}
    data = lf.weightless.simulate(factory, x, **options)
    assert "copy of" in data.attrs["kept"]
    before, same, other = (data.covariance.values[:, k] for k in range(3))
    np.testing.assert_allclose(same, before, rtol=1e-12)
    assert not np.isclose(other, same).any()  # the twin: two weights


def from_numpy():
    layer = linear()
    layer.weight = nn.Parameter(torch.tensor(np.random.standard_normal((8, 8))))
    return Layers(Residual(layer))


def alpha():
    layer = linear()
    layer.weight.data.add_(1.0, alpha=2.0)
    return Layers(Residual(layer))


@pytest.mark.parametrize("factory", [from_numpy, alpha])
def test_dependent_or_rearranged_entries_have_unknown_laws(factory, monkeypatch):
    assert lf.weightless.law(factory)["layers.0.map.weight"].kind == "unknown"
    monkeypatch.setattr(network, "available_memory", lambda: 100)
    with pytest.raises(lf.InputError, match=r"the law of layers\.0\.map\.weight is not understood.* takes 512 bytes"):
        lf.weightless.simulate(factory, np.ones((1, 2, 8)), samples=1, seed=0)
    named = {"layers.0.map.weight": 0.5}
    data = lf.weightless.simulate(factory, np.ones((1, 2, 8)), samples=1, seed=0, overrides=named, progress=False)
    assert data.attrs["weights"] in ("1 never drawn", "1 drawn when needed")
    monkeypatch.undo()
    data = lf.weightless.simulate(factory, np.ones((1, 2, 8)), samples=1, seed=0, progress=False)
    assert data.attrs["weights"] == "1 drawn by the model's own code"


def holding(make):
    """Return a factory of modules with the parameters that `make` returns."""
    return lambda: nn.ParameterList([nn.Parameter(each) for each in make()])


def views_of(make):
    """Return a function that makes a matrix and views of it."""

    def made():
        matrix = torch.randn(8, 8)
        return [matrix, *make(matrix)]

    return made


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(3, 8, 8).unbind(),
        lambda: torch.randn(8, 16).chunk(2, -1),
        lambda: torch.randn(16).split(8),
        lambda: (lambda both: [both[:, ::2], both[:, 1::2]])(torch.randn(8, 16)),
        lambda: [torch.randn(16)[:8]],
        lambda: [torch.randn(1, 8).expand(8, 8)],
        lambda: [torch.randn(8, 8).as_strided((8, 8), (1, 1))],
        views_of(lambda matrix: [matrix.T]),
        views_of(lambda matrix: [matrix[:4]]),
        views_of(lambda matrix: [matrix.view(4, 16)]),
        views_of(lambda matrix: [matrix.clone().view(4, 16)]),
        lambda: (lambda matrix: [matrix, matrix.erfinv()])(torch.rand(8, 8) * 0.9),
    ],
)
def test_parameters_that_share_numbers_in_several_forms_have_unknown_laws(make):
    table = lf.weightless.law(holding(make))
    assert {law.kind for law in table.laws.values()} == {"unknown"}
    sources = [law.source for law in table.laws.values()]
    assert len(set(sources)) == len(sources)  # so that overrides do not make them copies


def test_transposed_whole_matrix_has_a_known_law():
    assert str(lf.weightless.law(holding(lambda: [torch.randn(8, 6).T]))["0"]) == "normal, std 1"


def written(rows):
    matrix = torch.randn(8, 8)
    rows(matrix.detach()).zero_()
    return [matrix]


def test_constant_rows_must_be_rows_of_the_parameter_itself():
    assert lf.weightless.law(holding(lambda: written(lambda m: m[3])))["0"].rows == {3: 0.0}
    assert lf.weightless.law(holding(lambda: written(lambda m: m.view(4, 16).detach()[1])))["0"].kind == "unknown"


class TiedPair(nn.Module):
    """An embedding with a fixed row, and a head that is tied to it and initialised later."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 4, padding_idx=2), nn.Linear(4, 9, bias=False)
        self.head.weight = self.embed.weight

    def initialise(self):
        self.embed.reset_parameters()
        nn.init.normal_(self.head.weight, 0, 0.5)


def test_memory_for_a_module_on_meta_ends_its_ties_as_without_a_watch():
    """Other conversions keep them."""

    def with_memory():
        with torch.device("meta"):
            module = TiedPair()
        module.to_empty(device="cpu")
        module.initialise()
        return module

    for factory in (with_memory, TiedPair, lambda: TiedPair().double(), lambda: TiedPair().to_empty(device="cpu")):
        names = [name for name, _ in factory().named_parameters()]
        table = lf.weightless.law(factory)
        assert list(table.laws) == names
        assert len(table.tied) == 2 - len(names)
    assert str(lf.weightless.law(with_memory)["embed.weight"]) == "normal, std 1, row 2 is 0"
    assert str(lf.weightless.law(with_memory)["head.weight"]) == "normal, std 0.5"


def test_code_that_asks_for_the_default_device_is_read_as_it_runs():
    """Transformers initialises nothing on the meta device, and all of it after `to_empty`."""

    def with_memory():
        with torch.device("meta"):
            assert torch.get_default_device().type == torch.tensor([]).device.type == "meta"
            model = resolve(CONFIGS["llama"]()).factory()
        model.to_empty(device="cpu")
        model.init_weights()
        return model

    table, other = lf.weightless.law(CONFIGS["llama"]()), lf.weightless.law(with_memory)
    assert {name: str(law) for name, law in other.laws.items()} == {name: str(law) for name, law in table.laws.items()}
