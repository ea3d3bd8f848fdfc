r"""What a shaped model's configuration says, for who loads it.

* The activation's name is a sentence. There is no such activation, so that a stock model cannot be built from it,
  whatever attention one asks for, and the error says what to call instead.
* `shaped_class` is the module and the name of a user's own class. Nothing is imported for it: a file from elsewhere
  must not choose what runs.
* The wish for attentions has a name of our own, `shaped_attentions`: a configuration may say `output_attentions` beside
  the library's own attention "eager" alone.
"""

import re
import sys
from typing import Any

import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from limitformer.base.errors import InputError
from limitformer.hf.families import FAMILIES

SENTENCE = (
    "This is the configuration of a shaped model, which limitformer.hf.load_shaped loads and from_pretrained cannot "
    "(its activation is {})."
)
MARKED = re.compile(re.escape(SENTENCE).replace(r"\{\}", "(.*)"))
LIBRARY = "transformers."
WISH = "shaped_attentions"


def mark(config: PreTrainedConfig, model_class: type[PreTrainedModel]) -> None:
    """Make the activation a sentence; note a wish for attentions, and a class that is not the library's."""
    if config.output_attentions:
        setattr(config, WISH, True)
        config.output_attentions = False
    if config.model_type in FAMILIES:
        name = FAMILIES[config.model_type].activation_name
        setattr(config, name, SENTENCE.format(getattr(config, name)))
    vars(config).pop("shaped_class", None)
    if not model_class.__module__.startswith(LIBRARY):
        config.shaped_class = f"{model_class.__module__}:{model_class.__qualname__}"


def unmark(config: PreTrainedConfig) -> None:
    """Give the activation its name back."""
    if config.model_type in FAMILIES:
        name = FAMILIES[config.model_type].activation_name
        match = MARKED.fullmatch(str(getattr(config, name)))
        if match:
            setattr(config, name, match[1])


def recorded_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The class that a model had: a user's, if that is the one that was saved, or the library's.

    Raises:
        InputError: there is none of that name, or its module has not been imported.
    """
    named = (config.architectures or [""])[0]
    module, _, path = str(getattr(config, "shaped_class", "")).partition(":")
    users = path.rpartition(".")[2] == named and bool(module)
    found: Any = own_class(module, path) if users else getattr(transformers, named, None)
    if not (isinstance(found, type) and issubclass(found, PreTrainedModel)):
        raise InputError(f"config.json names no model of transformers; got architectures={config.architectures}.")
    return found


def own_class(module: str, path: str) -> Any:
    """The class of this name in a module that has been imported."""
    found: Any = sys.modules.get(module)
    for name in path.split("."):
        found = getattr(found, name, None)
    if found is None:
        message = (
            f"The model is a {path} of {module}, which is not imported here. Nearest: import it, or give model_class."
        )
        raise InputError(message)
    return found
