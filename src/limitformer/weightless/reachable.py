"""All objects that a module can reach when it runs: its parts, attributes, lists, dictionaries and closures.

A forward pass may use tensors that are neither parameters nor buffers, and may change objects. `reachable` walks them
by their paths, such as `blocks.0.extra[1].weight`, to compare two builds and to restore a module.
"""

import functools
import random
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from limitformer.weightless.implicit import Implicit
from limitformer.weightless.tensors import same_tensors

# Modules whose objects hold no numbers of the user.
OPAQUE = ("limitformer.weightless", "limitformer.stepping", "logging", "threading", "weakref", "_thread")
CLASSES = (type, types.ModuleType, Implicit, str, bytes, torch.dtype, torch.device)  # whose objects are not searched
WITHOUT_NUMBERS = {type(None), str, type, types.BuiltinFunctionType, types.ModuleType}  # the common ones
OF_MODULES = set(vars(nn.Module()))  # mostly hooks
LEAVES = {bool, int, float, complex}
NUMBERS = bool | int | float | complex | np.generic | np.ndarray
GENERATORS = torch.Generator | np.random.Generator | np.random.RandomState | random.Random
REGISTERS = ("_parameters", "_buffers", "_modules")  # of a module; paths leave these names out
HOOKS = ("_forward_hooks", "_forward_pre_hooks")
WHOLE_COPIES = 2  # parameters with as many dimensions are not copied; their changes are counted


class Place(NamedTuple):
    """An object that a module can reach."""

    path: str
    value: Any
    registered: bool  # whether the path is that of a parameter or buffer


def reachable(module: nn.Module) -> Iterator[Place]:
    """Yield every tensor at each of its paths, and every other object once."""
    seen: set[int] = set()
    owned = {id(part) for part in module.modules()}
    waiting: list[Place] = [Place("", module, False)]
    while waiting:
        place = waiting.pop()
        value, kind = place.value, type(place.value)
        if kind in LEAVES:
            yield place
            continue
        if isinstance(value, CLASSES) or kind.__module__.startswith(OPAQUE):
            continue
        if not isinstance(value, Tensor):
            if id(value) in seen:
                continue
            seen.add(id(value))
        yield place
        waiting.extend(one for one in inside(place, owned) if type(one.value) not in WITHOUT_NUMBERS)


def inside(place: Place, owned: set[int]) -> Iterator[Place]:
    """Yield the objects that an object holds; the modules in `owned` register their parameters."""
    path, value = place.path, place.value
    if isinstance(value, dict):
        named = enumerate(value.items())
        yield from (Place(f"{path}[{key if isinstance(key, str) else k}]", each, False) for k, (key, each) in named)
    elif isinstance(value, list | tuple | set | frozenset):
        yield from (Place(f"{path}[{k}]", each, False) for k, each in enumerate(value))
    elif isinstance(value, functools.partial):
        yield from (Place(f"{path}()", each, False) for each in (value.func, value.args, value.keywords))
    elif isinstance(value, types.MethodType):
        yield Place(f"{path}()", value.__self__, False)
    elif isinstance(value, types.FunctionType):
        cells = dict(zip(value.__code__.co_freevars, value.__closure__ or (), strict=True))
        yield from (Place(f"{path}()[{name}]", content(cell), False) for name, cell in cells.items())
        yield Place(f"{path}()", value.__defaults__, False)
    elif not isinstance(value, NUMBERS):
        for name, each in fields_of(value).items():
            if name in OF_MODULES and not each and isinstance(value, nn.Module):
                continue
            if isinstance(value, nn.Module) and name in REGISTERS:
                registered = id(value) in owned
                yield from (Place(joined(path, key), one, registered) for key, one in each.items())
            else:
                yield Place(joined(path, name), each, False)


def joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def content(cell: Any) -> Any:
    """Return the value of a closure's cell, None while it is empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def fields_of(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, including slots."""
    if hasattr(value, "__dict__"):
        return dict(vars(value))
    slots = [kind.__dict__.get("__slots__", ()) for kind in type(value).__mro__]
    names = [name for each in slots for name in ((each,) if isinstance(each, str) else each)]
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def stray_tensors(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield tensors, numbers and generators other than parameters and buffers, by path."""
    for place in reachable(module):
        if isinstance(place.value, Tensor | NUMBERS | GENERATORS) and not place.registered:
            yield place.path, place.value


class State:
    """A copy of all that a module holds, which `restore` puts back after a pass."""

    def __init__(self, module: nn.Module) -> None:
        self.holders: list[tuple[Any, Any]] = []
        self.tensors: list[tuple[Tensor, Tensor]] = []
        self.weights: list[tuple[str, Tensor, int]] = []
        self.hooks: list[tuple[dict[int, Any], set[int]]] = []
        for place in reachable(module):
            value = place.value
            if isinstance(value, Tensor):
                self.copy(place.path, value)
            elif isinstance(value, np.ndarray | list | dict | set):
                self.holders.append((value, value.copy()))
            elif type(value) not in LEAVES and isinstance(getattr(value, "__dict__", None), dict):
                fields = vars(value)
                self.holders.append((fields, dict(fields)))
                registers = [fields[name] for name in REGISTERS if name in fields]
                self.holders.extend((each, each.copy()) for each in registers if isinstance(each, dict))
                hooks = [fields[name] for name in HOOKS if name in fields] if isinstance(value, nn.Module) else []
                self.hooks.extend((each, set(each)) for each in hooks)

    def copy(self, name: str, tensor: Tensor) -> None:
        """Copy a tensor's entries; of a large parameter, note the number of its changes."""
        if isinstance(tensor, nn.Parameter) and tensor.dim() >= WHOLE_COPIES:
            if not tensor.is_inference():
                self.weights.append((name, tensor, tensor._version))
        elif not tensor.is_meta:
            self.tensors.append((tensor, tensor.detach().clone()))

    def restore(self) -> None:
        """Put everything back as it was, except hooks of this package.

        Transformers installs hooks in the first pass that asks for hidden states, and notes that in an attribute.
        Without the attribute, and with the hooks, the next pass would install them twice.
        """
        ours = __package__.partition(".")[0]
        for hooks, known in self.hooks:
            for key in hooks.keys() - known:
                if not str(getattr(hooks[key], "__module__", "")).startswith(ours):
                    del hooks[key]
        for holder, before in self.holders:
            put_back(holder, before)
        with torch.no_grad():
            for tensor, before in self.tensors:
                if not same_tensors(tensor, before):
                    tensor.detach().copy_(before)

    def changed_weight(self) -> str | None:
        """Return the name of a parameter whose entries were changed, if there is one."""
        return next((name for name, weight, version in self.weights if weight._version != version), None)


def put_back(holder: Any, before: Any) -> None:
    """Restore an array, a list, a dictionary or a set in place."""
    if isinstance(holder, np.ndarray):
        holder[...] = before
    elif isinstance(holder, dict):
        if len(holder) != len(before) or any(holder.get(key, holder) is not each for key, each in before.items()):
            holder.clear()
            holder.update(before)
    elif isinstance(holder, list):
        if len(holder) != len(before) or any(a is not b for a, b in zip(holder, before, strict=True)):
            holder[:] = before
    elif holder != before:
        holder.clear()
        holder.update(before)
