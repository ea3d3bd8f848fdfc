"""A user function, frozen: copied with all that it reads when a part is made of it.

Gain, chain and network of a part are made at different times, and all three use the same copy. The globals, closure
variables, defaults and helpers that the function reads are copied with it, so a later change of one has no effect.

Compiled helpers are compiled again, because Numba keeps the numbers that a helper read when it was first called: for
the process and, with `cache=True`, on disk. Functions and modules of libraries are not copied, nor are objects of
classes other than numbers, texts, arrays, records, tuples, lists, sets and dicts.
"""

import dis
import hashlib
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cached_property
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np

from limitformer.base.errors import InputError, require, set_fields
from limitformer.models.functions import Function, import_function, name_of, path_of, python_function

LIBRARIES = {"builtins", "limitformer", "llvmlite", "math", "numba", "numpy", "scipy", "torch"}  # not copied
PLAIN = bool | int | float | complex | str | bytes | np.generic | None
ALWAYS_READ = ("__builtins__", "__name__")  # names in the globals of every function


class FrozenFunction:
    """A function as it was when a part was made of it.

    Attributes:
        original: the user's function.
        py_func: its copy in Python; the original of a library's.
        digest: a hash of code and values, equal in every process.
    """

    def __init__(self, original: Function, py_func: FunctionType, digest: str) -> None:
        self.original, self.py_func, self.digest = original, py_func, digest
        self.__name__, self.__qualname__ = py_func.__name__, py_func.__qualname__
        self.__module__, self.__doc__ = py_func.__module__, py_func.__doc__

    def __call__(self, *arguments: Any) -> Any:
        return self.py_func(*arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return freeze_again, (self.original, self.digest)

    def __deepcopy__(self, memo: object) -> "FrozenFunction":
        return self

    @cached_property
    def compiled(self) -> Any:
        """The copy for Numba, which compiles it for the types of its first call."""
        import numba

        return numba.njit(error_model="numpy")(self.py_func)


FROZEN: dict[tuple[Any, ...], FrozenFunction] = {}


def freeze(function: Function) -> FrozenFunction:
    """Return the function with copies of all that it reads; the same object while nothing of that changes."""
    if isinstance(function, FrozenFunction):
        return function
    snapshot = Snapshot()
    python = snapshot.copy(python_function(function), ())
    digest = hashlib.sha256(repr(snapshot.texts).encode()).hexdigest()
    return FROZEN.setdefault((function, digest, *snapshot.others), FrozenFunction(function, python, digest))


def freeze_again(function: Function, digest: str) -> FrozenFunction:
    """Freeze a function in the process that unpickles it.

    Raises:
        InputError: its code or a value that it reads differs from that of the process that pickled it.
    """
    frozen = freeze(function)
    if frozen.digest != digest:
        raise InputError(
            f"{name_of(function)} has other code, or reads other values, than when the part was made. "
            "Nearest: constants in its module that nothing changes."
        )
    return frozen


def freeze_functions(part: Any) -> None:
    """Freeze `function` and `torch` of a part that is being made.

    Raises:
        InputError: `function` is not a function of Python or Numba, or `torch` not callable.
    """
    function, torch = part.function, part.torch
    if isinstance(function, str):
        function = import_function(function)
    require(
        isinstance(python_function(function), FunctionType),
        f"function must be a function of Python or Numba, or its path; got {function!r}. Nearest: a def that calls it.",
    )
    set_fields(part, function=freeze(function), torch=torch, _torch=None)
    if torch is None or isinstance(torch, str):
        return
    require(callable(torch), f"torch must be a function of tensors, its name or its path; got {torch!r}.")
    frozen = freeze(torch) if isinstance(torch, FunctionType | FrozenFunction) else torch
    set_fields(part, torch=path_of(torch) or frozen, _torch=frozen)


def function_of(part: Any) -> FrozenFunction:
    """Return the frozen function of a part, whose field is annotated with what its constructor takes."""
    function: FrozenFunction = part.function
    return function


def is_user_part(part: object) -> bool:
    """Whether a part is made of a function."""
    return isinstance(getattr(part, "function", None), FrozenFunction)


def functions_of(part: Any) -> tuple[tuple[str, str], ...]:
    """Return name and digest of each user function in a part or model."""
    if isinstance(part, FrozenFunction):
        return () if is_of_library(part.py_func) else ((name_of(part), part.digest),)
    inner = [getattr(part, one.name) for one in fields(part)] if is_dataclass(part) else []
    return tuple(each for value in inner for each in functions_of(value))


def name_of_part(part: Any) -> str:
    """Return `Elementwise(module:function)`, for messages."""
    return f"{type(part).__name__}({name_of(part.function)})"


def is_library(module: str | None) -> bool:
    return (module or "").split(".")[0] in LIBRARIES


def is_of_library(function: FunctionType) -> bool:
    """Whether a library defines the function; `__module__` does not say so, because `functools.wraps` copies it."""
    module = str(function.__globals__.get("__name__"))
    return is_library(module) and vars(sys.modules.get(module, ModuleType(""))) is function.__globals__


def plain_helpers(function: FrozenFunction) -> list[str]:
    """Return the names of the uncompiled user functions that it calls."""
    python = function.py_func
    values = {name: python.__globals__.get(name) for name in sorted(globals_in(python.__code__))} | cells_of(python)
    return [name for name, value in values.items() if isinstance(value, FunctionType) and not is_of_library(value)]


@dataclass
class Snapshot:
    """Copies of what a function reads, by the identity of the originals.

    Attributes:
        texts: names and values.
        others: identities of the objects that are not copied.
    """

    copies: dict[tuple[Any, ...], Any] = field(default_factory=dict)
    texts: list[str] = field(default_factory=list)
    others: list[int] = field(default_factory=list)

    def copy(self, value: Any, names: Iterable[str]) -> Any:
        """Copy a value; of a module, the attributes of these names."""
        if isinstance(value, ModuleType):
            return value if is_library(value.__name__) else self.copy_module(value, tuple(names))
        if isinstance(value, FrozenFunction):
            self.texts.append(value.digest)
            return value.compiled  # for the kernel of a function that calls it
        python = python_function(value)
        if isinstance(python, FunctionType):
            copied = not is_of_library(python) and (python is value or hasattr(value, "targetoptions"))
            if copied:
                return self.copies[id(value),] if (id(value),) in self.copies else self.copy_function(value)
            self.texts.append(name_of(python))
            if not is_of_library(python):
                self.others.append(id(value))
            return value
        if type(value) in (tuple, list, set, frozenset, dict) or is_named_tuple(value):
            return self.copy_container(value, names)
        self.texts.append(text_of(value))
        if isinstance(value, np.ndarray):
            array = value.copy()
            array.flags.writeable = False
            return array
        if isinstance(value, np.void):
            return value.copy()  # a record is a view of its array
        if not isinstance(value, PLAIN):
            self.others.append(id(value))
        return value

    def copy_container(self, value: Any, names: Iterable[str]) -> Any:
        """Copy a tuple, list, set or dict with all that is in it."""
        self.texts.append(f"{type(value).__name__} {len(value)}")
        if type(value) is dict:
            copies = {}
            for key, inner in value.items():
                self.texts.append(text_of(key))
                copies[key] = self.copy(inner, names)
            return copies
        entries = sorted(value, key=text_of) if isinstance(value, set | frozenset) else value
        parts = [self.copy(inner, names) for inner in entries]
        return type(value)._make(parts) if is_named_tuple(value) else type(value)(parts)

    def copy_module(self, module: ModuleType, names: tuple[str, ...]) -> ModuleType:
        key = (id(module), *names)
        if key not in self.copies:
            copy = self.copies[key] = ModuleType(module.__name__)
            vars(copy).update(vars(module))
            vars(copy).update(self.copies_of(vars(module), names, names))
        copied: ModuleType = self.copies[key]
        return copied

    def copy_function(self, function: Any) -> Any:
        python = python_function(function)
        code, names = python.__code__, sorted(names_in(python.__code__))
        read = sorted(globals_in(code))
        space = {name: python.__globals__[name] for name in ALWAYS_READ if name in python.__globals__}
        cells = {name: CellType() for name in code.co_freevars}
        copy = FunctionType(code, space, python.__name__, None, tuple(cells.values()))
        copy.__module__, copy.__qualname__, copy.__doc__ = python.__module__, python.__qualname__, python.__doc__
        self.texts.append(repr(code_key(code)))
        copy.__defaults__ = self.copy(python.__defaults__, names)
        copy.__kwdefaults__ = self.copy(python.__kwdefaults__, names)
        # A function that reads itself finds its copy here. One of fixed signatures is compiled when its globals exist.
        fixed = has_fixed_signatures(function)
        self.copies[id(function),] = copy if fixed else compile_again(function, copy)
        space |= self.copies_of(python.__globals__, read, names)
        for name, value in cells_of(python).items():
            self.texts.append(name)
            cells[name].cell_contents = self.copy(value, names)
        if fixed:
            self.copies[id(function),] = compile_again(function, copy)
        return self.copies[id(function),]

    def copies_of(self, space: dict[str, Any], names: Iterable[str], attributes: Iterable[str]) -> dict[str, Any]:
        """Copy the values of these names, where they have one; of modules among them, these attributes."""
        copies = {}
        for name in (name for name in names if name in space):
            self.texts.append(name)
            copies[name] = self.copy(space[name], attributes)
        return copies


def is_named_tuple(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_make")


def has_fixed_signatures(function: Any) -> bool:
    """Whether `numba.jit` was called with the types of the arguments."""
    return not getattr(function, "_can_compile", True)


def compile_again(function: Any, copy: FunctionType) -> Any:
    """Return the copy with the Numba options of the function; the copy itself if that is plain Python."""
    if python_function(function) is function:
        return copy
    import numba

    if not hasattr(function, "py_func"):
        return numba.vectorize(**function.targetoptions)(copy)
    signatures = list(function.nopython_signatures) if has_fixed_signatures(function) else None
    return numba.jit(signatures, locals=function.locals, **function.targetoptions)(copy)


def cells_of(function: FunctionType) -> dict[str, Any]:
    """Return the closure's variables that have a value."""
    values = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            values[name] = cell.cell_contents
        except ValueError:
            continue
    return values


def names_in(code: CodeType) -> set[str]:
    """Return the names of globals and attributes, also those in nested functions."""
    inner = (names_in(one) for one in code.co_consts if isinstance(one, CodeType))
    return set(code.co_names).union(*inner)


def globals_in(code: CodeType) -> set[str]:
    """Return the names of globals, also those in nested functions."""
    loaded = {one.argval for one in dis.get_instructions(code) if one.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return loaded.union(*(globals_in(one) for one in code.co_consts if isinstance(one, CodeType)))


def code_key(code: CodeType) -> tuple[Any, ...]:
    """Return what the code does, without its place in a file."""
    constants = [code_key(one) if isinstance(one, CodeType) else text_of(one) for one in code.co_consts]
    return code.co_code, code.co_names, code.co_varnames, code.co_freevars, constants


def text_of(value: Any) -> str:
    """Return a text, equal in every process, that differs where numbers, texts, arrays or containers do.

    Other objects count by their type.
    """
    if isinstance(value, np.ndarray | np.void):
        return f"array {value.shape} {value.dtype} {hashlib.sha256(value.tobytes()).hexdigest()}"
    if isinstance(value, PLAIN):
        return repr(value)
    if isinstance(value, tuple | list):
        return f"{type(value).__name__}({', '.join(map(text_of, value))})"
    if isinstance(value, set | frozenset):
        return f"{type(value).__name__}({', '.join(sorted(map(text_of, value)))})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{text_of(key)}: {text_of(inner)}' for key, inner in value.items())}}}"
    return str(getattr(value, "__qualname__", type(value).__name__))
