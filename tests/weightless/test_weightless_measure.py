"""The measures of passes, against tensors that the module's own code records."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import limitformer as lf
from weightless_families import Step

WIDTH, HEADS, TOKENS, LAYERS, SAMPLES = 24, 3, 7, 3, 4
SEEN = []
KEYS = (
    "branch",
    "covariance_inside",
    "entropy",
    "effective_tokens",
    "logit_std",
    "largest_logit",
    "step",
    "largest",
    "typical",
)


class Block(nn.Module):
    """Causal attention and a hidden layer, which records all its tensors."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 40, bias=False), nn.Linear(40, WIDTH, bias=False)
        nn.init.normal_(self.qkv.weight, std=0.5)

    def forward(self, x):
        b, m, n = x.shape
        q, k, v = (
            t.view(b, m, HEADS, -1).transpose(1, 2) for t in self.qkv(functional.layer_norm(x, (n,))).chunk(3, -1)
        )
        hidden = torch.ones(m, m, dtype=torch.bool).triu(1)
        logits = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(hidden, -torch.inf)
        weights = logits.softmax(-1)
        mixed = self.out((weights @ v).transpose(1, 2).reshape(b, m, n))
        between = x + mixed
        added = self.down(torch.relu(self.up(between)))
        seen = {"start": x, "logits": logits, "weights": weights, "mixed": mixed, "between": between, "added": added}
        SEEN.append({key: value.detach().double() for key, value in seen.items()})
        return between + added


