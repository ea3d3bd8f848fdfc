"""Paths of the SDE of tokens on the sphere: layers with Gaussian values, 1/dt of them in a unit of time."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from limitformer.base.errors import require, require_real
from limitformer.models import HybridTransformer, StochasticTransformer
from limitformer.models.kinds import of_kind
from limitformer.models.sphere_start import SphereStart
from limitformer.paths.times import whole_steps
from limitformer.sphere.layer import layer_of
from limitformer.sphere.limit import TokenLimit, averaged_rate
from limitformer.sphere.methods import chosen_method, has_averages
from limitformer.sphere.options import SphereOptions
from limitformer.sphere.process import SpherePaths

LONGEST_STEP = 0.01
COARSEST = 0.5  # product of a step that is asked for and the fastest rate; beyond, it is another model


def of_stochastic(model: StochasticTransformer) -> float:
    """The weak error is of this order; the spread of paths, to which it is compared, falls like 1/√dim."""
    return 0.01 / max(1.0, (model.dim / 4) ** 0.5)


def of_hybrid(_: HybridTransformer) -> float:
    """Its noise is common to all tokens, so that errors add up, but its step is cheap."""
    return 0.001


# Of the default step: its product with the fastest rate.
RESOLUTIONS: Mapping[type, Callable[[Any], float]] = {
    StochasticTransformer: of_stochastic,
    HybridTransformer: of_hybrid,
}


def chosen_step(limit: TokenLimit, dt: float | None, method: str = "gram") -> float:
    """dt, or what resolves the model where it is None; steps with averages need not resolve the draws.

    Raises:
        InputError: a dt that is no positive number, or too long for the model.
    """
    averaged = method == "overlap" and has_averages(limit.model)
    rate = averaged_rate(limit.model) if averaged else limit.fastest_rate
    enough = min(LONGEST_STEP, of_kind(limit.model, RESOLUTIONS)(limit.model) / rate)
    if dt is None:
        return enough
    dt = require_real("dt", dt)
    coarse = f"dt is too long for this model, whose tokens move at a rate of {rate:.3g}: it must be at most"
    require(dt * rate <= COARSEST, f"{coarse} {COARSEST / rate:.3g}; got {dt:g}. The default takes {enough:.3g}.")
    return dt


def token_paths(
    limit: TokenLimit, start: SphereStart, times: NDArray[np.float64] | None, options: SphereOptions, dt: float | None
) -> SpherePaths:
    """The paths, ready to run, in steps of at most `dt`, of which a whole number meets the horizon.

    Raises:
        InputError: a dt that cannot be used, or times outside [0, horizon].
    """
    method = chosen_method(limit.model, "gaussian", options, limit=True)
    dt = chosen_step(limit, dt, method)
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
        method=method,
        options=options,
        extra={"dt": float(dt), "actual_dt": actual},
    )
