"""The law of every parameter of a module, as a table."""

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
import xarray as xr
from torch import nn

from limitformer.base.errors import InputError, first_line, require_real
from limitformer.weightless import laws
from limitformer.weightless.building import built
from limitformer.weightless.laws import Law
from limitformer.weightless.models import Blueprint, blueprint_of

COLUMNS = ("kind", "mean", "std", "shape", "law", "tied")


@dataclass(frozen=True)
class LawTable:
    """What a module's own code draws: the shape and the law of each parameter, and which are the same one."""

    name: str
    laws: dict[str, Law]
    shapes: dict[str, tuple[int, ...]]
    tied: dict[str, tuple[str, ...]]

    def __getitem__(self, name: str) -> Law:
        return self.laws[name]

    def __len__(self) -> int:
        return len(self.laws)

    def dataset(self) -> xr.Dataset:
        """One entry for each weight: kind, mean, std, shape, law, tied."""
        rows = {
            "kind": [law.kind for law in self.laws.values()],
            "mean": [law.mean for law in self.laws.values()],
            "std": [law.std for law in self.laws.values()],
            "shape": ["×".join(map(str, self.shapes[name])) for name in self.laws],
            "law": [str(law) for law in self.laws.values()],
            "tied": [", ".join(self.tied.get(name, ())) for name in self.laws],
        }
        return xr.Dataset({key: ("weight", rows[key]) for key in COLUMNS}, {"weight": list(self.laws)})

    def __str__(self) -> str:
        """Lines of name, shape and law; like layers in one line."""
        lines = [f"{self.name}: {len(self)} parameters, {self.count:,} entries"]
        for name, (number, shape, law, tied) in self.alike().items():
            times = f" ×{number}" if number > 1 else ""
            lines.append(f"  {name}{times}  {shape}  {law}{f', tied to {tied}' if tied else ''}")
        return "\n".join(lines)

    @property
    def count(self) -> int:
        """Entries of all parameters."""
        return sum(torch.Size(shape).numel() for shape in self.shapes.values())

    def alike(self) -> dict[str, tuple[int, str, str, str]]:
        """Parameters whose names differ by numbers alone and whose laws do not: how many, shape, law, tied."""
        found: dict[str, tuple[int, str, str, str]] = {}
        for name, law in self.laws.items():
            short = ".".join("*" if part.isdecimal() else part for part in name.split("."))
            shape, tied = "×".join(map(str, self.shapes[name])), ", ".join(self.tied.get(name, ()))
            key = short if found.get(short, (0, shape, str(law), tied))[1:] == (shape, str(law), tied) else name
            found[key] = (found.get(key, (0,))[0] + 1, shape, str(law), tied)
        return found


def law(model: Any) -> LawTable:
    """The law that a model's own initialisation draws from, read by watching it on no memory.

    Args:
        model: a configuration of transformers, its folder, JSON or public name, a function that makes a module, or a
            `limitformer.Transformer`.

    Raises:
        InputError: the model cannot be made.

    >>> import torch
    >>> print(law(lambda: torch.nn.Linear(100, 7, bias=False)))
    <lambda>: 1 parameters, 700 entries
      weight  7×100  uniform, std 0.05774
    """
    blueprint = blueprint_of(model)
    module, found = build_without_weights(blueprint, torch.float32)
    return table_of(blueprint, module, found)


def build_without_weights(blueprint: Blueprint, dtype: torch.dtype) -> tuple[nn.Module, dict[str, Law]]:
    """The module without its random weights, and their laws; one error for whatever its code raises."""
    try:
        module, found, _ = built(blueprint.factory, dtype)
    except (InputError, MemoryError):
        raise
    except Exception as error:  # the user's own code, which may raise anything
        raise cannot_be_made(blueprint, error) from error
    return module, found


def cannot_be_made(blueprint: Blueprint, error: BaseException) -> InputError:
    """The error of a factory that fails."""
    return InputError(f"{blueprint.name} cannot be made: {type(error).__name__}: {first_line(error)}")


def table_of(blueprint: Blueprint, module: nn.Module, found: dict[str, Law]) -> LawTable:
    """With shapes and ties."""
    every = dict(module.named_parameters(remove_duplicate=False))
    first = {id(parameter): name for name, parameter in module.named_parameters()}
    tied: dict[str, tuple[str, ...]] = {}
    for name, parameter in every.items():
        if name not in found:
            tied[first[id(parameter)]] = (*tied.get(first[id(parameter)], ()), name)
    shapes = {name: tuple(every[name].shape) for name in found}
    return LawTable(blueprint.name, found, shapes, tied)


def with_overrides(table: dict[str, Law], overrides: dict[str, Any] | None) -> dict[str, Law]:
    """The laws, with those whose names match a pattern replaced: by a standard deviation, or a `Law`.

    Parameters that are copies of each other stay copies.
    """
    found = dict(table)
    for pattern, given in (overrides or {}).items():
        names = [name for name in found if fnmatchcase(name, pattern) and found[name].kind != laws.GIVEN]
        if not names:
            raise InputError(f"overrides: no weight is named {pattern!r}. Such as: {', '.join(list(found)[:3])}.")
        law = given if isinstance(given, Law) else laws.normal(require_real(f"overrides[{pattern!r}]", given))
        found.update({name: replace(law, source=found[name].source) for name in names})  # copies stay copies
    return found
