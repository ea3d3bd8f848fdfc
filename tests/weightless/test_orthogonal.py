"""Orthogonal weights: their law, and passes that never draw them against networks that `nn.init.orthogonal_` draws."""

import functools
import math
import pickle

import numpy as np
import pytest
import torch
from scipy.stats import chi2, ks_2samp, kstest
from torch import nn

import limitformer as lf
from limitformer.initialisation.summary import summarise
from limitformer.initialisation.weight_by_weight import check_initialisation
from limitformer.initialisation.weight_tests import cdf, line_p_values, p_values
from limitformer.weightless import laws, run
from limitformer.weightless.laws import Law
from limitformer.weightless.maps import NeverDrawnMap
from limitformer.weightless.numbers import wishart_root
from limitformer.weightless.orthogonal import OrthogonalMap, frame, haar_matrix
from limitformer.weightless.roots import root_of

SAMPLES, TOKENS, GAIN = 2500, 4, 0.7
LEVEL, REJECTED = 1e-4, 1e-6
SHAPES = [(12, 12), (7, 16), (16, 7), (3, 12), (12, 3)]  # inputs and outputs; four tokens, three of them different
OPTIONS = {"seed": 0, "progress": False}


class FromTorch:
    """Numbers for a map, from torch's own generator."""

    def __init__(self, seed, dtype):
        self.generator, self.dtype, self.squared = torch.Generator().manual_seed(seed), dtype, None
        self.scale = GAIN

    def gaussian(self, purpose, rows, columns):
        return torch.randn(SAMPLES, rows, columns, generator=self.generator, dtype=self.dtype)

    def wishart_root(self, purpose, rows, freedom):
        """A Gaussian matrix: T of another width, but with T Tᵀ of the same law."""
        return self.gaussian(purpose, rows, freedom)

    def note_product(self, backward, factor, answer):
        pass

    def add_squared_gradient(self, squared):
        self.squared = squared


class WithoutBeyond(FromTorch):
    """Numbers by which a rectangular matrix is treated as square."""

    def wishart_root(self, purpose, rows, freedom):
        return torch.zeros(SAMPLES, rows, freedom, dtype=self.dtype)


class ForgottenFrame(OrthogonalMap):
    """The map whose backward pass has a frame of its own."""

    @staticmethod
    def forward(ctx, z, anchor, numbers, root, columns):
        out = OrthogonalMap.forward(ctx, z, anchor, numbers, root, columns)
        other = frame(numbers, "other", numbers.gaussian("other", z.shape[-2], columns), root.width - columns)
        ctx.save_for_backward(*other, *root)
        return out


class GaussianMap(NeverDrawnMap):
    """The map by a Gaussian matrix whose entries have the same standard deviation."""

    @staticmethod
    def forward(ctx, z, anchor, numbers, root, columns):
        numbers.scale = GAIN / math.sqrt(max(z.shape[-1], columns))
        return NeverDrawnMap.forward(ctx, z, anchor, numbers, root, columns)


