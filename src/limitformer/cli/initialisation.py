"""`limitformer initialisation A B`: do two builds of one model begin alike? `limitformer recipes`: published ones."""

import json
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from limitformer.base.errors import about
from limitformer.cli.endings import begin_work
from limitformer.cli.options import require_known, user_recipe
from limitformer.cli.report import errors_in_one_line, print_plain

FAILED = 1
BUILD = (
    "a function that builds a module (path/to/model.py:NAME or package.module:NAME), a configuration's JSON or folder, "
    "a public shape, or a file or folder of safetensors."
)


def initialisation(
    a: Annotated[str, typer.Argument(metavar="A", help=f"The reference: {BUILD}")],
    b: Annotated[str, typer.Argument(metavar="B", help="The build to compare with it, of the same kinds.")],
    same: Annotated[
        bool, typer.Option("--same", help="Numbers must be equal too, such as after loading one file.")
    ] = False,
    level: Annotated[float, typer.Option(help="Probability at which two sound builds may have a finding.")] = 1e-4,
    shards: Annotated[
        int | None, typer.Option(help="Shards of a matrix of A, if B holds one of them.", show_default="whole")
    ] = None,
    fail_on: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help="Kinds of finding that end with exit code 1: law,lost tie, or any."),
    ] = None,
    table: Annotated[bool, typer.Option("--table", help="Print every tensor, in A and B, with its verdict.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare two builds of one model: laws, ties, buffers, and memory that nothing writes after to_empty.

    For example: limitformer initialisation model.py:on_cpu model.py:on_meta --fail-on any
    """
    with errors_in_one_line():
        for one in (a, b):
            if not (Path(one).suffix == ".safetensors" and Path(one).is_file()):
                require_known(one)
        from limitformer.initialisation import compare
        from limitformer.initialisation.report import failing_kinds

        if find_spec("transformers") is not None:
            import_module("transformers")  # before the work begins
        with about("--fail-on"):
            failing_kinds(fail_on)
        begin_work()
        report = compare(a, b, same=same, level=level, shards=shards)
        if table and not as_json:
            print_plain(f"{report.table()}\n")
        print_plain(json.dumps(report.record(), ensure_ascii=False) if as_json else str(report))
        if report.failed(fail_on):
            raise typer.Exit(FAILED)


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
