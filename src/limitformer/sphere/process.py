r"""Chains and limits of tokens on the sphere as processes that `simulate` runs.

A chain and a limit differ in their step alone: the layer of the model itself, or the same layer with Gaussian values
and 1/dt layers per unit of time, which is a step of the SDE that stays on the sphere.
"""

import json
from dataclasses import dataclass
from functools import cached_property
from math import exp
from typing import Any

import numpy as np
from numpy.typing import NDArray

from limitformer.base.memory import check_scratch
from limitformer.models import SphereModel, StochasticTransformer
from limitformer.models.kinds import of_kind
from limitformer.models.sphere_start import SphereStart
from limitformer.numerics.lanes import LANES
from limitformer.numerics.random import key
from limitformer.numerics.watch import WHOLE, Watch
from limitformer.paths.arrays import (
    Shapes,
    as_result_array,
    coordinate_shapes,
    new_outputs,
    pairs_of,
    smaller_recordings,
)
from limitformer.sphere.layer import ONE_NUMBER, Layer
from limitformer.sphere.methods import can_merge, has_averages
from limitformer.sphere.near.relations import GAP_FLOOR, alone, nearness, related, related_pair
from limitformer.sphere.options import Method, SphereOptions
from limitformer.sphere.outcome import LABELS, outcomes_of_overlaps
from limitformer.sphere.overlap.drawn import Drawn
from limitformer.sphere.pair.averaged import averages_table
from limitformer.sphere.pair.chain import PairConstants, run_pairs
from limitformer.sphere.stopping.bound import stops
from limitformer.sphere.stopping.merging import NEVER, Merging, merging_bounds
from limitformer.sphere.stopping.two_clusters import Continuation
from limitformer.sphere.tokens.attention import AttentionConstants
from limitformer.sphere.tokens.logits import query_constants, signed_beta, signed_bilinear
from limitformer.sphere.tokens.record import Record
from limitformer.sphere.tokens.run import run_tokens
from limitformer.sphere.tokens.step import (
    AT_OVERLAP,
    AT_TOKENS,
    FULL,
    GRAM,
    SCALAR,
    SKETCHED,
    UNIFORM,
    TokenConstants,
)
from limitformer.sphere.tokens.values import LAWS

Outputs = dict[str, NDArray[Any]]


