r"""Stopping times of an attention network from an adversarially large start [ST, Sec. 4.4, Figs. 5, 8].

t* = d*/n, d* the depth at which an eigenvalue of V first exceeds 10⁴ or drops below 10⁻⁴, capped at d/n. The start's
tokens have norm 10√n, so V₀ has variances of 100. The captions do not give the number of tokens: it is 4 here, and it
matters. Two tokens are an exception: attention amplifies nothing once they are parallel, and near γ = 1 that happens
before the instability, so their median t* rises again. From three tokens on it falls with γ, as the paper says.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from limitformer.models import ShapedAttention, Transformer, equicorrelated
from limitformer.sweep import Sweep
from limitformer_papers.common.claims import FigureRun, chain
from limitformer_papers.common.grids import on_grid

LARGEST, SMALLEST = 1e4, 1e-4


@dataclass(frozen=True, kw_only=True)
class Adversarial:
    """An adversarial start and its network: the parameters of both captions, and those that they leave open."""

    width: int = 200
    depth: int = 200
    tokens: int = 4
    correlation: float = 0.2
    variance: float = 100.0
    samples: int = 100


def network(config: Adversarial, gamma: float, tau0: float) -> Transformer:
    return Transformer(width=config.width, depth=config.depth, gamma=gamma, attention=ShapedAttention(tau0=tau0))


def spectrum(config: Adversarial, gamma: float, tau0: float, run: FigureRun) -> NDArray[np.float64]:
    """Return the eigenvalues of V, ascending, in every layer of the attention network: (sample, depth, token)."""
    start = equicorrelated(tokens=config.tokens, correlation=config.correlation, variance=config.variance)
    samples = chain(network(config, gamma, tau0), start, config.samples, run)
    return np.linalg.eigvalsh(samples["covariance"].values)


def stopping_times(
    config: Adversarial, tau0: float, over: Mapping[str, Sequence[float]], run: FigureRun, name: str
) -> xr.DataArray:
    """Return t* of every sample of every cell; a common seed keeps the noise between neighbouring cells small."""
    settings = {
        "samples": config.samples,
        "seed": run.seed,
        "common_seed": True,
        "record": "all",
        "start": {"tokens": config.tokens, "correlation": config.correlation, "variance": config.variance},
    }
    ends = {"largest": LARGEST, "smallest": SMALLEST}
    sweep = Sweep(network(config, 0.5, tau0), over=over, simulate=settings, reduce={"stopping_times": ends})
    return on_grid(sweep, run, name)["stopping_time"]
