"""Correlations of tokens, from covariances or from pairs of tokens."""

from typing import Annotated, Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from limitformer.base.errors import require


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
