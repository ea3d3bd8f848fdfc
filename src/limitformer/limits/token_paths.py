"""Paths of the SDE of tokens on the sphere: layers with Gaussian values, 1/dt of them in a unit of time."""

import numpy as np
from numpy.typing import NDArray

from limitformer.errors import require
from limitformer.limits.path import whole_steps
from limitformer.limits.tokens import TokenLimit
from limitformer.models.sphere_start import SphereStart
from limitformer.sphere.process import SphereOptions, SpherePaths, chosen_method, layer_of


def token_paths(
    limit: TokenLimit, start: SphereStart, times: NDArray[np.float64] | None, options: SphereOptions, dt: float
) -> SpherePaths:
    """The paths, ready to run, in steps of at most `dt`, of which a whole number meets the horizon.

    Raises:
        InputError: a dt that is not positive, or times outside [0, horizon].
    """
    steps = whole_steps(options.horizon, dt)
    actual = options.horizon / steps
    recorded = options.default_points(steps)
    if times is not None:
        in_range = bool((times >= 0).all() and (times <= options.horizon * (1 + 1e-12)).all())
        require(in_range, f"Times to record must lie in [0, {options.horizon:g}]; got {times}.")
        recorded = np.unique(np.rint(times / actual).astype(np.int64))
    return SpherePaths(
        model=limit.model,
        description="limit",
        layer=layer_of(limit.model, 1 / actual, "gaussian"),
        start=start,
        steps=steps,
        time_of_step=actual,
        step_numbers=recorded,
        method=chosen_method(limit.model, "gaussian", options),
        options=options,
        extra={"dt": float(dt), "actual_dt": actual},
    )
