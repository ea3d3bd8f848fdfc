r"""The law of the overlap at finite times: the Fokker-Planck equation in u = artanh z.

With scale density s and speed density m = 2/(g² s), the flux of a density p is −(p/m)′/s. On cells of width Δ, with p
constant in a cell, mass goes from the cell at u_i to the next at the rate

  1/( Δ m(u_i) · ∫_{u_i}^{u_{i+1}} s ),

and back at the rate with m(u_{i+1}): a birth-death chain with the hitting probabilities of the diffusion (the scheme of
Scharfetter and Gummel, the integral taken to 15 digits). Where log s changes by x in a cell, its drift is that of the
diffusion, whatever x is, and its noise g² is (x/2) coth(x/2) ≈ 1 + x²/12 times as large; with p/m constant instead,
∫ m in place of Δ m, the drift would be x/(2 sinh(x/2)) of what it is. Mass that crosses the end of the grid toward an
attracting end goes to a tally and does not return; an end that does not attract is closed. The tallies are two more
states, so that the mass is conserved.

The time steps are four of backward Euler, which smooth a start at one point, then TR-BDF2, second order and L-stable,
at the times T(k/n)³. Backward Euler is positive for every step; it replaces a TR-BDF2 step with a negative result.

The noise of unequal clusters is unbounded toward −1, which they leave at once. The grid is closed there, at most 12
below the u where their noise levels off.
"""

from dataclasses import dataclass
from itertools import pairwise
from math import log, sqrt

import numpy as np
import xarray as xr
from numpy.typing import ArrayLike
from scipy.linalg import solve_banded

from limitformer.base.errors import require, require_real
from limitformer.sphere.overlap.motion import End, Motion, log_speed, slope_at
from limitformer.sphere.overlap.panels import on_edges
from limitformer.sphere.overlap.position import Array, artanh, at_artanh
from limitformer.sphere.overlap.scale import uniform_below

MOST_CELLS = 200_000
WIDEST_CELL = 0.05
LARGEST_CELL_RISE = 0.25  # x, which makes the noise 0.5 % too large
COARSEST_RISE = 2.0  # x for the largest `spacing`, which makes the noise 31 % too large
FORGET = 30.0  # a mass of e^{−30} lies beyond the ends, or returns
BEFORE_END = 4.0  # |u| from which the slope is nearly that of the end, plus log(1 + β)/2
SMOOTHING_STEPS = 4
DEEPEST = 12.0  # the noise there is e^{12} times that where it levels off
ROUNDING = 1e-15


@dataclass(frozen=True)
class Chain:
    """Cells of `width` around `centres` (n,), with rates (n,) up and down; the outer ones lead to the tallies."""

    centres: Array
    width: float
    up: Array
    down: Array

    def bands(self, step: float) -> Array:
        """Return I − step·A as bands (3, n + 2), where A moves mass between lower tally, cells and upper tally."""
        bands = np.zeros((3, len(self.centres) + 2))
        bands[1] = 1.0
        bands[1, 1:-1] += step * (self.up + self.down)
        bands[0, 1:-1] = -step * self.down
        bands[2, 1:-1] = -step * self.up
        return bands

    def change(self, mass: Array) -> Array:
        """Return A·`mass` (n + 2) as differences of fluxes."""
        flux = np.zeros(len(mass) - 1)
        flux[1:] = self.up * mass[1:-1]
        flux[:-1] -= self.down * mass[1:-1]
        return -np.diff(flux, prepend=0.0, append=0.0)


def chain(motion: Motion, low: float, high: float, centre: float, width: float) -> Chain:
    """Return the chain on about (low, high) with a cell at `centre`, closed at ends that do not attract."""
    first, last = int(np.floor((low - centre) / width)), int(np.ceil((high - centre) / width))
    centres = centre + width * np.arange(first, last + 1, dtype=np.float64)
    pieces = on_edges(motion, centre + width / 2 * np.arange(2 * first - 1, 2 * last + 2, dtype=np.float64))
    # Half cells: left of u_i and right of u_i; all logs are relative to h(u_i).
    mass = log(width) + log_speed(motion, centres)
    scale = pieces.log_integral(pieces.local)
    left_scale, right_scale = scale[0::2] - pieces.rise[0::2], scale[1::2]
    rise = pieces.rise[1:-1:2] + pieces.rise[2::2]
    step = np.logaddexp(right_scale[:-1], left_scale[1:] + rise)
    up = np.append(-step, -right_scale[-1]) - mass
    down = np.append(-left_scale[0], rise - step) - mass
    up[-1] = up[-1] if motion.plus.slope < 0 else -np.inf
    down[0] = down[0] if motion.minus.growth == 0 and motion.minus.slope > 0 else -np.inf
    return Chain(centres, width, np.exp(up), np.exp(down))


