"""Values of options that name functions in the user's own files."""

from pathlib import Path
from typing import Any

from limitformer.base.errors import InputError, require
from limitformer.base.foreign import one_line
from limitformer.subjects.user_code import names_code, user_object


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
