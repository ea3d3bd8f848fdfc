r"""Where tokens have gone: clusters and antipodal pairs, within a tolerance.

Two tokens are *together* if 1 − z ≤ tolerance and *antipodal* if 1 + z ≤ tolerance [CT, Def. 1, Sec. 6]; a pair that is
neither is unresolved. Clusters are what chains of togetherness connect. Of a configuration are kept the number of
clusters, the tokens of the largest one, the antipodal pairs and the unresolved pairs.
"""

import numpy as np
from numpy.typing import NDArray

from limitformer.kernels import kernel

CLUSTERS, LARGEST, ANTIPODAL, UNRESOLVED = 0, 1, 2, 3
LABELS = ("clusters", "largest_cluster", "antipodal_pairs", "unresolved_pairs")


@kernel
def gaps(x, i, j, lane):
    """(1 − z, 1 + z) of tokens i and j of one replica: |xⁱ ∓ xʲ|²/2, which keeps the precision of the smaller."""
    minus, plus = 0.0, 0.0
    for k in range(x.shape[1]):
        difference, total = x[i, k, lane] - x[j, k, lane], x[i, k, lane] + x[j, k, lane]
        minus += difference * difference
        plus += total * total
    return 0.5 * minus, 0.5 * plus


@kernel
def overlap_and_gap(minus, plus):
    """(z, 1 − |z|)."""
    return (1.0 - minus, minus) if minus <= plus else (plus - 1.0, plus)


@kernel
def write_overlaps(x, lane, overlap, gap):
    """All pairs i < j of one replica into `overlap` and `gap` (pairs,)."""
    pair = 0
    for i in range(x.shape[0]):
        for j in range(i + 1, x.shape[0]):
            minus, plus = gaps(x, i, j, lane)
            overlap[pair], gap[pair] = overlap_and_gap(minus, plus)
            pair += 1


@kernel
def write_outcome(x, lane, tolerance, parent, outcome):
    """The outcome of one replica into `outcome` (4,); `parent` (N,) is scratch."""
    n = x.shape[0]
    for i in range(n):
        parent[i] = i
    antipodal, unresolved = 0, 0
    for i in range(n):
        for j in range(i + 1, n):
            minus, plus = gaps(x, i, j, lane)
            if minus <= tolerance:
                join(i, j, parent)
            elif plus <= tolerance:
                antipodal += 1
            else:
                unresolved += 1
    clusters, largest = count_clusters(parent)
    outcome[CLUSTERS], outcome[LARGEST] = clusters, largest
    outcome[ANTIPODAL], outcome[UNRESOLVED] = antipodal, unresolved


@kernel
def root_of(i, parent):
    """The representative of i's cluster."""
    while parent[i] != i:
        parent[i] = parent[parent[i]]
        i = parent[i]
    return i


@kernel
def join(i, j, parent):
    """One cluster of two, represented by its first token."""
    a, b = root_of(i, parent), root_of(j, parent)
    parent[max(a, b)] = min(a, b)


@kernel
def count_clusters(parent):
    """Number of clusters, and tokens of the largest."""
    clusters, largest = 0, 0
    for i in range(len(parent)):
        size = 0
        for j in range(len(parent)):
            size += root_of(j, parent) == i
        clusters += size > 0
        largest = max(largest, size)
    return clusters, largest


def outcomes_of_overlaps(
    overlap: NDArray[np.float64], gap: NDArray[np.float64], tokens: int, tolerance: float
) -> NDArray[np.int32]:
    """The outcomes (…, 4) of `tokens` tokens from the overlaps and gaps of their pairs (…, pairs)."""
    together, antipodal = (overlap > 0) & (gap <= tolerance), (overlap < 0) & (gap <= tolerance)
    clusters, largest = clusters_of(together, tokens)
    columns = (clusters, largest, antipodal.sum(-1), (~together & ~antipodal).sum(-1))
    return np.stack([np.asarray(column, np.int32) for column in columns], axis=-1)


def clusters_of(together: NDArray[np.bool_], tokens: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Number of clusters (…) and tokens of the largest (…), from which pairs (…, pairs) are together.

    Every token takes the least number among those it is together with, until nothing changes.
    """
    first, second = np.triu_indices(tokens, 1)
    name = np.broadcast_to(np.arange(tokens), (*together.shape[:-1], tokens)).copy()
    changed = True
    while changed:
        before = name.copy()
        for pair, (i, j) in enumerate(zip(first, second, strict=True)):
            least = np.minimum(name[..., i], name[..., j])
            name[..., i] = np.where(together[..., pair], least, name[..., i])
            name[..., j] = np.where(together[..., pair], least, name[..., j])
        changed = bool((before != name).any())
    sizes = (name[..., None] == np.arange(tokens)).sum(-2)
    return (sizes > 0).sum(-1), sizes.max(-1)
