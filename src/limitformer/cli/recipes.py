"""`limitformer recipes`: published initialisations."""

from typing import Annotated

import typer

from limitformer.cli.report import errors_in_one_line, print_plain
from limitformer.cli.user_code import user_recipe


def complete_recipe(incomplete: str) -> list[str]:
    """Return the published recipes that begin so, for the shell."""
    from limitformer.initialisation.recipes.recipe import recipes as known

    return [name for name in known() if name.startswith(incomplete)]


def recipes(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]",
            autocompletion=complete_recipe,
            help="One recipe, or your own, FILE.py:NAME; with other settings as NAME,SETTING=NUMBER.",
        ),
    ] = None,
) -> None:
    """List published initialisations, or print one: its code, settings and source.

    For example: limitformer recipes megatron,std=0.006
    """
    with errors_in_one_line():
        from limitformer.initialisation.recipes.recipe import recipes as known

        if name is not None:
            print_plain(str(user_recipe(name, "NAME")))
            return
        for each in known().values():
            print_plain(f"{each.name:20} {each.title}")
        print_plain("\nNext: limitformer check MODEL --recipe NAME  (a model's own code against one of them)")
