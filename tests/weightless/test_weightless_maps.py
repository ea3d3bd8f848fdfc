"""Linear maps with a weight that is never drawn: roots of tokens, and the joint law of outputs and gradients."""

from functools import partial

import numpy as np
import pytest
import torch
from scipy.linalg.lapack import dpstrf
from scipy.stats import ks_2samp

from limitformer.weightless.maps import NeverDrawnMap
from limitformer.weightless.products import RepeatedMap, products_of
from limitformer.weightless.roots import (
    cholesky,
    cholesky_of_any,
    cholesky_of_independent,
    gram,
    gram_root,
    householder_root,
    in_order,
    inverse_of,
    root_of,
    size_of,
)

SAMPLES, TOKENS, INPUTS, OUTPUTS, STD = 4000, 3, 7, 5, 0.4
REPEATED = 1200  # samples of repeated maps, whose products are computed one sample at a time


class FromTorch:
    """Numbers for a map, from torch's own generator."""

    def __init__(self, seed):
        self.generator, self.squared, self.scale = torch.Generator().manual_seed(seed), None, STD

    def gaussian(self, purpose, rows, columns):
        return torch.randn(SAMPLES, rows, columns, generator=self.generator, dtype=self.dtype)

    def note_product(self, backward, factor, answer):
        pass

    def add_squared_gradient(self, squared):
        self.squared = squared


