"""Processes of any number of tokens, by their Gram factor or in coordinates, and what they record of eight replicas."""

from abc import abstractmethod
from math import exp
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from limitformer.base.memory import check_scratch
from limitformer.models.kinds import of_kind
from limitformer.numerics.factor import FIRST
from limitformer.numerics.kernels import allocator, driver, kernel
from limitformer.numerics.lanes import LANES, everywhere, lane_matrix, load, smaller, store, where_positive
from limitformer.numerics.random import rewind
from limitformer.numerics.watch import Watch, count_whole, is_halted, keep_going
from limitformer.sampling.arrays import TILE, ResultArray, as_result_array, entries_in, replicas_between, write_lane_row
from limitformer.sampling.exits import first_at
from limitformer.sampling.process import Outputs
from limitformer.sphere.methods import ONE_NUMBER, Method, can_merge
from limitformer.sphere.near.near_tree import (
    GAP_FLOOR,
    Rows,
    alone,
    link_initial,
    nearness,
    related,
    related_pair,
    update_links,
)
from limitformer.sphere.outcome import count_clusters, measure, sort_replica
from limitformer.sphere.pair.chain import CHECK
from limitformer.sphere.process import SpherePaths, gap_at, key_words
from limitformer.sphere.stopping.merging import NEVER, NOT_YET, Merging, all_merged, merging_bounds, open_merged
from limitformer.sphere.stopping.two_clusters import Continuation, open_two_clusters, run_two_clusters
from limitformer.sphere.tokens.attention import AttentionParameters
from limitformer.sphere.tokens.queries import query_constants, signed_beta, signed_bilinear
from limitformer.sphere.tokens.step import (
    AT_OVERLAP,
    AT_TOKENS,
    FULL,
    GRAM,
    SCALAR,
    SKETCHED,
    UNIFORM,
    TokenConstants,
    advance_tokens,
    begin_tokens,
    open_relations,
    token_workspace,
)
from limitformer.sphere.tokens.values import LAWS


class Record(NamedTuple):
    """Output arrays of one kernel call; an array that is not written has no columns."""

    pairs: np.ndarray  # (pairs, 2), all pairs for outcomes
    tolerance: float
    overlap: ResultArray  # one entry per pair
    gap: ResultArray
    outcome: np.ndarray  # (replicas, points, 4)
    positions: ResultArray  # N r entries
    stopped: np.ndarray  # (replicas,): layer of an early stop


class RecordWorkspace(NamedTuple):
    """Scratch memory."""

    minus: np.ndarray  # (1, TILE, LANES): 1 − z, then z
    plus: np.ndarray  # (1, TILE, LANES): 1 + z, then 1 − |z|
    parent: np.ndarray  # (LANES, N): an earlier token of the same cluster
    size: np.ndarray  # (N,): tokens per cluster


@allocator
def record_workspace(tokens):
    parent, size = np.empty((LANES, tokens), np.int64), np.empty(tokens, np.int64)
    return RecordWorkspace(lane_matrix(1, TILE), lane_matrix(1, TILE), parent, size)


@driver
def part_of(record, begin, end):
    """Return the rows of replicas begin … end − 1."""
    return Record(
        record.pairs,
        record.tolerance,
        replicas_between(record.overlap, begin, end),
        replicas_between(record.gap, begin, end),
        record.outcome[begin:end],
        replicas_between(record.positions, begin, end),
        record.stopped[begin:end],
    )


@kernel
def write_point(x, tree, k, record, work):
    """Write point k of LANES replicas with tokens `x` (N, r, LANES) and links `tree`."""
    if entries_in(record.overlap) > 0:
        write_overlaps(x, tree, k, record, work)
    if record.outcome.shape[2] > 0:
        write_outcomes(x, tree, k, record, work)
    if entries_in(record.positions) > 0:
        for i in range(x.shape[0]):
            write_lane_row(x, i, x.shape[1], i * x.shape[1], k, record.positions)


@kernel
def write_overlaps(x, tree, k, record, work):
    """Write z and 1 − |z| of all recorded pairs."""
    for begin in range(0, len(record.pairs), TILE):
        count = min(TILE, len(record.pairs) - begin)
        measure(x, tree, record.pairs, begin, count, work.minus, work.plus)
        take_overlaps(count, work.minus, work.plus)
        write_lane_row(work.minus, FIRST, count, begin, k, record.overlap)
        write_lane_row(work.plus, FIRST, count, begin, k, record.gap)


@kernel
def take_overlaps(count, minus, plus):
    """Replace (1 − z, 1 + z) by (z, 1 − |z|)."""
    for q in range(count):
        apart, across = load(minus, FIRST, q), load(plus, FIRST, q)
        gap = smaller(apart, across)
        sign = 1.0 - where_positive(apart - across, everywhere(2.0))
        store(minus, FIRST, q, sign * (1.0 - gap))
        store(plus, FIRST, q, gap)


