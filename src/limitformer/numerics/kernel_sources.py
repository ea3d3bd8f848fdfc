"""Which sources a kernel is made of, and a fingerprint of them.

A compiled kernel holds the code of all kernels that it calls and the constants that it reads, wherever they are
written. Those files are found by following the imports of its own file, among the files that kernels are written in. So
an edit of the sphere's kernels leaves those of the covariance chain as they are, and no edit is missed.
"""

import hashlib
import re
import sys
from functools import cache
from pathlib import Path

import numba

PACKAGE = Path(__file__).parents[1]
KERNEL_SOURCES = (
    "numerics/*.py",
    "paths/*.py",
    "covariance/*/*.py",
    "sphere/**/*.py",
    "weightless/numbers.py",
)
IMPORT = re.compile(r"^\s*from (limitformer[\w.]*) import ([^(\n]+|\([^)]*\))", re.MULTILINE)


@cache
def kernel_files() -> frozenset[Path]:
    """Every file that kernels, or what they read, may be written in."""
    return frozenset(path for pattern in KERNEL_SOURCES for path in PACKAGE.glob(pattern))


@cache
def imports_of(path: Path) -> frozenset[Path]:
    """The files of kernels that `path` imports from.

    >>> sorted(path.name for path in imports_of(PACKAGE / "paths" / "arrays.py"))
    ['kernels.py']
    """
    found = set()
    for module, names in IMPORT.findall(path.read_text(encoding="utf-8")):
        place = PACKAGE.joinpath(*module.split(".")[1:])
        found |= {place.with_suffix(".py"), place / "__init__.py"}
        found |= {place / f"{name}.py" for name in re.findall(r"\w+", names)}
    return frozenset(found & kernel_files())


def sources_of(path: Path) -> list[Path]:
    """`path` and all that it is made of, in one order."""
    found, waiting = set(), [path]
    while waiting:
        one = waiting.pop()
        if one not in found:
            found.add(one)
            waiting.extend(imports_of(one))
    return sorted(found)


@cache
def fingerprint(path: Path) -> str:
    """A name for the present state of the file `path` and of all that its kernels are made of."""
    digest = hashlib.sha256(f"{sys.version} {numba.__version__}".encode())
    for source in sources_of(path):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]
