"""Batches of several sequences: their pieces, their law against drawn networks, and the noise of their gradients."""

import itertools

import numpy as np
import pytest
import torch
import transformers
from scipy import stats
from torch import nn
from torch.nn import functional

import limitformer as lf
from limitformer.base.errors import InputError
from limitformer.stepping.noise import ALL, noise_of, noise_rows, noise_scale
from limitformer.stepping.simulate import training_of
from limitformer.stepping.trajectory import NOISE_PIECES, PIECE_TOKENS, pieces_of
from limitformer.subjects.inputs import Inputs
from statistics_checks import STANDARD_ERRORS, assert_same_law
from training_networks import Custom, next_token
from weightless_families import CONFIGS

OPTIMIZERS = {"sgd": {"lr": 0.1, "momentum": 0.9}, "adamw": {"lr": 0.01}, "muon": {"lr": 0.02}}


def simulate(model, inputs, **options):
    options = {"samples": 2, "seed": 0, "progress": False, "optimizer": "sgd"} | options
    return lf.weightless.simulate_steps(model, inputs, **options)


def test_pieces_are_whole_sequences_that_fit_and_together_the_batch():
    for rows, tokens, least in ((23, 16, NOISE_PIECES), (64, 100, 1), (3, 4000, 1), (1, 4000, NOISE_PIECES), (9, 8, 1)):
        ids = torch.arange(rows * tokens).reshape(rows, tokens)
        pieces = pieces_of(Inputs({"": ids}, {}, rows), least)
        assert torch.equal(torch.cat([each.fixed[""] for each in pieces]), ids)
        assert all(each.rows == len(each.fixed[""]) for each in pieces)
        assert all(each.rows == 1 or each.rows * tokens <= PIECE_TOKENS for each in pieces)
        assert len(pieces) >= min(least, rows)
    assert len(pieces) == 1
    by_time = Inputs({"": ids.T, "places": torch.arange(8)}, {}, 9, batch_dim=1)
    parts = pieces_of(by_time, 3)
    assert torch.equal(torch.cat([each.fixed[""] for each in parts], 1), ids.T)
    assert all(torch.equal(each.fixed["places"], torch.arange(8)) for each in parts)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("model", [Custom, CONFIGS["gpt2"]()], ids=["custom", "gpt2"])
def test_gradients_of_pieces_add_up_to_the_step_of_the_whole_batch(name, model):
    """The 23 sequences are divided unequally; drawn weights are the same numbers for any pieces."""
    ids = torch.randint(1, 30, (23, 5), generator=torch.Generator().manual_seed(1))
    options = {"optimizer": {"name": name} | OPTIMIZERS[name], "clip": 1.0, "draw": "always", "dtype": torch.float64}
    options |= {"loss": next_token} if model is Custom else {}
    whole, pieces = (simulate(model, ids, sequences=each, **options) for each in (None, 23))
    for key in ("loss", "loss_unseen", "gradient_norm", "clipping", "weight_gradient", "weight_change"):
        np.testing.assert_allclose(pieces[key], whole[key], rtol=1e-7, atol=1e-12, err_msg=key)
    assert "weight_noise" not in whole
    assert int(pieces.weight_noise.notnull().any(["sample", "weight"]).sum()) == 1  # later weights have seen the batch


@pytest.mark.parametrize("own", [False, True])
def test_pieces_with_as_many_sequences_as_heads_keep_them_apart(own):
    """The piece is measured as the batch of these four sequences is; the twin has the heads of another order."""
    config = CONFIGS["gpt2"]()
    config.n_head = 4
    model = (lambda: transformers.GPT2LMHeadModel(config)) if own else config
    ids = torch.randint(1, 30, (32, 5), generator=torch.Generator().manual_seed(1))
    options = {"draw": "always", "dtype": torch.float64, "steps": 1}
    options |= {"loss": lambda out, inputs: next_token(out.logits, inputs)} if own else {}
    pieces, four = (simulate(model, each, sequences=len(each), **options) for each in (ids, ids[:4]))
    one = simulate(model, ids[:4], **options).entropy.isel(step=0)
    assert pieces.entropy.sizes["head"] == 4
    np.testing.assert_allclose(pieces.entropy.isel(step=0), one, rtol=1e-9)
    assert four.entropy.isel(step=0).shape == one.shape
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(pieces.entropy.isel(step=0, head=slice(None, None, -1)), one, rtol=1e-9)


