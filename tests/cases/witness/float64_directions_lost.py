"""Rows e1, e1, e2 span two dimensions; in float64 the basis once had one row, so that e2 W was zero.

Right: as many directions as the rank, an orthonormal basis, U Dᵀ = Z Bᵀ, and a mean loss of
½ (1 + 2 · 64 · 0.5²) = 16.5 whether matrices are drawn or not.
"""

import numpy as np
import pytest
import torch
from torch import nn

import limitformer as lf
from limitformer.weightless.products import Bases, UndrawnMatrix


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.w, self.out = nn.Linear(2, 64, bias=False), nn.Linear(64, 2, bias=False)
        nn.init.normal_(self.w.weight, std=1.0)
        nn.init.normal_(self.out.weight, std=0.5)

    def forward(self, x):
        return x + self.out(self.w(x))


def half_square(output, inputs):
    return output.square().sum(-1).mean(1) / 2


def verify_basis(dtype):
    generator = torch.Generator().manual_seed(1)
    z = torch.randn(9, 12, generator=generator, dtype=dtype)
    z = torch.cat(
        [z, z[[0, 3]], 2 * z[1:2], z[4:5] - z[5:6], torch.zeros(1, 12, dtype=dtype), torch.randn(6, 12, dtype=dtype)]
    )
    d = torch.randn(len(z), 8, generator=generator, dtype=dtype)[[0, 0, *range(len(z) - 2)]]  # 17 rows in 8 dimensions
    matrix = UndrawnMatrix((12, 8), 1.0, lambda _, rows, n: torch.randn(len(rows), n, dtype=dtype), dtype, Bases())
    u, b = matrix.times(z).answer, matrix.times_transpose(d).answer
    for side, factor in ((matrix.left, z), (matrix.right, d)):
        assert len(side.basis) == torch.linalg.matrix_rank(factor)
        assert torch.allclose(side.basis @ side.basis.mT, torch.eye(len(side.basis), dtype=dtype), atol=1e-5)
    error = torch.linalg.norm(u @ d.mT - z @ b.mT) / torch.linalg.norm(u @ d.mT)
    assert error < (1e-12 if dtype == torch.float64 else 1e-5), error


def verify():
    x = torch.tensor([[[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]])
    for dtype in (torch.float32, torch.float64):
        verify_basis(dtype)
        for draw in ("auto", "never", "always"):
            data = lf.weightless.simulate_steps(
                lambda: nn.Sequential(Block()), x, optimizer="sgd", steps=1, samples=100, seed=0, draw=draw,
                dtype=dtype, blocks="0", loss=half_square, progress=False,
            )  # fmt: skip
            losses = data.loss.values[0, :, 0]
            assert losses.mean() == pytest.approx(16.5, abs=4 * losses.std() / np.sqrt(100)), (dtype, draw)
