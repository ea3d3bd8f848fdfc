r"""Outcomes: clusters and antipodal pairs of tokens, within a tolerance.

Two tokens are *together* if 1 − z ≤ tolerance and *antipodal* if 1 + z ≤ tolerance [CT, Def. 1, Sec. 6]; a pair that is
neither is unresolved. A cluster is a connected component of the relation "together". An outcome is the number of
clusters, the number of tokens in the largest one, and the numbers of antipodal and of unresolved pairs.
"""

import numpy as np
from numpy.typing import NDArray

from limitformer.numerics.factor import FIRST
from limitformer.numerics.kernels import kernel
from limitformer.numerics.lanes import LANES, everywhere, load, store
from limitformer.sphere.near.near_tree import any_related, gaps, relation

CLUSTERS, LARGEST, ANTIPODAL, UNRESOLVED = 0, 1, 2, 3
LABELS = ("clusters", "largest_cluster", "antipodal_pairs", "unresolved_pairs")


@kernel
def measure(x, tree, pairs, begin, count, minus, plus):
    """Write (1 − z, 1 + z) of pairs begin … to `minus` and `plus` (1, count): |xⁱ ∓ xʲ|²/2, which does not cancel.

    Pairs in one tree are measured by their stored differences (`near.near_tree`).
    """
    for q in range(count):
        i, j = pairs[begin + q, 0], pairs[begin + q, 1]
        apart, across = everywhere(0.0), everywhere(0.0)
        for k in range(x.shape[1]):
            a, b = load(x, i, k), load(x, j, k)
            difference, total = a - b, a + b
            apart = apart + difference * difference
            across = across + total * total
        store(minus, FIRST, q, 0.5 * apart)
        store(plus, FIRST, q, 0.5 * across)
    if any_related(tree.children):
        for lane in range(LANES):
            measure_related(x, tree, pairs, begin, count, lane, minus, plus)


@kernel
def measure_related(x, tree, pairs, begin, count, lane, minus, plus):
    for q in range(count):
        i, j = pairs[begin + q, 0], pairs[begin + q, 1]
        if relation(i, j, lane, tree) != 0.0:
            minus[0, q, lane], plus[0, q, lane] = gaps(x, i, j, lane, tree)


@kernel
def sort_replica(pairs, begin, count, lane, tolerance, minus, plus, parent, outcome):
    """Count pairs begin … of one replica in `outcome` (4,), and join pairs that are together in `parent` (N,)."""
    for q in range(count):
        if minus[0, q, lane] <= tolerance:
            join(pairs[begin + q, 0], pairs[begin + q, 1], parent)
        elif plus[0, q, lane] <= tolerance:
            outcome[ANTIPODAL] += 1
        else:
            outcome[UNRESOLVED] += 1


@kernel
def root_of(i, parent):
    """Return the first token of the cluster of i."""
    while parent[i] != i:
        parent[i] = parent[parent[i]]
        i = parent[i]
    return i


@kernel
def join(i, j, parent):
    a, b = root_of(i, parent), root_of(j, parent)
    parent[max(a, b)] = min(a, b)


@kernel
def count_clusters(parent, size, outcome):
    """Write the number of clusters and the size of the largest to `outcome` (4,); `size` (N,) is scratch."""
    size[:] = 0
    for i in range(len(parent)):
        size[root_of(i, parent)] += 1
    clusters, largest = 0, 0
    for i in range(len(size)):
        clusters += size[i] > 0
        largest = max(largest, size[i])
    outcome[CLUSTERS], outcome[LARGEST] = clusters, largest


def outcomes_of_overlaps(
    overlap: NDArray[np.float64], gap: NDArray[np.float64], tokens: int, tolerance: float
) -> NDArray[np.int32]:
    """Return the outcomes (…, 4) of `tokens` tokens from the overlaps and gaps of their pairs (…, pairs)."""
    together, antipodal = (overlap > 0) & (gap <= tolerance), (overlap < 0) & (gap <= tolerance)
    clusters, largest = clusters_of(together, tokens)
    columns = (clusters, largest, antipodal.sum(-1), (~together & ~antipodal).sum(-1))
    return np.stack([np.asarray(column, np.int32) for column in columns], axis=-1)


def clusters_of(together: NDArray[np.bool_], tokens: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the number of clusters (…) and the size of the largest (…), given which pairs (…, pairs) are together.

    Every token takes the least number of a token it is together with, until nothing changes.
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
