"""The training of one network at one learning rate: passes forward and backward, and steps between them.

Before each step, and after the last, the network is measured on the first batch: its stream, branches, attention and
output, and how they have changed since the start. Its loss is that of the batch of the next step; the loss on another
batch, which no step has seen, is measured too. `DrawnWeights` are those of a drawn network that a user's own optimiser
trains. `EffectsOfUpdates` watches matrices that begin with given entries, such as zeros, and `weights.TrainedRun` the
random ones.
"""

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from limitformer.base.errors import InputError, require
from limitformer.nn.drawn.simulate import torch_seed
from limitformer.results.datasets import correlations
from limitformer.stepping.noise import noise_of
from limitformer.stepping.optimizers import StepRules, base_rate, made_by
from limitformer.stepping.weights import Forms, TrainedRun, TrainedWeights
from limitformer.subjects.inputs import Inputs
from limitformer.subjects.losses import Loss, output_of
from limitformer.weightless.arrays import (
    BY_HEAD,
    OTHER_TOKENS,
    Arrays,
    require_same_blocks,
    sizes_of_stacks,
    stream_arrays,
)
from limitformer.weightless.building import seeded
from limitformer.weightless.interpreter import Observer, Op
from limitformer.weightless.network import Weightless
from limitformer.weightless.observers.stream import UnclearBlocksError
from limitformer.weightless.ops import LOOKUP, PAIRS, PRODUCT
from limitformer.weightless.reachable import State
from limitformer.weightless.run import DrawWholeError, KeepWeightsError
from limitformer.weightless.simulate import token_count
from limitformer.weightless.tensors import storage
from limitformer.weightless.threads import one_thread

Result = TypeVar("Result")
PIECE_TOKENS = 512  # of a pass, if a batch has more
NOISE_PIECES = 8  # of a batch whose gradient noise is estimated
LEAST_PULL = 1e-300  # a gradient of zeros has no direction
CLIPPED = 1e-6  # that torch adds to the norm of all gradients before it divides by it


@dataclass(frozen=True)
class StepBatches:
    """The inputs of the steps, one for each and one for the loss after the last, and inputs that no step sees.

    Attributes:
        noisy: whether the noise of gradients is estimated.
        whole: whether batches are not divided, as their loss is not a mean of numbers of sequences.
    """

    of_steps: list[Inputs]
    unseen: Inputs | None
    noisy: bool = False
    whole: bool = False


@dataclass
class Pass:
    """The loss of a pass, its gradients, and what was measured."""

    loss: float
    output: Tensor  # of the first piece of the batch, like all that was measured
    squares: dict[str, float]  # |∂W|² by weight, after a backward pass
    noise: dict[str, tuple[float, float]] = field(default_factory=dict)  # by weight: |G|² and tr Σ
    arrays: Arrays = field(default_factory=dict)  # of `stream_arrays`, if it was measured
    correlation: NDArray[np.float64] | None = None  # by layer; None if it is not known which sequence a token is of
    streams: list[Tensor] = field(default_factory=list)  # by layer
    branches: list[list[Tensor]] = field(default_factory=list)  # by block and sublayer
    logits: list[list[Tensor]] = field(default_factory=list)  # by block
    pulls: list[list[Tensor]] = field(default_factory=list)  # the loss's gradients by them


def mean_correlation(arrays: Arrays, inputs: Inputs) -> NDArray[np.float64] | None:
    """Return the mean correlation by layer over pairs of different tokens of a sequence."""
    if "covariance" not in arrays:
        return None
    v = arrays["covariance"][0]
    sequence = inputs.sequence_of(v.shape[-1])
    if len(sequence) != v.shape[-1] or v.shape[-1] == inputs.rows:
        return None
    first, second = np.nonzero(np.triu(sequence[:, None] == sequence, 1))
    with np.errstate(invalid="ignore"):  # a stream that is not finite
        sizes = np.sqrt(np.diagonal(v, axis1=-2, axis2=-1).astype(float))
        rho = correlations(v[:, first, second].astype(float), sizes[:, first], sizes[:, second])
    return np.asarray(rho.mean(-1))


