"""`simulate`: a chain or a limit over many replicas, on threads.

Replica j's random numbers depend on (seed, j) alone, so the result has the same bits for any number of threads and
any chunking.
"""

import time
from dataclasses import fields
from functools import singledispatch
from typing import Annotated, Any, Protocol, Unpack, overload

import numpy as np
import xarray as xr
from numpy.typing import ArrayLike, NDArray

from limitformer.base.errors import InputError, MadeOf, require, require_count, require_real
from limitformer.base.memory import check_list, readable
from limitformer.base.progress import advance, announcement, bar
from limitformer.covariance.chain import OneMatrixChain, TransformerChain
from limitformer.covariance.gradients import GradientChain, weights_of
from limitformer.covariance.limit import CovarianceFlow, CovarianceLimit, CovariancePaths, FlowPath
from limitformer.models import (
    Elementwise,
    Gated,
    HybridTransformer,
    Mixing,
    OneMatrix,
    RadialNorm,
    SphereModel,
    Start,
    StochasticTransformer,
    Transformer,
    as_start,
)
from limitformer.models.serial import described
from limitformer.models.sphere_start import SphereStart, as_sphere_start
from limitformer.numerics import kernels
from limitformer.numerics.watch import Watch, new_watch
from limitformer.recording.records import Shapes, bytes_of
from limitformer.recording.writing import Recording
from limitformer.running.options import (
    ChainOptions,
    CovarianceLimitOptions,
    Record,
    SphereChainOptions,
    SphereLimitOptions,
)
from limitformer.running.replicas import run_all, usable_cores
from limitformer.running.results import (
    covariance_dataset,
    pairs_dataset,
    sphere_dataset,
    with_gradients,
)
from limitformer.sphere.chain import sphere_chain
from limitformer.sphere.limit import TokenLimit
from limitformer.sphere.limit_paths import token_paths
from limitformer.sphere.options import SphereOptions
from limitformer.sphere.process import SpherePaths

WITHOUT_GRADIENTS = (OneMatrix, Elementwise, Gated, Mixing, RadialNorm)
KEEPING = tuple(field.name for field in fields(Recording))

Outputs = dict[str, NDArray[Any]]
SquareLike = Annotated[ArrayLike, "tokens tokens"]
TokensLike = Annotated[ArrayLike, "tokens dim", ""]  # or the overlap of two


class Prepared(Protocol):
    """A process that is ready to run replicas, from any thread."""

    def run(self, first: int, outputs: Outputs, watch: Watch) -> None:
        """Fill the arrays with replicas `first`, `first` + 1, …, unless the watch says halt."""


class Process(Protocol):
    """What can be simulated: a chain or a limit with its start and its recording."""

    @property
    def description(self) -> str:
        """ "chain" or "limit"."""

    @property
    def tokens(self) -> int:
        """How many there are."""

    @property
    def points(self) -> NDArray[Any]:
        """The layers or times that are recorded."""

    @property
    def settings(self) -> dict[str, Any]:
        """What else one needs to know to repeat it."""

    def shapes(self, samples: int) -> Shapes:
        """Shapes and types of the arrays for the results, (samples, …) each."""

    @property
    def once(self) -> Shapes:
        """Of what the results have beside them, once: coordinates and the start."""

    def outputs(self, samples: int) -> Outputs:
        """Arrays for the results, (samples, …) each; `InputError` if they do not fit the memory."""

    def prepare(self, seed: int) -> Prepared:
        """Everything that all replicas share."""


class Interrupted(MadeOf, KeyboardInterrupt):
    """Ctrl-C during `simulate`; `partial` holds the replicas that were finished, from the first on."""

    def __init__(self, partial: xr.Dataset) -> None:
        super().__init__(f"interrupted after {partial.sizes['sample']} samples")
        self.partial, self.made_of = partial, (partial,)


