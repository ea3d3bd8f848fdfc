r"""The marks of a shaped model in its saved configuration.

* The activation's name is a sentence. Since no such activation exists, `from_pretrained` fails for any attention, and
  its error names the function to call instead.
* `shaped_class` is the module and name of a user's class. Loading imports nothing for it: a file of unknown origin must
  not choose the code that runs.
* `shaped_attentions` stores `output_attentions=True`, which the library allows only with "eager" attention.
"""

import re
import sys
from typing import Any

import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from limitformer.base.errors import InputError, require
from limitformer.hf.families import ACTIVATION_NAMES

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
