"""What made the numbers of a cell: the code, the libraries that compute, and the processor it was compiled for.

A processor's own instructions change the order in which a sum is taken, and so its last bits. So a store keeps for
each cell what made it, and cells of different origins are mixed only if somebody says so.
"""

import hashlib
import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from limitformer.base.errors import require
from limitformer.base.version import package_version

Code = dict[str, str]

PACKAGE = Path(__file__).parents[1]
NO_NUMBERS = (  # parts without effect on a sweep's numbers
    "cli", "nn", "hf", "checking", "designing", "initialisation", "weightless", "plot.py",
    "base/progress.py", "base/lock.py", "sweep/phase.py", "sweep/phase_picture.py",
)  # fmt: skip
MOST_CODES, LONGEST = 10_000, 200
NAMES = ("version", "sources", "numpy", "numba", "processor")


@cache
def code() -> Code:
    """Of this process."""
    import numba  # it takes a while, and whoever only reads a store does without

    found = (package_version(), sources(), np.__version__, numba.__version__, processor())
    return dict(zip(NAMES, found, strict=True))


def sources() -> str:
    """A fingerprint of the sources that make the numbers."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        place = path.relative_to(PACKAGE)
        if place.parts[0] not in NO_NUMBERS and place.as_posix() not in NO_NUMBERS:
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def processor() -> str:
    """The name of the processor that kernels are compiled for, and a fingerprint of what it can do."""
    from numba.core.registry import cpu_target

    system, name, features = cpu_target.target_context.codegen().magic_tuple()
    return f"{name}-{hashlib.sha256(f'{system} {features}'.encode()).hexdigest()[:8]}"


def code_number(code: Code) -> int:
    """31 bits that stand for a code in a cell."""
    digest = hashlib.sha256(json.dumps(code, sort_keys=True).encode()).digest()
    return int.from_bytes(digest[:4], "little") >> 1


def differences(there: Code, here: Code) -> str:
    """In which points two codes differ."""
    names = [name for name in {**there, **here} if there.get(name) != here.get(name)]
    return "; ".join(f"{name} {there.get(name)} there, {here.get(name)} here" for name in names)


def checked_codes(given: Any) -> dict[int, Code]:
    """Codes by their numbers, from whomever they come.

    Raises:
        InputError: no such table.
    """
    plain = isinstance(given, list) and len(given) < MOST_CODES and all(map(is_code, given))
    require(plain, "its codes are no list of tables.")
    return {code_number(one): one for one in given}


def is_code(one: Any) -> bool:
    """Whether it is a short table of words, which a terminal can show."""
    if not isinstance(one, dict) or len(one) > 2 * len(NAMES):
        return False
    return all(isinstance(text, str) and len(text) < LONGEST and text.isprintable() for text in (*one, *one.values()))


def mixture(codes: Iterable[Code]) -> str:
    """In which points several codes differ, all values of each."""
    several = list(codes)
    values = {name: sorted({one.get(name, "unknown") for one in several}) for name in NAMES}
    return "; ".join(f"{name} {' and '.join(found)}" for name, found in values.items() if len(found) > 1)
