"""The command line, assembled from its commands.

The module of a command is imported only when it runs; the list of commands is known without it.
"""

import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from io import TextIOWrapper
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from limitformer.base.extras import package_version
from limitformer.cli.endings import ALIKE, BAD_INPUT, CLOSED_PIPE, code_at_end, finish_streams

# (command, old option) → what is in its place.
DASK = "--dask tcp://…, the address of a Dask scheduler"
OLD_OPTIONS: dict[tuple[Any, Any], str] = {
    ("steps", "--batches"): "--sequences fresh, or 16,fresh",
    ("simulate", "--model"): "the file alone",
    ("run", "--any-version"): "leave it out",
    **{("run", f"--{name}"): DASK for name in ("cluster", "slurm", "cores", "memory", "queue", "walltime")},
    ("mlm", "--nproc-per-node"): "leave it out, or --workers for several runs at a time",
}

# Typer re-exports only a subclass; the module of the class itself depends on the version.
UsageError: Any = typer.BadParameter.__base__


def message_of(error: Any) -> str:
    """Return the message about a wrong option, and add the received value if typer leaves it out."""
    causes: list[Any] = getattr(error.__cause__, "errors", list)()
    came = f"; got {causes[0]['input']!r}" if causes else ""
    name, command = getattr(error, "option_name", None), error.ctx.info_name if error.ctx else None
    if (command, name) in OLD_OPTIONS:
        return f"No such option: {name}. Nearest: {OLD_OPTIONS[command, name]}."
    if command == "simulate" and name:
        error.possibilities = []  # beside the file, which is said next
    message = error.format_message().rstrip(".")
    return message if message.endswith("?") and not came else f"{message}{came}."


# Name → the object that the command is, and its line in the list of commands; a test holds the line against the
# command's own help.
COMMANDS = {
    "check": (
        "limitformer.cli.check:check",
        "Tell whether a Transformer collapses, explodes or freezes: the exact law at initialisation, or a checkpoint.",
    ),
    "compare": (
        "limitformer.cli.compare:compare",
        "Tell whether a model is better or worse after a change: two laws at initialisation, in pairs of networks.",
    ),
    "recipes": (
        "limitformer.cli.initialisation:recipes",
        "List published initialisations, or print one: its code, settings and source.",
    ),
    "initialisation": (
        "limitformer.cli.initialisation:initialisation",
        "Compare two builds of one model: laws, ties, buffers, and memory that nothing writes after to_empty.",
    ),
    "design": (
        "limitformer.cli.design:design",
        "Find settings for a sound network at initialisation, with their risk, and print the lines to paste.",
    ),
    "steps": (
        "limitformer.cli.steps:steps",
        "Compute the first training steps in law: which learning rates a network takes, and what moves.",
    ),
    "rate": (
        "limitformer.cli.rate:rate",
        "Search the largest learning rate that nine of ten networks bear, and the range to tune in.",
    ),
    "transfer": (
        "limitformer.cli.transfer:transfer",
        "Tell whether a learning rate transfers over width or depth: the first training steps at several sizes.",
    ),
    "simulate": (
        "limitformer.cli.simulate:simulate",
        "Simulate a Transformer at initialisation: its exact chain, its limit, or the network itself.",
    ),
    "phase": (
        "limitformer.cli.phase:phase",
        "Draw a phase diagram: do tokens on the sphere end in one cluster, or as antipodal pairs?",
    ),
    "sweep": (
        "limitformer.cli.sweep:sweep",
        "Run grids of simulations that can be stopped, resumed, extended and moved to a cluster.",
    ),
}


def commands_of(entry: EntryPoint) -> dict[str, tuple[str, str]]:
    """Return the commands of another package, or none and a warning if they cannot be loaded."""
    try:
        return {name: (str(target), str(line)) for name, (target, line) in entry.load().items()}
    except Exception as error:  # noqa: BLE001  another package may raise anything
        typer.echo(f"Warning: the commands of {entry.value} cannot be loaded: {error}", err=True)
        return {}


for entry in entry_points(group="limitformer.commands"):  # `limitformer_papers` has two
    COMMANDS = COMMANDS | commands_of(entry) | COMMANDS  # none replaces ours

FILE_ERRORS = ("NoSuchOption", "MissingParameter")
MODEL_FILE = (  # in place of the options that `simulate` had for fields of the model
    "The model comes from a TOML file, and 'limitformer simulate --help' shows one: "
    "limitformer simulate model.toml --set gamma=0.3."
)


def command_of(name: str) -> Any:
    """Import the module of the command `name` and return the command or group."""
    module, _, attribute = COMMANDS[name][0].partition(":")
    command = getattr(import_module(module), attribute)
    holder = typer.Typer(add_completion=False, rich_markup_mode="rich")
    if isinstance(command, typer.Typer):
        holder.add_typer(command, name=name)
    else:
        holder.command(name)(command)
    return typer.main.get_group(holder).commands[name]


class Commands(TyperGroup):
    """The group of all commands. A wrong option gives one line, like any other bad input."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Replace the stand-in in the list by the real command."""
        if args[:1] == ["overlap"]:
            raise UsageError("overlap is a function of Python now: limitformer.overlap(model).summary()", ctx)
        name, command, rest = super().resolve_command(ctx, args)
        return name, command and command_of(str(name)), rest

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """List every command with its complete help line."""
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
            asked = (error.ctx and error.ctx.info_name, getattr(error, "option_name", None))
            file = asked[0] == "simulate" and asked not in OLD_OPTIONS and type(error).__name__ in FILE_ERRORS
            say_error(f"{message_of(error)} " + (MODEL_FILE if file else f"See '{command} --help'."))
            result = BAD_INPUT
        except SystemExit:  # typer's answer to a closed pipe, with the code of a failed check
            result = CLOSED_PIPE
        if standalone_mode:
            sys.exit(result if isinstance(result, int) else 0)
        return result


# The list of commands is plain text: importing Rich's Markdown would take most of the start-up time.
app = typer.Typer(
    name="limitformer",
    cls=Commands,
    pretty_exceptions_show_locals=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},  # of all commands
)


def stand_in() -> None:
    """Represent a command in the list; the real one replaces it before it would run."""
    raise NotImplementedError


for each, (_, line) in COMMANDS.items():
    app.command(each, help=line)(stand_in)


def show_version(asked: bool) -> None:
    """Print the version and exit."""
    if asked:
        typer.echo(f"limitformer {package_version()}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def options(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=show_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """What a Transformer does at depth, before you train it.

    Will it collapse? check. What to set? design. Which learning rate? rate. Does it hold at width? transfer.
    Which number format? check --number-format. Is this change better? compare. Figures of the papers? figure.
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def run() -> None:
    """Run the command line. Characters that the terminal cannot encode are replaced."""
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
    for number in (signal.SIGINT, *ALIKE):
        signal.signal(number, signal.SIG_DFL)
    sys.exit(code_at_end(code or failure))
