"""`weightless.simulate`: numbers that do not depend on the division of work, laws, and refused arguments."""

import gc
import json
import sys

import numpy as np
import pytest
import torch
from scipy.stats import ks_2samp
from torch import nn

import limitformer as lf
from cases.foreign import Experts, ExpertsByOperators, Layers, wide
from weightless_families import CONFIGS, INPUTS, Step, weightless


def test_first_sample_is_the_same_in_any_number():
    several = weightless("llama", 6)
    alone = weightless("llama", 1)
    for name in several.data_vars:
        assert np.allclose(several[name].values[:1], alone[name].values, rtol=1e-9, equal_nan=True), name
    assert not np.allclose(several.loss.values[0], several.loss.values[1])


def test_seed_determines_all_bits():
    first, again, other = (weightless("gpt2", 3, seed=seed) for seed in (4, 4, 5))
    assert np.array_equal(first.covariance, again.covariance)
    assert np.array_equal(first.weight_gradient, again.weight_gradient)
    assert not np.allclose(first.covariance, other.covariance)


def test_passes_free_their_tensors():
    """The second of two calls leaves no more tensors behind than the first."""

    def tensors_after_a_call():
        weightless("gpt2", 2)
        gc.collect()
        return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())

    tensors_after_a_call()
    assert tensors_after_a_call() == tensors_after_a_call()


def test_both_precisions_give_the_same_sample():
    single, double = (weightless("llama", 2, dtype=dtype) for dtype in (torch.float32, torch.float64))
    for name in ("loss", "logits_std", "covariance", "stream_gradient"):
        assert np.allclose(single[name], double[name], rtol=1e-4, equal_nan=True), name
    assert not np.allclose(single.loss[0], double.loss[1], rtol=1e-4)


def test_recompute_changes_no_gradient():
    stored, again = weightless("gemma2", 2), weightless("gemma2", 2, recompute=True)
    assert np.array_equal(stored.weight_gradient, again.weight_gradient)
    assert np.array_equal(stored.stream_gradient, again.stream_gradient)


def of_uses(factory, samples=2, **options):
    """Return a simulation on two tokens of 24 entries."""
    x = np.random.Generator(np.random.Philox(1)).standard_normal((1, 2, 24))
    options = {"seed": 0, "progress": False} | options
    return lf.weightless.simulate(factory, x, samples=samples, **options)


@pytest.mark.parametrize(
    ("most", "options", "weights"),
    [
        (None, {}, "1 kept"),
        (None, {"draw": "always"}, "1 kept"),
        (None, {"gradients": True}, "1 kept"),
        (None, {"draw": "never", "gradients": True}, "1 never drawn"),
        (0, {}, "1 never drawn"),
    ],
)
def test_weights_used_more_than_once_are_kept_where_that_costs_less(most, options, weights, monkeypatch):
    if most is not None:
        monkeypatch.setattr(sys.modules["limitformer.weightless.run"], "MOST_REPEATED", most)
    attrs = of_uses(wide, **options).attrs
    assert attrs["weights"] == weights
    assert ("used more than once" in attrs["kept"]) == (weights == "1 kept")


def test_kept_weights_beyond_the_memory_are_drawn_again_with_the_same_numbers(monkeypatch):
    def factory():
        one, other = wide((False, True)), wide((False, True))
        return nn.Sequential(one, other, one)

    run = sys.modules["limitformer.weightless.run"]
    before, drawn = of_uses(factory, 3), []
    monkeypatch.setattr(run, "MOST_KEPT", 0)
    entries = run.WeightlessRun.entries
    monkeypatch.setattr(
        run.WeightlessRun, "entries", lambda self, *args: drawn.append(args[0].name) or entries(self, *args)
    )
    after = of_uses(factory, 3)
    assert np.array_equal(before.covariance, after.covariance)
    assert len(drawn) > 2 * len(set(drawn))  # in each pass


