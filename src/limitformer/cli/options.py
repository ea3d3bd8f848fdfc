"""Options that several commands share: their validation without torch, and functions in the user's own files."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from limitformer.base.errors import InputError, about, nearest, require
from limitformer.base.files import check_writable
from limitformer.base.foreign import one_line
from limitformer.stepping.updates import OPTIMIZERS
from limitformer.subjects.user_code import names_code, user_object


def complete_shape(incomplete: str) -> list[str]:
    """Return the public shapes that begin so, for the shell."""
    from limitformer.subjects.shapes import SHAPES

    return [name for name in SHAPES if name.startswith(incomplete)]


What = Annotated[
    str,
    typer.Argument(
        metavar="WHAT",
        autocompletion=complete_shape,
        help="A public shape ('limitformer check list' shows them), a configuration's JSON or folder, or a "
        "function that builds a module: path/to/model.py:NAME or package.module:NAME.",
    ),
]
Optimizer = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help=f"{', '.join(OPTIMIZERS)}, or a function of the module that returns its optimiser: FILE.py:NAME.",
    ),
]
AfterGroups = Annotated[
    str | None,
    typer.Option(
        metavar="FILE.py:NAME",
        help="Function of the training loop that applies the optimiser's own keys of groups, such as lr_scale.",
        show_default="none",
    ),
]
Clip = Annotated[float | None, typer.Option(help="Largest norm of all gradients together.", show_default="none")]
Warmup = Annotated[int, typer.Option(help="Steps over which the rate rises linearly.")]
Text = Annotated[Path | None, typer.Option(help="File whose words are the tokens.", show_default="unrelated tokens")]
Tokens = Annotated[int, typer.Option(help="Number of tokens, of each sequence.")]
SEQUENCES = "Sequences of a batch: of random tokens, cut from --text, or the first of --inputs."
Sequences = Annotated[int | None, typer.Option(help=SEQUENCES, show_default="as given")]
InputsOption = Annotated[
    str | None,
    typer.Option(
        "--inputs", metavar="WHAT", help="Instead of --text: a number of tokens, a file of text, or FILE.py:NAME."
    ),
]
Blocks = Annotated[
    list[str] | None, typer.Option(metavar="PATTERN", help="Measure the modules of these names, such as 'h.*'.")
]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run the Python code in the folder of a configuration.")
]
LossOption = Annotated[
    str | None,
    typer.Option(
        "--loss",
        metavar="NAME",
        help="next-token, mse (the inputs have targets), or FILE.py:NAME, a function of the output and a mapping of "
        "the inputs, whose first argument has the name ''.",
        show_default="the module's own or its task's",
    ),
]
WitnessOption = Annotated[
    str,
    typer.Option(
        "--witness",
        metavar="HOW",
        help="auto, full or no: compare a sample with your own module in plain PyTorch; full at any size.",
    ),
]
Full = Annotated[bool, typer.Option("--full", help="Print everything: reasons, all measures, what to set.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON alone, for scripts.")]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Change a field of the configuration, or an argument of the function, first."
    ),
]


def option(panel: str, *names: str, help: str, default: str | bool = True) -> Any:  # noqa: A002
    """Return an option in a panel of the help. `default` replaces the default value in the help."""
    return typer.Option(*names, help=help, rich_help_panel=panel, show_default=default)


def assignments(pairs: list[str] | None, option: str) -> dict[str, Any]:
    """Read KEY=VALUE by key; values are JSON, Python's True, False and None, or text."""
    result: dict[str, Any] = {}
    words = {"True": True, "False": False, "None": None}
    for one in pairs or []:
        key, equals, value = one.partition("=")
        require(bool(equals and key), f"{option} takes KEY=VALUE; got {one!r}.")
        require(key not in result, f"{option} gives {key} twice; got {one!r}.")
        try:
            result[key] = json.loads(value)
        except ValueError:
            result[key] = words.get(value, value)
    return result


def separated(text: str, takes: str, kind: Callable[[str], Any] = float) -> list[Any]:
    """Read numbers with commas between; raise `InputError`, which says what the option takes."""
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError as error:
        raise InputError(f"{takes}; got {text!r}.") from error


