"""The operations of torch that a pass looks at, in one table.

Each spelling of an operation is one of them below autograd: `x + y` and `torch.add` are `add`, and `F.linear` is `mm`
or `addmm`. Operations that are not in the table have no kind.
"""

from functools import cache
from typing import Any

SUM, MULTIPLE, SOFTMAX = "sum", "multiple", "softmax"
PAIRS = "products of pairs"  # of stacked matrices, such as queries and keys
PRODUCT, CONVOLUTION, LOOKUP = "product", "convolution", "lookup"  # in which one tensor is mostly a weight
LARGEST, CHOICE = "largest", "choice"
FUSED = "fused attention"
COPY = "copy"  # of numbers that exist
ENTRIES = "entries"  # of a weight, which were drawn for another operation

KINDS: dict[str, str] = {}
FUSED_MASKS: dict[str, tuple[int | str, int]] = {  # the arguments that are the mask, and whether it is causal
    "_scaled_dot_product_flash_attention_for_cpu": ("attn_mask", 4),
    "_scaled_dot_product_flash_attention": ("", 4),
    "_scaled_dot_product_efficient_attention": (3, 6),
    "_scaled_dot_product_cudnn_attention": (3, 6),
}


def register(kind: str, *names: str) -> None:
    """Give operations a kind.

    >>> register(SUM, "mul")
    Traceback (most recent call last):
    ValueError: mul is a multiple already
    """
    for name in names:
        if KINDS.setdefault(name, kind) != kind:
            raise ValueError(f"{name} is a {KINDS[name]} already")


register(SUM, "add", "add_")
register(MULTIPLE, "mul", "mul_")
register(SOFTMAX, "_softmax", "_safe_softmax")
register(PAIRS, "bmm", "baddbmm")
register(PRODUCT, "mm", "addmm", "mv", "addmv")
register(CONVOLUTION, "convolution")
register(LOOKUP, "embedding")
register(LARGEST, "argmax", "max")
register(CHOICE, "topk")
register(FUSED, *FUSED_MASKS)
register(COPY, "clone", "_to_copy", "copy_", "cat", "stack", "repeat", "_unsafe_view", "index", "index_select", "roll")


@cache
def kind_of(func: Any) -> str:
    """Return the kind of an operation of torch's dispatcher; empty if it has none."""
    return KINDS.get(func.overloadpacket.__name__, "") if func.namespace == "aten" else ""
