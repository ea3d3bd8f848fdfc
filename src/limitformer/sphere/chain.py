"""The chain of a model on the sphere: its own layers, L of them per unit of time.

Paths of the SDE are layers with Gaussian values, 1/dt of them per unit of time.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from limitformer.base.errors import require, require_real
from limitformer.models import HybridTransformer, SphereModel, StochasticTransformer
from limitformer.models.kinds import of_kind
from limitformer.models.sphere import SphereStart
from limitformer.sampling.process import whole_steps
from limitformer.sphere.limit import TokenLimit, averaged_rate
from limitformer.sphere.methods import Method, SphereOptions, chosen_method, has_averages, layer_of
from limitformer.sphere.pair.process import AveragedPairPaths, PairPaths
from limitformer.sphere.process import SpherePaths
from limitformer.sphere.tokens.process import CoordinatePaths, GramPaths

PATHS: Mapping[Method, type[SpherePaths]] = {"overlap": PairPaths, "gram": GramPaths, "coordinates": CoordinatePaths}


def sphere_chain(
    model: StochasticTransformer | HybridTransformer,
    start: SphereStart,
    times: NDArray[np.float64] | None,
    options: SphereOptions,
) -> SpherePaths:
    """Return the chain, ready to run; without `times` it records `options.default_points`.

    Raises:
        InputError: the horizon is not a whole number of layers, or a time lies outside it.
    """
    per_unit = model.layers_per_unit_time
    layers = round(options.horizon * per_unit)
    require(
        layers >= 1 and abs(options.horizon * per_unit - layers) <= 1e-9 * layers,
        f"horizon must be a whole number of layers, {per_unit} in a unit of time; got {options.horizon:g}. "
        f"Nearest: {max(layers, 1) / per_unit:g}.",
    )
    recorded = options.default_points(layers)
    if times is not None:
        require_within(times, layers / per_unit)
        recorded = np.unique(np.rint(times * per_unit).astype(np.int64))
    paths = PATHS[chosen_method(model, model.values, options)]
    return paths(
        model=model,
        description="chain",
        layer=layer_of(model, per_unit, model.values),
        start=start,
        steps=layers,
        time_of_step=1 / per_unit,
        step_numbers=recorded,
        options=options,
    )


def require_within(times: NDArray[np.float64], horizon: float) -> None:
    in_range = bool((times >= 0).all() and (times <= horizon * (1 + 1e-12)).all())
    require(in_range, f"Times to record must lie in [0, {horizon:g}]; got {times}.")


LONGEST_STEP = 0.01
COARSEST = 0.5  # largest product of `dt` and the fastest rate; a longer step is another model


# Product of the default step and the fastest rate.
RESOLUTIONS: Mapping[type, Callable[[Any], float]] = {
    # The weak error is of this order and is compared to the spread of paths, which falls like 1/√dim.
    StochasticTransformer: lambda model: 0.01 / max(1.0, (model.dim / 4) ** 0.5),
    # The noise is common to all tokens, so errors add up; steps are cheap.
    HybridTransformer: lambda _: 0.001,
}


def chosen_step(limit: TokenLimit, dt: float | None, method: str = "gram") -> float:
    """Return `dt`, or a step that resolves the model if it is None; averaged attention has no draws to resolve.

    Raises:
        InputError: `dt` is not a positive number, or is too long for the model.
    """
    rate = averaged_rate(limit.model) if is_averaged(limit.model, method) else limit.fastest_rate
    enough = min(LONGEST_STEP, of_kind(limit.model, RESOLUTIONS)(limit.model) / rate)
    if dt is None:
        return enough
    dt = require_real("dt", dt)
    coarse = f"dt is too long for this model, whose tokens move at a rate of {rate:.3g}: it must be at most"
    require(dt * rate <= COARSEST, f"{coarse} {COARSEST / rate:.3g}; got {dt:g}. The default takes {enough:.3g}.")
    return dt


def is_averaged(model: SphereModel, method: str) -> bool:
    return method == "overlap" and has_averages(model)


def token_paths(
    limit: TokenLimit, start: SphereStart, times: NDArray[np.float64] | None, options: SphereOptions, dt: float | None
) -> SpherePaths:
    """Return the paths, ready to run, in steps of at most `dt` that divide the horizon.

    Raises:
        InputError: `dt` cannot be used, or a time lies outside [0, horizon].
    """
    method = chosen_method(limit.model, "gaussian", options, limit=True)
    dt = chosen_step(limit, dt, method)
    steps = whole_steps(options.horizon, dt)
    actual = options.horizon / steps
    recorded = options.default_points(steps)
    if times is not None:
        require_within(times, options.horizon)
        recorded = np.unique(np.rint(times / actual).astype(np.int64))
    paths = AveragedPairPaths if is_averaged(limit.model, method) else PATHS[method]
    return paths(
        model=limit.model,
        description="limit",
        layer=layer_of(limit.model, 1 / actual, "gaussian"),
        start=start,
        steps=steps,
        time_of_step=actual,
        step_numbers=recorded,
        options=options,
        extra={"dt": float(dt), "actual_dt": actual},
    )
