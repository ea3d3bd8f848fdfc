r"""The infinite-depth limit of a Transformer's covariance: depth and width to infinity, depth/width → T.

* only attention: [ST, Thm 4.2]; only feed-forward: [ST, Thm 3.2]; both: [ST, Cor. 4.3]; causal mask: see `drift`.
* one matrix a layer at γ = 1: [ST, eq. 3], with Σ_lin instead of 2γ² Σ_lin.
* a smooth shaped activation: b of `drift` instead of [ST, eq. 6], and the same Σ.
* **Beyond the paper, derivations and not theorems** (`CovarianceLimit.basis`): a causal mask. A hidden width n_h = r·n
  with r ≠ 1: the hidden units are n_h samples of the kernel, so their fluctuation has 1/r of the variance; λ²γ²·2 +
  γ⁴(1 + 1/r) replaces 2γ² in Σ_res. One matrix a layer at γ < 1: no hidden units fluctuate, which is r = ∞. A smooth
  activation, which [Li, Nica and Roy, 2022] have in networks of one matrix a layer.

Crossings of the largest and the least eigenvalue between two recorded points of the limit's paths.

As for exits from a ball (`ball`), an eigenvalue λ that is inside at both points may have crossed its end e between
them: with a Brownian bridge of log λ it did with probability

  exp(−2 log(e/λ₀) log(e/λ₁)/(σ²h)),   σ² = 4 (a² + (γ²/τ₀)² tr(V Q V Qᵀ)) at the first point,

where u is the eigenvector, uᵀ(N + Nᵀ)u/λ the noise of log λ, and Q has the centred rows of u uᵀ, over m_α.
"""

from dataclasses import dataclass, field
from math import inf
from typing import Annotated, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from limitformer.base.errors import NoLimitError, require, require_real, set_fields
from limitformer.covariance.limit.drift import LimitConstants, Mask, drift_at
from limitformer.covariance.limit.explosion import explosion_probability
from limitformer.models import (
    Elementwise,
    Gated,
    Mixing,
    OneMatrix,
    ShapedReLU,
    ShapedSmooth,
    SoftmaxAttention,
    Start,
    Transformer,
    as_start,
)
from limitformer.models.kinds import register, require_exact_kind
from limitformer.models.serial import LATER

SOFTMAX = (
    "Softmax attention has no limit, because each layer mixes all tokens at once, by an amount that does not shrink as "
    "width and depth grow. Nearest: ShapedAttention(tau0=1.0), or limitformer.simulate, which needs no limit."
)

Matrix = NDArray[np.float64]
Square = Annotated[Matrix, "tokens tokens"]
SquareLike = Annotated[ArrayLike, "tokens tokens"]


