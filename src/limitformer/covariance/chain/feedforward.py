r"""The feed-forward sublayer's output factor: U Uᵀ = (c/n_h) Σⱼ σ(hⱼ) σ(hⱼ)ᵀ.

The columns hⱼ of the pre-activation X W_pre/√n = R (Q W_pre) are i.i.d. N(0, R Rᵀ), one for each of the n_h hidden
units. A Gaussian matrix follows them, so only the lower triangular factor of √(c/n_h) σ(h) (m × n_h) matters. In a
gated pair another such column, of X W_gate/√n, multiplies σ(hⱼ).
"""

from collections.abc import Callable, Mapping
from math import erf
from typing import Any, NamedTuple

import numpy as np

from limitformer.covariance.chain.own import NOTHING, call_elementwise, elementwise_address
from limitformer.models import GELU, Elementwise, Feedforward, Gated, ReLU, ShapedReLU, ShapedSmooth
from limitformer.models.functions import function_of
from limitformer.models.kinds import of_kind
from limitformer.numerics.factor import FIRST, copy, multiply_into, triangularise
from limitformer.numerics.kernels import allocator, kernel
from limitformer.numerics.lanes import LANES, everywhere, lane_matrix, larger, load, smaller, store
from limitformer.numerics.random import next_normal
from limitformer.numerics.watch import is_halted

TILE = 64  # hidden units computed at a time, few enough for the cache

PIECEWISE_LINEAR, GAUSSIAN_ERROR, OWN = 0, 1, 2

# The activation; its slopes s₊ and s₋, or s and 1/s of s σ(x/s); its address; whether it is gated.
Kernel = tuple[int, float, float, int, bool]


def piecewise(part: ShapedReLU | ReLU, width: int) -> Kernel:
    return PIECEWISE_LINEAR, *part.slopes(width), NOTHING, False


def smooth(part: GELU, width: int) -> Kernel:
    return GAUSSIAN_ERROR, 1.0, 1.0, NOTHING, False


def own(part: Elementwise | Gated, width: int) -> Kernel:
    return OWN, 1.0, 1.0, elementwise_address(function_of(part)), type(part) is Gated


def shaped(part: ShapedSmooth, width: int) -> Kernel:
    scale = part.scale_at(width)
    return OWN, scale, 1 / scale, elementwise_address(function_of(part)), False


KERNELS: Mapping[type, Callable[[Any, int], Kernel]] = {
    ShapedReLU: piecewise,
    ReLU: piecewise,
    GELU: smooth,
    Elementwise: own,
    Gated: own,
    ShapedSmooth: shaped,
}


def kernel_of(part: Feedforward, width: int) -> Kernel:
    """Return the kernel of the activation of `part` at this width; raise `InputError` if it has none."""
    return of_kind(part, KERNELS)(part, width)


class FeedforwardConstants(NamedTuple):
    """The numbers of a feed-forward layer; `gain` is √(c/n_h), and the activation is described as in `Kernel`."""

    hidden: int
    gain: float
    activation: int
    positive: float
    negative: float
    address: int
    gated: bool
    derivative: int = NOTHING  # the address of σ′, for gradients


class FeedforwardWorkspace(NamedTuple):
    """Scratch matrices, each with LANES as its last dimension."""

    normals: np.ndarray  # (r, TILE)
    rows: np.ndarray  # (m, m + TILE): the factor of the units so far, and the next units


@allocator
def feedforward_workspace(tokens, rank):
    return FeedforwardWorkspace(lane_matrix(rank, TILE), lane_matrix(tokens, tokens + TILE))


@kernel
def hidden_units(stream, factor, constants, work, out, watch):
    """The lower triangular factor of √(c/n_h) σ(h) into `out` (m, m), tile after tile."""
    m = factor.shape[0]
    for begin in range(0, constants.hidden, TILE):
        if is_halted(watch):
            return
        size = min(TILE, constants.hidden - begin)
        if begin > 0:
            copy(out, work.rows)
        draw_units(stream, factor, size, work)
        activate(work.rows, m, m + size, constants)
        if constants.gated:
            multiply_by_gates(stream, factor, size, work)
        triangularise(work.rows, FIRST if begin > 0 else m, m + size, out, FIRST)


@kernel
def draw_units(stream, factor, size, work):
    """Pre-activations hⱼ = R gⱼ, gⱼ ~ N(0, I), of `size` units behind the first m columns of `work.rows`."""
    for k in range(factor.shape[1]):
        for j in range(size):
            store(work.normals, k, j, next_normal(stream))
    multiply_into(factor, work.normals, size, work.rows, factor.shape[0])


@kernel
def multiply_by_gates(stream, factor, size, work):
    """Multiply each unit in `work.rows` by R g, with another g for each."""
    m = factor.shape[0]
    for k in range(factor.shape[1]):
        for j in range(size):
            store(work.normals, k, j, next_normal(stream))
    for i in range(m):
        for j in range(size):
            gate = everywhere(0.0)
            for k in range(factor.shape[1]):
                gate = gate + load(factor, i, k) * load(work.normals, k, j)
            store(work.rows, i, m + j, gate * load(work.rows, i, m + j))


@kernel
def activate(rows, first, last, constants):
    """√(c/n_h) σ of columns first … last − 1, in place."""
    if constants.activation == GAUSSIAN_ERROR:
        gaussian_error(rows, first, last, constants.gain)
    elif constants.activation == OWN:
        for i in range(rows.shape[0]):
            if constants.negative != 1.0:
                for j in range(first, last):
                    store(rows, i, j, constants.negative * load(rows, i, j))
            call_elementwise(constants.address, rows, i, first, last, constants.gain * constants.positive)
    else:
        piecewise_linear(rows, first, last, constants.gain * constants.positive, constants.gain * constants.negative)


@kernel
def piecewise_linear(rows, first, last, positive, negative):
    """s₊ max(x, 0) + s₋ min(x, 0)."""
    for i in range(rows.shape[0]):
        for j in range(first, last):
            x = load(rows, i, j)
            store(rows, i, j, positive * larger(x, 0.0) + negative * smaller(x, 0.0))


@kernel
def gaussian_error(rows, first, last, gain):
    """gain·x Φ(x)."""
    for i in range(rows.shape[0]):
        for j in range(first, last):
            for lane in range(LANES):
                x = rows[i, j, lane]
                rows[i, j, lane] = gain * x * 0.5 * (1.0 + erf(x * 0.7071067811865476))