@pytest.mark.parametrize("kind", [Experts, ExpertsByOperators])
def test_slices_weights_and_samples_have_independent_numbers(kind):
    """The same tokens multiply them all; the same numbers for two of them would have the correlation 1."""

    class Noting(kind):
        def hidden(self, x):
            out = super().hidden(x)
            NOTED.append(out.detach())
            return out

    NOTED.clear()
    data = of_uses(lambda: Layers(Noting(), Noting()), 40, draw="never")
    assert data.attrs["weights"] == "4 never drawn"
    first = torch.stack(NOTED[-80::2])  # (samples, slices, tokens, entries) of the first layer
    second = torch.stack(NOTED[-79::2])
    pairs = [(first[:, 0], first[:, 1]), (first[:, 1], first[:, 2]), (first, second), (first[1:], first[:-1])]
    for one, other in pairs:
        assert abs(np.corrcoef(one.flatten(), other.flatten())[0, 1]) < 4.5 / one[:, ..., 0, :].numel() ** 0.5
    assert np.corrcoef(first[:, 0].flatten(), first[:, 0].flatten())[0, 1] == pytest.approx(1.0)


NOTED = []


def test_two_sequences_share_their_weights():
    data = weightless("llama", 4, inputs=[INPUTS, INPUTS])
    v = data.covariance.values
    assert v.shape[-1] == 10
    assert np.allclose(v[..., :5, :5], v[..., 5:, 5:], rtol=1e-12)
    assert np.allclose(v[..., :5, 5:], v[..., :5, :5], rtol=1e-9)


def test_transformer_has_the_law_of_its_chain():
    parts = {"attention": lf.ShapedAttention(tau0=1.0), "feedforward": lf.ShapedReLU(c_plus=0.5, c_minus=-1.0)}
    net = lf.Transformer(width=24, depth=4, gamma=0.6, **parts)
    start = [[1.0, 0.3], [0.3, 1.4]]
    mine = lf.weightless.simulate(net, start, samples=400, seed=0, dtype=torch.float64, progress=False)
    chain = lf.simulate(net, start, samples=3000, seed=1)
    twin = lf.simulate(lf.Transformer(width=24, depth=4, gamma=0.9, **parts), start, samples=3000, seed=1)

    def least(other):
        v, w = mine.covariance[:, -1].values, other.covariance[:, -1].values
        return min(ks_2samp(v[:, i, j], w[:, i, j]).pvalue for i, j in ((0, 0), (0, 1), (1, 1)))

    assert least(chain) > 1e-4
    assert least(twin) < 1e-8
    assert mine.sizes["sublayer"] == 2


def test_texts_become_numbered_words():
    data = lf.weightless.simulate(CONFIGS["llama"](), "to be or not to be", samples=1, seed=0, progress=False)
    assert list(data.word.values) == ["to", "be", "or", "not", "to", "be"]
    v = data.covariance[0, 0].values
    assert v[0, 4] == pytest.approx(v[0, 0])
    assert abs(v[0, 1]) < v[0, 0]


def test_configurations_may_be_objects_json_files_or_folders(tmp_path):
    config = CONFIGS["gpt2"]()
    values = config.to_dict()
    (tmp_path / "config.json").write_text(json.dumps(values), encoding="utf-8")
    results = [
        lf.weightless.simulate(model, INPUTS, samples=1, seed=0, progress=False).covariance.values
        for model in (config, values, json.dumps(values), tmp_path, tmp_path / "config.json")
    ]
    assert all(np.array_equal(results[0], other) for other in results[1:])


class Silent(nn.Module):
    """No blocks."""

    def forward(self, x):
        return x


