"""`limitformer sweep`: run, status, show and export of grids of simulations."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from limitformer.base.errors import printable, require
from limitformer.cli.endings import begin_work
from limitformer.cli.report import errors, errors_in_one_line, print_plain, screen

if TYPE_CHECKING:
    import numpy as np
    import xarray as xr

    from limitformer.sweep import SweepReport

ROWS = 40  # of a table, at most
FAILED_CODE = 1  # exit code if cells have failed
STORE = Annotated[Path, typer.Argument(metavar="STORE", help="The folder of the sweep's store.")]

sweep = typer.Typer(help="Run grids of simulations that can be stopped, resumed, extended and moved to a cluster.")


@sweep.command("run")
def run(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="TOML: tables model, over, simulate, keep.")],
    store: Annotated[Path, typer.Option(help="The folder of the store; finished cells in it are not computed again.")],
    workers: Annotated[int | None, typer.Option(help="Number of processes.", show_default="one per core")] = None,
    dask: Annotated[
        str | None, typer.Option(help="Address tcp://… of a Dask scheduler.", show_default="processes of this machine")
    ] = None,
    extend: Annotated[bool, typer.Option("--extend", help="Add new values on the axes to the store.")] = False,
    retry_failed: Annotated[bool, typer.Option(help="Try failed cells of an earlier run again.")] = True,
) -> None:
    """Compute the cells that the store lacks. Ctrl-C stops, and the same command resumes.

    For example: limitformer sweep run sweep.toml --store sweep.sweep --workers 8
    """
    with errors_in_one_line():
        from limitformer.base.progress import suggest_quicker
        from limitformer.sweep import read_sweep, run_sweep

        begin_work()
        description = read_sweep(file)
        require(dask is None or workers is None, "--workers would change nothing: Dask has its own.")
        with suggest_quicker("fewer samples in simulate, or values in over, are quicker."):
            report = run_sweep(description, store, workers=workers, dask=dask, extend=extend, retry_failed=retry_failed)
        print_report(report)


def print_report(report: "SweepReport") -> None:
    """Print the result of a run; exit with code 1 if cells have failed."""
    before = f", {report.skipped} of them before" if report.skipped else ""
    screen.print(
        f"{report.done} of {report.cells} cells are done{before}: {report.store}", markup=False, soft_wrap=True
    )
    if report.failed:
        errors.print(f"{report.failed} cells have failed:", style="bold red")
        for index, message in list(report.errors.items())[:5]:
            errors.print(f"  {index}: {printable(message)}", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(FAILED_CODE)


@sweep.command("status")
def status(store: STORE) -> None:
    """Print the progress of a sweep, also while it runs."""
    with errors_in_one_line():
        from limitformer.sweep.show import progress_of

        begin_work()
        table = Table("", "", show_header=False)
        for name, value in progress_of(store):
            table.add_row(name, Text(value))  # an error may have brackets
        screen.print(table)


@sweep.command("show")
def show(
    store: STORE,
    variable: Annotated[str | None, typer.Option(help="The result to print.", show_default="the first one")] = None,
    at: Annotated[
        list[str] | None,
        typer.Option(help="NAME=VALUE: select a value of an axis; can be repeated.", show_default="none"),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write a picture to this file (.png, .pdf, .svg).", show_default="none")
    ] = None,
) -> None:
    """Print a result as a table, and draw it if --out is set."""
    with errors_in_one_line():
        from limitformer.sweep import load_sweep
        from limitformer.sweep.show import interval, picture, selected, write_picture

        begin_work()
        with printed_warnings():
            data = load_sweep(store)
        chosen = selected(data, variable, at or [])
        if out is not None:
            write_picture(picture(chosen, interval(data, variable, at or [])), out)
        screen.print(table_of(chosen))
        if out is not None:
            print_plain(f"Wrote {out}")


@sweep.command("export")
def export(
    store: STORE,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The file to write: .nc (NetCDF), .zarr or .csv.")],
) -> None:
    """Write all results as one dataset (.nc, .zarr) or as a table (.csv)."""
    with errors_in_one_line():
        from limitformer.sweep.show import export_store

        begin_work()
        with printed_warnings():
            export_store(store, out)
        print_plain(f"Wrote {out}")


@contextmanager
def printed_warnings() -> Iterator[None]:
    """Print warnings in the block as one line each, such as that of cells that different versions made."""
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always", UserWarning)
        yield
    for note in notes:
        errors.print(f"Careful: {note.message}", markup=False, highlight=False, soft_wrap=True)


def table_of(chosen: "xr.DataArray") -> Table:
    """Return a table with a row for each value, evenly thinned if there are more than `ROWS`."""
    import numpy as np

    dims = [str(dim) for dim in chosen.dims]
    table = Table(*dims, str(chosen.name))
    for column in table.columns:
        column.justify = "right"
    selection = range(0, chosen.size, max(1, -(-chosen.size // ROWS)))
    for place in selection:
        row = tuple(map(int, np.unravel_index(place, chosen.shape)))
        labels = [label_of(chosen, dim, k) for dim, k in zip(dims, row, strict=True)]
        table.add_row(*labels, f"{chosen.values[row]:.6g}")
    if len(selection) < chosen.size:
        table.caption = f"{len(selection)} of {chosen.size} values; export has all of them"
    return table


def label_of(chosen: "xr.DataArray", dim: str, k: int) -> str:
    value: np.ndarray | int = chosen[dim].values[k] if dim in chosen.coords else k
    return str(value) if isinstance(value, str) else f"{value:g}"
