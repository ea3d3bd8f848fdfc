"""`Shaping`: what is changed in a stock model, as its configuration keeps it."""

from dataclasses import dataclass
from typing import Any

from limitformer.base.errors import require, require_real


@dataclass(frozen=True, kw_only=True)
class Shaping:
    """The shaping of a model, which is saved with its configuration.

    Attributes:
        gamma1, gamma2: start values of γ₁ and γ₂. With 0 a trained model computes the same; None removes the term.
        tau0: τ₀ > 0, which divides the logits.
        per_head: whether each head has its own γ₁ and γ₂.
        trained: whether γ₁, γ₂, s₋, λ and γ have gradients.
        float32: whether softmax − γ₂C̄, its sum with γ₁ I and the tokens between the layers are in float32 for any dtype
            of the weights.
        residual_gamma: γ of the residuals, which removes the blocks' normalisations; None changes neither.
        shaped_relu: whether the activation becomes a shaped ReLU.
    """

    gamma1: float | None = 1.0
    gamma2: float | None = 1.0
    tau0: float = 1.0
    per_head: bool = True
    trained: bool = True
    float32: bool = False
    residual_gamma: float | None = None
    shaped_relu: bool = False

    def __post_init__(self) -> None:
        for name in ("gamma1", "gamma2", "residual_gamma"):
            if getattr(self, name) is not None:
                require_real(name, getattr(self, name))
        require(require_real("tau0", self.tau0) > 0, f"tau0 must be positive; got {self.tau0}.")
        gamma = self.residual_gamma
        fits = gamma is None or 0 <= gamma <= 1
        require(fits, f"residual_gamma must lie in [0, 1]; got {gamma}. [ST, App. D] takes 0.05, 0.1 or 0.2.")


def require_shaping(shaping: Any) -> None:
    require(
        isinstance(shaping, Shaping),
        f"shaping must be a limitformer.hf.Shaping; got {shaping!r:.60}. Nearest: Shaping(gamma1=1.0, gamma2=1.0).",
    )
