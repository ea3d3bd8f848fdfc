r"""Shaped attention registered with `transformers`, under the name "shaped": the attention and its mask function.

Both are needed. A model asks the mask function of its attention for a mask, and without one padding is silently
ignored. This mask function returns the mask of `sdpa`, or None where no token is hidden. It prepares the mask once for
all layers (`Visibility`), and leaves causality to the kernel where the mask adds only padding.

A = γ₁ I + softmax(QKᵀ/τ) − γ₂ C̄ has an identity, so the attention must know where the queries stand among the keys. A
growing cache has them last; a cache of fixed length does not, and no argument of the attention has their positions. A
hook before each attention asks the cache, before it receives the new keys, and passes the result as `query_offset`.
"""

from collections.abc import Callable, Sequence
from math import sqrt
from operator import attrgetter
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    create_masks_for_generate,
    sdpa_mask,
)
from transformers.utils import is_tracing

from limitformer.base.errors import InputError, require
from limitformer.hf.settings import OUTPUT_ATTENTIONS, Shaping
from limitformer.nn import Gain, Visibility, shaped_attention, visibility
from limitformer.nn.attention_matrix import Logits, Probe, mixed_and_matrix
from limitformer.nn.rounding import warn_of_rounding

ATTENTION = "shaped"
CACHED = "Packed sequences and a cache exclude each other: tokens would see other sequences. Nearest: use_cache=False."
UNPACKED = (
    "This family's masks are not known to read positions: tokens of packed sequences might see other sequences. "
    "Nearest: an attention_mask (batch, 1, tokens, tokens)."
)
# Arguments of attention functions that add terms inside the softmax, which C̄ would ignore.
MEANINGLESS = {
    "softcap": "a soft cap of the logits",
    "position_bias": "a relative position bias",
    "s_aux": "an attention sink",
    "cache": "a paged cache",
}


class AttentionShaping(nn.Module):
    """The γ₁, γ₂ and τ₀ of one attention with `heads` heads.

    Attributes:
        forms_matrix: whether A is formed too, for `output_attentions=True`.
    """

    def __init__(self, shaping: Shaping, heads: int) -> None:
        super().__init__()
        number = heads if shaping.per_head else None
        self.gamma1 = None if shaping.gamma1 is None else Gain(shaping.gamma1, number, shaping.trained)
        self.gamma2 = None if shaping.gamma2 is None else Gain(shaping.gamma2, number, shaping.trained)
        self.tau0, self.float32 = shaping.tau0, shaping.float32
        self.probe: Probe | None = None
        self.forms_matrix = False

    def forward(self, query: Tensor) -> "AttentionShaping":
        """Return self; calling it lets PEFT (`modules_to_save`) substitute the active copy."""
        return self

    def gains(self) -> dict[str, float | Tensor]:
        """Return the current γ₁ and γ₂."""
        return {
            "gamma1": 0.0 if self.gamma1 is None else self.gamma1(),
            "gamma2": 0.0 if self.gamma2 is None else self.gamma2(),
        }


def shaped_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | Visibility | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    query_offset: int | Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """Return (A V (b, q, h, d), A or None) of query (b, h, q, d), key and value (b, g, k, d).

    This is the attention function that `transformers` calls. A is formed only for `output_attentions=True`.

    Raises:
        InputError: the module has no shaping, or an argument adds a term to the softmax.
    """
    shaping = shaping_of(module, query)
    refuse_meaningless(others)
    window = others.get("sliding_window")
    seen = window is None or attention_mask is not None or key.shape[-2] <= window
    require(seen, f"a sliding window of {window} needs an attention mask; this model passes none.")
    scale = (1 / sqrt(query.shape[-1]) if scaling is None else scaling) / shaping.tau0
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    is_causal, queries, positions = causal and attention_mask is None, query.shape[-2], None
    last = isinstance(query_offset, int) and query_offset + queries == key.shape[-2]
    if query_offset is not None and not last:
        positions = torch.arange(queries, device=query.device) + query_offset
    arguments: dict[str, Any] = {"scale": scale, "mask": attention_mask, "is_causal": is_causal, **shaping.gains()}
    arguments |= {"positions": positions, "dropout": dropout}
    warn_of_rounding(value, shaping.float32 or not (shaping.gamma1 or shaping.gamma2))
    if shaping.probe is not None:
        shaping.probe(Logits(query, key, scale, attention_mask, is_causal, positions))
    mixed, a = shaped_attention(query, key, value, **arguments, float32=shaping.float32), None
    if shaping.forms_matrix:
        mixed, a = mixed_and_matrix(mixed, query, key, value, **arguments)
    return mixed.transpose(1, 2).contiguous(), a


def shaping_of(module: nn.Module, query: Tensor) -> AttentionShaping:
    """Return the module's shaping; raise `InputError` without one."""
    shaping = getattr(module, "shaping", None)
    shaping = shaping(query) if isinstance(shaping, nn.Module) else None
    if not isinstance(shaping, AttentionShaping):
        raise InputError(
            f"This {type(module).__name__} is not shaped: its gains were never loaded. "
            "Use limitformer.hf.load_shaped for a saved shaped model, limitformer.hf.shape_model for any other."
        )
    return shaping


