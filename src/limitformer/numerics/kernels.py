"""Compilation of the numerical kernels: with Numba, once per machine, cached on disk.

Numba compiles a cached kernel again when its own file changes, but not when a kernel that it calls does. So the cache
is a folder named after a fingerprint of all files that define kernels: an edited checkout never runs old code, and two
versions never share a cache. Numba's index of a cache is a pickle, which can run code as its reader: the folder belongs
to the user (mode 0700).
"""

import functools
import hashlib
import os
import stat
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numba
from llvmlite import ir
from llvmlite.binding import parse_assembly
from numba.core import event
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.core.registry import CPUDispatcher

from limitformer.base.errors import InputError

# Numba's annotations leave out the option `_nrt`, which its own documentation of extensions uses.
njit: Any = numba.njit
config: Any = numba.config

# Sums may be regrouped (so that they vectorise), but infinities and NaN keep their meaning, by which explosions are
# detected.
FASTMATH = {"reassoc", "contract", "nsz", "arcp"}

PACKAGE = Path(__file__).parents[1]
KERNEL_SOURCES = (
    "numerics/*.py",
    "sampling/*.py",
    "covariance/*/*.py",
    "sphere/**/*.py",
    "weightless/numbers.py",
    "stepping/entrywise.py",
    "formats/tally.py",
)


def kernel_files() -> list[Path]:
    """Return every file that may define kernels or constants that they read, sorted."""
    return sorted({path for pattern in KERNEL_SOURCES for path in PACKAGE.glob(pattern)})


def fingerprint() -> str:
    """Return a name for the contents of all these files, and the versions of Python and Numba."""
    digest = hashlib.sha256(f"{sys.version} {numba.__version__}".encode())
    for path in kernel_files():
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def cache_folder() -> Path | None:
    """Return the first usable folder in NUMBA_CACHE_DIR, next to the source or in the user's caches."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    chosen = [Path(config.CACHE_DIR).absolute()] if config.CACHE_DIR else []
    places = (*chosen, PACKAGE / "__pycache__", Path(home, "limitformer"))
    name = f"kernels-{fingerprint()}"  # a user without HOME has a relative one
    return next((place / name for place in places if place.is_absolute() and usable(place / name)), None)


def usable(folder: Path) -> bool:
    """Make the folder if it does not exist; return whether only this user has access to it, and can write files."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = folder.lstat()
        if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.geteuid() or state.st_mode & 0o077:
            return False
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"0")  # fails on a full disk
    except OSError:
        return False
    return True


CACHE = cache_folder()
HOW_OFTEN = (
    "the first time only"
    if CACHE
    else "in every process: no folder of yours can keep them. Nearest: NUMBA_CACHE_DIR, a folder of mode 0700"
)


def compiled(function: Callable[..., Any], **options: Any) -> Any:
    """Compile `function` to run without the interpreter's lock, with the cache on disk if there is one."""
    if config.DISABLE_JIT:
        return refuse_to_run
    before = config.CACHE_DIR
    try:
        config.CACHE_DIR = str(CACHE or "")  # Numba reads it when it makes the function's cache
        cached = CACHE is not None
        return njit(nogil=True, error_model="numpy", no_cfunc_wrapper=True, cache=cached, **options)(function)
    finally:
        config.CACHE_DIR = before


def refuse_to_run(*_: Any, **__: Any) -> None:
    """Raise `InputError`: with Numba disabled kernels cannot run, because intrinsics have no Python form."""
    raise InputError("NUMBA_DISABLE_JIT is set, but kernels run only compiled. Nearest: unset NUMBA_DISABLE_JIT.")


class Begun(event.Listener):
    """A listener that calls `call` when a compilation begins, but not when a cached kernel is loaded."""

    def __init__(self, call: Callable[[], None]) -> None:
        self.call = call

    def on_start(self, event: Any) -> None:
        self.call()

    def on_end(self, event: Any) -> None:
        """Do nothing; the base class requires this method."""


def at_compilation(call: Callable[[], None]) -> AbstractContextManager[None]:
    """Call `call` whenever a compilation begins in the block."""
    return event.install_listener("numba:compile", Begun(call))


def kernel(function: Callable[..., Any]) -> Any:
    """Compile a `function` that does not allocate.

    It is compiled without reference counts of arrays, whose atomic instructions take 20 of the 25 ns of a call on small
    matrices. Workspaces come from an `allocator`.
    """
    return without_python(function, fastmath=FASTMATH, _nrt=False)


def strict_kernel(function: Callable[..., Any]) -> Any:
    """Compile a kernel whose sums stay in the written order, for arithmetic on the bits of a number."""
    return without_python(function, fastmath={"contract"}, _nrt=False)


def without_python(function: Callable[..., Any], **options: Any) -> Any:
    """Compile without the wrapper for calls from Python, which takes a third of the compilation time."""
    dispatcher = compiled(function, no_cpython_wrapper=True, pipeline_class=KernelCompiler, **options)
    if not config.DISABLE_JIT:
        dispatcher.__class__ = Kernel
    return dispatcher


class KernelCompiler(Compiler):
    """Numba's compiler with a `KernelLibrary`."""

    def compile_extra(self, func: Callable[..., Any]) -> Any:
        self.state.library = KernelLibrary(self.state.targetctx.codegen(), func.__qualname__)
        self.state.library.enable_object_caching()
        return super().compile_extra(func)


class KernelLibrary(JITCodeLibrary):
    """The library of a kernel. It emits no machine code; each caller compiles its own copy."""

    def _optimize_final_module(self) -> None:
        """Do nothing: Numba optimises the copy in each caller, and this pass would add a fifth to the compilation."""

    def _finalize_final_module(self) -> None:
        """Emit machine code for a module without functions."""
        module = self._final_module
        self._final_module = without_functions(module)
        super()._finalize_final_module()
        self._final_module = module


def without_functions(module: Any) -> Any:
    """Return a module with only the pointers to Python objects, which Numba sets for everything that it compiles."""
    places, pointer = ir.Module(), ir.IntType(8).as_pointer()
    for each in module.global_variables:
        if each.name.startswith("_ZN08NumbaEnv"):
            place = ir.GlobalVariable(places, pointer, each.name)
            place.linkage, place.initializer = "common", ir.Constant(pointer, None)
    return parse_assembly(str(places))


class Kernel(CPUDispatcher):
    """A function for compiled code. Python calls it through a driver that is compiled at the first call."""

    def __call__(self, *arguments: Any) -> Any:
        return self.driver(*arguments)

    @functools.cached_property
    def driver(self) -> Any:
        """A compiled function that only calls the kernel."""
        kernel = self

        def call(*arguments: Any) -> Any:
            return kernel(*arguments)

        return njit(nogil=True, error_model="numpy", _nrt=self.targetoptions.get("_nrt", True))(call)


def driver(function: Callable[..., Any]) -> Any:
    """Compile a `function` that allocates workspaces and hands them to kernels."""
    return compiled(function)


def allocator(function: Callable[..., Any]) -> Any:
    """Compile a `function` that allocates arrays that drivers pass to kernels."""
    return without_python(function)


def inlined(function: Callable[..., Any]) -> Any:
    """Compile `function` into its callers, where the compiler can vectorise over it."""
    return njit(nogil=True, error_model="numpy", fastmath={"contract"}, inline="always", _nrt=False)(function)