def tokens(dtype):
    """Tokens of unequal lengths and overlaps; the last repeats the first."""
    z = torch.randn(TOKENS, INPUTS, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    z = torch.cat([z * torch.tensor([[1.0], [2.0], [0.3]]), z[:1]])
    return z.to(dtype).repeat(SAMPLES, 1, 1).requires_grad_()


def summary(z, u, squared):
    """Return statistics of outputs and gradients of a nonlinear loss."""
    back, out = z.grad.double(), u.detach().double()
    return {
        "an output": out[:, 1, 2],
        "an inner product": (out[:, 0] * out[:, 1]).sum(-1),
        "size of the gradient": back.square().sum((-1, -2)),
        "gradient along a token": (back[:, 1] * z.detach()[:, 1]).sum(-1),
        "gradient along an output's": (back[:, 0] * back[:, 1]).sum(-1),
        "of the weight": squared,
    }


def loss(u):
    """A loss whose gradient depends on u."""
    return (torch.tanh(u) * u.roll(1, -2)).sum() + u[:, 1].square().sum()


def drawn_weight(dtype=torch.float64):
    z, generator = tokens(dtype), torch.Generator().manual_seed(11)
    w = STD * torch.randn(SAMPLES, INPUTS, OUTPUTS, generator=generator, dtype=dtype)
    w.requires_grad_()
    u = z @ w
    loss(u).backward()
    return summary(z, u, w.grad.double().square().sum((-1, -2)))


def never_drawn(dtype, seed=5, root=root_of):
    z, numbers = tokens(dtype), FromTorch(seed)
    numbers.dtype = dtype
    u = NeverDrawnMap.apply(z, torch.zeros((), requires_grad=True), numbers, root(z.detach()), OUTPUTS)
    loss(u).backward()
    return summary(z, u, numbers.squared)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_never_drawn_map_has_the_joint_law_of_a_drawn_weight(dtype):
    mine, theirs = never_drawn(dtype), drawn_weight()
    assert min(ks_2samp(mine[key], theirs[key]).pvalue for key in mine) > 1e-4


def test_wrong_twin_without_one_token_is_rejected():
    def too_short(z):
        z = z.clone()
        z[:, 1] *= 0.8
        return householder_root(z)

    mine, theirs = never_drawn(torch.float64, root=too_short), drawn_weight()
    assert min(ks_2samp(mine[key], theirs[key]).pvalue for key in mine) < 1e-10


def chain_of_uses(products):
    """Statistics of uses of one square weight, the second by its transpose, each with tokens that depend on others."""
    z = tokens(torch.float32).detach()[:REPEATED]
    first, second = products[0](z, False), products[1](z.flip(1) * 0.5, True)
    u = products[2](torch.tanh(first) + 0.3 * z + second.roll(1, -2), False)
    u, first, second = u.double(), first.double(), second.double()
    return {
        "an output": u[:, 1, 2],
        "an inner product": (u[:, 0] * u[:, 1]).sum(-1),
        "along an earlier output": (u[:, 1] * first[:, 2]).sum(-1),
        "of the transpose along the tokens": (second[:, 0] * z[:, 1]).sum(-1),
        "sizes": u.square().sum((-1, -2)),
    }


class ByRow:
    """Numbers for repeated maps, from torch's own generator."""

    def __init__(self, seed):
        self.generator, self.scale, self.samples = torch.Generator().manual_seed(seed), STD, REPEATED

    def rows_of(self, sample, purpose, rows, columns):
        return torch.randn(len(rows), columns, generator=self.generator)


def repeated_maps(number, seed=5):
    numbers = ByRow(seed)
    maps = [RepeatedMap().of_samples(numbers, (INPUTS, INPUTS), torch.float32) for _ in range(number)]
    return [partial(products_of, maps[k % number]) for k in range(3)]


def test_repeated_map_has_the_joint_law_of_a_drawn_weight():
    w = STD * torch.randn(REPEATED, INPUTS, INPUTS, generator=torch.Generator().manual_seed(11))
    theirs = chain_of_uses([lambda z, transpose: z @ (w.mT if transpose else w)] * 3)
    mine, twin = chain_of_uses(repeated_maps(1)), chain_of_uses(repeated_maps(3))
    assert min(ks_2samp(mine[key], theirs[key]).pvalue for key in mine) > 1e-4
    assert min(ks_2samp(twin[key], theirs[key]).pvalue for key in mine) < 1e-10  # three weights


def test_repeated_map_is_linear_once_all_directions_are_known():
    product = partial(repeated_maps(1)[0], transpose=False)
    z = torch.randn(REPEATED, 9, INPUTS, generator=torch.Generator().manual_seed(2))
    z[:, 5], z[:, 6] = z[:, 2], 0.0
    u = product(z)
    torch.testing.assert_close(u[:, 5], u[:, 2])
    assert not u[:, 6].any()
    again = product(z[:, 1:4] - 2 * z[:, 7:8])  # seven directions are known, as many as there are
    torch.testing.assert_close(again, u[:, 1:4] - 2 * u[:, 7:8], rtol=1e-3, atol=2e-4)


def test_repeated_map_treats_tokens_that_collapse_as_a_matrix_would():
    product = partial(repeated_maps(1)[0], transpose=False)
    z = torch.randn(1, 1, INPUTS, generator=torch.Generator().manual_seed(2)).repeat(REPEATED, 5, 1)
    z = z + 1e-5 * torch.randn(REPEATED, 5, INPUTS, generator=torch.Generator().manual_seed(3))
    first, again = product(z), product(z.flip(1))
    torch.testing.assert_close(again.flip(1), first, rtol=0, atol=1e-5)
    apart = (first[:, 1:] - first[:, :1]).square().mean().sqrt()
    assert float(apart) == pytest.approx(STD * 1e-5 * (2 * INPUTS) ** 0.5, rel=0.05)


@pytest.mark.parametrize("root", [householder_root, gram_root])
def test_roots_reproduce_tokens_and_repeats(root):
    z = tokens(torch.float64)[:2].detach()
    z[1] *= torch.tensor([1.0, 3.0, 0.5, 1.0])[:, None]
    z_root = root(z)
    rows = z_root.factor.shape[-1]
    basis = z_root.along(torch.eye(rows, dtype=z.dtype).expand(2, rows, rows))
    assert torch.allclose(z_root.factor @ basis, z, atol=1e-12)
    assert torch.equal(z_root.factor[:, 0], z_root.factor[:, 3])
    f = torch.randn(2, 4, INPUTS, dtype=z.dtype, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(z_root.onto(f), f @ basis.mT, atol=1e-12)


def pivoted_root(z):
    """Return a root that takes the largest token first."""
    g = gram(z).numpy()[0]
    lower, order, _, _ = dpstrf(g, lower=1)
    root = np.zeros_like(g)
    root[order - 1] = np.tril(lower)
    return root


def test_root_moves_little_with_rounding():
    z = torch.randn(1, 24, 96, generator=torch.Generator().manual_seed(1))
    z = z / z.norm(dim=-1, keepdim=True)  # as behind a norm
    z[:, 5], z[:, 9] = z[:, 2], 0.0

    digit = 1e-7 * torch.randn(z.shape[:-1], generator=torch.Generator().manual_seed(2))[..., None]
    digit[:, 5] = digit[:, 2]

    def moved(root):
        return np.abs(np.asarray(root(z)) - np.asarray(root(z * (1 + digit)))).max()

    assert moved(lambda z: gram_root(z).factor) < 1e-6
    assert moved(pivoted_root) > 0.1
    assert gram_root(z).factor[0].diagonal().nonzero().flatten().tolist() == [*range(5), *range(6, 9), *range(10, 24)]


@pytest.mark.parametrize(("m", "n"), [(32, 32), (44, 32), (128, 100)])
def test_rows_of_q_stay_orthonormal_for_dependent_tokens(m, n):
    """If there are more tokens than entries, residuals of later tokens are rounding errors over small pivots."""

    def worst(factorised):
        root, rows = factorised
        q = inverse_of(root, rows).T @ z.double().numpy()[0]
        return np.abs(q[rows] @ q[rows].T - np.eye(len(rows))).max()

    largest = {cholesky: 0.0, in_order: 0.0}
    for seed in range(200 if m < 100 else 20):
        z = torch.randn(1, m, n, generator=torch.Generator().manual_seed(seed)) * torch.logspace(0, -4, n)
        g = gram(z).numpy()[0]
        largest = {way: max(worst(way(g)), error) for way, error in largest.items()}
    assert largest[cholesky] < 0.02
    assert m == n or largest[in_order] > 0.5


def test_both_precisions_have_the_same_root():
    z = torch.randn(2, 9, 6, generator=torch.Generator().manual_seed(1))  # some depend on the others
    z[1, 3], z[1, 4] = z[1, 0], 0.0
    single, double = gram_root(z), householder_root(z.double())
    assert torch.allclose(single.factor.double(), double.factor, atol=1e-6)
    assert torch.equal(double.factor[:1], householder_root(z[:1].double()).factor)  # whatever is beside it
    assert single.factor[1].diagonal().nonzero().flatten().tolist() == [0, 1, 2, 5, 6, 7]
    assert torch.allclose(size_of(z).double(), size_of(z.double()), atol=1e-6)
    assert (torch.linalg.qr(z.double().mT).R.diagonal(dim1=-2, dim2=-1) < 0).any()  # so the signs had to be mended


def test_root_of_independent_tokens_equals_the_general_root():
    """They agree to the last bit; a repeated, zero, NaN or nearly dependent token needs the general one."""
    *z, new = np.random.default_rng(0).standard_normal((9, 20))
    z = np.array(z)
    (short, rows), (long, long_rows) = cholesky_of_independent(z @ z.T), cholesky_of_any(z @ z.T)
    np.testing.assert_array_equal(short, long)
    np.testing.assert_array_equal(rows, long_rows)
    np.testing.assert_allclose(inverse_of(short, rows), np.linalg.inv(long).T, rtol=0, atol=1e-12)
    for token in (z[2], 0 * z[2], np.nan * z[2], z[2] + 1e-4 * new):
        other = z.copy()
        other[5] = token
        assert cholesky_of_independent(other @ other.T) is None


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_token_with_nan_does_not_change_the_root_of_others(broken):
    z = torch.randn(1, 5, INPUTS, generator=torch.Generator().manual_seed(1))
    others = [0, 2, 3, 4]
    alone = gram_root(z[:, others]).factor
    z[0, 1, 2] = broken
    factor = gram_root(z).factor
    assert factor[0, 1].isnan().all()
    assert torch.equal(factor[:, others][..., others], alone)


def test_householder_roots_preserve_small_differences():
    z = tokens(torch.float64)[:1].detach()
    apart = 1e-11 * torch.ones(INPUTS, dtype=torch.float64)
    z[0, 3] = z[0, 0] + apart

    def kept(root):
        factor = root(z).factor[0]
        return float((factor[3] - factor[0]).norm() / apart.norm())

    assert kept(householder_root) == pytest.approx(1.0, abs=1e-4)
    assert kept(gram_root) < 0.99  # a Gram matrix has only the part along other tokens


def test_gradients_of_gradients_are_refused():
    z, numbers = tokens(torch.float64), FromTorch(1)
    numbers.dtype = torch.float64
    u = NeverDrawnMap.apply(z, torch.zeros((), requires_grad=True), numbers, root_of(z.detach()), OUTPUTS)
    (first,) = torch.autograd.grad(u.square().sum(), z, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.square().sum().backward()
