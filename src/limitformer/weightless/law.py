"""`law`: the table of the laws of all parameters of a module."""

import math
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
import xarray as xr
from torch import nn

from limitformer.base.errors import InputError, first_line, require, require_real
from limitformer.subjects.subject import Subject, resolve
from limitformer.weightless import laws
from limitformer.weightless.building import build_twice
from limitformer.weightless.laws import Law

COLUMNS = ("kind", "mean", "std", "shape", "law", "tied")


@dataclass(frozen=True)
class LawTable:
    """The laws that a module's own code draws parameters from, with their shapes and ties."""

    name: str
    laws: dict[str, Law]
    shapes: dict[str, tuple[int, ...]]
    tied: dict[str, tuple[str, ...]]

    def __getitem__(self, name: str) -> Law:
        return self.laws[name]

    def __len__(self) -> int:
        return len(self.laws)

    def dataset(self) -> xr.Dataset:
        """Return kind, mean, std, shape, law and ties of each weight."""
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
        """Return lines of name, shape and law; equal layers share a line."""
        lines = [f"{self.name}: {len(self)} parameters, {self.count:,} entries"]
        for name, (number, shape, law, tied) in self.alike().items():
            times = f" ×{number}" if number > 1 else ""
            lines.append(f"  {name}{times}  {shape}  {law}{f', tied to {tied}' if tied else ''}")
        return "\n".join(lines)

    @property
    def count(self) -> int:
        """The number of entries of all parameters."""
        return sum(torch.Size(shape).numel() for shape in self.shapes.values())

    def alike(self) -> dict[str, tuple[int, str, str, str]]:
        """Group parameters whose names differ only by numbers: their number, shape, law and ties."""
        groups: dict[str, tuple[int, str, str, str]] = {}
        for name, law in self.laws.items():
            short = ".".join("*" if part.isdecimal() else part for part in name.split("."))
            shape, tied = "×".join(map(str, self.shapes[name])), ", ".join(self.tied.get(name, ()))
            key = short if groups.get(short, (0, shape, str(law), tied))[1:] == (shape, str(law), tied) else name
            groups[key] = (groups.get(key, (0,))[0] + 1, shape, str(law), tied)
        return groups


def law(model: Any) -> LawTable:
    """Read the laws that a model's own initialisation draws from, without memory for its matrices.

    Args:
        model: a configuration of transformers, its folder, JSON or public name, a function that builds a module, or a
            `limitformer.Transformer`.

    Raises:
        InputError: the model cannot be built.

    >>> import torch
    >>> print(law(lambda: torch.nn.Linear(100, 7, bias=False)))
    <lambda>: 1 parameters, 700 entries
      weight  7×100  uniform, std 0.05774
    """
    subject = resolve(model)
    return table_of(subject, *build_without_weights(subject, torch.float32))


def build_without_weights(subject: Subject, dtype: torch.dtype) -> tuple[nn.Module, dict[str, Law]]:
    """Build the module without the entries of its random weights and buffers, and read the laws of the weights.

    Raises:
        InputError: its code raises an error.
    """
    try:
        module, known, random, *_ = build_twice(subject.factory, dtype)
    except (InputError, MemoryError):
        raise
    except Exception as error:  # the user's own code, which may raise anything
        raise build_error(subject, error) from error
    for name, part in module.named_modules():
        for key, buffer in part._buffers.items():
            if buffer is not None and f"{name}.{key}".removeprefix(".") in random:
                part._buffers[key] = buffer.to("meta")
    return module, known


def build_error(subject: Subject, error: BaseException) -> InputError:
    return InputError(f"{subject.name} cannot be made: {type(error).__name__}: {first_line(error)}")


def table_of(subject: Subject, module: nn.Module, known: dict[str, Law]) -> LawTable:
    """Add shapes and ties to the laws of a module."""
    every = dict(module.named_parameters(remove_duplicate=False))
    first = {id(parameter): name for name, parameter in module.named_parameters()}
    tied: dict[str, tuple[str, ...]] = {}
    for name, parameter in every.items():
        if name not in known:
            tied[first[id(parameter)]] = (*tied.get(first[id(parameter)], ()), name)
    shapes = {name: tuple(every[name].shape) for name in known}
    return LawTable(subject.name, known, shapes, tied)


def with_overrides(
    table: dict[str, Law], overrides: dict[str, Any] | None, shapes: dict[str, tuple[int, ...]]
) -> dict[str, Law]:
    """Replace the laws whose names match a pattern, by a standard deviation or a `Law`; copies stay copies."""
    result = dict(table)
    for pattern, override in (overrides or {}).items():
        names = [name for name in result if fnmatchcase(name, pattern) and result[name].kind != laws.GIVEN]
        if not names:
            raise InputError(f"overrides: no weight is named {pattern!r}. Nearest: {', '.join(list(result)[:3])}.")
        law = override if isinstance(override, Law) else laws.normal(require_real(f"overrides[{pattern!r}]", override))
        vector = next((name for name in names if law.kind == laws.ORTHOGONAL and len(shapes[name]) < 2), None)
        require(vector is None, f"overrides: an orthogonal law is of matrices; {vector} is a vector.")
        for name in names:
            sides = (shapes[name][0], math.prod(shapes[name][1:])) if len(shapes[name]) >= 2 else (1, 1)
            result[name] = replace(law, source=result[name].source, matrix=sides)
    return result
