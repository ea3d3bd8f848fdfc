"""`witness_steps`: the first steps of a simulated training, compared with the user's own module and optimiser.

A simulated weight is W_t = a W₀ + U_t, of which only products with W₀ are known. The sketch of its update is linear, so
that it can be made up once W₀ is completed: that of U_t plus (a − 1) times that of W₀.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from limitformer.base.memory import available_memory, readable
from limitformer.stepping.rules import StepRules
from limitformer.stepping.simulate import Training
from limitformer.stepping.trajectory import Trajectory, made_at, step_at
from limitformer.stepping.updates import TensorUpdate, UpdateRule
from limitformer.stepping.weights import TrainedRows, TrainedWeights
from limitformer.subjects.inputs import call_with
from limitformer.subjects.losses import output_of
from limitformer.subjects.subject import resolve
from limitformer.weightless.arrays import Arrays
from limitformer.weightless.network import Weightless
from limitformer.witness.compare import DELTA, DRAWN, NOT_WITNESSED, WITNESSED, Witness, compare
from limitformer.witness.complete import weights_of_training
from limitformer.witness.real import (
    GRADIENT,
    LOSS,
    OUTPUT,
    UPDATE,
    CastsAsCopies,
    Quantity,
    Sketch,
    Values,
    disturb,
    note_gradients,
    number,
    outputs_noted,
    sketch,
)
from limitformer.witness.reduce import reduced
from limitformer.witness.witness import (
    FULL,
    MOST_IN_FLOAT64,
    SHARE,
    TOKENS,
    arguments_of,
    drawn,
    fill,
    first_that_tells,
    real_module,
    wrong_law,
)

STEPS = 2  # two show all that three did
COPIES = 8  # of the weights: two modules, gradients, two means of the optimiser, the start


def witness_steps(
    build: Callable[..., Training],
    optimizer: Any,
    how: bool | str = True,
    copy: bool = True,
    sequences: int | None = None,
) -> Witness:
    """Compare the first two steps of the first network, at the first rate, with the user's own module and optimiser.

    Up to 20 million parameters in float64; above, by a reduced copy in float64, if the model is a configuration of
    transformers, else in float32 at full size, if that fits a quarter of the free memory.

    Args:
        build: takes a `dtype`, and perhaps another `model` with other `inputs`, and returns the training.
        optimizer: as for `limitformer.steps`; one that is named is torch's, if torch has it, else its formula.
        how: "full" for the full size, whatever its memory.
        copy: whether a reduced copy of the configuration stands for the model, as it does not under a rule's factors.
        sequences: of the batch, as for `limitformer.steps`.
    """
    if sequences is not None:  # two show what more would show
        build = partial(build, sequences=min(sequences, 2))
    began, training = time.perf_counter(), build(dtype=torch.float32)
    size, config = training.network.table.count, training.network.subject.config
    if training.network.drawn:
        return drawn(training.network)
    free, needed = available_memory(), COPIES * size * torch.float32.itemsize
    small = copy and how != FULL and config is not None and size > MOST_IN_FLOAT64
    tries: list[tuple[bool, torch.dtype]] = [(True, torch.float64), (True, torch.float32)] if small else []
    tries += [(False, torch.float64)] if size <= MOST_IN_FLOAT64 else []
    tries += [(False, torch.float32)] if how == FULL or free is None or needed <= SHARE * free else []
    absent = Witness(NOT_WITNESSED, f"two steps of the module need {readable(needed)}", parameters=size)

    def compare_in(of_copy: bool, dtype: torch.dtype) -> Witness:
        copy = {"model": resolve(reduced(config)), "inputs": TOKENS} if of_copy else {}
        return witness_in(build(dtype=dtype, **copy), optimizer)

    return replace(first_that_tells(tries, compare_in, absent), seconds=time.perf_counter() - began)


def witness_in(training: Training, optimizer: Any) -> Witness:
    """Compare two steps at the first rate, and one at the largest, in the number format of a training."""
    first, largest = training.rules[0], max(training.rules, key=lambda each: each.base)
    result = witness_at(training, first, optimizer, STEPS)
    if largest is first or result.status != WITNESSED:
        return result
    other = witness_at(training, largest, optimizer, 1)  # the steps may depend on the rate
    return other if other.status == DRAWN else result


def witness_at(training: Training, rule: StepRules, optimizer: Any, steps: int) -> Witness:
    """Compare some steps at a rate in the number format of a training."""
    network = training.network
    steps = min(steps, len(training.batches.of_steps) - 1)
    of_torch = all(each.in_torch() for each in rule.rules.values())
    formula = "torch's optimiser" if of_torch else f"the formula of {rule.name}"
    about: dict[str, Any] = {
        "optimizer": "your optimiser" if callable(optimizer) else formula,
        "number_format": str(network.dtype).removeprefix("torch."),
        "parameters": network.table.count,
    }
    if network.drawn:
        return drawn(network)
    simulated = SimulatedTraining(training, rule, steps)
    simulated.arrays()
    if network.drawn:
        return drawn(network)
    delta, build = DELTA[network.dtype], partial(real_module, network.subject, network.dtype, training.seed)
    with build() as module:
        if wrong := wrong_law(module, network) or fill(module, network, simulated.completed):
            return Witness(DRAWN, wrong, **about)
        simulated.make_updates(module)
        real = real_training(module, training, rule, optimizer, steps)
    with build() as module:  # a copy would not have the hooks of parameters
        fill(module, network, simulated.completed)
        disturb(module, delta)
        other = real_training(module, training, rule, optimizer, steps)
    if not all(math.isfinite(each.size) for key, each in real.items() if key.kind == LOSS):
        return Witness(NOT_WITNESSED, "its loss is not finite at this rate", **about)
    return compare(simulated.values, real, other, delta, steps=steps, **about)


class SimulatedTraining(Trajectory):
    """A training of which losses, gradients and updates are noted, and whose weights at the start are completed.

    Its batches are not divided.
    """

    pieces = staticmethod(lambda inputs, least: [inputs])

    def __init__(self, training: Training, rule: StepRules, steps: int) -> None:
        super().__init__(
            training.network, rule, training.forms, training.loss, training.batches, training.seed, sample=0
        )
        self.values, self.updates = Values(), dict[Quantity, tuple[float, Sketch] | TrainedRows]()
        self.completed: dict[str, Tensor | dict[int | None, Tensor]] = {}
        self.steps = steps

    def train(self) -> Arrays:
        """Take the steps without measuring anything between them."""
        self.values, self.updates = Values(), {}
        shapes, noted = self.network.table.shapes, list(self.network.trained)
        for step, batch in enumerate(self.batches.of_steps[: self.steps + 1]):
            with noted_calls(self.network, self.values if step == 0 else Values()):
                now = self.run(batch, gradients=step < self.steps)
            self.values[Quantity(LOSS, number=step)] = number(now.loss)
            self.values[Quantity(OUTPUT, number=step)] = sketch(now.output)
            self.values |= {Quantity(GRADIENT, name, step): number(square**0.5) for name, square in now.squares.items()}
            if step < self.steps:
                self.step(now.squares, step)
                for name in noted:
                    if (update := update_of(self.weights, name, shapes[name])) is not None:
                        self.updates[Quantity(UPDATE, name, step + 1)] = update
        self.completed = weights_of_training(self.weights, self.seed)
        return {}

    def make_updates(self, module: nn.Module) -> None:
        """Make the sketches of W_t − W₀ from those of U_t and of the weights at the start."""
        for key, update in self.updates.items():
            start = module.get_parameter(key.name).detach()
            if isinstance(update, TrainedRows):
                self.values[key] = sketch(update.now(torch.arange(len(start)), start.clone()) - start)
                continue
            factor, change = update
            sums = change.sums + (factor - 1.0) * sketch(start).sums if factor != 1.0 else change.sums
            self.values[key] = Sketch(sums, float(sums.norm()), change.entries)


@contextmanager
def noted_calls(network: Weightless, values: Values) -> Iterator[None]:
    """Note the outputs of modules whenever a network is called, which restores its hooks before."""
    call = network.call

    def noted(arguments: Mapping[str, Any]) -> Any:
        with outputs_noted(network.module, values):
            return call(arguments)

    vars(network)["call"] = noted
    try:
        yield
    finally:
        del vars(network)["call"]


def update_of(weights: TrainedWeights, name: str, shape: tuple[int, ...]) -> tuple[float, Sketch] | TrainedRows | None:
    """Return a and the sketch of U of W_t = a W₀ + U; of a table its gradients so far, since they may move any row."""
    if name in weights.entries:
        one = weights.entries[name]
        return 1.0, sketch((one.value - one.initial).reshape(shape))
    if name in weights.rows:
        table = TrainedRows(weights.rows[name].rule)
        table.gradients = list(weights.rows[name].gradients)
        return table
    total = torch.zeros(shape, dtype=weights.dtype)
    factor = 1.0
    for part, each in weights.matrices.get(name, {}).items():
        target = total if part is None else total[part]
        if each.core is not None:
            left, right = (side.basis for side in (each.initial.left, each.initial.right))
            rows, columns = each.core.core.shape
            factor = each.core.a
            change = left[:rows].double().mT @ each.core.core @ right[:columns].double()
            target.copy_(change.to(total.dtype).reshape(target.shape))
        elif each.history is not None:
            factor = each.history.decay
            target.copy_(each.history.times(torch.eye(each.initial.shape[0], dtype=total.dtype)).reshape(target.shape))
    return (factor, sketch(total)) if name in weights.matrices else None


def real_training(module: nn.Module, training: Training, rule: StepRules, optimizer: Any, steps: int) -> Values:
    """Train a module by its own optimiser for the steps; return what is compared."""
    values, loss = Values(), training.loss
    start = {name: each.detach().clone() for name, each in module.named_parameters()}
    optimizers = optimizer_of(optimizer, module, rule)
    for step, batch in enumerate(training.batches.of_steps[: steps + 1]):
        arguments = arguments_of(batch, training.seed, training.network.dtype)
        module.zero_grad()
        with torch.set_grad_enabled(step < steps), torch.compiler.set_stance("force_eager"):
            with outputs_noted(module, values if step == 0 else Values()):
                out = call_with(module, arguments)
            values[Quantity(OUTPUT, number=step)] = sketch(output_of(out))
            value = loss(out, arguments).reshape(1, -1).mean(1).sum()
            values[Quantity(LOSS, number=step)] = number(value.detach())
            if step == steps:
                break
            value.backward()
        note_gradients(module, values, step)
        if rule.clip is not None:
            nn.utils.clip_grad_norm_(module.parameters(), rule.clip)
        with CastsAsCopies(torch.bfloat16):  # as in Muon's iteration, whose formula is simulated
            step_at(optimizers, rule.schedule[step])
        for name, each in module.named_parameters():
            values[Quantity(UPDATE, name, step + 1)] = sketch(each.detach() - start[name])
    return values


def optimizer_of(optimizer: Any, module: nn.Module, rule: StepRules) -> list[torch.optim.Optimizer]:
    """Return the user's optimisers at the base rate of the rules; those of torch, or a formula, for one by name."""
    optimizers: list[torch.optim.Optimizer]
    if callable(optimizer):
        optimizers = made_at(optimizer, module, rule)
        # torch computes in the format of the rate
        for group in (each for one in optimizers for each in one.param_groups):
            rate = group["lr"]
            group["lr"] = rate.to(next(module.parameters()).dtype) if isinstance(rate, Tensor) else float(rate)
        return optimizers
    optimizers = []
    for name, each in module.named_parameters():
        if (one := rule.rules.get(name)) is None:
            continue
        kind = None if one.of_matrices and each.dim() != 2 else one.in_torch()  # torch's takes no stacked matrices
        optimizers.append(kind([each], **one.torch_options()) if kind else Formula(each, one))
    return optimizers


class Formula(torch.optim.Optimizer):
    """An optimiser that torch does not have, by the formula that is simulated."""

    def __init__(self, parameter: nn.Parameter, rule: UpdateRule) -> None:
        super().__init__([parameter], {"lr": rule.lr})
        self.update = TensorUpdate(rule)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Change the parameter by its gradient."""
        (group,) = self.param_groups
        for each in group["params"]:
            if each.grad is not None:
                each.copy_(self.update.step(each.clone(), each.grad, group["lr"] / max(self.update.rule.lr, 1e-300)))
