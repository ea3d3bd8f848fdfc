"""`simulate`: a chain or a limit over many replicas, on threads.

Replica j's random numbers depend on (seed, j) alone, so the result has the same bits for any number of threads and
any chunking.
"""

import time
from collections.abc import Sequence
from functools import singledispatch
from typing import Any, Protocol

import numpy as np
import xarray as xr
from numpy.typing import ArrayLike, NDArray

from limitformer.chains import TransformerChain
from limitformer.errors import InputError, require, require_count, require_real
from limitformer.limits import CovarianceLimit, CovariancePaths
from limitformer.memory import check_list, check_recording
from limitformer.models import Start, Transformer, as_start, to_json
from limitformer.progress import advance, announced, bar
from limitformer.recording import INSIDE, LARGEST_RADIUS
from limitformer.replicas import run_parts, slices, slices_after_a_trial, usable_cores
from limitformer.results import covariance_dataset

Record = Sequence[float] | NDArray[Any] | None


class Prepared(Protocol):
    """A process that is ready to run replicas, from any thread."""

    def run(
        self,
        first: int,
        covariance: NDArray[np.float64],
        exits: NDArray[np.float64],
        causes: NDArray[np.int8],
    ) -> None:
        """Fill the arrays with replicas `first`, `first` + 1, …"""


class Process(Protocol):
    """What can be simulated: a chain or a limit with its start and its recording."""

    @property
    def axis(self) -> str:
        """ "depth" or "time"."""

    @property
    def description(self) -> str:
        """ "chain" or "limit"."""

    @property
    def start(self) -> Start:
        """The input tokens."""

    @property
    def points(self) -> NDArray[Any]:
        """The layers or times that are recorded."""

    @property
    def settings(self) -> dict[str, Any]:
        """What else one needs to know to repeat it."""

    def prepare(self, seed: int) -> Prepared:
        """Everything that all replicas share."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during `simulate`; `partial` holds the replicas that were finished, from the first on."""

    def __init__(self, partial: xr.Dataset) -> None:
        super().__init__(f"interrupted after {partial.sizes['sample']} samples")
        self.partial = partial


def simulate(
    model: Transformer | CovarianceLimit,
    start: Start | ArrayLike,
    *,
    samples: int,
    seed: int,
    record: Record = None,
    radius: float = LARGEST_RADIUS,
    threads: int | None = None,
    chunk: int | None = None,
    progress: bool = True,
    **options: Any,
) -> xr.Dataset:
    """Simulate the exact chain of a Transformer, or its limit.

    Args:
        model: a `Transformer` (its chain) or `limit(model)` (its SDE).
        start: a start, or a covariance matrix V₀ (tokens, tokens).
        samples: independent replicas.
        seed: 0 to 2⁶³ − 1; the same seed gives the same bits, whatever the threads.
        record: layers (chain) or times (limit) to keep, ascending; None keeps all.
        radius: paths whose |V| (Frobenius) reaches it stop there and are marked.
        threads: None takes all cores.
        chunk: replicas handed to a thread at a time, best a multiple of 8 (`lanes`); None chooses.
        progress: whether work of more than two seconds shows on the terminal.
        options: for a limit, `dt` (default 0.01) and `step`, "factor" (default) or "euler-maruyama".

    Returns:
        Dataset of `covariance` (sample, depth or time, token, token_), `exit` and `exit_cause` (sample,).

    Raises:
        InputError: an argument that cannot be used, or a recording that does not fit the memory.
        Interrupted: Ctrl-C, with the finished replicas.

    >>> import limitformer as lf
    >>> net = lf.Transformer(width=64, depth=8, gamma=0.5, attention=lf.ShapedAttention(tau0=1.0))
    >>> lf.simulate(net, [[1.0, 0.2], [0.2, 1.0]], samples=10, seed=0).covariance.shape
    (10, 9, 2, 2)
    """
    require_count("samples", samples)
    threads = usable_cores() if threads is None else require_count("threads", threads)
    radius = require_real("radius", radius)
    require(0 < radius <= LARGEST_RADIUS, f"radius must lie in (0, {LARGEST_RADIUS:g}]; got {radius}.")
    if chunk is not None:
        require_count("chunk", chunk)
    process = process_of(model, as_start(start), record, radius, options)
    check_recording(samples, len(process.points), process.start.tokens, process.axis)
    prepared = process.prepare(seed)

    began = time.perf_counter()
    tokens, points = process.start.tokens, len(process.points)
    covariance = np.empty((samples, points, tokens, tokens))
    exits, causes = np.full(samples, np.inf), np.full(samples, INSIDE, np.int8)

    def dataset(finished: int) -> xr.Dataset:
        provenance = {
            "model": to_json(model),
            "description": process.description,
            "start": process.start.description,
            "seed": seed,
            "samples": finished,
            "radius": radius,
            "threads": threads,
            **process.settings,
            "wall_seconds": time.perf_counter() - began,
        }
        return covariance_dataset(
            covariance[:finished],
            exits[:finished],
            causes[:finished],
            axis=process.axis,
            points=process.points,
            start=process.start,
            provenance=provenance,
        )

    def run(part: slice) -> None:
        prepared.run(part.start, covariance[part], exits[part], causes[part])

    try:
        with announced(f"Compiling the {process.description}'s kernels for this machine (the first time only)"):
            run(slice(0, 0))
        parts = slices(0, samples, chunk) if chunk else slices_after_a_trial(run, samples, threads)
    except KeyboardInterrupt as interrupt:
        raise Interrupted(dataset(0)) from interrupt
    shown = bar(f"{process.description} samples", samples) if progress else None
    finished, interrupted = run_parts(run, parts, samples, threads, lambda done: advance(shown, done))
    if interrupted:
        raise Interrupted(dataset(finished))
    return dataset(samples)


@singledispatch
def process_of(model: Any, start: Start, record: Record, radius: float, options: dict[str, Any]) -> Process:
    """The process that `model` declares, from `start`."""
    raise InputError(f"simulate needs a Transformer or limit(model); got {type(model).__name__}.")


@process_of.register
def _(model: Transformer, start: Start, record: Record, radius: float, options: dict[str, Any]) -> Process:
    refuse_options("a chain", options, ())
    return TransformerChain(model=model, start=start, points=recorded_layers(model, record), radius=radius)


@process_of.register
def _(model: CovarianceLimit, start: Start, record: Record, radius: float, options: dict[str, Any]) -> Process:
    refuse_options("a limit", options, ("dt", "step"))
    settings = {"dt": 0.01, "step": "factor", **options}
    if record is not None:
        return CovariancePaths(
            model=model,
            start=start,
            times=recorded_points("record", record),
            radius=radius,
            **settings,
        )
    last = CovariancePaths(model=model, start=start, times=np.array([model.horizon]), radius=radius, **settings)
    check_list(last.steps + 1, "time")
    times: NDArray[np.float64] = np.arange(last.steps + 1, dtype=np.float64) * last.actual_dt
    times[-1] = model.horizon
    return CovariancePaths(model=model, start=start, times=times, radius=radius, **settings)


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
