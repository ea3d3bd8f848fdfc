"""Drawn networks that a user's own optimiser trains, whatever it does."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from limitformer.weightless.network import Weightless
from limitformer.weightless.reachable import State
from limitformer.weightless.steps.optimizers import base_rate, made_by
from limitformer.weightless.steps.rules import StepRules
from limitformer.weightless.steps.weights import Forms, TrainedRun, TrainedWeights


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

    def note_gradients(self, run: TrainedRun) -> dict[str, float]:
        squares = super().note_gradients(run)
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
