r"""Attention of two clusters with queries and keys drawn in each layer: averages over the logits.

Depth averages over the draws: the step of a layer is small, and the limit depends on QᵀK only by the mean of ⟨Aⁱ, Aʲ⟩.
With weights (1 ± T)/2 (`pair.unlike`) on a cluster itself and on the other one, the letters of `weights` become

  G = (1 + C)/2,   X = (1 − C)/2,   D = E (T₁ − T₂)²/2,   C = E T₁T₂,

where T₁ = tanh((x + y)/2), T₂ = tanh((x − y)/2), x ~ N(0, b²(1 − z)²) and y ~ N(λ, b²(1 − z²)) are independent, b = βτ,
and λ = log(p/q) for clusters of p and q tokens. Both are functions of cosh x and cosh y alone,

  T₁T₂ = (cosh x − cosh y)/(cosh x + cosh y),      (T₁ − T₂)²/2 = 2 sinh²y/(cosh x + cosh y)².

For p = q, D vanishes at −1, and its *bend* q̃ = D/(1 + z) is finite. At −1

  C = m = E tanh²(bs),    q̃ = q = b² E sech⁴(bs),    s ~ N(0, 1).

For a product of two matrices with k rows the logits are normal with the deviation b√(χ²_k/k), which is averaged too.

**Method.** The fractions have no pole nearer than π to the real line, so even points FINE apart integrate them to 15
digits. If y is wide, the average over x comes first. With F(y) = E_x tanh((x + y)/2), which differs from an error
function only within a few units of x = −y,

  E_x (1 − T₁T₂) = 2 coth(y) F(y),      E_x (T₁ − T₂)²/2 = 2 (coth(y) F(y) − F′(y)).

As functions of u = artanh z the averages vary over a few units for every b. They are tabulated once, as polynomials on
panels.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import log1p, sqrt

import numpy as np
from numpy.polynomial import legendre
from scipy.special import erf

from limitformer.sphere.overlap.position import Array, Position, at_artanh

POINTS, WEIGHTS = legendre.leggauss(10)
FARTHEST = 8.5  # deviations of a normal
TURN = np.array([0.0, 1.25, 2.5, 5.0, 10.0, 20.0])  # edges of panels where functions turn about 0
BEYOND = 38.0  # where 1 + e^{−x} = 1 in doubles
FINE, WIDE = 0.6, 6.0  # step of the lattice; deviation above which it is too long
FALLEN, LONGEST_STEP = 25.0, 0.2  # e^{−25} of a mixture is omitted; step of its logarithm
WIDTH, MIXED_WIDTH, TAIL_WIDTH = 0.5, 1.0, 2.0  # of panels in u
TAIL, LAST = 9.0, 19.0  # where the tail begins and ends, plus log(1 + b)
DEGREE = 12


@dataclass(frozen=True)
class Averages:
    """Averages of the mixtures of two clusters (`weights.ClusterMixtures`), all of one shape."""

    spread: Array  # D
    aligned: Array  # G
    crossed: Array  # X


@dataclass(frozen=True)
class DrawnAttention:
    """C, and D (for p = q the bend D/(1 + z)), as functions of the position.

    Attributes:
        b: βτ.
        odds: λ = log(p/q).
        head_dim: rows of Q and K; None for normal entries.
    """

    b: float
    odds: float = 0.0
    head_dim: int | None = None

    def __call__(self, at: Position) -> tuple[Array, Array]:
        """Return (C, q̃) for p = q, else (C, D)."""
        with np.errstate(divide="ignore"):
            u = 0.5 * (np.log(at.above) - np.log(at.below))
        return table(self).at(u)

    def averages(self, at: Position) -> Averages:
        """Return the letters D, G and X of `weights`."""
        product, other = self(at)
        spread = other if self.odds else other * at.above
        return Averages(spread, (1 + product) / 2, (1 - product) / 2)

    @property
    def near_ends(self) -> float:
        """(1 + b)² − 1, the factor of e^{−2|u|} near the ends (`motion.reach`)."""
        return self.b * (self.b + 2)

    @property
    def last(self) -> float:
        """The |u| beyond which C and q̃ have their values at the ends."""
        return LAST + log1p(self.b)


@dataclass(frozen=True)
class Table:
    """Legendre coefficients (DEGREE, 2, panels) between `edges` (panels + 1)."""

    edges: Array
    coefficients: Array

    def at(self, u: Array) -> tuple[Array, Array]:
        """Evaluate both functions at `u`, any shape."""
        near = np.clip(u, self.edges[0], self.edges[-1])
        panel = np.clip(np.searchsorted(self.edges, near, side="right") - 1, 0, len(self.edges) - 2)
        middle = (self.edges[panel] + self.edges[panel + 1]) / 2
        local = 2 * (near - middle) / (self.edges[panel + 1] - self.edges[panel])
        first, second = legendre.legval(local, self.coefficients[:, :, panel], tensor=False)
        return first, second


@lru_cache(maxsize=64)
def table(drawn: DrawnAttention) -> Table:
    """Tabulate the averages on panels in u."""
    edges, points = panel_edges(drawn), legendre.leggauss(DEGREE)[0]
    half = np.diff(edges)[:, None] / 2
    nodes = edges[:-1, None] + half * (1 + points)
    values = np.array([averaged(drawn, u) for u in nodes.ravel()]).reshape(*nodes.shape, 2)
    fitted = np.linalg.solve(legendre.legvander(points, DEGREE - 1), values.transpose(1, 2, 0).reshape(DEGREE, -1))
    return Table(edges, fitted.reshape(DEGREE, 2, len(nodes)))


def panel_edges(drawn: DrawnAttention) -> Array:
    """Return edges of narrow panels where the averages vary, and of wide ones in the tails."""
    inner, outer = TAIL + log1p(drawn.b), drawn.last
    width = WIDTH if drawn.head_dim is None else MIXED_WIDTH
    narrow = np.linspace(-inner, inner, 1 + int(np.ceil(2 * inner / width)))
    wide = np.linspace(inner, outer, 1 + int(np.ceil((outer - inner) / TAIL_WIDTH)))
    return np.concatenate([-wide[::-1], narrow[1:-1], wide])


def averaged(drawn: DrawnAttention, u: float) -> tuple[float, float]:
    """Return (C, q̃) or (C, D) at one u."""
    if drawn.head_dim is None:
        return of_normal_logits(drawn.b, drawn.odds, u)
    scales, weights = scale_nodes(drawn.head_dim)
    parts = np.array([of_normal_logits(drawn.b * scale, drawn.odds, u) for scale in scales])
    first, second = weights @ parts
    return float(first), float(second)


def of_normal_logits(b: float, odds: float, u: float) -> tuple[float, float]:
    """Return (C, q̃) or (C, D) at one u for logits of deviation `b`."""
    at = at_artanh(u)
    wide, deviation = b * float(at.below), b * float(np.sqrt(at.below * at.above))
    rule = x_first if deviation > WIDE else both_at_once
    less, spread = rule(wide, odds, deviation)
    return 1 - less, spread if odds else spread / float(at.above)


def both_at_once(wide: float, mean: float, deviation: float) -> tuple[float, float]:
    """Return E (1 − T₁T₂) and D by a lattice in x and y."""
    y, of_y = even_points(mean, deviation)
    x, of_x = even_points(0.0, wide, last=float(np.abs(y).max()) + BEYOND)
    inverse = 1 / (np.cosh(x) + np.cosh(y)[:, None])  # cosh² < 1e120: |λ| < 44, as tokens are below 2⁶³
    return float((of_y * 2 * np.cosh(y)) @ inverse @ of_x), float((of_y * 2 * np.sinh(y) ** 2) @ inverse**2 @ of_x)


def x_first(wide: float, mean: float, deviation: float) -> tuple[float, float]:
    """Return E (1 − T₁T₂) and D for a wide y, by F."""
    y, of_y = wide_nodes(mean, deviation)
    f, slope = smoothed(wide, y)
    ratio = np.divide(f, np.tanh(y), out=slope.copy(), where=y != 0)
    return float(2 * of_y @ ratio), float(2 * of_y @ (ratio - slope))


def smoothed(wide: float, y: Array) -> tuple[Array, Array]:
    """Return F and F′ at `y` (n,)."""
    if wide <= WIDE:
        x, of_x = even_points(0.0, wide)
        ahead, behind = np.tanh((y[:, None] + x) / 2), np.tanh((y[:, None] - x) / 2)
        return (ahead + behind) @ of_x / 2, (2 - ahead**2 - behind**2) @ of_x / 4
    v, weights = on_panels(np.concatenate([TURN, [BEYOND]]))
    rest = 2 / (np.exp(v) + 1)  # sign(v) − tanh(v/2), v > 0
    near, far = normal_density(v - y[:, None], wide), normal_density(v + y[:, None], wide)
    peak = weights / (2 * np.cosh(v / 2) ** 2)
    return erf(y / (sqrt(2) * wide)) - (near - far) @ (weights * rest), (near + far) @ peak


def normal_density(x: Array, deviation: float) -> Array:
    return np.asarray(np.exp(-0.5 * (x / deviation) ** 2) / (sqrt(2 * np.pi) * deviation))


@lru_cache(maxsize=64)
def scale_nodes(head_dim: int) -> tuple[Array, Array]:
    """Return nodes and weights of √(χ²_k/k): even points in its logarithm, where the density is smooth."""
    width = 1 / sqrt(2 * head_dim)
    logs = np.arange(-FALLEN / min(head_dim, 4 * sqrt(head_dim)), 9 * width, min(LONGEST_STEP, 0.5 * width))
    density = np.exp(head_dim * logs - head_dim / 2 * np.expm1(2 * logs))
    return np.exp(logs), density / density.sum()


def even_points(mean: float, deviation: float, last: float = np.inf) -> tuple[Array, Array]:
    """Return nodes up to `last` and weights of N(`mean`, `deviation`²); for even functions if the mean is 0."""
    if deviation == 0.0:
        return np.array([mean]), np.ones(1)
    step = min(FINE, 0.7 * deviation)
    most = np.ceil(min(FARTHEST * deviation, last) / step)
    away = step * np.arange(-most if mean else 0.0, most + 1)
    mass = step * normal_density(away, deviation)
    if not mean:
        mass[1:] *= 2
    return mean + away, mass


def wide_nodes(mean: float, deviation: float) -> tuple[Array, Array]:
    """Return nodes and weights on panels that are narrow near 0, for functions that change there."""
    far = FARTHEST * deviation
    grid = deviation * np.arange(FARTHEST + 1)
    right = np.unique(np.concatenate([TURN, mean + grid, mean - grid]).clip(0, far + abs(mean)))
    nodes, weights = on_panels(right)
    if not mean:
        return nodes, 2 * weights * normal_density(nodes, deviation)
    both, twice = np.concatenate([-nodes, nodes]), np.concatenate([weights, weights])
    return both, twice * normal_density(both - mean, deviation)


def on_panels(edges: Array) -> tuple[Array, Array]:
    """Return Gauss-Legendre nodes and weights between the `edges` (n,)."""
    half = np.diff(edges)[:, None] / 2
    return (edges[:-1, None] + half * (1 + POINTS)).ravel(), (half * WEIGHTS).ravel()


def at_antipodes(b: float, head_dim: int | None = None) -> tuple[float, float]:
    """Return (m, q) = (E tanh²(bs), b² E sech⁴(bs)).

    >>> m, q = at_antipodes(1.0)
    >>> round(m, 4), round(q, 4)
    (0.3943, 0.4644)
    """
    return averaged(DrawnAttention(b, head_dim=head_dim), -(LAST + log1p(b)))
