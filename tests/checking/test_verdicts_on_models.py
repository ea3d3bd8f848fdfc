"""Verdicts on whole models: known faults, and sound models that must have no verdict."""

import json
import math

import numpy as np
import pytest
import torch
import transformers
from torch import nn

import limitformer as lf
from limitformer.checking.thresholds import THRESHOLDS

WIDTH, WORDS = 16, 50
IDS = torch.arange(20).reshape(2, 10)
T5_V1_1 = {
    "model_type": "t5", "d_model": 256, "d_kv": 32, "d_ff": 256, "num_layers": 2, "num_decoder_layers": 2,
    "num_heads": 8, "vocab_size": 1000, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False,
}  # fmt: skip
SMALL = {"vocab_size": 60, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 24, "bos_token_id": 1}
SMALL |= {"eos_token_id": 2}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, block=Block):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Router(nn.Module):
    """A router with one expert for each token, whose weight is normalised by itself: w/w = 1."""

    def __init__(self, normalised=True):
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.normalised = normalised

    def forward(self, x):
        y = self.norm(x)
        weight, place = self.gate(y).softmax(-1).max(-1, keepdim=True)
        weight = weight / (weight.sum(-1, keepdim=True) + 1e-20) if self.normalised else weight
        every = torch.stack([expert(y) for expert in self.experts], -1)
        return x + weight * every.gather(-1, place[..., None, :].expand(*y.shape, 1))[..., 0]


def zero(*names):
    """Return a factory of models in which these weights start at zero."""

    def make():
        model = Model()
        for name in names:
            nn.init.zeros_(model.get_parameter(name))
        return model

    return make


def verdicts_on(what, inputs=IDS, **options):
    report = lf.check(what, inputs, samples=3, progress=False, **options)
    return {one.name: one for one in report.verdicts}


def test_t5_with_a_large_head_has_a_loss_past_broken():
    report = lf.check(T5_V1_1, tokens=16, samples=4, progress=False)
    (loss,) = [one for one in report.verdicts if one.name == "loss"]
    assert (loss.grade, loss.severe) == ("watch", True)  # one measure alone
    drawn = float(report.curves["loss"].median())
    assert loss.value == pytest.approx(drawn - np.log(1000))
    assert f"loss {drawn:.4g} is" in str(loss)
    assert "above that of a uniform guess, 6.908" in str(loss)
    sound = lf.check(T5_V1_1, tokens=16, samples=4, progress=False, overrides={"shared.weight": 256**-0.5})
    assert "loss" not in {one.name for one in sound.verdicts}


@pytest.mark.parametrize("existing", [True, False])
def test_constant_router_is_dead(existing):
    def model(normalised=True):
        return Model(lambda: Router(normalised))

    torch.manual_seed(0)
    verdicts = verdicts_on(model() if existing else model)
    assert verdicts["dead"].grade == "broken"
    assert "1 of " in str(verdicts["dead"])
    assert "blocks.*.gate.weight" in str(verdicts["dead"])
    assert "dead" not in verdicts_on(model(False) if existing else lambda: model(False))


@pytest.mark.parametrize("name", ["head.weight", "norm.weight"])
def test_weights_behind_a_zero_factor_are_watch(name):
    """A zero head, as in DiT, or a last gain of zero explodes nothing; the verdict names the factor."""
    verdicts = verdicts_on(zero(name))
    assert set(verdicts) & {"exploding", "vanishing", "not finite"} == set()
    assert verdicts["waits for zeros"].grade == "watch"
    assert f"have no gradient until {name}, zero at first, has moved" in str(verdicts["waits for zeros"])


def test_weights_behind_two_zero_factors_are_broken():
    """The second factor of 0·0 has no gradient either, so that neither ever moves."""

    class TwoFactors(Block):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(torch.zeros(WIDTH, WIDTH)), nn.Parameter(torch.zeros(WIDTH, WIDTH))

        def forward(self, x):
            return x + self.down(torch.relu(self.up(self.norm(x)))) @ self.a @ self.b

    dead = verdicts_on(lambda: Model(TwoFactors))["dead"]
    assert dead.grade == "broken"
    assert "blocks.*.a" in str(dead)
    assert "blocks.*.b" in str(dead)
    assert "held back by blocks.*.a, blocks.*.b, which is zero" in str(dead)


@pytest.mark.parametrize("existing", [True, False])
def test_unrelated_zero_does_not_excuse_a_dead_weight(existing):
    """One gate starts at zero and moves; another matrix is in a branch times 0."""

    class CutOff(Block):
        def __init__(self):
            super().__init__()
            self.gate, self.lost = nn.Parameter(torch.zeros(WIDTH)), nn.Linear(WIDTH, WIDTH, bias=False)

        def forward(self, x):
            return x + self.down(torch.relu(self.up(self.norm(x)))) * self.gate + 0.0 * self.lost(x)

    torch.manual_seed(0)
    report = lf.check((lambda: Model(CutOff))() if existing else lambda: Model(CutOff), IDS, samples=2, progress=False)
    dead = {one.grade: str(one) for one in report.verdicts if one.name in ("dead", "waits for zeros")}
    assert "blocks.*.lost.weight" in dead["broken"]
    assert "up.weight" not in dead["broken"]
    assert "until blocks.*.gate, zero at first, has moved" in dead["watch"]
    assert "lost" not in dead["watch"]


@pytest.mark.parametrize("existing", [True, False])
def test_detached_embedding_is_dead(existing):
    class Cut(Model):
        def forward(self, ids):
            x = self.embed(ids).detach()
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x))

    torch.manual_seed(0)
    dead = verdicts_on(Cut() if existing else Cut)["dead"]
    assert (dead.grade, dead.value) == ("broken", 1)
    assert "embed.weight" in str(dead)