def tokens(inputs, dtype):
    """Unequal tokens; the third repeats the first."""
    z = torch.randn(TOKENS, inputs, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    z = z * torch.tensor([[1.0], [2.0], [0.3], [0.8]]) / math.sqrt(inputs)
    z[2] = z[0]
    return z.to(dtype).repeat(SAMPLES, 1, 1).requires_grad_()


def statistics(z, u, squared):
    """Statistics of outputs and gradients of a nonlinear loss."""
    back, out, z = z.grad.double(), u.detach().double(), z.detach().double()
    return {
        "an output": out[:, 1, 2],
        "fourth powers": out[:, 3].pow(4).sum(-1),
        "an inner product": (torch.tanh(2 * out[:, 0]) * out[:, 1]).sum(-1),
        "size of a gradient": back[:, 1].square().sum(-1),
        "an entry of a gradient": back[:, 3, 1],
        "gradient along its token": (back[:, 1] * z[:, 1]).sum(-1),
        "gradient along another token": (back[:, 3] * z[:, 1]).sum(-1),
        "inner product of gradients": (back[:, 0] * back[:, 1]).sum(-1),
        "gradient of the weight": squared.double(),
    }


def loss(u):
    """A loss whose gradient depends on u."""
    return (torch.tanh(2 * u) * u.roll(1, -2)).sum() + u[:, 1].pow(4).sum()


@functools.cache
def drawn_by_torch(inputs, outputs, number=SAMPLES):
    """Matrices (number, inputs, outputs) that torch's own initialisation draws."""
    with torch.random.fork_rng():
        torch.manual_seed(11)
        w = torch.empty(number, inputs, outputs, dtype=torch.float64)
        for each in w:
            nn.init.orthogonal_(each, gain=GAIN)
    return w


@functools.cache
def drawn(inputs, outputs):
    z, w = tokens(inputs, torch.float64), drawn_by_torch(inputs, outputs).clone().requires_grad_()
    u = z @ w
    loss(u).backward()
    return statistics(z, u, w.grad.square().sum((-1, -2)))


def never_drawn(inputs, outputs, dtype, which=OrthogonalMap, numbers=FromTorch):
    z, numbers = tokens(inputs, dtype), numbers(5, dtype)
    u = which.apply(z, torch.zeros((), requires_grad=True), numbers, root_of(z.detach()), outputs)
    loss(u).backward()
    return statistics(z, u, numbers.squared)


def least_p(mine, theirs):
    return min(ks_2samp(mine[key], theirs[key]).pvalue for key in mine)


@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_map_has_the_joint_law_of_a_matrix_that_torch_draws(inputs, outputs):
    """Wrong twins have a Gaussian matrix, or forget the frame of the forward pass."""
    theirs = drawn(inputs, outputs)
    for dtype in (torch.float32, torch.float64):
        assert least_p(never_drawn(inputs, outputs, dtype), theirs) > LEVEL
    for twin in (GaussianMap, ForgottenFrame):
        assert least_p(never_drawn(inputs, outputs, torch.float64, twin), theirs) < REJECTED


@pytest.mark.parametrize(("inputs", "outputs"), [(7, 16), (16, 7)])
def test_wrong_twin_that_treats_a_rectangle_as_square_is_rejected(inputs, outputs):
    mine = never_drawn(inputs, outputs, torch.float64, numbers=WithoutBeyond)
    assert least_p(mine, drawn(inputs, outputs)) < REJECTED


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_orthonormal_sides_preserve_inner_products(inputs, outputs, dtype):
    """Orthonormal rows preserve those of tokens, and orthonormal columns those of gradients, in every sample."""
    z, numbers = tokens(inputs, dtype), FromTorch(5, dtype)
    u = OrthogonalMap.apply(z, torch.zeros((), requires_grad=True), numbers, root_of(z.detach()), outputs)
    d = torch.randn(u.shape, generator=torch.Generator().manual_seed(1), dtype=dtype)
    u.backward(d)
    close = {"rtol": 0, "atol": 2e-5 if dtype == torch.float32 else 1e-11}
    if inputs <= outputs:
        torch.testing.assert_close(u @ u.mT, GAIN**2 * z @ z.mT, **close)
    if inputs >= outputs:
        torch.testing.assert_close(z.grad @ z.grad.mT, GAIN**2 * d @ d.mT, **close)
    torch.testing.assert_close(z.grad @ z.mT, d @ u.mT, **close)  # D Wᵀ Zᵀ = D Uᵀ


def test_zero_tokens_have_zero_outputs_and_no_effect():
    z = tokens(12, torch.float32)
    z.data[:, 3] = 0.0
    for some in (z, z[:, :0]):
        numbers = FromTorch(5, torch.float32)
        u = OrthogonalMap.apply(some, torch.zeros((), requires_grad=True), numbers, root_of(some.detach()), 12)
        assert u.shape == (*some.shape[:2], 12)
        assert not u[:, 3:].any()
        (u**3).sum().backward()
        assert z.grad.isfinite().all()
        assert numbers.squared.isfinite().all()


def test_token_that_is_not_finite_does_not_change_the_outputs_of_others():
    z = tokens(12, torch.float32).detach()
    z[:, 3, 0] = torch.inf
    u = OrthogonalMap.apply(z, torch.zeros(()), FromTorch(5, torch.float32), root_of(z), 12)
    assert u[:, 3].isnan().all()
    assert u[:, :3].isfinite().all()


@pytest.mark.parametrize(("rows", "freedom"), [(3, 9), (5, 3), (4, 4)])
def test_wishart_root_has_the_law_of_a_gaussian_matrix(rows, freedom):
    t = wishart_root(0, "p", range(SAMPLES), rows, freedom, torch.float64)
    assert t.shape == (SAMPLES, rows, min(rows, freedom))
    w = (t @ t.mT).numpy()
    e = np.random.default_rng(1).standard_normal((SAMPLES, rows, freedom))
    other = e @ e.swapaxes(1, 2)
    for k in range(rows):
        assert kstest(w[:, k, k], chi2(freedom).cdf).pvalue > LEVEL
    assert kstest(w[:, 0, 0], chi2(freedom + 1).cdf).pvalue < REJECTED
    for statistic in (lambda m: m[:, 0, 1], lambda m: (m**2).sum((1, 2)), lambda m: np.linalg.eigvalsh(m)[:, -1]):
        assert ks_2samp(statistic(w), statistic(other)).pvalue > LEVEL
    assert torch.equal(t[7:9], wishart_root(0, "p", range(7, 9), rows, freedom, torch.float64))


@pytest.mark.parametrize(("rows", "columns"), [(6, 6), (4, 9), (9, 4)])
def test_drawn_matrix_is_haar(rows, columns):
    g = torch.randn(SAMPLES, rows, columns, generator=torch.Generator().manual_seed(4))
    w, theirs = GAIN * haar_matrix(g).double(), drawn_by_torch(rows, columns)
    short = w if rows <= columns else w.mT
    one = GAIN**2 * torch.eye(min(rows, columns), dtype=w.dtype)
    torch.testing.assert_close(short @ short.mT, one.expand(SAMPLES, -1, -1), rtol=0, atol=1e-6)
    for statistic in (lambda m: m[:, 0, 0], lambda m: m[:, 2, 3], lambda m: m.diagonal(dim1=1, dim2=2).sum(1)):
        assert ks_2samp(statistic(w), statistic(theirs)).pvalue > LEVEL
    unsigned = torch.linalg.qr(g if rows >= columns else g.mT).Q  # the twin: signs as LAPACK chooses them
    assert ks_2samp(GAIN * unsigned[:, 0, 0], theirs[:, 0, 0]).pvalue < REJECTED


# Modules.


class Stack(nn.Module):
    """Residual layers, each with a linear map."""

    def __init__(self, *maps):
        super().__init__()
        self.blocks = nn.ModuleList(Residual(each) for each in maps)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Residual(nn.Module):
    """x + f(x)."""

    def __init__(self, f):
        super().__init__()
        self.f = f

    def forward(self, x):
        return x + self.f(x)


def turned(width=12, gain=1.0):
    layer = nn.Linear(width, width, bias=False)
    nn.init.orthogonal_(layer.weight, gain=gain)
    return layer


@pytest.mark.parametrize(
    ("width", "number", "draw", "weights"),
    [
        (12, 3, "auto", "1 never drawn"),
        (12, 5, "never", "1 kept"),  # no frame of five rows is left
        (12, 3, "always", "1 kept"),
    ],
)
def test_weight_is_drawn_if_tokens_are_many(width, number, draw, weights):
    x = np.random.default_rng(0).standard_normal((1, number, width))
    data = lf.weightless.simulate(lambda: Stack(turned()), x, samples=2, draw=draw, **OPTIONS)
    assert data.attrs["weights"] == weights
    assert ("orthogonal matrix" in data.attrs["kept"]) == (weights == "1 kept")
    grown = data.covariance.values[:, 1].trace(axis1=1, axis2=2)
    assert (grown > 0.1 * data.covariance.values[:, 0].trace(axis1=1, axis2=2)).all()


def used_twice():
    first = turned()
    return Stack(first, nn.Tanh(), first)


def test_weight_used_twice_is_drawn_even_where_gaussian_ones_need_not_be(monkeypatch):
    monkeypatch.setattr(run, "MOST_REPEATED", 0)
    x = np.random.default_rng(0).standard_normal((1, 3, 30))

    def used_twice(initialise):
        first = turned(30)
        initialise(first.weight)
        return Stack(first, nn.Tanh(), first)

    for initialise, weights in ((nn.init.orthogonal_, "1 kept"), (nn.init.normal_, "1 never drawn")):
        data = lf.weightless.simulate(lambda i=initialise: used_twice(i), x, samples=1, **OPTIONS)
        assert data.attrs["weights"] == weights


class Rescaled(nn.Module):
    """A network whose code divides a weight before it uses it, as RWKV's."""

    def __init__(self, initialise):
        super().__init__()
        self.blocks = nn.ModuleList([Residual(nn.Linear(12, 12, bias=False))])
        self.ready = False
        initialise(self.blocks[0].f.weight)

    def forward(self, x):
        if not self.ready:
            with torch.no_grad():
                self.blocks[0].f.weight.div_(4).mul_(0.5)
            self.ready = True
        return self.blocks[0](x)


@pytest.mark.parametrize(("initialise", "draw"), [(nn.init.orthogonal_, "auto"), (nn.init.normal_, "always")])
def test_multiples_taken_by_forward_scale_the_weight(initialise, draw):
    x = np.random.default_rng(0).standard_normal((1, 2, 12))
    data = lf.weightless.simulate(lambda: Rescaled(initialise), x, samples=3, draw=draw, **OPTIONS)
    whole = lf.weightless.simulate(
        lambda: Stack(nn.Linear(12, 12, bias=False)), x, samples=3, draw=draw,
        overrides={"blocks.0.f.weight": laws.orthogonal(0.125, 9, 9) if initialise is nn.init.orthogonal_ else 0.125},
        **OPTIONS,
    )  # fmt: skip
    np.testing.assert_allclose(data.covariance, whole.covariance, rtol=1e-5)


# Tables.


class Table(nn.Module):
    """An embedding before one residual layer of zeros; it is looked up a second time if `again`."""

    def __init__(self, rows, columns, again=False):
        super().__init__()
        self.embed, self.again = nn.Embedding(rows, columns), again
        nn.init.orthogonal_(self.embed.weight, gain=GAIN)
        self.blocks = nn.ModuleList([Residual(nn.Linear(columns, columns))])
        for each in self.blocks.parameters():
            nn.init.zeros_(each)

    def forward(self, ids):
        if self.again:
            return self.blocks[0](torch.cat([self.embed(ids[:, :1]), self.embed(ids[:, 1:])], 1))
        return self.blocks[0](self.embed(ids))


@pytest.mark.parametrize(
    ("rows", "columns", "again"), [(12, 10, False), (30, 4, False), (12, 30, False), (12, 10, True)]
)
def test_rows_of_a_table_have_the_law_of_drawn_ones(rows, columns, again):
    data = lf.weightless.simulate(
        lambda: Table(rows, columns, again), torch.tensor([[5, 1, 9]]), samples=1500, dtype=torch.float64, **OPTIONS
    )
    assert data.attrs["weights"] == ("1 kept" if again else "1 rows drawn")
    w = drawn_by_torch(rows, columns)[:, [5, 1, 9]]
    theirs = (w @ w.mT / columns).numpy()
    mine = data.covariance.values[:, 0]
    if rows <= columns:
        np.testing.assert_allclose(mine, theirs[:1500], atol=1e-9)
        return
    for i, j in ((0, 0), (0, 1), (1, 2), (2, 2)):
        assert ks_2samp(mine[:, i, j], theirs[:, i, j]).pvalue > LEVEL
    independent = GAIN**2 * np.random.default_rng(0).standard_normal((1500, columns)) ** 2 / rows
    assert columns < 10 or ks_2samp(mine[:, 0, 0], independent.mean(1)).pvalue < REJECTED  # the twin: a Gaussian table


# Laws.


def law_after(change, shape=(8, 8)):
    def factory():
        net = nn.Module()
        net.w = nn.Parameter(torch.empty(shape))
        change(net)
        return net

    return lf.weightless.law(factory)["w"]


def plain_orthogonal(net):
    nn.init.orthogonal_(net.w, gain=3.0)


def negative_half(net):
    nn.init.orthogonal_(net.w, -1.5)
    net.w.data.div_(-0.5)


def product(net):
    net.w = nn.Parameter(nn.init.orthogonal_(torch.empty_like(net.w)) * 3)


def of_transpose(net):
    nn.init.orthogonal_(net.w.mT if net.w.dim() == 2 else net.w, 3.0)


def copied_in(net):
    net.w.data.copy_(nn.init.orthogonal_(torch.empty_like(net.w), 3.0))


@pytest.mark.parametrize("change", [plain_orthogonal, negative_half, product, of_transpose, copied_in])
@pytest.mark.parametrize("shape", [(5, 9), (4, 3, 2)])
def test_law_of_orthogonal_weights_and_their_multiples(change, shape):
    law = law_after(change, shape)
    sides = shape[0], math.prod(shape[1:])
    assert (law.kind, law.scale, law.mean) == ("orthogonal", 3.0, 0.0)
    assert sorted(law.matrix) == sorted(sides)
    assert law.std == pytest.approx(3 / max(sides) ** 0.5)
    assert str(law) == f"orthogonal, gain 3, std {law.std:.4g}"
    assert pickle.loads(pickle.dumps(law)) == law
    assert not law.gaussian


def plus(net):
    nn.init.orthogonal_(net.w)
    net.w.data.add_(1.0)


def part(net):
    nn.init.orthogonal_(net.w[1:])


def scaled_part(net):
    nn.init.orthogonal_(net.w)
    net.w.data[1:] *= 2


def reshaped(net):
    net.w = nn.Parameter(nn.init.orthogonal_(torch.empty(4, 16)).view(8, 8))


def sliced(net):
    whole = nn.init.orthogonal_(torch.empty(16, 8))
    net.w, net.v = nn.Parameter(whole[:8]), nn.Parameter(whole[8:])


def viewed(net):
    whole = nn.init.orthogonal_(torch.empty(8, 8))
    net.w, net.v = nn.Parameter(whole), nn.Parameter(whole.mT)


def stacked(net):
    net.w = nn.Parameter(torch.empty(2, 4, 4))
    for each in net.w.data:
        nn.init.orthogonal_(each)


@pytest.mark.parametrize(
    "change",
    [plus, part, scaled_part, reshaped, sliced, viewed, stacked],
    ids=lambda f: f.__name__,
)
def test_parts_sums_and_other_forms_have_no_law(change):
    assert law_after(change).kind == "unknown"


def test_overrides_by_an_orthogonal_law_take_the_shape_of_the_weight():
    x = np.random.default_rng(0).standard_normal((1, 3, 12))
    orthogonal = {"*.weight": laws.orthogonal(2.0, 1, 1)}
    data = lf.weightless.simulate(lambda: Stack(nn.Linear(12, 12)), x, samples=2, overrides=orthogonal, **OPTIONS)
    assert "orthogonal, gain 2, std 0.5774" in data.attrs["laws"]
    with pytest.raises(lf.InputError, match=r"an orthogonal law is of matrices; blocks\.0\.f\.bias is a vector"):
        lf.weightless.simulate(
            lambda: Stack(nn.Linear(12, 12)), x, samples=2, overrides={"*.bias": Law("orthogonal", 1.0)}, **OPTIONS
        )


# Stored weights.


@pytest.mark.parametrize(("dtype", "shape"), [(torch.float32, (64, 64)), (torch.bfloat16, (48, 96))])
def test_stored_orthogonal_weights_follow_their_law(shape, dtype):
    law = laws.orthogonal(GAIN, *shape)
    p, rejected = {"mean": [], "range": []}, 0
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for _ in range(200):
            w = nn.init.orthogonal_(torch.empty(shape), gain=GAIN).to(dtype)
            each = summarise(w)
            found = p_values(each, law)
            assert found["spread"] == 1.0
            assert not line_p_values(w, each, law)
            p = {key: [*values, found[key]] for key, values in p.items()}
            g = torch.randn(shape).mul_(law.std).to(dtype)  # the twin: independent entries
            rejected += line_p_values(g, summarise(g), law) == {"orthogonal": 0.0}
    assert rejected == 200
    assert kstest(p["mean"], "uniform", alternative="greater").pvalue > LEVEL
    assert kstest(p["range"], "uniform", alternative="greater").pvalue > LEVEL
    if dtype == torch.float32:
        assert kstest(p["mean"], "uniform").pvalue > LEVEL
    larger = summarise(1.1 * w)
    assert p_values(larger, law)["spread"] == 0.0
    assert not line_p_values(1.1 * w, larger, law)
    shifted = summarise(w + 2 * law.std)
    assert p_values(shifted, law)["mean"] < REJECTED


def test_distribution_function_is_that_of_an_entry():
    law = laws.orthogonal(-2.0, 5, 9)
    w = -2.0 / GAIN * drawn_by_torch(5, 9)[:, 1, 4]
    assert kstest(w, lambda x: cdf(np.asarray(x), law)).pvalue > LEVEL
    assert kstest(1.1 * w, lambda x: cdf(np.asarray(x), law)).pvalue < 1e-3


def test_finding_names_a_matrix_that_is_not_orthogonal():
    def factory():
        return Stack(turned(32), turned(32))

    net = factory()
    assert not check_initialisation(net, lf.weightless.law(factory)).findings
    nn.init.normal_(net.blocks[1].f.weight, std=32**-0.5)
    finding = check_initialisation(net, lf.weightless.law(factory)).findings[0]
    assert (finding.pattern, finding.kind) == ("blocks.1.f.weight", "orthogonal")
    nn.init.orthogonal_(net.blocks[1].f.weight, gain=1.1)
    assert check_initialisation(net, lf.weightless.law(factory)).findings[0].kind == "spread"
