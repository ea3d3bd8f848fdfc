"""The source files of a kernel, and a fingerprint of them.

A compiled kernel contains the code of all kernels that it calls and the constants that it reads. Their files are found
by following imports, among the files that define kernels. So an edit of the sphere's kernels does not recompile those
of the covariance chain, and no edit is missed.
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
    "weightless/steps/entrywise.py",
)
IMPORT = re.compile(r"^\s*from (limitformer[\w.]*) import ([^(\n]+|\([^)]*\))", re.MULTILINE)


@cache
def kernel_files() -> frozenset[Path]:
    """Return every file that may define kernels or constants that they read."""
    return frozenset(path for pattern in KERNEL_SOURCES for path in PACKAGE.glob(pattern))


@cache
def imports_of(path: Path) -> frozenset[Path]:
    """Return the kernel files from which `path` imports.

    >>> sorted(path.name for path in imports_of(PACKAGE / "paths" / "arrays.py"))
    ['kernels.py']
    """
    imports = set()
    for module, names in IMPORT.findall(path.read_text(encoding="utf-8")):
        place = PACKAGE.joinpath(*module.split(".")[1:])
        imports |= {place.with_suffix(".py"), place / "__init__.py"}
        imports |= {place / f"{name}.py" for name in re.findall(r"\w+", names)}
    return frozenset(imports & kernel_files())


def sources_of(path: Path) -> list[Path]:
    """Return `path` and all files from which it imports, directly or not, sorted."""
    sources, waiting = set(), [path]
    while waiting:
        source = waiting.pop()
        if source not in sources:
            sources.add(source)
            waiting.extend(imports_of(source))
    return sorted(sources)


@cache
def fingerprint(path: Path) -> str:
    """Return a name for the contents of `path` and of all sources of its kernels."""
    digest = hashlib.sha256(f"{sys.version} {numba.__version__}".encode())
    for source in sources_of(path):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]
