"""The error about a configuration without `model_type`, with the configuration of the same network.

Configurations of nanoGPT and Meta's Llama hold only sizes. The message shows the configuration of transformers that is
the same network at initialisation.
"""

import json
from math import ceil
from typing import Any

from limitformer.base.errors import nearest

NANO = {"n_layer", "n_head", "n_embd", "block_size"}
NOT_NANO = {
    "rotary_percentage",
    "n_query_groups",
    "norm_class_name",
    "mlp_class_name",
    "intermediate_size",
    "n_kv_head",
}
META = {"dim", "n_layers", "n_heads"}
INSIDE = ("model_args", "args", "config", "model_config", "model", "gptconf", "hparams", "hyper_parameters")
NEEDED = 'a configuration must name its family, such as "model_type": "gpt2"'


def without_family(values: dict[str, Any]) -> str:
    """Return the message about a configuration whose model_type is missing, or not a word."""
    if values.get("model_type") is not None:
        return f'model_type must be one word, such as "gpt2"; got {values["model_type"]!r:.60}.'
    for name in INSIDE:
        inner = values.get(name)
        if isinstance(inner, dict) and (known := recognised(inner)):
            return f"{NEEDED}; under {name!r} it has the sizes of {known}"
    if known := recognised(values):
        return f"{NEEDED}; it has the sizes of {known}"
    if family := family_of(values.get("architectures")):
        return f'{NEEDED}; got none. Nearest: "model_type": "{family}", the family of {values["architectures"][0]}.'
    inner_name = next((name for name in INSIDE if isinstance(values.get(name), dict)), None)
    if inner_name is not None and "model_type" in values[inner_name]:
        return f"{NEEDED}; got none. Nearest: the object under {inner_name!r}."
    close = [name for name in values if nearest("model_type", [name], 0.7)]
    return f"{NEEDED}; got {f'{close[0]!r}' if close else 'none'}."


def recognised(values: dict[str, Any]) -> str:
    """Return the origin of a configuration and the repair, or an empty string."""
    for names, write in ((NANO, nano), (META, meta)):
        if write is nano and NOT_NANO & values.keys():
            continue
        if names <= values.keys() and all(is_count(values[name]) for name in names):
            return write(values)
    return ""


def is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def nano(values: dict[str, Any]) -> str:
    """Return the hint for nanoGPT: GPT-2 with the exact GELU; biases are 0 at initialisation."""
    same = {
        "model_type": "gpt2",
        **{name: values[name] for name in ("n_layer", "n_head", "n_embd")},
        "n_positions": values["block_size"],
        "vocab_size": values.get("vocab_size") or values.get("padded_vocab_size") or 50304,
        "activation_function": "gelu",
    }
    return (
        f"nanoGPT. Nearest: {json.dumps(same)}, the same network at initialisation; of a trained one, the module "
        "itself: limitformer.check(model) after model.load_state_dict."
    )


def meta(values: dict[str, Any]) -> str:
    """Return the hint for the params.json of Meta's Llama."""
    dim, multiple = values["dim"], values.get("multiple_of") or 256
    hidden = int(2 * 4 * dim / 3)
    hidden = int((values.get("ffn_dim_multiplier") or 1) * hidden)
    vocabulary = values.get("vocab_size", -1)
    same = {
        "model_type": "llama",
        "hidden_size": dim,
        "num_hidden_layers": values["n_layers"],
        "num_attention_heads": values["n_heads"],
        "num_key_value_heads": values.get("n_kv_heads") or values["n_heads"],
        "intermediate_size": multiple * ceil(hidden / multiple),
        "vocab_size": vocabulary if is_count(vocabulary) else 32000,
    }
    return f"Meta's Llama (params.json). Nearest: {json.dumps(same)}."


def family_of(architectures: Any) -> str | None:
    """Return the model_type of the class that `architectures` names, if transformers has it."""
    import transformers

    name = architectures[0] if isinstance(architectures, list) and architectures else None
    kind = getattr(transformers, name, None) if isinstance(name, str) else None
    return getattr(getattr(kind, "config_class", None), "model_type", None)
