"""A reduced copy of a configuration of transformers: the same code path, with few layers and narrow matrices."""

import re
from collections.abc import Callable
from copy import deepcopy
from fractions import Fraction
from math import gcd, lcm
from typing import Any

import torch

from limitformer.base.errors import InputError, printable, require
from limitformer.base.foreign import one_line
from limitformer.subjects.configurations import SIZES, is_config
from limitformer.subjects.subject import subject_of_config

MOST_PARAMETERS, MOST_TOKENS, MOST_EXPERTS, LEAST_WIDTH, MOST_HALVINGS = 8_000_000, 1024, 4, 64, 16
LAYERS = re.compile(rf"^({'|'.join(SIZES[0])}|layers|(num_)?(en|de)coder_layers)$")
HEADS = re.compile(rf"^({'|'.join(SIZES[2])}|attention_heads|(num_)?(en|de)coder_attention_heads)$")
HEAD_COUNT = re.compile(r"heads(_per_layer)?$|^n_(kv_)?head$|(^|_)(query_groups|n_?groups|d_ssm|lru_width)$")
HIDDEN = re.compile(rf"^({'|'.join(SIZES[1])})$")
WORDS = "hidden|intermediate|inner|ff|ffn|feed_?forward|mlp|emb|embed|embedding|proj|projection|pooler_output|expert"
OTHERS = r"d_(ff|inner)|n_inner|dim_ff|(lora|dt|time_step)_rank|intermediate_size_mlp"
WIDTH = re.compile(rf"(^|_)(({WORDS})_(size|dim)|{OTHERS})$|{HIDDEN.pattern}")
EXPERTS = re.compile(r"^(moe_)?(num|n)_(local_|routed_)?experts$")
CHOSEN = re.compile(r"^(num_experts_per_tok(en)?|num_selected_experts|(moe_)?top_?k|moe_k|(n|topk|num_expert)_group)$")
DENSE = re.compile(r"^(first_k_dense_replace|num_dense_layers|moe_layer_start_index)$")  # layers before the experts
INDICES = re.compile(r"(mlp_only|cross_attention|moe|hybrid|full_?att|global_att)\w*(layers|_ids|idxs|indexes|blocks)$")
PERIOD = re.compile(r"(layer_(period|interval|step|group_size)|frequency|sparse_step|every_n_layers|window_pattern)$")
TOKENS = re.compile(r"^((padded_|n_|src_|tgt_|decoder_|text_|entity_)?vocab(_size(_per_layer_input)?)?|n_words)$")
IDS = re.compile(r"token_(ids?|index)$|^(pad|bos|eos|unk|mask)_index$|suppress_tokens$|_(start|end|pad)_id$")


def reduced(config: Any) -> Any:
    """Return a copy of a configuration with the same code path and sizes of heads and at most 8 million parameters.

    Raises:
        InputError: the argument is not a configuration of transformers, or no copy that builds is small enough.
    """
    require(is_config(config), f"reduced needs a configuration of transformers; got {printable(f'{config!r:.60}')}.")
    shallow, why = deepcopy(config), ""
    with one_line(f"{config.model_type} cannot be reduced"), torch.device("meta"):
        kinds = {type(each).__name__ for each in subject_of_config(config).factory().modules()}
        ids = sorted({i for part in parts_of(shallow) for i in change(part, IDS)})
        for part in parts_of(shallow):
            for deep in sorted({*change(part, LAYERS)}):
                cut_layers(part, deep)
            cut_experts_and_tokens(part, ids)
        for halvings in range(MOST_HALVINGS):
            narrow = deepcopy(shallow)
            parts = [(part, ratio_of(part, halvings)) for part in parts_of(narrow)]
            hidden = {width: int(width * ratio) for part, ratio in parts for width in change(part, HIDDEN)}
            for part, ratio in parts:
                halve(part, ratio, halvings, hidden)
            try:
                module = subject_of_config(narrow).factory()
                number = sum(each.numel() for each in module.parameters())
                lost = kinds - {type(each).__name__ for each in module.modules()}
                why = f"its copy has no {min(lost)}." if lost else f"a narrow copy has {number:,} parameters."
                if number <= MOST_PARAMETERS and not lost:
                    return narrow
            except InputError as error:  # one halving may break a rule of the family that the next one keeps
                why = printable(str(error))
    raise InputError(f"{config.model_type} cannot be reduced: {why}")


