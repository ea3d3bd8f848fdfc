"""`at_size`: a model at another width or depth.

A function is called with its argument of that name; it returns the module, or a configuration. A configuration grows
by its fields of `GROWS`, in proportion: a head keeps its size, so that the number of heads grows with the width; lists
by layer continue in their own period. Vocabulary, experts, positions and images stay. Any other name is one field of
the configuration, and nothing else changes. Who needs other fields writes the function.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from math import gcd
from typing import Any

import torch
from torch import nn

from limitformer.base.errors import InputError, nearest, printable, require, require_count
from limitformer.base.foreign import one_line
from limitformer.models import Transformer
from limitformer.scaling.exponents import LEAST_SIZES
from limitformer.subjects.configurations import check_sizes, is_config
from limitformer.subjects.size import size_of
from limitformer.subjects.subject import (
    ANY,
    Subject,
    arguments_of,
    called_with,
    model_of,
    name_of,
    refuse_existing,
    resolve,
)

WIDTH, DEPTH = "width", "depth"
BATCH = "batch"  # a number of sequences, at which the model stays
SIZES = {  # the fields of a size itself, the usual ones first
    WIDTH: ("hidden_size", "n_embd", "d_model", "dim", "n_embed", "embed_dim", "width", "emb_dim", "embedding_size"),
    DEPTH: (
        *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "num_encoder_layers"),
        *("depth", "layers", "num_blocks"),
    ),
}
GROWS = {  # all fields that grow
    WIDTH: {
        *SIZES[WIDTH],
        *("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"),
        *("moe_shared_expert_intermediate_size", "intermediate_size_mlp", "ffn_hidden_size", "expert_ffn_hidden_size"),
        *("encoder_ffn_dim", "decoder_ffn_dim", "ffn_dim", "d_ff", "d_inner", "n_inner", "hidden_dim", "mlp_dim"),
        *("q_lora_rank", "kv_lora_rank", "o_lora_rank", "laurel_rank", "mamba_dt_rank", "mamba_d_ssm", "lru_width"),
        *("word_embed_proj_dim", "project_dim", "projection_dim", "true_hidden_size", "hidden_size_per_layer_input"),
        *("num_attention_heads", "num_key_value_heads", "num_heads", "n_head", "n_heads", "attention_heads"),
        *("encoder_attention_heads", "decoder_attention_heads", "num_kv_heads", "kv_n_heads", "index_n_heads"),
        *("swa_num_attention_heads", "swa_num_key_value_heads", "linear_num_key_heads", "linear_num_value_heads"),
        *("mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "num_attention_heads_per_layer"),
        *("cross_attention_hidden_size", "encoder_hidden_size", "attention_hidden_size", "linear_num_heads"),
        *("num_encoder_attention_heads", "num_decoder_attention_heads", "num_sliding_attention_heads"),
        *("embedding_dim", "input_embedding_size", "output_embedding_size", "dense_intermediate_size"),
        *("dff", "dim_ff", "feed_forward_size", "moe_hidden_size", "shared_experts_intermediate_size"),
        *("share_expert_dim", "intra_bottleneck_size", "time_step_rank", "adapter_rank"),
        *("encoder_num_attention_heads", "decoder_num_attention_heads", "encoder_num_key_value_heads"),
        *("decoder_num_key_value_heads", "num_key_value_attention_heads", "num_global_key_value_heads"),
    },
    DEPTH: {
        *SIZES[DEPTH],
        *("decoder_layers", "num_decoder_layers", "num_sparse_encoder_layers", "num_sparse_decoder_layers"),
    },
}
LISTS_BY_LAYER = (  # lists of numbers with an entry for each layer; lists of words need no name
    *("intermediate_size", "activation_sparsity_pattern", "no_rope_layers", "moe_layer_freq", "layer_rope_theta"),
    "num_attention_heads_per_layer",
)
LISTS_OF_LAYERS = (
    *("moe_layers", "full_attn_idxs", "attn_layer_indices", "hybrid_layer_ids", "kv_source_layers"),
    "cross_attention_layers",
)
SHARES_LAYERS = ("albert", "hrm_text", "perceiver")  # types whose layers share their parameters

# Parts of a composite configuration that read or write text. If there is one, the others keep their size.
TEXT_PARTS = ("text_config", "text_encoder", "encoder", "decoder", "generator", "question_encoder", "thinker_config")
IS_SIZE = re.compile("dim|size|width|rank|inner|dff|_ff|latent")
IS_FIXED = re.compile(
    "^num_|headdim|vocab|head_dim|head_size|patch|image|position|state|kernel|window|conv|expand|num_labels"
)
Changes = dict[str, tuple[Any, Any]]
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Sized:
    """A model at a size.

    Attributes:
        model: the model at that size.
        changes: old and new value by the name of a field or argument; a field inside another configuration has both
            names, such as `text_config.hidden_size`.
        stays: names and numbers of fields that stay, though they may be meant to grow (`fields_that_stay`).
    """

    model: Subject
    changes: Changes
    stays: tuple[str, ...] = ()


def sizes_over(over: Any) -> tuple[str, tuple[int, ...]]:
    """Return the name in `over`, such as width, and its ascending sizes.

    Raises:
        InputError: there is not one name, or not two or more different sizes.
    """
    valid = isinstance(over, Mapping) and len(over) == 1 and isinstance(next(iter(over)), str)
    require(valid, f'over must have one name, such as {{"width": [256, 1024]}}; got {over!r:.80}.')
    ((name, values),) = over.items()
    listed = hasattr(values, "__iter__") and not isinstance(values, str | bytes | Mapping)
    require(listed, f"over[{name!r}] must be a list of sizes; got {values!r:.80}.")
    sizes = sorted(require_count(f"each of over[{name!r}]", value) for value in values)
    enough = len(set(sizes)) == len(sizes) >= LEAST_SIZES
    require(enough, f"over[{name!r}] must have two or more different sizes; got {sizes}.")
    return name, tuple(sizes)


def others_in(over: Any) -> tuple[Any, dict[str, tuple[int, ...]]]:
    """Return the first name of `over` with its sizes, and those of the other names, which grow with it.

    Raises:
        InputError: the names have different numbers of sizes.

    >>> others_in({"width": [64, 128], "depth": [2, 4]})
    ({'width': (64, 128)}, {'depth': (2, 4)})
    """
    if not isinstance(over, Mapping) or len(over) < 2:
        return over, {}
    every = {name: sizes_over({name: values})[1] for name, values in over.items()}
    counts = {len(values) for values in every.values()}
    require(len(counts) == 1, f"the names of over must have as many sizes each; got {dict(over)!r:.80}.")
    require(BATCH not in every, "over the batch nothing else can grow. Nearest: one call for each width.")
    (name, sizes), *others = every.items()
    return {name: sizes}, dict(others)


def grown_by(model: Any, sizes: Mapping[str, int]) -> Any:
    """Return a model at several sizes, whose other sizes stay; of a function these arguments."""
    model = model_of(model)
    if sizes and callable(model) and not isinstance(model, nn.Module):
        return partial(model, **sizes)
    for over, size in sizes.items():
        model = at_size(model, over, size).model
    return model


def at_size(model: Any, over: str, size: int) -> Sized:
    """Return a model at another size.

    Args:
        model: a configuration of transformers, its folder, JSON or public name, a function that builds a module, a
            `limitformer.Transformer`, or a module of transformers.
        over: "width" or "depth"; else one field of the configuration, or one argument of the function.
        size: of that.

    Raises:
        InputError: the model has no such size, or is not built in proportion.

    >>> at_size({"model_type": "gpt2"}, "width", 256).changes
    {'n_embd': (768, 256), 'n_head': (12, 4)}
    """
    size = require_count(over, size)
    model = model_of(model)
    if over == BATCH:
        return Sized(resolve(model), {})
    if callable(model) and not isinstance(model, nn.Module):
        return factory_at(model, over, size)
    subject = resolve(model)
    if subject.transformer is not None:
        return transformer_at(subject.transformer, over, size)
    if subject.module is not None and not subject.has_law:
        refuse_existing(subject.name)
    if subject.config is None:
        return factory_at(subject.factory, over, size)
    config, changes = config_at(subject.config, over, size)
    if subject.module is None:
        grown = resolve(config)
    else:
        assert subject.kind is not None
        grown = replace(subject, config=config, factory=partial(subject.kind, config), module=None)
    return Sized(grown, changes, check_growth(subject, grown, over, size, changes))


def present_size(model: Any, over: str) -> int | None:
    """Return the present size of a model; None for an argument of a function without a default."""
    model = model_of(model)
    if isinstance(model, Subject):
        model = model.transformer or model.config or model.factory
    model = getattr(model, "config", None) if isinstance(model, nn.Module) else model
    if isinstance(model, Transformer):
        return size_of_transformer(model, over)
    if is_config(model):
        return main_field(model, over)[2]
    default = arguments_of(model).get(over)
    return default if isinstance(default, int) and not isinstance(default, bool) else None


def size_of_transformer(model: Transformer, over: str) -> int:
    names = (WIDTH, DEPTH)
    require(over in names, f"a Transformer has no size {over!r}; it has width and depth.{nearest(over, names)}")
    return model.width if over == WIDTH else model.depth


def transformer_at(model: Transformer, over: str, size: int) -> Sized:
    present = size_of_transformer(model, over)
    if over == DEPTH:
        return Sized(resolve(replace(model, depth=size)), {DEPTH: (present, size)})
    changes: Changes = {WIDTH: (model.width, size)}
    values: dict[str, int | None] = {
        "attention.heads": getattr(model.attention, "heads", None),
        "feedforward.hidden": getattr(model.feedforward, "hidden", None),
    }
    grown = {name: value for name, value in values.items() if value is not None}
    require_whole(size, model.width, grown, "Transformer", over)
    parts: dict[str, Any] = {}
    for name, value in grown.items():
        part, field = name.split(".")
        changes[name] = (value, value * size // model.width)
        parts[part] = replace(getattr(model, part), **{field: changes[name][1]})
    return Sized(resolve(replace(model, width=size, **parts)), changes)


def factory_at(factory: Callable[..., Any], over: str, size: int) -> Sized:
    known = arguments_of(factory)
    name = name_of(factory)
    if over not in known and ANY not in known:
        code = f"def build({over}): …"
        hint = f" Nearest: a function of the size, such as {code}, with this name." if over.isidentifier() else ""
        has = f"its arguments are {', '.join(known)}" if known else "it has no arguments"
        raise InputError(f"{printable(name)} has no argument {over!r}; {has}.{nearest(over, known) or hint}")
    at = called_with(factory, {over: size})
    with one_line(f"{printable(name)} cannot be called with {over} {size}"), torch.device("meta"):
        result = at()
    return Sized(resolve(result if is_config(result) else at), {over: (known.get(over), size)})


def config_at(config: Any, over: str, size: int) -> tuple[Any, Changes]:
    """Return a configuration at another size, and what was changed."""
    with one_line(f"{config.model_type} cannot have {over} {size}"):
        _, field, present = main_field(config, over)
        new, changes = deepcopy(config), dict[str, tuple[Any, Any]]()
        for prefix, part, own in changed_fields(config, over, size, field, present):
            before = vars(part)
            changes |= {f"{prefix}{name}": (before[name], value) for name, value in own.items()}
            target = new
            for name in prefix.split(".")[:-1]:
                target = getattr(target, name)
            for name, value in own.items():
                setattr(target, name, value)
        check_sizes(new.to_dict(), config.model_type)
        new.validate()
    return new, {name: pair for name, pair in changes.items() if pair[0] != pair[1]}


def changed_fields(
    config: Any, over: str, size: int, field: str, present: int
) -> list[tuple[str, Any, dict[str, Any]]]:
    """Return each part of a configuration with its prefix and the new values of its fields."""
    if over not in (WIDTH, DEPTH):
        part = main_field(config, over)[0]
        return [(prefix, each, {field: size}) for prefix, each in parts_that_grow(config) if each is part]
    parts = list(parts_that_grow(config))
    values = {f"{prefix}{name}": v for prefix, part in parts for name, v in growing_fields(part, over).items()}
    require_whole(size, present, values, config.model_type, over)
    result = []
    for prefix, part in parts:
        own = {name: scaled(value, size, present) for name, value in growing_fields(part, over).items()}
        own |= lists_by_layer(part, size, present) if over == DEPTH else {}
        result.append((prefix, part, own))
    return [*result, *projections(config, parts, size, present)] if over == WIDTH else result


def projections(config: Any, parts: Sequence[Any], size: int, present: int) -> Iterator[tuple[str, Any, Any]]:
    """Yield the parts for images whose output has the width of the text, with their new field."""
    for name in config.sub_configs or ():
        other = getattr(config, name, None)
        if all(other is not part for _, part in parts) and getattr(other, "out_hidden_size", None) == present:
            yield f"{name}.", other, {"out_hidden_size": size}


def main_field(config: Any, over: str) -> tuple[Any, str, int]:
    """Return the part of a configuration with the size `over`, its field, and its value."""
    parts = [part for _, part in parts_that_grow(config)]
    if over not in (WIDTH, DEPTH):
        for part in parts:
            field = type(part).attribute_map.get(over, over)
            value = vars(part).get(field)
            if isinstance(value, int) and not isinstance(value, bool):
                return part, field, value
        every = [(name, value) for part in parts for name, value in vars(part).items()]
        known = [name for name, value in every if isinstance(value, int) and not isinstance(value, bool)]
        close = nearest(over, [WIDTH, DEPTH, *known]) or f" Nearest: {WIDTH} or {DEPTH}."
        raise InputError(f"{config.model_type} has no size {over!r}.{close}")
    names = SIZES[over]
    for part in [*parts[1:], parts[0]] if len(parts) > 1 else parts:  # the parts that read text first
        fields = [type(part).attribute_map.get(name, name) for name in names]
        for field in fields:
            value = vars(part).get(field)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return part, field, value
    raise InputError(
        f"{config.model_type} has no one field for its {over} ({', '.join(names[:3])} …). "
        f"Nearest: a function of the {over} that returns the module or the configuration."
    )


def parts_that_grow(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield a configuration and those inside it that grow with it, with the prefixes of their fields.

    A configuration with a text part is that of a language model; its other parts (images, sound) keep their sizes.
    """
    yield prefix, config
    inside = [name for name in config.sub_configs or () if is_config(getattr(config, name, None))]
    text = [name for name in inside if name in TEXT_PARTS]
    for name in text or inside:
        yield from parts_that_grow(getattr(config, name), f"{prefix}{name}.")