class Decoder(nn.Module):
    """Embeddings, blocks, a head."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.head = nn.Linear(WIDTH, 11)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        SEEN.append({"output": logits.detach().double()})
        return SimpleNamespace(logits=logits)


@pytest.fixture(scope="module")
def passes():
    """Return the dataset of two sequences, and the tensors that the blocks of the same pass recorded."""
    options = {"samples": SAMPLES, "seed": 3, "dtype": torch.float64, "progress": False}
    ids = [[1, 2, 3, 1, 4, 5, 6], [7, 7, 8, 9, 1, 2, 3]]
    SEEN.clear()
    data = lf.weightless.simulate(Decoder, ids, **options)
    calls = [SEEN[k : k + LAYERS + 1] for k in range(0, len(SEEN), LAYERS + 1)]
    passes = calls[-SAMPLES:]  # those of the samples follow the trials
    return data, [
        {key: torch.cat([each[key] for each in parts]) for key in parts[0]} for parts in zip(*passes, strict=True)
    ]


def by_sample(x):
    """Reshape (S·B, …) to (S, B, …) in NumPy."""
    return x.reshape(SAMPLES, 2, *x.shape[1:]).numpy()


def rows_with_a_choice(values):
    """Average over rows that see two tokens or more, and over sequences: (S, B, heads, M) to (S, heads)."""
    return values[..., 1:].mean((1, 3))


def expected(whole):
    """Compute every measure from the recorded tensors."""
    out = {key: [] for key in KEYS}
    for seen in whole[:LAYERS]:
        at = {key: by_sample(value) for key, value in seen.items()}
        sizes = [np.sqrt((at[key] ** 2).mean((1, 2, 3))) for key in ("mixed", "added")]
        after = [at["between"], at["between"] + at["added"]]
        tokens = [x.reshape(SAMPLES, 2 * TOKENS, WIDTH) for x in after]
        entropy = -np.where(at["weights"] > 0, at["weights"] * np.log(np.maximum(at["weights"], 1e-300)), 0).sum(-1)
        spread = np.stack([at["logits"][:, :, :, i, : i + 1].var(-1) for i in range(TOKENS)], -1)
        out["branch"].append(np.stack(sizes, -1))
        out["covariance_inside"].append(np.stack([x @ x.swapaxes(1, 2) / WIDTH for x in tokens], 1))
        out["entropy"].append(rows_with_a_choice(entropy))
        out["effective_tokens"].append(rows_with_a_choice(np.exp(entropy)))
        out["logit_std"].append(np.sqrt(rows_with_a_choice(spread)))
        out["largest_logit"].append(at["logits"].max((1, 3, 4)))
        start, end = (x.reshape(SAMPLES, -1) for x in (at["start"], after[-1]))
        out["step"].append(np.linalg.norm(end - start, axis=1) / np.linalg.norm(start, axis=1))
        out["largest"].append(np.abs(start).max(1))
        out["typical"].append(torch.tensor(start).abs().median(1).values)
    return {key: np.stack(values, 1) for key, values in out.items()}


def test_measures_equal_those_of_recorded_tensors(passes):
    data, whole = passes
    recorded = expected(whole)
    for key, values in recorded.items():
        seen = (
            data[key].isel(layer=slice(0, LAYERS)) if "layer" in data[key].dims and key != "covariance" else data[key]
        )
        np.testing.assert_allclose(seen, values, rtol=1e-6, err_msg=key)
    assert not np.allclose(data["entropy"], recorded["entropy"][::-1], rtol=1e-3)  # samples in their order
    assert not np.allclose(data["branch"], recorded["branch"][..., ::-1], rtol=1e-3)
    output = by_sample(whole[-1]["output"]).reshape(SAMPLES, -1)
    assert not np.allclose(data["step"], recorded["step"] * (1 - 1 / WIDTH), rtol=1e-3)
    np.testing.assert_allclose(data.logits_mean, output.mean(1), rtol=1e-6)
    np.testing.assert_allclose(data.logits_std, output.std(1, ddof=1), rtol=1e-6)


class Readout(nn.Module):
    """Two steps, and a last operation `read`, with a matrix or the embedding."""

    def __init__(self, write, read):
        super().__init__()
        self.embed, self.matrix = nn.Embedding(30, 8), nn.Parameter(torch.empty(8, 8))
        self.steps = nn.ModuleList([Step(), Step()])
        self.heads = nn.ModuleList([nn.Linear(8, 3)])
        self.read = read
        with torch.no_grad():
            write(self.matrix)

    def forward(self, ids):
        x = self.embed(ids)
        for step in self.steps:
            x = step(x)
        MATRICES.append(self.matrix)
        return self.read(self, x)


MATRICES = []


def halved(w):
    w.copy_(torch.eye(8))
    w.mul_(0.5)


def row_of_a_copy(w):
    w.copy_(torch.eye(8))
    w[0].zero_()


def row_of_ones(w):
    nn.init.ones_(w)
    w[0].zero_()


def plainly(model, x):
    return x @ model.matrix


def run(write, read):
    return lf.weightless.simulate(
        lambda: Readout(write, read), [[1, 2, 1]], samples=2, seed=0, gradients=True, progress=False
    )


@pytest.mark.parametrize("write", [halved, row_of_a_copy, row_of_ones])
def test_given_numbers_follow_later_changes(write):
    MATRICES.clear()
    run(write, plainly)
    expected = torch.empty(8, 8)
    with torch.no_grad():
        write(expected)
    np.testing.assert_array_equal(MATRICES[-1].detach(), expected)


class Changed(nn.Module):
    """A sublayer that combines x and f by `end`."""

    def __init__(self, end):
        super().__init__()
        self.linear, self.end = nn.Linear(WIDTH, WIDTH, bias=False), end

    def forward(self, x):
        return self.end(x, self.linear(x))


def halved_unseen(x, f):
    h = x + f
    h.data.mul_(0.5)  # which torch does not count
    return h


def onto_the_branch(x, f):
    f += x
    return f


def measured(end):

    def stack():
        return nn.Sequential(*(nn.Sequential(nn.Identity(), Changed(end)) for _ in range(3)))

    options = {"samples": 2, "seed": 1, "dtype": torch.float64, "progress": False}
    return lf.weightless.simulate(stack, {"input": torch.randn(1, 5, WIDTH, generator=torch.Generator())}, **options)


@pytest.mark.parametrize(
    ("end", "plain"),
    [
        (halved_unseen, lambda x, f: 0.5 * (x + f)),
        (onto_the_branch, lambda x, f: x + f),
        (lambda x, f: x + (f > 0), lambda x, f: x + (f > 0).double()),
    ],
    ids=["halved unseen", "onto the branch", "a branch of truth values"],
)
def test_stream_is_measured_after_any_change_in_place(end, plain):
    actual, wanted = measured(end), measured(plain)
    for key in ("covariance", "covariance_inside", "branch", "step"):
        np.testing.assert_allclose(actual[key].values, wanted[key].values, rtol=1e-12)
    other = measured(lambda x, f: x - 2 * f)
    assert np.abs(actual["covariance"].values[:, 1] - other["covariance"].values[:, 1]).max() > 0.1


@pytest.mark.parametrize(
    "halved",
    [lambda x: 0.5 * x, lambda x: torch.mul(x, torch.tensor(0.5)), lambda x: x * torch.full((WIDTH,), 0.5)],
    ids=["number", "scalar tensor", "vector"],
)
def test_multiple_of_the_stream_is_the_stream(halved):
    """The branch of 0.5 x + f is f, and the covariance inside is that of the sum."""
    passed = []

    def end(x, f):
        passed.append((x.detach(), f.detach()))
        return halved(x) + f

    data = measured(end).isel(sample=[-1])  # samples go one at a time, and the last pass is of the last one
    assert data.sizes["sublayer"] == 1
    for block, (x, f) in enumerate(passed[-3:]):
        branch, after = f.flatten(1), (0.5 * x + f).numpy()
        np.testing.assert_allclose(data.branch[:, block, 0], branch.square().mean(1).sqrt(), rtol=1e-12)
        inside = after @ after.swapaxes(1, 2) / WIDTH
        np.testing.assert_allclose(data.covariance_inside[:, block, 0], inside, rtol=1e-9, atol=1e-12)
        assert not np.allclose(data.branch[:, block, 0], (0.5 * x).flatten(1).square().mean(1).sqrt(), rtol=1e-2)


class Twofold(nn.Module):
    """Two attentions with different logits, one after the other."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))

    def forward(self, x):
        for layer, size in ((self.first, 1.0), (self.second, 8.0)):
            q, k = (t.view(*x.shape[:2], HEADS, -1).transpose(1, 2) for t in layer(x).chunk(2, -1))
            logits = size * q @ k.mT
            SEEN.append(logits.detach())
            x = x + (logits.softmax(-1) @ x[:, None]).mean(1)
        return x


