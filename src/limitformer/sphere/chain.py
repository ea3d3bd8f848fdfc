"""The chain of a model on the sphere: its own layers, L of them in a unit of time."""

import numpy as np
from numpy.typing import NDArray

from limitformer.base.errors import require
from limitformer.models import HybridTransformer, SphereModel, StochasticTransformer
from limitformer.models.sphere_start import SphereStart
from limitformer.sphere.layer import layer_of
from limitformer.sphere.methods import chosen_method
from limitformer.sphere.options import SphereOptions
from limitformer.sphere.process import SpherePaths


def sphere_chain(
    model: StochasticTransformer | HybridTransformer,
    start: SphereStart,
    times: NDArray[np.float64] | None,
    options: SphereOptions,
) -> SpherePaths:
    """The chain, ready to run; `times` that are None stand for `options.default_points`.

    Raises:
        InputError: a horizon or a time that is no whole number of layers.
    """
    per_unit = model.layers_per_unit_time
    layers = whole_layers(options.horizon, per_unit)
    recorded = options.default_points(layers) if times is None else layers_at(times, model, layers)
    return SpherePaths(
        model=model,
        description="chain",
        layer=layer_of(model, per_unit, model.values),
        start=start,
        steps=layers,
        time_of_step=1 / per_unit,
        step_numbers=recorded,
        method=chosen_method(model, model.values, options),
        options=options,
        extra={},
    )


def whole_layers(horizon: float, per_unit: int) -> int:
    """Layers to the horizon."""
    layers = round(horizon * per_unit)
    whole = layers >= 1 and abs(horizon * per_unit - layers) <= 1e-9 * layers
    require(
        whole,
        f"horizon must be a whole number of layers, {per_unit} in a unit of time; got {horizon:g}. "
        f"Nearest: {max(layers, 1) / per_unit:g}.",
    )
    return layers


def layers_at(times: NDArray[np.float64], model: SphereModel, last: int) -> NDArray[np.int64]:
    """The layers nearest to these times; those that fall together count once."""
    horizon = last / model.layers_per_unit_time
    in_range = bool((times >= 0).all() and (times <= horizon * (1 + 1e-12)).all())
    require(in_range, f"Times to record must lie in [0, {horizon:g}]; got {times}.")
    return np.unique(np.rint(times * model.layers_per_unit_time).astype(np.int64))
