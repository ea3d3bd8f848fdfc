r"""The exact law of the covariance where a layer has one matrix: X ← λX + γ √(c/n) σ(X) W [ST, eq. 19 at λ = 0, γ = 1].

σ acts on the coordinates of the tokens, so V is not a Markov chain. But W is used once: given X, the columns of
√(c/n) σ(X) W are n i.i.d. vectors N(0, Φ), Φ = (c/n) Σⱼ σ(xⱼ) σ(xⱼ)ᵀ over the columns xⱼ (m,) of X. With Φ = U Uᵀ and
gⱼ ~ N(0, I),

  xⱼ ← λ xⱼ + γ U gⱼ,

so the chain carries R = X/√n itself (m × n): O(n m²) a layer, and still no n × n matrix. The tokens start at
X₀ = √n R₀ Q in a uniformly random position, as the network's do: Q has the orthonormalised rows of a Gaussian matrix.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from limitformer.covariance.chain.feedforward import TILE, FeedforwardConstants, activate
from limitformer.covariance.chain.own import mark_own_exits
from limitformer.covariance.chain.start import start_factor
from limitformer.covariance.chain.transformer import TransformerChain, feedforward_constants, kernel_strengths
from limitformer.models import OneMatrix, Transformer
from limitformer.numerics.factor import FIRST, copy, multiply, put_in_lanes, triangularise
from limitformer.numerics.kernels import allocator, driver, kernel
from limitformer.numerics.lanes import LANES, everywhere, lane_matrix, load, store
from limitformer.numerics.random import Stream, draw_normals, key, next_normal, open_stream, rewind
from limitformer.numerics.watch import Watch, count_whole, is_halted, keep_going
from limitformer.sampling.exits import Ledger, check_factor, clear_exits, copy_exits, open_ledger
from limitformer.sampling.recording import Outputs, replicas_of, rows_of, write_factor


class OneMatrixConstants(NamedTuple):
    """The numbers of a model: d, λ and γ/√n of each layer, √n, and σ with its gain √(c/n)."""

    depth: int
    strengths: np.ndarray  # (depth or 1, 1, 2)
    scale: float
    activation: FeedforwardConstants


class OneMatrixWorkspace(NamedTuple):
    """Scratch of one thread; every matrix has LANES as its last dimension."""

    stream: Stream
    ledger: Ledger
    root: np.ndarray  # (m, r): R₀
    directions: np.ndarray  # (r, n): Q
    lengths: np.ndarray  # (r, r)
    factor: np.ndarray  # (m, n): R
    previous: np.ndarray  # (m, n)
    rows: np.ndarray  # (m, m + TILE): the factor of the coordinates so far, and the next ones
    branch: np.ndarray  # (m, m): U
    normals: np.ndarray  # (m, 1): gⱼ


@allocator
def one_matrix_workspace(tokens, rank, width):
    return OneMatrixWorkspace(
        open_stream(),
        open_ledger(tokens),
        lane_matrix(tokens, rank),
        lane_matrix(rank, width),
        lane_matrix(rank, rank),
        lane_matrix(tokens, width),
        lane_matrix(tokens, width),
        lane_matrix(tokens, tokens + TILE),
        lane_matrix(tokens, tokens),
        lane_matrix(tokens, 1),
    )


@driver
def run_one_matrix(root, width, constants, share, watch):
    """Run the replicas of a share; write their records, exits and causes."""
    work = one_matrix_workspace(root.shape[0], root.shape[1], width)
    put_in_lanes(root, work.root)
    for begin in range(0, len(share.exits), LANES):
        rewind(work.stream, share.key_words, np.uint64(share.first + begin))
        place_tokens(work)
        run_one_matrix_lanes(constants, share.points, share.radius, rows_of(share.arrays, begin), work, watch)
        if is_halted(watch):
            return
        copy_exits(work.ledger, begin, share.exits, share.causes)
        count_whole(watch, min(LANES, len(share.exits) - begin))


@kernel
def place_tokens(work):
    """R₀ Q into `work.factor`; the rows of Q are the orthonormalised rows of a Gaussian matrix."""
    draw_normals(work.stream, work.directions)
    triangularise(work.directions, FIRST, work.directions.shape[1], work.lengths, FIRST)
    for k in range(work.directions.shape[0]):
        inverse = 1.0 / load(work.lengths, k, k)  # the length of row k after orthogonalisation
        for j in range(work.directions.shape[1]):
            store(work.directions, k, j, inverse * load(work.directions, k, j))
    multiply(work.root, work.directions, work.factor)


@kernel
def run_one_matrix_lanes(constants, layers, radius, record, work, watch):
    """Run all layers of the replicas of all lanes."""
    clear_exits(work.ledger)
    for layer in range(constants.depth + 1):
        if not keep_going(watch, replicas_of(record), layer / (constants.depth + 1)):
            return
        copy(work.factor, work.previous)
        if layer > 0:
            active_coordinates(constants, work)
            row = min(layer, constants.strengths.shape[0]) - 1
            move_coordinates(constants.strengths[row, 0, 0], constants.strengths[row, 0, 1], work)
        check_factor(work.factor, work.previous, layer, radius, work.ledger)
        write_factor(work.factor, layers, layer, record, work.ledger)


@kernel
def active_coordinates(constants, work):
    """U, the lower triangular factor of √(c/n) σ(X), into `work.branch`, tile after tile."""
    m, n = work.factor.shape[0], work.factor.shape[1]
    for begin in range(0, n, TILE):
        size = min(TILE, n - begin)
        if begin > 0:
            copy(work.branch, work.rows)
        for i in range(m):
            for j in range(size):
                store(work.rows, i, m + j, constants.scale * load(work.factor, i, begin + j))
        activate(work.rows, m, m + size, constants.activation)
        triangularise(work.rows, FIRST if begin > 0 else m, m + size, work.branch, FIRST)


@kernel
def move_coordinates(skip, branch, work):
    """xⱼ ← λ xⱼ + γ U gⱼ for every coordinate j."""
    m = work.factor.shape[0]
    for j in range(work.factor.shape[1]):
        for k in range(m):
            store(work.normals, k, 0, next_normal(work.stream))
        for i in range(m):
            total = everywhere(0.0)
            for k in range(i + 1):
                total = total + load(work.branch, i, k) * load(work.normals, k, 0)
            store(work.factor, i, j, skip * load(work.factor, i, j) + branch * total)


@dataclass(frozen=True, kw_only=True, eq=False)
class OneMatrixChain(TransformerChain):
    """The chain of a model whose feed-forward layer is a `OneMatrix`."""

    def prepare(self, seed: int) -> "PreparedOneMatrix":  # type: ignore[override]  # another class of the same protocol
        """Return the part of the computation that all replicas share."""
        return PreparedOneMatrix(self, seed)


class PreparedOneMatrix:
    """A chain with its start factor and key. Several threads may call `run`."""

    def __init__(self, chain: OneMatrixChain, seed: int) -> None:
        self.chain = chain
        self.root = start_factor(chain.start, chain.model.width, False)[0]
        self.key_words = np.array(key(seed, "one-matrix chain"), np.uint64)
        self.constants = one_matrix_constants(chain.model)

    def run(self, first: int, outputs: Outputs, watch: Watch) -> None:
        """Write replicas `first`, `first` + 1, … and their exits into `outputs`, unless `watch` is halted."""
        share = self.chain.share(outputs, first, self.key_words, self.chain.points)
        run_one_matrix(self.root, self.chain.model.width, self.constants, share, watch)
        mark_own_exits(self.chain.model, outputs, self.chain.points[-1], self.chain.radius)


def one_matrix_constants(model: Transformer) -> OneMatrixConstants:
    """Return the constants; those of σ are of a layer of two matrices with as many hidden units as coordinates."""
    part = model.feedforward
    assert type(part) is OneMatrix
    return OneMatrixConstants(
        depth=model.depth,
        strengths=kernel_strengths(model),
        scale=float(np.sqrt(model.width)),
        activation=feedforward_constants(replace(model, feedforward=part.activation)),
    )
