"""How the numerical kernels are compiled: with Numba, once a machine, cached on disk.

Numba renews a cached kernel when the kernel's own file changes but not when a kernel that it calls does. So the kernels
of a file are kept in a folder named after a fingerprint of all that they are made of (`kernel_sources`): an edited
checkout never runs yesterday's mathematics, and two versions never share a cache. Where that folder lies says `caches`.
"""

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numba
from llvmlite import ir
from llvmlite.binding import parse_assembly
from numba.core import event
from numba.core.caching import FunctionCache
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.core.registry import CPUDispatcher

from limitformer.base.errors import InputError
from limitformer.numerics import caches
from limitformer.numerics.kernel_sources import PACKAGE, fingerprint

# Numba's annotations leave out the option `_nrt`, which its own documentation of extensions uses.
njit: Any = numba.njit
config: Any = numba.config

# Sums may be regrouped (so that they vectorise), but infinities and NaN keep their meaning: explosions are
# recognised by them.
FASTMATH = {"reassoc", "contract", "nsz", "arcp"}


CACHE = caches.folder(config.CACHE_DIR, PACKAGE, "kernels")
HOW_OFTEN = caches.how_often(CACHE, config.CACHE_DIR)


def compiled(function: Callable[..., Any], **options: Any) -> Any:
    """Compile `function` to run without the interpreter's lock; the cache, if there is one, outlives the process."""
    if config.DISABLE_JIT:
        return refuse_to_run
    made = njit(nogil=True, error_model="numpy", no_cfunc_wrapper=True, **options)(function)
    before = config.CACHE_DIR
    try:
        if CACHE is not None:
            config.CACHE_DIR = str(CACHE / folder_of(function))  # Numba reads it when it makes the function's cache
            made._cache = KernelCache(function)  # as `njit(cache=True)` does with a cache of Numba's own
        return made
    finally:
        config.CACHE_DIR = before


def folder_of(function: Callable[..., Any]) -> str:
    """Named after the file of `function` and the state of all that its kernels are made of."""
    path = Path(inspect.getfile(function))
    return f"{path.stem}-{fingerprint(path)}"


class KernelCache(FunctionCache):
    """Kernels on disk, without which one computes all the same: a disk may be full, and a file damaged."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The kept kernel, or None if there is none that can be read."""
        try:
            return super().load_overload(sig, target_context)
        except Exception:  # noqa: BLE001  a damaged pickle may raise anything
            self.forget()
            return None

    def forget(self) -> None:
        """Begin anew, in the place of files that cannot be read."""
        try:
            self.flush()
        except OSError:
            self.disable()

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep a kernel if that can be."""
        try:
            super().save_overload(sig, data)
        except OSError as error:
            caches.say_not_kept(CACHE, error.strerror)


def refuse_to_run(*_: Any, **__: Any) -> None:
    """What a kernel does where Numba is switched off: intrinsics have no Python."""
    raise InputError("NUMBA_DISABLE_JIT is set, but kernels run only compiled. Nearest: unset NUMBA_DISABLE_JIT.")


class Begun(event.Listener):
    """Calls `call` when a compilation begins, rather than the loading of a compiled kernel."""

    def __init__(self, call: Callable[[], None]) -> None:
        self.call = call

    def on_start(self, event: Any) -> None:
        """A compilation begins."""
        self.call()

    def on_end(self, event: Any) -> None:
        """It has ended."""


def at_compilation(call: Callable[[], None]) -> AbstractContextManager[None]:
    """Call `call` whenever a compilation begins in the block."""
    return event.install_listener("numba:compile", Begun(call))


def kernel(function: Callable[..., Any]) -> Any:
    """Compile a `function` that does not allocate.

    It is compiled without the counting of references to arrays, whose atomic instructions took 20 of the 25 ns of
    every call on small matrices. Workspaces come from an `allocator`.
    """
    return without_python(function, fastmath=FASTMATH, _nrt=False)


def strict_kernel(function: Callable[..., Any]) -> Any:
    """A `kernel` whose sums stay in the order they are written, for arithmetic on the bits of a number."""
    return without_python(function, fastmath={"contract"}, _nrt=False)


def without_python(function: Callable[..., Any], **options: Any) -> Any:
    """Compiled without what only Python needs to call it, which took a third of the time of compilation."""
    made = compiled(function, no_cpython_wrapper=True, pipeline_class=KernelCompiler, **options)
    if not config.DISABLE_JIT:
        made.__class__ = Kernel
    return made


class KernelCompiler(Compiler):
    """Numba's own, with a library of another kind."""

    def compile_extra(self, func: Callable[..., Any]) -> Any:
        """Compile `func`."""
        self.state.library = KernelLibrary(self.state.targetctx.codegen(), func.__qualname__)
        self.state.library.enable_object_caching()
        return super().compile_extra(func)


class KernelLibrary(JITCodeLibrary):
    """What callers link, without machine code of its own: theirs has a copy, inlined or not."""

    def _optimize_final_module(self) -> None:
        """Nothing: Numba optimises what is called again in every caller, and what Python calls contains all it calls.

        It took a fifth of the time of compilation or more, and kernels are as fast without it, or faster.
        """

    def _finalize_final_module(self) -> None:
        """Numba hands its module to the machine: for the time being one without functions."""
        whole = self._final_module
        self._final_module = without_functions(whole)
        super()._finalize_final_module()
        self._final_module = whole


def without_functions(module: Any) -> Any:
    """Places of Python's objects alone, which Numba fills for all that it compiles."""
    places, pointer = ir.Module(), ir.IntType(8).as_pointer()
    for each in module.global_variables:
        if each.name.startswith("_ZN08NumbaEnv"):
            place = ir.GlobalVariable(places, pointer, each.name)
            place.linkage, place.initializer = "common", ir.Constant(pointer, None)
    return parse_assembly(str(places))


class Kernel(CPUDispatcher):
    """A function that compiled code calls. Python may, too, by way of a driver that is compiled when it is needed."""

    def __call__(self, *arguments: Any) -> Any:
        """As compiled code calls it."""
        return self.of_python(*arguments)

    @functools.cached_property
    def of_python(self) -> Any:
        """What calls the kernel and nothing else."""
        made = self

        def call(*arguments: Any) -> Any:
            return made(*arguments)

        return njit(nogil=True, error_model="numpy", _nrt=self.targetoptions.get("_nrt", True))(call)


def driver(function: Callable[..., Any]) -> Any:
    """Compile a `function` that allocates workspaces and hands them to kernels."""
    return compiled(function)


def allocator(function: Callable[..., Any]) -> Any:
    """Compile a `function` that allocates, for drivers alone: what they hand to kernels."""
    return without_python(function)


def inlined(function: Callable[..., Any]) -> Any:
    """Compile `function` into its callers, where the compiler can vectorise over it."""
    return njit(nogil=True, error_model="numpy", fastmath={"contract"}, inline="always", _nrt=False)(function)