def test_each_network_has_its_own_batch_and_a_larger_one_begins_with_a_smaller_one(monkeypatch):
    seen = []
    run = lf.stepping.trajectory.Trajectory.run

    def noted(self, inputs, *arguments, **options):
        seen.append(inputs.fixed["input_ids"])
        return run(self, inputs, *arguments, **options)

    monkeypatch.setattr(lf.stepping.trajectory.Trajectory, "run", noted)
    config = CONFIGS["gpt2"]()
    for sequences in (3, 6):
        simulate(config, 5, sequences=sequences, steps=1, samples=2 if sequences == 3 else 1)
    first, larger = next(each for each in seen if len(each) == 3), seen[-2]
    others = {tuple(each.flatten().tolist()) for each in seen if len(each) == 3}
    assert len(others) == 4  # of two networks, with their unseen batches
    assert torch.equal(larger[:3], first)
    assert len(larger) == 6
    assert int(first.max()) < config.vocab_size


class Sequence(nn.Module):
    """Two hidden layers that mix tokens, whose matrices are Gaussian: they stay undrawn."""

    def __init__(self, width=24, vocabulary=20):
        super().__init__()
        self.table, self.mix = nn.Embedding(vocabulary, width), nn.Linear(width, width, bias=False)
        self.out, self.head = nn.Linear(width, width, bias=False), nn.Linear(width, vocabulary, bias=False)
        for each in (self.mix.weight, self.out.weight, self.head.weight):
            nn.init.normal_(each, 0, 0.12)

    def forward(self, ids):
        x = self.table(ids)
        mean = x.cumsum(1) / torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]
        return self.head(torch.tanh(x + self.out(torch.tanh(self.mix(mean)))))