def refuse_meaningless(others: dict[str, Any]) -> None:
    """Raise `InputError` for terms that would change the softmax but not C̄."""
    for name, term in MEANINGLESS.items():
        require(others.get(name) is None, f"Shaped attention has no meaning for {term} ({name}).")


def shaped_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> Tensor | Visibility | None:
    """Return the mask of a model with shaped attention; None hides only the future.

    This is the mask function that `transformers` calls.
    """
    if attention_mask is not None:
        both_sides = mask_function is bidirectional_mask_function
        fits = q_length == kv_length if both_sides else q_length <= kv_length
        fits = fits and attention_mask.shape[0] == batch_size
        shape, got = (batch_size, q_length), tuple(attention_mask.shape)
        require(fits, f"attention_mask must have the shape {shape} of the tokens; got {got}.")
    square = isinstance(q_offset, int) and q_offset == kv_offset == 0 and q_length == kv_length
    padding = None if attention_mask is None else attention_mask[:, None, None, :].bool()
    if square and padding is not None and mask_function is causal_mask_function and padding.shape[-1] == kv_length:
        hides = is_tracing(padding) or not bool(padding.all())  # entries cannot be read while a graph is traced
        padding = padding if hides else None
        return visibility(padding, is_causal=True, queries=q_length, keys=kv_length)
    mask = sdpa_mask(
        batch_size, q_length, kv_length, cast(int, q_offset), kv_offset, mask_function=mask_function,
        attention_mask=attention_mask, **options,
    )  # fmt: skip
    if mask is None or not square:
        return mask
    return visibility(mask, queries=q_length, keys=kv_length)


def masks_for_generate(**options: Any) -> Tensor | None:
    """Return the mask that `generate` makes outside a model, as a tensor."""
    mask: Any = create_masks_for_generate(**options)
    result: Tensor | None = mask.as_mask() if isinstance(mask, Visibility) else mask
    return result


def store_output_attentions(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A hook before a model: store for each attention whether A is requested, as not every family passes this on."""
    requested = kwargs.get("output_attentions")
    requested = getattr(module.config, OUTPUT_ATTENTIONS, False) if requested is None else requested
    blocks = list(attrgetter(module.shaped_blocks)(module))
    number = len(blocks)
    layers: Sequence[int] = range(number if requested else 0)
    if isinstance(requested, list | tuple):  # of layers; −1 is the last
        fits = all(isinstance(k, int) and -number <= k < number for k in requested)
        require(fits, f"output_attentions must be a flag, or layers from 0 to {number - 1}; got {requested!r}.")
        layers = [k % number for k in requested]
    for layer, block in enumerate(blocks):
        for part in block.modules():
            if isinstance(part, AttentionShaping) and part.forms_matrix != (layer in layers):
                part.forms_matrix = layer in layers
    return args, kwargs | ({"output_attentions": requested} if requested else {})


def check_packing(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A hook before a causal model: raise `InputError` for packed sequences that it would not separate."""
    if kwargs.get("attention_mask") is not None:
        return
    use_cache, places = kwargs.get("use_cache"), kwargs.get("position_ids")
    use_cache = getattr(module.config, "use_cache", False) if use_cache is None else use_cache
    harmless = module.shaped_packs and not use_cache and cache_among(kwargs) is None
    if harmless or places is None or places.shape[-1] == 1 or is_tracing(places):
        return
    require(bool((places.diff() == 1).all()), CACHED if module.shaped_packs else UNPACKED)


def cache_among(kwargs: dict[str, Any]) -> Any:
    """Return the cache, which is called `cache` from transformers 5.24 on, and `layer_past` in GPT-NeoX, or None."""
    names = ("cache", "past_key_values", "layer_past")
    return next((kwargs[name] for name in names if kwargs.get(name) is not None), None)


def note_offset(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    """A hook before an attention: pass the position of its first query in the cache."""
    kind = module.config._attn_implementation
    require(kind == ATTENTION, f"This model is shaped: its attention is {ATTENTION!r} and cannot become {kind!r}.")
    cache = cache_among(kwargs)
    if cache is None:
        return None
    offset = cache.get_query_offset(module.layer_idx)
    tokens = args[0] if args else kwargs["hidden_states"]
    dropped = cache.get_mask_sizes(tokens.shape[1], module.layer_idx)[1]  # keys that a sliding window has lost
    offset = offset - dropped if isinstance(dropped, int) and dropped else offset
    # A cache of fixed length counts in place, so its number is copied.
    return args, kwargs | {"query_offset": offset.clone() if isinstance(offset, Tensor) else offset}


AttentionInterface.register(ATTENTION, shaped_attention_forward)
AttentionMaskInterface.register(ATTENTION, shaped_mask)
