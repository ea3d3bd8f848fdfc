r"""One step of an optimiser, in the arithmetic of torch.

`TensorUpdate` changes tensors with entries. `CoreUpdate` changes W = a W₀ + QᵀK P, of which Q and P are known and W₀
is not, by the gradient QᵀG P: for SGD, which is linear, and for Muon, whose iteration maps QᵀG P to Qᵀφ(G) P, because Q
and P have orthonormal rows. Adam and Lion are functions of entries (`entrywise`).
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from limitformer.stepping.rules import ADAM, LION, MUON, SGD, UpdateRule


def is_entrywise(rule: UpdateRule) -> bool:
    """Whether the update of an entry is a function of the entry's gradients."""
    return rule.kind in (ADAM, LION)


def needs_entries(rule: UpdateRule) -> bool:
    """Whether the update depends on entries of the weight: weight decay is part of Adam's gradient."""
    return rule.kind == ADAM and not rule.decoupled and rule.weight_decay != 0.0


class TensorUpdate:
    """The optimiser of one tensor."""

    def __init__(self, rule: UpdateRule) -> None:
        self.rule, self.steps = rule, 0
        self.first: Tensor | None = None  # momentum
        self.second: Tensor | None = None  # Adam's mean square

    def step(self, value: Tensor, gradient: Tensor | None, factor: float) -> Tensor:
        """Return the value after a step at the rule's learning rate times `factor`; without a gradient the same."""
        if gradient is None:
            return value
        self.steps += 1
        rule, rate = self.rule, self.rule.lr * factor
        if rule.decoupled:
            value = value * (1.0 - rate * rule.weight_decay)
        elif rule.weight_decay:
            gradient = gradient + rule.weight_decay * value
        if rule.kind == SGD:
            if rule.momentum:  # it begins with the first gradient, without dampening
                fresh = 1.0 - rule.dampening
                self.first = gradient if self.first is None else rule.momentum * self.first + fresh * gradient
                gradient = gradient + rule.momentum * self.first if rule.nesterov else self.first
            return value - rate * gradient
        if rule.kind == MUON:
            known = self.first if self.first is not None else torch.zeros_like(gradient)
            self.first = known.lerp(gradient, 1.0 - rule.momentum)
            update = gradient.lerp(self.first, rule.momentum) if rule.nesterov else self.first
            every = update if update.dim() == 3 else update.reshape(1, len(update), -1)
            changed = torch.stack([muon_update(each, rule, (each.shape[0], each.shape[1])) for each in every])
            return value - rate * changed.reshape(value.shape)
        first = self.first if self.first is not None else torch.zeros_like(gradient)
        b1, b2 = rule.betas
        if rule.kind == LION:
            change = torch.sign(b1 * first + (1.0 - b1) * gradient)
            self.first = b2 * first + (1.0 - b2) * gradient
            return value - rate * change
        # In place where a tensor is this object's own: the same roundings, without the memory of a copy each.
        second = self.second if self.second is not None else torch.zeros_like(gradient)
        self.first = first.mul_(b1).add_((1.0 - b1) * gradient)
        self.second = second.mul_(b2).add_(gradient.square().mul_(1.0 - b2))
        change, size = self.first / (1.0 - b1**self.steps), self.second / (1.0 - b2**self.steps)
        return value - change.mul_(rate).div_(size.sqrt_().add_(rule.eps))


class CoreUpdate:
    """The optimiser SGD or Muon of a matrix W = a W₀ + QᵀK P.

    Args:
        shape: of the matrix, as the module stores it (out, in).

    Attributes:
        a: the factor that weight decay gives W₀.
        core: K (k, l) in float64; Q and P may have more rows than that.
    """

    def __init__(self, rule: UpdateRule, shape: tuple[int, int]) -> None:
        self.rule, self.shape = rule, shape
        self.a, self.core = 1.0, torch.zeros(0, 0, dtype=torch.float64)
        self.momentum_of_start = 0.0  # the part of SGD's momentum along W₀
        self.momentum: Tensor | None = None

    def step(self, gradient: Tensor | None, factor: float) -> None:
        """Change the matrix by the gradient QᵀG P, of which G (k, l) is given; without a gradient not at all."""
        if gradient is None:
            return
        rule, rate, g = self.rule, self.rule.lr * factor, gradient.double()
        self.core = padded(self.core, g)
        known = None if self.momentum is None else padded(self.momentum, g)
        if rule.kind == MUON:
            keeps = 1.0 - rate * rule.weight_decay
            self.momentum = (torch.zeros_like(g) if known is None else known).lerp(g, 1.0 - rule.momentum)
            mean = g.lerp(self.momentum, rule.momentum) if rule.nesterov else self.momentum
            self.a *= keeps
            self.core = keeps * self.core - rate * muon_update(mean, rule, self.shape)
            return
        of_start = rule.weight_decay * self.a
        g = g + rule.weight_decay * self.core
        if rule.momentum:
            fresh = 1.0 - rule.dampening
            start = of_start if known is None else rule.momentum * self.momentum_of_start + fresh * of_start
            self.momentum = g if known is None else rule.momentum * known + fresh * g
            self.momentum_of_start = start
            g = g + rule.momentum * self.momentum if rule.nesterov else self.momentum
            of_start = of_start + rule.momentum * start if rule.nesterov else start
        self.a -= rate * of_start
        self.core = self.core - rate * g


def padded(matrix: Tensor, like: Tensor) -> Tensor:
    """Fill up a core with zeros, for a basis that has grown."""
    return pad(matrix, (0, like.shape[1] - matrix.shape[1], 0, like.shape[0] - matrix.shape[0]))


def muon_update(mean: Tensor, rule: UpdateRule, shape: tuple[int, int]) -> Tensor:
    """Return Muon's scaled direction of a matrix of this shape (out, in), or of its core.

    The matrix is divided by its norm, and Newton–Schulz's polynomial then brings its singular values near 1. Torch
    computes it in bfloat16; this is the formula in the precision of `mean`.
    """
    if not mean.numel():
        return mean
    a, b, c = rule.coefficients
    x = mean / mean.norm().clamp(min=rule.least_norm)
    wide = x if x.shape[0] <= x.shape[1] else x.mT
    for _ in range(rule.iterations):
        gram = wide @ wide.mT
        wide = a * wide + (b * gram + c * gram @ gram) @ wide
    out, into = shape
    scale = math.sqrt(max(1.0, out / into)) if rule.scale == "width" else 0.2 * math.sqrt(max(out, into))
    return scale * (wide if x.shape[0] <= x.shape[1] else wide.mT)