@dataclass(frozen=True, kw_only=True, eq=False)
class SpherePaths:
    """A chain or a limit of tokens on the sphere, ready to run.

    Attributes:
        model: the declaration.
        description: "chain" or "limit".
        layer: one layer or step.
        start: the first tokens.
        steps: layers, or steps, to the last point.
        time_of_step: the time that one takes.
        step_numbers: layers or steps to record, ascending.
        method: the one that is used.
        options: what `simulate` was asked for.
        extra: what else goes to the results.
    """

    model: SphereModel
    description: str
    layer: Layer
    start: SphereStart
    steps: int
    time_of_step: float
    step_numbers: NDArray[np.int64]
    method: Method
    options: SphereOptions
    extra: dict[str, Any]
    axis: str = "time"

    @property
    def points(self) -> NDArray[np.float64]:
        """The times that are recorded."""
        return np.asarray(self.step_numbers * self.time_of_step)

    @property
    def tokens(self) -> int:
        """N."""
        return self.model.tokens

    @property
    def pair_count(self) -> int:
        """Pairs whose overlaps are kept."""
        n = self.model.tokens
        every = n * (n - 1) // 2 if self.options.pairs is None else len(self.options.pairs)
        return every if self.options.keep == "overlap" else 0

    @cached_property
    def pairs(self) -> NDArray[np.int64]:
        """(pairs, 2): those that are looked at."""
        return pairs_of(self.options.pairs, self.model.tokens if self.options.keep != "tokens" else 0)

    @property
    def settings(self) -> dict[str, Any]:
        """How it is simulated."""
        plus, minus = self.stops()
        stopping = (
            {}
            if self.options.early_stop is None
            else {"early_stop": self.options.early_stop, "stop_gaps": [plus, minus]}
        )
        return {
            "method": self.method,
            "keep": self.options.keep,
            "dtype": self.options.dtype,
            "pairs": "all" if self.options.pairs is None else json.dumps(self.options.pairs),
            "tolerance": self.options.tolerance,
            "horizon": self.steps * self.time_of_step,
            **stopping,
            **self.floor,
            **self.extra,
        }

    @property
    def floor(self) -> dict[str, float]:
        """The least gap that the method can tell, where rounding sets one."""
        has = self.method != "overlap" and self.token_constants().near == 0
        return {"gap_floor": GAP_FLOOR} if has else {}

    def stops(self) -> tuple[float, float]:
        """1 − |z| at +1 and at −1 below which a replica stops; 0: never."""
        if self.options.early_stop is None:
            return 0.0, 0.0
        if self.method != "overlap":
            return stop_gap(self.merging.stop_plus), stop_gap(self.merging.stop_minus)
        if not self.model.moves_alike:
            return 0.0, 0.0
        plus, minus = stops(self.pair_constants(), self.options.tolerance, self.options.early_stop)
        return stop_gap(plus), stop_gap(minus)

    @property
    def merging(self) -> Merging:
        """When tokens count as one."""
        asked = self.options.early_stop is not None and self.options.keep == "outcome" and self.method != "overlap"
        if not (asked and can_merge(self.model, self.layer.law)):
            return NEVER
        assert self.options.early_stop is not None
        return merging_bounds(self.pair_constants(), self.tokens, self.options.tolerance, self.options.early_stop)

    def outputs(self, samples: int) -> Outputs:
        """Empty arrays for the results of so many samples.

        Raises:
            InputError: they do not fit the memory.
        """
        n, points = self.model.tokens, len(self.step_numbers)
        if self.method != "overlap":
            columns = max(self.coordinates * query_constants(self.model).heads, n)
            rows = max(self.model.dim if self.drawn() == FULL else 0, self.coordinates if self.model.is_fresh else 0, n)
            what = f"A layer of eight replicas ({rows} × {columns} numbers each)"
            check_scratch(8 * LANES * rows * columns, what, "Gaussian values, a smaller dim, or fewer tokens")
        smaller = [*smaller_recordings(self.options.dtype, self.pair_count), 'keep="outcome"']
        smaller = smaller if self.options.keep != "outcome" else []
        outputs = new_outputs(self.shapes(samples), self.once, samples, points, self.axis, smaller)
        outputs["stopped"].fill(np.inf)
        return outputs

    def shapes(self, samples: int) -> Shapes:
        """Of the arrays for so many samples; what is not kept has no columns."""
        rows, what, dtype = (samples, len(self.step_numbers)), self.options.keep, self.options.dtype
        return {
            "overlap": ((*rows, self.pair_count), dtype),
            "gap": ((*rows, self.pair_count), dtype),
            "outcome": ((*rows, len(LABELS) if what == "outcome" else 0), np.int32),
            "tokens": ((*rows, self.model.tokens * self.model.dim if what == "tokens" else 0), dtype),
            "stopped": ((samples,), np.float64),
        }

    @property
    def once(self) -> Shapes:
        """Of what the results have once, whatever the samples."""
        start = {} if self.start.tokens is None else {"start_tokens": (self.start.tokens.shape, np.float64)}
        return {**coordinate_shapes(len(self.step_numbers), self.pair_count), **start}

    def record(self, outputs: Outputs) -> Record:
        """`outputs` as the kernels take them."""
        overlap, gap, tokens = (as_result_array(outputs[name]) for name in ("overlap", "gap", "tokens"))
        return Record(self.pairs, self.options.tolerance, overlap, gap, outputs["outcome"], tokens, outputs["stopped"])

    def prepare(self, seed: int) -> "PreparedSphere":
        """Everything that all replicas share."""
        return PreparedSphere(self, seed)

    def pair_constants(self, plus: float = 0.0, minus: float = 0.0) -> PairConstants:
        """For the kernels of two tokens; `plus` and `minus` are the w at which replicas stop."""
        fixed = exp(self.model.beta) / 2 if self.model.attention == "unnormalized" else 0.0
        layer = self.layer
        queries = query_constants(self.model)
        return PairConstants(
            of_kind(self.model, ONE_NUMBER),
            queries.fresh,
            self.model.is_causal,
            queries.head_dim,
            self.drawn_limit.last if self.drawn_limit else 0.0,
            self.model.dim,
            signed_beta(self.model),
            fixed,
            self.steps,
            layer.step,
            layer.drift,
            LAWS[layer.law],
            plus,
            minus,
        )

    @property
    def drawn_limit(self) -> Drawn | None:
        """The averages with which the limit of two tokens is stepped, if it has them."""
        model = self.model
        averaged = self.description == "limit" and self.method == "overlap" and has_averages(model)
        if not (averaged and isinstance(model, StochasticTransformer)):
            return None
        return Drawn(model.logit_scale, head_dim=model.head_dim)

    def token_constants(self) -> TokenConstants:
        """For the kernels of any number of tokens."""
        model, fixed = self.model, 0.0
        if model.attention == "unnormalized":
            fixed = (exp(model.beta) if model.is_isotropic else 1.0) / model.tokens
        attention = AttentionConstants(signed_beta(model), fixed, model.is_isotropic, model.is_causal)
        layer = self.layer
        return TokenConstants(
            attention,
            model.dim,
            self.steps,
            layer.step,
            layer.drift,
            LAWS[layer.law],
            self.drawn(),
            *nearness(model, layer.step, layer.drift, self.coordinates),
            query_constants(model),
        )

    def drawn(self) -> int:
        """What of the random matrix is drawn."""
        if of_kind(self.model, ONE_NUMBER):
            return SCALAR
        if self.method == "gram":
            return GRAM
        fewer = self.model.tokens < self.model.dim or query_constants(self.model).heads > 1
        return SKETCHED if self.layer.law == "gaussian" and fewer else FULL

    @property
    def coordinates(self) -> int:
        """That are carried of a token."""
        return self.model.tokens if self.method == "gram" else self.model.dim