def start_uniform(cells: Chain, dim: int) -> Array:
    """Return the mass (n + 2) of two independent tokens, uniform on the sphere of R^dim.

    Mass beyond an end goes to its tally, or to the last cell if the end is closed.
    """
    edges = np.append(cells.centres - cells.width / 2, cells.centres[-1] + cells.width / 2)
    # Each tail is computed from its own side, without cancellation.
    below, above = uniform_below(edges, dim), uniform_below(-edges, dim)
    inner = np.where(edges[1:] < 0, np.diff(below), -np.diff(above))
    mass = np.concatenate([below[:1], inner, above[-1:]])
    for tally, cell, rate in ((0, 1, cells.down[0]), (-1, -2, cells.up[-1])):
        if rate == 0:
            mass[cell] += mass[tally]
            mass[tally] = 0.0
    return mass


def evolve(cells: Chain, mass: Array, times: Array, steps: int) -> Array:
    """Return masses (times, n + 2) at `times`, increasing, from `mass` (n + 2) at time 0."""
    graded = times[-1] * (np.arange(steps + 1) / steps) ** 3
    grid = np.unique(np.concatenate([graded, times]))
    out = np.empty((len(times), len(mass)))
    out[times == 0] = mass
    for number, (now, after) in enumerate(pairwise(grid)):
        advance = backward_euler if number < SMOOTHING_STEPS else positive_step
        mass = advance(cells, mass, after - now)
        out[times == after] = mass
    return out


def backward_euler(cells: Chain, mass: Array, dt: float) -> Array:
    return solve(cells, dt, mass)


def positive_step(cells: Chain, mass: Array, dt: float) -> Array:
    """Apply TR-BDF2, or backward Euler if the result is not positive."""
    after = tr_bdf2(cells, mass, dt)
    return after if after.min() >= -ROUNDING else backward_euler(cells, mass, dt)


def tr_bdf2(cells: Chain, mass: Array, dt: float) -> Array:
    """Apply TR-BDF2 with the fraction 2 − √2 [Hosea and Shampine, 1996], which needs one matrix for both stages."""
    part = 2 - sqrt(2)
    middle = solve(cells, part * dt / 2, mass + part * dt / 2 * cells.change(mass))
    weight = 1 / (part * (2 - part))
    return solve(cells, part * dt / 2, weight * middle + (1 - weight) * mass)


def solve(cells: Chain, step: float, right: Array) -> Array:
    """Return x with x − step·A x = `right` (n + 2).

    Rounding loses the 1 on the diagonal at rates of 10¹⁶/step, and mass with it. One correction by the residual, whose
    fluxes conserve mass, restores it.
    """
    bands = cells.bands(step)
    x = solve_banded((1, 1), bands, right)
    return np.asarray(x + solve_banded((1, 1), bands, right - x + step * cells.change(x)))


def extent(motion: Motion, starts: tuple[float, float], horizon: float) -> tuple[float, float]:
    """Return (low, high); paths from between the two `starts` leave it by `horizon` with probability about e^{−30}."""
    speed, noise = fastest(motion)
    farthest = speed * horizon + 8 * noise * sqrt(horizon) + 1
    high = min(max(starts) + farthest, settling_point(motion.plus, motion, max(starts)))
    if motion.minus.growth < 0:
        return deepest(motion), high
    return max(min(starts) - farthest, -settling_point(motion.minus, motion, -min(starts))), high


def fastest(motion: Motion) -> tuple[float, float]:
    """Return the largest |drift| and noise of u on the line, or right of −`reach` if they are unbounded."""
    at = at_artanh(np.linspace(-motion.plus.reach, motion.plus.reach, 2000))
    return float(np.abs(motion.drift(at)).max()), float(np.sqrt(motion.variance(at).max()))


