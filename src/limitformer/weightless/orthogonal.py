r"""Products Z W with an orthogonal W (n × p) that is used once and never drawn.

`nn.init.orthogonal_` draws gain times a Haar matrix: with L = max(n, p), W = gain · V, V the first n rows and p columns
of a Haar matrix O of O(L). Z W = gain · [Z, 0] O, without the columns of O beyond p, so that O can replace V.

Let Z = R Q with orthonormal rows of Q, r of them (`roots`). Rows of O in a basis that begins with Q are a Haar frame:
r orthonormal rows N of L entries, whose law no rotation changes. It is Λ⁻¹ [G, E], where [G, E] (r × L) is Gaussian and
Λ Λᵀ its Gram matrix. Only the p columns of G are multiplied by anything; the others enter by E Eᵀ alone, a Wishart
matrix, whose root T (r × min(r, L − p)) replaces E: triangular, with χ on the diagonal and N(0, 1) below it. Forward,

  U = gain · R Λ⁻¹ G.

Given N, the rest of O maps what is orthogonal to Q onto what is orthogonal to N, and is Haar there. Backward, let D
(M × p) be the gradient of U, and A = [D, 0] Nᵀ. The rest is [D, 0] − A N = S P with orthonormal rows of P, and
P Oᵀ is a Haar frame F orthogonal to Q, of which the first n columns are needed. They are made in the same way as N,
from a Gaussian matrix without its part along Q, and from a Wishart matrix for the L − n columns beyond:

  D Wᵀ = gain · (A Q + S F).

A frame of M rows exists if M directions are left: 2 M ≤ L. 3 M ≤ L is required, for which all Gram matrices are well
conditioned (their eigenvalues are within a factor of 40), so that they need no pivoting. The page `weightless` proves
all of this.
"""

from typing import Any

import torch
from torch import Tensor

from limitformer.weightless.maps import Numbers
from limitformer.weightless.roots import Root, gram, size_of

ROOM = 3  # least number of entries on the longer side of a matrix for each token


def has_room(tokens: int, inputs: int, columns: int) -> bool:
    """Whether so few tokens use a matrix (inputs × columns) that it need not be drawn."""
    return ROOM * tokens <= max(inputs, columns)


class OrthogonalMap(torch.autograd.Function):
    """Z W for gain times a Haar matrix W that is used once and never drawn."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, anchor: Tensor, numbers: Numbers, root: Root, columns: int) -> Tensor:
        """Return U = gain · R Λ⁻¹ G (S, M, p)."""
        rows, g = frame(numbers, "forward", numbers.gaussian("forward", z.shape[-2], columns), root.width - columns)
        ctx.numbers, ctx.kind, ctx.columns = numbers, type(root), columns
        ctx.save_for_backward(rows, g, *root)
        out = (root.factor.double() @ rows).mul_(numbers.scale).to(z.dtype) @ g[..., :columns]
        numbers.note_product(False, z, out)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        """Return D Wᵀ (S, M, n), and add |∂W|² = |Rᵀ D|²."""
        rows, g, *tensors = ctx.saved_tensors
        numbers, root, columns = ctx.numbers, ctx.kind(*tensors), ctx.columns
        numbers.add_squared_gradient((root.factor.mT @ d).double().square().sum((-1, -2)))
        if not ctx.needs_input_grad[0]:
            return None, None, None, None, None
        new = root.factor.diagonal(dim1=-2, dim2=-1) > 0  # other tokens have no row in Q, and none in N
        rows = rows * new[..., None]
        known = (d @ g[..., :columns].mT).double() @ rows.mT  # A
        left = torch.nn.functional.pad(d, (0, g.shape[-1] - columns)) - (known @ rows).to(d.dtype) @ g
        fresh = numbers.gaussian("backward", d.shape[-2], root.width)
        fresh = fresh - root.along(root.onto(fresh))
        basis, fresh = frame(numbers, "backward", fresh, columns - root.width)
        back = (size_of(left).double() @ basis).to(d.dtype) @ fresh[..., : root.width]
        back = back.add_(root.along(known.to(d.dtype))).mul_(numbers.scale)
        numbers.note_product(True, d, back)
        return back, None, None, None, None


def frame(numbers: Numbers, purpose: str, gaussian: Tensor, beyond: int) -> tuple[Tensor, Tensor]:
    """Return Λ⁻¹ (S, M, M), in float64, and [G, T] of a Haar frame Λ⁻¹ [G, T] that has `beyond` more columns than G."""
    if beyond > 0:
        extra = numbers.wishart_root(f"{purpose}, columns beyond", gaussian.shape[-2], beyond)
        gaussian = torch.cat([gaussian, extra], -1)
    return inverse_root(gaussian), gaussian


def inverse_root(gaussian: Tensor) -> Tensor:
    """Return Λ⁻¹ (S, M, M) in float64, Λ Λᵀ the Gram matrix of rows (S, M, L); NaN remains NaN."""
    lower = torch.linalg.cholesky_ex(gram(gaussian)).L
    one = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device).expand_as(lower)
    return torch.linalg.solve_triangular(lower, one, upper=False)


def haar_rows(gaussian: Tensor, extra: Tensor) -> Tensor:
    """Return rows (S, M, p) of a tall matrix with orthonormal columns, from Gaussian ones and a root of the rest."""
    whole = torch.cat([gaussian, extra], -1)
    return (inverse_root(whole) @ gaussian.double()).to(gaussian.dtype)


def haar_matrix(gaussian: Tensor) -> Tensor:
    """Return a Haar matrix (S, n, p) from a Gaussian one: orthonormal rows, or columns if these are fewer.

    The factor Q of a Gaussian matrix is Haar if R has a positive diagonal [F. Mezzadri, Notices of the AMS 54 (2007)].
    """
    wide = gaussian.shape[-2] < gaussian.shape[-1]
    q, r = torch.linalg.qr((gaussian.mT if wide else gaussian).double())
    q = q * torch.where(r.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0).to(q.dtype)[..., None, :]
    return (q.mT if wide else q).to(gaussian.dtype)