def loss_of(network, ids):
    return functional.cross_entropy(network(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def adamw(module):
    return torch.optim.AdamW(module.parameters(), lr=0.01)


def muon(module):
    hidden = [module.mix.weight, module.out.weight]
    rest = [module.table.weight, module.head.weight]
    return [torch.optim.Muon(hidden, lr=0.02), torch.optim.AdamW(rest, lr=0.01)]


def trained_by_torch(optimizer, sequences, networks, seed):
    """Return the losses of two steps, and the sizes of updates and gradients, of plain torch networks."""
    rows = []
    for k in range(networks):
        torch.manual_seed(seed + k)
        network = Sequence()
        start = {name: each.detach().clone() for name, each in network.named_parameters()}
        ids = torch.randint(0, 20, (sequences, 64))
        made = optimizer(network)
        made = made if isinstance(made, list) else [made]
        groups = [group for each in made for group in each.param_groups]
        kept = {
            id(each): (1 - group["lr"] * group["weight_decay"]) ** 2 for group in groups for each in group["params"]
        }
        row = {}
        for step in range(2):
            network.zero_grad()
            loss = loss_of(network, ids)
            loss.backward()
            row[f"loss {step}"] = loss.item()
            for name, each in network.named_parameters() if step == 0 else ():
                row[f"gradient of {name}"] = each.grad.norm().item()
            for each in made:
                each.step()
        row["loss 2"] = loss_of(network, ids).item()
        for name, each in network.named_parameters():
            row[f"update of {name}"] = (each - kept[id(each)] * start[name]).norm().item()
        rows.append(row)
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}


@pytest.mark.parametrize("optimizer", [adamw, muon], ids=["adamw", "muon"])
def test_updates_at_four_sequences_of_64_tokens_have_the_law_of_torch(optimizer):
    """The twin is trained on one of the four sequences."""
    data = simulate(
        Sequence, 64, sequences=4, loss=next_token, optimizer=optimizer, steps=2, samples=150, draw="never"
    ).isel(rate=0)
    ours = {f"loss {step}": data.loss[:, step].values for step in range(3)}
    for name in data.weight.values:
        one = data.sel(weight=name)
        ours[f"gradient of {name}"] = one.weight_gradient[:, 0].values
        ours[f"update of {name}"] = (one.weight_change * one.weight_size)[:, 2].values
    torchs, wrong = (trained_by_torch(optimizer, each, 600, seed) for each, seed in ((4, 0), (1, 10_000)))
    assert ours.keys() == torchs.keys()
    assert_same_law(ours, torchs, wrong)


class Fixed(nn.Module):
    """A network whose weights are given, on sequences of three of four ids: 64 different ones."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(4, 6), nn.Linear(6, 4)
        for k, each in enumerate(self.parameters()):
            each.data = torch.sin(1.7 * torch.arange(each.numel()) ** 1.5 + k).reshape(each.shape)
        self.register_buffer("unused", torch.randn(1))  # networks that are the same each time are refused

    def forward(self, ids):
        x = self.table(ids)
        return self.head(torch.tanh(x + x.cumsum(1)))


@pytest.fixture(scope="module")
def exact():
    """Return the gradients (64, weights) of all sequences, by weight, from plain torch."""
    network, rows = Fixed(), {}
    for ids in itertools.product(range(4), repeat=3):
        network.zero_grad()
        loss_of(network, torch.tensor([ids])).backward()
        for name, each in network.named_parameters():
            rows.setdefault(name, []).append(each.grad.flatten().double().numpy())
    return {name: np.array(each) for name, each in rows.items()}


def signal_and_trace(gradients):
    return float((gradients.mean(0) ** 2).sum()), float(gradients.var(0).sum())


def far(samples, expected):
    """Return how many standard errors the mean of samples is from a number."""
    return abs(np.mean(samples) - expected) / (np.std(samples) / len(samples) ** 0.5)


def test_noise_of_2000_drawn_batches_is_that_of_all_sequences(exact):
    """Twins: |ḡ|² for |G|², and a number of pieces that counts one too many."""
    rng, shares = np.random.default_rng(0), np.array([1, 2, 1, 3]) / 7
    for name, gradients in exact.items():
        signal, trace = signal_and_trace(gradients)
        found, naive = [], []
        for _ in range(2000):
            batch = gradients[rng.integers(64, size=7)]
            pieces = [share * each.mean(0) for share, each in zip(shares, np.split(batch, [1, 3, 4]), strict=True)]
            alone = [(share, {name: each @ each}) for share, each in zip(shares, pieces, strict=True)]
            square = float((batch.mean(0) ** 2).sum())
            found.append(noise_of({name: square}, alone, 7)[name])
            naive.append(square)
        signals, traces = np.array(found).T
        assert far(signals, signal) < STANDARD_ERRORS
        assert far(traces, trace) < STANDARD_ERRORS
        assert far(naive, signal) > STANDARD_ERRORS
        assert far(3 / 4 * traces, trace) > STANDARD_ERRORS


def test_steps_measure_the_noise_of_every_weight(exact):
    """Each of the 200 networks, which are one network, has its own batch of 12 random sequences."""
    data = simulate(Fixed, 3, sequences=12, loss=next_token, steps=2, samples=200, batches="fresh").isel(rate=0)
    for name, gradients in exact.items():
        signal, trace = signal_and_trace(gradients)
        one = data.sel(weight=name).isel(step=0)
        assert far(one.weight_signal.values, signal) < STANDARD_ERRORS
        assert far(one.weight_noise.values, trace) < STANDARD_ERRORS
        assert far(one.weight_gradient.values**2, signal) > STANDARD_ERRORS
    rows = noise_rows(data, lambda name: name.partition(".")[0])
    assert [(row["weights"], row["step"]) for row in rows[:4]] == [(ALL, 1), (ALL, 2), ("table", 1), ("table", 2)]
    signal, trace = (sum(pair) for pair in zip(*map(signal_and_trace, exact.values()), strict=True))
    assert rows[0]["low"] < trace / signal < rows[0]["high"]
    assert rows[0]["high"] / rows[0]["low"] < 1.5


def test_interval_of_the_noise_scale_covers_it():
    """Fieller's interval; the twin is that of the mean of the networks' ratios."""
    rng, networks, covered, twin = np.random.default_rng(0), 8, 0, 0
    for _ in range(2000):
        signal = 1.0 + 1.5 * rng.normal(size=networks)
        trace = 20.0 + 2.0 * rng.normal(size=networks) + 3.0 * (signal - 1.0)
        each = noise_scale(trace, signal)
        covered += each.low <= 20.0 <= each.high
        half = stats.t.ppf(0.975, networks - 1) * stats.sem(trace / signal)
        twin += abs(np.mean(trace / signal) - 20.0) <= half
    assert abs(covered / 2000 - 0.95) < 0.02
    assert twin / 2000 < 0.90
    assert noise_scale(np.array([1.0]), np.array([1.0]))[1:] == (0.0, np.inf)
    without = noise_scale(np.array([5.0, 6.0, 5.5]), np.array([0.1, -0.2, 0.05]))
    assert without.scale == without.high == np.inf
    assert without.low > 1


def test_report_has_the_noise_on_its_page_and_in_its_record(tmp_path):
    report = lf.steps(
        Fixed, 3, sequences=12, loss=next_token, optimizer="sgd", samples=3, seed=0, progress=False, witness=False
    )
    assert "36 tokens" in report.heading
    row = report.record()["noise"][0]
    assert row["weights"] == ALL
    assert "Simple noise scale of SGD at step 1" in " ".join(str(report).split())
    report.save(tmp_path)
    page = (tmp_path / "steps.html").read_text(encoding="utf-8")
    assert "Noise of gradients" in page
    assert "noise scale" in page


def test_rate_takes_a_batch_whose_ids_are_more_than_the_vocabulary():
    report = lf.rate(Sequence, 30, sequences=5, loss=next_token, optimizer="sgd", seed=0, networks=2, progress=False)
    assert "(5, 30)" in report.heading
    assert report.witness.status == "witnessed"


def test_batches_that_cannot_be_made_give_one_clear_error():
    for options, message in (
        ({"sequences": 0}, "sequences must be at least 1"),
        ({"sequences": 2.5}, "sequences must be a whole number"),
        ({"sequences": 3, "inputs": [[1, 2, 3], [2, 3, 1]]}, "the inputs must have 3 sequences; got 2"),
        ({"sequences": 2, "inputs": 99}, "the network reads at most 16 tokens"),
        ({"sequences": 2, "inputs": 0}, "inputs must be at least 1"),
    ):
        with pytest.raises(InputError, match=message):
            simulate(CONFIGS["gpt2"](), **{"inputs": 8} | options)
    transformer = lf.Transformer(width=16, depth=2, gamma=0.5, attention=lf.ShapedAttention(tau0=1.0))
    with pytest.raises(InputError, match="sequences needs a network that reads ids"):
        simulate(transformer, 4, sequences=2)


class Given(nn.Module):
    """A module whose entries are given, which returns its own loss: the mean over all tokens with a label."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(30, 8), nn.Linear(8, 30, bias=False)
        for each in self.parameters():
            each.data = torch.arange(each.numel(), dtype=each.dtype).cos().view(each.shape)

    def forward(self, input_ids, labels=None):
        logits = self.head(torch.tanh(self.table(input_ids)))
        return logits if labels is None else (functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits)


@pytest.mark.parametrize("sequences", [None, 11])
@pytest.mark.parametrize("own", [True, False], ids=["own loss", "sum of all"])
def test_loss_that_is_not_a_mean_of_sequences_has_the_whole_batch_in_one_pass(own, sequences):
    """Half of the sequences have two labels: their mean is another number, as is the mean of sums of pieces."""
    ids = torch.randint(1, 30, (11, 64), generator=torch.Generator().manual_seed(2))
    labels = ids.roll(1, 1).clone()
    labels[:6, 2:] = -100

    def total(out, inputs):
        return (out[1] if isinstance(out, tuple) else out).square().sum()

    inputs = {"input_ids": ids, "labels": labels} if own else {"input_ids": ids}
    data = simulate(
        Given, inputs, sequences=sequences, loss=None if own else total, steps=1, samples=1, dtype=torch.float64
    )
    module = Given().double()
    value = module(ids, labels)[0] if own else total(module(ids), None)
    value.backward()
    norm = sum(each.grad.square().sum().item() for each in module.parameters()) ** 0.5
    assert data.loss.values[0, 0, 0] == pytest.approx(value.item())
    assert data.gradient_norm.values[0, 0, 0] == pytest.approx(norm)
    parts = [slice(0, 6), slice(6, 11)]  # the twin
    twin = sum(len(ids[k]) / 11 * (module(ids[k], labels[k])[0] if own else total(module(ids[k]), None)) for k in parts)
    assert abs(twin.item() / value.item() - 1) > 0.01


@pytest.mark.parametrize("tokens", [64, 300])
def test_batches_are_divided_however_long_their_sequences_are(tokens):
    """Two sequences of 300 tokens are more than one piece; the loss is one number for each all the same."""
    config = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 30, "n_positions": 300}
    training = training_of(config, tokens, optimizer="sgd", rates=None, steps=1, seed=0, sequences=12)
    assert not training.batches.whole
    one = training.trajectory(training.rules[0], 0)
    pieces = one.pieces(training.batches.of_steps[0], one.least)
    assert max(each.rows for each in pieces) * tokens <= max(tokens, PIECE_TOKENS)
