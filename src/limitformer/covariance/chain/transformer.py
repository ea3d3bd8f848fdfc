r"""The exact law of a finite Transformer's token covariance, with no n × n weight ever drawn.

The chain carries a factor R (m × r) of V = R Rᵀ, r = min(m, n), or min(m + 1, n) under a LayerNorm. A layer is a list
of sublayers. Each computes its output factor U from R (`attention`, `feedforward`) and adds it to R (`residual`), with
the λ and γ of its place and the norm of the model. The start is in `start`.

The chain is exact in law at every width, for Gaussian weights. The cost of a layer does not depend on n, except for
the hidden units, which are n_h Gaussian vectors.

Letters of [ST] in this folder, and their names in code:

| letter | name | meaning |
|---|---|---|
| m, n, d | `tokens`, `width`, `depth` | tokens, width, layers |
| n_k, n_h | `key_dim`, `hidden` | dimension of queries and keys, hidden units |
| R, U | `factor`, `branch` | factors of the tokens (m × r) and of a sublayer's output |
| λ, γ/√n | `skip`, `branch` of the constants | strengths of a residual sum |
| n − r | `outside` | directions that the tokens do not span |
| 1/τ | `inverse_temperature` | of the softmax |
| c/n_h | `gain`² | the constant c of the activation [ST, eq. 4], over the hidden units |
| s₊, s₋ | `positive`, `negative` | slopes of a piecewise linear activation |
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from limitformer.covariance.chain.attention import (
    AttentionConstants,
    AttentionWorkspace,
    attention_workspace,
    mix_heads,
    mix_tokens,
)
from limitformer.covariance.chain.feedforward import (
    PIECEWISE_LINEAR,
    FeedforwardConstants,
    FeedforwardWorkspace,
    feedforward_workspace,
    hidden_units,
    kernel_of,
)
from limitformer.covariance.chain.own import NOTHING, elementwise_address, mark_own_exits, mixing_address
from limitformer.covariance.chain.residual import (
    NO_NORM,
    POST_NORM,
    PRE_NORM,
    ResidualConstants,
    ResidualWorkspace,
    add_branch,
    normalise,
    residual_workspace,
)
from limitformer.covariance.chain.start import start_factor, turn_at_random
from limitformer.models import Mixing, RadialNorm, Start, Transformer
from limitformer.models.functions import function_of
from limitformer.numerics.factor import copy
from limitformer.numerics.kernels import allocator, driver, kernel
from limitformer.numerics.lanes import LANES, in_lanes, lane_matrix
from limitformer.numerics.random import Stream, key, open_stream, rewind
from limitformer.numerics.watch import Watch, count_whole, is_halted, keep_going
from limitformer.sampling.exits import Ledger, check_factor, clear_exits, copy_exits, open_ledger
from limitformer.sampling.recording import (
    ALL_OF_V,
    FACTOR_FLOOR,
    CovarianceProcess,
    Outputs,
    Recording,
    replicas_of,
    rows_of,
    write_factor,
)

ATTENTION, HEADS, FEEDFORWARD = 0, 1, 2
PLACEMENTS = {None: NO_NORM, "pre": PRE_NORM, "post": POST_NORM}


class Constants(NamedTuple):
    """The numbers of a model that the kernels read."""

    depth: int
    width: int
    residual: ResidualConstants  # with the strengths of the first sublayer
    attention: AttentionConstants
    feedforward: FeedforwardConstants
    strengths: np.ndarray  # (depth or 1, sublayers, 2): λ and γ/√n


class Workspace(NamedTuple):
    """Scratch of one thread; every matrix has LANES as its last dimension."""

    stream: Stream
    ledger: Ledger
    attention: AttentionWorkspace
    feedforward: FeedforwardWorkspace
    wide: ResidualWorkspace  # for the branch of [ST, eq. 1], whose factor has r columns
    square: ResidualWorkspace  # for the others, whose factor is triangular
    factor: np.ndarray  # (m, r)
    previous: np.ndarray  # (m, r)
    normal: np.ndarray  # (m, r)
    direction: np.ndarray  # (r, 1)


@allocator
def workspace(tokens, rank, constants):
    return Workspace(
        open_stream(),
        open_ledger(tokens),
        attention_workspace(tokens, rank, constants.attention),
        feedforward_workspace(tokens, rank),
        residual_workspace(tokens, rank, rank, constants.residual),
        residual_workspace(tokens, rank, tokens, constants.residual),
        lane_matrix(tokens, rank),
        lane_matrix(tokens, rank),
        lane_matrix(tokens, rank),
        lane_matrix(rank, 1),
    )


@driver
def run_replicas(start, turned, constants, sublayers, visible, share, watch):
    """Run the replicas of a share from `start` (m, r, LANES); write their records, exits and causes."""
    work = workspace(start.shape[0], start.shape[1], constants)
    for begin in range(0, len(share.exits), LANES):
        rewind(work.stream, share.key_words, np.uint64(share.first + begin))
        copy(start, work.factor)
        if turned:
            spread = min(start.shape[0], constants.width)
            turn_at_random(work.stream, work.factor, work.direction, spread, constants.width)
        record = rows_of(share.arrays, begin)
        run_lanes(constants, sublayers, visible, share.points, share.radius, record, work, watch)
        if is_halted(watch):
            return
        copy_exits(work.ledger, begin, share.exits, share.causes)
        count_whole(watch, min(LANES, len(share.exits) - begin))


@kernel
def run_lanes(constants, sublayers, visible, layers, radius, record, work, watch):
    """Run all layers of the replicas of all lanes."""
    clear_exits(work.ledger)
    for layer in range(constants.depth + 1):
        if not keep_going(watch, replicas_of(record), layer / (constants.depth + 1)):
            return
        copy(work.factor, work.previous)
        if layer > 0:
            for place in range(len(sublayers)):
                apply_sublayer(sublayers[place], residual_at(constants, layer, place), constants, visible, work, watch)
        check_factor(work.factor, work.previous, layer, radius, work.ledger)
        write_factor(work.factor, layers, layer, record, work.ledger)


@kernel
def residual_at(constants, layer, place):
    """Return the constants of one sublayer; layers count from 1."""
    row, shared = min(layer, constants.strengths.shape[0]) - 1, constants.residual
    return ResidualConstants(
        constants.strengths[row, place, 0],
        constants.strengths[row, place, 1],
        shared.outside,
        shared.placement,
        shared.mean_columns,
        shared.eps,
        shared.address,
    )


@kernel
def apply_sublayer(sublayer, residual, constants, visible, work, watch):
    """X ← λX + γ·branch, with a Pre-norm or a Post-norm."""
    source = work.factor
    if residual.placement == PRE_NORM:
        normalise(work.factor, residual.mean_columns, residual.eps, residual.address, work.normal)
        source = work.normal
    if sublayer == ATTENTION:
        mix_tokens(work.stream, source, visible, constants.attention, work.attention, work.wide.branch)
        add_branch(work.stream, work.factor, residual, work.wide)
    elif sublayer == HEADS:
        mix_heads(work.stream, source, visible, constants.attention, work.attention, work.square.branch, watch)
        add_branch(work.stream, work.factor, residual, work.square)
    else:
        hidden_units(work.stream, source, constants.feedforward, work.feedforward, work.square.branch, watch)
        add_branch(work.stream, work.factor, residual, work.square)
    if residual.placement == POST_NORM:
        normalise(work.factor, residual.mean_columns, residual.eps, residual.address, work.normal)
        copy(work.normal, work.factor)


@dataclass(frozen=True, kw_only=True, eq=False)
class TransformerChain(CovarianceProcess):
    """The process that `simulate` runs: the chain of one model and start.

    Attributes:
        model: the Transformer.
        start: its input tokens.
        points: layers to record, ascending, 0 (the start) to depth.
        radius: samples whose |V| reaches it stop there.
        recording: quantities to record.
    """

    model: Transformer
    start: Start
    points: NDArray[np.int64]
    radius: float
    recording: Recording = ALL_OF_V
    axis: str = field(default="depth", init=False)
    description: str = field(default="chain", init=False)
    unit: str = field(default="layer", init=False)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that are stored with the results."""
        recording = self.recording.settings(FACTOR_FLOOR)
        return {"start": self.start.description, "radius": self.radius, **recording}

    def prepare(self, seed: int) -> "PreparedChain":
        """Return the part of the computation that all replicas share."""
        factor, turned = start_factor(self.start, self.model.width, subtracts_mean(self.model))
        return PreparedChain(self, factor, turned, seed)


