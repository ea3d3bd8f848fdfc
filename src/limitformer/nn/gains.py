r"""Learn, Recover and Keep: the shaping parameters in training [ST, App. D].

The shaping parameters are γ₁, γ₂ of each attention [ST, eq. 33] and the negative slope s₋ of each ReLU. They start at
their shaped values, γ₁ = γ₂ = 1 and s₋ = 1 − 1/√n, and then

* **Learn**: all of them are trained;
* **Recover**: all of them fall linearly to zero over the first 4,000 steps and stay there. The result has softmax
  attention and an ordinary ReLU: a Transformer without LayerNorm;
* **Keep**: all of them stay, which the paper reports to train much more slowly.

Recover depends only on the step and on the start, never on the current values, so a resumed run equals an unbroken one.
λ and γ of the residuals are trained in all three.

The shaped ReLU σ(x) = s₊ max(x, 0) + s₋ min(x, 0) [ST, after eq. 4], with a negative slope that trains.

[ST, App. D] takes s₊ = 1 and s₋ = 1 − 1/√n. At 0 the gradient is s₋: with `clamp` it would be the sum of both slopes,
and padded tokens are exact zeros.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn

from limitformer.base.errors import require, require_count, require_real
from limitformer.nn.strengths import Strengths


class Gain(Strengths):
    """A shaping parameter: `value` (1,) or (heads,), which `Learn` trains and `Recover` reduces to zero.

    Args:
        start: the value at step 0.
        heads: how many numbers; None makes one.
        trained: whether it has a gradient.
    """

    def __init__(self, start: float, heads: int | None = None, trained: bool = True) -> None:
        super().__init__()
        self.start = require_real("start", start)
        self.add("value", self.start, 1 if heads is None else heads, trained)

    @property
    def value(self) -> nn.Parameter:
        return self.strength("value")

    def forward(self) -> Annotated[Tensor, "heads", "1"]:
        return self.value

    def extra_repr(self) -> str:
        return f"start={self.start}, shape={tuple(self.value.shape)}, trained={self.value.requires_grad}"


@dataclass(frozen=True)
class Learn:
    """All shaping parameters are trained."""

    def prepare(self, model: nn.Module) -> None:
        """Give every gain of `model` a gradient. Call it before the optimiser is made."""
        set_trained(model, True)

    def apply(self, model: nn.Module, step: int) -> None:
        """Do nothing: the optimiser changes the gains."""


@dataclass(frozen=True, kw_only=True)
class Recover:
    """All shaping parameters fall linearly to zero.

    Attributes:
        steps: the step from which they are zero; [ST] takes the warm-up's 4,000.
    """

    steps: int = 4000

    def __post_init__(self) -> None:
        require_count("steps", self.steps)

    def fraction(self, step: int) -> float:
        """Return the share of the shaping that remains at a step: 1 at step 0, 0 from `steps` on."""
        require(step >= 0, f"step must be at least 0; got {step}.")
        return max(0, self.steps - step) / self.steps

    def prepare(self, model: nn.Module) -> None:
        """Freeze every gain of `model`. Call it before the optimiser is made."""
        set_trained(model, False)

    @torch.no_grad()
    def apply(self, model: nn.Module, step: int) -> None:
        """Set every gain of `model` to its value at `step`. Call it before that step's forward pass."""
        fraction = self.fraction(step)
        for gain in gains(model):
            gain.value.fill_(gain.start * fraction)


@dataclass(frozen=True)
class Keep:
    """All shaping parameters keep their values: no gradient, no schedule."""

    def prepare(self, model: nn.Module) -> None:
        """Freeze every gain of `model`. Call it before the optimiser is made."""
        set_trained(model, False)

    def apply(self, model: nn.Module, step: int) -> None:
        """Do nothing."""


def gains(model: nn.Module) -> list[Gain]:
    """List all shaping parameters of a model, without repetition."""
    return [module for module in model.modules() if isinstance(module, Gain)]


def set_trained(model: nn.Module, trained: bool) -> None:
    for gain in gains(model):
        gain.value.requires_grad_(trained)


class TrainableShapedReLU(nn.Module):
    """The shaped ReLU σ, entry by entry, for any shape.

    Args:
        negative: s₋ at the start; for width n, [ST] takes 1 − 1/√n.
        positive: s₊, which is constant.
        trained: whether s₋ has a gradient.
    """

    def __init__(self, *, negative: float, positive: float = 1.0, trained: bool = True) -> None:
        super().__init__()
        self.positive = require_real("positive", positive)
        self.negative = Gain(require_real("negative", negative), trained=trained)

    def forward(self, x: Annotated[Tensor, "*shape"]) -> Annotated[Tensor, "*shape"]:
        return torch.where(x > 0, self.positive * x, (self.negative() * x).to(x.dtype))

    def extra_repr(self) -> str:
        return f"positive={self.positive}"