@kernel
def write_outcomes(x, tree, k, record, work):
    replicas = record.outcome.shape[0]
    for lane in range(replicas):
        record.outcome[lane, k, :] = 0
        for i in range(x.shape[0]):
            work.parent[lane, i] = i
    for begin in range(0, len(record.pairs), TILE):
        count = min(TILE, len(record.pairs) - begin)
        measure(x, tree, record.pairs, begin, count, work.minus, work.plus)
        for lane in range(replicas):
            sort_replica(
                record.pairs,
                begin,
                count,
                lane,
                record.tolerance,
                work.minus,
                work.plus,
                work.parent[lane],
                record.outcome[lane, k],
            )
    for lane in range(replicas):
        count_clusters(work.parent[lane], work.size, record.outcome[lane, k])


@driver
def run_tokens(
    start,
    start_parent,
    start_sign,
    how,
    constants,
    bilinear,
    key_words,
    start_key,
    query_key,
    follow,
    points,
    first,
    coordinates,
    record,
    watch,
):
    """Run replicas `first`, … of N tokens and write their points to `record`.

    `start` (N, r) is of the kind `how`. Rows of tokens with a parent in `start_parent` (N,) hold differences, with the
    signs `start_sign` (N,). `follow` is the `two_clusters.Continuation` of replicas that merge.
    """
    tokens, replicas = start.shape[0], len(record.stopped)
    work = token_workspace(tokens, coordinates, constants, bilinear)
    relations, record_work = open_relations(tokens, coordinates), record_workspace(tokens)
    merged, two = open_merged(tokens), open_two_clusters()
    for begin in range(0, replicas, LANES):
        rows = part_of(record, begin, min(begin + LANES, replicas))
        replica = np.uint64(first + begin)
        begin_tokens(start, how, constants, start_key, query_key, replica, work)
        link_initial(start_parent, start_sign, constants.attention, work.x, relations.tree)
        merged.since[:] = NOT_YET
        last = run_lanes(
            constants, key_words, replica, follow.bounds, points, rows, record_work, work, relations, merged, watch
        )
        if follow.bounds.together > 0.0 and not is_halted(watch):
            run_two_clusters(follow, tokens, replica, points, rows, merged, last, two, watch)
        if is_halted(watch):
            return
        count_whole(watch, min(LANES, replicas - begin))


@kernel
def run_lanes(constants, key_words, replica, bounds, points, record, record_work, work, relations, merged, watch):
    """Run LANES replicas to the last layer, or until all have merged; return the layer reached."""
    tree, replicas = relations.tree, len(record.stopped)
    if constants.draw == GRAM:
        rewind(work.stream, key_words, replica)
    for layer in range(constants.layers + 1):
        if not keep_going(watch, replicas, layer / (constants.layers + 1)):
            return layer
        if layer > 0:
            advance_tokens(layer, constants, key_words, replica, work, relations)
        if constants.near > 0.0 and layer % constants.update_every == 0:
            update_links(work.x, constants.near, layer % constants.relink_every == 0, constants.attention, tree)
        k = first_at(points, layer)
        while k < len(points) and points[k] == layer:
            write_point(work.x, tree, k, record, record_work)
            k += 1
        if bounds.together > 0.0 and layer % CHECK == 0 and all_merged(layer, replicas, work.x, tree, bounds, merged):
            return layer
    return constants.layers


