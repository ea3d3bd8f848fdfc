r"""The exact overlap of two tokens, or of two clusters, at infinite depth.

Time is counted in units of layers_per_unit_time layers. The mathematics is in `weights` (attention of two clusters),
`motion` (the diffusion of u = artanh z), `scale` (where it goes), `thresholds`, `hitting` (when), `gap` (the
metastable state of unequal clusters) and `transport` (its law at finite times). σ and the form of attention set the
clock; where two tokens of the stochastic model go depends on β and dim alone [CT, Theorem 2].
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf, nan
from typing import Annotated, Any

import numpy as np
import xarray as xr
from numpy.typing import ArrayLike

from limitformer.base.errors import InputError, NoLimitError, require, require_count
from limitformer.models.kinds import with_display
from limitformer.models.sphere import HybridTransformer, SphereModel, StochasticTransformer
from limitformer.sphere.overlap import hitting, thresholds
from limitformer.sphere.overlap.gap import MetastableGap, metastable_gap
from limitformer.sphere.overlap.hitting import inverse_push, leading_lifetime
from limitformer.sphere.overlap.motion import (
    Boundaries,
    FlowMotion,
    HybridMotion,
    Motion,
    Rates,
    StochasticMotion,
    minus_end,
    plus_end,
)
from limitformer.sphere.overlap.motions import motion_of
from limitformer.sphere.overlap.position import (
    Array,
    artanh,
    at_artanh,
    at_overlap,
    require_inside,
    require_overlap,
    require_overlaps,
)
from limitformer.sphere.overlap.scale import FlowScale, ScaleFunction
from limitformer.sphere.overlap.summary import summary_of
from limitformer.sphere.overlap.thresholds import critical_beta as layered_critical_beta
from limitformer.sphere.overlap.transport import density_of

Numbers = Annotated[Array, "*shape"]  # one for each number given, in the same shape
NumbersLike = Annotated[ArrayLike, "*shape"]


@with_display
@dataclass(frozen=True)
class OverlapDiffusion:
    """The diffusion of the overlap z ∈ (−1, 1); made by `overlap(model)`.

    Attributes:
        model: the model of the tokens.
        clusters: (p, q): p tokens at one point, q at the other; (1, 1) for two tokens.
        beta: βc if QᵀK = cI, so β itself without Q and K, or |β|τ if QᵀK is drawn. It may be negative. For the
            stochastic model its sign has no effect with softmax, and changes only the clock without normalisation.

    >>> from limitformer.sphere.overlap import overlap
    >>> pair = overlap(StochasticTransformer(tokens=2, dim=4, beta=1.0, layers_per_unit_time=100))
    >>> round(float(pair.antipodal_probability()), 4), round(float(pair.antipodal_probability(start=0.0)), 4)
    (0.1199, 0.0844)
    >>> pair.boundaries.minus.kind, pair.boundaries.plus.kind
    ('attracting', 'attracting')
    """

    model: SphereModel
    clusters: tuple[int, int]

    @property
    def beta(self) -> float:
        """βc for QᵀK = cI, |β|τ where queries and keys are drawn."""
        if isinstance(self.model, StochasticTransformer) and self.model.is_fresh:
            return self.model.logit_scale
        beta = self.model.isotropic_beta
        assert beta is not None
        return beta

    @cached_property
    def motion(self) -> Motion:
        """The coefficients in u = artanh z."""
        return motion_of(self.model, self.clusters, self.beta)

    @cached_property
    def _scale(self) -> ScaleFunction | FlowScale:
        return FlowScale(self.motion) if isinstance(self.motion, FlowMotion) else ScaleFunction(self.motion)

    @property
    def _leaves(self) -> bool:
        """Whether tokens leave z = −1 at once."""
        return self.motion.minus.growth < 0

    # Coefficients.

    def drift(self, z: NumbersLike) -> Numbers:
        """Return μ(z) of dZ = μ dt + g dB; `z` in [−1, 1], any shape."""
        return self.motion.overlap_drift(at_overlap(require_overlaps("z", z)))

    def diffusion(self, z: NumbersLike) -> Numbers:
        """Return g(z) ≥ 0 of dZ = μ dt + g dB; `z` in [−1, 1], any shape."""
        return np.sqrt(self.motion.overlap_variance(at_overlap(require_overlaps("z", z))))

    def artanh_drift(self, u: NumbersLike) -> Numbers:
        """Return μ(u) of dU = μ dt + g dB, U = artanh Z; `u` real, any shape."""
        return self.motion.drift(at_artanh(u))

    def artanh_diffusion(self, u: NumbersLike) -> Numbers:
        """Return g(u) ≥ 0 of dU = μ dt + g dB, U = artanh Z; `u` real, any shape."""
        return np.sqrt(self.motion.variance(at_artanh(u)))

    def scale_density(self, z: NumbersLike) -> Numbers:
        """Return s(z) = exp(−∫₀^z 2μ/g²), s(0) = 1, for `z` in (−1, 1), any shape; infinite if it overflows.

        Raises:
            InputError: z is outside (−1, 1), or ε = 0.
        """
        z = require_overlaps("z", z)
        require(bool((np.abs(z) < 1).all()), "z must lie strictly between -1 and 1, where the scale density is finite.")
        at = at_overlap(z)
        with np.errstate(over="ignore"):
            return np.exp(self._scale.log_scale(artanh(z)) - np.log(at.below * at.above))

    # Where it goes.

    @cached_property
    def boundaries(self) -> Boundaries:
        """The behaviour of the diffusion at z = −1 (`minus`) and z = +1 (`plus`)."""
        return Boundaries(minus_end(self.motion), plus_end(self.motion))

    @property
    def rates(self) -> Rates:
        """Exponential rates of approach: twice |drift of artanh z| at the ends that attract."""
        ends = zip((-1.0, 1.0), self.boundaries, strict=True)
        return Rates(*(self._rate(z) if end.kind == "attracting" else nan for z, end in ends))

    def _rate(self, z: float) -> float:
        return 2 * abs(float(self.motion.drift(at_overlap(z))))

    def log_antipodal_probability(self, start: NumbersLike | None = None) -> Numbers:
        """Return log P(Z → −1), the logarithm of `antipodal_probability`, without underflow.

        >>> from limitformer.sphere.overlap import overlap
        >>> pair = overlap(StochasticTransformer(tokens=2, dim=4096, beta=4.6, layers_per_unit_time=100))
        >>> round(float(pair.log_antipodal_probability(start=0.9)), 3)
        -2434.53
        """
        if start is None:
            return np.asarray(self._scale.uniform_log_probability(self.model.dim))
        z = require_overlaps("start", start)
        log_p = self._scale.log_probability(artanh(z).ravel()).reshape(z.shape)
        if self._leaves:
            return log_p
        return np.where(z == -1, 0.0, np.where(z == 1, -inf, log_p))

    def antipodal_probability(self, start: NumbersLike | None = None) -> Numbers:
        """Return P(Z → −1 as t → ∞) from overlaps `start` in [−1, 1], any shape; None for a uniform start.

        It is (S(1) − S(z₀))/(S(1) − S(−1)) with the scale function S [CT, App. C.3]. It is 0 at or below the threshold,
        and for unequal clusters of the stochastic model, whose antipodal state is only metastable. Two tokens that
        start at z = ±1 stay there.
        """
        return np.exp(self.log_antipodal_probability(start))

    def single_cluster_probability(self, start: NumbersLike | None = None) -> Numbers:
        """Return P(Z → +1 as t → ∞): 1 − `antipodal_probability`, or 0 if neither end attracts."""
        antipodal = self.log_antipodal_probability(start)
        if self.motion.plus.slope < 0 or self.motion.minus.slope > 0:
            return 0.0 - np.expm1(antipodal)
        return np.where(np.asarray(start, float) == 1, 1.0, 0.0) if start is not None else np.zeros(())

    def return_probability(
        self, level: Annotated[ArrayLike, "*#shape"], start: Annotated[ArrayLike, "*#shape"]
    ) -> Annotated[Array, "*#shape"]:
        """Return P(Z is ever at `level`) from `start`; shapes broadcast; 1 if the end beyond `start` does not attract.

        For `start` beyond `level`, near an attracting end, it is a ratio of tails of the scale function: the error
        probability of stopping there.
        """
        levels, starts = np.broadcast_arrays(require_overlaps("level", level), require_overlaps("start", start))
        require(bool((np.abs(levels) < 1).all()), "level must lie strictly between -1 and 1: the ends are not reached.")
        stuck = np.abs(starts) == 1 if not self._leaves else starts == 1
        inside = np.where(stuck, 0.0, starts)
        p = self._scale.return_probability(artanh(levels).ravel(), artanh(inside).ravel()).reshape(levels.shape)
        return np.where(stuck, 0.0, p)

    # Thresholds.

    @property
    def critical_beta(self) -> float:
        """The value of `beta` above which the tokens may end antipodal; infinite if there is none.

        It is that of the limit of many layers; `critical_beta_of_layers` is that of few, and higher.

        Stochastic: the value of |beta|, arccosh(dim − 2)/2 [CT, Theorem 2]. It is 0 for dim ≤ 3, where every β ≠ 0
        suffices (in dim 2, β = 0 too), and infinite with drawn queries and keys for dim ≥ 4, and with a causal mask.
        Hybrid: log(2/ε²) for unnormalized attention [CT, Prop. 1], ε² = 1 + e^{−2β} for softmax; negative for ε² > 2.

        Raises:
            InputError: the clusters of the hybrid model are unequal.
        """
        motion = self.motion
        if isinstance(motion, StochasticMotion):
            return thresholds.stochastic_critical_beta(motion)
        assert isinstance(motion, HybridMotion)
        equal = self.clusters[0] == self.clusters[1]
        require(equal, "critical_beta of the hybrid model is known for equal clusters only; use critical_epsilon.")
        if self.model.attention == "softmax":
            return thresholds.softmax_critical_beta(motion.epsilon)
        return thresholds.unnormalized_critical_beta(motion.epsilon)

    def critical_beta_of_layers(self, layers: int | None = None) -> float:
        """Return |β| above which tokens may end antipodal in a network with few layers; `critical_beta` has many.

        At and below it two tokens, or equal clusters, are certain to end in one cluster unless they start antipodal
        (docs/equal-clusters.md). It falls to `critical_beta` as layers grow, in all cases computed. It is 0 where it
        is below 0.001.

        Args:
            layers: layers in a unit of time; None: those of the model.

        Raises:
            InputError: the model is not stochastic with softmax, Gaussian values and fixed queries and keys, or has a
                causal mask or unequal clusters.

        >>> from limitformer.sphere.overlap import overlap
        >>> pair = overlap(StochasticTransformer(tokens=2, dim=4, beta=1.0, layers_per_unit_time=1))
        >>> round(pair.critical_beta, 4), round(pair.critical_beta_of_layers(10), 4)
        (0.6585, 0.7108)
        >>> round(pair.critical_beta_of_layers(), 4)
        1.0405
        """
        model, (p, q) = self.model, self.clusters
        known = isinstance(model, StochasticTransformer) and not (model.is_fresh or model.is_causal) and p == q
        require(
            known and model.attention == "softmax" and model.values == "gaussian",
            "The threshold of few layers is known for two tokens or equal clusters of a StochasticTransformer with "
            "softmax, Gaussian values, and without a mask or drawn queries. Nearest: critical_beta.",
        )
        assert isinstance(model, StochasticTransformer)
        count = model.layers_per_unit_time if layers is None else require_count("layers", layers)
        return layered_critical_beta(model.dim, model.sigma / count**0.5)

    @property
    def critical_epsilon(self) -> float:
        """ε above which the tokens may end antipodal, at this β; hybrid model only."""
        return thresholds.amplitude(thresholds.hybrid_of(self.motion, "critical_epsilon"), -1.0)

    @property
    def certain_epsilon(self) -> float:
        """ε above which the tokens are certain to end antipodal, at this β; hybrid model only."""
        motion = thresholds.hybrid_of(self.motion, "certain_epsilon")
        return max(thresholds.amplitude(motion, 1.0), self.critical_epsilon)

    # When.

    def mean_hitting_time(self, target: float, start: float) -> float:
        """Return the mean time until the overlap is `target`, in (−1, 1), from `start`.

        It is infinite at a threshold, and if an attracting end makes the overlap miss `target` with positive
        probability. Unequal clusters may start at −1: `mean_hitting_time(0.9, start=-1.0)` is the mean lifetime of the
        antipodal state.

        Raises:
            InputError: an overlap is out of range, or tokens at `start` never move.
        """
        b, x = float(artanh(require_inside("target", target))), float(artanh(self._moving(start)))
        if x == b:
            return 0.0
        if isinstance(self.motion, FlowMotion):
            return hitting.flow_time(self.motion, x, b)
        assert isinstance(self._scale, ScaleFunction)
        return (hitting.rising_time if x < b else hitting.falling_time)(self._scale, x, b)

    def lifetime_asymptote(self, target: float) -> float:
        """Return the large-|β| asymptote of the mean lifetime `mean_hitting_time(target, start=-1.0)`.

        It is (π/2 + arcsin b) · B(½, (dim − 1)/2)/(2√2) · pq/|p² − q²| · e^{2|β|}/σ² for unequal clusters with softmax,
        b = `target` in (−1, 1). For two tokens behind a causal mask, 1 replaces pq/|p² − q²|. Its relative error is of
        order (dim − 2) e^{−|β|(1 − b)}/β² where |β|(1 − b) is large (see `hitting`).

        Raises:
            InputError: the target is out of range, clusters are equal, or the model is hybrid or unnormalized.

        >>> from limitformer.sphere.overlap import overlap
        >>> three = overlap(StochasticTransformer(tokens=3, dim=4, beta=8.0, layers_per_unit_time=100), (2, 1))
        >>> round(three.mean_hitting_time(0.9, start=-1.0) / three.lifetime_asymptote(0.9), 3)
        0.963
        """
        b = require_inside("target", target)
        require(
            self._leaves,
            "Only unequal clusters of the stochastic model, and tokens behind a causal mask, have a lifetime; others "
            "stay antipodal.",
        )
        require(
            not self.model.is_fresh,
            "With drawn queries and keys lifetimes do not grow like e^{2|beta|}: tokens leave antipodes at once. "
            f"Use mean_hitting_time({b:g}, start=-1.0).",
        )
        require(
            self.model.attention == "softmax",
            "Lifetimes grow like e^{2|beta|} only with softmax; with unnormalized attention they fall. Use "
            f"mean_hitting_time({b:g}, start=-1.0).",
        )
        assert isinstance(self.model, StochasticTransformer)
        if self.model.is_causal:
            require(self.beta > 0, f"Behind a causal mask the lifetime grows only for beta > 0; got {self.beta:g}.")
            return leading_lifetime(1.0, self.model.dim, self.beta, self.model.sigma, b)
        return leading_lifetime(inverse_push(*self.clusters), self.model.dim, self.beta, self.model.sigma, b)

    def mean_exit_time(self, low: float, high: float, start: float) -> float:
        """Return the mean time until the overlap leaves (`low`, `high`) from `start` in between; always finite."""
        a, x, b = (require_inside(n, v) for n, v in (("low", low), ("start", start), ("high", high)))
        require(a <= x <= b and a < b, f"low, start and high must be in order; got {a:g}, {x:g}, {b:g}.")
        if x in (a, b):
            return 0.0
        if isinstance(self.motion, FlowMotion):
            return hitting.flow_time(self.motion, float(artanh(x)), float(artanh(b)))
        return hitting.exit_time(self.motion, *(float(artanh(z)) for z in (a, b, x)))

    def metastable_gap(self) -> MetastableGap:
        """Return the speed measure of the gap 1 + z of unequal clusters below the barrier, normalised (see `gap`).

        In the limit of long lifetimes it is the law of the gap while the clusters are antipodal. The quasi-stationary
        law of a short state has a smaller median (by 25 % for (2, 1), d = 4, β = 2; by 5 % at β = 3, by 1 % at β = 4).

        Raises:
            InputError: clusters are equal or the model is hybrid, so antipodes stay; or there is no barrier.
        """
        require(
            self._leaves, "Only unequal clusters of the stochastic model are metastable; others stay or leave at once."
        )
        assert isinstance(self._scale, ScaleFunction)
        return metastable_gap(self._scale)

    def _moving(self, start: float) -> float:
        z = require_overlap("start", start)
        stays = "two tokens there stay there for ever"
        require(z > -1 or self._leaves, f"start must be above -1: {stays}. Nearest: start = -0.999.")
        require(z < 1, f"start must be below 1: {stays}. Nearest: start = 0.999.")
        return z

    def density(
        self,
        times: Annotated[ArrayLike, "times"],
        start: float | None = None,
        *,
        spacing: float | None = None,
        steps: int = 400,
    ) -> xr.Dataset:
        """Return the law of the overlap at `times`, by the Fokker-Planck equation (see `transport`).

        Args:
            times: increasing, at least 0.
            start: overlap; None for tokens uniform on the sphere.
            spacing: width of a cell in artanh z; None for 0.05, or less where the scale density is steep. Where log s
                changes by x in a cell, the noise g² is about 1 + x²/12 times too large.
            steps: number of time steps until the last of `times`.

        Returns:
            Dataset over (time, artanh_overlap): `density` per unit of artanh z, `overlap_density` per unit of z; over
            (time): `below` and `above`, the mass beyond the ends of the grid, which does not return. The
            mass in the cells, `density` times the attribute `spacing`, and these two add up to 1. Coordinates `time`
            and `overlap` = z.

        Raises:
            InputError: times do not increase, the start never moves, ε = 0, or the grid is too large or too coarse.
        """
        if isinstance(self.motion, FlowMotion):
            raise InputError(
                "There is no density without noise: the overlap is a function of time; epsilon must be positive."
            )
        moving = None if start is None else self._moving(start)
        return density_of(self.motion, self.model.dim, times, moving, spacing, require_count("steps", steps, least=8))

    def summary(self) -> dict[str, Any]:
        """Return all exact quantities as a dict for JSON (see `overlap.summary`)."""
        return summary_of(self)


LARGEST_BETA = 150.0  # e^{4β} is a double; the noise between clusters far apart is e^{−4β}
LARGEST_DRAWN = 1e4  # beyond it, the noise near antipodes needs too many cells in a density


def overlap(model: SphereModel, clusters: Sequence[int] | None = None) -> OverlapDiffusion:
    """Return the diffusion of the overlap of two tokens of `model`, or of `clusters` (p, q) with p + q = model.tokens.

    QᵀK may be a multiple c of the identity, so that βc replaces β, or drawn in each layer; β may be negative. Depth
    averages over heads, so the limit does not depend on their number. Nor does it depend on layers_per_unit_time: with
    few layers antipodes need a larger β (`OverlapDiffusion.critical_beta_of_layers`).

    Raises:
        NoLimitError: QᵀK is fixed and not a multiple of the identity, so that the overlap alone is not a diffusion, or
            the coefficients are not known.
        InputError: `model` is not on the sphere, has more than two tokens without clusters, or clusters do not fit.

    >>> from limitformer.models.sphere import StochasticTransformer
    >>> three = StochasticTransformer(tokens=3, dim=4, beta=2.0, layers_per_unit_time=100)
    >>> round(overlap(three, clusters=(2, 1)).mean_hitting_time(0.9, start=-1.0), 2)
    32.66
    """
    kinds = StochasticTransformer, HybridTransformer
    known = isinstance(model, kinds)
    require(known, f"overlap needs a StochasticTransformer or HybridTransformer; got {type(model).__name__}.")
    sizes = checked_clusters(model, clusters)
    require_limit(model, sizes)
    beta = model.isotropic_beta or 0.0
    equal = isinstance(model, StochasticTransformer) and sizes[0] == sizes[1]
    drawn = model.logit_scale if isinstance(model, StochasticTransformer) and model.is_fresh else 0.0
    require(drawn <= LARGEST_DRAWN, f"Drawn queries need beta * tau <= {LARGEST_DRAWN:g} here; got {drawn:g}.")
    require(
        equal or abs(beta) <= LARGEST_BETA,
        f"Unequal clusters and the hybrid model need |beta| <= {LARGEST_BETA:g} here; got {beta:g}.",
    )
    return OverlapDiffusion(model, sizes)


def require_limit(model: SphereModel, sizes: tuple[int, int]) -> None:
    """Raise `NoLimitError` unless the overlap is a diffusion by itself, with known coefficients."""
    if model.isotropic_beta is None and not model.is_fresh:
        raise NoLimitError(
            "No limit for the overlap alone: it needs Q^T K = c times the identity [CT, Assumption 2], or drawn in "
            "each layer, else attention depends on where the tokens are. Leave query_key out."
        )
    if not model.moves_alike and model.attention != "softmax":
        raise NoLimitError(
            f"With {'drawn queries and keys' if model.is_fresh else 'a causal mask'} the coefficients are known for "
            'softmax attention only; got "unnormalized". Nearest: a simulation.'
        )
    if model.is_causal and sizes != (1, 1):
        raise NoLimitError(
            "Behind a causal mask tokens of one cluster attend to different tokens, so clusters do not stay together."
        )


def checked_clusters(model: SphereModel, clusters: Sequence[int] | None) -> tuple[int, int]:
    """Return (p, q); raise `InputError` unless they are two whole numbers that add up to the number of tokens."""
    tokens = model.tokens
    if clusters is None:
        require(
            tokens == 2, f"The overlap of {tokens} tokens is not a diffusion; give clusters=(p, q), p + q = {tokens}."
        )
        return 1, 1
    clusters = clusters.tolist() if isinstance(clusters, np.ndarray) else clusters
    two = isinstance(clusters, Sequence) and not isinstance(clusters, str) and len(clusters) == 2
    require(two, f"clusters must be two whole numbers (p, q); got {clusters!r}.")
    p, q = (require_count("A cluster", size) for size in clusters)
    require(p + q == tokens, f"clusters must add up to tokens = {tokens}; got {p} + {q} = {p + q}.")
    return p, q
