r"""Two tokens under attention alone: their squared distance d = V₀₀ + V₁₁ − 2V₀₁ is a diffusion by itself.

In the drift of [ST, Thm 4.2] the second-order terms of two tokens cancel, P = d²/16, and

  dd = γ²d³/(16τ₀²) dt + √(2γ²(2 − γ²) d² + γ⁴d⁴/(4τ₀²)) dB.

Its scale function has the density f(x) = (1 + x²/K²)^{−1/(4γ²)}, K² = 8τ₀²(2 − γ²)/γ². If γ² ≥ ½, ∫₀^∞ f = ∞ and d
returns from everywhere; if γ² < ½ it explodes in finite time with the probability ∫₀^{d₀} f / ∫₀^∞ f (Feller's test;
the proof is in the theory page). With x = K sinh u the density is f dx = K cosh^{−p} u du,
p = 1/(2γ²) − 1, and

  P(ever) = I_{d₀²/(d₀² + K²)}(½, p/2)      (regularised incomplete beta function),
  P(d reaches R before 0) = ∫₀^{u(d₀)} cosh^{−p} / ∫₀^{u(R)} cosh^{−p},  for every γ.

**By a time.** w(t, d) = P(R, or ∞, reached by t) solves w_t = L w with w(t, 0) = 0, w(t, R) = 1. In the scale
S = ∫f and the speed measure dm = 2 dd/(σ² f) the generator is L = d/dm d/dS: on a grid of log d a tridiagonal matrix
A whose hitting probabilities are exact, so that w(T) = w(∞) − exp(TA) w(∞), w(∞) = S/S(R). The outermost cell is
joined to R, or ∞, by the scale that lies between, where d moves in no time compared with T. exp(TA) is the inverse
Laplace transform of (z − A)⁻¹ by the trapezoidal rule on a parabola [Weideman and Trefethen, Math. Comp. 76, 2007].
"""

from dataclasses import dataclass
from math import asinh, exp, inf, log, log1p, pi, sqrt

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import solve_banded
from scipy.special import betainc

from limitformer.base.errors import require, require_real

Array = NDArray[np.float64]

CELLS = 4000
NEAR, FAR = 1e-9, 1e5  # the grid begins at NEAR min(d₀, K) and ends where d moves FAR² times as fast as T
FALLEN = 300.0  # − log f at the end of the grid, at most: f is still a double
POINTS = 24  # of the parabola: the error falls like 2.85^−points
LEAST = 1e-10  # the parabola's error: a smaller probability is 0


