"""A report on a network on the terminal: coloured signs, and the command to run next."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from limitformer.cli.report import screen

if TYPE_CHECKING:
    from limitformer.checking import Comparison, Report, StepsReport

COLOURS = {"✓": "bold green", "!": "bold yellow", "✗": "bold red", "·": "bold cyan", "≠": "bold yellow"}
DESIGNED = ("collapsed", "grows", "dies", "frozen", "uniform", "vanishing")  # verdicts that `design` may fix


def print_report(report: "Report | Comparison | StepsReport") -> None:
    """Print the report, with coloured signs and grades if the terminal has colours."""
    text = Text()
    for line in str(report).splitlines():
        sign = line.strip()[:1]
        end = (line.find(":") + 1 or line.find(sign) + 1) if sign in COLOURS else 0
        text.append(line[:end], COLOURS.get(sign, ""))
        text.append(line[end:] + "\n")
    screen.print(text, soft_wrap=True, end="")


def next_command(report: "Report", what: str, settings: list[str] | None, designs: bool, out: Path | None) -> str:
    """Return the line that suggests the next command; `designs`: whether `limitformer design` takes the subject."""
    if designs and report.verdicts[0].name in DESIGNED:
        source = str(Path(what) / "config.json") if report.exists else what
        changes = [word for setting in settings or [] for word in ("--set", setting)]
        return f"Next: {shlex.join(['limitformer', 'design', source, *changes])}  (what to set)"
    if out is None:
        return f"Next: {shlex.join(['limitformer', 'check', what, '--out', 'report'])}  (a page with every curve)"
    return f"Next: open {out / 'check.html'}"
