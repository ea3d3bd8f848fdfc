r"""The curves of a check, by layer: from the covariances V of tokens and what else was measured.

Pairs are of different tokens of one sequence, and means are over sequences.

  correlation, correlation_abs, correlation_95   mean, mean absolute, 95th percentile of ρ_αβ
  stable_rank      tr V/λ₁: |X|²_F/|X|₂², the number of directions that matter
  effective_rank   exp of the entropy of λ/tr V
  size             √(tr V/m), the root mean square of a coordinate
  relative_branch  by sublayer: size of the branch over that of the stream it is added to;
  group_size       `size` of words and of what stands among them, such as an image (group)
  agreement        of the outputs for two inputs that differ in one condition (`conditions`)
  gradient         |∂L/∂W| by kind of weight and block; several of one kind in a block (experts) count as one matrix

m tokens, λ eigenvalues of V, λ₁ the largest. `CURVES` has the title, the unit and the scale of each curve.

The law's band is where the curve of a new network lies with 90 % probability, given a few samples of the law.
x₁ … x_n are a curve's values at one layer in n networks, on the scale on which they are nearly normal: log for
positive numbers, artanh for correlations. A further one lies in

  x̄ ± t_{n−1}(0.95) s √(1 + 1/n)

with probability 0.9, for every n ≥ 2. (Quantiles of eight samples would hold at most 78 %.)
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray
from scipy import special  # scipy.stats takes a second to import

from limitformer.results.datasets import correlation
from limitformer.weightless.block_parts import DECAYS, ROUTER
from limitformer.weightless.observers.stream import BEFORE

Array = NDArray[np.float64]
LOG, ARTANH, LINEAR = "log", "artanh", "linear"


@dataclass(frozen=True)
class CurveInfo:
    """The names of a curve, its unit, and the scale on which networks vary normally.

    Attributes:
        title: of its panel; empty: it has no panel of its own.
        note: its unit, or what its values mean.
        row: its name in the table of the terminal; empty: it is not in the table.
        change: its name in the comparison of a trained network with a new one; empty: it is not compared.
        scale: "log" (positive), "artanh" (correlations) or "linear" (any sign).
        least: its smallest possible value.
    """

    title: str = ""
    note: str = ""
    row: str = ""
    change: str = ""
    scale: str = LOG
    least: float = -inf


CURVES: Mapping[str, CurveInfo] = {  # in the order of the page
    "correlation": CurveInfo(
        "Correlation of tokens, mean", "1: all tokens point the same way", "correlation",
        "mean correlation at the end", ARTANH,
    ),
    "correlation_abs": CurveInfo("Correlation of tokens, mean absolute", scale=ARTANH, least=0.0),
    "correlation_95": CurveInfo("Correlation of tokens, 95th percentile", scale=ARTANH),
    "size": CurveInfo("Stream", "root mean square of a coordinate", "stream", "stream at the end"),
    "relative_branch": CurveInfo("Branch", "size over that of the stream it is added to"),
    "step": CurveInfo("Step", "change in a block over the stream before it"),
    "stable_rank": CurveInfo("Stable rank of the tokens", "directions that matter, by the largest", least=1.0),
    "effective_rank": CurveInfo(
        "Effective rank of the tokens", "directions that matter, by entropy", "rank", "rank of the tokens at the end",
        least=1.0,
    ),
    "largest": CurveInfo("Largest activation", "largest |x| of the stream"),
    "typical": CurveInfo("Typical activation", "median |x| of the stream"),
    "logit_std": CurveInfo(
        "Logits' standard deviation", "in a row of attention, mean of heads", "logit std", "logit std, block"
    ),
    "effective_tokens": CurveInfo(
        "Effective tokens", "that a row of attention takes in, mean of heads", "eff. tokens",
        "effective tokens, block", least=1.0,
    ),
    "largest_logit": CurveInfo("Largest logit", "mean of heads", scale=LINEAR),
    "effective_experts": CurveInfo(
        "Effective experts", "that the tokens choose, by entropy", "eff. experts", "effective experts, block",
        least=1.0,
    ),
    "busiest_expert": CurveInfo("Busiest expert", "share of the tokens that choose it", least=0.0),
    "longest_memory": CurveInfo(
        "Longest memory", "half-life in tokens, of the slowest head", "memory", "longest memory, block"
    ),
    "median_memory": CurveInfo("Median memory", "half-life in tokens, of a typical head"),
    "stream_gradient": CurveInfo("Gradient of the stream", "norm of the loss's derivative", "gradient"),
    "gradient": CurveInfo(note="norm by block"),  # its panels have the names of weights
    "loss": CurveInfo(change="loss"),
    "logits_mean": CurveInfo(scale=LINEAR),
}  # fmt: skip
KEPT = 1.1  # largest over smallest size of a stream that a norm sets
PANELS = ("size", "correlation", "effective_rank", "logit_std", "effective_tokens", "stream_gradient")  # of the picture
TABLE = (*PANELS, "effective_experts", "longest_memory")  # of the terminal
BY_HEAD = ("logit_std", "effective_tokens", "largest_logit")
COMPUTED = ("stable_rank", "effective_rank", "correlation", "correlation_abs", "correlation_95", "relative_branch")
COPIED = (
    "branch", "step", "largest", "typical", "entropy", "effective_tokens", "tokens_seen", "logit_std",
    "largest_logit", *ROUTER, *DECAYS, "stream_gradient", "loss", "logits_mean", "logits_std",
)  # fmt: skip
LAYERWISE = frozenset(("size", *COPIED, *COMPUTED)) - {"loss", "logits_mean", "logits_std"}
LEVEL = 0.9
WITHOUT_BAND = ("tokens_seen", "unrelated_experts", "chosen_experts")  # not random


def curves(data: xr.Dataset) -> xr.Dataset:
    """Return the curves of a dataset of `weightless.simulate` or `measure_module`, by sample."""
    result = {name: data[name] for name in COPIED if name in data}
    result |= covariance_curves(data)
    if "branch" in data:
        result["relative_branch"] = relative_branch(data)
    if "weight_gradient" in data:
        result["gradient"], result["outside_gradient"] = by_kind(data["weight_gradient"])
    return xr.Dataset({name: curve.drop_vars("weight", errors="ignore") for name, curve in result.items()})


def covariance_curves(data: xr.Dataset) -> dict[str, xr.DataArray]:
    """Return correlations, size and ranks (sample, layer), means over sequences."""
    covariance = data["covariance"]
    with np.errstate(invalid="ignore"):  # a stream that is NaN or infinite has a verdict
        rho = correlation(data).values
    sequence = data["sequence"].values if "sequence" in data.coords else np.zeros(data.sizes["token"], int)
    parts = [np.flatnonzero(sequence == k) for k in np.unique(sequence)]
    each = [sequence_curves(covariance.values[..., at[:, None], at], rho[..., at[:, None], at]) for at in parts]
    first = covariance[..., 0, 0].drop_vars(["sequence", "word"], errors="ignore")
    return {name: first.copy(data=np.mean([one[name] for one in each], 0)) for name in each[0]}


def sequence_curves(v: Array, rho: Array) -> dict[str, Array]:
    """Return the curves of one sequence; V and ρ are (sample, layer, m, m)."""
    m = v.shape[-1]
    trace = np.trace(v, axis1=-2, axis2=-1)
    result = {"size": np.sqrt(trace / m)} | ranks(v, trace)
    if m > 1:
        pairs = rho[..., *np.triu_indices(m, 1)]
        result["correlation"] = pairs.mean(-1)
        result["correlation_abs"] = np.abs(pairs).mean(-1)
        result["correlation_95"] = np.quantile(pairs, 0.95, -1)
    return result


def ranks(v: Array, trace: Array) -> dict[str, Array]:
    """Return stable and effective rank; NaN for tokens that are zero or not finite."""
    sound = np.isfinite(v).all((-1, -2)) & (trace > 0)
    scaled = np.where(sound[..., None, None], v / np.where(sound, trace, 1.0)[..., None, None], np.eye(v.shape[-1]))
    part = np.clip(np.linalg.eigvalsh(scaled), 1e-300, None)
    entropy = -np.sum(part * np.log(part), -1)
    return {
        "stable_rank": np.where(sound, 1 / part[..., -1], np.nan),
        "effective_rank": np.where(sound, np.exp(entropy), np.nan),
    }


def relative_branch(data: xr.Dataset) -> xr.DataArray:
    """Return each branch over the stream that it is added to, (sample, block, sublayer)."""
    entering = np.sqrt(np.einsum("slii->sl", data["covariance"].values) / data.sizes["token"])[:, :-1]
    inside = np.sqrt(np.einsum("sbkii->sbk", data["covariance_inside"].values) / data.sizes["token"])
    before = np.concatenate([entering[:, :, None], inside[:, :, :-1]], 2)
    with np.errstate(divide="ignore", invalid="ignore"):
        return data["branch"] / before


def by_kind(gradient: xr.DataArray) -> tuple[xr.DataArray, xr.DataArray]:
    """Split norms (sample, weight) into (sample, kind, block), and those of weights outside the blocks."""
    places = [kind_and_block(str(name)) for name in gradient["weight"].values]
    kinds = list(dict.fromkeys(kind for kind, block in places if block >= 0))
    blocks = max((block for _, block in places), default=-1) + 1
    squared = np.full((gradient.sizes["sample"], len(kinds), blocks), np.nan)
    for (kind, block), column in zip(places, np.square(gradient.values).T, strict=True):
        if block >= 0:
            at = (slice(None), kinds.index(kind), block)
            squared[at] = np.where(np.isnan(squared[at]), 0.0, squared[at]) + column
    coordinates: dict[str, Any] = {"kind": kinds, "block": np.arange(1, blocks + 1)}
    for name in ("matrix", "read"):  # what is true of one weight is true of its kind
        if name in gradient.coords:
            true = {kind for (kind, _), value in zip(places, gradient[name].values, strict=True) if value}
            coordinates[name] = ("kind", [kind in true for kind in kinds])
    inside = xr.DataArray(np.sqrt(squared), coordinates, ("sample", "kind", "block"))
    outside = [k for k, (_, block) in enumerate(places) if block < 0]
    rest = gradient.drop_vars(["matrix", "read"], errors="ignore").isel(weight=outside).rename(weight="outside")
    if "read" in gradient.coords:  # under another name, because kinds have a coordinate `read`
        rest = rest.assign_coords(read_first=("outside", gradient["read"].values[outside] == BEFORE))
    return inside, rest


def gradient_of_matrices(curves: xr.Dataset) -> xr.DataArray:
    """Return the gradient by kind without gains and biases, whose size by block follows other rules."""
    gradient = curves["gradient"]
    return gradient.isel(kind=gradient["matrix"].values.astype(bool)) if "matrix" in gradient.coords else gradient


def gradient_ratio(norms: Array) -> tuple[Array, NDArray[Any], NDArray[Any]]:
    """Return the ratio of largest to smallest norm over blocks, the worst kind and its weakest block, each (sample,).

    The ratio is NaN where no norm is a number, and 1 where all norms of a kind are 0.

    Args:
        norms: (sample, kind, block).
    """
    largest, smallest = np.fmax.reduce(norms, 2), np.fmin.reduce(norms, 2)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(largest > 0, largest / smallest, 1.0)
    worst = np.argmax(np.where(np.isnan(ratio), 0.0, ratio), 1)
    known, samples = np.isfinite(norms).any((1, 2)), np.arange(len(norms))
    least = np.argmin(np.where(np.isnan(norms), np.inf, norms)[samples, worst], 1)
    return np.where(known, ratio[samples, worst], np.nan), worst, least


def kind_and_block(name: str) -> tuple[str, int]:
    """Return the kind and the block of a weight: `h.3.attn.c_proj.weight` is `h.*.attn.c_proj.weight` of block 3."""
    parts = name.split(".")
    numbers = [k for k, part in enumerate(parts) if re.fullmatch(r"\d+", part)]
    if not numbers:
        return name, -1
    return ".".join("*" if k in numbers else part for k, part in enumerate(parts)), int(parts[numbers[0]])


def over_heads(curve: xr.DataArray) -> xr.DataArray:
    """Return the mean over heads if the curve has heads."""
    return curve.mean("head") if "head" in curve.dims else curve


def typical(curve: xr.DataArray) -> Any:
    """Return the median over samples of the mean over heads."""
    return over_heads(curve).median("sample").values


def stream_ratio(size: Array) -> Array:
    """Return the size of the stream at the end over that at the start (sample,), from its size (sample, layer).

    The start is the embedding. It is the stream after the first block if that keeps its size from there on, within a
    tenth: a norm after each sum sets it, whatever the embedding's size is.
    """
    later = size[:, 1:]
    with np.errstate(divide="ignore", invalid="ignore"):
        kept = later.max(1) <= KEPT * later.min(1) if later.shape[1] > 2 else np.zeros(len(size), bool)
        return np.asarray(size[:, -1] / np.where(kept, size[:, min(1, size.shape[1] - 1)], size[:, 0]))


def medians(curves: xr.Dataset) -> dict[str, Any]:
    """Return `typical` of all curves as JSON holds it: lists by layer or block, by the name of a kind of weight.

    Numbers have five digits, and are None where they are not finite.
    """
    return {str(name): nested(typical(each), each) for name, each in curves.items() if "sample" in each.dims}


def nested(values: Array, curve: xr.DataArray) -> Any:
    names = next((curve[name].values for name in ("kind", "outside") if name in curve.dims), None)
    if names is not None:
        return {str(name): five_digits(each.tolist()) for name, each in zip(names, values, strict=True)}
    return five_digits(values.T.tolist())  # of sublayers each a list by block


def five_digits(values: Any) -> Any:
    if isinstance(values, list):
        return [five_digits(each) for each in values]
    return float(f"{values:.5g}") if np.isfinite(values) else None


def layer_numbers(curve: xr.DataArray) -> Any:
    """Return layers from 0, or blocks from 1."""
    name = "layer" if "layer" in curve.dims else "block"
    return curve[name].values if name in curve.coords else np.arange(curve.sizes[name])


# The law's band


def band(curves: xr.Dataset) -> xr.Dataset:
    """Return `low`, `middle` and `high` (edge) of each curve: its mean, and the band of one more network."""
    lawful = {name: each for name, each in curves.items() if "sample" in each.dims and name not in WITHOUT_BAND}
    return xr.Dataset(
        {name: edges(each, str(name)) for name, each in lawful.items()}, attrs={"samples": curves.sizes["sample"]}
    )


def edges(values: xr.DataArray, name: str) -> xr.DataArray:
    """Return (edge, …) of low, middle, high."""
    forward, back = scale_of(name)
    values = values.transpose("sample", ...)
    with np.errstate(all="ignore"):
        result = back(low_middle_high(forward(values.values.astype(float))))
    coordinates: dict[Any, Any] = {label: each for label, each in values.coords.items() if "sample" not in each.dims}
    coordinates["edge"] = ["low", "middle", "high"]
    result = np.clip(result, CURVES.get(name, CurveInfo()).least, None)
    return xr.DataArray(result, dims=("edge", *values.dims[1:]), coords=coordinates, attrs=values.attrs)


def low_middle_high(x: Array) -> Array:
    """Return the three edges (3, …) of x (sample, …), ignoring NaN."""
    known = ~np.isnan(x)
    count = known.sum(0)
    middle = np.where(known, x, 0).sum(0) / count
    apart = np.where(known, x - middle, 0)
    spread = np.sqrt((apart * apart).sum(0) / (count - 1))
    reach = special.stdtrit(np.where(count > 1, count - 1, np.nan), (1 + LEVEL) / 2)
    half = reach * spread * np.sqrt(1 + 1 / count)
    return np.stack([middle - half, middle, middle + half])


def scale_of(name: str) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """Return the function to the scale on which a curve is nearly normal, and its inverse."""
    scale = CURVES.get(name, CurveInfo()).scale
    if scale == ARTANH:
        return lambda x: np.arctanh(x.clip(-1 + 1e-15, 1 - 1e-15)), np.tanh
    if scale == LOG:
        return lambda x: np.log(x / (x > 0)), np.exp  # NaN at 0 and below
    return lambda x: x, lambda x: x


def inside(curves: xr.Dataset, law: xr.Dataset) -> xr.Dataset:
    """Return whether each value lies in the law's band; curves without a band are left out."""
    result = {}
    for name, each in curves.items():
        if name in law and bool(law[name].notnull().any()):
            low, high = law[name].sel(edge="low", drop=True), law[name].sel(edge="high", drop=True)
            rounding = 1e-6 * abs(high) + 1e-12  # of numbers that are not random
            known = each.notnull() & low.notnull()
            result[name] = ((each >= low - rounding) & (each <= high + rounding)).where(known)
    return xr.Dataset(result)


