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
from typing import Any

from limitformer.base.errors import InputError, nearest, require
from limitformer.base.foreign import one_line

NAMED = re.compile(r"(?P<place>.+):(?P<name>[A-Za-z_]\w*)")
NEIGHBOURS = set[str]()  # modules and packages next to the files that ran
DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


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
        module = imported_file(Path(place)) if place.endswith(".py") else imported_module(place)
    known = [key for key, each in vars(module).items() if callable(each) and not key.startswith("_")]
    if not hasattr(module, name):
        raise InputError(f"{prefix}{place} has no {name!r}.{nearest(name, known)}")
    return getattr(module, name)


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
    """Run a file as a module; it may import the files next to it, which run again for each file."""
    require(path.is_file(), f"there is no file {path}")
    folder = str(path.parent.resolve())
    for each in NEIGHBOURS:  # another folder may have a file of this name, or the file may be edited
        sys.modules.pop(each, None)
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
    finally:
        new = sys.modules.keys() - known - {name}
        beside = {key for key in new if "." not in key and stands_in(folder, sys.modules[key])}
        NEIGHBOURS.update(key for key in new if key.partition(".")[0] in beside)
    return module


def stands_in(folder: str, module: ModuleType) -> bool:
    """Return whether a file, or a package's folder, stands in this folder; what is installed below it does not."""
    file = Path(getattr(module, "__file__", None) or "/")
    return str((file.parent.parent if file.name == "__init__.py" else file.parent).resolve()) == folder


def imported_module(name: str) -> ModuleType:
    """Import a module that is installed, or in the current folder."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    return importlib.import_module(name)
