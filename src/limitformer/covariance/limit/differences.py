r"""The factor that the factor step moves: with a mask the tokens, else a first token and the differences from it.

These are x⁰ and yᵅ = xᵅ − x⁰, α ≥ 1. Tokens may align until their differences are 10¹⁶ times shorter than they are;
in rows of their own the differences keep their digits. In a lower triangular factor x⁰ has only one entry, so that y
and x differ only in the first column.
"""

from limitformer.numerics.factor import FIRST, copy, gram, inner, trace_of_gram
from limitformer.numerics.kernels import kernel
from limitformer.numerics.lanes import everywhere, load, store


@kernel
def to_differences(tokens, out):
    copy(tokens, out)
    for i in range(1, tokens.shape[0]):
        store(out, i, 0, load(tokens, i, 0) - load(tokens, 0, 0))


@kernel
def to_tokens(differences, out):
    copy(differences, out)
    for i in range(1, differences.shape[0]):
        store(out, i, 0, load(differences, i, 0) + load(differences, 0, 0))


@kernel
def to_step_factor(tokens, mask, out):
    """out: the factor to move, from the lower triangular factor `tokens` of V."""
    if mask.full:
        to_differences(tokens, out)
    else:
        copy(tokens, out)


@kernel
def tokens_of(factor, mask, out):
    """out: a factor of V whose rows are the tokens."""
    if mask.full:
        to_tokens(factor, out)
    else:
        copy(factor, out)


@kernel
def covariance_of(factor, mask, scratch, out):
    """out = V."""
    if mask.full:
        to_tokens(factor, scratch)
        gram(scratch, out)
    else:
        gram(factor, out)


@kernel
def trace_of_tokens(differences):
    first = load(differences, 0, 0)
    total = first * first
    for i in range(1, differences.shape[0]):
        total = total + (first * first + variance_beyond_first(differences, i))
    return total


@kernel
def trace_of(factor, mask):
    """Return tr V, a bound of |V|."""
    if mask.full:
        return trace_of_tokens(factor)
    return trace_of_gram(factor)


@kernel
def variance_beyond_first(differences, i):
    """Return V_ii − V₀₀ = |yⁱ|² + 2 ⟨yⁱ, x⁰⟩."""
    squared = inner(differences, i, differences, i, FIRST, i + 1)
    return squared + 2.0 * (load(differences, i, 0) * load(differences, 0, 0))


@kernel
def centre(differences, means, out):
    """out = C X (m, m), X the tokens: each column minus its mean, all relative to x⁰; the means into `means` (m, 1)."""
    m = differences.shape[0]
    for k in range(m):
        total = everywhere(0.0)
        for i in range(1, m):
            total = total + load(differences, i, k)
        mean = total / float(m)
        store(means, k, 0, mean)
        store(out, 0, k, -1.0 * mean)
        for i in range(1, m):
            store(out, i, k, load(differences, i, k) - mean)


@kernel
def join_twins(twins, differences):
    """Set equal tokens to the same row; an explosion would blow their rounding up to the size of the others."""
    for i in range(1, len(twins)):
        if twins[i] < i:
            for k in range(differences.shape[1]):
                first = twins[i] == 0
                store(differences, i, k, everywhere(0.0) if first else load(differences, twins[i], k))


@kernel
def keep_opposite(differences):
    """Set y = −2x⁰ for two antipodes; an explosion would blow the rounding of their sum up to their difference."""
    store(differences, 1, 0, -2.0 * load(differences, 0, 0))
    store(differences, 1, 1, everywhere(0.0))
