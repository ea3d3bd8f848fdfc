"""Functions of one's own, the parts that are no numbers: their names, and the paths by which they are imported.

A path is "package.module:function". JSON has functions by their paths and nothing else of them: no code is kept, none
is evaluated. Whoever reads JSON imports the modules that it names, and importing runs them.
"""

import re
import sys
from collections.abc import Callable
from importlib import import_module
from numbers import Real
from types import FunctionType
from typing import Any

from limitformer.base.errors import InputError, NotImportedError, first_line, require

Function = Callable[..., Any]

DOTTED = r"[^\W\d]\w*(?:\.[^\W\d]\w*)*"


def is_path(text: object) -> bool:
    """Whether it has the form "package.module:function"."""
    return isinstance(text, str) and re.fullmatch(rf"{DOTTED}:{DOTTED}", text) is not None


def python_function(function: Any) -> Any:
    """The Python function of one that Numba has compiled, by `njit` or `vectorize`; others as they are."""
    return getattr(getattr(function, "_dispatcher", function), "py_func", function)


def name_of(function: Function | str) -> str:
    """What to call it in messages.

    >>> name_of(is_path)
    'limitformer.models.functions:is_path'
    """
    python = python_function(function)
    return f"{getattr(python, '__module__', '?')}:{getattr(python, '__qualname__', type(python).__name__)}"


def path_of(function: Function) -> str | None:
    """The path that leads back to it from another process; None of a lambda, a function inside another, a script's."""
    path = name_of(function)
    if not is_path(path) or path.startswith("__main__:"):
        return None
    try:
        return path if import_function(path) in (function, python_function(function)) else None
    except InputError:
        return None


def import_function(path: str, *, imports: bool = True) -> Function:
    """The function of that path, whose module is imported; with `imports=False` only if it has been already.

    Raises:
        InputError: no path, or nothing there that can be called.

    >>> imported("limitformer.models.functions:is_path") is is_path
    True
    """
    require(is_path(path), f'A function is named by its path, "package.module:function"; got {path!r}.')
    module, name = path.split(":")
    found: Any = module_named(module) if imports else sys.modules.get(module)
    if found is None:
        raise NotImportedError(f"{path} is not imported because a file names it. Nearest: import {module} first.")
    for part in name.split("."):
        found = getattr(found, part, None)
    require(callable(found), f"{module} has no function {name}; {path!r} leads nowhere.")
    return found


def module_named(name: str) -> Any:
    """The imported module; whatever its code raises, as one line."""
    try:
        return import_module(name)
    except (Exception, SystemExit) as error:
        what = f"{type(error).__name__}: {first_line(error)}"
        raise InputError(f"The module {name} cannot be imported: {what}") from error


def checked(name: str, function: Any) -> Function:
    """`function`, or that of its path, if it is one of Python or Numba.

    Raises:
        InputError: it is none.
    """
    found = import_function(function) if isinstance(function, str) else function
    python = isinstance(python_function(found), FunctionType)
    wanted = "a function of Python or Numba, or its path"
    require(python, f"{name} must be {wanted}; got {found!r}. Nearest: a def that calls it.")
    return found


def checked_torch(torch: Any) -> Any:
    """A name, a path, a function without one, or None."""
    if torch is None or isinstance(torch, str):
        return torch
    require(callable(torch), f"torch must be a function of tensors, its name or its path; got {torch!r}.")
    return path_of(torch) or torch


def value_at(function: Function, x: float) -> float:
    """σ(x) of a Python function.

    Raises:
        InputError: it raises something, or gives no number.
    """
    try:
        y = python_function(function)(x)
    except Exception as error:
        what = f"{type(error).__name__}: {first_line(error)}"
        raise InputError(f"function must take any number; {name_of(function)}({x:g}) raised {what}.") from error
    require(isinstance(y, Real), f"function must give a real number; {name_of(function)}({x:g}) gave {y!r}.")
    return float(y)