def test_unused_weights_are_not_dead():
    """The loss does not reach a pooler, and ViT has a token for another task."""
    config = transformers.BertConfig(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48, vocab_size=60,
        architectures=["BertModel"],
    )  # fmt: skip
    report = lf.check(config, tokens=6, samples=3, progress=False)
    assert np.isnan(report.curves["outside_gradient"].sel(outside="pooler.dense.weight")).all()
    assert "dead" not in {one.name for one in report.verdicts}
    vit = transformers.ViTConfig(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48, image_size=16, patch_size=8,
    )  # fmt: skip
    assert "dead" not in {one.name for one in lf.check(vit, samples=3, progress=False).verdicts}


def trained_gpt2(steps, seed=0):
    torch.manual_seed(seed)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**SMALL))
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        ids = torch.randint(3, 60, (4, 12)).sort().values
        optimiser.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimiser.step()
    return model


def test_trained_network_has_changes_and_no_grade(tmp_path):
    model = trained_gpt2(60)
    report = lf.check(model, tokens=12, samples=4, progress=False)
    assert (report.trained, report.grade, report.failed("any")) == (True, None, [])
    text = str(report)
    assert "· trained: " in text
    assert "✗" not in text
    changes = {each.name: each for each in report.changes()}
    loss = changes["loss"]
    low, high = (float(edge) for edge in loss.new.split(" to "))
    assert low < np.log(60) < high
    assert not low < float(loss.now) < high
    record = report.record()
    assert (record["grade"], record["trained"]) == (None, True)
    assert len(record["changes"]) == len(changes) > 4
    assert "differs from initialisation" in report._repr_html_()
    report.save(tmp_path)
    record = json.loads((tmp_path / "check.json").read_text(encoding="utf-8"), parse_constant=pytest.fail)
    assert record["trained"] is True


def test_untrained_networks_have_a_grade():
    assert not lf.check(trained_gpt2(0), tokens=12, samples=3, progress=False).trained
    other = trained_gpt2(0)
    with torch.no_grad():
        for k, each in enumerate(each for each in other.parameters() if each.dim() == 2):
            each.exponential_(1.0).mul_((torch.rand_like(each) - 0.5).sign() * 0.01 * 1.3**k)
    report = lf.check(other, tokens=12, samples=3, progress=False)
    assert report.initialisation.trained
    assert not report.trained
    assert report.grade in ("watch", "broken")


def test_watch_in_check_is_unsafe_in_design():
    """Qwen 3 at 24 tokens has a correlation between the two thresholds."""
    report = lf.check("qwen3-0.6b", tokens=24, samples=2, gradients=False, progress=False)
    rho = float(report.curves["correlation"].isel(layer=-1).median())
    assert THRESHOLDS["collapse"].watch < rho < THRESHOLDS["collapse"].broken
    assert {one.name: one.grade for one in report.verdicts}["collapsed"] == "watch"
    assert lf.designing.Objective().missed({"correlation": (np.array([rho]),) * 2, **SAFE_VALUES})["correlation"].all()


SAFE_VALUES = {
    name: (np.array([value]),) * 2 for name, value in {"stream": 1.0, "effective": 0.9, "gradient": 2.0}.items()
}


class OwnLoss(nn.Module):
    """A language model that computes its loss itself, with a head tied to an embedding of standard deviation `std`."""

    def __init__(self, std, mean=True):
        super().__init__()
        self.embedding = nn.Embedding(400, 256)
        nn.init.normal_(self.embedding.weight, std=std)
        self.h = nn.ModuleList(nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 256)) for _ in range(2))
        self.norm, self.mean = nn.LayerNorm(256), mean

    def forward(self, ids, targets=None):
        x = self.embedding(ids)
        for block in self.h:
            x = x + block(x)
        logits = self.norm(x) @ self.embedding.weight.T
        if targets is None:
            return logits, None
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss if self.mean else 3 * loss + 1


def test_own_cross_entropy_is_compared_with_a_uniform_guess():
    """An embedding of standard deviation 1 that the head is tied to; a loss of another form has no such guess."""
    ids = torch.arange(12)[None]
    loud, quiet, other = (
        lf.check(lambda std=std, mean=mean: OwnLoss(std, mean), ids, samples=2, progress=False)
        for std, mean in ((1.0, True), (0.02, True), (1.0, False))
    )
    assert loud.about["chance"] == quiet.about["chance"] == pytest.approx(math.log(400))
    assert [one.severe for one in loud.verdicts if one.name == "loss"] == [True]
    assert "loss" not in [one.name for one in quiet.verdicts]
    assert float(quiet.curves["loss"].median()) == pytest.approx(math.log(400), abs=0.3)
    assert "chance" not in other.about


@pytest.mark.parametrize("place", ["post", "pre"])
def test_stream_that_a_norm_sets_does_not_grow(place):
    """After each norm the size is 1 whatever the embedding's is; before the branches a small embedding is swamped."""

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = torch.nn.Linear(32, 32), torch.nn.Linear(32, 32)

        def forward(self, x):
            if place == "post":
                return torch.nn.functional.layer_norm(x + self.down(torch.relu(self.up(x))), (32,))
            return x + self.down(torch.relu(self.up(torch.nn.functional.layer_norm(x, (32,)))))

    def build():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Embedding(60, 32), *[Block() for _ in range(6)])
        torch.nn.init.normal_(model[0].weight, std=0.01)
        return model

    report = lf.check(build(), IDS, law=False, progress=False)
    sizes = report.curves["size"].values[0]
    assert sizes[-1] / sizes[0] > 30
    assert ("grows" in {one.name for one in report.verdicts}) is (place == "pre")
