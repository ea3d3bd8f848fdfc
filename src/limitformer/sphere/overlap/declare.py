"""The diffusion of the overlap that a model on the sphere declares."""

from collections.abc import Sequence

import numpy as np

from limitformer.base.errors import NoLimitError, require, require_count
from limitformer.models.sphere import HybridTransformer, SphereModel, StochasticTransformer
from limitformer.sphere.overlap.diffusion import OverlapDiffusion

LARGEST_BETA = 150.0  # e^{4β} is a double; the noise between clusters far apart is e^{−4β}
LARGEST_DRAWN = 1e4  # beyond it, the noise near antipodes needs too many cells in a density


def overlap(model: SphereModel, clusters: Sequence[int] | None = None) -> OverlapDiffusion:
    """Return the diffusion of the overlap of two tokens of `model`, or of `clusters` (p, q) with p + q = model.tokens.

    QᵀK may be a multiple c of the identity, so that βc replaces β, or drawn in each layer; β may be negative. Depth
    averages over heads, so the limit does not depend on their number. Nor does it depend on layers_per_unit_time: with
    few layers antipodes need a larger β (`OverlapDiffusion.critical_beta_of_layers`).

    Raises:
        NoLimitError: QᵀK is fixed and not a multiple of the identity, so that the overlap alone is not a diffusion, or
            the coefficients are not known.
        InputError: `model` is not on the sphere, has more than two tokens without clusters, or clusters do not fit.

    >>> from limitformer.models.sphere import StochasticTransformer
    >>> three = StochasticTransformer(tokens=3, dim=4, beta=2.0, layers_per_unit_time=100)
    >>> round(overlap(three, clusters=(2, 1)).mean_hitting_time(0.9, start=-1.0), 2)
    32.66
    """
    kinds = StochasticTransformer, HybridTransformer
    known = isinstance(model, kinds)
    require(known, f"overlap needs a StochasticTransformer or HybridTransformer; got {type(model).__name__}.")
    sizes = checked_clusters(model, clusters)
    require_limit(model, sizes)
    beta = model.isotropic_beta or 0.0
    equal = isinstance(model, StochasticTransformer) and sizes[0] == sizes[1]
    drawn = model.logit_scale if isinstance(model, StochasticTransformer) and model.is_fresh else 0.0
    require(drawn <= LARGEST_DRAWN, f"Drawn queries need beta * tau <= {LARGEST_DRAWN:g} here; got {drawn:g}.")
    require(
        equal or abs(beta) <= LARGEST_BETA,
        f"Unequal clusters and the hybrid model need |beta| <= {LARGEST_BETA:g} here; got {beta:g}.",
    )
    return OverlapDiffusion(model, sizes)


def require_limit(model: SphereModel, sizes: tuple[int, int]) -> None:
    """Raise `NoLimitError` unless the overlap is a diffusion by itself, with known coefficients."""
    if model.isotropic_beta is None and not model.is_fresh:
        raise NoLimitError(
            "No limit for the overlap alone: it needs Q^T K = c times the identity [CT, Assumption 2], or drawn in "
            "each layer, else attention depends on where the tokens are. Leave query_key out."
        )
    if not model.moves_alike and model.attention != "softmax":
        raise NoLimitError(
            f"With {'drawn queries and keys' if model.is_fresh else 'a causal mask'} the coefficients are known for "
            'softmax attention only; got "unnormalized". Nearest: a simulation.'
        )
    if model.is_causal and sizes != (1, 1):
        raise NoLimitError(
            "Behind a causal mask tokens of one cluster attend to different tokens, so clusters do not stay together."
        )


def checked_clusters(model: SphereModel, clusters: Sequence[int] | None) -> tuple[int, int]:
    """Return (p, q); raise `InputError` unless they are two whole numbers that add up to the number of tokens."""
    tokens = model.tokens
    if clusters is None:
        require(
            tokens == 2, f"The overlap of {tokens} tokens is not a diffusion; give clusters=(p, q), p + q = {tokens}."
        )
        return 1, 1
    clusters = clusters.tolist() if isinstance(clusters, np.ndarray) else clusters
    two = isinstance(clusters, Sequence) and not isinstance(clusters, str) and len(clusters) == 2
    require(two, f"clusters must be two whole numbers (p, q); got {clusters!r}.")
    p, q = (require_count("A cluster", size) for size in clusters)
    require(p + q == tokens, f"clusters must add up to tokens = {tokens}; got {p} + {q} = {p + q}.")
    return p, q
