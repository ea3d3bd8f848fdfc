"""Printing and exit codes, shared by the commands."""

import errno
import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

import typer

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
    import_failure,
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
        line = import_failure(error)
        if line is None and isinstance(error, OSError) and error.filename is not None:
            line = unusable(error)  # a file that no command has checked
        if line is None:
            raise
        say_error(line)
        raise typer.Exit(BAD_INPUT) from error
