"""The commands, put together. Each lives in a file of its own and imports the heavy parts when it runs."""

import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from io import TextIOWrapper
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from limitformer.cli.check import check
from limitformer.cli.design import design
from limitformer.cli.figure import figure
from limitformer.cli.overlap import overlap
from limitformer.cli.phase import phase
from limitformer.cli.report import BAD_INPUT, say_error
from limitformer.cli.simulate import simulate
from limitformer.cli.sweep import sweep
from limitformer.cli.train import train

# Typer re-exports its subclass alone, and where the class itself lives depends on the version.
UsageError: Any = typer.BadParameter.__base__


def described(error: Any) -> str:
    """The message about a wrong option, with what was given where typer leaves it out."""
    causes: list[Any] = getattr(error.__cause__, "errors", list)()
    given = f"; got {causes[0]['input']!r}" if causes else ""
    return f"{error.format_message().rstrip('.')}{given}."


class Commands(TyperGroup):
    """The commands, with one line for a wrong option, as for any other bad input."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run the command line; exit with its code if `standalone_mode`."""
        try:
            result = super().main(args, prog_name, complete_var, False, windows_expand_args, **extra)
        except UsageError as error:
            if not standalone_mode:
                raise
            command = error.ctx.command_path if error.ctx else self.name
            say_error(f"{described(error)} See '{command} --help'.")
            result = BAD_INPUT
        if standalone_mode:
            sys.exit(result if isinstance(result, int) else 0)
        return result


class Once(TyperCommand):
    """A command whose options are given once: of two folders the first would be lost without a word."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Refuse what is given twice and is no list."""
        order = [] if ctx.resilient_parsing else self.make_parser(ctx).parse_args(args=list(args))[2]
        for option in order:
            if order.count(option) > 1 and not getattr(option, "multiple", True):
                raise typer.BadParameter(f"{max(option.opts, key=len)} is given twice", ctx)
        return super().parse_args(ctx, args)


app = typer.Typer(
    name="limitformer",
    cls=Commands,
    pretty_exceptions_show_locals=False,
    rich_markup_mode="rich",
)
app.command(cls=Once)(check)
app.command(cls=Once)(design)
app.command()(figure)
app.command()(simulate)
app.command()(phase)
app.command()(overlap)
app.add_typer(sweep, name="sweep")
app.add_typer(train, name="train")


def show_version(asked: bool) -> None:
    """Print the version and end."""
    if asked:
        try:
            typer.echo(f"limitformer {version('limitformer')}")
        except PackageNotFoundError:
            typer.echo("limitformer, not installed")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def options(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=show_version, is_eager=True, help="Print the version and end."),
    ] = False,
) -> None:
    """What a Transformer does at depth, before you train it."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main() -> None:
    """Run the command line; what the terminal's encoding lacks is replaced."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
    app()
