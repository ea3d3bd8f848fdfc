r"""float32 for softmax − C̄ in a network of 16 bits: the sum A V, its projection and the tokens.

At initialisation (softmax − C̄)V is smaller than γ₁V by a factor of the order 1/√(width·tokens), 1/1448 at width 2,048
and 1,024 tokens; one rounding to bfloat16 is of the order 1/600. So from the sum on nothing may be rounded: input and
output of the output projection are float32 (`Float32Linear`), and so are the tokens X ← λX + γf between the layers.
Queries, keys, values and the feed-forward layer, which read the tokens, have 16 bits (`to_half_dtype`): their rounding
is 1 part in 600 of themselves.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from limitformer.nn.rounding import without_autocast
from limitformer.nn.strengths import at_least_float32


def has_16_bits(tensor: Tensor) -> bool:
    return tensor.dtype in (torch.bfloat16, torch.float16)


def to_half_dtype(x: Tensor, weight: Tensor) -> Tensor:
    """Convert tokens to the dtype of a weight of 16 bits; a weight of another dtype leaves them unchanged."""
    return x.to(weight.dtype) if has_16_bits(weight) else x


class Float32Linear(nn.Linear):
    """A linear map computed in float32, or finer if its tokens are, for any dtype of its weights and under autocast."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002, the name that torch has
        """Compute W x + b in float32: (*, in) to (*, out)."""
        dtype = at_least_float32(input.dtype)
        with without_autocast(input.device.type):
            bias = None if self.bias is None else self.bias.to(dtype)
            return functional.linear(input.to(dtype), self.weight.to(dtype), bias)
