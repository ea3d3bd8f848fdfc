"""Small configurations of every model type of the installed transformers, made from the default configuration of each.

Rules by the names of fields make numbers smaller; `overrides` has the fields of types that need more than rules.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig

from benchmarks.zoo.overrides import DEFAULT, OVERRIDES

VOCABULARY = 128
DEPTHS = (2, 3, 4, 6, 8)  # a type has the first at which it has every kind of its layers
TASKS = {  # in the order in which limitformer chooses
    "seq2seq": ("AutoModelForSeq2SeqLM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING"),
    "masked": ("AutoModelForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING"),
    "causal": ("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING"),
    "image": ("AutoModelForImageClassification", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING"),
    "hidden": ("AutoModel", "MODEL_MAPPING"),
    "classification": ("AutoModelForSequenceClassification", "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING"),
}

# Numbers: the pattern of a name, the pattern of its exceptions, and the largest value; the first rule that makes the
# number smaller is used.
NEVER = r"(?!)"
MOST = [
    (r"vocab_size", NEVER, VOCABULARY),
    (
        r"^(num_hidden_layers|n_layers?|num_layers|depth|num_blocks|num_.*layers|n_.*layers|.*_layers|.*_num_layers"
        r"|.*_depth|layers|num_hidden_groups|num_.*_blocks|conv_depth)$",
        r"num_encoder_blocks|max_window_layers|kv_shared|nextn|predict|first_|start|num_dense|_freq|_every|step|which"
        r"|fusion|skip|feature_layer|no_rope|num_layers_per|adapter_|intermediate_layers|selected|output_hidden"
        r"|dilation|num_mtp",
        DEPTHS[0],  # replaced by the depth
    ),
    (r"^(n_heads?|nhead|.*attention_heads|(.*_)?num_heads|.*_heads)$", r"mamba|linear_|ssm|^n_kv|^num_kv", 4),
    (r"linear_num_key", NEVER, 2),
    (r"linear_num_value", NEVER, 4),
    (r"^mamba_(n|num)_heads$", NEVER, 8),
    (
        r"^(num_experts|n_routed_experts|num_local_experts|moe_num_experts|num_routed_experts|num_moe_experts"
        r"|n_experts|num_expert|moe_n_routed_experts|num_real_experts)$",
        NEVER,
        4,
    ),
    (
        r"^(num_experts_per_tok|num_experts_per_token|moe_k|moe_topk|top_k_experts|moe_top_k|num_selected_experts|top_k"
        r"|moe_num_experts_per_tok|num_experts_per_topk)$",
        NEVER,
        2,
    ),
    (r"^(n_group|topk_groups?|num_expert_group|n_groups_routed)$", NEVER, 1),
    (r"^(first_k_dense_replace|num_dense_layers|moe_layer_start_index|moe_layer_offset)$", NEVER, 1),
    (
        r"^(.*head_dim|d_kv|.*d_head|(.*_)?head_size|dim_head|kv_channels|.*_kv_dim)$|(_rank|lora_dim)$",
        NEVER,
        16,
    ),
    (r"sliding_window", "pattern", 8),
    (r"^(image_size|img_size|input_image_size)$", NEVER, 32),
    (r"^patch_size$", NEVER, 8),
    (
        r"intermediate|(ffn_dim|d_ff|ffn_hidden_size|mlp_dim|n_inner|ffn_embed_dim|ff_dim|ffn_size|inner_dim|_ffn"
        r"|expert_ffn.*|mlp_hidden.*|dim_feedforward|feed_forward.*size|ffn_.*size|feedforward_size|mlp_size"
        r"|hidden_features)$",
        NEVER,
        96,
    ),
    (
        r"^(max_position_embeddings|n_positions|n_ctx|max_seq_len|seq_length|max_sequence_length|max_target_positions"
        r"|max_source_positions)$",
        NEVER,
        512,
    ),
    (
        r"^(dim|hidden_channels|n_state|num_features|d_embed|.*hidden_size.*|.*_dim|.*embedding_size|.*_embd"
        r"|.*projection_size|.*d_model|.*width|.*_channels|.*_size)$",
        r"vocab|image|patch|window|kernel|crop|stride|pool|num_channels|in_channels|out_channels|input_channels"
        r"|output_channels|chunk|batch|block_size|max_|codebook_size|state_size|conv_size|conv_kernel|cache|beam|merge"
        r"|downsample|resolution|page|grid|temporal|sample|shrink|type_|spatial|freq|group|label|num_codebook|bucket"
        r"|sequence|seq_|stack|tubelet|scale|hop|fft|win_|rope|rotary|context|_pad|buffer|num_mel|num_audio"
        r"|audio_channels|size_per_head|topk|top_k|index_|mem_|head_dim",
        64,
    ),
    (r"^codebook_size$", NEVER, 64),
]
RULES = [(re.compile(name), re.compile(exception), most) for name, exception, most in MOST]
DEPTH_RULE = RULES[1]
KV_HEADS = re.compile(r"(kv_heads|key_value_heads|_kv_.*head|num_kv.*head|n_groups_kv.*head|head.*_kv_)")
TOKEN = re.compile(r"(_token_id|_token_index|_token_idx|_token|_id|_token_ids|_ids|_code|_index)$")
BLOCKS_BY_STAGE = re.compile(
    r"^(depth|layers|num_blocks|layer_depths|num_encoder_blocks_list|block_repeats|num_conv_layers|.*depths)$"
)
WIDTHS_BY_STAGE = re.compile(
    r"^(hidden_sizes|embed_dims?|channels|stage_channels|neck_hidden_sizes|encoder_in_channels|dims|stem_channels"
    r"|widths|hidden_dims|embedding_dims|num_features)$"
)
HEADS_BY_STAGE = re.compile(r"^(num_heads|.*attention_heads|.*_heads)$")
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "sep_token_id": 3, "decoder_start_token_id": 3}
SPECIAL |= {"cls_token_id": 3, "mask_token_id": 3}
UNCHANGED = {"transformers_version", "id2label", "label2id", "architectures", "chunk_size_feed_forward", "num_labels"}


def all_types() -> list[str]:
    """Return the model types of transformers that have a class for a task of TASKS."""
    mappings = [getattr(transformers, mapping) for _, mapping in TASKS.values()]
    own = [kind for kind in CONFIG_MAPPING if CONFIG_MAPPING[kind].__module__.startswith("transformers.")]
    return [kind for kind in own if any(CONFIG_MAPPING[kind] in mapping for mapping in mappings)]


def task_of(config: Any) -> tuple[str, str]:
    """Return the task of a configuration and the name of the Auto class that builds its model."""
    for task, (auto, mapping) in TASKS.items():
        if type(config) in getattr(transformers, mapping):
            return ("hidden" if task == "classification" else task), auto
    raise ValueError(f"{config.model_type} has no task")


def small_config(kind: str) -> Any:
    """Return a small configuration of a type."""
    make, own = CONFIG_MAPPING[kind], OVERRIDES.get(kind, {})
    values = merged(small_values(make, {}, depth_of(make, own), SpecialTokens()), own)
    for name in ("layer_types", "mlp_layer_types"):
        if values.get(name):
            values[name] = values[name][: values.get("num_hidden_layers")]
    scale_sections(make, values)
    return make(**merged(values, {k: v for k, v in own.items() if k == "rope_parameters"}))


def depth_of(make: Any, own: Mapping[str, Any]) -> int:
    """Return the first depth at which a configuration has every kind of layer that its default has."""
    kinds = kinds_of_layers(make, {})
    for depth in DEPTHS if len(kinds) > 1 else ():
        if kinds_of_layers(make, merged(small_values(make, {}, depth, SpecialTokens()), own)) >= kinds:
            return depth
    return DEPTHS[0]


def kinds_of_layers(make: Any, values: Mapping[str, Any]) -> set[str]:
    try:
        text = make(**values).get_text_config()
    except Exception:  # a configuration of transformers may raise anything  # noqa: BLE001
        return set()
    return set(map(str, getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or ()))


class SpecialTokens:
    """Special tokens at the end of the small vocabulary, a new one at each call."""

    def __init__(self) -> None:
        self.last = VOCABULARY - 2

    def __call__(self) -> int:
        self.last -= 1
        return self.last


def fields_of(make: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the default values of a configuration's fields, or the given ones."""
    result = dict[str, Any]()
    for field in dataclasses.fields(make):
        factory = field.default_factory
        default = None if field.default is dataclasses.MISSING else field.default
        result[field.name] = default if factory is dataclasses.MISSING else factory()
    return result | dict(given)


