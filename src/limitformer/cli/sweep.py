"""`limitformer sweep`: run, status, show and export of grids of simulations."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
STORE = Annotated[Path, typer.Argument(metavar="STORE", help="Folder of the sweep's Zarr store.")]

sweep = typer.Typer(help="Run grids of simulations that can be stopped, resumed, extended and moved to a cluster.")


@sweep.command("run")
def run(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="TOML: tables model, over, simulate, keep.")],
    store: Annotated[Path, typer.Option(help="Folder of the Zarr store; what it has is not computed again.")],
    workers: Annotated[int | None, typer.Option(help="Processes.", show_default="one a core")] = None,
    cluster: Annotated[
        str | None, typer.Option(help="Dask scheduler, tcp://…, or 'local' for one with --workers.")
    ] = None,
    slurm: Annotated[int | None, typer.Option(help="SLURM jobs to ask for, through dask-jobqueue.")] = None,
    cores: Annotated[int, typer.Option(help="Cores of a SLURM job.")] = 8,
    memory: Annotated[str, typer.Option(help="Memory of a SLURM job.")] = "16GB",
    walltime: Annotated[str, typer.Option(help="Time limit of a SLURM job.")] = "04:00:00",
    queue: Annotated[str | None, typer.Option(help="SLURM partition.", show_default="the cluster's own")] = None,
    extend: Annotated[bool, typer.Option("--extend", help="Add new values of the axes to the store.")] = False,
    retry_failed: Annotated[bool, typer.Option(help="Try failed cells of an earlier run again.")] = True,
    any_version: Annotated[
        bool,
        typer.Option("--any-version", help="Mix cells of other code, libraries or processors, each marked."),
    ] = False,
) -> None:
    """Compute what is missing in the store. Ctrl-C drops the cells that are running; start it again to go on.

    For example: limitformer sweep run sweep.toml --store sweep.zarr --workers 8
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
        say_report(report)


class Cluster(AbstractContextManager[str]):
    """A cluster of our own, closed at the end."""

    def __init__(self, made: Any) -> None:
        self.made = made

    def __enter__(self) -> str:
        return str(self.made.scheduler_address)

    def __exit__(self, *exception: object) -> None:
        self.made.close()


def cluster_of(
    address: str | None, slurm: int | None, workers: int | None, job: tuple[int, str, str, str | None]
) -> AbstractContextManager[str | None]:
    """Where the cells run: None for processes of this machine."""
    require(address is None or slurm is None, "Choose one of --cluster and --slurm.")
    own = address == "local" or (address is None and slurm is None)
    require(own or workers is None, "--workers would change nothing: the cluster has its own.")
    if address is None and slurm is None:
        return nullcontext(None)
    from limitformer.paths.replicas import usable_cores
    from limitformer.sweep.cluster import local_cluster, slurm_cluster

    if slurm is not None:
        require(slurm > 0, f"--slurm must be at least 1 job; got {slurm}.")
        return Cluster(slurm_cluster(slurm, *job))
    return Cluster(local_cluster(workers or usable_cores())) if address == "local" else nullcontext(address)


def say_report(report: "Report") -> None:
    """What the run did; exit code 1 if cells have failed."""
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
    """Print how far a sweep is: also while it runs, from anywhere."""
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
    variable: Annotated[str | None, typer.Option(help="Which result.", show_default="the first one")] = None,
    at: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE: only there; may be given several times.", show_default="none")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write a picture to this file (.png, .pdf, .svg).", show_default="none")
    ] = None,
) -> None:
    """Print a result as a table, and draw it."""
    with errors_in_one_line():
        from limitformer.sweep import load_sweep
        from limitformer.sweep.show import doubts, picture, selected, written

        begin_work()
        data = load_sweep(store)
        chosen = selected(data, variable, at or [])
        if out is not None:
            written(picture(chosen), out)
        screen.print(table_of(chosen))
        warn(doubts(data))
        if out is not None:
            print_plain(f"Wrote {out}")


@sweep.command("export")
def export(
    store: STORE,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="File to write: .nc (NetCDF), .zarr or .csv.")],
) -> None:
    """Write all results as one dataset (.nc, .zarr) or as a table (.csv)."""
    with errors_in_one_line():
        from limitformer.sweep.show import exported

        begin_work()
        lines = exported(store, out)
        print_plain(f"Wrote {out}")
        warn(lines)


def warn(lines: list[str]) -> None:
    """What one should know of the data, a line each."""
    for line in lines:
        errors.print(f"Careful: {line}", markup=False, highlight=False, soft_wrap=True)


def table_of(chosen: "xr.DataArray") -> Table:
    """One row for each value, thinned out evenly if there are too many."""
    import numpy as np

    dims = [str(dim) for dim in chosen.dims]
    table = Table(*dims, str(chosen.name))
    for column in table.columns:
        column.justify = "right"
    rows = list(np.ndindex(chosen.shape))
    shown = rows[:: max(1, -(-len(rows) // ROWS))]
    for row in shown:
        labels = [label_of(chosen, dim, k) for dim, k in zip(dims, row, strict=True)]
        table.add_row(*labels, f"{chosen.values[row]:.6g}")
    if len(shown) < len(rows):
        table.caption = f"{len(shown)} of {len(rows)} values; export has all of them"
    return table


def label_of(chosen: "xr.DataArray", dim: str, k: int) -> str:
    """The value of an axis at k."""
    value: np.ndarray | int = chosen[dim].values[k] if dim in chosen.coords else k
    return str(value) if isinstance(value, str) else f"{value:g}"
