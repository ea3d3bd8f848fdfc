"""A model before and after a change: paired differences against plain torch, and unpaired ones, which must differ."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn
from typer.testing import CliRunner

import limitformer as lf
from limitformer.checking import PairedComparison
from limitformer.checking.paired import difference
from limitformer.cli.app import app

WIDTH, DEPTH, TOKENS, SAMPLES = 32, 6, 5, 24
STREAM, TOKENS_ALIKE = "stream, end / embedding", "correlation of tokens at the end"
OPTIONS = {"tokens": TOKENS, "samples": SAMPLES, "progress": False, "gradients": False}
MODEL = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, width, skip, scale):
        super().__init__()
        self.skip, self.inner, self.outer = skip, nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        nn.init.normal_(self.inner.weight, std=(2 / width) ** 0.5)
        nn.init.normal_(self.outer.weight, std=scale * (2 * width) ** -0.5)
        nn.init.zeros_(self.inner.bias), nn.init.zeros_(self.outer.bias)

    def forward(self, x):
        return self.skip * x + self.outer(torch.relu(self.inner(x)))

class Network(nn.Module):
    def __init__(self, width=32, depth=6, skip=1.0, scale=1.0, uniform=False):
        super().__init__()
        self.embed = nn.Embedding(30, width)
        if uniform:
            nn.init.uniform_(self.embed.weight, -1, 1)
        self.blocks = nn.ModuleList(Block(width, skip, scale) for _ in range(depth))

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return x
"""
namespace = {}
exec(MODEL, namespace)
Network = namespace["Network"]


def paired(base, head, **options):
    return PairedComparison(lf.compare({"base": base, "head": head}, **OPTIONS | options).reports)


def by_name(comparison):
    return {each.measure: each for each in comparison.differences()}


def in_plain_torch(networks, **settings):
    """Return the two measures of networks that torch draws, seed by seed."""
    result = []
    for seed in range(networks):
        torch.manual_seed(seed)
        network = Network(**settings)
        with torch.no_grad():
            first = x = network.embed(torch.arange(TOKENS))
            for block in network.blocks:
                x = block(x)
        unit = nn.functional.normalize(x, dim=-1)
        pairs = (unit @ unit.T)[~torch.eye(TOKENS, dtype=torch.bool)]
        result.append([(x.square().mean() / first.square().mean()).sqrt(), pairs.mean()])
    return np.array(result)


def test_same_network_has_no_difference():
    result = paired(Network, Network)
    assert len(result.differences()) >= 4
    for each in result.differences():
        assert (each.mean, each.half, each.moved, each.worse) == (0, 0, False, False)
        assert each.base == each.head
        assert each.unpaired > 0 or each.measure == "largest branch / stream"
    assert result.worse() == []
    assert result.answer.startswith("no verdict changes")
    assert "share the numbers of 25 of 25 weights" in result.pairing


def test_doubled_matrices_double_the_stream_of_the_same_networks():
    """Without skip connections the ratio of head to base is 2⁶ in every network: exactly, as rounding scales along."""
    base, head = partial(Network, skip=0.0), partial(Network, skip=0.0, scale=2.0)
    row = by_name(paired(base, head))[STREAM]
    each = lf.check(base, **OPTIONS).curves["size"].values
    ratio = each[:, -1] / each[:, 0]
    assert row.mean == pytest.approx(63 * ratio.mean(), rel=1e-6)
    assert row.half == pytest.approx(63 * stats.t.ppf(0.975, SAMPLES - 1) * stats.sem(ratio), rel=1e-6)
    other = lf.check(head, **OPTIONS | {"seed": 1}).curves["size"].values  # other networks: not a multiple
    assert (other[:, -1] / other[:, 0] - ratio).mean() != pytest.approx(row.mean, rel=1e-3)


