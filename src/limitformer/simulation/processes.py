"""From a model and its options to the process that simulates it, and from a finished process to its Dataset."""

from collections.abc import Sequence
from dataclasses import fields
from functools import singledispatch
from typing import Any, Required, TypedDict

import numpy as np
import xarray as xr

from limitformer.base.errors import InputError, require, require_real
from limitformer.base.memory import check_list
from limitformer.covariance.chain import OneMatrixChain, TransformerChain
from limitformer.covariance.gradients import GradientChain, weights_of
from limitformer.covariance.limit import CovarianceFlow, CovarianceLimit, CovariancePaths, FlowPath
from limitformer.covariance.limit.path import Step
from limitformer.models import (
    Elementwise,
    Gated,
    HybridTransformer,
    Mixing,
    OneMatrix,
    RadialNorm,
    Start,
    StochasticTransformer,
    Transformer,
    as_start,
)
from limitformer.models.sphere_start import as_sphere_start
from limitformer.paths import recording as writing
from limitformer.paths.arrays import Dtype
from limitformer.paths.process import Outputs, Process
from limitformer.paths.recording import Recording
from limitformer.paths.times import Record, recorded_layers, recorded_points
from limitformer.results.datasets import (
    covariance_dataset,
    pairs_dataset,
    sphere_dataset,
    with_gradients,
)
from limitformer.sphere import options as options_on_sphere
from limitformer.sphere.chain import sphere_chain
from limitformer.sphere.limit import TokenLimit
from limitformer.sphere.limit_paths import token_paths
from limitformer.sphere.options import SphereOptions
from limitformer.sphere.process import SpherePaths


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
    method: options_on_sphere.Method | None
    keep: options_on_sphere.Keep
    tolerance: float
    early_stop: float | None
    pairs: Sequence[tuple[int, int]] | None
    dtype: Dtype


class SphereLimitOptions(SphereChainOptions, total=False):
    """Of the limit of tokens on the sphere: its step too; None resolves the model."""

    dt: float | None


WITHOUT_GRADIENTS = (OneMatrix, Elementwise, Gated, Mixing, RadialNorm)


KEEPING = tuple(field.name for field in fields(Recording))


@singledispatch
def dataset_of(process: Any, outputs: Outputs, provenance: dict[str, Any]) -> xr.Dataset:
    """The results of a process."""
    raise TypeError(f"no results are known for {type(process).__name__}")


@dataset_of.register(TransformerChain)
@dataset_of.register(CovariancePaths)
@dataset_of.register(FlowPath)
def _(process: TransformerChain | CovariancePaths | FlowPath, outputs: Outputs, about: dict[str, Any]) -> xr.Dataset:
    recording, tokens = process.recording, process.tokens
    paths: dict[str, Any] = {"exits": outputs["exits"], "causes": outputs["causes"], "provenance": about}
    paths |= {"axis": process.axis, "unit": process.unit, "points": process.points, "start": process.start}
    if recording.keep == "covariance":
        v = outputs["covariance"]
        return covariance_dataset(v.reshape(*v.shape[:2], tokens, tokens), **paths)
    kept: dict[str, Any] = {name: outputs[name] for name in ("variance", "pair_covariance", "distance")}
    return pairs_dataset(**kept, pairs=recording.pairs_among(tokens), **paths)


@dataset_of.register
def _(process: GradientChain, outputs: Outputs, about: dict[str, Any]) -> xr.Dataset:
    found = dataset_of.dispatch(TransformerChain)(process, outputs, about)
    return with_gradients(found, outputs, weights_of(process.model))


@dataset_of.register
def _(process: SpherePaths, outputs: Outputs, provenance: dict[str, Any]) -> xr.Dataset:
    n, dim = process.model.tokens, process.model.dim
    shape = (*outputs["tokens"].shape[:2], n, dim) if process.options.keep == "tokens" else (0, 0, 0, 0)
    outputs = outputs | {"tokens": outputs["tokens"].reshape(shape)}
    return sphere_dataset(
        outputs, times=process.points, pairs=process.pairs, start=process.start, provenance=provenance
    )


@singledispatch
def process_of(model: Any, start: Any, record: Record, options: dict[str, Any]) -> Process:
    """The process that `model` declares, from `start`."""
    raise InputError(f"simulate needs a model or limit(model); got {type(model).__name__}.")