def test_first_attention_of_a_block_is_summarised():
    SEEN.clear()
    options = {"samples": 2, "seed": 1, "dtype": torch.float64, "progress": False}
    x = torch.randn(1, 5, WIDTH, generator=torch.Generator().manual_seed(0))
    data = lf.weightless.simulate(lambda: nn.Sequential(Twofold(), Twofold()), x, **options).isel(sample=[-1])
    assert data.sizes["sublayer"] == 2
    first, second = ([SEEN[-4 + place], SEEN[-2 + place]] for place in (0, 1))

    def largest(logits):
        return np.stack([each.amax((2, 3)).numpy() for each in logits], 1)

    def entropy(logits):
        return np.stack([entropy_of_rows(each.softmax(-1)).mean(-1).numpy() for each in logits], 1)

    np.testing.assert_allclose(data.largest_logit[:, :2], largest(first), rtol=1e-6)
    np.testing.assert_allclose(data.entropy[:, :2], entropy(first), rtol=1e-5)
    assert not np.allclose(data.largest_logit[:, :2], largest(second), rtol=0.1)
    assert not np.allclose(data.entropy[:, :2], entropy(second), rtol=0.1)


def entropy_of_rows(weights):
    return torch.special.entr(weights).sum(-1)


class Turned(nn.Module):
    """Adds the stream in place to a branch whose memory lies in another order."""

    def __init__(self):
        super().__init__()
        self.map = nn.Linear(8, 8)

    def forward(self, x):
        f = torch.tanh(self.map(x)).mT.contiguous().mT
        BRANCHES.append(f.detach().square().mean().sqrt().item())
        f += x
        return f


BRANCHES = []


def test_branch_that_takes_the_stream_in_place_has_its_own_size():
    BRANCHES.clear()
    x = torch.randn(1, 5, 8, generator=torch.Generator().manual_seed(0))
    data = lf.weightless.simulate(lambda: nn.Sequential(Turned(), Turned()), x, samples=1, seed=0, progress=False)
    np.testing.assert_allclose(data.branch.values[0, :, 0], BRANCHES[-2:], rtol=1e-5)
    sums = np.sqrt(np.trace(data.covariance_inside.values[0, :, 0], axis1=-2, axis2=-1) / 5)
    assert np.all(sums > 1.1 * data.branch.values[0, :, 0])


@torch.library.custom_op("limitformer_tests::mix", mutates_args=())
def mix(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x @ x.mT, -1) @ x


def test_operation_of_another_package_is_named_and_its_parts_are_not_measured():
    class Mixing(nn.Module):
        def __init__(self, mixed):
            super().__init__()
            self.mixed, self.out = mixed, nn.Linear(8, 8)

        def forward(self, x):
            return x + self.out(self.mixed(x))

    def build(mixed):
        return nn.Sequential(nn.Embedding(9, 8), *(Mixing(mixed) for _ in range(2)))

    named, own = (
        lf.weightless.simulate(lambda each=each: build(each), 6, samples=1, seed=0, progress=False)
        for each in (mix, lambda x: torch.softmax(x @ x.mT, -1) @ x)
    )
    assert named.attrs["opaque"] == "limitformer_tests.mix.default"
    assert "entropy" not in named
    assert "opaque" not in own.attrs
    assert "entropy" in own
    np.testing.assert_allclose(named.covariance, own.covariance, rtol=1e-5)
    torch.manual_seed(0)
    assert (
        lf.check(build(mix), tokens=6, gradients=False, progress=False).data.attrs["opaque"]
        == "limitformer_tests.mix.default"
    )
