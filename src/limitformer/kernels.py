"""How the numerical kernels are compiled: with Numba, once a machine, cached on disk beside their source.

Numba renews a cached kernel when the kernel's own file changes but not when a kernel that it calls does.
`drop_stale_caches` closes that gap, so that an edited checkout never runs yesterday's mathematics.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba

# Numba's annotations leave out the option `_nrt`, which its own documentation of extensions uses.
njit: Any = numba.njit

PACKAGE = Path(__file__).parent
KERNEL_SOURCES = (
    "kernels.py",
    "lanes.py",
    "elementary.py",
    "random.py",
    "factor.py",
    "recording.py",
    "chains/*.py",
    "limits/*.py",
)

# Sums may be regrouped (so that they vectorise), but infinities and NaN keep their meaning: explosions are
# recognised by them.
FASTMATH = {"reassoc", "contract", "nsz", "arcp"}


def drop_stale_caches() -> None:
    """Delete cached kernels that are older than the newest kernel source."""
    sources = [path for pattern in KERNEL_SOURCES for path in PACKAGE.glob(pattern)]
    newest = max(path.stat().st_mtime for path in sources)
    for index in PACKAGE.glob("**/__pycache__/*.nbi"):
        if index.stat().st_mtime < newest:
            index.unlink(missing_ok=True)


def kernel(function: Callable[..., Any]) -> Any:
    """Compile `function` to run without the interpreter's lock; the cache outlives the process.

    A kernel must not allocate: it is compiled without the counting of references to arrays, whose atomic
    instructions took 20 of the 25 ns of every call on small matrices. Workspaces come from a `driver`.
    """
    return njit(cache=True, nogil=True, error_model="numpy", fastmath=FASTMATH, _nrt=False)(function)


def strict_kernel(function: Callable[..., Any]) -> Any:
    """A `kernel` whose sums stay in the order they are written, for arithmetic on the bits of a number."""
    return njit(cache=True, nogil=True, error_model="numpy", fastmath={"contract"}, _nrt=False)(function)


def driver(function: Callable[..., Any]) -> Any:
    """Compile a `function` that allocates workspaces and hands them to kernels."""
    return njit(cache=True, nogil=True, error_model="numpy")(function)


def inlined(function: Callable[..., Any]) -> Any:
    """Compile `function` into its callers, where the compiler can vectorise over it."""
    return njit(nogil=True, error_model="numpy", fastmath={"contract"}, inline="always", _nrt=False)(function)


drop_stale_caches()
