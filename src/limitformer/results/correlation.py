"""Correlations of tokens, from covariances or from pairs."""

from typing import Annotated, Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from limitformer.base.errors import require


def correlation(dataset: xr.Dataset) -> Annotated[xr.DataArray, "sample layer token token", "sample layer pair"]:
    """ρ = V_αβ/√(V_αα V_ββ): same dims as `covariance`, or those of `pair_covariance` where pairs are kept.

    A token of variance 0, or below the least normal number of its type (1e-38 in float32), has no correlation. It
    counts as 0, with itself too: a 0 on the diagonal of ρ marks such a token (`variance` does where pairs are kept),
    and a mean over tokens or samples stays a number, with 0 for what has died. Who must not count the dead leaves them
    out: `rho.where(rho_αα > 0)`.

    Raises:
        InputError: neither covariances nor pairs.
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
    """v/(first second) for standard deviations of the shape of `v` or one that fits it; 0 where one of them is 0."""
    dead = (first == 0) | (second == 0)
    rho = v / np.where(first == 0, 1, first) / np.where(second == 0, 1, second)
    rho[np.broadcast_to(dead, rho.shape)] = 0
    return rho


def dead_samples(dataset: xr.Dataset) -> NDArray[np.bool_]:
    """(sample,): whether a token of the sample has variance 0 at some recorded point."""
    values = dataset["variance"].values if "variance" in dataset else dataset["covariance"].values
    variance = values if "variance" in dataset else np.diagonal(values, axis1=-2, axis2=-1)
    return np.asarray((variance == 0).any((1, 2)))
