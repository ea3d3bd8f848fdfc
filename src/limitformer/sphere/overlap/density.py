"""The law of the overlap at finite times as a Dataset; the scheme is in `transport`."""

import numpy as np
import xarray as xr
from numpy.typing import ArrayLike

from limitformer.base.errors import require, require_real
from limitformer.sphere.overlap.motion import Motion
from limitformer.sphere.overlap.position import Array, artanh, at_artanh
from limitformer.sphere.overlap.transport import (
    Chain,
    cell_width,
    chain,
    check_cells,
    check_width,
    evolve,
    extent,
    levelling,
    start_at_point,
    start_uniform,
)

NEAR_MINUS = 6.0  # a start at −1, or closer, begins at e^{−12} times the gap where the noise levels off
UNIFORM_TAIL = 30.0
LOST = 1e-10  # mass


def density_of(
    motion: Motion, dim: int, times: ArrayLike, start: float | None, spacing: float | None, steps: int
) -> xr.Dataset:
    t = checked_times(times)
    width = None if spacing is None else checked_spacing(spacing)
    if start is None:
        reach = UNIFORM_TAIL / (dim - 1)
        cells = fitted(motion, (-reach, reach), 0.0, t[-1], width)
        mass = start_uniform(cells, dim)
    else:
        centre = float(artanh(start))
        if motion.minus.growth < 0:
            centre = max(centre, levelling(motion) - NEAR_MINUS)
        cells = fitted(motion, (centre, centre), centre, t[-1], width)
        mass = start_at_point(cells, centre)
    return as_dataset(cells, evolve(cells, mass, t, steps), t)


def fitted(motion: Motion, starts: tuple[float, float], centre: float, horizon: float, width: float | None) -> Chain:
    """Return the chain on a grid wide enough for `horizon`."""
    low, high = extent(motion, starts, horizon)
    finest = cell_width(motion, low, high)
    fine = finest if width is None else width
    check_width(fine, finest)
    check_cells(low, high, fine)
    return chain(motion, low, high, centre, fine)


def as_dataset(cells: Chain, masses: Array, times: Array) -> xr.Dataset:
    """Return masses (times, n + 2) as densities and tallies.

    Raises:
        InputError: mass was lost, because doubles do not resolve the fastest rates over the requested times.
    """
    lost, least = float(np.abs(masses.sum(1) - 1).max()), float(masses.min())
    require(
        lost <= LOST and least >= -LOST,
        f"The density cannot be kept to {LOST:g} here: rates are too fast for these times (mass off by {lost:.2g}). "
        "Nearest: shorter times, or a smaller beta or dim.",
    )
    at = at_artanh(cells.centres)
    density = masses[:, 1:-1] / cells.width
    both = ("time", "artanh_overlap")
    return xr.Dataset(
        {
            "density": (both, density),
            "overlap_density": (both, density / (at.below * at.above)),
            "below": ("time", masses[:, 0]),
            "above": ("time", masses[:, -1]),
        },
        coords={"time": times, "artanh_overlap": cells.centres, "overlap": ("artanh_overlap", at.z)},
        attrs={"spacing": cells.width},
    )


def checked_times(times: ArrayLike) -> Array:
    """Return `times` as (n,); raise `InputError` unless they increase from at least 0."""
    t = np.atleast_1d(np.asarray(times, float))
    good = t.ndim == 1 and t.size > 0 and bool(np.isfinite(t).all()) and t[0] >= 0 and bool((np.diff(t) > 0).all())
    require(good, "times must be finite, increasing and at least 0, in one dimension.")
    require(t[-1] > 0, "times must end after 0.")
    return t


def checked_spacing(spacing: float) -> float:
    width = require_real("spacing", spacing)
    require(width > 0, f"spacing must be positive; got {width:g}.")
    return width