@overload
def simulate(model: Transformer, start: Start | SquareLike, **options: Unpack[ChainOptions]) -> xr.Dataset: ...


@overload
def simulate(
    model: CovarianceLimit | CovarianceFlow, start: Start | SquareLike, **options: Unpack[CovarianceLimitOptions]
) -> xr.Dataset: ...


@overload
def simulate(
    model: SphereModel, start: SphereStart | TokensLike | None = None, **options: Unpack[SphereChainOptions]
) -> xr.Dataset: ...


@overload
def simulate(
    model: TokenLimit, start: SphereStart | TokensLike | None = None, **options: Unpack[SphereLimitOptions]
) -> xr.Dataset: ...


def simulate(
    model: Transformer | CovarianceLimit | CovarianceFlow | SphereModel | TokenLimit,
    start: Start | SquareLike | SphereStart | TokensLike | None = None,
    *,
    samples: int,
    seed: int,
    record: Record = None,
    threads: int | None = None,
    chunk: int | None = None,
    progress: bool = True,
    gradients: bool = False,
    **options: Any,
) -> xr.Dataset:
    """Simulate the exact chain of a model, or its limit.

    Args:
        model: a `Transformer`, `StochasticTransformer` or `HybridTransformer` (its chain), or `limit(model)` (its
            SDE, or its ODE, which gives the same to every sample).
        start: of a `Transformer`, a start or a covariance matrix V₀ (tokens, tokens). On the sphere, None for tokens
            that are uniform there, an array (tokens, dim) of unit vectors, or the overlap of two tokens.
        samples: independent replicas.
        seed: 0 to 2⁶³ − 1; the same seed gives the same bits, whatever the threads.
        record: layers (chain of a `Transformer`) or times to keep, ascending; None keeps all, on the sphere about 100.
        threads: None takes all cores.
        chunk: replicas handed to a thread at a time, best a multiple of 8 (`lanes`); None chooses.
        progress: whether work of more than two seconds shows on the terminal.
        gradients: of a `Transformer` whose weights its chain never draws: whether ½|x|² of the last tokens, mean over
            tokens, is differentiated, as in `limitformer.nn.drawn.simulate`.
        options: what is kept: `keep` ("covariance" or "pairs"; on the sphere "overlap", "outcome" or "tokens"),
            `pairs`, a list of two tokens each, and `dtype` ("float64" or "float32"). Of a `Transformer` and its limit,
            `radius`: paths whose |V| (Frobenius) reaches it stop and are marked. On the sphere, `horizon` (needed),
            `method`, `tolerance`, `early_stop`. Of a limit, `dt` (default 0.01 for covariances, on the sphere what
            resolves the model), and of a covariance limit `step`, "factor" (default) or "euler-maruyama".

    Returns:
        Dataset of `covariance` (sample, depth or time, token, token_), `exit` and `exit_cause` (sample,); or, on the
        sphere, of what `keep` names (`results.sphere_dataset`). With gradients also `loss` (sample,) and the norms
        `stream_gradient` (sample, depth), of ∂loss/∂X of all tokens at once, and `weight_gradient` (sample, weight),
        of ∂loss/∂W for weights with N(0, 1) entries; NaN of a path that left the ball.

    Raises:
        InputError: an argument that cannot be used, or a recording that does not fit the memory.
        Interrupted: Ctrl-C, with the finished replicas.

    >>> import limitformer as lf
    >>> net = lf.Transformer(width=64, depth=8, gamma=0.5, attention=lf.ShapedAttention(tau0=1.0))
    >>> lf.simulate(net, [[1.0, 0.2], [0.2, 1.0]], samples=10, seed=0).covariance.shape
    (10, 9, 2, 2)
    >>> pair = lf.StochasticTransformer(tokens=2, dim=4, beta=1.0, layers_per_unit_time=100)
    >>> lf.simulate(pair, horizon=2.0, samples=10, seed=0, record=[0.0, 2.0]).overlap.shape
    (10, 2, 1)
    """
    require_count("samples", samples)
    threads = usable_cores() if threads is None else require_count("threads", threads)
    if chunk is not None:
        require_count("chunk", chunk)
    require(isinstance(gradients, bool), f"gradients must be True or False; got {gradients!r}.")
    process = process_of(model, start, record, options | ({"gradients": True} if gradients else {}))
    outputs = process.outputs(samples)
    prepared = process.prepare(seed)
    began = time.perf_counter()

    def dataset(finished: int) -> xr.Dataset:
        provenance = {
            "model": described(model),
            "description": process.description,
            "seed": seed,
            "samples": finished,
            "threads": threads,
            **process.settings,
            "recorded_bytes": bytes_kept(process, finished),
            "wall_seconds": time.perf_counter() - began,
        }
        return dataset_of(process, part_of(outputs, slice(0, finished)), provenance)

    def run(part: slice, watch: Watch) -> None:
        prepared.run(part.start, part_of(outputs, part), watch)

    compiling = f"Compiling the {process.description}'s kernels ({kernels.HOW_OFTEN})"
    try:
        with announcement(compiling) as begin, kernels.at_compilation(begin):
            run(slice(0, 0), new_watch())
    except KeyboardInterrupt as interrupt:
        raise Interrupted(dataset(0)) from interrupt
    size = readable(bytes_kept(process, samples))
    shown = bar(f"{process.description} samples ({size} to keep)", samples) if progress else None
    try:
        finished, interrupted = run_all(run, samples, threads, chunk, lambda done: advance(shown, done))
    finally:
        advance(shown, -1)
    if interrupted:
        raise Interrupted(dataset(finished))
    return dataset(samples)


