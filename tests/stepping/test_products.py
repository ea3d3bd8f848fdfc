"""Products of an undrawn matrix: the joint law of any sequence of them, by torch's own matrices."""

import numpy as np
import pytest
import torch
from scipy.stats import ks_2samp

from limitformer.weightless.products import Bases, UndrawnMatrix

ROWS, COLUMNS, STD, SAMPLES = 9, 6, 0.4, 300
DTYPE = torch.float64


def undrawn(seed, dtype=DTYPE, kind=UndrawnMatrix):
    generator = torch.Generator().manual_seed(seed)

    def draw(purpose, rows, columns):
        return torch.randn(len(rows), columns, generator=generator, dtype=dtype)

    return kind((ROWS, COLUMNS), STD, draw, dtype, Bases())


class Forgetful(UndrawnMatrix):
    """The wrong twin: what the other side's products have shown is forgotten."""

    def image_of(self, q, rows, side, other):
        return self.draw(f"{side.name} {side.uses}", rows, other.basis.shape[-1]) * self.scale


def program(times, times_transpose):
    """Left and right products, each of which depends on the answers before it; tokens repeat and are dependent."""
    first = torch.randn(3, ROWS, generator=torch.Generator().manual_seed(3), dtype=DTYPE)
    z = torch.cat([first, first[:1], first[1:2] + 2 * first[2:3]])
    u = times(z)
    back = times_transpose(torch.tanh(u))
    again = times(torch.tanh(back) + 0.1 * z)
    last = times_transpose(again.roll(1, 0) * u)
    return {
        "an output": again[1, 2],
        "along the first": (again * u).sum(),
        "size of the gradient": back.square().sum(),
        "the last": last.square().sum(),
        "the last along the first": (last * z).sum(),
        "of the repeated token": (back[3] * last[0]).sum(),
    }


def statistics(make):
    rows = []
    for seed in range(SAMPLES):
        matrix = make(seed)
        if isinstance(matrix, torch.Tensor):
            rows.append(program(lambda z, w=matrix: z @ w, lambda d, w=matrix: d @ w.mT))
        else:
            rows.append(program(lambda z, m=matrix: m.times(z).answer, lambda d, m=matrix: m.times_transpose(d).answer))
    return {key: np.array([float(row[key]) for row in rows]) for key in rows[0]}


def drawn(seed):
    return STD * torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(10**6 + seed), dtype=DTYPE)


def test_products_have_the_joint_law_of_a_drawn_matrix():
    mine, theirs = statistics(undrawn), statistics(drawn)
    twin = statistics(lambda seed: undrawn(seed, kind=Forgetful))
    assert min(ks_2samp(mine[key], theirs[key]).pvalue for key in mine) > 1e-4
    assert min(ks_2samp(twin[key], theirs[key]).pvalue for key in mine) < 1e-10


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_all_products_are_those_of_one_matrix(dtype):
    """⟨d, z W⟩ = ⟨d Wᵀ, z⟩ for all pairs, also of tokens that nearly repeat and when all directions are known."""
    matrix, generator = undrawn(1, dtype), torch.Generator().manual_seed(2)
    lefts, rights = [], []
    for k in range(6):
        z = torch.randn(4, ROWS, generator=generator, dtype=dtype)
        z[1], z[2] = z[0], 0.0
        if k:
            z[3] = lefts[-1][0][3] + 1e-4 * z[3]
        lefts.append((z, matrix.times(z).answer))
        d = torch.randn(2, COLUMNS, generator=generator, dtype=dtype)
        rights.append((d, matrix.times_transpose(d).answer))
    tolerance = 1e-12 if dtype == torch.float64 else 2e-5
    for z, answer in lefts:
        for d, back in rights:
            torch.testing.assert_close(d @ answer.mT, back @ z.mT, rtol=0, atol=tolerance)
    assert len(matrix.left.basis) == ROWS
    assert len(matrix.right.basis) == COLUMNS
    for side in (matrix.left, matrix.right):
        gram = side.basis @ side.basis.mT
        torch.testing.assert_close(gram, torch.eye(len(gram), dtype=dtype), rtol=0, atol=tolerance)


def test_matrices_that_multiply_the_same_tensors_share_their_basis_and_others_do_not():
    bases, generator = Bases(), torch.Generator().manual_seed(4)

    def draw(purpose, rows, columns):
        return torch.randn(len(rows), columns, generator=generator, dtype=DTYPE)

    query, key = (UndrawnMatrix((ROWS, COLUMNS), STD, draw, DTYPE, bases) for _ in range(2))
    z, other = (torch.randn(2, ROWS, generator=generator, dtype=DTYPE) for _ in range(2))
    before = query.times(z).answer, key.times(z).answer
    assert query.left.directions is key.left.directions
    query.times(other)
    key.times(other.flip(0) * 2.0 + z)  # they part here
    assert query.left.directions is not key.left.directions
    for matrix, answer in zip((query, key), before, strict=True):
        torch.testing.assert_close(matrix.times(z).answer, answer)
    assert not torch.equal(*before)


def test_constant_rows_are_known_from_the_start():
    matrix = undrawn(1)
    matrix.know_rows({2: 0.0, 5: 0.25})
    rows = torch.eye(ROWS, dtype=DTYPE)[[5, 1, 2]]
    answer = matrix.times(rows).answer
    assert torch.equal(answer[0], torch.full((COLUMNS,), 0.25, dtype=DTYPE))
    assert not answer[2].any()
    back = matrix.times_transpose(torch.ones(1, COLUMNS, dtype=DTYPE)).answer
    torch.testing.assert_close(back[0, [2, 5]], torch.tensor([0.0, 0.25 * COLUMNS], dtype=DTYPE))
