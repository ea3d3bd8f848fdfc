r"""The scale function of the overlap, and the probabilities of its ends.

With h = log s in u, the two basic integrals are relative to the point itself,

  lower(u) = log ∫_{−∞}^u e^{h(v) − h(u)} dv,   upper(u) = log ∫_u^∞ e^{h(v) − h(u)} dv,

each infinite if its end does not attract. Hence log P(Z → −1 | u) = −log(1 + e^{lower − upper}) cannot overflow
[CT, eq. 24]. Beyond ±reach, h is linear and they are −log|slope|. Hybrid models at large β are
*steep* toward −1: the slope grows like e^{β(1−z)}, to e^{2β}. Where |h′| exceeds `STEEP`, integration by parts gives
e^{−lower} = h′ − (log|h′|)′ if h rises, and e^{−upper} = |h′| + (log|h′|)′ if it falls, to a relative (2β/h′)².

A start uniform on the sphere has the density sech(u)^{d−1}/B((d−1)/2, 1/2) in u.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.special import betainc, betaln, logsumexp

from limitformer.base.errors import InputError, require
from limitformer.sphere.overlap.motion import Motion, slope_at
from limitformer.sphere.overlap.panels import WEIGHTS, Panels, cells, on_edges, refined, separate, thirds
from limitformer.sphere.overlap.position import Array, at_artanh, log_cosh

STEEP = 1e5


@dataclass(frozen=True)
class ScaleFunction:
    """The function log s on the whole line, and its two integrals."""

    motion: Motion

    @cached_property
    def cells(self) -> Panels:
        """Wide panels from reach to reach; fine enough for h but not for e^h."""
        ends = np.array([self.motion.minus.reach, 0.0, self.motion.plus.reach])
        return on_edges(self.motion, cells(self.motion, ends))

    @cached_property
    def core_edges(self) -> Array:
        """Edges of the wide panels that are not steep; raises `InputError` if +1 is steep too."""
        edges = self.cells.edges
        steep = np.abs(slope_at(self.motion, thirds(edges))).min(axis=1) > STEEP
        require(
            not steep[-1],
            f"The scale function is too steep: s ~ exp({self.motion.plus.slope:.2g} u) toward 1. Nearest: epsilon "
            "= 0, a larger one or a beta nearer to 0 for the hybrid model, dim up to 100000 for the stochastic one.",
        )
        return edges[int(np.flatnonzero(~steep)[0]) :]

    @cached_property
    def core(self) -> Panels:
        """Panels fine enough for e^h where h is not steep."""
        return on_edges(self.motion, refined(self.motion, self.core_edges))

    @cached_property
    def _heights(self) -> Array:
        """log s at the edges of the wide panels, zero at u = 0."""
        rise, middle = self.cells.rise, int(np.searchsorted(self.cells.edges, 0.0))
        lower = -np.cumsum(rise[:middle][::-1])[::-1]
        return np.concatenate([lower, [0.0], np.cumsum(rise[middle:])])

    def log_scale(self, u: Array) -> Array:
        """Return log s(u), s(0) = 1, as a density in u; `u` of any shape."""
        edges, (minus, plus) = self.cells.edges, (self.motion.minus, self.motion.plus)
        near = np.clip(u, minus.reach, plus.reach)
        cell = np.clip(np.searchsorted(edges, near, side="right") - 1, 0, len(edges) - 2)
        part = separate(self.motion, edges[cell].ravel(), near.ravel()).rise.reshape(near.shape)
        beyond = np.where(u < near, minus.slope, plus.slope) * (u - near)
        return np.asarray(self._heights[cell] + part + beyond)

    def lower(self, u: Array) -> Array:
        """Return log ∫_{−∞}^u s/s(u) for u (n,); infinite if −1 does not attract."""
        if not self.motion.minus.slope > 0:
            return np.full(u.shape, np.inf)
        cell, near = self._place(u)
        part = separate(self.motion, self.core.edges[cell], near)
        below = self._from_below[cell] - self.core.heights[cell] - part.rise
        value = np.logaddexp(below, part.log_integral(part.local) - part.rise)
        return self._left_of_core(u, value)

    def upper(self, u: Array) -> Array:
        """Return log ∫_u^∞ s/s(u) for u (n,); infinite if +1 does not attract."""
        if not self.motion.plus.slope < 0:
            return np.full(u.shape, np.inf)
        cell, near = self._place(u)
        part = separate(self.motion, near, self.core.edges[cell + 1])
        above = self._from_above[cell + 1] - self.core.heights[cell + 1] + part.rise
        value = np.logaddexp(above, part.log_integral(part.local))
        if self.motion.minus.slope < 0:
            return self._left_of_core(u, value)
        return value + np.where(u < near, self.log_scale(near) - self.log_scale(u), 0.0)

    def _place(self, u: Array) -> tuple[Array, Array]:
        """Return the point of the core nearest to u, after the number of its panel."""
        edges = self.core.edges
        near = np.clip(u, edges[0], edges[-1])
        return np.clip(np.searchsorted(edges, near, side="right") - 1, 0, len(edges) - 2), near

    def _left_of_core(self, u: Array, value: Array) -> Array:
        """Replace values at points left of the core by the tail."""
        out, outside = value.copy(), u < self.core.edges[0]
        out[outside] = self.left_tail(u[outside])
        return out

    @property
    def is_steep(self) -> bool:
        """Whether log s is too steep for panels toward −1."""
        return bool(self.core_edges[0] > self.cells.edges[0])

    def left_tail(self, u: Array) -> Array:
        """Return `lower` of a rising, `upper` of a falling log s, for u left of the core."""
        if not self.is_steep:
            return np.full(u.shape, -np.log(abs(self.motion.minus.slope)))
        slope = slope_at(self.motion, u)
        return np.asarray(-np.log(np.abs(slope) - np.sign(slope) * log_slope_growth(self.motion, u)))

    @cached_property
    def _from_below(self) -> Array:
        """log ∫_{−∞}^{edge} s at the edges of the core (n + 1), s = 1 at the first."""
        first = self.left_tail(self.core.edges[:1])
        parts = self.core.log_integral(self.core.local) + self.core.heights[:-1]
        return np.logaddexp.accumulate(np.concatenate([first, parts]))

    @cached_property
    def _from_above(self) -> Array:
        """log ∫_{edge}^∞ s at the edges of the core (n + 1), s = 1 at the first."""
        last = self.core.heights[-1:] - np.log(-self.motion.plus.slope)
        parts = self.core.log_integral(self.core.local) + self.core.heights[:-1]
        return np.logaddexp.accumulate(np.concatenate([parts, last])[::-1])[::-1]

    def log_probability(self, u: Array) -> Array:
        """Return log P(Z → −1 | u) for u (n,)."""
        if not self.motion.minus.slope > 0:
            return np.full(u.shape, -np.inf)
        if not self.motion.plus.slope < 0:
            return np.zeros(u.shape)
        return -np.logaddexp(0.0, self.lower(u) - self.upper(u))

    def uniform_log_probability(self, dim: int) -> float:
        """Return log P(Z → −1) from a start uniform on the sphere of R^dim."""
        if not self.motion.minus.slope > 0:
            return -np.inf
        if not self.motion.plus.slope < 0:
            return 0.0
        fine = on_edges(self.motion, refined(self.motion, self.core_edges, least=dim - 1.0))
        top = fine.heights[:-1, None]
        parts = fine.log_integral(fine.local) + top[:, 0]
        last = fine.heights[-1] - np.log(-self.motion.plus.slope)
        above = np.logaddexp.accumulate(np.append(parts, last)[::-1])[::-1]
        total = np.logaddexp(above[0], self.left_tail(fine.edges[:1])[0])
        log_p = np.logaddexp(above[1:, None], top + np.log(fine.to_right(np.exp(fine.local)))) - total
        middle = logsumexp(log_p + log_uniform(fine.nodes, dim), b=fine.half * WEIGHTS)
        below = uniform_below(fine.edges[0], dim)
        beyond = above[-1] - total + log_uniform(fine.edges[-1], dim) - np.log(dim - 1 - self.motion.plus.slope)
        with np.errstate(divide="ignore"):
            return float(logsumexp([np.log(below), middle, beyond]))

    def return_probability(self, level: Array, start: Array) -> Array:
        """Return P(ever at `level` | start) for u (n,) each."""
        up = self._log_come_back(self.upper, level, start) if self.motion.plus.slope < 0 else np.zeros(level.shape)
        down = self._log_come_back(self.lower, level, start) if self.motion.minus.slope > 0 else np.zeros(level.shape)
        return np.exp(np.minimum(np.where(start > level, up, np.where(start < level, down, 0.0)), 0.0))

    def _log_come_back(self, tail, level: Array, start: Array) -> Array:
        """Return the log of the ratio of the tails of S beyond `start` and beyond `level`."""
        return tail(start) - tail(level) + self.log_scale(start) - self.log_scale(level)


def log_slope_growth(motion: Motion, u: Array) -> Array:
    """Return (log|h′|)′."""
    step = 1e-4 / (1 + motion.beta)
    ahead, behind = slope_at(motion, u + step), slope_at(motion, u - step)
    return np.asarray(np.log(ahead / behind) / (2 * step))


def log_uniform(u: Array, dim: int) -> Array:
    """Return the log density in u of the overlap of two independent uniform tokens on the sphere of R^dim."""
    return -(dim - 1) * log_cosh(u) - betaln((dim - 1) / 2, 0.5)


def uniform_below(u: Array | float, dim: int) -> Array:
    """Return P(z < tanh u) for two independent uniform tokens on the sphere of R^dim."""
    return np.asarray(betainc((dim - 1) / 2, (dim - 1) / 2, at_artanh(u).above / 2))


@dataclass(frozen=True)
class FlowScale:
    """The counterpart of `ScaleFunction` without noise, where u only rises."""

    motion: Motion

    def log_scale(self, u: Array) -> Array:
        raise InputError("There is no scale density without noise; epsilon must be positive.")

    def log_probability(self, u: Array) -> Array:
        return np.full(u.shape, -np.inf)

    def uniform_log_probability(self, dim: int) -> float:
        return -np.inf

    def return_probability(self, level: Array, start: Array) -> Array:
        return np.where(start > level, 0.0, 1.0)