def test_depth_scaled_branches_agree_with_plain_torch():
    scale = (2 * DEPTH) ** -0.5
    rows = by_name(paired(Network, partial(Network, scale=scale)))
    plain = in_plain_torch(400, scale=scale) - in_plain_torch(400)
    for name, each in zip((STREAM, TOKENS_ALIKE), plain.T, strict=True):
        row, error = rows[name], stats.sem(each)
        assert row.mean < 0
        assert row.moved
        reach = np.hypot(error, row.half / stats.t.ppf(0.975, SAMPLES - 1))
        assert abs(row.mean - each.mean()) < 4 * reach
        assert abs(-row.mean - each.mean()) > 20 * reach  # base minus head


def test_pairs_detect_a_change_that_unpaired_networks_hide():
    small = partial(Network, scale=1.01)
    together = paired(Network, small)
    apart = PairedComparison({
        "base": lf.check(Network, **OPTIONS), "head": lf.check(small, **OPTIONS | {"seed": 1})
    })  # fmt: skip
    narrow, wide = by_name(together)[STREAM], by_name(apart)[STREAM]
    assert narrow.moved
    assert narrow.mean > 0
    assert not wide.moved
    assert wide.half > 5 * narrow.half
    assert narrow.unpaired > 5 * narrow.half
    assert wide.unpaired == pytest.approx(wide.half, rel=0.5)
    assert "times narrower" in together.pairing
    assert "gains nothing" in apart.pairing
    plain = in_plain_torch(100), in_plain_torch(100, scale=1.01)
    assert stats.sem(plain[1] - plain[0])[0] * 5 < stats.sem(plain[0])[0] * 2**0.5


def test_intervals_are_those_of_scipy():
    x, y = np.random.default_rng(0).normal([[0.0], [1.0]], size=(2, 9))
    result = difference("", x, y, [])
    pair, apart = stats.ttest_rel(y, x).confidence_interval(), stats.ttest_ind(y, x).confidence_interval()
    assert (result.mean - result.half, result.mean + result.half) == pytest.approx((pair.low, pair.high))
    assert (result.mean - result.unpaired, result.mean + result.unpaired) == pytest.approx((apart.low, apart.high))
    with np.errstate(all="raise"):
        assert not difference("", np.full(3, np.inf), np.full(3, np.inf), [False]).worse


def test_rounding_does_not_count_as_a_change():
    x = np.linspace(1.0, 2.0, 5)
    assert not difference("", x, x * (1 + 2e-5), [False]).moved
    assert difference("", x, x * (1 + 1e-3), [False]).worse


@pytest.mark.parametrize(
    ("base", "head", "worse"),
    [(0.85, 0.8, True), (0.8, 0.85, False), (1.8, 1.9, True), (1.9, 1.8, False), (1.4, 1.6, False)],
)
def test_worse_is_further_beyond_a_threshold(base, head, worse):
    """A stream that dies becomes worse as it falls, and one that grows as it rises; below 30 it is not judged."""
    result = paired(partial(Network, skip=base, scale=1e-3), partial(Network, skip=head, scale=1e-3), samples=3)
    row = by_name(result)[STREAM]
    assert row.mean == pytest.approx(head**DEPTH - base**DEPTH, rel=1e-2)
    assert row.moved
    assert row.worse == worse
    assert any(STREAM in each for each in result.worse()) == worse
    assert result.answer.startswith("worse" if worse else "no verdict changes")


def test_new_verdict_is_worse_and_one_less_is_better():
    steady, dying = partial(Network, scale=1e-3), partial(Network, skip=0.8, scale=1e-3)
    assert "dies: fine → watch" in paired(steady, dying, samples=2).worse()
    assert paired(dying, steady, samples=2).answer.startswith("better: dies: watch → fine")


def test_other_shapes_and_laws_share_no_numbers():
    result = paired(Network, partial(Network, width=48))
    assert (
        "share the numbers of 0 of 25 weights; pairing gains nothing, because names, shapes or laws differ"
        in result.pairing
    )
    for each in result.differences():
        assert each.half > each.unpaired / 2
    uniform = paired(Network, partial(Network, uniform=True), samples=2)
    assert "share the numbers of 24 of 25 weights" in uniform.pairing


