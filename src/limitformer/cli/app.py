"""The commands, put together. Each lives in a file of its own, which is imported when that command runs: the list of
commands is known without."""

import os
import signal
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, entry_points, version
from io import TextIOWrapper
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from limitformer.cli.endings import BAD_INPUT, CLOSED_PIPE, finish_streams

# Typer re-exports its subclass alone, and where the class itself lives depends on the version.
UsageError: Any = typer.BadParameter.__base__


def described(error: Any) -> str:
    """The message about a wrong option, with what was given where typer leaves it out."""
    causes: list[Any] = getattr(error.__cause__, "errors", list)()
    given = f"; got {causes[0]['input']!r}" if causes else ""
    message = error.format_message().rstrip(".")
    return message if message.endswith("?") and not given else f"{message}{given}."


# Name → the object that the command is, and its line in the list of commands; a test holds the line against the
# command's own help.
COMMANDS = {
    "check": (
        "limitformer.cli.check:check",
        "Tell whether a Transformer collapses, explodes or freezes: the exact law at initialisation, or a checkpoint.",
    ),
    "design": (
        "limitformer.cli.design:design",
        "Find what to set so that a network at initialisation is sound, how sure that is, and the lines to paste.",
    ),
    "simulate": (
        "limitformer.cli.simulate:simulate",
        "Simulate a Transformer at initialisation: its exact chain, its limit, or the network itself.",
    ),
    "phase": (
        "limitformer.cli.phase:phase",
        "Draw a phase diagram: do tokens on the sphere end in one cluster, or as antipodal pairs?",
    ),
    "overlap": (
        "limitformer.cli.overlap:overlap",
        "Tell whether two tokens end at antipodes: exact probabilities, thresholds and times at infinite depth.",
    ),
    "sweep": (
        "limitformer.cli.sweep:sweep",
        "Run grids of simulations that can be stopped, resumed, extended and moved to a cluster.",
    ),
}
# Commands of other packages; `limitformer_papers` has two.
for entry in entry_points(group="limitformer.commands"):
    COMMANDS |= entry.load()


ONCE = ("check", "design")  # they write several files; elsewhere the last of two counts, as it is usual


class Once(TyperCommand):
    """A command whose options are given once: of two folders the first would be lost without a word."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Refuse what is given twice and is no list."""
        order = [] if ctx.resilient_parsing else self.make_parser(ctx).parse_args(args=list(args))[2]
        for option in order:
            if order.count(option) > 1 and not getattr(option, "multiple", True):
                raise typer.BadParameter(f"{max(option.opts, key=len)} is given twice", ctx)
        return super().parse_args(ctx, args)


def command_of(name: str) -> Any:
    """The command `name` itself, or the group of commands; imports its module."""
    module, _, attribute = COMMANDS[name][0].partition(":")
    found = getattr(import_module(module), attribute)
    holder = typer.Typer(add_completion=False, rich_markup_mode="rich")
    if isinstance(found, typer.Typer):
        holder.add_typer(found, name=name)
    else:
        holder.command(name, cls=Once if name in ONCE else TyperCommand)(found)
    return typer.main.get_group(holder).commands[name]


class Commands(TyperGroup):
    """The commands, imported when they run, with one line for a wrong option, as for any other bad input."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that is called, in the place of its line in the list."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, command and command_of(str(name)), rest

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Every command with its whole line, on several where it is long."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.help) for name, command in self.commands.items()])

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
            from limitformer.cli.report import say_error

            command = error.ctx.command_path if error.ctx else self.name
            say_error(f"{described(error)} See '{command} --help'.")
            result = BAD_INPUT
        except SystemExit:  # typer's answer to a closed pipe, with the code of a failed check
            result = CLOSED_PIPE
        if standalone_mode:
            sys.exit(result if isinstance(result, int) else 0)
        return result


# The list of commands is plain text: what Rich needs for Markdown takes longer than everything else in it.
app = typer.Typer(
    name="limitformer",
    cls=Commands,
    pretty_exceptions_show_locals=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},  # of all commands
)


def line_of(name: str) -> Callable[[], None]:
    """What stands for a command in the list, and is never run."""

    def stand_in() -> None:
        raise NotImplementedError(name)

    return stand_in


for each, (_, says) in COMMANDS.items():
    app.command(each, help=says)(line_of(each))


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


def run() -> None:
    """Run the command line; what the terminal's encoding lacks is replaced."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the shell
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        app()
    except SystemExit as end:
        code = end.code
    except OSError as error:  # of the help or the version; commands handle their own
        if error.filename is not None:
            raise
        from limitformer.cli.report import say_output_error

        code = say_output_error(error)
    failure = finish_streams()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(code or failure)
