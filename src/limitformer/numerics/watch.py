"""A watch: an array through which the main thread halts a running kernel, and reads its progress.

Each kernel call has its own watch and reads it in every layer, or more often in a long layer, so that work ends soon
after Ctrl-C, however large the model is.
"""

import numpy as np
from numpy.typing import NDArray

from limitformer.numerics.kernels import kernel

# Places in a watch: whether to halt, the number of finished replicas, and the same with fractions of unfinished ones.
HALT, WHOLE, DONE = 0, 1, 2

Watch = NDArray[np.float64]


def new_watch() -> Watch:
    """Return the watch (3,) of a kernel that has not begun."""
    return np.zeros(3)


def halt(watch: Watch) -> None:
    """Let a kernel return within a layer."""
    watch[HALT] = 1.0


@kernel
def is_halted(watch):
    """Return whether the kernel should return."""
    return watch[HALT] != 0.0


@kernel
def keep_going(watch, replicas, share):
    """Record that a `share` of the layers of `replicas` replicas is done, and return whether to continue."""
    watch[DONE] = watch[WHOLE] + share * replicas
    return watch[HALT] == 0.0


@kernel
def count_whole(watch, replicas):
    """Record that `replicas` more replicas are finished."""
    watch[WHOLE] += replicas
    watch[DONE] = watch[WHOLE]
