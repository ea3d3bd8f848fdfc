r"""What a check looks at, by layer: from the covariances V of tokens and what was seen beside them.

Pairs are of different tokens of one sequence, and means are over sequences.

  correlation, correlation_abs, correlation_95   mean, mean absolute, 95th percentile of ρ_αβ
  stable_rank      tr V/λ₁: |X|²_F/|X|₂², the number of directions that matter
  effective_rank   exp of the entropy of λ/tr V
  size             √(tr V/m), the root mean square of a coordinate
  relative_branch  of each sublayer: size of the branch over that of the stream it is added to
  gradient         |∂L/∂W| by kind of weight and block; several of one kind in a block (experts) count as one matrix

m tokens, λ eigenvalues of V, λ₁ the largest.
"""

import re
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from limitformer.results.correlation import correlation
from limitformer.weightless.measure import BEFORE

AS_THEY_ARE = (
    "branch", "step", "largest", "typical", "entropy", "effective_tokens", "tokens_seen", "logit_std",
    "largest_logit", "stream_gradient", "loss", "logits_mean", "logits_std",
)  # fmt: skip
Array = NDArray[np.float64]


def curves(data: xr.Dataset) -> xr.Dataset:
    """The curves of a dataset of `weightless.simulate` or of `measured`, by sample."""
    found = {name: data[name] for name in AS_THEY_ARE if name in data}
    found |= of_covariance(data)
    if "branch" in data:
        found["relative_branch"] = relative_branch(data)
    if "weight_gradient" in data:
        found["gradient"], found["outside_gradient"] = by_kind(data["weight_gradient"])
    return xr.Dataset({name: each.drop_vars("weight", errors="ignore") for name, each in found.items()})


def of_covariance(data: xr.Dataset) -> dict[str, xr.DataArray]:
    """Correlations and ranks, by sample and layer."""
    covariance = data["covariance"]
    with np.errstate(invalid="ignore"):  # a stream that is NaN or infinite has a verdict
        rho = correlation(data).values
    sequence = data["sequence"].values if "sequence" in data.coords else np.zeros(data.sizes["token"], int)
    parts = [np.flatnonzero(sequence == k) for k in np.unique(sequence)]
    each = [of_one(covariance.values[..., at[:, None], at], rho[..., at[:, None], at]) for at in parts]
    return {name: like(covariance, np.mean([one[name] for one in each], 0)) for name in each[0]}


def like(covariance: xr.DataArray, values: Array) -> xr.DataArray:
    """By sample and layer, as the covariance is."""
    return covariance[..., 0, 0].copy(data=values).drop_vars(["sequence", "word"], errors="ignore")


def of_one(v: Array, rho: Array) -> dict[str, Array]:
    """Of one sequence: V and ρ (sample, layer, m, m)."""
    m = v.shape[-1]
    trace = np.trace(v, axis1=-2, axis2=-1)
    found = {"size": np.sqrt(trace / m)} | ranks(v, trace)
    if m > 1:
        pairs = rho[..., *np.triu_indices(m, 1)]
        found["correlation"] = pairs.mean(-1)
        found["correlation_abs"] = np.abs(pairs).mean(-1)
        found["correlation_95"] = np.quantile(pairs, 0.95, -1)
    return found


def ranks(v: Array, trace: Array) -> dict[str, Array]:
    """Stable and effective rank; NaN for tokens that are zero or not finite."""
    sound = np.isfinite(v).all((-1, -2)) & (trace > 0)
    scaled = np.where(sound[..., None, None], v / np.where(sound, trace, 1.0)[..., None, None], np.eye(v.shape[-1]))
    part = np.clip(np.linalg.eigvalsh(scaled), 1e-300, None)
    entropy = -np.sum(part * np.log(part), -1)
    return {
        "stable_rank": np.where(sound, 1 / part[..., -1], np.nan),
        "effective_rank": np.where(sound, np.exp(entropy), np.nan),
    }


