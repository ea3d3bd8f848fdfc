"""`simulate`: a chain or a limit over many replicas, on threads.

Replica j's random numbers depend only on (seed, j), so the result has the same bits for any number of threads and any
chunk.
"""

import time
from typing import Annotated, Any, Unpack, overload

import xarray as xr
from numpy.typing import ArrayLike

from limitformer.base.errors import PicklesArguments, require_count
from limitformer.base.memory import readable
from limitformer.base.progress import advance, delayed_notice, progress_bar
from limitformer.covariance.limit import CovarianceFlow, CovarianceLimit
from limitformer.models import SphereModel, Start, Transformer
from limitformer.models.serial import describe
from limitformer.models.sphere import SphereStart
from limitformer.numerics import kernels
from limitformer.numerics.watch import Watch, new_watch
from limitformer.sampling.arrays import Outputs, bytes_of
from limitformer.sampling.process import Process, Record
from limitformer.sampling.replicas import run_all, usable_cores
from limitformer.simulation.processes import (
    ChainOptions,
    CovarianceLimitOptions,
    SphereChainOptions,
    SphereLimitOptions,
    dataset_of,
    process_of,
)
from limitformer.sphere.limit import TokenLimit

SquareLike = Annotated[ArrayLike, "tokens tokens"]
TokensLike = Annotated[ArrayLike, "tokens dim", ""]  # or the overlap of two


