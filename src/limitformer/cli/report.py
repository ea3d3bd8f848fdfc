"""What the commands share: clear endings, and tables."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.table import Table

from limitformer.base.errors import InputError, MissingExtraError

if TYPE_CHECKING:
    from limitformer.figures.common.claims import Claim

BAD_INPUT, INTERRUPTED = 2, 130  # 130 is 128 + SIGINT, as shells have it

screen = Console()
errors = Console(stderr=True)


def say_error(message: str) -> None:
    """One line on stderr, whatever line breaks the message has."""
    line = "Error: " + " ".join(message.split())
    errors.print(line, style="bold red", markup=False, highlight=False, soft_wrap=True)


@contextmanager
def errors_in_one_line() -> Iterator[None]:
    """Bad input ends with one line and exit code 2, Ctrl-C with one line and 130."""
    try:
        yield
    except (InputError, MissingExtraError) as error:
        say_error(str(error))
        raise typer.Exit(BAD_INPUT) from error
    except MemoryError as error:
        say_error("This does not fit the memory: take fewer tokens, layers or samples, or a smaller width.")
        raise typer.Exit(BAD_INPUT) from error
    except KeyboardInterrupt as error:
        resumes = getattr(error, "resumes", False)  # a sweep's store has what was finished
        message = str(error) if resumes else "Interrupted; nothing was written."
        errors.print(message, markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(INTERRUPTED) from error


def claims_table(title: str, claims: "list[Claim]") -> Table:
    """One row for each claim: what, the number, and whether what the paper says holds."""
    table = Table("claim", "value", "holds", title=title, title_justify="left")
    table.columns[1].justify = "right"
    marks = {True: "yes", False: "NO", None: ""}
    for claim in claims:
        table.add_row(claim.name, f"{claim.value:.6g}", marks[claim.holds])
    return table
