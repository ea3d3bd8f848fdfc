"""Caches of keys and values: what `transformers` calls them, and where queries stand in one.

From 5.24 on the argument `past_key_values` of its models, and the field of their outputs, are called `cache`. A model
hands its cache on under the name of its version; who calls a model may use either.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutputWithPast

from limitformer.base.errors import require

OLD = "past_key_values"
NAME = "cache" if "cache" in {field.name for field in fields(BaseModelOutputWithPast)} else OLD

Forward = TypeVar("Forward", bound=Callable[..., Any])


def cache_among(arguments: Mapping[str, Any]) -> Any:
    """The cache among a call's named arguments, under either name, or None."""
    given = [arguments[name] for name in ("cache", OLD) if arguments.get(name) is not None]
    require(len(given) < 2, f"cache and {OLD} are two names of one argument; got both. Nearest: {NAME} alone.")
    return given[0] if given else None


def require_cache(cache: Any) -> None:
    """Raise `InputError` unless it is None or a cache that a decoder alone has."""
    fits = cache is None or (isinstance(cache, Cache) and not isinstance(cache, EncoderDecoderCache))
    require(fits, f"cache must be a cache of transformers, such as DynamicCache; got {type(cache).__name__}.")


def takes_either_name(forward: Forward) -> Forward:
    """A model's `forward` whose `cache` may be given as `past_key_values` too."""

    @wraps(forward)
    def renaming(self: Any, *args: Any, **options: Any) -> Any:
        if OLD in options:
            cache = cache_among(options)
            options = {name: value for name, value in options.items() if name != OLD} | {"cache": cache}
        return forward(self, *args, **options)

    return cast(Forward, renaming)  # the same arguments, and one name more


def places_of(cache: Any, queries: int) -> Tensor | None:
    """Where queries stand before a cache takes their keys, None: last; asked before any layer of it grows."""
    if cache is None:
        return None
    offset = cache.get_query_offset(0)
    if isinstance(offset, int) and cache.get_mask_sizes(queries, 0)[0] == offset + queries:
        return None
    places = torch.arange(queries, device=offset.device if isinstance(offset, Tensor) else None)
    return places + offset