def surprises(curves: xr.Dataset, law: xr.Dataset) -> dict[str, float]:
    """Return, for each curve of one network, how probable its worst point is under the law.

    A point is x̄ + t s √(1 + 1/n), and t has Student's law with n − 1 degrees of freedom. Probabilities are corrected
    for the number of points of all curves (Bonferroni): in a sound network any of them is below 0.01 with probability
    at most 0.01.
    """
    freedom = int(law.attrs["samples"]) - 1
    reach = special.stdtrit(freedom, (1 + LEVEL) / 2)
    worst, points = {}, 0
    for name, each in curves.items():
        if name in law and bool(law[name].notnull().any()):
            forward, _ = scale_of(str(name))
            with np.errstate(all="ignore"):
                low, middle, high = (forward(law[name].sel(edge=edge, drop=True)) for edge in ("low", "middle", "high"))
                spread = (high - low) / 2 + 1e-9 * abs(middle) + 1e-12  # not 0 for numbers that are not random
                t = reach * abs(forward(each.isel(sample=0)) - middle) / spread
            known = t.values[np.isfinite(t.values)]
            if known.size:  # kinds of weight that the law lacks are not compared
                points += known.size
                worst[str(name)] = 2 * float(special.stdtr(freedom, -known.max()))
    return {name: min(1.0, p * points) for name, p in worst.items()}
