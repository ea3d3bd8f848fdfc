"""The options of `simulate` for tokens on the sphere."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from limitformer.base.errors import require, require_real, set_fields
from limitformer.models.sphere import require_known
from limitformer.sampling.arrays import Dtype, Pairs, checked_dtype, checked_pairs

Method = Literal["overlap", "gram", "coordinates"]
Keep = Literal["overlap", "outcome", "tokens"]

DEFAULT_POINTS = 101
LONGEST = 1e9  # units of time


@dataclass(frozen=True, kw_only=True)
class SphereOptions:
    """The options of tokens on the sphere; `limitformer.simulate` describes them.

    Raises:
        InputError: a value is out of range.
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
        idle = f'would change nothing with keep="{self.keep}"; '
        require(self.pairs is None or self.keep == "overlap", f"pairs {idle}leave it out, or keep overlaps.")
        require(self.dtype == "float64" or self.keep != "outcome", f"dtype {idle}outcomes are whole numbers.")

    def default_points(self, steps: int) -> NDArray[np.int64]:
        """About a hundred step numbers, evenly spaced, from the first to the last."""
        return np.unique(np.rint(np.linspace(0, steps, DEFAULT_POINTS)).astype(np.int64))
