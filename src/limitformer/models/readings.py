"""What a function of one's own reads besides its arguments: globals, closures, defaults, and the functions it calls.

A part is gain, kernel and network at once. Each is made at another time, so a number that the function reads and that
changes in between would make three models of one. A part keeps what its function read when the part was made; it is
compared at each use, and what is kept of a function (gains, kernels, tensors) is kept under it.
"""

import hashlib
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np

from limitformer.base.errors import InputError
from limitformer.models.functions import Function, name_of, python_function

Reading = tuple[tuple[str, str], ...]  # names and what stood there, shown or as a digest

OF_LIBRARIES = {"builtins", "limitformer", "llvmlite", "math", "numba", "numpy", "scipy", "torch"}  # taken as they are
ITSELF = "()"  # the name of a function's code


def reading_of(function: Function) -> Reading:
    """Names and values of all that it reads; strings alone, so that it travels between processes.

    Values are followed through functions and modules, but not into libraries; those of objects that are no number,
    text, array, tuple or list count by their type alone.

    >>> scale = 2.0
    >>> reading_of(lambda x: scale * x)[1:]
    (('scale', '2.0'),)
    """
    return tuple(entries(python_function(function), "", set()))


def require_unchanged(function: Function, then: Reading) -> None:
    """Raise `InputError` if it reads something else than it did."""
    now = reading_of(function)
    if now != then:
        raise InputError(f"{name_of(function)} {difference(dict(then), dict(now))}. Nearest: make the part again.")


def difference(then: Mapping[str, str], now: Mapping[str, str]) -> str:
    """The first thing that is not as it was, in words."""
    names = [name for name in {**then, **now} if then.get(name) != now.get(name)]
    name = next((name for name in names if not name.endswith(ITSELF)), names[0])
    if name == ITSELF:
        return "is another function than when the part was made"
    was, is_ = (values.get(name, "nothing") for values in (then, now))
    return f"reads {name}, which was {was} when the part was made and is {is_} now"


def entries(function: Any, before: str, seen: set[Any]) -> Iterator[tuple[str, str]]:
    """Of one function, whose names are written behind `before`."""
    if id(function) in seen or not isinstance(function, FunctionType):
        return
    seen.add(id(function))
    yield before.rstrip(".") + ITSELF, digest(repr(code_key(function.__code__)).encode())
    given = {"defaults": function.__defaults__, "keyword defaults": function.__kwdefaults__}
    yield from ((before + name, shown(value)) for name, value in given.items() if value)
    names = sorted(names_in(function.__code__))
    found = {name: function.__globals__[name] for name in names if name in function.__globals__}
    for name, value in {**found, **cells_of(function)}.items():
        yield from entries_of(value, before + name, names, seen)


def plain_helpers(function: Function) -> list[str]:
    """The names of the functions of plain Python, none of a library's, that it calls."""
    python = python_function(function)
    names = names_in(python.__code__)
    found = {name: python.__globals__.get(name) for name in sorted(names)} | cells_of(python)
    return [
        name for name, value in found.items() if isinstance(value, FunctionType) and not is_library(value.__module__)
    ]


def entries_of(value: Any, name: str, names: list[str], seen: set[Any]) -> Iterator[tuple[str, str]]:
    """Of what stands under a name: of a module those of its own `names` that are read."""
    if isinstance(python_function(value), FunctionType):
        if not is_library(python_function(value).__module__):
            yield from entries(python_function(value), f"{name}.", seen)
    elif not isinstance(value, ModuleType):
        yield name, shown(value)
    elif not is_library(value.__name__):
        for inner in (inner for inner in names if inner in vars(value) and (id(value), inner) not in seen):
            seen.add((id(value), inner))
            yield from entries_of(vars(value)[inner], f"{name}.{inner}", names, seen)


def is_library(module: str | None) -> bool:
    """Whether it belongs to one whose contents nobody changes."""
    return (module or "").split(".")[0] in OF_LIBRARIES


def cells_of(function: FunctionType) -> dict[str, Any]:
    """The closure's variables; those without a value yet are left out."""
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:
            continue
    return found


def names_in(code: CodeType) -> set[str]:
    """Of globals and attributes, those of functions inside it too."""
    inner = (names_in(one) for one in code.co_consts if isinstance(one, CodeType))
    return set(code.co_names).union(*inner)


def code_key(code: CodeType) -> tuple[Any, ...]:
    """What it does, without where it is written."""
    constants = [code_key(one) if isinstance(one, CodeType) else repr(one) for one in code.co_consts]
    return code.co_code, code.co_names, code.co_varnames, code.co_freevars, constants


def shown(value: Any) -> str:
    """The value as text that differs where values do; of arrays their shape and a digest."""
    if isinstance(value, np.ndarray):
        return f"an array {value.shape} of {value.dtype}, {digest(value.tobytes())}"
    if isinstance(value, bool | int | float | complex | str | bytes | np.generic | None):
        return repr(value)
    if isinstance(value, tuple | list):
        return f"({', '.join(map(shown, value))})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{shown(key)}: {shown(inner)}' for key, inner in value.items())}}}"
    if isinstance(python_function(value), FunctionType):
        return name_of(value)
    return str(getattr(value, "__qualname__", f"a {type(value).__name__}"))


def digest(content: bytes) -> str:
    """A short one."""
    return hashlib.sha256(content).hexdigest()[:12]
