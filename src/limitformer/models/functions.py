"""User functions: frozen and compiled when a part is made of them, named by the paths by which they are imported.

Gain, chain and network of a part are made at different times and must use one function. So a part has a copy of it with
the globals and closure variables that it reads, and the copy is compiled at once: a later change of a number, text or
array has no effect. Helpers, modules and containers are not copied, so do not change what the function reads there.

A path is "package.module:function". JSON has only the paths of functions: no code is stored, and none is evaluated.
Reading JSON imports the modules that it names, and importing a module runs its code.
"""

import builtins
import hashlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from importlib import import_module
from math import isfinite
from numbers import Real
from types import CellType, CodeType, FunctionType
from typing import Any

import numpy as np

from limitformer.base.errors import InputError, NotImportedError, first_line, printable, require, set_fields

Function = Callable[..., Any]

DOTTED = r"[^\W\d]\w*(?:\.[^\W\d]\w*)*"
PLAIN = bool | int | float | complex | str | bytes | np.generic | None
# Words in lines of Numba's messages that name the cause, most telling first; beginnings of lines that do not.
TELLING = ("got an unexpected keyword", "unexpected keyword", "missing a required argument", "too many positional",
           "unknown attribute", "untyped global name", "not supported", "unsupported", "cannot unify",
           "no implementation", "invalid use")  # fmt: skip
NOISE = ("Failed in", "During:", "Resolution failure", "There are", "Overload", "Enable logging", "File ",
         "raised from")  # fmt: skip


class FrozenFunction:
    """A function as it was when a part was made of it.

    Attributes:
        original: the user's function.
        py_func: its copy in Python.
        digest: a hash of its code and of the numbers, texts, arrays and tuples that it reads, equal in every process.
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
    """Return a copy of the function and of what it reads; the same object while nothing of that changes."""
    if isinstance(function, FrozenFunction):
        return function
    python = python_function(function)
    code = python.__code__
    read = names_in(code)
    space = {name: copied(value) for name, value in python.__globals__.items() if name in read}
    cells = [copied(cell.cell_contents) for cell in python.__closure__ or ()]
    copy = FunctionType(code, space, python.__name__, python.__defaults__, tuple(map(CellType, cells)))
    copy.__module__, copy.__qualname__, copy.__doc__ = python.__module__, python.__qualname__, python.__doc__
    copy.__kwdefaults__ = python.__kwdefaults__
    defaults = copy.__defaults__, *(copy.__kwdefaults__ or {}).items()
    values = [*(space[name] for name in sorted(space)), *cells, *defaults]
    texts = code_key(code), sorted(space), [text_of(value) for value in values]
    digest = hashlib.sha256(repr(texts).encode()).hexdigest()
    space["__builtins__"] = builtins  # C code that imports while the function runs, as numpy does, looks there
    others = (id(value) for value in values if not isinstance(value, PLAIN | np.ndarray))
    return FROZEN.setdefault((function, digest, *others), FrozenFunction(function, copy, digest))


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


def names_in(code: CodeType) -> set[str]:
    """Return the names of globals and attributes, also those in nested functions."""
    return set(code.co_names).union(*(names_in(one) for one in code.co_consts if isinstance(one, CodeType)))


def copied(value: Any) -> Any:
    return value.copy() if isinstance(value, np.ndarray | np.void) else value  # a record is a view of its array


def code_key(code: CodeType) -> tuple[Any, ...]:
    """Return what the code does, without its place in a file."""
    constants = [code_key(one) if isinstance(one, CodeType) else text_of(one) for one in code.co_consts]
    return code.co_code, code.co_names, code.co_varnames, code.co_freevars, constants


def text_of(value: Any) -> str:
    """Return a text, equal in every process, that differs where numbers, texts or arrays do; the name of others."""
    if isinstance(value, tuple):
        return repr([text_of(one) for one in value])
    if isinstance(value, frozenset):  # `x in {1, 2}`; its order is another one in each process
        return repr({"set": sorted(map(text_of, value))})
    if isinstance(value, np.ndarray | np.void):
        return f"array {value.shape} {value.dtype} {hashlib.sha256(value.tobytes()).hexdigest()}"
    return repr(value) if isinstance(value, PLAIN) else str(getattr(value, "__qualname__", type(value).__name__))


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
    frozen = freeze(torch) if isinstance(torch, FunctionType) else torch
    set_fields(part, torch=path_of(torch) or frozen, _torch=frozen)


def function_of(part: Any) -> FrozenFunction:
    """Return the frozen function of a part, whose field is annotated with what its constructor takes."""
    function: FrozenFunction = part.function
    return function


def is_user_part(part: object) -> bool:
    """Whether a part is made of a function."""
    return isinstance(getattr(part, "function", None), FrozenFunction)


def name_of_part(part: Any) -> str:
    """Return `Elementwise(module:function)`, for messages."""
    return f"{type(part).__name__}({name_of(part.function)})"


# Paths.


def is_path(text: object) -> bool:
    """Whether it has the form "package.module:function"."""
    return isinstance(text, str) and re.fullmatch(rf"{DOTTED}:{DOTTED}", text) is not None


def python_function(function: Any) -> Any:
    """Return the Python function of one that was compiled by `njit` or `vectorize`, or frozen; others as they are."""
    return getattr(getattr(function, "_dispatcher", function), "py_func", function)


def name_of(function: Function | str) -> str:
    """Return the name for messages.

    >>> name_of(is_path)
    'limitformer.models.functions:is_path'
    """
    python = python_function(function)
    return f"{getattr(python, '__module__', '?')}:{getattr(python, '__qualname__', type(python).__name__)}"


def path_of(function: Function) -> str | None:
    """Return the path that imports it in another process; None for a lambda, a nested function or a script's."""
    original, path = getattr(function, "original", function), name_of(function)
    if not is_path(path) or path.startswith("__main__:"):
        return None
    try:
        return path if import_function(path) in (original, python_function(original)) else None
    except InputError:
        return None