def test_shaped_attention_is_uniform_on_purpose():
    net = lf.Transformer(width=32, depth=4, gamma=0.3, attention=lf.ShapedAttention(tau0=1.0))
    steeper = lf.Transformer(width=32, depth=4, gamma=0.3, attention=lf.ShapedAttention(tau0=2.0))
    rows = by_name(paired(net, steeper, samples=4))
    assert not any(each.worse for each in rows.values())


def test_encoder_and_decoder_have_their_own_rows():
    t5 = {"model_type": "t5", "d_model": 32, "num_layers": 2, "d_kv": 8, "num_heads": 4, "d_ff": 64, "vocab_size": 99}
    result = paired(t5, t5 | {"d_ff": 128}, samples=2)
    assert {TOKENS_ALIKE, f"encoder.block {TOKENS_ALIKE}"} <= set(by_name(result))
    assert len(str(result).splitlines()) <= 24
    assert max(map(len, str(result).splitlines())) <= 100


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PairedComparison(lf.compare([Network], **OPTIONS | {"samples": 2}).reports), "two networks; got 1"),
        (lambda: paired(Network, Network, samples=1), "samples must be at least 2"),
        (lambda: paired(Network, Network()), "head has its weights"),
    ],
)
def test_anything_but_a_pair_of_laws_is_refused(make, message):
    with pytest.raises(lf.InputError, match=message):
        make()


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Write the model before and after a change, each next to a module of the same name."""
    monkeypatch.chdir(tmp_path)
    for name, scale in (("before", 0.2), ("after", 1.5)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "layers.py").write_text(MODEL + f"SCALE = {scale}\n", encoding="utf-8")
        code = "from layers import SCALE, Network\ndef build():\n    return Network(scale=SCALE)\n"
        (tmp_path / name / "model.py").write_text(code, encoding="utf-8")
    return "before/model.py:build", "after/model.py:build"


def test_command_fails_on_a_worse_model(files):
    run, small = CliRunner(), ["--tokens", "5", "--samples", "4", "--fail-on", "worse"]
    worse = run.invoke(app, ["compare", *files, *small, "--out", "report"])
    assert worse.exit_code == 1, worse.output
    assert worse.output.startswith("✗ worse: collapsed: fine → watch")
    assert len(worse.output.splitlines()) <= 24
    assert f"Next: limitformer check {files[1]} --tokens 5 --against {files[0]}" in worse.output
    page = Path("report/paired.html").read_text(encoding="utf-8")
    assert page.index("Is the change better?") < page.index("Table of networks")
    better = run.invoke(app, ["compare", *reversed(files), *small, "--json"])
    assert better.exit_code == 0, better.output
    record, written = json.loads(better.output), json.loads(Path("report/paired.json").read_bytes())
    assert record["answer"].startswith("better: collapsed: watch → fine")
    there, back = ({each["measure"]: each["mean"] for each in one["differences"]} for one in (written, record))
    assert there == {name: -value for name, value in back.items()}
    assert any(each.startswith(TOKENS_ALIKE) for each in written["worse"])  # between its two thresholds
    assert list(record["reports"]) == [f"base: {files[1]}", f"head: {files[0]}"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["after/model.py:buil"], "has no 'buil'"),
        (["gpt2-xxl"], "no public shape, file or folder 'gpt2-xxl'"),
        (["after/model.py:build", "--samples", "1"], "--samples must be"),
        (["after/model.py:build", "--fail-on", "wors"], "--fail-on has no 'wors'"),
        (["after/model.py:build", "--threshold", "colapse=0.9"], "thresholds has no 'colapse'"),
    ],
)
def test_command_refuses_in_one_line(files, arguments, message):
    result = CliRunner().invoke(app, ["compare", files[0], "--tokens", "5", *arguments])
    assert result.exit_code == 2, result.output
    assert message in result.output
    assert result.output.count("\n") == 1