@dataclass(frozen=True, kw_only=True)
class PairDistance:
    """The diffusion of the squared distance d.

    Attributes:
        gamma: γ in (0, 1].
        tau0: τ₀.
    """

    gamma: float
    tau0: float

    @property
    def scale_length(self) -> float:
        """The length K of the scale function."""
        return self.tau0 / self.gamma * sqrt(8 * (2 - self.gamma**2))

    @property
    def decay(self) -> float:
        """The exponent p of the scale function."""
        return 1 / (2 * self.gamma**2) - 1

    def ever(self, distance: float, radius: float) -> float:
        """Return P(d reaches `radius`, which may be infinite), from `distance`."""
        if distance >= radius:
            return 1.0
        if radius == inf:
            ratio = distance / self.scale_length
            return float(betainc(0.5, self.decay / 2, ratio**2 / (1 + ratio**2))) if self.decay > 0 else 0.0
        return exp(self.log_scale(0.0, distance) - self.log_scale(0.0, radius)) if distance > 0 else 0.0

    def log_scale(self, near: float, far: float) -> float:
        """Return log ∫ cosh^{−p} between two distances, the further of which may be infinite if p > 0."""
        from scipy.integrate import quad  # slow to import, and workers of sweeps do not need it

        p, low, high = self.decay, asinh(near / self.scale_length), asinh(far / self.scale_length)
        top = -p * log_cosh(high if p < 0 else low)
        # Beyond about 40/|p| from its maximum the integrand is below 1e-17 of it.
        width = 40 / abs(p) + 1 if p else inf
        low, high = (max(low, high - width), high) if p < 0 else (low, min(high, low + width))
        value, _ = quad(lambda u: exp(-p * log_cosh(u) - top), low, high, epsabs=0, epsrel=1e-12, limit=500)
        return top + log(value)

    def by(self, time: float, distance: float, radius: float) -> float:
        """Return P(d reaches `radius`, which may be infinite, within `time`), from `distance`."""
        if distance >= radius:
            return 1.0
        if distance == 0:
            return 0.0
        if log(distance) > min(self.fastest(time), self.fallen):
            return self.ever(distance, radius)  # which takes no time
        logs = self.grid(time, distance, radius)
        lower, diagonal, upper, eventually = self.generator(logs, radius)
        waiting = exponential_of(time, lower, diagonal, upper, eventually)
        probability = float(np.interp(log(distance), logs, eventually - waiting))
        return min(probability, 1.0) if probability > LEAST else 0.0

    def fastest(self, time: float) -> float:
        """Return log d beyond which d moves `FAR`² times as fast as `time`."""
        return log(FAR) + log(2 * self.tau0 / self.gamma**2 / sqrt(time))

    @property
    def fallen(self) -> float:
        """The value of log d where f is e^−`FALLEN`."""
        rise = 2 * FALLEN / (self.decay + 1)  # of log(1 + d²/K²)
        return log(self.scale_length) + (rise + log1p(-exp(-rise))) / 2

    def grid(self, time: float, distance: float, radius: float) -> Array:
        """Return values of log d, among them log `distance`."""
        low = log(NEAR) + log(min(distance, self.scale_length))
        high = min(max(self.fastest(time), log(distance) + 1, log(self.scale_length) + 1), self.fallen)
        if radius < inf:
            high = min(high, log(radius))
        step = (high - low) / CELLS
        below = np.arange(log(distance), low, -step)[::-1]
        above = np.arange(log(distance) + step, high, step)
        return np.concatenate([below, above])

    def generator(self, logs: Array, radius: float) -> tuple[Array, Array, Array, Array]:
        """Return the lower, main and upper diagonal of A, and w(∞) at the cells."""
        scale, beyond = self.scale_steps(logs, radius)
        half = np.append(np.diff(logs), logs[-1] - logs[-2]) / 2
        mass = self.speed_density(logs) * (half + np.append(half[0], half[:-1]))
        up, down = 1 / (mass * np.append(scale[1:], beyond)), 1 / (mass * scale)
        total = np.cumsum(scale)
        return down[1:], -(up + down), up[:-1], total / (total[-1] + beyond)

    def scale_steps(self, logs: Array, radius: float) -> tuple[Array, float]:
        """Return ∫f over the steps of the grid, the first from 0, and ∫f from the last cell to the radius."""
        nodes, weights = np.polynomial.legendre.leggauss(4)
        step = np.diff(logs)
        points = logs[:-1, None] + step[:, None] * (nodes + 1) / 2
        inner = (self.density(points) * np.exp(points) * weights).sum(1) * step / 2
        first = exp(logs[0])  # f = 1 there
        return np.append(first, inner), self.scale_length * exp(self.log_scale(exp(logs[-1]), radius))

    def density(self, logs: Array) -> Array:
        """Return f at exp(logs)."""
        return np.exp(-np.logaddexp(0, 2 * (logs - log(self.scale_length))) * (self.decay + 1) / 2)

    def speed_density(self, logs: Array) -> Array:
        """Return 2/(σ² f) d, the density of the speed measure over log d."""
        squared = self.gamma**2
        linear, mixing = 2 * squared * (2 - squared), squared**2 / (4 * self.tau0**2)
        rate = linear + mixing * np.exp(2 * logs)
        return 2 / (rate * np.exp(logs) * self.density(logs))


def log_cosh(u: float) -> float:
    """Return log cosh u, for u ≥ 0."""
    return u - log(2) + log1p(exp(-2 * u))


def exponential_of(time: float, lower: Array, diagonal: Array, upper: Array, vector: Array) -> Array:
    """Return exp(time A) vector for a tridiagonal A with real eigenvalues ≤ 0."""
    bands = np.zeros((3, len(vector)), complex)
    bands[0, 1:], bands[2, :-1] = -upper, -lower
    angles = (2 * np.arange(POINTS) + 1) / POINTS - 1  # ± π in steps, over π
    total = np.zeros(len(vector))
    for angle in angles[angles > 0] * pi:
        z = POINTS / time * (0.1309 - 0.1194 * angle**2 + 0.2500j * angle)
        slope = POINTS / time * (-0.2388 * angle + 0.2500j)
        bands[1] = z - diagonal
        resolvent = solve_banded((1, 1), bands, vector.astype(complex))
        total += 2 * (np.exp(z * time) * slope * resolvent).imag / POINTS
    return total


def explosion_probability(gamma: float, tau0: float, distance: float, time: float | None, radius: float) -> float:
    """Return P(d reaches `radius` within `time`, or ever), or raise `InputError`; at γ = 0 nothing moves."""
    radius = inf if radius == inf else require_real("radius", radius)
    require(radius > 0, f"radius must be positive; got {radius:g}.")
    if time is not None:
        time = require_real("time", time)
        require(time > 0, f"time must be positive, or None for ever; got {time:g}.")
    if gamma == 0:
        return float(distance >= radius)
    pair = PairDistance(gamma=gamma, tau0=tau0)
    if time is None or (radius == inf and pair.decay <= 0):
        return pair.ever(distance, radius)
    return pair.by(time, distance, radius)
