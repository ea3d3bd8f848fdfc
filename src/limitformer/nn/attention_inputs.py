"""Checks of the arguments of shaped attention, by types and shapes only.

Values of tensors are not read: that would wait for the device. In shapes: b batch, h heads, g key/value heads,
q queries, k keys, d head_dim.
"""

from typing import Any

import torch
from torch import Tensor

from limitformer.base.errors import InputError, require, require_real
from limitformer.nn.visibility import Visibility


def check_inputs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    gamma1: Any,
    gamma2: Any,
    scale: Any,
    mask: Any,
    is_causal: Any,
    positions: Any,
    dropout: Any = 0.0,
    float32: Any = False,
) -> None:
    """Raise `InputError` unless the arguments of `shaped_attention` have the right kinds and fit each other."""
    if not torch.compiler.is_compiling():  # a compiled call has symbols for numbers, and ran uncompiled before
        check_tensors({"query": query, "key": key, "value": value})
        if not float32:  # float32 gives them one dtype
            check_dtypes_and_devices(query, key, value)
        check_gain("gamma1", gamma1, query)
        check_gain("gamma2", gamma2, query)
        if not isinstance(scale, Tensor):
            require_real("scale", scale)
        if not 0 <= require_real("dropout", dropout) <= 1:
            raise InputError(f"dropout must be a probability; got {dropout}.")
        for name, switch in (("is_causal", is_causal), ("float32", float32)):
            if str(switch) not in ("True", "False", "1", "0"):
                raise InputError(f"{name} must be True or False; got {switch!r}.")
        check_mask_and_positions(mask, positions, query)
    check_shapes(query, key, value, positions)
    if isinstance(mask, Tensor) and mask.dim() == 4:
        fits = mask.shape[0] in (1, query.shape[0]) and mask.shape[1] in (1, query.shape[1])
        wanted = f"({query.shape[0]} or 1, {query.shape[1]} or 1, …)"
        require(fits, f"mask must have the shape {wanted}; got {tuple(mask.shape)}.")
    both = isinstance(mask, Visibility) and is_causal
    require(not both, "is_causal is part of a Visibility: pass it to limitformer.nn.visibility.")


def check_tensors(inputs: dict[str, Any]) -> None:
    for name, x in inputs.items():
        if not isinstance(x, Tensor):
            raise InputError(f"{name} must be a tensor; got {type(x).__name__}. Nearest: torch.as_tensor({name}).")
        if x.is_nested:
            raise InputError(f"{name} must not be nested: pad it and pass a mask.")
        if not x.is_floating_point():
            raise InputError(f"{name} must be of real numbers; got {x.dtype}. Nearest: {name}.float().")


def check_dtypes_and_devices(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raise `InputError` unless they have one dtype, unless autocast chooses it, and one device."""
    same = query.dtype == key.dtype == value.dtype or torch.is_autocast_enabled(query.device.type)
    if not same or not query.device == key.device == value.device:
        kinds = ", ".join(f"{x.dtype} on {x.device}" for x in (query, key, value))
        raise InputError(f"query, key and value must have one dtype and device; got {kinds}.")


def check_gain(name: str, gain: Any, query: Tensor) -> None:
    """Raise `InputError` unless a gain is a finite number or a real tensor on the queries' device; () may be on any."""
    if not isinstance(gain, Tensor):
        require_real(name, gain)
        return
    if gain.is_complex():
        raise InputError(f"{name} must be of real numbers; got {gain.dtype}.")
    if gain.device != query.device and gain.dim():
        raise InputError(f"{name} is on {gain.device}, query on {query.device}. Nearest: {name}.to(query.device).")


def check_mask_and_positions(mask: Any, positions: Any, query: Tensor) -> None:
    if not (mask is None or isinstance(mask, Tensor | Visibility)):
        raise InputError(f"mask must be a tensor, a Visibility or None; got {type(mask).__name__}.")
    if not (positions is None or isinstance(positions, Tensor)):
        raise InputError(f"positions must be a tensor or None; got {type(positions).__name__}.")
    if positions is not None and positions.dtype not in (torch.int64, torch.int32):
        raise InputError(f"positions must be whole numbers; got {positions.dtype}. Nearest: positions.long().")
    for name, x in (("mask", mask), ("positions", positions)):
        if isinstance(x, Tensor) and x.device != query.device:
            raise InputError(f"{name} is on {x.device}, query on {query.device}. Nearest: {name}.to(query.device).")


def check_shapes(query: Tensor, key: Tensor, value: Tensor, positions: Tensor | None) -> None:
    """Raise `InputError` unless queries, keys, values and positions have shapes that fit each other."""
    fits = query.dim() == key.dim() == 4 and key.shape == value.shape
    fits = fits and (query.shape[0], query.shape[3]) == (key.shape[0], key.shape[3])
    if not fits:
        shapes = ", ".join(str(tuple(x.shape)) for x in (query, key, value))
        needed = "query must be (batch, heads, queries, head_dim), key and value (batch, kv_heads, keys, head_dim)"
        raise InputError(f"{needed}; got {shapes}.")
    if key.shape[1] < 1 or query.shape[1] < 1 or query.shape[1] % key.shape[1]:
        raise InputError(f"kv_heads must divide heads; got {key.shape[1]} and {query.shape[1]}.")
    queries, keys = query.shape[-2], key.shape[-2]
    if positions is None:
        message = f"{queries} queries cannot be the last of {keys} keys: the identity in A needs positions."
        require(queries <= keys, message)
        return
    fits = positions.shape in ((queries,), (query.shape[0], queries))
    require(fits, f"positions must be ({queries},) or ({query.shape[0]}, {queries}); got {tuple(positions.shape)}.")