def growing_fields(config: Any, over: str) -> dict[str, Any]:
    """Return the fields of one configuration that grow: positive whole numbers, and lists of them."""
    return {name: value for name, value in vars(config).items() if name in GROWS[over] and numbers_of(value)}


def numbers_of(value: Any) -> list[int]:
    """Return the positive whole numbers in a number or a list of them; nothing of anything else."""
    listed = list(value) if isinstance(value, list | tuple) else [value]
    valid = all(isinstance(each, int) and not isinstance(each, bool) and each > 0 for each in listed)
    return listed if valid else []


def scaled(value: Any, size: int, present: int) -> Any:
    numbers = [each * size // present for each in numbers_of(value)]
    return type(value)(numbers) if isinstance(value, list | tuple) else numbers[0]


def require_whole(size: int, present: int, values: Mapping[str, Any], name: str, over: str) -> None:
    """Raise `InputError` unless every value times size/present is a whole number; the error has the nearest sizes."""
    unit, first = 1, ""
    for field, value in values.items():
        for number in numbers_of(value):
            step = present // gcd(present, number)
            if size % step and not first:
                first = f"{field} would be {Fraction(number * size, present)}"
            unit = unit * step // gcd(unit, step)
    below, above = size // unit * unit, -(-size // unit) * unit
    close = " or ".join(str(each) for each in (below, above) if each > 0)
    require(not first, f"{name} at {over} {size}: {first}, in proportion to {over} {present}. Nearest: {close}.")


def lists_by_layer(config: Any, size: int, present: int) -> dict[str, Any]:
    """Return the lists with an entry for each layer, and those of numbers of layers, at another depth."""
    depths = {each for value in growing_fields(config, DEPTH).values() for each in numbers_of(value)}
    lists = {name: value for name, value in vars(config).items() if isinstance(value, list | tuple)}
    words = {name for name, value in lists.items() if value and all(isinstance(each, str) for each in value)}
    names = [name for name in lists if name in words | {*LISTS_BY_LAYER} and name != "architectures"]
    grown = {
        name: continued(list(lists[name]), len(lists[name]) * size // present)
        for name in names
        if len(lists[name]) in depths
    }
    most = max(depths, default=0)
    for name in lists.keys() & {*LISTS_OF_LAYERS}:
        marks = continued([layer in lists[name] for layer in range(most)], most * size // present)
        grown[name] = [layer for layer, mark in enumerate(marks) if mark]
    return {name: type(lists[name])(value) for name, value in grown.items()}


def continued(values: list[Any], length: int) -> list[Any]:
    """Return a list at another length: after its first entries it repeats its shortest period."""
    if length <= len(values):
        return values[:length]
    pairs = ((start, end - start) for end in range(1, len(values) + 1) for start in range(end))
    start, period = next((start, period) for start, period in pairs if repeats(values, start, period))
    return [values[k] if k < len(values) else values[start + (k - start) % period] for k in range(length)]


def repeats(values: list[Any], start: int, period: int) -> bool:
    return all(values[k] == values[k - period] for k in range(start + period, len(values)))


def shapes_of(subject: Subject) -> Shapes:
    """Return the shape of each parameter, by all its names, without memory for them."""
    return size_of(subject.factory, subject.name).names


def check_growth(before: Subject, after: Subject, over: str, size: int, changes: Changes) -> tuple[str, ...]:
    """Raise `InputError` unless parameters grow as they should; return the fields that stay and perhaps should not.

    Over width each dimension stays, grows in proportion, or less where a part of a joined matrix stays. Over depth
    there are more parameters, unless layers share them.
    """
    if over not in (WIDTH, DEPTH):
        return ()
    old, new = shapes_of(before), shapes_of(after)
    name, present = before.name, present_size(before, over)
    own = f"Nearest: a function of the {over} that returns the configuration."
    assert present is not None
    if over == DEPTH:
        grows = len(new) != len(old) or size == present or before.config.model_type in SHARES_LAYERS
        require(grows, f"{name} has the same layers at depth {size}. {own}")
        return ()
    ratio = Fraction(size, present)
    for key, shape in old.items():
        require(key in new and len(new[key]) == len(shape), f"{name} has no parameter {key} at width {size}. {own}")
        pairs = zip(shape, new[key], strict=True)
        fits = all(0 <= (b - a) * (ratio - 1) <= a * (ratio - 1) ** 2 for a, b in pairs)
        require(
            fits,
            f"{name} does not grow in proportion: {key} is {shape} at {present}, and {new[key]} at width {size}. {own}",
        )
    require(size == present or old != new, f"{name} has the same parameters at width {size}.")
    return fields_that_stay(before.config, changes, old, new)


def fields_that_stay(config: Any, changes: Changes, old: Shapes, new: Shapes) -> tuple[str, ...]:
    """Return numbers of heads that stay, and sizes that a side of a matrix keeps while its other side grows."""
    if old == new:
        return ()
    unchanged = {
        a for key, shape in old.items() if shape != new[key] for a, b in zip(shape, new[key], strict=True) if a == b
    }
    every = [(f"{prefix}{name}", v) for prefix, part in parts_that_grow(config) for name, v in vars(part).items()]
    return tuple(
        f"{name} {value}"
        for name, value in every
        if name not in changes
        and type(value) is int
        and value > 1
        and ("heads" in name or (value in unchanged and IS_SIZE.search(name) and not IS_FIXED.search(name)))
    )