def pieces_of(inputs: Inputs, least: int = 1) -> list[Inputs]:
    """Divide a batch into pieces of `PIECE_TOKENS` at most, or of one sequence; into at least `least`, if possible."""
    count = max(least, -(-inputs.rows * token_count(inputs) // PIECE_TOKENS)) if inputs.rows > 1 else 1
    rows = max(1, inputs.rows // count)
    count = -(-inputs.rows // rows)
    ends = [inputs.rows * k // count for k in range(count + 1)]
    return [inputs.part(slice(*pair)) for pair in pairwise(ends)] if count > 1 else [inputs]


class Trajectory:
    """The training of network `sample` by `rules`.

    The gradients of the pieces of a batch add up, so that memory does not grow with the batch.
    """

    pieces: Callable[..., list[Inputs]] = staticmethod(pieces_of)

    def __init__(
        self, network: Weightless, rules: StepRules, forms: Forms, loss: Loss, batches: StepBatches, seed: int,
        sample: int,
    ) -> None:  # fmt: skip
        self.network, self.rules, self.forms, self.loss, self.batches = network, rules, forms, loss, batches
        self.seed, self.sample = seed, sample
        self.reasons = dict(network.reasons_to_keep) if network.rebuilt else {}
        self.weights = TrainedWeights(rules, forms, seed, sample, network.dtype)
        self.optimizer: Any = None  # a user's function that trains drawn networks
        self.least = NOISE_PIECES if batches.noisy else 1
        self.advance: Callable[[float], None] = lambda share: None  # called with the share of the steps that is done

    def arrays(self) -> Arrays:
        """Train the network; return its measures by step."""
        return self.repeated(self.train)

    def losses(self) -> NDArray[np.float64]:
        """Train the network without measuring it; return its losses (2, steps + 1) before each step and after the last.

        The first row is that of the batch of the step, and after the last step that of the last batch; the second is
        that of the unseen batch, NaN without one. Once a loss or a gradient is not finite, the rest is NaN.
        """
        return self.repeated(self.train_unmeasured)

    def gradients(self) -> dict[str, float]:
        """Return the loss of the first batch before training, and |∂W|² by weight."""
        now = self.repeated(lambda: self.run(self.batches.of_steps[0], gradients=True))
        return now.squares | {"the loss": now.loss}

    def repeated(self, train: Callable[[], Result]) -> Result:
        """Return what `train` returns.

        A use of a weight that its form does not allow begins the training again, with another form.
        """
        while True:
            numbers, dtype = (self.rules, self.forms, self.seed, self.sample), self.network.dtype
            seed: AbstractContextManager[Any] = nullcontext()
            if self.optimizer is None:
                self.weights = TrainedWeights(*numbers, dtype)
            else:  # an optimiser of the user's may change modules, and draw random numbers
                self.network.sample = None
                self.weights = DrawnWeights(*numbers, self.network, self.optimizer)
                seed = seeded(torch_seed(self.seed, f"training {self.sample}"), dtype)
            try:
                with one_thread(), seed:
                    return train()
            except RuntimeError as error:
                if not self.network.detach_inputs(error):
                    raise
            except DrawWholeError as needed:
                self.network.draw_whole(needed.reasons)
                self.reasons = {}
            except KeepWeightsError as needed:
                weights = {each.name: each for each in self.network.weights}
                for name, reason in needed.reasons.items():
                    self.forms.forms.pop(name, None)
                    self.forms.require_entries(weights[name], reason)
            finally:
                self.weights.release()

    def train(self) -> Arrays:
        """Take the steps; once the loss or a gradient is not finite, the rest is NaN."""
        first, steps = self.batches.of_steps[0], len(self.batches.of_steps) - 1
        piece = self.divided(first)[0]
        measures: list[Arrays] = []
        start: Pass | None = None
        for step, batch in enumerate(self.batches.of_steps):
            now = self.run(batch, gradients=step < steps, measured=batch is first)
            probe = now if batch is first else self.run_piece(piece, 1.0, gradients=False, measured=True)
            unseen = self.run(self.batches.unseen).loss if self.batches.unseen is not None else math.nan
            start = start or probe
            arrays = self.measured(start, probe) | {"loss": number(now.loss), "loss_unseen": number(unseen)}
            squares = now.squares if step < steps else {}
            total = self.norm(squares) if step < steps else math.nan
            arrays |= {"gradient_norm": number(total), "weight_gradient": self.by_weight(squares, math.sqrt)}
            arrays["clipping"] = number(self.clipping(total) if math.isfinite(total) else math.nan)
            if self.batches.noisy:
                noise = now.noise if batch is not first or not step else {}  # later weights have seen the first batch
                for k, key in enumerate(("weight_signal", "weight_noise")):
                    arrays[key] = self.by_weight({name: pair[k] for name, pair in noise.items()})
            measures.append(arrays)
            if step < steps and not (math.isfinite(now.loss) and math.isfinite(total)):
                break
            if step < steps:
                self.step(squares, step)
                self.advance((step + 1) / (steps + 1))
        return by_step(measures, steps + 1)

    def train_unmeasured(self) -> NDArray[np.float64]:
        """Take the steps; return the losses."""
        last = len(self.batches.of_steps) - 1
        result = np.full((2, last + 1), np.nan)
        for step, batch in enumerate(self.batches.of_steps):
            now = self.run(batch, gradients=step < last)
            result[0, step] = now.loss
            if self.batches.unseen is not None:
                result[1, step] = self.run(self.batches.unseen).loss
            if step == last or not (math.isfinite(now.loss) and math.isfinite(self.norm(now.squares))):
                break
            self.step(now.squares, step)
        return result

    def norm(self, squares: dict[str, float]) -> float:
        """Return the norm of all gradients together, of which |∂W|² are given; NaN without gradients."""
        known = squares or self.optimizer is not None  # which may have used up the gradients
        return math.sqrt(sum(squares.values())) if known else math.nan

    def clipping(self, total: float) -> float:
        """Return the factor of all gradients, whose norm together is `total`; 1 without gradients."""
        return 1.0 if self.rules.clip is None or math.isnan(total) else min(1.0, self.rules.clip / (total + CLIPPED))

    def step(self, squares: dict[str, float], step: int) -> None:
        """Change the weights by their gradients, of which |∂W|² are given."""
        self.weights.step(squares, self.clipping(math.sqrt(sum(squares.values()))), self.rules.schedule[step])

    def divided(self, inputs: Inputs) -> list[Inputs]:
        """Return the pieces of a batch."""
        return [inputs] if self.batches.whole else self.pieces(inputs, self.least)

    def run(self, inputs: Inputs, gradients: bool = False, measured: bool = False) -> Pass:
        """Run the pieces of a batch, differentiate the loss if it has `gradients`, and measure the first piece."""
        result, loss, alone = None, 0.0, []
        for piece in self.divided(inputs):
            share = piece.rows / inputs.rows
            one = self.run_piece(piece, share, gradients, measured and result is None)
            loss += share * one.loss
            alone.append((share, one.squares))
            result = result or one
        assert result is not None  # a batch has a sequence
        result.loss, result.squares = loss, self.weights.squares() if gradients else {}
        if gradients and self.batches.noisy and len(alone) > 1:
            result.noise = noise_of(result.squares, alone, inputs.rows)
        return result

    def run_piece(self, inputs: Inputs, share: float, gradients: bool, measured: bool) -> Pass:
        """Run a pass of this share of a batch."""
        network = self.network
        run = TrainedRun(
            self.seed, range(self.sample, self.sample + 1), inputs.rows, network.dtype, network.device, self.forms.draw,
            gradients, dict(self.reasons), trained=self.weights, measured=measured,
        )  # fmt: skip
        network.begin(run)
        self.weights.put(network.module)
        measure, observers = None, list[Observer]()
        if measured:
            self.weights.effects, self.weights.lookups = {}, {}
            if network.axes is not None:  # those of every piece and batch
                network.axes = inputs, network.axes[1]
            measure = network.measure(1, inputs, run.read)
            measure.keeps = True
            observers = [*network.observers(measure), EffectsOfUpdates(self.weights)]
        arguments = network.arguments(run, inputs)
        with torch.set_grad_enabled(gradients):
            with network.watching(run, *observers) if measured else nullcontext(), network.trimming():
                out = network.call(arguments)
            output = output_of(out).detach()
            if measured:
                self.weights.scale_last(output)
            if measure is not None:
                try:
                    measure.finish()
                except UnclearBlocksError as error:  # its blocks are not those of the first network
                    raise InputError(OTHER_TOKENS) from error
            value = self.loss(out, arguments)
            require(
                isinstance(value, Tensor) and (value.requires_grad or not gradients),
                "the loss must be a tensor that depends on the module's output.",
            )
            value = value.reshape(1, -1).mean(1).sum()
            squares = {}
            if gradients:
                (value if share == 1.0 else share * value).backward()
                squares = self.weights.note_gradients(run, alone=self.batches.noisy)
            result = Pass(float(value.detach()), output.clone(), squares)
            if measure is not None:
                network.stacks = sizes_of_stacks(measure)
                result.arrays = stream_arrays(measure, gradients=False)
                result.correlation = mean_correlation(result.arrays, inputs)
                result.streams = [each[0] for stack in measure.stacks for each in stack.streams]
                result.branches = [[each[0] for each in block] for stack in measure.stacks for block in stack.branches]
                result.logits, result.pulls = (
                    [block for stack in measure.stacks for block in getattr(stack, name)]
                    for name in ("logits", "pulls")
                )
            return result

    def measured(self, start: Pass, now: Pass) -> Arrays:
        """Return the measures of a pass, and how they have changed since the start."""
        arrays, result = now.arrays, Arrays()
        require_same_blocks(start.arrays, arrays)
        if "covariance" in arrays:
            variances = np.diagonal(arrays["covariance"][0], axis1=-2, axis2=-1)
            known = ~np.isnan(variances)
            with np.errstate(invalid="ignore", divide="ignore"):  # a stream that is not finite has no size
                result["stream"] = np.sqrt(np.where(known, variances, 0.0).sum(-1) / known.sum(-1))
            moved = [ratio(a, b) for a, b in zip(now.streams, start.streams, strict=True)]
            result |= {"stream_change": np.array(moved), "largest": arrays["largest"][0]}
            result |= {} if now.correlation is None else {"correlation": now.correlation}
        result |= {"output": number(rms(now.output)), "output_change": number(rms(now.output - start.output))}
        result |= {key: arrays[key][0] for key in BY_HEAD if key in arrays}
        if "logit_std" in arrays:
            result["logit_change"] = np.full(result["logit_std"].shape, np.nan)
            for row, parts in enumerate(zip(now.logits, start.logits, start.pulls, strict=True)):
                if parts[0]:
                    after, before, pull = (torch.cat(each).flatten(1).double() for each in parts)
                    along = ((after - before) * functional.normalize(pull, eps=LEAST_PULL)).sum(-1).abs()
                    result["logit_change"][row, : len(along)] = along.numpy()
        if "branch" in arrays:
            result["branch"] = arrays["branch"][0]
            change = np.full(result["branch"].shape, np.nan)
            for row, pairs in enumerate(zip(now.branches, start.branches, strict=True)):
                for column, (f, f_start) in enumerate(zip(*pairs, strict=False)):
                    change[row, column] = ratio(f, f_start)
            result["branch_change"] = change
        changes = self.weights.changes()
        lookups = root_mean_squares(self.weights.lookups)
        result["weight_change"] = self.by_weight({name: size for name, (size, _) in changes.items()})
        result["weight_spectral"] = self.by_weight({name: largest for name, (_, largest) in changes.items()})
        result["update_effect"] = self.by_weight(lookups | root_mean_squares(self.weights.effects))
        result["lookup_effect"] = self.by_weight(lookups)
        return result

    def by_weight(self, values: dict[str, float], function: Callable[[float], float] = float) -> NDArray[np.float64]:
        """Return numbers in the order of the trained parameters, NaN for those that have none."""
        return np.array([function(values[name]) if name in values else math.nan for name in self.network.trained])


def root_mean_squares(squares: dict[str, list[tuple[float, int]]]) -> dict[str, float]:
    """Return √(Σ squares / Σ numbers of entries) by name."""
    return {
        name: math.sqrt(sum(square for square, _ in every) / sum(count for _, count in every))
        for name, every in squares.items()
    }


def number(value: float) -> NDArray[np.float64]:
    return np.array(value)


def rms(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x, dtype=torch.float64)) / math.sqrt(max(x.numel(), 1))


def ratio(now: Tensor, start: Tensor) -> float:
    """Return |now − start|/|start|: 0 if nothing has changed, infinite if the start is zero."""
    change, size = (float(torch.linalg.vector_norm(x, dtype=torch.float64)) for x in (now - start, start))
    return change / size if size else (math.inf if change else 0.0)


def by_step(measures: list[Arrays], steps: int) -> Arrays:
    """Stack the measures of each step to arrays (1, steps, …), with NaN after the last of `measures`."""
    result = Arrays()
    for key, first in measures[0].items():
        result[key] = np.full((1, steps, *first.shape), np.nan)
        for step, each in enumerate(measures):
            result[key][0, step] = each[key]
    return result


def step_at(every: list[torch.optim.Optimizer], factor: float) -> None:
    """Take a step of each optimiser, at its learning rates times `factor`."""
    for one in every:
        rates = [group["lr"] for group in one.param_groups]
        for group in one.param_groups:
            group["lr"] = group["lr"] * factor
        one.step()
        for group, rate in zip(one.param_groups, rates, strict=False):
            if factor != 1.0:  # the step may have changed it on purpose
                group["lr"] = group["lr"] / factor if factor else rate


def made_at(optimizer: Callable[[nn.Module], Any], module: nn.Module, rules: StepRules) -> list[torch.optim.Optimizer]:
    """Return the optimisers that a user's function makes, at the base rate and with the factors of the rules."""
    every = made_by(optimizer, module)
    own, factors = base_rate(every[0]), {id(each): rules.factors.get(name) for name, each in module.named_parameters()}
    for one in every:
        for group in one.param_groups if own != rules.base else []:
            group["lr"] = group["lr"] * rules.base / own
        if any(factors.values()):
            one.param_groups = [part for group in one.param_groups for part in by_factors(group, factors)]
    return every


def by_factors(group: dict[str, Any], factors: Mapping[int, tuple[float, ...] | None]) -> list[dict[str, Any]]:
    """Divide a group of parameters into groups with one factor each of the learning rate, the decay and ε."""
    parts: dict[tuple[float, ...], list[nn.Parameter]] = {}
    for each in group["params"]:
        parts.setdefault(factors.get(id(each)) or (1.0, 1.0, 1.0), []).append(each)
    keys = ("lr", "weight_decay", "eps")
    return [
        group | {"params": part} | {key: group[key] * by for key, by in zip(keys, each, strict=True) if key in group}
        for each, part in parts.items()
    ]


class DrawnWeights(TrainedWeights):
    """The weights of a drawn network. They start as the user's function leaves them, and its optimiser changes them.

    What a module keeps from call to call stays as the passes of the steps leave it.
    """

    def __init__(
        self, rules: StepRules, forms: Forms, seed: int, sample: int, network: Weightless,
        optimizer: Callable[[nn.Module], Any],
    ) -> None:  # fmt: skip
        super().__init__(rules, forms, seed, sample, network.dtype)
        self.network, self.optimizer = network, optimizer
        self.made: list[torch.optim.Optimizer] = []

    def put(self, module: nn.Module) -> None:
        if not self.made:
            self.made = made_at(self.optimizer, module, self.rules)
            self.network.state = State(module)
        super().put(module)

    def note_gradients(self, run: TrainedRun, alone: bool = False) -> dict[str, float]:
        squares = super().note_gradients(run, alone)
        for name, each in self.own.items():  # what forward changes in place
            self.entries[name].value = each.detach().clone()
        self.network.state = State(self.network.module)
        return squares

    def step(self, squares: dict[str, float], scale: float, factor: float) -> None:
        assert self.network.state is not None  # taken after the backward pass
        self.network.state.restore()  # later passes may have changed what the step reads
        for name, parameter in self.own.items():
            parameter.grad = self.gradients.get(name)
        if self.rules.clip is not None:
            nn.utils.clip_grad_norm_(self.own.values(), self.rules.clip)
        step_at(self.made, factor)
        for name, parameter in self.own.items():
            one = self.entries[name]
            one.still = one.still and torch.equal(one.value, parameter.detach())
            one.value, parameter.grad = parameter.detach().clone(), None
        self.gradients, self.network.state = {}, State(self.network.module)


class EffectsOfUpdates(Observer):
    """An observer of what the updates of a module's own matrices add to products with them, and to rows of tables."""

    def __init__(self, trained: TrainedWeights) -> None:
        self.trained = trained
        self.names = {storage(each): name for name, each in trained.own.items() if each.dim() == 2}

    def see(self, op: Op) -> None:
        """Note the effect of a matrix, its transpose or a slice, or that of a table."""
        if not self.names:
            return
        if op.kind == LOOKUP:
            table, ids = op.args[:2]
            name = self.names.get(storage(table))
            if name is not None and table.shape == self.trained.entries[name].initial.shape:
                distinct, place = torch.unique(ids, return_inverse=True)
                self.trained.note_lookup(name, self.trained.entries[name].moved[distinct], place)
        elif op.kind in (PRODUCT, PAIRS):
            for place, matrix in enumerate(op.args[-2:]):
                if name := self.names.get(storage(matrix)):
                    self.note(name, matrix, op.args[-2:][1 - place], turned=place == 0)
                    self.trained.last = name, op.out.clone()  # the code may change it in place

    def note(self, name: str, matrix: Tensor, x: Tensor, turned: bool) -> None:
        """Note the effect of x W, or W x if `turned`, where W is a view of the matrix `name`."""
        moved = self.trained.entries[name].moved.contiguous()
        if matrix.dtype != moved.dtype or x.layout != torch.strided or not bool(x.isfinite().all()):
            return
        moved = moved.as_strided(matrix.shape, matrix.stride(), matrix.storage_offset())
        self.trained.note_effect(name, moved @ x if turned else x @ moved)
