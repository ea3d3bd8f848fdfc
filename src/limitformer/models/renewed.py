"""A function of one's own with all that it calls as that is now.

Numba compiles a helper when it is first called, with the numbers that the helper reads then, and keeps it: for the
process, and with `cache=True` on disk. So a function that is made again could still have a helper's old numbers. What
is computed with is therefore a copy of the function, whose compiled helpers, and theirs, are made again from their
Python form. Libraries are taken as they are.
"""

from functools import lru_cache
from types import CellType, FunctionType, ModuleType
from typing import Any

from limitformer.models.functions import Function, python_function
from limitformer.models.readings import Reading, cells_of, is_library, names_in

Copies = dict[tuple[Any, ...], Any]  # by what was copied


@lru_cache(maxsize=1024)
def renewed(function: Function, reading: Reading) -> Function:
    """The copy, kept under what the function reads; the function itself where it calls nothing compiled."""
    copies: Copies = {}
    copy = copy_of(python_function(function), [], copies)
    return copy if any(map(is_compiled, copies.values())) else function


def copy_of(value: Any, names: list[str], copies: Copies) -> Any:
    """Of a function, or of a module of which these names are read; all else, and what is a library's, as it is."""
    if isinstance(value, ModuleType) and not is_library(value.__name__):
        key = (id(value), *names)
        return copies[key] if key in copies else copy_of_module(value, names, copies)
    if isinstance(python_function(value), FunctionType) and not is_library(python_function(value).__module__):
        return copies[id(value),] if (id(value),) in copies else copy_of_function(value, copies)
    return value


def copy_of_module(module: ModuleType, names: list[str], copies: Copies) -> ModuleType:
    """With copies under these names."""
    copy = copies[id(module), *names] = ModuleType(module.__name__)
    vars(copy).update(vars(module))
    vars(copy).update({name: copy_of(vars(module)[name], names, copies) for name in names if name in vars(module)})
    return copy


def copy_of_function(function: Any, copies: Copies) -> Any:
    """With copies under the names that it reads; compiled if it was."""
    python = python_function(function)
    names, values, space = sorted(names_in(python.__code__)), cells_of(python), dict(python.__globals__)
    cells = {name: CellType() for name in python.__code__.co_freevars}
    copy = FunctionType(python.__code__, space, python.__name__, python.__defaults__, tuple(cells.values()))
    copy.__kwdefaults__, copy.__module__ = python.__kwdefaults__, python.__module__
    copy.__qualname__ = python.__qualname__
    made = copies[id(function),] = compiled_again(function, copy)
    space |= {name: copy_of(space[name], names, copies) for name in names if name in space}
    for name, value in values.items():
        cells[name].cell_contents = copy_of(value, names, copies)
    return made


def is_compiled(value: Any) -> bool:
    """Whether Numba makes machine code of it."""
    return python_function(value) is not value


def compiled_again(function: Any, copy: FunctionType) -> Any:
    """The copy compiled when it is called, with the options of the function; the copy itself if that is plain."""
    if not is_compiled(function):
        return copy
    import numba  # here it has long been imported

    again = numba.jit if hasattr(function, "py_func") else numba.vectorize
    return again(**function.targetoptions)(copy)