def small_values(make: Any, given: Mapping[str, Any], depth: int, token: SpecialTokens) -> dict[str, Any]:
    """Return smaller values for the fields of a configuration class."""
    fields, parts = fields_of(make, given), dict(make.sub_configs_defaults or {})
    result = dict(given)
    for name, value in fields.items():
        if name in parts:
            result[name] = small_part(parts[name], value, depth, token)
        elif name in UNCHANGED:
            continue
        elif is_count(value):
            result[name] = small_number(name, value, fields, depth, token)
        elif isinstance(value, list | tuple) and value and all(map(is_count, value)):
            result[name] = type(value)(small_list(name, list(value)))
    heads = [each for name, each in fields.items() if HEADS_BY_STAGE.match(name) and isinstance(each, list | tuple)]
    if heads and heads[0] and is_count(heads[0][0]) and is_count(fields.get("embed_dim")):
        result["embed_dim"] = heads[0][0] * 8
    for name, small in SPECIAL.items():
        value = fields.get(name)
        if is_count(value) and value >= VOCABULARY:
            result[name] = small
        elif isinstance(value, list | tuple) and any(is_count(each) and each >= VOCABULARY for each in value):
            result[name] = 2
    return {name: value for name, value in result.items() if name in given or value != fields.get(name)}