def recording_size(model: Any, start: Any = None, *, samples: int, record: Record = None, **options: Any) -> int:
    """Bytes that `simulate` with these arguments will keep, before any work; names and means of tokens aside.

    Raises:
        InputError: as `simulate`.

    >>> import limitformer as lf
    >>> many = lf.StochasticTransformer(tokens=50, dim=4, beta=1.0, layers_per_unit_time=100)
    >>> lf.recording_size(many, horizon=10.0, samples=1000) // 2**20
    1887
    >>> lf.recording_size(many, horizon=10.0, samples=1000, pairs=[(0, 1), (0, 2)], dtype="float32") // 2**20
    1
    """
    return bytes_kept(process_of(model, start, record, options), require_count("samples", samples))


def bytes_kept(process: Process, samples: int) -> int:
    """Of the results of so many samples."""
    return bytes_of(process.shapes(samples)) + bytes_of(process.once)


def part_of(outputs: Outputs, part: slice) -> Outputs:
    """These samples of every array."""
    return {name: array[part] for name, array in outputs.items()}


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


def recorded_layers(model: Transformer, record: Record) -> NDArray[np.int64]:
    """`record` as layers of `model`, ascending; all of them, from the start on, if None."""
    if record is None:
        check_list(model.depth + 1, "depth")
        record = np.arange(model.depth + 1)
    layers = recorded_points("record", record)
    whole = bool((np.isfinite(layers) & (layers == np.rint(layers))).all())
    require(whole, f"Layers to record must be whole numbers; got {layers}.")
    in_range = bool((layers >= 0).all() and (layers <= model.depth).all())
    require(in_range, f"Layers to record must lie in 0 … {model.depth}; got {layers}.")
    return layers.astype(np.int64)


def recorded_points(name: str, record: Record) -> NDArray[Any]:
    """`record` as an ascending array."""
    points = np.asarray(record)
    numbers = points.ndim == 1 and points.size > 0 and points.dtype.kind in "iuf"
    require(numbers, f"{name} must be a list of layers or times; got {record!r}.")
    require(bool((points[1:] > points[:-1]).all()), f"{name} must be strictly ascending; got {record!r}.")
    return points
