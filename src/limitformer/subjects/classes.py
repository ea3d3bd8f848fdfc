"""The class of transformers for a configuration: the one that it names, or that of its first task."""

from collections.abc import Callable
from functools import partial
from inspect import Parameter, signature
from typing import Any

import transformers
from transformers import PreTrainedModel

from limitformer.base.errors import InputError, nearest, require

AUTO_CLASSES = (  # a configuration without a class takes the first of these tasks that its family has
    ("seq2seq", "AutoModelForSeq2SeqLM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING"),
    ("masked", "AutoModelForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING"),
    ("causal", "AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING"),
    ("image", "AutoModelForImageClassification", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING"),
    ("hidden", "AutoModel", "MODEL_MAPPING"),
)
TASKS_BY_NAME = {  # of classes that are not the first of their family
    "CausalLM": "causal",
    "LMHead": "causal",
    "MaskedLM": "masked",
    "ImageClassification": "image",
    "ConditionalGeneration": "seq2seq",
    "EncoderDecoderModel": "seq2seq",
    "SpeechToText": "seq2seq",
}
OTHER_MAPPINGS = (
    "MODEL_FOR_PRETRAINING_MAPPING",
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING",
    "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING",
    "MODEL_FOR_QUESTION_ANSWERING_MAPPING",
    "MODEL_FOR_TEXT_ENCODING_MAPPING",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING",
    "MODEL_FOR_CTC_MAPPING",
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
    classes: dict[str, Any] = {}
    for name in (*(mapping for _, _, mapping in AUTO_CLASSES), *OTHER_MAPPINGS):
        classes |= {kind.__name__: kind for kind in listed(getattr(transformers, name), config)}
    return classes


def hint(config: Any) -> str:
    """Return ` Nearest: …` with the class of the family whose name is closest, or its first."""
    known = family_classes(config)
    return nearest(config.architectures[0], known) or (f" Nearest: {next(iter(known))}." if known else "")


def auto_class(config: Any) -> tuple[Any, Callable[[], Any]]:
    """Return the class of the family's first task, and a function that builds its model.

    Raises:
        InputError: transformers builds no model from a configuration of this family alone.
    """
    for _, auto, mapping in AUTO_CLASSES:
        kinds = listed(getattr(transformers, mapping), config)
        if kinds:
            return kinds[0], partial(getattr(transformers, auto).from_config, config, trust_remote_code=False)
    known = family_classes(config)
    if not known:
        raise InputError(f"transformers builds no model of {config.model_type} from its configuration alone.")
    kind = next(iter(known.values()))
    return kind, partial(kind, config)


def task_of(kind: type, config: Any) -> str:
    """Return the task of a class of transformers; hidden: it has no known head.

    A class that generates is seq2seq if it has a decoder of its own. Otherwise it predicts the next token, as do
    language models that read images or sound.
    """
    mapped = (task for task, _, mapping in AUTO_CLASSES if kind in listed(getattr(transformers, mapping), config))
    named = (task for word, task in TASKS_BY_NAME.items() if word in kind.__name__)
    task = next((each for each in (*mapped, *named) if each != "hidden"), "hidden")
    decodes = getattr(config, "is_encoder_decoder", False) or "decoder_input_ids" in parameters_of(kind)
    return "causal" if task == "seq2seq" and not decodes else task


def listed(mapping: Any, config: Any) -> tuple[Any, ...]:
    """Return the classes that a mapping of transformers has for a configuration."""
    kinds = mapping.get(type(config), ())
    return kinds if isinstance(kinds, tuple) else (kinds,)


def parameters_of(kind: Any) -> dict[str, Parameter]:
    """Return the parameters of a class's `forward`, or of a module's, without `self`."""
    try:
        parameters = dict(signature(kind.forward).parameters)
    except (AttributeError, TypeError, ValueError):
        return {}
    parameters.pop("self", None)
    return parameters
