"""What `simulate` takes for tokens on the sphere."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from limitformer.base.errors import require, require_real, set_fields
from limitformer.models.sphere import require_known
from limitformer.paths.arrays import Dtype, Pairs, checked_dtype, checked_pairs

Method = Literal["overlap", "gram", "coordinates"]
Keep = Literal["overlap", "outcome", "tokens"]

DEFAULT_POINTS = 101
LONGEST = 1e9  # units of time


@dataclass(frozen=True, kw_only=True)
class SphereOptions:
    """What `simulate` takes for tokens on the sphere.

    Attributes:
        horizon: T, in units of time.
        method: "overlap" (two tokens, by artanh z), "gram" (the tokens' Gram matrix) or "coordinates"; None: the
            cheapest that the model allows.
        keep: "overlap" (z and 1 − |z| of all pairs), "outcome" (clusters and antipodal pairs) or "tokens".
        tolerance: how near to ±1 an overlap counts as arrived.
        early_stop: replicas stop once the chance that they ever leave the tolerance again is at most this, and keep
            what they have; None: none stops. Two tokens by their overlap (`stopping`). More tokens, or another method,
            with keep="outcome" alone, for softmax with QᵀK = I, β ≥ 0 and Gaussian values: tokens that have become two
            points go on as such, and stop as one or as antipodes (`merging`). Elsewhere there is no such bound and none
            stops, which `stop_gaps` = (0, 0) in the results says.
        pairs: the pairs whose overlaps are kept, such as [(0, 1), (0, 2)]; None: all of them.
        dtype: in which overlaps, gaps and tokens are kept, "float64" or "float32". The simulation runs in float64
            whatever it is; a gap below 1e-45 is 0 in float32.

    Raises:
        InputError: a value out of range.
    """

    horizon: float
    method: Method | None = None
    keep: Keep = "overlap"
    tolerance: float = 1e-3
    early_stop: float | None = None
    pairs: Pairs | None = None
    dtype: Dtype = "float64"

    def __post_init__(self) -> None:
        for name in ("horizon", "tolerance"):
            set_fields(self, **{name: require_real(name, getattr(self, name))})
        require(self.horizon > 0, f"horizon must be positive; got {self.horizon}.")
        require(self.horizon <= LONGEST, f"horizon must be at most {LONGEST:g}; got {self.horizon:g}.")
        require(0 < self.tolerance < 0.5, f"tolerance must lie in (0, 0.5); got {self.tolerance}.")
        require_known("keep", self.keep, Keep)
        if self.early_stop is not None:
            set_fields(self, early_stop=require_real("early_stop", self.early_stop))
            require(0 < self.early_stop < 1, f"early_stop must lie in (0, 1) or be None; got {self.early_stop}.")
        if self.method is not None:
            require_known("method", self.method, Method)
        set_fields(self, pairs=checked_pairs(self.pairs), dtype=checked_dtype(self.dtype))
        chosen = f'would change nothing beside keep="{self.keep}"; '
        require(self.pairs is None or self.keep == "overlap", f"pairs {chosen}leave it out, or keep overlaps.")
        require(self.dtype == "float64" or self.keep != "outcome", f"dtype {chosen}outcomes are whole numbers.")

    def default_points(self, steps: int) -> NDArray[np.int64]:
        """About a hundred steps, evenly spaced, with the first and the last."""
        return np.unique(np.rint(np.linspace(0, steps, DEFAULT_POINTS)).astype(np.int64))
