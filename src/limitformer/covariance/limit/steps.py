r"""One step of the covariance SDE, dV = b dt + N + Nᵀ with, for V = L Lᵀ and independent standard normal G₁, G₂,

  N = √dt { a L G₁ Lᵀ + (γ²/τ₀) B V },   B = centred rows of Y = L G₂ Lᵀ, over m_α  (`coefficients`),

whose covariance is exactly Σ(V) of [ST, Thm 3.2, Thm 4.2, Cor. 4.3] at a cost of O(m³); no pair-by-pair matrix.

**Factor step** (default), stays positive semi-definite by construction and never needs a root of V:

  R ← triangular factor of [ K (R (C + √dt A) + (γ²/τ₀)√dt B R) | (γλ/τ₀)√dt B R | √(η dt) |R g| ].

R has the tokens as its rows where there is a mask (`masked_step`), and else a first token and the differences from it
(`free_step`). Its square has the SDE's mean and covariance up to O(dt²), term by term:

* A is lower triangular with independent entries, N(0, a²) on the diagonal and N(0, 2a²) below, so that A + Aᵀ has the
  law of a (G₁ + G₁ᵀ) and, R being lower triangular, R (C + √dt A) is too. E AAᵀ is diagonal, a² (2i + 1) in row
  i = 0, 1, …; the diagonal C takes it back: C² = 1 − η dt − dt a² (2i + 1).
* The terms with B add (γ⁴ + γ²λ²)/τ₀² E BVBᵀ = γ²/τ₀² V∘P. Without a mask V∘P is a multiple of V, and the second
  block becomes γ²λ²/τ₀² P dt = ρx in C², with x = (γ²/τ₀)² P dt and ρ = λ²/γ².
* Two more orders of C², κx² + μx³ with κ = ρ²/2 − ρ + 3/2 and μ = ρκ − ρ³/3 + ρ² − κ − 3ρ + 5, matter far out, where
  the mixing of two tokens acts alone and multiplies their squared distance by (C + √x g)² in every step, g ~ N(0, 1):
  with them E log (C + √x g)² is (ρ − 1) x, as in the SDE, up to O(x⁴). Whether d explodes hangs on that number.
* K = I + dt γ²/(2τ₀²) W adds γ²/(2τ₀²)(WV + VWᵀ). Without a mask W = diag(V) sᵀ/m has rank one.
* The last column, g ~ N(0, I) and |·| entry by entry, adds η E|h||h|ᵀ with h ~ N(0, V), which is
  ηV + γ² ν(ρ)√(V_αα V_ββ): the drift of the ReLU, as a sample of it.

A step takes its own dt in every lane, and what `pace.measure` has left in the workspace about the state it starts from.
The paper's step is in `euler`.
"""

from limitformer.covariance.limit.differences import (
    join_twins,
    keep_opposite,
    to_differences,
    to_tokens,
    trace_of_tokens,
)
from limitformer.covariance.limit.free_step import free_rows
from limitformer.covariance.limit.masked_step import masked_rows
from limitformer.numerics.factor import FIRST, copy, gram, trace_of_gram, triangularise
from limitformer.numerics.kernels import kernel


@kernel
def factor_step(stream, dt, constants, mask, factor, out, work):
    """Move `factor`, lower triangular and measured, by dt with the step that stays in the cone, into `out`."""
    if mask.full:
        free_rows(stream, dt, constants, factor, work)
    else:
        masked_rows(stream, dt, constants, mask, factor, work)
    triangularise(work.rows, FIRST, work.rows.shape[1], out, FIRST)
    if mask.full:
        join_twins(mask.twins, out)
        if mask.opposite:
            keep_opposite(out)


@kernel
def carry(tokens, mask, out):
    """out: what the factor step carries of tokens with the lower triangular factor `tokens`."""
    if mask.full:
        to_differences(tokens, out)
    else:
        copy(tokens, out)


@kernel
def tokens_of(factor, mask, out):
    """out: a factor of V whose rows are the tokens, of what the factor step carries."""
    if mask.full:
        to_tokens(factor, out)
    else:
        copy(factor, out)


@kernel
def covariance_of(factor, mask, scratch, out):
    """out = V of what the factor step carries."""
    if mask.full:
        to_tokens(factor, scratch)
        gram(scratch, out)
    else:
        gram(factor, out)


@kernel
def trace_of(factor, mask):
    """tr V, a bound of |V|."""
    if mask.full:
        return trace_of_tokens(factor)
    return trace_of_gram(factor)
