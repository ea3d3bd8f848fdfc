"""`limitformer sweep`: run, status, show and export of grids of simulations."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
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

    from limitformer.sweep import Report

ROWS = 40  # of a table, at most
FAILED_CODE = 1  # exit code if cells have failed
STORE = Annotated[Path, typer.Argument(metavar="STORE", help="The folder of the sweep's store.")]

sweep = typer.Typer(help="Run grids of simulations that can be stopped, resumed, extended and moved to a cluster.")


@sweep.command("run")
def run(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="TOML: tables model, over, simulate, keep.")],
    store: Annotated[Path, typer.Option(help="The folder of the store; finished cells in it are not computed again.")],
    workers: Annotated[int | None, typer.Option(help="Number of processes.", show_default="one per core")] = None,
    cluster: Annotated[
        str | None, typer.Option(help="Address of a Dask scheduler, tcp://…, or 'local' to start one here.")
    ] = None,
    slurm: Annotated[int | None, typer.Option(help="Number of SLURM jobs to request, through dask-jobqueue.")] = None,
    cores: Annotated[int, typer.Option(help="Cores of a SLURM job.")] = 8,
    memory: Annotated[str, typer.Option(help="Memory of a SLURM job.")] = "16GB",
    walltime: Annotated[str, typer.Option(help="Time limit of a SLURM job.")] = "04:00:00",
    queue: Annotated[str | None, typer.Option(help="SLURM partition.", show_default="the cluster's default")] = None,
    extend: Annotated[bool, typer.Option("--extend", help="Add new values on the axes to the store.")] = False,
    retry_failed: Annotated[bool, typer.Option(help="Try failed cells of an earlier run again.")] = True,
    any_version: Annotated[
        bool,
        typer.Option("--any-version", help="Allow cells of other code, libraries or processors; each records its own."),
    ] = False,
) -> None:
    """Compute the cells that the store lacks. Ctrl-C stops, and the same command resumes.

    For example: limitformer sweep run sweep.toml --store sweep.sweep --workers 8
    """
    with errors_in_one_line():
        from limitformer.base.progress import suggest_quicker
        from limitformer.sweep import read_sweep, run_sweep

        begin_work()
        description = read_sweep(file)
        job = (cores, memory, walltime, queue)
        hint = "fewer samples in simulate, or values in over, are quicker."
        with cluster_of(cluster, slurm, workers, job) as address, suggest_quicker(hint):
            report = run_sweep(
                description,
                store,
                workers=workers,
                cluster=address,
                extend=extend,
                retry_failed=retry_failed,
                any_version=any_version,
            )
        print_report(report)


@contextmanager
def cluster_of(
    address: str | None, slurm: int | None, workers: int | None, job: tuple[int, str, str, str | None]
) -> Iterator[str | None]:
    """Yield the address of the cluster, or None for processes of this machine; close a cluster that is started here."""
    require(address is None or slurm is None, "Choose one of --cluster and --slurm.")
    require(job[0] >= 1, f"--cores must be at least 1 core of a SLURM job; got {job[0]}.")
    here = address == "local" or (address is None and slurm is None)
    require(here or workers is None, "--workers would change nothing: the cluster has its own.")
    if slurm is None and address != "local":
        yield address
        return
    from limitformer.paths.replicas import usable_cores
    from limitformer.sweep.cluster import local_cluster, slurm_cluster

    require(slurm is None or slurm > 0, f"--slurm must be at least 1 job; got {slurm}.")
    with closing(local_cluster(workers or usable_cores()) if slurm is None else slurm_cluster(slurm, *job)) as cluster:
        yield str(cluster.scheduler_address)


def print_report(report: "Report") -> None:
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
        from limitformer.sweep.show import doubts, interval, picture, selected, write_picture

        begin_work()
        data = load_sweep(store)
        chosen = selected(data, variable, at or [])
        if out is not None:
            write_picture(picture(chosen, interval(data, variable, at or [])), out)
        screen.print(table_of(chosen))
        warn(doubts(data))
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
        lines = export_store(store, out)
        print_plain(f"Wrote {out}")
        warn(lines)


def warn(lines: list[str]) -> None:
    for line in lines:
        errors.print(f"Careful: {line}", markup=False, highlight=False, soft_wrap=True)


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
