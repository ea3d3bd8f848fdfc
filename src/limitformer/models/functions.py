"""User functions: their names in messages, and the paths by which they are imported.

A path is "package.module:function". JSON has only the paths of functions: no code is stored, and none is evaluated.
Reading JSON imports the modules that it names, and importing a module runs its code.
"""

import re
import sys
from collections.abc import Callable
from importlib import import_module
from numbers import Real
from typing import Any

from limitformer.base.errors import InputError, NotImportedError, first_line, require

Function = Callable[..., Any]

DOTTED = r"[^\W\d]\w*(?:\.[^\W\d]\w*)*"


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
