"""The origin of a cell's numbers: the code, the numerical libraries, and the processor that kernels are compiled for.

The instructions of a processor change the order of a sum, and so its last bits. Hence a cell records its origin, and
cells of different origins are mixed only on request.
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
NO_NUMBERS = (  # files without effect on the numbers of a sweep
    "cli", "nn", "hf", "checking", "designing", "initialisation", "weightless", "plot.py",
    "base/progress.py", "base/lock.py", "sweep/phase.py", "sweep/phase_picture.py",
)  # fmt: skip
MOST_CODES, LONGEST = 10_000, 200
NAMES = ("version", "sources", "numpy", "numba", "processor")


@cache
def code() -> Code:
    """Return the origin of numbers that this process computes."""
    import numba  # slow to import, and not needed to read a store

    values = (package_version(), sources(), np.__version__, numba.__version__, processor())
    return dict(zip(NAMES, values, strict=True))


def sources() -> str:
    """Return a fingerprint of the sources that make the numbers."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        place = path.relative_to(PACKAGE)
        if place.parts[0] not in NO_NUMBERS and place.as_posix() not in NO_NUMBERS:
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def processor() -> str:
    """Return the name of the processor that kernels are compiled for, and a fingerprint of its features."""
    from numba.core.registry import cpu_target

    system, name, features = cpu_target.target_context.codegen().magic_tuple()
    return f"{name}-{hashlib.sha256(f'{system} {features}'.encode()).hexdigest()[:8]}"


def code_number(code: Code) -> int:
    """Return the number of a code in a loaded sweep, 31 bits of its hash."""
    digest = hashlib.sha256(json.dumps(code, sort_keys=True).encode()).digest()
    return int.from_bytes(digest[:4], "little") >> 1


def differences(there: Code, here: Code) -> str:
    """Describe how two codes differ."""
    names = [name for name in {**there, **here} if there.get(name) != here.get(name)]
    return "; ".join(f"{name} {there.get(name)} there, {here.get(name)} here" for name in names)


def checked_codes(codes: Any) -> dict[int, Code]:
    """Return codes of unknown origin by their numbers.

    Raises:
        InputError: not a list of short tables of words.
    """
    valid = isinstance(codes, list) and len(codes) < MOST_CODES and all(map(is_code, codes))
    require(valid, "its codes are not a list of tables.")
    return {code_number(code): code for code in codes}


def is_code(code: Any) -> bool:
    """Whether it is a short table of printable words."""
    if not isinstance(code, dict) or len(code) > 2 * len(NAMES):
        return False
    return all(isinstance(text, str) and len(text) < LONGEST and text.isprintable() for text in (*code, *code.values()))


def mixture(codes: Iterable[Code]) -> str:
    """Describe how several codes differ, with all values."""
    several = list(codes)
    values = {name: sorted({one.get(name, "unknown") for one in several}) for name in NAMES}
    return "; ".join(f"{name} {' and '.join(texts)}" for name, texts in values.items() if len(texts) > 1)
