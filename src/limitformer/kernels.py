"""How the numerical kernels are compiled: with Numba, once a machine, cached on disk.

Numba renews a cached kernel when the kernel's own file changes but not when a kernel that it calls does. So the cache
lives in a folder named after a fingerprint of all kernel sources: an edited checkout never runs yesterday's
mathematics, and two versions never share a cache.
"""

import getpass
import hashlib
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba

# Numba's annotations leave out the option `_nrt`, which its own documentation of extensions uses.
njit: Any = numba.njit
config: Any = numba.config

PACKAGE = Path(__file__).parent
KERNEL_SOURCES = (
    "kernels.py",
    "lanes.py",
    "elementary.py",
    "random.py",
    "factor.py",
    "records.py",
    "recording.py",
    "writing.py",
    "watch.py",
    "sphere/*.py",
    "chains/*.py",
    "limits/*.py",
)

# Sums may be regrouped (so that they vectorise), but infinities and NaN keep their meaning: explosions are
# recognised by them.
FASTMATH = {"reassoc", "contract", "nsz", "arcp"}


def fingerprint() -> str:
    """A name for the present state of all kernel sources."""
    digest = hashlib.sha256(f"{sys.version} {numba.__version__}".encode())
    for pattern in KERNEL_SOURCES:
        for path in sorted(PACKAGE.glob(pattern)):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def cache_folder() -> Path:
    """Where compiled kernels are kept: NUMBA_CACHE_DIR if it is set, beside the source, or in the user's cache."""
    chosen = config.CACHE_DIR
    candidates = [Path(chosen)] if chosen else [PACKAGE / "__pycache__", *user_caches()]
    return next(filter(writable, candidates), candidates[-1]) / f"kernels-{fingerprint()}"


def user_caches() -> list[Path]:
    """Where a user's programs may keep things."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return [Path(home) / "limitformer", Path(tempfile.gettempdir()) / f"limitformer-{getpass.getuser()}"]


def writable(folder: Path) -> bool:
    """Whether the folder can be made, if need be, and written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


CACHE = cache_folder()


def compiled(function: Callable[..., Any], **options: Any) -> Any:
    """Compile `function` to run without the interpreter's lock; the cache outlives the process."""
    before = config.CACHE_DIR
    config.CACHE_DIR = str(CACHE)  # Numba reads it here, when it makes the function's cache
    try:
        return njit(cache=True, nogil=True, error_model="numpy", no_cfunc_wrapper=True, **options)(function)
    finally:
        config.CACHE_DIR = before


def kernel(function: Callable[..., Any]) -> Any:
    """Compile a `function` that does not allocate.

    It is compiled without the counting of references to arrays, whose atomic instructions took 20 of the 25 ns of
    every call on small matrices. Workspaces come from a `driver`.
    """
    return compiled(function, fastmath=FASTMATH, _nrt=False)


def strict_kernel(function: Callable[..., Any]) -> Any:
    """A `kernel` whose sums stay in the order they are written, for arithmetic on the bits of a number."""
    return compiled(function, fastmath={"contract"}, _nrt=False)


def driver(function: Callable[..., Any]) -> Any:
    """Compile a `function` that allocates workspaces and hands them to kernels."""
    return compiled(function)


def inlined(function: Callable[..., Any]) -> Any:
    """Compile `function` into its callers, where the compiler can vectorise over it."""
    return njit(nogil=True, error_model="numpy", fastmath={"contract"}, inline="always", _nrt=False)(function)
