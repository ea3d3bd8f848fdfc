r"""Integrals of e^{h} and e^{−h}, given only the slope of h = log s, which may rise and fall by thousands.

The line is cut into panels on which h changes by at most `LARGEST_RISE`, each with `NODES` Gauss-Legendre points; h
inside a panel is the integral of the polynomial through its slopes. For p = q the slopes have no pole
closer to the real line than π/4 (1/cosh(β(1 − z))) or π/2 (tanh), at any β, so that panels no wider than `WIDEST` give
15 digits; for clusters of ratio ρ = p/q the nearest is at about π/(2 log ρ). Values are relative to the left
edge of their panel, and sums over panels use logarithms, so that they do not overflow.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.polynomial import legendre

from limitformer.base.errors import require
from limitformer.sphere.overlap.motion import Motion, log_speed, slope_at
from limitformer.sphere.overlap.position import Array

NODES = 12
WIDEST = 0.25
LARGEST_RISE = 6.0
MOST_PANELS = 1_000_000


def integration_matrix(points: Array, weights: Array) -> Array:
    """Return (NODES, NODES); row i integrates the polynomial through the values at the points from −1 to point i."""
    values = legendre.legvander(points, NODES)  # P_0 … P_n at the points
    rises = values[:, 2:] - values[:, :-2]  # (2k + 1) ∫ P_k from −1, k = 1 … n − 1
    return 0.5 * weights * ((points + 1)[:, None] + rises @ values[:, 1:-1].T)


POINTS, WEIGHTS = legendre.leggauss(NODES)
CUMULATIVE = integration_matrix(POINTS, WEIGHTS)


@dataclass(frozen=True)
class Panels:
    """Panels between `edges` (n + 1) and, at their nodes (n, NODES), h − h(left edge) and log(2/g²).

    `rise` (n) is the change of h over a panel, `half` (n, 1) half its width.
    """

    motion: Motion
    edges: Array
    nodes: Array
    half: Array
    local: Array
    rise: Array

    @cached_property
    def log_speed(self) -> Array:
        """log(2/g²) at the nodes (n, NODES)."""
        return log_speed(self.motion, self.nodes)

    @cached_property
    def heights(self) -> Array:
        """h at the edges (n + 1), zero at the first."""
        return np.concatenate([[0.0], np.cumsum(self.rise)])

    def log_integral(self, exponent: Array) -> Array:
        """Return the log of the integral of e^{exponent} over each panel (n), from values at the nodes (n, NODES)."""
        top = exponent.max(axis=1, keepdims=True)
        with np.errstate(divide="ignore"):  # a panel of width 0
            return np.asarray(top[:, 0] + np.log((self.half * np.exp(exponent - top)) @ WEIGHTS))

    def from_left(self, values: Array) -> Array:
        """Integrate `values` (n, NODES) from the left edge to each node (n, NODES)."""
        return self.half * (values @ CUMULATIVE.T)

    def to_right(self, values: Array) -> Array:
        """Integrate `values` (n, NODES) from each node to the right edge (n, NODES)."""
        return self.half * (values @ (WEIGHTS - CUMULATIVE).T)


def panels(motion: Motion, cuts: Array) -> Panels:
    """Return fine panels with `cuts` (m,), increasing, among their edges."""
    return on_edges(motion, refined(motion, cells(motion, cuts)))


def cells(motion: Motion, cuts: Array) -> Array:
    """Return edges at most `WIDEST` and `motion.widest` apart, `cuts` among them."""
    widest = min(WIDEST, motion.widest)
    return split(cuts, np.ceil(np.diff(cuts) / widest))


def refined(motion: Motion, edges: Array, least: float = 0.0) -> Array:
    """Cut cells until h, or a function of slope `least`, changes by at most `LARGEST_RISE` in each."""
    steepest = np.maximum(np.abs(slope_at(motion, thirds(edges))).max(axis=1), least)
    return split(edges, np.ceil(steepest * np.diff(edges) / LARGEST_RISE))


def thirds(edges: Array) -> Array:
    """Return both edges and the middle of each cell (n, 3)."""
    return np.stack([edges[:-1], (edges[:-1] + edges[1:]) / 2, edges[1:]], axis=1)


def split(edges: Array, parts: Array) -> Array:
    """Cut cell k into `parts[k]` equal parts."""
    total = float(parts.sum())
    require(
        total <= MOST_PANELS,
        f"The scale function is too steep there: its integral needs {total:.2g} panels, and at most {MOST_PANELS} are "
        "made. Nearest: a smaller beta or dim, or points closer to 1.",
    )
    counts = np.maximum(parts, 1).astype(int)
    first = np.cumsum(counts) - counts
    position = np.arange(counts.sum()) - np.repeat(first, counts)
    inner = np.repeat(edges[:-1], counts) + position * np.repeat(np.diff(edges) / counts, counts)
    return np.append(inner, edges[-1])


def on_edges(motion: Motion, edges: Array) -> Panels:
    """Return panels between consecutive `edges` (n + 1)."""
    half = np.diff(edges)[:, None] / 2
    return panels_at(motion, edges, edges[:-1, None] + half * (1 + POINTS), half)


def panels_at(motion: Motion, edges: Array, nodes: Array, half: Array) -> Panels:
    """Return panels with the given nodes (n, NODES); panels need not touch."""
    slopes = slope_at(motion, nodes)
    local = half * (slopes @ CUMULATIVE.T)
    return Panels(motion, edges, nodes, half, local, half[:, 0] * (slopes @ WEIGHTS))


def separate(motion: Motion, left: Array, right: Array) -> Panels:
    """Return one panel for each pair `left` (n,) ≤ `right` (n,), with the edges `left`."""
    half = (right - left)[:, None] / 2
    return panels_at(motion, left, left[:, None] + half * (1 + POINTS), half)
