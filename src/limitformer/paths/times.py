"""Equal steps of a horizon."""

from math import ceil

from limitformer.base.errors import require, require_real


def whole_steps(horizon: float, dt: float) -> int:
    """The least number of equal steps of at most `dt`, up to rounding, that make the horizon."""
    dt = require_real("dt", dt)
    require(dt > 0, f"dt must be positive; got {dt}.")
    require(horizon / dt <= 2**53, f"dt must be at least {horizon / 2**53:.3g} for this horizon; got {dt}.")
    return max(1, ceil(horizon / dt - 1e-9))
