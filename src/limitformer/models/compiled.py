"""User functions compiled by Numba when a part is made, or refused with what Numba reports, in one line."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import isfinite
from typing import Any

import numpy as np

from limitformer.base.errors import InputError, printable, require
from limitformer.models.frozen import FrozenFunction, is_of_library, plain_helpers
from limitformer.models.functions import name_of, value_at

# Words in lines of Numba's messages that name the cause, most telling first; beginnings of lines that do not.
TELLING = ("got an unexpected keyword", "unexpected keyword", "missing a required argument", "too many positional",
           "unknown attribute", "untyped global name", "not supported", "unsupported", "cannot unify",
           "no implementation", "invalid use")  # fmt: skip
NOISE = ("Failed in", "During:", "Resolution failure", "There are", "Overload", "Enable logging", "File ",
         "raised from")  # fmt: skip


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
    if is_of_library(function.py_func) and function.py_func.__globals__["__name__"].split(".")[0] == "limitformer":
        return
    with refuse_uncompilable(function):
        values = [function.compiled(*arguments) for arguments in inputs]
    alike = np.allclose(values, outputs, rtol=1e-9, atol=1e-12, equal_nan=True)
    hint = "does it use whole numbers, or read something that has changed?"
    require(alike, f"Numba and Python do not agree about {name_of(function)}: {hint}")


@contextmanager
def refuse_uncompilable(function: FrozenFunction) -> Iterator[None]:
    """Raise `InputError` with Numba's reason where it cannot compile the function within the block."""
    try:
        yield
    except Exception as error:  # some that Numba raises are not a NumbaError
        reason, cure = telling_line(str(error)), cure_of(function)
        raise InputError(f"Numba cannot compile {name_of(function)}: {reason} Nearest: {cure}.") from error


def telling_line(text: str) -> str:
    """Return the line of Numba's message that names the cause best."""
    lines = [line.strip().lstrip("->.* ") for line in re.sub(r"\x1b\[\d*m", "", text).splitlines()]
    lines = [line for line in lines if any(map(str.isalpha, line)) and not line.startswith(NOISE)]
    telling = (line for word in TELLING for line in lines if word in line.lower())
    return printable(next(telling, next(iter(lines), "it gives no reason"))).rstrip(".:")[:300] + "."


def cure_of(function: FrozenFunction) -> str:
    helpers = plain_helpers(function)
    if function.__name__ in helpers:
        return "a loop; a function cannot call itself"
    if helpers:
        return f"@numba.njit on {', '.join(helpers)}, which it calls"
    return "arithmetic, math and numpy on floats"