def numbers(values: dict[str, Any], option: str) -> dict[str, Any]:
    """Return the assignments, or raise `InputError` for a value that is not a number."""
    for name, value in values.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        require(number, f"{option} {name} takes a number; got {value!r}.")
    return values


def require_known(what: str, *code: str | None) -> None:
    """Raise `InputError` unless `what` is a file, a folder, JSON, FILE.py:NAME or the name of a public shape.

    The files of `code`, other options that may name a function, must exist, too. The import of torch takes seconds.
    """
    for one in filter(None, (what, *code)):
        file = one.rpartition(":")[0]
        missing = names_code(one) and file.endswith(".py") and not os.path.isfile(file)
        require(not missing, f"there is no file {file}.")
    import limitformer.checking  # noqa: F401  # first: its error names the extra that has all packages

    # isort: split
    from limitformer.subjects.shapes import require_shape

    if names_code(what):
        return
    exists = os.path.exists(what)
    is_code = exists and what.endswith(".py")
    require(not is_code, f"{what} is Python. Nearest: {what}:NAME, with the name of a function that builds a module.")
    if not exists and not what.lstrip().startswith("{"):
        require_shape(what)


def witness_of(name: str) -> bool | str:
    """Return the argument `witness` of `limitformer.check`."""
    one_of(name, ("auto", "full", "no"), "--witness has no")
    return {"auto": True, "no": False}.get(name, name)


def folder_of(out: str | Path | None) -> Path | None:
    """Return the folder of --out, and make it; raise `InputError` unless it can be written."""
    require(out is None or bool(str(out).strip()), "--out must be a folder; got ''. Nearest: --out . for this one.")
    if out is None:
        return None
    check_writable(Path(out))
    return Path(out)


def require_readable(text: Path | None, inputs: str | None = None) -> None:
    """Raise `InputError` unless the files of --text and --inputs exist, as far as these name files."""
    require(text is None or text.exists(), f"Cannot read the text {text}: there is no such file.")
    file = not (inputs is None or inputs.strip().isdigit() or names_code(inputs)) and not Path(inputs).is_file()
    require(not file, f"--inputs: there is no file {inputs}. It takes a number, a file of text, or FILE.py:NAME.")


def one_of(name: str, known: tuple[str, ...], what: str) -> None:
    """Raise `InputError` unless the name is known."""
    require(name in known, f"{what} {name!r}; there are {', '.join(known)}.{nearest(name, known)}")


def quicker(option: str, samples: int) -> str:
    """Suggest half of the samples; an empty text for a single sample."""
    return f"{option} {samples // 2} takes about half." if samples > 1 else ""


def subject_and_batch(
    what: str, changes: dict[str, Any], trust_remote_code: bool, text: Path | None, inputs: str | None, tokens: int,
    sequences: int | None,
) -> tuple[Any, Any]:  # fmt: skip
    """Return the subject, named with its changes, and the batch of --text, of --inputs or of a number of tokens."""
    from limitformer.reports.verdict import titled
    from limitformer.subjects.inputs import inputs_for
    from limitformer.subjects.subject import resolve

    data = text if inputs is None else user_inputs(inputs)
    subject = resolve(what, changes, trust_remote_code=trust_remote_code)
    subject = replace(subject, name=titled(subject.name, changes))
    if isinstance(data, int):
        return subject, inputs_for(subject, None, data, sequences)
    return subject, inputs_for(subject, data, tokens, sequences)


def user_loss(text: str | None) -> Any:
    """Return the function that `--loss` names, or the text, which is the name of a loss of the library."""
    return user_object(text, "--loss") if text is not None and names_code(text) else text


def user_recipe(text: str, option: str) -> Any:
    """Return the recipe that a text names: NAME or FILE.py:NAME, with settings as NAME,SETTING=NUMBER."""
    from limitformer.initialisation.recipes.recipe import recipe_of

    name, _, settings = text.partition(",")
    function = user_object(name, option) if names_code(name) else None
    with about(option):
        return recipe_of(text) if function is None else recipe_of(function, settings)


def user_inputs(text: str) -> Any:
    """Return the inputs that `--inputs` names: a number of tokens, a function's result, or a file of text."""
    if text.strip().isdigit():
        return int(text)
    if names_code(text):
        function = user_object(text, "--inputs")
        with one_line(f"--inputs: {text} cannot be called"):
            return function() if callable(function) else function
    return Path(text)