class TokenPaths(SpherePaths):
    """Any number of tokens."""

    @property
    @abstractmethod
    def coordinates(self) -> int:
        """The number of coordinates that the kernels store of a token."""

    @property
    @abstractmethod
    def draw(self) -> int:
        """The part of the random matrix that a layer draws: FULL, SKETCHED, SCALAR or GRAM."""

    @abstractmethod
    def first_rows(self, tokens: NDArray[np.float64], near: float) -> Rows:
        """Rows (tokens, coordinates), parents and signs (tokens,) of given tokens (tokens, dim) (`near.near_tree`)."""

    @property
    def gap_floor(self) -> dict[str, float]:
        """The setting `gap_floor`, if no differences of tokens are carried."""
        return {"gap_floor": GAP_FLOOR} if self.token_constants().near == 0 else {}

    @property
    def stop_gaps(self) -> tuple[float, float]:
        """The gaps 1 − |z| at +1 and at −1 below which two clusters stop; 0 for never."""
        return gap_at(self.merging.stop_plus), gap_at(self.merging.stop_minus)

    @property
    def merging(self) -> Merging:
        """The distances at which tokens count as one."""
        level, keep = self.options.early_stop, self.options.keep
        if level is None or keep != "outcome" or not can_merge(self.model, self.layer.law):
            return NEVER
        return merging_bounds(self.pair_constants(), self.tokens, self.options.tolerance, level)

    def outputs(self, samples: int) -> Outputs:
        """Allocate the results of this number of samples.

        Raises:
            InputError: the results, or a layer of eight replicas, do not fit into memory.
        """
        n, model = self.tokens, self.model
        columns = max(self.coordinates * query_constants(model).heads, n)
        rows = max(model.dim if self.draw == FULL else 0, self.coordinates if model.is_fresh else 0, n)
        what = f"A layer of eight replicas ({rows} × {columns} numbers each)"
        check_scratch(8 * LANES * rows * columns, what, "Gaussian values, a smaller dim, or fewer tokens")
        return super().outputs(samples)

    def token_constants(self) -> TokenConstants:
        """Constants of the kernels of any number of tokens."""
        model, layer, fixed = self.model, self.layer, 0.0
        if model.attention == "unnormalized":
            fixed = (exp(model.beta) if model.is_isotropic else 1.0) / model.tokens
        return TokenConstants(
            AttentionParameters(signed_beta(model), fixed, model.is_isotropic, model.is_causal),
            model.dim,
            self.steps,
            layer.step,
            layer.drift,
            LAWS[layer.law],
            self.draw,
            *nearness(model, layer.step, layer.drift, self.coordinates),
            query_constants(model),
        )

    def first_tokens(self) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.float64], int]:
        """Rows (tokens, coordinates), parents and signs (tokens,) at the start, and the kind of start."""
        near = self.token_constants().near
        if self.start.overlap is not None:
            return *related_pair(self.start.overlap, self.coordinates, near), AT_OVERLAP
        if self.start.tokens is None:
            return *alone(np.zeros((self.tokens, self.coordinates))), UNIFORM
        return *self.first_rows(self.start.tokens, near), AT_TOKENS

    def prepare(self, seed: int) -> "PreparedTokens":
        """Compute everything that all replicas share."""
        return PreparedTokens(self, seed)


class GramPaths(TokenPaths):
    """Tokens by the triangular factor of their Gram matrix, which is a Markov chain by itself."""

    method: ClassVar[Method] = "gram"

    @property
    def coordinates(self) -> int:
        """The size N of the Gram matrix."""
        return self.tokens

    @property
    def draw(self) -> int:
        """SCALAR for the hybrid model, otherwise GRAM."""
        return SCALAR if of_kind(self.model, ONE_NUMBER) else GRAM

    def first_rows(self, tokens: NDArray[np.float64], near: float) -> Rows:
        """The factor (tokens, tokens) of given tokens and their relations."""
        rows, parents, signs = related(tokens, near)
        return np.asarray(np.linalg.qr(rows.T, mode="r")).T.copy(), parents, signs


class CoordinatePaths(TokenPaths):
    """Tokens by their coordinates."""

    method: ClassVar[Method] = "coordinates"

    @property
    def coordinates(self) -> int:
        """The dimension of the tokens."""
        return self.model.dim

    @property
    def draw(self) -> int:
        """SCALAR for the hybrid model, SKETCHED for Gaussian values on fewer rows than dim, otherwise FULL."""
        if of_kind(self.model, ONE_NUMBER):
            return SCALAR
        fewer = self.tokens < self.model.dim or query_constants(self.model).heads > 1
        return SKETCHED if self.layer.law == "gaussian" and fewer else FULL

    def first_rows(self, tokens: NDArray[np.float64], near: float) -> Rows:
        """The given tokens, without relations, which the kernel finds before the first layer."""
        return alone(np.ascontiguousarray(tokens))


class PreparedTokens:
    """Paths of any number of tokens with their keys; `run` may be called from several threads."""

    def __init__(self, paths: TokenPaths, seed: int) -> None:
        self.paths, self.constants = paths, paths.token_constants()
        self.key_words, self.start_key = key_words(paths, "", seed), key_words(paths, "start", seed)
        self.query_key = key_words(paths, "queries", seed)
        self.continuation = Continuation(paths.merging, paths.pair_constants(), key_words(paths, "clusters", seed))
        self.first_tokens = paths.first_tokens()
        self.bilinear = signed_bilinear(paths.model, paths.coordinates)

    def run(self, first: int, outputs: Outputs, watch: Watch) -> None:
        """Run replicas `first`, … into `outputs` until they end or the watch halts them."""
        paths = self.paths
        overlap, gap, tokens = (as_result_array(outputs[name]) for name in ("overlap", "gap", "tokens"))
        record = Record(
            paths.pairs, paths.options.tolerance, overlap, gap, outputs["outcome"], tokens, outputs["stopped"]
        )
        run_tokens(
            *self.first_tokens,
            self.constants,
            self.bilinear,
            self.key_words,
            self.start_key,
            self.query_key,
            self.continuation,
            paths.step_numbers,
            first,
            paths.coordinates,
            record,
            watch,
        )
        outputs["stopped"] *= paths.time_of_step
