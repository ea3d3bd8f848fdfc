r"""Where a network starts: the covariance V₀ = X₀X₀ᵀ/n of its m input tokens.

All weights are Gaussian, so the law of what follows depends on X₀ through V₀ alone; a LayerNorm also sees the
tokens' means over their coordinates. Where those are not given, the tokens lie in a uniformly random position
(X₀ = √n V₀^½ Q with Q Haar distributed), drawn anew for each sample.
"""

from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from limitformer.base.errors import InputError, require, require_count, require_real
from limitformer.base.memory import check_scratch
from limitformer.models.display import table
from limitformer.models.kinds import require_exact_kind

WHILE_CHECKED = 5  # matrices of its size there are while a covariance is made and checked
ROUNDING = 1e-9  # how far a covariance may be from symmetric and positive, relative to its largest entry


@dataclass(frozen=True, kw_only=True, eq=False)
class Start:
    """The input tokens, as the network's law sees them.

    Attributes:
        covariance: V₀, symmetric positive semi-definite; it may be singular.
        means: the tokens' means over their coordinates, or None for a random position.
        labels: what each token is, for pictures and tables; None numbers them.
        description: where it comes from, kept with the results.
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
        """m."""
        return len(self.covariance)

    def rank(self) -> int:
        """The number of directions in which the tokens spread."""
        return rank_of(self.covariance)


def correlations_of(covariance: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Correlations (…, tokens, tokens), standard deviations (…, tokens); a token of variance 0 has correlations 0."""
    deviation = np.sqrt(np.maximum(np.diagonal(covariance, axis1=-2, axis2=-1), 0))
    safe = np.where(deviation > 0, deviation, 1)
    return covariance / safe[..., :, None] / safe[..., None, :], deviation


def rank_of(covariance: NDArray[np.float64]) -> int:
    """The number of directions in which tokens of this covariance spread."""
    return int(np.linalg.matrix_rank(correlations_of(covariance)[0], hermitian=True, tol=ROUNDING))


def real_array(name: str, value: ArrayLike, dimensions: int) -> NDArray[np.float64]:
    """`value` as float64, or one line that says why it is none."""
    require(not np.ma.is_masked(value), f"{name} must have no masked entries. Nearest: leave those tokens out.")
    try:
        given = np.asarray(value)
        array = np.array(given, dtype=np.float64) if given.dtype.kind != "c" else None
    except (TypeError, ValueError, RuntimeError) as error:
        repair = " Nearest: .detach().cpu().double().numpy()." if hasattr(value, "detach") else ""
        raise InputError(f"{name} must be an array of numbers; got {type(value).__name__}.{repair}") from error
    if array is None:
        raise InputError(f"{name} must be real; got complex numbers ({given.dtype}). Nearest: their real part, .real.")
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
    return Start(covariance=covariance)  # type: ignore[arg-type]  # made an array, and checked, there


def checked_covariance(covariance: ArrayLike) -> NDArray[np.float64]:
    """`covariance` as a symmetric array that cannot be written to, or one line that says why it is no covariance."""
    given = covariance is not None
    require(
        given, "The start must be given: a covariance (tokens, tokens). Nearest: equicorrelated(2, correlation=0.2)."
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
    """Raise `InputError` if a covariance of so many tokens does not fit the memory, before it is made."""
    check_scratch(WHILE_CHECKED * 8 * tokens**2, f"A covariance of {tokens:,} tokens", "fewer tokens")


def equicorrelated(tokens: int, correlation: float, variance: float = 1.0) -> Start:
    """Tokens of one variance, every two with one correlation: the start of all figures of [ST].

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
    """Start from the tokens themselves, X₀: covariance and means as they are.

    No more is kept of the tokens: differences of less than 1e-7 of their length are rounding in V.
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
    """`value` itself if it is a start, else the start from that covariance matrix."""
    return value if isinstance(value, Start) else from_covariance(value)
