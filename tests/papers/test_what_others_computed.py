"""The numbers of docs/what-others-computed.md: closed forms of four papers, the exact law, and drawn networks."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

import limitformer as lf
from limitformer_papers.beyond import others
from limitformer_papers.beyond.others import HeadSetting, half_square, matrix

PUBLISHED = {0.5: [0.159, 0.582, 0.900, 0.997], 3.0: [0.098, 0.280, 0.567, 0.977]}  # theory_update_relu.py from ρ = 0
DIM, DEPTH = 8, 3


def standard_errors(sample, expected):
    """Return (mean − expected)/(standard error), along the first dimension."""
    return (np.mean(sample, 0) - expected) / (np.std(sample, 0, ddof=1) / math.sqrt(len(sample)))


def test_participation_ratio_at_512_tokens_is_far_from_its_limit():
    rho, beta, tokens = 0.3, 2.0, 512
    attention = lf.SoftmaxAttention(tau0=1 / (beta * math.sqrt(math.log(tokens))))
    net = lf.Transformer(width=20_000, depth=1, gamma=1.0, attention=attention)
    start = lf.equicorrelated(tokens=tokens, correlation=rho)
    data = lf.simulate(net, start, samples=8, seed=0, progress=False).covariance.isel(depth=-1).values
    size = np.einsum("stt->s", data) / tokens
    overlap = (data.sum((1, 2)) / tokens - size) / (tokens - 1)
    chain = (np.stack([size, overlap], 1) - rho) / (1 - rho)
    assert (abs(standard_errors(chain, others.row_moments(rho, beta, tokens, 4000, 0))) < 4).all()
    limit, _ = others.row_moments(rho, beta, None, 0, 0)
    assert limit == pytest.approx(0.155, abs=5e-4)
    assert standard_errors(chain, limit)[0] > 20


class PostNormBlock(nn.Module):
    """The block of Giorlandino and Goldt, Figure 1, with one head and as many hidden units as coordinates."""

    def __init__(self, width, tokens, beta):
        super().__init__()
        self.query, self.key = (matrix(width, width, beta * math.sqrt(math.log(tokens))) for _ in range(2))
        self.value, self.up, self.down = (matrix(width, width, others.WEIGHTS) for _ in range(3))
        for each in (self.value, self.up, self.down):
            each.bias = nn.Parameter(torch.empty(width).normal_(std=math.sqrt(others.BIASES)))
        self.norm = nn.LayerNorm(width, elementwise_affine=False)

    def forward(self, x):
        logits = self.query(x) @ self.key(x).mT / math.sqrt(x.shape[-1])
        x = self.norm(x + logits.softmax(-1) @ self.value(x))
        return self.norm(x + self.down(self.up(x).relu()))


def network_correlations(beta, tokens, depth, samples, width=720):
    x = torch.randn(1, tokens, width, generator=torch.Generator().manual_seed(0))
    x = nn.functional.layer_norm(x, (width,))
    data = lf.weightless.simulate(
        lambda: nn.Sequential(*(PostNormBlock(width, tokens, beta) for _ in range(depth))),
        x, samples=samples, seed=0, progress=False,
    )  # fmt: skip
    return lf.correlation(data).values[..., ~np.eye(tokens, dtype=bool)].mean(-1)


@pytest.mark.parametrize("beta", PUBLISHED)
def test_recursion_with_rows_of_finite_length_is_the_network(beta):
    limit = others.correlations(beta, 50)
    assert limit[[10, 20, 30, 50]] == pytest.approx(PUBLISHED[beta], abs=6e-4)
    network, layers = network_correlations(beta, 64, 20, 8), [10, 20]
    rows = others.correlations(beta, 20, tokens=64, rows=4000)
    assert (abs(standard_errors(network[:, layers], rows[layers])) < 4).all()
    assert (standard_errors(network[:, layers], limit[layers]) > 5).all()


def drawn_head(setting, seed, samples):
    """Return mean squares of output and gradient of heads whose weights are drawn, for the inputs of the law."""
    inputs, rng, rows = setting.inputs(seed), torch.Generator().manual_seed(1000 + seed), []
    for _ in range(samples):
        q, k, v = (torch.randn(setting.width, setting.head_dim, generator=rng) / setting.width**0.5 for _ in range(3))
        x = inputs["x"][0].clone().requires_grad_()
        logits = setting.query**2 * (x @ q) @ (x @ k).T / setting.head_dim**0.5
        mixed = (torch.softmax(logits, 1) * inputs["mask"][0]) @ x
        (mixed @ v * inputs["above"][0]).sum().backward()
        rows.append([mixed.square().mean().item(), x.grad.square().mean().item()])
    return np.array(rows)


def test_exact_law_of_a_head_has_no_error_but_that_of_sampling():
    settings = [(100, 32, 0.0, 0.6, 0.0, 0.0), (316, 64, 1 / 3, 0.6, 2 / 3, 0.0), (100, 256, 2 / 3, 0.1, 1 / 3, 2 / 3)]
    wrong = []
    for seed, setting in enumerate(HeadSetting(*each) for each in settings):
        law, drawn = setting.law(24, seed), drawn_head(setting, seed, 24)
        assert (abs(law.mean(0) - drawn.mean(0)) < 4 * np.sqrt((law.var(0) + drawn.var(0)) / 24)).all()
        wrong.append(standard_errors(drawn, setting.closed_form())[1])
    assert min(wrong[:2]) > 6  # the closed form leaves out the gradient through the softmax
    assert abs(wrong[2]) < 4  # small logits, correlated gradients


def regression(sequences):
    """Return inputs, targets, K = L XXᵀ/(d m), and the best rate yᵀKy/|Ky|² of a model with this kernel."""
    draws = torch.Generator().manual_seed(3)
    x, y = (torch.randn(sequences, n, generator=draws) for n in (DIM, 1))
    kernel = x @ x.T * DEPTH / DIM / sequences
    return x, y, kernel, (y.T @ kernel @ y / (kernel @ y).square().sum()).item()


def rates(width, kind, x, y, limit):
    """Return the best rates of 40 networks over the limit; the standard ones times the width."""
    last, near = {"mup": (1 / width, limit), "standard": (1.0, limit / width)}[kind]
    network = partial(others.linear_network, width, DEPTH, DIM, last)
    return others.best_rates(network, x, y, near, 40, 0) / near


def test_best_rate_of_one_step_is_a_constant_under_mup_and_random_under_others():
    x, y, kernel, limit = regression(3)
    mup = rates(4096, "mup", x, y, limit)
    assert abs(standard_errors(mup, 1)) < 4
    rest = y.T - torch.randn(10**5, DIM, generator=torch.Generator().manual_seed(0)) @ x.T / DIM**0.5
    steps = rest @ kernel  # y − f(x) is a Gaussian vector at infinite width
    wide = (rest * steps).sum(1) / steps.square().sum(1) / limit
    for width in (1024, 4096):
        assert stats.ks_2samp(rates(width, "standard", x, y, limit), wide).pvalue > 0.01
    assert stats.ks_2samp(mup, wide).pvalue < 1e-4


def test_best_rate_of_one_datum_is_the_inverse_kernel_in_every_parametrisation():
    x, y, kernel, limit = regression(1)
    assert limit == pytest.approx(DIM / DEPTH / x.square().sum().item()) == pytest.approx(1 / kernel.item())
    for kind in ("mup", "standard"):
        ratios = rates(4096, kind, x, y, limit)
        assert abs(standard_errors(ratios, 1)) < 4
        assert abs(standard_errors(ratios, 1.1)) > 8
    critical = lf.rate(
        partial(others.linear_network, 2**16, DEPTH, DIM, 2.0**-16), x, loss=half_square(y), steps=1, seed=0,
        optimizer=lambda module: torch.optim.SGD(module[1:-1].parameters(), lr=limit), networks=4, witness=False,
        progress=False,
    )  # fmt: skip
    assert critical.data["critical"].values == pytest.approx(2 * limit, rel=0.06)  # the loss falls up to twice the best


class TwoLayerBlock(nn.Module):
    """A residual block x + W₂ relu(W₁ x); the rule depth-mup multiplies its branch."""

    def __init__(self, width):
        super().__init__()
        self.first, self.second = matrix(width, width), matrix(width, width, 0.25)

    def forward(self, x):
        return x + self.second(self.first(x).relu())


def two_layer_network(depth, width=1024):
    blocks = [TwoLayerBlock(width) for _ in range(depth)]
    return nn.Sequential(matrix(DIM, width), nn.Sequential(*blocks), matrix(width, 1, 1 / width))


def exponents(*layers, power=0.0):
    """Return the exponents over depth of effects and of the stream's change, by rates ∝ depth^power of `layers`."""

    def optimizer(module):
        weights = [getattr(block, layer).weight for block in module[1] for layer in layers]
        return torch.optim.SGD(weights, lr=0.03 * (len(module[1]) / 4) ** power)

    result = lf.transfer(
        two_layer_network, {"depth": [4, 12, 36]}, torch.ones(1, 1, DIM), optimizer=optimizer, rule="depth-mup",
        steps=1, samples=2, seed=0, loss=half_square(torch.ones(1, 1)), progress=False,
    )  # fmt: skip
    assert result.witness.status == "witnessed"  # two steps of plain PyTorch
    names = ("stream change at the end", *(f"effect of *.*.{layer}, first step" for layer in layers))
    return [result.exponents[name].value for name in names]


def test_effects_of_both_inner_layers_fall_with_depth_under_depth_mup():
    stream, first, second = exponents("first", "second")
    assert [first, second] == pytest.approx([-0.5, -0.5], abs=0.08)
    assert abs(stream) < 0.1


def test_first_inner_layers_alone_move_the_stream_at_every_depth():
    assert exponents("first") == pytest.approx([0, -0.5], abs=0.08)
    assert exponents("first", power=0.5) == pytest.approx([0.5, 0], abs=0.08)  # rates times √L restore the effect
