"""Cached kernels: after an edit of a source, no old kernel runs."""

import ast
import dis
import importlib
import inspect
import re
import types
from pathlib import Path

import numba
import pytest

from limitformer.numerics import kernel_sources, kernels

pytestmark = pytest.mark.fast


def test_kernel_sources_lists_every_file_with_kernels():
    """An edit of a file that is missing from the list would leave its callers' caches in place.

    What kernels are made of counts too: the types and functions that other files add to the compiler.
    """
    sign = re.compile(r"^(from limitformer\.numerics\.kernels import|from numba|import numba)", re.MULTILINE)
    defining = {path for path in kernel_sources.PACKAGE.glob("**/*.py") if sign.search(path.read_text())}
    watched = kernel_sources.kernel_files()
    assert {"random.py", "factor.py", "lanes.py", "elementary.py", "exits.py"} <= {path.name for path in defining}
    assert defining <= watched, sorted(path.name for path in defining - watched)


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """A copy of the sources of kernels, which tests can edit."""
    for path in kernel_sources.kernel_files():
        copy = tmp_path / path.relative_to(kernel_sources.PACKAGE)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    monkeypatch.setattr(kernel_sources, "PACKAGE", tmp_path)
    forget()
    yield tmp_path
    forget()


def forget():
    for remembered in (kernel_sources.kernel_files, kernel_sources.imports_of, kernel_sources.fingerprint):
        remembered.cache_clear()


def fingerprints(folder):
    forget()
    return {path: kernel_sources.fingerprint(path) for path in sorted(folder.glob("**/*.py"))}


def test_edit_changes_only_the_fingerprints_of_files_that_use_it(copied):
    """The expected files come from Python's parser; the regular expression must not miss an import."""
    before = fingerprints(copied)
    importers = imported_from(copied)
    for path in before:
        text = path.read_bytes()
        path.write_bytes(text + b"#")
        after = fingerprints(copied)
        assert {one for one in before if after[one] != before[one]} == importers[path], path.name
        path.write_bytes(text)
    assert fingerprints(copied) == before


def imported_from(folder):
    """{file: the files that import it, or what imports it, and itself}."""
    files = sorted(folder.glob("**/*.py"))
    direct = {path: set(modules_of(path, folder)) & set(files) for path in files}
    reached = {path: {path} for path in files}
    for _ in files:
        reached = {path: known.union(*(direct[one] for one in known)) for path, known in reached.items()}
    return {path: {one for one in files if path in reached[one]} for path in files}


def modules_of(path, folder):
    """Files that a file imports from."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("limitformer"):
            assert node.level == 0
            place = folder.joinpath(*node.module.split(".")[1:])
            yield from (place.with_suffix(".py"), place / "__init__.py")
            yield from (place / f"{name.name}.py" for name in node.names)
        elif isinstance(node, ast.Import):
            assert not any(name.name.startswith("limitformer") for name in node.names), path


def test_fingerprints_of_sphere_and_covariance_are_independent(copied):
    before = fingerprints(copied)
    (copied / "sphere" / "pair" / "chain.py").write_text("#")
    (copied / "covariance" / "chain" / "norm.py").write_text("#")
    after = fingerprints(copied)
    changed = {path.relative_to(copied).as_posix() for path in before if after[path] != before[path]}
    assert {"sphere/pair/chain.py", "covariance/chain/norm.py", "covariance/chain/transformer.py"} <= changed
    assert not {"sphere/tokens/values.py", "covariance/chain/attention.py", "covariance/limit/path.py"} & changed


def test_kernels_are_cached_in_the_folder_of_their_fingerprint():
    from limitformer.numerics.factor import gram
    from limitformer.numerics.random import next_normal

    for compiled in (gram, next_normal):
        path = Path(inspect.getfile(compiled.py_func))
        name = f"{path.stem}-{kernel_sources.fingerprint(path)}"
        assert Path(compiled.stats.cache_path).parent == kernels.CACHE / name


def test_kernel_does_not_change_numbas_cache_setting():
    before = numba.config.CACHE_DIR
    kernels.kernel(lambda: None)
    assert before == numba.config.CACHE_DIR


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
    folder = kernel_sources.PACKAGE
    for path in kernel_sources.kernel_files():
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
