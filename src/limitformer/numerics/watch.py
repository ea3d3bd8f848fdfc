"""A watch on kernels that run: the main thread tells them to halt, and they tell how far they are.

A kernel is given a watch of its own and looks at it in every layer, more often where a layer is long, so that no work
goes on for long after Ctrl-C, however large the model is.
"""

import numpy as np
from numpy.typing import NDArray

from limitformer.numerics.kernels import kernel

# Places in a watch: whether to halt, how many replicas are whole, and how many are done, those under way in part.
HALT, WHOLE, DONE = 0, 1, 2

Watch = NDArray[np.float64]


def new_watch() -> Watch:
    """(3,) of a kernel that has not begun."""
    return np.zeros(3)


def halt(watch: Watch) -> None:
    """Tell a kernel to return within a layer."""
    watch[HALT] = 1.0


@kernel
def is_halted(watch):
    """Whether the kernel is to return."""
    return watch[HALT] != 0.0


@kernel
def keep_going(watch, replicas, share):
    """Whether the `replicas` side by side, of whose layers a `share` is done, are to go on."""
    watch[DONE] = watch[WHOLE] + share * replicas
    return watch[HALT] == 0.0


@kernel
def count_whole(watch, replicas):
    """So many replicas more are whole."""
    watch[WHOLE] += replicas
    watch[DONE] = watch[WHOLE]
