"""The class of transformers for a configuration: the one that it names, or that of its first task."""

from collections.abc import Callable
from functools import partial
from typing import Any

import transformers
from transformers import PreTrainedModel

from limitformer.base.errors import InputError, nearest, require

AUTO_CLASSES = (  # a configuration without a class takes the first of these tasks that its family has
    ("seq2seq", "AutoModelForSeq2SeqLM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING"),
    ("masked", "AutoModelForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING"),
    ("causal", "AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING"),
    ("image", "AutoModelForImageClassification", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING"),
)
OTHER_MAPPINGS = (
    "MODEL_MAPPING",
    "MODEL_FOR_PRETRAINING_MAPPING",
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING",
    "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING",
    "MODEL_FOR_QUESTION_ANSWERING_MAPPING",
    "MODEL_FOR_TEXT_ENCODING_MAPPING",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
)


def named_class(config: Any) -> Any:
    """Return the class that `architectures` names, None if it names none.

    Raises:
        InputError: the installed transformers has no such class, or it is not a model of the family.
    """
    names = config.architectures
    if names is None or names == []:
        return None
    listed = isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)
    require(listed, f'architectures must be a list of one class, such as ["GPT2LMHeadModel"]; got {names!r:.80}.')
    known = family_classes(config)
    kind = known.get(names[0], getattr(transformers, names[0], None))
    if isinstance(kind, type) and issubclass(kind, PreTrainedModel):
        family: Any = kind.config_class
        if isinstance(family, type) and isinstance(config, family):
            return kind
        other = f"a class of {family.model_type}" if family is not None else "not a model by itself"
        raise InputError(f"architectures names {names[0]}, {other}; model_type is {config.model_type}.{hint(config)}")
    raise InputError(f"architectures names {names[0]!r:.80}, which is not a model of transformers.{hint(config)}")


def family_classes(config: Any) -> dict[str, Any]:
    """Return the classes of a configuration's family by name, including those that the user has registered."""
    classes = {}
    for name in (*(mapping for _, _, mapping in AUTO_CLASSES), *OTHER_MAPPINGS):
        kinds = getattr(transformers, name).get(type(config), ())
        for kind in kinds if isinstance(kinds, tuple) else (kinds,):
            classes[kind.__name__] = kind
    return classes


def hint(config: Any) -> str:
    """Return ` Nearest: …` with the class of the family whose name is closest, or its first."""
    known = family_classes(config)
    return nearest(config.architectures[0], known) or (f" Nearest: {next(iter(known))}." if known else "")


def auto_class(config: Any) -> tuple[str, Callable[[], Any]]:
    """Return the first task of the family, and a function that builds its model."""
    fitting = [(task, auto) for task, auto, mapping in AUTO_CLASSES if type(config) in getattr(transformers, mapping)]
    task, auto = fitting[0] if fitting else ("hidden", "AutoModel")
    return task, partial(getattr(transformers, auto).from_config, config, trust_remote_code=False)