class Interrupted(PicklesArguments, KeyboardInterrupt):
    """Ctrl-C during `simulate`; `partial` has the finished replicas, from the first on."""

    def __init__(self, partial: xr.Dataset) -> None:
        super().__init__(f"interrupted after {partial.sizes['sample']} samples")
        self.partial, self.pickled_arguments = partial, (partial,)


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
        start: of a `Transformer`, a start or a covariance matrix V₀ (tokens, tokens). On the sphere, None for uniformly
            distributed tokens, an array (tokens, dim) of unit vectors, or the overlap of two tokens.
        samples: independent replicas.
        seed: 0 to 2⁶³ − 1; the same seed gives the same bits for any number of threads.
        record: layers (chain of a `Transformer`) or times to record, ascending; None records all, on the sphere about
            100.
        threads: None takes all cores.
        chunk: replicas handed to a thread at a time, best a multiple of 8 (`lanes`); None chooses.
        progress: whether work of more than two seconds shows on the terminal.
        gradients: whether ½|x|² of the last tokens, averaged over tokens, is differentiated. For a `Transformer` of the
            library's own parts, `SwiGLU` and `Tanh` too, other than `OneMatrix`, and for its SDE with step="factor";
            `limitformer.nn.simulate` has the gradients of all.

    Keyword Args:
        keep: the quantities in the results. Of covariances "covariance" (V, the default) or "pairs" (the variance of
            every token, covariance and distance of pairs). On the sphere "overlap" (z and 1 − |z| of pairs, the
            default), "outcome" (clusters and antipodal pairs) or "tokens".
        pairs: with keep="pairs" or "overlap" the pairs of tokens, such as [(0, 1), (0, 2)]; None (default): all of
            them.
        dtype: type of the results, "float64" (default) or "float32", which has seven digits from 1e-38 to 3e38, fewer
            below and 0 below 1e-45. Paths run in float64 in either case.
        radius: of a `Transformer` and its SDE: a path whose |V| (Frobenius) reaches it stops and is marked, in the SDE
            also within a step, and with V scaled to |V| = radius. The default and largest value is 1e100, in float32
            3e37; a path that left with larger entries is scaled down to 3e37.
        dt: step of a limit. The default is 0.01 for covariances, and on the sphere a step that resolves the model.
        step: of an SDE of covariances, "factor" (default) or "euler-maruyama".
        horizon: on the sphere, the time at which paths end; required.
        method: on the sphere, "overlap" (two tokens, by artanh z), "gram" (the tokens' Gram matrix) or "coordinates";
            None (default): the cheapest that the model allows.
        tolerance: on the sphere, how near to ±1 an overlap counts as arrived; default 1e-3.
        early_stop: on the sphere, replicas stop, and keep their values, when the probability that they ever leave the
            tolerance again is at most this; None (default): none stops. It applies to two tokens by their overlap, and
            with keep="outcome" to more tokens or other methods under softmax with QᵀK = I, β ≥ 0 and Gaussian values:
            tokens that have become two points continue as two, and stop as one or as antipodes. For other runs no bound
            is known and none stops; `stop_gaps` = (0, 0) in the results marks them.

    Returns:
        Dataset of `covariance` (sample, depth or time, token, token_), or `variance`, `pair_covariance` and `distance`,
        with `exit` and `exit_cause` (sample,); on the sphere of the quantities that `keep` names
        (`results.datasets.sphere_dataset`). With gradients also `loss` (sample,) and the norms `stream_gradient`
        (sample, depth), of ∂loss/∂X of all tokens at once, and `weight_gradient` (sample, weight), of ∂loss/∂W for
        weights with N(0, 1) entries; NaN for a path that left the ball. The gradients of an SDE are in units of the
        width n: `loss` over n; `stream_gradient` (sample, time) over n; `weight_gradient` (sample, time, weight), of
        one weight of the layer at that time, over n (over √n of queries and keys); and `tangent_kernel` (sample,), the
        sum of |∂loss/∂W|² over all weights, over n³.

    Raises:
        InputError: an argument that cannot be used, or results that do not fit the memory.
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
    process = process_of(model, start, record, options if gradients is False else options | {"gradients": gradients})
    outputs = process.outputs(samples)
    prepared = process.prepare(seed)
    began = time.perf_counter()

    def dataset(finished: int) -> xr.Dataset:
        provenance = {
            "model": describe(model),
            "description": process.description,
            "seed": seed,
            "samples": finished,
            "threads": threads,
            **process.settings,
            "recorded_bytes": result_bytes(process, finished),
            "wall_seconds": time.perf_counter() - began,
        }
        return dataset_of(process, part_of(outputs, slice(0, finished)), provenance)

    def run(part: slice, watch: Watch) -> None:
        prepared.run(part.start, part_of(outputs, part), watch)

    compiling = f"Compiling the {process.description}'s kernels ({kernels.HOW_OFTEN})"
    try:
        with delayed_notice(compiling) as begin, kernels.at_compilation(begin):
            run(slice(0, 0), new_watch())
    except KeyboardInterrupt as interrupt:
        raise Interrupted(dataset(0)) from interrupt
    size = readable(result_bytes(process, samples))
    bar = progress_bar(f"{process.description} samples ({size} to keep)", samples) if progress else None
    try:
        finished, interrupted = run_all(run, samples, threads, chunk, lambda done: advance(bar, done))
    finally:
        advance(bar, -1)
    if interrupted:
        raise Interrupted(dataset(finished))
    return dataset(samples)


def recording_size(model: Any, start: Any = None, *, samples: int, record: Record = None, **options: Any) -> int:
    """Return the bytes of the results of `simulate` with these arguments, without names and means of tokens.

    Raises:
        InputError: as `simulate`.

    >>> import limitformer as lf
    >>> many = lf.StochasticTransformer(tokens=50, dim=4, beta=1.0, layers_per_unit_time=100)
    >>> lf.recording_size(many, horizon=10.0, samples=1000) // 2**20
    1887
    >>> lf.recording_size(many, horizon=10.0, samples=1000, pairs=[(0, 1), (0, 2)], dtype="float32") // 2**20
    1
    """
    return result_bytes(process_of(model, start, record, options), require_count("samples", samples))


def result_bytes(process: Process, samples: int) -> int:
    return bytes_of(process.shapes(samples)) + bytes_of(process.shared_shapes)


def part_of(outputs: Outputs, part: slice) -> Outputs:
    return {name: array[part] for name, array in outputs.items()}
