"""The role of each parameter of a module: query, feed-forward out, norm gain, …; and the sizes that its law depends on.

Structure comes first: classes of modules (norms, embeddings), shapes (a head maps the stream to the vocabulary; of w1,
w2 and w3 the one that ends at the stream's width writes to it) and lists of blocks (depth and index). The names of
projections are those of many libraries. A weight whose role is not clear has none, and a reason.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from limitformer.initialisation.recipes.law import Weight

WEIGHT = ("weight", "kernel", "w")
GAIN, SHIFT = ("weight", "scale", "gamma", "g", "gain", "w"), ("bias", "beta", "b", "shift")
NORM = re.compile(r"norm", re.IGNORECASE)
NAMED_NORM = re.compile(r"norm|^ln|layer_?scale$|^pre_ln$", re.IGNORECASE)
POSITION = re.compile(
    r"(^|[._])(wpe|pos|position|positions|positional|pos_?emb\w*|position_?emb\w*)([._]|$)", re.IGNORECASE
)
TYPE = re.compile(r"token_?type|segment|type_emb", re.IGNORECASE)
RELATIVE = re.compile(r"relative_attention_bias|rel_pos|relative_pos|rel_attn_bias|relpos", re.IGNORECASE)
TOKENS = re.compile(
    r"^(wte|embed_tokens|tok_embeddings|word_embeddings?|tok_emb|tok_embed|token_emb\w*|token_embed\w*|tokens_embed|shared|"
    r"embed_in|embeddings?|emb|embed|embedder|encoder|tok|tokens|word_embed)$",
    re.IGNORECASE,
)
ATTENTION = re.compile(r"attn|attention|(^|_)att(_|$)|^mha$|^sa$|^self$", re.IGNORECASE)
FORWARD = re.compile(r"mlp|ffn|^ff(\d|_|$)|feed_?forward|densereludense|intermediate|expert|moe", re.IGNORECASE)

OTHER = re.compile(
    r"router|projector|merger|norm|adapter|compress|indexer|pool|quantiz|codebook|sampl|(^|\.)gate\.(?!weight|bias)",
    re.IGNORECASE,
)
HEAD = (
    "lm_head head output output_layer embed_out logits logits_dense to_logits unembed unembedding output_projection "
    "decoder ff_out proj_out final_layer word_predictions"
)
PROJECTIONS = {  # roles, joined by +, and the names of a matrix
    "query": "q q_proj q_lin query wq to_q c_q linear_q query_proj queries q_linear query_projection",
    "key": "k k_proj k_lin key wk to_k c_k linear_k key_proj keys k_linear key_projection",
    "value": "v v_proj v_lin value wv to_v c_v linear_v value_proj values v_linear value_projection",
    "query+key+value": "qkv qkv_proj c_attn query_key_value wqkv att_proj in_proj to_qkv linear_qkv w_pack qkv_linear "
    "c_qkv qkvw attn_qkv",
    "key+value": "kv kv_proj to_kv key_value linear_kv c_kv wkv",
    "attention output": "o o_proj out_proj out_lin wo c_proj dense proj output to_out linear_proj attn_out output_proj "
    "out projection projection_layer",
}
FORWARD_NAMES = {
    "feed-forward out": "down_proj w2 wo fc2 c_proj fc_out dense_4h_to_h lin2 linear2 linear_2 linear_fc2 ff_out proj "
    "out_proj down output_linear output_dense net_2 w_2 ff2",
    "gate": "gate_proj wi_0 linear_gate gate",
    "feed-forward in": "up_proj w3 wi wi_1 fc1 c_fc fc_in dense_h_to_4h lin1 linear1 linear_1 linear_fc1 w1 fc up w_1 "
    "input_linear intermediate_dense ff_proj ff1",
    "gate+feed-forward in": "gate_up_proj w12",
}
UNAMBIGUOUS = (  # names of feed-forward layers that blocks hold themselves
    "fc1 fc2 lin1 lin2 linear1 linear2 ff_proj ff_out c_fc fc_in fc_out gate_proj up_proj down_proj dense_h_to_4h "
    "dense_4h_to_h gate_up_proj w1 w2 w3 linear_fc1 linear_fc2"
)
OF_ATTENTION, OF_FORWARD = (
    {name: tuple(roles.split("+")) for roles, names in table.items() for name in names.split()}
    for table in (PROJECTIONS, FORWARD_NAMES)
)
READS = {"query", "key", "value", "feed-forward in", "gate", "router", "head"}  # from the stream
WRITES = {"attention output", "feed-forward out"}  # to the stream
NUMBERED = {"w1", "w2", "w3"}
HEADS = ("num_heads", "n_heads", "num_attention_heads", "n_head", "heads", "nhead", "num_query_heads")
HEAD_DIMS = ("head_dim", "attention_head_size", "key_value_proj_dim", "head_size", "d_kv", "d_head", "dim_head")
DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")


def places_of(
    module: nn.Module, shapes: Mapping[str, tuple[int, ...]], names: Mapping[str, str], config: Any
) -> dict[str, Weight]:
    """Return the place of each parameter.

    Args:
        module: the module, with or without numbers.
        shapes: of its parameters, by name.
        names: {role: pattern} of a recipe, which come first.
        config: of transformers, or None.
    """
    owners = {name: owner_of(module, name) for name in shapes}
    places = {name: Weight(name, shape, stack=stack_of(name)[0]) for name, shape in shapes.items()}
    for name, place in places.items():
        own = next((role for role, pattern in names.items() if re.search(pattern, name)), None)
        place.roles = (own,) if own else name_roles(place, owners[name], shapes)
        if not place.roles:
            place.reason = "its role is not known"
    rows = [
        place.shape
        for name, place in places.items()
        if place.roles == ("embedding",) and is_embedding(owners[name]) and len(place.shape) == 2
    ]
    vocabulary = max((shape[0] for shape in rows), default=None)
    widths = {place.stack: None for place in places.values()} | widths_of(places, rows)
    for place in places.values():
        place.sizes = {"vocabulary": vocabulary, "width": widths[place.stack] or (rows[0][1] if rows else None)}
    for name, place in places.items():
        width, outside = place.sizes["width"], place.stack == "" and place.roles in ((), ("bias",))
        maps = place.shape in ((vocabulary, width), (width, vocabulary)) and not is_embedding(owners[name])
        if outside and maps and words_of(name)[1].lower() in HEAD.split():
            place.roles, place.reason = ("head",), ""
        by_shape(place, owners[name], set(names), shapes)
    add_depths(places, module, config)
    add_sizes(places, module, owners, config)
    return places


def owner_of(module: nn.Module, name: str) -> nn.Module:
    return module.get_submodule(name.rpartition(".")[0])


def stack_of(name: str) -> tuple[str, int | None]:
    """Return the outermost list with a number in a name, and the number."""
    parts = name.split(".")
    for place, part in enumerate(parts):
        if part.isdecimal():
            return ".".join(parts[:place]), int(part)
    return "", None


def is_embedding(owner: nn.Module) -> bool:
    return isinstance(owner, nn.Embedding) or "Embedding" in type(owner).__name__


def words_of(name: str) -> tuple[list[str], str, str]:
    """Return the parts of a name without numbers: those of its surroundings, its module and its leaf."""
    parts = [part for part in name.split(".") if not part.isdecimal()]
    leaf = parts[-1]
    if leaf in WEIGHT and len(parts) > 1:
        return parts[:-2], parts[-2], leaf
    return parts[:-1], re.sub(r"_weight$|_bank$", "", leaf), leaf


def name_roles(place: Weight, owner: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> tuple[str, ...]:
    """Return the roles that classes and names give a weight; none if they are not clear."""
    around, word, leaf = words_of(place.name)
    own = place.name.split(".")[-2] if "." in place.name else ""
    if NORM.search(type(owner).__name__) or (len(place.shape) <= 1 and NAMED_NORM.search(own) and leaf in GAIN + SHIFT):
        return ("norm gain",) if leaf in GAIN else ("norm bias",) if leaf in SHIFT else ()
    raw = leaf not in WEIGHT  # a parameter of its own, not the weight of a layer
    if RELATIVE.search(leaf if raw else own) and (raw or is_embedding(owner)):
        return ("relative bias",)
    if leaf == "bias" or re.search(r"_proj_bias$|^in_proj_bias$", leaf):
        return ("bias",) if len(place.shape) == 1 else ()
    if is_embedding(owner) or (place.stack == "" and raw and POSITION.search(leaf) and len(place.shape) >= 2):
        if POSITION.search(place.name):
            return ("position embedding",)
        if TYPE.search(place.name):
            return ("type embedding",)
        tokens = len(place.shape) == 2 and place.stack == "" and TOKENS.match(word) and not OTHER.search(place.name)
        return ("embedding",) if tokens else ()
    own_name = not raw or leaf.endswith(("proj", "_weight", "_bank")) or leaf in NUMBERED
    if len(place.shape) not in (2, 3) or place.stack == "" or not own_name:
        return ()
    return projection_roles(place, around, word, shapes)


def projection_roles(
    place: Weight, around: list[str], word: str, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[str, ...]:
    """Return the roles of a matrix in a block."""
    lower = word.lower()
    if lower == "linear" and around:  # a wrapper that is named like the projection
        around, lower = around[:-1], around[-1].lower()
    attention, forward = (
        max((place for place, each in enumerate(around) if pattern.search(each)), default=-1)
        for pattern in (ATTENTION, FORWARD)
    )
    if lower in ("router", "gate", "wg", "classifier", "layer") and is_router(place, lower, shapes):
        return ("router",)
    inside = place.name.removeprefix(f"{place.stack}.")
    if OTHER.search(inside):
        return ()
    if lower == "dense":  # BERT's names: attention.output.dense, intermediate.dense, output.dense
        inner = around[-1].lower() if around else ""
        if inner == "output":
            return ("attention output",) if attention >= 0 else ("feed-forward out",)
        if inner == "intermediate":
            return ("feed-forward in",)
    if attention > forward and lower in OF_ATTENTION:
        return OF_ATTENTION[lower]
    if forward > attention and lower in OF_FORWARD:
        return OF_FORWARD[lower]
    if attention < 0 and forward < 0 and inside.count(".") <= 3:  # the block holds it itself, or in a mixer
        if lower in UNAMBIGUOUS.split():
            return OF_FORWARD[lower]
        if lower in ("attn_out", "att_proj", "q_proj", "k_proj", "v_proj", "qkv_proj"):
            return OF_ATTENTION[lower]
    return ()


def is_router(place: Weight, word: str, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Return whether a matrix chooses experts: it is next to them, or in a router."""
    parts = place.name.split(".")
    if any("router" in part.lower() for part in parts[:-1]):
        return True
    parent = ".".join(parts[:-2])
    return word in ("gate", "wg") and any(other.startswith(f"{parent}.experts.") for other in shapes)


