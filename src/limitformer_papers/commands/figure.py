"""`limitformer figure`: list the papers' figures, or make one."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from limitformer.cli.endings import begin_work
from limitformer.cli.report import errors_in_one_line, print_plain, screen

if TYPE_CHECKING:
    from limitformer_papers.common.claims import Claim


def complete_figure(incomplete: str) -> list[str]:
    """Return the figures that begin so, for the shell's completion."""
    from limitformer_papers import FIGURES, RUN_FIGURES

    return [name for name in (*FIGURES, *RUN_FIGURES) if name.startswith(incomplete)]


def figure(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", autocompletion=complete_figure, help="Name of a figure, or 'list' for all names."
        ),
    ],
    scale: Annotated[str, typer.Option(help="'paper' for the paper's size, 'quick' for a small size.")] = "paper",
    out: Annotated[Path, typer.Option(help="Folder for the picture, NAME.nc (data) and NAME.json (claims).")] = Path(
        "out"
    ),
    seed: Annotated[int, typer.Option(help="Seed of all simulations.")] = 0,
    threads: Annotated[int | None, typer.Option(help="Number of threads.", show_default="all cores")] = None,
    runs: Annotated[
        Path | None,
        typer.Option(help="Folder of finished runs: of `limitformer train`, or of the studies for foretells."),
    ] = None,
    picture_format: Annotated[str, typer.Option("--format", help="png, pdf, svg or pgf.")] = "png",
    width: Annotated[
        float | None,
        typer.Option(
            metavar="INCHES",
            help="Width in print; panels side by side have at least 2.6 each.",
            show_default="9.6, or 5.6 of one panel",
        ),
    ] = None,
    letters: Annotated[bool, typer.Option("--letters", help="Letters a, b, … at the panels.")] = False,
    serif: Annotated[bool, typer.Option("--serif", help="A serif typeface, as in most journals.")] = False,
) -> None:
    """Make a figure of a paper: picture, data and checked claims."""
    with errors_in_one_line():
        if name == "list":
            from limitformer_papers import FIGURES, RUN_FIGURES

            table = Table("figure", "shows", box=None)
            for known, shows in (FIGURES | RUN_FIGURES).items():
                table.add_row(known, shows)
            screen.print(table, markup=False)
            return
        from limitformer.base.progress import suggest_quicker
        from limitformer_papers import Picture, make

        picture = Picture(picture_format, width, letters, serif)
        begin_work()
        with suggest_quicker("--scale quick takes seconds." if scale == "paper" and runs is None else ""):
            result = make(name, scale=scale, out=out, seed=seed, threads=threads, runs=runs, picture=picture)
        size = f"{scale} scale" if runs is None else f"runs in {runs}"
        screen.print(claims_table(f"{name}, {size}, {result.seconds:.1f} s", result.claims))
        print_plain("Wrote " + ", ".join(map(str, result.paths)))


def claims_table(title: str, claims: "list[Claim]") -> Table:
    """Return a table with one row for each claim: name, number, and whether the paper's statement holds."""
    table = Table("claim", "value", "holds", title=title, title_justify="left")
    table.columns[1].justify = "right"
    marks = {True: "yes", False: "NO", None: ""}
    for claim in claims:
        table.add_row(claim.name, f"{claim.value:.6g}", marks[claim.holds])
    return table
