"""Printing and exit codes, shared by the commands."""

import errno
import json
import os
import shlex
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import typer
from rich.text import Text

from limitformer.base.errors import InputError, MissingExtraError, unusable
from limitformer.base.files import WRITTEN, written_paths
from limitformer.base.progress import Terminal
from limitformer.cli.endings import (
    BAD_INPUT,
    CLOSED_PIPE,
    INTERRUPTED,
    NOTHING_WRITTEN,
    OutputError,
    check_folder,
    code_of,
)


class Screen(Terminal):
    """Standard output. A failing write raises OutputError; commands save their files first."""

    def print(self, *objects: Any, **options: Any) -> None:
        """Print as Rich does; raise OutputError if that fails."""
        try:
            super().print(*objects, **options)
        except OutputError:
            raise
        except OSError as error:
            raise OutputError(error.errno, error.strerror or str(error)) from error

    def on_broken_pipe(self) -> NoReturn:
        """Raise OutputError; Rich would exit with 1, the code of a failed check."""
        raise OutputError(errno.EPIPE, os.strerror(errno.EPIPE))


class Errors(Terminal):
    """Standard error. A failing write is ignored."""

    def print(self, *objects: Any, **options: Any) -> None:
        """Print as Rich does; ignore a failing write."""
        with suppress(OSError):
            super().print(*objects, **options)

    def on_broken_pipe(self) -> NoReturn:
        """Raise BrokenPipeError, which `print` ignores."""
        raise BrokenPipeError


screen = Screen()
errors = Errors(stderr=True)


def print_plain(text: str) -> None:
    """Print text on standard output without markup or highlighting."""
    screen.print(text, markup=False, highlight=False, soft_wrap=True)


def save_and_print(report: Any, place: Path | None, as_json: bool = False, full: bool = True) -> None:
    """Save a report if there is a folder, then print it, so that a failing output loses no file."""
    written = [] if place is None else report.save(place)
    if as_json:
        print_plain(json.dumps(report.record(), ensure_ascii=False))
        return
    print_report(report, full)
    print_written(written)


def print_interrupted(count: int) -> None:
    """Say on stderr that a report is about the networks that were finished before Ctrl-C."""
    networks = f"the {count} finished networks" if count > 1 else "the finished network"
    errors.print(f"Interrupted; this is about {networks}.", markup=False, highlight=False, soft_wrap=True)


def print_written(paths: Sequence[Path]) -> None:
    """Print which files were written, if any."""
    if paths:
        print_plain("Wrote " + ", ".join(map(str, paths)))


def say_error(message: str) -> None:
    """Print an error as one line on stderr."""
    line = "Error: " + " ".join(message.split())
    errors.print(line, style="bold red", markup=False, highlight=False, soft_wrap=True)


def say_output_error(error: OSError) -> int:
    """Print a line about the failing standard output (none for a closed pipe) and return the exit code."""
    code = code_of(error)
    if code != CLOSED_PIPE:
        say_error(f"Standard output cannot be written: {error.strerror or error}.")
    return code


@contextmanager
def errors_in_one_line() -> Iterator[None]:
    """Turn exceptions into one line and an exit code: 2 for bad input, 130 for Ctrl-C, 74 if stdout fails.

    An exception that is handled as Ctrl-C may have an `exit_code`.
    """
    try:
        WRITTEN.clear()
        check_folder()
        yield
    except (InputError, MissingExtraError) as error:
        say_error(str(error))
        raise typer.Exit(BAD_INPUT) from error
    except MemoryError as error:
        say_error("This does not fit the memory: take fewer tokens, layers or samples, or a smaller width.")
        raise typer.Exit(BAD_INPUT) from error
    except OutputError as error:
        raise typer.Exit(say_output_error(error)) from error
    except KeyboardInterrupt as error:
        resumes = getattr(error, "resumes", False)  # a sweep's store keeps the finished cells
        paths = ", ".join(written_paths())
        message = str(error) if resumes else f"Interrupted; these were written: {paths}." if paths else NOTHING_WRITTEN
        errors.print(message, markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(getattr(error, "exit_code", None) or INTERRUPTED) from error
    except SystemExit as error:
        *_, place = traceback.extract_tb(error.__traceback__)
        call = f"sys.exit({error}) in {place.filename}, line {place.lineno}"
        say_error(f"The module's own code ends the process: {call}. Nearest: the same code without it.")
        raise typer.Exit(BAD_INPUT) from error
    except Exception as error:
        if not isinstance(error, OSError) or error.filename is None:
            raise
        say_error(unusable(error))  # a file that no command has checked
        raise typer.Exit(BAD_INPUT) from error


COLOURS = {"✓": "bold green", "!": "bold yellow", "✗": "bold red", "·": "bold cyan", "≠": "bold yellow"}
# Options without which a command would ask another network or optimiser.
NEEDED = {"after_groups", "betas", "inputs", "loss", "momentum", "shaped", "trust_remote_code", "warmup"}
NEEDED |= {"weight_decay"}


def print_report(report: Any, full: bool = True) -> None:
    """Print the report, with coloured signs and grades if the terminal has colours."""
    text = Text()
    lines = report.text(full).splitlines()
    more = len(report.text().splitlines()) - len(lines)
    lines += ["", f"{more} more line{'s' * (more > 1)}: --full"] if more else []
    for line in lines:
        sign = line.strip()[:1]
        end = (line.find(":") + 1 or line.find(sign) + 1) if sign in COLOURS else 0
        text.append(line[:end], COLOURS.get(sign, ""))
        text.append(line[end:] + "\n")
    screen.print(text, soft_wrap=True, end="")


def print_next(context: typer.Context, command: str, label: str = "Next", **changes: Any) -> None:
    """Print the command that follows, on the same subject, with the user's own options that it has, and `changes`.

    `label` begins the line. Nothing is printed for a script that reads JSON, or if the command has no option for one
    that the subject or its optimiser needs.
    """
    if context.params.get("as_json"):
        return
    from limitformer.cli.app import command_of

    takes = {each.name: each for each in command_of(command).params}
    skips = changes.keys() | ({"samples"} if command != context.info_name else set())  # of another meaning
    own = {name: value for name, value in context.params.items() if name not in skips and is_given(context, name)}
    if NEEDED & own.keys() - takes.keys():
        return
    words, values = ["limitformer", command], own | changes
    for name, parameter in takes.items():
        option = parameter.opts[:1] if parameter.param_type_name == "option" else []
        value = values.get(name)
        for each in value if isinstance(value, list | tuple) else [] if value is None else [value]:
            switch = option if each is True else parameter.secondary_opts[:1]
            words += switch if isinstance(each, bool) else [*option, str(each)]
    print_plain(f"\n{label}: {shlex.join(words)}")


def is_given(context: typer.Context, name: str) -> bool:
    """Whether the user gave an option or argument."""
    return getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"