def settling_point(end: End, motion: Motion, start: float) -> float:
    """Return the |u| beyond which, toward `end`, a mass of e^{−30} returns or stays."""
    decay = FORGET / abs(end.slope) if end.slope != 0 else np.inf
    return max(start, BEFORE_END + np.log1p(motion.beta) / 2) + decay


def levelling(motion: Motion) -> float:
    """Return the u where the noise of unequal clusters levels off."""
    return motion.minus.reach + motion.plus.reach


def deepest(motion: Motion) -> float:
    """Return the u where the grid of unequal clusters is closed."""
    return levelling(motion) - min(DEEPEST, FORGET / (-motion.minus.growth - motion.minus.slope))


NEAR_MINUS = 6.0  # a start at −1, or closer, begins at e^{−12} times the gap where the noise levels off
UNIFORM_TAIL = 30.0
LOST = 1e-10  # mass


def density_of(
    motion: Motion, dim: int, times: ArrayLike, start: float | None, spacing: float | None, steps: int
) -> xr.Dataset:
    t = checked_times(times)
    width = None if spacing is None else require_real("spacing", spacing)
    if width is not None:
        require(width > 0, f"spacing must be positive; got {width:g}.")
    if start is None:
        reach = UNIFORM_TAIL / (dim - 1)
        cells = fitted(motion, (-reach, reach), 0.0, t[-1], width)
        mass = start_uniform(cells, dim)
    else:
        centre = float(artanh(start))
        if motion.minus.growth < 0:
            centre = max(centre, levelling(motion) - NEAR_MINUS)
        cells = fitted(motion, (centre, centre), centre, t[-1], width)
        mass = np.zeros(len(cells.centres) + 2)
        mass[1 + int(np.argmin(np.abs(cells.centres - centre)))] = 1.0
    masses = evolve(cells, mass, t, steps)
    lost, least = float(np.abs(masses.sum(1) - 1).max()), float(masses.min())
    require(
        lost <= LOST and least >= -LOST,
        f"The density cannot be kept to {LOST:g} here: rates are too fast for these times (mass off by {lost:.2g}). "
        "Nearest: shorter times, or a smaller beta or dim.",
    )
    at = at_artanh(cells.centres)
    density = masses[:, 1:-1] / cells.width
    both = ("time", "artanh_overlap")
    return xr.Dataset(
        {
            "density": (both, density),
            "overlap_density": (both, density / (at.below * at.above)),
            "below": ("time", masses[:, 0]),
            "above": ("time", masses[:, -1]),
        },
        coords={"time": t, "artanh_overlap": cells.centres, "overlap": ("artanh_overlap", at.z)},
        attrs={"spacing": cells.width},
    )


def fitted(motion: Motion, starts: tuple[float, float], centre: float, horizon: float, width: float | None) -> Chain:
    """Return the chain on a grid wide enough for `horizon`; raise `InputError` for cells too wide or too many."""
    low, high = extent(motion, starts, horizon)
    steepest = float(np.abs(slope_at(motion, np.linspace(low, high, 2000))).max())
    finest = min(WIDEST_CELL, LARGEST_CELL_RISE / steepest)
    fine, widest = finest if width is None else width, finest * COARSEST_RISE / LARGEST_CELL_RISE
    require(
        fine <= widest,
        f"spacing must be at most {widest:.3g} for this model, or its noise would be far too large; got {fine:g}. "
        f"The default takes {finest:.3g}.",
    )
    cells = (high - low) / fine
    require(
        cells <= MOST_CELLS,
        f"The density needs {cells:.2g} cells; the limit is {MOST_CELLS}. Nearest: shorter times, a smaller "
        "beta or dim, or more noise.",
    )
    return chain(motion, low, high, centre, fine)


def checked_times(times: ArrayLike) -> Array:
    """Return `times` as (n,); raise `InputError` unless they increase from at least 0."""
    t = np.atleast_1d(np.asarray(times, float))
    good = t.ndim == 1 and t.size > 0 and bool(np.isfinite(t).all()) and t[0] >= 0 and bool((np.diff(t) > 0).all())
    require(good, "times must be finite, increasing and at least 0, in one dimension.")
    require(t[-1] > 0, "times must end after 0.")
    return t
