"""The choice of the diffusion for a model and its clusters."""

from collections.abc import Callable, Mapping
from functools import partial
from math import log
from typing import Any

import numpy as np

from limitformer.models.kinds import of_kind
from limitformer.models.sphere import HybridTransformer, SphereModel, StochasticTransformer
from limitformer.sphere.overlap.causal import CausalMotion, drawn_averages, fixed_averages
from limitformer.sphere.overlap.drawn import DrawnAttention
from limitformer.sphere.overlap.drawn_motion import DrawnMotion
from limitformer.sphere.overlap.motion import FlowMotion, HybridMotion, Motion, StochasticMotion, widest_panel
from limitformer.sphere.overlap.weights import weights_of

Clusters = tuple[int, int]


def stochastic_motion(model: StochasticTransformer, clusters: Clusters, beta: float) -> Motion:
    """Return the diffusion of the stochastic model, also with drawn queries or a causal mask."""
    if model.is_fresh:
        drawn = DrawnAttention(model.logit_scale, log(clusters[0] / clusters[1]), model.head_dim)
        if model.is_causal:
            return CausalMotion(partial(drawn_averages, drawn), drawn.near_ends, model.dim, model.sigma, np.inf)
        return drawn_motion(drawn, model.dim, model.sigma)
    if model.is_causal:
        return CausalMotion(partial(fixed_averages, beta), abs(beta), model.dim, model.sigma, widest_panel(beta))
    weights = weights_of(model, clusters, beta)
    return StochasticMotion(weights, abs(beta), model.dim, model.sigma, widest_panel(beta))


def drawn_motion(drawn: DrawnAttention, dim: int, sigma: float) -> Motion:
    """Return the diffusion with drawn queries and no mask; its averages vary slowly for every b."""
    if drawn.odds:
        return StochasticMotion(drawn.averages, drawn.near_ends, dim, sigma, np.inf)
    return DrawnMotion(drawn.averages, drawn.near_ends, dim, sigma, np.inf, drawn)


def hybrid_motion(model: HybridTransformer, clusters: Clusters, beta: float) -> Motion:
    """Return the diffusion of the hybrid model, a flow without noise."""
    weights, size = weights_of(model, clusters, beta), abs(beta)
    return HybridMotion(weights, size, model.epsilon) if model.epsilon > 0 else FlowMotion(weights, size)


MOTIONS: Mapping[type, Callable[[Any, Clusters, float], Motion]] = {
    StochasticTransformer: stochastic_motion,
    HybridTransformer: hybrid_motion,
}


def motion_of(model: SphereModel, clusters: Clusters, beta: float) -> Motion:
    """Return the diffusion of the overlap of two clusters of `model`, with `beta` for its β."""
    return of_kind(model, MOTIONS)(model, clusters, beta)
