"""`simulate`: a chain or a limit over many replicas, on threads.

Replica j's random numbers depend on (seed, j) alone, so the result has the same bits for any number of threads and
any chunking.
"""

import os
import time
from collections.abc import Sequence
from functools import singledispatch
from typing import Any, Protocol

import numpy as np
import xarray as xr
from numpy.typing import ArrayLike, NDArray

from limitformer.chains import TransformerChain
from limitformer.errors import InputError, require, require_count
from limitformer.limits import CovarianceLimit, CovariancePaths
from limitformer.models import Start, Transformer, as_start, to_json
from limitformer.progress import advance, announced, bar
from limitformer.recording import INSIDE, LARGEST_RADIUS
from limitformer.replicas import run_parts, slices, slices_after_a_trial
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
    threads = os.cpu_count() or 1 if threads is None else threads
    require_count("threads", threads)
    require(0 < radius <= LARGEST_RADIUS, f"radius must lie in (0, {LARGEST_RADIUS:g}]; got {radius}.")
    if chunk is not None:
        require_count("chunk", chunk)
    process = process_of(model, as_start(start), record, radius, options)
    check_memory(samples, process)
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
            "options": str(options),
            "wall_seconds": time.perf_counter() - began,
        }
        return covariance_dataset(
            covariance[:finished],
            exits[:finished],
            causes[:finished],
            axis=process.axis,
            points=process.points,
            labels=process.start.labels,
            provenance=provenance,
        )

    def run(part: slice) -> None:
        prepared.run(part.start, covariance[part], exits[part], causes[part])

    with announced(f"Compiling the {process.description}'s kernels for this machine (the first time only)"):
        run(slice(0, 0))
    try:
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


def available_memory() -> int | None:
    """Bytes that a new array may take; None where the system does not say."""
    try:
        with open("/proc/meminfo") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return None


def check_list(count: int, axis: str) -> None:
    """Raise `InputError` if the list of all layers or times does not fit the memory by itself."""
    available = available_memory()
    fits = available is None or 8 * count <= 0.75 * available
    require(fits, f"All {count:,} {axis}s do not fit the memory. Nearest: give record, the {axis}s to keep.")


def check_memory(samples: int, process: Process) -> None:
    """Raise `InputError` if what is to be recorded does not fit three quarters of the memory that is free."""
    available = available_memory()
    one = 8 * process.start.tokens**2 * samples
    needed = one * len(process.points)
    if available is None or needed <= 0.75 * available:
        return
    fitting = int(0.75 * available / one)
    repair = f"record at most {fitting} {process.axis}s" if fitting else "take fewer samples"
    raise InputError(
        f"Recording {samples} samples at {len(process.points)} {process.axis}s takes {needed / 2**30:,.1f} GiB; "
        f"{available / 2**30:,.1f} GiB are free. Nearest: {repair}."
    )
