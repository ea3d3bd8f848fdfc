"""The training of one network at one learning rate: passes forward and backward, and steps between them.

Before each step, and after the last, the network is measured on the first batch: its stream, branches, attention and
output, and how they have changed since the start. Its loss is that of the batch of the next step; the loss on another
batch, which no step has seen, is measured too.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from limitformer.base.errors import InputError, require
from limitformer.nn.drawn.simulate import torch_seed
from limitformer.weightless.arrays import (
    BY_HEAD,
    OTHER_TOKENS,
    Arrays,
    require_same_blocks,
    sizes_of_stacks,
    stream_arrays,
)
from limitformer.weightless.building import seeded
from limitformer.weightless.inputs import Inputs
from limitformer.weightless.losses import Loss, output_of
from limitformer.weightless.measure import Measure, UnclearBlocksError
from limitformer.weightless.network import Weightless
from limitformer.weightless.run import DrawWholeError, KeepWeightsError
from limitformer.weightless.steps.drawn import DrawnWeights
from limitformer.weightless.steps.effects import EffectsOfUpdates
from limitformer.weightless.steps.optimizers import StepRules
from limitformer.weightless.steps.weights import Forms, TrainedRun, TrainedWeights
from limitformer.weightless.threads import one_thread

CLIPPED = 1e-6  # that torch adds to the norm of all gradients before it divides by it


@dataclass(frozen=True)
class StepBatches:
    """The inputs of the steps, one for each and one for the loss after the last, and inputs that no step sees."""

    of_steps: list[Inputs]
    unseen: Inputs | None


@dataclass
class Pass:
    """The loss of a pass, its gradients, and what was measured."""

    loss: float
    output: Tensor
    squares: dict[str, float]  # |∂W|² by weight, after a backward pass
    arrays: Arrays = field(default_factory=dict)  # of `stream_arrays`, if it was measured
    streams: list[Tensor] = field(default_factory=list)  # by layer
    branches: list[list[Tensor]] = field(default_factory=list)  # by block and sublayer


class Trajectory:
    """The training of network `sample` by `rules`."""

    def __init__(
        self,
        network: Weightless,
        rules: StepRules,
        forms: Forms,
        loss: Loss,
        batches: StepBatches,
        seed: int,
        sample: int,
    ) -> None:
        self.network, self.rules, self.forms, self.loss, self.batches = network, rules, forms, loss, batches
        self.seed, self.sample = seed, sample
        self.reasons = dict(network.reasons_to_keep) if network.rebuilt else {}
        self.weights = TrainedWeights(rules, forms, seed, sample, network.dtype)
        self.optimizer: Any = None  # a user's function that trains drawn networks

    def arrays(self) -> Arrays:
        """Train the network; return its measures by step.

        A use of a weight that its form does not allow begins the training again, with another form.
        """
        while True:
            self.weights = self.new_weights()
            try:
                with one_thread(), self.randomness():
                    return self.train()
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

    def randomness(self) -> AbstractContextManager[Any]:
        """Seed the global generators for an optimiser of the user's, which may draw random numbers."""
        if self.optimizer is None:
            return nullcontext()
        return seeded(torch_seed(self.seed, f"training {self.sample}"), self.network.dtype)

    def new_weights(self) -> TrainedWeights:
        """Return the weights at the start; an optimiser of the user's has a new network, as it may change modules."""
        numbers = self.rules, self.forms, self.seed, self.sample
        if self.optimizer is None:
            return TrainedWeights(*numbers, self.network.dtype)
        self.network.sample = None
        return DrawnWeights(*numbers, self.network, self.optimizer)

    def train(self) -> Arrays:
        """Take the steps; where the loss or a gradient is no longer finite, the rest is NaN."""
        first, steps = self.batches.of_steps[0], len(self.batches.of_steps) - 1
        measures: list[Arrays] = []
        start: Pass | None = None
        for step, batch in enumerate(self.batches.of_steps):
            now = self.run(batch, gradients=step < steps, measured=batch is first)
            probe = now if batch is first else self.run(first, measured=True)
            unseen = self.run(self.batches.unseen).loss if self.batches.unseen is not None else math.nan
            start = start or probe
            arrays = self.measured(start, probe) | {"loss": number(now.loss), "loss_unseen": number(unseen)}
            squares = now.squares if step < steps else {}
            known = squares or (step < steps and self.optimizer is not None)  # which may have used up the gradients
            total = math.sqrt(sum(squares.values())) if known else math.nan
            arrays |= {"gradient_norm": number(total), "weight_gradient": self.by_weight(squares, math.sqrt)}
            arrays["clipping"] = number(self.clipping(total) if math.isfinite(total) else math.nan)
            measures.append(arrays)
            if step < steps and not (math.isfinite(now.loss) and math.isfinite(total)):
                break
            if step < steps:
                self.step(squares, step)
        return by_step(measures, steps + 1)

    def clipping(self, total: float) -> float:
        """Return the factor of all gradients, whose norm together is `total`; 1 without gradients."""
        return 1.0 if self.rules.clip is None or math.isnan(total) else min(1.0, self.rules.clip / (total + CLIPPED))

    def step(self, squares: dict[str, float], step: int) -> None:
        """Change the weights by their gradients, of which |∂W|² are given."""
        self.weights.step(squares, self.clipping(math.sqrt(sum(squares.values()))), self.rules.schedule[step])

    def run(self, inputs: Inputs, gradients: bool = False, measured: bool = False) -> Pass:
        """Run a pass, and differentiate the loss if it has `gradients`."""
        network = self.network
        run = TrainedRun(
            self.seed, range(self.sample, self.sample + 1), inputs.rows, network.dtype, network.device, self.forms.draw,
            gradients, dict(self.reasons), trained=self.weights, measured=measured,
        )  # fmt: skip
        network.begin(run)
        self.weights.put(network.module)
        self.weights.effects = {} if measured else self.weights.effects
        measure = network.measure(1, inputs) if measured else None
        if measure is not None:
            measure.keeps = True
        arguments = network.arguments(run, inputs)
        with torch.set_grad_enabled(gradients):
            effects = EffectsOfUpdates(self.weights) if measured else nullcontext()
            with effects, network.trimming(), measure or nullcontext():
                out = network.call(arguments)
            output = output_of(out).detach()
            if measured:
                self.weights.scale_last(output)
            if measure is not None:
                finish(measure)
            value = self.loss(out, arguments)
            require(
                isinstance(value, Tensor) and (value.requires_grad or not gradients),
                "the loss must be a tensor that depends on the module's output.",
            )
            value = value.reshape(1, -1).mean(1).sum()
            squares = {}
            if gradients:
                value.backward()
                squares = self.weights.note_gradients(run)
            result = Pass(float(value.detach()), output.clone(), squares)
            if measure is not None:
                network.stacks = sizes_of_stacks(measure)
                result.arrays = stream_arrays(measure, gradients=False)
                result.streams = [each[0] for stack in measure.stacks for each in stack.streams]
                result.branches = [[each[0] for each in block] for stack in measure.stacks for block in stack.branches]
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
        result |= {"output": number(rms(now.output)), "output_change": number(rms(now.output - start.output))}
        result |= {key: arrays[key][0] for key in BY_HEAD if key in arrays}
        if "branch" in arrays:
            result["branch"] = arrays["branch"][0]
            change = np.full(result["branch"].shape, np.nan)
            for row, pairs in enumerate(zip(now.branches, start.branches, strict=True)):
                for column, (f, f_start) in enumerate(zip(*pairs, strict=False)):
                    change[row, column] = ratio(f, f_start)
            result["branch_change"] = change
        changes, effects = self.weights.changes(), self.weights.effects
        mean = {
            name: math.sqrt(sum(square for square, _ in every) / sum(count for _, count in every))
            for name, every in effects.items()
        }
        result["weight_change"] = self.by_weight({name: size for name, (size, _) in changes.items()})
        result["weight_spectral"] = self.by_weight({name: largest for name, (_, largest) in changes.items()})
        result["update_effect"] = self.by_weight(mean)
        return result

    def by_weight(self, values: dict[str, float], function: Callable[[float], float] = float) -> NDArray[np.float64]:
        """Return numbers in the order of the trained parameters, NaN for those that have none."""
        return np.array([function(values[name]) if name in values else math.nan for name in self.network.trained])


def finish(measure: Measure) -> None:
    """Finish the measures of a pass; raise `InputError` if its blocks are not those of the first network."""
    try:
        measure.finish()
    except UnclearBlocksError as error:
        raise InputError(OTHER_TOKENS) from error


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
    result = {}
    for key, first in measures[0].items():
        array = np.full((1, steps, *first.shape), np.nan)
        for step, each in enumerate(measures):
            array[0, step] = each[key]
        result[key] = array
    return result