class PreparedChain:
    """A chain with its start factor and key. Several threads may call `run`."""

    def __init__(self, chain: TransformerChain, factor: NDArray[np.float64], turned: bool, seed: int) -> None:
        self.chain = chain
        self.factor = in_lanes(factor)
        self.turned = turned
        self.key_words = np.array(key(seed, "chain"), np.uint64)
        self.constants = constants_of(chain.model, factor.shape[1])
        self.sublayers = np.array(sublayers_of(chain.model), np.int64)
        self.visible = visibility(chain.model, chain.start.tokens)
        if type(chain.model.attention) is Mixing:
            chain.model.attention.require_tokens(self.visible)

    def run(self, first: int, outputs: Outputs, watch: Watch) -> None:
        """Write replicas `first`, `first` + 1, … and their exits into `outputs`, unless `watch` is halted."""
        share = self.chain.share(outputs, first, self.key_words, self.chain.points)
        run_replicas(self.factor, self.turned, self.constants, self.sublayers, self.visible, share, watch)
        mark_own_exits(self.chain.model, outputs, self.chain.points[-1], self.chain.radius)


def subtracts_mean(model: Transformer) -> bool:
    """Return whether a norm subtracts the tokens' means over their coordinates."""
    return model.normalisation is not None and model.normalisation.subtracts_mean


