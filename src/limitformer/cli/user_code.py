"""Functions in the user's own files, named on the command line as path/to/file.py:name or package.module:name."""

import importlib
import importlib.util
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
DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def names_code(text: str) -> bool:
    """Whether a text names a function in a Python file or an importable module."""
    match = NAMED.fullmatch(text)
    return match is not None and (match["place"].endswith(".py") or DOTTED.fullmatch(match["place"]) is not None)


def user_object(text: str, option: str) -> Any:
    """Import a file or module, and return the object that it has under the name after the colon.

    Raises:
        InputError: it cannot be imported, or has no such name.
    """
    match = NAMED.fullmatch(text)
    assert match is not None  # `names_code` was asked
    place, name = match["place"], match["name"]
    with restored_surroundings(), one_line(f"{option}: {place} cannot be imported"):
        module = imported_file(Path(place)) if place.endswith(".py") else imported_module(place)
    known = [key for key, each in vars(module).items() if callable(each) and not key.startswith("_")]
    if not hasattr(module, name):
        raise InputError(f"{option}: {place} has no {name!r}.{nearest(name, known)}")
    return getattr(module, name)


@contextmanager
def restored_surroundings() -> Iterator[None]:
    """Undo a change of the working folder, where files are written, and of torch's default device."""
    with chdir("."):
        try:
            yield
        finally:
            torch: Any = sys.modules.get("torch")
            if torch is not None and torch.get_default_device().type != "cpu":
                torch.set_default_device(None)


def imported_file(path: Path) -> ModuleType:
    """Run a file as a module; it may import the files next to it."""
    require(path.is_file(), f"there is no file {path}")
    folder = str(path.parent.resolve())
    name = path.stem if path.stem not in sys.modules else f"{path.stem} of the user"
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None  # of a file whose name ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # so that its classes find their module
    spec.loader.exec_module(module)
    return module


def imported_module(name: str) -> ModuleType:
    """Import a module that is installed, or in the current folder."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    return importlib.import_module(name)


def user_loss(text: str | None) -> Any:
    """Return the function that `--loss` names, or the text, which is the name of a loss of the library."""
    return user_object(text, "--loss") if text is not None and names_code(text) else text


def user_recipe(text: str, option: str) -> Any:
    """Return the recipe that a text names: NAME or FILE.py:NAME, with settings as NAME,SETTING=NUMBER."""
    from limitformer.initialisation.recipes.recipe import recipe_of

    name, _, settings = text.partition(",")
    function = user_object(name, option) if names_code(name) else None
    try:
        return recipe_of(text) if function is None else recipe_of(function, settings)
    except InputError as error:
        raise InputError(f"{option}: {error}") from error


def user_inputs(text: str) -> Any:
    """Return the inputs that `--inputs` names: a number of tokens, a function's result, or a file of text."""
    if text.strip().isdigit():
        return int(text)
    if names_code(text):
        function = user_object(text, "--inputs")
        with one_line(f"--inputs: {text} cannot be called"):
            return function() if callable(function) else function
    path = Path(text)
    require(path.is_file(), f"--inputs: there is no file {text}. It takes a number, a file of text, or FILE.py:NAME.")
    return path