def parts_of(config: Any) -> list[Any]:
    return [config, *(part for value in vars(config).values() if is_config(value) for part in parts_of(value))]


def change(part: Any, names: re.Pattern[str], new: Callable[[str, int], int] = lambda _, number: number) -> list[int]:
    """Replace each whole number, alone or in a list, in the fields that match `names`, and return the old numbers."""
    old: list[int] = []
    for name, value in [*vars(part).items()]:
        numbers = value if isinstance(value, list | tuple) else [value]
        if names.search(name) and all(type(number) is int for number in numbers):
            old += numbers
            setattr(part, name, type(value)(new(name, n) for n in numbers) if numbers is value else new(name, value))
    return old


def cut_layers(part: Any, deep: int) -> None:
    """Keep one period of `deep` layers, else the shortest run with all kinds, and the entries of lists for them."""
    lists = {name: value for name, value in vars(part).items() if isinstance(value, list | tuple) and value}
    marks = {name: value for name, value in lists.items() if INDICES.search(name) and max(map(int, value)) < deep}
    lists = {name: value for name, value in lists.items() if len(value) == deep > 2 and name not in marks}
    columns = [[*map(repr, value)] for value in lists.values()]
    marked = (*marks.values(), *map(range, change(part, DENSE)))
    columns += [[str(layer in value) for layer in range(deep)] for value in marked]
    columns = [column for column in columns if len({*column}) <= 8]  # more are numbers, not kinds of layers
    rows = [*zip(*columns, strict=True)] or [()] * deep
    periods = ((0, n) for n in range(1, deep // 2 + 1) if rows[n:] == rows[:-n])
    runs = ((i, n) for n in range(deep + 1) for i in range(deep - n + 1) if {*rows[i : i + n]} == {*rows})
    first, number = next(periods, None) or next(runs)
    number = min(deep, max(2, lcm(number, *(n for n in change(part, PERIOD) if 1 < n <= deep))))
    first = min(first, deep - number)
    change(part, DENSE, lambda _, dense: max(0, dense - first))
    change(part, LAYERS, lambda _, layers: number if layers == deep else layers)
    for name, value in (lists | marks).items():
        inside = (layer - first for layer in value if first <= layer < first + number) if name in marks else ()
        setattr(part, name, type(value)(inside) if name in marks else value[first : first + number])


def cut_experts_and_tokens(part: Any, ids: list[int]) -> None:
    """Keep four experts, two of them per token, and 1,024 tokens, with the special ones of `ids` moved among them."""
    if max(change(part, EXPERTS, lambda _, number: min(number, MOST_EXPERTS)), default=0) > MOST_EXPERTS:
        change(part, CHOSEN, lambda name, number: min(number, 1 if name == "topk_group" else MOST_EXPERTS // 2))
    size = min([*change(part, TOKENS, lambda _, size: min(size, MOST_TOKENS)), MOST_TOKENS])
    moved = dict(zip([i for i in ids if i >= size], [i for i in range(size)[::-1] if i not in ids], strict=False))
    change(part, IDS, lambda _, i: i if i < size else moved.get(i, size - 1))


def ratio_of(part: Any, halvings: int) -> Fraction:
    """Return the new share of heads, and so of the hidden size, that leaves two heads and a width of 64."""
    heads, hidden = gcd(*change(part, HEADS)), change(part, HIDDEN)
    shares = (Fraction(max(min(heads, 2), heads >> n) or 1, heads or 1 << n) for n in range(halvings, 0, -1))
    return next((share for share in shares if all(w * share >= min(w, LEAST_WIDTH) for w in hidden)), Fraction(1))


def halve(part: Any, ratio: Fraction, halvings: int, hidden: dict[int, int]) -> None:
    """Narrow heads by `ratio` and other widths by halvings; those that equal a hidden size of any part stay equal."""
    heads, own = change(part, HEADS), {width: int(width * ratio) for width in change(part, HIDDEN)}

    def fewer(name: str, number: int) -> int:
        new, queries = max(1, int(number * ratio)), int(gcd(*heads) * ratio)
        shared = number not in heads and re.search("kv|key_value|query_groups", name)
        return next(n for n in range(new, 0, -1) if queries % n == 0) if shared else new

    change(part, HEAD_COUNT, fewer)
    change(part, WIDTH, lambda _, w: (hidden | own).get(w, max(min(w, LEAST_WIDTH), w >> halvings)))
