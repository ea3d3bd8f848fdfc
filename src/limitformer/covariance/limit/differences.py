r"""Tokens as a first one and differences from it: x⁰ and yᵅ = xᵅ − x⁰, α ≥ 1.

Tokens may align until their differences are 10¹⁶ times shorter than they are; as rows of their own these keep their
digits. In a lower triangular factor x⁰ has one entry only, so that y and x differ in the first column alone.
"""

from limitformer.numerics.factor import FIRST, copy, gram, inner, trace_of_gram
from limitformer.numerics.kernels import kernel
from limitformer.numerics.lanes import everywhere, load, store


@kernel
def to_differences(tokens, out):
    """out: the differences of the lower triangular factor `tokens`."""
    copy(tokens, out)
    for i in range(1, tokens.shape[0]):
        store(out, i, 0, load(tokens, i, 0) - load(tokens, 0, 0))


@kernel
def to_tokens(differences, out):
    """out: the tokens of the lower triangular `differences`."""
    copy(differences, out)
    for i in range(1, differences.shape[0]):
        store(out, i, 0, load(differences, i, 0) + load(differences, 0, 0))


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
def trace_of_tokens(differences):
    """tr V."""
    first = load(differences, 0, 0)
    total = first * first
    for i in range(1, differences.shape[0]):
        total = total + (first * first + variance_beyond_first(differences, i))
    return total


@kernel
def trace_of(factor, mask):
    """tr V, a bound of |V|."""
    if mask.full:
        return trace_of_tokens(factor)
    return trace_of_gram(factor)


@kernel
def variance_beyond_first(differences, i):
    """V_ii − V₀₀ = |yⁱ|² + 2 ⟨yⁱ, x⁰⟩."""
    squared = inner(differences, i, differences, i, FIRST, i + 1)
    return squared + 2.0 * (load(differences, i, 0) * load(differences, 0, 0))


@kernel
def centre(differences, means, out):
    """out = C X (m, m), X the tokens: each column less its mean, all relative to x⁰; the means go to `means` (m, 1)."""
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
    """Give tokens that are one the same row: an explosion would blow their rounding up to the size of the others."""
    for i in range(1, len(twins)):
        if twins[i] < i:
            for k in range(differences.shape[1]):
                none = twins[i] == 0
                store(differences, i, k, everywhere(0.0) if none else load(differences, twins[i], k))


@kernel
def keep_opposite(differences):
    """Two antipodes: y = −2x⁰. An explosion would blow the rounding of their sum up to the size of their difference."""
    store(differences, 1, 0, -2.0 * load(differences, 0, 0))
    store(differences, 1, 1, everywhere(0.0))
