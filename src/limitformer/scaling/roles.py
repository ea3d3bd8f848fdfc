"""The role of each parameter of a network, by the dimensions that grow with its width.

Shapes of the network at two sizes show which dimensions grow, as in the package mup (`set_base_shapes`). The kind of
module says which of two dimensions is the fan-in: torch's linear maps and convolutions have (out, in, …), the `Conv1D`
of transformers (in, out), tables that are looked up (number, out).
"""

from collections import Counter
from dataclasses import dataclass
from math import prod

from torch import nn

from limitformer.base.errors import require
from limitformer.scaling.rules import FIXED, HIDDEN, INPUT, OUTPUT, VECTOR
from limitformer.weightless.layout import outermost_list

Shape = tuple[int, ...]
FAN_IN_FIRST = nn.Embedding, nn.EmbeddingBag, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d  # fan-in first
MAPS = nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.RNNBase, nn.MultiheadAttention
ROUTERS = ("router", "gate", "classifier", "head")  # in the names of modules whose own parameter maps to a fixed size


@dataclass(frozen=True)
class Role:
    """The role of one parameter.

    Attributes:
        role: input, hidden, output, vector or fixed.
        fan_in, fan_out: its ratios to the base; 1 where the dimension does not grow.
        inside: whether it is in a residual block.
        owner: the name of the module whose `weight` it is, if that module's input can be multiplied.
    """

    role: str
    fan_in: float
    fan_out: float
    inside: bool
    owner: str | None


def block_names(module: nn.Module, base: nn.Module) -> list[str]:
    """Return the names of residual blocks: modules of the outermost lists that are longer than those of the base.

    If no list is longer, which is so over width, they are the modules of all outermost lists.
    """
    blocks = outermost_list(module).blocks
    mine, theirs = (Counter(each.stack for each in outermost_list(part).blocks) for part in (module, base))
    longer = {stack for stack, number in mine.items() if number != theirs[stack]} or set(mine)
    return [name for block in blocks if block.stack in longer for name in block.members]


def roles_of(
    module: nn.Module, base_module: nn.Module, shapes: dict[str, Shape], base: dict[str, Shape], wider: dict[str, Shape]
) -> dict[str, Role]:
    """Return the role of each parameter of `module` by its first name.

    Args:
        shapes: of the network, by name.
        base: of the base, by the same names.
        wider: of the network at another width, which shows the dimensions that grow.
    """
    blocks = tuple(f"{name}." for name in block_names(module, base_module))
    return {
        name: role_of(name, module, shapes[name], base[name], wider[name], name.startswith(blocks))
        for name, _ in module.named_parameters()
    }


def role_of(name: str, module: nn.Module, shape: Shape, base: Shape, wider: Shape, inside: bool) -> Role:
    path, _, attribute = name.rpartition(".")
    part = module.get_submodule(path)
    grows = [k for k, (a, b) in enumerate(zip(shape, wider, strict=True)) if a != b]
    ratios = [a / b if b else 1.0 for a, b in zip(shape, base, strict=True)]
    if not grows:
        return Role(FIXED, 1.0, 1.0, inside, None)
    if (
        "bias" in attribute
        or len(shape) - shape.count(1) < 2
        or (len(grows) == 1 and not is_matrix(part, attribute, shape))
    ):
        return Role(VECTOR, 1.0, ratios[grows[-1]], inside, None)
    in_axis, out_axis = axes_of(part, attribute, shape, path)
    if len(grows) > 1:
        fan_in, fan_out = ratios[in_axis], ratios[out_axis]
        if in_axis not in grows or out_axis not in grows:  # of a table of matrices, in any order
            fan_in, fan_out = ratios[grows[-1]], ratios[grows[-2]]
        return Role(HIDDEN, fan_in, fan_out, inside, None)
    if grows[0] == in_axis:
        callable_owner = path if isinstance(part, nn.Linear) or is_conv1d(part) else None
        return Role(OUTPUT, ratios[in_axis], 1.0, inside, callable_owner if attribute == "weight" else None)
    return Role(INPUT, 1.0, ratios[grows[0]], inside, None)


def is_matrix(part: nn.Module, attribute: str, shape: Shape) -> bool:
    """Whether a parameter maps vectors, or is a table of them; a depthwise filter and positions (1, 1, n) are not."""
    depthwise = isinstance(part, nn.Conv1d | nn.Conv2d | nn.Conv3d) and part.groups > 1 and shape[1] == 1
    return len(shape) >= 2 and not depthwise and prod(shape) > max(shape)


def is_conv1d(part: nn.Module) -> bool:
    """Whether a module is the `Conv1D` of transformers, whose weight is (in, out)."""
    return type(part).__name__ == "Conv1D"


def axes_of(part: nn.Module, attribute: str, shape: Shape, path: str) -> tuple[int, int]:
    """Return the dimensions of fan-in and fan-out."""
    if is_conv1d(part) or isinstance(part, FAN_IN_FIRST):
        return 0, 1
    if isinstance(part, MAPS):
        return 1, 0
    if is_table_by_shape(part, attribute, path, len(shape)):
        return len(shape) - 2, len(shape) - 1
    return len(shape) - 1, len(shape) - 2  # used as the weight of a linear map


def is_table_by_shape(part: nn.Module, attribute: str, path: str, dimensions: int) -> bool:
    """Whether a parameter of the user's own module is taken for a table, such as positions or tokens of a class."""
    words = f"{path}.{attribute}.{type(part).__name__}".lower()
    known = is_conv1d(part) or isinstance(part, (*FAN_IN_FIRST, *MAPS))
    return not known and not any(word in words for word in ROUTERS) and not (dimensions == 2 and "weight" in attribute)


def kind_of(name: str) -> str:
    """Return a name with its numbers replaced, so that layers have the same."""
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def partners(base: list[str], names: list[str]) -> dict[str, str]:
    """Return for each name that of the base with its kind, and at its place among the layers.

    Raises:
        InputError: the base has none.
    """
    of_kind: dict[str, list[str]] = {}
    for name in base:
        of_kind.setdefault(kind_of(name), []).append(name)
    mine: dict[str, list[str]] = {}
    for name in names:
        mine.setdefault(kind_of(name), []).append(name)
    result: dict[str, str] = {}
    for kind, every in mine.items():
        known = of_kind.get(kind, [])
        require(bool(known), f"the base has no parameter {kind}. Nearest: a base with every kind of layer.")
        result |= {name: known[k * len(known) // len(every)] for k, name in enumerate(every)}
    return result