def relative_branch(data: xr.Dataset) -> xr.DataArray:
    """Each branch over the stream that it is added to, (sample, block, sublayer)."""
    entering = np.sqrt(np.einsum("slii->sl", data["covariance"].values) / data.sizes["token"])[:, :-1]
    inside = np.sqrt(np.einsum("sbkii->sbk", data["covariance_inside"].values) / data.sizes["token"])
    before = np.concatenate([entering[:, :, None], inside[:, :, :-1]], 2)
    with np.errstate(divide="ignore", invalid="ignore"):
        return data["branch"] / before


def by_kind(gradient: xr.DataArray) -> tuple[xr.DataArray, xr.DataArray]:
    """Norms (sample, weight) as (sample, kind, block), and of the weights that are in no block (sample, weight)."""
    names = [str(name) for name in gradient["weight"].values]
    places = [place_of(name) for name in names]
    kinds = list(dict.fromkeys(kind for kind, block in places if block >= 0))
    blocks = max((block for _, block in places), default=-1) + 1
    squared = np.full((gradient.sizes["sample"], len(kinds), blocks), np.nan)
    for (kind, block), column in zip(places, np.square(gradient.values).T, strict=True):
        if block >= 0:
            at = (slice(None), kinds.index(kind), block)
            squared[at] = np.where(np.isnan(squared[at]), 0.0, squared[at]) + column
    outside = [k for k, (_, block) in enumerate(places) if block < 0]
    coordinates: dict[str, Any] = {"kind": kinds, "block": np.arange(1, blocks + 1)}
    if "matrix" in gradient.coords:
        matrices = {kind for (kind, _), matrix in zip(places, gradient["matrix"].values, strict=True) if matrix}
        coordinates["matrix"] = ("kind", [kind in matrices for kind in kinds])
    if "read" in gradient.coords:
        read = {kind for (kind, _), where in zip(places, gradient["read"].values, strict=True) if where}
        coordinates["read"] = ("kind", [kind in read for kind in kinds])
    inside = xr.DataArray(np.sqrt(squared), coordinates, ("sample", "kind", "block"))
    rest = gradient.drop_vars(["matrix", "read"], errors="ignore").isel(weight=outside).rename(weight="outside")
    if "read" in gradient.coords:  # by a name of its own, as kinds have the other
        rest = rest.assign_coords(read_first=("outside", gradient["read"].values[outside] == BEFORE))
    return inside, rest


def gradient_of_matrices(curves: xr.Dataset) -> xr.DataArray:
    """The gradient by kind without gains and biases, whose size by block follows other rules."""
    gradient = curves["gradient"]
    return gradient.isel(kind=gradient["matrix"].values) if "matrix" in gradient.coords else gradient


def gradient_ratio(norms: Array) -> tuple[Array, NDArray[Any], NDArray[Any]]:
    """The ratio of largest to smallest norm (sample, kind, block) over blocks, the worst kind, its weakest block.

    Each is (sample,). The ratio is NaN where no norm is a number, and 1 where all norms of a kind are 0.
    """
    largest, smallest = np.fmax.reduce(norms, 2), np.fmin.reduce(norms, 2)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(largest > 0, largest / smallest, 1.0)
    worst = np.argmax(np.where(np.isnan(ratio), 0.0, ratio), 1)
    known, samples = np.isfinite(norms).any((1, 2)), np.arange(len(norms))
    least = np.argmin(np.where(np.isnan(norms), np.inf, norms)[samples, worst], 1)
    return np.where(known, ratio[samples, worst], np.nan), worst, least


def place_of(name: str) -> tuple[str, int]:
    """The kind and the block of a weight: `h.3.attn.c_proj.weight` is `h.*.attn.c_proj.weight` of block 3."""
    parts = name.split(".")
    numbers = [k for k, part in enumerate(parts) if re.fullmatch(r"\d+", part)]
    if not numbers:
        return name, -1
    return ".".join("*" if k in numbers else part for k, part in enumerate(parts)), int(parts[numbers[0]])


def over_heads(curve: xr.DataArray) -> xr.DataArray:
    """The mean over heads, where a curve has heads."""
    return curve.mean("head") if "head" in curve.dims else curve
