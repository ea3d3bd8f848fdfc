"""What `simulate` takes: a record of options for each kind of run, for completion and for checkers."""

from collections.abc import Sequence
from typing import Annotated, Any, Required, TypedDict

from numpy.typing import NDArray

from limitformer.covariance.limit.path import Step
from limitformer.paths import recording as writing
from limitformer.paths.arrays import Dtype
from limitformer.sphere import options as sphere_options

Record = Annotated[Sequence[float] | NDArray[Any], "points"] | None


class RunOptions(TypedDict, total=False):
    """Of every run; their meaning in `simulate`."""

    samples: Required[int]
    seed: Required[int]
    record: Record
    threads: int | None
    chunk: int | None
    progress: bool


class CovarianceOptions(RunOptions, total=False):
    """Of runs that record covariances: what is kept (`paths.recording.Recording`)."""

    keep: writing.Keep
    pairs: Sequence[tuple[int, int]] | None
    dtype: Dtype


class ChainOptions(CovarianceOptions, total=False):
    """Of the chain of a `Transformer`: `radius`, at which paths stop (|V|, Frobenius), and whether it has gradients."""

    radius: float
    gradients: bool


class CovarianceLimitOptions(CovarianceOptions, total=False):
    """Of `limit(transformer)`: its step `dt`, 0.01 if none is given, and which step it is."""

    radius: float
    dt: float
    step: Step


class SphereChainOptions(RunOptions, total=False):
    """Of tokens on the sphere (`sphere.options.SphereOptions`)."""

    horizon: Required[float]
    method: sphere_options.Method | None
    keep: sphere_options.Keep
    tolerance: float
    early_stop: float | None
    pairs: Sequence[tuple[int, int]] | None
    dtype: Dtype


class SphereLimitOptions(SphereChainOptions, total=False):
    """Of the limit of tokens on the sphere: its step too; None resolves the model."""

    dt: float | None
