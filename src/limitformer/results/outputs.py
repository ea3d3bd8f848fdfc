r"""Read-outs of the last layer, which given V are Gaussian with covariance V [ST, Sec. 2, eq. 21].

X_out = X W_out/√n with W_out (n × n_out) i.i.d. N(0, 1). Given X its n_out columns are i.i.d. N(0, XXᵀ/n), which
depends on X only by V = XXᵀ/n: X_out | V_T ~ N(0, V_T ⊗ I). For a chain this is exact at every width; for an SDE it is
the law as d and n → ∞. V_T is random, so the outputs are a mixture of Gaussians, with heavier tails: of
one token E x⁴ = 3 E V², not 3 (E V)². In an infinitely wide network V_T is a number, and the outputs are a Gaussian
process.
"""

from typing import Annotated

import numpy as np
import xarray as xr

from limitformer.base.errors import require, require_count
from limitformer.numerics.factor import root
from limitformer.numerics.random import key, replica_normals


def outputs(
    paths: xr.Dataset, *, units: int, seed: int, at: float | None = None
) -> Annotated[xr.DataArray, "sample token units"]:
    """Draw the outputs of every sample, given its covariance.

    Args:
        paths: a simulation of a `Transformer` or its limit.
        units: n_out, coordinates of an output.
        seed: of W_out; it may equal that of the paths, whose numbers are independent.
        at: the recorded layer or time that is read out; None for the last.

    Returns:
        Dims (sample, token, unit). A path that left the ball has the covariance of its exit.

    Raises:
        InputError: other data, or a layer or time that was not recorded.

    >>> import limitformer as lf
    >>> net = lf.Transformer(width=64, depth=8, gamma=0.5, attention=lf.ShapedAttention(tau0=1.0))
    >>> paths = lf.simulate(net, [[1.0, 0.2], [0.2, 1.0]], samples=10, seed=0)
    >>> lf.outputs(paths, units=3, seed=0).shape
    (10, 2, 3)
    """
    units = require_count("units", units)
    covariance = covariance_at(paths, at)
    samples, tokens = covariance.sizes["sample"], covariance.sizes["token"]
    normals = replica_normals(key(seed, "outputs"), samples, tokens * units).reshape(samples, tokens, units)
    return xr.DataArray(
        root(covariance.values, tokens) @ normals,
        dims=("sample", "token", "unit"),
        coords={"label": covariance["label"]},
        name="outputs",
        attrs={"long_name": "X W_out / sqrt(width)", "units": "1", "seed": seed, "model": paths.attrs["model"]},
    )


def covariance_at(paths: xr.Dataset, at: float | None) -> xr.DataArray:
    """Return V (sample, token, token_) at a recorded layer or time, the last one if None."""
    known = isinstance(paths, xr.Dataset) and "covariance" in paths
    require(known, "outputs needs the covariances that simulate makes of a Transformer or of its limit.")
    covariance = paths["covariance"]
    axis = str(covariance.dims[1])
    points = covariance[axis].values
    if at is None:
        return covariance[:, -1]
    matches = np.flatnonzero(np.isclose(points, at, rtol=1e-9, atol=0))
    near = f"{points[np.abs(points - at).argmin()]:g}"
    require(len(matches) > 0, f"The {axis} {at:g} was not recorded. Nearest: {near}.")
    return covariance[:, int(matches[0])]
