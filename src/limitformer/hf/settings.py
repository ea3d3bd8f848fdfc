r"""`Shaping`: what is changed in a stock model; and the marks of a shaped model in its saved configuration.

* The activation's name is a sentence. Since no such activation exists, `from_pretrained` fails for any attention, and
  its error names the function to call instead.
* `shaped_class` is the module and name of a user's class. Loading imports nothing for it: a file of unknown origin must
  not choose the code that runs.
* `shaped_attentions` stores `output_attentions=True`, which the library allows only with "eager" attention.
"""

import re
import sys
from dataclasses import dataclass
from typing import Any

import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from limitformer.base.errors import InputError, require, require_real
from limitformer.hf.families import ACTIVATION_NAMES


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


SENTENCE = (
    "This is the configuration of a shaped model, which limitformer.hf.load_shaped loads and from_pretrained cannot "
    "(its activation is {})."
)
MARKED = re.compile(re.escape(SENTENCE).replace(r"\{\}", "(.*)"))
LIBRARY = "transformers."
OUTPUT_ATTENTIONS = "shaped_attentions"


def mark(config: PreTrainedConfig, model_class: type[PreTrainedModel], activation: str) -> None:
    """Replace the name in the field `activation` by the sentence; store `output_attentions` and a user's class."""
    if config.output_attentions:
        setattr(config, OUTPUT_ATTENTIONS, True)
        config.output_attentions = False
    setattr(config, activation, SENTENCE.format(getattr(config, activation)))
    vars(config).pop("shaped_class", None)
    if not model_class.__module__.startswith(LIBRARY):
        config.shaped_class = f"{model_class.__module__}:{model_class.__qualname__}"


def unmark(config: PreTrainedConfig) -> None:
    """Restore the activation's name in the configuration."""
    for name in ACTIVATION_NAMES:
        match = MARKED.fullmatch(str(getattr(config, name, "")))
        if match:
            setattr(config, name, match[1])


def recorded_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """Return the class of a saved model, a user's or the library's.

    Raises:
        InputError: the class is unknown, or its module has not been imported.
    """
    named = (config.architectures or [""])[0]
    module, _, path = str(getattr(config, "shaped_class", "")).partition(":")
    kind: Any = getattr(transformers, named, None)
    if module and path.rpartition(".")[2] == named:
        kind = sys.modules.get(module)
        for name in path.split("."):
            kind = getattr(kind, name, None)
        missing = f"The model is a {path} of {module}, which is not imported here."
        require(kind is not None, f"{missing} Nearest: import it, or give model_class.")
    if not (isinstance(kind, type) and issubclass(kind, PreTrainedModel)):
        raise InputError(f"config.json names no model of transformers; got architectures={config.architectures}.")
    return kind
