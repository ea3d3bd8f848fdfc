"""Cached kernels: after an edit of a source, no old kernel runs."""

import dis
import importlib
import inspect
import re
import shutil
import types

import pytest

from limitformer.numerics import kernels

pytestmark = pytest.mark.fast


def test_kernel_sources_lists_every_file_with_kernels():
    """An edit of a file that is missing from the list would leave its callers' caches in place.

    What kernels are made of counts too: the types and functions that other files add to the compiler.
    """
    sign = re.compile(r"^(from limitformer\.numerics\.kernels import|from numba|import numba)", re.MULTILINE)
    defining = {path for path in kernels.PACKAGE.glob("**/*.py") if sign.search(path.read_text())}
    watched = set(kernels.kernel_files())
    assert {"random.py", "factor.py", "lanes.py", "elementary.py", "exits.py"} <= {path.name for path in defining}
    assert defining <= watched, sorted(path.name for path in defining - watched)


def test_an_edit_of_a_source_changes_the_fingerprint(monkeypatch, tmp_path):
    before = kernels.fingerprint()
    shutil.copytree(kernels.PACKAGE, tmp_path / "limitformer", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(kernels, "PACKAGE", tmp_path / "limitformer")
    assert kernels.fingerprint() == before
    for path in kernels.kernel_files():
        text = path.read_bytes()
        path.write_bytes(text + b"#")
        assert kernels.fingerprint() != before
        path.write_bytes(text)


def test_machine_code_is_generated_only_for_drivers(monkeypatch):
    """A kernel is compiled into its callers; machine code for itself would take a fifth of the time."""
    monkeypatch.setattr(kernels, "CACHE", None)
    halved = kernels.kernel(lambda x: 0.5 * x)
    quartered = kernels.driver(lambda x: halved(halved(x)))
    assert quartered(8.0) == 2.0
    assert not has_code_for_the_machine(halved)
    assert has_code_for_the_machine(quartered)
    assert halved(8.0) == 4.0  # by way of a driver of its own


def has_code_for_the_machine(made):
    (compiled,) = made.overloads.values()
    return compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name) != 0


def test_python_code_never_calls_a_kernel():
    """Such a kernel would be compiled again in every process; Python must call drivers."""
    offences = {
        f"{module.__name__}: {function.__qualname__} calls {', '.join(called)}"
        for module in map(importlib.import_module, modules_with_kernels())
        for function in functions_of(module)
        if (called := sorted(names_in(function.__code__) & kernels_of(module)))
    }
    assert offences == set()


def modules_with_kernels():
    folder = kernels.PACKAGE
    for path in kernels.kernel_files():
        yield ".".join(path.relative_to(folder.parent).with_suffix("").parts).removesuffix(".__init__")


def kernels_of(module):
    """Return the module's names of kernels, including imported ones."""
    return {name for name, value in vars(module).items() if isinstance(value, kernels.Kernel)}


def functions_of(module):
    """Yield all functions that the interpreter runs, including methods and properties."""
    own = [each for each in vars(module).values() if getattr(each, "__module__", None) == module.__name__]
    members = [member for each in own if inspect.isclass(each) for member in vars(each).values()]
    for each in (*own, *members):
        function = getattr(each, "fget", None) or getattr(each, "func", None) or each
        if isinstance(function, types.FunctionType):
            yield function


def names_in(code):
    """Return the globals that the code reads, also in nested functions."""
    inner = [each for each in code.co_consts if isinstance(each, types.CodeType)]
    own = {each.argval for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL"}
    return own.union(*map(names_in, inner))
