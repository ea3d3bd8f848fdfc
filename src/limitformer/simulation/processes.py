"""The kinds of models that `simulate` takes: the options of each, the process that runs it, and its Dataset.

The docstring of `limitformer.simulate` describes every option; here are their names and types.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Required, TypedDict, overload

import numpy as np
import xarray as xr

from limitformer.base.errors import InputError, require, require_real
from limitformer.base.memory import check_scratch
from limitformer.covariance.chain import OneMatrixChain, TransformerChain
from limitformer.covariance.gradients import GradientChain, has_gradients, weights_of
from limitformer.covariance.limit import CovarianceFlow, CovarianceLimit, CovariancePaths, FlowPath
from limitformer.covariance.limit.covariance import covariance_limit
from limitformer.covariance.limit.flow import flows
from limitformer.covariance.limit.path import Step
from limitformer.covariance.limit_gradients import GradientPaths, weight_kinds
from limitformer.models import (
    HybridTransformer,
    OneMatrix,
    SphereModel,
    Start,
    StochasticTransformer,
    Transformer,
    as_start,
)
from limitformer.models.functions import is_user_part, name_of_part
from limitformer.models.sphere import as_sphere_start
from limitformer.results.datasets import (
    covariance_dataset,
    pairs_dataset,
    sphere_dataset,
    with_gradients,
    with_limit_gradients,
)
from limitformer.sampling.arrays import Dtype, Outputs
from limitformer.sampling.exits import LARGEST_RADIUS
from limitformer.sampling.process import Process, Record, recorded_layers, recorded_points
from limitformer.sampling.recording import LARGEST, Keep, Recording
from limitformer.sphere.chain import sphere_chain, token_paths
from limitformer.sphere.limit import TokenLimit
from limitformer.sphere.methods import Keep as SphereKeep
from limitformer.sphere.methods import Method, SphereOptions
from limitformer.sphere.process import SpherePaths


class RunOptions(TypedDict, total=False):
    """The options of every run, which do not depend on the model."""

    samples: Required[int]
    seed: Required[int]
    record: Record
    threads: int | None
    chunk: int | None
    progress: bool


class CovarianceOptions(RunOptions, total=False):
    """The options of every run that records covariances."""

    keep: Keep
    pairs: Sequence[tuple[int, int]] | None
    dtype: Dtype


class ChainOptions(CovarianceOptions, total=False):
    """The options of the chain of a `Transformer`."""

    radius: float
    gradients: bool


class CovarianceLimitOptions(CovarianceOptions, total=False):
    """The options of the SDE of a `Transformer`."""

    radius: float
    dt: float
    step: Step
    gradients: bool


class SphereChainOptions(RunOptions, total=False):
    """The options of tokens on the sphere."""

    horizon: Required[float]
    method: Method | None
    keep: SphereKeep
    tolerance: float
    early_stop: float | None
    pairs: Sequence[tuple[int, int]] | None
    dtype: Dtype


class SphereLimitOptions(SphereChainOptions, total=False):
    """The options of the limit of tokens on the sphere."""

    dt: float | None


def process_of(model: Any, start: Any, record: Record, options: Mapping[str, Any]) -> Process:
    """Return the process that `model` declares, from `start`; `options` are those of its kind.

    Raises:
        InputError: not a model, or an option that this kind does not have.
    """
    kind = next((kind for kind in KINDS if isinstance(model, kind.models)), None)
    if kind is None:
        raise InputError(f"simulate needs a model or limit(model); got {type(model).__name__}.")
    known = [name for name in kind.options.__annotations__ if name not in RunOptions.__annotations__]
    unknown = sorted(set(options) - set(known))
    require(not unknown, f"{kind.name} has no option {', '.join(unknown)}; it has {', '.join(known)}.")
    if "horizon" in known:
        require("horizon" in options, f"{kind.name} needs a horizon: how many units of time.")
    return kind.process(model, start, record, **options)


def chain(
    model: Transformer,
    start: Any,
    record: Record,
    *,
    radius: float | None = None,
    gradients: bool = False,
    **recording_options: Any,
) -> TransformerChain:
    require_boolean("gradients", gradients)
    start, points = as_start(start), recorded_layers(model, record)
    recording = recording_of(recording_options, start)
    kind = OneMatrixChain if type(model.feedforward) is OneMatrix else TransformerChain
    if gradients:
        for part in (model.attention, model.feedforward, model.norm):
            name = name_of_part(part) if is_user_part(part) else type(part).__name__
            require(
                has_gradients(part),
                f"The chain with {name} has no gradients. Nearest: lf.nn.simulate(…, gradients=True).",
            )
        kind = GradientChain
    radius = checked_radius(radius, recording)
    return kind(model=model, start=start, points=points, radius=radius, recording=recording)


def covariance_paths(
    model: CovarianceLimit,
    start: Any,
    record: Record,
    *,
    radius: float | None = None,
    dt: float = 0.01,
    step: Step = "factor",
    gradients: bool = False,
    **recording_options: Any,
) -> CovariancePaths:
    require_boolean("gradients", gradients)
    start = as_start(start)
    recording = recording_of(recording_options, start)
    kind = GradientPaths if gradients else CovariancePaths

    def paths_at(times: Any) -> CovariancePaths:
        ball = checked_radius(radius, recording)
        return kind(model=model, start=start, times=times, dt=dt, step=step, radius=ball, recording=recording)

    if record is not None:
        return paths_at(recorded_points("record", record))
    last = paths_at(np.array([model.horizon]))
    check_scratch(8 * (last.steps + 1), f"The list of all {last.steps + 1:,} times", "give record")
    times = np.arange(last.steps + 1, dtype=np.float64) * last.actual_dt
    times[-1] = model.horizon
    return paths_at(times)


def flow_path(model: CovarianceFlow, start: Any, record: Record, **recording_options: Any) -> FlowPath:
    start, times = as_start(start), recorded_times(record)
    return FlowPath(model=model, start=start, times=times, recording=recording_of(recording_options, start))


def limit_on_sphere(
    model: TokenLimit, start: Any, record: Record, *, dt: float | None = None, **options: Any
) -> SpherePaths:
    first = as_sphere_start(start, model.model)
    return token_paths(model, first, recorded_times(record), SphereOptions(**options), dt)


class ModelKind(NamedTuple):
    """One kind of models: what messages call its run, its options, and the function that makes its process."""

    models: tuple[type, ...]
    name: str
    options: type
    process: Callable[..., Process]


KINDS = (
    ModelKind((Transformer,), "A chain", ChainOptions, chain),
    ModelKind((CovarianceLimit,), "A limit", CovarianceLimitOptions, covariance_paths),
    ModelKind((CovarianceFlow,), "A deterministic limit", CovarianceOptions, flow_path),
    ModelKind(
        (StochasticTransformer, HybridTransformer),
        "A chain on the sphere",
        SphereChainOptions,
        lambda model, start, record, **options: sphere_chain(
            model, as_sphere_start(start, model), recorded_times(record), SphereOptions(**options)
        ),
    ),
    ModelKind((TokenLimit,), "A limit on the sphere", SphereLimitOptions, limit_on_sphere),
)


def require_boolean(name: str, value: Any) -> None:
    require(isinstance(value, bool), f"{name} must be True or False; got {value!r}.")


def recording_of(options: Mapping[str, Any], start: Start) -> Recording:
    recording = Recording(**options)
    recording.pairs_among(start.tokens)  # raises if a token is not there
    return recording


def recorded_times(record: Record) -> Any:
    return None if record is None else recorded_points("record", record)


def checked_radius(radius: float | None, recording: Recording) -> float:
    """Return the radius at which paths stop; None stands for the largest that the results' type allows."""
    largest = min(LARGEST_RADIUS, LARGEST[recording.dtype])  # every V inside the ball fits the type
    if radius is None:
        return largest
    radius = require_real("radius", radius)
    require(0 < radius <= largest, f"radius must lie in (0, {largest:g}] for {recording.dtype}; got {radius}.")
    return radius


