"""A warning about 16 bits, in which the sum with the identity rounds softmax − C̄ away; and blocks without autocast."""

import warnings
from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch
from torch import Tensor


class RoundingWarning(UserWarning):
    """Half precision rounds away most of the terms that shaped attention adds to the identity."""


def warn_of_rounding(value: Tensor, float32: bool) -> None:
    """Warn once per process if values have 16 bits, or autocast rounds them, and `float32` is off."""
    if float32 or torch.compiler.is_compiling():
        return
    dtype, kind = value.dtype, value.device.type
    if dtype == torch.float32 and autocasts(kind):  # then the kernel rounds
        dtype = torch.get_autocast_dtype(kind)
    if dtype in (torch.bfloat16, torch.float16):
        warn(str(dtype).removeprefix("torch."), 256 if dtype == torch.bfloat16 else 2048)


def autocasts(kind: str) -> bool:
    """Whether autocast is on for a kind of device; some kinds, such as "meta", have no autocast."""
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def without_autocast(kind: str) -> AbstractContextManager[object]:
    """Disable autocast in the block, if the kind of device has it."""
    has = torch.amp.is_autocast_available(kind)
    return torch.autocast(kind, enabled=False) if has else nullcontext()


@cache
def warn(dtype: str, parts: int) -> None:
    message = (
        f"Shaped attention in {dtype}: A = γ₁I + (softmax − γ₂C̄), where at initialisation the bracket is of order "
        f"1/√width. {dtype} resolves 1 part in {parts} of the sum, so much of the bracket is rounding. Nearest: "
        "float32=True, which computes the bracket and the sum in float32."
    )
    warnings.warn(message, RoundingWarning, stacklevel=5)