@register("limit")
@dataclass(frozen=True, kw_only=True)
class CovarianceLimit:
    """The covariance SDE of [ST], the result of `lf.limit(model)`; `basis` names its theorem, or says "derivation".

    Attributes:
        gamma: γ.
        tau0: τ₀; None without attention.
        kink: c₊ − c₋; 0 with a smooth activation, None without a feed-forward layer.
        hidden_ratio: r = hidden width / width; None, for ∞, where a layer has one matrix.
        mask: None or "causal".
        horizon: T = depth/width.
        second: σ″(0)/q of a smooth activation; 0 with others.
        third: σ‴(0)/q² of a smooth activation. V may explode if 3 second²/4 + third > 0.
    """

    gamma: float
    tau0: float | None
    kink: float | None
    hidden_ratio: float | None = 1.0
    mask: Literal["causal"] | None = None
    horizon: float
    second: float = field(default=0.0, metadata=LATER)
    third: float = field(default=0.0, metadata=LATER)

    def __post_init__(self) -> None:
        require_exact_kind(self, CovarianceLimit)
        for name in ("gamma", "horizon", "second", "third"):
            set_fields(self, **{name: require_real(name, getattr(self, name))})
        if self.hidden_ratio is not None:
            set_fields(self, hidden_ratio=require_real("hidden_ratio", self.hidden_ratio))
            require(self.hidden_ratio > 0, f"hidden_ratio must be positive; got {self.hidden_ratio}.")
        require(0 <= self.gamma <= 1, f"gamma must lie in [0, 1]; got {self.gamma}.")
        require(self.horizon > 0, f"horizon must be positive; got {self.horizon}.")
        require(self.tau0 is None or self.tau0 > 0, f"tau0 must be positive or None; got {self.tau0}.")
        smooth = self.kink == 0 or not (self.second or self.third)
        require(smooth, f"second and third belong to a smooth activation, which has kink=0; got kink={self.kink}.")
        require(self.mask in (None, "causal"), f'mask must be None or "causal"; got {self.mask!r}.')

    @property
    def basis(self) -> str:
        """The theorem that proves this limit, or "derivation: …" where none does; docs/theory.md has each derivation.

        >>> import limitformer as lf
        >>> parts = {"width": 200, "depth": 150, "gamma": 0.5, "attention": lf.ShapedAttention(tau0=1.0)}
        >>> lf.limit(lf.Transformer(**parts)).basis
        '[ST, Theorem 4.2]'
        >>> lf.limit(lf.Transformer(**parts, mask="causal")).basis
        'derivation: a causal mask'
        """
        if self.second or self.third:
            return "derivation: a smooth shaped activation"
        if self.hidden_ratio is None:
            return "[ST, equation 3]" if self.gamma == 1 else "derivation: one matrix a layer at gamma < 1"
        if self.mask is not None and self.tau0 is not None:
            return "derivation: a causal mask"
        if self.kink is not None and self.hidden_ratio != 1:
            return "derivation: a hidden width other than the width"
        attention, feedforward = self.tau0 is not None, self.kink is not None
        return f"[ST, {'Corollary 4.3' if attention and feedforward else f'Theorem {4.2 if attention else 3.2}'}]"

    def constants(self) -> LimitConstants:
        """Return the factors of drift and noise."""
        squared = self.gamma**2
        linear = 0.0
        if self.tau0 is not None:
            linear += squared * (2 - squared) / 2
        if self.kink is not None:
            fluctuation = 0.0 if self.hidden_ratio is None else 1 / self.hidden_ratio
            linear += squared * (1 - squared) + squared**2 * (1 + fluctuation) / 2
        return LimitConstants(
            linear=float(np.sqrt(linear)),
            mixing=0.0 if self.tau0 is None else squared / self.tau0,
            mixing_drift=0.0 if self.tau0 is None else squared / self.tau0**2,
            second_order=0.0 if self.tau0 is None else squared / (2 * self.tau0**2),
            kink=0.0 if self.kink is None else squared * self.kink**2 / 4,
            square=squared * self.second**2 / 4,
            cube=squared * self.third / 2,
        )

    def mask_for(self, tokens: int) -> Mask:
        """Return the mask of `tokens` tokens."""
        everything = np.ones((tokens, tokens), bool)
        seen = {None: everything, "causal": np.tril(everything)}[self.mask]
        return Mask(bool(seen.all()), seen, seen.sum(1).astype(np.float64), np.arange(tokens))

    def mask_from(self, start: Start) -> Mask:
        """Return the mask of the tokens of `start`, with the twins and antipodes among them."""
        mask = self.mask_for(start.tokens)
        if not mask.full:
            return mask
        constants = self.constants()
        odd = constants.kink == constants.square == 0  # then −x moves as x does
        v = start.covariance
        opposite = odd and len(v) == 2 and int(twins_of(v * np.array([[1, -1], [-1, 1]]))[1]) == 0
        return mask._replace(twins=twins_of(v), opposite=opposite)

    def drift(self, covariance: SquareLike) -> Square:
        """Return b(V) (tokens, tokens), at V = `covariance` (tokens, tokens).

        >>> import limitformer as lf
        >>> relu = lf.ShapedReLU(c_plus=0.0, c_minus=-1.0)
        >>> lf.limit(lf.Transformer(width=9, depth=9, gamma=1.0, feedforward=relu)).drift(np.eye(2)).round(6)
        array([[0.      , 0.159155],
               [0.159155, 0.      ]])
        """
        v = as_start(covariance).covariance
        at: Square = drift_at(v, self.constants(), self.mask_for(len(v)))
        return at

    def diffusion(self, covariance: SquareLike) -> Annotated[Matrix, "pairs pairs"]:
        """Return Σ(V), dense, over the pairs α ≤ β in the order of `numpy.triu_indices`; for checks.

        Cov(dV_αβ, dV_δω)/dt = 2a²(V_αδ V_βω + V_αω V_βδ) + the four terms of Cov((BV)_αβ, (BV)_δω) =
        V_αδ (V K^{αδ} V)_βω, K^{αδ} = C_α V C_δᵀ/(m_α m_δ).
        """
        v = as_start(covariance).covariance
        constants = self.constants()
        ordered = constants.linear**2 * np.einsum("ad,bw->abdw", v, v)
        if constants.mixing > 0:
            ordered = ordered + constants.mixing**2 * self._mixing_covariance(v)
        swapped = ordered + ordered.transpose(0, 1, 3, 2)
        both = swapped + swapped.transpose(1, 0, 2, 3)
        rows, columns = np.triu_indices(len(v))
        return both[rows[:, None], columns[:, None], rows[None], columns[None]]

    def explosion_probability(
        self, start: Start | Annotated[ArrayLike, "2 2"], *, time: float | None = None, radius: float = inf
    ) -> float:
        """Return the probability that d = V₀₀ + V₁₁ − 2V₀₁ of two tokens reaches `radius`, or explodes.

        It is known for attention without a mask and without a feed-forward layer (`explosion`): in closed form for all
        times, by a one-dimensional partial differential equation within a time (relative error about 1e-6; below 1e-10
        it is 0). Without a radius it is positive if and only if γ² < ½. |V| reaches a radius sooner than d does, since
        d ≤ 2|V| and tokens align while they grow; it explodes when d does.

        Args:
            start: a start of two tokens, or V₀.
            time: the time within which d reaches the radius, None for any; `simulate` ends at `horizon`.
            radius: the radius in d.

        Raises:
            InputError: not two tokens, a feed-forward layer, a mask, no attention, or a value out of range.

        >>> import limitformer as lf
        >>> net = lf.Transformer(width=200, depth=150, gamma=0.6, attention=lf.ShapedAttention(tau0=1.0))
        >>> round(lf.limit(net).explosion_probability([[1.0, 0.0], [0.0, 1.0]]), 5)
        0.10081
        """
        v = as_start(start).covariance
        require(
            len(v) == 2,
            f"The probability of an explosion is known for two tokens; got {len(v)}. Nearest: limitformer.simulate.",
        )
        others = {"a feed-forward layer": self.kink is not None, 'mask="causal"': self.mask is not None}
        obstacles = [name for name, present in others.items() if present]
        require(
            self.tau0 is not None and not obstacles,
            "The probability of an explosion is known only for attention without a mask and a feed-forward layer; got "
            f"{' and '.join(obstacles) or 'no attention'}. Nearest: limitformer.simulate.",
        )
        assert self.tau0 is not None
        return explosion_probability(self.gamma, self.tau0, float(v[0, 0] + v[1, 1] - 2 * v[0, 1]), time, radius)

    def _mixing_covariance(self, v: Matrix) -> Matrix:
        mask = self.mask_for(len(v))
        weights = mask.seen / mask.counts[:, None]  # p_α in row α
        # (C_α)_νκ: one matrix for each row α.
        centre = mask.seen[:, :, None] * (np.eye(len(v)) - weights[:, None, :])
        logits = np.einsum("anx,xy,dky->adnk", centre, v, centre)
        logits /= (mask.counts[:, None] * mask.counts[None])[:, :, None, None]
        return np.einsum("ad,adnk,nb,kw->abdw", v, logits, v, v)