def dataset_of(process: Any, outputs: Outputs, provenance: dict[str, Any]) -> xr.Dataset:
    """Return the results of a process as a Dataset."""
    if isinstance(process, SpherePaths):
        if process.options.keep == "tokens":
            values = outputs["tokens"]
            tokens = values.reshape(*values.shape[:2], process.model.tokens, process.model.dim)
            outputs = outputs | {"tokens": tokens}
        return sphere_dataset(
            outputs, times=process.points, pairs=process.pairs, start=process.start, provenance=provenance
        )
    recording, tokens = process.recording, process.tokens
    paths: dict[str, Any] = {"exits": outputs["exits"], "causes": outputs["causes"], "provenance": provenance}
    paths |= {"axis": process.axis, "unit": process.unit, "points": process.points, "start": process.start}
    if recording.keep == "covariance":
        v = outputs["covariance"]
        result = covariance_dataset(v.reshape(*v.shape[:2], tokens, tokens), **paths)
    else:
        arrays: dict[str, Any] = {name: outputs[name] for name in ("variance", "pair_covariance", "distance")}
        result = pairs_dataset(**arrays, pairs=recording.pairs_among(tokens), **paths)
    if isinstance(process, GradientChain):
        return with_gradients(result, outputs, weights_of(process.model))
    if isinstance(process, GradientPaths):
        return with_limit_gradients(result, outputs, weight_kinds(process.model))
    return result


@overload
def limit(model: Transformer) -> CovarianceLimit | CovarianceFlow: ...


@overload
def limit(model: SphereModel) -> TokenLimit: ...


def limit(model: Transformer | SphereModel) -> CovarianceLimit | CovarianceFlow | TokenLimit:
    """Return the infinite-depth limit of `model`: covariances for a `Transformer`, otherwise tokens on the sphere.

    A `CovarianceLimit`, the SDE of λ² + γ² = 1, has the horizon depth/width; a `CovarianceFlow`, the ODE of λ = 1 and
    γ = 1/√depth, has the horizon 1; a `TokenLimit` has none, and `simulate` needs `horizon`. Some limits of covariances
    are theorems and others derivations that are tested: the attribute `basis` says which.

    Raises:
        InputError: not a model.
        NoLimitError: a part of a `Transformer` whose contribution to a layer does not shrink with the width, or one
            for which no limit is proven or derived; the message names it.

    >>> import limitformer as lf
    >>> lf.limit(lf.Transformer(width=200, depth=150, gamma=0.5, attention=lf.ShapedAttention(tau0=1.0))).horizon
    0.75
    """
    if isinstance(model, Transformer):
        return CovarianceFlow(model=model) if flows(model) else covariance_limit(model)
    if isinstance(model, SphereModel):
        return TokenLimit(model=model)
    stock = isinstance(model, str | dict) or hasattr(model, "model_type")
    hint = " Nearest: limitformer.check, for a configuration of transformers." if stock else ""
    raise InputError(f"limit needs a model; got {type(model).__name__}.{hint}")
