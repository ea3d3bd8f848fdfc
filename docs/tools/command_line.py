"""The page of the command line, written from the commands themselves.

python docs/tools/command_line.py     # writes docs/api/command-line.md; tests/test_site.py says when that is due
"""

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[1] / "api" / "command-line.md"
OPENING = """# Command line

`limitformer COMMAND --help` says the same.

| exit code | meaning |
|---|---|
| 0 | done |
| 1 | a check that fails |
| 2 | bad input: one line says what came, what was needed, and the nearest repair |
| 74 | standard output cannot be written; files are saved first |
| 75 | `--minutes` ended a training that the same command resumes |
| 130 | Ctrl-C |
| 141 | a pipe was closed |
"""


def page() -> str:
    """Return the page, with all commands in the order of `limitformer --help`."""
    from limitformer.cli.app import COMMANDS, command_of

    # The list of `limitformer --help` holds stand-ins without options; each command is imported here.
    pairs = [each for name in COMMANDS for each in commands(f"limitformer {name}", command_of(name))]
    return OPENING + "".join(section(name, command) for name, command in pairs)


def commands(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of the tree of commands with their full names."""
    if not hasattr(command, "list_commands"):
        yield name, command
        return
    context = command.make_context(name, [], resilient_parsing=True)
    for word in command.list_commands(context):
        yield from commands(f"{name} {word}", command.get_command(context, word))


def section(name: str, command: Any) -> str:
    """Return a command's description and a row for each argument and option."""
    visible = [each for each in command.params if not getattr(each, "hidden", False) and each.name != "help"]
    rows = "".join(row(parameter) for parameter in visible)
    text = re.sub(r"\\(\[model\](\n.+)+)", r"```toml\n\1\n```", inspect.cleandoc(command.help or ""))  # Rich needs \\[
    return f"\n## {name}\n\n{text}\n\n| | meaning | default |\n|---|---|---|\n{rows}"


def row(parameter: Any) -> str:
    names = ", ".join(f"`{each}`" for each in [*parameter.opts, *parameter.secondary_opts])
    if parameter.metavar:
        names += f" `{parameter.metavar}`"
    if parameter.param_type_name == "argument":
        names = f"`{parameter.metavar or parameter.name.upper()}`"
    return f"| {names} | {cell(getattr(parameter, 'help', '') or '')} | {default(parameter)} |\n"


def default(parameter: Any) -> str:
    """Return the default value as the help shows it."""
    if parameter.required:
        return "needed"
    text = getattr(parameter, "show_default", None)
    if isinstance(text, str):
        return cell(text)
    value = parameter.default
    return "" if value is None or callable(value) or value in ((), []) else f"`{cell(str(value))}`"


def cell(text: str) -> str:
    """Escape characters that would end a cell or begin HTML."""
    return " ".join(text.split()).replace("|", r"\|").replace("<", "&lt;")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
