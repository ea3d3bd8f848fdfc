"""Functions in the user's own files, named as path/to/file.py:name or package.module:name."""

import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from limitformer.base.errors import InputError, nearest, require
from limitformer.base.foreign import one_line

NAMED = re.compile(r"(?P<place>.+):(?P<name>[A-Za-z_]\w*)")
DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


class UserFile(NamedTuple):
    """A file that ran, the folder of the file that was named, and its time and size."""

    file: Path
    folder: str
    stamp: tuple[int, int] | None


FILES: dict[str, UserFile] = {}  # the user's files that ran, by the names of their modules


def names_code(text: str | Path) -> bool:
    """Whether a text names a function in a Python file or an importable module, and not a file or folder."""
    match = NAMED.fullmatch(str(text))
    if match is None or not (match["place"].endswith(".py") or DOTTED.fullmatch(match["place"])):
        return False
    return not os.path.exists(text)


def user_object(text: str, option: str = "") -> Any:
    """Import a file or module, and return the object that it has under the name after the colon.

    Args:
        text: path/to/file.py:name or package.module:name.
        option: the option of the command line that has this value, for the error; empty for a model.

    Raises:
        InputError: it cannot be imported, or has no such name.
    """
    match = NAMED.fullmatch(text)
    assert match is not None  # `names_code` was asked
    place, name = match["place"], match["name"]
    prefix = f"{option}: " if option else ""
    with restored_surroundings(), one_line(f"{prefix}{place} cannot be imported"):
        if not place.endswith(".py") and str(Path.cwd()) not in sys.path:  # the module may be in the current folder
            sys.path.insert(0, str(Path.cwd()))
        module = imported_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    known = [key for key, each in vars(module).items() if callable(each) and not key.startswith("_")]
    if not hasattr(module, name):
        own = [key for key in known if getattr(vars(module)[key], "__module__", "") == module.__name__]
        names = f" It has {', '.join(own)}." if own else ""
        raise InputError(f"{prefix}{place} has no {name!r}.{nearest(name, known) or names}")
    result = getattr(module, name)
    prose = isinstance(result, str) and " " in result and not result.lstrip().startswith("{")  # no JSON, nor a name
    if not option and (prose or isinstance(result, bytes | int | float | list | tuple | set | None)):
        own = [key for key in known if getattr(getattr(module, key), "__module__", "") == module.__name__]
        close = nearest(name, own) or (f" Nearest: one of {', '.join(own[:4])}." if own else "")
        needed = "a function that builds a module, a module, or a configuration"
        raise InputError(f"{text} is of type {type(result).__name__}; it must be {needed}.{close}")
    return result


@contextmanager
def restored_surroundings() -> Iterator[None]:
    """Undo a change of the working folder, where files are written, and of torch's default device."""
    before: Any = sys.modules.get("torch")
    device = "cpu" if before is None else before.get_default_device()
    with chdir("."):
        try:
            yield
        finally:
            torch: Any = sys.modules.get("torch")
            if torch is not None and str(torch.get_default_device()) != str(device):
                torch.set_default_device(None if str(device) == "cpu" else device)


def imported_file(path: Path) -> ModuleType:
    """Run a file as a module; it may import the files next to it.

    Files that ran are not run again, so that their classes stay the same, until a file of their folder is edited, or a
    file of another folder runs that has a neighbour of the same name.
    """
    require(path.is_file(), f"there is no file {path}")
    path = path.resolve()
    folder = str(path.parent)
    old = {
        each.folder
        for key, each in FILES.items()
        if each.stamp != stamp_of(each.file)
        or (each.folder != folder and has_module(path.parent, key.partition(".")[0]))
    }
    for key in [key for key, each in FILES.items() if each.folder in old]:
        sys.modules.pop(key, None)
        del FILES[key]
    known_as = next((key for key, each in FILES.items() if each.file == path), None)
    if known_as is not None:
        return sys.modules[known_as]
    name = path.stem if path.stem not in sys.modules else f"{path.stem} of the user"
    if folder in sys.path:
        sys.path.remove(folder)
    sys.path.insert(0, folder)
    importlib.invalidate_caches()
    known = set(sys.modules)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None  # of a file whose name ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # so that its classes find their module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        new = sys.modules.keys() - known
        beside = {key for key in new if "." not in key and stands_in(folder, sys.modules[key])}
        for key in new:
            file = getattr(sys.modules[key], "__file__", None)
            if file and key.partition(".")[0] in beside:
                FILES[key] = UserFile(Path(file), folder, stamp_of(Path(file)))
    return module


def has_module(folder: Path, name: str) -> bool:
    """Return whether a folder has a file or a package that is imported by this name."""
    return (folder / f"{name}.py").exists() or (folder / name).is_dir()


def stamp_of(file: Path) -> tuple[int, int] | None:
    """Return the time and the size of a file; None if it is gone."""
    try:
        return file.stat().st_mtime_ns, file.stat().st_size
    except OSError:
        return None


def stands_in(folder: str, module: ModuleType) -> bool:
    """Return whether a file, or a package's folder, stands in this folder; what is installed below it does not."""
    file = Path(getattr(module, "__file__", None) or "/")
    return str((file.parent.parent if file.name == "__init__.py" else file.parent).resolve()) == folder