def widths_of(places: Mapping[str, Weight], embeddings: Sequence[tuple[int, ...]]) -> dict[str, int]:
    """Return the width of each stack's stream: the length of its norms that is the embedding's, else the usual one."""
    lengths: dict[str, Counter[int]] = {}
    for place in places.values():
        if place.roles == ("norm gain",) and len(place.shape) == 1:
            lengths.setdefault(place.stack, Counter())[place.shape[0]] += 1
    own = {shape[1] for shape in embeddings}
    result = {}
    for stack, counter in lengths.items():
        shared = [length for length in counter if length in own]
        most = max(counter.values())
        result[stack] = shared[0] if shared else max(length for length, times in counter.items() if times == most)
    return result


def fans(place: Weight, owner: nn.Module) -> tuple[int, int]:
    """Return the numbers of inputs and outputs of a weight."""
    shape = place.shape
    if len(shape) < 2:
        return shape[0] if shape else 1, shape[0] if shape else 1
    if type(owner).__name__ == "Conv1D":
        return shape[0], shape[1]
    if isinstance(owner, nn.Linear) or (len(shape) == 2 and not place.roles):
        return shape[1], shape[0]
    if isinstance(owner, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        field_size = math.prod(shape[2:])
        return shape[1] * field_size, shape[0] * field_size
    pair, width = shape[-2:], place.sizes.get("width")
    reads = bool(set(place.roles) & READS)
    if pair[1] != pair[0] and width in pair and (reads or set(place.roles) & WRITES):
        other = pair[0] if pair[1] == width else pair[1]
        return (int(width or 0), other) if reads else (other, int(width or 0))
    return pair[1], pair[0]


def by_shape(place: Weight, owner: nn.Module, own: set[str], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Correct roles by shapes, or remove those that the shape contradicts."""
    width, roles = place.sizes["width"], set(place.roles)
    if not roles or roles <= own or len(place.shape) < 2 or place.stack == "" or width is None:
        return
    into, out = fans(place, owner)
    _, word, _ = words_of(place.name)
    if word.lower() in NUMBERED and roles <= {"feed-forward in", "feed-forward out", "gate"}:
        place.roles = numbered_roles(place, word.lower(), into, out, int(width), shapes)
    elif place.roles == ("feed-forward in",) and gated(place, into, out, shapes):
        place.roles = ("gate", "feed-forward in")
    reads = into == width or roles <= {"key", "value"}  # which may read another stream
    fits = not place.roles or (
        out == width if set(place.roles) <= WRITES else reads if set(place.roles) <= READS else True
    )
    if not fits or not place.roles:
        place.roles, place.reason = (), f"{into} inputs and {out} outputs do not fit its name at width {width:g}"


def numbered_roles(
    place: Weight, word: str, into: int, out: int, width: int, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[str, ...]:
    """Return the role of w1, w2 or w3: the one that ends at the stream's width writes to it."""
    if into == out:
        writes = word == "w2"
    elif width in (into, out):
        writes = out == width
    else:
        return ()
    if writes:
        return ("feed-forward out",)
    third = re.sub(r"w[12](?=\.[^.]*$|[^.]*$)", "w3", place.name)
    return ("gate",) if word == "w1" and third in shapes else ("feed-forward in",)


def gated(place: Weight, into: int, out: int, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Return whether a matrix holds the gate too: it has twice as many outputs as the next one has inputs."""
    parent = place.name.rpartition(".")[0].rpartition(".")[0]
    writers = [
        shape
        for name, shape in shapes.items()
        if name.rpartition(".")[0].rpartition(".")[0] == parent
        and OF_FORWARD.get(words_of(name)[1].lower()) == ("feed-forward out",)
    ]
    return out % 2 == 0 and any(sorted(shape[-2:]) == sorted((out // 2, into)) for shape in writers)


def add_depths(places: Mapping[str, Weight], module: nn.Module, config: Any) -> None:
    """Add depth and index of the block; the depth of nested or repeated blocks is not known."""
    numbers: dict[str, set[int]] = {}
    for place in places.values():
        stack, layer = stack_of(place.name)
        if layer is not None:
            numbers.setdefault(stack, set()).add(layer)
    nested = {stack for stack in numbers if has_nested_blocks(stack, places)}
    attends = {place.stack for place in places.values() if "query" in place.roles and place.stack}
    declared = declared_depth(config)
    for place in places.values():
        stack, layer = stack_of(place.name)
        depth = len(numbers.get(stack, ())) or None
        if stack in nested or (declared is not None and attends == {stack} and depth != declared):
            depth = None
        place.sizes |= {"depth": depth, "layer": None if depth is None else layer}
    if len(attends) == 1:  # weights outside blocks belong to the only stack
        only = next(iter(attends))
        shared = next(place.sizes["depth"] for place in places.values() if place.stack == only)
        for place in places.values():
            if place.stack == "":
                place.sizes["depth"] = shared


def declared_depth(config: Any) -> int | None:
    """Return the depth in a configuration."""
    if config is None:
        return None
    try:
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
    except ValueError:  # several texts
        return None
    return next((value for name in DEPTHS if (value := whole_number(text, name)) is not None), None)


def has_nested_blocks(stack: str, places: Mapping[str, Weight]) -> bool:
    """Return whether an entry of the list holds several blocks with attention."""
    seen: dict[tuple[str, str], set[str]] = {}
    for place in places.values():
        if place.stack != stack or "query" not in place.roles:
            continue
        rest = place.name.removeprefix(f"{stack}.").split(".")
        for index, part in enumerate(rest[1:], 1):
            if part.isdecimal():
                seen.setdefault((".".join(rest[:index]), ".".join(rest[index + 1 :])), set()).add(part)
                break
    return any(len(each) > 1 for each in seen.values())


def add_sizes(places: Mapping[str, Weight], module: nn.Module, owners: Mapping[str, nn.Module], config: Any) -> None:
    """Add fans, numbers of heads and their dimensions to `places`."""
    for name, place in places.items():
        into, out = fans(place, owners[name])
        rows, columns = (1, 1, *place.shape)[-2:]
        heads = attribute(module, name, HEADS, config)
        size = attribute(module, name, HEAD_DIMS, config)
        width = place.sizes["width"]
        if size is None and heads and width and width % heads == 0:
            size = width / heads
        place.sizes |= {"fan_in": into, "fan_out": out, "rows": rows, "columns": columns, "heads": heads}
        place.sizes["head_dim"] = size


def attribute(module: nn.Module, name: str, names: tuple[str, ...], config: Any) -> float | None:
    """Return a whole number that the innermost module around a weight has under one of these names, or its config."""
    parts = name.split(".")[:-1]
    around = (module.get_submodule(".".join(parts[:length])) for length in range(len(parts), 0, -1))
    every = (whole_number(owner, each) for owner in (*around, config) for each in names)
    return next((value for value in every if value is not None), None)


def whole_number(owner: Any, name: str) -> int | None:
    """Return an attribute that is a positive whole number; a configuration raises if it differs between layers."""
    try:
        value = getattr(owner, name, None)
    except Exception:  # noqa: BLE001  a user's module or configuration may raise anything
        return None
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
