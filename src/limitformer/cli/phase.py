"""`limitformer phase`: outcomes over a grid of dim, β, ε and tokens, simulated and exact; table, picture, data."""

from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from limitformer.base.errors import require
from limitformer.cli.endings import begin_work
from limitformer.cli.report import errors_in_one_line, print_plain, screen
from limitformer.cli.sphere_options import (
    MOST_CELLS,
    HeadDim,
    Heads,
    Mask,
    QueryKey,
    Tau,
    parse_counts,
    parse_grid,
    sphere_model,
)

if TYPE_CHECKING:
    import xarray as xr

GRID, MODEL, RUN = "Grid: values and ranges start:stop:step, separated by commas", "Model", "Simulation"
ROWS = 60  # of the table, at most


def phase(
    context: typer.Context,
    dim: Annotated[str, typer.Option(help="Coordinates d of a token.", rich_help_panel=GRID)] = "4,6,8",
    beta: Annotated[str, typer.Option(help="Inverse temperatures β.", rich_help_panel=GRID)] = "0:2:0.25",
    epsilon: Annotated[
        str | None,
        typer.Option(
            help="Noise amplitudes ε: the hybrid model.", rich_help_panel=GRID, show_default="none: stochastic model"
        ),
    ] = None,
    tokens: Annotated[str, typer.Option(help="Numbers of tokens N.", rich_help_panel=GRID)] = "2",
    attention: Annotated[str, typer.Option(help="softmax or unnormalized.", rich_help_panel=MODEL)] = "softmax",
    layers_per_unit_time: Annotated[
        int, typer.Option("--layers", help="Layers L in a unit of time.", rich_help_panel=MODEL)
    ] = 100,
    sigma: Annotated[
        float | None, typer.Option(help="Deviation σ of the values.", rich_help_panel=MODEL, show_default="1")
    ] = None,
    values: Annotated[
        str | None,
        typer.Option(
            help="Law of the values: gaussian, uniform, rademacher or 'truncated normal'.",
            rich_help_panel=MODEL,
            show_default="gaussian; hybrid: uniform",
        ),
    ] = None,
    query_key: QueryKey = None,
    tau: Tau = None,
    head_dim: HeadDim = None,
    heads: Heads = None,
    mask: Mask = None,
    horizon: Annotated[float, typer.Option(help="Units of time T: L·T layers.", rich_help_panel=RUN)] = 100.0,
    samples: Annotated[int, typer.Option(help="Independent networks in a cell.", rich_help_panel=RUN)] = 2000,
    tolerance: Annotated[
        float, typer.Option(help="Distance from ±1 at which an overlap has arrived.", rich_help_panel=RUN)
    ] = 1e-3,
    early_stop: Annotated[
        float,
        typer.Option(help="Probability of a return below which a replica stops; 0: none stops.", rich_help_panel=RUN),
    ] = 1e-9,
    seed: Annotated[int, typer.Option(help="Seed; the same seed gives the same numbers.", rich_help_panel=RUN)] = 0,
    threads: Annotated[int | None, typer.Option(help="Threads.", rich_help_panel=RUN, show_default="all cores")] = None,
    store: Annotated[
        Path | None,
        typer.Option(
            help="Folder of a sweep's store, with which an interrupted diagram resumes.",
            rich_help_panel=RUN,
            show_default="none",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for phase.png and phase.nc.", rich_help_panel=RUN, show_default="none")
    ] = None,
) -> None:
    """Draw a phase diagram: do tokens on the sphere end in one cluster, or as antipodal pairs?

    Prints the simulated probabilities with 95 % Wilson intervals and, for two tokens, the exact one of the limit.

    For example: limitformer phase --dim 4:10:1 --beta 0:4:0.25 --out out
    """
    with errors_in_one_line():
        from limitformer.base.files import check_writable
        from limitformer.base.progress import suggest_quicker
        from limitformer.sweep.phase import phase_diagram

        check_run(layers_per_unit_time, early_stop)
        over = grid_of(dim, beta, epsilon, tokens)
        base = sphere_model(context.params, **{name: axis[0] for name, axis in over.items()})
        if out is not None:
            check_writable(out)
        begin_work()
        with suggest_quicker(f"--samples {max(1, samples // 2)} takes about half."):
            data = phase_diagram(
                base,
                over,
                horizon=horizon,
                samples=samples,
                seed=seed,
                tolerance=tolerance,
                early_stop=early_stop or None,
                threads=threads,
                store=store,
            )
        paths = [] if out is None else write(data, out)
        screen.print(table_of(data), crop=False)
        if paths:
            print_plain("Wrote " + ", ".join(map(str, paths)))


def check_run(layers: int, early_stop: float) -> None:
    """Raise `InputError` about options whose name or meaning differs from the library's."""
    require(layers >= 1, f"--layers must be at least 1; got {layers}.")
    require(0 <= early_stop < 1, f"--early-stop must be at least 0 (never) and below 1; got {early_stop:g}.")


def grid_of(dim: str, beta: str, epsilon: str | None, tokens: str) -> dict[str, Any]:
    """Return the values of each field that is varied or set."""
    grid: dict[str, Any] = {"tokens": parse_counts("tokens", tokens), "dim": parse_counts("dim", dim)}
    if epsilon is not None:
        grid["epsilon"] = parse_grid("epsilon", epsilon)
    grid["beta"] = parse_grid("beta", beta)
    cells = prod(map(len, grid.values()))
    sizes = " x ".join(f"{len(values):,} {name}" for name, values in grid.items())
    require(cells <= MOST_CELLS, f"The grid has {cells:,} cells ({sizes}); at most {MOST_CELLS:,} are taken.")
    return grid


def table_of(data: "xr.Dataset") -> Table:
    """Return a table with a row for each cell, evenly thinned if there are more than `ROWS`."""
    import numpy as np

    axes = [str(axis) for axis in data["exact"].dims if data.sizes[axis] > 1] or ["beta"]
    fixed = [f"{axis} = {data[axis].item():.10g}" for axis in data["exact"].dims if axis not in axes]
    data = data.squeeze([str(axis) for axis in data["exact"].dims if axis not in axes])
    cells = list(np.ndindex(data["exact"].shape))
    selection = [cells[k] for k in np.linspace(0, len(cells) - 1, min(len(cells), ROWS)).round().astype(int)]
    title = ", ".join([*fixed, f"{data.attrs['samples']} samples a cell", f"T = {data.attrs['horizon']:g}"])
    table = Table(*axes, "single", "antipodal", "95 % interval", "unresolved", "exact", title=title)
    for cell in selection:
        one = data.isel(dict(zip(axes, cell, strict=True)))
        single, antipodal, unresolved = one["probability"].values
        interval = f"{one['low'].values[1]:.4f} … {one['high'].values[1]:.4f}"
        exact = float(one["exact"])
        row = [f"{one[axis].item():.10g}" for axis in axes]
        numbers = (f"{single:.4f}", f"{antipodal:.4f}", interval, f"{unresolved:.4f}")
        table.add_row(*row, *numbers, "" if np.isnan(exact) else f"{exact:.4f}")
    if len(selection) < len(cells):
        table.caption = f"{len(selection)} of {len(cells)} cells; all of them are in the data (--out)"
    for column in table.columns:
        column.justify, column.no_wrap = "right", True
        column.min_width = max(map(len, [str(column.header), *map(str, column.cells)]))
    return table


def write(data: "xr.Dataset", out: Path) -> list[Path]:
    """Save data and picture, and return their paths."""
    from limitformer.base.files import write_whole
    from limitformer.plot import style
    from limitformer.results.storage import save
    from limitformer.sweep.show import draw

    numbers, picture = save(data, out / "phase.nc"), out / "phase.png"
    with style():
        drawing = draw(data)
        write_whole(picture, lambda path: drawing.savefig(path))
    return [picture, numbers]
