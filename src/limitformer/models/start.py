r"""The start of a network: the covariance V₀ = X₀X₀ᵀ/n of its m input tokens.

All weights are Gaussian, so the law of all layers depends on X₀ only through V₀; a LayerNorm also uses the
tokens' means over their coordinates. Without means, the tokens lie in a uniformly random position
(X₀ = √n V₀^½ Q with Q Haar distributed), drawn for each sample.
"""

from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from limitformer.base.errors import InputError, require, require_count, require_real
from limitformer.base.memory import check_scratch
from limitformer.models.kinds import require_exact_kind, table

WHILE_CHECKED = 5  # matrices of its size that exist while a covariance is made and checked
ROUNDING = 1e-9  # relative to the largest entry: allowed distance from a symmetric, positive matrix


@dataclass(frozen=True, kw_only=True, eq=False)
class Start:
    """The input tokens, reduced to what the law of a network depends on.

    Attributes:
        covariance: V₀, symmetric positive semi-definite; it may be singular.
        means: the tokens' means over their coordinates, or None for a random position.
        labels: names of the tokens, for pictures and tables; None numbers them.
        description: the origin of the start, stored with the results.
    """

    covariance: Annotated[NDArray[np.float64], "tokens tokens"]
    means: Annotated[NDArray[np.float64], "tokens"] | None = None
    labels: tuple[str, ...] | None = None
    description: str = "covariance"

    def __post_init__(self) -> None:
        require_exact_kind(self, Start)
        object.__setattr__(self, "covariance", checked_covariance(self.covariance))
        if self.means is not None:
            object.__setattr__(self, "means", real_array("means", self.means, 1))
        for name in ("means", "labels"):
            value = getattr(self, name)
            fits = value is None or len(value) == self.tokens
            require(fits, f"{name} must have one entry for each of the {self.tokens} tokens; got {value!r}.")

    def __repr__(self) -> str:
        return f"<Start of {self.tokens} tokens: {self.description}>"

    def _repr_html_(self) -> str:
        labels = [] if self.labels is None else [("labels", ", ".join(self.labels[:20]))]
        return table("Start", [("tokens", str(self.tokens)), ("from", self.description), *labels])

    @property
    def tokens(self) -> int:
        """The number of tokens, m."""
        return len(self.covariance)

    def rank(self) -> int:
        """Return the number of directions in which the tokens spread."""
        return rank_of(self.covariance)


