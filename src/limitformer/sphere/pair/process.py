"""Processes of two tokens by their overlap."""

from functools import cached_property
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from limitformer.models import StochasticTransformer
from limitformer.numerics.watch import WHOLE, Watch
from limitformer.sampling.arrays import as_result_array
from limitformer.sampling.process import Outputs
from limitformer.sphere.methods import Method
from limitformer.sphere.outcome import outcomes_of_overlaps
from limitformer.sphere.overlap.drawn import DrawnAttention
from limitformer.sphere.pair.chain import PairConstants, averages_table, run_pairs
from limitformer.sphere.process import SpherePaths, gap_at, key_words
from limitformer.sphere.stopping.bound import stops


class PairPaths(SpherePaths):
    """Two tokens, by the Markov chain of their overlap."""

    method: ClassVar[Method] = "overlap"

    @property
    def stop_gaps(self) -> tuple[float, float]:
        """The gaps 1 − |z| at +1 and at −1 below which a replica stops; 0 for never."""
        if self.options.early_stop is None or not self.model.moves_alike:
            return 0.0, 0.0
        plus, minus = stops(self.pair_constants(), self.options.tolerance, self.options.early_stop)
        return gap_at(plus), gap_at(minus)

    def prepare(self, seed: int) -> "PreparedPair":
        """Compute everything that all replicas share."""
        return PreparedPair(self, seed)

    def averages(self) -> NDArray[np.float64]:
        """The table (2, points) of `averages_table`, empty where attention is not averaged."""
        return np.zeros((2, 0))

    def first_pair(self) -> NDArray[np.float64]:
        """w and the sign of the overlap (2,) at the start; a uniform start does not read them."""
        start = self.start
        if start.tokens is not None:
            minus = float(((start.tokens[0] - start.tokens[1]) ** 2).sum())
            plus = float(((start.tokens[0] + start.tokens[1]) ** 2).sum())
            return np.array([min(minus, plus) / max(minus, plus), 1.0 if minus <= plus else -1.0])
        z = start.overlap or 0.0
        return np.array([(1 - abs(z)) / (1 + abs(z)), 1.0 if z >= 0 else -1.0])


class AveragedPairPaths(PairPaths):
    """Two tokens in the limit with drawn queries and keys, stepped with attention averaged over the draws."""

    @cached_property
    def drawn(self) -> DrawnAttention:
        """The averages over drawn queries and keys."""
        assert isinstance(self.model, StochasticTransformer)
        return DrawnAttention(self.model.logit_scale, head_dim=self.model.head_dim)

    def averages(self) -> NDArray[np.float64]:
        """The table (2, points) of `averages_table`."""
        return averages_table(self.drawn)

    def pair_constants(self, plus: float = 0.0, minus: float = 0.0) -> PairConstants:
        """Constants of the kernels of two tokens, with the last u of the table."""
        return super().pair_constants(plus, minus)._replace(averaged=self.drawn.last)


class PreparedPair:
    """Paths of two tokens with their keys; `run` may be called from several threads."""

    def __init__(self, paths: PairPaths, seed: int) -> None:
        self.paths = paths
        self.key_words, self.start_key = key_words(paths, "", seed), key_words(paths, "start", seed)
        plus, minus = paths.stop_gaps
        self.constants = paths.pair_constants(plus / (2 - plus), minus / (2 - minus))
        self.table, self.first_pair = paths.averages(), paths.first_pair()

    def run(self, first: int, outputs: Outputs, watch: Watch) -> None:
        """Run replicas `first`, … into `outputs` until they end or the watch halts them."""
        paths, count = self.paths, len(outputs["stopped"])
        stored, shape = paths.options.keep == "overlap", (count, len(paths.step_numbers), 1)
        overlap, gap = (outputs[name] if stored else np.empty(shape) for name in ("overlap", "gap"))
        run_pairs(
            self.first_pair,
            paths.start.is_uniform,
            self.constants,
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
        if not stored:
            whole = slice(int(watch[WHOLE]))
            outputs["outcome"][whole] = outcomes_of_overlaps(overlap[whole], gap[whole], 2, paths.options.tolerance)
