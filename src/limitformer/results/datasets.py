"""Results: an xarray Dataset with dims, units and provenance; saved whole or not at all.

`covariance` (sample, depth or time, token, token_) is V; `variance`, `pair_covariance` and `distance` replace it for
pairs of tokens (`pairs_dataset`). `exit` (sample,) is the layer or time at which a path left the ball (∞ if it did not)
and `exit_cause` the reason. `start_covariance`, `start_means` and the attributes (`model` as JSON, `seed`, `samples`,
`radius`, and for a limit `dt` and `step`) suffice to reproduce the numbers; `recorded_bytes` is the memory of the
recorded arrays, `dtype` their type. Results on the sphere have other variables (`sphere_dataset`) and the options of
`simulate` among their attributes.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from math import isqrt
from typing import Annotated, Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from limitformer.base.errors import require
from limitformer.base.extras import package_version
from limitformer.models import Start
from limitformer.models.sphere import SphereStart
from limitformer.sampling.exits import CAUSES
from limitformer.sphere.outcome import LABELS

CAUSE_CODES = ", ".join(f"{code} {words}" for code, words in enumerate(CAUSES))


def covariance_dataset(
    covariance: NDArray[Any], exits: NDArray[np.float64], causes: NDArray[np.int8], *, axis: str, **about: Any
) -> xr.Dataset:
    """Return the Dataset of one simulation of V (samples, points, m, m); other arguments as for `path_dataset`."""
    attributes = {"long_name": "V = X X^T / width", "units": "1"}
    variables = {"covariance": (("sample", axis, "token", "token_"), covariance, attributes)}
    return path_dataset(variables, exits, causes, axis=axis, **about)


def pairs_dataset(
    variance: NDArray[Any],
    pair_covariance: NDArray[Any],
    distance: NDArray[Any],
    exits: NDArray[np.float64],
    causes: NDArray[np.int8],
    *,
    pairs: NDArray[np.int64],
    axis: str,
    **about: Any,
) -> xr.Dataset:
    """Return the Dataset of one simulation of `pairs` (pairs, 2); other arguments as for `path_dataset`.

    * `variance` (sample, depth or time, token): V_αα;
    * `pair_covariance` and `distance` (sample, depth or time, pair): V_αβ and |x_α − x_β|²/n of the tokens `first` and
      `second`. One layer or step rounds a distance by at most the attribute `distance_floor` times the larger variance.
    """
    dims, units = ("sample", axis, "pair"), {"units": "1"}
    variables = {
        "variance": (("sample", axis, "token"), variance, {"long_name": "|x|^2 / width", **units}),
        "pair_covariance": (dims, pair_covariance, {"long_name": "<x_first, x_second> / width", **units}),
        "distance": (dims, distance, {"long_name": "|x_first - x_second|^2 / width", **units}),
    }
    return path_dataset(variables, exits, causes, axis=axis, **about).assign_coords(pair_coordinates(pairs))


def path_dataset(
    variables: Mapping[str, Any],
    exits: NDArray[np.float64],
    causes: NDArray[np.int8],
    *,
    axis: str,
    points: NDArray[Any],
    start: Start,
    provenance: dict[str, Any],
    unit: str | None = None,
) -> xr.Dataset:
    """Return the Dataset of paths: `variables`, exits, start and provenance.

    `exits` and `causes` (samples,); `points` (points,) along `axis`, in `unit` (None: layers, or depth/width).
    """
    names = np.array(start.labels or [str(k) for k in range(start.tokens)])
    means = {} if start.means is None else {"start_means": ("token", start.means, {"units": "1"})}
    unit = unit or {"depth": "layer", "time": "depth/width"}[axis]
    return xr.Dataset(
        {
            **variables,
            "exit": (("sample",), exits, {"long_name": f"{axis} at the exit, inf if none", "units": unit}),
            "exit_cause": (("sample",), causes, {"long_name": CAUSE_CODES}),
            "start_covariance": (("token", "token_"), start.covariance, {"long_name": "V_0", "units": "1"}),
            **means,
        },
        coords={axis: (axis, points, {"units": unit}), "label": ("token", names, {"long_name": "label of the token"})},
        attrs={**provenance, **stamp(provenance.get("dtype", "float64"))},
    )


def sphere_dataset(
    outputs: dict[str, NDArray[Any]],
    *,
    times: NDArray[np.float64],
    pairs: NDArray[np.int64],
    start: SphereStart,
    provenance: dict[str, Any],
) -> xr.Dataset:
    """Return the Dataset of tokens on the sphere, with the quantities that `provenance["keep"]` names.

    * `overlap` and `gap` (sample, time, pair): z and 1 − |z|, exact also near ±1, of the tokens `first` and `second` of
      `pairs` (pairs, 2);
    * `clusters`, `largest_cluster`, `antipodal_pairs`, `unresolved_pairs` (sample, time);
    * `tokens` (sample, time, token, coordinate);
    * `stopped` (sample,): when a replica stopped early, ∞ if it did not; its last values stand at all later times.
    """
    variables: dict[str, Any] = {}
    coordinates: dict[str, Any] = {"time": ("time", times, {"units": "layers/layers_per_unit_time"})}
    if provenance["keep"] == "overlap":
        variables["overlap"] = (("sample", "time", "pair"), outputs["overlap"], {"long_name": "z", "units": "1"})
        variables["gap"] = (("sample", "time", "pair"), outputs["gap"], {"long_name": "1 - |z|", "units": "1"})
        coordinates |= pair_coordinates(pairs)
    if provenance["keep"] == "outcome":
        for k, name in enumerate(LABELS):
            variables[name] = (("sample", "time"), outputs["outcome"][..., k], {"units": "1"})
    if provenance["keep"] == "tokens":
        variables["tokens"] = (("sample", "time", "token", "coordinate"), outputs["tokens"], {"units": "1"})
    if "early_stop" in provenance:
        variables["stopped"] = (("sample",), outputs["stopped"], {"long_name": "time of an early stop"})
    if start.tokens is not None:
        variables["start_tokens"] = (("token", "coordinate"), start.tokens, {"units": "1"})
    overlap = {} if start.overlap is None else {"start_overlap": start.overlap}
    about = {**provenance, "start": start.description, **overlap, **stamp(provenance["dtype"])}
    return xr.Dataset(variables, coordinates, about)


def with_gradients(dataset: xr.Dataset, outputs: Mapping[str, NDArray[Any]], weights: list[str]) -> xr.Dataset:
    """Add `loss` (sample,), `stream_gradient` (sample, depth) and `weight_gradient` (sample, weight)."""
    units = {"units": "1"}
    added = {
        "loss": (("sample",), outputs["loss"], {"long_name": "|x|^2 / 2 of the last tokens, mean", **units}),
        "stream_gradient": (("sample", "depth"), outputs["stream_gradient"], {"long_name": "|d loss / dX|", **units}),
        "weight_gradient": (("sample", "weight"), outputs["weight_gradient"], {"long_name": "|d loss / dW|", **units}),
    }
    return dataset.assign(added).assign_coords(weight=weights)


def with_limit_gradients(dataset: xr.Dataset, outputs: Mapping[str, NDArray[Any]], weights: list[str]) -> xr.Dataset:
    """Add the gradients of a limit, in units of the width.

    `loss` and `tangent_kernel` (sample,), `stream_gradient` (sample, time) and `weight_gradient` (sample, time,
    weight).
    """
    paths = ("sample", "time")
    added = {
        "loss": (("sample",), outputs["loss"], {"long_name": "|x|^2 / 2 of the last tokens, mean", "units": "width"}),
        "stream_gradient": (paths, outputs["stream_gradient"], {"long_name": "|d loss / dX|", "units": "width"}),
        "weight_gradient": (
            (*paths, "weight"),
            outputs["weight_gradient"],
            {"long_name": "|d loss / dW|", "units": "width, of queries and keys width^(1/2)"},
        ),
        "tangent_kernel": (
            ("sample",),
            outputs["tangent_kernel"],
            {"long_name": "sum of |d loss / dW|^2", "units": "width^3"},
        ),
    }
    return dataset.assign(added).assign_coords(weight=weights)


def pair_coordinates(pairs: NDArray[np.int64]) -> dict[str, Any]:
    return {"first": ("pair", pairs[:, 0]), "second": ("pair", pairs[:, 1])}


def tokens_of(pairs: int) -> int:
    """Return how many tokens have this many pairs."""
    return (1 + isqrt(1 + 8 * pairs)) // 2


def stamp(dtype: str = "float64") -> dict[str, str]:
    """Return the version and the date of a result, and the type of its numbers."""
    created = datetime.now(UTC).isoformat(timespec="seconds")
    return {"limitformer_version": package_version(), "created": created, "dtype": dtype}


def correlation(dataset: xr.Dataset) -> Annotated[xr.DataArray, "sample layer token token", "sample layer pair"]:
    """Return ρ = V_αβ/√(V_αα V_ββ), with the dims of `covariance`, or of `pair_covariance` for recorded pairs.

    A token of variance 0, or below the least normal number of its type (1e-38 in float32), is dead: it has no
    correlation. Its ρ is set to 0, also with itself, so that means over tokens or samples stay numbers. A 0 on the
    diagonal of ρ marks such a token (of recorded pairs a 0 in `variance`); `rho.where(rho_αα > 0)` excludes it.

    Raises:
        InputError: the dataset has neither covariances nor pairs.
    """
    if "covariance" in dataset:
        v = dataset["covariance"]
        variance = np.diagonal(v.values, axis1=-2, axis2=-1)
        first, second = variance[..., :, None], variance[..., None, :]
    else:
        require("pair_covariance" in dataset, "correlation needs covariances or pairs of a Transformer's tokens.")
        v, variance = dataset["pair_covariance"], dataset["variance"].values
        first, second = (variance[..., dataset[name].values] for name in ("first", "second"))
    least = float(np.finfo(v.dtype).tiny)  # below it digits are lost
    rho = correlations(v.values, *(np.sqrt(np.where(part < least, 0, part)) for part in (first, second)))
    return v.copy(data=rho).rename("correlation").assign_attrs(long_name="correlation", units="1")


def correlations(v: NDArray[Any], first: NDArray[Any], second: NDArray[Any]) -> NDArray[Any]:
    """Return v/(first second) for standard deviations that broadcast to `v`; 0 where one of them is 0."""
    dead = (first == 0) | (second == 0)
    rho = v / np.where(first == 0, 1, first) / np.where(second == 0, 1, second)
    rho[np.broadcast_to(dead, rho.shape)] = 0
    return rho
