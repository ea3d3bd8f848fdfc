r"""Tokens in float32 between the layers of a stock model of 16 bits, for `Shaping(float32=True)`.

`limitformer.nn.rounding` has the reason. The output projection of attention and the LayerNorms compute in float32
and return float32. Other linear maps cast their inputs to their own dtype. Tokens are cast to float32 before the first
block and back after the last one, so that embeddings and head do not change. A model of float32 is not affected.
"""

from operator import attrgetter
from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from limitformer.base.errors import InputError
from limitformer.hf.families import Family
from limitformer.nn.rounding import Float32Linear, to_half_dtype, without_autocast
from limitformer.nn.strengths import at_least_float32


class Float32Conv1D(Conv1D):
    """GPT-2's linear map, computed in float32 or finer."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x W + b in float32: (*, in) to (*, out)."""
        dtype = at_least_float32(x.dtype)
        with without_autocast(x.device.type):
            return functional.linear(x.to(dtype), self.weight.mT.to(dtype), self.bias.to(dtype))


class Float32LayerNorm(nn.LayerNorm):
    """LayerNorm in float32 or finer."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002, the name in torch
        """Normalise tokens (*, n) in float32 or finer."""
        dtype = at_least_float32(input.dtype)
        weight, bias = (None if x is None else x.to(dtype) for x in (self.weight, self.bias))
        return functional.layer_norm(input.to(dtype), self.normalized_shape, weight, bias, self.eps)


MAPS = {nn.Linear: Float32Linear, Conv1D: Float32Conv1D}


def keep_float32(blocks: list[nn.Module], family: Family) -> None:
    """Keep tokens in float32 between the blocks, whose modules must be final.

    Raises:
        InputError: an output projection has another class, such as a quantised one.
    """
    for block in blocks:
        projection = attrgetter(family.projection)(block)
        kind: Any = type(projection)
        if kind not in MAPS:
            raise InputError(
                f"float32=True needs an output projection that is a plain linear map; got {kind.__name__}."
            )
        projection.__class__ = MAPS[kind]  # its weights keep their names
        for path in family.norms:
            norm = attrgetter(path)(block)
            if type(norm) is nn.LayerNorm:  # RMSNorms compute in float32 already
                norm.__class__ = Float32LayerNorm
        for module in block.modules():
            if type(module) in MAPS:
                module.register_forward_pre_hook(cast_input)
    blocks[0].register_forward_pre_hook(cast_tokens, with_kwargs=True)
    blocks[-1].register_forward_hook(cast_output)


def cast_input(module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """A hook before a linear map: cast its input to its dtype."""
    return to_half_dtype(args[0], module.weight), *args[1:]


def cast_tokens(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """A hook before the first block: cast tokens to float32."""
    if args:
        return (args[0].to(at_least_float32(args[0].dtype)), *args[1:]), kwargs
    x = kwargs["hidden_states"]
    return args, kwargs | {"hidden_states": x.to(at_least_float32(x.dtype))}


def cast_output(module: nn.Module, args: Any, output: Any) -> Any:
    """A hook after the last block: cast tokens to the dtype of the weights."""
    weight = next(part.weight for part in module.modules() if isinstance(part, Float32Linear | Float32Conv1D))
    if isinstance(output, tuple):
        return to_half_dtype(output[0], weight), *output[1:]
    return to_half_dtype(output, weight)