class Broken(nn.Module):
    """Its own code fails."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Step(), Step()])

    def forward(self, x):
        return self.layers[0](x) + self.no_such_thing


@pytest.mark.parametrize(
    ("model", "inputs", "options", "message"),
    [
        ("gpt3", 4, {}, "no public shape, file or folder 'gpt3'. Nearest: gpt2"),
        ({"model_type": "lama"}, 4, {}, "model_type must be one .* got 'lama'. Nearest: llama"),
        ({"model_type": "llama", "hidden_size": "wide"}, 4, {}, "the configuration of llama cannot be made"),
        ({"model_type": "llama", "hidden_size": 30, "num_attention_heads": 4}, 4, {}, "llama cannot"),
        ("{", 4, {}, "must be JSON"),
        (3, 4, {}, r"The model must be a configuration .*; got 3\. Nearest: a name of limitformer\.shapes\(\)\.$"),
        (nn.Linear(3, 3), 4, {}, "has its weights already"),
        (Silent, np.ones((1, 2, 3)), {}, "has no blocks: no module of a list receives tokens"),
        (Broken, np.ones((1, 2, 8)), {}, r"cannot run with these inputs: AttributeError.*no_such_thing"),
        ("small", [3, 99], {}, "embed_tokens.weight has rows 0 to 39; got the number 99"),
        ("small", [3, -1], {}, "embed_tokens.weight has rows 0 to 39; got the number -1. Nearest: ids of 0 or more"),
        ("small", [[0.5]], {}, "ids must be whole numbers"),
        ("small", 0, {}, "at least one token"),
        ("small", 41, {}, "need a larger vocabulary than 40"),
        ("small", object(), {}, "inputs must be texts, ids"),
        ("small", 4, {"seed": -1}, "seed must be"),
        ("small", {}, {}, "must name at least one tensor"),
        ("small", 4, {"draw": "maybe"}, 'draw must be "auto"'),
        ("small", 4, {"dtype": torch.float16}, "dtype must be"),
        ("small", 4, {"samples": 0}, "samples must be at least 1"),
        ("small", 4, {"overrides": {"*.wv": 1.0}}, r"no weight is named '\*\.wv'"),
        ("small", 4, {"overrides": {"*.q_proj.weight": "big"}}, "must be a number"),
        ("small", 4, {"device": "abacus"}, "device must be one"),
        ("vit", np.ones((2, 3, 9, 9)), {}, r"images must be \(number, 3, 8, 8\)"),
        (lambda: 3, 4, {}, "must return a torch.nn.Module"),
    ],
)
def test_simulate_refuses_bad_arguments_in_one_line(model, inputs, options, message):
    small = {"small": "llama", "vit": "vit"}
    model = CONFIGS[small[model]]() if isinstance(model, str) and model in small else model
    with pytest.raises(lf.InputError, match=message) as caught:
        lf.weightless.simulate(model, inputs, **{"samples": 1, "seed": 0, "progress": False, **options})
    assert "\n" not in str(caught.value)


def test_simulate_refuses_more_tokens_than_positions():
    with pytest.raises(
        lf.InputError, match=r"at most 16 tokens, as many as transformer\.wpe\.weight has positions for; got 20"
    ):
        weightless("gpt2", 1, inputs=[3] * 20)


def test_ctrl_c_returns_the_finished_samples():
    calls = []

    def interrupted(out, inputs):
        calls.append(1)
        if len(calls) > 3:
            raise KeyboardInterrupt
        return out.logits.square().mean().reshape(1)

    with pytest.raises(lf.Interrupted) as caught:
        weightless("llama", 9, loss=interrupted)
    assert caught.value.partial.sizes["sample"] == 3


class Tied(nn.Module):
    """An embedding with a padding row that is its head too."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(40, 12, padding_idx=0)
        self.layers = nn.ModuleList([Step(), Step()])
        self.down, self.up = nn.Linear(12, 8, bias=False), nn.Linear(8, 12, bias=False)

    def forward(self, ids):
        x = self.down(self.embed(ids))
        for layer in self.layers:
            x = layer(x)
        return nn.functional.linear(self.up(x), self.embed.weight)


def test_tied_head_has_the_zero_row_of_the_padding():
    seen = []

    def loss(out, inputs):
        seen.append(float(out[..., 0].detach().abs().max()))
        return out.square().mean((1, 2))

    data = lf.weightless.simulate(Tied, [[3, 7, 9]], samples=3, seed=0, gradients=True, loss=loss, progress=False)
    assert max(seen) == 0.0
    assert np.isfinite(data.loss).all()


def test_table_is_looked_up_by_whole_numbers():
    """Torch refuses other numbers, too."""

    class Table(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.blocks = torch.nn.Embedding(20, 8), torch.nn.ModuleList([torch.nn.Linear(8, 8)])

        def forward(self, ids):
            return self.blocks[0](self.table(ids))

    for given in (torch.rand(2, 5), torch.ones(2, 5, dtype=torch.bool)):
        with pytest.raises(RuntimeError, match="indices"):
            Table()(given)
        with pytest.raises(lf.InputError, match=r"table.weight is looked up by whole numbers; got torch"):
            lf.weightless.simulate(Table, given, samples=1, seed=0, progress=False)