@process_of.register
def _(model: Transformer, start: Any, record: Record, options: dict[str, Any]) -> Process:
    refuse_options("a chain", options, ("radius", "gradients", *KEEPING))
    start, points = as_start(start), recorded_layers(model, record)
    recording = recording_of(options, start)
    kind = chain_kind(model, options.get("gradients", False))
    radius = checked_radius(options, recording)
    return kind(model=model, start=start, points=points, radius=radius, recording=recording)


def chain_kind(model: Transformer, gradients: bool) -> type[TransformerChain]:
    """The chain of a Transformer; `InputError` where it has no gradients."""
    one_matrix = type(model.feedforward) is OneMatrix
    for part in (model.attention, model.feedforward, model.norm):
        without = type(part) in WITHOUT_GRADIENTS and gradients
        name = type(part).__name__
        require(not without, f"The chain with {name} has no gradients. Nearest: lf.nn.simulate(…, gradients=True).")
    return GradientChain if gradients else OneMatrixChain if one_matrix else TransformerChain


@process_of.register
def _(model: CovarianceLimit, start: Any, record: Record, options: dict[str, Any]) -> Process:
    refuse_options("a limit", options, ("radius", "dt", "step", *KEEPING))
    start = as_start(start)
    recording = recording_of(options, start)
    stepping = {"dt": options.get("dt", 0.01), "step": options.get("step", "factor")}
    settings = {**stepping, "radius": checked_radius(options, recording), "recording": recording}
    if record is not None:
        times = recorded_points("record", record)
        return CovariancePaths(model=model, start=start, times=times, **settings)
    last = CovariancePaths(model=model, start=start, times=np.array([model.horizon]), **settings)
    check_list(last.steps + 1, "time")
    times = np.arange(last.steps + 1, dtype=np.float64) * last.actual_dt
    times[-1] = model.horizon
    return CovariancePaths(model=model, start=start, times=times, **settings)


@process_of.register
def _(model: CovarianceFlow, start: Any, record: Record, options: dict[str, Any]) -> Process:
    refuse_options("a deterministic limit", options, KEEPING)
    start, times = as_start(start), None if record is None else recorded_points("record", record)
    return FlowPath(model=model, start=start, times=times, recording=recording_of(options, start))


@process_of.register(StochasticTransformer)
@process_of.register(HybridTransformer)
def _(model: StochasticTransformer | HybridTransformer, start: Any, record: Record, options: dict[str, Any]) -> Process:
    times = None if record is None else recorded_points("record", record)
    chosen = sphere_options("a chain on the sphere", options)
    return sphere_chain(model, as_sphere_start(start, model), times, chosen)


@process_of.register
def _(model: TokenLimit, start: Any, record: Record, options: dict[str, Any]) -> Process:
    times = None if record is None else recorded_points("record", record)
    chosen = sphere_options("a limit on the sphere", options, ("dt",))
    return token_paths(model, as_sphere_start(start, model.model), times, chosen, options.get("dt"))


def recording_of(options: dict[str, Any], start: Start) -> Recording:
    """What `options` say of what to keep of these tokens."""
    recording = Recording(**{name: options[name] for name in KEEPING if name in options})
    recording.pairs_among(start.tokens)
    return recording


def checked_radius(options: dict[str, Any], recording: Recording) -> float:
    """The radius at which paths stop."""
    largest = recording.largest_radius
    radius = require_real("radius", options.get("radius", largest))
    require(0 < radius <= largest, f"radius must lie in (0, {largest:g}] for {recording.dtype}; got {radius}.")
    return radius


def sphere_options(what: str, options: dict[str, Any], more: tuple[str, ...] = ()) -> SphereOptions:
    """`options` without `more`, checked."""
    known = tuple(field.name for field in fields(SphereOptions))
    refuse_options(what, options, (*known, *more))
    require("horizon" in options, f"{what.capitalize()} needs a horizon: how many units of time.")
    return SphereOptions(**{name: value for name, value in options.items() if name in known})


def refuse_options(what: str, options: dict[str, Any], known: tuple[str, ...]) -> None:
    """Raise `InputError` on an option that this process does not have."""
    strange = sorted(set(options) - set(known))
    have = f"it has {', '.join(known)}" if known else "it has none"
    require(not strange, f"{what.capitalize()} has no option {', '.join(strange)}; {have}.")
