"""The chain of a model on the sphere: its own layers, L of them per unit of time."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from limitformer.base.errors import require
from limitformer.models import HybridTransformer, SphereModel, StochasticTransformer
from limitformer.models.sphere_start import SphereStart
from limitformer.sphere.layer import layer_of
from limitformer.sphere.methods import chosen_method
from limitformer.sphere.options import Method, SphereOptions
from limitformer.sphere.pair.process import PairPaths
from limitformer.sphere.process import SpherePaths
from limitformer.sphere.tokens.process import CoordinatePaths, GramPaths

PATHS: Mapping[Method, type[SpherePaths]] = {
    "overlap": PairPaths,
    "gram": GramPaths,
    "coordinates": CoordinatePaths,
}


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
    layers = whole_layers(options.horizon, per_unit)
    recorded = options.default_points(layers) if times is None else layers_at(times, model, layers)
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


def whole_layers(horizon: float, per_unit: int) -> int:
    layers = round(horizon * per_unit)
    whole = layers >= 1 and abs(horizon * per_unit - layers) <= 1e-9 * layers
    require(
        whole,
        f"horizon must be a whole number of layers, {per_unit} in a unit of time; got {horizon:g}. "
        f"Nearest: {max(layers, 1) / per_unit:g}.",
    )
    return layers


def layers_at(times: NDArray[np.float64], model: SphereModel, last: int) -> NDArray[np.int64]:
    """Return the layers nearest to these times, without duplicates."""
    horizon = last / model.layers_per_unit_time
    in_range = bool((times >= 0).all() and (times <= horizon * (1 + 1e-12)).all())
    require(in_range, f"Times to record must lie in [0, {horizon:g}]; got {times}.")
    return np.unique(np.rint(times * model.layers_per_unit_time).astype(np.int64))