def is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def small_number(name: str, value: int, fields: Mapping[str, Any], depth: int, token: SpecialTokens) -> int:
    name = name.lower()
    if TOKEN.search(name) and value >= VOCABULARY and "layer" not in name:
        return token()
    if KV_HEADS.search(name):
        heads = [fields.get(each) for each in ("num_attention_heads", "n_heads", "n_head", "num_heads")]
        every = next((each for each in heads if each), fields.get(name.replace("key_value", "attention")))
        return 1 if value == 1 else 4 if value == every else 2
    for rule in RULES:
        pattern, exception, limit = rule
        most = depth if rule is DEPTH_RULE else limit
        if value > most and pattern.search(name) and not exception.search(name):
            return most
    return value


def small_list(name: str, values: list[int]) -> list[int]:
    if name in ("image_size", "img_size", "input_size") and len(values) == 2:
        return [32, 32]
    if name == "patch_size" and len(values) == 2:
        return [min(each, 8) for each in values]
    if BLOCKS_BY_STAGE.match(name):
        return [min(each, 2) for each in values]
    if WIDTHS_BY_STAGE.match(name):
        factor = 1
        while min(values) >= 32 * factor and all(each % (2 * factor) == 0 for each in values):
            factor *= 2
        return [each // factor for each in values]
    return [min(each, VOCABULARY - 1) for each in values] if TOKEN.search(name) else values


def small_part(part: Any, given: Any, depth: int, token: SpecialTokens) -> dict[str, Any] | None:
    """Return smaller values for a configuration inside another."""
    if part.optional and given is None:
        return None
    own = dict(given) if isinstance(given, dict) else {}
    make = part.config_class
    if not issubclass(make, PreTrainedConfig):
        make = CONFIG_MAPPING[own.get("model_type") or part.model_type]
    kind = make.model_type
    own.pop("model_type", None)
    values = small_values(make, dict(part.init_kwargs or {}) | own, depth, token) | OVERRIDES.get(kind, {})
    return values if issubclass(part.config_class, PreTrainedConfig) else values | {"model_type": kind}


def merged(values: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return values replaced by a type's own, also inside dictionaries."""
    result = dict(values)
    for name, value in own.items():
        inside = result.get(name)
        if value is DEFAULT:
            result.pop(name, None)
        else:
            result[name] = merged(inside, value) if isinstance(value, dict) and isinstance(inside, dict) else value
    return result


def scale_sections(make: Any, values: dict[str, Any]) -> None:
    """Scale the sections of rotary positions to the smaller heads, also inside nested configurations."""
    for name, part in (make.sub_configs_defaults or {}).items():
        if isinstance(values.get(name), dict):
            inside = part.config_class
            if not issubclass(inside, PreTrainedConfig):
                inside = CONFIG_MAPPING[values[name].get("model_type") or part.model_type]
            scale_sections(inside, values[name])
    rope = default_rope(make)
    if "mrope_section" not in rope:
        return
    names = {field.name for field in dataclasses.fields(make)}
    head = values.get("qk_rope_head_dim" if "qk_rope_head_dim" in names else "head_dim")
    head = head or values.get("hidden_size", 64) // values.get("num_attention_heads", 4)
    half = int(head * rope.get("partial_rotary_factor", 1.0)) // 2
    old = rope["mrope_section"] or [8, 12, 12]
    sections = [max(1, half * each // sum(old)) for each in old]
    sections[0] += half - sum(sections)
    values["rope_parameters"] = rope | {"mrope_section": sections}


def default_rope(make: Any) -> dict[str, Any]:
    """Return the rotary positions of a class; those whose classes name no sections have them in their code."""
    try:
        rope = getattr(make(), "rope_parameters", None)
    except Exception:  # as above  # noqa: BLE001
        rope = None
    rope = dict(rope or {})
    if make.__name__ in SECTIONS_IN_CODE:
        rope = (rope or {"rope_type": "default", "rope_theta": 10000.0}) | {"mrope_section": rope.get("mrope_section")}
    return rope


SECTIONS_IN_CODE = {
    "Glm4vTextConfig",
    "Glm4vMoeTextConfig",
    "GlmImageTextConfig",
    "GlmOcrTextConfig",
    "Qwen2VLTextConfig",
    "Qwen2_5_VLTextConfig",
    "PaddleOCRTextConfig",
    "Qwen2_5OmniTextConfig",
}


def parts_of(config: Any) -> Iterator[Any]:
    """Yield a configuration and those inside it."""
    yield config
    for name in config.sub_configs or ():
        if isinstance(getattr(config, name, None), PreTrainedConfig):
            yield from parts_of(getattr(config, name))


def number_in(config: Any, names: tuple[str, ...], otherwise: int) -> int:
    """Return the first whole number that a configuration, or one directly inside it, has under one of these names."""
    inside = (getattr(config, name, None) for name in config.sub_configs or ())
    for part in (config, *(each for each in inside if isinstance(each, PreTrainedConfig))):
        for name in names:
            value: Any = getattr(part, name, None)
            value = value[0] if isinstance(value, list | tuple) and value else value
            if is_count(value):
                return value
    return otherwise