def correlations_of(covariance: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return correlations (…, tokens, tokens), 0 for tokens of variance 0, and standard deviations (…, tokens)."""
    deviation = np.sqrt(np.maximum(np.diagonal(covariance, axis1=-2, axis2=-1), 0))
    safe = np.where(deviation > 0, deviation, 1)
    return covariance / safe[..., :, None] / safe[..., None, :], deviation


def rank_of(covariance: NDArray[np.float64]) -> int:
    return int(np.linalg.matrix_rank(correlations_of(covariance)[0], hermitian=True, tol=ROUNDING))


def real_array(name: str, value: ArrayLike, dimensions: int) -> NDArray[np.float64]:
    """Return `value` as float64; raise `InputError` unless it is a finite array of `dimensions` dimensions."""
    require(not np.ma.is_masked(value), f"{name} must have no masked entries. Nearest: leave those tokens out.")
    try:
        raw = np.asarray(value)
        array = np.array(raw, dtype=np.float64) if raw.dtype.kind != "c" else None
    except (TypeError, ValueError, RuntimeError) as error:
        repair = " Nearest: .detach().cpu().double().numpy()." if hasattr(value, "detach") else ""
        raise InputError(f"{name} must be an array of numbers; got {type(value).__name__}.{repair}") from error
    if array is None:
        raise InputError(f"{name} must be real; got complex numbers ({raw.dtype}). Nearest: their real part, .real.")
    require(array.ndim == dimensions, f"{name} must have {dimensions} dimensions; got shape {array.shape}.")
    require(array.size > 0, f"{name} must not be empty; got shape {array.shape}.")
    bad = int(np.sum(~np.isfinite(array)))
    require(bad == 0, f"{name} must be finite; {bad} of its {array.size} entries are NaN or infinite.")
    return array


def from_covariance(covariance: Annotated[ArrayLike, "tokens tokens"]) -> Start:
    """Start from any covariance matrix V₀.

    Raises:
        InputError: not square, not symmetric, not positive semi-definite, not finite, or a token of variance 0.

    >>> from_covariance([[1.0, 2.0], [2.0, 1.0]])
    Traceback (most recent call last):
    limitformer.base.errors.InputError: The start must be positive semi-definite; its smallest eigenvalue is -1.
    """
    return Start(covariance=covariance)  # type: ignore[arg-type]  # which converts it


def checked_covariance(covariance: ArrayLike) -> NDArray[np.float64]:
    """Return `covariance` as a symmetric, read-only array; raise `InputError` if it is not a covariance."""
    require(
        covariance is not None,
        "The start must be given: a covariance (tokens, tokens). Nearest: equicorrelated(2, correlation=0.2).",
    )
    v = real_array("The start", covariance, 2)
    require(v.shape[0] == v.shape[1], f"The start must be square, tokens by tokens; got shape {v.shape}.")
    size = np.abs(v).max()
    skew = np.abs(v - v.T).max()
    require(
        skew <= ROUNDING * size,
        f"The start must be symmetric; entries differ from their mirror image by up to {skew:.3g}. "
        "Repair: (V + V.T)/2.",
    )
    v = (v + v.T) / 2
    least = np.linalg.eigvalsh(v)[0]
    require(
        least >= -ROUNDING * size,
        f"The start must be positive semi-definite; its smallest eigenvalue is {least:.3g}.",
    )
    require(v.diagonal().min() > 0, "Every token must have a positive variance; got one that is zero.")
    v.setflags(write=False)
    return v


def check_covariance(tokens: int) -> None:
    """Raise `InputError` if a covariance of this size does not fit the memory, before it is made."""
    check_scratch(WHILE_CHECKED * 8 * tokens**2, f"A covariance of {tokens:,} tokens", "fewer tokens")


def equicorrelated(tokens: int, correlation: float, variance: float = 1.0) -> Start:
    """Return a start whose tokens have one variance and one correlation, as in all figures of [ST].

    >>> equicorrelated(tokens=2, correlation=0.2).covariance
    array([[1. , 0.2],
           [0.2, 1. ]])
    """
    require_count("tokens", tokens)
    correlation, variance = require_real("correlation", correlation), require_real("variance", variance)
    check_covariance(tokens)
    least = -1.0 if tokens == 1 else -1 / (tokens - 1)
    require(
        least <= correlation <= 1,
        f"correlation of {tokens} tokens must lie in [{least:.4g}, 1]; got {correlation}.",
    )
    require(variance > 0, f"variance must be positive; got {variance}.")
    v = variance * ((1 - correlation) * np.eye(tokens) + correlation)
    description = f"equicorrelated, correlation {correlation:g}, variance {variance:g}"
    return Start(covariance=v, description=description)


def from_tokens(tokens: Annotated[ArrayLike, "tokens width"]) -> Start:
    """Start from the tokens themselves, X₀, by their covariance and means.

    Differences of less than 1e-7 of the tokens' length are lost to rounding in V.
    """
    x = real_array("tokens", tokens, 2)
    check_covariance(len(x))
    require(bool(x.any(1).all()), "Every token must differ from zero; got one that is zero.")
    with np.errstate(over="ignore", invalid="ignore"):
        v = x @ x.T / x.shape[1]
    in_range = bool(np.isfinite(v).all() and v.diagonal().all())
    require(
        in_range, f"The squares of the tokens leave the range of doubles; their largest entry is {abs(x).max():.3g}."
    )
    return Start(covariance=v, means=x.mean(1), description=f"array {x.shape}")


def as_start(value: Any) -> Start:
    """Return `value` if it is a start, otherwise the start from that covariance matrix."""
    return value if isinstance(value, Start) else from_covariance(value)