def import_function(path: str, *, imports: bool = True) -> Function:
    """Return the function at a path; with `imports=False` its module must have been imported already.

    Raises:
        InputError: not a path, or nothing there that can be called.

    >>> import_function("limitformer.models.functions:is_path") is is_path
    True
    """
    require(is_path(path), f'A function is named by its path, "package.module:function"; got {path!r}.')
    module, name = path.split(":")
    value: Any = import_named_module(module) if imports else sys.modules.get(module)
    if value is None:
        raise NotImportedError(f"{path} is not imported because a file names it. Nearest: import {module} first.")
    for part in name.split("."):
        value = getattr(value, part, None)
    require(callable(value), f"{module} has no function {name}; {path!r} leads nowhere.")
    function: Function = value
    return function


def import_named_module(name: str) -> Any:
    try:
        return import_module(name)
    except (Exception, SystemExit) as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise InputError(f"The module {name} cannot be imported: {reason}") from error


def value_at(function: Function, x: float) -> float:
    """Return σ(x) of a Python function.

    Raises:
        InputError: σ raises an exception, or returns anything but a real number.
    """
    try:
        y = python_function(function)(x)
    except Exception as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise InputError(f"function must take any number; {name_of(function)}({x:g}) raised {reason}.") from error
    require(isinstance(y, Real), f"function must give a real number; {name_of(function)}({x:g}) gave {y!r}.")
    return float(y)


# Compilation.


def require_scalar_function(function: FrozenFunction, points: Sequence[float]) -> None:
    """Raise `InputError` unless σ is finite at these points in Python, and the same when it is compiled."""
    values = [value_at(function, x) for x in points]
    for x, y in zip(points, values, strict=True):
        require(isfinite(y), f"function must be finite; {name_of(function)}({x:g}) gave {y}.")
    compile_user_function(function, [(x,) for x in points], values)


def compile_user_function(function: FrozenFunction, inputs: Sequence[tuple[Any, ...]], outputs: Any) -> None:
    """Compile a user's function for arguments such as these inputs, and compare it with the outputs of Python there.

    Functions of this package are compiled when a kernel needs them, so that declaring a model does not import Numba.

    Raises:
        InputError: Numba cannot compile it, or the compiled function gives other numbers.
    """
    if python_function(function.original).__globals__.get("__name__", "").startswith("limitformer."):
        return
    with refuse_uncompilable(function):
        values = [function.compiled(*arguments) for arguments in inputs]
    alike = np.allclose(values, outputs, rtol=1e-9, atol=1e-12, equal_nan=True)
    hint = "does it use whole numbers, or read something that has changed?"
    require(alike, f"Numba and Python do not agree about {name_of(function)}: {hint}")


@contextmanager
def refuse_uncompilable(function: FrozenFunction) -> Iterator[None]:
    """Raise `InputError` with the line of Numba's message that names the cause best, if it cannot compile the function.

    The message proposes a repair.
    """
    try:
        yield
    except Exception as error:  # some that Numba raises are not a NumbaError
        lines = [line.strip().lstrip("->.* ") for line in re.sub(r"\x1b\[\d*m", "", str(error)).splitlines()]
        lines = [line for line in lines if any(map(str.isalpha, line)) and not line.startswith(NOISE)]
        telling = (line for word in TELLING for line in lines if word in line.lower())
        reason = printable(next(telling, next(iter(lines), "it gives no reason"))).rstrip(".:")[:300]
        read = {**function.py_func.__globals__, **inspect.getclosurevars(function.py_func).nonlocals}
        helpers = sorted(name for name, value in read.items() if isinstance(value, FunctionType))
        cure = (
            f"@numba.njit on {', '.join(helpers)}, which it calls"
            if helpers
            else "arithmetic, math and numpy on floats"
        )
        if function.__name__ in helpers:
            cure = "a loop; a function cannot call itself"
        raise InputError(f"Numba cannot compile {name_of(function)}: {reason}. Nearest: {cure}.") from error