def constants_of(model: Transformer, rank: int) -> Constants:
    """Return the constants of a model whose start factor has `rank` columns."""
    norm = model.normalisation
    strengths = kernel_strengths(model)
    residual = ResidualConstants(
        skip=float(strengths[0, 0, 0]),
        branch=float(strengths[0, 0, 1]),
        outside=model.width - rank,
        placement=PLACEMENTS[None if norm is None else norm.placement],
        mean_columns=int(subtracts_mean(model)),
        eps=0.0 if norm is None else float(norm.eps),
        address=elementwise_address(function_of(norm)) if type(norm) is RadialNorm else NOTHING,
    )
    parts = attention_constants(model), feedforward_constants(model)
    return Constants(model.depth, model.width, residual, *parts, strengths)


def kernel_strengths(model: Transformer) -> NDArray[np.float64]:
    """Return λ and γ/√n (depth or 1, sublayers, 2)."""
    return model.strengths / np.array([1.0, np.sqrt(model.width)])


def attention_constants(model: Transformer) -> AttentionConstants:
    """Return the constants of attention; without attention, the smallest that the workspace allows."""
    if model.attention is None:
        return AttentionConstants(0.0, 0.0, 0.0, 1, 1, NOTHING)
    identity, center, _ = model.attention.interventions
    return AttentionConstants(
        identity=float(identity),
        center=float(center),
        inverse_temperature=1 / model.attention.temperature_at(model.width),
        heads=model.attention.heads or 1,
        key_dim=model.attention.key_dim(model.width),
        address=mixing_address(function_of(model.attention)) if type(model.attention) is Mixing else NOTHING,
    )


def feedforward_constants(model: Transformer) -> FeedforwardConstants:
    """Return the constants of the feed-forward layer; without one, those of one hidden unit that is never used."""
    part = model.feedforward
    if part is None:
        return FeedforwardConstants(1, 0.0, PIECEWISE_LINEAR, 1.0, 1.0, NOTHING, False)
    hidden = part.hidden_at(model.width)
    gain = float(np.sqrt(part.gain_at(model.width) / hidden))
    return FeedforwardConstants(hidden, gain, *kernel_of(part, model.width))


def sublayers_of(model: Transformer) -> list[int]:
    """Return the sublayers of a layer, in order."""
    attention = [] if model.attention is None else [HEADS if model.attention.heads else ATTENTION]
    return attention + ([] if model.feedforward is None else [FEEDFORWARD])


def visibility(model: Transformer, tokens: int) -> NDArray[np.bool_]:
    """Return (tokens, tokens): whether the row's token sees the column's."""
    everything = np.ones((tokens, tokens), bool)
    return {None: everything, "causal": np.tril(everything)}[model.mask]
