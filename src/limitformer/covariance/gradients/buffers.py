"""Allocation of the named buffers that the kernels of this folder work on.

Each sublayer declares a NamedTuple of buffers and a function that returns it with the shape of each. The total of the
shapes is known before anything is allocated, so that a run that does not fit the memory is refused beforehand.
"""

from math import prod
from typing import Any

import numpy as np

from limitformer.numerics.lanes import LANES

# An array (*shape, LANES) once it is allocated; before, its shape.
Buffer = Any


def allocate(shapes: Any) -> Any:
    """Replace every shape in a NamedTuple, which may be nested, by zeros of that shape with LANES behind."""
    if hasattr(shapes, "_fields"):
        return type(shapes)(*map(allocate, shapes))
    size = prod(shapes) * LANES
    padded = np.zeros(size + LANES)
    skip = -padded.ctypes.data // 8 % LANES  # an entry begins at a multiple of its size, see `lanes.lane_matrix`
    return padded[skip : skip + size].reshape(*shapes, LANES)


def count_bytes(shapes: Any) -> int:
    """Return the size of all buffers of a NamedTuple of shapes."""
    if hasattr(shapes, "_fields"):
        return sum(map(count_bytes, shapes))
    return 8 * LANES * prod(shapes)