def stop_gap(w: float) -> float:
    """1 − |z|."""
    return 2 * w / (1 + w)


class PreparedSphere:
    """Paths with their keys; `run` may be called from several threads."""

    def __init__(self, paths: SpherePaths, seed: int) -> None:
        self.paths = paths
        self.key_words = np.array(key(seed, f"{paths.description} {paths.method}"), np.uint64)
        self.start_key = np.array(key(seed, f"{paths.description} start {paths.method}"), np.uint64)
        self.query_key = np.array(key(seed, f"{paths.description} queries {paths.method}"), np.uint64)
        if paths.method == "overlap":
            plus, minus = paths.stops()
            self.table = np.zeros((2, 0)) if paths.drawn_limit is None else averages_table(paths.drawn_limit)
            self.pair_constants = paths.pair_constants(plus / (2 - plus), minus / (2 - minus))
        else:
            self.token_constants = paths.token_constants()
            cluster_key = np.array(key(seed, f"{paths.description} clusters {paths.method}"), np.uint64)
            self.follow = Continuation(paths.merging, paths.pair_constants(), cluster_key)
            self.first = self.first_tokens()
            self.bilinear = signed_bilinear(paths.model, paths.coordinates)

    def run(self, first: int, outputs: Outputs, watch: Watch) -> None:
        """Replicas `first` … into `outputs`, unless it is halted."""
        replicas = self.run_two if self.paths.method == "overlap" else self.run_any
        replicas(first, outputs, watch)

    def run_two(self, first: int, outputs: Outputs, watch: Watch) -> None:
        """Two tokens, by their overlap."""
        paths, count = self.paths, len(outputs["stopped"])
        kept, shape = paths.options.keep == "overlap", (count, len(paths.step_numbers), 1)
        overlap, gap = (outputs[name] if kept else np.empty(shape) for name in ("overlap", "gap"))
        run_pairs(
            self.first_pair(),
            paths.start.is_uniform,
            self.pair_constants,
            self.table,
            self.key_words,
            self.start_key,
            paths.step_numbers,
            first,
            as_result_array(overlap),
            as_result_array(gap),
            outputs["stopped"],
            watch,
        )
        outputs["stopped"] *= paths.time_of_step
        if not kept:
            whole = slice(int(watch[WHOLE]))
            outputs["outcome"][whole] = outcomes_of_overlaps(overlap[whole], gap[whole], 2, paths.options.tolerance)

    def first_pair(self) -> NDArray[np.float64]:
        """w and the sign of the overlap of two tokens, which are not read if the start is uniform."""
        start = self.paths.start
        if start.tokens is not None:
            apart = float(((start.tokens[0] - start.tokens[1]) ** 2).sum())
            across = float(((start.tokens[0] + start.tokens[1]) ** 2).sum())
            return np.array([min(apart, across) / max(apart, across), 1.0 if apart <= across else -1.0])
        z = start.overlap or 0.0
        return np.array([(1 - abs(z)) / (1 + abs(z)), 1.0 if z >= 0 else -1.0])

    def run_any(self, first: int, outputs: Outputs, watch: Watch) -> None:
        """Any number of tokens."""
        paths = self.paths
        run_tokens(
            *self.first,
            self.token_constants,
            self.bilinear,
            self.key_words,
            self.start_key,
            self.query_key,
            self.follow,
            paths.step_numbers,
            first,
            paths.coordinates,
            paths.record(outputs),
            watch,
        )
        outputs["stopped"] *= paths.time_of_step

    def first_tokens(self) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.float64], int]:
        """(tokens, coordinates), parents and signs (tokens,) (`relations`), and how to read them."""
        paths, near = self.paths, self.token_constants.near
        if paths.start.overlap is not None:
            return *related_pair(paths.start.overlap, paths.coordinates, near), AT_OVERLAP
        if paths.start.tokens is None:
            return *alone(np.zeros((paths.model.tokens, paths.coordinates))), UNIFORM
        if paths.method == "gram":
            rows, parents, signs = related(paths.start.tokens, near)
            factor = np.asarray(np.linalg.qr(rows.T, mode="r")).T.copy()
            return factor, parents, signs, AT_TOKENS
        return *alone(np.ascontiguousarray(paths.start.tokens)), AT_TOKENS
