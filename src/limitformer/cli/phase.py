"""`limitformer phase`: outcomes over a grid of dim, β, ε and tokens, simulated and exact; table, picture, data."""

from decimal import Decimal
from math import isfinite, prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from limitformer.base.errors import require
from limitformer.base.progress import suggest_quicker
from limitformer.cli.endings import begin_work
from limitformer.cli.options import folder_of, option
from limitformer.cli.report import errors_in_one_line, print_written, screen

if TYPE_CHECKING:
    import xarray as xr

BEYOND = "Beyond [CT]: attention of real networks"
QueryKey = Annotated[str | None, option(BEYOND, help="gaussian draws queries and keys in each layer.", default="fixed")]
Tau = Annotated[float | None, option(BEYOND, help="Standard deviation τ of the entries of a drawn QᵀK.", default="1")]
HeadDim = Annotated[int | None, option(BEYOND, help="Rows of drawn Q and K.", default="none: QᵀK itself is normal")]
Heads = Annotated[int | None, option(BEYOND, help="Number of heads; each draws its own queries and keys.", default="1")]
Mask = Annotated[str | None, option(BEYOND, help="none or causal.", default="none")]
EXTENSIONS = ("query_key", "tau", "head_dim", "heads", "mask")

MOST_VALUES = 10_000  # in one range
MOST_CELLS = 100_000
LARGEST_COUNT = 2**53  # larger whole numbers may not be doubles


def parse_grid(name: str, text: str) -> list[float]:
    """Parse a list such as "4,6,8" or "0:2:0.25,5": values and ranges (with both ends), separated by commas.

    Ranges are computed in decimals, so 0:1:0.1 contains exactly 0.3 and 1.

    Raises:
        InputError: the text has another form, no values, or too many values.

    >>> parse_grid("beta", "0:1:0.5,3")
    [0.0, 0.5, 1.0, 3.0]
    """
    values = [value for part in text.split(",") for value in parse_part(name, part.strip(), text)]
    distinct = list(dict.fromkeys(values))
    require(len(distinct) == len(values), f"--{name} has a value twice; got {text!r}.")
    return values


def parse_part(name: str, part: str, text: str) -> list[float]:
    """Parse one value or one range of the option's `text`."""
    try:
        numbers = [float(number) for number in part.split(":")]
    except ValueError:
        numbers = []
    known = len(numbers) in (1, 3) and all(map(isfinite, numbers))
    came = repr(text) if part == text.strip() else f"{part!r} in {text!r}"
    require(known, f"--{name} must be finite numbers or ranges start:stop:step, separated by commas; got {came}.")
    if len(numbers) == 1:
        return numbers
    start, stop, step = (Decimal(repr(number)) for number in numbers)
    require(step > 0, f"--{name} needs a positive step in start:stop:step; got {came}.")
    require(start <= stop, f"--{name} has no value: the range ends before it begins; got {came}.")
    steps = (stop - start) / step
    require(steps < MOST_VALUES, f"--{name} takes at most {MOST_VALUES:,} values in a range; got {came}.")
    return [float(start + k * step) for k in range(int(steps) + 1)]


def parse_counts(name: str, text: str) -> list[int]:
    """Parse a grid of whole numbers as `parse_grid` does."""
    values = parse_grid(name, text)
    whole = all(value == int(value) and abs(value) <= LARGEST_COUNT for value in values)
    require(whole, f"--{name} must be whole numbers, at most 2**53; got {text!r}.")
    return [int(value) for value in values]


