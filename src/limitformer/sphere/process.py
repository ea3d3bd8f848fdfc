r"""Chains and limits of tokens on the sphere as processes that `simulate` runs.

A chain and a limit differ only in their step: the layer of the model itself, or the same layer with Gaussian values and
1/dt layers per unit of time, which is a step of the SDE that stays on the sphere. Each method has its class:
`PairPaths` and `AveragedPairPaths` (`pair.process`), `GramPaths` and `CoordinatePaths` (`tokens.process`).
"""

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import cached_property
from math import exp
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from limitformer.models import SphereModel
from limitformer.models.kinds import of_kind
from limitformer.models.sphere import SphereStart
from limitformer.numerics.random import key
from limitformer.sampling.arrays import Shapes, coordinate_shapes, new_outputs, pairs_of, smaller_recordings
from limitformer.sampling.process import Outputs, Prepared
from limitformer.sphere.methods import ONE_NUMBER, Method, SphereLayer, SphereOptions
from limitformer.sphere.outcome import LABELS
from limitformer.sphere.pair.chain import PairConstants
from limitformer.sphere.tokens.queries import query_constants, signed_beta
from limitformer.sphere.tokens.values import LAWS


@dataclass(frozen=True, kw_only=True, eq=False)
class SpherePaths(ABC):
    """A chain or a limit of tokens on the sphere, ready to run.

    Attributes:
        model: the declaration.
        description: "chain" or "limit".
        layer: one layer or step.
        start: the first tokens.
        steps: number of layers or steps to the horizon.
        time_of_step: time that one layer or step takes.
        step_numbers: layers or steps to record, ascending.
        options: the options of `simulate`.
        extra: further settings, stored with the results.
    """

    method: ClassVar[Method]
    axis: ClassVar[str] = "time"

    model: SphereModel
    description: str
    layer: SphereLayer
    start: SphereStart
    steps: int
    time_of_step: float
    step_numbers: NDArray[np.int64]
    options: SphereOptions
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def points(self) -> NDArray[np.float64]:
        """The times at which to record."""
        return np.asarray(self.step_numbers * self.time_of_step)

    @property
    def tokens(self) -> int:
        return self.model.tokens

    @property
    def pair_count(self) -> int:
        """The number of pairs whose overlaps are stored."""
        n = self.model.tokens
        every = n * (n - 1) // 2 if self.options.pairs is None else len(self.options.pairs)
        return every if self.options.keep == "overlap" else 0

    @cached_property
    def pairs(self) -> NDArray[np.int64]:
        """The pairs (pairs, 2) that are measured."""
        return pairs_of(self.options.pairs, self.model.tokens if self.options.keep != "tokens" else 0)

    @property
    def settings(self) -> dict[str, Any]:
        """Settings stored with the result so that the run can be repeated."""
        early_stop = self.options.early_stop
        stopping = {} if early_stop is None else {"early_stop": early_stop, "stop_gaps": list(self.stop_gaps)}
        return {
            "method": self.method,
            "keep": self.options.keep,
            "dtype": self.options.dtype,
            "pairs": "all" if self.options.pairs is None else json.dumps(self.options.pairs),
            "tolerance": self.options.tolerance,
            "horizon": self.steps * self.time_of_step,
            **stopping,
            **self.gap_floor,
            **self.extra,
        }

    @property
    def gap_floor(self) -> dict[str, float]:
        """The setting `gap_floor`, if rounding sets a least gap."""
        return {}

    @property
    @abstractmethod
    def stop_gaps(self) -> tuple[float, float]:
        """The gaps 1 − |z| at +1 and at −1 below which a replica stops; 0 for never."""

    def outputs(self, samples: int) -> Outputs:
        """Allocate the results of this number of samples.

        Raises:
            InputError: the results do not fit into memory.
        """
        smaller = [*smaller_recordings(self.options.dtype, self.pair_count), 'keep="outcome"']
        smaller = smaller if self.options.keep != "outcome" else []
        outputs = new_outputs(
            self.shapes(samples), self.shared_shapes, samples, len(self.step_numbers), self.axis, smaller
        )
        outputs["stopped"].fill(np.inf)
        return outputs

    def shapes(self, samples: int) -> Shapes:
        """Shapes and types of the results of this number of samples; an array that is not stored has no columns."""
        rows, keep, dtype = (samples, len(self.step_numbers)), self.options.keep, self.options.dtype
        return {
            "overlap": ((*rows, self.pair_count), dtype),
            "gap": ((*rows, self.pair_count), dtype),
            "outcome": ((*rows, len(LABELS) if keep == "outcome" else 0), np.int32),
            "tokens": ((*rows, self.model.tokens * self.model.dim if keep == "tokens" else 0), dtype),
            "stopped": ((samples,), np.float64),
        }

    @property
    def shared_shapes(self) -> Shapes:
        """Shapes of arrays stored once, not per sample: coordinates and the start."""
        start = {} if self.start.tokens is None else {"start_tokens": (self.start.tokens.shape, np.float64)}
        return {**coordinate_shapes(len(self.step_numbers), self.pair_count), **start}

    @abstractmethod
    def prepare(self, seed: int) -> Prepared:
        """Compute everything that all replicas share."""

    def pair_constants(self, plus: float = 0.0, minus: float = 0.0) -> PairConstants:
        """Constants of the kernels of two tokens; `plus` and `minus` are the w at which replicas stop."""
        queries, layer = query_constants(self.model), self.layer
        return PairConstants(
            of_kind(self.model, ONE_NUMBER),
            queries.fresh,
            self.model.is_causal,
            queries.head_dim,
            0.0,
            self.model.dim,
            signed_beta(self.model),
            exp(self.model.beta) / 2 if self.model.attention == "unnormalized" else 0.0,
            self.steps,
            layer.step,
            layer.drift,
            LAWS[layer.law],
            plus,
            minus,
        )


def gap_at(w: float) -> float:
    """Return the gap 1 − |z| of w (`pair.chain`)."""
    return 2 * w / (1 + w)


def key_words(paths: SpherePaths, purpose: str, seed: int) -> NDArray[np.uint64]:
    """Return the key (2,) of the random numbers for one purpose; "" for the layers."""
    words = (paths.description, purpose, paths.method) if purpose else (paths.description, paths.method)
    return np.array(key(seed, " ".join(words)), np.uint64)
