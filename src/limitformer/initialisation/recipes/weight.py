"""The weight that a recipe takes, and `known_as`, which names a recipe."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from limitformer.base.errors import nearest

# The sizes of a weight that a recipe may read, and what each is.
SIZES = {
    "width": "of the stream of the weight's stack",
    "depth": "number of blocks of its stack",
    "layer": "index of its block, from 0",
    "heads": "number of heads",
    "head_dim": "dimension of a head",
    "fan_in": "inputs of the weight",
    "fan_out": "outputs of the weight",
    "rows": "of the tensor",
    "columns": "of the tensor",
    "vocabulary": "rows of the embedding of tokens",
}


class UnknownSizeError(Exception):
    """A recipe reads a size of a weight that is not known."""


@dataclass
class Weight:
    """A weight of a model, as recipes see it; its sizes are attributes too, such as `weight.depth`.

    Attributes:
        name: of the parameter.
        shape: of the parameter.
        roles: one, or several of a fused weight; empty: not clear.
        reason: why its role is not clear.
        stack: the list of blocks that it belongs to, such as `transformer.h`.
        sizes: numbers by the names of `limitformer.initialisation.recipes.SIZES`; None is not known.
    """

    name: str
    shape: tuple[int, ...]
    roles: tuple[str, ...] = ()
    reason: str = ""
    stack: str = ""
    sizes: dict[str, float | None] = field(default_factory=dict)

    @property
    def role(self) -> str:
        """The role, such as `attention output`."""
        return self.roles[0]

    @property
    def i(self) -> np.ndarray:
        """The indices of the entries of a row."""
        return np.arange(self.columns)

    def __getattr__(self, name: str) -> Any:
        """Return one of `SIZES`."""
        if name not in SIZES:
            raise AttributeError(f"a weight has no {name!r}.{nearest(name, SIZES)}")
        if self.sizes.get(name) is None:
            raise UnknownSizeError(f"its {name} is not known")
        return self.sizes[name]


def known_as(name: str, tied: bool | None = None, names: Mapping[str, str] | None = None) -> Callable[[Any], Any]:
    """Return a decorator that gives a recipe a name, and what a function of one weight cannot say.

    Args:
        name: for `limitformer check --recipe`.
        tied: whether the head shares the weights of the embedding; None: both are published.
        names: {role: pattern of weights' names} for roles that this architecture alone has: regular expressions, which
            come before the names that every recipe shares.
    """

    def named(law: Any) -> Any:
        law.known_as, law.tied, law.names = name, tied, dict(names or {})
        return law

    return named
