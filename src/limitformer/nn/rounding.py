r"""A warning about 16 bits, in which the sum with the identity rounds softmax − C̄ away; and blocks without autocast.

float32 for softmax − C̄ in a network of 16 bits: the sum A V, its projection and the tokens.

At initialisation (softmax − C̄)V is smaller than γ₁V by a factor of the order 1/√(width·tokens), 1/1448 at width 2,048
and 1,024 tokens; one rounding to bfloat16 is of the order 1/600. So from the sum on nothing may be rounded: input and
output of the output projection are float32 (`Float32Linear`), and so are the tokens X ← λX + γf between the layers.
Queries, keys, values and the feed-forward layer, which read the tokens, have 16 bits (`to_half_dtype`): their rounding
is 1 part in 600 of themselves.
"""

import warnings
from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional

from limitformer.nn.strengths import at_least_float32


class RoundingWarning(UserWarning):
    """Half precision rounds away most of the terms that shaped attention adds to the identity."""


def warn_of_rounding(value: Tensor, float32: bool) -> None:
    """Warn once per process if values have 16 bits, or autocast rounds them, and `float32` is off."""
    if float32 or torch.compiler.is_compiling():
        return
    dtype, kind = value.dtype, value.device.type
    autocasts = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    if dtype == torch.float32 and autocasts:  # then the kernel rounds
        dtype = torch.get_autocast_dtype(kind)
    if dtype in (torch.bfloat16, torch.float16):
        warn(str(dtype).removeprefix("torch."), 256 if dtype == torch.bfloat16 else 2048)


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


def to_half_dtype(x: Tensor, weight: Tensor) -> Tensor:
    """Convert tokens to the dtype of a weight of 16 bits; a weight of another dtype leaves them unchanged."""
    return x.to(weight.dtype) if weight.dtype in (torch.bfloat16, torch.float16) else x


class Float32Linear(nn.Linear):
    """A linear map computed in float32, or finer if its tokens are, for any dtype of its weights and under autocast."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002, the name that torch has
        """Compute W x + b in float32: (*, in) to (*, out)."""
        dtype = at_least_float32(input.dtype)
        with without_autocast(input.device.type):
            bias = None if self.bias is None else self.bias.to(dtype)
            return functional.linear(input.to(dtype), self.weight.to(dtype), bias)
