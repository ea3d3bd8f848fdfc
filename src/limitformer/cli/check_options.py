"""What `limitformer check` and `limitformer design` have in common: options, and how they speak."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from limitformer.cli.report import screen
from limitformer.errors import require

Text = Annotated[Path | None, typer.Option(help="File whose words are the tokens.", show_default="unrelated tokens")]
Tokens = Annotated[int, typer.Option(help="How many tokens.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a field of the configuration first.")
]


def say(text: str) -> None:
    """As it is."""
    screen.print(text, markup=False, highlight=False, soft_wrap=True)


def assignments(given: list[str] | None, option: str) -> dict[str, Any]:
    """KEY=VALUE by key; values as JSON has them, or as text."""
    found = {}
    for one in given or []:
        key, equals, value = one.partition("=")
        require(bool(equals and key), f"{option} takes KEY=VALUE; got {one!r}.")
        try:
            found[key] = json.loads(value)
        except ValueError:
            found[key] = value
    return found