def sphere_model(chosen: dict[str, Any], **first: Any) -> Any:
    """Build the model from the options: hybrid with --epsilon, stochastic without."""
    from limitformer.models import HybridTransformer, StochasticTransformer

    common: dict[str, Any] = {name: chosen[name] for name in ("layers_per_unit_time", "attention") if name in chosen}
    if chosen["values"] is not None:
        common["values"] = chosen["values"]
    more = {name: chosen[name] for name in EXTENSIONS if chosen.get(name) is not None}
    if more.get("query_key") == "fixed":
        del more["query_key"]
    if "epsilon" in first:
        unused = ", ".join(f"--{name.replace('_', '-')}" for name in more)
        require(
            not more,
            f"{unused} would change nothing: only the stochastic model has such options. Nearest: no --epsilon.",
        )
        require(chosen["sigma"] is None, "--sigma would change nothing: a hybrid model has --epsilon instead.")
        return HybridTransformer(**common, **first)
    sigma = 1.0 if chosen["sigma"] is None else chosen["sigma"]
    return StochasticTransformer(**common, **first, **more, sigma=sigma)


GRID, MODEL, RUN = "Grid: values and ranges start:stop:step, separated by commas", "Model", "Simulation"
ROWS = 60  # of the table, at most


def phase(
    context: typer.Context,
    dim: Annotated[str, option(GRID, help="Coordinates d of a token.")] = "4,6,8",
    beta: Annotated[str, option(GRID, help="Inverse temperatures β.")] = "0:2:0.25",
    epsilon: Annotated[
        str | None, option(GRID, help="Noise amplitudes ε: the hybrid model.", default="none: stochastic model")
    ] = None,
    tokens: Annotated[str, option(GRID, help="Numbers of tokens N.")] = "2",
    attention: Annotated[str, option(MODEL, help="softmax or unnormalized.")] = "softmax",
    layers_per_unit_time: Annotated[int, option(MODEL, "--layers", help="Layers L in a unit of time.")] = 100,
    sigma: Annotated[float | None, option(MODEL, help="Deviation σ of the values.", default="1")] = None,
    values: Annotated[
        str | None,
        option(
            MODEL,
            help="Law of the values: gaussian, uniform, rademacher or 'truncated normal'.",
            default="gaussian; hybrid: uniform",
        ),
    ] = None,
    query_key: QueryKey = None,
    tau: Tau = None,
    head_dim: HeadDim = None,
    heads: Heads = None,
    mask: Mask = None,
    horizon: Annotated[float, option(RUN, help="Units of time T: L·T layers.")] = 100.0,
    samples: Annotated[int, option(RUN, help="Independent networks in a cell.")] = 2000,
    tolerance: Annotated[float, option(RUN, help="Distance from ±1 at which an overlap has arrived.")] = 1e-3,
    early_stop: Annotated[
        float, option(RUN, help="Probability of a return below which a replica stops; 0: none stops.")
    ] = 1e-9,
    seed: Annotated[int, option(RUN, help="Seed; the same seed gives the same numbers.")] = 0,
    threads: Annotated[int | None, option(RUN, help="Threads.", default="all cores")] = None,
    store: Annotated[
        Path | None,
        option(RUN, help="Folder of a sweep's store, with which an interrupted diagram resumes.", default="none"),
    ] = None,
    out: Annotated[Path | None, option(RUN, help="Folder for phase.png, .pdf and .nc.", default="none")] = None,
) -> None:
    """Draw a phase diagram: do tokens on the sphere end in one cluster, or as antipodal pairs?

    Prints the simulated probabilities with 95 % Wilson intervals and, for two tokens, the exact one of the limit.

    For example: limitformer phase --dim 4:10:1 --beta 0:4:0.25 --out out
    """
    with errors_in_one_line():
        from limitformer.sweep.phase import phase_diagram

        require(layers_per_unit_time >= 1, f"--layers must be at least 1; got {layers_per_unit_time}.")
        valid = 0 <= early_stop < 1
        require(valid, f"--early-stop must be at least 0 (never) and below 1; got {early_stop:g}.")
        over = grid_of(dim, beta, epsilon, tokens)
        base = sphere_model(context.params, **{name: axis[0] for name, axis in over.items()})
        folder_of(out)
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
        print_written(paths)


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

    numbers, pictures = save(data, out / "phase.nc"), [out / "phase.png", out / "phase.pdf"]
    with style():
        drawing = draw(data)
        for each in pictures:
            write_whole(each, drawing.savefig)
    return [*pictures, numbers]
