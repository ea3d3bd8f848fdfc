"""Caches of keys and values: their name in `transformers`, and the positions of queries in one.

From 5.24 on the argument `past_key_values` of models, and the field of their outputs, are called `cache`. A model
passes its cache on under the name of the installed version; callers may use either name.
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
    """Return the cache among a call's named arguments, under either name, or None."""
    caches = [arguments[name] for name in ("cache", OLD) if arguments.get(name) is not None]
    require(len(caches) < 2, f"cache and {OLD} are two names of one argument; got both. Nearest: only {NAME}.")
    return caches[0] if caches else None


def require_cache(cache: Any) -> None:
    """Raise `InputError` unless it is None or a cache of a decoder without an encoder."""
    fits = cache is None or (isinstance(cache, Cache) and not isinstance(cache, EncoderDecoderCache))
    require(fits, f"cache must be a cache of transformers, such as DynamicCache; got {type(cache).__name__}.")


def takes_either_name(forward: Forward) -> Forward:
    """Wrap a model's `forward` so that `cache` may be named `past_key_values`."""

    @wraps(forward)
    def renaming(self: Any, *args: Any, **options: Any) -> Any:
        if OLD in options:
            cache = cache_among(options)
            options = {name: value for name, value in options.items() if name != OLD} | {"cache": cache}
        return forward(self, *args, **options)

    return cast(Forward, renaming)  # the same arguments, one of them under a second name


def query_positions(cache: Any, queries: int) -> Tensor | None:
    """Return the positions of queries before a cache receives their keys; None if they are the last."""
    if cache is None:
        return None
    offset = cache.get_query_offset(0)
    if isinstance(offset, int) and cache.get_mask_sizes(queries, 0)[0] == offset + queries:
        return None
    return torch.arange(queries, device=offset.device if isinstance(offset, Tensor) else None) + offset
