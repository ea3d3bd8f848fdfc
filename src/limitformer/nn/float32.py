r"""What keeps softmax − C̄ in a network of 16 bits: the sum A V, its projection and the tokens are in float32.

Beside γ₁V, (softmax − C̄)V is of the order 1/√(width·tokens) at initialisation, 1/1448 at width 2,048 and 1,024 tokens;
one rounding to bfloat16 is of the order 1/600. So from the sum on nothing may be rounded: the output projection takes
and gives float32 (`Float32Linear`), and the tokens X ← λX + γf between the layers have it. What reads the tokens,
queries, keys, values and the feed-forward layer, has 16 bits (`lowered`): its rounding is 1 part in 600 of its own.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from limitformer.nn.rounding import without_autocast
from limitformer.nn.strengths import at_least_float32


def has_16_bits(tensor: Tensor) -> bool:
    """Whether it is bfloat16 or float16."""
    return tensor.dtype in (torch.bfloat16, torch.float16)


def to_half_dtype(x: Tensor, weight: Tensor) -> Tensor:
    """Tokens in the dtype of a weight of 16 bits; as they are before any other."""
    return x.to(weight.dtype) if has_16_bits(weight) else x


class Float32Linear(nn.Linear):
    """A linear map computed in float32, or finer where its tokens are, whatever its weights' dtype and autocast are."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002, the name that torch has
        """W x + b in float32: (*, in) to (*, out)."""
        dtype = at_least_float32(input.dtype)
        with without_autocast(input.device.type):
            bias = None if self.bias is None else self.bias.to(dtype)
            return functional.linear(input.to(dtype), self.weight.to(dtype), bias)