def twins_of(covariance: Matrix) -> NDArray[np.int64]:
    """Return for each token the first token at distance 0, up to the rounding of V."""
    variances = np.diag(covariance)
    distances = variances[:, None] + variances - 2 * covariance
    rounding = 4 * len(covariance) * np.finfo(float).eps
    return np.argmax(distances <= rounding * (variances[:, None] + variances), axis=1).astype(np.int64)


def refuse_own(model: Transformer) -> None:
    """Raise `NoLimitError` for user-defined parts and for strengths that differ, which no theorem covers."""
    if not model.uniform:
        raise NoLimitError(
            "No limit is proven where strengths differ by layer or sublayer; gamma and lam must be numbers."
        )
    feedforward = model.feedforward
    parts = (model.attention, feedforward.activation if type(feedforward) is OneMatrix else feedforward)
    for part in parts:
        if type(part) in (Mixing, Elementwise, Gated):
            raise NoLimitError(
                f"No limit is proven for {part!r}; it needs ShapedAttention, and ShapedReLU or ShapedSmooth. "
                "Nearest: limitformer.simulate, which needs no limit."
            )


def covariance_limit(model: Transformer) -> CovarianceLimit:
    """Return the limit of `model` as depth and width go to infinity with their ratio fixed.

    Raises:
        NoLimitError: a part whose contribution to a layer does not shrink with the width, or one for which no limit
            is proven; the message names it.

    >>> import limitformer as lf
    >>> lf.limit(lf.Transformer(width=200, depth=150, gamma=0.5, attention=lf.ShapedAttention(tau0=1.0))).horizon
    0.75
    """
    attention, feedforward = model.attention, model.feedforward
    refuse_own(model)
    if type(attention) is SoftmaxAttention:
        raise NoLimitError(SOFTMAX)
    if not np.isclose(model.skip**2 + model.branch**2, 1, atol=1e-12, rtol=0):
        raise NoLimitError(
            f"No limit: lam**2 + gamma**2 must be 1, else the variance changes by that factor in every layer; got "
            f"lam={model.skip:g}, gamma={model.branch:g}. Leave lam out, or take lam=1 with "
            f"gamma=1/sqrt(depth)={model.depth**-0.5:g}, whose limit is an ODE [Hayou and Yang, 2023]."
        )
    if model.norm is not None:
        raise NoLimitError("No limit is proven with normalisation layers; norm must be None.")
    if attention is not None:
        if attention.interventions != (True, True, "shaped"):
            raise NoLimitError(missing_shape(attention.interventions))
        if attention.heads is not None:
            raise NoLimitError("No limit is proven for several heads with an output projection; heads must be None.")
    one_matrix = type(feedforward) is OneMatrix
    shaped = feedforward.activation if type(feedforward) is OneMatrix else feedforward
    if shaped is not None and type(shaped) not in (ShapedReLU, ShapedSmooth):
        raise NoLimitError(
            f"No limit: {type(shaped).__name__} bends every layer by a fixed amount; its slopes must "
            "approach 1 like 1/sqrt(width). Use ShapedReLU(c_plus, c_minus) or ShapedSmooth(function, scale)."
        )
    kink, second, third = None, 0.0, 0.0
    if type(shaped) is ShapedReLU:
        kink = shaped.c_plus - shaped.c_minus
    if type(shaped) is ShapedSmooth:
        kink, second, third = 0.0, shaped.derivatives[0] / shaped.scale, shaped.derivatives[1] / shaped.scale**2
    return CovarianceLimit(
        gamma=model.branch,
        tau0=None if attention is None else attention.tau0,
        kink=kink,
        hidden_ratio=None if one_matrix else 1.0 if shaped is None else shaped.hidden_at(model.width) / model.width,
        mask=model.mask,
        horizon=model.depth / model.width,
        second=second,
        third=third,
    )


def missing_shape(interventions: tuple[bool, bool, str]) -> str:
    """Return the reason why attention without all three modifications of [ST, eq. 9] has no limit."""
    identity, center, temperature = interventions
    reasons = []
    if not identity:
        reasons.append("identity=True, else a layer mixes all tokens at once")
    if not center:
        reasons.append("center=True, else the softmax adds 1/m to every weight in every layer")
    if temperature != "shaped":
        reasons.append('temperature="shaped", else the softmax does not approach 1/m as the width grows')
    return "No limit: shaped attention needs " + "; ".join(reasons) + "."


def largest_step(limit: CovarianceLimit, tokens: int) -> float:
    """Return the dt below which the factor step exists: 1/((2m − 1) a² + η + γ²c₀)."""
    constants = limit.constants()
    rate = (2 * tokens - 1) * constants.linear**2 + constants.kink + 3 * constants.square + 2 * constants.cube
    return inf if rate <= 0 else 1 / rate


Array = NDArray[np.float64]


def crossing_chances(limit: CovarianceLimit, covariance: Array, times: Array, smallest: float, largest: float) -> Array:
    """Return the probability of a crossing between neighbouring points, (samples, points − 1).

    Args:
        limit: the limit.
        covariance: V (samples, points, m, m).
        times: times of the points (points,).
        smallest: the end of the least eigenvalue.
        largest: the end of the largest eigenvalue.
    """
    values, vectors = np.linalg.eigh(covariance)
    stays = np.ones((len(covariance), len(times) - 1))
    for k, end in ((0, smallest), (-1, largest)):
        variance = log_variance(limit, covariance[:, :-1], vectors[:, :-1, :, k])
        with np.errstate(divide="ignore", invalid="ignore"):
            room = np.log(end / np.maximum(values[..., k], 0)) * (1 if k else -1)
            chance = np.exp(-2 * room[:, :-1] * room[:, 1:] / (variance * np.diff(times)))
        inside = (room[:, :-1] > 0) & (room[:, 1:] > 0)
        stays *= 1 - np.where(inside & (variance > 0), chance, ~inside)
    return 1 - stays


def log_variance(limit: CovarianceLimit, covariance: Array, vector: Array) -> Array:
    """Return σ² of log λ for V (..., m, m) and the eigenvector (..., m) of λ."""
    constants, mask = limit.constants(), limit.mask_for(covariance.shape[-1])
    means = vector @ mask.seen.T / mask.counts
    centred = vector[..., :, None] * np.where(mask.seen, vector[..., None, :] - means[..., :, None], 0)
    centred /= mask.counts[:, None]
    mixed = ((covariance @ centred @ covariance) * centred).sum((-2, -1))
    return np.asarray(4 * (constants.linear**2 + constants.mixing**2 * mixed))
